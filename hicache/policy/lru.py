"""Least recently used."""

from collections import OrderedDict
from collections.abc import Iterator

from hicache.collector import untrack
from hicache.node import Box, Node
from hicache.sortedchunks import SortedChunks


class LruPolicy:
    """Evicts what was used longest ago.

    Uses come in order of time, so a used node simply goes to the end of `_recent`, in O(1). Only a node that becomes a
    leaf of its tier later than it was used has a place further to the front: those few stand in `_late`, sorted by use.
    The next victim is the older of both heads.
    """

    def __init__(self) -> None:
        self._recent: OrderedDict[Box, float] = OrderedDict()
        self._newest = float("-inf")  # no node in `_recent` was used after it
        self._late: SortedChunks[tuple[float, int, Box]] = SortedChunks()
        self._late_keys: dict[Box, tuple[float, int, Box]] = {}
        self._serial = 0  # tells late nodes of one time apart
        untrack(self._recent)
        untrack(self._late_keys)

    def __contains__(self, node: Node) -> bool:
        """Whether a live node was added and not discarded."""
        box = node.box
        return box in self._recent or box in self._late_keys

    def add(self, node: Node, now: float) -> None:
        box, used = node.box, node.last_access
        if used >= self._newest or not self._recent:
            self._newest = used
            self._recent[box] = used
            return
        self._serial += 1
        key = (used, self._serial, box)
        untrack(key)
        self._late.add(key)
        self._late_keys[box] = key

    def discard(self, node: Node) -> None:
        if self._recent.pop(node.box, None) is None:
            self._late.remove(self._late_keys.pop(node.box))

    def touch(self, node: Node, now: float) -> None:
        box = node.box
        if box in self._recent:
            self._recent.move_to_end(box)
        else:
            self._late.remove(self._late_keys.pop(box))
        self._recent[box] = self._newest = now

    def split(self, upper: Node, lower: Node) -> None:
        pass

    def victims(self) -> Iterator[Node]:
        late = iter(self._late)
        waiting = next(late, None)
        for box, used in self._recent.items():
            while waiting is not None and waiting[0] < used:
                yield waiting[2][0]
                waiting = next(late, None)
            yield box[0]
        while waiting is not None:
            yield waiting[2][0]
            waiting = next(late, None)
