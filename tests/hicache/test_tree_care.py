"""Ranks of prefixes: who leaves first, how long that lasts, and that it never stops anybody."""

import numpy as np
import pytest

from hicache import caring
from hicache.care import DEFAULT_RANK, PRIORITY_MAX, PRIORITY_MIN, rank, rank_of, states_of_rank, without_retention
from hicache.errors import BadRequest, NotResident
from hicache.node import PUBLISHED
from hicache.policies import NAMES, policies_named
from hicache.policy.base import HearsUses, Use
from hicache.tier import DEVICE, HOST, NVME
from hicache.tree import HiRadixTree, Node
from tests.hicache.trees import make_namespace, sequence

PAGE = 4
NAMESPACE = make_namespace(PAGE)


class Cared:
    """A tree of two tiers under a policy by name."""

    def __init__(self, policy: str = "lru") -> None:
        self.policies = policies_named(policy, {HOST: 64, NVME: 64})
        self.tree = HiRadixTree(page_size=PAGE, tiers=(HOST, NVME), policies=self.policies)
        self.next_slot = 0
        self.now = 0.0

    def store(self, number: int, num_pages: int = 1) -> Node:
        self.now += 1.0
        slots = np.arange(self.next_slot, self.next_slot + num_pages)
        self.next_slot += num_pages
        tokens = sequence(number, num_pages * PAGE)
        node = self.tree.insert(NAMESPACE, tokens, tier=HOST, slots=slots, now=self.now).node
        for policy in self.policies.values():
            assert isinstance(policy, HearsUses)
            policy.used(Use(self.tree.path(node), self.now))
        return node

    def care(self, node: Node, priority: int = 0, retain_s: float | None = None) -> None:
        until = None if retain_s is None else self.now + retain_s
        self.tree.care(node, priority=priority, retain_until=until, now=self.now)
        self.tree.check_integrity()

    def order(self) -> list[Node]:
        return self.tree.victims(HOST, 1_000, self.now)


@pytest.mark.parametrize("policy", NAMES)
def test_lower_priority_leaves_first_and_the_policy_decides_among_equals(policy: str) -> None:
    plain, cared = Cared(policy), Cared(policy)
    for tree in (plain, cared):
        nodes = [tree.store(number) for number in range(8)]
    expected = {node: place for place, node in enumerate(plain.order())}
    order = [expected[node] for node in plain.order()]
    assert order == sorted(order)
    cared.care(nodes[5], priority=-2)
    cared.care(nodes[1], priority=-4)
    cared.care(nodes[0], priority=3)
    cared.care(nodes[3], priority=1)
    found = cared.order()
    assert found[:2] == [nodes[1], nodes[5]]
    assert found[-2:] == [nodes[3], nodes[0]]
    # Both trees hold the same prompts: the nodes in between come as they do without any hint.
    places = {tuple(plain.tree.tokens_of(node)): place for node, place in expected.items()}
    between = [places[tuple(cared.tree.tokens_of(node))] for node in found[2:-2]]
    assert between == sorted(between)


def test_what_is_retained_leaves_last_until_its_time_is_over() -> None:
    cared = Cared()
    nodes = [cared.store(number) for number in range(4)]
    cared.care(nodes[0], priority=-4, retain_s=10.0)
    cared.care(nodes[1], retain_s=5.0)
    assert cared.order() == [nodes[2], nodes[3], nodes[0], nodes[1]], "among the retained, priority decides"
    assert cared.tree.retained_until(nodes[0]) == cared.now + 10.0
    cared.now += 5.0
    assert cared.order() == [nodes[1], nodes[2], nodes[3], nodes[0]], "as if it had never been retained"
    assert cared.tree.retained_until(nodes[1]) is None
    cared.now += 5.0
    assert cared.order() == [nodes[0], nodes[1], nodes[2], nodes[3]], "its priority is what is left of the hint"
    assert cared.tree.priority(nodes[0]) == -4
    assert cared.tree.num_ranked == 1


def test_retained_pages_stop_nobody() -> None:
    cared = Cared()
    nodes = [cared.store(number) for number in range(3)]
    for node in nodes:
        cared.care(node, retain_s=1e6)
    assert cared.order() == nodes
    for node in cared.order():
        cared.tree.evict(node, HOST)
    cared.tree.check_integrity()
    assert cared.tree.num_nodes == cared.tree.num_ranked == 0


def test_a_later_word_replaces_an_earlier_one() -> None:
    cared = Cared()
    nodes = [cared.store(number) for number in range(3)]
    cared.care(nodes[0], priority=4, retain_s=1e6)
    cared.care(nodes[0], priority=2)
    assert cared.order() == [nodes[1], nodes[2], nodes[0]]
    cared.care(nodes[0])
    assert cared.order() == nodes
    assert cared.tree.num_ranked == 0
    cared.now += 2e6
    assert cared.order() == nodes, "the end of what was replaced means nothing"
    cared.care(nodes[1], retain_s=0.0)
    assert cared.tree.retained_until(nodes[1]) is None


def test_both_halves_of_a_split_keep_it_and_runs_of_another_rank_stay_apart() -> None:
    cared = Cared()
    node = cared.store(1, num_pages=6)
    cared.care(node, priority=2, retain_s=100.0)
    upper, lower = cared.tree.split(node, 2)
    for half in (upper, lower):
        assert cared.tree.priority(half) == 2
        assert cared.tree.retained_until(half) == cared.now + 100.0
    longer = cared.store(1, num_pages=7)
    assert longer is not lower
    assert cared.tree.priority(longer) == 0
    assert cared.order() == [longer], "what is above stays while something below it does"
    cared.tree.evict(longer, HOST)
    cared.care(lower, priority=1)
    assert cared.tree.priority(cared.tree.path(lower)[0]) == 1, "what had the same rank goes with it"
    cared.tree.check_integrity()


def test_only_what_is_not_shared_goes_with_its_end() -> None:
    cared = Cared()
    cared.store(1, num_pages=2)
    stem = np.concatenate([sequence(1, 2 * PAGE), sequence(7, PAGE)])
    slots = [cared.next_slot, cared.next_slot + 1, cared.next_slot + 2]
    cared.next_slot += 3
    branch = cared.tree.insert(NAMESPACE, stem, tier=HOST, slots=slots, now=cared.now).node
    other = cared.store(1, num_pages=4)
    cared.care(branch, priority=-3)
    assert cared.tree.priority(branch) == -3
    assert [cared.tree.priority(node) for node in cared.tree.path(other)] == [0, 0]


def test_what_leaves_is_forgotten() -> None:
    cared = Cared()
    node = cared.store(1, num_pages=3)
    cared.care(node, priority=4, retain_s=50.0)
    cared.tree.flush()
    assert cared.tree.num_ranked == 0
    again = cared.store(1, num_pages=3)
    assert cared.tree.priority(again) == 0
    assert cared.tree.priority(node) == 0
    assert cared.tree.retained_until(node) is None
    with pytest.raises(NotResident):
        cared.tree.care(node, priority=1, now=cared.now)


def test_a_bounded_number_is_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caring, "RANKED_MAX", 3)
    cared = Cared()
    nodes = [cared.store(number) for number in range(6)]
    for node in nodes:
        cared.care(node, priority=4, retain_s=100.0)
    assert cared.tree.num_ranked == 3
    assert [cared.tree.priority(node) for node in nodes] == [0, 0, 0, 4, 4, 4], "the ones ranked longest ago lose it"


@pytest.mark.parametrize(
    ("named", "field"),
    [
        ({"priority": 5}, "priority"),
        ({"priority": -5}, "priority"),
        ({"priority": 1.0}, "priority"),
        ({"priority": True}, "priority"),
        ({"retain_until": float("inf")}, "retain_until"),
        ({"retain_until": "soon"}, "retain_until"),
        ({"now": None}, "now"),
    ],
)
def test_wrong_arguments_are_named_and_change_nothing(named: dict[str, object], field: str) -> None:
    cared = Cared()
    node = cared.store(1)
    with pytest.raises(BadRequest, match=field):
        cared.tree.care(node, **{"now": 1.0, **named})  # type: ignore[arg-type]  # what a caller may get wrong
    assert cared.tree.num_ranked == 0


def test_ranks_lie_beside_residencies() -> None:
    cared = Cared()
    node = cared.store(1)
    for priority in range(PRIORITY_MIN, PRIORITY_MAX + 1):
        for is_retained in (False, True):
            wanted = rank(priority, is_retained=is_retained)
            states = states_of_rank(node._states | PUBLISHED, wanted)
            assert states & (PUBLISHED | 0xFFFFFF) == node._states & 0xFFFFFF | PUBLISHED
            node._states, kept = states_of_rank(node._states, wanted), node._states
            assert rank_of(node) == wanted
            assert without_retention(wanted) == rank(priority, is_retained=False)
            node._states = kept
    assert rank_of(node) == DEFAULT_RANK
    assert DEVICE not in cared.tree.tiers
