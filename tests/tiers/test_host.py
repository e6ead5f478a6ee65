from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from hicache.tier import Tier
from hicache.tiers.host import HostTier
from tests.tiers.contract import TierContract


class TestHostContract(TierContract):
    def make_tier(self, *, page_bytes: int, capacity_pages: int) -> AbstractAsyncContextManager[Tier]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Tier]:
            tier = HostTier(page_bytes=page_bytes, capacity_pages=capacity_pages)
            try:
                yield tier
            finally:
                await tier.close()

        return opened()

    def raw_page(self, tier: Tier, slot: int) -> bytes:
        assert isinstance(tier, HostTier)
        return bytes(tier.array[slot, : tier.page_bytes])
