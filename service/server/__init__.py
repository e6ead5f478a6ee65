"""The sidecar's process: see service/README.md for its parts."""
