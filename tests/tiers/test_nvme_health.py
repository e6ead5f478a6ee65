"""When the NVMe tier counts its device as down, and how it comes back."""

import asyncio

import numpy as np
import pytest

from hicache.clock import Clock, ManualClock
from hicache.errors import TierUnavailable
from hicache.tier import Outcome, PageWrite
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.health import ERRORS_TO_DOWN, PROBE_INTERVAL_S, Health, Kind
from hicache.tiers.nvme.io import aligned_buffer
from hicache.tiers.nvme.store import HUNG_AFTER_S
from tests.stamps import identity_chain
from tests.tiers.contract import expect_miss, expect_page, page_data, run, store
from tests.tiers.faulty_files import Fault, FaultyFiles, HeldFiles
from tests.tiers.nvme import (
    DATA_CALLS,
    SMALL,
    data_faults,
    place_of,
    read_raw,
    shape_of,
    small_tier,
    write_all,
)


class WatchedHealth(Health):
    """Says when a probe has ended."""

    def __init__(self, name: str, clock: Clock) -> None:
        super().__init__(name, clock)
        self.ended: asyncio.Event = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def probed(self, problem: str | None) -> None:
        super().probed(problem)
        self.loop.call_soon_threadsafe(self.ended.set)

    async def probe(self, tier: NvmeTier) -> None:
        """Ask for pages, which has a device that is down probed, and wait for that."""
        self.ended.clear()
        with pytest.raises(TierUnavailable):
            tier.allocate(1)
        async with asyncio.timeout(30):
            await self.ended.wait()


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC, Fault.EROFS])
def test_a_device_that_fails_again_and_again_is_down_and_comes_back_by_itself(fault: Fault) -> None:
    files = FaultyFiles(counts=lambda name: name == "pwritev")
    clock = ManualClock()

    async def main() -> None:
        async with small_tier(SMALL, 24, files=files, clock=clock, health=WatchedHealth) as tier:
            health = tier._health
            assert isinstance(health, WatchedHealth)
            kept = identity_chain(2)
            slots = tier.allocate(2)
            await store(tier, slots, kept)
            files.arm(fault, 1, lasting=True)
            lost = tier.allocate(ERRORS_TO_DOWN).tolist()
            for count, slot in enumerate(lost):
                assert tier.down is None, f"after {count} failures"
                assert await write_all(tier, [slot], kept[:1]) == [Outcome.ERROR]
                # Reads that succeed in between do not hide that nothing can be written.
                await expect_page(tier, int(slots[0]), kept[0])
            assert tier.down is not None
            with pytest.raises(TierUnavailable, match="failed"):
                tier.allocate(1)
            assert files.num_calls == ERRORS_TO_DOWN, "probed before it was due"
            assert (tier.num_free, tier.capacity_pages) == (24 - 2 - ERRORS_TO_DOWN, 24)
            await expect_page(tier, int(slots[1]), kept[1])
            tier.free(np.array(lost, np.int32))

            clock.advance(PROBE_INTERVAL_S)
            await health.probe(tier)
            assert tier.down is not None
            files.heal()
            with pytest.raises(TierUnavailable):
                tier.allocate(1)
            clock.advance(PROBE_INTERVAL_S)
            await health.probe(tier)
            assert tier.down is None
            again = tier.allocate(20)
            await store(tier, again, identity_chain(20, seed=2))
            await expect_page(tier, int(slots[0]), kept[0])

    run(main())


def test_one_probe_at_a_time_is_due_when_the_interval_has_passed() -> None:
    clock = ManualClock()
    health = Health("nvme", clock)
    error = OSError(5, "Input/output error")
    assert not health.claim_probe()
    for _ in range(ERRORS_TO_DOWN):
        health.failed(Kind.WRITE, error)
    assert health.down is not None
    assert not health.claim_probe()
    clock.advance(PROBE_INTERVAL_S / 2)
    assert not health.claim_probe()
    clock.advance(PROBE_INTERVAL_S / 2)
    assert health.claim_probe()
    clock.advance(10 * PROBE_INTERVAL_S)
    assert not health.claim_probe(), "one is under way"
    health.probed("still dead")
    assert not health.claim_probe()
    clock.advance(PROBE_INTERVAL_S)
    assert health.claim_probe()
    health.probed(None)
    assert health.down is None
    # What failed before counts no more.
    for _ in range(ERRORS_TO_DOWN - 1):
        health.failed(Kind.WRITE, error)
        health.failed(Kind.READ, error)
    assert health.down is None
    health.failed(Kind.READ, error)
    assert health.down is not None


def test_failures_that_are_not_in_a_row_do_not_mark_the_device_down() -> None:
    files = data_faults()

    async def main() -> None:
        async with small_tier(SMALL, 1, files=files) as tier:
            [identity] = identity_chain(1)
            tier.allocate(1)
            for _ in range(3):
                for _ in range(ERRORS_TO_DOWN - 1):
                    files.arm(Fault.EIO, 1)
                    assert await write_all(tier, [0], [identity]) == [Outcome.ERROR]
                assert await write_all(tier, [0], [identity]) == [Outcome.OK]
                for _ in range(ERRORS_TO_DOWN - 1):
                    files.arm(Fault.EIO, 1)
                    await expect_miss(tier, 0, identity, Outcome.ERROR)
                await expect_page(tier, 0, identity)
            assert tier.down is None

    run(main())


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.FLIP, Fault.EIO])
@pytest.mark.parametrize("name", ["preadv", "pwritev", "fsync"])
def test_a_probe_believes_only_what_comes_back(fault: Fault, name: str) -> None:
    if name == "fsync" and fault is not Fault.EIO:
        fault = Fault.ENOSPC
    files = FaultyFiles()
    clock = ManualClock()

    async def main() -> None:
        async with small_tier(SMALL, 1, files=files, clock=clock, health=WatchedHealth) as tier:
            health = tier._health
            assert isinstance(health, WatchedHealth)
            for _ in range(ERRORS_TO_DOWN):
                health.failed(Kind.READ, OSError(5, "Input/output error"))
            if name == "pwritev" and fault is Fault.LOST:
                # A lost write is only seen if what lies there differs.
                path, _ = place_of(tier, 0)
                with path.open("r+b") as file:
                    file.write(bytes(4096))
            files.counts = lambda called: called == name
            files.arm(fault, 1)
            clock.advance(PROBE_INTERVAL_S)
            await health.probe(tier)
            assert files.hits == [name]
            assert tier.down is not None
            clock.advance(PROBE_INTERVAL_S)
            await health.probe(tier)
            assert tier.down is None

    run(main())


def test_a_probe_leaves_nothing_behind_for_the_next_page() -> None:
    """A probe and the last block of an odd page use the same memory of one thread."""
    clock = ManualClock()

    async def main() -> None:
        shape = shape_of(10_000)
        async with small_tier(shape, 1, clock=clock, health=WatchedHealth, write_lanes=1) as tier:
            health = tier._health
            assert isinstance(health, WatchedHealth)
            for _ in range(ERRORS_TO_DOWN):
                health.failed(Kind.READ, OSError(5, "Input/output error"))
            clock.advance(PROBE_INTERVAL_S)
            await health.probe(tier)
            [identity] = identity_chain(1)
            data = aligned_buffer(3 * 4096)[:10_000]
            data[:] = page_data(identity, 10_000)
            tier.allocate(1)
            assert await tier.write([PageWrite(0, 0, identity, data)]) == [Outcome.OK]
            assert read_raw(tier, 0, 4096 + 10_000, 3 * 4096 - 10_000) == bytes(3 * 4096 - 10_000)

    run(main())


@pytest.mark.parametrize("name", DATA_CALLS)
def test_a_device_that_does_not_answer_counts_as_down_until_it_does(name: str) -> None:
    files = HeldFiles(name)
    clock = ManualClock()

    async def main() -> None:
        async with small_tier(SMALL, 4, files=files, clock=clock) as tier:
            identities = identity_chain(2)
            slots = tier.allocate(2)
            await store(tier, slots, identities)
            files.hold()
            async with asyncio.TaskGroup() as group:
                if name == "preadv":
                    group.create_task(expect_page(tier, 0, identities[0]))
                else:
                    group.create_task(store(tier, slots[:1], identities[:1]))
                await asyncio.to_thread(files.arrived.acquire)
                clock.advance(HUNG_AFTER_S)
                assert tier.down is None
                clock.advance(1)
                assert tier.down is not None
                with pytest.raises(TierUnavailable, match="not answered"):
                    tier.allocate(1)
                files.let_go()
            assert tier.down is None
            assert tier.allocate(2).size == 2

    run(main())
