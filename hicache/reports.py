"""What engines say they have on their own devices: hints about pages, by tier instance `device:<session>/<rank>`.

What an instance reported is shown and may be used for planning. It is no residency: nothing is ever read from there, no
page stays in the tree for it, and whether it is true is the engine's business. So it lives beside the nodes, costs
nothing while nobody reports, and is dropped with the session.

For a node and an instance there is one integer: bit i is set when page i of the node was reported. A split cuts it, a
merge joins it. Pages that leave the tree take their reports with them.
"""

from typing import Final

from hicache.node import Node
from hicache.tier import TierId


class Reports:
    """The reports, by node and by tier instance. Called by the tree alone."""

    def __init__(self) -> None:
        self.by_node: Final[dict[Node, dict[TierId, int]]] = {}
        self.nodes_of: Final[dict[TierId, set[Node]]] = {}
        self.num_reports = 0
        """Pairs of a node and an instance."""

    def note(self, node: Node, instance: TierId, pages: int, resident: bool) -> None:
        """The pages of `node` whose bits are set are, or are no longer, on the instance's device."""
        known = self.by_node.get(node, {}).get(instance, 0)
        self._put(node, instance, known | pages if resident else known & ~pages)

    def of(self, node: Node) -> dict[TierId, int]:
        """By instance, which pages of a node it has: never 0."""
        return self.by_node.get(node, {})

    def counts(self, node: Node) -> dict[TierId, int]:
        """By instance, how many pages of a node it has."""
        return {instance: pages.bit_count() for instance, pages in self.of(node).items()}

    def split(self, upper: Node, lower: Node) -> None:
        """`lower` was split, and has lost its first pages to `upper`."""
        border = upper._num_pages
        for instance, pages in list(self.of(lower).items()):
            self._put(upper, instance, pages & (1 << border) - 1)
            self._put(lower, instance, pages >> border)

    def merge(self, upper: Node, lower: Node) -> None:
        """`upper` was joined into `lower`, whose first pages its own now are."""
        instances = {**self.of(upper), **self.of(lower)}
        for instance in instances:
            pages = self.of(lower).get(instance, 0) << upper._num_pages | self.of(upper).get(instance, 0)
            self._put(lower, instance, pages)
        self.leave(upper)

    def leave(self, node: Node) -> None:
        """A node has left the tree."""
        for instance in list(self.of(node)):
            self._put(node, instance, 0)

    def drop(self, instance: TierId) -> int:
        """Forget what one instance said; returns the pages it was about."""
        nodes = self.nodes_of.get(instance, set())
        num_pages = sum(self.by_node[node][instance].bit_count() for node in nodes)
        for node in list(nodes):
            self._put(node, instance, 0)
        return num_pages

    def _put(self, node: Node, instance: TierId, pages: int) -> None:
        if pages:
            reports = self.by_node.setdefault(node, {})
            self.num_reports += instance not in reports
            reports[instance] = pages
            self.nodes_of.setdefault(instance, set()).add(node)
            return
        reports = self.by_node.get(node, {})
        if instance not in reports:
            return
        del reports[instance]
        self.num_reports -= 1
        if not reports:
            del self.by_node[node]
        nodes = self.nodes_of[instance]
        nodes.remove(node)
        if not nodes:
            del self.nodes_of[instance]
