"""How much callers care about a run of pages: its rank, kept in the node's states, and until when it is retained.

    priority    from `PRIORITY_MIN` to `PRIORITY_MAX`, 0 by default: what has a lower one leaves first
    retained    leaves only when everything of its tenant that is not retained has left, or may not leave

A rank is both in one number, lower ranks leave first. Splits give it to both halves, and only runs of one rank are
joined, as states have to be equal for that. Retention ends by the clock (`Retained`).
"""

from heapq import heapify, heappop, heappush
from typing import Final

from hicache.node import RANK_MASK, RANK_SHIFT, Box, Node

PRIORITY_MIN: Final = -4
PRIORITY_MAX: Final = 4
RETAIN_S_MAX: Final = 30 * 86_400.0
"""Longest retention, seconds."""
RANKED_MAX: Final = 1 << 16
"""Nodes of a tree that may be of another rank than the ordinary one; beyond, the one ranked longest ago loses it."""
_PRIORITIES: Final = PRIORITY_MAX - PRIORITY_MIN + 1
DEFAULT_RANK: Final = -PRIORITY_MIN
"""Of priority 0, not retained."""


def rank(priority: int, *, is_retained: bool) -> int:
    """The rank of a priority."""
    return priority - PRIORITY_MIN + _PRIORITIES * is_retained


def rank_of(node: Node) -> int:
    """The rank of a node."""
    # Kept so that the ordinary one, which nearly all have, is 0.
    kept = node._states >> RANK_SHIFT & RANK_MASK
    return (kept + DEFAULT_RANK) % (2 * _PRIORITIES) if kept else DEFAULT_RANK


def without_retention(ranked: int) -> int:
    """The rank of the same priority, not retained."""
    return ranked % _PRIORITIES


def states_of_rank(states: int, ranked: int) -> int:
    """Packed states of a node with another rank."""
    stored = (ranked - DEFAULT_RANK) % (2 * _PRIORITIES)
    return states & ~(RANK_MASK << RANK_SHIFT) | stored << RANK_SHIFT


class Ranked:
    """The nodes of a tree that are not of the ordinary rank, ranked longest ago first, and when retentions end."""

    def __init__(self) -> None:
        self.until: dict[Box, float | None] = {}
        """Monotonic seconds at which a retention ends; None for what has a priority alone."""
        self._ends: list[tuple[float, int, Box]] = []
        self._serial = 0  # tells ends of one moment apart

    def note(self, node: Node, until: float | None) -> None:
        """A node has another rank now."""
        box = node.box
        self.until.pop(box, None)
        self.until[box] = until
        if until is not None:
            self._serial += 1
            heappush(self._ends, (until, self._serial, box))
            if len(self._ends) > 64 + 2 * len(self.until):
                # Most ends are out of date.
                self._ends = [end for end in self._ends if self.until.get(end[2]) == end[0]]
                heapify(self._ends)

    def drop(self, node: Node) -> None:
        """A node is of the ordinary rank again, or leaves."""
        self.until.pop(node.box, None)

    def merge(self, upper: Node, lower: Node) -> None:
        """`lower`, of the same rank, is about to take the pages of `upper`."""
        above, below = self.until.pop(upper.box), self.until[lower.box]
        if above is not None and below is not None and above > below:
            self.note(lower, above)

    def ended(self, now: float) -> list[Node]:
        """The nodes whose retention ends by `now`; each is given once."""
        nodes = []
        while self._ends and self._ends[0][0] <= now:
            until, _, box = heappop(self._ends)
            if self.until.get(box) == until:
                nodes.append(box[0])
                self.until[box] = None
        return nodes

    def oldest(self) -> Node:
        """The one that was ranked longest ago; there is one."""
        return next(iter(self.until))[0]
