"""LRU order, also where a node becomes a leaf of its tier long after it was used."""

import random

from hicache.node import Node, Root, make_box
from hicache.policy.base import EvictionPolicy
from hicache.policy.lru import LruPolicy
from hicache.tier import DEVICE, HOST
from tests.hicache.trees import World, make_namespace, sequence


def make_node(root: Root, used: float) -> Node:
    """A node below `root`, last used at `used`, as a policy sees it."""
    siblings = root._children = root._children or {}
    node = Node(root, len(siblings).to_bytes(4, "little"), b"", 0, 1)
    node._parent = root
    node._last_access = used
    siblings[node._key] = make_box(node)
    return node


def test_the_contract_is_met() -> None:
    policy: EvictionPolicy = LruPolicy()
    assert list(policy.victims()) == []


def test_random_histories_are_in_order_of_use() -> None:
    for seed in range(30):
        pick = random.Random(seed)
        policy, listed, now = LruPolicy(), list[Node](), 0.0
        root = Root(make_namespace(), {HOST: 0})
        for _ in range(200):
            now += pick.choice([0.0, 1.0])
            what = pick.random()
            if what < 0.5 or not listed:
                node = make_node(root, now if pick.random() < 0.5 else pick.uniform(0.0, now))
                policy.add(node, now)
                listed.append(node)
            elif what < 0.75:
                node = pick.choice(listed)
                node._last_access = now
                policy.touch(node, now)
            else:
                node = pick.choice(listed)
                policy.discard(node)
                listed.remove(node)
            order = list(policy.victims())
            assert len(order) == len(listed)
            assert set(order) == set(listed)
            times = [node.last_access for node in order]
            assert times == sorted(times), f"seed {seed}"


def test_used_nodes_leave_last() -> None:
    world = World()
    nodes = [world.insert(sequence(i, 4)).node for i in range(5)]
    world.tree.touch(nodes[0], world.tick())
    world.tree.touch(nodes[2], world.tick())
    order = world.tree.victims(HOST, 5, world.now)
    assert order == [nodes[1], nodes[3], nodes[4], nodes[0], nodes[2]]


def test_a_parent_takes_its_place_by_its_own_last_use() -> None:
    """Its only child leaves; the parent was last used between two other sequences."""
    world = World()
    prefix = sequence(0, 8)
    world.insert(sequence(1, 4))
    parent = world.insert(prefix).node
    child = world.insert([*prefix, *sequence(2, 4)], DEVICE, first_page=2).node
    lease = world.tree.lease(parent, owner="o", deadline=None, now=world.now)
    leaf = world.insert([*prefix, *sequence(2, 4)], HOST, first_page=2).node
    assert leaf is child
    assert leaf.parent is parent
    late = world.insert(sequence(3, 4)).node
    assert parent not in world.tree.victims(HOST, 100, world.now)
    world.tree.evict(leaf, HOST)
    first, second, third = world.tree.victims(HOST, 100, world.now)
    assert (second, third) == (parent, late)
    world.tree.touch(parent, world.tick())
    assert world.tree.victims(HOST, 100, world.now) == [first, late, parent]
    world.tree.release(lease)
    world.tree.check_integrity()


def test_a_use_below_is_a_use_above() -> None:
    world = World()
    prefix = sequence(0, 4)
    one = world.insert([*prefix, *sequence(1, 8)]).node
    two = world.insert([*prefix, *sequence(2, 8)]).node
    other = world.insert(sequence(3, 4)).node
    world.tree.touch(one, world.tick())
    assert world.tree.victims(HOST, 100, world.now) == [two, other, one]
    parent = one.parent
    assert parent is not None
    assert parent.last_access == one.last_access == world.now


def test_time_that_steps_back_counts_as_the_latest_seen() -> None:
    world = World()
    first = world.insert(sequence(0, 4)).node
    second = world.insert(sequence(1, 4)).node
    world.tree.touch(first, -1e9)
    assert first.last_access == second.last_access
    assert world.tree.victims(HOST, 2, world.now) == [second, first]
