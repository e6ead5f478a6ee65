"""Whose pages leave a tier that tenants share, and in which order."""

from collections.abc import Mapping

import numpy as np
import pytest

from hicache.errors import BadRequest
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.policies import policies_named
from hicache.policy.base import EvictionPolicy, Use
from hicache.policy.lrfu import LrfuPolicy
from hicache.policy.lru import LruPolicy
from hicache.policy.shared import EMPTY_MAX, IDLE_S, OWN_MAX, RESIZED_FROM, SharedPolicy
from hicache.policy.slru import SlruPolicy
from hicache.quotas import TenantQuota, check_quotas, in_shares, quota_pages
from hicache.tier import DEVICE, HOST, NVME
from hicache.tree import HiRadixTree
from tests.hicache.counting import check_counts
from tests.hicache.trees import make_namespace, sequence

PAGE = 4


class Shared:
    """A tree of one tier that tenants share."""

    def __init__(self, capacity_pages: int, quotas: Mapping[str, int] | None = None, policy: str = "lru") -> None:
        by_tier = {HOST: dict(quotas or {})}
        self.policy = policies_named(policy, {HOST: capacity_pages}, by_tier)[HOST]
        self.tree = HiRadixTree(page_size=PAGE, tiers=(HOST,), policies={HOST: self.policy})
        self.capacity = capacity_pages
        self.now = 0.0
        self.free = list(range(capacity_pages))
        self.number = 0
        self.lost: dict[str, int] = {}
        """Pages that each tenant has lost."""

    def namespace(self, tenant: str) -> Namespace:
        return make_namespace(PAGE, tenant=tenant)

    def store(self, tenant: str, num_pages: int = 1, number: int | None = None) -> Node:
        """A prompt of a tenant comes: what leaves for it leaves first."""
        if number is None:
            self.number = number = self.number + 1
        self.now += 1.0
        while len(self.free) < num_pages:
            (victim, *_) = self.tree.victims(HOST, 1, self.now)
            self.lost[victim.tenant] = self.lost.get(victim.tenant, 0) + 1
            self.free += self.tree.evict(victim, HOST, 1)[HOST].tolist()
        slots, self.free = self.free[:num_pages], self.free[num_pages:]
        tokens = sequence(number, num_pages * PAGE)
        inserted = self.tree.insert(self.namespace(tenant), tokens, tier=HOST, slots=slots, now=self.now)
        self.free += inserted.duplicates.tolist()
        self.policy.used(Use(self.tree.path(inserted.node), self.now))
        self.tree.check_integrity()
        nodes = [info.node for batch in self.tree.walk() for info in batch]
        check_counts(self.policy, {node: node.num_pages for node in nodes})
        return inserted.node

    def holds(self, tenant: str) -> int:
        return self.policy.pages_by_tenant().get(tenant, 0)


def test_a_scan_takes_nothing_from_a_tenant_below_its_fair_share() -> None:
    shared = Shared(20)
    for number in range(8):
        shared.store("worker", number=100 + number)
    for _ in range(60):
        shared.store("scanner")
    assert shared.lost == {"scanner": 48}
    assert shared.holds("worker") == 8
    assert all(shared.tree.match(shared.namespace("worker"), sequence(100 + n, PAGE)).num_tokens for n in range(8))


def test_what_others_do_not_use_is_there_to_be_used_and_given_back() -> None:
    shared = Shared(20)
    for _ in range(20):
        shared.store("first")
    assert shared.lost == {}
    for _ in range(15):
        shared.store("second")
    # Down to equal parts, then each loses its own; one of two that hold just their parts makes room for the other.
    assert shared.lost == {"first": 11, "second": 4}
    assert (shared.holds("first"), shared.holds("second")) == (9, 11)
    for _ in range(10):
        shared.store("third")
    assert all(abs(shared.holds(tenant) - 20 / 3) < 1.5 for tenant in ("first", "second", "third"))


def test_a_tenant_over_its_quota_loses_its_own_pages_first() -> None:
    shared = Shared(20, {"small": 2, "large": 12})
    for _ in range(10):
        shared.store("small")
    for _ in range(12):
        shared.store("large")
    assert shared.lost == {"small": 2}
    for _ in range(6):
        shared.store("other")
    assert shared.holds("small") == 2
    assert shared.holds("large") == 12
    assert shared.holds("other") == 6
    for _ in range(30):
        shared.store("small")
    assert (shared.holds("small"), shared.holds("large"), shared.holds("other")) == (2, 12, 6)


def test_idle_tenants_have_one_part_together_and_the_longest_idle_loses_first() -> None:
    shared = Shared(20)
    for name in ("a", "b", "c", "d"):
        for _ in range(3):
            shared.store(name)
    shared.now += IDLE_S + 1
    for _ in range(18):
        shared.store("active")
    assert shared.holds("active") == 11, "half, and one: all the idle ones count as one"
    assert [shared.holds(name) for name in "abcd"] == [0, 3, 3, 3]
    shared.store("a")
    for _ in range(12):
        shared.store("a")
    assert sorted((shared.holds("a"), shared.holds("active"), shared.holds("c") + shared.holds("d"))) == [6, 7, 7]
    assert shared.holds("b") == 0


def test_where_the_one_to_lose_has_all_in_use_the_next_one_does() -> None:
    shared = Shared(10)
    nodes = [shared.store("large") for _ in range(8)]
    shared.store("small")
    shared.store("small")
    pin = shared.tree.pin(nodes, HOST)
    shared.store("third")
    assert shared.lost == {"small": 1}
    every = [info.node for batch in shared.tree.walk() for info in batch if info.tenant != "large"]
    other = shared.tree.pin(every, HOST)
    assert shared.tree.victims(HOST, 1, shared.now) == [], "nothing is given that is in use"
    shared.tree.unpin(other)
    shared.tree.unpin(pin)
    assert next(iter(shared.tree.victims(HOST, 1, shared.now))).tenant == "large"


def test_each_tenant_is_kept_by_the_policy_that_was_named() -> None:
    shared = Shared(16, policy="slru")
    for _ in range(3):
        shared.store("a", number=1)
    for _ in range(4):
        shared.store("b", number=2)
    for _ in range(30):
        shared.store("a")
        shared.store("b")
    for tenant, number in (("a", 1), ("b", 2)):
        assert shared.tree.match(shared.namespace(tenant), sequence(number, PAGE)).num_tokens, "it was used again"


def test_policies_learn_which_part_is_theirs() -> None:
    told: list[int] = []

    class Counting(SlruPolicy):
        def resized(self, capacity_pages: int) -> None:
            told.append(capacity_pages)
            super().resized(capacity_pages)

    policy = SharedPolicy(lambda: Counting(capacity_pages=100), LruPolicy, capacity_pages=100)
    tree = HiRadixTree(page_size=PAGE, tiers=(HOST,), policies={HOST: policy})
    for number, tenant in enumerate(["a", "a", "b", "a"]):
        namespace = make_namespace(PAGE, tenant=tenant)
        node = tree.insert(namespace, sequence(number, PAGE), tier=HOST, slots=[number], now=float(number)).node
        policy.used(Use(tree.path(node), float(number)))
    assert told == [100, 100, 50, 50], "made for all of the tier, then told of half of it each"
    assert RESIZED_FROM < 0.5


def test_tenants_that_are_gone_are_remembered_for_a_while_only() -> None:
    shared = Shared(4)
    for number in range(3 * EMPTY_MAX):
        shared.store(f"tenant {number}")
    assert len(shared.policy._tenants) <= EMPTY_MAX + 4
    assert len(shared.policy._by_use) + len(shared.policy._idle) <= EMPTY_MAX + 4
    assert sum(shared.policy.pages_by_tenant().values()) == 4


@pytest.mark.parametrize("quotas", [None, {f"tenant {number}": 1 for number in range(2 * EMPTY_MAX)}])
def test_tenants_that_a_flush_left_without_pages_are_forgotten_whole(quotas: dict[str, int] | None) -> None:
    shared = Shared(2 * EMPTY_MAX, quotas)
    for number in range(2 * EMPTY_MAX + 1):
        shared.store(f"tenant {number}")
    assert shared.lost, "all have a place in the order of claims"
    shared.free += shared.tree.flush().freed[HOST].tolist()
    for number in range(2 * EMPTY_MAX + 1):
        shared.store(f"later tenant {number}")
    assert sum(shared.policy.pages_by_tenant().values()) == 2 * EMPTY_MAX


def test_only_so_many_tenants_and_ranks_have_a_policy_that_remembers() -> None:
    made: list[LrfuPolicy] = []

    def make() -> LrfuPolicy:
        made.append(LrfuPolicy())
        return made[-1]

    policy = SharedPolicy(make, make, capacity_pages=1_000)
    tree = HiRadixTree(page_size=PAGE, tiers=(HOST,), policies={HOST: policy})

    def store(tenant: int, slot: int) -> Node:
        namespace = make_namespace(PAGE, tenant=f"tenant {tenant}")
        node = tree.insert(namespace, sequence(slot, PAGE), tier=HOST, slots=[slot], now=float(slot)).node
        policy.used(Use(tree.path(node), float(slot)))
        return node

    nodes = [store(tenant, tenant) for tenant in range(3 * OWN_MAX)]
    assert len(made) == OWN_MAX
    for number, node in enumerate(nodes):
        tree.care(node, priority=1, now=float(100 + number))
    assert len(made) == 2 * OWN_MAX, "and as many of another rank"
    # The others are kept as well: what each of them used longest ago leaves first.
    last = 3 * OWN_MAX - 1
    later = [store(last, 100 + step) for step in range(3)]
    leaving = [node for node in tree.victims(HOST, 1_000, 200.0) if node.tenant == nodes[last].tenant]
    assert leaving == [*later, nodes[last]]
    for node in nodes[:5]:
        tree.evict(node, HOST)
    for tenant in range(200, 210):
        store(tenant, tenant)
    assert len(made) == 2 * OWN_MAX + 5, "those without a page have given their places"
    tree.check_integrity()


def test_a_victim_of_many_tenants_costs_no_look_at_all_of_them() -> None:
    """Counted in tenants that are looked at, of 2,000."""
    looked: list[int] = []

    class Looked(LruPolicy):
        def victims(self):  # type: ignore[no-untyped-def]  # as the base has it
            looked.append(1)
            return super().victims()

    policy = SharedPolicy(Looked, Looked, capacity_pages=5_000, own_max=2_000)
    tree = HiRadixTree(page_size=PAGE, tiers=(HOST,), policies={HOST: policy})
    for number in range(2_000):
        namespace = make_namespace(PAGE, tenant=str(number))
        node = tree.insert(namespace, sequence(number, PAGE), tier=HOST, slots=[number], now=0.0).node
        policy.used(Use([node], 0.0))
    assert len(tree.victims(HOST, 3, 0.0)) == 3
    assert len(looked) <= 5


def test_quotas_are_shares_or_bytes() -> None:
    quotas = check_quotas({"a": 0.25, "b": TenantQuota(host=4096, nvme=0.5), "c": TenantQuota()})
    pages = quota_pages(quotas, {DEVICE: 8, HOST: 16, NVME: 100}, page_bytes=1024)
    assert pages == {DEVICE: {"a": 2}, HOST: {"a": 4, "b": 4}, NVME: {"a": 25, "b": 50}}


@pytest.mark.parametrize(
    ("quotas", "field"),
    [
        ([], "tenant_quotas"),
        ({1: 0.5}, "tenant_quotas"),
        ({"a": 2}, r"tenant_quotas\[a\]"),
        ({"a": float("nan")}, r"tenant_quotas\[a\]"),
        ({"a": TenantQuota(host=0.0)}, r"tenant_quotas\[a\].host"),
        ({"a": TenantQuota(nvme=-1)}, r"tenant_quotas\[a\].nvme"),
        ({"a": TenantQuota(device=True)}, r"tenant_quotas\[a\].device"),
        ({"a": TenantQuota(device=float("inf"))}, r"tenant_quotas\[a\].device"),
    ],
)
def test_quotas_that_cannot_be_are_named(quotas: object, field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        check_quotas(quotas)  # type: ignore[arg-type]  # what a caller may get wrong


def test_bytes_are_shares_of_a_budget() -> None:
    quotas = in_shares(check_quotas({"a": TenantQuota(host=29, nvme=0), "b": 0.5}), {HOST: 100, DEVICE: 10})
    assert quotas == {"a": TenantQuota(host=0.29, nvme=0), "b": TenantQuota(0.5, 0.5, 0.5)}
    assert quota_pages(quotas, {HOST: 100}, page_bytes=1) == {HOST: {"a": 29, "b": 50}}
    with pytest.raises(BadRequest, match=r"tenant_quotas: 1\.01 times the host tier"):
        in_shares({"a": TenantQuota(host=51), "b": TenantQuota(host=0.5)}, {HOST: 100})


def test_quotas_beyond_a_tier_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"tenant_quotas: 1\.1 times the host tier"):
        quota_pages(check_quotas({"a": 0.6, "b": 0.5}), {HOST: 10}, page_bytes=64)
    with pytest.raises(BadRequest, match="tenant_quotas: 11 pages of host, which has 10"):
        quota_pages(check_quotas({"a": 0.6, "b": TenantQuota(host=5 * 64)}), {HOST: 10}, page_bytes=64)


def test_the_contract_is_met() -> None:
    policy: EvictionPolicy = policies_named("lru", {HOST: 4})[HOST]
    assert list(policy.victims()) == []
    assert np.array(list(policies_named("value", {DEVICE: 4, HOST: 8}))).tolist() == [DEVICE, HOST]
