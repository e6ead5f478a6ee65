"""What the tree answers: plain values, nothing in them changes later but the nodes they name."""

from typing import NamedTuple

from hicache.node import Node
from hicache.residency import Residency
from hicache.tier import Slots, TierId

Freed = dict[TierId, Slots]
"""Slots that nobody uses any more, by tier; int32 arrays, no tier without slots. The receiver frees them, once."""


class Partial(NamedTuple):
    """The cached page that shares the longest further run of tokens with a prompt, beyond its last whole-page match.

    Copy-on-write: the page belongs to the tree and holds other tokens after the shared ones. A reader pins its node,
    copies the first `num_tokens` tokens' KV into a fresh page of its own, and unpins; it never writes into the slot,
    and never publishes the copy as this page.
    """

    node: Node
    """Where the page is."""
    page: int
    """Index of the page in `node`, from 0."""
    num_tokens: int
    """Tokens shared beyond `Match.num_tokens`, 1 to page_size - 1."""


class Match(NamedTuple):
    """The longest cached prefix of a prompt."""

    nodes: tuple[Node, ...]
    """Nodes of the matched path, root side first; the last one may be matched in part."""
    num_tokens: int
    """Tokens matched: a multiple of the page size."""
    pages_in_last: int
    """Pages of the last node that match, 1 to its `num_pages`; 0 when nothing matched."""
    partial: Partial | None
    """The best page to copy part of, if any page shares a token beyond the match."""
    owner: bytes = b""
    """Digest of the namespace whose pages `nodes` are, 32 bytes: the one asked for, or that of another tenant who
    published them. The partial may be another one's again: its node names it."""
    asked: bytes = b""
    """Digest of the namespace that was asked for, 32 bytes."""


class Inserted(NamedTuple):
    """What an insert did."""

    node: Node
    """The node that ends where the inserted tokens end."""
    num_stored: int
    """Pages whose slots were taken over by the tree."""
    duplicates: Slots
    """Slots given for pages that the tier already holds, int32, in page order: the caller frees them."""
    freed: Freed
    """Slots of other pages, which left the tree because its metadata had reached the budget: the caller frees them."""
    num_dropped: int
    """How many pages these were."""


class Finished(NamedTuple):
    """What became of a move."""

    nodes: tuple[Node, ...]
    """Live nodes over the pages that are now resident in the target, root side first."""
    freed: Freed
    """Target slots of failed pages, and all slots of pages that were removed meanwhile."""


class Removed(NamedTuple):
    """What a removal did, and what it could not do."""

    freed: Freed
    """Slots to free now."""
    num_pages: int
    """Pages that left: the tree, or for a flush of one tier that tier. None of them is served any more."""
    num_pending: int
    """Slots among them that a pin or a move still uses: they come back through `unpin` and `finish_move`."""
    held: tuple[Node, ...]
    """Nodes that stayed because a lease ends at them or below them, in no particular order."""


class Occupancy(NamedTuple):
    """Pages of one tier that the tree accounts for, by state. Their sum is the number of slots it holds there."""

    resident: int
    arriving: int
    condemned: int

    @property
    def total(self) -> int:
        """Slots in use."""
        return self.resident + self.arriving + self.condemned


class NodeInfo(NamedTuple):
    """A node as `walk` saw it."""

    node: Node
    namespace: bytes
    """Digest of its namespace."""
    tenant: str
    first_page: int
    """Pages between the root and the node's first page."""
    num_pages: int
    residency: tuple[Residency, ...]
    """State in each tier, fast to slow."""
    last_access: float
    """Monotonic seconds."""
    num_uses: int
    """Requests that were given it, see `Node.num_uses`."""
    num_leases: int
    num_children: int
    is_published: bool
    """Whether other tenants may read its pages."""
    reported: dict[TierId, int]
    """How many of its pages engines say they have, by `device:<session>/<rank>`: a hint. None who has none."""


class PublicationInfo(NamedTuple):
    """A published prefix, as it is now."""

    node: Node
    """Where it ends."""
    namespace: bytes
    """Digest of the publisher's namespace."""
    tenant: str
    """Who published it."""
    num_pages: int
    """Pages from the root that are published."""
    readers: dict[str, float]
    """When each other tenant last used one of its pages, monotonic seconds. Not shown to the publisher."""
