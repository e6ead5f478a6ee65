"""Random histories beside a dictionary: see `tests.hicache.histories`.

`HICACHE_SOAK=1` runs many more, from another seed each time, which is printed.
"""

import os
import random

import pytest

from tests.hicache.counting import POLICIES
from tests.hicache.histories import HistoryFailure, run_history
from tests.hicache.test_tree_mutants import LostFreedSlot

SOAK = bool(os.environ.get("HICACHE_SOAK"))
NUM_BLOCKS = 20
HISTORIES_PER_BLOCK = 5_000 if SOAK else 100
STEPS = 300 if SOAK else 100
FIRST_SEED = random.SystemRandom().randrange(10**9) if SOAK else 0


@pytest.mark.timeout(7200 if SOAK else 300)
@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_histories_agree_with_the_dictionary(block: int) -> None:
    first = FIRST_SEED + block * HISTORIES_PER_BLOCK
    print(f"seeds {first} to {first + HISTORIES_PER_BLOCK - 1}, {STEPS} steps each")
    for seed in range(first, first + HISTORIES_PER_BLOCK):
        run_history(seed, STEPS)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_lists_and_counts_what_is_there(policy: str) -> None:
    """Whatever happens to the tree, nothing is listed that may not leave, and nothing is missing (I26)."""
    for seed in range(12 if not SOAK else 3_000):
        run_history(seed, STEPS, policy=policy)


def test_a_failure_names_its_seed_and_how_to_repeat_it() -> None:
    with pytest.raises(HistoryFailure, match=r"python -m tests\.hicache\.histories --seed 1 --steps 100"):
        run_history(1, 100, LostFreedSlot)


def test_a_seed_decides_its_history() -> None:
    from tests.hicache.histories import History

    def trace() -> tuple[list[str], str]:
        history = History(11)
        history.run(60)
        return history.log, repr(history.free)

    assert trace() == trace()
