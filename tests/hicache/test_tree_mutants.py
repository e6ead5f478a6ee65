"""Does the history driver notice? Each mutant is the tree with one thing broken; each must fail within a few histories.

A mutant that lives means that a rule is not tested: add the test, not an exception here.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hicache import leaving, residency, structure, tree
from hicache.errors import NoRoom
from hicache.lease import Hold, Lease, Move, Pin
from hicache.node import TIER_MASK, Node, Root, child_nodes, held_tiers, make_box
from hicache.residency import Event, Residency
from hicache.results import Finished, Freed, Inserted, Match, Removed
from hicache.tier import TierId
from hicache.tree import HiRadixTree
from tests.hicache.histories import HistoryFailure, run_history

MAX_HISTORIES = 100


class SkippedCompare(HiRadixTree):
    """Trusts the first page of a run and never compares the rest."""

    def _descend(self, root: Node, raw: memoryview | bytes, num_bytes: int) -> tuple[list[Node], int, int]:
        path, position, inside = super()._descend(root, raw, num_bytes)
        if path and inside < path[-1]._num_pages:
            whole = min(path[-1]._num_pages, inside + (num_bytes - position) // self._page_bytes)
            position += (whole - inside) * self._page_bytes
            inside = whole
        return path, position, inside


class MatchesTheTail(HiRadixTree):
    """Counts the shared tokens of the partial page as matched."""

    def match(self, namespace: Any, tokens: Any, *, published: bool = True) -> Match:
        match = super().match(namespace, tokens, published=published)
        if match.partial is None:
            return match
        return match._replace(num_tokens=match.num_tokens + match.partial.num_tokens)


class FirstPartial(HiRadixTree):
    """Takes any sibling as the partial instead of the one that shares most."""

    def _find_partial(self, node: Node, *rest: Any) -> Any:
        partial = super()._find_partial(node, *rest)
        if partial is None or partial.page or partial.node._parent is None:
            return partial
        siblings = child_nodes(partial.node._parent)
        return partial._replace(node=siblings[0])


class MatchSplits(HiRadixTree):
    """Splits where a match ends inside a node."""

    def match(self, namespace: Any, tokens: Any, *, published: bool = True) -> Match:
        match = super().match(namespace, tokens, published=published)
        if match.nodes and match.pages_in_last < match.nodes[-1].num_pages:
            self._split(match.nodes[-1], match.pages_in_last)
            return super().match(namespace, tokens, published=published)
        return match


class NamespaceIgnored(HiRadixTree):
    """Keeps the pages of all namespaces of a tenant in one tree."""

    def match(self, namespace: Any, tokens: Any, *, published: bool = True) -> Match:
        for root in self._roots.values():
            if root.owner == namespace.tenant:
                packed = tree.pack_tokens(tokens)
                path, position, inside = self._descend(root, packed.tobytes(), packed.nbytes)
                return super().match(namespace, tokens, published=published)._replace(
                    nodes=tuple(path), num_tokens=position // 4, pages_in_last=inside
                )
        return super().match(namespace, tokens, published=published)


class SplitForgetsHolds(HiRadixTree):
    """The upper half of a split is no longer held by the pins and moves of the whole."""

    def _split(self, node: Node, num_pages: int) -> Node:
        upper = super()._split(node, num_pages)
        for hold in upper._holds:
            hold._nodes.remove(upper)
        upper._holds = ()
        return upper


class SplitMovesLeases(HiRadixTree):
    """A split leaves the leases with the upper half."""

    def _split(self, node: Node, num_pages: int) -> Node:
        upper = super()._split(node, num_pages)
        upper._num_leases, node._num_leases = node._num_leases, 0
        return upper


class SplitSwapsSlots(HiRadixTree):
    """A split gives the lower half's slots to the upper one where both are as long."""

    def _split(self, node: Node, num_pages: int) -> Node:
        upper = super()._split(node, num_pages)
        if upper._num_pages == node._num_pages:
            upper._slots, node._slots = node._slots, upper._slots
        return upper


class SplitForgetsRecency(HiRadixTree):
    """The upper half of a split counts as never used."""

    def _split(self, node: Node, num_pages: int) -> Node:
        upper = super()._split(node, num_pages)
        upper._last_access = 0.0
        return upper


class SplitForgetsUses(HiRadixTree):
    """The upper half of a split counts as never used, and the lower one too."""

    def _split(self, node: Node, num_pages: int) -> Node:
        upper = super()._split(node, num_pages)
        upper._num_uses = node._num_uses = 0
        return upper


class CountsTheEndAlone(HiRadixTree):
    """A use counts with the node where it ends."""

    def count_use(self, node: Node) -> None:
        node._num_uses += 1


class SplitKeepsDigest(HiRadixTree):
    """The upper half of a split takes over the digest of the whole chain."""

    def _split(self, node: Node, num_pages: int) -> Node:
        upper = super()._split(node, num_pages)
        upper._chain = node._chain
        return upper


class MergesUnequal(HiRadixTree):
    """Joins runs whatever tiers they are in."""

    def _can_merge(self, upper: Node, lower: Node) -> bool:
        states, upper._states = upper._states, lower._states
        possible = super()._can_merge(upper, lower)
        upper._states = states
        return possible


class MergesLeased(HiRadixTree):
    """Joins a leased run with what lies below it."""

    def _can_merge(self, upper: Node, lower: Node) -> bool:
        leases, upper._num_leases = upper._num_leases, 0
        possible = super()._can_merge(upper, lower)
        upper._num_leases = leases
        return possible


class MergesMoving(HiRadixTree):
    """Joins runs that a move or a pin holds."""

    def _can_merge(self, upper: Node, lower: Node) -> bool:
        holds, upper._holds = upper._holds, ()
        possible = super()._can_merge(upper, lower)
        upper._holds = holds
        return possible


class ForgottenPin(HiRadixTree):
    """A pin protects nothing."""

    def pin(self, nodes: Any, tier: TierId) -> Pin:
        pin = super().pin(nodes, tier)
        for node in pin._nodes:
            node._holds = tuple(hold for hold in node._holds if hold is not pin)
            self._refresh(node)
        pin._nodes = []
        return pin


class EvictsMoveSources(HiRadixTree):
    """A move protects its target only."""

    def start_move(self, node: Node, *, source: TierId, target: TierId, slots: Any) -> Move:
        move = super().start_move(node, source=source, target=target, slots=slots)
        move._tiers &= ~(1 << self._tier_index[source])
        self._refresh(node)
        return move


class EarlyArrival(HiRadixTree):
    """A moved page may be served as soon as its move has begun."""

    def start_move(self, node: Node, *, source: TierId, target: TierId, slots: Any) -> Move:
        move = super().start_move(node, source=source, target=target, slots=slots)
        self._apply(node, self._tier_index[target], Event.MOVE_DONE)
        return move


class FailedMoveStays(HiRadixTree):
    """A failed page counts as arrived."""

    def finish_move(self, move: Move, ok: Sequence[bool]) -> Finished:
        return super().finish_move(move, [True] * len(ok) if len(ok) == move.num_pages else ok)


class FailureLosesAll(HiRadixTree):
    """One failed page fails its whole move."""

    def finish_move(self, move: Move, ok: Sequence[bool]) -> Finished:
        return super().finish_move(move, [all(ok)] * len(ok) if len(ok) == move.num_pages else ok)


class Resurrects(HiRadixTree):
    """A page that was removed during its move comes back when the move ends."""

    def finish_move(self, move: Move, ok: Sequence[bool]) -> Finished:
        gone = [node for node in move._nodes if node._parent is None]
        parents = {id(node): node._root for node in gone}
        finished = super().finish_move(move, ok)
        for node in gone:
            root = parents[id(node)]
            if self._roots.get(root.digest) is root and node._key not in (root._children or {}):
                assert root._children is not None
                root._children[node._key] = make_box(node)
                node._parent = root
        return finished


class LostFreedSlot(HiRadixTree):
    """Freeing several slots of one tier forgets the last one."""

    def _freed(self, parts: Any) -> Freed:
        return {tier: slots[: max(1, len(slots) - 1)] for tier, slots in super()._freed(parts).items()}


class FreesCondemned(HiRadixTree):
    """Removal frees the slots that a pin or a move still uses."""

    def _release_condemned(self, node: Node, freed: Any) -> None:
        holds, node._holds = node._holds, ()
        super()._release_condemned(node, freed)
        node._holds = holds


class LeakedDuplicate(HiRadixTree):
    """Does not give back the slots of pages that were there already."""

    def insert(self, *arguments: Any, **named: Any) -> Inserted:
        return super().insert(*arguments, **named)._replace(duplicates=np.empty(0, np.int32))


class OverwritesCopy(HiRadixTree):
    """A duplicate's slot replaces the one that the tree has."""

    def _add_copies(self, path: list[Node], index: int, slots: bytes, first_page: int, duplicates: list[bytes]) -> int:
        if first_page == 0 and path and path[0]._states & TIER_MASK == 1 << index:
            path[0]._slots = slots[: 4 * path[0]._num_pages]
        return super()._add_copies(path, index, slots, first_page, duplicates)


class LostGeneration(HiRadixTree):
    """Finds a lease by nothing but its being the latest of its owner."""

    def release(self, lease: Lease, *, owner: str | None = None) -> None:
        for other in reversed(self._leases.values()):
            if other._owner == lease._owner and (owner is None or owner == lease._owner):
                super().release(other)
                return
        super().release(lease, owner=owner)


class AnyOwner(HiRadixTree):
    """Lets anybody release a lease."""

    def release(self, lease: Lease, *, owner: str | None = None) -> None:
        super().release(lease)


class RenewForgets(HiRadixTree):
    """A renewed lease still ends at its old deadline."""

    def expire(self, now: float) -> list[Lease]:
        due = {generation for deadline, generation in self._deadlines if deadline <= now}
        ended = super().expire(now)
        for generation in due & set(self._leases):
            ended.append(self._leases[generation])
            self._end_lease(ended[-1])
        return ended


class EvictsLeased(HiRadixTree):
    """A lease does not protect the last copy."""

    def can_evict(self, node: Node, tier: TierId) -> bool:
        leases, node._num_leases = node._num_leases, 0
        possible = super().can_evict(node, tier)
        node._num_leases = leases
        return possible


class RemovesLeased(HiRadixTree):
    """Removal does not ask for leases."""

    def _remove_node(self, node: Node, step: Any) -> None:
        node._num_leases = 0
        super()._remove_node(node, step)


class EvictsInner(HiRadixTree):
    """Evicts a last copy although pages lie below it."""

    def can_evict(self, node: Node, tier: TierId) -> bool:
        return super().can_evict(node, tier) or (
            node._parent is not None and node._states & TIER_MASK == 1 << self._tier_index[tier] and not node._holds
        )


class EvictsHead(HiRadixTree):
    """Evicts the first pages of a run instead of the last ones."""

    def evict(self, node: Node, tier: TierId, num_pages: int | None = None) -> Freed:
        if num_pages is not None and 0 < num_pages < node.num_pages and self.can_evict(node, tier):
            upper = self._split(node, num_pages)
            if self.can_evict(upper, tier):
                return super().evict(upper, tier)
        return super().evict(node, tier, num_pages)


class ForgetsOnlyOneTier(HiRadixTree):
    """A page whose last copy is forgotten stays in the tree."""

    def forget(self, node: Node, tier: TierId, first_page: int = 0) -> Freed:
        index = self._tier_index[tier]
        if node._parent is None or node._states & TIER_MASK != 1 << index or first_page:
            return super().forget(node, tier, first_page)
        freed: dict[int, list[bytes]] = {}
        self._drop_copy(node, index, freed)
        return self._freed(freed)


class FlushSparesArriving(HiRadixTree):
    """A flush of one tier leaves what is on its way there."""

    def _flush_tier(self, tops: list[Node], index: int) -> Removed:
        tops = [node for node in tops if not node._holds]
        return super()._flush_tier(tops, index)


class TouchesOneNode(HiRadixTree):
    """A use does not count for the nodes above."""

    def touch(self, node: Node, now: float, *, reader: Any = None) -> None:
        self._advance(now)
        self._use(node)


class ParentStaysListed(HiRadixTree):
    """A node stays evictable although a child of it came into the tier."""

    def _refresh(self, node: Node) -> None:
        if not node._children:
            super()._refresh(node)


class MostRecentFirst(HiRadixTree):
    """Evicts what was used last."""

    def victims(self, tier: TierId, num_pages: int, now: float) -> list[Node]:
        return list(reversed(super().victims(tier, num_pages, now)))


class OrderNotKept(HiRadixTree):
    """The order of siblings misses the children that came after it was made."""

    def _attach(self, parent: Node, *rest: Any) -> Node:
        order, parent._order = parent._order, None
        node = super()._attach(parent, *rest)
        parent._order = order
        return node


class CountsTwice(HiRadixTree):
    """Occupancy counts an arrival twice."""

    def _apply(self, node: Node, index: int, event: Event, then: Event | None = None) -> None:
        super()._apply(node, index, event, then)
        if event is Event.MOVE_DONE:
            self._pages[index][Residency.RESIDENT] += 1


class UnpinKeepsHold(HiRadixTree):
    """A pin of removed pages is never given up."""

    def _let_go(self, hold: Hold) -> bool:
        if isinstance(hold, Pin) and any(node._parent is None for node in hold._nodes):
            return False
        return super()._let_go(hold)


class PublishesWholeNodes(HiRadixTree):
    """Publishes all pages of the node in which the prefix ends."""

    def publish(self, namespace: Any, tokens: Any) -> Node:
        match = self.match(namespace, tokens, published=False)
        if match.nodes and match.num_tokens == len(tokens):
            return super().publish(namespace, self.tokens_of(match.nodes[-1]))
        return super().publish(namespace, tokens)


class PublishedToAll(HiRadixTree):
    """Shows what is published to every namespace, not to those alone that differ in nothing but the tenant."""

    def match(self, namespace: Any, tokens: Any, *, published: bool = True) -> Match:
        match = super().match(namespace, tokens, published=published)
        for readable in self._published.readable.values() if published else ():
            root = self._roots.get(namespace.digest)
            found = self._match_published(namespace.digest, root, readable, tree.pack_tokens(tokens))
            match = max(match, found, key=lambda each: each.num_tokens)
        return match


class ReadsUnpublished(HiRadixTree):
    """Lets readers go on below what is published."""

    def match(self, namespace: Any, tokens: Any, *, published: bool = True) -> Match:
        match = super().match(namespace, tokens, published=published)
        if match.nodes and match.owner != namespace.digest:
            packed = tree.pack_tokens(tokens)
            path, position, inside = self._descend(match.nodes[0]._root, packed.tobytes(), packed.nbytes)
            return match._replace(nodes=tuple(path), num_tokens=position // 4, pages_in_last=inside)
        return match


class PartialOfUnpublished(HiRadixTree):
    """Offers a page as a partial that its owner has not published."""

    def _match_published(self, digest: bytes, root: Root | None, readable: Any, packed: Any) -> Match:
        match = super()._match_published(digest, root, readable, packed)
        if not match.nodes or match.num_tokens == len(packed):
            return match
        position = 4 * match.num_tokens
        partial = self._find_partial(
            match.nodes[-1], match.pages_in_last, packed.tobytes(), position, packed.nbytes
        )
        return match._replace(partial=partial)


class PrefersOthers(HiRadixTree):
    """Gives another tenant's pages where one's own are as long."""

    def _match_published(self, digest: bytes, root: Root | None, readable: Any, packed: Any) -> Match:
        found = super()._match_published(digest, None, readable, packed)
        own = super()._match_published(digest, root, readable, packed)
        return found if found.num_tokens == own.num_tokens else own


class HeldStaysPublished(HiRadixTree):
    """What a lease keeps from being removed can still be found by other tenants."""

    def _remove_node(self, node: Node, step: Any) -> None:
        was_published, published = node.is_published, self._published
        super()._remove_node(node, step)
        if was_published and node.is_live and not node.is_published:
            raw = self.tokens_of(node).tobytes()
            published.publish(str(id(node)).encode(), node.record.scope, self.path(node), raw)


class UnpublishesNothing(HiRadixTree):
    """Says that a publication has ended, and goes on."""

    def unpublish(self, namespace: Any, tokens: Any) -> bool:
        return self._key(namespace, self._whole_pages(tokens)) in self._published.publications


class UnpublishesAll(HiRadixTree):
    """Ends every publication of the same tree with one."""

    def unpublish(self, namespace: Any, tokens: Any) -> bool:
        found = super().unpublish(namespace, tokens)
        if found:
            for publication in list(self._published.publications.values()):
                if publication.node.namespace == namespace.digest:
                    self._published.unpublish(publication.key)
        return found


class ReaderMovesRecency(HiRadixTree):
    """Another tenant's use of a published page counts as the owner's."""

    def touch(self, node: Node, now: float, *, reader: Any = None) -> None:
        super().touch(node, now)


class SplitForgetsReports(HiRadixTree):
    """The upper half of a split is not reported by anybody any more."""

    def _split(self, node: Node, num_pages: int) -> Node:
        upper = super()._split(node, num_pages)
        self._reports.leave(upper)
        return upper


class MergeMixesReports(HiRadixTree):
    """A merge puts the upper half's reports over the lower half's pages."""

    def _merge(self, upper: Node, lower: Node) -> None:
        num_pages, upper._num_pages = upper._num_pages, 0
        self._reports.merge(upper, lower)
        upper._num_pages = num_pages
        super()._merge(upper, lower)


class ReportsProtect(HiRadixTree):
    """A page stays in the cache because an engine says that it has it."""

    def can_evict(self, node: Node, tier: TierId) -> bool:
        return super().can_evict(node, tier) and not self._reports.of(node)


class ReportsTooMuch(HiRadixTree):
    """A report is taken for the whole node in which it ends."""

    def report(self, instance: TierId, namespace: Any, tokens: Any, **named: Any) -> int:
        noted = super().report(instance, namespace, tokens, **named)
        if noted:
            self.report_node(instance, self.match(namespace, tokens, published=False).nodes[-1], resident=True)
        return noted


class ForgetsTheSession(HiRadixTree):
    """The end of a session leaves its reports."""

    def drop_instance(self, instance: TierId) -> int:
        return sum(pages.get(instance, 0).bit_count() for (pages,) in self._reports.by_node.values())


class BudgetIgnored(HiRadixTree):
    """Grows past its budget."""

    def _plan_room(self, *arguments: Any) -> list[Node]:
        return []


class DropsTheWarmest(HiRadixTree):
    """Makes room for metadata by what was used last."""

    def _plan_room(self, growth: int, root: Root | None, path: list[Node], num_pages: int) -> list[Node]:
        plan = super()._plan_room(growth, root, path, num_pages)
        leaves = [node for node in self._evictable.coldest() if node not in path]
        return leaves[-len(plan) :] if plan else plan


class DropsTooMuch(HiRadixTree):
    """Drops everything that may leave once the budget is reached."""

    def _plan_room(self, growth: int, root: Root | None, path: list[Node], num_pages: int) -> list[Node]:
        plan = super()._plan_room(growth, root, path, num_pages)
        return plan or [node for node in self._evictable.coldest() if node not in path]


class DropsTheLeased(HiRadixTree):
    """Makes room for metadata at the cost of leases."""

    def _plan_room(self, *arguments: Any) -> list[Node]:
        leased = [lease._node for lease in self._leases.values() if lease._node is not None]
        counts = {node: node._num_leases for node in leased}
        for node in counts:
            node._num_leases = 0
            self._refresh(node)
        try:
            return super()._plan_room(*arguments)
        finally:
            for node, count in counts.items():
                node._num_leases = count
                self._refresh(node)


class RefusesAtBudget(HiRadixTree):
    """Refuses what does not fit instead of making room."""

    def _plan_room(self, growth: int, root: Root | None, path: list[Node], num_pages: int) -> list[Node]:
        if super()._plan_room(growth, root, path, num_pages):
            raise NoRoom("metadata", pages_asked=num_pages, pages_free=0)
        return []


class LosesDropped(HiRadixTree):
    """Keeps the slots of what was dropped for the budget to itself."""

    def insert(self, *arguments: Any, **named: Any) -> Inserted:
        return super().insert(*arguments, **named)._replace(freed={})


class SplitCostsNothing(HiRadixTree):
    """Forgets that a split makes a node."""

    def _split(self, node: Node, num_pages: int) -> Node:
        upper = super()._split(node, num_pages)
        self._num_copies -= held_tiers(node._states).bit_count()
        return upper


MUTANTS = sorted(
    (
        mutant
        for mutant in list(globals().values())
        if isinstance(mutant, type) and issubclass(mutant, HiRadixTree) and mutant is not HiRadixTree
    ),
    key=lambda mutant: mutant.__name__,
)


def assert_noticed(mutant: type[HiRadixTree]) -> None:
    for seed in range(MAX_HISTORIES):
        try:
            run_history(seed, 100, mutant)
        except HistoryFailure:
            return
    pytest.fail(f"{MAX_HISTORIES} histories did not notice: {mutant.__doc__}")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_histories_catch_the_mutant(mutant: type[HiRadixTree]) -> None:
    assert_noticed(mutant)


def test_the_mutants_are_many() -> None:
    assert len(MUTANTS) >= 10


def test_histories_notice_a_changed_transition_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed move that leaves its target ARRIVING."""
    original = residency.after

    def after(state: Residency, event: Event) -> Residency:
        return Residency.ARRIVING if event is Event.MOVE_FAILED else original(state, event)

    monkeypatch.setattr(structure, "after", after)
    assert_noticed(HiRadixTree)


def test_histories_notice_that_pins_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """`is_held` is what stands between a pin and eviction."""
    monkeypatch.setattr(leaving, "is_held", lambda holds, index: False)
    monkeypatch.setattr(structure, "is_held", lambda holds, index: False)
    assert_noticed(HiRadixTree)
