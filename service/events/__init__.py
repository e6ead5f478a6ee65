"""Events that keep indices elsewhere up to date: see `form.py` for what is told."""
