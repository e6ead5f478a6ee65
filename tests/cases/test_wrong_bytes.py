"""C01 and C03: another request's pages, and a slot's previous life."""

import asyncio
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hicache.tier import Outcome, PageIdentity
from hicache.tiers.nvme import NvmeTier
from tests.cases.client import Client, P, check_at_rest, opened, sequence
from tests.faults.power import SHAPE, STORE
from tests.stamps import identity_chain
from tests.tiers.contract import expect_page, fetch, store
from tests.tiers.nvme import capacity_for
from tests.tiers.simulated_disk import Fail, Rates, SimulatedDisk


def test_c01_sessions_that_come_back_get_their_own_pages_under_load(tmp_path: Path) -> None:
    sessions = [sequence(letter, 4 * P) for letter in range(6)]
    with opened(tmp_path / "nvme", device=8, host=8, nvme=256) as cache:
        for tokens in sessions:
            Client(cache).insert(tokens)
        failures: list[BaseException] = []

        def load() -> None:
            try:
                for number in range(200):
                    Client(cache).insert(sequence(100 + number, P))
            except BaseException as error:
                failures.append(error)

        other = threading.Thread(target=load)
        other.start()
        for _ in range(2):
            for tokens in reversed(sessions):
                # `read` compares every byte with the stamp of this session and page.
                assert Client(cache).read(tokens) in (0, P, 2 * P, 3 * P, 4 * P)
        other.join()
        assert failures == []
        for tokens in sessions:
            assert Client(cache).match(tokens) == 4 * P
            assert Client(cache).read_there(tokens) == 4 * P
        check_at_rest(cache)


# ---- C03, against the tier: which slot a page gets, and in which order a disk forgets, only the seam can say


RECORD = b"a namespace's record"


def one_page_tier(disk: SimulatedDisk) -> NvmeTier:
    """A tier of one slot: whatever is written takes the place of what was there."""
    capacity_bytes, segment_bytes = capacity_for(SHAPE, 1, slots_per_segment=1)
    return NvmeTier.open(
        STORE, layout=SHAPE, capacity_bytes=capacity_bytes, segment_bytes=segment_bytes, files=disk,
        read_lanes=1, write_lanes=1, layer_lanes=1, commit_interval_s=3600.0,
    )  # fmt: skip


def pages() -> tuple[PageIdentity, PageIdentity]:
    """A and B, each the first page of its prompt."""
    import hashlib

    digest = hashlib.sha256(RECORD).digest()
    first, second = (identity_chain(1, seed=seed)[0].tokens for seed in (1, 2))
    return PageIdentity(digest, digest, first), PageIdentity(digest, digest, second)


async def a_was_there_and_removed(disk: SimulatedDisk) -> NvmeTier:
    a, _ = pages()
    tier = one_page_tier(disk)
    tier.remember(a.namespace, RECORD)
    slots = tier.allocate(1)
    await store(tier, slots, [a])
    await tier.sync(tier.accepted, deadline=time.monotonic() + 30)
    tier.free(slots)
    await tier.sync(tier.accepted, deadline=time.monotonic() + 30)
    return tier


def new_disk(seed: int) -> SimulatedDisk:
    disk = SimulatedDisk(random.Random(seed))
    disk.mkdir("/disk")
    root = disk.open("/", 0)
    disk.fsync(root)
    return disk


async def after_restart(disk: SimulatedDisk) -> list[PageIdentity]:
    """What is served by a new start; capacity is whole, and what is offered and not served can be given back."""
    served = []
    async with one_page_tier(disk) as tier:
        runs = tier.recovered()
        offered = [slot for run in runs for slot in run.slots.tolist()]
        assert tier.num_free + len(offered) == 1
        for slot in range(1):
            for identity in pages():
                if (await fetch(tier, slot, identity))[0] is Outcome.OK:
                    await expect_page(tier, slot, identity)
                    served.append(identity)
        tier.free(np.array(offered, np.int32))
        assert tier.num_free == 1
        tier.remember(pages()[0].namespace, RECORD)
        slots = tier.allocate(1)
        await store(tier, slots, [pages()[0]])
        await expect_page(tier, 0, pages()[0])
    return served


@pytest.mark.parametrize("seed", range(8))
def test_c03_a_record_without_its_page_does_not_show_what_the_slot_held_before(seed: int) -> None:
    """(i) B's record is durable; its page never came to the medium, though the device said so."""

    async def main() -> None:
        disk = new_disk(seed)
        tier = await a_was_there_and_removed(disk)
        _, b = pages()
        slots = tier.allocate(1)
        disk.rates = Rates(lost=1.0)
        await store(tier, slots, [b])
        disk.never_fail()
        await tier.sync(tier.accepted, deadline=time.monotonic() + 30)
        disk.cut_power_at(1, lambda: None)
        await tier.close()
        disk.power_up()
        assert await after_restart(disk) == []

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(24))
def test_c03_a_page_without_its_record_shows_nothing_or_itself(seed: int) -> None:
    """(ii) The power goes while B's page is written, or after it and before the record: of B, of A and of the slot
    there is, sector by sector, what the seed says."""

    async def main() -> None:
        disk = new_disk(seed)
        tier = await a_was_there_and_removed(disk)
        _, b = pages()
        await store(tier, tier.allocate(1), [b])
        if seed % 2:
            # The record too has been written, and its sync fails with the power.
            disk.fail_at(2, Fail.EIO)
        disk.cut_power_at(1 + seed % 3, lambda: None)
        await tier.close()
        disk.never_fail()
        disk.power_up()
        assert set(await after_restart(disk)) <= {b}

    asyncio.run(main())
