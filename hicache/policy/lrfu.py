"""Least recently and least frequently used."""

from collections.abc import Iterator
from math import log2
from typing import Final

from hicache.collector import untrack
from hicache.errors import BadRequest
from hicache.node import Node
from hicache.policy.base import Use
from hicache.policy.history import RECORDS_MAX, History
from hicache.policy.ordered import Ordered

DECAY: Final = 1e-3
"""Default halvings a use: what was used 1,000 uses ago counts half."""


class LrfuPolicy:
    """Evicts what has the smallest sum of its uses, each halved `decay` times for every use of anything since.

    The sum (the paper calls it CRF) after `i` uses is `c * 2^(-decay * (i - i0))` for one that was `c` at use `i0`, so
    `log2(c) + decay * i0` keeps nodes in order without ever being computed again. Sums outlive the pages.
    Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least frequently used policies".
    """

    def __init__(self, *, decay: float = DECAY, records_max: int = RECORDS_MAX) -> None:
        if not 0 <= decay <= 1:
            raise BadRequest("decay", f"{decay} is not within 0 to 1")
        self._decay = decay
        self._sums: History[tuple[float, int]] = History(records_max)
        self._listed = Ordered()
        self._uses = 0

    def add(self, node: Node, now: float) -> None:
        self._listed.place(node, self._key(node))

    def discard(self, node: Node) -> None:
        self._listed.remove(node)

    def touch(self, node: Node, now: float) -> None:
        pass  # `used` tells it

    def split(self, upper: Node, lower: Node) -> None:
        known = self._sums.get(lower)
        if known is not None:
            self._sums.put(upper, known)

    def joined(self, upper: Node, lower: Node) -> None:
        above, below = self._sums.get(upper), self._sums.get(lower)
        # What went through the lower one went through the upper one too; the longer run keeps the longer past.
        if above is not None and (below is None or self._order(above) > self._order(below)):
            self._sums.put(lower, above)

    def used(self, use: Use) -> None:
        # Tail before head, so that of nodes with equal sums the tail leaves first.
        for node in reversed(use.path):
            total, at = self._sums.within(node) or (0.0, self._uses)
            known = 1.0 + total * 2.0 ** (-self._decay * (self._uses - at)), self._uses
            untrack(known)
            self._sums.put(node, known)
            if node in self._listed:
                self._listed.place(node, self._key(node))
        self._uses += 1

    def victims(self) -> Iterator[Node]:
        return iter(self._listed)

    def _key(self, node: Node) -> float:
        return self._order(self._sums.get(node) or (1.0, self._uses))

    def _order(self, known: tuple[float, int]) -> float:
        total, at = known
        return log2(total) + self._decay * at
