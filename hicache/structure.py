"""The tree's structure: how nodes are linked, split and joined, and the one place where a residency changes.

Base of `hicache.tree.HiRadixTree`, where the invariants are numbered. Methods with an underscore check nothing: they
are called once the input is known to be good.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.arguments import name, whole
from hicache.care import Ranked
from hicache.collector import untrack
from hicache.errors import BadRequest, NotResident
from hicache.evictable import Evictable, is_held
from hicache.layout import MAX_PAGE_SIZE
from hicache.metadata import (
    MAX_PUBLICATIONS,
    MAX_REPORT_BYTES,
    NODE_BYTES,
    ORDER_BYTES,
    PUBLICATION_BYTES,
    READER_BYTES,
    ROOT_BYTES,
    check_metadata_bytes,
)
from hicache.namespace import Namespace
from hicache.node import (
    ARRIVING_SHIFT,
    CONDEMNED_SHIFT,
    COUNT_BITS,
    COUNT_MASK,
    MAX_TIERS,
    PUBLISHED,
    RANK_MASK,
    RANK_SHIFT,
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
from hicache.policy.base import EvictionPolicy, HearsCopies, HearsShape
from hicache.policy.lru import LruPolicy
from hicache.published import Published
from hicache.reports import Reports
from hicache.residency import IN_TIER, Event, Residency, after
from hicache.results import Freed, Occupancy
from hicache.sortedchunks import ORDER_FROM, SortedChunks
from hicache.tier import Slots, TierId
from hicache.tokens import INT32, TOKEN_BYTES, common_bytes

SPARSE_BYTES: Final = 400
"""Bytes of dictionary a child above which a node's children are worth a new one: four times what one grows to."""
SLOT_BYTES: Final = 4

FreedParts = dict[int, list[bytes]]
"""Packed slots to free, by tier index, before they are handed out as `Freed`."""


class Structure:
    """Nodes under one root a namespace, and what is counted about them."""

    def __init__(
        self,
        *,
        page_size: int,
        tiers: Sequence[TierId],
        policies: Mapping[TierId, EvictionPolicy] | None = None,
        listeners: Sequence[HearsShape | HearsCopies] = (),
        metadata_bytes: int | None = None,
        max_publications: int = MAX_PUBLICATIONS,
        max_report_bytes: int = MAX_REPORT_BYTES,
    ) -> None:
        # What `__del__` looks at is there before anything is refused.
        self._roots: Final[dict[bytes, Root]] = {}
        self._limbo: Final[set[Node]] = set()  # left the tree, with CONDEMNED copies
        self._published: Final = Published()
        self._ranked: Final = Ranked()
        if type(page_size) is not int or not 1 <= page_size <= MAX_PAGE_SIZE:
            raise BadRequest("page_size", f"{page_size!r} is not within 1 to {MAX_PAGE_SIZE} tokens")
        if isinstance(tiers, str) or not isinstance(tiers, Sequence):
            raise BadRequest("tiers", f"{type(tiers).__name__} is not a sequence of tiers")
        if not 1 <= len(tiers) <= MAX_TIERS:
            raise BadRequest("tiers", f"{len(tiers)} tiers are not within 1 to {MAX_TIERS}")
        for tier in tiers:
            name("tiers", tier)
        if len(set(tiers)) != len(tiers):
            raise BadRequest("tiers", "a tier is named twice")
        policies = policies or {}
        if unknown := set(policies) - set(tiers):
            raise BadRequest("policies", f"{', '.join(sorted(unknown))} is no tier of this tree")
        check_metadata_bytes(metadata_bytes, page_size=page_size, num_tiers=len(tiers))
        self.max_publications: Final = whole("max_publications", max_publications, 0)
        """Most publications of all tenants at a time."""
        max_report_bytes = whole("max_report_bytes", max_report_bytes, 0)
        self.metadata_budget: Final = metadata_bytes
        """Most bytes that `insert` lets the tree's own memory grow to, by its own estimate; None for no bound."""
        self.page_size: Final = page_size
        self.tiers: Final = tuple(tiers)
        self._tier_index: Final = {tier: index for index, tier in enumerate(tiers)}
        self._page_bytes: Final = page_size * TOKEN_BYTES
        self._evictable: Final = Evictable(
            [policies.get(tier) or LruPolicy() for tier in tiers],
            LruPolicy() if metadata_bytes is not None else None,
            listeners,
        )
        self._reports: Final = Reports(max_report_bytes)
        self._pages: Final = [[0] * len(Residency) for _ in tiers]
        self._now = float("-inf")
        self._num_nodes = 0
        self._num_pages = 0  # in the tree, each once, wherever its copies are
        self._num_slots = 0  # those of all copies
        self._num_copies = 0  # pairs of a node and a tier in which it is not ABSENT, in the tree or in limbo

    def __del__(self) -> None:
        # The collector does not see nodes, so cycles through them are undone here.
        nodes: list[Node] = [*self._roots.values(), *self._limbo]
        while nodes:
            node = nodes.pop()
            nodes += child_nodes(node)
            node._parent = node._children = None
            node._holds = ()
        self._published.clear()

    # -- looking ------------------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """Nodes in the tree, over all namespaces."""
        return self._num_nodes

    @property
    def num_namespaces(self) -> int:
        """Namespaces with at least one page."""
        return len(self._roots)

    @property
    def metadata_bytes(self) -> int:
        """About how many bytes of memory the tree uses: see `hicache.metadata` for what is counted and how well.

        This is what the budget bounds. Publications and reports have bounds of their own, and are in `aside_bytes`.
        """
        budgeted = self.metadata_budget is not None
        return (
            (self._num_nodes + len(self._limbo)) * (NODE_BYTES + budgeted * ORDER_BYTES)
            + self._num_copies * ORDER_BYTES
            + self._num_pages * self._page_bytes
            + self._num_slots * SLOT_BYTES
            + len(self._roots) * ROOT_BYTES
        )

    @property
    def aside_bytes(self) -> int:
        """About how many bytes of memory publications and reports take, beside `metadata_bytes`. No page leaves and no
        insert is refused for them."""
        published = self._published
        return (
            len(published.publications) * PUBLICATION_BYTES
            + published.num_readers * READER_BYTES
            + sum([readable.num_bytes for readable in published.readable.values()])
            + self._reports.num_bytes
        )

    @property
    def num_reports_dropped(self) -> int:
        """Reports about a node that were not kept, or not any more, since `max_report_bytes` was reached."""
        return self._reports.num_dropped

    def _bytes_of(self, node: Node) -> int:
        """What `metadata_bytes` counts for one node in the tree."""
        num_copies = held_tiers(node._states).bit_count()
        ids = node._num_pages * (self._page_bytes + num_copies * SLOT_BYTES)
        orders = (num_copies + (self.metadata_budget is not None)) * ORDER_BYTES
        return NODE_BYTES + orders + ids

    def occupancy(self, tier: TierId) -> Occupancy:
        """Pages of one tier that the tree accounts for."""
        pages = self._pages[tier_index(self._tier_index, tier)]
        return Occupancy(pages[Residency.RESIDENT], pages[Residency.ARRIVING], pages[Residency.CONDEMNED])

    def path(self, node: Node) -> list[Node]:
        """The nodes from the root to `node`, root side first; empty for a node that left the tree."""
        self._require_node(node)
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
        self._require_node(node)
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

    def own_tokens_of(self, node: Node, most: int | None = None) -> npt.NDArray[np.int32]:
        """Those of the node itself, or the first `most` of them, without what leads to it; read-only. Takes no longer
        for a deeper one."""
        if most is None:
            return np.frombuffer(self._node_bytes(node), INT32)
        rest = min((node._num_pages - 1) * self._page_bytes, most * TOKEN_BYTES)
        first = node._key + node._buffer[node._start : node._start + rest]
        return np.frombuffer(first[: most * TOKEN_BYTES], INT32)

    def _node_bytes(self, node: Node) -> bytes:
        rest = (node._num_pages - 1) * self._page_bytes
        return node._key + node._buffer[node._start : node._start + rest]

    def _descend(self, root: Node, raw: memoryview | bytes, num_bytes: int) -> tuple[list[Node], int, int]:
        """The path that `raw` shares with what is below a node: its nodes, the bytes that match (whole pages), pages of
        the last node, which is `root` where there is none."""
        page_bytes = self._page_bytes
        path: list[Node] = []
        node = root
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

    def _require_page_size(self, namespace: Namespace) -> None:
        if namespace.layout.page_size != self.page_size:
            problem = f"its pages have {namespace.layout.page_size} tokens, the tree's have {self.page_size}"
            raise BadRequest("namespace", problem)

    def _require_node(self, node: Node) -> None:
        if not isinstance(node, Node):
            raise BadRequest("node", f"{type(node).__name__} is not a node")
        if node._root.tiers is not self._tier_index:
            raise BadRequest("node", "belongs to another tree")

    def _require_live(self, node: Node) -> None:
        self._require_node(node)
        if node._parent is None:
            raise NotResident("any tier", "a node that was removed, or merged into the one below it,")

    def _require_resident(self, node: Node, index: int) -> None:
        self._require_live(node)
        if not node._states >> index & 1:
            raise NotResident(self.tiers[index], f"a node of {node._num_pages} pages")

    # -- linking ------------------------------------------------------------------------------------------------------

    def _attach(
        self, parent: Node, key: bytes, rest: bytes, index: int, slots: bytes, chain: bytes | None
    ) -> Node:
        """Hang a new leaf below `parent`, resident in one tier. `key`: the tokens of its first page; `rest`: those of
        all others; `chain`: the digest at its end, where it is known."""
        node = Node(parent._root, key, rest, 0, len(slots) // SLOT_BYTES)
        node._last_access = self._now
        node._parent = parent
        node._chain = chain
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
        self._num_pages += node._num_pages
        node._slots = slots
        self._apply(node, index, Event.STORED)
        self._refresh(node)
        return node

    def split(self, node: Node, num_pages: int) -> tuple[Node, Node]:
        """Cut a node after its first `num_pages` pages; returns the upper half, which is new, and the lower one, which
        is the same object. Pins and moves cover both halves; leases stay at the end, which is the lower half's.

        Raises `BadRequest` unless `num_pages` is within 1 to `node.num_pages - 1`, `NotResident` for a node that left.
        """
        self._require_live(node)
        num_pages = whole("num_pages", num_pages, 1, node._num_pages - 1)
        return self._split(node, num_pages), node

    def _split(self, node: Node, num_pages: int) -> Node:
        parent, siblings = place(node)
        box = node.box
        upper_slots, lower_slots = _cut_slots(node, num_pages)
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
        upper._num_uses = node._num_uses
        upper._in_tier = _counts((states | states >> ARRIVING_SHIFT) & TIER_MASK)
        upper._holds = node._holds
        for hold in node._holds:
            hold._replace(node, upper)
        self._trim(upper)
        self._trim(node)
        self._evictable.split(upper, node)
        if states & PUBLISHED:
            self._published.split(upper, node)
        if states >> RANK_SHIFT:
            self._ranked.note(upper, self._ranked.until[box])
        if self._reports.by_node:
            self._reports.split(upper, node)
        self._num_nodes += 1
        self._num_copies += held_tiers(states).bit_count()
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
            and upper not in self._published.ends
        )

    def _merge(self, upper: Node, lower: Node) -> None:
        if self._reports.by_node:
            self._reports.merge(upper, lower)
        if upper._states >> RANK_SHIFT:
            self._ranked.merge(upper, lower)
        later = upper._last_access > lower._last_access
        is_heard = self._evictable.is_shape_heard
        states = lower._states
        if later or is_heard:
            # It takes another place in the policies' orders: which one is for them to say once it is whole.
            lower._states = 0
            self._refresh(lower)
            lower._states = states
        if is_heard:
            self._evictable.joined(upper, lower)
        parent, siblings = place(upper)
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
        lower._num_uses = max(upper._num_uses, lower._num_uses)
        upper._parent = None  # keeps its one child: `current` follows it
        if lower._states & PUBLISHED:
            self._published.merge(upper, lower)
        self._num_nodes -= 1
        self._num_copies -= held_tiers(lower._states).bit_count()
        if later or is_heard:
            lower._last_access = max(upper._last_access, lower._last_access)
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

    def _leave(self, node: Node, freed: FreedParts) -> None:
        """Take a childless node out of the tree with all its copies."""
        assert not node._children, "a node leaves before its children"
        parent, siblings = place(node)
        root = node._root
        if node._states & PUBLISHED:
            self._published.withdraw(node)
        if self._reports.by_node:
            self._reports.leave(node)
        if node._states >> RANK_SHIFT:
            self._ranked.drop(node)
            node._states &= ~(RANK_MASK << RANK_SHIFT)
        in_tier = (node._states | node._states >> ARRIVING_SHIFT) & TIER_MASK
        for index in range(in_tier.bit_length()):
            if not in_tier >> index & 1:
                continue
            if node._holds and is_held(node._holds, index):
                self._apply(node, index, Event.REMOVED)
            else:
                self._free_slots(node, index, freed)
                self._apply(node, index, Event.REMOVED, Event.RELEASED)
        self._refresh(node)
        node._parent = node._children = None
        del siblings[node._key]
        if parent._order is not None:
            parent._order.remove(node._key)
        if node._states:
            self._limbo.add(node)
        self._num_nodes -= 1
        self._num_pages -= node._num_pages
        if parent is root and not siblings:
            del self._roots[root.digest]
            return
        if not siblings:
            parent._children = parent._order = None
            self._refresh(parent)
        elif len(siblings) >= ORDER_FROM and sys.getsizeof(siblings) > SPARSE_BYTES * len(siblings):
            # Dictionaries do not shrink by themselves. Most children of a large one have left: keep a small one.
            parent._children = dict(siblings)
            untrack(parent._children)

    # -- residency and slots ------------------------------------------------------------------------------------------

    def _apply(self, node: Node, index: int, event: Event, then: Event | None = None) -> None:
        """The one place where a residency changes: by the table, with the counts that follow from it. Two events are
        one after the other, with nothing in between."""
        before = state_of(node._states, index)
        state = after(before, event)
        if then is not None:
            state = after(state, then)
        node._states = with_state(node._states, index, state)
        pages = self._pages[index]
        pages[before] -= node._num_pages
        pages[state] += node._num_pages
        if not before:
            self._num_copies += 1
            self._num_slots += node._num_pages
        elif not state:
            self._num_copies -= 1
            self._num_slots -= node._num_pages
        was_in, is_in = before in IN_TIER, state in IN_TIER
        parent = node._parent
        if was_in != is_in and parent is not None:
            residents = self._evictable.residents[index]
            if residents is not None:
                if is_in:
                    residents.entered(node)
                else:
                    residents.left(node)
            shift = COUNT_BITS * index
            parent._in_tier += 1 << shift if is_in else -1 << shift
            # The first child in a tier, or none any more: the parent ceases or begins to be a leaf of it.
            if parent._in_tier >> shift & COUNT_MASK == is_in:
                self._refresh(parent)
        if self._evictable.hear_copies:
            was_there, is_there = before is Residency.RESIDENT, state is Residency.RESIDENT
            if was_there != is_there:
                for each in self._evictable.hear_copies:
                    each.copied(node, self.tiers[index], is_there)

    def _drop_copy(self, node: Node, index: int, freed: FreedParts) -> None:
        """One copy goes now: its slots are free, or CONDEMNED while something uses them."""
        self._apply(node, index, Event.REMOVED)
        self._refresh(node)
        self._release_condemned(node, freed)

    def _release_condemned(self, node: Node, freed: FreedParts) -> None:
        """Free the CONDEMNED copies of a node that no hold uses any more."""
        condemned = node._states >> CONDEMNED_SHIFT & TIER_MASK
        for index in range(condemned.bit_length()):
            if condemned >> index & 1 and not is_held(node._holds, index):
                self._free_slots(node, index, freed)
                self._apply(node, index, Event.RELEASED)
        if node._parent is None and not node._states:
            self._limbo.discard(node)

    def _give_slots(self, node: Node, index: int, slots: bytes) -> None:
        """Record the slots of a tier in which the node is still ABSENT."""
        held, size = held_tiers(node._states), node._num_pages * SLOT_BYTES
        at = (held & (1 << index) - 1).bit_count() * size
        node._slots = node._slots[:at] + slots + node._slots[at : held.bit_count() * size]

    def _free_slots(self, node: Node, index: int, freed: FreedParts) -> None:
        """Hand out the slots of a tier in which the node is about to be ABSENT."""
        held, size = held_tiers(node._states), node._num_pages * SLOT_BYTES
        at = (held & (1 << index) - 1).bit_count() * size
        freed.setdefault(index, []).append(node._slots[at : at + size])
        node._slots = node._slots[:at] + node._slots[at + size : held.bit_count() * size]

    def _freed(self, parts: FreedParts) -> Freed:
        return {self.tiers[index]: pack_parts(parts[index]) for index in sorted(parts)}

    # -- recency and eviction order -----------------------------------------------------------------------------------

    def _refresh(self, node: Node) -> None:
        self._evictable.refresh(node, self._now)

    def _advance(self, now: float) -> None:
        if now > self._now:
            self._now = now

    def _use(self, node: Node) -> None:
        node._last_access = self._now
        if node._listed:
            self._evictable.touch(node, self._now)


def place(node: Node) -> tuple[Node, dict[bytes, Box]]:
    """The parent of a live node, and the parent's children, among which the node stands under its key."""
    parent = node._parent
    assert parent is not None, "a node that left the tree has no place"
    assert parent._children is not None, "a parent has no children"
    return parent, parent._children


def digest_of(namespace: Namespace) -> bytes:
    """The namespace's digest; raises `BadRequest` for what is no namespace."""
    if not isinstance(namespace, Namespace):
        raise BadRequest("namespace", f"{type(namespace).__name__} is not a Namespace")
    return namespace.digest


def _cut_slots(node: Node, num_upper: int) -> tuple[bytes, bytes]:
    """Slots of the two parts of a node, each tier's cut at the same page."""
    slots, size, border = node._slots, node._num_pages * SLOT_BYTES, num_upper * SLOT_BYTES
    held = held_tiers(node._states).bit_count()
    if held == 1:
        # Evicting a long run page by page from its end would copy all that stays each time.
        return slots if len(slots) <= 2 * border else slots[:border], slots[border:size]
    starts = range(0, held * size, size)
    upper = b"".join(slots[at : at + border] for at in starts)
    return upper, b"".join(slots[at + border : at + size] for at in starts)


def _join_slots(upper: Node, lower: Node) -> bytes:
    """Slots of two nodes of equal residency, joined tier by tier."""
    parts: list[bytes] = []
    for index in range(held_tiers(lower._states).bit_length()):
        parts += (slots_of(upper, index), slots_of(lower, index))
    return b"".join(parts)


def pack_parts(parts: list[bytes]) -> Slots:
    """Packed slots one after the other, as one read-only array."""
    return np.frombuffer(b"".join(parts), np.int32)


def _counts(mask: int) -> int:
    """One child in each tier of `mask`, in the packed form of `Node._in_tier`."""
    counts = 0
    for index in range(mask.bit_length()):
        counts |= (mask >> index & 1) << COUNT_BITS * index
    return counts
