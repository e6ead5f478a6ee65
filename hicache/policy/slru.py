"""Segmented LRU."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from hicache.collector import untrack
from hicache.errors import BadRequest
from hicache.node import Box, Node
from hicache.policy.base import Use
from hicache.policy.ordered import Ordered

PROTECTED_SHARE: Final = 0.8
"""Default share of the tier for what was used more than once."""


class SlruPolicy:
    """Evicts first what was used once, by recency; what was used again is protected while it fits into its share.

    `capacity_pages` is the tier's, `protected_share` the part of it, 0 to 1, for the protected segment. Where that
    overflows, the protected nodes used longest ago go back to the end of the others.
    """

    def __init__(self, *, capacity_pages: int, protected_share: float = PROTECTED_SHARE) -> None:
        if capacity_pages < 1:
            raise BadRequest("capacity_pages", f"{capacity_pages} is below 1")
        if not 0 <= protected_share <= 1:
            raise BadRequest("protected_share", f"{protected_share} is not within 0 to 1")
        self._protected_share = protected_share
        self.resized(capacity_pages)
        self._protected: OrderedDict[Box, None] = OrderedDict()  # used longest ago first
        self._protected_pages = 0
        self._stamps: dict[Box, int] = {}  # of every node of the tier: its last use, 0 for none since it entered
        untrack(self._protected)
        untrack(self._stamps)
        self._clock = 0
        self._probation, self._guarded = Ordered(), Ordered()

    def resized(self, capacity_pages: int) -> None:
        self._protected_max = int(capacity_pages * self._protected_share)

    def entered(self, node: Node) -> None:
        self._stamps[node.box] = 0

    def left(self, node: Node) -> None:
        del self._stamps[node.box]
        if node.box in self._protected:
            del self._protected[node.box]
            self._protected_pages -= node.num_pages

    def add(self, node: Node, now: float) -> None:
        listed = self._guarded if node.box in self._protected else self._probation
        listed.place(node, self._stamps[node.box] or self._clock + 1)

    def discard(self, node: Node) -> None:
        if not self._guarded.remove(node):
            self._probation.remove(node)

    def touch(self, node: Node, now: float) -> None:
        pass  # `used` tells it

    def split(self, upper: Node, lower: Node) -> None:
        stamp = self._stamps.get(lower.box)
        if stamp is None:
            return  # in other tiers only
        self._stamps[upper.box] = stamp
        if lower.box in self._protected:
            self._protected[upper.box] = None

    def joined(self, upper: Node, lower: Node) -> None:
        above, below = upper.box, lower.box
        stamp = self._stamps.pop(above, None)
        if stamp is None:
            return
        self._stamps[below] = max(stamp, self._stamps[below])
        was_protected, is_protected = above in self._protected, below in self._protected
        if was_protected:
            del self._protected[above]
            if not is_protected:  # the end of what was used again has grown: one run, and as recent
                self._protected[below] = None
                self._protected_pages += lower.num_pages
        elif is_protected:
            self._protected_pages += upper.num_pages

    def used(self, use: Use) -> None:
        for node in reversed(use.path):
            box = node.box
            stamp = self._stamps.get(box)
            if stamp is None:
                continue  # in other tiers only
            if stamp and box not in self._protected:
                self._protected_pages += node.num_pages
                self._protected[box] = None
            self._clock += 1
            self._stamps[box] = self._clock
            if box in self._protected:
                self._protected.move_to_end(box)
            self._replace(node)
        while self._protected_pages > self._protected_max:
            (node,), _ = self._protected.popitem(last=False)
            self._protected_pages -= node.num_pages
            self._clock += 1
            self._stamps[node.box] = self._clock
            self._replace(node)

    def _replace(self, node: Node) -> None:
        """Give a node the place that it should have now, if it is listed."""
        if self._guarded.remove(node) or self._probation.remove(node):
            self.add(node, 0.0)

    def victims(self) -> Iterator[Node]:
        yield from self._probation
        yield from self._guarded
