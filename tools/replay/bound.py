"""MIN: what no policy can beat, because it knows the future."""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

NEVER: Final = 1 << 60


def min_hits(paths: Sequence[Sequence[int]], capacity_blocks: int) -> int:
    """Block hits of Belady's MIN with bypass over prompts of chained block ids, from an empty cache.

    It keeps the blocks that are used again soonest, and of equals those nearer to the root. A block's next use is never
    before that of the block above it, so only leaves are ever evicted: the bound holds for a prefix tree as it is.
    Belady, "A study of replacement algorithms for a virtual-storage computer".
    """
    following: dict[int, int] = {}
    next_uses: list[list[int]] = []
    for index in range(len(paths) - 1, -1, -1):
        next_uses.append([following.get(block, NEVER) for block in paths[index]])
        following.update(dict.fromkeys(paths[index], index))
    next_uses.reverse()
    resident: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for path, row in zip(paths, next_uses, strict=True):
        for block in path:
            if block not in resident:
                break
            hits += 1
        for depth, (block, next_use) in enumerate(zip(path, row, strict=True)):
            if next_use == NEVER:
                resident.pop(block, None)
            else:
                resident[block] = next_use
                heappush(heap, (-next_use, -depth, block))
        while len(resident) > capacity_blocks:
            next_use, _, block = heappop(heap)
            if resident.get(block) == -next_use:
                del resident[block]
    return hits
