"""The NVMe tier: pages in the slots of preallocated segment files, checked on every read.

Who waits where: `allocate`, `free` and `generation` work on memory; `write` and `read` hand runs of neighbouring slots
to lane threads (`lanes`), which do the I/O and the checksums; `start_layer_reads` hands single layers to lanes of
their own, from any thread. What a page must be comes from the index in memory, what it is from its own header on disk;
both must agree with what was asked before a byte is given out (`segment`, `findings`).

Invariants:

1. A slot is served only after a write of its present generation ended whole (`Index.holds`).
2. Copies into one slot never overlap: a write waits for an earlier one, also for one of an earlier generation.
3. What a copy learns counts only if the slot's generation is still the same when it lands.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Self

from hicache.clock import Clock, SystemClock
from hicache.errors import BadRequest, DeadlineExceeded, TierUnavailable
from hicache.layout import KVLayout
from hicache.tier import NVME, LayerRead, Outcome, PageIdentity, PageRead, PageWrite, Slots, Ticket, TierId
from hicache.tiers.nvme.directory import StoreDirectory, close_directory, open_directory
from hicache.tiers.nvme.findings import OUTCOMES, Counters, Finding, Operation
from hicache.tiers.nvme.geometry import Geometry, PageShape
from hicache.tiers.nvme.header import DIGEST_BYTES
from hicache.tiers.nvme.health import Health
from hicache.tiers.nvme.index import Index
from hicache.tiers.nvme.io import FileIO, Scratch, flat
from hicache.tiers.nvme.lanes import Lanes
from hicache.tiers.nvme.segment import LayerGet, PageGet, PagePut, SegmentFile
from hicache.tiers.slots import SlotPool

READ_LANES: Final = 16
WRITE_LANES: Final = 16
LAYER_LANES: Final = 8
"""Layers that attention waits for do not queue behind pages that are promoted."""
MAX_RUN_BYTES: Final = 2 << 20
"""Longest I/O that neighbouring slots are joined to."""
MAX_RUN_PAGES: Final = 64
"""Most pages in one I/O."""
HUNG_AFTER_S: Final = 10.0
"""A device that has not answered a call for so long counts as down."""
CLOSE_TIMEOUT_S: Final = 10.0
"""How long `close` waits for a device that does not answer."""
MAX_LANES: Final = 64

_log = logging.getLogger(__name__)


class NvmeTier:
    """A tier on one directory of a file system, made for NVMe. Open with `NvmeTier.open`.

    While the device is down (`down`), `allocate` raises `TierUnavailable`; reads are still tried.
    """

    def __init__(
        self,
        *,
        tier_id: TierId,
        geometry: Geometry,
        directory: StoreDirectory,
        files: FileIO,
        clock: Clock,
        health: Health,
        read_lanes: int,
        write_lanes: int,
        layer_lanes: int,
    ) -> None:
        self._tier_id = tier_id
        self._geometry = geometry
        self._shape = geometry.shape
        self._directory = directory
        self._files = files
        self._clock = clock
        self._health = health
        self._max_run = min(MAX_RUN_PAGES, max(1, MAX_RUN_BYTES // self._shape.slot_bytes))
        self._pool = SlotPool(tier_id, geometry.num_slots)
        self._index = Index(self._shape, geometry.num_slots)
        self._counters = Counters()
        self._reads = self._lanes("nvme-read", read_lanes)
        self._writes = self._lanes("nvme-write", write_lanes)
        self._layers = self._lanes("nvme-layer", layer_lanes)
        self._writing: set[int] = set()
        self._write_landed: list[asyncio.Future[None]] = []
        self._closed = False
        self._released = False

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        layout: KVLayout | PageShape,
        capacity_bytes: int,
        segment_bytes: int | None = None,
        tier_id: TierId = NVME,
        clock: Clock | None = None,
        files: FileIO | None = None,
        health: Callable[[str, Clock], Health] = Health,
        read_lanes: int = READ_LANES,
        write_lanes: int = WRITE_LANES,
        layer_lanes: int = LAYER_LANES,
    ) -> Self:
        """Make the directory's segments, all of them, preallocated. Blocks for milliseconds; needs no running loop.

        Args:
            directory: made with mode 0700 if missing; must be this user's own and writable by nobody else. Files in it
                that are not the store's are left alone. Used by one instance at a time.
            layout: what a page looks like; of a `KVLayout` all parts together.
            capacity_bytes: at most so much goes into segment files, `OVERHEAD_BYTES` beside them.
            segment_bytes: at most so much in one file; by default 1/64 of the capacity, at least 256 MiB.
            files, clock, health: the seams to the system, to time, and to what counts as down.
            read_lanes, write_lanes, layer_lanes: threads, 1 to 64 each.

        Raises `BadRequest` naming the argument and its bound (a capacity below one page, below one segment, or beyond
        the free space), and `TierUnavailable` with one line naming the directory when it cannot be used: in use, not
        ours, of an unknown format version, read-only. Nothing has been created or altered then.
        """
        for name, lanes in (("read_lanes", read_lanes), ("write_lanes", write_lanes), ("layer_lanes", layer_lanes)):
            if not 1 <= lanes <= MAX_LANES:
                raise BadRequest(name, f"{lanes} is not within 1 to {MAX_LANES}")
        shape = layout if isinstance(layout, PageShape) else PageShape.of(layout)
        geometry = Geometry.plan(shape, capacity_bytes=capacity_bytes, segment_bytes=segment_bytes)
        clock = clock or SystemClock()
        files = files or FileIO()
        state = health(tier_id, clock)
        return cls(
            tier_id=tier_id,
            geometry=geometry,
            directory=open_directory(os.fspath(directory), tier=tier_id, geometry=geometry, files=files, health=state),
            files=files,
            clock=clock,
            health=state,
            read_lanes=read_lanes,
            write_lanes=write_lanes,
            layer_lanes=layer_lanes,
        )

    # ---- what it is

    @property
    def tier_id(self) -> TierId:
        return self._tier_id

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self._shape.page_bytes

    @property
    def capacity_pages(self) -> int:
        """Slots in all. Stays as it is while the device is down: pages are still read, and none has to leave for it."""
        return self._pool.capacity

    @property
    def num_free(self) -> int:
        """Slots that are not handed out."""
        return self._pool.num_free

    @property
    def total_bytes(self) -> int:
        """Bytes of all segment files, headers included; at most the capacity that was asked for."""
        return self._geometry.total_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """Fallbacks in use (no direct I/O, no preallocation), one sentence each; empty on an ordinary file system."""
        return tuple(self._directory.notes)

    @property
    def down(self) -> str | None:
        """Why no new pages are taken, None when they are: failures in a row, or a call that has not come back."""
        if (reason := self._health.down) is not None:
            return reason
        since = [busy for lanes in self._all_lanes() if (busy := lanes.busy_since()) is not None]
        if since and (age := self._clock.monotonic() - min(since)) > HUNG_AFTER_S:
            return f"the device has not answered for {age:.0f} s"
        return None

    def counters(self) -> dict[str, int]:
        """What became of pages and layers since the tier was opened: `read.ok`, `read.bad_payload`, `write.bytes`..."""
        return self._counters.snapshot()

    # ---- slots

    def allocate(self, num_pages: int) -> Slots:
        """Take slots, neighbours where possible; all or none. Never waits.

        Raises `NoRoom` when fewer are free; `TierUnavailable` when the tier is closed or the device down, and then has
        the device probed if that is due, so that asking again later may work.
        """
        if self._closed:
            raise TierUnavailable(self._tier_id, "closed")
        if (reason := self.down) is not None:
            if self._health.claim_probe():
                self._writes.submit_anywhere(_Probe(self._directory.segments[0], self._health))
            raise TierUnavailable(self._tier_id, reason)
        return self._pool.allocate(num_pages)

    def free(self, slots: Slots) -> None:
        """Give slots back and bump their generations. `AssertionError`, and nothing freed, for a slot that is not
        handed out or is named twice."""
        self._pool.free(slots)
        self._index.forget(slots)

    def generation(self, slot: int) -> int:
        """How often the slot has been freed, from 0. Raises `BadRequest` for a slot that does not exist."""
        return self._pool.generation(slot)

    # ---- pages

    async def write(self, pages: Sequence[PageWrite]) -> list[Outcome]:
        """Copy pages into their slots; one outcome each, in order: `OK`, `STALE`, or `ERROR` (counted; nothing of that
        page is served afterwards). Waits for the device, and for earlier writes into the same slots.

        Raises `BadRequest`, before anything is touched, for a slot that does not exist or is named twice, a buffer
        that is not one contiguous page, and an identity of the wrong lengths. Cancelled, it waits for the copies all
        the same.
        """
        checked = [(page, self._checked(page.slot, page.identity, page.data)) for page in pages]
        if len({page.slot for page in pages}) < len(pages):
            raise BadRequest("pages", "one slot is named twice")
        while not self._closed and not self._writing.isdisjoint(page.slot for page in pages):
            landed = asyncio.get_running_loop().create_future()
            self._write_landed.append(landed)
            await landed
        batch = _Batch(self._counters, Operation.WRITE, len(pages))
        puts: list[tuple[int, PageWrite, memoryview]] = []
        for place, (page, data) in enumerate(checked):
            if self._closed:
                batch.found(place, Finding.CLOSED)
            elif not self._is_current(page.slot, page.generation):
                batch.found(place, Finding.FREED)
            else:
                puts.append((place, page, data))
                self._writing.add(page.slot)
                self._index.forget(page.slot)
        for segment, first, run in self._runs([page.slot for _, page, _ in puts], self._writes.num_threads):
            batch.expect(_WriteRun(self, batch, segment, first, puts[run]), self._writes)
        return await batch.outcomes()

    async def read(self, pages: Sequence[PageRead]) -> list[Outcome]:
        """Copy pages out of their slots, verified; one outcome each, in order. Waits for the device.

        `findings.OUTCOMES` says which finding is which outcome. Raises `BadRequest` as `write` does (a slot may be
        named twice, a buffer must be writable). Cancelled, it waits for the copies all the same.
        """
        batch = _Batch(self._counters, Operation.READ, len(pages))
        checked = [(page, self._checked(page.slot, page.identity, page.into, writable=True)) for page in pages]
        gets: list[tuple[int, PageRead, memoryview]] = []
        for place, (page, into) in enumerate(checked):
            if (problem := self._problem(page.slot, page.generation, page.identity)) is not None:
                batch.found(place, problem)
            else:
                gets.append((place, page, into))
        for segment, first, run in self._runs([page.slot for _, page, _ in gets], self._reads.num_threads):
            batch.expect(_ReadRun(self, batch, segment, first, gets[run]), self._reads)
        return await batch.outcomes()

    # ---- layers

    def start_layer_reads(self, reads: Sequence[LayerRead]) -> Ticket:
        """Queue reads of single layers and return at once. Callable from any thread, while a lease of the caller keeps
        the pages from being freed.

        A layer is verified by generation, by identity and by its own checksum, all of which the index keeps since the
        page was written; its page's header is not read again. A slot freed meanwhile is `STALE`. Raises `BadRequest`
        for a slot or layer that does not exist, and for a buffer that is not as long as the layer, contiguous and
        writable.
        """
        checked = [(read, self._checked_layer(read)) for read in reads]
        ticket = _LayerTicket(len(reads), self._counters)
        gets: list[tuple[int, LayerRead, SegmentFile, LayerGet]] = []
        for place, (read, into) in enumerate(checked):
            if (problem := self._problem(read.slot, read.generation, read.identity)) is not None:
                ticket.found(place, problem)
                continue
            ordinal, index = self._geometry.locate(read.slot)
            sums = self._index.layer_sums(read.slot, read.layer)
            get = LayerGet(index, read.layer, sums, into)
            gets.append((place, read, self._directory.segments[ordinal], get))
        share = max(1, -(-len(gets) // self._layers.num_threads))
        for start in range(0, len(gets), share):
            job = _LayerRun(self, ticket, gets[start : start + share])
            if not self._layers.submit_anywhere(job):
                job.end_with(Finding.CLOSED)
        return ticket

    # ---- end

    async def close(self) -> None:
        """Refuse new work, wait for copies under way, release files, lock and threads. Idempotent.

        Waits at most `CLOSE_TIMEOUT_S` for a device that does not answer; its files then stay open until the process
        ends, because a copy may still be using them.
        """
        self._closed = True
        self._wake_writers()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for lanes in self._all_lanes():
                    await lanes.stop()
        except TimeoutError:
            _log.warning("%s: the device does not answer; its files stay open", self._directory.path)
            return
        if not self._released:
            self._released = True
            close_directory(self._files, self._directory)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- parts of the above

    def _lanes(self, name: str, num_threads: int) -> Lanes:
        return Lanes(
            name, num_threads=num_threads, scratch=lambda: Scratch(self._shape, self._max_run), clock=self._clock
        )

    def _all_lanes(self) -> tuple[Lanes, Lanes, Lanes]:
        return self._reads, self._writes, self._layers

    def _checked(
        self,
        slot: int,
        identity: PageIdentity,
        buffer: memoryview,
        *,
        writable: bool = False,
        num_bytes: int | None = None,
    ) -> memoryview:
        """The buffer as a flat view. Raises `BadRequest` for arguments that no device could make right."""
        self._pool.generation(slot)
        expected = self._shape.page_bytes if num_bytes is None else num_bytes
        if buffer.nbytes != expected:
            raise BadRequest("buffer", f"{buffer.nbytes} bytes are not the {expected} that are needed")
        if not buffer.c_contiguous:
            raise BadRequest("buffer", "is not contiguous")
        if writable and buffer.readonly:
            raise BadRequest("buffer", "cannot be written to")
        lengths = len(identity.namespace), len(identity.prefix), len(identity.tokens)
        if lengths != (DIGEST_BYTES, DIGEST_BYTES, self._shape.token_bytes):
            raise BadRequest("identity", f"lengths {lengths} are not (32, 32, {self._shape.token_bytes}) bytes")
        return flat(buffer)

    def _checked_layer(self, read: LayerRead) -> memoryview:
        if not 0 <= read.layer < self._shape.num_layers:
            raise BadRequest("layer", f"{read.layer} is not within 0 to {self._shape.num_layers - 1}")
        num_bytes = self._shape.layer_bytes[read.layer]
        return self._checked(read.slot, read.identity, read.into, writable=True, num_bytes=num_bytes)

    def _is_current(self, slot: int, generation: int) -> bool:
        return self._pool.generation(slot) == generation and self._pool.is_allocated(slot)

    def _problem(self, slot: int, generation: int, identity: PageIdentity) -> Finding | None:
        """Why memory alone already says that the slot does not hold the page; None if it does."""
        if self._closed:
            return Finding.CLOSED
        if self._pool.generation(slot) != generation:
            return Finding.FREED
        if not self._index.holds(slot, generation):
            return Finding.EMPTY
        return None if self._index.is_page(slot, identity) else Finding.OTHER_PAGE

    def _runs(self, slots: Sequence[int], num_threads: int) -> Iterator[tuple[SegmentFile, int, slice]]:
        """Cut the slots into runs of neighbours in one segment: the segment, the first slot's place in it, and which
        slots.

        Runs are as long as `MAX_RUN_BYTES` allows, but no longer than it takes to keep all threads busy.
        """
        longest = min(self._max_run, -(-len(slots) // num_threads))
        start = 0
        while start < len(slots):
            ordinal, index = self._geometry.locate(slots[start])
            segment = self._directory.segments[ordinal]
            limit = min(start + longest, len(slots), start + segment.num_slots - index)
            stop = start + 1
            while stop < limit and slots[stop] == slots[stop - 1] + 1:
                stop += 1
            yield segment, index, slice(start, stop)
            start = stop

    def _written(self, page: PageWrite, finding: Finding, layer_sums: tuple[int, ...]) -> Finding:
        """A write landed: serve the page if it went well and the slot is still the same."""
        self._writing.discard(page.slot)
        if not self._is_current(page.slot, page.generation):
            return Finding.FREED
        if finding is Finding.OK:
            self._index.record(page.slot, page.generation, page.identity, layer_sums)
        return finding

    def _wake_writers(self) -> None:
        waiting, self._write_landed = self._write_landed, []
        for landed in waiting:
            if not landed.done():
                landed.set_result(None)


class _Batch:
    """The pages of one `write` or `read`: what was found so far, and who waits for the rest."""

    def __init__(self, counters: Counters, operation: Operation, num_pages: int) -> None:
        self._counters = counters
        self._operation = operation
        self._findings: list[Finding | None] = [None] * num_pages
        self._num_runs = 0
        self._waiter: asyncio.Future[None] | None = None

    def found(self, place: int, finding: Finding, num_bytes: int = 0) -> None:
        self._findings[place] = finding
        self._counters.add(self._operation, finding, num_bytes if finding is Finding.OK else 0)

    def expect(self, run: "_WriteRun | _ReadRun", lanes: Lanes) -> None:
        self._num_runs += 1
        lanes.submit(run)

    def run_landed(self) -> None:
        self._num_runs -= 1
        if not self._num_runs and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def outcomes(self) -> list[Outcome]:
        """Wait for all runs. A cancellation is kept until they have landed: they own buffers of the caller."""
        cancelled: asyncio.CancelledError | None = None
        while self._num_runs:
            # A fresh future each time: a cancelled task cancels the future that it waits for.
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        assert None not in self._findings, "a page was forgotten"
        return [OUTCOMES[finding] for finding in self._findings if finding is not None]


class _WriteRun:
    """Pages for neighbouring slots of one segment."""

    def __init__(
        self,
        tier: NvmeTier,
        batch: _Batch,
        segment: SegmentFile,
        first: int,
        puts: Sequence[tuple[int, PageWrite, memoryview]],
    ) -> None:
        self._tier = tier
        self._batch = batch
        self._segment = segment
        self._pages = [(place, page) for place, page, _ in puts]
        self._puts = [
            PagePut(first + offset, page.generation, page.identity, data)
            for offset, (_, page, data) in enumerate(puts)
        ]
        self._written: list[tuple[Finding, tuple[int, ...]]] = []

    def run(self, scratch: Scratch) -> None:
        self._written = self._segment.write_pages(self._puts, scratch)

    def land(self, error: Exception | None) -> None:
        tier = self._tier
        written = self._written if error is None else [(Finding.BUG, ())] * len(self._puts)
        for (place, page), (finding, layer_sums) in zip(self._pages, written, strict=True):
            self._batch.found(place, tier._written(page, finding, layer_sums), tier.page_bytes)
        tier._wake_writers()
        self._batch.run_landed()


class _ReadRun:
    """Pages from neighbouring slots of one segment."""

    def __init__(
        self,
        tier: NvmeTier,
        batch: _Batch,
        segment: SegmentFile,
        first: int,
        gets: Sequence[tuple[int, PageRead, memoryview]],
    ) -> None:
        self._tier = tier
        self._batch = batch
        self._segment = segment
        self._pages = [(place, page) for place, page, _ in gets]
        self._gets = [
            PageGet(first + offset, page.generation, page.identity, tier._index.payload_sum(page.slot), into)
            for offset, (_, page, into) in enumerate(gets)
        ]
        self._findings: list[Finding] = []

    def run(self, scratch: Scratch) -> None:
        self._findings = self._segment.read_pages(self._gets, scratch)

    def land(self, error: Exception | None) -> None:
        findings = self._findings if error is None else [Finding.BUG] * len(self._gets)
        for (place, page), finding in zip(self._pages, findings, strict=True):
            if self._tier._pool.generation(page.slot) != page.generation:
                finding = Finding.FREED
            self._batch.found(place, finding, self._tier.page_bytes)
        self._batch.run_landed()


class _LayerTicket:
    """Layer reads under way; what `start_layer_reads` returns."""

    def __init__(self, num_reads: int, counters: Counters) -> None:
        self._counters = counters
        self._findings: list[Finding | None] = [None] * num_reads
        self._num_open = num_reads
        self._changed = threading.Condition()

    def found(self, place: int, finding: Finding, num_bytes: int = 0) -> None:
        self._counters.add(Operation.READ_LAYER, finding, num_bytes if finding is Finding.OK else 0)
        with self._changed:
            assert self._findings[place] is None, "a layer was reported twice"
            self._findings[place] = finding
            self._num_open -= 1
            if not self._num_open:
                self._changed.notify_all()

    def wait(self, timeout_s: float) -> list[Outcome]:
        """Block the calling thread until every read reported; one outcome each, in order.

        Raises `DeadlineExceeded` after `timeout_s` seconds; the buffers then still belong to the reads.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._num_open, timeout_s):
                raise DeadlineExceeded(f"{self._num_open} layer reads did not end within {timeout_s:g} s")
            return [OUTCOMES[finding] for finding in self._findings if finding is not None]


class _LayerRun:
    """Layers that one thread reads one after the other."""

    def __init__(
        self, tier: NvmeTier, ticket: _LayerTicket, gets: Sequence[tuple[int, LayerRead, SegmentFile, LayerGet]]
    ) -> None:
        self._tier = tier
        self._ticket = ticket
        self._gets = list(gets)

    def run(self, scratch: Scratch) -> None:
        while self._gets:
            place, read, segment, get = self._gets[0]
            finding = segment.read_layer(get, scratch)
            if not self._tier._index.holds(read.slot, read.generation):
                finding = Finding.FREED
            del self._gets[0]
            self._ticket.found(place, finding, len(get.into))

    def land(self, error: Exception | None) -> None:
        self.end_with(Finding.BUG)

    def end_with(self, finding: Finding) -> None:
        """Report everything that has not been read."""
        for place, *_ in self._gets:
            self._ticket.found(place, finding)
        self._gets.clear()


class _Probe:
    """Tries a device that is down."""

    def __init__(self, segment: SegmentFile, health: Health) -> None:
        self._segment = segment
        self._health = health

    def run(self, scratch: Scratch) -> None:
        self._health.probed(self._segment.probe(scratch))

    def land(self, error: Exception | None) -> None:
        if error is not None:
            self._health.probed(str(error))
