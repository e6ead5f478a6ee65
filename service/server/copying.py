"""Copies pages out of staging memory into the arena in threads, and knows their checksums.

The checksums are those that travel with a page (`hicache.tiers.sums`): all of them where the arena keeps them, as there
is a slower tier that would have to take them otherwise; else the whole page's alone, which costs next to nothing. They
are taken of the copy, which nobody else can write to, while it is in the cache of a core.

The threads share a copy page by page, and are on cores of their own. Between two copies a thread needs the interpreter
for some microseconds: who finds it taken sleeps, and is woken late. So there is no more between them than has to be,
and one thread copies alone where that was measured to be faster (`pace.py`).
"""

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from hicache.clock import Clock
from hicache.service.server.pace import Pace
from hicache.service.server.staging import Staging
from hicache.tier import PageSums, Slots, TierId
from hicache.tiers.host import HostTier
from hicache.tiers.memory import started_executor
from hicache.tiers.sums import payload_checksum, pieces_checksum, whole_sum

CHUNK_BYTES: Final = 2 << 20
"""A thread is handed at least so many bytes of pages to copy."""
PIECE_BYTES: Final = 512 << 10
"""Longer pages are copied and summed in pieces of this length, which stay in a core's cache between the two. Shorter
pieces cost more than they save: each is a hand-over of the interpreter's lock from thread to thread."""
GIL_KEPT_BELOW: Final = 32 << 10
"""Bytes of a page below which giving the interpreter's lock away for its CRC costs more than keeping it."""
MAX_THREADS: Final = 4
"""Threads that copy, at most one a core."""

_Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Copies:
    """Pages that were copied, in order."""

    sums: list[PageSums] | None
    """The checksums that travel with each; None where the arena keeps none."""
    crcs: list[int]
    """The CRC-32C of each, where they were asked for; else 0."""


class Copying:
    """Copies for all sessions of a server. Belongs to its loop."""

    def __init__(self, host: HostTier, clock: Clock) -> None:
        self._host: Final = host
        self._clock: Final = clock
        self._wholes: Final = np.zeros(host.capacity_pages, np.uint32)
        """Checksums of whole pages, by slot."""
        self._generations: Final = np.full(host.capacity_pages, -1, np.int64)
        """In which life of its slot each checksum was taken."""
        max_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._threads: Final = started_executor(TierId("commit"), max_threads, apart=True)
        self._max_threads: Final = max_threads
        self._pace: Final = Pace(max_threads)
        self._num_begun = 0
        self._num_ended = 0

    def close(self) -> None:
        """Join the threads; no copy is under way any more."""
        self._threads.shutdown()

    async def copy(self, staging: Staging, sources: Slots, slots: Slots, *, has_crcs: bool) -> Copies:
        """Copy staging slots to slots of the arena that are the caller's. Returns, even when cancelled, only after
        every thread has ended: until then both are in use."""
        num_pages, page_bytes = len(slots), self._host.page_bytes
        work = _Work(self._threads, self._host, staging.pages(page_bytes), sources, slots, has_crcs=has_crcs)
        num_bytes = num_pages * page_bytes
        num_threads = min(num_pages, max(1, num_bytes // CHUNK_BYTES))
        is_enough, is_alone = num_threads >= self._max_threads, self._num_begun == self._num_ended
        if is_enough:
            # Beside others nothing is tried, as it could not be measured, perhaps for ever.
            num_threads = self._pace.choose() if is_alone else self._pace.best
        began = self._clock.monotonic()
        self._num_begun = num_begun = self._num_begun + 1
        staging.hold()
        try:
            await _ended(asyncio.get_running_loop().run_in_executor(self._threads, work.do_some, num_threads - 1))
        finally:
            staging.let_go()
            self._num_ended += 1
        if is_enough and is_alone and self._num_begun == num_begun:
            self._pace.took(num_threads, num_bytes, self._clock.monotonic() - began)
        has_sums = self._host.num_sums > 0
        self._wholes[slots] = list(map(whole_sum, work.sums)) if has_sums else work.wholes
        self._generations[slots] = self._host.generations(slots)
        return Copies(work.sums if has_sums else None, work.crcs)

    async def is_whole(self, slots: Slots) -> list[bool | None]:
        """Whether arena pages still have the checksums that they had when they were copied, one a slot, which nobody
        may give to another page meanwhile. None for what came into the arena otherwise. Reads them in a thread."""
        are_known = self._generations[slots] == self._host.generations(slots)
        known = list(zip(slots.tolist(), self._wholes[slots].tolist(), are_known.tolist(), strict=True))

        def compare() -> list[bool | None]:
            return [payload_checksum(self._host.view(slot)) == whole if each else None for slot, whole, each in known]

        return await asyncio.get_running_loop().run_in_executor(self._threads, compare)


class _Work:
    """Pages to be copied, of which each thread takes the next one. Nothing that lasts refers to it."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        host: HostTier,
        staged: npt.NDArray[np.uint8],
        sources: Slots,
        slots: Slots,
        *,
        has_crcs: bool,
    ) -> None:
        """`staged`: all of staging memory, uint8 `[slots, page_bytes]`. `sources`, `slots`: rows there, and slots of
        the arena."""
        num_pages = len(slots)
        self.wholes: Final = [0] * num_pages
        """Checksums of whole pages, where the arena keeps none."""
        self.sums: Final = [b""] * num_pages
        """All checksums of pages, where it keeps them."""
        self.crcs: Final = [0] * num_pages
        self._threads: Final = threads
        self._host: Final = host
        self._staged: Final = staged
        self._from_slots: Final[list[int]] = sources.tolist()
        self._to_slots: Final[list[int]] = slots.tolist()
        self._todo: Final = iter(range(num_pages))
        self._has_crcs: Final = has_crcs

    def do_some(self, num_others: int) -> None:
        """In a thread: copy pages until none is left, with so many other threads."""
        # The next thread is woken by this one, not by the loop: whoever has not begun when all is done can be left
        # out, where the loop would have to wait for it.
        other = self._threads.submit(self.do_some, num_others - 1) if num_others else None
        try:
            self._copy()
        finally:
            if other is not None and not other.cancel():
                other.result()

    def _copy(self) -> None:
        host, staged, from_slots, to_slots = self._host, self._staged, self._from_slots, self._to_slots
        page_bytes, has_sums, has_crcs = host.page_bytes, host.num_sums > 0, self._has_crcs
        pages, is_long = host.array[:, :page_bytes], page_bytes > PIECE_BYTES
        # Each thread takes the next page that none has: that is one step under the interpreter's lock.
        for index in self._todo:
            page = pages[to_slots[index]]
            if has_sums:
                np.copyto(page, staged[from_slots[index]])
                self.sums[index] = host.take_sums(to_slots[index])
            elif is_long:
                self.wholes[index] = pieces_checksum(_copied(staged[from_slots[index]], page))
            else:
                np.copyto(page, staged[from_slots[index]])
                self.wholes[index] = payload_checksum(page.data)
            if has_crcs:
                self.crcs[index] = checksum(page.data)


async def _ended(work: "asyncio.Future[None]") -> None:
    """Wait until threads have ended their work, even when cancelled: until then the memory is in use. Raises what they
    raised."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    work.result()


def _copied(source: _Bytes, target: _Bytes) -> Iterator[memoryview]:
    """Copy a page piece by piece; each piece of the copy once it is there."""
    for start in range(0, len(target), PIECE_BYTES):
        piece = target[start : start + PIECE_BYTES]
        np.copyto(piece, source[start : start + PIECE_BYTES])
        yield piece.data


def checksum(page: memoryview) -> int:
    """CRC-32C of a page, as clients send it."""
    return int(crc32c(page, 0, len(page) >= GIL_KEPT_BELOW))
