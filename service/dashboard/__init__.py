"""The page of `hicache serve --http`: what a browser is shown of a running server."""
