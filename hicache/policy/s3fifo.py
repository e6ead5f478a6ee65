"""S3-FIFO: three first-in-first-out queues."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from hicache.collector import put, untrack
from hicache.errors import BadRequest
from hicache.node import Box, Node
from hicache.policy.base import Use
from hicache.policy.history import History

SMALL_SHARE: Final = 0.1
"""Default share of the tier for what is new."""
FREQUENCY_MAX: Final = 3


class _Place(Enum):
    """Where a node of the tier stands."""

    SMALL = "small"
    MAIN = "main"
    CHOSEN = "chosen"
    """Taken from the head of one of the two: next to leave."""
    ASIDE = "aside"
    """Its turn to leave came while it might not. It comes again as soon as it may: the rounds that it would have gone
    meanwhile have taken its uses."""


@dataclass(slots=True)
class _Entry:
    """A node of the tier."""

    in_main: bool
    """Whether it has moved on to the main queue."""
    place: _Place = _Place.ASIDE
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
        self._small_share = small_share
        self.resized(capacity_pages)
        self._small_pages = 0
        self._entries: dict[Box, _Entry] = {}
        self._small: OrderedDict[Box, None] = OrderedDict()
        self._main: OrderedDict[Box, None] = OrderedDict()
        self._chosen: OrderedDict[Box, None] = OrderedDict()
        for large in (self._entries, self._small, self._main, self._chosen):
            untrack(large)
        self._num_listed = 0
        self._ghosts: History[bool] = History(capacity_pages)

    def resized(self, capacity_pages: int) -> None:
        self._small_max = max(1, int(capacity_pages * self._small_share))

    def entered(self, node: Node) -> None:
        in_main = bool(self._ghosts.within(node))
        entry = self._new(node, _Entry(in_main))
        self._enqueue(node, entry)
        if in_main:
            self._ghosts.put(node, False)

    def left(self, node: Node) -> None:
        entry = self._entries.pop(node.box)
        self._dequeue(node, entry)
        if not entry.in_main:
            self._ghosts.put(node, True)

    def add(self, node: Node, now: float) -> None:
        entry = self._entries[node.box]
        entry.listed = True
        self._num_listed += 1
        if entry.place is _Place.ASIDE:
            entry.in_main, entry.frequency = True, 0
            self._enqueue(node, entry)
            self._main.move_to_end(node.box, last=False)

    def discard(self, node: Node) -> None:
        self._num_listed -= 1
        entry = self._entries.get(node.box)
        if entry is not None:
            entry.listed = False
            if entry.place is _Place.CHOSEN:
                self._dequeue(node, entry)

    def touch(self, node: Node, now: float) -> None:
        pass  # `used` tells it

    def split(self, upper: Node, lower: Node) -> None:
        entry = self._entries.get(lower.box)
        if entry is None:
            return  # in other tiers only
        if entry.place is _Place.SMALL:
            self._small_pages -= upper.num_pages  # counted again with what they stand in now
        other = _Entry(entry.in_main, frequency=entry.frequency, fresh=entry.fresh)
        self._enqueue(upper, self._new(upper, other))

    def joined(self, upper: Node, lower: Node) -> None:
        above = self._entries.pop(upper.box, None)
        if above is None:
            return
        self._dequeue(upper, above)
        below = self._entries[lower.box]
        below.frequency = max(above.frequency, below.frequency)
        below.fresh = above.fresh and below.fresh
        if below.place is _Place.SMALL:
            if above.in_main:
                below.in_main = True
                self._enqueue(lower, below)
            else:
                self._small_pages += upper.num_pages

    def used(self, use: Use) -> None:
        for node in reversed(use.path):
            entry = self._entries.get(node.box)
            if entry is None:
                continue  # in other tiers only
            if entry.fresh:
                entry.fresh = False
                if entry.place is not _Place.ASIDE:
                    self._enqueue(node, entry)  # anew, tails before heads
            elif entry.place is _Place.CHOSEN:
                entry.in_main = True
                self._enqueue(node, entry)
            else:
                entry.frequency = min(FREQUENCY_MAX, entry.frequency + 1)

    def victims(self) -> Iterator[Node]:
        """In passing, nodes that were used since they stood at the head of a queue take their next place, and those
        that are given stay the next ones to leave: a second call gives the same nodes."""
        for box in self._chosen:
            yield box[0]
        while self._num_listed > len(self._chosen):
            yield self._choose()

    def _choose(self) -> Node:
        """The next node that may leave; there is one. Every step that chooses none takes a use from a node, moves it
        from the small queue to the main one, or puts it aside until it may leave: they cost no more than those events.
        """
        while True:
            is_small = bool(self._small) and (self._small_pages > self._small_max or not self._main)
            (node,) = next(iter(self._small if is_small else self._main))
            entry = self._entries[node.box]
            if entry.listed and not entry.frequency:
                self._dequeue(node, entry)
                self._chosen[node.box], entry.place = None, _Place.CHOSEN
                return node
            if is_small:
                # Used since, or kept by something: it has proved itself.
                entry.frequency, entry.in_main = 0, True
                self._enqueue(node, entry)
            elif entry.frequency:
                entry.frequency -= 1
                self._enqueue(node, entry)
            else:
                self._dequeue(node, entry)

    def _new(self, node: Node, entry: _Entry) -> _Entry:
        untrack(entry)
        put(self._entries, node.box, entry)
        return entry

    def _enqueue(self, node: Node, entry: _Entry) -> None:
        """Put a node at the end of its queue, wherever it stood before."""
        self._dequeue(node, entry)
        if entry.in_main:
            entry.place = _Place.MAIN
            self._main[node.box] = None
        else:
            entry.place = _Place.SMALL
            self._small[node.box] = None
            self._small_pages += node.num_pages

    def _dequeue(self, node: Node, entry: _Entry) -> None:
        """Take a node from where it stands, and put it aside."""
        if entry.place is _Place.SMALL:
            del self._small[node.box]
            self._small_pages -= node.num_pages
        elif entry.place is _Place.MAIN:
            del self._main[node.box]
        elif entry.place is _Place.CHOSEN:
            del self._chosen[node.box]
        entry.place = _Place.ASIDE
