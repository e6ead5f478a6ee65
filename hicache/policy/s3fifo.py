"""S3-FIFO: three first-in-first-out queues."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from hicache.errors import BadRequest
from hicache.node import Box, Node
from hicache.policy.base import Use
from hicache.policy.history import History

SMALL_SHARE: Final = 0.1
"""Default share of the tier for what is new."""
FREQUENCY_MAX: Final = 3


@dataclass(slots=True)
class _Entry:
    """A node of the tier."""

    in_main: bool
    frequency: int = 0
    listed: bool = False
    fresh: bool = True
    """The use that brought it in, which does not count, has not been told yet."""


class S3FifoPolicy:
    """Evicts from a small queue of new nodes what was not used while it stood there; the rest moves on to a main queue,
    where each use grants one more round. What left the small queue unused enters the main one when it comes back.

    The queues hold every node of the tier, so that a parent, which is used with each of its children, moves on although
    it may not leave yet. `capacity_pages` is the tier's, `small_share` the part of it, 0 to 1, that the small queue may
    hold before the main one gives. Yang et al., "FIFO queues are all you need for cache eviction".
    """

    def __init__(self, *, capacity_pages: int, small_share: float = SMALL_SHARE) -> None:
        if capacity_pages < 1:
            raise BadRequest("capacity_pages", f"{capacity_pages} is below 1")
        if not 0 <= small_share <= 1:
            raise BadRequest("small_share", f"{small_share} is not within 0 to 1")
        self._small_max = max(1, int(capacity_pages * small_share))
        self._small_pages = 0
        self._entries: dict[Box, _Entry] = {}
        self._small: OrderedDict[Box, None] = OrderedDict()
        self._main: OrderedDict[Box, None] = OrderedDict()
        self._num_listed = 0
        self._ghosts: History[bool] = History(capacity_pages)

    def entered(self, node: Node) -> None:
        in_main = bool(self._ghosts.get(node))
        entry = self._entries[node.box] = _Entry(in_main)
        self._enqueue(node.box, entry)
        if in_main:
            self._ghosts.put(node, False)
        else:
            self._small_pages += node.num_pages

    def left(self, node: Node) -> None:
        box = node.box
        if self._entries.pop(box).in_main:
            del self._main[box]
        else:
            del self._small[box]
            self._small_pages -= node.num_pages
            self._ghosts.put(node, True)

    def add(self, node: Node, now: float) -> None:
        self._entries[node.box].listed = True
        self._num_listed += 1

    def discard(self, node: Node) -> None:
        entry = self._entries.get(node.box)
        if entry is not None:
            entry.listed = False
        self._num_listed -= 1

    def touch(self, node: Node, now: float) -> None:
        pass  # `used` tells it

    def split(self, upper: Node, lower: Node) -> None:
        entry = self._entries[lower.box]
        self._entries[upper.box] = _Entry(entry.in_main, entry.frequency, fresh=entry.fresh)
        self._enqueue(upper.box, entry)

    def joined(self, upper: Node, lower: Node) -> None:
        above, below = self._entries.pop(upper.box), self._entries[lower.box]
        del (self._main if above.in_main else self._small)[upper.box]
        self._small_pages += upper.num_pages * (above.in_main - below.in_main)
        below.frequency = max(above.frequency, below.frequency)

    def used(self, use: Use) -> None:
        for node in reversed(use.path):
            entry = self._entries.get(node.box)
            if entry is None:
                continue  # in other tiers only
            if entry.fresh:
                entry.fresh = False
                self._enqueue(node.box, entry)  # anew, tails before heads
            else:
                entry.frequency = min(FREQUENCY_MAX, entry.frequency + 1)

    def _enqueue(self, box: Box, entry: _Entry) -> None:
        """Put a node at the end of its queue."""
        queue = self._main if entry.in_main else self._small
        queue[box] = None
        queue.move_to_end(box)

    def victims(self) -> Iterator[Node]:
        """In passing, nodes that were used since they stood at the head of a queue take their next place: a second call
        gives the same nodes."""
        given: set[Box] = set()
        small_pages, num_kept = self._small_pages, 0
        while len(given) < self._num_listed:
            small = next((box for box in self._small if box not in given), None)
            main = next((box for box in self._main if box not in given), None)
            if num_kept > len(self._main):
                main = None  # a whole round of nodes that may not leave
            box = small if small is not None and (small_pages > self._small_max or main is None) else main
            assert box is not None, "what is listed stands in a queue"
            entry = self._entries[box]
            if entry.listed and not entry.frequency:
                given.add(box)
                num_kept = 0
                if not entry.in_main:
                    small_pages -= box[0].num_pages
                yield box[0]
            elif entry.in_main:
                num_kept = 0 if entry.frequency else num_kept + 1
                entry.frequency = max(0, entry.frequency - 1)
                self._enqueue(box, entry)
            else:
                # Used since, or kept by something: it has proved itself.
                num_kept = 0
                del self._small[box]
                entry.frequency, entry.in_main = 0, True
                self._small_pages -= box[0].num_pages
                small_pages -= box[0].num_pages
                self._enqueue(box, entry)
