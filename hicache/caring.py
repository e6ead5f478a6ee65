"""What callers care about: ranks of prefixes, by which they leave their tiers."""

from hicache.arguments import moment, whole
from hicache.care import (
    DEFAULT_RANK,
    PRIORITY_MAX,
    PRIORITY_MIN,
    RANKED_MAX,
    rank,
    rank_of,
    states_of_rank,
    without_retention,
)
from hicache.node import Node
from hicache.structure import Structure


class Caring(Structure):
    """The ranks of a tree's nodes."""

    def care(self, node: Node, *, priority: int = 0, retain_until: float | None = None, now: float) -> None:
        """Say by which rank the prefix that ends with `node` leaves, in place of what was said of it before.

        It holds for the node, and for those above it that had the same rank and nothing else below them. What is
        further up stays anyhow where something below it stays, in each tier. A retained node is given out by `victims`
        when nothing else of its tenant may leave, in each tier for itself.

        Args:
            priority: from -4, to leave first, to 4, to leave last; 0 is the ordinary one.
            retain_until: monotonic seconds, None for no retention. One that is past already retains nothing.

        Raises `BadRequest` naming the field, `NotResident` for a node that left the tree.
        """
        self._require_live(node)
        priority = whole("priority", priority, PRIORITY_MIN, PRIORITY_MAX)
        retain_until = None if retain_until is None else moment("retain_until", retain_until)
        self._advance(moment("now", now))
        until = retain_until if retain_until is not None and retain_until > self._now else None
        path, before = [node], rank_of(node)
        while (above := path[-1].parent) is not None and len(above.children) == 1 and rank_of(above) == before:
            path.append(above)
        for each in path:
            self._rank(each, rank(priority, is_retained=until is not None), until)
        while len(self._ranked.until) > RANKED_MAX:
            self._rank(self._ranked.oldest(), DEFAULT_RANK, None)
        self._heal(node)

    @property
    def num_ranked(self) -> int:
        """Nodes that leave by another rank than the ordinary one."""
        return len(self._ranked.until)

    def retained_until(self, node: Node) -> float | None:
        """Monotonic seconds until which a node is retained; None for no longer, or never."""
        self._require_node(node)
        return self._ranked.until.get(node.box) if node.is_live else None

    def priority(self, node: Node) -> int:
        """By which priority a node leaves, -4 to 4."""
        self._require_node(node)
        return without_retention(rank_of(node)) + PRIORITY_MIN

    def _end_retentions(self) -> None:
        """Give back their own priority to what is retained no longer."""
        for node in self._ranked.ended(self._now):
            self._rank(node, without_retention(rank_of(node)), None)

    def _rank(self, node: Node, to: int, until: float | None) -> None:
        listed, node._states = node._states, 0
        self._refresh(node)
        node._states = states_of_rank(listed, to)
        self._refresh(node)
        if to == DEFAULT_RANK:
            self._ranked.drop(node)
        else:
            self._ranked.note(node, until)
