"""The three sides of `hicache bench nvme`: the tier, the device itself, and one file a page.

Each moves batches of pages between one memory and one file system and says how long that took; what is to be written or
read, and where on the raw side, has been decided before.
"""

import asyncio
import itertools
import os
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import Final

import numpy as np

from hicache.layout import KVLayout
from hicache.namespace import Namespace
from hicache.tier import Outcome, PageIdentity, PageRead, PageSums, PageWrite, Slots
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.filling import segment_name
from hicache.tiers.nvme.geometry import Geometry, PageShape
from hicache.tiers.nvme.store import RESERVE_SHARE
from hicache.tiers.sums import page_sums
from hicache.tools.bench.raw_io import RawFile
from hicache.tools.exits import CommandFailed

BATCH_PAGES: Final = 16
"""Pages that a mover hands to the tier at once."""
MAX_BATCHES: Final = 8
"""Batches that a mover has under way."""
MAX_IN_FLIGHT_BYTES: Final = 64 << 20
"""Bytes that a mover has under way."""
RESERVE_BATCHES: Final = 1
"""Batches that the store is larger by than what is written: the tier keeps slots back (`RESERVE_SHARE`)."""
STRETCH_BYTES: Final = 32 << 20
"""Length of the stretches of the file that the tier and the raw side have in turn."""
FILE_THREADS: Final = 8
"""Threads of the one-file-a-page side."""
DEADLINE_S: Final = 60.0
"""A flush that takes longer has failed."""

Batch = Sequence[memoryview]
"""Buffers of the pages of one batch."""


@dataclass(frozen=True)
class Load:
    """Pages of one size."""

    name: str
    """End of the row names."""
    layout: KVLayout

    @cached_property
    def shape(self) -> PageShape:
        return PageShape.of(self.layout)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page, a multiple of 4,096."""
        return self.layout.page_bytes

    @cached_property
    def num_under_way(self) -> int:
        """Batches under way at one time."""
        return max(1, min(MAX_BATCHES, MAX_IN_FLIGHT_BYTES // (BATCH_PAGES * self.page_bytes)))

    def batches(self, num_bytes: int) -> int:
        """Whole batches in so many bytes, at least one."""
        return max(num_bytes // (BATCH_PAGES * self.page_bytes), 1)


class Memory:
    """Batches of buffers, in turn. Twice as many as are under way, so that nobody waits for one."""

    def __init__(self, memory: memoryview, shape: PageShape) -> None:
        size = shape.page_bytes
        buffers = [memory[start : start + size] for start in range(0, len(memory) - size + 1, size)]
        starts = range(0, len(buffers) - BATCH_PAGES + 1, BATCH_PAGES)
        self._shape = shape
        self._batches = [buffers[start : start + BATCH_PAGES] for start in starts]
        self._sums: list[list[PageSums]] = []
        self._turns = itertools.cycle(range(len(self._batches)))

    def batch(self) -> Batch:
        return self._batches[next(self._turns)]

    def take_sums(self) -> None:
        """Take the checksums of what lies in all buffers now, as is done where pages enter memory."""
        self._sums = [[page_sums(page, self._shape.layer_ranges) for page in batch] for batch in self._batches]

    def batch_with_sums(self) -> Iterable[tuple[memoryview, PageSums]]:
        """The next batch, and the checksums that were taken of it last."""
        turn = next(self._turns)
        return zip(self._batches[turn], self._sums[turn], strict=True)


@dataclass(frozen=True, slots=True)
class Written:
    """How long a write took."""

    accepted_s: float
    """Until all of it could be read."""
    durable_s: float
    """Until all of it was durable too."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A batch that lies in the tier."""

    slots: Slots
    generations: tuple[int, ...]
    identities: tuple[PageIdentity, ...]


class TierSide:
    """The tier, used as the movers use it. In a coroutine each, since it belongs to an event loop."""

    def __init__(self, load: Load, memory: Memory, directory: Path, num_batches: int) -> None:
        self._load = load
        self._memory = memory
        self._namespace = Namespace(model="bench", layout=load.layout)
        num_slots = int((num_batches + RESERVE_BATCHES) * BATCH_PAGES / (1 - RESERVE_SHARE))
        num_bytes = 4096 + num_slots * load.shape.slot_bytes
        self.geometry: Final = Geometry.plan(load.shape, capacity_bytes=num_bytes, segment_bytes=num_bytes)
        """One segment with all slots."""
        self.tier: Final = NvmeTier.open(
            directory, layout=load.layout, capacity_bytes=num_bytes, segment_bytes=num_bytes
        )
        self.tier.remember(self._namespace.digest, self._namespace.encode())
        self._held: deque[_Held] = deque()
        self._num_prompts = 0

    async def write(self, num_batches: int, *, reuse: bool) -> Written:
        """Write batches, into slots never used, or, with `reuse`, each into slots that freeing the oldest makes room
        for."""
        prompts = iter([self._prompt() for _ in range(num_batches)])

        async def work() -> None:
            for identities in prompts:
                await self._write_batch(identities, reuse=reuse)

        began = perf_counter()
        await self._side_by_side(work)
        accepted = perf_counter() - began
        await self._sync()
        return Written(accepted, perf_counter() - began)

    async def read(self, num_batches: int, rng: random.Random) -> float:
        """Seconds to read batches chosen at random, none twice."""
        chosen = iter(rng.sample(self._held, num_batches))

        async def work() -> None:
            for held in chosen:
                await self._read_batch(held)

        began = perf_counter()
        await self._side_by_side(work)
        return perf_counter() - began

    async def go_to_first(self) -> None:
        """Write over the oldest pages until the next go into the first of the file's slots, as those of the raw side
        do. Into slots that nothing has been written to, too: those that the tier keeps back."""
        while self._held[-1].slots[-1] < self.tier.num_slots - BATCH_PAGES:
            await self.write(1, reuse=True)

    async def empty(self) -> None:
        """Drop all pages."""
        await self.give_back(held.slots for held in self._held)
        self._held.clear()

    def allocate(self) -> Slots:
        """Slots of a batch, which are the caller's."""
        return self.tier.allocate(BATCH_PAGES)

    async def give_back(self, batches: Iterable[Slots]) -> None:
        """Take back slots that `allocate` gave."""
        for slots in batches:
            self.tier.free(slots)
        await self._sync()

    async def close(self) -> None:
        await self.tier.close()

    async def _side_by_side(self, work: Callable[[], Awaitable[None]]) -> None:
        await asyncio.gather(*(work() for _ in range(self._load.num_under_way)))

    async def _write_batch(self, identities: tuple[PageIdentity, ...], *, reuse: bool) -> None:
        if reuse:
            self.tier.free(self._held.popleft().slots)
        slots = self.allocate()
        held = _Held(slots, tuple(self.tier.generation(slot) for slot in slots.tolist()), identities)
        writes = [
            PageWrite(slot, generation, identity, data, sums)
            for slot, generation, identity, (data, sums) in zip(
                slots.tolist(), held.generations, identities, self._memory.batch_with_sums(), strict=True
            )
        ]
        _expect_ok(await self.tier.write(writes))
        self._held.append(held)

    async def _read_batch(self, held: _Held) -> None:
        reads = [
            PageRead(slot, generation, identity, into)
            for slot, generation, identity, into in zip(
                held.slots.tolist(), held.generations, held.identities, self._memory.batch(), strict=True
            )
        ]
        _expect_ok(await self.tier.read(reads))

    async def _sync(self) -> None:
        await self.tier.sync(self.tier.accepted, deadline=monotonic() + DEADLINE_S)

    def _prompt(self) -> tuple[PageIdentity, ...]:
        """The pages of a prompt that no other shares a page with."""
        self._num_prompts += 1
        token_bytes = self._load.shape.token_bytes
        prefix, pages = self._namespace.digest, []
        for index in range(BATCH_PAGES):
            tokens = self._num_prompts.to_bytes(4, "little") + index.to_bytes(token_bytes - 4, "little")
            pages.append(PageIdentity(self._namespace.digest, prefix, tokens))
            prefix = pages[-1].chain
        return tuple(pages)


class RawSide:
    """The device itself, in the tier's own file: pages in slots that the tier hands out and hears no more of. On the
    same disk some stretches of 128 MiB are written 1.6 times as fast as others, by where their blocks lie; here the
    sides have every second batch of one file, and go through it side by side."""

    def __init__(self, tier: TierSide, memory: Memory, directory: Path) -> None:
        self._tier = tier
        self._memory = memory
        self._file = RawFile(directory / segment_name(0))
        self._batches: list[list[int]] = []
        """Slots of every batch that it has."""
        self._num_written = 0
        """Batches that have been written."""
        self._oldest = 0
        """Which batch is written over next."""

    def take(self, num_batches: int) -> None:
        """Have these batches, and no others."""
        self._have([self._tier.allocate().tolist() for _ in range(num_batches)])

    async def share(self, num_batches: int, *, is_first: bool) -> None:
        """Have so many batches, and no others; between stretches of them lie as many of the tier's, which holds
        nothing yet. `is_first`: begin with the first of the stretches."""
        stretch = max(1, STRETCH_BYTES // (BATCH_PAGES * self._tier.geometry.shape.slot_bytes))
        everything = [self._tier.allocate() for _ in range(2 * num_batches)]
        halves: tuple[list[Slots], list[Slots]] = [], []
        for index, slots in enumerate(everything):
            second = index // stretch % 2 == 1 or len(halves[0]) == num_batches
            halves[second].append(slots)
        mine, theirs = halves if is_first else halves[::-1]
        self._have([slots.tolist() for slots in mine])
        await self._tier.give_back(theirs)

    async def give_back(self) -> None:
        """Have no batches."""
        await self._tier.give_back(np.array(slots, np.int32) for slots in self._batches)
        self._have([])

    def write(self, num_batches: int, *, reuse: bool, depth: int) -> Written:
        """Write batches, into slots never used or over the oldest."""
        if reuse:
            chosen = [(self._oldest + index) % self._num_written for index in range(num_batches)]
            self._oldest = (self._oldest + num_batches) % self._num_written
        else:
            chosen = list(range(self._num_written, self._num_written + num_batches))
            self._num_written += num_batches
        accepted = self._file.write(self._transfers(chosen), depth)
        return Written(accepted, accepted + self._file.sync())

    def read(self, num_batches: int, rng: random.Random, *, depth: int) -> float:
        """Seconds to read batches chosen at random, none twice."""
        return self._file.read(self._transfers(rng.sample(range(self._num_written), num_batches)), depth)

    def close(self) -> None:
        self._file.close()

    def _have(self, batches: list[list[int]]) -> None:
        self._batches = batches
        self._num_written = self._oldest = 0

    def _transfers(self, batches: Sequence[int]) -> list[tuple[int, memoryview]]:
        geometry = self._tier.geometry
        return [
            (geometry.slot_offset(slot) + geometry.shape.header_bytes, buffer)
            for batch in batches
            for slot, buffer in zip(self._batches[batch], self._memory.batch(), strict=True)
        ]


class FileSide:
    """One file a page, through the page cache."""

    def __init__(self, memory: Memory, directory: Path) -> None:
        self._memory = memory
        self._directory = directory
        self._num_batches = 0
        self._threads = ThreadPoolExecutor(FILE_THREADS, "bench-files")
        directory.mkdir(mode=0o700)

    def write(self, num_batches: int) -> Written:
        """Write batches into new files, and then sync them."""
        began = self._num_batches
        self._num_batches += num_batches
        pages = [page for batch in range(began, self._num_batches) for page in self._pages(batch)]
        accepted = self._timed(self._write, pages)
        return Written(accepted, accepted + self._timed(self._sync, pages))

    def read(self, num_batches: int, rng: random.Random) -> float:
        """Seconds to read batches chosen at random, after the page cache was told to forget them."""
        pages = [page for batch in rng.sample(range(self._num_batches), num_batches) for page in self._pages(batch)]
        self._timed(self._forget, pages)
        return self._timed(self._read, pages)

    def close(self) -> None:
        self._threads.shutdown()

    def _pages(self, batch: int) -> Iterator[tuple[Path, memoryview]]:
        for index, buffer in enumerate(self._memory.batch()):
            yield self._directory / f"{batch}-{index}", buffer

    def _timed(self, call: Callable[[Path, memoryview], None], pages: Sequence[tuple[Path, memoryview]]) -> float:
        began = perf_counter()
        for end in [self._threads.submit(partial(call, path, buffer)) for path, buffer in pages]:
            end.result()
        return perf_counter() - began

    @staticmethod
    def _write(path: Path, buffer: memoryview) -> None:
        with open(path, "xb", buffering=0) as file:
            if file.write(buffer) != len(buffer):
                raise CommandFailed(f"{path}: written in part only")

    @staticmethod
    def _read(path: Path, buffer: memoryview) -> None:
        with open(path, "rb", buffering=0) as file:
            if file.readinto(buffer) != len(buffer):
                raise CommandFailed(f"{path}: read in part only")

    @staticmethod
    def _sync(path: Path, buffer: memoryview) -> None:
        with open(path, "rb", buffering=0) as file:
            os.fdatasync(file.fileno())

    @staticmethod
    def _forget(path: Path, buffer: memoryview) -> None:
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _expect_ok(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        if outcome is not Outcome.OK:
            raise CommandFailed(f"a page came back as {outcome.value}: figures of such a run say nothing")
