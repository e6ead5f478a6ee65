"""The NVMe tier: pages in the slots of preallocated segment files, checked on every read.

Who waits where: `allocate`, `free` and `generation` work on memory; `write` and `read` hand runs of neighbouring slots
to lane threads (`lanes`), which do the I/O and the checksums; `start_layer_reads` hands single layers to lanes of
their own, from any thread. What a page must be comes from the index in memory, what it is from its own header on disk;
both must agree with what was asked before a byte is given out (`segment`, `findings`).

Invariants:

1. A slot is served only after a write of its present generation ended whole (`Index.holds`).
2. Copies into one slot never overlap: a write waits for an earlier one, also for one of an earlier generation.
3. What a copy learns counts only if the slot's generation is still the same when it lands.
4. A slot is written only when the log says, durably, that it holds nothing (`commits`).
"""

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Self

import numpy as np

from hicache.clock import Clock, SystemClock
from hicache.errors import BadRequest, NoRoom, TierUnavailable
from hicache.layout import KVLayout
from hicache.tier import (
    NVME,
    LayerRead,
    Outcome,
    PageIdentity,
    PageRead,
    PageWrite,
    RecoveredRun,
    Slots,
    Ticket,
    TierId,
)
from hicache.tiers.codecs.registry import NONE, check_name
from hicache.tiers.nvme.budget import SpaceFloor, WriteBudget, check_budget
from hicache.tiers.nvme.commits import COMMIT_INTERVAL_S, Commits
from hicache.tiers.nvme.directory import Room, open_directory
from hicache.tiers.nvme.filling import StoreDirectory, close_directory
from hicache.tiers.nvme.findings import OUTCOMES, Counters, Finding, Operation
from hicache.tiers.nvme.geometry import Geometry, PageShape
from hicache.tiers.nvme.health import Health
from hicache.tiers.nvme.index import Index
from hicache.tiers.nvme.io import FileIO, Scratch, num_cores
from hicache.tiers.nvme.lanes import Lanes
from hicache.tiers.nvme.namespaces import Namespaces
from hicache.tiers.nvme.records import Rows, namespace_room
from hicache.tiers.nvme.recovery import Progress, Recovery, nothing_recovered
from hicache.tiers.nvme.requests import Requests
from hicache.tiers.nvme.runs import (
    Batch,
    Keeper,
    LayerRun,
    LayerTicket,
    Look,
    Probe,
    ReadRun,
    WriteRun,
    cut_runs,
)
from hicache.tiers.nvme.segment import LayerGet, SegmentFile
from hicache.tiers.slots import SlotPool

READ_LANES: Final = 12
"""Reads that the device works on at one time. What came in is checked by other threads while more is to be read."""
WRITE_LANES: Final = 16
LAYER_LANES: Final = 8
"""Layers that attention waits for do not queue behind pages that are promoted."""
MAX_RUN_BYTES: Final = 2 << 20
"""Longest I/O that neighbouring slots are joined to."""
MIN_RUN_BYTES: Final = 1 << 20
"""Neighbouring slots are not cut into shorter I/Os so that more threads have one: handing over costs more."""
MAX_RUN_PAGES: Final = 64
"""Most pages in one I/O."""
HUNG_AFTER_S: Final = 10.0
"""A device that has not answered a call for so long counts as down."""
CLOSE_TIMEOUT_S: Final = 10.0
"""How long `close` waits for a device that does not answer."""
MAX_LANES: Final = 64
RESERVE_BYTES: Final = 256 << 20
"""Slots kept back beyond the capacity, so that a full tier writes into those whose free has become durable while others
were written: as long as two commits take at several GB/s."""
RESERVE_SHARE: Final = 1 / 32
"""At most so much of the slots is kept back."""
MIN_SLOTS_FOR_RESERVE: Final = 256
"""A store with fewer slots keeps none back: it would be a page or two."""

_log = logging.getLogger(__name__)


class NvmeTier:
    """A tier on one directory of a file system, made for NVMe. Open with `NvmeTier.open`.

    While the device is down (`down`), `allocate` raises `TierUnavailable`; reads are still tried.
    """

    def __init__(
        self,
        *,
        tier_id: TierId,
        directory: StoreDirectory,
        files: FileIO,
        clock: Clock,
        health: Health,
        read_lanes: int,
        write_lanes: int,
        layer_lanes: int,
        commit_interval_s: float,
        min_free_bytes: int,
        write_bytes_per_day: int | None,
        recovery: Recovery,
    ) -> None:
        recovered = directory.recovered
        self.recovery = recovery
        """What came back when the store was opened."""
        self._tier_id = tier_id
        self._geometry = directory.geometry
        self._shape = directory.geometry.shape
        self._directory = directory
        self._logs = tuple(directory.logs)
        self._files = files
        self._clock = clock
        self._health = health
        self._max_run = min(MAX_RUN_PAGES, max(1, MAX_RUN_BYTES // self._shape.slot_bytes))
        self._runs_recovered: list[RecoveredRun] = recovered.runs
        self._unconnected = recovered.rows, recovered.namespaces
        if not recovered.is_unconnected:
            self._unconnected = recovered.rows[:0], {}
        # What was freed last is given last: its record has to be durable before it is written (`commits`).
        self._pool = SlotPool.restored(
            tier_id, recovered.generations, recovered.rows["slot"].astype(np.int32), reuse_late=True
        )
        self._index = Index(self._shape, self._geometry.num_slots)
        self._index.restore(recovered.rows, recovered.digests)
        self._namespaces = Namespaces(tier_id, namespace_room(self._geometry))
        for number, (digest, record) in recovered.namespaces.items():
            self._namespaces.adopt(number, digest, record)
        self._reserve = _reserve(self._geometry)
        self.requests = Requests(self._shape, self._pool)
        """The checks of `write`, `read` and `start_layer_reads` alone."""
        self._counters = Counters()
        self._reads = self._lanes("nvme-read", read_lanes)
        self._writes = self._lanes("nvme-write", write_lanes)
        self._layers = self._lanes("nvme-layer", layer_lanes)
        self._commit_lane = self._lanes("nvme-commit", 1)
        self._commits = Commits(
            tier_id=tier_id,
            directory=directory,
            files=files,
            clock=clock,
            health=health,
            index=self._index,
            pool=self._pool,
            namespaces=self._namespaces,
            lanes=self._commit_lane,
            interval_s=commit_interval_s,
        )
        self._keeper = Keeper(self._pool, self._index, self._commits, self._namespaces)
        self._budget = None
        if write_bytes_per_day is not None:
            level = recovered.budget if recovery.clean_stop else 0
            self._budget = WriteBudget(write_bytes_per_day, self._shape.slot_bytes, clock, level)
            self._commits.budget_level = self._budget.level_bytes
        self._floor = SpaceFloor(min_free_bytes, clock, lambda: _free_bytes(files, directory.path))
        self._num_refused = {"budget": 0, "floor": 0}
        self._closed = False
        self._released = False
        self._batches: Final[set[Batch]] = set()
        """Calls of `read` and `write` under way."""
        self._is_given_up = False
        self._closing: asyncio.Timeout | None = None
        self._ending = asyncio.Lock()

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        layout: KVLayout | PageShape,
        capacity_bytes: int,
        segment_bytes: int | None = None,
        codec: str = NONE,
        codec_ratio: float | None = None,
        min_free_bytes: int = 0,
        write_bytes_per_day: int | None = None,
        tier_id: TierId = NVME,
        clock: Clock | None = None,
        files: FileIO | None = None,
        health: Callable[[str, Clock], Health] = Health,
        progress: Progress = lambda _done, _total: None,
        read_lanes: int = READ_LANES,
        write_lanes: int = WRITE_LANES,
        layer_lanes: int = LAYER_LANES,
        commit_interval_s: float = COMMIT_INTERVAL_S,
        is_whole: bool = True,
        before_filling: Callable[[Room], None] = lambda _room: None,
    ) -> Self:
        """Open the store in a directory, or make one: its segments and logs, all of them, preallocated. Blocks for
        milliseconds, and for what recovery takes (`recovery`); needs no running loop.

        Args:
            directory: made with mode 0700 if missing; must be this user's own and writable by nobody else. Files in it
                that are not the store's are left alone. Used by one instance at a time.
            layout: what a page looks like; of a `KVLayout` all parts together. A store that holds pages of a namespace
                with another `KVLayout` is refused, also where those are as long.
            capacity_bytes: at most so much goes into segment files, `overhead_bytes` beside them. Another capacity than
                before makes the store grow, or shrink: pages that lie beyond it are dropped.
            segment_bytes: at most so much in one file; by default 1/64 of the capacity, at least 256 MiB. A store
                that is there keeps the size that its segments have.
            codec: how pages are encoded: "none"; "exponent-zstd" (lossless, of 16-bit floats); "lz4" (lossless); "int8"
                (lossy: only pages of namespaces whose `codec` is "int8" are taken). Needs a `KVLayout`. A store that is
                there keeps the codec that it has: another one is refused like another layout.
            codec_ratio: by how much a lossless codec is expected to shrink pages, 1 to 16. Slots are planned so much
                smaller, and a page that does not fit is not stored. By default a tenth less than real KV shrinks by.
            min_free_bytes: no new pages are taken while the file system has less space left for others.
            write_bytes_per_day: no 24 hours see more written; at least two pages. Up to an hour's share, or one page if
                that is more, is saved up for one request. None: no bound.
            progress: told how much of the recovery is done, of how much in all.
            files, clock, health: the seams to the system, to time, and to what counts as down.
            read_lanes, write_lanes, layer_lanes: threads, 1 to 64 each.
            commit_interval_s: longest time from a change to the commit that makes it durable, above 0.
            is_whole: False for a store that holds only some pages of each path: they are not linked, nothing is
                `recovered`, and who put the stores together asks for `unconnected`.
            before_filling: called when everything has been checked and nothing created or altered. What it raises is
                raised, and nothing has been.

        Raises `BadRequest` naming the argument and its bound (a capacity below one page, below one segment, or beyond
        the free space), and `TierUnavailable` with one line naming the directory when it cannot be used: in use, not
        ours, of an unknown format version or another layout, read-only. Nothing has been created or altered then.
        """
        for name, lanes in (("read_lanes", read_lanes), ("write_lanes", write_lanes), ("layer_lanes", layer_lanes)):
            if not 1 <= lanes <= MAX_LANES:
                raise BadRequest(name, f"{lanes} is not within 1 to {MAX_LANES}")
        if not 0 < commit_interval_s < math.inf:
            raise BadRequest("commit_interval_s", f"{commit_interval_s} is not a finite number above 0")
        if min_free_bytes < 0:
            raise BadRequest("min_free_bytes", f"{min_free_bytes} is negative")
        shape = _shape_of(layout, codec, codec_ratio)
        if write_bytes_per_day is not None:
            check_budget(write_bytes_per_day, shape.slot_bytes)
        clock = clock or SystemClock()
        files = files or FileIO()
        state = health(tier_id, clock)
        begun = clock.monotonic()
        opened = open_directory(
            os.fspath(directory),
            tier=tier_id,
            shape=shape,
            capacity_bytes=capacity_bytes,
            segment_bytes=segment_bytes,
            files=files,
            health=state,
            progress=progress,
            is_whole=is_whole,
            layout=layout if isinstance(layout, KVLayout) else None,
            before_filling=before_filling,
        )
        try:
            recovery = opened.recovered.summary(clock.monotonic() - begun)
            tier = cls(
                tier_id=tier_id,
                directory=opened,
                files=files,
                clock=clock,
                health=state,
                read_lanes=read_lanes,
                write_lanes=write_lanes,
                layer_lanes=layer_lanes,
                commit_interval_s=commit_interval_s,
                min_free_bytes=min_free_bytes,
                write_bytes_per_day=write_bytes_per_day,
                recovery=recovery,
            )
            # What a killed process appended last may be in the page cache alone, even after a sync that failed: it
            # counts as durable only once it is in a log that this process has synced.
            if opened.is_resized or opened.recovered.is_contested or not recovery.clean_stop:
                tier._commits.write_log_now()
            elif opened.recovered.log is None:
                # So pages without a log are damage. A device that fails is asked again with the first commit.
                with contextlib.suppress(OSError):
                    tier._commits.write_log_now()
            tier._floor.look()
            opened.recovered = nothing_recovered(opened.geometry)
        except BaseException as error:
            close_directory(files, opened)
            if isinstance(error, OSError):
                raise TierUnavailable(tier_id, f"{os.fspath(directory)}: {error.strerror or error}") from error
            raise
        for sentence in recovery.damage:
            _log.warning("%s: %s", opened.path, sentence)
        return tier

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
        """Slots that can be handed out. Stays as it is while the device is down: pages are still read, and none has to
        leave for it."""
        return self.num_free + self._pool.capacity - self._pool.num_free

    @property
    def path(self) -> str:
        """The directory."""
        return self._directory.path

    @property
    def num_slots(self) -> int:
        """Slots in all, from 0: those of the reserve too."""
        return self._pool.capacity

    @property
    def num_free(self) -> int:
        """Slots that `allocate` can give now: those that are not handed out, but for a reserve."""
        return max(0, self._pool.num_free - self._reserve)

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
        if (reason := self._health.down or self._commits.problem or self._floor.problem) is not None:
            return reason
        since = [busy for lanes in self._all_lanes() if (busy := lanes.busy_since()) is not None]
        if since and (age := self._clock.monotonic() - min(since)) > HUNG_AFTER_S:
            return f"the device has not answered for {age:.0f} s"
        return None

    def counters(self) -> dict[str, int]:
        """What became of pages and layers since the tier was opened: `read.ok`, `read.bad_payload`...; `read.bytes` and
        `read_layer.bytes` that callers were given; `write.device_bytes` that the device was (pages as they are stored,
        headers included), and `commit.log_bytes` for the logs; `commit.rounds`, `commit.logs`, `commit.lost` (pages
        that failed flushes took); `refused.budget` and `refused.floor`; `recovered.pages` and
        `recovered.dropped.<reason>`; `slots.taken`, those of recovered pages included, and `slots.freed`."""
        commits, recovery = self._commits, self.recovery
        counts = {
            "commit.rounds": commits.num_rounds,
            "commit.logs": commits.num_checkpoints,
            "commit.lost": commits.num_lost,
            "commit.log_bytes": sum(log.written_bytes for log in self._logs),
            "refused.budget": self._num_refused["budget"],
            "refused.floor": self._num_refused["floor"],
            "recovered.pages": recovery.num_pages,
            **self._pool.counters(),
            **{f"recovered.dropped.{reason}": count for reason, count in recovery.dropped.items()},
        }
        return self._counters.snapshot() | {name: count for name, count in counts.items() if count}

    # ---- durability

    @property
    def accepted(self) -> int:
        """Number of the last write of a page or free of a slot that was accepted. Goes on over restarts from what was
        durable; 0 in a new store."""
        return self._commits.accepted

    @property
    def durable(self) -> int:
        """Every change up to this number is durable, but for those of which `sync` says that a flush lost them. Never
        falls."""
        return self._commits.durable

    async def sync(self, number: int, *, deadline: float, is_frees_only: bool = False) -> None:
        """Wait until `durable` has reached `number`, at most until `deadline` (monotonic seconds of the clock). Has a
        commit begin at once. With `is_frees_only` pages that a flush has lost are no reason to fail: every free up to
        `number` is durable then, and every page accepted until then that `check` still finds.

        Raises `DeadlineExceeded`; `TierUnavailable` when a flush failed that `number` waited for: pages accepted
        until then may be lost, and are then in the tier no more; and `BadRequest` for a number that was not accepted.
        """
        await self._commits.sync(number, deadline, is_frees_only=is_frees_only)

    def remember(self, digest: bytes, record: bytes) -> None:
        """Keep a namespace's record with its pages, without which they do not come back. Never waits.

        To be called before the first page of that namespace is written, and again before one is written after its
        last page left: a namespace without pages is forgotten when others need its room. Raises `BadRequest` for a
        digest or record of a wrong length, `NoRoom` when the records of namespaces with pages take all the room.
        """
        if not self._namespaces.remember(digest, record):
            self._namespaces.remember(digest, record, frozenset(self._index.namespaces_in_use()))

    def recovered(self) -> Sequence[RecoveredRun]:
        """What was durable when the tier was opened, parents before children, prefix-closed; their slots are handed
        out. Once: later calls return nothing."""
        runs, self._runs_recovered = self._runs_recovered, []
        return runs

    def unconnected(self) -> tuple[Rows, dict[int, tuple[bytes, bytes]]]:
        """What a store that is not whole had durable when it was opened, for `recovery.connect`: pages (their slots are
        handed out), and digest and record of each namespace by number. Once: later calls return nothing."""
        found = self._unconnected
        self._unconnected = found[0][:0], {}
        return found

    # ---- slots

    def allocate(self, num_pages: int) -> Slots:
        """Take slots, neighbours where possible; all or none. Never waits.

        Raises `NoRoom` when fewer are free; `TierUnavailable` when the tier is closed, the device down (and then has
        it probed if that is due, so that asking again later may work), space short, or the write budget used up.
        """
        if self._closed:
            raise TierUnavailable(self._tier_id, "closed")
        self.probe()
        if (reason := self.down) is not None:
            self._num_refused["floor"] += reason == self._floor.problem
            raise TierUnavailable(self._tier_id, reason)
        if num_pages > self.num_free:
            raise NoRoom(self._tier_id, pages_asked=num_pages, pages_free=self.num_free)
        if self._budget is None:
            return self._pool.allocate(num_pages)
        if num_pages and not self._budget.take(num_pages * self._shape.slot_bytes):
            self._num_refused["budget"] += 1
            raise TierUnavailable(self._tier_id, self._budget.refusal(num_pages * self._shape.slot_bytes))
        self._commits.budget_level = self._budget.level_bytes
        return self._pool.allocate(num_pages)

    def probe(self) -> None:
        """Have a device that is down tried, and the free space looked at, where that is due. Never waits."""
        if self._closed:
            return
        if self._floor.min_free_bytes and self._floor.claim_look():
            self._commit_lane.submit_anywhere(Look(self._floor))
        if self._health.claim_probe():
            self._writes.submit_anywhere(Probe(self._directory.segments[0], self._health))

    def free(self, slots: Slots) -> None:
        """Give slots back and bump their generations. `AssertionError`, and nothing freed, for a slot that is not
        handed out or is named twice."""
        self._pool.free(slots)
        self._index.forget(slots)
        self._commits.freed(slots.tolist())

    def generation(self, slot: int) -> int:
        """How often the slot has been freed, from 0. Raises `BadRequest` for a slot that does not exist."""
        return self._pool.generation(slot)

    def check(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        """What a `read` would say now as far as memory knows, without reading: `OK`, `STALE` or `NOT_FOUND`. Raises
        `BadRequest` for a slot that does not exist."""
        problem = self._problem(slot, generation, identity)
        return Outcome.OK if problem is None else OUTCOMES[problem]

    # ---- pages

    async def write(self, pages: Sequence[PageWrite]) -> list[Outcome]:
        """Copy pages into their slots; one outcome each, in order: `OK`, `STALE`, `ERROR`, or, where pages are encoded,
        `CORRUPT` for one that is not what its checksums were taken of (counted; nothing of that page is served
        afterwards). Waits for the device, and for earlier writes into the same slots.

        Raises `BadRequest`, before anything is touched, for a slot that does not exist or is named twice, a buffer
        that is not one contiguous page, and an identity of the wrong lengths. Cancelled, it waits for the copies all
        the same.
        """
        checked = list(zip(pages, self.requests.check_write(pages), strict=True))
        problem = await self._keeper.wait_for_turn(pages)
        batch = Batch(self._counters, Operation.WRITE, len(pages))
        puts: list[tuple[int, PageWrite, memoryview]] = []
        for place, (page, data) in enumerate(checked):
            if self._closed:
                batch.found(place, Finding.CLOSED)
            elif not self._keeper.is_current(page.slot, page.generation):
                batch.found(place, Finding.FREED)
            elif not self._keeper.takes(page.identity):
                batch.found(place, Finding.LOSSY_REFUSED)
            elif problem is not None and not self._commits.is_reusable(page.slot):
                batch.found(place, Finding.DEVICE_ERROR)
            else:
                puts.append((place, page, data))
                self._keeper.begin(page.slot)
        for ordinal, first, run in self._cut([page.slot for _, page, _ in puts], self._writes):
            segment = self._directory.segments[ordinal]
            batch.expect(WriteRun(self._keeper, batch, ordinal, segment, first, puts[run]), self._writes)
        return await self._outcomes(batch)

    async def read(self, pages: Sequence[PageRead]) -> list[Outcome]:
        """Copy pages out of their slots, verified; one outcome each, in order. Waits for the device.

        `findings.OUTCOMES` says which finding is which outcome. Raises `BadRequest` as `write` does (a slot may be
        named twice, a buffer must be writable). Cancelled, it waits for the copies all the same.
        """
        batch = Batch(self._counters, Operation.READ, len(pages))
        checked = list(zip(pages, self.requests.check_read(pages), strict=True))
        gets: list[tuple[int, PageRead, memoryview]] = []
        for place, (page, into) in enumerate(checked):
            if (problem := self._problem(page.slot, page.generation, page.identity)) is not None:
                batch.found(place, problem)
            else:
                gets.append((place, page, into))
        for ordinal, first, run in self._cut([page.slot for _, page, _ in gets], self._reads):
            segment = self._directory.segments[ordinal]
            batch.expect(ReadRun(self._keeper, batch, segment, first, gets[run]), self._reads)
        return await self._outcomes(batch)

    async def _outcomes(self, batch: Batch) -> list[Outcome]:
        self._batches.add(batch)
        try:
            return await batch.outcomes()
        finally:
            self._batches.remove(batch)

    # ---- layers

    def start_layer_reads(self, reads: Sequence[LayerRead]) -> Ticket:
        """Queue reads of single layers and return at once. Callable from any thread, while a lease of the caller keeps
        the pages from being freed.

        A layer is verified by generation, by identity and by its own checksum, all of which the index keeps since the
        page was written; its page's header is not read again. A slot freed meanwhile is `STALE`. Raises `BadRequest`
        for a slot or layer that does not exist, and for a buffer that is not as long as the layer, contiguous and
        writable.
        """
        checked = list(zip(reads, self.requests.check_layer_reads(reads), strict=True))
        ticket = LayerTicket(len(reads), self._counters)
        gets: list[tuple[int, LayerRead, SegmentFile, LayerGet]] = []
        for place, (read, into) in enumerate(checked):
            if (problem := self._problem(read.slot, read.generation, read.identity)) is not None:
                ticket.found(place, problem)
                continue
            ordinal, index = self._geometry.locate(read.slot)
            stored = self._index.stored_layer(read.slot, read.layer)
            get = LayerGet(index, read.layer, stored, into)
            gets.append((place, read, self._directory.segments[ordinal], get))
        share = max(1, -(-len(gets) // self._layers.num_threads))
        for start in range(0, len(gets), share):
            job = LayerRun(self._keeper, ticket, gets[start : start + share])
            if not self._layers.submit_anywhere(job):
                job.end_with(Finding.CLOSED)
        return ticket

    # ---- end

    async def close(self) -> None:
        """Refuse new work, wait for copies under way, make everything durable and note that the store was closed;
        release files, lock and threads. Idempotent.

        Waits at most `CLOSE_TIMEOUT_S` for a device that does not answer; its files then stay open until the process
        ends, because a copy may still be using them.
        """
        self._closed = True
        self._keeper.close()
        timeout_s, self._is_given_up = 0.0 if self._is_given_up else CLOSE_TIMEOUT_S, False
        try:
            async with asyncio.timeout(timeout_s) as self._closing:
                for lanes in (self._reads, self._writes, self._layers):
                    await lanes.stop()
                async with self._ending:
                    await self._commits.end()
                await self._commit_lane.stop()
        except TimeoutError:
            self._commits.give_up()
            _log.warning("%s: the device does not answer; its files stay open", self._directory.path)
            return
        finally:
            self._closing = None
        if not self._released:
            self._released = True
            close_directory(self._files, self._directory)

    def give_up(self) -> None:
        """Wait for the device no more: calls under way answer `ERROR` for what has not been copied, and `close` does
        not wait, be it the next or one under way. Buffers of those calls belong to their copies until the process
        ends."""
        self._closed = True
        self._keeper.close()
        self._commits.give_up()
        for batch in self._batches:
            batch.give_up()
        if self._closing is None:
            self._is_given_up = True
        elif not self._closing.expired():
            self._closing.reschedule(0.0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def abandon(self) -> None:
        """Give up files and lock of a tier that was opened and never used."""
        self._closed = self._released = True
        self._commits.give_up()
        close_directory(self._files, self._directory)

    # ---- parts of the above

    def _lanes(self, name: str, num_threads: int) -> Lanes:
        # Reads alone leave something: what is written is checked before it goes out. Half of the cores for that leave
        # the rest to whoever starts transfers.
        return Lanes(
            name,
            num_threads=num_threads,
            num_finishers=max(1, num_cores() // 2) if name == "nvme-read" else 0,
            scratch=lambda: Scratch(self._shape, self._max_run),
            clock=self._clock,
        )

    def _all_lanes(self) -> tuple[Lanes, ...]:
        return self._reads, self._writes, self._layers, self._commit_lane

    def _cut(self, slots: Sequence[int], lanes: Lanes) -> Iterator[tuple[int, int, slice]]:
        """Runs for every thread, of `MIN_RUN_BYTES` to `MAX_RUN_BYTES`; what is less than that in all, is wanted soon
        and spread out."""
        num_bytes = len(slots) * self._shape.slot_bytes
        most_runs = num_bytes // MIN_RUN_BYTES or len(slots)
        num_runs = max(-(-len(slots) // self._max_run), min(lanes.num_threads, most_runs), 1)
        return cut_runs(slots, self._geometry, -(-len(slots) // num_runs))

    def _problem(self, slot: int, generation: int, identity: PageIdentity) -> Finding | None:
        """Why memory alone already says that the slot does not hold the page; None if it does."""
        if self._closed:
            return Finding.CLOSED
        if self._pool.generation(slot) != generation:
            return Finding.FREED
        if not self._index.holds(slot, generation):
            return Finding.EMPTY
        return None if self._index.is_page(slot, identity) else Finding.OTHER_PAGE


def _free_bytes(files: FileIO, path: str) -> int:
    """Bytes that the file system has left for this user."""
    space = files.statvfs(path)
    return space.f_bavail * space.f_frsize


def _shape_of(layout: KVLayout | PageShape, codec: str, codec_ratio: float | None) -> PageShape:
    if isinstance(layout, KVLayout):
        return PageShape.of(layout, codec=codec, codec_ratio=codec_ratio)
    check_name(codec)
    if codec != NONE or codec_ratio is not None:
        raise BadRequest("layout", "a codec needs a KVLayout, which says what the elements of a page are")
    return layout


def _reserve(geometry: Geometry) -> int:
    """Slots that are kept back."""
    if geometry.num_slots < MIN_SLOTS_FOR_RESERVE:
        return 0
    return min(RESERVE_BYTES // geometry.shape.slot_bytes, int(geometry.num_slots * RESERVE_SHARE))
