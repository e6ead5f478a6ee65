"""What engines say they have on their own devices: hints about pages, by tier instance `device:<session>/<rank>`.

What an instance reported is shown and may be used for planning. It is no residency: nothing is ever read from there, no
page stays in the tree for it, and whether it is true is the engine's business. So it lives beside the nodes, costs
nothing while nobody reports, and is dropped with the session.

For a node and an instance there is one integer: bit i is set when page i of the node was reported. A split cuts it, a
merge joins it. Pages that leave the tree take their reports with them.

All reports together are bounded in bytes. What would pass the bound is not kept, and counted: what is known already
stays known, and losing a hint costs no more than not having had it.
"""

from typing import Final

from hicache.collector import untrack
from hicache.metadata import REPORT_BYTES
from hicache.node import Box, Node
from hicache.tier import TierId

OfNode = dict[TierId, int]
"""By instance, which pages of a node it has: never 0."""


class Reports:
    """The reports, by node and by tier instance. Called by the tree alone.

    All containers are kept from the collector's sight. Nodes stand in them by their `Node.box`, so that dictionaries
    stay untracked; any tuple of the node finds them.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes: Final = max_bytes
        self.by_node: Final[dict[Box, tuple[OfNode]]] = {}
        self.nodes_of: Final[dict[TierId, set[Box]]] = {}
        self.num_bytes = 0
        """What all reports take, by the estimate of `_cost`."""
        self.num_dropped = 0
        """Reports about one node that the bound did not allow."""
        untrack(self.by_node)

    def note(self, node: Node, instance: TierId, pages: int, resident: bool) -> bool:
        """The pages of `node` whose bits are set are, or are no longer, on the instance's device. False where that is
        not kept for want of room; what was known of the node then stays."""
        known = self.of(node).get(instance, 0)
        wanted = known | pages if resident else known & ~pages
        if self.num_bytes - _cost(known) + _cost(wanted) > self.max_bytes and wanted & ~known:
            self.num_dropped += 1
            return False
        self._put(node, instance, wanted)
        return True

    def of(self, node: Node) -> OfNode:
        """By instance, which pages of a node it has: never 0."""
        reports = self.by_node.get((node,))
        return reports[0] if reports is not None else {}

    def counts(self, node: Node) -> dict[TierId, int]:
        """By instance, how many pages of a node it has."""
        return {instance: pages.bit_count() for instance, pages in self.of(node).items()}

    def split(self, upper: Node, lower: Node) -> None:
        """`lower` was split, and has lost its first pages to `upper`."""
        border = upper._num_pages
        for instance, pages in list(self.of(lower).items()):
            self._put(lower, instance, pages >> border)
            self._put(upper, instance, pages & (1 << border) - 1)

    def merge(self, upper: Node, lower: Node) -> None:
        """`upper` is about to be joined into `lower`, in front of its pages."""
        border = upper._num_pages
        above, below = self.of(upper).copy(), self.of(lower).copy()
        self.leave(upper)
        for instance in {**above, **below}:
            self._put(lower, instance, below.get(instance, 0) << border | above.get(instance, 0))

    def leave(self, node: Node) -> None:
        """A node is about to leave the tree."""
        for instance in list(self.of(node)):
            self._put(node, instance, 0)

    def drop(self, instance: TierId) -> int:
        """Forget what one instance said; returns the pages it was about."""
        num_pages = 0
        for (node,) in list(self.nodes_of.get(instance, ())):
            num_pages += self.of(node)[instance].bit_count()
            self._put(node, instance, 0)
        return num_pages

    def _put(self, node: Node, instance: TierId, pages: int) -> None:
        """Replace what an instance said of a node; nothing of it is kept where the bound would be passed."""
        reports = self.of(node)
        self.num_bytes -= _cost(reports.get(instance, 0))
        if pages and self.num_bytes + _cost(pages) > self.max_bytes:
            self.num_dropped += 1
            pages = 0
        if pages:
            self.num_bytes += _cost(pages)
            if not reports:
                untrack(reports)
                boxed = (reports,)
                untrack(boxed)
                self.by_node[node.box] = boxed
            if instance not in reports:
                nodes = self.nodes_of.get(instance)
                if nodes is None:
                    nodes = self.nodes_of[instance] = set()
                    untrack(nodes)
                nodes.add(node.box)
            reports[instance] = pages
        elif instance in reports:
            del reports[instance]
            if not reports:
                del self.by_node[node,]
            nodes = self.nodes_of[instance]
            nodes.remove((node,))
            if not nodes:
                del self.nodes_of[instance]


def _cost(pages: int) -> int:
    """About the bytes that a report takes: nothing where there is none."""
    return REPORT_BYTES + pages.bit_length() // 8 if pages else 0
