"""The contract of NVMe admission: which pages may be written there at all, and the two simplest answers.

Flash wears with every write, and most pages are never asked for again. A page that is refused is not lost sooner than
it must be: it stays in the faster tiers until it has to leave them, and leaves for nothing then.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from hicache.node import Node
from hicache.policy.base import Use
from hicache.policy.history import RECORDS_MAX
from hicache.policy.stretches import Stretches, cut


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


@dataclass(slots=True)
class _Touched:
    """A stretch of a prompt that was used."""

    num_pages: int
    again: bool
    """Twice at least."""


class SecondTouchAdmission:
    """Admits what was used twice, of a node as soon as that is half of it. It needs about as few writes as knowing the
    future, and loses each first return.

    Args:
        stride: pages that are judged together, from 1 on (`hicache.policy.stretches`).
        records_max: stretches of so many pages remembered, resident or not; at least 1.

    Raises `BadRequest` naming what is out of bounds.
    """

    def __init__(self, *, stride: int = 1, records_max: int = RECORDS_MAX) -> None:
        self._stretches: Stretches[_Touched] = Stretches(stride=stride, records_max=records_max)

    def used(self, use: Use) -> None:
        stretches = cut(use.path, self._stretches.stride)
        known = self._stretches.known(stretches)
        self._stretches.keep(use.path, stretches, [
            _Touched(stretch.num_pages, before is not None) for stretch, before in zip(stretches, known, strict=True)
        ])  # fmt: skip

    def admits(self, node: Node, now: float) -> Verdict:
        touched = self._stretches.of(node)
        again = sum([each.num_pages for each in touched if each.again])
        return Verdict.ADMITTED if 0 < 2 * again >= sum([each.num_pages for each in touched]) else Verdict.ONCE

    def written(self, node: Node, now: float) -> None:
        pass

    def split(self, upper: Node, lower: Node) -> None:
        """See `HearsShape`."""
        self._stretches.split(upper, lower)

    def joined(self, upper: Node, lower: Node) -> None:
        """See `HearsShape`."""
        self._stretches.joined(upper, lower)
