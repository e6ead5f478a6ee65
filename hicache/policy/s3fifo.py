"""S3-FIFO: three first-in-first-out queues."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from hicache.errors import BadRequest
from hicache.node import Box, Node
from hicache.policy.base import Use
from hicache.policy.history import History
from hicache.policy.ordered import Ordered

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
    """Its turn to leave came while it might not. It takes a place in the main queue again once it may."""


@dataclass(slots=True)
class _Entry:
    """A node of the tier."""

    in_main: bool
    """Whether it has moved on to the main queue."""
    place: _Place = _Place.ASIDE
    turn: int = 0
    """Of the main queue, when it was put aside."""
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
        self._main = Ordered()  # by turns, which count up
        self._chosen: OrderedDict[Box, None] = OrderedDict()
        self._turn = 0
        self._num_listed = 0
        self._ghosts: History[bool] = History(capacity_pages)

    def entered(self, node: Node) -> None:
        in_main = bool(self._ghosts.get(node))
        entry = self._entries[node.box] = _Entry(in_main)
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
            # Where it would stand now if it had gone to the end of the queue round after round.
            head = self._main.first_key() if len(self._main) else self._turn
            round_turns = self._turn - head + 1
            entry.in_main, entry.place = True, _Place.MAIN
            self._main.place(node, head + (entry.turn - head) % round_turns)

    def discard(self, node: Node) -> None:
        self._num_listed -= 1
        entry = self._entries.get(node.box)
        if entry is not None:
            entry.listed = False
            if entry.place is _Place.CHOSEN:
                self._put_aside(node, entry)

    def touch(self, node: Node, now: float) -> None:
        pass  # `used` tells it

    def split(self, upper: Node, lower: Node) -> None:
        entry = self._entries.get(lower.box)
        if entry is None:
            return  # in other tiers only
        if entry.place is _Place.SMALL:
            self._small_pages -= upper.num_pages  # counted again with what they stand in now
        other = self._entries[upper.box] = _Entry(entry.in_main, frequency=entry.frequency, fresh=entry.fresh)
        self._enqueue(upper, other)

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
            is_small = bool(self._small) and (self._small_pages > self._small_max or not len(self._main))
            node = next(iter(self._small))[0] if is_small else next(iter(self._main))
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
                self._put_aside(node, entry)

    def _put_aside(self, node: Node, entry: _Entry) -> None:
        self._dequeue(node, entry)
        entry.turn = self._turn

    def _enqueue(self, node: Node, entry: _Entry) -> None:
        """Put a node at the end of its queue, wherever it stood before."""
        self._dequeue(node, entry)
        if entry.in_main:
            entry.place = _Place.MAIN
            self._turn += 1
            self._main.place(node, self._turn)
        else:
            entry.place = _Place.SMALL
            self._small[node.box] = None
            self._small_pages += node.num_pages

    def _dequeue(self, node: Node, entry: _Entry) -> None:
        if entry.place is _Place.SMALL:
            del self._small[node.box]
            self._small_pages -= node.num_pages
        elif entry.place is _Place.MAIN:
            self._main.remove(node)
        elif entry.place is _Place.CHOSEN:
            del self._chosen[node.box]
        entry.place = _Place.ASIDE
