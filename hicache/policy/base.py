"""The contract of an eviction policy. One instance serves one tier, over all namespaces."""

from collections.abc import Iterator
from typing import Protocol

from hicache.node import Node


class EvictionPolicy(Protocol):
    """An index over the nodes that may leave one tier now, in the order in which they should.

    The tree feeds it, from one thread, and keeps this true: what was added and not discarded is a live node, resident
    in the tier, without a child in the tier, neither pinned nor moving, and able to leave (evicted, or demoted to a
    slower tier). Nothing here raises for what a caller of the tree does, waits, or changes a node. Every call must cost
    O(log n) at most; a victim that is taken comes back as `discard`.
    """

    def add(self, node: Node, now: float) -> None:
        """The node may leave from now on. `node.last_access` is when it was last used, which may be long ago: an inner
        node becomes a leaf of its tier when its last child leaves."""
        ...

    def discard(self, node: Node) -> None:
        """The node may not leave any more, or has left. It was added before."""
        ...

    def touch(self, node: Node, now: float) -> None:
        """An added node was used at `now`; `node.last_access` is already `now`. Times never go backwards."""
        ...

    def split(self, upper: Node, lower: Node) -> None:
        """An added node was split: `lower` is that same object, with fewer pages, and stays added; `upper` is new and
        comes by `add` when it may leave."""
        ...

    def victims(self) -> Iterator[Node]:
        """The added nodes, next to leave first. Valid until the next call that changes the index."""
        ...
