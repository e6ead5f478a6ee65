"""The simulated world keeps its promises: time jumps, seeds repeat, a deadlock is found, and its tier is a tier."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

import pytest

from hicache.tier import HOST, NVME, Outcome, PageIdentity, PageWrite, SupportsDeclare, SupportsView, Tier
from tests.simulation import SEED_VARIABLE, DeadlockError, SimulatedHost, SimulatedTier, World, run_simulated, seeds
from tests.stamps import identity_chain, stamp
from tests.tiers.contract import TierContract

T = TypeVar("T", bound=SimulatedTier)


class TestSimulatedTierContract(TierContract):
    def make_tier(self, *, page_bytes: int, capacity_pages: int) -> AbstractAsyncContextManager[SimulatedTier]:
        return _open(SimulatedTier(NVME, page_bytes=page_bytes, capacity_pages=capacity_pages))

    def raw_page(self, tier: Tier, slot: int) -> bytes:
        assert isinstance(tier, SimulatedTier)
        return tier.raw_page(slot)


class TestSimulatedHostContract(TestSimulatedTierContract):
    def make_tier(self, *, page_bytes: int, capacity_pages: int) -> AbstractAsyncContextManager[SimulatedHost]:
        return _open(SimulatedHost(HOST, page_bytes=page_bytes, capacity_pages=capacity_pages))


@asynccontextmanager
async def _open(tier: T) -> AsyncIterator[T]:
    try:
        yield tier
    finally:
        await tier.close()


def test_time_jumps() -> None:
    async def main(world: World) -> float:
        async with asyncio.timeout(200_000):
            await asyncio.sleep(100_000)
        return world.monotonic()

    assert run_simulated(main, 0) == 100_000


def test_a_deadlock_is_an_error_that_tells_who_waits_and_how_to_repeat_it() -> None:
    async def main(world: World) -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError) as caught:
        run_simulated(main, 17)
    notes = "\n".join(caught.value.__notes__)
    assert "asyncio.Event().wait()" in notes
    assert f"{SEED_VARIABLE}=17 " in notes
    assert "test_simulation.py::test_a_deadlock" in notes


def test_a_failure_carries_its_seed() -> None:
    async def main(world: World) -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong") as caught:
        run_simulated(main, 23)
    assert f"{SEED_VARIABLE}=23 " in caught.value.__notes__[0]


def test_one_seed_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED_VARIABLE, "41")
    assert list(seeds(5, block=3)) == [41]
    monkeypatch.delenv(SEED_VARIABLE)
    monkeypatch.delenv("HICACHE_SOAK", raising=False)
    assert [*seeds(5), *seeds(5, block=1)] == list(range(10))


def test_threads_are_refused() -> None:
    async def main(world: World) -> None:
        await asyncio.to_thread(int)

    with pytest.raises(RuntimeError, match="thread"):
        run_simulated(main, 0)


def test_what_a_callback_raises_is_not_lost() -> None:
    async def main(world: World) -> None:
        asyncio.get_running_loop().call_soon(int, "x")
        await asyncio.sleep(1)

    with pytest.raises(AssertionError, match="invalid literal"):
        run_simulated(main, 0)


def test_tasks_left_behind_are_an_error() -> None:
    async def main(world: World) -> None:
        # What code under test may not do; here it proves that it would be noticed.
        asyncio.get_running_loop().create_task(asyncio.sleep(5), name="forgotten")

    with pytest.raises(AssertionError, match="forgotten"):
        run_simulated(main, 0)


def test_the_host_can_be_viewed_and_told_what_it_holds() -> None:
    host = SimulatedHost(HOST, page_bytes=64, capacity_pages=2)
    assert isinstance(host, SupportsView)
    assert isinstance(host, SupportsDeclare)
    assert not isinstance(SimulatedTier(NVME, page_bytes=64, capacity_pages=2), SupportsView)
    [identity] = identity_chain(1)
    [slot] = host.allocate(1).tolist()
    host.view(slot)[:] = stamp(identity, 64).data
    assert host.declare(slot, 1, identity) is Outcome.STALE
    assert host.check(slot, 0, identity) is Outcome.NOT_FOUND
    assert host.declare(slot, 0, identity) is Outcome.OK
    assert [host.check(slot, generation, identity) for generation in (0, 1)] == [Outcome.OK, Outcome.STALE]
    assert (host.holds(slot), host.raw_page(slot)) == (identity, stamp(identity, 64).tobytes())


def test_a_call_takes_its_latency_and_calls_share_the_bandwidth() -> None:
    async def main(world: World) -> None:
        tier = SimulatedTier(NVME, page_bytes=100, capacity_pages=8, latency_s=2.0, bandwidth=50.0)
        identities = identity_chain(8)
        tier.allocate(8)
        ends = []

        async def write(first: int) -> None:
            pages = [_page(slot, identities[slot]) for slot in range(first, first + 4)]
            assert await tier.write(pages) == [Outcome.OK] * 4
            ends.append(world.monotonic())

        async with asyncio.TaskGroup() as group:
            group.create_task(write(0))
            group.create_task(write(4))
        # 2 s of latency side by side, then 8 pages of 2 s through one pipe, by turns.
        assert ends == [16.0, 18.0]

    run_simulated(main, 0)


def test_a_copy_reads_its_source_until_it_ends() -> None:
    async def main(world: World) -> None:
        tier = SimulatedTier(NVME, page_bytes=64, capacity_pages=1)
        [identity] = identity_chain(1)
        tier.allocate(1)
        source = bytearray(b"a" * 64)
        barrier = tier.hold(after_pages=0)
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(tier.write([PageWrite(0, 0, identity, memoryview(source))]))
            await barrier.reached()
            assert tier.in_flight_pages == 1
            source[:] = b"b" * 64
            barrier.release()
        assert writing.result() == [Outcome.OK]
        assert tier.raw_page(0) == b"a" * 32 + b"b" * 32

    run_simulated(main, 0)


def _page(slot: int, identity: PageIdentity) -> PageWrite:
    return PageWrite(slot, 0, identity, stamp(identity, 100).data)
