"""What the two tiers in memory share: slots, which page each slot holds, and copies in threads.

The event loop owns all of it; pool threads only copy bytes. A slot's record of its page is one object that is replaced,
never changed, so that comparing the record before and after a copy tells whether anything happened to the slot between:

1. `write` removes the record, copies, and sets a new one if the slot was not freed meanwhile.
2. `free` removes the record and bumps the generation. A write under way then ends as `STALE`; the next write to the
   slot waits for it, so that late bytes of the old page cannot land among those of the new one.
3. `read` finds the record, copies, and counts only if the record is still the same object.
"""

import asyncio
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeVar

from hicache.errors import BadRequest, TierUnavailable
from hicache.tier import Outcome, PageIdentity, PageRead, PageSums, PageWrite, Slots, TierId
from hicache.tiers.slots import MAX_SLOTS, SlotPool

MAX_THREADS: Final = 64
"""Most threads a tier may copy in."""

_log = logging.getLogger(__name__)
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A slot's record that it holds one whole page. Each filling of a slot makes a new one."""

    identity: PageIdentity
    sums: PageSums | None = None


class MemoryTier(ABC):
    """Slots in memory of this process or of its GPU. A subclass says how bytes get in and out.

    A slot gets its page in one of two ways: by `write`, or in place (through whatever access the subclass gives)
    followed by `declare`. Whoever reads in place asks `check` before and, unless the slot is pinned, after.

    Requests queue up for the threads without a bound of their own: the lanes bound what is in flight.

    Args:
        page_bytes: bytes of one page.
        capacity_pages: slots.
        num_threads: threads that copy, 1 to `MAX_THREADS`.
        chunk_bytes: one thread is handed at least so much at a time; a hand-off costs some 50 µs.
    """

    def __init__(
        self, tier_id: TierId, *, page_bytes: int, capacity_pages: int, num_threads: int, chunk_bytes: int
    ) -> None:
        if not 1 <= num_threads <= MAX_THREADS:
            raise BadRequest("num_threads", f"{num_threads} is not within 1 to {MAX_THREADS}")
        self._pool = SlotPool(tier_id, capacity_pages)
        self._page_bytes = page_bytes
        self._held: list[Held | None] = [None] * capacity_pages
        self._num_threads = num_threads
        self._chunk_bytes = chunk_bytes
        self._executor = started_executor(tier_id, num_threads)
        self._under_way: set[asyncio.Future[None]] = set()
        """One future a request whose copies have begun, done when they have ended."""
        self._being_written: dict[int, asyncio.Future[None]] = {}
        """For each slot that a thread writes to, the future of that request."""
        self._closed = False
        self._released = False

    @abstractmethod
    def _copy_in(self, pages: Sequence[PageWrite]) -> None:
        """Copy pages into their slots. Runs in a pool thread, for different slots in several at once."""

    @abstractmethod
    def _copy_out(self, pages: Sequence[PageRead]) -> None:
        """Copy pages out of their slots. Runs in a pool thread."""

    @abstractmethod
    def _release(self) -> None:
        """Let go of the memory. Called once, when no copy is under way."""

    @property
    def tier_id(self) -> TierId:
        return self._pool.tier_id

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    @property
    def capacity_pages(self) -> int:
        return self._pool.capacity

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def counters(self) -> dict[str, int]:
        """`slots.taken` and `slots.freed` since the tier was made. Any thread may call."""
        return self._pool.counters()

    def allocate(self, num_pages: int) -> Slots:
        if self._closed:
            raise TierUnavailable(self.tier_id, "is closed")
        return self._pool.allocate(num_pages)

    def free(self, slots: Slots) -> None:
        self._pool.free(slots)
        for slot in slots.tolist():
            self._held[slot] = None

    def generation(self, slot: int) -> int:
        return self._pool.generation(slot)

    def check(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        """What a `read` would say now, without copying: `OK`, `STALE` or `NOT_FOUND`. For readers in place."""
        if self._pool.generation(slot) != generation:
            return Outcome.STALE
        held = self._held[slot]
        return Outcome.OK if held is not None and held.identity == identity else Outcome.NOT_FOUND

    def declare(
        self, slot: int, generation: int, identity: PageIdentity, sums: PageSums | None = None
    ) -> Outcome:
        """The slot has been filled in place and holds that page, whole; `sums` are the page's checksums, where they
        were taken. `STALE` when it was freed meanwhile."""
        if not self._accepts(slot, generation):
            return Outcome.STALE
        assert slot not in self._being_written, f"{self.tier_id}: slot {slot} was declared under a write"
        self._held[slot] = Held(identity, sums)
        return Outcome.OK

    async def write(self, pages: Sequence[PageWrite]) -> list[Outcome]:
        """See `Tier.write`. Waits for pool threads, and for a write to an earlier life of a slot to end."""
        self._check_writes(pages)
        await self._until_unwritten([page.slot for page in pages])
        if self._closed:
            return [Outcome.ERROR] * len(pages)
        outcomes = [Outcome.STALE] * len(pages)
        accepted = [index for index, page in enumerate(pages) if self._accepts(page.slot, page.generation)]
        with self._writing([pages[index].slot for index in accepted]):
            copied = await self._copy(self._copy_in, [pages[index] for index in accepted])
        for index, ok in zip(accepted, copied, strict=True):
            page = pages[index]
            if not ok:
                outcomes[index] = Outcome.ERROR
            elif self._accepts(page.slot, page.generation):
                self._held[page.slot] = Held(page.identity, page.sums)
                outcomes[index] = Outcome.OK
        return outcomes

    async def read(self, pages: Sequence[PageRead]) -> list[Outcome]:
        """See `Tier.read`. Waits for pool threads."""
        for page in pages:
            self._check_buffer("into", page.slot, page.into)
            if page.into.readonly:
                raise BadRequest("into", "is read-only")
        if self._closed:
            return [Outcome.ERROR] * len(pages)
        outcomes = [self.check(page.slot, page.generation, page.identity) for page in pages]
        found = [(index, self._held[pages[index].slot]) for index, got in enumerate(outcomes) if got is Outcome.OK]
        with self._under_way_until_left():
            copied = await self._copy(self._copy_out, [pages[index] for index, _ in found])
        for (index, held), ok in zip(found, copied, strict=True):
            page = pages[index]
            if not ok:
                outcomes[index] = Outcome.ERROR
            elif held is None or self._held[page.slot] is not held:
                freed = self._pool.generation(page.slot) != page.generation
                outcomes[index] = Outcome.STALE if freed else Outcome.NOT_FOUND
            elif page.sums is not None and not page.sums and held.sums is not None:
                page.sums[:] = held.sums
        return outcomes

    async def close(self) -> None:
        self._closed = True
        while self._under_way:
            await asyncio.wait(set(self._under_way))
        if not self._released:
            self._released = True
            self._executor.shutdown()  # joins threads that have nothing left to do
            self._release()

    def _accepts(self, slot: int, generation: int) -> bool:
        return self._pool.generation(slot) == generation and self._pool.is_allocated(slot)

    def _check_writes(self, pages: Sequence[PageWrite]) -> None:
        for page in pages:
            self._check_buffer("data", page.slot, page.data)
        if len({page.slot for page in pages}) != len(pages):
            raise BadRequest("pages", "two of them name the same slot")

    def _check_buffer(self, field: str, slot: int, buffer: memoryview) -> None:
        if not 0 <= slot < self.capacity_pages:
            raise BadRequest("slot", f"{slot} is not within 0 to {self.capacity_pages - 1}")
        if not buffer.c_contiguous or buffer.nbytes != self._page_bytes:
            raise BadRequest(field, f"is not {self._page_bytes} contiguous bytes")

    async def _until_unwritten(self, slots: Sequence[int]) -> None:
        """Wait until no thread writes to any of the slots. They were freed under a write if one does."""
        while earlier := {self._being_written[slot] for slot in slots if slot in self._being_written}:
            await asyncio.wait(earlier)

    @contextmanager
    def _writing(self, slots: Sequence[int]) -> Iterator[None]:
        """While the block runs, threads write to the slots; they hold nothing then, and nothing when it is left."""
        with self._under_way_until_left() as request:
            for slot in slots:
                self._held[slot] = None
                self._being_written[slot] = request
            try:
                yield
            finally:
                for slot in slots:
                    del self._being_written[slot]

    @contextmanager
    def _under_way_until_left(self) -> Iterator[asyncio.Future[None]]:
        """A future that is done when the block has been left; `close` waits for it."""
        request: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way.add(request)
        try:
            yield request
        finally:
            self._under_way.remove(request)
            request.set_result(None)

    async def _copy(self, copy: Callable[[Sequence[_Item]], None], pages: Sequence[_Item]) -> list[bool]:
        """Run `copy` over all pages, split among the threads; whether each was copied. Returns, even when cancelled,
        only after every thread has ended its part: until then buffers and slots are in use."""
        return await self._copied(self._start_copy(copy, pages, item_bytes=self._page_bytes))

    def _start_copy(
        self, copy: Callable[[Sequence[_Item]], None], pages: Sequence[_Item], *, item_bytes: int
    ) -> list[asyncio.Future[list[bool]]]:
        """Hand pages, or parts of pages, of so many bytes each to the threads. Whoever calls it waits for `_copied`."""
        if not pages:
            return []
        by_size = -(-len(pages) * item_bytes // self._chunk_bytes)
        num_parts = min(self._num_threads, len(pages), by_size)
        borders = [len(pages) * part // num_parts for part in range(num_parts + 1)]
        loop = asyncio.get_running_loop()
        return [
            loop.run_in_executor(self._executor, self._copy_part, copy, pages[start:end])
            for start, end in pairwise(borders)
        ]

    async def _copied(self, parts: Sequence[asyncio.Future[list[bool]]]) -> list[bool]:
        """Wait for what `_start_copy` began, to its end even when cancelled."""
        cancelled: asyncio.CancelledError | None = None
        waiting = set(parts)
        while waiting:
            try:
                _, waiting = await asyncio.wait(waiting)
            except asyncio.CancelledError as error:
                cancelled = error
                waiting = {part for part in waiting if not part.done()}
        if cancelled is not None:
            raise cancelled
        return [ok for part in parts for ok in part.result()]

    def _copy_part(self, copy: Callable[[Sequence[_Item]], None], pages: Sequence[_Item]) -> list[bool]:
        try:
            copy(pages)
        except (RuntimeError, MemoryError, OSError) as error:  # what torch, CUDA and allocation raise
            _log.warning("%s: copying %d pages failed: %s", self.tier_id, len(pages), error)
            return [False] * len(pages)
        return [True] * len(pages)


def capacity_in_pages(page_stride: int, capacity_pages: int | None, capacity_bytes: int | None) -> int:
    """Pages of `page_stride` bytes that a tier is given room for, by either of two arguments.

    Raises `BadRequest` unless exactly one is given and at least one page fits.
    """
    if (capacity_pages is None) == (capacity_bytes is None):
        raise BadRequest("capacity_bytes", "is given exactly when capacity_pages is not")
    if capacity_bytes is not None:
        if capacity_bytes < page_stride:
            raise BadRequest("capacity_bytes", f"{capacity_bytes} is below one page, which takes {page_stride} bytes")
        capacity_pages = capacity_bytes // page_stride
    assert capacity_pages is not None
    if not 1 <= capacity_pages <= MAX_SLOTS:
        raise BadRequest("capacity_pages", f"{capacity_pages} is not within 1 to {MAX_SLOTS} pages")
    return capacity_pages


def started_executor(tier_id: TierId, num_threads: int, *, apart: bool = False) -> ThreadPoolExecutor:
    """A pool whose threads all run, named for what they serve: handing it work later cannot fail for want of one.
    Raises `TierUnavailable` when they cannot be had.

    `apart`: no two of them run on the same core, where the process may use as many. For threads that share a short
    piece of work: of two that are woken at once the kernel puts the second behind the first as often as not, and leaves
    it there for milliseconds beside an idle core.
    """
    cores = sorted(os.sched_getaffinity(0))
    parts = iter([cores[part::num_threads] for part in range(num_threads)])

    def part_company() -> None:
        with suppress(OSError):  # where that is forbidden, the kernel's choice does
            os.sched_setaffinity(0, next(parts))  # 0 is the calling thread

    executor = ThreadPoolExecutor(
        num_threads,
        thread_name_prefix=f"hicache-{tier_id}",
        initializer=part_company if apart and len(cores) >= num_threads else None,
    )
    everybody = threading.Barrier(num_threads)
    try:
        for _ in range(num_threads):
            executor.submit(everybody.wait)
    except RuntimeError as error:
        everybody.abort()
        executor.shutdown()
        raise TierUnavailable(tier_id, f"cannot start {num_threads} threads: {error}") from error
    return executor
