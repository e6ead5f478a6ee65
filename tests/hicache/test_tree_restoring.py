"""Runs that come back after a restart make the tree that inserting their pages would have made."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import BadRequest, NoRoom, NotResident
from hicache.metadata import NODE_BYTES, ORDER_BYTES, ROOT_BYTES
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.tier import DEVICE, HOST, NVME, PageIdentity, TierId, chain_digest
from hicache.tree import HiRadixTree
from tests.hicache.trees import Tokens, World, digest, make_namespace, sequence

PAGE = 2
NAMESPACE = make_namespace(PAGE)
OTHER = make_namespace(PAGE, tenant="another")

# Few ids, so that prompts share prefixes and part at any page.
_prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=12)


def new_tree(**options: Any) -> HiRadixTree:
    return HiRadixTree(page_size=PAGE, tiers=(DEVICE, HOST, NVME), **options)


def pages(firsts: list[int]) -> Tokens:
    """A prompt in which each of `firsts` is the first id of a page."""
    return np.array([id_ for first in firsts for id_ in (first, first)], np.int32)


def restore(
    tree: HiRadixTree, namespace: Namespace, parent: Node | None, tokens: Any, *, tier: TierId, now: float, **run: Any
) -> Node:
    """One run put back."""
    return tree.restorer(namespace, tier=tier, now=now).restore(parent, tokens, **run)


def restored(source: HiRadixTree, target: HiRadixTree, now: float) -> None:
    """Every node of `source`, restored into `target` as a run of its own."""
    nodes: dict[Node, Node] = {}
    for batch in source.walk():
        for info in batch:
            node, start = info.node, info.first_page * PAGE
            identities = source.identities(node)
            nodes[node] = restore(
                target,
                node.record,
                nodes[node.parent] if node.parent is not None else None,
                source.tokens_of(node)[start:],
                tier=NVME,
                slots=node.slots(NVME),
                chain=identities[-1].chain,
                now=now,
            )


def held(tree: HiRadixTree) -> dict[PageIdentity, int]:
    """The slot of every page."""
    return {
        identity: int(slot)
        for batch in tree.walk()
        for info in batch
        for identity, slot in zip(tree.identities(info.node), info.node.slots(NVME), strict=True)
    }


@given(_prompts, st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=5), st.data())
def test_what_is_restored_equals_what_inserts_build(
    prompts: list[list[int]], queries: list[list[int]], data: st.DataObject
) -> None:
    inserted, next_slot = new_tree(), 0
    for number, firsts in enumerate(prompts):
        namespace = data.draw(st.sampled_from([NAMESPACE, OTHER]))
        slots = np.arange(next_slot, next_slot + len(firsts), dtype=np.int32)
        next_slot += len(firsts)
        inserted.insert(namespace, pages(firsts), tier=NVME, slots=slots, now=float(number))
    tree = new_tree()
    restored(inserted, tree, now=100.0)
    tree.check_integrity()
    assert held(tree) == held(inserted)
    assert tree.occupancy(NVME) == inserted.occupancy(NVME)
    for firsts in [*prompts, *queries]:
        for namespace in (NAMESPACE, OTHER):
            for tokens in (pages(firsts), pages(firsts)[:-1]):
                found, expected = tree.match(namespace, tokens), inserted.match(namespace, tokens)
                assert found.num_tokens == expected.num_tokens
                assert (found.partial and found.partial.num_tokens) == (
                    expected.partial and expected.partial.num_tokens
                )


@given(_prompts, _prompts)
def test_a_restored_tree_goes_on_as_any_other(before: list[list[int]], after: list[list[int]]) -> None:
    inserted = new_tree()
    for number, firsts in enumerate(before):
        slots = np.arange(8 * number, 8 * number + len(firsts), dtype=np.int32)
        inserted.insert(NAMESPACE, pages(firsts), tier=NVME, slots=slots, now=float(number))
    tree = new_tree()
    restored(inserted, tree, now=100.0)
    for number, firsts in enumerate(after):
        slots = np.arange(8 * number, 8 * number + len(firsts), dtype=np.int32)
        tree.insert(NAMESPACE, pages(firsts), tier=HOST, slots=slots, now=101.0 + number)
        tree.check_integrity()
    while victims := tree.victims(NVME, 1, 200.0):
        if not tree.can_evict(victims[0], NVME):
            break
        tree.evict(victims[0], NVME, 1)
        tree.check_integrity()


def test_what_was_restored_first_leaves_first() -> None:
    world = World(PAGE)
    runs = [sequence(number, PAGE) for number in range(3)]
    nodes = [
        restore(world.tree, world.namespace, None, run, tier=NVME, slots=[slot], chain=bytes(32), now=1.0)
        for slot, run in enumerate(runs)
    ]
    assert world.tree.victims(NVME, 3, 2.0) == nodes


def test_restoring_stops_at_the_metadata_budget() -> None:
    room = 5
    node_bytes = NODE_BYTES + 2 * ORDER_BYTES + PAGE * 4 + 4
    tree = new_tree(metadata_bytes=ROOT_BYTES + room * node_bytes)
    for slot in range(room):
        tokens = sequence(slot, PAGE)
        chain = chain_digest(NAMESPACE.digest, tokens.tobytes())
        restore(tree, NAMESPACE, None, tokens, tier=NVME, slots=[slot], chain=chain, now=1.0)
    before = digest(tree)
    for parent in (None, tree.match(NAMESPACE, sequence(0, PAGE)).nodes[-1]):
        with pytest.raises(NoRoom, match="metadata"):
            restore(tree, NAMESPACE, parent, sequence(9, PAGE), tier=NVME, slots=[9], chain=bytes(32), now=2.0)
    assert digest(tree) == before
    assert tree.metadata_bytes == tree.metadata_budget
    tree.check_integrity()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens": sequence(1, PAGE + 1)}, "tokens"),
        ({"tokens": []}, "tokens"),
        ({"tokens": [1, -1]}, "tokens"),
        ({"tokens": sequence(0, PAGE)}, "tokens"),
        ({"tokens": sequence(0, PAGE).tobytes()}, "tokens"),
        ({"tokens": sequence(1, PAGE).tobytes()[:-1]}, "tokens"),
        ({"tokens": b""}, "tokens"),
        ({"tokens": np.array([1, -1], np.int32).tobytes()}, "tokens: id -1 at index 1"),
        ({"tokens": np.tile(np.array([-1, 1], np.int32), 2000), "slots": range(2000)}, "tokens: id -1 at index 0"),
        ({"slots": [1, 2]}, "slots"),
        ({"slots": [-1]}, "slots"),
        ({"chain": bytes(31)}, "chain"),
        ({"tier": "tape"}, "tier"),
        ({"namespace": OTHER, "parent": "known"}, "parent"),
        ({"parent": "a node"}, "node"),
        ({"namespace": make_namespace(PAGE + 1)}, "namespace"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(changes: dict[str, Any], field: str) -> None:
    tree = new_tree()
    known = restore(tree, NAMESPACE, None, sequence(0, PAGE), tier=NVME, slots=[0], chain=bytes(32), now=1.0)
    arguments: dict[str, Any] = {
        "namespace": NAMESPACE, "parent": None, "tokens": sequence(1, PAGE), "tier": NVME, "slots": [1],
        "chain": bytes(32), "now": 2.0,
    } | changes
    if arguments["parent"] == "known":
        arguments["parent"] = known
    before = digest(tree)
    with pytest.raises(BadRequest, match=rf"^{field}"):
        restore(tree, **arguments)
    assert digest(tree) == before


def test_packed_tokens_are_restored_as_their_ids_are() -> None:
    tree = new_tree()
    tokens = np.array([0, 127, 128, 2**31 - 1], np.int32)
    chain = NAMESPACE.digest
    for page in (tokens[:PAGE], tokens[PAGE:]):
        chain = chain_digest(chain, page.tobytes())
    node = restore(tree, NAMESPACE, None, tokens.tobytes(), tier=NVME, slots=[0, 1], chain=chain, now=1.0)
    assert tree.tokens_of(node).tolist() == tokens.tolist()
    assert tree.match(NAMESPACE, tokens).nodes == (node,)
    tree.check_integrity()


def test_nothing_is_restored_below_what_has_left() -> None:
    tree = new_tree()
    known = restore(tree, NAMESPACE, None, sequence(0, PAGE), tier=NVME, slots=[0], chain=bytes(32), now=1.0)
    tree.flush()
    with pytest.raises(NotResident):
        restore(tree, NAMESPACE, known, sequence(1, PAGE), tier=NVME, slots=[1], chain=bytes(32), now=2.0)
    tree.check_integrity()
