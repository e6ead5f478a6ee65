"""Quotas: which part of a tier is a tenant's own, whatever others do."""

from collections.abc import Mapping
from dataclasses import dataclass

from hicache.arguments import name, real, whole
from hicache.errors import BadRequest
from hicache.tier import DEVICE, HOST, NVME, TierId

Part = float | int
"""A share of a tier, a float above 0 and at most 1; or an integer, bytes."""


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """What of each tier is one tenant's own. None: an equal part of what is nobody's quota (`hicache.policy.shared`).

    A tenant that holds more than its quota loses its own pages first when the tier is full; it may hold more while
    others do not use theirs.
    """

    device: Part | None = None
    host: Part | None = None
    nvme: Part | None = None

    def of(self, tier_id: TierId) -> Part | None:
        """The part of one tier."""
        return {DEVICE: self.device, HOST: self.host, NVME: self.nvme}[tier_id]


TenantQuotas = Mapping[str, float | TenantQuota]
"""By tenant; a number is a share of every tier."""


def check_quotas(quotas: TenantQuotas | None) -> dict[str, TenantQuota]:
    """The quotas in one form. Raises `BadRequest` naming the tenant and the bound."""
    if quotas is None:
        return {}
    if not isinstance(quotas, Mapping):
        raise BadRequest("tenant_quotas", f"{type(quotas).__name__} is no mapping of tenants to quotas")
    checked = {}
    for tenant, quota in quotas.items():
        field = f"tenant_quotas[{name('tenant_quotas', tenant):.80}]"
        if not isinstance(quota, TenantQuota):
            share = _share(field, quota)
            quota = TenantQuota(share, share, share)
        for tier_id in (DEVICE, HOST, NVME):
            part = quota.of(tier_id)
            if part is not None and not isinstance(part, int):
                _share(f"{field}.{tier_id}", part)
            elif part is not None:
                whole(f"{field}.{tier_id}", part, 0)
        checked[tenant] = quota
    return checked


def quota_pages(
    quotas: Mapping[str, TenantQuota], capacity_pages: Mapping[TierId, int], page_bytes: int
) -> dict[TierId, dict[str, int]]:
    """Whole pages of each tier, by tenant. Raises `BadRequest` where quotas are more than the tier."""
    by_tier: dict[TierId, dict[str, int]] = {}
    for tier_id, capacity in capacity_pages.items():
        pages = by_tier[tier_id] = {}
        for tenant, quota in quotas.items():
            part = quota.of(tier_id)
            if part is not None:
                pages[tenant] = part // page_bytes if isinstance(part, int) else int(part * capacity)
        if sum(pages.values()) > capacity:
            raise BadRequest("tenant_quotas", f"{sum(pages.values())} pages of {tier_id}, which has {capacity}")
    return by_tier


def _share(field: str, value: object) -> float:
    share = real(field, value)
    if isinstance(value, int) or not 0 < share <= 1:
        raise BadRequest(field, f"{value!r:.80} is no share: a float above 0, at most 1")
    return share
