"""Pages that go from the device to NVMe past the host have checksums from where they leave the device."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from hicache.cache import Cache
from hicache.clock import SystemClock
from hicache.layout import KVDtype, KVLayout
from hicache.movers import PageMove
from hicache.namespace import Namespace
from hicache.tier import DEVICE, HOST, NVME, Outcome, PageIdentity, PageRead, PageWrite
from hicache.tiers.device import DeviceTier
from hicache.tiers.host import HostTier
from hicache.tiers.nvme import NvmeTier
from tests.stamps import stamp

LAYOUT = KVLayout.uniform(num_layers=4, num_kv_heads=2, head_dim=32, dtype=KVDtype.BFLOAT16, page_size=16)
NAMESPACE = Namespace(model="test", layout=LAYOUT)
NUM_PAGES = 3


class SpoilingTier(NvmeTier):
    """A store before which memory goes bad: a bit of the second page flips on its way from the device."""

    async def write(self, pages: Sequence[PageWrite]) -> list[Outcome]:
        pages[1].data[5_000] ^= 0x10
        return await super().write(pages)


def test_a_bit_that_flips_between_device_and_disk_is_found_when_the_page_is_read(tmp_path: Path) -> None:
    identities = [
        PageIdentity(NAMESPACE.digest, NAMESPACE.digest, bytes([place]) * 4 * LAYOUT.page_size)
        for place in range(NUM_PAGES)
    ]

    async def main() -> None:
        nvme = SpoilingTier.open(tmp_path / "store", layout=LAYOUT, capacity_bytes=1 << 20)
        nvme.remember(NAMESPACE.digest, NAMESPACE.encode())
        device = DeviceTier(LAYOUT, capacity_pages=NUM_PAGES, num_threads=1)
        host = HostTier(page_bytes=LAYOUT.page_bytes, capacity_pages=1, huge_pages=False)
        async with Cache(LAYOUT, {DEVICE: device, HOST: host, NVME: nvme}, clock=SystemClock()) as cache:
            sources, targets = device.allocate(NUM_PAGES).tolist(), nvme.allocate(NUM_PAGES).tolist()
            assert await device.write([
                PageWrite(slot, 0, identity, stamp(identity, LAYOUT.page_bytes).data)
                for slot, identity in zip(sources, identities, strict=True)
            ]) == [Outcome.OK] * NUM_PAGES
            moves = [PageMove(*ends) for ends in zip(sources, [0] * 3, targets, [0] * 3, identities, strict=True)]
            assert await cache.writer.copy_past_host(device, nvme, moves) == [Outcome.OK] * NUM_PAGES
            reads = [
                PageRead(slot, 0, identity, memoryview(bytearray(LAYOUT.page_bytes)))
                for slot, identity in zip(targets, identities, strict=True)
            ]
            assert await nvme.read(reads) == [Outcome.OK, Outcome.CORRUPT, Outcome.OK]
            assert bytes(reads[2].into) == stamp(identities[2], LAYOUT.page_bytes).tobytes()

    asyncio.run(main())
