"""The contract of NVMe admission: which pages may be written there at all, and the two simplest answers.

Flash wears with every write, and most pages are never asked for again. A page that is refused is not lost sooner than
it must be: it stays in the faster tiers until it has to leave them, and leaves for nothing then.
"""

from enum import Enum
from typing import Protocol

from hicache.errors import BadRequest
from hicache.node import Node
from hicache.policy.base import Use
from hicache.policy.history import RECORDS_MAX, History


class Verdict(Enum):
    """What became of a request to be written; the values are the words that counters and people get."""

    ADMITTED = "admitted"
    ONCE = "used once"
    UNLIKELY = "unlikely to return"


class AdmissionPolicy(Protocol):
    """Says which nodes may be written to NVMe. One instance serves the tier, over all namespaces.

    The cache feeds it, from one thread. Nothing here waits, does I/O or changes a node; every call costs O(log n) at
    most for each node that it is given, and memory is bounded. One that makes use of what callers know also offers
    `HearsHints`, one that remembers prefixes `HearsShape`.
    """

    def used(self, use: Use) -> None:
        """A prefix was used: as `HearsUses.used`."""
        ...

    def admits(self, node: Node, now: float) -> Verdict:
        """A live node that NVMe does not have is about to leave the host, or could be written before it has to. What is
        above it and not on NVMe is written with it."""
        ...

    def written(self, node: Node, now: float) -> None:
        """A copy of the node to NVMe begins, whether it was asked about or goes with what is below it."""
        ...


class AlwaysAdmission:
    """Admits everything: NVMe is as good as its size, and wears as fast as it can."""

    def used(self, use: Use) -> None:
        pass

    def admits(self, node: Node, now: float) -> Verdict:
        return Verdict.ADMITTED

    def written(self, node: Node, now: float) -> None:
        pass


class SecondTouchAdmission:
    """Admits what was used twice. It needs about as few writes as knowing the future, and loses each first return.

    Args:
        records_max: prefixes remembered, resident or not; at least 1.
    """

    def __init__(self, *, records_max: int = RECORDS_MAX) -> None:
        if records_max < 1:
            raise BadRequest("records_max", f"{records_max} is not above 0")
        self._used_again: History[bool] = History(records_max)

    def used(self, use: Use) -> None:
        for node in reversed(use.path):
            self._used_again.put(node, self._used_again.get(node) is not None)

    def admits(self, node: Node, now: float) -> Verdict:
        return Verdict.ADMITTED if self._used_again.get(node) else Verdict.ONCE

    def written(self, node: Node, now: float) -> None:
        pass

    def split(self, upper: Node, lower: Node) -> None:
        """See `HearsShape`."""
        known = self._used_again.get(lower)
        if known is not None:
            self._used_again.put(upper, known)

    def joined(self, upper: Node, lower: Node) -> None:
        """See `HearsShape`."""
        above = self._used_again.get(upper)
        if above is not None and self._used_again.get(lower) is None:
            self._used_again.put(lower, above)
