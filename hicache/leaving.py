"""How pages leave: evicted from a tier, forgotten as corrupt, removed with everything below them, flushed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy.typing as npt

from hicache.arguments import moment, name, whole
from hicache.caring import Caring
from hicache.errors import BadRequest, NoRoom
from hicache.evictable import is_held
from hicache.metadata import ROOT_BYTES
from hicache.namespace import Namespace
from hicache.node import CONDEMNED_SHIFT, PUBLISHED, TIER_MASK, Node, Root, child_nodes, state_of, tier_index
from hicache.residency import IN_TIER, Event
from hicache.results import Freed, Removed
from hicache.structure import FreedParts, Structure, digest_of, place
from hicache.tier import TierId
from hicache.tokens import TOKEN_BYTES, check_ids, raw_bytes, view_tokens
from hicache.walking import Siblings, begins_at

_Finder = Callable[[], tuple[list[Siblings], int]]
"""Finds the siblings in and below which something is to be removed, and the page (of their paths) from which on."""


@dataclass(slots=True)
class _Step:
    """What a removal has done so far."""

    freed: FreedParts = field(default_factory=dict)
    num_pages: int = 0
    num_pending: int = 0
    held: list[Node] = field(default_factory=list)
    noted: set[Node] = field(default_factory=set)
    """Nodes that were named as held, in earlier steps too."""

    def removed(self, tree: Structure) -> Removed:
        return Removed(tree._freed(self.freed), self.num_pages, self.num_pending, tuple(self.held))


class Leaving(Caring):
    """What takes pages out of tiers and out of the tree."""

    def can_evict(self, node: Node, tier: TierId) -> bool:
        """Whether `evict` is allowed: the copy is RESIDENT and unused, and another remains or nobody needs one."""
        index = tier_index(self._tier_index, tier)
        self._require_node(node)
        if node._parent is None or not node._states >> index & 1 or is_held(node._holds, index):
            return False
        return node._states & TIER_MASK != 1 << index or not (node._num_leases or node._children)

    def victims(self, tier: TierId, num_pages: int, now: float) -> list[Node]:
        """The nodes that should leave a tier next, coldest first, until they cover `num_pages`.

        Each is a leaf of the tier that nobody uses there; it can be evicted, or else demoted to a slower tier. They may
        cover less: nodes above become leaves when these have left, so take these and ask again. The last one may hold
        more pages than are wanted; `evict` takes them from its end. Raises `BadRequest`, for a `num_pages` below 0 too.
        """
        index = tier_index(self._tier_index, tier)
        num_pages = whole("num_pages", num_pages, 0)
        self._advance(moment("now", now))
        self._end_retentions()
        return self._evictable.victims(index, num_pages)

    def evict(self, node: Node, tier: TierId, num_pages: int | None = None) -> Freed:
        """Let a node's copy leave a tier, or the last `num_pages` pages of it (the node is then split).

        A page whose last copy this was leaves the tree. Raises `NotResident` when there is no copy, `BadRequest` when
        it is pinned or moving, or is the last copy of pages that are leased or have others below (`can_evict` tells).
        """
        index = tier_index(self._tier_index, tier)
        self._require_resident(node, index)
        if num_pages is not None:
            num_pages = whole("num_pages", num_pages, 1, node._num_pages)
        if not self.can_evict(node, tier):
            reason = "is used by a pin or a move" if is_held(node._holds, index) else "is the last, and still needed"
            raise BadRequest("node", f"its copy in {tier} {reason}")
        if num_pages is not None and num_pages < node._num_pages:
            self._split(node, node._num_pages - num_pages)
        freed: FreedParts = {}
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
        self._require_node(node)
        first_page = whole("first_page", first_page, 0, node._num_pages - 1)
        freed: FreedParts = {}
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

        Takes some 10 µs a node: `remove_in_steps` does the same piece by piece.
        """
        find = self._doomed(namespace, tokens, first_page)
        return self._joined(self._removal(find, None))

    def remove_in_steps(
        self, namespace: Namespace, tokens: npt.ArrayLike, *, first_page: int | None = None, max_nodes: int
    ) -> Iterator[Removed]:
        """`remove`, looking at no more than `max_nodes` nodes in a step, so that others can do something in between.

        Each step names what it did itself. Whatever was in the tree at the call and is removed by it has left when the
        last step is done, unless it is held; until then it may still be matched. Pages that are inserted between the
        steps may go or stay, and those above them then stay as well.
        """
        find = self._doomed(namespace, tokens, first_page)
        return self._removal(find, whole("max_nodes", max_nodes, 1))

    def flush(
        self, namespace: Namespace | None = None, tenant: str | None = None, tier: TierId | None = None
    ) -> Removed:
        """Remove everything, or what belongs to a namespace, to a tenant, or (copies only) to one tier.

        Pages whose only copy is in the flushed tier leave the tree with everything below them, unless leased. What
        could not go is in `Removed.held`.

        Takes some 10 µs a node: `flush_in_steps` does the same piece by piece, but for one tier.
        """
        index = None if tier is None else tier_index(self._tier_index, tier)
        find = self._roots_of(namespace, tenant)
        if index is None:
            return self._joined(self._removal(find, None))
        return self._flush_tier([node for root in find()[0] for node in child_nodes(root.parent)], index)

    def flush_in_steps(
        self, namespace: Namespace | None = None, tenant: str | None = None, *, max_nodes: int
    ) -> Iterator[Removed]:
        """`flush`, of all tiers, looking at no more than `max_nodes` nodes in a step: see `remove_in_steps`."""
        return self._removal(self._roots_of(namespace, tenant), whole("max_nodes", max_nodes, 1))

    def _roots_of(self, namespace: Namespace | None, tenant: str | None) -> "_Finder":
        digest = None if namespace is None else digest_of(namespace)
        tenant = None if tenant is None else name("tenant", tenant)

        def find() -> tuple[list[Siblings], int]:
            return [
                Siblings(root)
                for root in self._roots.values()
                if (digest is None or root.digest == digest) and (tenant is None or root.owner == tenant)
            ], 0

        return find

    def _doomed(self, namespace: Namespace, tokens: npt.ArrayLike, first_page: int | None) -> "_Finder":
        packed = view_tokens(tokens)
        check_ids("tokens", packed)
        if first_page is not None:
            first_page = whole("first_page", first_page, 0, len(packed) // self.page_size)
        raw, digest = bytes(raw_bytes(packed)), digest_of(namespace)
        return lambda: self._find(digest, raw, first_page)

    def _find(self, digest: bytes, raw: bytes, first_page: int | None) -> tuple[list[Siblings], int]:
        num_pages, num_tail = divmod(len(raw) // TOKEN_BYTES, self.page_size)
        root = self._roots.get(digest)
        if root is None:
            return [], 0
        path, position, inside = self._descend(root, raw, num_pages * self._page_bytes)
        matched = position // self._page_bytes
        if first_page is not None and first_page < matched:
            start = 0
            for node in path:
                start += node._num_pages
                if start > first_page:
                    return [_alone(node)], first_page
        if matched < num_pages:
            return [], 0
        last: Node = path[-1] if path else root
        tail = raw[len(raw) - num_tail * TOKEN_BYTES :]
        limit = num_pages + (1 if tail else 0)
        if inside == last._num_pages:
            return [Siblings(last, prefix=tail)], limit
        start = last._start + (inside - 1) * self._page_bytes
        return ([_alone(last)] if last._buffer.startswith(tail, start) else []), limit

    def _removal(self, find: "_Finder", max_nodes: int | None) -> Iterator[Removed]:
        """Remove what `find` finds, children before their parents.

        What is above stays, also where nodes were joined or split between two steps: a page is judged by its place. A
        node that left meanwhile, while what is below it was gone through, may have left an upper half behind: then
        everything is looked for once more.
        """
        step, ends, num_seen = _Step(), dict[Node, int](), 0
        tops, limit = find()
        is_disturbed = False
        while tops or is_disturbed:
            if not tops:
                (tops, limit), is_disturbed = find(), False
                continue
            stack = [tops.pop()]
            while stack:
                if num_seen == max_nodes:
                    yield step.removed(self)
                    step, ends, num_seen = _Step(noted=step.noted), {}, 0
                num_seen += 1
                node = stack[-1].next()
                if node is None:
                    node = stack.pop().parent
                    is_disturbed |= _has_left(node)
                    if not stack:
                        break
                elif node._children:
                    stack.append(Siblings(node))
                    continue
                # A node that was split meanwhile has its upper half between itself and the node that was above it; one
                # that the node above was joined into has none of it above itself.
                above = next((top.parent for top in reversed(stack) if not _has_left(top.parent)), None)
                while node is not above and not _has_left(node) and not isinstance(node, Root):
                    parent, _ = place(node)
                    begins = begins_at(node, ends) if limit else 0
                    if begins + node._num_pages <= limit:
                        break
                    if begins < limit:
                        self._split(node, limit - begins)
                    self._remove_node(node, step)
                    node = parent
        yield step.removed(self)

    def _remove_node(self, node: Node, step: "_Step") -> None:
        """Remove a node below which nothing is left, or note that it is held, and published no more."""
        if node._num_leases or node._children:
            if node not in step.noted:
                step.noted.add(node)
                step.held.append(node)
            if node._states & PUBLISHED and node not in self._published.below:
                self._published.withdraw(node)
            return
        step.num_pages += node._num_pages
        self._leave(node, step.freed)
        step.num_pending += node._num_pages * (node._states >> CONDEMNED_SHIFT).bit_count()

    def _joined(self, steps: Iterator[Removed]) -> Removed:
        """What a removal that was not cut into steps did."""
        (removed,) = steps
        return removed

    def _plan_room(self, growth: int, root: Root | None, path: list[Node], num_pages: int) -> list[Node]:
        """The nodes that leave, in this order, so that `growth` more bytes fit into the metadata budget: always the
        coldest that nothing keeps, and nothing below which stays. None of `path` below `root`. Changes nothing.

        Raises `NoRoom`, for an insert of `num_pages` new pages, when that is not enough.
        """
        assert self.metadata_budget is not None, "there is no budget"
        excess = self.metadata_bytes + growth - self.metadata_budget
        plan: list[Node] = []
        kept = set(path)
        listed = self._evictable.coldest()
        waiting = next(listed, None)
        # Nodes whose children are all in the plan, by recency; how many children the others still have.
        exposed: list[tuple[float, int, Node]] = []
        remaining: dict[Node, int] = {}
        while excess > 0:
            if exposed and (waiting is None or exposed[0][0] < waiting._last_access):
                node = heappop(exposed)[2]
            elif waiting is not None:
                node, waiting = waiting, next(listed, None)
                if node in kept:
                    continue
            else:
                raise NoRoom("metadata", pages_asked=num_pages, pages_free=0, problem=(
                    f"{growth} bytes asked of a budget of {self.metadata_budget}, "
                    f"of which {self.metadata_bytes} are used and too few can be freed"
                ))
            plan.append(node)
            excess -= self._bytes_of(node)
            parent = node._parent
            assert parent is not None, "what is listed is in the tree"
            left = remaining[parent] = remaining.get(parent, len(parent._children or ())) - 1
            if left:
                continue
            if isinstance(parent, Root):
                excess -= ROOT_BYTES if parent is not root else 0
            elif not (parent._num_leases or parent._holds or parent in kept):
                heappush(exposed, (parent._last_access, len(plan), parent))
        return plan

    def _drop(self, nodes: list[Node]) -> Freed:
        """Carry such a plan out."""
        freed: FreedParts = {}
        parents = [node._parent for node in nodes]
        for node in nodes:
            self._leave(node, freed)
        for parent in parents:
            if parent is not None:
                self._heal(parent)
        return self._freed(freed)

    def _flush_tier(self, tops: list[Node], index: int) -> Removed:
        freed: FreedParts = {}
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
                step = _Step(freed)
                for each in reversed(self._branch([node])):
                    self._remove_node(each, step)
                num_pages += step.num_pages
                num_pending += step.num_pending
        return Removed(self._freed(freed), num_pages, num_pending, tuple(stayed))


def _has_left(node: Node) -> bool:
    return node._parent is None and not isinstance(node, Root)


def _alone(node: Node) -> Siblings:
    """One node, without its siblings."""
    assert node._parent is not None, "it was just found"
    return Siblings(node._parent, only=node._key)
