"""A full store writes into slots whose free is durable already: it keeps a reserve for that."""

import numpy as np
import pytest

from hicache.errors import NoRoom
from hicache.tiers.nvme.store import MIN_SLOTS_FOR_RESERVE
from tests.stamps import identity_chain
from tests.tiers.contract import run, store
from tests.tiers.nvme import shape_of, small_tier

SHAPE = shape_of(4096)
LONG = 1_000.0
"""Seconds until a commit that nobody asks for: within a test there is none."""


def test_a_full_store_does_not_wait_for_the_commit_of_what_it_just_freed() -> None:
    async def main() -> None:
        num_slots = 2 * MIN_SLOTS_FOR_RESERVE
        async with small_tier(SHAPE, num_slots, slots_per_segment=num_slots, commit_interval_s=LONG) as tier:
            assert tier.num_slots == num_slots
            reserve = num_slots - tier.capacity_pages
            assert 0 < reserve == num_slots // 32
            assert tier.num_free == tier.capacity_pages
            held = tier.allocate(tier.capacity_pages)
            with pytest.raises(NoRoom) as refused:
                tier.allocate(1)
            assert refused.value.pages_free == 0
            await store(tier, held, identity_chain(len(held)))
            await tier.sync(tier.accepted, deadline=float("inf"))
            rounds = tier.counters()["commit.rounds"]
            # As many pages as the reserve has slots are replaced, one by one, before anything has to be committed.
            for index in range(reserve):
                tier.free(held[index : index + 1])
                [slot] = tier.allocate(1).tolist()
                assert slot not in held[: index + 1]
                await store(tier, np.array([slot], np.int32), identity_chain(1, seed=index))
            assert tier.counters()["commit.rounds"] == rounds
            assert tier.capacity_pages == num_slots - reserve

    run(main())


def test_a_small_store_gives_all_its_slots() -> None:
    async def main() -> None:
        num_slots = MIN_SLOTS_FOR_RESERVE - 1
        async with small_tier(SHAPE, num_slots, slots_per_segment=num_slots) as tier:
            assert len(tier.allocate(num_slots)) == num_slots == tier.capacity_pages

    run(main())
