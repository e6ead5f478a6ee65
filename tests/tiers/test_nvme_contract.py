"""The NVMe tier keeps the contract of all tiers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hicache.tier import SupportsLayerRead, Tier
from hicache.tiers.nvme import NvmeTier
from tests.tiers.contract import TierContract, run
from tests.tiers.nvme import read_raw, shape_of, small_tier


class TestNvmeContract(TierContract):
    @asynccontextmanager
    async def make_tier(self, *, page_bytes: int, capacity_pages: int) -> AsyncIterator[NvmeTier]:
        async with small_tier(shape_of(page_bytes), capacity_pages) as tier:
            yield tier

    def raw_page(self, tier: Tier, slot: int) -> bytes:
        assert isinstance(tier, NvmeTier)
        return read_raw(tier, slot, tier._shape.header_bytes, tier.page_bytes)

    def test_layers_can_be_read(self) -> None:
        async def main() -> None:
            async with self.make_tier(page_bytes=self.page_bytes, capacity_pages=1) as tier:
                assert isinstance(tier, SupportsLayerRead)

        run(main())
