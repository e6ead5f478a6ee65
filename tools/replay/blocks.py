"""A cache of one tier over blocks of a trace: the fast way to ask what a policy would have kept.

It drives the very policy objects that a cache uses, with one node a block. What it leaves out of a real cache is what
no policy sees: bytes, slots and moves. A prompt enters whole, then blocks leave until the rest fits; so a policy may
refuse what has just come by naming it first.
"""

from collections.abc import Sequence
from typing import Final

from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.node import Node, Root, make_box
from hicache.policy.base import EvictionPolicy, HearsHints, HearsResidency, HearsUses, Hint, Use
from hicache.tier import HOST

ID_BYTES: Final = 8
# Nodes belong to some namespace; no policy looks at its layout.
_LAYOUT: Final = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=8, dtype=KVDtype.BFLOAT16, page_size=1)
_NAMESPACE: Final = Namespace(model="replay", layout=_LAYOUT)


def block_root() -> Root:
    """What the nodes of blocks lie below."""
    return Root(_NAMESPACE, {HOST: 0})


def block_node(root: Root, parent: Node, block: int) -> Node:
    """A node of one block, as policies see it. Its parent does not know of it."""
    key = block.to_bytes(ID_BYTES, "little")
    node = Node(root, key, b"", 0, 1)
    node._chain = key  # chained ids are digests of their prefixes
    node._parent = parent
    return node


class BlockCache:
    """At most `capacity_blocks` blocks, evicted by `policy`. Ids are chained: equal id means equal whole prefix."""

    def __init__(self, policy: EvictionPolicy, capacity_blocks: int) -> None:
        self._policy = policy
        self._residency = policy if isinstance(policy, HearsResidency) else None
        self._uses = policy if isinstance(policy, HearsUses) else None
        self._hints = policy if isinstance(policy, HearsHints) else None
        self._capacity = capacity_blocks
        self._root = block_root()
        self._nodes: dict[int, Node] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def request(self, blocks: Sequence[int], now: float, *, returns: bool | None = None) -> int:
        """Look a prompt up and keep it; returns how many of its blocks, from the first on, were there. `returns` is
        what its caller knows: whether a later prompt goes on from it."""
        nodes, policy = self._nodes, self._policy
        path: list[Node] = []
        for block in blocks:
            node = nodes.get(block)
            if node is None:
                break
            node._last_access = now
            path.append(node)
        found = len(path)
        if path and not path[-1]._children:
            policy.touch(path[-1], now)
            if found < len(blocks):
                policy.discard(path[-1])
        for block in blocks[found:]:
            path.append(self._enter(path[-1] if path else self._root, block, now))
        if found < len(path):
            policy.add(path[-1], now)
        if self._uses is not None and path:
            self._uses.used(Use(path, now))
        if self._hints is not None and path and returns is not None:
            self._hints.hinted(path, Hint(returns=returns), now)
        while len(nodes) > self._capacity:
            self._evict(next(policy.victims()), now)
        return found

    def _enter(self, parent: Node, block: int, now: float) -> Node:
        node = block_node(self._root, parent, block)
        node._last_access = now
        if parent._children is None:
            parent._children = {}
        parent._children[node._key] = make_box(node)
        self._nodes[block] = node
        if self._residency is not None:
            self._residency.entered(node)
        return node

    def _evict(self, node: Node, now: float) -> None:
        policy, parent = self._policy, node._parent
        assert parent is not None
        assert parent._children is not None
        policy.discard(node)
        if self._residency is not None:
            self._residency.left(node)
        del parent._children[node._key], self._nodes[int.from_bytes(node._key, "little")]
        node._parent = None
        if not parent._children and parent is not self._root:
            policy.add(parent, now)
