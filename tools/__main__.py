"""`python -m hicache.tools` is the same as `hicache`."""

import sys

from hicache.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
