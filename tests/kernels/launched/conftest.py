"""Tests that launch the kernels run in a process of their own.

`TRITON_INTERPRET=1` works only if it is set before Triton is imported, and then for the whole process; the other tests
import Triton to compile with it, or to be refused by it. So these files are not collected in an ordinary run: there
`tests/kernels/test_launched.py` starts each of them in a child process with the variable set, and shows what failed.

By hand: `TRITON_INTERPRET=1 python -m pytest tests/kernels/launched`, or `HICACHE_TEST_DEVICE=cuda` on a GPU.
"""

from tests.kernels.launched.device import LAUNCHES

collect_ignore_glob = [] if LAUNCHES else ["test_*.py"]
