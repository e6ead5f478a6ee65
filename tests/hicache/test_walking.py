"""Looking at the tree in steps, however wide and deep it is and whatever changes between the steps."""

import random
from time import perf_counter_ns

import numpy as np
import pytest

from hicache.node import Node
from hicache.sortedchunks import SortedChunks
from hicache.tier import HOST
from hicache.walking import BATCH, Siblings
from tests.hicache.trees import World, make_namespace, sequence


def wide(num_children: int) -> World:
    world = World(page_size=1, tiers=(HOST,))
    for token in range(num_children):
        world.tree.insert(world.namespace, [token], tier=HOST, slots=world.slots(HOST, 1), now=1.0)
    return world


@pytest.mark.parametrize("count", [0, 1, 5, 2000])
def test_what_follows_a_member_is_found_in_order(count: int) -> None:
    members = [f"{number:05}" for number in range(0, 2 * count, 2)]
    order = SortedChunks(members)
    for number in [-1, *range(min(count, 60)), count, 2 * count - 2, 2 * count]:
        after = f"{number:05}" if number >= 0 else ""
        expected = [member for member in members if member > after]
        found = order.following(after, 10)
        assert found == expected[: len(found)]
        assert bool(found) == bool(expected)
        assert len(found) <= 10


def test_a_step_over_a_wide_node_touches_no_more_than_it_gives() -> None:
    """A snapshot of the siblings would be as long as the tree is large."""
    world = wide(20_000)
    (root,) = world.tree._roots.values()
    siblings = Siblings(root)
    assert siblings.next() is not None
    assert len(siblings._waiting) < BATCH
    seen = 1
    while siblings.next() is not None:
        seen += 1
    assert seen == 20_000
    firsts = []
    for _ in range(5):  # another program may have the processor during the first step of one of them
        walk, times = world.tree.walk(batch=100), []
        for _ in range(200):
            began = perf_counter_ns()
            batch = next(walk)
            times.append(perf_counter_ns() - began)
            assert len(batch) == 100
        assert next(walk, None) is None
        firsts.append(times[0])
    assert min(firsts) < 20 * sorted(times)[100], "the first step pays for all"


def test_nodes_that_do_not_change_are_seen_once_and_begin_where_they_do() -> None:
    for seed in range(60):
        pick = random.Random(seed)
        world = wide(pick.choice([3, 70, 200]))
        tree = world.tree

        def grow(pick: random.Random = pick, world: World = world) -> None:
            head = [pick.randrange(100)]
            world.insert([*head, *(pick.randrange(3) for _ in range(pick.randrange(6)))])

        for _ in range(20):
            grow()
        before = {info.node: info.num_pages for batch in tree.walk() for info in batch}
        seen: list[Node] = []
        for batch in tree.walk(batch=pick.choice([1, 7])):
            for info in batch:
                seen.append(info.node)
                assert info.first_page == len(tree.tokens_of(info.node)) - info.num_pages
            for _ in range(pick.randrange(3)):
                action = pick.random()
                nodes = [info.node for batch in tree.walk() for info in batch]
                if action < 0.4 or not nodes:
                    grow()
                elif action < 0.7:
                    for victim in tree.victims(HOST, 1, 1.0):
                        tree.evict(victim, HOST, 1)
                elif long := [node for node in nodes if node.num_pages > 1]:
                    node = pick.choice(long)
                    tree.split(node, pick.randrange(1, node.num_pages))
        assert len(seen) == len(set(seen)), "a node was seen twice"
        unchanged = {node for node, num_pages in before.items() if node.is_live and node.num_pages == num_pages}
        assert unchanged <= set(seen), "a node that did not change was not seen"


def test_siblings_under_a_prefix_alone() -> None:
    world = World(page_size=2, tiers=(HOST,))
    for token in range(300):
        world.insert([token % 3, token])
    (root,) = world.tree._roots.values()
    few = Siblings(root, prefix=np.array([1], np.int32).tobytes())
    found = []
    while (node := few.next()) is not None:
        found.append(world.tree.tokens_of(node).tolist())
    assert sorted(found) == [[1, token] for token in range(1, 300, 3)]
    one = world.tree.match(world.namespace, [0, 3]).nodes[0]
    alone = Siblings(root, only=one._key)
    assert (alone.next(), alone.next()) == (one, None)
    assert world.matched(sequence(1, 2)) == 0


def test_all_nodes_or_those_of_a_namespace_or_below_one() -> None:
    world = wide(200)
    beside = world.insert([5, 8]).node
    deep = world.insert([5, 6, 7]).node
    other = make_namespace(1, tenant="other")
    world.tree.insert(other, [9], tier=HOST, slots=world.slots(HOST, 1), now=2.0)
    infos = {info.node: info for batch in world.tree.walk() for info in batch}
    assert list(world.tree.nodes()) == list(infos)
    assert [node.tenant for node in world.tree.nodes(other.digest)] == ["other"]
    assert sum(1 for _ in world.tree.nodes(world.namespace.digest)) == len(infos) - 1
    assert deep.parent is not None
    assert list(world.tree.nodes(deep.parent)) == [deep, beside]
    assert list(world.tree.nodes(deep)) == list(world.tree.nodes(bytes(32))) == []
    ends: dict[Node, int] = {}
    assert {node: world.tree.info(node, ends) for node in infos} == infos
    assert world.tree.own_tokens_of(deep, 1).tolist() == [6]
    assert world.tree.own_tokens_of(deep, 9).tolist() == world.tree.own_tokens_of(deep).tolist() == [6, 7]
