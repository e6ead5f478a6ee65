"""What a tier would find were it kept by some policy: the nodes without the pages."""

from collections.abc import Sequence
from typing import Final

from hicache.node import Node, Root, make_box
from hicache.policy.base import EvictionPolicy, HearsHints, HearsResidency, HearsShape, HearsUses, Hint, Use
from hicache.policy.history import prefix_of
from hicache.tier import HOST

_ONE_TIER: Final = {HOST: 0}  # nodes belong to a tree with tiers, which no policy looks at


class ShadowTier:
    """A tier of `capacity_pages` that takes in every prompt it is told of and evicts by `policy`.

    Its nodes are copies of those that were used, found by their prefixes. The tree that those are in goes its own way
    meanwhile: what was evicted there and comes back may be cut into nodes at other places, and then counts here by the
    longest of its prefixes that is known.
    """

    def __init__(self, policy: EvictionPolicy, capacity_pages: int) -> None:
        self.capacity_pages = capacity_pages
        self._policy = policy
        self._hears_uses = policy if isinstance(policy, HearsUses) else None
        self._hears_shape = policy if isinstance(policy, HearsShape) else None
        self._hears_residency = policy if isinstance(policy, HearsResidency) else None
        self._hears_hints = policy if isinstance(policy, HearsHints) else None
        self._nodes: dict[bytes, Node] = {}
        self._root: Root | None = None
        self._pages = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def use(self, use: Use) -> int:
        """A prompt was used: take it in. Returns how many of its pages were here before."""
        if self._root is None:
            self._root = Root(use.path[0].record, _ONE_TIER)
        policy, now = self._policy, use.now
        # Not until now: the last prompt may have been hinted at since.
        while self._pages > self.capacity_pages and self._nodes:
            self._evict(next(policy.victims()), now)
        mine, num_known = self._known(use.path)
        found = sum([node.num_pages for node in mine])
        for node in mine:
            node._last_access = now
        if mine and not mine[-1]._children:
            policy.touch(mine[-1], now)
            if num_known < len(use.path):
                policy.discard(mine[-1])
        for node in use.path[num_known:]:
            mine.append(self._enter(mine[-1] if mine else self._root, node, now))
        if num_known < len(use.path):
            policy.add(mine[-1], now)
        if self._hears_uses is not None:
            self._hears_uses.used(Use(mine, now))
        return found

    def hinted(self, path: Sequence[Node], hint: Hint, now: float) -> None:
        """A prompt was hinted at, as `HearsHints` says it."""
        if self._hears_hints is not None:
            mine, _ = self._known(path)
            if mine:
                self._hears_hints.hinted(mine, hint, now)

    def split(self, upper: Node, lower: Node) -> None:
        """A node was split, as `HearsShape` says it."""
        known = self._nodes.get(prefix_of(lower))
        if known is None or prefix_of(upper) in self._nodes or known.num_pages <= upper.num_pages:
            return
        above = known._parent
        assert above is not None
        assert above._children is not None
        new = self._new_node(above, prefix_of(upper), upper.num_pages)
        new._last_access = known._last_access
        del above._children[known._key]
        known._parent, known._num_pages = new, known.num_pages - upper.num_pages
        new._children = {known._key: make_box(known)}
        if self._hears_shape is not None or not known._children:
            self._policy.split(new, known)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _known(self, path: Sequence[Node]) -> tuple[list[Node], int]:
        """The nodes here down to the longest known prefix of a path, and how many of the path's that covers."""
        for num_known in range(len(path), 0, -1):
            node = self._nodes.get(prefix_of(path[num_known - 1]))
            if node is not None:
                mine = list[Node]()
                while node is not None:
                    mine.append(node)
                    node = node.parent
                return mine[::-1], num_known
        return [], 0

    def _new_node(self, above: Node, prefix: bytes, num_pages: int) -> Node:
        node = Node(self._root, prefix, b"", 0, num_pages)
        node._chain = prefix
        node._parent = above
        if above._children is None:
            above._children = {}
        above._children[prefix] = make_box(node)
        self._nodes[prefix] = node
        return node

    def _enter(self, above: Node, node: Node, now: float) -> Node:
        new = self._new_node(above, prefix_of(node), node.num_pages)
        new._last_access = now
        self._pages += new.num_pages
        if self._hears_residency is not None:
            self._hears_residency.entered(new)
        return new

    def _evict(self, node: Node, now: float) -> None:
        above = node._parent
        assert above is not None
        assert above._children is not None
        self._policy.discard(node)
        if self._hears_residency is not None:
            self._hears_residency.left(node)
        del above._children[node._key], self._nodes[prefix_of(node)]
        node._parent = None
        self._pages -= node.num_pages
        if not above._children and above is not self._root:
            self._policy.add(above, now)
