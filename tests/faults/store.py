"""The small store on real files that the fault programme damages, kills and starts again."""

import os
from typing import Any, Final

from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.geometry import PageShape
from tests.faults.oracle import PAGE_SIZE
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
