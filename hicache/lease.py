"""Handles that hold parts of the tree: leases hold that pages exist, pins and moves hold their copies in one tier.

    Lease   some copy of every page from the root to the lease's end; has an owner, a generation and maybe a deadline
    Pin     the copies in one tier, so that addresses stay good; in-process, ends only by `unpin`
    Move    the copy it reads in the source tier and the slots it fills in the target tier; ends only by `finish_move`

Only the tree makes and changes them. A split gives both halves to every pin and move; the lease stays at its end, which
is the end of the lower half, the half that keeps the node's identity.
"""

from hicache.collector import untrack
from hicache.node import Node
from hicache.tier import TierId


class Lease:
    """A hold on the existence of a prefix. Made by `HiRadixTree.lease`; generations are never used twice."""

    __slots__ = ("_deadline", "_generation", "_node", "_owner")

    def __init__(self, node: Node | None, owner: str, generation: int, deadline: float | None) -> None:
        self._node = node
        self._owner = owner
        self._generation = generation
        self._deadline = deadline
        untrack(self)  # there may be as many as nodes, and nothing refers back to one

    @property
    def node(self) -> Node | None:
        """The node at whose end the leased prefix ends; None for an empty prefix and once the lease has ended."""
        return self._node

    @property
    def owner(self) -> str:
        """Who may release it."""
        return self._owner

    @property
    def generation(self) -> int:
        """Number of this lease in its tree, from 1, never used twice."""
        return self._generation

    @property
    def deadline(self) -> float | None:
        """Monotonic seconds at which `expire` ends it; None for never."""
        return self._deadline

    def __repr__(self) -> str:
        return f"Lease(owner={self._owner!r}, generation={self._generation}, deadline={self._deadline})"


class Hold:
    """What pins and moves have in common: they keep slots of their nodes in some tiers from being reused."""

    __slots__ = ("_nodes", "_open", "_tiers")

    def __init__(self, nodes: list[Node], tiers: int) -> None:
        self._nodes = nodes
        self._tiers = tiers  # bit mask over tier indices
        self._open = True

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes held, in the order given; where one was split, its upper half before its lower half."""
        return tuple(self._nodes)

    @property
    def is_open(self) -> bool:
        """False once it was unpinned or finished."""
        return self._open

    @property
    def num_pages(self) -> int:
        """Pages of all nodes held."""
        return sum(node.num_pages for node in self._nodes)

    def _replace(self, node: Node, upper: Node) -> None:
        self._nodes.insert(self._nodes.index(node), upper)


class Pin(Hold):
    """A hold on copies in one tier: neither evicted nor reused until `HiRadixTree.unpin`."""

    __slots__ = ("_tier",)

    def __init__(self, nodes: list[Node], tier: TierId, tiers: int) -> None:
        super().__init__(nodes, tiers)
        self._tier = tier

    @property
    def tier(self) -> TierId:
        return self._tier


class Move(Hold):
    """One copy under way between two tiers, over a run of pages that was one node when it started."""

    __slots__ = ("_source", "_target")

    def __init__(self, node: Node, source: TierId, target: TierId, tiers: int) -> None:
        super().__init__([node], tiers)
        self._source = source
        self._target = target

    @property
    def source(self) -> TierId:
        return self._source

    @property
    def target(self) -> TierId:
        return self._target
