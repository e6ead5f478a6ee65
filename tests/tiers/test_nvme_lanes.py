"""Who waits for whom: lane threads, cancellation, layer reads from other threads, and the end."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hicache.tiers.nvme.store
from hicache.clock import ManualClock
from hicache.errors import BadRequest, DeadlineExceeded, TierUnavailable
from hicache.tier import LayerRead, Outcome, PageIdentity, PageRead, PageWrite
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.geometry import PageShape
from hicache.tiers.nvme.io import FileIO, Scratch, aligned_buffer, num_cores
from hicache.tiers.nvme.lanes import MAX_QUEUED, Lanes
from hicache.tiers.nvme.store import MAX_RUN_BYTES, READ_LANES
from tests.stamps import identity_chain, other_identities, stamp
from tests.tiers.contract import GUARD, expect_miss, expect_page, fetch, run, store, write_of
from tests.tiers.faulty_files import Fault, FaultyFiles, HeldFiles
from tests.tiers.nvme import SMALL, data_faults, read_all, read_layers, shape_of, small_tier, write_all


def lane_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hicache-")]


def layer_read(
    tier: NvmeTier, slot: int, identity: PageIdentity, layer: int, generation: int | None = None
) -> tuple[LayerRead, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    """A read of one layer and its buffer, full of `GUARD`."""
    into = np.full(tier._shape.layer_bytes[layer], GUARD, np.uint8)
    expected = tier.generation(slot) if generation is None else generation
    return LayerRead(slot, expected, identity, layer, into.data), into


def aligned_writes(tier: NvmeTier, slots: Sequence[int], identities: Sequence[PageIdentity]) -> list[PageWrite]:
    """Writes of stamped pages from buffers that begin at blocks."""
    writes = []
    for slot, identity in zip(slots, identities, strict=True):
        data = aligned_buffer(tier.page_bytes)
        data[:] = stamp(identity, tier.page_bytes).data
        writes.append(PageWrite(slot, tier.generation(slot), identity, data))
    return writes


# ---- one call for many pages


class CountingFiles(FileIO):
    """Notes how many bytes each call was given."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.lengths.append(sum(map(len, buffers)))
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.lengths.append(sum(map(len, buffers)))
        return super().pwritev(fd, buffers, offset)


@pytest.mark.parametrize("page_bytes", [12_288, 10_000, 100])
def test_neighbouring_slots_are_one_io_and_others_are_not(page_bytes: int) -> None:
    files = CountingFiles()

    async def main() -> None:
        shape = shape_of(page_bytes)
        async with small_tier(shape, 8, slots_per_segment=5, files=files, read_lanes=1, write_lanes=1) as tier:
            identities = identity_chain(8)
            slots = tier.allocate(8)
            files.lengths.clear()
            assert await tier.write(aligned_writes(tier, slots.tolist(), identities)) == [Outcome.OK] * 8
            # Neighbours end where a segment does.
            assert files.lengths == [5 * shape.slot_bytes, 3 * shape.slot_bytes]
            order = [0, 1, 3, 4, 2, 7, 6, 5]
            shuffled = [slots.tolist()[place] for place in order]
            files.lengths.clear()
            writes = aligned_writes(tier, shuffled, [identities[place] for place in order])
            assert await tier.write(writes) == [Outcome.OK] * 8
            assert files.lengths == [count * shape.slot_bytes for count in (2, 2, 1, 1, 1, 1)]
            assert await read_all(tier, slots.tolist(), identities, together=True) == [Outcome.OK] * 8

    run(main())


def test_a_run_is_no_longer_than_its_bound_and_leaves_no_thread_idle() -> None:
    files = CountingFiles()

    async def main() -> None:
        shape = shape_of(300_000)
        async with small_tier(shape, 40, slots_per_segment=40, files=files, read_lanes=1, write_lanes=8) as tier:
            identities = identity_chain(40)
            slots = tier.allocate(40)
            files.lengths.clear()
            assert await tier.write(aligned_writes(tier, slots.tolist(), identities)) == [Outcome.OK] * 40
            assert files.lengths == [5 * shape.slot_bytes] * 8
            files.lengths.clear()
            buffers = [aligned_buffer(tier.page_bytes) for _ in identities]
            reads = [
                PageRead(slot, 0, identity, buffer)
                for slot, identity, buffer in zip(slots.tolist(), identities, buffers, strict=True)
            ]
            assert await tier.read(reads) == [Outcome.OK] * 40
            longest = MAX_RUN_BYTES // shape.slot_bytes
            assert files.lengths[0] == longest * shape.slot_bytes == max(files.lengths)
            assert sum(files.lengths) == 40 * shape.slot_bytes

    run(main())


def test_large_requests_are_cut_into_few_runs_and_small_ones_are_spread_out() -> None:
    files = CountingFiles()

    async def main() -> None:
        for page_bytes, lengths in ((368_640, [4, 4, 4, 4]), (12_288, [1] * 16), (2 << 20, [1] * 16)):
            shape = shape_of(page_bytes)
            async with small_tier(shape, 16, slots_per_segment=16, files=files, write_lanes=16) as tier:
                slots, identities = tier.allocate(16), identity_chain(16)
                files.lengths.clear()
                assert await tier.write(aligned_writes(tier, slots.tolist(), identities)) == [Outcome.OK] * 16
                written = [length for length in files.lengths if length % shape.slot_bytes == 0]
                assert written == [count * shape.slot_bytes for count in lengths]

    run(main())


def test_the_device_reads_no_more_at_a_time_than_is_good_for_it() -> None:
    class MeetingFiles(FileIO):
        """Reads that go on when as many as may be under way at one time have come."""

        def __init__(self) -> None:
            self.together = threading.Barrier(READ_LANES, timeout=60)
            self.counting = threading.Lock()
            self.num_inside = self.most_inside = 0
            self.meets = False

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if not self.meets:
                return super().preadv(fd, buffers, offset)
            with self.counting:
                self.num_inside += 1
                self.most_inside = max(self.most_inside, self.num_inside)
            self.together.wait()
            try:
                return super().preadv(fd, buffers, offset)
            finally:
                with self.counting:
                    self.num_inside -= 1

    files = MeetingFiles()

    async def main() -> None:
        num_pages = 4 * READ_LANES
        async with small_tier(SMALL, num_pages, files=files, read_lanes=READ_LANES) as tier:
            slots, identities = tier.allocate(num_pages), identity_chain(num_pages)
            await store(tier, slots, identities)
            files.meets = True
            reading = read_all(tier, slots[::-1].tolist(), identities[::-1], together=True)
            assert await reading == [Outcome.OK] * num_pages
            assert files.most_inside == READ_LANES

    run(main())


def test_aligned_buffers_are_given_to_the_device_as_they_are() -> None:
    """No copy on the way: the very addresses of the caller reach the call, for a run of pages as for one."""
    seen: list[tuple[int, int]] = []

    class Addresses(FileIO):
        def _note(self, buffers: Sequence[memoryview]) -> None:
            for buffer in buffers:
                seen.append((np.frombuffer(buffer, np.uint8).ctypes.data, len(buffer)))

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            self._note(buffers)
            return super().preadv(fd, buffers, offset)

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            self._note(buffers)
            return super().pwritev(fd, buffers, offset)

    async def main() -> None:
        async with small_tier(SMALL, 4, files=Addresses(), read_lanes=1, write_lanes=1, layer_lanes=1) as tier:
            arena = np.zeros(5 * tier.page_bytes + 4096, np.uint8)
            arena = arena[-arena.ctypes.data % 4096 :]
            identities = identity_chain(4)
            pages = [arena[place * tier.page_bytes : (place + 1) * tier.page_bytes] for place in range(4)]
            for page, identity in zip(pages, identities, strict=True):
                page[:] = stamp(identity, tier.page_bytes)
            slots = tier.allocate(4).tolist()
            writes = [
                PageWrite(slot, 0, identity, page.data)
                for slot, identity, page in zip(slots, identities, pages, strict=True)
            ]
            seen.clear()
            assert await tier.write(writes) == [Outcome.OK] * 4
            assert [address for address, _ in seen][1::2] == [page.ctypes.data for page in pages]
            assert len(seen) == 8
            for page in pages:
                page[:] = GUARD
            seen.clear()
            reads = [
                PageRead(slot, 0, identity, page.data)
                for slot, identity, page in zip(slots, identities, pages, strict=True)
            ]
            assert await tier.read(reads) == [Outcome.OK] * 4
            assert [address for address, _ in seen][1::2] == [page.ctypes.data for page in pages]
            for page, identity in zip(pages, identities, strict=True):
                assert np.array_equal(page, stamp(identity, tier.page_bytes))
            # A layer of whole blocks, too.
            seen.clear()
            layer = LayerRead(slots[2], 0, identities[2], 1, arena[4096 : 4096 + SMALL.layer_bytes[1]].data)
            assert await asyncio.to_thread(tier.start_layer_reads([layer]).wait, 30) == [Outcome.OK]
            assert seen == [(arena.ctypes.data + 4096, SMALL.layer_bytes[1])]

    run(main())


def test_more_pages_than_may_be_queued_all_arrive_in_order() -> None:
    async def main() -> None:
        num_pages = 3 * MAX_QUEUED
        async with small_tier(shape_of(100), num_pages, slots_per_segment=7) as tier:
            identities = identity_chain(num_pages)
            slots = tier.allocate(num_pages)[::-1].copy()
            # Descending slots are no neighbours: each page is a job of its own.
            await store(tier, slots, identities)
            assert await read_all(tier, slots.tolist(), identities, together=True) == [Outcome.OK] * num_pages

    run(main())


def test_no_more_jobs_than_allowed_are_with_the_threads() -> None:
    files = HeldFiles("preadv")

    async def main() -> None:
        num_pages = 2 * MAX_QUEUED
        async with small_tier(shape_of(100), num_pages, files=files, read_lanes=4) as tier:
            identities = identity_chain(num_pages)
            slots = tier.allocate(num_pages)[::-1].copy()
            await store(tier, slots, identities)
            files.hold()
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(read_all(tier, slots.tolist(), identities, together=True))
                for _ in range(4):
                    await asyncio.to_thread(files.arrived.acquire)
                # Four wait in the device, the rest of what is allowed in the queue, and everything else on our side.
                assert tier._reads._queue.qsize() == MAX_QUEUED - 4
                assert len(tier._reads._waiting) == num_pages - MAX_QUEUED
                files.let_go()
            assert reading.result() == [Outcome.OK] * num_pages

    run(main())


def test_the_loop_is_woken_once_for_what_has_finished_meanwhile() -> None:
    class Woken(asyncio.SelectorEventLoop):
        wakings = 0

        def call_soon_threadsafe(self, *args: object, **kwargs: object) -> asyncio.Handle:
            self.wakings += 1
            return super().call_soon_threadsafe(*args, **kwargs)  # type: ignore[arg-type]  # passed on as it came

    class HeldLast(HeldFiles):
        """Holds the forty-first read."""

        count = 0

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            self.count += 1
            return super().preadv(fd, buffers, offset) if self.count == 41 else FileIO.preadv(self, fd, buffers, offset)

    files = HeldLast("preadv")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Woken)
        async with small_tier(shape_of(100), 41, files=files, read_lanes=1) as tier:
            identities = identity_chain(41)
            slots = tier.allocate(41)[::-1].copy()
            await store(tier, slots, identities)
            files.count, loop.wakings = 0, 0
            files.hold()
            reading = loop.create_task(read_all(tier, slots.tolist(), identities, together=True))
            await asyncio.sleep(0)
            # The loop stands still while 40 jobs finish on the one thread and the next one waits in the device.
            files.arrived.acquire()
            assert loop.wakings == 1
            files.let_go()
            assert await reading == [Outcome.OK] * 41

    with asyncio.Runner(loop_factory=Woken) as runner:
        runner.run(main())


def test_a_slow_device_does_not_block_the_loop() -> None:
    files = HeldFiles("preadv", "pwritev")

    async def main() -> None:
        async with small_tier(SMALL, 4, files=files) as tier:
            identities = identity_chain(4)
            slots = tier.allocate(4)
            await store(tier, slots[:2], identities[:2])
            files.hold()
            async with asyncio.TaskGroup() as group:
                group.create_task(expect_page(tier, 0, identities[0]))
                group.create_task(store(tier, slots[2:], identities[2:]))
                for _ in range(3):
                    await asyncio.to_thread(files.arrived.acquire)
                # Everything that does not copy goes on.
                for _ in range(100):
                    await asyncio.sleep(0)
                tier.free(slots[1:2])
                assert tier.allocate(1).tolist() == [1]
                assert tier.generation(1) == 1
                await expect_miss(tier, 1, identities[1], Outcome.NOT_FOUND)
                files.let_go()

    run(main())


# ---- cancellation


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_cancelled_copy_returns_only_when_its_buffers_are_free(operation: str) -> None:
    files = HeldFiles("preadv" if operation == "read" else "pwritev")

    async def main() -> None:
        async with small_tier(SMALL, 2, files=files) as tier:
            identities = identity_chain(2)
            slots = tier.allocate(2)
            await store(tier, slots, identities)
            files.hold()
            into = [np.full(tier.page_bytes, GUARD, np.uint8) for _ in range(2)]
            if operation == "read":
                reads = [
                    PageRead(slot, 0, identity, buffer.data)
                    for slot, identity, buffer in zip(slots.tolist(), identities, into, strict=True)
                ]
                copying = asyncio.get_running_loop().create_task(tier.read(reads))
            else:
                writes = [write_of(tier, slot, identity) for slot, identity in zip((0, 1), identities, strict=True)]
                copying = asyncio.get_running_loop().create_task(tier.write(writes))
            for _ in range(2):
                await asyncio.to_thread(files.arrived.acquire)
            for _ in range(3):
                copying.cancel()
                await asyncio.sleep(0)
                assert not copying.done()
            files.let_go()
            with pytest.raises(asyncio.CancelledError):
                await copying
            if operation == "read":
                for buffer, identity in zip(into, identities, strict=True):
                    assert np.array_equal(buffer, stamp(identity, tier.page_bytes))
            # The tier learned what the cancelled caller did not: both pages are there.
            for slot, identity in zip((0, 1), identities, strict=True):
                await expect_page(tier, slot, identity)

    run(main())


def test_a_write_that_waits_for_another_one_can_be_cancelled_at_once() -> None:
    files = HeldFiles("pwritev")

    async def main() -> None:
        async with small_tier(SMALL, 1, files=files) as tier:
            first, second, third = identity_chain(3)
            tier.allocate(1)
            files.hold()
            loop = asyncio.get_running_loop()
            writing = loop.create_task(write_all(tier, [0], [first]))
            await asyncio.to_thread(files.arrived.acquire)
            waiting = loop.create_task(write_all(tier, [0], [second]))
            last = loop.create_task(write_all(tier, [0], [third]))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            files.let_go()
            assert await writing == [Outcome.OK]
            assert await last == [Outcome.OK]
            await expect_page(tier, 0, third)

    run(main())


# ---- lives of a slot


def test_writes_into_one_slot_land_one_after_the_other() -> None:
    """A write of a life that has ended must not land on top of the next one's."""
    files = HeldFiles("pwritev")

    async def main() -> None:
        async with small_tier(SMALL, 1, files=files) as tier:
            old, new = identity_chain(2)
            slots = tier.allocate(1)
            files.hold()
            loop = asyncio.get_running_loop()
            first = loop.create_task(write_all(tier, [0], [old]))
            await asyncio.to_thread(files.arrived.acquire)
            tier.free(slots)
            tier.allocate(1)
            second = loop.create_task(write_all(tier, [0], [new]))
            for _ in range(10):
                await asyncio.sleep(0)
            assert files.num_waiting == 1
            files.let_go()
            assert await first == [Outcome.STALE]
            assert await second == [Outcome.OK]
            await expect_page(tier, 0, new)

    run(main())


@pytest.mark.parametrize("again", [False, True])
def test_a_slot_freed_under_a_read_is_stale_though_the_bytes_were_right(again: bool) -> None:
    files = HeldFiles("preadv")

    async def main() -> None:
        async with small_tier(SMALL, 1, files=files, layer_lanes=1) as tier:
            identity, other = identity_chain(2)
            slots = tier.allocate(1)
            await store(tier, slots, [identity])
            files.hold()
            reading = asyncio.get_running_loop().create_task(fetch(tier, 0, identity))
            layer, _ = layer_read(tier, 0, identity, 0)
            ticket = tier.start_layer_reads([layer])
            for _ in range(2):
                await asyncio.to_thread(files.arrived.acquire)
            tier.free(slots)
            if again:
                await store(tier, tier.allocate(1), [other])
            files.let_go()
            assert (await reading)[0] is Outcome.STALE
            assert await asyncio.to_thread(ticket.wait, 30) == [Outcome.STALE]
            if again:
                await expect_page(tier, 0, other)

    run(main())


# ---- layers


def test_layers_are_read_from_any_thread_while_the_loop_is_busy() -> None:
    async def main() -> None:
        async with small_tier(shape_of(100_003, num_layers=7), 12) as tier:
            identities = identity_chain(12)
            slots = tier.allocate(12)
            await store(tier, slots, identities)
            failures: list[str] = []

            def attend(number: int) -> None:
                for layer in range(7):
                    reads = [layer_read(tier, slot, identities[slot], layer) for slot in range(12)]
                    outcomes = tier.start_layer_reads([read for read, _ in reads]).wait(30)
                    start, stop = tier._shape.layer_ranges[layer]
                    for (read, into), outcome in zip(reads, outcomes, strict=True):
                        right = stamp(read.identity, tier.page_bytes)[start:stop]
                        if outcome is not Outcome.OK or not np.array_equal(into, right):
                            failures.append(f"thread {number}, layer {layer}, slot {read.slot}: {outcome}")

            threads = [threading.Thread(target=attend, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            # The loop does not run at all in the meantime.
            for thread in threads:
                thread.join()
            assert failures == []
            assert tier.counters()["read_layer.ok"] == 4 * 7 * 12

    run(main())


@pytest.mark.parametrize("offset", [0, 1, 512])
@pytest.mark.parametrize("lengths", [(4096, 4096), (8192, 100, 4000), (1, 4095, 4097, 2), (12_289, 3)])
def test_layers_of_any_length_reach_buffers_at_any_address(lengths: tuple[int, ...], offset: int) -> None:
    async def main() -> None:
        shape = PageShape(lengths, 4)
        async with small_tier(shape, 3) as tier:
            identities = identity_chain(3)
            slots = tier.allocate(3)
            await store(tier, slots, identities)
            for slot, identity in zip(slots.tolist(), identities, strict=True):
                for layer, (start, stop) in enumerate(shape.layer_ranges):
                    around = np.full(stop - start + 8192, GUARD, np.uint8)
                    first = -around.ctypes.data % 4096 + offset
                    into = around[first : first + stop - start]
                    ticket = tier.start_layer_reads([LayerRead(slot, 0, identity, layer, into.data)])
                    assert await asyncio.to_thread(ticket.wait, 30) == [Outcome.OK]
                    assert np.array_equal(into, stamp(identity, tier.page_bytes)[start:stop])
                    assert np.all(around[:first] == GUARD)
                    assert np.all(around[first + stop - start :] == GUARD)

    run(main())


def test_layers_say_what_pages_say_of_other_lives_identities_and_empty_slots() -> None:
    async def main() -> None:
        async with small_tier(SMALL, 3) as tier:
            first, second = identity_chain(2)
            slots = tier.allocate(2)
            await store(tier, slots[:1], [first])
            reads = [
                layer_read(tier, 0, first, 2)[0],
                layer_read(tier, 0, second, 2)[0],
                *(layer_read(tier, 0, other, 2)[0] for other in other_identities(first)),
                layer_read(tier, 0, first, 2, generation=1)[0],
                layer_read(tier, 1, second, 2)[0],
                layer_read(tier, 2, second, 2)[0],
            ]
            missing = [Outcome.NOT_FOUND]
            expected = [Outcome.OK, *missing * 4, Outcome.STALE, *missing * 2]
            assert tier.start_layer_reads(reads).wait(30) == expected
            assert tier.start_layer_reads([]).wait(0) == []
            tier.free(slots[:1])
            assert tier.start_layer_reads(reads[:1]).wait(30) == [Outcome.STALE]

    run(main())


def test_wrong_layer_reads_are_refused_and_touch_nothing() -> None:
    async def main() -> None:
        async with small_tier(SMALL, 2) as tier:
            identities = identity_chain(2)
            await store(tier, tier.allocate(2), identities)
            good, into = layer_read(tier, 0, identities[0], 0)
            size = SMALL.layer_bytes[1]
            wrong = [
                LayerRead(0, 0, identities[0], -1, memoryview(bytearray(size))),
                LayerRead(0, 0, identities[0], 3, memoryview(bytearray(size))),
                LayerRead(2, 0, identities[0], 1, memoryview(bytearray(size))),
                LayerRead(-1, 0, identities[0], 1, memoryview(bytearray(size))),
                LayerRead(0, 0, identities[0], 1, memoryview(bytearray(size - 1))),
                LayerRead(0, 0, identities[0], 1, memoryview(bytearray(size + 1))),
                LayerRead(0, 0, identities[0], 1, memoryview(bytes(size))),
                LayerRead(0, 0, identities[0], 1, memoryview(bytearray(2 * size))[::2]),
                LayerRead(0, 0, PageIdentity(b"", b"", b""), 1, memoryview(bytearray(size))),
            ]
            for read in wrong:
                with pytest.raises(BadRequest):
                    tier.start_layer_reads([good, read])
            assert np.all(into == GUARD)
            assert "read_layer.ok" not in tier.counters()

    run(main())


def test_waiting_for_layers_ends_at_its_deadline_and_can_be_tried_again() -> None:
    files = HeldFiles("preadv")

    async def main() -> None:
        async with small_tier(SMALL, 1, files=files) as tier:
            [identity] = identity_chain(1)
            await store(tier, tier.allocate(1), [identity])
            files.hold()
            read, into = layer_read(tier, 0, identity, 1)
            ticket = tier.start_layer_reads([read])
            with pytest.raises(DeadlineExceeded, match="1 layer read"):
                ticket.wait(0.01)
            files.let_go()
            assert ticket.wait(30) == ticket.wait(0) == [Outcome.OK]
            start, stop = SMALL.layer_ranges[1]
            assert np.array_equal(into, stamp(identity, tier.page_bytes)[start:stop])

    run(main())


def test_layers_do_not_wait_behind_pages() -> None:
    class HeldPages(HeldFiles):
        """Holds reads of whole slots only."""

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if sum(map(len, buffers)) >= SMALL.slot_bytes:
                return super().preadv(fd, buffers, offset)
            return FileIO.preadv(self, fd, buffers, offset)

    files = HeldPages("preadv")

    async def main() -> None:
        async with small_tier(SMALL, 8, files=files, read_lanes=2) as tier:
            identities = identity_chain(8)
            slots = tier.allocate(8)
            await store(tier, slots, identities)
            files.hold()
            async with asyncio.TaskGroup() as group:
                group.create_task(read_all(tier, slots.tolist(), identities, together=True))
                await asyncio.to_thread(files.arrived.acquire)
                assert set(await read_layers(tier, slots.tolist(), identities)) == {Outcome.OK}
                files.let_go()

    run(main())


# ---- the end


def test_closing_ends_all_threads_and_closes_all_files() -> None:
    async def main() -> None:
        async with small_tier(SMALL, 4) as tier:
            assert lane_threads() == []
            identities = identity_chain(4)
            slots = tier.allocate(4)
            await store(tier, slots, identities)
            await expect_page(tier, 0, identities[0])
            await read_layers(tier, [1], identities[1:2])
            assert len(lane_threads()) == 4 + 4 + 2 + max(1, num_cores() // 2)
            await tier.close()
            assert lane_threads() == []
            layer, into = layer_read(tier, 0, identities[0], 0)
            assert tier.start_layer_reads([layer]).wait(0) == [Outcome.ERROR]
            assert np.all(into == GUARD)

    run(main())


def test_closing_again_closes_nothing_again() -> None:
    """A descriptor that was closed may be somebody else's by then."""
    files = FaultyFiles(counts="close".__eq__)

    async def main() -> None:
        async with small_tier(SMALL, 4, files=files) as tier:
            files.num_calls = 0
            await asyncio.gather(tier.close(), tier.close())
            assert files.num_calls == 4, "one segment, two logs and the directory"
            await tier.close()
            assert files.num_calls == 4

    run(main())


def test_closing_finishes_what_waits_and_refuses_what_comes() -> None:
    files = HeldFiles("pwritev", "preadv")

    async def main() -> None:
        num_pages = 2 * MAX_QUEUED
        async with small_tier(shape_of(100), num_pages, files=files) as tier:
            identities = identity_chain(num_pages)
            slots = tier.allocate(num_pages)[::-1].copy()
            loop = asyncio.get_running_loop()
            await store(tier, slots[:1], identities[:1])
            files.hold()
            writing = loop.create_task(write_all(tier, slots.tolist()[1:], identities[1:]))
            layer, _ = layer_read(tier, int(slots[0]), identities[0], 0)
            ticket = tier.start_layer_reads([layer])
            for _ in range(5):
                await asyncio.to_thread(files.arrived.acquire)
            behind = loop.create_task(write_all(tier, slots.tolist()[1:2], identities[1:2]))
            await asyncio.sleep(0)
            closing = [loop.create_task(tier.close()) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(TierUnavailable, match="closed"):
                tier.allocate(1)
            # A write that waited for its slot had not begun.
            assert await behind == [Outcome.ERROR]
            assert not any(task.done() for task in closing)
            files.let_go()
            assert await writing == [Outcome.OK] * (num_pages - 1)
            assert ticket.wait(0) == [Outcome.OK]
            for task in closing:
                await task
            assert lane_threads() == []

    run(main())


@asynccontextmanager
async def tier_that_hangs(files: HeldFiles) -> AsyncIterator[tuple[NvmeTier, asyncio.Task[Any]]]:
    """A tier of `files` in the midst of a read that hangs, and the read."""
    async with small_tier(SMALL, 1, files=files, read_lanes=1, layer_lanes=1) as tier:
        [identity] = identity_chain(1)
        await store(tier, tier.allocate(1), [identity])
        files.hold()
        reading = asyncio.get_running_loop().create_task(fetch(tier, 0, identity))
        await asyncio.to_thread(files.arrived.acquire)
        yield tier, reading


def test_closing_does_not_wait_for_ever_for_a_hung_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = HeldFiles("preadv")

    async def main() -> None:
        async with tier_that_hangs(files) as (tier, reading):
            with caplog.at_level(logging.WARNING), monkeypatch.context() as patched:
                patched.setattr(hicache.tiers.nvme.store, "CLOSE_TIMEOUT_S", 0.05)
                await tier.close()
            assert "does not answer" in caplog.text
            assert not reading.done()
            # It answers after all: the copy ends as it should, and a second close cleans up.
            files.let_go()
            assert (await reading)[0] is Outcome.OK
            await tier.close()
            assert lane_threads() == []

    run(main())


def test_a_tier_may_be_given_up_at_any_moment_of_its_closing() -> None:
    """Whoever gives it up does not know how far the closing has come, whose own time may just have run out."""
    files = HeldFiles("preadv")

    async def main() -> None:
        async with tier_that_hangs(files) as (tier, reading):
            closing = asyncio.get_running_loop().create_task(tier.close())
            await asyncio.sleep(0)
            while not closing.done():  # every turn of the loop
                tier.give_up()
                await asyncio.sleep(0)
            await closing
            assert (await reading)[0] is Outcome.ERROR
            files.let_go()
            await tier.close()
            assert lane_threads() == []

    run(main())


def test_one_tier_may_serve_one_loop_after_another(tmp_path: Path) -> None:
    shape = shape_of(100)
    tier = NvmeTier.open(tmp_path / "store", layout=shape, capacity_bytes=1 << 20)

    async def first() -> None:
        await store(tier, tier.allocate(2), identity_chain(2))

    async def second() -> None:
        for slot, identity in enumerate(identity_chain(2)):
            await expect_page(tier, slot, identity)
        await tier.close()

    run(first())
    run(second())
    assert lane_threads() == []


def test_without_threads_copies_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """F27: the system gives no more threads; then it does."""

    async def main() -> None:
        async with small_tier(SMALL, 1) as tier:
            [identity] = identity_chain(1)
            tier.allocate(1)

            def refuse(_thread: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            with monkeypatch.context() as patched:
                patched.setattr(threading.Thread, "start", refuse)
                assert await write_all(tier, [0], [identity]) == [Outcome.ERROR]
            assert await write_all(tier, [0], [identity]) == [Outcome.OK]
            with monkeypatch.context() as patched:
                patched.setattr(threading.Thread, "start", refuse)
                await expect_miss(tier, 0, identity, Outcome.ERROR)
                layer, _ = layer_read(tier, 0, identity, 0)
                assert tier.start_layer_reads([layer]).wait(30) == [Outcome.ERROR]
            await expect_page(tier, 0, identity)

    run(main())


def test_fewer_threads_than_wished_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle:
        """A job that says on which thread it ran."""

        ran = ""

        def run(self, _scratch: Scratch) -> None:
            self.ran = threading.current_thread().name

        def land(self, error: Exception | None) -> None:
            assert error is None
            done.set()

    done = threading.Event()
    start = threading.Thread.start

    def start_two(thread: threading.Thread) -> None:
        if thread.name.endswith("-2"):
            raise RuntimeError("can't start new thread")
        start(thread)

    async def main() -> None:
        lanes = Lanes("few", num_threads=5, scratch=lambda: Scratch(SMALL, 1), clock=ManualClock())
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start_two)
            job = Idle()
            assert lanes.submit_anywhere(job)
        await asyncio.to_thread(done.wait, 30)
        assert job.ran.startswith("hicache-few-")
        assert len(lane_threads()) == 2
        await lanes.stop()
        assert not lanes.submit_anywhere(job)
        assert lane_threads() == []

    run(main())


def test_a_failed_read_does_not_spoil_what_is_under_way_beside_it() -> None:
    files = data_faults()

    async def main() -> None:
        async with small_tier(SMALL, 8, files=files, read_lanes=8) as tier:
            identities = identity_chain(8)
            slots = tier.allocate(8)
            await store(tier, slots, identities)
            files.arm(Fault.EIO, 3)
            outcomes = await read_all(tier, slots.tolist(), identities, together=True)
            assert sorted(outcome.value for outcome in outcomes) == ["error", *["ok"] * 7]

    run(main())
