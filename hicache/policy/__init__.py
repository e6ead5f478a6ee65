"""Eviction policies: which copy should leave a tier next. They decide and do no I/O."""
