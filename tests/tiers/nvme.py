"""What the tests of the NVMe tier share: small stores in directories of their own, and a way around the tier."""

import asyncio
import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hicache.tier import LayerRead, Outcome, PageIdentity, PageRead, Tier
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.geometry import Geometry, PageShape
from tests.stamps import stamp
from tests.tiers.contract import GUARD, write_of
from tests.tiers.faulty_files import Fault, FaultyFiles

PAGE_SIZE = 4
"""Tokens of the pages that `tests.stamps.identity_chain` makes."""
DATA_CALLS = ("preadv", "pwritev")
"""Calls of the seam that move pages."""
LANES = {"read_lanes": 4, "write_lanes": 4, "layer_lanes": 2}
NEVER = 3600.0
"""No commit by itself while a test runs: which calls reach a file does not depend on how long the test takes."""


def shape_of(page_bytes: int, num_layers: int = 3) -> PageShape:
    """A page of so many bytes with layers of unequal, odd lengths."""
    cuts = [page_bytes * layer // num_layers for layer in range(num_layers + 1)]
    return PageShape(tuple(stop - start for start, stop in itertools.pairwise(cuts)), PAGE_SIZE)


SMALL = shape_of(12_288)
"""Three whole blocks in three layers."""


def capacity_for(shape: PageShape, num_pages: int, *, slots_per_segment: int) -> tuple[int, int]:
    """`capacity_bytes` and `segment_bytes` that give exactly so many slots."""
    segment_bytes = 4096 + slots_per_segment * shape.slot_bytes
    full, rest = divmod(num_pages, slots_per_segment)
    return full * segment_bytes + (4096 + rest * shape.slot_bytes if rest else 0), segment_bytes


@asynccontextmanager
async def small_tier(
    shape: PageShape, num_pages: int, *, directory: Path | None = None, slots_per_segment: int = 4, **options: Any
) -> AsyncIterator[NvmeTier]:
    """A tier of so many pages in small segments, by default in a directory of its own that is removed afterwards, which
    commits when it is asked to and as it is closed."""
    segment_slots = min(slots_per_segment, num_pages)
    capacity_bytes, segment_bytes = capacity_for(shape, num_pages, slots_per_segment=segment_slots)
    with tempfile.TemporaryDirectory() as own:
        tier = NvmeTier.open(
            directory or Path(own) / "store",
            layout=shape,
            capacity_bytes=capacity_bytes,
            segment_bytes=segment_bytes,
            **{**LANES, "commit_interval_s": NEVER, **options},
        )
        try:
            yield tier
        finally:
            await tier.close()


def place_of(tier: Tier, slot: int) -> tuple[Path, int]:
    """The file in which a slot lies, and where its header begins there."""
    assert isinstance(tier, NvmeTier)
    geometry: Geometry = tier._geometry
    ordinal, index = geometry.locate(slot)
    return Path(tier._directory.path) / f"hicache-{ordinal:06d}.seg", geometry.slot_offset(index)


def read_raw(tier: Tier, slot: int, start: int, num_bytes: int) -> bytes:
    """Bytes of a slot as they lie in the file, counted from its header."""
    path, offset = place_of(tier, slot)
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, num_bytes, offset + start)
    finally:
        os.close(fd)


def write_raw(tier: Tier, slot: int, start: int, data: bytes) -> None:
    """Overwrite bytes of a slot in the file."""
    path, offset = place_of(tier, slot)
    fd = os.open(path, os.O_RDWR)
    try:
        assert os.pwrite(fd, data, offset + start) == len(data)
        os.fsync(fd)
    finally:
        os.close(fd)


# ---- pages and layers of `SMALL`


def data_faults(fault: Fault | None = None, at: int = 0, *, flip_bit: int = 0) -> FaultyFiles:
    """Files whose reads and writes count."""
    return FaultyFiles(
        fault, at, counts=DATA_CALLS.__contains__, misdirect_by=SMALL.slot_bytes, flip_bit=flip_bit
    )


async def read_all(
    tier: NvmeTier, slots: Sequence[int], identities: Sequence[PageIdentity], *, together: bool
) -> list[Outcome]:
    """Read the pages in one call or each in its own. What is `OK` has the right bytes."""
    buffers = [np.full(tier.page_bytes, GUARD, np.uint8) for _ in slots]
    reads = [
        PageRead(slot, tier.generation(slot), identity, buffer.data)
        for slot, identity, buffer in zip(slots, identities, buffers, strict=True)
    ]
    outcomes = await tier.read(reads) if together else [(await tier.read([read]))[0] for read in reads]
    for outcome, identity, buffer in zip(outcomes, identities, buffers, strict=True):
        if outcome is Outcome.OK:
            assert np.array_equal(buffer, stamp(identity, tier.page_bytes))
    return outcomes


async def read_layers(tier: NvmeTier, slots: Sequence[int], identities: Sequence[PageIdentity]) -> list[Outcome]:
    """Read every layer of the pages. What is `OK` has the right bytes."""
    reads, expected = [], []
    for slot, identity in zip(slots, identities, strict=True):
        page = stamp(identity, tier.page_bytes)
        for layer, (start, stop) in enumerate(SMALL.layer_ranges):
            into = np.full(stop - start, GUARD, np.uint8)
            reads.append(LayerRead(slot, tier.generation(slot), identity, layer, into.data))
            expected.append((into, page[start:stop]))
    outcomes = await asyncio.to_thread(tier.start_layer_reads(reads).wait, 60)
    for outcome, (into, right) in zip(outcomes, expected, strict=True):
        if outcome is Outcome.OK:
            assert np.array_equal(into, right)
    return outcomes


async def write_all(tier: NvmeTier, slots: Sequence[int], identities: Sequence[PageIdentity]) -> list[Outcome]:
    return await tier.write(
        [write_of(tier, slot, identity) for slot, identity in zip(slots, identities, strict=True)]
    )
