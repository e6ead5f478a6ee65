"""Quotas: which part of a tier is a tenant's own, whatever others do."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from hicache.arguments import name, real, whole
from hicache.errors import BadRequest
from hicache.tier import DEVICE, HOST, NVME, TierId

ROUNDING: Final = 1e-9
"""What shares may be beside each other without being more than one."""
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


def in_shares(quotas: Mapping[str, TenantQuota], budget_bytes: Mapping[TierId, int]) -> dict[str, TenantQuota]:
    """The quotas with bytes as shares of the tiers' budgets: how much a page takes beside its own bytes, or, encoded,
    less than them, a tier alone knows. Raises `BadRequest` where quotas are more than a budget."""
    quotas = {tenant: _in_shares(quota, budget_bytes) for tenant, quota in quotas.items()}
    for tier_id in budget_bytes:
        _check_shares(tier_id, quotas.values())
    return quotas


def _in_shares(quota: TenantQuota, budget_bytes: Mapping[TierId, int]) -> TenantQuota:
    parts = {tier_id: quota.of(tier_id) for tier_id in (DEVICE, HOST, NVME)}
    for tier_id, budget in budget_bytes.items():
        part = parts[tier_id]
        if isinstance(part, int) and part:
            parts[tier_id] = part / budget
    return TenantQuota(parts[DEVICE], parts[HOST], parts[NVME])


def _check_shares(tier_id: TierId, quotas: Iterable[TenantQuota]) -> None:
    share = sum(part for quota in quotas if isinstance(part := quota.of(tier_id), float))
    if share > 1 + ROUNDING:
        raise BadRequest("tenant_quotas", f"{share:.6g} times the {tier_id} tier")


def quota_pages(
    quotas: Mapping[str, TenantQuota], capacity_pages: Mapping[TierId, int], page_bytes: int
) -> dict[TierId, dict[str, int]]:
    """Whole pages of each tier, by tenant. Raises `BadRequest` where quotas are more than the tier."""
    by_tier: dict[TierId, dict[str, int]] = {}
    for tier_id, capacity in capacity_pages.items():
        _check_shares(tier_id, quotas.values())
        pages = by_tier[tier_id] = {}
        for tenant, quota in quotas.items():
            part = quota.of(tier_id)
            if part is not None:
                pages[tenant] = part // page_bytes if isinstance(part, int) else int(part * capacity + ROUNDING)
        if sum(pages.values()) > capacity:
            raise BadRequest("tenant_quotas", f"{sum(pages.values())} pages of {tier_id}, which has {capacity}")
    return by_tier


def _share(field: str, value: object) -> float:
    share = real(field, value)
    if isinstance(value, int) or not 0 < share <= 1:
        raise BadRequest(field, f"{value!r:.80} is no share: a float above 0, at most 1")
    return share
