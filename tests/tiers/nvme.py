"""What the tests of the NVMe tier share: small stores in directories of their own, and a way around the tier."""

import itertools
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from hicache.tier import Tier
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.geometry import Geometry, PageShape

PAGE_SIZE = 4
"""Tokens of the pages that `tests.stamps.identity_chain` makes."""
LANES = {"read_lanes": 4, "write_lanes": 4, "layer_lanes": 2}


def shape_of(page_bytes: int, num_layers: int = 3) -> PageShape:
    """A page of so many bytes with layers of unequal, odd lengths."""
    cuts = [page_bytes * layer // num_layers for layer in range(num_layers + 1)]
    return PageShape(tuple(stop - start for start, stop in itertools.pairwise(cuts)), PAGE_SIZE)


def capacity_for(shape: PageShape, num_pages: int, *, slots_per_segment: int) -> tuple[int, int]:
    """`capacity_bytes` and `segment_bytes` that give exactly so many slots."""
    segment_bytes = 4096 + slots_per_segment * shape.slot_bytes
    full, rest = divmod(num_pages, slots_per_segment)
    return full * segment_bytes + (4096 + rest * shape.slot_bytes if rest else 0), segment_bytes


@asynccontextmanager
async def small_tier(
    shape: PageShape, num_pages: int, *, directory: Path | None = None, slots_per_segment: int = 4, **options: Any
) -> AsyncIterator[NvmeTier]:
    """A tier of so many pages in small segments, by default in a directory of its own that is removed afterwards."""
    segment_slots = min(slots_per_segment, num_pages)
    capacity_bytes, segment_bytes = capacity_for(shape, num_pages, slots_per_segment=segment_slots)
    with tempfile.TemporaryDirectory() as own:
        tier = NvmeTier.open(
            directory or Path(own) / "store",
            layout=shape,
            capacity_bytes=capacity_bytes,
            segment_bytes=segment_bytes,
            **{**LANES, **options},
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
