"""The tree's invariants (numbered at the head of `hicache.tree`), checked from scratch.

Everything that the tree keeps incrementally is computed again here from the nodes, the handles and nothing else.
"""

import gc
from typing import TYPE_CHECKING

import numpy as np

from hicache import metadata
from hicache.care import DEFAULT_RANK, rank_of, without_retention
from hicache.evictable import is_held, tiers_of_children
from hicache.lease import Hold, Move
from hicache.node import TIER_MASK, Box, Node, child_nodes, slots_of, state_of
from hicache.policy.base import EvictionPolicy
from hicache.residency import IN_TIER, Residency
from hicache.sortedchunks import ORDER_FROM
from hicache.tier import chain_digest

if TYPE_CHECKING:
    from hicache.tree import HiRadixTree


def check_integrity(tree: "HiRadixTree") -> None:
    """Raise `AssertionError` naming the first invariant of `tree` that does not hold."""
    live = _reachable(tree)
    for node in live:
        _check_tokens(tree, node)
        _check_residency(tree, node)
        _check_order(node)
    for root in tree._roots.values():
        _check_order(root)
    assert len(live) == tree._num_nodes, f"{len(live)} nodes are reachable, {tree._num_nodes} were counted"
    gone = list(tree._limbo)
    for node in gone:
        assert node._parent is None, "a removed node is linked"
        assert not node._children, "a removed node has children"
        for index in range(len(tree.tiers)):
            assert state_of(node._states, index) not in IN_TIER, "a removed node has a copy that is not condemned"
        assert node._states, "a removed node without slots is kept"
        assert not node._listed, "a removed node is evictable"
    _check_slots(tree, live + gone)
    _check_holds(live + gone)
    _check_leases(tree, live)
    _check_evictable(tree, live)
    _check_metadata(tree, live, gone)
    _check_published(tree, live)
    _check_reports(tree, live)
    _check_ranked(tree, live)


def _reachable(tree: "HiRadixTree") -> list[Node]:
    live: list[Node] = []
    for digest, root in tree._roots.items():
        assert root.digest == root._chain == digest, "2: a namespace stands under another digest"
        assert root._children, "an empty namespace is kept"
        stack: list[Node] = [root]
        while stack:
            parent = stack.pop()
            for key, (child,) in (parent._children or {}).items():
                assert child._parent is parent, "2: a child names another parent"
                assert child._key == key, "2: a child stands under another key than its first page"
                assert child._root is root, "2: a child belongs to another namespace"
                assert parent is root or child._last_access <= parent._last_access, "8: used later than its parent"
                assert parent is root or child._num_uses <= parent._num_uses, "8: used more often than its parent"
                live.append(child)
                stack.append(child)
    assert len(set(live)) == len(live), "2: a node is reachable twice"
    return live


def _check_tokens(tree: "HiRadixTree", node: Node) -> None:
    page_bytes = tree.page_size * 4
    needed = (node._num_pages - 1) * page_bytes
    assert node._num_pages >= 1, "1: a node is empty"
    assert len(node._key) == page_bytes, "1: a key is not one page"
    assert 0 <= node._start <= len(node._buffer) - needed, "1: a node's tokens are not there"
    assert len(node._buffer) <= 2 * needed, "a node keeps more than twice its tokens alive"
    assert not any(map(gc.is_tracked, (node, node.box, node._children))), "the collector sees a node"
    parent = node._parent
    if node._chain is not None and parent is not None and parent._chain is not None:
        data, chain = tree._node_bytes(node), parent._chain
        for at in range(0, len(data), page_bytes):
            chain = chain_digest(chain, data[at : at + page_bytes])
        assert chain == node._chain, "7: a chain digest is not that of the node's tokens"


def _check_residency(tree: "HiRadixTree", node: Node) -> None:
    assert node._states & TIER_MASK, "3: a node in the tree has no copy that can be served"
    num_held = 0
    children = child_nodes(node)
    for index in range(len(tree.tiers)):
        state = state_of(node._states, index)
        num_held += state is not Residency.ABSENT
        in_tier = len([child for child in children if state_of(child._states, index) in IN_TIER])
        assert node._in_tier >> 32 * index & 0xFFFFFFFF == in_tier, "9: children in a tier are miscounted"
    num_slots, spare = divmod(len(node._slots), 4)
    most = node._num_pages * (2 if num_held == 1 else num_held)
    assert node._num_pages * num_held <= num_slots <= most, "4: a node has not one slot a page in each tier"
    assert not spare, "4: part of a slot"
    assert node._in_tier >> 32 * len(tree.tiers) == 0, "9: children are counted in a tier that does not exist"


def _check_order(node: Node) -> None:
    assert node._order is not None or len(node._children or ()) < ORDER_FROM, "2: many siblings are not in order"
    if node._order is not None:
        assert list(node._order) == sorted(node._children or {}), "2: the order of siblings is not that of the children"


def _check_slots(tree: "HiRadixTree", nodes: list[Node]) -> None:
    for index, tier in enumerate(tree.tiers):
        pages = [0] * len(Residency)
        slots: list[int] = []
        for node in nodes:
            state = state_of(node._states, index)
            if state is not Residency.ABSENT:
                pages[state] += node._num_pages
                slots += np.frombuffer(slots_of(node, index), np.int32).tolist()
        counted = tree._pages[index]
        for state in (Residency.ARRIVING, Residency.RESIDENT, Residency.CONDEMNED):
            assert counted[state] == pages[state], f"4: {tier} counts {counted[state]} {state.name}, not {pages[state]}"
        assert len(slots) == len(set(slots)), f"4: a slot of {tier} belongs to two pages"
        assert len(slots) == tree.occupancy(tier).total


def _check_holds(nodes: list[Node]) -> None:
    holds: dict[Hold, list[Node]] = {}
    for node in nodes:
        assert len(set(node._holds)) == len(node._holds), "5: a hold counts twice"
        for hold in node._holds:
            holds.setdefault(hold, []).append(node)
        tiers = node._root.tiers
        for tier, index in tiers.items():
            state = state_of(node._states, index)
            filling = [hold for hold in node._holds if isinstance(hold, Move) and hold._target == tier]
            if state is Residency.ARRIVING:
                assert len(filling) == 1, "5: an arriving copy has not exactly one move"
            elif state is Residency.CONDEMNED:
                assert is_held(node._holds, index), "5: a condemned copy has no user"
            elif state is Residency.ABSENT:
                assert not is_held(node._holds, index), "5: a hold uses a copy that is not there"
            else:
                assert not filling, "5: a move fills a copy that is resident"
    for hold, held in holds.items():
        assert hold._open, "5: a closed hold still holds"
        assert len(hold._nodes) == len(held), "5: a hold and its nodes disagree"
        assert set(hold._nodes) == set(held), "5: a hold and its nodes disagree"


def _check_leases(tree: "HiRadixTree", live: list[Node]) -> None:
    counts: dict[Node, int] = {}
    for generation, lease in tree._leases.items():
        assert lease._generation == generation <= tree._generation
        if lease._node is not None:
            counts[lease._node] = counts.get(lease._node, 0) + 1
        if lease._deadline is not None:
            assert (lease._deadline, generation) in tree._deadlines, "6: a deadline is not watched"
    for node in live:
        assert node._num_leases == counts.pop(node, 0), "6: leases are miscounted"
    for node, count in counts.items():
        assert node._num_leases == count, "6: leases are miscounted"
        assert node._parent is None, "6: a leased node cannot be reached"


def _check_evictable(tree: "HiRadixTree", live: list[Node]) -> None:
    slowest = len(tree.tiers) - 1
    for index, policy in enumerate(tree._evictable.policies):
        expected = set()
        for node in live:
            if state_of(node._states, index) is not Residency.RESIDENT or is_held(node._holds, index):
                continue
            if tiers_of_children(node) >> index & 1:
                continue
            elsewhere = any(
                state_of(node._states, other) is Residency.RESIDENT for other in range(slowest + 1) if other != index
            )
            if index < slowest or elsewhere or not (node._num_leases or node._children):
                expected.add(node)
        _check_listed(policy, index, expected, live, tree.tiers[index])
    if tree._evictable.droppable is not None:
        expected = {node for node in live if not (node._children or node._num_leases or node._holds)}
        _check_listed(tree._evictable.droppable, slowest + 1, expected, live, "the tree")
        times = [node._last_access for node in tree._evictable.coldest()]
        assert times == sorted(times), "9: what may be dropped is not in order of use"


def _check_listed(policy: EvictionPolicy, index: int, expected: set[Node], live: list[Node], where: str) -> None:
    listed = list(policy.victims())
    assert len(listed) == len(set(listed)), "9: a victim is listed twice"
    assert set(listed) == expected, f"9: the evictable nodes of {where} are not the listed ones"
    assert all(bool(node._listed >> index & 1) == (node in expected) for node in live), "9: listings disagree"


def _check_metadata(tree: "HiRadixTree", live: list[Node], gone: list[Node]) -> None:
    copies = [
        sum(state_of(node._states, index) is not Residency.ABSENT for index in range(len(tree.tiers)))
        for node in live + gone
    ]
    assert tree._num_copies == sum(copies), "copies are miscounted"
    assert tree._num_pages == sum(node._num_pages for node in live), "pages are miscounted"
    slots = sum(tree.occupancy(tier).total for tier in tree.tiers)
    assert tree.metadata_bytes == (
        (len(live) + len(gone)) * (metadata.NODE_BYTES + (tree.metadata_budget is not None) * metadata.ORDER_BYTES)
        + sum(copies) * metadata.ORDER_BYTES
        + sum(node._num_pages for node in live) * tree.page_size * 4
        + slots * 4
        + len(tree._roots) * metadata.ROOT_BYTES
    ), "the estimate of metadata is not that of its parts"
    published = tree._published.publications.values()
    pages: dict[bytes, set[bytes]] = {}
    for each in published:
        of_scope, raw = pages.setdefault(each.scope, set()), tree.tokens_of(each.node).tobytes()
        of_scope.update(raw[:end] for end in range(tree.page_size * 4, len(raw) + 1, tree.page_size * 4))
    assert tree.aside_bytes == (
        len(published) * metadata.PUBLICATION_BYTES
        + sum(len(each.readers) for each in published) * metadata.READER_BYTES
        + sum(map(len, pages.values())) * tree.page_size * 4
        + tree._reports.num_bytes
    ), "the estimate of publications and reports is not that of its parts"


def _check_published(tree: "HiRadixTree", live: list[Node]) -> None:
    index = tree._published
    covered: set[Node] = set()
    for key, publication in index.publications.items():
        assert publication.key == key, "11: a publication stands under another key"
        assert publication in index.ends.get(publication.node, []), "11: a publication ends elsewhere"
        path = tree.path(publication.node)
        assert path, "11: a publication ends at a node that is gone"
        covered.update(path)
        num_pages = sum(node._num_pages for node in path)
        assert publication.num_pages == num_pages, "11: a publication covers another number of pages"
    assert sum(map(len, index.ends.values())) == len(index.publications), "11: an end of no publication"
    assert {node for node in live if node.is_published} == covered, "11: what is published is not what is covered"
    below: dict[Node, dict[bytes, Node]] = {}
    for node in covered:
        assert node._parent is not None
        below.setdefault(node._parent, {})[node._key] = node
    assert index.below == below, "11: published children are miscounted"
    _check_readable(tree)
    hidden = [index.publications, index.ends, index.below, *index.ends.values(), *index.below.values()]
    hidden += index.publications.values()
    assert not any(map(gc.is_tracked, hidden)), "the collector sees publications"


def _check_readable(tree: "HiRadixTree") -> None:
    """Readers find exactly the pages that publications cover, and each run is as long as it can be."""
    index, page_bytes = tree._published, tree.page_size * 4
    expected: dict[bytes, dict[bytes, set[bytes]]] = {}
    for key, publication in index.publications.items():
        raw, of_scope = tree.tokens_of(publication.node).tobytes(), expected.setdefault(publication.scope, {})
        for end in range(page_bytes, len(raw) + 1, page_bytes):
            of_scope.setdefault(raw[:end], set()).add(key)
    found: dict[bytes, dict[bytes, set[bytes]]] = {}
    for scope, readable in index.readable.items():
        of_scope = found.setdefault(scope, {})
        stack = [(readable.root, b"")]
        while stack:
            run, before = stack.pop()
            keys = {publication.key for publication in run.covering}
            pages = run.key + run.rest
            assert len(pages) == run.num_pages * page_bytes, "11: a run has another number of pages"
            for end in range(page_bytes, len(pages) + 1, page_bytes):
                of_scope[before + pages[:end]] = keys
            for publication in run.covering:
                if publication.num_pages * page_bytes == len(before + pages):
                    assert publication.run is run, "11: a publication ends in another run"
            if run.order is not None:
                assert list(run.order) == sorted(run.children), "11: readable siblings are out of order"
            for key, child in run.children.items():
                assert (child.key, child.parent) == (key, run), "11: a run stands in another place"
                assert run is readable.root or len(run.children) > 1 or len(child.covering) < len(run.covering), (
                    "11: two runs are one"
                )
                stack.append((child, before + pages))
            hidden = [run, run.children, run.covering]
            assert not any(map(gc.is_tracked, hidden)), "the collector sees what is readable"
    assert found == expected, "11: readers do not find what is published"


def _check_reports(tree: "HiRadixTree", live: list[Node]) -> None:
    nodes, reports = set(live), tree._reports
    nodes_of: dict[str, set[Box]] = {}
    num_bytes = 0
    for (node,), (masks,) in reports.by_node.items():
        assert node in nodes, "12: a report is about a node that is gone"
        assert masks, "12: a node without reports is kept"
        for instance, pages in masks.items():
            assert 0 < pages < 1 << node._num_pages, "12: a report is about pages that the node does not have"
            nodes_of.setdefault(instance, set()).add((node,))
            num_bytes += metadata.REPORT_BYTES + pages.bit_length() // 8
        assert not gc.is_tracked(masks), "the collector sees a report"
    assert reports.nodes_of == nodes_of, "12: instances and nodes disagree"
    assert reports.num_bytes == num_bytes <= reports.max_bytes, "12: reports are miscounted"
    assert not any(map(gc.is_tracked, (reports.by_node, *reports.nodes_of.values()))), "the collector sees reports"


def _check_ranked(tree: "HiRadixTree", live: list[Node]) -> None:
    until = tree._ranked.until
    assert set(until) == {node.box for node in live if rank_of(node) != DEFAULT_RANK}, "9: ranks are miscounted"
    for (node,), end in until.items():
        assert (end is not None) == (without_retention(rank_of(node)) != rank_of(node)), "9: a rank is another one"
        assert end is None or any(each == end and box == (node,) for each, _, box in tree._ranked._ends), (
            "9: a retention never ends"
        )
