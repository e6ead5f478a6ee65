"""The HiRadixTree: for every prefix, which tiers hold its pages.

One radix tree over token ids a namespace. A node is a run of whole pages with one residency a tier
(`hicache.residency`). This file is the only writer of nodes and handles.

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
8.  No node was used more recently than the node above it.
9.  The evictable lists hold exactly the nodes that `hicache.evictable` defines.
10. `match`, and everything else that only reads, changes none of this.

The tree belongs to one thread, which is the event loop's. It does no I/O, never frees a slot, asks no clock (`now` is
monotonic seconds; one that went backwards counts as the latest seen), and does not wait. Input is checked before
anything is changed: a call that raises has changed nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.collector import untrack
from hicache.errors import BadRequest, LeaseExpired, NotResident
from hicache.evictable import Evictable, is_held
from hicache.integrity import check_integrity
from hicache.layout import MAX_PAGE_SIZE
from hicache.lease import Hold, Lease, Move, Pin
from hicache.namespace import Namespace
from hicache.node import (
    ARRIVING_SHIFT,
    CONDEMNED_SHIFT,
    COUNT_BITS,
    COUNT_MASK,
    MAX_TIERS,
    TIER_MASK,
    Box,
    Node,
    Root,
    child_nodes,
    held_tiers,
    make_box,
    slots_of,
    state_of,
    tier_index,
    with_state,
)
from hicache.policy.base import EvictionPolicy
from hicache.policy.lru import LruPolicy
from hicache.residency import IN_TIER, Event, Residency, after
from hicache.results import Finished, Freed, Inserted, Match, NodeInfo, Occupancy, Partial, Removed
from hicache.sortedchunks import SortedChunks
from hicache.tier import PageIdentity, Slots, TierId, chain_digest
from hicache.tokens import (
    INT32,
    TOKEN_BYTES,
    check_ids,
    common_bytes,
    pack_slots,
    pack_tokens,
    raw_bytes,
    view_tokens,
)

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

ORDER_FROM: Final = 64
"""From this many children on, a node keeps them in order; below, the order is made when a partial first asks for it."""
SLOT_BYTES: Final = 4
NO_SLOTS: Final[Slots] = np.frombuffer(b"", np.int32)

_FreedParts = dict[int, list[bytes]]


class HiRadixTree:
    """One radix tree a namespace over tiers of pages. See the module's docstring for the rules it keeps.

    `tiers` are the cache's own, fast to slow, at most 8, none twice. `policies` may name one policy object for any of
    them (never shared between tiers); the others get `LruPolicy`.
    """

    def __init__(
        self,
        *,
        page_size: int,
        tiers: Sequence[TierId],
        policies: Mapping[TierId, EvictionPolicy] | None = None,
    ) -> None:
        self._roots: Final[dict[bytes, Root]] = {}
        self._limbo: Final[set[Node]] = set()  # left the tree, with CONDEMNED copies
        if type(page_size) is not int or not 1 <= page_size <= MAX_PAGE_SIZE:
            raise BadRequest("page_size", f"{page_size!r} is not within 1 to {MAX_PAGE_SIZE} tokens")
        if not 1 <= len(tiers) <= MAX_TIERS:
            raise BadRequest("tiers", f"{len(tiers)} tiers are not within 1 to {MAX_TIERS}")
        if len(set(tiers)) != len(tiers):
            raise BadRequest("tiers", "a tier is named twice")
        policies = policies or {}
        if unknown := set(policies) - set(tiers):
            raise BadRequest("policies", f"{', '.join(sorted(unknown))} is no tier of this tree")
        self.page_size: Final = page_size
        self.tiers: Final = tuple(tiers)
        self._tier_index: Final = {tier: index for index, tier in enumerate(tiers)}
        self._page_bytes: Final = page_size * TOKEN_BYTES
        self._evictable: Final = Evictable([policies.get(tier) or LruPolicy() for tier in tiers])
        self._pages: Final = [[0] * len(Residency) for _ in tiers]
        self._leases: Final[dict[int, Lease]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._generation = 0
        self._now = float("-inf")
        self._num_nodes = 0
        self._version = 0  # counts structural changes: what `walk` looks at between its steps

    def __del__(self) -> None:
        # The collector does not see nodes, so cycles through them are undone here.
        nodes: list[Node] = [*self._roots.values(), *self._limbo]
        while nodes:
            node = nodes.pop()
            nodes += child_nodes(node)
            node._parent = node._children = None
            node._holds = ()

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """Nodes in the tree, over all namespaces."""
        return self._num_nodes

    @property
    def num_leases(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    def occupancy(self, tier: TierId) -> Occupancy:
        """Pages of one tier that the tree accounts for."""
        pages = self._pages[tier_index(self._tier_index, tier)]
        return Occupancy(pages[Residency.RESIDENT], pages[Residency.ARRIVING], pages[Residency.CONDEMNED])

    def match(self, namespace: Namespace, tokens: npt.ArrayLike) -> Match:
        """Find the longest cached prefix of `tokens` `[num_tokens]`, and the page that shares most of what follows.

        Changes nothing and lets nothing live longer: lease the match to keep it, touch its last node to count the use.
        Whatever is returned is in at least one tier. Raises `BadRequest` for tokens that are not token ids.
        """
        packed = view_tokens(tokens)
        num_bytes = len(packed) * TOKEN_BYTES
        root = self._roots.get(_digest_of(namespace))
        if root is None or not num_bytes:
            check_ids("tokens", packed)
            return Match((), 0, 0, None)
        raw = raw_bytes(packed)
        path, position, inside = self._descend(root, raw, num_bytes)
        partial = None
        if position < num_bytes:
            check_ids("tokens", packed[position // TOKEN_BYTES :])
            partial = self._find_partial(path[-1] if path else root, inside, raw, position, num_bytes)
        return Match(tuple(path), position // TOKEN_BYTES, inside, partial)

    def _descend(self, root: Root, raw: memoryview | bytes, num_bytes: int) -> tuple[list[Node], int, int]:
        """The path that `raw` shares with a tree: its nodes, the bytes that match (whole pages), pages of the last."""
        page_bytes = self._page_bytes
        path: list[Node] = []
        node: Node = root
        position, end = 0, page_bytes
        while end <= num_bytes:
            children = node._children
            if not children:
                break
            box = children.get(bytes(raw[position:end]))
            if box is None:
                break
            node = box[0]
            path.append(node)
            position = end
            buffer = node._buffer
            if buffer:
                rest = (node._num_pages - 1) * page_bytes
                end += rest
                if end > num_bytes or not buffer.startswith(raw[position:end], node._start):
                    limit = min(rest, (num_bytes - position) // page_bytes * page_bytes)
                    common = common_bytes(buffer, node._start, raw, position, limit) // page_bytes
                    return path, position + common * page_bytes, 1 + common
                position = end
            end += page_bytes
        return path, position, node._num_pages

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
        if len(children) == 1:
            candidates: tuple[bytes | None, ...] = tuple(children)
        else:
            if node._order is None:
                node._order = SortedChunks(children)
            candidates = node._order.neighbours(bytes(raw[position : position + limit]))
        best, most = None, 0
        for key in candidates:
            if key is not None and (shared := common_bytes(key, 0, raw, position, limit) // TOKEN_BYTES) > most:
                best, most = key, shared
        return Partial(children[best][0], 0, most) if best is not None else None

    def path(self, node: Node) -> list[Node]:
        """The nodes from the root to `node`, root side first; empty for a node that left the tree."""
        path: list[Node] = []
        step: Node | None = node
        while step is not None and step._parent is not None:
            path.append(step)
            step = step._parent
        path.reverse()
        return path

    def current(self, node: Node) -> Node | None:
        """`node` while it is live, else the live node that it was merged into, which reaches further down; None when
        its pages were removed."""
        step = node
        while step._parent is None:
            # A node that was merged keeps the one child it had, which took its place; a removed one keeps none.
            if not step._children or isinstance(step, Root):
                return None
            (step,) = child_nodes(step)
        return step

    def tokens_of(self, node: Node) -> npt.NDArray[np.int32]:
        """Token ids from the root to the node's end, int32 `[num_tokens]`, read-only."""
        return np.frombuffer(b"".join(self._node_bytes(step) for step in self.path(node)), INT32)

    def _node_bytes(self, node: Node) -> bytes:
        rest = (node._num_pages - 1) * self._page_bytes
        return node._key + node._buffer[node._start : node._start + rest]

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

    def can_evict(self, node: Node, tier: TierId) -> bool:
        """Whether `evict` is allowed: the copy is RESIDENT and unused, and another remains or nobody needs one."""
        index = tier_index(self._tier_index, tier)
        if node._parent is None or not node._states >> index & 1 or is_held(node._holds, index):
            return False
        return node._states & TIER_MASK != 1 << index or not (node._num_leases or node._children)

    def victims(self, tier: TierId, num_pages: int, now: float) -> list[Node]:
        """The nodes that should leave a tier next, coldest first, until they cover `num_pages`.

        Each is a leaf of the tier that nobody uses there; it can be evicted, or else demoted to a slower tier. They may
        cover less: nodes above become leaves when these have left, so take these and ask again. The last one may hold
        more pages than are wanted; `evict` takes them from its end.
        """
        self._advance(now)
        return self._evictable.victims(tier_index(self._tier_index, tier), num_pages)

    def walk(self, *, batch: int = 1000) -> Iterator[list[NodeInfo]]:
        """Look at all nodes, parents before children, in steps of at most `batch` nodes.

        The tree may change between two steps: nodes that do not change are seen once, others may be missing.
        """
        if batch < 1:
            raise BadRequest("batch", f"{batch} is below 1")
        stack: list[tuple[Node, int]] = [
            (node, 0) for root in self._roots.values() for node in child_nodes(root)
        ]
        while stack:
            infos: list[NodeInfo] = []
            version = self._version
            while stack and len(infos) < batch:
                node, first_page = stack.pop()
                if node._parent is None:
                    continue
                infos.append(self._info(node, first_page))
                below = first_page + node._num_pages
                stack += [(child, below) for child in child_nodes(node)]
            if infos:
                yield infos
            if version != self._version:
                # Splits and merges move the beginning of a node, never its end.
                stack = [(node, self._first_page(node)) for node, _ in stack if node._parent is not None]

    def _first_page(self, node: Node) -> int:
        return sum(step._num_pages for step in self.path(node)) - node._num_pages

    def _info(self, node: Node, first_page: int) -> NodeInfo:
        return NodeInfo(
            node=node,
            namespace=node._root.digest,
            tenant=node._root.owner,
            first_page=first_page,
            num_pages=node._num_pages,
            residency=tuple(state_of(node._states, index) for index in range(len(self.tiers))),
            last_access=node._last_access,
            num_leases=node._num_leases,
            num_children=len(node._children or ()),
        )

    def check_integrity(self) -> None:
        """Check every invariant from scratch; `AssertionError` names what does not hold. A walk of the whole tree."""
        check_integrity(self)

    # -- inserting ----------------------------------------------------------------------------------------------------

    def insert(
        self,
        namespace: Namespace,
        tokens: npt.ArrayLike,
        *,
        tier: TierId,
        slots: npt.ArrayLike,
        first_page: int = 0,
        now: float,
    ) -> Inserted:
        """Publish pages: `tokens` are whole pages from the root, `slots` those of pages `first_page` and on.

        Pages before `first_page` must be in the tree. A new page becomes resident in `tier`; a known one that is absent
        there gets the slot as a further copy; of one that is there already (or arriving, or still being removed) the
        slot comes back in `Inserted.duplicates`. Counts as a use of the whole path at `now`. Splits where needed, and
        joins runs of equal residency behind it, so that a sequence published page by page does not become a chain.

        Raises `BadRequest` naming the field: tokens that are no token ids, not whole pages, or none; slots that do not
        match the pages, are negative or named twice; an unknown tier; a `first_page` past what the tree knows.
        """
        index = tier_index(self._tier_index, tier)
        packed = view_tokens(tokens)
        num_pages, odd = divmod(len(packed), self.page_size)
        if odd or not num_pages:
            raise BadRequest("tokens", f"{len(packed)} tokens are not one or more whole pages of {self.page_size}")
        if not 0 <= first_page <= num_pages:
            raise BadRequest("first_page", f"{first_page} is not within 0 to {num_pages} pages")
        new_slots = pack_slots(slots, num_pages - first_page).tobytes()
        page_bytes = self._page_bytes
        raw = raw_bytes(packed)
        digest = _digest_of(namespace)
        root = self._roots.get(digest)
        path: list[Node] = []
        position = inside = 0
        if root is None:
            if namespace.layout.page_size != self.page_size:
                problem = f"its pages have {namespace.layout.page_size} tokens, the tree's have {self.page_size}"
                raise BadRequest("namespace", problem)
        else:
            path, position, inside = self._descend(root, raw, packed.nbytes)
        matched = position // page_bytes
        if matched < num_pages:
            check_ids("tokens", packed[position // TOKEN_BYTES :])
            if matched < first_page:
                raise BadRequest("first_page", f"{first_page} is past the {matched} pages that are in the tree")

        # From here on nothing fails.
        self._advance(now)
        if root is None:
            root = self._roots[digest] = Root(digest, namespace.tenant, self._tier_index)
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
            node = self._attach(node, raw, position, index, new_slots[known:])
            num_stored += node._num_pages
            if node._parent is not root:
                self._merge_upwards(node)
        return Inserted(node, num_stored, _join(duplicates) if duplicates else NO_SLOTS)

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

    def _attach(self, parent: Node, raw: memoryview | bytes, position: int, index: int, slots: bytes) -> Node:
        """Hang a new leaf with the tokens `raw[position:]` below `parent`, resident in one tier."""
        first = position + self._page_bytes
        key = bytes(raw[position:first])
        node = Node(parent._root, key, bytes(raw[first:]), 0, len(slots) // SLOT_BYTES)
        node._last_access = self._now
        node._parent = parent
        children = parent._children
        if children is None:
            children = parent._children = {}
            untrack(children)
        children[key] = make_box(node)
        if parent._order is not None:
            parent._order.add(key)
        elif len(children) >= ORDER_FROM:
            parent._order = SortedChunks(children)
        self._num_nodes += 1
        self._version += 1
        node._slots = slots
        self._apply(node, index, Event.STORED)
        self._refresh(node)
        if len(children) == 1:
            self._refresh(parent)
        return node

    # -- structure ----------------------------------------------------------------------------------------------------

    def split(self, node: Node, num_pages: int) -> tuple[Node, Node]:
        """Cut a node after its first `num_pages` pages; returns the upper half, which is new, and the lower one, which
        is the same object. Pins and moves cover both halves; leases stay at the end, which is the lower half's.

        Raises `BadRequest` unless `num_pages` is within 1 to `node.num_pages - 1`, `NotResident` for a node that left.
        """
        self._require_live(node)
        if not 0 < num_pages < node._num_pages:
            raise BadRequest("num_pages", f"{num_pages} is not within 1 to {node._num_pages - 1}")
        return self._split(node, num_pages), node

    def _split(self, node: Node, num_pages: int) -> Node:
        parent, siblings = _place(node)
        box = node.box
        upper_slots, lower_slots = _cut_slots(node._slots, node._num_pages, num_pages)
        cut = node._start + (num_pages - 1) * self._page_bytes
        upper = Node(node._root, node._key, node._buffer, node._start, num_pages)
        node._key = node._buffer[cut : cut + self._page_bytes]
        node._start = cut + self._page_bytes
        node._num_pages -= num_pages
        upper._parent = parent
        upper._children = {node._key: box}
        untrack(upper._children)
        siblings[upper._key] = make_box(upper)
        node._parent = upper
        upper._slots, node._slots = upper_slots, lower_slots
        upper._states = states = node._states
        upper._last_access = node._last_access
        upper._in_tier = _counts((states | states >> ARRIVING_SHIFT) & TIER_MASK)
        upper._holds = node._holds
        for hold in node._holds:
            hold._replace(node, upper)
        self._trim(upper)
        self._trim(node)
        self._evictable.split(upper, node)
        self._num_nodes += 1
        self._version += 1
        return upper

    def _trim(self, node: Node) -> None:
        """Let go of a shared buffer of which the node needs less than half: memory stays in proportion to tokens."""
        needed = (node._num_pages - 1) * self._page_bytes
        if len(node._buffer) > 2 * needed:
            node._buffer = node._buffer[node._start : node._start + needed]
            node._start = 0

    def _merge_upwards(self, node: Node) -> None:
        """Join a node with those above it while they are one run of equal residency that nobody holds.

        Only when the upper one is less than twice as long as the lower: then every token is copied O(log n) times over
        the growth of a sequence, and a chain has O(log n) nodes.
        """
        while (upper := node._parent) is not None and self._can_merge(upper, node):
            self._merge(upper, node)

    def _can_merge(self, upper: Node, lower: Node) -> bool:
        return (
            upper._num_pages < 2 * lower._num_pages
            and upper._parent is not None
            and upper._states == lower._states
            and not upper._num_leases
            and not upper._holds
            and not lower._holds
            and upper._children is not None
            and len(upper._children) == 1
        )

    def _merge(self, upper: Node, lower: Node) -> None:
        parent, siblings = _place(upper)
        gap = upper._start + upper._num_pages * self._page_bytes
        if upper._buffer and lower._buffer is upper._buffer and lower._start == gap:
            lower._start = upper._start  # halves of one split: the page between them is still there
        else:
            lower._buffer = self._node_bytes(upper)[self._page_bytes :] + self._node_bytes(lower)
            lower._start = 0
        siblings[upper._key] = lower.box
        lower._key = upper._key
        lower._parent = parent
        lower._slots = _join_slots(upper, lower)
        lower._num_pages += upper._num_pages
        upper._parent = None  # keeps its one child: `current` follows it
        self._num_nodes -= 1
        self._version += 1
        if upper._last_access > lower._last_access:
            # It takes a later place in the policies' order, which may lie before that of others.
            listed, lower._states = lower._states, 0
            self._refresh(lower)
            lower._states, lower._last_access = listed, upper._last_access
            self._refresh(lower)

    def _heal(self, node: Node) -> None:
        """Something that kept a node apart has ended: join it with its neighbours where possible."""
        if node._parent is None:
            return
        if node._children is not None and len(node._children) == 1:
            (child,) = child_nodes(node)
            if self._can_merge(node, child):
                node = child
        self._merge_upwards(node)

    def _apply(self, node: Node, index: int, event: Event) -> None:
        """The one place where a residency changes: by the table, with the counts that follow from it."""
        before = state_of(node._states, index)
        state = after(before, event)
        node._states = with_state(node._states, index, state)
        pages = self._pages[index]
        pages[before] -= node._num_pages
        pages[state] += node._num_pages
        was_in, is_in = before in IN_TIER, state in IN_TIER
        parent = node._parent
        if was_in != is_in and parent is not None:
            shift = COUNT_BITS * index
            parent._in_tier += 1 << shift if is_in else -1 << shift
            # The first child in a tier, or none any more: the parent ceases or begins to be a leaf of it.
            if parent._in_tier >> shift & COUNT_MASK == is_in:
                self._refresh(parent)

    def _give_slots(self, node: Node, index: int, slots: bytes) -> None:
        """Record the slots of a tier in which the node is still ABSENT."""
        at = (held_tiers(node._states) & (1 << index) - 1).bit_count() * node._num_pages * SLOT_BYTES
        node._slots = node._slots[:at] + slots + node._slots[at:]

    def _refresh(self, node: Node) -> None:
        self._evictable.refresh(node, self._now)

    def _advance(self, now: float) -> None:
        if now > self._now:
            self._now = now

    def _use(self, node: Node) -> None:
        node._last_access = self._now
        if node._listed:
            self._evictable.touch(node, self._now)

    def touch(self, node: Node, now: float) -> None:
        """Count a use of `node` and of every node above it. A node that was merged stands for its heir, a removed one
        for nothing.

        One step up the path costs a store; policies hear only of the nodes they list, few on any path: a node is
        listed in a tier only when nothing below it is there.
        """
        self._advance(now)
        step = self.current(node)
        while step is not None and step._parent is not None:
            self._use(step)
            step = step._parent

    # -- leases -------------------------------------------------------------------------------------------------------

    def lease(
        self, target: Match | Inserted | Node, *, owner: str, deadline: float | None, now: float
    ) -> Lease:
        """Protect some copy of every page from the root to the end of `target` until the lease is released or expires.

        Splits a node where a match ends inside it. A match of nothing gives a lease that holds nothing yet. Which copy
        is kept is open: pin one to keep its address. Raises `NotResident` when the pages left the tree meanwhile.
        """
        node = self._node_at_end(target)
        self._advance(now)
        self._generation += 1
        lease = Lease(node, owner, self._generation, deadline)
        self._leases[self._generation] = lease
        if deadline is not None:
            heappush(self._deadlines, (deadline, self._generation))
        if node is not None:
            self._count_lease(node, 1)
        return lease

    def move_lease(self, lease: Lease, target: Match | Inserted | Node, now: float) -> None:
        """Let a lease end elsewhere: at a deeper node when its sequence grew, at a higher one when it is cut.

        Raises `LeaseExpired` when it ended, was not made here, or is past its deadline at `now`.
        """
        self._require_lease(lease)
        if lease._deadline is not None and lease._deadline <= now:
            raise LeaseExpired(f"lease {lease._generation} ended at {lease._deadline}, it is {now}")
        node = self._node_at_end(target)
        self._advance(now)
        before = lease._node
        if node is not None:
            self._count_lease(node, 1)
        lease._node = node
        if before is not None:
            self._count_lease(before, -1)
            self._heal(before)

    def release(self, lease: Lease, *, owner: str | None = None) -> None:
        """End a lease. Again is no error. Raises `LeaseExpired` for a lease of another tree, and of another owner than
        `owner` where one is given."""
        if owner is not None and owner != lease._owner:
            raise LeaseExpired(f"lease {lease._generation} belongs to another owner")
        known = self._leases.get(lease._generation)
        if known is lease:
            self._end_lease(lease)
        elif known is not None or lease._node is not None:
            raise LeaseExpired(f"lease {lease._generation} was not made by this tree")

    def renew(self, lease: Lease, deadline: float | None) -> None:
        """Give a lease another deadline, monotonic seconds or None for never.

        Raises `LeaseExpired` when it ended, was not made here, or holds pages that were forgotten as corrupt.
        """
        self._require_lease(lease)
        if lease._node is not None and lease._node._parent is None:
            raise LeaseExpired(f"the pages of lease {lease._generation} are gone")
        lease._deadline = deadline
        if deadline is not None:
            heappush(self._deadlines, (deadline, lease._generation))
            if len(self._deadlines) > 64 + 2 * len(self._leases):
                self._deadlines = [
                    (each._deadline, each._generation) for each in self._leases.values() if each._deadline is not None
                ]
                heapify(self._deadlines)

    def expire(self, now: float) -> list[Lease]:
        """End the leases whose deadline is not after `now`; returns them, earliest deadline first."""
        self._advance(now)
        ended: list[Lease] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, generation = heappop(self._deadlines)
            lease = self._leases.get(generation)
            if lease is not None and lease._deadline == deadline:
                self._end_lease(lease)
                ended.append(lease)
        return ended

    def _end_lease(self, lease: Lease) -> None:
        node = lease._node
        del self._leases[lease._generation]
        lease._node = None
        if node is not None:
            self._count_lease(node, -1)
            self._heal(node)

    def _count_lease(self, node: Node, change: int) -> None:
        node._num_leases += change
        self._refresh(node)

    def _require_lease(self, lease: Lease) -> None:
        if self._leases.get(lease._generation) is not lease:
            raise LeaseExpired(f"lease {lease._generation} of {lease._owner!r} has ended or was not made by this tree")

    def _node_at_end(self, target: Match | Inserted | Node) -> Node | None:
        """The node that ends where `target` does; splits to make it so. The place is looked up again by its number of
        pages, since a match may be older than a split."""
        if isinstance(target, Match):
            if not target.nodes:
                return None
            path = self.path(target.nodes[-1])
            self._require_live(target.nodes[-1])
            end = target.num_tokens // self.page_size
            for node in path:
                if end < node._num_pages:
                    return self._split(node, end)
                if end == node._num_pages:
                    return node
                end -= node._num_pages
            raise AssertionError("a node's path became shorter while it lived")
        node = target.node if isinstance(target, Inserted) else target
        self._require_live(node)
        return node

    def _require_live(self, node: Node) -> None:
        if node._root.tiers is not self._tier_index:
            raise BadRequest("node", "belongs to another tree")
        if node._parent is None:
            raise NotResident("any tier", "a node that was removed, or merged into the one below it,")

    # -- pins and moves -----------------------------------------------------------------------------------------------

    def pin(self, nodes: Iterable[Node], tier: TierId) -> Pin:
        """Keep the copies of `nodes` in `tier` where they are until `unpin`: neither evicted nor reused.

        Halves of a later split stay pinned; removal and flush make pinned copies unservable but do not free them.
        Raises `NotResident` when one of the nodes is not RESIDENT there.
        """
        index = tier_index(self._tier_index, tier)
        pinned = list(dict.fromkeys(nodes))
        for node in pinned:
            self._require_resident(node, index)
        pin = Pin(pinned, tier, 1 << index)
        self._hold(pin)
        return pin

    def unpin(self, pin: Pin) -> Freed:
        """End a pin; again is no error. Returns the slots of pages removed meanwhile that nobody else uses."""
        freed: _FreedParts = {}
        if self._let_go(pin):
            for node in pin._nodes:
                self._release_condemned(node, freed)
        return self._freed(freed)

    def start_move(self, node: Node, *, source: TierId, target: TierId, slots: npt.ArrayLike) -> Move:
        """Begin a copy of a node's pages from `source`, where it is RESIDENT, into `slots` of `target`.

        The target, ABSENT before, becomes ARRIVING; the source keeps its copy, and nobody may take it before
        `finish_move`. Raises `NotResident` for the source, `BadRequest` naming `target` or `slots`.
        """
        source_index = tier_index(self._tier_index, source)
        target_index = tier_index(self._tier_index, target)
        self._require_resident(node, source_index)
        if state_of(node._states, target_index) is not Residency.ABSENT:
            raise BadRequest("target", f"{target} already has, or awaits, a copy of the node")
        packed = pack_slots(slots, node._num_pages)
        move = Move(node, source, target, 1 << source_index | 1 << target_index)
        self._give_slots(node, target_index, packed.tobytes())
        self._apply(node, target_index, Event.MOVE_STARTED)
        self._hold(move)
        return move

    def finish_move(self, move: Move, ok: Sequence[bool]) -> Finished:
        """End a move: `ok` says for each of its pages, in order, whether the copy arrived whole.

        Runs that arrived become RESIDENT in the target, failed ones ABSENT again (nodes split at the borders). Pages
        removed meanwhile stay removed: their slots come back. A move ends once; again changes nothing and returns
        nothing. Raises `BadRequest` when `ok` does not have one value a page.
        """
        if move._open and len(ok) != move.num_pages:
            raise BadRequest("ok", f"{len(ok)} values for {move.num_pages} pages")
        freed: _FreedParts = {}
        if not self._let_go(move):
            return Finished((), {})
        target = self._tier_index[move._target]
        arrived: list[Node] = []
        pieces: list[Node] = []
        start = 0
        for node in move._nodes:
            flags = [bool(flag) for flag in ok[start : start + node._num_pages]]
            start += len(flags)
            if state_of(node._states, target) is not Residency.ARRIVING:
                self._release_condemned(node, freed)
                pieces.append(node)
                continue
            for piece, good in self._cut_into_runs(node, flags):
                pieces.append(piece)
                if good:
                    self._apply(piece, target, Event.MOVE_DONE)
                    arrived.append(piece)
                else:
                    self._free_slots(piece, target, freed)
                    self._apply(piece, target, Event.MOVE_FAILED)
                self._refresh(piece)
                self._release_condemned(piece, freed)
        move._nodes = pieces
        if all(ok):
            for node in arrived:
                self._heal(node)
            arrived = list(dict.fromkeys(node for node in map(self.current, arrived) if node is not None))
        return Finished(tuple(arrived), self._freed(freed))

    def failed_pages(self, move: Move, failed: Sequence[bool]) -> list[tuple[Node, int]]:
        """Where the pages of a finished move are whose flag is set: each live node that has one and is RESIDENT in the
        source, with the index of its first such page. Right after `finish_move`, before the tree changes again."""
        found: list[tuple[Node, int]] = []
        source = self._tier_index[move._source]
        start = 0
        for node in move._nodes:
            flags = list(failed[start : start + node._num_pages])
            start += len(flags)
            if any(flags) and node._parent is not None and node._states >> source & 1:
                found.append((node, flags.index(True)))
        return found

    def _cut_into_runs(self, node: Node, flags: list[bool]) -> list[tuple[Node, bool]]:
        """Split a node so that each piece has one flag; root side first."""
        runs: list[tuple[Node, bool]] = []
        start = 0
        for at in range(1, len(flags)):
            if flags[at] != flags[at - 1]:
                runs.append((self._split(node, at - start), flags[at - 1]))
                start = at
        runs.append((node, flags[-1]))
        return runs

    def _hold(self, hold: Hold) -> None:
        for node in hold._nodes:
            node._holds = (*node._holds, hold)
            self._refresh(node)

    def _let_go(self, hold: Hold) -> bool:
        """Take an open hold off its nodes; false when it was closed already."""
        if not hold._open:
            return False
        for node in hold._nodes:
            if node._root.tiers is not self._tier_index:
                raise BadRequest("handle", "was not made by this tree")
        hold._open = False
        for node in hold._nodes:
            node._holds = tuple(other for other in node._holds if other is not hold)
            self._refresh(node)
        return True

    def _release_condemned(self, node: Node, freed: _FreedParts) -> None:
        """Free the CONDEMNED copies of a node that no hold uses any more."""
        condemned = node._states >> CONDEMNED_SHIFT
        if not condemned:
            return
        for index in range(len(self.tiers)):
            if condemned >> index & 1 and not is_held(node._holds, index):
                self._free_slots(node, index, freed)
                self._apply(node, index, Event.RELEASED)
        if node._parent is None and not node._states:
            self._limbo.discard(node)

    def _require_resident(self, node: Node, index: int) -> None:
        self._require_live(node)
        if not node._states >> index & 1:
            raise NotResident(self.tiers[index], f"a node of {node._num_pages} pages")

    def _free_slots(self, node: Node, index: int, freed: _FreedParts) -> None:
        """Hand out the slots of a tier in which the node is about to be ABSENT."""
        size = node._num_pages * SLOT_BYTES
        at = (held_tiers(node._states) & (1 << index) - 1).bit_count() * size
        freed.setdefault(index, []).append(node._slots[at : at + size])
        node._slots = node._slots[:at] + node._slots[at + size :]

    def _freed(self, parts: _FreedParts) -> Freed:
        return {self.tiers[index]: _join(parts[index]) for index in sorted(parts)}

    # -- leaving ------------------------------------------------------------------------------------------------------

    def evict(self, node: Node, tier: TierId, num_pages: int | None = None) -> Freed:
        """Let a node's copy leave a tier, or the last `num_pages` pages of it (the node is then split).

        A page whose last copy this was leaves the tree. Raises `NotResident` when there is no copy, `BadRequest` when
        it is pinned or moving, or is the last copy of pages that are leased or have others below (`can_evict` tells).
        """
        index = tier_index(self._tier_index, tier)
        self._require_resident(node, index)
        if num_pages is not None and not 1 <= num_pages <= node._num_pages:
            raise BadRequest("num_pages", f"{num_pages} is not within 1 to {node._num_pages}")
        if not self.can_evict(node, tier):
            reason = "is used by a pin or a move" if is_held(node._holds, index) else "is the last, and still needed"
            raise BadRequest("node", f"its copy in {tier} {reason}")
        if num_pages is not None and num_pages < node._num_pages:
            self._split(node, node._num_pages - num_pages)
        freed: _FreedParts = {}
        self._free_slots(node, index, freed)
        self._apply(node, index, Event.EVICTED)
        if node._states & TIER_MASK:
            self._refresh(node)
            self._heal(node)
        else:
            parent = node._parent
            self._leave(node, freed)
            if parent is not None:
                self._heal(parent)
        return self._freed(freed)

    def forget(self, node: Node, tier: TierId, first_page: int = 0) -> Freed:
        """A copy turned out to be bad: drop it in that tier from page `first_page` of the node on.

        Pages left without any copy leave the tree with everything below them, leased or not. Where the node has no copy
        in the tier (any more), there is nothing to do. Slots that a pin or a move uses come back when that ends.
        """
        index = tier_index(self._tier_index, tier)
        if not 0 <= first_page < node._num_pages:
            raise BadRequest("first_page", f"{first_page} is not within 0 to {node._num_pages - 1}")
        if node._root.tiers is not self._tier_index:
            raise BadRequest("node", "belongs to another tree")
        freed: _FreedParts = {}
        if node._parent is not None and node._states >> index & 1:
            if first_page:
                self._split(node, first_page)
            self._drop_copy(node, index, freed)
            if not node._states & TIER_MASK:
                for each in reversed(self._branch([node])):
                    self._leave(each, freed)
        return self._freed(freed)

    def remove(self, namespace: Namespace, tokens: npt.ArrayLike, *, first_page: int | None = None) -> Removed:
        """Remove what lies below a prefix: every page that begins at or after the end of `tokens` on a path that starts
        with them. With `first_page`, the pages of `tokens` themselves from that one on go as well.

        Pages under a lease stay, with those above them, and are named in `Removed.held`. Slots that a pin or a move
        uses come back when that ends; nothing that is under way brings a removed page back.
        """
        packed = view_tokens(tokens)
        check_ids("tokens", packed)
        num_pages, num_tail = divmod(len(packed), self.page_size)
        if first_page is not None and not 0 <= first_page <= num_pages:
            raise BadRequest("first_page", f"{first_page} is not within 0 to {num_pages} pages")
        root = self._roots.get(_digest_of(namespace))
        if root is None:
            return Removed({}, 0, 0, ())
        raw = bytes(raw_bytes(packed))
        path, position, inside = self._descend(root, raw, num_pages * self._page_bytes)
        matched = position // self._page_bytes
        if first_page is not None and first_page < matched:
            start = 0
            for node in path:
                if start + node._num_pages > first_page:
                    if first_page > start:
                        self._split(node, first_page - start)
                    return self._remove_branches([node])
                start += node._num_pages
        if matched < num_pages:
            return Removed({}, 0, 0, ())
        last: Node = path[-1] if path else root
        tail = raw[len(raw) - num_tail * TOKEN_BYTES :]
        tops: list[Node] = []
        if inside < last._num_pages:
            start = last._start + (inside - 1) * self._page_bytes
            if last._buffer.startswith(tail, start):
                tops = self._below(last, inside + (1 if tail else 0))
        elif tail:
            for child in child_nodes(last):
                if child._key.startswith(tail):
                    tops += self._below(child, 1)
        else:
            tops = child_nodes(last)
        return self._remove_branches(tops)

    def _below(self, node: Node, num_pages: int) -> list[Node]:
        """The nodes that begin right after the first `num_pages` pages of a node."""
        if num_pages < node._num_pages:
            self._split(node, num_pages)
            return [node]
        return child_nodes(node)

    def flush(
        self, namespace: Namespace | None = None, tenant: str | None = None, tier: TierId | None = None
    ) -> Removed:
        """Remove everything, or what belongs to a namespace, to a tenant, or (copies only) to one tier.

        Pages whose only copy is in the flushed tier leave the tree with everything below them, unless leased. What
        could not go is in `Removed.held`.
        """
        index = None if tier is None else tier_index(self._tier_index, tier)
        digest = None if namespace is None else _digest_of(namespace)
        tops = [
            node
            for root in self._roots.values()
            if (digest is None or root.digest == digest) and (tenant is None or root.owner == tenant)
            for node in child_nodes(root)
        ]
        return self._remove_branches(tops) if index is None else self._flush_tier(tops, index)

    def _remove_branches(self, tops: list[Node]) -> Removed:
        freed: _FreedParts = {}
        held: list[Node] = []
        num_pages = num_pending = 0
        # Children come before their parents, so a parent that still has some is above a lease.
        for node in reversed(self._branch(tops)):
            if node._num_leases or node._children:
                held.append(node)
            else:
                num_pages += node._num_pages
                self._leave(node, freed)
                num_pending += node._num_pages * (node._states >> CONDEMNED_SHIFT).bit_count()
        return Removed(self._freed(freed), num_pages, num_pending, tuple(held))

    def _flush_tier(self, tops: list[Node], index: int) -> Removed:
        freed: _FreedParts = {}
        stayed: list[Node] = []
        num_pages = num_pending = 0
        branch = self._branch(tops)
        needed: set[Node] = set()  # leased, or above a leased node
        for node in reversed(branch):
            if node._num_leases or node in needed:
                needed.add(node)
                assert node._parent is not None
                needed.add(node._parent)
        for node in branch:
            if node._parent is None or state_of(node._states, index) not in IN_TIER:
                continue
            if node._states & TIER_MASK != 1 << index:
                num_pages += node._num_pages
                self._drop_copy(node, index, freed)
                num_pending += node._num_pages * (node._states >> (CONDEMNED_SHIFT + index) & 1)
            elif node in needed:
                stayed.append(node)
            else:
                removed = self._remove_branches([node])
                for tier, slots in removed.freed.items():
                    freed.setdefault(self._tier_index[tier], []).append(slots.tobytes())
                num_pages += removed.num_pages
                num_pending += removed.num_pending
        return Removed(self._freed(freed), num_pages, num_pending, tuple(stayed))

    def _branch(self, tops: list[Node]) -> list[Node]:
        """The nodes of whole branches, each parent before its children."""
        nodes: list[Node] = []
        stack = list(tops)
        while stack:
            node = stack.pop()
            nodes.append(node)
            if node._children:
                stack += child_nodes(node)
        return nodes

    def _drop_copy(self, node: Node, index: int, freed: _FreedParts) -> None:
        """One copy goes now: its slots are free, or CONDEMNED while something uses them."""
        self._apply(node, index, Event.REMOVED)
        self._refresh(node)
        self._release_condemned(node, freed)

    def _leave(self, node: Node, freed: _FreedParts) -> None:
        """Take a childless node out of the tree with all its copies."""
        assert not node._children, "a node leaves before its children"
        parent, siblings = _place(node)
        root = node._root
        for index in range(len(self.tiers)):
            if state_of(node._states, index) in IN_TIER:
                self._apply(node, index, Event.REMOVED)
        self._refresh(node)
        node._parent = node._children = None
        del siblings[node._key]
        if parent._order is not None:
            parent._order.remove(node._key)
        self._limbo.add(node)
        self._release_condemned(node, freed)
        if not node._states:
            self._limbo.discard(node)
        self._num_nodes -= 1
        self._version += 1
        if parent is root and not siblings:
            del self._roots[root.digest]
        else:
            self._refresh(parent)


def _place(node: Node) -> tuple[Node, dict[bytes, Box]]:
    """The parent of a live node, and the parent's children, among which the node stands under its key."""
    parent = node._parent
    assert parent is not None, "a node that left the tree has no place"
    assert parent._children is not None, "a parent has no children"
    return parent, parent._children


def _cut_slots(slots: bytes, num_pages: int, num_upper: int) -> tuple[bytes, bytes]:
    """Slots of the two parts of a node, each tier's cut at the same page."""
    size, border = num_pages * SLOT_BYTES, num_upper * SLOT_BYTES
    if len(slots) == size:
        return slots[:border], slots[border:]
    starts = range(0, len(slots), size)
    upper = b"".join(slots[at : at + border] for at in starts)
    return upper, b"".join(slots[at + border : at + size] for at in starts)


def _join_slots(upper: Node, lower: Node) -> bytes:
    """Slots of two nodes of equal residency, joined tier by tier."""
    parts: list[bytes] = []
    for index in range(held_tiers(lower._states).bit_length()):
        parts += (slots_of(upper, index), slots_of(lower, index))
    return b"".join(parts)


def _join(parts: list[bytes]) -> Slots:
    return np.frombuffer(b"".join(parts), np.int32)


def _digest_of(namespace: Namespace) -> bytes:
    try:
        return namespace.digest
    except AttributeError:
        raise BadRequest("namespace", f"{type(namespace).__name__} is not a Namespace") from None


def _counts(mask: int) -> int:
    """One child in each tier of `mask`, in the packed form of `Node._in_tier`."""
    counts = 0
    for index in range(mask.bit_length()):
        counts |= (mask >> index & 1) << COUNT_BITS * index
    return counts
