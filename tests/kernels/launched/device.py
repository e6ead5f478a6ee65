"""Where this process launches kernels."""

import os

DEVICE = os.environ.get("HICACHE_TEST_DEVICE", "cpu")
"""`cuda`, or `cpu`, where kernels are interpreted."""
LAUNCHES = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process is one that launches kernels at all."""
