"""Checksums that travel with a page: taken where it enters host memory, and compared when it comes back from a disk."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from hicache.clock import SystemClock
from hicache.errors import BadRequest
from hicache.movers import Lane, PageMove, Priority
from hicache.tier import Outcome, PageIdentity, PageRead, PageSums, PageWrite, Slots, Tier
from hicache.tiers.device import DeviceTier
from hicache.tiers.host import HostTier
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.geometry import PageShape
from hicache.tiers.nvme.striped import StripedTier
from hicache.tiers.sums import page_sums, payload_checksum, pieces_checksum, unpacked, whole_sum
from tests.stamps import identity_chain, stamp
from tests.tiers.contract import expect_page, fetch, run, store
from tests.tiers.nvme import capacity_for
from tests.tiers.real_kv import real_layout, real_pages

LAYOUT = real_layout(16)
SHAPE = PageShape.of(LAYOUT)
CODECS = ("none", "exponent-zstd")
PAGES = [page.reshape(-1).view(np.uint8) for page in real_pages(16)]
"""Four pages of real KV, which every codec takes."""
IDENTITIES = identity_chain(len(PAGES), page_size=16)


def sums_of(page: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> PageSums:
    """What the checksums of a page are, one hash at a time."""
    parts = [page[start:stop] for start, stop in SHAPE.layer_ranges]
    return b"".join((xxh3_64_intdigest(part.tobytes()) % 2**32).to_bytes(4, "little") for part in (*parts, page))


class World:
    """A tier of each kind, and lanes between them."""

    def __init__(self, device: DeviceTier, host: HostTier, nvme: Tier, group: asyncio.TaskGroup) -> None:
        self.device, self.host, self.nvme = device, host, nvme
        self.lanes: dict[tuple[Tier, Tier], Lane] = {}
        for source, target in ((device, host), (host, nvme), (nvme, host)):
            self.lanes[source, target] = lane = Lane(source, target, clock=SystemClock())
            group.create_task(lane.run())

    async def move(self, source: Tier, target: Tier, slots: Slots) -> tuple[Slots, list[Outcome | None]]:
        """Copy the pages, of `IDENTITIES`, into slots of their own."""
        targets = target.allocate(len(slots))
        pages = [
            PageMove(before, source.generation(before), after, target.generation(after), identity)
            for before, after, identity in zip(slots.tolist(), targets.tolist(), IDENTITIES, strict=True)
        ]
        transfer = await self.lanes[source, target].submit(pages, priority=Priority.WRITE_BACK)
        return targets, list((await transfer.wait()).outcomes)

    def sums(self, slots: Slots) -> list[PageSums | None]:
        return [self.host.sums(slot, self.host.generation(slot)) for slot in slots.tolist()]


@asynccontextmanager
async def world(directory: Path, codec: str = "none", *, num_directories: int = 1) -> AsyncIterator[World]:
    shape = PageShape.of(LAYOUT, codec=codec)
    capacity_bytes, segment_bytes = capacity_for(shape, 8, slots_per_segment=4)
    options: dict[str, Any] = {"layout": LAYOUT, "segment_bytes": segment_bytes, "codec": codec}
    device = DeviceTier(LAYOUT, capacity_pages=8)
    host = HostTier(
        page_bytes=LAYOUT.page_bytes, capacity_pages=16, layer_bytes=SHAPE.layer_bytes, huge_pages=False
    )
    nvme: NvmeTier | StripedTier
    if num_directories == 1:
        nvme = NvmeTier.open(directory / "store", capacity_bytes=capacity_bytes, **options)
    else:
        stores = [directory / f"store{number}" for number in range(num_directories)]
        nvme = StripedTier.open(stores, capacity_bytes=num_directories * capacity_bytes, **options)
    try:
        async with asyncio.TaskGroup() as group:
            all_tiers = World(device, host, nvme, group)
            yield all_tiers
            for lane in all_tiers.lanes.values():
                await lane.close(drain_until=None)
    finally:
        for tier in (nvme, host, device):
            await tier.close()


async def fill(tier: Tier, slots: Slots, pages: Sequence[np.ndarray[tuple[int], np.dtype[np.uint8]]] = PAGES) -> None:
    writes = [
        PageWrite(slot, tier.generation(slot), identity, page.data)
        for slot, identity, page in zip(slots.tolist(), IDENTITIES, pages, strict=True)
    ]
    assert await tier.write(writes) == [Outcome.OK] * len(writes)


def read_of(tier: Tier, slot: int, identity: PageIdentity) -> PageRead:
    """A read that asks for checksums, too."""
    return PageRead(slot, tier.generation(slot), identity, np.empty(tier.page_bytes, np.uint8).data, bytearray())


# ---- what they are, and who keeps them


def test_there_is_one_of_each_layer_and_one_of_the_page() -> None:
    page = PAGES[0]
    sums = page_sums(page.data, SHAPE.layer_ranges)
    assert sums == sums_of(page)
    assert len(unpacked(sums)) == SHAPE.num_layers + 1
    assert unpacked(sums)[-1] == whole_sum(sums) == payload_checksum(page.data)
    assert pieces_checksum([page.data[:7], page.data[7:7], page.data[7:]]) == whole_sum(sums)


def test_the_host_keeps_them_for_one_life_of_a_slot() -> None:
    async def main() -> None:
        host = HostTier(page_bytes=3_000, capacity_pages=2, layer_bytes=(1_000, 2_000), huge_pages=False)
        try:
            assert host.num_sums == 3
            first, second = identity_chain(2)
            slots = host.allocate(2)
            host.view(0)[:] = stamp(first, 3_000).data
            sums = host.take_sums(0)
            assert host.sums(0, 0) is None
            assert host.declare(0, 0, first, sums) is Outcome.OK
            assert host.sums(0, 0) == sums == page_sums(stamp(first, 3_000).data, ((0, 1_000), (1_000, 3_000)))
            assert host.sums(0, 1) is None
            # A page that was declared without leaves none behind that are not its own.
            assert host.declare(0, 0, second) is Outcome.OK
            assert host.sums(0, 0) is None
            assert host.declare(0, 0, first, sums) is Outcome.OK
            # Written or read, they go with the bytes.
            write = PageWrite(1, 0, second, stamp(second, 3_000).data, sums)
            assert await host.write([write]) == [Outcome.OK]
            read = read_of(host, 1, second)
            assert await host.read([read]) == [Outcome.OK]
            assert bytes(read.sums or b"") == sums
            host.free(slots)
            assert host.sums(0, 0) is host.sums(0, 1) is None
        finally:
            await host.close()

    run(main())


def test_checksums_of_another_number_are_refused_before_anything_is_touched(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as tiers:
            for tier in (tiers.host, tiers.nvme):
                [slot] = tier.allocate(1).tolist()
                good = PageWrite(slot, 0, IDENTITIES[0], PAGES[0].data, sums_of(PAGES[0]))
                for bad in (b"", sums_of(PAGES[0])[4:], sums_of(PAGES[0]) + bytes(4)):
                    with pytest.raises(BadRequest) as caught:
                        await tier.write([replace(good, sums=bad)])
                    assert caught.value.field == "sums"
                outcome, _ = await fetch(tier, slot, IDENTITIES[0])
                assert outcome is Outcome.NOT_FOUND
                assert await tier.write([good]) == [Outcome.OK]
            with pytest.raises(BadRequest) as caught:
                tiers.host.declare(0, 0, IDENTITIES[0], bytes(4))
            assert caught.value.field == "sums"

    run(main())


@pytest.mark.parametrize("layer_bytes", [(), (1_000, 1_999), (1_000, 2_001), (0, 3_000), (4_000, -1_000)])
def test_layers_that_are_no_page_are_refused(layer_bytes: tuple[int, ...]) -> None:
    with pytest.raises(BadRequest) as caught:
        HostTier(page_bytes=3_000, capacity_pages=1, layer_bytes=layer_bytes, huge_pages=False)
    assert caught.value.field == "layer_bytes"


def test_a_host_that_knows_no_layers_keeps_none() -> None:
    async def main() -> None:
        host = HostTier(page_bytes=3_000, capacity_pages=1, huge_pages=False)
        try:
            assert host.num_sums == 0
            host.allocate(1)
            [identity] = identity_chain(1)
            with pytest.raises(BadRequest):
                host.declare(0, 0, identity, bytes(4))
            await store(host, np.array([0], np.int32), [identity])
            assert host.sums(0, 0) is None
            await expect_page(host, 0, identity)
        finally:
            await host.close()

    run(main())


# ---- where they come from, and where they go


@pytest.mark.parametrize("num_directories", [1, 2])
@pytest.mark.parametrize("codec", CODECS)
def test_they_come_with_a_page_from_every_side(tmp_path: Path, codec: str, num_directories: int) -> None:
    async def main() -> None:
        async with world(tmp_path, codec, num_directories=num_directories) as tiers:
            ok = [Outcome.OK] * len(PAGES)
            on_device = tiers.device.allocate(len(PAGES))
            await fill(tiers.device, on_device)
            # Taken by the thread that copies a page out of the device,
            in_host, outcomes = await tiers.move(tiers.device, tiers.host, on_device)
            assert outcomes == ok
            assert tiers.sums(in_host) == [sums_of(page) for page in PAGES]
            # kept on the disk or, of what a codec has changed, taken again,
            on_disk, outcomes = await tiers.move(tiers.host, tiers.nvme, in_host)
            assert outcomes == ok
            tiers.host.free(in_host)
            back, outcomes = await tiers.move(tiers.nvme, tiers.host, on_disk)
            assert outcomes == ok
            assert tiers.sums(back) == [sums_of(page) for page in PAGES]
            # and left out where nobody asked.
            for slot, identity in zip(on_disk.tolist(), IDENTITIES, strict=True):
                outcome, buffer = await fetch(tiers.nvme, slot, identity)
                assert outcome is Outcome.OK
                assert any(np.array_equal(buffer, page) for page in PAGES)

    run(main())


def test_a_page_that_comes_without_gets_its_own_where_it_is_written(tmp_path: Path) -> None:
    async def main() -> None:
        async with world(tmp_path) as tiers:
            slots = tiers.nvme.allocate(len(PAGES))
            await fill(tiers.nvme, slots)
            reads = [
                read_of(tiers.nvme, slot, identity) for slot, identity in zip(slots.tolist(), IDENTITIES, strict=True)
            ]
            assert await tiers.nvme.read(reads) == [Outcome.OK] * len(PAGES)
            assert [bytes(read.sums or b"") for read in reads] == [sums_of(page) for page in PAGES]

    run(main())


# ---- what they are for


@pytest.mark.parametrize("place", [0, 12_345, LAYOUT.page_bytes - 1])
@pytest.mark.parametrize("codec", CODECS)
def test_a_byte_that_flips_in_host_memory_is_found(tmp_path: Path, codec: str, place: int) -> None:
    """Its page is refused where it is encoded, or else when it is read back; the others are not concerned."""

    async def main() -> None:
        async with world(tmp_path, codec) as tiers:
            on_device = tiers.device.allocate(len(PAGES))
            await fill(tiers.device, on_device)
            in_host, _ = await tiers.move(tiers.device, tiers.host, on_device)
            tiers.host.view(int(in_host[1]))[place] ^= 0x10
            on_disk, outcomes = await tiers.move(tiers.host, tiers.nvme, in_host)
            if codec == "none":
                assert outcomes == [Outcome.OK] * len(PAGES)
                back, outcomes = await tiers.move(tiers.nvme, tiers.host, on_disk)
                assert outcomes[1] is Outcome.CORRUPT
                assert (await fetch(tiers.host, int(back[1]), IDENTITIES[1]))[0] is Outcome.NOT_FOUND
                assert tiers.sums(back)[1] is None
                assert isinstance(tiers.nvme, NvmeTier)
                assert tiers.nvme.counters()["read.bad_payload"] == 1
            else:
                assert outcomes[1] is Outcome.CORRUPT
                assert (await fetch(tiers.nvme, int(on_disk[1]), IDENTITIES[1]))[0] is Outcome.NOT_FOUND
                assert isinstance(tiers.nvme, NvmeTier)
                assert tiers.nvme.counters()["write.spoilt"] == 1
            assert [outcomes[index] for index in (0, 2, 3)] == [Outcome.OK] * 3

    run(main())


def test_a_byte_that_flips_on_the_second_way_down_is_found_too(tmp_path: Path) -> None:
    """What was read back and verified is not hashed again on its way down: the flip would be sealed with it."""

    async def main() -> None:
        async with world(tmp_path) as tiers:
            in_host = tiers.host.allocate(len(PAGES))
            await fill(tiers.host, in_host)  # from an engine, without checksums
            on_disk, _ = await tiers.move(tiers.host, tiers.nvme, in_host)
            back, outcomes = await tiers.move(tiers.nvme, tiers.host, on_disk)
            assert outcomes == [Outcome.OK] * len(PAGES)
            tiers.host.view(int(back[2]))[777] ^= 1
            tiers.nvme.free(on_disk)
            again, outcomes = await tiers.move(tiers.host, tiers.nvme, back)
            assert outcomes == [Outcome.OK] * len(PAGES)
            for index, (slot, identity) in enumerate(zip(again.tolist(), IDENTITIES, strict=True)):
                outcome, _ = await fetch(tiers.nvme, slot, identity)
                assert outcome is (Outcome.CORRUPT if index == 2 else Outcome.OK)

    run(main())
