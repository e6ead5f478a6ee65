"""One tier shared among tenants, and among pages that callers care about more or less.

A tier is kept by one policy for each tenant, and this one says whose turn it is to lose something:

1. Every tenant has a share of the tier. With a quota, that is the quota. The others have equal parts of what quotas
   leave: one for each tenant that used the tier within `IDLE_S`, and one for all the idle ones together, of which the
   one that has been idle longest loses first.
2. The next victim is of the tenant that holds most for its share. In a full tier that is one that holds no less than
   its share: a tenant below its share loses a page only when none above its own has one that may leave. Nobody is
   refused room for being above: what others do not use is there to be used.
3. Of the pages of one tenant, those that are not retained leave first, then those of lower rank (`hicache.care`), and
   among equals the policy decides. Retained pages leave when nothing else of their tenant may: they never stop anybody.
   So no hint of one tenant keeps a page of another one from its share.

What a tenant's policy remembers beyond its pages is bounded, and so is the number of those that remember: `OWN_MAX`
tenants have a policy of the kind asked for, and as many ranks of tenants one of theirs. The others are kept by LRU,
which knows of nothing but what is there, until one of those has no page any more: then it gives its place to the next
tenant that comes.

Choosing costs O(log n) in tenants and pages, beyond what the tenant's own policy costs.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, merge
from typing import Final

from hicache.care import DEFAULT_RANK, rank_of
from hicache.node import Box, Node
from hicache.policy.base import (
    EvictionPolicy,
    HearsCapacity,
    HearsHints,
    HearsResidency,
    HearsShape,
    HearsUses,
    Hint,
    Use,
)
from hicache.policy.lru import LruPolicy
from hicache.sortedchunks import SortedChunks

IDLE_S: Final = 600.0
"""Seconds without a use after which a tenant without a quota has no share of its own."""
RESIZED_FROM: Final = 1 / 8
"""Relative change of what a tenant may keep from which its policy is told."""
EMPTY_MAX: Final = 64
"""Tenants without a page whose policies, and what these remember, are kept."""
OWN_MAX: Final = 16
"""Tenants, and ranks of tenants, that have a policy which remembers: with the default of `hicache.policy.value` about
100 MB each when all of it is full."""
_LEAST_QUOTA: Final = 0.5
"""Pages that a quota of none counts for: who has one holds too much with its first page."""


class _Kept:
    """A policy, and by what else it hears. Asked once: `isinstance` of a protocol takes longer than a policy does."""

    __slots__ = ("capacity", "hints", "policy", "residency", "shape", "uses")

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.residency = policy if isinstance(policy, HearsResidency) else None
        self.shape = policy if isinstance(policy, HearsShape) else None
        self.uses = policy if isinstance(policy, HearsUses) else None
        self.hints = policy if isinstance(policy, HearsHints) else None
        self.capacity = policy if isinstance(policy, HearsCapacity) else None


@dataclass(slots=True, eq=False)
class _Tenant:
    """What the tier holds of one tenant."""

    name: str
    serial: int
    main: _Kept
    """Keeps all pages of ordinary rank, and knows of all others."""
    quota: int | None
    capacity: int
    """Pages that its policy counts on."""
    is_own: bool
    """Whether its policy is of the kind asked for."""
    pages: int = 0
    num_listed: int = 0
    last_used: float = float("-inf")
    is_idle: bool = True
    place: tuple[float, int] | None = None
    """Where it stands in the order of claims: while it may lose something, and is not idle."""
    num_own_ranks: int = 0
    ranked: dict[int, _Kept] = field(default_factory=dict)
    """Those of other ranks: each knows what is listed in it."""

    def kept(self) -> list[_Kept]:
        return [self.main, *self.ranked.values()]

    def victims(self) -> Iterator[Node]:
        if not self.ranked:
            return self.main.policy.victims()
        return self._by_rank()

    def _by_rank(self) -> Iterator[Node]:
        for rank in sorted([DEFAULT_RANK, *self.ranked]):
            yield from (self.main if rank == DEFAULT_RANK else self.ranked[rank]).policy.victims()


@dataclass(slots=True, order=True)
class _Claim:
    """Somebody who holds pages, for the choice of victims."""

    excess: float
    """Pages held for each page of the share, negative."""
    serial: int
    share: float = field(compare=False)
    nodes: Iterator[Node] = field(compare=False)

    def lose(self, num_pages: int) -> None:
        self.excess += num_pages / self.share


class SharedPolicy:
    """The policies of one tier's tenants, in the order of the module's docstring.

    Args:
        make: makes the policy of a tenant.
        make_ranked: makes one for its pages of another rank than the ordinary one. It knows of these alone, so it
            cannot be one that judges by the whole tier.
        capacity_pages: the tier's.
        quotas: pages of the tier, by tenant; their sum is at most its capacity.
        own_max: most policies that each of `make` and `make_ranked` has made that are in use at once.
    """

    def __init__(
        self,
        make: Callable[[], EvictionPolicy],
        make_ranked: Callable[[], EvictionPolicy],
        *,
        capacity_pages: int,
        quotas: Mapping[str, int] | None = None,
        own_max: int = OWN_MAX,
    ) -> None:
        self._own_max = own_max
        self._num_own = self._num_own_ranks = 0
        self._make, self._make_ranked = make, make_ranked
        self._capacity = capacity_pages
        self._quotas = dict(quotas or {})
        self._unreserved = max(1, capacity_pages - sum(self._quotas.values()))
        self._tenants: dict[str, _Tenant] = {}
        self._serial = 0
        self._now = float("-inf")
        self._ranks: dict[Box, int] = {}
        """Of listed nodes, where it is not the ordinary one."""
        self._with_quota: SortedChunks[tuple[float, int]] = SortedChunks()
        self._active: SortedChunks[tuple[float, int]] = SortedChunks()
        self._by_serial: dict[int, _Tenant] = {}
        self._num_active = 0
        """Tenants in `_by_use` that hold pages."""
        self._by_use: OrderedDict[_Tenant, None] = OrderedDict()  # not idle, without a quota; used longest ago first
        self._idle: OrderedDict[_Tenant, None] = OrderedDict()  # idle longest first
        self._idle_pages = 0
        self._moved: set[_Tenant] = set()
        """Tenants whose place is not that of their pages any more."""
        self._empty: OrderedDict[_Tenant, None] = OrderedDict()

    # -- what a tenant's policies are told ----------------------------------------------------------------------------

    def entered(self, node: Node) -> None:
        tenant = self._tenant(node)
        self._count(tenant, node.num_pages)
        if tenant.main.residency is not None:
            tenant.main.residency.entered(node)

    def left(self, node: Node) -> None:
        tenant = self._tenant(node)
        self._count(tenant, -node.num_pages)
        if tenant.main.residency is not None:
            tenant.main.residency.left(node)

    def add(self, node: Node, now: float) -> None:
        if now > self._now:
            self._now = now
        tenant, rank = self._tenant(node), rank_of(node)
        tenant.num_listed += 1
        if tenant.num_listed == 1:
            self._moved.add(tenant)
        if rank == DEFAULT_RANK:
            tenant.main.policy.add(node, now)
            return
        kept = tenant.ranked.get(rank)
        if kept is None:
            is_own = self._num_own_ranks < self._own_max
            self._num_own_ranks += is_own
            tenant.num_own_ranks += is_own
            kept = tenant.ranked[rank] = _Kept(self._make_ranked() if is_own else LruPolicy())
        self._ranks[node.box] = rank
        if kept.residency is not None:
            kept.residency.entered(node)
        kept.policy.add(node, now)

    def discard(self, node: Node) -> None:
        tenant = self._tenant(node)
        tenant.num_listed -= 1
        if not tenant.num_listed:
            self._moved.add(tenant)
        rank = self._ranks.pop(node.box, None) if self._ranks else None
        if rank is None:
            tenant.main.policy.discard(node)
            return
        kept = tenant.ranked[rank]
        kept.policy.discard(node)
        if kept.residency is not None:
            kept.residency.left(node)

    def touch(self, node: Node, now: float) -> None:
        tenant, rank = self._tenant(node), self._ranks.get(node.box)
        (tenant.main if rank is None else tenant.ranked[rank]).policy.touch(node, now)

    def split(self, upper: Node, lower: Node) -> None:
        tenant = self._tenant(lower)
        for kept in tenant.kept():
            kept.policy.split(upper, lower)
        ranked = tenant.ranked.get(self._ranks.get(lower.box, DEFAULT_RANK))
        if ranked is not None and ranked.residency is not None:
            ranked.residency.left(upper)  # it comes when it may leave, as all that this one knows

    def joined(self, upper: Node, lower: Node) -> None:
        for kept in self._tenant(lower).kept():
            if kept.shape is not None:
                kept.shape.joined(upper, lower)

    def used(self, use: Use) -> None:
        self._now = max(self._now, use.now)
        tenant = self._tenant(use.path[0])
        tenant.last_used = self._now
        if tenant.quota is None:
            if tenant.is_idle:
                tenant.is_idle = False
                self._idle.pop(tenant, None)
                self._idle_pages -= tenant.pages
                self._num_active += bool(tenant.pages)
                self._moved.add(tenant)
            self._by_use[tenant] = None
            self._by_use.move_to_end(tenant)
        self._resize(tenant)
        for kept in tenant.kept():
            if kept.uses is not None:
                kept.uses.used(use)

    def hinted(self, path: Sequence[Node], hint: Hint, now: float) -> None:
        for kept in self._tenant(path[0]).kept():
            if kept.hints is not None:
                kept.hints.hinted(path, hint, now)

    # -- whose turn it is ---------------------------------------------------------------------------------------------

    def pages_by_tenant(self) -> dict[str, int]:
        """Pages that the tier holds or awaits of each tenant."""
        return {tenant.name: tenant.pages for tenant in self._tenants.values() if tenant.pages}

    def victims(self) -> Iterator[Node]:
        if len(self._tenants) == 1:
            (tenant,) = self._tenants.values()
            return tenant.victims()
        self._settle()
        return self._by_claim()

    def _by_claim(self) -> Iterator[Node]:
        """Of each claim in turn what leaves first, the largest excess first; claims shrink with what they give."""
        with_quota, active = self._claims(self._with_quota, None), self._claims(self._active, self._part())
        waiting = merge(with_quota, active, self._idle_claim())
        following = next(waiting, None)
        drawn: list[_Claim] = []
        while drawn or following is not None:
            if following is not None and (not drawn or following < drawn[0]):
                heappush(drawn, following)
                following = next(waiting, None)
                continue
            claim = heappop(drawn)
            node = next(claim.nodes, None)
            if node is not None:
                yield node
                claim.lose(node.num_pages)
                heappush(drawn, claim)

    def _part(self) -> float:
        """Pages that each of those without a quota may have: the idle ones have one part together."""
        return self._unreserved / max(1, self._num_active + bool(self._idle_pages))

    def _claims(self, order: SortedChunks[tuple[float, int]], part: float | None) -> Iterator[_Claim]:
        for _, serial in order:
            tenant = self._by_serial[serial]
            share = part if part is not None else max(_LEAST_QUOTA, tenant.quota or 0)
            yield _Claim(-tenant.pages / share, serial, share, tenant.victims())

    def _idle_claim(self) -> Iterator[_Claim]:
        if self._idle_pages:
            nodes = (node for tenant in list(self._idle) for node in tenant.victims())
            yield _Claim(-self._idle_pages / self._part(), -1, self._part(), nodes)

    # -- keeping count ------------------------------------------------------------------------------------------------

    def _tenant(self, node: Node) -> _Tenant:
        return self._tenants.get(node.tenant) or self._begin(node.tenant)

    def _begin(self, name: str) -> _Tenant:
        """A tenant of whom the tier has nothing yet."""
        self._serial += 1
        if self._num_own >= self._own_max:
            self._forget_own()
        is_own = self._num_own < self._own_max
        self._num_own += is_own
        main = _Kept(self._make() if is_own else LruPolicy())
        tenant = _Tenant(name, self._serial, main, self._quotas.get(name), self._capacity, is_own)
        self._tenants[name] = tenant
        self._by_serial[self._serial] = tenant
        self._empty[tenant] = None
        if len(self._tenants) == 2:
            self._moved.update(self._tenants.values())
        self._forget_empty()
        return tenant

    def _forget_empty(self) -> None:
        while len(self._empty) > EMPTY_MAX:
            self._forget(next(iter(self._empty)))

    def _forget_own(self) -> None:
        """Take its policy from a tenant that has been without a page for longest, if there is one."""
        tenant = next((each for each in self._empty if each.is_own), None)
        if tenant is not None:
            self._forget(tenant)

    def _forget(self, tenant: _Tenant) -> None:
        """A tenant without a page."""
        del self._empty[tenant]
        self._by_use.pop(tenant, None)
        self._idle.pop(tenant, None)
        self._moved.discard(tenant)
        if tenant.place is not None:  # of pages that it has lost since, all at once by a flush
            (self._active if tenant.quota is None else self._with_quota).remove(tenant.place)
        self._num_own -= tenant.is_own
        self._num_own_ranks -= tenant.num_own_ranks
        del self._tenants[tenant.name], self._by_serial[tenant.serial]

    def _count(self, tenant: _Tenant, num_pages: int) -> None:
        had = bool(tenant.pages)
        tenant.pages += num_pages
        has = bool(tenant.pages)
        if has != had:
            if has:
                del self._empty[tenant]
            else:
                self._empty[tenant] = None
        if tenant.quota is None and tenant.is_idle:
            self._idle_pages += num_pages
            if has and not had:
                self._idle[tenant] = None
            elif had and not has:
                del self._idle[tenant]
            return
        if tenant.quota is None:
            self._num_active += has - had
        if len(self._tenants) > 1:
            self._moved.add(tenant)

    def _resize(self, tenant: _Tenant) -> None:
        """Tell a tenant's policy what it may count on: its share, or what it holds beyond."""
        capacity = self._capacity
        if len(self._tenants) > 1:
            share = self._part() if tenant.quota is None else tenant.quota
            capacity = max(1, int(share), tenant.pages)
        if abs(capacity - tenant.capacity) > RESIZED_FROM * tenant.capacity:
            tenant.capacity = capacity
            if tenant.main.capacity is not None:
                tenant.main.capacity.resized(capacity)

    def _settle(self) -> None:
        """Bring the orders up to date: who has become idle, and the places of those whose pages have changed."""
        while self._by_use and (tenant := next(iter(self._by_use))).last_used < self._now - IDLE_S:
            del self._by_use[tenant]
            tenant.is_idle = True
            if tenant.pages:
                self._idle[tenant] = None
                self._idle_pages += tenant.pages
                self._num_active -= 1
            self._moved.add(tenant)
        for tenant in self._moved:
            order = self._active if tenant.quota is None else self._with_quota
            if tenant.place is not None:
                order.remove(tenant.place)
                tenant.place = None
            if tenant.num_listed and not (tenant.quota is None and tenant.is_idle):
                share = 1.0 if tenant.quota is None else max(_LEAST_QUOTA, tenant.quota)
                tenant.place = (-tenant.pages / share, tenant.serial)
                order.add(tenant.place)
        self._moved.clear()
