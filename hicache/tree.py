"""The HiRadixTree: for every prefix, which tiers hold its pages.

One radix tree over token ids a namespace. A node is a run of whole pages with one residency a tier
(`hicache.residency`). Nodes and handles are written by this class alone, which is made of these parts:

    structure   linking, splitting and joining nodes, residencies and their counts
    leasing     leases                    moving    pins and moves
    leaving     eviction, removal, flush  publishing, reporting   prefixes for other tenants, hints of engines
    caring      by which rank pages leave       restoring   what survived a restart
    tree        matching, inserting, identities, inspection

Invariants, checked by `check_integrity` (`hicache.integrity`):

1.  A node holds at least one page; nodes split at page borders only.
2.  A child's key is its first page, it stands under that key in exactly one parent, and siblings differ in their first
    page. So every prefix of whole pages has at most one place.
3.  A node in the tree is RESIDENT in at least one tier. With 2: what is offered at depth k is offered at all depths
    before it. One tier alone may have holes.
4.  A slot of a tier belongs to at most one page, of a node in the tree or of one that left it with a CONDEMNED copy.
    What leaves is returned to the caller, exactly once. Per tier, page counts by state add up to what the nodes hold.
5.  A copy that a pin or a move uses is never given out: it stays, or becomes CONDEMNED until the last user ends.
    ARRIVING means that exactly one open move has the pair as its target. CONDEMNED means that some hold uses it.
6.  A leased node, and every node above one, stays in the tree until the lease ends; only a corrupt last copy
    (`forget`) breaks that, since there is nothing left to protect.
7.  A node's tokens from the root to its end never change while it is in the tree; who refers to a node refers to a
    prefix. A split keeps the object as the lower half, a merge keeps the lower one.
8.  No node was used more recently, or more often, than the node above it.
9.  The evictable lists hold exactly the nodes that `hicache.evictable` defines.
10. `match`, and everything else that only reads, changes none of this.
11. The published nodes are those on the paths to the ends of publications; another tenant's match never gives others.
12. Reports are about nodes in the tree. Nothing above depends on them.

The tree belongs to one thread, which is the event loop's. It does no I/O, never frees a slot, asks no clock (`now` is
monotonic seconds; one that went backwards counts as the latest seen), and does not wait. Input is checked before
anything is changed: a call that raises has changed nothing.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.arguments import moment, name, whole
from hicache.errors import BadRequest
from hicache.integrity import check_integrity
from hicache.lease import Lease, Move, Pin
from hicache.leasing import Leasing
from hicache.leaving import Leaving
from hicache.metadata import NODE_BYTES, ORDER_BYTES, ROOT_BYTES
from hicache.moving import Moving
from hicache.namespace import Namespace
from hicache.node import Node, Root, held_tiers, state_of, tier_index
from hicache.publishing import Publishing
from hicache.readable import Readable
from hicache.reporting import Reporting
from hicache.residency import Event, Residency
from hicache.restoring import Restoring, check_chain
from hicache.results import Finished, Freed, Inserted, Match, NodeInfo, Occupancy, Partial, Removed
from hicache.sortedchunks import SortedChunks
from hicache.structure import SLOT_BYTES, digest_of, pack_parts
from hicache.tier import PageIdentity, Slots, TierId, chain_digest
from hicache.tokens import (
    TOKEN_BYTES,
    check_ids,
    common_bytes,
    most_shared,
    pack_slots,
    pack_tokens,
    raw_bytes,
    view_tokens,
)
from hicache.walking import begins_at, below

__all__ = [
    "Finished",
    "Freed",
    "HiRadixTree",
    "Inserted",
    "Lease",
    "Match",
    "Move",
    "Node",
    "NodeInfo",
    "Occupancy",
    "Partial",
    "Pin",
    "Removed",
    "Residency",
    "pack_tokens",
]

NO_SLOTS: Final[Slots] = np.frombuffer(b"", np.int32)


class HiRadixTree(Leasing, Moving, Leaving, Publishing, Reporting, Restoring):
    """One radix tree a namespace over tiers of pages. See the module's docstring for the rules it keeps.

    `tiers` are the cache's own, fast to slow, at most 8, none twice. `policies` may name one policy object for any of
    them (never shared between tiers); the others get `LruPolicy`. `listeners`, which are none, hear of every split and
    join, or of every copy that can be served or no longer. `metadata_bytes` bounds the memory of the tree itself, as
    the property of that name estimates it: `insert` makes room below it. Splits for leases, moves and publications may
    pass it by a node each, and the next insert makes up for them.

    What lies beside the pages has bounds of its own, and is never a reason for a page to leave: `max_publications` (a
    further `publish` is refused) and `max_report_bytes` (a further report is not noted). `max_leases_per_owner`, None
    for no bound, limits the leases that one owner has at a time.
    """

    # -- matching -----------------------------------------------------------------------------------------------------

    def match(self, namespace: Namespace, tokens: npt.ArrayLike, *, published: bool = True) -> Match:
        """Find the longest cached prefix of `tokens` `[num_tokens]`, and the page that shares most of what follows.

        That is the namespace's own, unless other tenants have published a longer one (`publish`); `Match.owner` tells.
        Without `published` only the namespace's own pages are looked at.

        Changes nothing and lets nothing live longer: lease the match to keep it, touch its last node to count the use.
        Whatever is returned is in at least one tier. Raises `BadRequest` for tokens that are not token ids.
        """
        packed = view_tokens(tokens)
        num_bytes = len(packed) * TOKEN_BYTES
        digest = digest_of(namespace)
        root = self._roots.get(digest)
        if published and self._published.readable:
            readable = self._published.readable.get(namespace.scope)
            if readable is not None:
                return self._match_published(digest, root, readable, packed)
        if root is None or not num_bytes:
            check_ids("tokens", packed)
            return Match((), 0, 0, None, digest, digest)
        raw = raw_bytes(packed)
        path, position, inside = self._descend(root, raw, num_bytes)
        partial = None
        if position < num_bytes:
            check_ids("tokens", packed[position // TOKEN_BYTES :])
            partial = self._find_partial(path[-1] if path else root, inside, raw, position, num_bytes)
        return Match(tuple(path), position // TOKEN_BYTES, inside, partial, digest, digest)

    def match_after(self, node: Node, num_pages: int, tokens: npt.ArrayLike) -> Match:
        """`match` of the first `num_pages` pages on the path to `node`, which are known to be cached, and of `tokens`
        `[num_tokens]` behind them: only these are compared. Looks at the namespace's own pages alone.

        Raises `NotResident` for a node that left (`current` may know its heir), `BadRequest` unless `num_pages` is
        within 1 to the pages on that path, and for tokens that are not token ids.
        """
        self._require_live(node)
        packed = view_tokens(tokens)
        raw, num_bytes, page_bytes = raw_bytes(packed), len(packed) * TOKEN_BYTES, self._page_bytes
        path = self.path(node)
        pages = sum([step._num_pages for step in path])
        num_pages = whole("num_pages", num_pages, 1, pages)
        while num_pages <= pages - path[-1]._num_pages:
            pages -= path.pop()._num_pages
        last = path[-1]
        inside = num_pages - pages + last._num_pages
        start, rest = last._start + (inside - 1) * page_bytes, last._num_pages - inside
        limit = min(rest * page_bytes, num_bytes // page_bytes * page_bytes)
        common = common_bytes(last._buffer, start, raw, 0, limit) // page_bytes
        position, inside = common * page_bytes, inside + common
        if inside == last._num_pages:
            below, further, inside = self._descend(last, raw[position:], num_bytes - position)
            path += below
            position += further
        partial = None
        if position < num_bytes:
            check_ids("tokens", packed[position // TOKEN_BYTES :])
            partial = self._find_partial(path[-1], inside, raw, position, num_bytes)
        digest = node._root.digest
        num_tokens = (num_pages * page_bytes + position) // TOKEN_BYTES
        return Match(tuple(path), num_tokens, inside, partial, digest, digest)

    def _match_published(
        self, digest: bytes, root: Root | None, readable: Readable, packed: npt.NDArray[np.int32]
    ) -> Match:
        """The longest match of one's own tree and of what is published; one's own where they are as long.

        Among what is published may be one's own pages. They never win: one's own tree has them as well.
        """
        raw, num_bytes, page_bytes = raw_bytes(packed), len(packed) * TOKEN_BYTES, self._page_bytes
        path, own, inside = self._descend(root, raw, num_bytes) if root is not None else ([], 0, 0)
        run, shared, inside_run = readable.descend(raw, num_bytes)
        position, owner, best = max(own, shared), digest, None
        if position < num_bytes:
            check_ids("tokens", packed[position // TOKEN_BYTES :])
            if own == position and root is not None:
                best = self._find_partial(path[-1] if path else root, inside, raw, position, num_bytes)
            if shared == position:
                follower, most = readable.partial(run, inside_run, raw, position, num_bytes)
                if most > (best.num_tokens if best is not None else 0):
                    nodes, end = self._path_to(follower.publication().node, position // page_bytes + 1)
                    best = Partial(nodes[-1], end - 1, most)
        if shared > own:
            path, inside = self._path_to(run.publication().node, shared // page_bytes)
            owner = path[-1]._root.digest
        return Match(tuple(path), position // TOKEN_BYTES, inside, best, owner, digest)

    def _path_to(self, node: Node, num_pages: int) -> tuple[list[Node], int]:
        """The nodes of the first pages of the path to a node, and how many pages of the last of them these are."""
        nodes: list[Node] = []
        for step in self.path(node):
            nodes.append(step)
            if num_pages <= step._num_pages:
                break
            num_pages -= step._num_pages
        return nodes, num_pages

    def _find_partial(
        self, node: Node, inside: int, raw: memoryview | bytes, position: int, num_bytes: int
    ) -> Partial | None:
        """The page after the match that shares most of `raw[position:]`, at least one token."""
        page_bytes = self._page_bytes
        limit = min(page_bytes, num_bytes - position)
        if inside < node._num_pages:
            start = node._start + (inside - 1) * page_bytes
            shared = common_bytes(node._buffer, start, raw, position, limit) // TOKEN_BYTES
            return Partial(node, inside, shared) if shared else None
        children = node._children
        if not children:
            return None
        candidates: Iterable[bytes | None] = children
        if len(children) > 1:
            if node._order is None:
                node._order = SortedChunks(children)
            candidates = node._order.neighbours(bytes(raw[position : position + limit]))
        best, most = most_shared(candidates, raw, position, limit)
        return Partial(children[best][0], 0, most) if best is not None else None

    # -- inserting ----------------------------------------------------------------------------------------------------

    def insert(
        self,
        namespace: Namespace,
        tokens: npt.ArrayLike,
        *,
        tier: TierId,
        slots: npt.ArrayLike,
        first_page: int = 0,
        chain: bytes | None = None,
        now: float,
    ) -> Inserted:
        """Publish pages: `tokens` are whole pages from the root, `slots` those of pages `first_page` and on, none of
        them another page's in that tier: the tree takes the caller's word for it.

        Pages before `first_page` must be in the tree. A new page becomes resident in `tier`; a known one that is absent
        there gets the slot as a further copy; of one that is there already (or arriving, or still being removed) the
        slot comes back in `Inserted.duplicates`. Counts as a use of the whole path at `now`. Splits where needed, and
        joins runs of equal residency behind it, so that a sequence published page by page does not become a chain.

        `chain` is the digest of the chain at the end of the last page (`PageIdentity.chain`), where the caller has it:
        the tree, which takes his word for it, need not hash the tokens again.

        Where the tree's metadata would grow past its budget, whole nodes leave first, with all their copies: the
        coldest that have no children, no leases and no holds, over all tiers and namespaces, never one of this path.
        Their slots come back in `Inserted.freed`.

        Raises `BadRequest` naming the field: tokens that are no token ids, not whole pages, or none; slots that do not
        match the pages, are negative or named twice; an unknown tier; a `chain` that is no digest; a `first_page` past
        what the tree knows. `NoRoom` naming "metadata" when not enough can leave.
        """
        index = tier_index(self._tier_index, tier)
        packed = view_tokens(tokens)
        num_pages, odd = divmod(len(packed), self.page_size)
        if odd or not num_pages:
            raise BadRequest("tokens", f"{len(packed)} tokens are not one or more whole pages of {self.page_size}")
        first_page = whole("first_page", first_page, 0, num_pages)
        now = moment("now", now)
        new_slots = pack_slots(slots, num_pages - first_page).tobytes()
        if chain is not None:
            check_chain(chain)
        page_bytes = self._page_bytes
        raw = raw_bytes(packed)
        digest = digest_of(namespace)
        root = self._roots.get(digest)
        path: list[Node] = []
        position = inside = 0
        if root is None:
            self._require_page_size(namespace)
        else:
            path, position, inside = self._descend(root, raw, packed.nbytes)
        matched = position // page_bytes
        if matched < num_pages:
            check_ids("tokens", packed[position // TOKEN_BYTES :])
            if matched < first_page:
                raise BadRequest("first_page", f"{first_page} is past the {matched} pages that are in the tree")
        leaving: list[Node] = []
        if self.metadata_budget is not None:
            growth = self._growth(root, path, inside, index, first_page, matched, num_pages)
            leaving = self._plan_room(growth, root, path, num_pages - matched)

        # From here on nothing fails.
        self._advance(now)
        freed: Freed = {}
        num_dropped = 0
        if leaving:
            num_dropped = sum([node._num_pages for node in leaving])
            freed = self._drop(leaving)
            # The path has not become shorter, but its nodes may have been joined.
            root = self._roots.get(digest)
            if root is not None:
                path, position, inside = self._descend(root, raw, packed.nbytes)
        if root is None:
            root = self._roots[digest] = Root(namespace, self._tier_index)
        node: Node = root
        if path:
            node = path[-1]
            if inside < node._num_pages:
                node = path[-1] = self._split(node, inside)
            for step in path:
                self._use(step)
        duplicates: list[bytes] = []
        num_stored = 0
        if matched > first_page:
            num_stored = self._add_copies(path, index, new_slots, first_page, duplicates)
        if matched < num_pages:
            known = max(0, matched - first_page) * SLOT_BYTES
            first = position + self._page_bytes
            key, rest = bytes(raw[position:first]), bytes(raw[first:])
            node = self._attach(node, key, rest, index, new_slots[known:], chain)
            num_stored += node._num_pages
            if node._parent is not root:
                self._merge_upwards(node)
        given_back = pack_parts(duplicates) if duplicates else NO_SLOTS
        return Inserted(node, num_stored, given_back, freed, num_dropped)

    def _growth(
        self,
        root: Root | None,
        path: list[Node],
        inside: int,
        index: int,
        first_page: int,
        matched: int,
        num_pages: int,
    ) -> int:
        """Bytes of metadata that an insert adds, before runs are joined behind it."""
        node_bytes, slots, splits = NODE_BYTES + ORDER_BYTES, 0, []
        if path and inside < path[-1]._num_pages:
            splits.append(path[-1])
        start, copies = 0, 0
        for node in path:
            end = min(matched, start + node._num_pages)
            if end > first_page and state_of(node._states, index) is Residency.ABSENT:
                slots += end - max(first_page, start)
                copies += 1
                if start < first_page:
                    splits.append(node)
            start = end
        growth = copies * ORDER_BYTES
        for node in splits:
            growth += node_bytes + held_tiers(node._states).bit_count() * ORDER_BYTES
        if matched < num_pages:
            slots += num_pages - matched
            growth += node_bytes + ORDER_BYTES + (num_pages - matched) * self._page_bytes
        return growth + slots * SLOT_BYTES + (root is None) * ROOT_BYTES

    def _add_copies(
        self, path: list[Node], index: int, slots: bytes, first_page: int, duplicates: list[bytes]
    ) -> int:
        """Give known pages from `first_page` on their slots where the tier has none; the others are duplicates."""
        stored = start = 0
        for node in path:
            end = start + node._num_pages
            if end > first_page:
                begin = max(first_page, start)
                piece = slots[(begin - first_page) * SLOT_BYTES : (end - first_page) * SLOT_BYTES]
                if state_of(node._states, index) is not Residency.ABSENT:
                    duplicates.append(piece)
                else:
                    if begin > start:
                        self._split(node, begin - start)
                    self._give_slots(node, index, piece)
                    self._apply(node, index, Event.STORED)
                    self._refresh(node)
                    stored += node._num_pages
            start = end
        return stored

    def touch(self, node: Node, now: float, *, reader: Namespace | None = None) -> None:
        """Count a use of `node` and of every node above it. A node that was merged stands for its heir, a removed one
        for nothing.

        `reader` is whose use it is, where that is not the node's own namespace. Recency is kept per tenant: a use by
        another tenant is noted with the publications that cover the node, and moves nothing of the owner's.

        One step up the path costs a store; policies hear only of the nodes they list, few on any path: a node is
        listed in a tier only when nothing below it is there.
        """
        step = self.current(node)
        read_as = None if reader is None else digest_of(reader)
        self._advance(moment("now", now))
        if reader is not None and step is not None and step._root.digest != read_as:
            self._published.read(step, reader.scope, reader.tenant, self._now)
            return
        while step is not None and step._parent is not None:
            self._use(step)
            step = step._parent

    def count_use(self, node: Node) -> None:
        """A request was given the pages down to `node`: count that with it and every node above it. Once a request, and
        apart from `touch`: what is fetched ahead or stored again is used recently, and not once more. A node that was
        merged stands for its heir, a removed one for nothing."""
        step = self.current(node)
        while step is not None and step._parent is not None:
            step._num_uses += 1
            step = step._parent

    # -- identity and inspection --------------------------------------------------------------------------------------

    def identities(self, node: Node) -> list[PageIdentity]:
        """The identity of each of the node's own pages, in order.

        The digest of the chain up to a node's end is kept with the node: it stays right for as long as the node lives
        (invariant 7), so a path is hashed once.
        """
        self._require_live(node)
        unknown: list[Node] = []
        step = node._parent
        while step is not None and step._chain is None:
            unknown.append(step)
            step = step._parent
        for above in reversed(unknown):
            assert above._parent is not None
            self._digest_pages(above)
        return self._digest_pages(node)

    def _digest_pages(self, node: Node) -> list[PageIdentity]:
        chain = node._parent._chain if node._parent is not None else None
        assert chain is not None, "digests are made from the root down"
        data, step, namespace = self._node_bytes(node), self._page_bytes, node._root.digest
        pages: list[PageIdentity] = []
        for at in range(0, len(data), step):
            pages.append(PageIdentity(namespace, chain, data[at : at + step]))
            chain = chain_digest(chain, pages[-1].tokens)
        node._chain = chain
        return pages

    def namespace_of(self, digest: bytes) -> Namespace | None:
        """The namespace that has this digest; None where none of its pages is in the tree."""
        root = self._roots.get(digest)
        return root.identity if root is not None else None

    def namespaces(self) -> list[Namespace]:
        """All namespaces of which pages are in the tree."""
        return [root.identity for root in self._roots.values()]

    def walk(self, *, batch: int = 1000, tenant: str | None = None) -> Iterator[list[NodeInfo]]:
        """Look at all nodes, or one tenant's, parents before children, in steps of at most `batch` nodes.

        A step costs O(log n) a node, however many siblings a node has; the first one also looks through the names of
        all namespaces. The tree may change between two steps: nodes that do not change are seen once, others may be
        missing.
        """
        return self._walk(whole("batch", batch, 1), None if tenant is None else name("tenant", tenant))

    def _walk(self, batch: int, tenant: str | None) -> Iterator[list[NodeInfo]]:
        infos: list[NodeInfo] = []
        ends: dict[Node, int] = {}
        for root in [root for root in self._roots.values() if tenant is None or root.owner == tenant]:
            for node in below(root):
                infos.append(self._info(node, begins_at(node, ends)))
                if len(infos) == batch:
                    yield infos
                    infos = []
                    ends.clear()
        if infos:
            yield infos

    def nodes(self, top: Node | bytes | None = None) -> Iterator[Node]:
        """All nodes, those of the namespace with this digest, or those below a node: parents before children, one at a
        time. The tree may change between two, as for `walk`, which says more of each and costs several times as much.
        """
        if isinstance(top, Node):
            tops: list[Node] = [top]
        else:
            tops = [root for root in self._roots.values() if top is None or root.digest == top]
        return (node for each in tops for node in below(each))

    def info(self, node: Node, ends: dict[Node, int] | None = None) -> NodeInfo:
        """What `walk` says of a node. Who asks about many gives the same `ends` each time, which then remembers where
        nodes above them end. Raises `NotResident` for a node that left."""
        self._require_live(node)
        return self._info(node, begins_at(node, {} if ends is None else ends))

    def _info(self, node: Node, first_page: int) -> NodeInfo:
        return NodeInfo(
            node=node,
            namespace=node._root.digest,
            tenant=node._root.owner,
            first_page=first_page,
            num_pages=node._num_pages,
            residency=tuple(state_of(node._states, index) for index in range(len(self.tiers))),
            last_access=node._last_access,
            num_uses=node._num_uses,
            num_leases=node._num_leases,
            num_children=len(node._children or ()),
            is_published=node.is_published,
            reported=self._reports.counts(node) if self._reports.by_node else {},
        )

    def check_integrity(self) -> None:
        """Check every invariant from scratch; `AssertionError` names what does not hold. A walk of the whole tree."""
        check_integrity(self)
