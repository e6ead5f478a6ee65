"""Which nodes may leave which tier, kept up to date with every change so that choosing a victim never walks the tree.

A node is listed in a tier while all of this holds there:

1. it is RESIDENT;
2. no child of it is RESIDENT or ARRIVING (it is a leaf of the tier: tails leave before heads);
3. no pin and no move uses the copy;
4. it can go down or need not: a slower tier exists, or another tier holds it, or it has neither leases nor children.
"""

from collections.abc import Iterator, Sequence

from hicache.lease import Hold
from hicache.node import COUNT_BITS, COUNT_MASK, TIER_MASK, Node
from hicache.policy.base import EvictionPolicy, HearsCopies, HearsResidency, HearsShape


class Evictable:
    """The listed nodes of every tier, each in its policy's order. `policies` are fast to slow, as the tiers are.

    With `droppable`, an order of its own over all tiers: the nodes that may leave the tree as they are, with all their
    copies. A node is listed there while it has no children, no leases and no holds.

    `listeners` keep no order; they hear of shapes as policies do, and of copies.
    """

    def __init__(
        self,
        policies: Sequence[EvictionPolicy],
        droppable: EvictionPolicy | None = None,
        listeners: Sequence[HearsShape | HearsCopies] = (),
    ) -> None:
        self.policies = tuple(policies)
        """Of the tiers. In a node's listings, `droppable` has the bit after theirs."""
        self.droppable = droppable
        self._orders = self.policies if droppable is None else (*self.policies, droppable)
        # Asked once: `isinstance` of a protocol takes longer than a policy does.
        self._unshaped = sum([1 << at for at, each in enumerate(self._orders) if not isinstance(each, HearsShape)])
        self._shaped = tuple([each for each in (*self._orders, *listeners) if isinstance(each, HearsShape)])
        self.hear_copies = tuple([each for each in listeners if isinstance(each, HearsCopies)])
        """Who is told of copies that can be served."""
        self.is_shape_heard = bool(self._shaped)
        """Whether somebody hears of joins."""
        self.residents = tuple([each if isinstance(each, HearsResidency) else None for each in policies])
        """By tier: its policy where that hears of residency."""
        self._slowest = 1 << (len(policies) - 1)
        self._droppable = 0 if droppable is None else 1 << len(policies)

    def refresh(self, node: Node, now: float) -> None:
        """Bring a node's listings up to date with its states, holds, leases and children."""
        wanted = self.wanted(node)
        changed = wanted ^ node._listed
        if not changed:
            return
        node._listed = wanted
        for index, policy in enumerate(self._orders):
            if changed >> index & 1:
                if wanted >> index & 1:
                    policy.add(node, now)
                else:
                    policy.discard(node)

    def wanted(self, node: Node) -> int:
        """Bit mask of the orders in which the node should be listed: by tier index, then `droppable`."""
        states = node._states
        wanted = states & TIER_MASK
        if not wanted or node._parent is None:
            return 0
        if node._in_tier:
            wanted &= ~tiers_of_children(node)
        for hold in node._holds:
            wanted &= ~hold._tiers
        if wanted & self._slowest and states & TIER_MASK == self._slowest and (node._num_leases or node._children):
            wanted &= ~self._slowest
        if self._droppable and not (node._children or node._num_leases or node._holds):
            wanted |= self._droppable
        return wanted

    def touch(self, node: Node, now: float) -> None:
        """Tell the policies of the orders in which the node is listed that it was used."""
        listed = node._listed
        for index, policy in enumerate(self._orders):
            if listed >> index & 1:
                policy.touch(node, now)

    def split(self, upper: Node, lower: Node) -> None:
        """Tell the same policies, and whoever hears of shapes, that the node was split."""
        told = lower._listed & self._unshaped
        if told:
            for index, policy in enumerate(self._orders):
                if told >> index & 1:
                    policy.split(upper, lower)
        for each in self._shaped:
            each.split(upper, lower)

    def joined(self, upper: Node, lower: Node) -> None:
        """Tell whoever hears of shapes that `lower`, which is not listed, is to take the pages of `upper`."""
        for each in self._shaped:
            each.joined(upper, lower)

    def victims(self, index: int, num_pages: int) -> list[Node]:
        """Listed nodes of one tier in policy order, until they cover `num_pages`."""
        chosen: list[Node] = []
        if num_pages > 0:
            for node in self.policies[index].victims():
                chosen.append(node)
                num_pages -= node._num_pages
                if num_pages <= 0:
                    break
        return chosen

    def coldest(self) -> Iterator[Node]:
        """The droppable nodes, least recently used first; none without such an order."""
        return iter(()) if self.droppable is None else self.droppable.victims()


def tiers_of_children(node: Node) -> int:
    """Bit mask of the tiers in which at least one child is RESIDENT or ARRIVING."""
    counts, mask, bit = node._in_tier, 0, 1
    while counts:
        if counts & COUNT_MASK:
            mask |= bit
        counts >>= COUNT_BITS
        bit <<= 1
    return mask


def is_held(holds: Sequence[Hold], index: int) -> bool:
    """Whether one of `holds` uses tier `index`."""
    return any(hold._tiers >> index & 1 for hold in holds)
