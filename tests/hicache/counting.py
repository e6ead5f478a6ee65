"""Eviction policies beside a plain count of their tier: what they are told adds up, and so does what they keep."""

from collections.abc import Callable, Mapping
from functools import partial

from hicache.care import rank_of
from hicache.node import Box, Node
from hicache.policies import NAMES
from hicache.policy.base import EvictionPolicy, Use
from hicache.policy.lru import LruPolicy
from hicache.policy.s3fifo import S3FifoPolicy
from hicache.policy.shared import IDLE_S, SharedPolicy
from hicache.policy.slru import SlruPolicy


class Told(LruPolicy):
    """Hears everything, and holds the tree to the contract of policies."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: dict[Box, int] = {}
        self.added: set[Box] = set()

    def entered(self, node: Node) -> None:
        assert node.box not in self.pages, "it has entered already"
        self.pages[node.box] = node.num_pages

    def left(self, node: Node) -> None:
        assert node.is_live, "it has left the tree before its tier"
        assert self.pages.pop(node.box) == node.num_pages

    def add(self, node: Node, now: float) -> None:
        assert node.box in self.pages, "it is added before it has entered"
        assert node.box not in self.added, "it is added twice"
        self.added.add(node.box)
        super().add(node, now)

    def discard(self, node: Node) -> None:
        self.added.remove(node.box)
        super().discard(node)

    def touch(self, node: Node, now: float) -> None:
        assert node.box in self.added, "it was not added"
        assert node.last_access == now
        super().touch(node, now)

    def split(self, upper: Node, lower: Node) -> None:
        assert lower.parent is upper, "they are not halves of one node"
        assert upper.box not in self.added, "a new node may leave already"
        if lower.box in self.pages:
            assert self.pages[lower.box] == upper.num_pages + lower.num_pages
            self.pages[upper.box], self.pages[lower.box] = upper.num_pages, lower.num_pages

    def joined(self, upper: Node, lower: Node) -> None:
        assert lower.parent is upper, "they are not one below the other"
        assert self.added.isdisjoint((upper.box, lower.box)), "one of them may leave while they are joined"
        assert (upper.box in self.pages) == (lower.box in self.pages)
        if upper.box in self.pages:
            self.pages[lower.box] += self.pages.pop(upper.box)

    def used(self, use: Use) -> None:
        assert use.path
        for above, node in zip((None, *use.path), use.path, strict=False):
            assert node.parent is above, "this is no path from the root"
            assert node.last_access <= use.now


def _shared(name: str, capacity_pages: int) -> SharedPolicy:
    def make() -> EvictionPolicy:
        return NAMES[name](capacity_pages)

    return SharedPolicy(make, make, capacity_pages=capacity_pages, quotas={"c": capacity_pages // 3})


POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = {
    **NAMES,
    "told": lambda capacity_pages: Told(),
    **{f"shared {name}": partial(_shared, name) for name in NAMES},
}
"""Every policy that has a name, alone and shared among tenants, and one that looks at what it is told; for a tier of so
many pages."""


def check_counts(policy: EvictionPolicy, in_tier: Mapping[Node, int]) -> None:
    """Compare what a policy counts with the nodes that its tier holds or awaits, and their pages."""
    pages = {node.box: count for node, count in in_tier.items()}
    if isinstance(policy, SharedPolicy):
        _check_shared(policy, in_tier)
    elif isinstance(policy, Told):
        assert policy.pages == pages
    elif isinstance(policy, S3FifoPolicy):
        assert set(policy._entries) == set(pages), "it knows other nodes than the tier has"
        assert policy._small_pages == sum([pages[box] for box in policy._small]), "new pages are miscounted"
        standing = {"small": policy._small, "main": policy._main, "chosen": policy._chosen}
        for box, entry in policy._entries.items():
            places = [name for name, boxes in standing.items() if box in boxes]
            assert places == [entry.place.value] * (entry.place.value in standing), "a node stands in another queue"
        assert policy._num_listed == sum([entry.listed for entry in policy._entries.values()])
    elif isinstance(policy, SlruPolicy):
        assert set(policy._stamps) == set(pages), "it knows other nodes than the tier has"
        assert set(policy._protected) <= set(pages), "it protects what the tier does not have"
        protected = sum([pages[box] for box in policy._protected])
        assert policy._protected_pages == protected, "protected pages are miscounted"


def _check_shared(policy: SharedPolicy, in_tier: Mapping[Node, int]) -> None:
    held: dict[str, dict[Node, int]] = {}
    for node, count in in_tier.items():
        held.setdefault(node.tenant, {})[node] = count
    pages = {name: sum(nodes.values()) for name, nodes in held.items()}
    assert policy.pages_by_tenant() == pages
    for name, tenant in policy._tenants.items():
        check_counts(tenant.main.policy, held.get(name, {}))
    _check_order(policy, list(policy.victims()), dict(pages))


def _check_order(policy: SharedPolicy, victims: list[Node], pages: dict[str, int]) -> None:
    """Each victim is of the one who holds most for his share, of those who may lose something; lower ranks first."""
    assert len(victims) == len(set(victims))
    idle = {
        name
        for name, tenant in policy._tenants.items()
        if tenant.quota is None and not tenant.last_used >= policy._now - IDLE_S
    }
    active = [name for name in pages if name not in idle and name not in policy._quotas]
    part = policy._unreserved / max(1, len(active) + any(name in pages for name in idle))
    ranks: dict[str, int] = {}
    left = [node.tenant for node in victims]
    for node in victims:
        excess: dict[str, float] = {}
        for name in left:
            if name in idle:
                excess[name] = sum([count for other, count in pages.items() if other in idle]) / part
            else:
                excess[name] = pages[name] / max(0.5, policy._quotas.get(name, part))
        assert excess[node.tenant] >= max(excess.values()) - 1e-6, "another tenant holds more for its share"
        assert ranks.get(node.tenant, 0) <= rank_of(node), "what is cared for less stays"
        ranks[node.tenant] = rank_of(node)
        pages[node.tenant] -= node.num_pages
        left.remove(node.tenant)
