"""The one test class that every tier passes. A tier's own test file inherits `TierContract` and gives two things: how
to make a tier, and how to look at a slot's bytes around it.

    class TestHostContract(TierContract):
        def make_tier(self, *, page_bytes: int, capacity_pages: int) -> AbstractAsyncContextManager[HostTier]: ...
        def raw_page(self, tier: Tier, slot: int) -> bytes: ...

Pages are stamped (`tests.stamps`). Each test runs on an event loop of its own, under pytest's time limit.
"""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from hicache.errors import BadRequest, NoRoom, TierUnavailable
from hicache.tier import Outcome, PageIdentity, PageRead, PageWrite, Slots, Tier
from tests.stamps import identity_chain, other_identities, stamp

GUARD = 0xA5
"""What buffers hold before a read: a byte that the read must overwrite inside, and must leave alone outside."""


def page_data(identity: PageIdentity, page_bytes: int) -> memoryview:
    """The stamped bytes of a page, in a buffer of its own."""
    return stamp(identity, page_bytes).data


def write_of(tier: Tier, slot: int, identity: PageIdentity) -> PageWrite:
    """A write of the stamped page into the slot as it is now."""
    return PageWrite(int(slot), tier.generation(int(slot)), identity, page_data(identity, tier.page_bytes))


async def store(tier: Tier, slots: Slots, identities: Sequence[PageIdentity]) -> None:
    """Write the stamped pages; each must be `OK`."""
    pages = [write_of(tier, slot, identity) for slot, identity in zip(slots.tolist(), identities, strict=True)]
    outcomes = await tier.write(pages)
    assert outcomes == [Outcome.OK] * len(pages)


async def fetch(
    tier: Tier, slot: int, identity: PageIdentity, generation: int | None = None
) -> tuple[Outcome, npt.NDArray[np.uint8]]:
    """Read one slot; the outcome and the buffer, which was full of `GUARD`."""
    buffer = np.full(tier.page_bytes, GUARD, np.uint8)
    expected = tier.generation(int(slot)) if generation is None else generation
    [outcome] = await tier.read([PageRead(int(slot), expected, identity, buffer.data)])
    return outcome, buffer


async def expect_page(tier: Tier, slot: int, identity: PageIdentity) -> None:
    """The slot serves exactly the stamped page."""
    outcome, buffer = await fetch(tier, slot, identity)
    assert outcome is Outcome.OK
    assert np.array_equal(buffer, stamp(identity, tier.page_bytes))


async def expect_miss(tier: Tier, slot: int, identity: PageIdentity, outcome: Outcome) -> None:
    """The slot does not serve the page, for the reason given."""
    got, _ = await fetch(tier, slot, identity)
    assert got is outcome


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine to its end on a loop of its own, errors of forgotten tasks and callbacks included."""
    unhandled: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unhandled.append(context))
        await main
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a tier left tasks behind"

    asyncio.run(watched())
    assert unhandled == []


class TierContract(ABC):
    """What `hicache.tier.Tier` promises."""

    page_bytes: ClassVar[int] = 12_288
    """An ordinary page: whole blocks of 4,096 bytes."""
    odd_page_bytes: ClassVar[int] = 10_000
    """A page that is no multiple of a disk's block. Both are multiples of 16."""
    page_size: ClassVar[int] = 4
    """Tokens in a page: what the identities used here carry."""

    @abstractmethod
    def make_tier(self, *, page_bytes: int, capacity_pages: int) -> AbstractAsyncContextManager[Tier]:
        """A tier of that shape, open inside the block and closed after it."""

    @abstractmethod
    def raw_page(self, tier: Tier, slot: int) -> bytes:
        """The `page_bytes` bytes that lie in the slot, page-first, whatever the tier would say of them."""

    # ---- round trip

    @pytest.mark.parametrize("odd", [False, True])
    def test_pages_come_back_as_they_were_written(self, odd: bool) -> None:
        page_bytes = self.odd_page_bytes if odd else self.page_bytes

        async def main() -> None:
            async with self.make_tier(page_bytes=page_bytes, capacity_pages=9) as tier:
                assert (tier.page_bytes, tier.capacity_pages) == (page_bytes, 9)
                identities = identity_chain(7)
                slots = tier.allocate(7)
                await store(tier, slots, identities)
                buffers = [np.full(page_bytes, GUARD, np.uint8) for _ in identities]
                reads = [
                    PageRead(slot, tier.generation(slot), identity, buffer.data)
                    for slot, identity, buffer in zip(slots.tolist(), identities, buffers, strict=True)
                ]
                assert await tier.read(reads) == [Outcome.OK] * 7
                for slot, identity, buffer in zip(slots.tolist(), identities, buffers, strict=True):
                    expected = stamp(identity, page_bytes)
                    assert np.array_equal(buffer, expected)
                    assert self.raw_page(tier, slot) == expected.tobytes()

        run(main())

    def test_outcomes_come_in_the_order_of_the_pages(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=6) as tier:
                identities = identity_chain(6)
                slots = tier.allocate(6)
                await store(tier, slots[::-1].copy(), identities)
                for slot, identity in zip(slots[::-1].tolist(), identities, strict=True):
                    await expect_page(tier, slot, identity)
                asked = [identities[5], identities[0], identities[3]]
                buffers = [np.full(tier.page_bytes, GUARD, np.uint8) for _ in asked]
                reads = [
                    PageRead(int(slots[0]), 0, asked[0], buffers[0].data),
                    PageRead(int(slots[1]), 0, asked[1], buffers[1].data),
                    PageRead(int(slots[2]), 0, asked[2], buffers[2].data),
                ]
                assert await tier.read(reads) == [Outcome.OK, Outcome.NOT_FOUND, Outcome.OK]
                assert np.array_equal(buffers[0], stamp(asked[0], tier.page_bytes))
                assert np.array_equal(buffers[2], stamp(asked[2], tier.page_bytes))

        run(main())

    def test_an_empty_request_does_nothing(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=2) as tier:
                assert await tier.write([]) == []
                assert await tier.read([]) == []
                assert tier.allocate(0).size == 0
                tier.free(np.empty(0, np.int32))
                assert tier.num_free == 2

        run(main())

    def test_one_page_may_be_read_into_several_buffers_at_once(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=2) as tier:
                [identity] = identity_chain(1)
                slots = tier.allocate(1)
                await store(tier, slots, [identity])
                buffers = [np.full(tier.page_bytes, GUARD, np.uint8) for _ in range(5)]
                reads = [PageRead(int(slots[0]), 0, identity, buffer.data) for buffer in buffers]
                assert await tier.read(reads) == [Outcome.OK] * 5
                for buffer in buffers:
                    assert np.array_equal(buffer, stamp(identity, tier.page_bytes))

        run(main())

    # ---- slots

    def test_allocation_is_all_or_none_and_says_what_was_free(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=5) as tier:
                tier.allocate(3)
                with pytest.raises(NoRoom) as caught:
                    tier.allocate(3)
                assert (caught.value.tier, caught.value.pages_asked, caught.value.pages_free) == (tier.tier_id, 3, 2)
                assert tier.num_free == 2
                assert tier.allocate(2).size == 2
                with pytest.raises(NoRoom) as caught:
                    tier.allocate(1)
                assert (caught.value.pages_asked, caught.value.pages_free) == (1, 0)

        run(main())

    def test_slots_are_int32_distinct_and_neighbours_in_a_fresh_tier(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=8) as tier:
                first, second = tier.allocate(5), tier.allocate(3)
                assert (first.dtype, first.ndim) == (np.dtype(np.int32), 1)
                assert np.all(np.diff(first) == 1)
                assert np.all(np.diff(second) == 1)
                assert sorted(first.tolist() + second.tolist()) == list(range(8))

        run(main())

    def test_free_and_used_add_up_to_the_capacity(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=10) as tier:
                assert tier.num_free == tier.capacity_pages == 10
                first = tier.allocate(4)
                second = tier.allocate(6)
                assert tier.num_free == 0
                tier.free(first)
                assert tier.num_free + second.size == tier.capacity_pages
                tier.free(second)
                assert tier.num_free == tier.capacity_pages == 10

        run(main())

    def test_a_wrong_free_is_refused_and_frees_nothing(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=4) as tier:
                identities = identity_chain(3)
                slots = tier.allocate(3)
                await store(tier, slots, identities)
                [unused] = set(range(4)) - set(slots.tolist())
                kept = slots[:2].tolist()
                wrong = [[*kept, unused], [*kept, kept[0]], [*kept, 4], [*kept, -1], [*kept, 2**31 - 1]]
                for named in wrong:
                    with pytest.raises(AssertionError):
                        tier.free(np.array(named, np.int32))
                assert tier.num_free == 1
                assert [tier.generation(slot) for slot in range(4)] == [0, 0, 0, 0]
                for slot, identity in zip(slots.tolist(), identities, strict=True):
                    await expect_page(tier, slot, identity)
                tier.free(slots)
                with pytest.raises(AssertionError):
                    tier.free(slots[:1])
                assert tier.num_free == 4

        run(main())

    def test_each_free_bumps_the_generation_of_its_slots_alone(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=3) as tier:
                expected = [0, 0, 0]
                tier.allocate(3)
                for slot in (1, 1, 2, 1):
                    tier.free(np.array([slot], np.int32))
                    expected[slot] += 1
                    assert [tier.generation(each) for each in range(3)] == expected
                    assert tier.allocate(1).tolist() == [slot]

        run(main())

    # ---- whose bytes

    def test_an_earlier_generation_neither_reads_nor_writes(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=1) as tier:
                old, new, late = identity_chain(3)
                slots = tier.allocate(1)
                await store(tier, slots, [old])
                tier.free(slots)
                assert (await fetch(tier, 0, old, generation=0))[0] is Outcome.STALE
                slots = tier.allocate(1)
                assert (await fetch(tier, 0, old, generation=0))[0] is Outcome.STALE
                await expect_miss(tier, 0, old, Outcome.NOT_FOUND)
                await store(tier, slots, [new])
                late_write = PageWrite(0, 0, late, page_data(late, tier.page_bytes))
                assert await tier.write([late_write]) == [Outcome.STALE]
                assert (await fetch(tier, 0, old, generation=0))[0] is Outcome.STALE
                assert (await fetch(tier, 0, new, generation=2))[0] is Outcome.STALE
                await expect_miss(tier, 0, late, Outcome.NOT_FOUND)
                await expect_page(tier, 0, new)
                assert self.raw_page(tier, 0) == stamp(new, tier.page_bytes).tobytes()

        run(main())

    def test_another_identity_is_not_found(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=2) as tier:
                first, second = identity_chain(2)
                slots = tier.allocate(2)
                await store(tier, slots, [first, second])
                for other in (second, *other_identities(first)):
                    await expect_miss(tier, int(slots[0]), other, Outcome.NOT_FOUND)
                await expect_page(tier, int(slots[0]), first)

        run(main())

    def test_a_slot_that_was_never_written_holds_nothing(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=3) as tier:
                first, second = identity_chain(2)
                await expect_miss(tier, 1, first, Outcome.NOT_FOUND)
                slots = tier.allocate(2)
                await expect_miss(tier, int(slots[0]), first, Outcome.NOT_FOUND)
                await store(tier, slots[:1], [first])
                await expect_miss(tier, int(slots[1]), second, Outcome.NOT_FOUND)
                # Handed out again: what lies in it is an earlier life's, though generation and identity agree.
                tier.free(slots[:1])
                [again] = tier.allocate(1).tolist()
                await expect_miss(tier, again, first, Outcome.NOT_FOUND)

        run(main())

    def test_a_slot_not_handed_out_cannot_be_written(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=2) as tier:
                [identity] = identity_chain(1)
                assert await tier.write([write_of(tier, 1, identity)]) == [Outcome.STALE]
                await expect_miss(tier, 1, identity, Outcome.NOT_FOUND)
                assert tier.num_free == 2

        run(main())

    def test_a_second_write_replaces_the_first(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=1) as tier:
                first, second = identity_chain(2)
                slots = tier.allocate(1)
                await store(tier, slots, [first])
                await store(tier, slots, [second])
                await expect_miss(tier, 0, first, Outcome.NOT_FOUND)
                await expect_page(tier, 0, second)

        run(main())

    def test_one_failing_page_leaves_the_others_alone(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=4) as tier:
                identities = identity_chain(4)
                slots = tier.allocate(4)
                tier.free(slots[2:3])
                slots = np.concatenate([slots[:2], tier.allocate(1), slots[3:]])
                pages = [
                    write_of(tier, slot, identity) for slot, identity in zip(slots.tolist(), identities, strict=True)
                ]
                stale = PageWrite(pages[2].slot, pages[2].generation - 1, pages[2].identity, pages[2].data)
                outcomes = await tier.write([*pages[:2], stale, pages[3]])
                assert outcomes == [Outcome.OK, Outcome.OK, Outcome.STALE, Outcome.OK]
                buffers = [np.full(tier.page_bytes, GUARD, np.uint8) for _ in slots]
                reads = [
                    PageRead(slot, tier.generation(slot), identity, buffer.data)
                    for slot, identity, buffer in zip(slots.tolist(), identities, buffers, strict=True)
                ]
                assert await tier.read(reads) == [Outcome.OK, Outcome.OK, Outcome.NOT_FOUND, Outcome.OK]
                for index in (0, 1, 3):
                    assert np.array_equal(buffers[index], stamp(identities[index], tier.page_bytes))

        run(main())

    # ---- requests that are wrong

    def test_a_wrong_buffer_is_refused_before_anything_is_touched(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=3) as tier:
                kept, other, wanted = identity_chain(3)
                slots = tier.allocate(3)
                await store(tier, slots[:2], [kept, other])
                size = tier.page_bytes
                before = [self.raw_page(tier, slot) for slot in range(3)]
                good = write_of(tier, int(slots[2]), wanted)
                wrong = {
                    "short": memoryview(bytearray(size - 1)),
                    "long": memoryview(bytearray(size + 1)),
                    "empty": memoryview(b""),
                    "strided": memoryview(bytearray(2 * size))[::2],
                }
                for buffer in wrong.values():
                    with pytest.raises(BadRequest):
                        await tier.write([good, PageWrite(int(slots[0]), 0, kept, buffer)])
                    into = np.full(size, GUARD, np.uint8)
                    with pytest.raises(BadRequest):
                        await tier.read(
                            [
                                PageRead(int(slots[0]), 0, kept, into.data),
                                PageRead(int(slots[1]), 0, other, buffer),
                            ]
                        )
                    assert np.all(into == GUARD)
                with pytest.raises(BadRequest):
                    await tier.read([PageRead(int(slots[0]), 0, kept, memoryview(bytes(size)))])
                assert [self.raw_page(tier, slot) for slot in range(3)] == before
                await expect_miss(tier, int(slots[2]), wanted, Outcome.NOT_FOUND)
                await expect_page(tier, int(slots[0]), kept)

        run(main())

    @pytest.mark.parametrize("slot", [-1, 2, 2**31 - 1])
    def test_a_slot_that_does_not_exist_is_refused(self, slot: int) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=2) as tier:
                [identity] = identity_chain(1)
                slots = tier.allocate(2)
                data = page_data(identity, tier.page_bytes)
                into = np.full(tier.page_bytes, GUARD, np.uint8)
                with pytest.raises(BadRequest):
                    tier.generation(slot)
                with pytest.raises(BadRequest):
                    await tier.write([PageWrite(int(slots[0]), 0, identity, data), PageWrite(slot, 0, identity, data)])
                with pytest.raises(BadRequest):
                    await tier.read([PageRead(slot, 0, identity, into.data)])
                await expect_miss(tier, int(slots[0]), identity, Outcome.NOT_FOUND)
                assert np.all(into == GUARD)

        run(main())

    def test_two_pages_for_one_slot_in_one_write_are_refused(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=2) as tier:
                first, second = identity_chain(2)
                slots = tier.allocate(1)
                with pytest.raises(BadRequest):
                    await tier.write([write_of(tier, int(slots[0]), identity) for identity in (first, second)])
                for identity in (first, second):
                    await expect_miss(tier, int(slots[0]), identity, Outcome.NOT_FOUND)

        run(main())

    @pytest.mark.parametrize("offset", [0, 1, 512])
    def test_nothing_outside_the_buffer_is_touched(self, offset: int) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.odd_page_bytes, capacity_pages=3) as tier:
                identities = identity_chain(3)
                slots = tier.allocate(3)
                for slot, identity in zip(slots.tolist(), identities, strict=True):
                    padded = np.full(offset + tier.page_bytes + 64, GUARD, np.uint8)
                    padded[offset : offset + tier.page_bytes] = stamp(identity, tier.page_bytes)
                    data = padded.data[offset : offset + tier.page_bytes]
                    assert await tier.write([PageWrite(slot, 0, identity, data)]) == [Outcome.OK]
                for slot, identity in zip(slots.tolist(), identities, strict=True):
                    padded = np.full(offset + tier.page_bytes + 64, GUARD, np.uint8)
                    into = padded.data[offset : offset + tier.page_bytes]
                    assert await tier.read([PageRead(slot, 0, identity, into)]) == [Outcome.OK]
                    assert np.array_equal(padded[offset : offset + tier.page_bytes], stamp(identity, tier.page_bytes))
                    assert np.all(padded[:offset] == GUARD)
                    assert np.all(padded[offset + tier.page_bytes :] == GUARD)

        run(main())

    # ---- at once

    def test_concurrent_writes_and_reads_do_not_mix(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=40) as tier:

                async def client(number: int) -> None:
                    rng = random.Random(number)
                    for turn in range(6):
                        identities = identity_chain(5, namespace=number, seed=turn)
                        slots = tier.allocate(5)
                        await store(tier, slots, identities)
                        await asyncio.gather(
                            *(
                                expect_page(tier, slot, identity)
                                for slot, identity in zip(slots.tolist(), identities, strict=True)
                            )
                        )
                        tier.free(slots[rng.sample(range(5), 5)])

                await asyncio.gather(*(client(number) for number in range(8)))
                assert tier.num_free == 40

        run(main())

    def test_a_slot_freed_under_a_copy_never_serves_another_page(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=1) as tier:
                for turn in range(20):
                    old, new = identity_chain(2, seed=turn)
                    slots = tier.allocate(1)
                    generation = tier.generation(0)
                    async with asyncio.TaskGroup() as group:
                        first = group.create_task(tier.write([write_of(tier, 0, old)]))
                        for _ in range(turn % 4):
                            await asyncio.sleep(0)
                        tier.free(slots)
                        slots = tier.allocate(1)
                        second = group.create_task(tier.write([write_of(tier, 0, new)]))
                    assert first.result() in ([Outcome.OK], [Outcome.STALE])
                    assert second.result() == [Outcome.OK]
                    assert (await fetch(tier, 0, old, generation=generation))[0] is Outcome.STALE
                    await expect_miss(tier, 0, old, Outcome.NOT_FOUND)
                    got, buffer = await fetch(tier, 0, new)
                    if got is Outcome.OK:
                        assert np.array_equal(buffer, stamp(new, tier.page_bytes))
                    else:
                        assert got in (Outcome.NOT_FOUND, Outcome.CORRUPT)
                    tier.free(slots)

        run(main())

    def test_a_page_under_a_write_is_not_readable(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=8) as tier:
                identities = identity_chain(8)
                slots = tier.allocate(8)
                pages = [
                    write_of(tier, slot, identity) for slot, identity in zip(slots.tolist(), identities, strict=True)
                ]
                async with asyncio.TaskGroup() as group:
                    writing = group.create_task(tier.write(pages))
                    while not writing.done():
                        await asyncio.sleep(0)
                        got, buffer = await fetch(tier, int(slots[7]), identities[7])
                        if got is Outcome.OK:
                            assert np.array_equal(buffer, stamp(identities[7], tier.page_bytes))
                        else:
                            assert got is Outcome.NOT_FOUND
                assert writing.result() == [Outcome.OK] * 8
                for slot, identity in zip(slots.tolist(), identities, strict=True):
                    await expect_page(tier, slot, identity)

        run(main())

    # ---- whole lives

    def test_the_whole_capacity_can_be_filled_twice(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=33) as tier:
                for turn in range(2):
                    identities = identity_chain(33, seed=turn)
                    slots = tier.allocate(33)
                    await store(tier, slots, identities)
                    for slot, identity in zip(slots.tolist(), identities, strict=True):
                        await expect_page(tier, slot, identity)
                    tier.free(slots)
                    assert tier.num_free == 33

        run(main())

    def test_closing_twice_is_closing_once(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=2) as tier:
                [identity] = identity_chain(1)
                slots = tier.allocate(1)
                await store(tier, slots, [identity])
                page = write_of(tier, int(slots[0]), identity)
                await tier.close()
                await tier.close()
                with pytest.raises(TierUnavailable):
                    tier.allocate(1)
                assert await tier.write([page]) == [Outcome.ERROR]
                assert (await fetch(tier, int(slots[0]), identity))[0] is Outcome.ERROR
                tier.free(slots)
                assert tier.num_free == 2

        run(main())

    def test_closing_waits_for_copies_under_way(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=16) as tier:
                identities = identity_chain(16)
                slots = tier.allocate(16)
                await store(tier, slots[:8], identities[:8])
                pages = [
                    write_of(tier, slot, identity) for slot, identity in zip(slots.tolist(), identities, strict=True)
                ]
                async with asyncio.TaskGroup() as group:
                    writing = group.create_task(tier.write(pages[8:]))
                    reading = group.create_task(fetch(tier, int(slots[0]), identities[0]))
                    await asyncio.sleep(0)
                    await tier.close()
                # A copy that had begun ended as if nothing had happened; one that had not says so.
                assert set(writing.result()) <= {Outcome.OK, Outcome.ERROR}
                got, buffer = reading.result()
                assert got in (Outcome.OK, Outcome.ERROR)
                if got is Outcome.OK:
                    assert np.array_equal(buffer, stamp(identities[0], tier.page_bytes))

        run(main())

    @pytest.mark.parametrize("seed", range(6))
    def test_random_operations_agree_with_a_dictionary(self, seed: int) -> None:
        """The model: a dictionary from each slot handed out to the page it holds, and how often each slot was freed."""

        async def main() -> None:
            rng = random.Random(seed)
            capacity = rng.choice([1, 7, 24])
            page_bytes = rng.choice([self.page_bytes, self.odd_page_bytes])
            known = identity_chain(12, seed=seed)
            async with self.make_tier(page_bytes=page_bytes, capacity_pages=capacity) as tier:
                held: dict[int, PageIdentity | None] = {}
                freed = [0] * capacity
                for _ in range(150):
                    match rng.choice(["allocate", "free", "write", "write", "read", "read", "read"]):
                        case "allocate":
                            wanted = rng.randint(1, max(1, capacity // 2))
                            if wanted > capacity - len(held):
                                with pytest.raises(NoRoom):
                                    tier.allocate(wanted)
                                continue
                            slots = tier.allocate(wanted).tolist()
                            assert len(set(slots)) == wanted
                            assert held.keys().isdisjoint(slots)
                            held.update(dict.fromkeys(slots))
                        case "free" if held:
                            chosen = rng.sample(sorted(held), rng.randint(1, len(held)))
                            tier.free(np.array(chosen, np.int32))
                            for slot in chosen:
                                del held[slot]
                                freed[slot] += 1
                        case "write":
                            chosen = rng.sample(range(capacity), rng.randint(1, capacity))
                            pages, expected = [], []
                            for slot in chosen:
                                identity = rng.choice(known)
                                generation = freed[slot] - rng.choice([0, 0, 0, 1])
                                good = slot in held and generation == freed[slot]
                                pages.append(PageWrite(slot, generation, identity, page_data(identity, page_bytes)))
                                expected.append(Outcome.OK if good else Outcome.STALE)
                            assert await tier.write(pages) == expected
                            for page, outcome in zip(pages, expected, strict=True):
                                if outcome is Outcome.OK:
                                    held[page.slot] = page.identity
                        case "read":
                            reads, wanted_outcomes = [], []
                            for _ in range(rng.randint(1, 2 * capacity)):
                                slot = rng.randrange(capacity)
                                truth = held.get(slot)
                                identity = truth if truth is not None and rng.random() < 0.7 else rng.choice(known)
                                generation = freed[slot] - rng.choice([0, 0, 0, 1])
                                into = np.full(page_bytes, GUARD, np.uint8)
                                reads.append((PageRead(slot, generation, identity, into.data), into))
                                if generation != freed[slot]:
                                    wanted_outcomes.append(Outcome.STALE)
                                else:
                                    wanted_outcomes.append(Outcome.OK if identity == truth else Outcome.NOT_FOUND)
                            assert await tier.read([read for read, _ in reads]) == wanted_outcomes
                            for (read, into), outcome in zip(reads, wanted_outcomes, strict=True):
                                if outcome is Outcome.OK:
                                    assert np.array_equal(into, stamp(read.identity, page_bytes))
                    assert tier.num_free + len(held) == tier.capacity_pages == capacity
                    assert [tier.generation(slot) for slot in range(capacity)] == freed
                for slot in range(capacity):
                    truth = held.get(slot)
                    if truth is None:
                        await expect_miss(tier, slot, known[0], Outcome.NOT_FOUND)
                    else:
                        await expect_page(tier, slot, truth)

        run(main())
