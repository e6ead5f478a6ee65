"""Least recently used."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from hicache.node import Node


class LruPolicy:
    """Evicts what was used longest ago.

    Uses come in order of time, so a used node simply goes to the end of `_recent`, in O(1). Only a node that becomes a
    leaf of its tier later than it was used has a place further to the front: those few stand in `_late`, sorted by use.
    The next victim is the older of both heads.
    """

    def __init__(self) -> None:
        self._recent: OrderedDict[Node, float] = OrderedDict()
        self._newest = float("-inf")
        self._late: list[tuple[float, int]] = []
        self._late_nodes: dict[int, Node] = {}
        self._late_keys: dict[Node, tuple[float, int]] = {}
        self._serial = 0

    def add(self, node: Node, now: float) -> None:
        used = node.last_access
        if used >= self._newest or not self._recent:
            self._newest = used
            self._recent[node] = used
            return
        self._serial += 1
        key = (used, self._serial)
        insort(self._late, key)
        self._late_nodes[self._serial] = node
        self._late_keys[node] = key

    def discard(self, node: Node) -> None:
        if self._recent.pop(node, None) is None:
            self._drop_late(node)

    def touch(self, node: Node, now: float) -> None:
        if node in self._recent:
            self._recent[node] = now
            self._recent.move_to_end(node)
        else:
            self._drop_late(node)
            self._recent[node] = now
        self._newest = now

    def split(self, upper: Node, lower: Node) -> None:
        pass

    def victims(self) -> Iterator[Node]:
        late = iter(self._late)
        waiting = next(late, None)
        for node, used in self._recent.items():
            while waiting is not None and waiting[0] < used:
                yield self._late_nodes[waiting[1]]
                waiting = next(late, None)
            yield node
        while waiting is not None:
            yield self._late_nodes[waiting[1]]
            waiting = next(late, None)

    def _drop_late(self, node: Node) -> None:
        key = self._late_keys.pop(node)
        del self._late[bisect_left(self._late, key)]
        del self._late_nodes[key[1]]
