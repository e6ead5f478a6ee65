"""Movers: what copies pages from one tier to another. A `Lane` is one direction between two tiers.

A lane decides nothing about what to move. It takes transfers, orders them by priority and then by arrival, and carries
them out in batches of neighbouring slots; one end of every lane is the host tier, whose slots are memory. Invariants:

1. Every page that was submitted ends exactly once, in the transfer it came with: with an `Outcome`, or with None if it
   was never copied. A transfer ends once, when its last page has; its `on_done` is called once, at that moment.
2. At most `max_queued_pages` pages of one priority wait. A larger transfer is taken when it is the only one of its
   priority. Submitters wait in order of arrival, so nothing is dropped and nobody is overtaken by an equal.
3. At most `max_in_flight_bytes` are being copied at any moment.
4. A copy that has begun is waited for, whatever happens: its buffers and slots belong to it until the tier returned.
   Neither cancelling a transfer, nor closing the lane, nor cancelling `run` cancels a coroutine of a tier.
5. A slot that was freed since the move was decided is neither read from nor written to: its page ends as `STALE`. If
   it is freed during the copy, which owners do not do, the page ends as `STALE` too.

Everything in here belongs to one event loop. The lane's workers are children of `run`; nothing else starts a task.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

from hicache.clock import Clock
from hicache.errors import BadRequest
from hicache.tier import Outcome, PageIdentity, PageRead, PageWrite, SupportsDeclare, SupportsView, Tier

_log = logging.getLogger(__name__)


class Priority(IntEnum):
    """What goes first. Equals go in order of arrival."""

    DEMAND = 0
    """A request waits for it."""
    PREFETCH = 1
    """A request is expected to want it."""
    WRITE_BACK = 2
    """Nobody waits for it."""


@dataclass(frozen=True, slots=True)
class PageMove:
    """One page to copy, with the generations that its two slots had when that was decided."""

    source_slot: int
    source_generation: int
    target_slot: int
    target_generation: int
    identity: PageIdentity


@dataclass(frozen=True, slots=True)
class TransferResult:
    """How a transfer ended."""

    outcomes: tuple[Outcome | None, ...]
    """One a page, in order. None: never copied, because the transfer was cancelled, its deadline passed before the copy
    began, or the lane was closed."""
    seconds: float
    """From `submit` to the end, waiting included."""
    unwanted: bool
    """Somebody cancelled the transfer before it ended. Pages that are `OK` nevertheless are there."""

    @property
    def ok(self) -> tuple[bool, ...]:
        """Which pages are whole in the target, in order."""
        return tuple(outcome is Outcome.OK for outcome in self.outcomes)


class Transfer:
    """Pages on their way through a lane. Made by `Lane.submit`.

    Its result may be had in three ways: `wait` for it, look at `result`, or be called back (`on_done`). Whoever changes
    state by the result is called back: a task that is cancelled while it waits learns nothing, and the copy went on.
    """

    def __init__(
        self,
        lane: "Lane",
        pages: Iterable[PageMove],
        priority: Priority,
        deadline: float | None,
        on_done: "Callable[[Transfer], None] | None",
    ) -> None:
        self.pages: Final = tuple(pages)
        self.priority: Final = priority
        self.deadline: Final = deadline
        """Monotonic seconds. Pages whose copy has not begun by then are not copied."""
        self.result: TransferResult | None = None
        """None until the transfer has ended."""
        self._lane = lane
        self._on_done = on_done
        self._submitted = lane.clock.monotonic()
        self._outcomes: list[Outcome | None] = [None] * len(self.pages)
        # Pages [0, _next) have begun, `_under_way` of them have not ended; [_next, len) wait.
        self._next = 0
        self._under_way = 0
        self._unwanted = False
        self._timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> TransferResult:
        """Wait until the transfer has ended, for as long as that takes.

        Raises nothing for what a device does. Cancelling the waiting task does not cancel the transfer.
        """
        await self._ended.wait()
        assert self.result is not None
        return self.result

    def cancel(self) -> bool:
        """Give the transfer up. True: no copy had begun, and it has now ended with None for every page. False: it had
        ended before, or copies had begun; pages not yet begun are left out, and the end is reported as always, with
        `unwanted` set, as soon as no copy is under way."""
        if self.result is not None:
            return False
        self._unwanted = True
        never_started = self._next == 0
        self._lane._withdraw(self)
        return never_started


@dataclass(frozen=True, slots=True)
class LaneStats:
    """What a lane has done and is doing. Pages are conserved: `submitted` is the sum of `pages`, `failed`, `cancelled`,
    `queued_pages` and `in_flight_pages`."""

    submitted: int
    """Pages taken by `submit` and `try_submit`."""
    pages: int
    """Pages copied."""
    bytes: int
    """Bytes of these."""
    failed: int
    """Pages that ended with another outcome than `OK`."""
    cancelled: int
    """Pages never copied: cancelled, late, or left over when the lane closed."""
    unexpected: int
    """Exceptions that nobody may raise here: from a tier, or from an owner's `on_done`."""
    queued_pages: int
    in_flight_pages: int
    in_flight_bytes: int
    busy_s: float
    """Seconds in which at least one copy was under way."""
    bandwidth: float | None
    """Bytes a second that the lane attains under load, a running estimate; None until something was measured."""
    latency_s: float | None
    """Seconds that a batch costs beside its bytes, a running estimate; None until something was measured."""


class Lane:
    """One direction between two tiers, of which one is the host.

    The owner runs it (`run`) in a TaskGroup of its own and closes it (`close`); it works for as long as `run` does.

    Args:
        source, target: tiers with equal `page_bytes`. One of them gives views of its slots (`SupportsView`); as the
            target it is also told what they hold (`SupportsDeclare`).
        clock: decides deadlines and measures.
        max_queued_pages: pages of one priority that may wait. One priority never fills the queue of another.
        max_in_flight_bytes: bytes being copied at one time, at least one page.
        batch_pages: pages handed to a tier at once. Small batches let a demand start sooner, large ones cost less each.
        num_workers: batches under way at one time.

    Raises `BadRequest` for sizes below their bounds and tiers that do not fit together.
    """

    def __init__(
        self,
        source: Tier,
        target: Tier,
        *,
        clock: Clock,
        max_queued_pages: int = 4096,
        max_in_flight_bytes: int = 64 << 20,
        batch_pages: int = 16,
        num_workers: int = 4,
    ) -> None:
        page_bytes = source.page_bytes
        if target.page_bytes != page_bytes:
            raise BadRequest("target.page_bytes", f"{target.page_bytes} is not the source's {page_bytes}")
        if max_in_flight_bytes < page_bytes:
            raise BadRequest("max_in_flight_bytes", f"{max_in_flight_bytes} is less than one page, {page_bytes} bytes")
        for name, value in (
            ("max_queued_pages", max_queued_pages),
            ("batch_pages", batch_pages),
            ("num_workers", num_workers),
        ):
            if value < 1:
                raise BadRequest(name, f"{value} is below 1")
        self.source: Final = source
        self.target: Final = target
        self.name: Final = f"{source.tier_id}->{target.tier_id}"
        """As in `host->nvme`."""
        self.clock: Final = clock
        self._copier = _copier(source, target)
        self._page_bytes = page_bytes
        self._max_in_flight_pages = max_in_flight_bytes // page_bytes
        self._batch_pages = batch_pages
        self._num_workers = num_workers

        self._lines = {priority: _Line(max_queued_pages) for priority in Priority}
        self._work = asyncio.Event()
        """Set when a worker that found nothing to do should look again."""
        self._running = False
        self._closing = False
        self._ended = asyncio.Event()
        """Set when `run` has ended."""
        self._drain_until = float("inf")
        self._drain_timer: asyncio.TimerHandle | None = None

        self._speed = _Speed()
        self._in_flight_pages = 0
        self._measured_at = 0.0
        """When a copy last ended, or when the lane last became busy, whichever is later."""
        self._exposed = True
        """No copy has ended since the lane became busy: the next one that does shows a whole latency."""
        self._submitted = self._copied = self._failed = self._cancelled = self._unexpected = 0
        self._busy_s = 0.0

    # -- the owner's side ---------------------------------------------------------------------------------------------

    async def submit(
        self,
        pages: Iterable[PageMove],
        *,
        priority: Priority,
        deadline: float | None = None,
        on_done: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """Queue pages to be copied, in this order. Waits while the queue of this priority is full, until `deadline`.

        Args:
            pages: what to copy; source and target slots belong to the transfer until it has ended.
            deadline: monotonic seconds; pages not begun by then are not copied.
            on_done: called with the transfer when it ends, on the loop, once; possibly before `submit` returns. It does
                not wait and does not raise.

        On a closed lane, or with the deadline past, the transfer has ended when it is returned. If the caller is
        cancelled while it waits here, nothing was submitted and `on_done` will not be called.
        """
        transfer = Transfer(self, pages, priority, deadline, on_done)
        line = self._lines[priority]
        num_pages = len(transfer.pages)
        if not self._closing and not line.takes(num_pages):
            turn = _Turn(num_pages, asyncio.get_running_loop().create_future())
            line.turns.append(turn)
            timer = None
            if deadline is not None:
                timer = asyncio.get_running_loop().call_later(self._seconds_until(deadline), turn.end)
            try:
                await turn.ended
            except asyncio.CancelledError:
                line.give_back(turn)
                line.grant()
                raise
            finally:
                if timer is not None:
                    timer.cancel()
            # No `await` between giving the reserved room back and taking it.
            line.give_back(turn)
            self._take_in(transfer, has_room=turn.granted)
        else:
            self._take_in(transfer, has_room=True)
        return transfer

    def try_submit(
        self,
        pages: Iterable[PageMove],
        *,
        priority: Priority,
        deadline: float | None = None,
        on_done: Callable[[Transfer], None] | None = None,
    ) -> Transfer | None:
        """`submit` without waiting: None if the queue has no room now, others wait for it, or the lane is closed."""
        transfer = Transfer(self, pages, priority, deadline, on_done)
        if self._closing or not self._lines[priority].takes(len(transfer.pages)):
            return None
        self._take_in(transfer, has_room=True)
        return transfer

    def estimate_seconds(self, num_pages: int, *, priority: Priority = Priority.DEMAND) -> float:
        """Seconds until `num_pages` more pages would have been copied if they were submitted now, behind what is under
        way and what is queued at this priority or a more urgent one. 0.0 while nothing was measured."""
        ahead = sum(line.num_pages for each, line in self._lines.items() if each <= priority) + self._in_flight_pages
        return self._speed.seconds(ahead + num_pages, self._batch_pages, overlapped=self._num_workers > 1)

    @property
    def stats(self) -> LaneStats:
        """A snapshot of the lane's counters."""
        page_seconds = self._speed.page_s
        busy = self._busy_s
        if self._in_flight_pages:
            busy += self.clock.monotonic() - self._measured_at
        return LaneStats(
            submitted=self._submitted,
            pages=self._copied,
            bytes=self._copied * self._page_bytes,
            failed=self._failed,
            cancelled=self._cancelled,
            unexpected=self._unexpected,
            queued_pages=self._queued_pages,
            in_flight_pages=self._in_flight_pages,
            in_flight_bytes=self._in_flight_pages * self._page_bytes,
            busy_s=busy,
            bandwidth=self._page_bytes / page_seconds if page_seconds else None,
            latency_s=self._speed.latency_s,
        )

    async def run(self) -> None:
        """Carry transfers out until the lane is closed. Once only.

        Cancelling it closes the lane at once: what is queued ends as never copied, copies under way are waited for, and
        then the cancellation goes on its way.
        """
        assert not self._running, f"{self.name}: run was called twice"
        self._running = True
        cancellation: asyncio.CancelledError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                workers = [
                    group.create_task(self._worker(), name=f"{self.name} worker {i}") for i in range(self._num_workers)
                ]
                # The block is not left before the workers have: leaving it by an exception would cancel them, and with
                # them the coroutines of tiers in which they wait.
                while not all(worker.done() for worker in workers):
                    try:
                        await asyncio.wait(workers)
                    except asyncio.CancelledError as error:
                        cancellation = error
                        self._begin_close(drain_until=float("-inf"))
        finally:
            # Something is left only if a worker died of a bug in this file; nobody may wait for it in vain.
            self._begin_close(drain_until=float("-inf"))
            self._ended.set()
        if cancellation is not None:
            raise cancellation

    async def close(self, *, drain_until: float | None) -> None:
        """End the lane in two stages. Idempotent; a later call may bring `drain_until` forward.

        From now on nothing is taken: `try_submit` returns None, and transfers of `submit`, also of those that wait
        there, have ended with None for every page. What is queued is still copied, until `drain_until` (monotonic
        seconds; None: for as long as it takes); what is left then ends as never copied. Waits for that, and for every
        copy under way. A lane that is not running drains nothing.
        """
        self._begin_close(drain_until=float("inf") if drain_until is None else drain_until)
        if self._running:
            await self._ended.wait()

    # -- queue --------------------------------------------------------------------------------------------------------

    @property
    def _queued_pages(self) -> int:
        return sum(line.num_pages for line in self._lines.values())

    def _seconds_until(self, moment: float) -> float:
        return max(0.0, moment - self.clock.monotonic())

    def _take_in(self, transfer: Transfer, *, has_room: bool) -> None:
        """The transfer enters the queue; or ends here, if it comes too late or is empty."""
        self._submitted += len(transfer.pages)
        self._lines[transfer.priority].append(transfer)
        if self._closing or not has_room or not transfer.pages or self._is_late(transfer):
            self._withdraw(transfer)
            return
        if transfer.deadline is not None:
            self._arm(transfer, transfer.deadline)
        self._work.set()

    def _is_late(self, transfer: Transfer) -> bool:
        return transfer.deadline is not None and self.clock.monotonic() >= transfer.deadline

    def _arm(self, transfer: Transfer, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        transfer._timer = loop.call_later(self._seconds_until(deadline), self._expire, transfer, deadline)

    def _expire(self, transfer: Transfer, deadline: float) -> None:
        if self._is_late(transfer):
            self._withdraw(transfer)
        else:  # The lane's clock lags behind the loop's.
            self._arm(transfer, deadline)

    def _withdraw(self, transfer: Transfer) -> None:
        """Pages of the transfer that have not begun never will."""
        line = self._lines[transfer.priority]
        self._cancelled += line.remove(transfer)
        line.grant()
        self._end_if_over(transfer)

    def _end_if_over(self, transfer: Transfer) -> None:
        if transfer._under_way or transfer._next < len(transfer.pages) or transfer.result is not None:
            return
        if transfer._timer is not None:
            transfer._timer.cancel()
        seconds = self.clock.monotonic() - transfer._submitted
        transfer.result = TransferResult(tuple(transfer._outcomes), seconds, transfer._unwanted)
        transfer._ended.set()
        if transfer._on_done is not None:
            try:
                transfer._on_done(transfer)
            except Exception as error:
                self._count_unexpected("an owner's on_done raised", error)

    # -- copying ------------------------------------------------------------------------------------------------------

    async def _worker(self) -> None:
        while True:
            if batch := self._next_batch():
                await self._carry_out(batch)
            elif self._closing and not self._queued_pages:
                return
            else:
                self._work.clear()
                await self._work.wait()

    def _next_batch(self) -> list[tuple[Transfer, int]]:
        """What to copy next, as pages of transfers, under way from here on; empty if nothing may begin now.

        A batch has one priority: joining what is urgent with what is not would make the urgent wait for it.
        """
        room = min(self._batch_pages, self._max_in_flight_pages - self._in_flight_pages)
        batch: list[tuple[Transfer, int]] = []
        for line in self._lines.values():
            while len(batch) < room and line.transfers:
                transfer = line.transfers[0]
                if self._is_late(transfer):
                    self._withdraw(transfer)
                    continue
                begun = line.begin(transfer, room - len(batch))
                if not self._in_flight_pages:
                    self._measured_at = self.clock.monotonic()
                    self._exposed = True
                self._in_flight_pages += len(begun)
                batch += begun
            if batch:
                line.grant()
                break
        return batch

    async def _carry_out(self, batch: list[tuple[Transfer, int]]) -> None:
        # In the order in which they lie in the tier beside the host; memory does not mind.
        batch.sort(key=lambda page: self._copier.place(page[0].pages[page[1]]))
        outcomes = [Outcome.ERROR] * len(batch)
        try:
            outcomes = await self._copier.copy([transfer.pages[index] for transfer, index in batch])
        except (Exception, asyncio.CancelledError) as error:
            # A tier may let the cancellation of some future of its own escape. That is its bug; if this task is being
            # cancelled it is not.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._count_unexpected(f"{self.name}: a copy raised instead of reporting", error)
        finally:
            self._settle(batch, outcomes)

    def _settle(self, batch: Sequence[tuple[Transfer, int]], outcomes: Sequence[Outcome]) -> None:
        """The copies of a batch have ended."""
        now = self.clock.monotonic()
        seconds = now - self._measured_at
        if all(outcome is Outcome.OK for outcome in outcomes):
            self._speed.add(seconds, num_pages=len(batch), batch_pages=self._batch_pages, exposed=self._exposed)
        self._busy_s += seconds
        self._measured_at = now
        self._exposed = False
        self._in_flight_pages -= len(batch)
        for (transfer, index), outcome in zip(batch, outcomes, strict=True):
            transfer._outcomes[index] = outcome
            transfer._under_way -= 1
            if outcome is Outcome.OK:
                self._copied += 1
            else:
                self._failed += 1
        # Only now, when all counters are right, are owners told: what they are called with, they may look at.
        for transfer in dict.fromkeys(transfer for transfer, _ in batch):
            self._end_if_over(transfer)
        self._work.set()

    def _count_unexpected(self, what: str, error: BaseException) -> None:
        self._unexpected += 1
        # With doubling gaps, so that a tier which always raises does not fill the log.
        if self._unexpected & (self._unexpected - 1) == 0:
            _log.error("%s (%d unexpected errors so far)", what, self._unexpected, exc_info=error)

    # -- closing ------------------------------------------------------------------------------------------------------

    def _begin_close(self, *, drain_until: float) -> None:
        self._closing = True
        self._drain_until = min(self._drain_until, drain_until)
        for line in self._lines.values():
            line.end_turns()
        self._drain()
        self._work.set()

    def _drain(self) -> None:
        """Let go of what is queued if the time for it is over, else look again then."""
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None
        if not self._running or self.clock.monotonic() >= self._drain_until:
            for line in self._lines.values():
                while line.transfers:
                    self._withdraw(line.transfers[0])
        elif self._drain_until < float("inf"):
            loop = asyncio.get_running_loop()
            self._drain_timer = loop.call_later(self._seconds_until(self._drain_until), self._drain)


@dataclass(slots=True, eq=False)
class _Turn:
    """A submitter that waits for room."""

    num_pages: int
    ended: asyncio.Future[None]
    """Done when there is room, or when waiting is over: the lane closed, or the deadline passed."""
    granted: bool = False
    """`num_pages` are reserved for it in its line."""

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class _Line:
    """Transfers of one priority with pages that have not begun, first come first served, and who waits to join them."""

    def __init__(self, max_pages: int) -> None:
        self.transfers: deque[Transfer] = deque()
        self.turns: deque[_Turn] = deque()
        self.num_pages = 0
        """Pages of `transfers` that have not begun."""
        self._reserved = 0
        self._max_pages = max_pages

    def _has_room(self, num_pages: int) -> bool:
        load = self.num_pages + self._reserved
        # What is larger than the queue goes in alone; it would otherwise wait for ever.
        return load == 0 or load + num_pages <= self._max_pages

    def takes(self, num_pages: int) -> bool:
        """Whether that many pages may join now, ahead of nobody."""
        return not self.turns and self._has_room(num_pages)

    def grant(self) -> None:
        """Let in who waits, as far as there is room. It is reserved until he has run: he may have been cancelled."""
        while self.turns and self._has_room(self.turns[0].num_pages):
            turn = self.turns.popleft()
            turn.granted = True
            self._reserved += turn.num_pages
            turn.end()

    def give_back(self, turn: _Turn) -> None:
        """The turn is over, granted or not."""
        if turn.granted:
            self._reserved -= turn.num_pages
        elif turn in self.turns:
            self.turns.remove(turn)

    def end_turns(self) -> None:
        """Nobody is let in any more."""
        while self.turns:
            self.turns.popleft().end()

    def append(self, transfer: Transfer) -> None:
        if transfer.pages:
            self.transfers.append(transfer)
            self.num_pages += len(transfer.pages)

    def begin(self, transfer: Transfer, max_pages: int) -> list[tuple[Transfer, int]]:
        """Begin the next pages of the first transfer; it leaves the line with its last."""
        start, stop = transfer._next, min(transfer._next + max_pages, len(transfer.pages))
        transfer._next = stop
        transfer._under_way += stop - start
        self.num_pages -= stop - start
        if stop == len(transfer.pages):
            self.transfers.popleft()
        return [(transfer, index) for index in range(start, stop)]

    def remove(self, transfer: Transfer) -> int:
        """Take out what has not begun of a transfer. Returns how many pages that were."""
        num_pages = len(transfer.pages) - transfer._next
        if num_pages:
            self.transfers.remove(transfer)
            self.num_pages -= num_pages
            transfer._next = len(transfer.pages)
        return num_pages


class _Copier(Protocol):
    """How a batch goes from one end of a lane to the other."""

    def place(self, page: PageMove) -> int:
        """What to sort by, so that neighbours are handed over as neighbours: the slot in the tier beside the host."""
        ...

    async def copy(self, pages: Sequence[PageMove]) -> list[Outcome]:
        """Copy; one outcome each, in order. Raises only what a tier raises against its contract."""
        ...


class _ViewableTier(Tier, SupportsView, Protocol):
    """The host as a source."""


class _FillableTier(Tier, SupportsView, SupportsDeclare, Protocol):
    """The host as a target."""


def _copier(source: Tier, target: Tier) -> _Copier:
    if isinstance(target, SupportsView) and isinstance(target, SupportsDeclare):
        return _IntoHost(source, target)
    if isinstance(source, SupportsView):
        return _OutOfHost(source, target)
    raise BadRequest("source, target", f"neither {source.tier_id} nor {target.tier_id} gives views of its slots")


class _IntoHost:
    """The source reads straight into the host's slots; the host is told afterwards what they hold."""

    def __init__(self, source: Tier, host: _FillableTier) -> None:
        self._source = source
        self._host = host

    def place(self, page: PageMove) -> int:
        return page.source_slot

    async def copy(self, pages: Sequence[PageMove]) -> list[Outcome]:
        host = self._host
        outcomes = [Outcome.STALE] * len(pages)
        # A slot that was freed while the transfer waited may be somebody else's by now.
        live = [i for i, page in enumerate(pages) if host.generation(page.target_slot) == page.target_generation]
        reads = [
            PageRead(page.source_slot, page.source_generation, page.identity, into=host.view(page.target_slot))
            for page in (pages[i] for i in live)
        ]
        if reads:
            # Paired before anything is declared: a tier that reports too little is believed in nothing.
            for i, outcome in list(zip(live, await self._source.read(reads), strict=True)):
                page = pages[i]
                if outcome is Outcome.OK:
                    outcome = host.declare(page.target_slot, page.target_generation, page.identity)
                outcomes[i] = outcome
        return outcomes


class _OutOfHost:
    """The target takes its data straight from the host's slots."""

    def __init__(self, host: _ViewableTier, target: Tier) -> None:
        self._host = host
        self._target = target

    def place(self, page: PageMove) -> int:
        return page.target_slot

    async def copy(self, pages: Sequence[PageMove]) -> list[Outcome]:
        outcomes = [self._check(page) for page in pages]
        live = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        writes = [
            PageWrite(page.target_slot, page.target_generation, page.identity, data=self._host.view(page.source_slot))
            for page in (pages[i] for i in live)
        ]
        if writes:
            for i, outcome in zip(live, await self._target.write(writes), strict=True):
                # Freed during the copy: what was written may be another page's bytes under this page's name.
                still = self._check(pages[i])
                outcomes[i] = outcome if still is Outcome.OK else still
        return outcomes

    def _check(self, page: PageMove) -> Outcome:
        return self._host.check(page.source_slot, page.source_generation, page.identity)


class _Speed:
    """What a lane's copies cost, learnt from those that ended well.

    Between two ends of copies in a busy lane, `x` batches' worth of pages (0 < x <= 1) take

        seconds = latency * h + full_batch * x          h = 1 if the lane was idle before, else 0

    because a lane with several workers hides all but the first latency. Both unknowns are fitted by least squares over
    samples whose weight decays with each new one. A small ridge decides where samples cannot tell the two apart (full
    batches from an idle lane, nothing else): it splits their time evenly, which is right for full batches.
    """

    _DECAY: Final = 1 - 1 / 32
    _RIDGE: Final = 1e-6

    def __init__(self) -> None:
        self._hh = self._hx = self._xx = self._hy = self._xy = 0.0
        self.latency_s: float | None = None
        """Seconds of a batch beside its bytes; None until something was measured."""
        self.page_s: float | None = None
        """Seconds of one page's bytes; None until something was measured, or if that took no time."""

    def add(self, seconds: float, *, num_pages: int, batch_pages: int, exposed: bool) -> None:
        """A copy of `num_pages` pages ended `seconds` after the one before it, or after the lane became busy."""
        h, x = float(exposed), num_pages / batch_pages
        decay = self._DECAY
        self._hh = decay * self._hh + h * h
        self._hx = decay * self._hx + h * x
        self._xx = decay * self._xx + x * x
        self._hy = decay * self._hy + h * seconds
        self._xy = decay * self._xy + x * seconds
        ridge = self._RIDGE * (self._hh + self._xx)
        hh, xx = self._hh + ridge, self._xx + ridge
        determinant = hh * xx - self._hx * self._hx
        latency = (xx * self._hy - self._hx * self._xy) / determinant
        full_batch = (hh * self._xy - self._hx * self._hy) / determinant
        if latency < 0 or full_batch < 0:
            # Noise may ask for less than nothing of one; then the other explains all there is.
            latency = 0.0 if latency < 0 else self._hy / hh
            full_batch = 0.0 if full_batch < 0 else self._xy / xx
        self.latency_s = latency
        self.page_s = full_batch / batch_pages or None

    def seconds(self, num_pages: int, batch_pages: int, *, overlapped: bool) -> float:
        """What `num_pages` pages take in an idle lane; with `overlapped`, only the first batch shows its latency."""
        num_batches = -(-num_pages // batch_pages)
        exposed = min(num_batches, 1) if overlapped else num_batches
        return exposed * (self.latency_s or 0.0) + num_pages * (self.page_s or 0.0)
