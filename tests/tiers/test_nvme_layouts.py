"""Pages of one layout are never dropped by who opens their directory for another, however alike the two are."""

from dataclasses import replace
from pathlib import Path

import pytest

from hicache.errors import TierUnavailable
from hicache.layout import KVDtype, KVLayout, PageOrder
from hicache.namespace import Namespace
from hicache.tier import Outcome, PageIdentity, Slots
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.geometry import PageShape
from hicache.tiers.nvme.striped import StripedTier
from tests.faults.store import snapshot
from tests.stamps import identity_chain
from tests.tiers.contract import run, store
from tests.tiers.nvme import capacity_for, read_all

LAYOUT = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=64, dtype=KVDtype.BFLOAT16, page_size=4)
ALIKE = {
    "dtype bfloat16, not float16": replace(LAYOUT, dtype=KVDtype.FLOAT16),
    "order nhd, not hnd": replace(LAYOUT, order=PageOrder.HND),
    "groups": KVLayout.uniform(num_layers=3, num_kv_heads=1, head_dim=128, dtype=KVDtype.BFLOAT16, page_size=4),
}
"""Layouts whose pages and layers are exactly as long."""


def open_tier(directory: Path, layout: KVLayout) -> NvmeTier:
    capacity_bytes, _ = capacity_for(PageShape.of(layout), 8, slots_per_segment=8)
    return NvmeTier.open(directory, layout=layout, capacity_bytes=capacity_bytes)


async def fill(tier: NvmeTier, namespace: Namespace, num_pages: int) -> tuple[Slots, list[PageIdentity]]:
    """Durable pages of one prompt in that namespace."""
    prefix, identities = namespace.digest, []
    for each in identity_chain(num_pages):
        identities.append(PageIdentity(namespace.digest, prefix, each.tokens))
        prefix = identities[-1].chain
    tier.remember(namespace.digest, namespace.encode())
    slots = tier.allocate(num_pages)
    await store(tier, slots, identities)
    return slots, identities


@pytest.mark.parametrize("difference", ALIKE)
def test_pages_of_a_layout_of_equal_lengths_are_not_dropped(tmp_path: Path, difference: str) -> None:
    other = ALIKE[difference]
    assert PageShape.of(other) == PageShape.of(LAYOUT)

    async def main() -> None:
        async with open_tier(tmp_path / "store", LAYOUT) as tier:
            slots, identities = await fill(tier, Namespace(model="m", layout=LAYOUT), 5)
        before = snapshot(tmp_path / "store")
        with pytest.raises(TierUnavailable, match="another layout") as refused:
            open_tier(tmp_path / "store", other)
        assert difference in str(refused.value)
        assert str(tmp_path / "store") in str(refused.value)
        with pytest.raises(TierUnavailable, match="another layout"):
            StripedTier.open(
                [tmp_path / "store", tmp_path / "second"], layout=other, capacity_bytes=1 << 20
            )
        assert snapshot(tmp_path / "store") == before
        assert not (tmp_path / "second").exists()
        async with open_tier(tmp_path / "store", LAYOUT) as tier:
            assert sum(len(each.slots) for each in tier.recovered()) == 5
            assert await read_all(tier, slots.tolist(), identities, together=True) == [Outcome.OK] * 5

    run(main())


def test_a_directory_whose_pages_of_another_layout_are_gone_is_taken(tmp_path: Path) -> None:
    other = ALIKE["dtype bfloat16, not float16"]

    async def main() -> None:
        async with open_tier(tmp_path / "store", LAYOUT) as tier:
            slots, _ = await fill(tier, Namespace(model="m", layout=LAYOUT), 5)
            tier.free(slots)
        async with open_tier(tmp_path / "store", other) as tier:
            await fill(tier, Namespace(model="m", layout=other), 3)
        async with open_tier(tmp_path / "store", other) as tier:
            assert sum(len(each.slots) for each in tier.recovered()) == 3

    run(main())


def test_namespaces_of_one_layout_share_a_directory(tmp_path: Path) -> None:
    first, second = Namespace(model="m", layout=LAYOUT), Namespace(model="n", layout=LAYOUT)

    async def main() -> None:
        async with open_tier(tmp_path / "store", LAYOUT) as tier:
            await fill(tier, first, 3)
            await fill(tier, second, 4)
        async with open_tier(tmp_path / "store", LAYOUT) as tier:
            found = tier.recovered()
            records = {each.namespace: len(each.slots) for each in found}
            assert records == {first.encode(): 3, second.encode(): 4}

    run(main())
