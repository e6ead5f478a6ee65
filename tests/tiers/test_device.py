from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar

import pytest

from hicache.layout import KVDtype, KVLayout
from hicache.tier import Tier
from hicache.tiers.device import DeviceTier
from tests.tiers.contract import TierContract


def layout_of(page_bytes: int) -> KVLayout:
    """Two layers of int8 pages with one head that together have so many bytes."""
    return KVLayout.uniform(
        num_layers=2, num_kv_heads=1, head_dim=page_bytes // 16, dtype=KVDtype.INT8, page_size=TierContract.page_size
    )


class TestDeviceContract(TierContract):
    device: ClassVar[str] = "cpu"

    def make_tier(self, *, page_bytes: int, capacity_pages: int) -> AbstractAsyncContextManager[Tier]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Tier]:
            tier = DeviceTier(layout_of(page_bytes), capacity_pages=capacity_pages, device=self.device)
            try:
                yield tier
            finally:
                await tier.close()

        return opened()

    def raw_page(self, tier: Tier, slot: int) -> bytes:
        assert isinstance(tier, DeviceTier)
        return b"".join(bytes(tier.layer(layer)[slot].cpu().numpy().tobytes()) for layer in range(2))


@pytest.mark.gpu
class TestCudaDeviceContract(TestDeviceContract):
    device = "cuda"
