"""Leaving a cache whose disk does not answer: in bounded time, every task ended, and no memory pulled from a copy."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

import hicache.cache
from hicache.cache import DRAIN_S, GIVE_UP_S, Cache
from hicache.clock import SystemClock
from hicache.errors import DeadlineExceeded
from hicache.prefill import PrefillCurve
from hicache.sequence import Sequence as Prompt
from hicache.tier import DEVICE, HOST, NVME, TierId
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.io import FileIO
from tests.hicache.worlds import LAYOUT, MODEL, Setup, SimulatedDevice, int32, opened, prompt
from tests.simulation import Faults, SimulatedHost, World, run_simulated

HANGS: Final = Faults(stall=1.0, stall_s=1e6)
BOUND_S: Final = DRAIN_S + GIVE_UP_S + 0.1


async def on_nvme(cache: Cache, tier_ids: Sequence[TierId] = (DEVICE, HOST)) -> None:
    """Let everything leave the faster tiers."""
    for tier_id in tier_ids:
        num_pages, deadline = cache.tiers[tier_id].capacity_pages, cache.clock.monotonic() + 10
        cache.free({tier_id: await cache.allocate(tier_id, num_pages, deadline=deadline)})


async def read(setup: Setup) -> None:
    await setup.request().open(prompt(1, 33), deadline_s=0.5)


async def from_both_ends(setup: Setup) -> None:
    cache = setup.cache
    await Prompt.open(
        cache, MODEL, int32(prompt(1, 33)), owner="test", deadline=cache.clock.monotonic() + 1, chunk_tokens=4
    )
    await asyncio.sleep(0.1)


async def write(setup: Setup) -> None:
    # Pages that cannot leave for a disk that hangs fill device and host.
    with suppress(DeadlineExceeded):
        for document in range(4, 9):
            await setup.request().run(prompt(document, 33))


async def prefetch(setup: Setup) -> None:
    setup.cache.prefetch(MODEL, prompt(1, 33), deadline=setup.cache.clock.monotonic() + 100)


async def part_of_a_page(setup: Setup) -> None:
    await setup.request().open(prompt(1, 33, branch=1, shared=3), deadline_s=0.5)


@pytest.mark.parametrize("work", [read, from_both_ends, write, prefetch, part_of_a_page])
def test_leaving_a_cache_takes_no_longer_than_it_says(work: Callable[[Setup], Awaitable[None]]) -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=12, host_pages=12, prefill=PrefillCurve(token_s=1e-4)) as setup:
            await setup.request().run(prompt(1, 33))
            await on_nvme(setup.cache)
            assert setup.nvme is not None
            setup.nvme.faults = HANGS
            await work(setup)
            leaving = world.monotonic()
        assert 1.0 < world.monotonic() - leaving <= BOUND_S
        # Its buffers were not pulled from under it: the host was not closed.
        assert not setup.host._closed
        assert setup.nvme._closed
        assert not setup.nvme.cancelled_calls

    run_simulated(main, 0)


def test_a_cache_whose_disk_answers_is_left_at_once_and_closes_every_tier() -> None:
    async def main(world: World) -> None:
        async with opened(world) as setup:
            await setup.request().run(prompt(1, 33))
            leaving = world.monotonic()
        assert world.monotonic() - leaving < 0.1
        assert all(tier._closed for tier in setup.tiers)
        await asyncio.sleep(BOUND_S)
        assert all(not tier._given_up.is_set() for tier in setup.tiers), "the timer still ran"

    run_simulated(main, 0)


class HungFiles(FileIO):
    """Files whose reads stand still from `hang` until `answer`."""

    def __init__(self) -> None:
        self._answers: Final = threading.Event()
        self.answer()

    def hang(self) -> None:
        self._answers.clear()

    def answer(self) -> None:
        self._answers.set()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert self._answers.wait(60)
        return super().preadv(fd, buffers, offset)


def test_threads_that_read_do_not_hold_it_up_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hicache.cache, "DRAIN_S", 0.1)
    monkeypatch.setattr(hicache.cache, "GIVE_UP_S", 0.1)
    files = HungFiles()

    async def main() -> None:
        nvme = NvmeTier.open(tmp_path / "store", layout=LAYOUT, capacity_bytes=1 << 20, files=files)
        device = SimulatedDevice(DEVICE, page_bytes=LAYOUT.page_bytes, capacity_pages=16)
        host = SimulatedHost(HOST, page_bytes=LAYOUT.page_bytes, capacity_pages=16)
        async with Cache(LAYOUT, {DEVICE: device, HOST: host, NVME: nvme}, clock=SystemClock()) as cache:
            setup = Setup(cache, device, host, None)
            await setup.request().run(prompt(1, 33))
            await on_nvme(cache)
            assert cache.coverage(cache.tree.match(MODEL, int32(prompt(1, 33)))).by_tier == {NVME: 32}
            files.hang()
            sequence = await setup.request().open(prompt(1, 33), deadline_s=0.2)
            assert sequence.length == 0
            leaving = time.monotonic()
        assert time.monotonic() - leaving < 5
        files.answer()
        await nvme.close()

    asyncio.run(main())
