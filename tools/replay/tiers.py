"""Tiers that keep no bytes and take the time that copying would."""

import asyncio
import mmap
from collections.abc import Sequence

from hicache.tier import Outcome, PageIdentity, PageRead, PageWrite, TierId
from hicache.tools.bench.virtual import SlotsOnly


class ReplayTier(SlotsOnly):
    """A tier without bytes. A call waits `latency_s`, then its pages pass, one after the other, through a pipe that all
    reads share, or one that all writes share."""

    def __init__(
        self, tier_id: TierId, num_pages: int, page_bytes: int, read_s: float, write_s: float, latency_s: float
    ) -> None:
        super().__init__(tier_id, capacity_pages=num_pages, page_bytes=page_bytes)
        self.pages_written = 0
        self._read_s, self._write_s, self._latency_s = read_s, write_s, latency_s
        self._reads_free_at = self._writes_free_at = 0.0

    async def write(self, pages: Sequence[PageWrite]) -> list[Outcome]:
        now = asyncio.get_running_loop().time()
        begin = max(now + self._latency_s, self._writes_free_at)
        self._writes_free_at = begin + len(pages) * self._write_s
        await asyncio.sleep(self._writes_free_at - now)
        self.pages_written += len(pages)
        return [self._outcome(page.slot, page.generation) for page in pages]

    async def read(self, pages: Sequence[PageRead]) -> list[Outcome]:
        now = asyncio.get_running_loop().time()
        begin = max(now + self._latency_s, self._reads_free_at)
        self._reads_free_at = begin + len(pages) * self._read_s
        await asyncio.sleep(self._reads_free_at - now)
        return [self._outcome(page.slot, page.generation) for page in pages]


class ReplayHost(ReplayTier):
    """Memory, one end of every lane. All slots show the same bytes, which nobody looks at."""

    def __init__(
        self, tier_id: TierId, num_pages: int, page_bytes: int, read_s: float, write_s: float, latency_s: float
    ) -> None:
        super().__init__(tier_id, num_pages, page_bytes, read_s, write_s, latency_s)
        self._bytes = memoryview(mmap.mmap(-1, page_bytes))  # takes no memory while nobody writes to it

    def view(self, slot: int) -> memoryview:
        return self._bytes

    def check(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        return self._outcome(slot, generation)

    def declare(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        return self._outcome(slot, generation)


class ReplayDevice(ReplayTier):
    """A pool that requests fill in place."""

    def declare(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        return self._outcome(slot, generation)

    async def copy_page(self, source_slot: int, target_slot: int) -> Outcome:
        return Outcome.OK
