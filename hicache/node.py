"""A node of the tree: a run of whole pages, and where copies of them are.

Callers read nodes; only `hicache.tree` writes them. **A node in the tree always stands for the same prefix**: the
tokens from the root to its end never change while it lives. Splits keep the object as the lower half and merges keep
the lower one, so its beginning may move up or down, its end does not. A node that left the tree (`is_live` is false)
was removed, or merged into the one below it (`HiRadixTree.current` finds that).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from hicache.collector import untrack
from hicache.errors import BadRequest
from hicache.namespace import Namespace
from hicache.residency import Residency
from hicache.sortedchunks import SortedChunks
from hicache.tier import Slots, TierId

if TYPE_CHECKING:
    from hicache.lease import Hold

MAX_TIERS: Final = 8
"""Most tiers of one tree: states are kept as bit masks of eight tiers each."""
TIER_MASK: Final = (1 << MAX_TIERS) - 1
# A node's states are three masks over tier indices in one integer, and a few bits above them.
ARRIVING_SHIFT: Final = MAX_TIERS
CONDEMNED_SHIFT: Final = 2 * MAX_TIERS
PUBLISHED: Final = 1 << 3 * MAX_TIERS
"""Set in the states of a node whose pages other tenants may read (`hicache.published`)."""
RANK_SHIFT: Final = 3 * MAX_TIERS + 1
"""From this bit of the states on: the rank by which a node leaves, 0 for the ordinary one (`hicache.care`)."""
RANK_MASK: Final = (1 << 5) - 1
# How many children are in a tier (ARRIVING or RESIDENT): one field of 32 bits a tier in one integer.
COUNT_BITS: Final = 32
COUNT_MASK: Final = (1 << COUNT_BITS) - 1


Box = tuple["Node"]
"""A node in a tuple of its own: as key or value it leaves a dictionary untracked (`hicache.collector`)."""


class Node:
    """A run of whole pages below `parent`.

    Its tokens are `_key` (the first page, which is also its key among its siblings) and, for the pages after the first,
    `_buffer[_start:]`. Halves of a split share a buffer until one of them needs less than half of it.

    `_slots` holds the slot ids of each tier that has or awaits a copy, one tier after the other, fast to slow. With one
    tier it may go on behind them, to twice their number: what a split cut off is not worth a copy of the rest.

    Parents and children refer to each other unseen by the collector: the tree unlinks what leaves.
    """

    __slots__ = (
        "_buffer",
        "_chain",
        "_children",
        "_holds",
        "_in_tier",
        "_key",
        "_last_access",
        "_listed",
        "_num_leases",
        "_num_pages",
        "_num_uses",
        "_order",
        "_parent",
        "_root",
        "_slots",
        "_start",
        "_states",
    )

    _root: "Root"

    def __init__(self, root: "Root | None", key: bytes, buffer: bytes, start: int, num_pages: int) -> None:
        if root is not None:
            self._root = root
        self._key = key
        self._buffer = buffer
        self._start = start
        self._num_pages = num_pages
        self._parent: Node | None = None
        self._children: dict[bytes, Box] | None = None
        self._order: SortedChunks[bytes] | None = None
        self._states = 0
        self._slots = b""
        self._in_tier = 0
        self._listed = 0
        self._holds: tuple[Hold, ...] = ()
        self._last_access = 0.0
        self._num_leases = 0
        self._num_uses = 0
        self._chain: bytes | None = None
        untrack(self)

    @property
    def num_pages(self) -> int:
        """Pages in the run, at least 1."""
        return self._num_pages

    @property
    def parent(self) -> "Node | None":
        """The node above; None for a node that begins at the root, and for one that left the tree."""
        parent = self._parent
        return parent if parent is not None and parent is not self._root else None

    @property
    def children(self) -> tuple["Node", ...]:
        """The nodes directly below, in no particular order."""
        return tuple(child_nodes(self)) if self.is_live else ()

    @property
    def box(self) -> Box:
        """The node as a key or value of large dictionaries: see `Box`. Always the same object; of a live node only."""
        siblings = self._parent._children if self._parent is not None else None
        assert siblings is not None, "a node that left has no box"
        return siblings[self._key]

    @property
    def is_live(self) -> bool:
        """Whether the node is in the tree."""
        return self._parent is not None

    @property
    def namespace(self) -> bytes:
        """Digest of the namespace, 32 bytes."""
        return self._root.digest

    @property
    def record(self) -> Namespace:
        """The namespace itself."""
        return self._root.identity

    @property
    def tenant(self) -> str:
        """Who owns the pages."""
        return self._root.owner

    @property
    def last_access(self) -> float:
        """Monotonic seconds of the last use of this node or of anything below it."""
        return self._last_access

    @property
    def num_uses(self) -> int:
        """Requests that were given this node since its pages entered the tree, see `HiRadixTree.count_use`. Halves of a
        split begin with what the whole had, and of joined runs the greater count stands for both. Not kept over a
        restart."""
        return self._num_uses

    @property
    def num_leases(self) -> int:
        """Leases that end exactly at this node."""
        return self._num_leases

    def residency(self, tier: TierId) -> Residency:
        """State of the copy in `tier`; raises `BadRequest` for a tier that the tree does not have."""
        index = tier_index(self._root.tiers, tier)
        return state_of(self._states, index)

    def slots(self, tier: TierId) -> Slots:
        """Slots in `tier`, int32 `[num_pages]`, read-only; empty `[0]` when the tier holds none for this node.

        Those of an ARRIVING or CONDEMNED copy are given too: look at `residency` before reading what is in them.
        """
        return np.frombuffer(slots_of(self, tier_index(self._root.tiers, tier)), np.int32)

    @property
    def is_published(self) -> bool:
        """Whether other tenants may read the node's pages."""
        return bool(self._states & PUBLISHED)

    def is_pinned(self, tier: TierId) -> bool:
        """Whether a pin or a move uses the copy in `tier`."""
        bit = 1 << tier_index(self._root.tiers, tier)
        return any(hold._tiers & bit for hold in self._holds)

    def __repr__(self) -> str:
        return f"<Node {self._num_pages} pages, {'live' if self.is_live else 'gone'}, {len(self.children)} children>"


class Root(Node):
    """Where a namespace's tree begins: holds no page, is nobody's child, and is gone when it has no children."""

    __slots__ = ("digest", "identity", "owner", "tiers")

    def __init__(self, namespace: Namespace, tiers: Mapping[TierId, int]) -> None:
        super().__init__(None, b"", b"", 0, 0)
        self._root = self
        self._chain = self.digest = namespace.digest
        self.identity = namespace
        self.owner = namespace.tenant
        self.tiers = tiers


def child_nodes(node: Node) -> list[Node]:
    """The nodes directly below, as a list that later changes leave alone."""
    return [child for (child,) in node._children.values()] if node._children else []


def make_box(node: Node) -> Box:
    """The one box of a node: made when it is linked to its parent."""
    box = (node,)
    untrack(box)
    return box


def slots_of(node: Node, index: int) -> bytes:
    """Packed slots of a node in tier `index`, none when it is ABSENT there."""
    held = held_tiers(node._states)
    if not held >> index & 1:
        return b""
    size = 4 * node._num_pages
    start = (held & (1 << index) - 1).bit_count() * size
    return node._slots[start : start + size]


def tier_index(tiers: Mapping[TierId, int], tier: TierId) -> int:
    """Index of a tier, 0 for the fastest; raises `BadRequest` when it is none of the tree's."""
    try:
        return tiers[tier]
    except (KeyError, TypeError):
        raise BadRequest("tier", f"{tier!r} is none of {', '.join(tiers)}") from None


def held_tiers(states: int) -> int:
    """Bit mask of the tiers in which a node is not ABSENT, from its packed states."""
    return (states | states >> ARRIVING_SHIFT | states >> CONDEMNED_SHIFT) & TIER_MASK


_BIT: Final = {
    Residency.ABSENT: 0,
    Residency.ARRIVING: 1 << ARRIVING_SHIFT,
    Residency.RESIDENT: 1,
    Residency.CONDEMNED: 1 << CONDEMNED_SHIFT,
}
_BITS: Final = 1 | 1 << ARRIVING_SHIFT | 1 << CONDEMNED_SHIFT
_STATE: Final = {bit: state for state, bit in _BIT.items()}


def state_of(states: int, index: int) -> Residency:
    """State of tier `index` in a node's packed states."""
    return _STATE[states >> index & _BITS]


def with_state(states: int, index: int, state: Residency) -> int:
    """A node's packed states with tier `index` in `state`."""
    return states & ~(_BITS << index) | _BIT[state] << index
