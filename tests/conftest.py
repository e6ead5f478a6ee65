"""What every test gets: a check that it left nothing open, Hypothesis profiles, and settings of the libraries.

torch is not imported here: most tests of `hicache/` run without it.
"""

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.leaks import nothing_left_behind

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


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves threads running or files open.

    What fixtures of a wider scope hold was there before the test and is theirs to close.
    """
    _calm_torch()
    with nothing_left_behind():
        yield


def _calm_torch() -> None:
    """Give torch, once somebody has imported it, no more threads than a small machine has cores."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 2:
        torch.set_num_threads(2)
