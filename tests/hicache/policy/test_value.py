"""What our own policy learns: which prompts come back and how soon, and what to make of hints."""

import random
from collections.abc import Sequence

import pytest

from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.node import Node, Root, make_box
from hicache.policy.base import Hint, Use
from hicache.policy.lru import LruPolicy
from hicache.policy.value import ValuePolicy
from hicache.tier import HOST
from hicache.tools.replay.blocks import BlockCache

LAYOUT = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=8, dtype=KVDtype.BFLOAT16, page_size=1)


def hits_of(policy: ValuePolicy | LruPolicy, paths: Sequence[Sequence[int]], capacity: int) -> int:
    cache = BlockCache(policy, capacity)
    return sum(cache.request(path, now) for now, path in enumerate(paths))


def asked_twice(count: int, returning: int, pause: int) -> tuple[list[list[int]], list[bool]]:
    """Prompts of ten blocks of which every `returning`-th comes once more after `pause` others, and whether each does.
    Nothing else tells them apart."""
    paths, returns = list[list[int]](), list[bool]()
    for step in range(count):
        again = step - pause
        if again >= 0 and again % returning == 0 and returns[again]:
            paths.append(paths[again])
            returns.append(False)
        else:
            paths.append(list(range(10 * step, 10 * step + 10)))
            returns.append(step % returning == 0)
    return paths, returns


def test_what_never_returns_early_is_kept_until_it_does() -> None:
    """Long prompts return after 40 uses, short ones never: LRU holds ten of them."""
    paths = list[list[int]]()
    for step in range(6000):
        if step % 4 == 0 and step >= 40 and step % 8 == 0:
            paths.append(paths[step - 40])
        else:
            first = 100 * step
            paths.append(list(range(first, first + (20 if step % 8 == 0 or step % 4 == 0 else 2))))
    assert hits_of(LruPolicy(), paths, 60) < 0.1 * hits_of(ValuePolicy(), paths, 60)


def test_hints_tell_what_nothing_else_does() -> None:
    paths, returns = asked_twice(4000, returning=7, pause=50)
    without, hinted = BlockCache(ValuePolicy(), 100), BlockCache(ValuePolicy(), 100)
    found = sum(without.request(path, now) for now, path in enumerate(paths))
    better = sum(hinted.request(path, now, returns=returns[now]) for now, path in enumerate(paths))
    assert better > 2 * found
    assert better > 0.8 * 10 * sum(returns[:-50])


def test_hints_that_say_nothing_true_do_little_harm() -> None:
    paths, _ = asked_twice(4000, returning=2, pause=8)
    pick = random.Random(1)
    without, misled = BlockCache(ValuePolicy(), 100), BlockCache(ValuePolicy(), 100)
    found = sum(without.request(path, now) for now, path in enumerate(paths))
    still = sum(misled.request(path, now, returns=pick.random() < 0.5) for now, path in enumerate(paths))
    assert still > 0.9 * found > 0


class Chain:
    """Prompts of one node each below one root, as a tree tells of them, all of which may leave."""

    def __init__(self, policy: ValuePolicy) -> None:
        self._policy = policy
        self._root = Root(Namespace(model="m", layout=LAYOUT), {HOST: 0})
        self.now = 0.0

    def node(self, parent: Node | None, number: int) -> Node:
        key = number.to_bytes(8, "little")
        above = self._root if parent is None else parent
        node = Node(self._root, key, b"", 0, 1)
        node._chain = key
        node._parent = above
        if above._children is None:
            above._children = {}
        above._children[key] = make_box(node)
        return node

    def use(self, *path: Node) -> None:
        self.now += 1.0
        self._policy.used(Use(path, self.now))


def order_of(policy: ValuePolicy) -> list[Node]:
    return list(policy.victims())


@pytest.mark.parametrize("wait", [3.0, 2000.0])
def test_a_time_of_return_is_part_of_the_class(wait: float) -> None:
    """Of two prompts hinted to return, what is learned of one wait does not touch the other."""
    policy = ValuePolicy()
    chain = Chain(policy)
    first, second = chain.node(None, 1), chain.node(None, 2)
    for node in (first, second):
        policy.add(node, chain.now)
        chain.use(node)
    policy.hinted([first], Hint(expected_return=chain.now + wait), chain.now)
    policy.hinted([second], Hint(returns=False), chain.now)
    assert order_of(policy) == [second, first]
    policy.hinted([first], Hint(returns=False), chain.now)
    policy.hinted([second], Hint(returns=True), chain.now)
    assert order_of(policy) == [first, second]
    policy.hinted([chain.node(None, 3)], Hint(returns=True), chain.now)  # of what was never used: nothing to tell
    policy.discard(first)
    assert order_of(policy) == [second]


def test_what_grows_keeps_its_past() -> None:
    """A node that takes the pages of the one above is as often used as that was; a split gives both halves the past."""
    policy = ValuePolicy()
    chain = Chain(policy)
    often = chain.node(None, 1)
    grown = chain.node(often, 2)
    once = chain.node(None, 3)
    for _ in range(5):
        chain.use(often)
    chain.use(often, grown)
    chain.use(once)
    policy.joined(often, grown)
    policy.add(grown, chain.now)
    policy.add(once, chain.now)
    assert order_of(policy) == [once, grown]
    policy.discard(grown)
    upper = chain.node(None, 4)
    policy.split(upper, grown)
    policy.add(upper, chain.now)
    assert order_of(policy) == [once, upper]
    stranger = chain.node(None, 5)
    policy.joined(often, stranger)  # never used itself
    policy.add(stranger, chain.now)
    assert order_of(policy)[0] is once


def test_hints_between_two_uses_take_no_memory() -> None:
    policy = ValuePolicy()
    chain = Chain(policy)
    node = chain.node(None, 1)
    policy.add(node, chain.now)
    chain.use(node)
    for number in range(1000):
        policy.hinted([node], Hint(returns=number % 2 == 0), chain.now)
    assert sum(map(len, policy._aging)) <= 5
    assert len(policy._order) <= 5
    assert order_of(policy) == [node]
    chain.use(node)
    policy.hinted([node], Hint(returns=True), chain.now)
    policy.discard(node)
    assert order_of(policy) == []
