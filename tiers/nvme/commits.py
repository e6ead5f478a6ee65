"""Group commit: what was accepted becomes durable, many changes at a time, in the order in which they were accepted.

A *change* is a slot that got a page or lost one; it has a number. A **round** takes the changes accepted so far and, on
the one thread of its lane,

1. syncs the segments in which pages were written,
2. appends one record of each kind to the log, in one write,
3. syncs the log; only then `durable` rises.

So a record never names bytes that are not on the medium. A round begins at the latest `COMMIT_INTERVAL_S` after a
change, or when `MAX_UNSYNCED_BYTES` were written, or when somebody waits; when nothing changes, nothing happens.

A slot that was freed may hold a page again only when the record that it was freed is durable (`is_reusable`). Otherwise
a power cut could leave the new page's bytes on the medium and the old page's record in the log, or the other way round,
with every checksum right (C03; GHSA-m63m-rp87-w4rf is such a case). The slot pool gives slots freed long ago first, so
that this wait is rare.

**A flush that fails loses what it was for.** The kernel may have thrown the bytes away and will report success the next
time. Pages in a segment whose sync failed, also those written meanwhile, are dropped and counted, and `sync` says so
for their numbers. A log whose append or sync failed is abandoned: a fresh one is written from memory.

**A fresh log** is a checkpoint of the whole index in bounded steps, between which rounds go on; they append to both
logs until the fresh one is whole. It is begun with the first commit after an opening, when the journal is half full,
and after a failure. It takes only what is durable already: everything else follows in records behind it.

Only the event loop changes anything here; the thread gets bytes to write.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.clock import Clock
from hicache.errors import BadRequest, DeadlineExceeded, TierUnavailable
from hicache.tiers.nvme.commit_jobs import Closing, Round, Step
from hicache.tiers.nvme.filling import StoreDirectory
from hicache.tiers.nvme.health import Health, Kind
from hicache.tiers.nvme.index import NOTHING, Index
from hicache.tiers.nvme.io import FileIO
from hicache.tiers.nvme.lanes import Lanes
from hicache.tiers.nvme.log import LogFile
from hicache.tiers.nvme.namespaces import Namespaces
from hicache.tiers.nvme.promises import Promises
from hicache.tiers.nvme.records import (
    FREED_DTYPE,
    HEAD_BYTES,
    Record,
    budget_record,
    checkpoint_bytes,
    chunks,
    freed_records,
    journal_room,
    pages_records,
    round_bytes,
    row_dtype,
)
from hicache.tiers.slots import SlotPool

COMMIT_INTERVAL_S: Final = 0.1
"""Longest time from a change to the round that makes it durable, while the device keeps up."""
MAX_UNSYNCED_BYTES: Final = 64 << 20
"""So much written has a round begin at once."""
MAX_UNCOMMITTED_FREE_BYTES: Final = 16 << 20
"""Slots of so many bytes, freed, have a round begin at once: they are wanted again soon. The tier keeps a reserve that
lasts until it has ended."""
RETRY_S: Final = 1.0
"""Until a log that could not be written is tried again."""

_log = logging.getLogger(__name__)
Numbers = npt.NDArray[np.int64]


@dataclass
class _Fresh:
    """A log that is being written."""

    log: LogFile
    chunks: Iterator[tuple[int, int]]
    left_bytes: int
    """What the rest of the checkpoint takes at most."""


class Commits:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        tier_id: str,
        directory: StoreDirectory,
        files: FileIO,
        clock: Clock,
        health: Health,
        index: Index,
        pool: SlotPool,
        namespaces: Namespaces,
        lanes: Lanes,
        interval_s: float,
    ) -> None:
        recovered = directory.recovered
        geometry = directory.geometry
        self.promises = Promises(tier_id, recovered.sequence)
        self.problem: str | None = None
        """Why the log cannot be written at present; None when it can."""
        self._num_failed_rounds = 0
        """Rounds in a row of which the log did not take the records."""
        self._is_retry_due = False
        """Whether the next step is to wait for `RETRY_S`, as the last one failed."""
        self.num_lost = 0
        """Pages that failed flushes took."""
        self.num_rounds = 0
        self.num_checkpoints = 0
        self.budget_level: int | None = recovered.budget
        """Level of the write budget, to be kept in the log; None where there is none."""
        self._tier_id = tier_id
        self._directory = directory
        self._files = files
        self._clock = clock
        self._health = health
        self._index = index
        self._pool = pool
        self._namespaces = namespaces
        self._lanes = lanes
        self._interval_s = interval_s
        self._geometry = geometry
        self._row_bytes = row_dtype(geometry.shape).itemsize
        self._round_bytes = round_bytes(geometry)
        self._journal_room = journal_room(geometry)
        self._is_changed = False
        """Whether the log that counts lacks something since the store was opened: a change, or the mark of a clean
        stop."""
        self._dirty: dict[int, int] = {}
        """Slots with a change that is not in a round yet, and its number, in order."""
        self._in_flight: dict[int, int] = {}
        """Slots in the round under way, and their numbers."""
        self._recorded = np.zeros(geometry.num_slots, np.bool_)
        """Slots that the log may say hold a page."""
        self._committed = np.full(geometry.num_slots, NOTHING, np.int64)
        """Generation of the page in the slot, if that is durable."""
        self._sync_failures = [0] * geometry.num_segments
        self._unsynced_bytes = 0
        self._freed_bytes = 0
        """Of slots that were freed since the last round began."""
        self._active: LogFile | None = None
        self._is_full = False
        """Whether the active log has no room for another round."""
        self._current = recovered.log
        """Which file holds the log that counts; it is not to be written over."""
        self._last_number = recovered.log_number
        self._fresh: _Fresh | None = None
        self._is_busy = False
        self._is_ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_loop: asyncio.AbstractEventLoop | None = None
        slots = recovered.rows["slot"].astype(np.int64)
        self._recorded[slots] = True
        self._committed[slots] = recovered.rows["generation"]
        self._recorded[recovered.dropped_slots] = True
        for slot in recovered.dropped_slots.tolist():
            self.changed(slot)
        self._is_changed = bool(self._dirty)

    @property
    def accepted(self) -> int:
        """The last change that was accepted."""
        return self.promises.accepted

    @property
    def durable(self) -> int:
        """Every change up to here is durable, or lost."""
        return self.promises.durable

    # ---- changes, as the tier tells of them

    def changed(self, slot: int) -> None:
        """A slot got a page, whole in the index, or lost one."""
        self._dirty.pop(slot, None)
        self._dirty[slot] = self.promises.accept()
        self._committed[slot] = NOTHING
        self._is_changed = True

    def freed(self, slots: Sequence[int]) -> None:
        """Slots were freed. Has a round begin, soon or at once."""
        for slot in slots:
            self.changed(slot)
        self._freed_bytes += len(slots) * self._geometry.shape.slot_bytes
        self.schedule()

    def wrote(self, slot: int) -> None:
        """A slot got a page. Has a round begin, soon or at once."""
        self.changed(slot)
        self._unsynced_bytes += self._geometry.shape.slot_bytes
        self.schedule()

    def is_reusable(self, slot: int) -> bool:
        """Whether a page may be written into the slot: the log says, durably, that it holds none."""
        return not self._recorded[slot]

    def clear(self, slot: int) -> int:
        """Have it recorded that the slot holds nothing; the number to wait for."""
        if slot not in self._dirty:
            self.changed(slot)
        return self._dirty[slot]

    def failures(self, ordinal: int) -> int:
        """How often a sync of that segment has failed. A write during which that changed is lost."""
        return self._sync_failures[ordinal]

    # ---- waiting

    async def sync(self, number: int, deadline: float, *, is_frees_only: bool = False) -> None:
        """See `SupportsDurability.sync`."""
        if not 0 <= number <= self.accepted:
            raise BadRequest("number", f"{number} is not within 0 to {self.accepted}, the last that was accepted")
        left = deadline - self._clock.monotonic()
        try:
            async with asyncio.timeout(left):
                await self.reach(number, is_frees_only=is_frees_only)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self._tier_id}: {number} was not durable in time") from error

    async def reach(self, number: int, *, is_frees_only: bool = False) -> None:
        """Wait until everything up to `number` is durable. Raises `TierUnavailable` when it cannot be made so: a flush
        took it, or the log cannot be written at present. That slots were freed is never lost (`is_frees_only`)."""
        if self._is_ended and self.durable < number:
            raise TierUnavailable(self._tier_id, "closed")
        await self.promises.reach(number, self.schedule, is_frees_only=is_frees_only)

    # ---- when what is done

    def schedule(self) -> None:
        """Begin the next step if it is due, else see to it that it will be. Nothing without a running loop."""
        if self._is_busy or self._is_ended or not self._has_work():
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if self._is_retry_due:
            self._set_timer(loop, RETRY_S)
        elif self._is_urgent():
            self._begin_step()
        else:
            self._set_timer(loop, self._interval_s)

    def _set_timer(self, loop: asyncio.AbstractEventLoop, delay_s: float) -> None:
        """Have `_on_timer` called in `delay_s` seconds at the latest."""
        if self._timer is not None:
            if self._timer_loop is loop and self._timer.when() <= loop.time() + delay_s:
                return
            self._timer.cancel()
        self._timer_loop = loop
        self._timer = loop.call_later(delay_s, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        self._is_retry_due = False
        if not self._is_busy and not self._is_ended and self._has_work():
            self._begin_step()

    def _has_work(self) -> bool:
        return bool(self._dirty) or self._fresh is not None

    def _is_urgent(self) -> bool:
        return (
            self.promises.is_awaited
            or self._fresh is not None
            or self._unsynced_bytes >= MAX_UNSYNCED_BYTES
            or self._freed_bytes >= MAX_UNCOMMITTED_FREE_BYTES
        )

    def _begin_step(self) -> None:
        self._stop_timer()
        self._is_busy = True
        self._lanes.submit(self._next_step())

    def _next_step(self) -> Round | Step:
        """A round if there is something to commit and room for it, else the next part of a fresh log."""
        if self._active is None or self._journal_bytes() > self._journal_room // 2:
            self._want_fresh()
        if self._dirty and self._has_room():
            return self._make_round()
        assert self._fresh is not None, "a log without room is followed by a fresh one"
        return self._make_step(self._fresh)

    def _journal_bytes(self) -> int:
        return self._active.position - self._active.journal_at if self._active is not None else 0

    def _has_room(self) -> bool:
        """Whether a round fits into the log, and into the fresh one beside the rest of its checkpoint."""
        if self._active is None:
            return False
        # A round's namespaces are the only part that is not bounded beforehand.
        numbers = self._index.namespace_numbers(self._first_dirty())
        records = self._namespaces.records(numbers)
        needed = self._round_bytes + 4096 + sum(record.num_bytes for record in records.values())
        self._is_full = self._active.room < needed
        if self._is_full:
            self._want_fresh()
            return False
        return self._fresh is None or self._fresh.log.room - self._fresh.left_bytes >= needed

    def _first_dirty(self) -> Numbers:
        """As many of the slots with a change, the earliest first, as a round can take at most."""
        return np.fromiter(islice(self._dirty, self._round_bytes // FREED_DTYPE.itemsize + 1), np.int64)

    # ---- a round

    def _make_round(self) -> Round:
        taken: list[int] = []
        self._freed_bytes = num_bytes = 0
        first = self._first_dirty()
        generations = self._index.generations(first)
        for slot, generation in zip(first.tolist(), generations.tolist()):
            # A frame's head for each page, should every one lie in a segment of its own.
            num_bytes += HEAD_BYTES + 8 + self._row_bytes if generation != NOTHING else FREED_DTYPE.itemsize
            if num_bytes > self._round_bytes and taken:
                break
            taken.append(slot)
        self._in_flight = {slot: self._dirty.pop(slot) for slot in taken}
        through = self._in_flight[taken[-1]]
        slots = np.array(taken, np.int64)
        holds = generations[: slots.size] != NOTHING
        pages, emptied = slots[holds], slots[~holds]
        self._recorded[pages] = True
        self._unsynced_bytes = max(0, self._unsynced_bytes - int(pages.size) * self._geometry.shape.slot_bytes)
        common: list[Record] = []
        if emptied.size:
            common += freed_records(emptied, self._pool.generations(emptied))
        if self.budget_level is not None:
            common.append(budget_record(self.budget_level))
        by_segment: dict[int, list[Record]] = {}
        ordinals = pages // self._geometry.slots_per_segment
        for ordinal in np.unique(ordinals).tolist():
            by_segment[ordinal] = pages_records(self._index.rows(pages[ordinals == ordinal]))
        namespaces = self._namespaces.records(self._index.namespace_numbers(pages).tolist())
        fresh = self._fresh.log if self._fresh is not None and self._fresh.log.position else None
        assert self._active is not None, "a round without a log"
        return Round(
            self._files,
            {ordinal: self._directory.segments[ordinal].fd for ordinal in by_segment},
            self._active,
            fresh,
            through=through,
            pages=pages,
            emptied=emptied,
            common=common,
            namespaces=namespaces,
            by_segment=by_segment,
            landed=self._round_landed,
        )

    def _round_landed(self, round_: Round) -> None:
        self._is_busy = False
        self.num_rounds += 1
        for ordinal, error in round_.failed_segments.items():
            self._lose(ordinal, error)
        in_flight, self._in_flight = self._in_flight, {}
        if round_.log_error is not None:
            # Back in line, in order; what changed again meanwhile has its place already.
            self._dirty = {slot: n for slot, n in in_flight.items() if slot not in self._dirty} | self._dirty
            self._abandon(round_.log_error)
        else:
            self._num_failed_rounds, self.problem = 0, None
            # What changed again meanwhile is for a later round. Pages that were lost are in the index no more.
            pages = self._unchanged(round_.pages)
            self._committed[pages] = self._index.generations(pages)
            self._recorded[self._unchanged(round_.emptied)] = False
            self.promises.keep(round_.through)
        if round_.fresh_error is not None:
            self._drop_fresh(round_.fresh_error)
        self.schedule()

    def _unchanged(self, slots: Numbers) -> Numbers:
        """Those of the slots without a change that is not in a round yet."""
        return np.array([slot for slot in slots.tolist() if slot not in self._dirty], np.int64)

    def _lose(self, ordinal: int, error: OSError) -> None:
        """A sync of that segment failed: drop every page in it that is not durable."""
        self._sync_failures[ordinal] += 1
        self._health.failed(Kind.WRITE, error)
        first, reason = None, f"a flush of segment {ordinal} failed: {error.strerror}"
        for slot, number in (self._in_flight | self._dirty).items():
            if slot // self._geometry.slots_per_segment != ordinal or not self._index.holds_any(slot):
                continue
            self._index.forget(slot)
            self.num_lost += 1
            first = number if first is None else min(first, number)
        if first is not None:
            self.promises.lose(first, reason)
        _log.error("%s: %s; pages that were not durable there are lost", self._directory.path, reason)

    def _abandon(self, error: OSError) -> None:
        """The log could not be appended to or synced: it is written no more, and a fresh one takes its place. At once,
        unless the one before it fared no better."""
        self._health.failed(Kind.WRITE, error)
        _log.error("%s: a log was abandoned: %s", self._directory.path, error.strerror)
        self._active = None
        self._num_failed_rounds += 1
        if self._num_failed_rounds > 1:
            self._fail(f"the log cannot be written: {error.strerror}")

    def _fail(self, reason: str) -> None:
        """Nothing can be made durable for now."""
        self.problem = reason
        self.promises.fail(reason)
        self._is_retry_due = True
        self._stop_timer()

    # ---- a fresh log

    def _want_fresh(self) -> None:
        if self._fresh is not None:
            return
        which = 1 - self._current if self._current is not None else 0
        self._last_number = (self._last_number + 1) % (1 << 64)
        left = checkpoint_bytes(self._geometry)
        self._fresh = _Fresh(self._directory.logs[which], chunks(self._geometry), left)
        self._fresh.log.position = 0

    def _make_step(self, fresh: _Fresh) -> Step:
        if fresh.log.position == 0:
            in_use = self._index.namespaces_in_use()
            self._namespaces.forget_numbers(set(in_use))
            namespaces = self._namespaces.records(in_use)
            beginning = list(namespaces.values())
            if self.budget_level is not None:
                beginning.append(budget_record(self.budget_level))
            return self._step(fresh, beginning, begin=self._last_number, namespaces=frozenset(namespaces))
        for start, stop in fresh.chunks:
            slots = np.arange(start, stop)
            generations = self._pool.generations(slots)
            committed = self._committed[start:stop]
            held = (committed != NOTHING) & (committed == self._index.generations(slots))
            emptied = ~held & (generations > 0)
            records = pages_records(self._index.rows(slots[held])) if held.any() else []
            if emptied.any():
                records += freed_records(slots[emptied], generations[emptied])
            fresh.left_bytes -= sum(record.num_bytes for record in records)
            if records:
                return self._step(fresh, records)
        retired = self._directory.logs[self._current] if self._current is not None else None
        return self._step(fresh, [], is_end=True, retired=retired)

    def _step(
        self,
        fresh: _Fresh,
        records: Sequence[Record],
        *,
        begin: int | None = None,
        namespaces: frozenset[int] = frozenset(),
        is_end: bool = False,
        retired: LogFile | None = None,
    ) -> Step:
        return Step(
            fresh.log,
            records,
            self.durable,
            begin=begin,
            namespaces=namespaces,
            is_end=is_end,
            retired=retired,
            landed=self._step_landed,
        )

    def _step_landed(self, step: Step) -> None:
        self._is_busy = False
        assert self._fresh is not None, "a step of no log"
        if step.error is not None:
            self._drop_fresh(step.error)
        elif step.is_end:
            self._active = self._fresh.log
            self._current = self._directory.logs.index(self._active)
            self._fresh = None
            self._is_full = False
            self._is_changed = True
            if not self._num_failed_rounds:
                self.problem = None
            self.num_checkpoints += 1
        self.schedule()

    def _drop_fresh(self, error: OSError) -> None:
        """A fresh log could not be written. Without one that counts, nothing can be made durable for now."""
        self._health.failed(Kind.WRITE, error)
        self._fresh = None
        reason = f"the log cannot be written: {error.strerror}"
        _log.error("%s: %s", self._directory.path, reason)
        if self._active is None or self._is_full:
            self._fail(reason)

    # ---- the end, and the beginning

    def write_log_now(self) -> None:
        """Write a fresh log on the calling thread, before anything is served. Raises `OSError`.

        For a store that is new, has not been closed, or has changed its size. Of two whole logs, which a crash or a
        failure just before the older was retired leaves behind, the newer is made sure of first: the older is written
        over.
        """
        recovered = self._directory.recovered
        if recovered.is_contested and recovered.log is not None:
            self._directory.logs[recovered.log].write_again(recovered.log_bytes)
        self._is_ended = True
        self._want_fresh()
        while self._fresh is not None:
            step = self._make_step(self._fresh)
            step.run(None)
            if step.error is not None:
                self._fresh, self._is_ended = None, False
                raise step.error
            self._step_landed(step)
        self._is_ended = False

    async def end(self) -> None:
        """Commit what was accepted, and note that the store was closed. No change may come any more. Idempotent."""
        if self._is_ended:
            return
        try:
            if self._is_changed:
                await self.reach(self.accepted, is_frees_only=True)
        except TierUnavailable as error:
            _log.error("%s: closed without making everything durable: %s", self._directory.path, error)
        self._is_ended = True
        self._stop_timer()
        if self._active is not None and self._is_changed and not self._dirty:
            closing = Closing(self._active, self.accepted)
            self._lanes.submit(closing)
            await closing.done()

    def give_up(self) -> None:
        """The device does not answer: whoever waits is told."""
        self._is_ended = True
        self._stop_timer()
        self.promises.fail("closed before everything was durable")
