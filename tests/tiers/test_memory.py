"""What a slot's record and its bytes say of each other while copies are under way.

The tier of these tests keeps its pages in a numpy array and lets every copy wait at a gate, in the thread that copies.
"""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from hicache.errors import BadRequest, TierUnavailable
from hicache.tier import HOST, Outcome, PageRead, PageWrite
from hicache.tiers.memory import MAX_THREADS, MemoryTier, capacity_in_pages, started_executor
from hicache.tiers.slots import MAX_SLOTS
from tests.stamps import identity_chain, stamp
from tests.tiers.contract import GUARD, expect_miss, expect_page, fetch, run, store, write_of

PAGE_BYTES = 4_096
GATE_TIMEOUT_S = 20.0


class GatedTier(MemoryTier):
    def __init__(self, capacity_pages: int, *, num_threads: int = 4) -> None:
        super().__init__(
            HOST, page_bytes=PAGE_BYTES, capacity_pages=capacity_pages, num_threads=num_threads, chunk_bytes=1
        )
        self.slots = np.zeros((capacity_pages, PAGE_BYTES), np.uint8)
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Semaphore(0)
        self.failing: set[int] = set()
        self.num_released = 0

    def _pass_gate(self, slots: set[int]) -> None:
        self.at_gate.release()
        assert self.gate.wait(GATE_TIMEOUT_S)
        if slots & self.failing:
            raise MemoryError("no memory for this page")

    def _copy_in(self, pages: Sequence[PageWrite]) -> None:
        self._pass_gate({page.slot for page in pages})
        for page in pages:
            self.slots[page.slot] = np.frombuffer(page.data, np.uint8)

    def _copy_out(self, pages: Sequence[PageRead]) -> None:
        self._pass_gate({page.slot for page in pages})
        for page in pages:
            np.frombuffer(page.into, np.uint8)[:] = self.slots[page.slot]

    def _release(self) -> None:
        self.num_released += 1

    async def until_at_gate(self, copies: int) -> None:
        """Wait until so many copies have come to the gate, or have passed it."""
        for _ in range(copies):
            assert await asyncio.to_thread(self.at_gate.acquire, timeout=GATE_TIMEOUT_S)


@asynccontextmanager
async def opened(capacity_pages: int, *, num_threads: int = 4) -> AsyncIterator[GatedTier]:
    tier = GatedTier(capacity_pages, num_threads=num_threads)
    try:
        yield tier
    finally:
        tier.gate.set()
        await tier.close()


def test_a_write_to_a_freed_slot_waits_for_the_one_under_way() -> None:
    async def main() -> None:
        async with opened(1) as tier:
            old, new = identity_chain(2)
            slots = tier.allocate(1)
            tier.gate.clear()
            async with asyncio.TaskGroup() as group:
                first = group.create_task(tier.write([write_of(tier, 0, old)]))
                await tier.until_at_gate(1)
                tier.free(slots)
                slots = tier.allocate(1)
                second = group.create_task(tier.write([write_of(tier, 0, new)]))
                for _ in range(5):
                    await asyncio.sleep(0)
                assert not tier.at_gate.acquire(blocking=False), "the second copy began under the first"
                tier.gate.set()
            assert (first.result(), second.result()) == ([Outcome.STALE], [Outcome.OK])
            await expect_page(tier, 0, new)
            await expect_miss(tier, 0, old, Outcome.NOT_FOUND)

    run(main())


def test_a_slot_freed_while_its_write_waits_is_not_written() -> None:
    async def main() -> None:
        async with opened(1) as tier:
            old, new = identity_chain(2)
            slots = tier.allocate(1)
            tier.gate.clear()
            async with asyncio.TaskGroup() as group:
                group.create_task(tier.write([write_of(tier, 0, old)]))
                await tier.until_at_gate(1)
                tier.free(slots)
                slots = tier.allocate(1)
                second = group.create_task(tier.write([write_of(tier, 0, new)]))
                await asyncio.sleep(0)
                tier.free(slots)
                tier.gate.set()
            assert second.result() == [Outcome.STALE]
            assert tier.slots[0].tobytes() == stamp(old, PAGE_BYTES).tobytes()
            assert tier.num_free == 1

    run(main())


def test_a_slot_freed_under_a_read_is_stale() -> None:
    async def main() -> None:
        async with opened(1) as tier:
            old, new = identity_chain(2)
            slots = tier.allocate(1)
            await store(tier, slots, [old])
            await tier.until_at_gate(1)
            for refilled in (False, True):
                tier.gate.clear()
                async with asyncio.TaskGroup() as group:
                    reading = group.create_task(fetch(tier, 0, old))
                    await tier.until_at_gate(1)
                    tier.free(slots)
                    slots = tier.allocate(1)
                    if refilled:
                        assert tier.declare(0, tier.generation(0), old) is Outcome.OK
                    tier.gate.set()
                assert reading.result()[0] is Outcome.STALE
                await store(tier, slots, [new if refilled else old])
                await tier.until_at_gate(1)

    run(main())


def test_a_slot_rewritten_under_a_read_is_not_found_even_under_the_same_identity() -> None:
    async def main() -> None:
        async with opened(1) as tier:
            [identity] = identity_chain(1)
            slots = tier.allocate(1)
            await store(tier, slots, [identity])
            await tier.until_at_gate(1)
            tier.gate.clear()
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(fetch(tier, 0, identity))
                await tier.until_at_gate(1)
                writing = group.create_task(tier.write([write_of(tier, 0, identity)]))
                await tier.until_at_gate(1)
                tier.gate.set()
            assert writing.result() == [Outcome.OK]
            # Whichever of the two copies ended first, the bytes read may be of both.
            assert reading.result()[0] is Outcome.NOT_FOUND
            await expect_page(tier, 0, identity)

    run(main())


def test_a_page_is_not_readable_while_it_is_written() -> None:
    async def main() -> None:
        async with opened(1) as tier:
            old, new = identity_chain(2)
            slots = tier.allocate(1)
            await store(tier, slots, [old])
            await tier.until_at_gate(1)
            tier.gate.clear()
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(tier.write([write_of(tier, 0, new)]))
                await tier.until_at_gate(1)
                for identity in (old, new):
                    await expect_miss(tier, 0, identity, Outcome.NOT_FOUND)
                    assert tier.check(0, 0, identity) is Outcome.NOT_FOUND
                with pytest.raises(AssertionError, match="under a write"):
                    tier.declare(0, 0, new)
                tier.gate.set()
            assert writing.result() == [Outcome.OK]

    run(main())


def test_a_cancelled_write_returns_only_when_its_copies_have_ended() -> None:
    async def main() -> None:
        async with opened(2) as tier:
            identities = identity_chain(2)
            slots = tier.allocate(2)
            pages = [write_of(tier, slot, each) for slot, each in zip(slots.tolist(), identities, strict=True)]
            tier.gate.clear()
            writing = asyncio.get_running_loop().create_task(tier.write(pages))
            await tier.until_at_gate(2)
            for _ in range(3):
                writing.cancel()
                await asyncio.sleep(0)
                assert not writing.done()
            tier.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await writing
            # Nobody was told that the pages are there, so they are not; the slots can be used again at once.
            for slot, identity in zip(slots.tolist(), identities, strict=True):
                await expect_miss(tier, slot, identity, Outcome.NOT_FOUND)
            await store(tier, slots, identities)
            for slot, identity in zip(slots.tolist(), identities, strict=True):
                await expect_page(tier, slot, identity)

    run(main())


def test_a_cancelled_read_keeps_its_buffer_until_the_copy_has_ended() -> None:
    async def main() -> None:
        async with opened(1) as tier:
            [identity] = identity_chain(1)
            slots = tier.allocate(1)
            await store(tier, slots, [identity])
            await tier.until_at_gate(1)
            buffer = np.full(PAGE_BYTES, GUARD, np.uint8)
            tier.gate.clear()
            reading = asyncio.get_running_loop().create_task(tier.read([PageRead(0, 0, identity, buffer.data)]))
            await tier.until_at_gate(1)
            reading.cancel()
            await asyncio.sleep(0)
            assert not reading.done()
            assert np.all(buffer == GUARD)
            tier.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert np.array_equal(buffer, stamp(identity, PAGE_BYTES))

    run(main())


def test_closing_waits_for_copies_and_releases_once() -> None:
    async def main() -> None:
        async with opened(1) as tier:
            [identity] = identity_chain(1)
            tier.allocate(1)
            tier.gate.clear()
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(tier.write([write_of(tier, 0, identity)]))
                await tier.until_at_gate(1)
                closing = [group.create_task(tier.close()) for _ in range(2)]
                for _ in range(3):
                    await asyncio.sleep(0)
                assert tier.num_released == 0
                assert not any(task.done() for task in closing)
                tier.gate.set()
            assert writing.result() == [Outcome.OK]
            assert tier.num_released == 1
            with pytest.raises(TierUnavailable, match="is closed"):
                tier.allocate(1)

    run(main())


def test_a_copy_that_fails_is_an_error_of_its_pages_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with opened(3, num_threads=3) as tier:
            identities = identity_chain(3)
            slots = tier.allocate(3)
            pages = [write_of(tier, slot, each) for slot, each in zip(slots.tolist(), identities, strict=True)]
            tier.failing = {1}
            assert await tier.write(pages) == [Outcome.OK, Outcome.ERROR, Outcome.OK]
            await expect_miss(tier, 1, identities[1], Outcome.NOT_FOUND)
            tier.failing = {2}
            assert (await fetch(tier, 2, identities[2]))[0] is Outcome.ERROR
            await expect_page(tier, 0, identities[0])
            tier.failing = set()
            await expect_page(tier, 2, identities[2])
            assert await tier.write(pages) == [Outcome.OK] * 3

    with caplog.at_level(logging.WARNING):
        run(main())
    assert [record.getMessage() for record in caplog.records] == [
        "host: copying 1 pages failed: no memory for this page"
    ] * 2


def test_a_page_filled_in_place_is_declared() -> None:
    async def main() -> None:
        async with opened(2) as tier:
            first, second = identity_chain(2)
            slots = tier.allocate(1)
            tier.slots[0] = stamp(first, PAGE_BYTES)
            await expect_miss(tier, 0, first, Outcome.NOT_FOUND)
            assert tier.declare(0, 0, first) is Outcome.OK
            await expect_page(tier, 0, first)
            assert tier.check(0, 0, first) is Outcome.OK
            assert tier.check(0, 0, second) is Outcome.NOT_FOUND
            assert tier.check(0, 1, first) is Outcome.STALE
            tier.free(slots)
            assert tier.check(0, 0, first) is Outcome.STALE
            assert tier.check(0, 1, first) is Outcome.NOT_FOUND
            # Freed meanwhile, and not handed out again: in both lives the slot stays as it is.
            assert tier.declare(0, 0, first) is Outcome.STALE
            assert tier.declare(0, 1, first) is Outcome.STALE
            assert tier.check(0, 1, first) is Outcome.NOT_FOUND

    run(main())


@pytest.mark.parametrize("num_threads", [0, MAX_THREADS + 1])
def test_a_number_of_threads_out_of_bounds_is_refused(num_threads: int) -> None:
    with pytest.raises(BadRequest, match="num_threads"):
        GatedTier(1, num_threads=num_threads)


def test_threads_that_share_a_piece_of_work_keep_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = os.sched_getaffinity(0)  # the caller's, which stay as they are

    def cores_of(num_threads: int, *, apart: bool) -> list[set[int]]:
        """Where each thread of a pool may run."""
        with started_executor(HOST, num_threads, apart=apart) as executor:
            everybody = threading.Barrier(num_threads)

            def look() -> set[int]:
                everybody.wait(GATE_TIMEOUT_S)
                return os.sched_getaffinity(0)

            return [each.result() for each in [executor.submit(look) for _ in range(num_threads)]]

    assert cores_of(3, apart=False) == [cores] * 3
    for num_threads in range(1, min(4, len(cores)) + 1):
        parts = cores_of(num_threads, apart=True)
        assert sum(map(len, parts)) == len(cores)
        assert set().union(*parts) == cores
        assert min(map(len, parts)) == len(cores) // num_threads
    # Of more threads than cores nobody is kept from any; nor where the kernel refuses.
    assert cores_of(len(cores) + 1, apart=True) == [cores] * (len(cores) + 1)

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert cores_of(len(cores), apart=True) == [cores] * len(cores)


def test_capacity_is_given_in_one_way_and_holds_a_page() -> None:
    assert capacity_in_pages(4_096, 3, None) == 3
    assert capacity_in_pages(4_096, None, 4_096) == 1
    assert capacity_in_pages(4_096, None, 3 * 4_096 + 4_095) == 3
    for pages, size in ((None, None), (1, 4_096)):
        with pytest.raises(BadRequest, match="capacity_bytes: is given exactly when capacity_pages is not"):
            capacity_in_pages(4_096, pages, size)
    for size in (4_095, 0, -1):
        with pytest.raises(BadRequest, match=f"capacity_bytes: {size} is below one page, which takes 4096 bytes"):
            capacity_in_pages(4_096, None, size)
    for pages in (0, -1, MAX_SLOTS + 1):
        with pytest.raises(BadRequest, match=f"capacity_pages: {pages} is not within 1 to {MAX_SLOTS}"):
            capacity_in_pages(4_096, pages, None)
    with pytest.raises(BadRequest, match="capacity_pages"):
        capacity_in_pages(1, None, MAX_SLOTS + 1)
