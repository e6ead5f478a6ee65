"""The small store on real files that the fault programme damages, kills and starts again, and pages for it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from hicache.tier import Outcome, PageRead
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.geometry import PageShape
from tests.faults.oracle import PAGE_SIZE, Life, Oracle, Page
from tests.stamps import stamp
from tests.tiers.contract import GUARD, write_of
from tests.tiers.nvme import capacity_for

SHAPE: Final = PageShape((1500, 1000, 500), PAGE_SIZE)
"""Three layers of odd lengths: a slot is two blocks."""
NUM_PAGES: Final = 60
SLOTS_PER_SEGMENT: Final = 16


def open_store(directory: str | os.PathLike[str], *, num_pages: int = NUM_PAGES, **options: Any) -> NvmeTier:
    """A tier of so many pages in that directory, with few threads."""
    capacity_bytes, segment_bytes = capacity_for(
        SHAPE, num_pages, slots_per_segment=min(num_pages, SLOTS_PER_SEGMENT)
    )
    lanes = {"read_lanes": 2, "write_lanes": 2, "layer_lanes": 1}
    return NvmeTier.open(
        directory, layout=SHAPE, capacity_bytes=capacity_bytes, segment_bytes=segment_bytes, **{**lanes, **options}
    )


async def write_path(oracle: Oracle, tier: NvmeTier, num_pages: int) -> list[Page]:
    """Write at most so many new pages, each below the one before."""
    path = oracle.new_path(num_pages)
    slots = tier.allocate(len(path)).tolist()
    pages = [write_of(tier, slot, page.identity) for slot, page in zip(slots, path, strict=True)]
    assert await tier.write(pages) == [Outcome.OK] * len(path)
    for page, slot in zip(path, slots, strict=True):
        page.lives.append(Life(slot, tier.generation(slot), written=tier.accepted))
    return path


async def read_pages(tier: NvmeTier, pages: Sequence[Page]) -> list[Outcome]:
    """Read pages where they are; what is served has the right bytes."""
    lives = [page.lives[-1] for page in pages]
    buffers = [np.full(SHAPE.page_bytes, GUARD, np.uint8) for _ in pages]
    outcomes = await tier.read(
        [
            PageRead(life.slot, life.generation, page.identity, buffer.data)
            for page, life, buffer in zip(pages, lives, buffers, strict=True)
        ]
    )
    for page, buffer, outcome in zip(pages, buffers, outcomes, strict=True):
        if outcome is Outcome.OK:
            assert np.array_equal(buffer, stamp(page.identity, SHAPE.page_bytes)), "wrong bytes"
    return outcomes


def snapshot(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every entry with its size, time of change, and contents."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_size, status.st_mtime_ns, data)
    return found
