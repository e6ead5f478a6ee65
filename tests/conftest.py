"""What every test gets: a check that it left nothing open, Hypothesis profiles, and settings of the libraries.

torch is not imported here: most tests of `hicache/` run without it.
"""

import gc
import os
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Triton 3.9 warns while this is unset and announces that the default will change.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
# No test asks a model hub for anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The ordinary run tries the same examples every time, so that it fails or passes for the code alone. The soak run tries
# new ones, many more of them, and prints what repeats a failure.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=5_000,
    stateful_step_count=300,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("soak" if os.environ.get("HICACHE_SOAK") else "repeatable")

THREAD_EXIT_TIMEOUT_S = 5.0
"""How long a thread that a test told to stop may take to end."""


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test after which threads run or files are open that did not before it.

    What fixtures of a wider scope hold was there before the test and is theirs to close.
    """
    _calm_torch()
    threads, files = set(threading.enumerate()), open_files()
    yield
    # A thread that has been told to stop may still be on its way out.
    for thread in set(threading.enumerate()) - threads:
        thread.join(THREAD_EXIT_TIMEOUT_S)
    left_threads = sorted(thread.name for thread in set(threading.enumerate()) - threads)
    assert not left_threads, f"threads left running: {left_threads}"
    if left_files := open_files() - files:
        # What only the collector would close is reported by its ResourceWarning; a cycle in a library is not a leak.
        gc.collect()
        left_files = open_files() - files
    assert not left_files, f"files left open: {sorted(left_files)}"


def open_files() -> frozenset[tuple[int, str]]:
    """Descriptors of this process and what they stand for."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return frozenset(found)


def _calm_torch() -> None:
    """Give torch, once somebody has imported it, no more threads than a small machine has cores."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 2:
        torch.set_num_threads(2)
