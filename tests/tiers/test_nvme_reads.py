"""A page is given out only if everything about it agrees: bits, places, lives and identities on disk are changed."""

import asyncio
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hicache.tier import Outcome, PageRead, PageWrite
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.findings import OUTCOMES, Finding
from hicache.tiers.nvme.header import PageHeader, decode_page_header, encode_page_header
from hicache.tiers.nvme.io import FileIO, aligned_buffer
from tests.stamps import identity_chain
from tests.tiers.contract import expect_miss, expect_page, fetch, page_data, run, store
from tests.tiers.faulty_files import Fault, HeldFiles
from tests.tiers.nvme import (
    SMALL,
    data_faults,
    read_layers,
    read_raw,
    shape_of,
    small_tier,
    write_all,
    write_raw,
)

# ---- bits at rest (I04)


@pytest.mark.parametrize("where", ["fixed part", "tokens and checksums", "zeros", "payload"])
def test_i04_a_flipped_bit_on_disk_is_a_miss(where: str) -> None:
    header_end = SMALL.header_bytes
    sums_end = 256 + SMALL.token_bytes + 4 * SMALL.num_layers
    ranges = {
        "fixed part": range(256),
        "tokens and checksums": range(256, sums_end),
        "zeros": range(sums_end, header_end, 97),
        "payload": range(header_end, header_end + SMALL.page_bytes, 241),
    }

    async def main() -> None:
        async with small_tier(SMALL, 1) as tier:
            [identity] = identity_chain(1)
            slots = tier.allocate(1)
            await store(tier, slots, [identity])
            places = [*ranges[where]] + ([header_end - 4, header_end - 1] if where == "zeros" else [])
            for turn, place in enumerate(places):
                [byte] = read_raw(tier, 0, place, 1)
                write_raw(tier, 0, place, bytes([byte ^ 1 << turn % 8]))
                await expect_miss(tier, 0, identity, Outcome.CORRUPT)
                write_raw(tier, 0, place, bytes([byte]))
            await expect_page(tier, 0, identity)
            finding = "bad_payload" if where == "payload" else "bad_header"
            assert tier.counters()[f"read.{finding}"] == len(places)

    run(main())


@pytest.mark.faults
def test_i04_every_bit_of_a_header_flipped_on_its_way_is_a_miss() -> None:
    """All 32,768 bits, and as many of the payload: flipped as they come from the device, one in each read."""

    class Flipping(FileIO):
        bits: list[int]

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            count = super().preadv(fd, buffers, offset)
            place, bit = divmod(self.bits.pop(), 8)
            for buffer in buffers:
                if place < len(buffer):
                    buffer[place] ^= 1 << bit
                    return count
                place -= len(buffer)
            raise AssertionError("no such bit")

    async def main() -> None:
        files = Flipping()
        files.bits = [0]
        async with small_tier(SMALL, 1, files=files) as tier:
            [identity] = identity_chain(1)
            await store(tier, tier.allocate(1), [identity])
            into = [memoryview(bytearray(tier.page_bytes)) for _ in range(128)]
            header_bits = 8 * SMALL.header_bytes
            for start in range(0, 2 * header_bits, 128):
                # Beyond the header, bits of the payload, spread over all of it.
                files.bits = [
                    bit if bit < header_bits else header_bits + (bit - header_bits) * 8 * tier.page_bytes // header_bits
                    for bit in range(start, start + 128)
                ]
                outcomes = await tier.read([PageRead(0, 0, identity, buffer) for buffer in into])
                assert outcomes == [Outcome.CORRUPT] * 128, f"bits from {start}"
            assert tier.counters()["read.bad_header"] == header_bits

    run(main())


# ---- whole headers that say something else


def forged(tier: NvmeTier, header: PageHeader) -> None:
    """Put a header with a right checksum before the page in slot 1."""
    block = aligned_buffer(SMALL.header_bytes)
    encode_page_header(header, block)
    write_raw(tier, 1, 0, bytes(block))


def test_a_whole_header_that_says_anything_else_is_the_miss_that_the_format_names() -> None:
    [mine, other] = identity_chain(2)
    cases: dict[str, tuple[Callable[[PageHeader], PageHeader], Finding]] = {
        "store": (lambda h: replace(h, store=bytes(16)), Finding.MISPLACED),
        "segment": (lambda h: replace(h, segment=h.segment + 1), Finding.MISPLACED),
        "slot": (lambda h: replace(h, slot=h.slot + 1), Finding.MISPLACED),
        "older": (lambda h: replace(h, generation=h.generation - 1), Finding.OLDER_LIFE),
        "newer": (lambda h: replace(h, generation=h.generation + 1), Finding.OLDER_LIFE),
        "identity": (lambda h: replace(h, identity=other), Finding.OTHER_PAGE),
        "namespace": (lambda h: replace(h, identity=replace(mine, namespace=bytes(32))), Finding.OTHER_PAGE),
        "prefix": (lambda h: replace(h, identity=replace(mine, prefix=bytes(32))), Finding.OTHER_PAGE),
        "tokens": (lambda h: replace(h, identity=replace(mine, tokens=other.tokens)), Finding.OTHER_PAGE),
        "fewer tokens": (lambda h: replace(h, identity=replace(mine, tokens=mine.tokens[:8])), Finding.OTHER_PAGE),
        "length": (lambda h: replace(h, payload_bytes=h.payload_bytes - 1), Finding.BAD_HEADER),
        "fewer layers": (lambda h: replace(h, layer_sums=h.layer_sums[1:]), Finding.BAD_HEADER),
        "payload checksum": (lambda h: replace(h, payload_sum=h.payload_sum ^ 1), Finding.OTHER_PAYLOAD),
    }

    async def main() -> None:
        async with small_tier(SMALL, 2) as tier:
            tier.free(tier.allocate(2))
            tier.allocate(2)
            await store(tier, np.array([1], np.int32), [mine])
            whole = read_raw(tier, 1, 0, SMALL.header_bytes)
            header = decode_page_header(memoryview(whole))
            assert header is not None
            assert (header.slot, header.generation, header.identity) == (1, 1, mine)
            for name, (change, finding) in cases.items():
                forged(tier, change(header))
                before = tier.counters().get(f"read.{finding.value}", 0)
                await expect_miss(tier, 1, mine, OUTCOMES[finding])
                assert tier.counters()[f"read.{finding.value}"] == before + 1, name
            write_raw(tier, 1, 0, whole)
            await expect_page(tier, 1, mine)

    run(main())


def test_the_same_page_written_twice_is_not_served_from_a_lost_second_write() -> None:
    files = data_faults()

    async def main() -> None:
        async with small_tier(SMALL, 1, files=files) as tier:
            [identity] = identity_chain(1)
            slots = tier.allocate(1)
            await store(tier, slots, [identity])
            files.arm(Fault.LOST, 1)
            newer = memoryview(bytes(tier.page_bytes))
            assert await tier.write([PageWrite(0, 0, identity, newer)]) == [Outcome.OK]
            await expect_miss(tier, 0, identity, Outcome.CORRUPT)
            assert tier.counters()["read.other_payload"] == 1

    run(main())


@pytest.mark.parametrize("aligned", [False, True])
def test_what_lies_behind_a_page_in_its_last_block_is_zeros(aligned: bool) -> None:
    """Nothing of another page, or of this process's memory, comes along."""

    async def main() -> None:
        shape = shape_of(10_000)
        async with small_tier(shape, 2, write_lanes=1) as tier:
            for turn in range(3):
                identities = identity_chain(2, seed=turn)
                slots = tier.allocate(2)
                writes = []
                for slot, identity in zip(slots.tolist(), identities, strict=True):
                    memory = aligned_buffer(3 * 4096)
                    data = memory[:10_000] if aligned else memory[1:10_001]
                    data[:] = page_data(identity, 10_000)
                    writes.append(PageWrite(slot, tier.generation(slot), identity, data))
                assert await tier.write(writes) == [Outcome.OK] * 2
                for slot in slots.tolist():
                    assert read_raw(tier, slot, 4096 + 10_000, 3 * 4096 - 10_000) == bytes(3 * 4096 - 10_000)
                for slot in slots.tolist():
                    write_raw(tier, slot, 4096 + 10_000, b"\xff" * (3 * 4096 - 10_000))
                tier.free(slots)

    run(main())


def test_after_a_failed_second_write_neither_page_is_served() -> None:
    """C10: what lies in the slot then is unknown, so it is no page."""
    files = data_faults()

    async def main() -> None:
        async with small_tier(SMALL, 1, files=files) as tier:
            first, second = identity_chain(2)
            slots = tier.allocate(1)
            await store(tier, slots, [first])
            files.arm(Fault.EIO, 1)
            assert await write_all(tier, [0], [second]) == [Outcome.ERROR]
            for identity in (first, second):
                await expect_miss(tier, 0, identity, Outcome.NOT_FOUND)
            assert await read_layers(tier, [0], [first]) == [Outcome.NOT_FOUND] * 3
            await store(tier, slots, [second])
            await expect_page(tier, 0, second)

    run(main())


# ---- lost and misdirected writes, in particular


def test_a_lost_write_is_a_miss_in_either_life_of_the_slot() -> None:
    """C03, as far as it concerns an index in memory: bytes of an earlier life are whole, and valid, and not served."""
    files = data_faults()

    async def main() -> None:
        async with small_tier(SMALL, 2, files=files) as tier:
            first, second, third = identity_chain(3)
            slots = tier.allocate(2)
            files.arm(Fault.LOST, 1)
            await store(tier, slots[:1], [first])
            await expect_miss(tier, 0, first, Outcome.CORRUPT)
            await store(tier, slots[:1], [second])
            await expect_page(tier, 0, second)
            tier.free(slots[:1])
            [again] = tier.allocate(1).tolist()
            files.arm(Fault.LOST, 1)
            await store(tier, np.array([again], np.int32), [third])
            await expect_miss(tier, again, third, Outcome.STALE)
            await expect_miss(tier, again, second, Outcome.NOT_FOUND)
            assert (await fetch(tier, again, second, generation=0))[0] is Outcome.STALE
            # The removed page asked for again under the new life: its bytes are still there, whole, of the old one.
            files.arm(Fault.LOST, 1)
            await store(tier, np.array([again], np.int32), [second])
            await expect_miss(tier, again, second, Outcome.STALE)
            assert tier.counters()["read.older_life"] == 2
            tier.free(slots)
            assert tier.num_free == 2

    run(main())


def test_a_misdirected_write_is_a_miss_for_both_its_victims() -> None:
    files = data_faults()

    async def main() -> None:
        async with small_tier(SMALL, 4, files=files) as tier:
            identities = identity_chain(4)
            slots = tier.allocate(4)
            await store(tier, slots[:3], identities[:3])
            files.arm(Fault.MISDIRECTED, 1)
            await store(tier, slots[3:], identities[3:])
            await expect_miss(tier, 3, identities[3], Outcome.CORRUPT)
            await expect_miss(tier, 2, identities[2], Outcome.CORRUPT)
            assert tier.counters()["read.misplaced"] == 1
            for slot in (0, 1):
                await expect_page(tier, slot, identities[slot])
            await expect_miss(tier, 2, identities[3], Outcome.NOT_FOUND)

    run(main())


# ---- other bytes in the place


def test_a_page_of_another_store_left_in_the_place_is_not_served(tmp_path: Path) -> None:
    """Same slot, same generation, same identity, of an earlier run: only the store's id tells them apart."""
    [identity] = identity_chain(1)

    async def main() -> None:
        async with small_tier(SMALL, 1, directory=tmp_path / "other") as tier:
            await store(tier, tier.allocate(1), [identity])
            old = read_raw(tier, 0, 0, SMALL.slot_bytes)
        async with small_tier(SMALL, 1, directory=tmp_path / "store") as tier:
            await store(tier, tier.allocate(1), [identity])
            write_raw(tier, 0, 0, old)
            await expect_miss(tier, 0, identity, Outcome.CORRUPT)
            assert tier.counters()["read.misplaced"] == 1

    run(main())


def test_layers_are_verified_each_by_its_own_checksum() -> None:
    async def main() -> None:
        async with small_tier(SMALL, 2) as tier:
            identities = identity_chain(2)
            slots = tier.allocate(2)
            await store(tier, slots, identities)
            for layer, (start, stop) in enumerate(SMALL.layer_ranges):
                for place in (start, stop - 1):
                    [byte] = read_raw(tier, 0, SMALL.header_bytes + place, 1)
                    write_raw(tier, 0, SMALL.header_bytes + place, bytes([byte ^ 16]))
                    outcomes = await read_layers(tier, [0, 1], identities)
                    expected = [Outcome.OK] * 6
                    expected[layer] = Outcome.CORRUPT
                    assert outcomes == expected
                    write_raw(tier, 0, SMALL.header_bytes + place, bytes([byte]))
            # A damaged header does not concern a layer, but does the page.
            write_raw(tier, 0, 300, struct.pack("<I", 0xFFFFFFFF))
            assert await read_layers(tier, [0], identities[:1]) == [Outcome.OK] * 3
            await expect_miss(tier, 0, identities[0], Outcome.CORRUPT)

    run(main())


def test_a_write_does_not_read_what_its_caller_must_not_change() -> None:
    """The bytes that are summed are the bytes that are written: who breaks the rule gets a miss, not garbage."""
    files = HeldFiles("pwritev")

    async def main() -> None:
        async with small_tier(SMALL, 1, files=files, write_lanes=1) as tier:
            [identity] = identity_chain(1)
            tier.allocate(1)
            data = aligned_buffer(tier.page_bytes)
            data[:] = page_data(identity, tier.page_bytes)
            files.hold()
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(tier.write([PageWrite(0, 0, identity, data)]))
                await asyncio.to_thread(files.arrived.acquire)
                data[7] ^= 1
                files.let_go()
            assert writing.result() == [Outcome.OK]
            await expect_miss(tier, 0, identity, Outcome.CORRUPT)

    run(main())
