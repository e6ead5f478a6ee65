"""Several NVMe stores as one tier: the contract of all tiers, spreading, failing stores, and restarts."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from hicache.clock import SystemClock
from hicache.errors import BadRequest, NoRoom, TierUnavailable
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.tier import (
    NVME,
    LayerRead,
    Outcome,
    PageIdentity,
    RecoveredRun,
    SupportsCounters,
    SupportsDurability,
    SupportsLayerRead,
    Tier,
)
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.geometry import PageShape
from hicache.tiers.nvme.io import FileIO
from hicache.tiers.nvme.striped import StripedTier
from tests.stamps import identity_chain, stamp
from tests.tiers.contract import TierContract, expect_page, run, store, write_of
from tests.tiers.faulty_files import Fault
from tests.tiers.nvme import PAGE_SIZE, SMALL, capacity_for, data_faults, read_raw, shape_of

NAMESPACE = Namespace(
    model="sha256:01",
    layout=KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=8, dtype=KVDtype.FLOAT32, page_size=PAGE_SIZE),
)


def open_store(directory: Path, shape: PageShape, num_pages: int, files: FileIO | None = None) -> NvmeTier:
    capacity_bytes, segment_bytes = capacity_for(shape, num_pages, slots_per_segment=min(64, num_pages))
    return NvmeTier.open(
        directory,
        layout=shape,
        capacity_bytes=capacity_bytes,
        segment_bytes=segment_bytes,
        files=files,
        is_whole=False,
        read_lanes=4,
        write_lanes=4,
        layer_lanes=2,
    )


@asynccontextmanager
async def striped(
    directory: Path,
    *num_pages: int,
    shape: PageShape = SMALL,
    files: tuple[FileIO | None, ...] = (),
    stripe_pages: int | None = None,
) -> AsyncIterator[StripedTier]:
    """A tier over stores of so many pages each, in `directory`."""
    doubles = files or (None,) * len(num_pages)
    stores = [
        open_store(directory / f"store-{number}", shape, count, double)
        for number, (count, double) in enumerate(zip(num_pages, doubles, strict=True))
    ]
    tier = StripedTier(stores, clock=SystemClock(), stripe_pages=stripe_pages)
    try:
        yield tier
    finally:
        await tier.close()


class TestStripedContract(TierContract):
    @asynccontextmanager
    async def make_tier(self, *, page_bytes: int, capacity_pages: int) -> AsyncIterator[StripedTier]:
        parts = [capacity_pages] if capacity_pages == 1 else [capacity_pages // 2, capacity_pages - capacity_pages // 2]
        with tempfile.TemporaryDirectory() as directory:
            async with striped(Path(directory), *parts, shape=shape_of(page_bytes)) as tier:
                yield tier

    def raw_page(self, tier: Tier, slot: int) -> bytes:
        assert isinstance(tier, StripedTier)
        number, its_slot = tier._place(slot)
        member = tier.stores[number]
        return read_raw(member, its_slot, member._shape.header_bytes, tier.page_bytes)


def identities(num_pages: int) -> list[PageIdentity]:
    """A chain of pages of `NAMESPACE`."""
    chain: list[PageIdentity] = []
    prefix = NAMESPACE.digest
    for page in identity_chain(num_pages, page_size=PAGE_SIZE):
        chain.append(PageIdentity(NAMESPACE.digest, prefix, page.tokens))
        prefix = chain[-1].chain
    return chain


def layer_reads(
    tier: StripedTier, slots: list[int], chain: list[PageIdentity]
) -> tuple[list[LayerRead], list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]]:
    """A read of every layer of the pages; and for each the buffer it fills, and what it should then hold."""
    reads, expected = [], []
    for slot, identity in zip(slots, chain, strict=True):
        page = stamp(identity, tier.page_bytes)
        for layer, (start, stop) in enumerate(SMALL.layer_ranges):
            into = np.zeros(stop - start, np.uint8)
            reads.append(LayerRead(slot, tier.generation(slot), identity, layer, into.data))
            expected.append((into, page[start:stop]))
    return reads, expected


def pages_of(runs: list[RecoveredRun]) -> int:
    return sum(len(found.slots) for found in runs)


def test_it_has_the_powers_of_a_store(tmp_path: Path) -> None:
    async def main() -> None:
        async with striped(tmp_path, 4, 4) as tier:
            assert isinstance(tier, SupportsLayerRead)
            assert isinstance(tier, SupportsDurability)
            assert isinstance(tier, SupportsCounters)
            assert tier.tier_id == NVME
            assert tier.total_bytes == sum(each.total_bytes for each in tier.stores)

    run(main())


def test_pages_are_spread_by_free_room(tmp_path: Path) -> None:
    async def main() -> None:
        async with striped(tmp_path, 3000, 1000, shape=shape_of(4096), stripe_pages=10) as tier:
            slots = tier.allocate(400)
            share = int((slots < 3000).sum())
            assert 280 <= share <= 320
            # Stripes are neighbours.
            assert int((np.diff(slots) == 1).sum()) >= 360

    run(main())


def test_a_faster_store_gets_more(tmp_path: Path) -> None:
    async def main() -> None:
        async with striped(tmp_path, 1000, 1000, shape=shape_of(4096), stripe_pages=10) as tier:
            tier._measure(0, 1024, 0.001)
            tier._measure(1, 1024, 0.004)
            slots = tier.allocate(200)
            assert 140 <= int((slots < 1000).sum()) <= 180

    run(main())


def test_a_tier_fills_to_its_last_slot(tmp_path: Path) -> None:
    async def main() -> None:
        async with striped(tmp_path, 5, 2, 1) as tier:
            slots = tier.allocate(8)
            assert sorted(slots.tolist()) == list(range(8))
            assert tier.num_free == 0
            with pytest.raises(NoRoom):
                tier.allocate(1)
            tier.free(slots)
            assert (tier.num_free, tier.capacity_pages) == (8, 8)

    run(main())


def test_layers_come_from_every_store(tmp_path: Path) -> None:
    async def main() -> None:
        async with striped(tmp_path, 4, 4) as tier:
            chain = identities(8)
            slots = tier.allocate(8)
            await store(tier, slots, chain)
            reads, expected = layer_reads(tier, slots.tolist(), chain)
            outcomes = await asyncio.to_thread(tier.start_layer_reads(reads).wait, 60)
            assert outcomes == [Outcome.OK] * len(reads)
            assert all(np.array_equal(into, right) for into, right in expected)

    run(main())


def test_bad_arguments_touch_no_store(tmp_path: Path) -> None:
    async def main() -> None:
        async with striped(tmp_path, 2, 2) as tier:
            chain = identities(4)
            slots = tier.allocate(4).tolist()
            pages = [write_of(tier, slot, identity) for slot, identity in zip(slots, chain, strict=True)]
            short = type(pages[3])(slots[3], 0, chain[3], memoryview(bytes(7)))
            with pytest.raises(BadRequest, match="buffer"):
                await tier.write([*pages[:3], short])
            assert tier.accepted == 0
            with pytest.raises(BadRequest, match="slot"):
                tier.generation(4)

    run(main())


def test_a_store_that_is_down_gets_no_pages_and_counts_no_room(tmp_path: Path) -> None:
    broken = data_faults()

    async def main() -> None:
        async with striped(tmp_path, 8, 8, files=(None, broken)) as tier:
            chain = identities(16)
            slots = tier.allocate(16)
            broken.arm(Fault.EIO, 1, lasting=True)
            writes = [write_of(tier, slot, identity) for slot, identity in zip(slots.tolist(), chain, strict=True)]
            outcomes = await tier.write(writes)
            expected = [Outcome.OK if slot < 8 else Outcome.ERROR for slot in slots.tolist()]
            assert outcomes == expected
            assert tier.stores[1].down is not None
            assert tier.down is None
            held = int((slots >= 8).sum())
            assert tier.capacity_pages == 8 + held
            first = slots[slots < 8]
            tier.free(first)
            again = tier.allocate(len(first))
            assert (again < 8).all()
            await store(tier, again, chain[: len(again)])
            for slot, identity in zip(again.tolist(), chain, strict=False):
                await expect_page(tier, slot, identity)

    run(main())


def test_a_restart_links_what_lies_on_several_stores(tmp_path: Path) -> None:
    chain = identities(12)

    async def fill() -> None:
        async with striped(tmp_path, 8, 8, stripe_pages=1) as tier:
            tier.remember(NAMESPACE.digest, NAMESPACE.encode())
            slots = tier.allocate(12)
            assert len(set((slots >= 8).tolist())) == 2
            await store(tier, slots, chain)
            number = tier.accepted
            await tier.sync(number, deadline=SystemClock().monotonic() + 30)
            assert tier.durable >= number

    async def reopen() -> None:
        async with striped(tmp_path, 8, 8) as tier:
            runs = list(tier.recovered())
            assert tier.recovered() == []
            assert pages_of(runs) == 12 == tier.recovery.num_pages
            [found] = runs
            assert found.prefix == NAMESPACE.digest
            assert found.chain == chain[-1].chain
            assert found.namespace == NAMESPACE.encode()
            for slot, identity in zip(found.slots.tolist(), chain, strict=True):
                await expect_page(tier, slot, identity)
            assert tier.num_free == 4

    run(fill())
    run(reopen())


def test_what_lost_its_parent_with_another_device_is_dropped(tmp_path: Path) -> None:
    chain = identities(6)

    async def fill() -> None:
        async with striped(tmp_path, 4, 4) as tier:
            tier.remember(NAMESPACE.digest, NAMESPACE.encode())
            # Pages 0, 1 and 3 in the first store, the others in the second.
            slots = np.array([0, 1, 4, 2, 5, 6], np.int32)
            tier.allocate(8)
            await store(tier, slots, chain)
            await tier.sync(tier.accepted, deadline=SystemClock().monotonic() + 30)

    async def reopen() -> None:
        async with striped(tmp_path, 4, 4) as tier:
            [found] = tier.recovered()
            assert found.slots.tolist() == [0, 1]
            assert tier.recovery.dropped["orphan"] == 1
            assert tier.num_free == 6
            [sentence] = tier.recovery.damage
            assert "store-1 is new" in sentence

    run(fill())
    shutil.rmtree(tmp_path / "store-1")
    run(reopen())


def test_a_number_waits_for_all_stores(tmp_path: Path) -> None:
    async def main() -> None:
        async with striped(tmp_path, 4, 4) as tier:
            tier.remember(NAMESPACE.digest, NAMESPACE.encode())
            chain = identities(8)
            await store(tier, tier.allocate(8), chain)
            number = tier.accepted
            assert number == 8
            one, other = tier.stores
            await one.sync(one.accepted, deadline=SystemClock().monotonic() + 30)
            if other.durable < other.accepted:
                assert tier.durable < number
            await tier.sync(number, deadline=SystemClock().monotonic() + 30)
            assert tier.durable == number
            with pytest.raises(BadRequest, match="number"):
                await tier.sync(number + 1, deadline=SystemClock().monotonic() + 30)

    run(main())


def test_opening_names_the_directory_that_refuses_and_leaves_the_others(tmp_path: Path) -> None:
    layout = NAMESPACE.layout
    foreign = tmp_path / "open-to-all"
    foreign.mkdir()
    foreign.chmod(0o777)
    with pytest.raises(TierUnavailable, match="open-to-all"):
        StripedTier.open([tmp_path / "one", foreign], layout=layout, capacity_bytes=1 << 20)
    assert list(foreign.iterdir()) == []
    # The first is free again.
    tier = StripedTier.open([tmp_path / "one", tmp_path / "two"], layout=layout, capacity_bytes=1 << 20)
    asyncio.run(tier.close())
    with pytest.raises(BadRequest, match="twice"):
        StripedTier.open([tmp_path / "one", tmp_path / "two" / ".." / "one"], layout=layout, capacity_bytes=1 << 20)
    with pytest.raises(BadRequest, match="directories"):
        StripedTier.open([], layout=layout, capacity_bytes=1 << 20)


def files_below(directory: Path) -> dict[str, tuple[int, int]]:
    """Every file: its size and when it was changed."""
    return {
        str(path.relative_to(directory)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(directory.rglob("*"))
    }


def test_a_refusal_of_one_directory_leaves_all_as_they_were(tmp_path: Path) -> None:
    layout = NAMESPACE.layout
    names = [tmp_path / "one", tmp_path / "two"]
    tier = StripedTier.open(names, layout=layout, capacity_bytes=2 << 20)
    slots = tier.num_free
    asyncio.run(tier.close())
    before = files_below(tmp_path)
    (tmp_path / "three").mkdir(mode=0o777)
    (tmp_path / "three").chmod(0o777)
    before = files_below(tmp_path)
    for capacity_bytes in (1 << 20, 8 << 20):
        for directories in ([*names, tmp_path / "three"], [*names, tmp_path / "no" / "parent"]):
            with pytest.raises(TierUnavailable):
                StripedTier.open(directories, layout=layout, capacity_bytes=capacity_bytes)
            assert files_below(tmp_path) == before
    # Not so much as a directory that would have been made for the first.
    with pytest.raises(TierUnavailable):
        StripedTier.open([tmp_path / "new", tmp_path / "three"], layout=layout, capacity_bytes=2 << 20)
    assert files_below(tmp_path) == before
    tier = StripedTier.open(names, layout=layout, capacity_bytes=2 << 20)
    assert tier.num_free == slots
    asyncio.run(tier.close())


def test_directories_on_one_file_system_must_fit_together(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(BadRequest, match="2 directories on one file system"):
        StripedTier.open(
            [tmp_path / "one", tmp_path / "two"], layout=NAMESPACE.layout, capacity_bytes=int(free * 1.2)
        )
    assert list(tmp_path.iterdir()) == []
