"""A lane: takes transfers, orders them, has them copied, and tells their owners. The invariants are the package's."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product, takewhile
from typing import Final

from hicache.clock import Clock
from hicache.errors import BadRequest
from hicache.movers.copier import find_copier, find_layer_copier
from hicache.movers.line import Line, Turn
from hicache.movers.speed import LaneSpeed, Speed
from hicache.movers.transfer import PageMove, Priority, Transfer, TransferResult
from hicache.tier import LayerWrites, Outcome, PageWrite, Tier

_log = logging.getLogger(__name__)


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
    """Pages never copied, or not whole: cancelled, late, or left over when the lane closed."""
    unexpected: int
    """Exceptions that nobody may raise here: from a tier, or from an owner's `on_done`."""
    queued_pages: int
    in_flight_pages: int
    in_flight_bytes: int
    """Of `in_flight_pages`, what is being copied at this moment: where pages go layer by layer, a part of them."""
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
        num_prefetches: of these, at most so many of what is fetched ahead, for which a demand that comes then waits; a
            quarter by default, and at least one.
        age_s: what a step of priority is worth in seconds of waiting. Among transfers that wait, the one with the least
            `arrival + priority * age_s` goes first: a demand overtakes what is less urgent, but no write-back is
            overtaken by a demand that came more than `2 * age_s` after it, so nothing waits for ever.

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
        num_prefetches: int | None = None,
        age_s: float = 10.0,
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
            ("num_prefetches", 1 if num_prefetches is None else num_prefetches),
        ):
            if value < 1:
                raise BadRequest(name, f"{value} is below 1")
        if not 0 < age_s < float("inf"):
            raise BadRequest("age_s", f"{age_s} is not a time above 0")
        self.source: Final = source
        self.target: Final = target
        self.name: Final = f"{source.tier_id}->{target.tier_id}"
        """As in `host->nvme`."""
        self.clock: Final = clock
        self._copier = find_copier(source, target)
        self._layer_copier = find_layer_copier(source, target)
        self._page_bytes = page_bytes
        self._max_in_flight_pages = max_in_flight_bytes // page_bytes
        self._batch_pages = batch_pages
        self._num_workers = num_workers
        self._num_prefetches = num_prefetches or max(1, num_workers // 4)

        self._age_s = age_s
        self._lines = {priority: Line(max_queued_pages) for priority in Priority}
        self._work = asyncio.Event()
        """Set when a worker that found nothing to do should look again."""
        self._running = False
        self._closing = False
        self._ended = asyncio.Event()
        """Set when `run` has ended."""
        self._drain_until = float("inf")
        self._drain_timer: asyncio.TimerHandle | None = None

        self._speed = Speed()
        self._in_flight_pages = 0
        self._copying_pages = 0
        """As many pages as what is being copied at this moment has bytes, at the most."""
        self._num_batches = dict.fromkeys(Priority, 0)
        """Batches under way, by the priority at which they began."""
        self._by_layer: set[Transfer] = set()
        """Transfers whose layers are being copied."""
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
        by_layer: bool = False,
        on_done: Callable[[Transfer], None] | None = None,
        on_layer: Callable[[Transfer, int], None] | None = None,
    ) -> Transfer:
        """Queue pages to be copied, in this order. Waits while the queue of this priority is full, until `deadline`.

        Args:
            pages: what to copy; source and target slots belong to the transfer until it has ended.
            deadline: monotonic seconds; pages not begun by then are not copied.
            by_layer: copy layer 0 of all pages, then layer 1, and so on, where the target can (`SupportsLayerWrite`),
                else as ever. Such a transfer begins as a whole, is carried out by one worker, a batch's worth of bytes
                at a time, and a page of it is there with its last layer.
            on_done: called with the transfer when it ends, on the loop, once; possibly before `submit` returns. It does
                not wait and does not raise.
            on_layer: called with the transfer and a layer when that layer of all pages is there, in the same manner, in
                order, never after `on_done`; not at all where whole pages are copied.

        On a closed lane, or with the deadline past, the transfer has ended when it is returned. If the caller is
        cancelled while it waits here, nothing was submitted and `on_done` will not be called.
        """
        transfer = self._transfer(pages, priority, deadline, by_layer, on_done, on_layer)
        line = self._lines[priority]
        num_pages = len(transfer.pages)
        if not self._closing and not line.takes(num_pages):
            turn = Turn(num_pages, asyncio.get_running_loop().create_future())
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
        by_layer: bool = False,
        on_done: Callable[[Transfer], None] | None = None,
        on_layer: Callable[[Transfer, int], None] | None = None,
    ) -> Transfer | None:
        """`submit` without waiting: None if the queue has no room now, others wait for it, or the lane is closed."""
        transfer = self._transfer(pages, priority, deadline, by_layer, on_done, on_layer)
        if self._closing or not self._lines[priority].takes(len(transfer.pages)):
            return None
        self._take_in(transfer, has_room=True)
        return transfer

    def estimate_seconds(self, num_pages: int, *, priority: Priority = Priority.DEMAND) -> float:
        """Seconds until `num_pages` more pages would have been copied if they were submitted now, behind what is under
        way and what is queued at this priority or a more urgent one. 0.0 while nothing was measured."""
        num_pages += self._pages_ahead(priority)
        return self._speed.seconds(num_pages, self._batch_pages, overlapped=self._num_workers > 1)

    def speed(self, *, priority: Priority = Priority.DEMAND) -> LaneSpeed:
        """What the lane costs whoever submits now at this priority, in parts, for planning."""
        page_s, latency_s = self._speed.page_s or 0.0, self._speed.latency_s
        return LaneSpeed(
            name=self.name,
            ahead_s=self._pages_ahead(priority) * page_s,
            latency_s=latency_s or 0.0,
            page_s=page_s,
            batch_pages=self._batch_pages,
            is_measured=latency_s is not None,
        )

    def _pages_ahead(self, priority: Priority) -> int:
        """Pages that are copied before those of a transfer submitted now."""
        ahead = self._in_flight_pages
        ahead -= sum(len(each.pages) * each._layers_done // each.num_layers for each in self._by_layer)
        turn = self.clock.monotonic() + priority * self._age_s
        for each, line in self._lines.items():
            if each <= priority:
                ahead += line.num_pages
            else:
                aged = takewhile(lambda transfer: self._turn(transfer) <= turn, line.transfers)
                ahead += sum(len(transfer.pages) - transfer._next for transfer in aged)
        return ahead

    def _turn(self, transfer: Transfer) -> float:
        """What transfers are ordered by: when it came, later by what it is less urgent."""
        return transfer._submitted_at + transfer.priority * self._age_s

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
            in_flight_bytes=self._copying_pages * self._page_bytes,
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

    def _transfer(
        self,
        pages: Iterable[PageMove],
        priority: Priority,
        deadline: float | None,
        by_layer: bool,
        on_done: Callable[[Transfer], None] | None,
        on_layer: Callable[[Transfer, int], None] | None,
    ) -> Transfer:
        return Transfer(
            pages,
            priority=priority,
            deadline=deadline,
            on_done=on_done,
            on_layer=on_layer,
            num_layers=self._layer_copier.num_layers if by_layer and self._layer_copier is not None else 1,
            now=self.clock.monotonic(),
            withdraw=self._withdraw,
            hasten=self._hasten,
        )

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
        transfer._next = len(transfer.pages)
        line.grant()
        self._end_if_over(transfer)

    def _hasten(self, transfer: Transfer, priority: Priority) -> None:
        line = self._lines[transfer.priority]
        waits = line.remove(transfer) > 0
        transfer.priority = priority
        if waits:
            self._lines[priority].insert(transfer)
            line.grant()

    def _end_if_over(self, transfer: Transfer) -> None:
        if transfer._under_way or transfer._next < len(transfer.pages) or transfer.result is not None:
            return
        if transfer._timer is not None:
            transfer._timer.cancel()
        seconds = self.clock.monotonic() - transfer._submitted_at
        transfer.result = TransferResult(tuple(transfer._outcomes), seconds, transfer._unwanted)
        transfer._ended.set()
        transfer._advanced.set()
        if transfer._on_done is not None:
            try:
                transfer._on_done(transfer)
            except Exception as error:
                self._count_unexpected("an owner's on_done raised", error)

    # -- copying ------------------------------------------------------------------------------------------------------

    async def _worker(self) -> None:
        while True:
            priority, batch = self._next_batch()
            if batch:
                self._num_batches[priority] += 1
                try:
                    transfer = batch[0][0]
                    if transfer.num_layers > 1:
                        await self._carry_out_layers(transfer)
                    else:
                        await self._carry_out(batch)
                finally:
                    self._num_batches[priority] -= 1
            elif self._closing and not self._queued_pages:
                return
            else:
                self._work.clear()
                await self._work.wait()

    def _next_batch(self) -> tuple[Priority, list[tuple[Transfer, int]]]:
        """What to copy next, as pages of transfers, under way from here on; empty if nothing may begin now. And at
        which priority it began: it may be hastened meanwhile.

        A batch has one priority: joining what is urgent with what is not would make the urgent wait for it. A transfer
        by layers is a batch of its own.
        """
        room = min(self._batch_pages, self._max_in_flight_pages - self._copying_pages)
        batch: list[tuple[Transfer, int]] = []
        for line in self._lines.values():
            while line.transfers and self._is_late(line.transfers[0]):
                self._withdraw(line.transfers[0])
        waiting = [priority for priority, line in self._lines.items() if line.transfers and self._may_begin(priority)]
        # Each line is in order of arrival, so its first transfer is the one whose turn comes first.
        for priority in sorted(waiting, key=lambda priority: self._turn(self._lines[priority].transfers[0])):
            line = self._lines[priority]
            while len(batch) < room and line.transfers:
                transfer = line.transfers[0]
                if self._is_late(transfer):
                    self._withdraw(transfer)
                    continue
                if batch and (transfer.num_layers > 1 or batch[0][0].num_layers > 1):
                    break
                begun = line.begin(transfer, room - len(batch))
                if not self._in_flight_pages:
                    self._measured_at = self.clock.monotonic()
                    self._exposed = True
                self._in_flight_pages += len(begun)
                # What goes by layers is copied two layers at a time.
                transfer._copying_pages = min(room, len(begun), -(-2 * len(begun) // transfer.num_layers))
                self._copying_pages += transfer._copying_pages
                batch += begun
            if batch:
                line.grant()
                return priority, batch
        return Priority.DEMAND, []

    def _may_begin(self, priority: Priority) -> bool:
        """What is only expected to be wanted takes few of the workers."""
        return priority is not Priority.PREFETCH or self._num_batches[priority] < self._num_prefetches

    async def _carry_out(self, batch: list[tuple[Transfer, int]]) -> None:
        # In the order in which they lie in the tier beside the host; memory does not mind.
        batch.sort(key=lambda page: self._copier.place(page[0].pages[page[1]]))
        outcomes = [Outcome.ERROR] * len(batch)
        try:
            copy = self._copier.copy([transfer.pages[index] for transfer, index in batch])
            outcomes = await self._outcomes_of(copy, len(batch))
        finally:
            self._copying_pages -= len(batch)
            self._learn(len(batch), outcomes)
            self._settle(batch, outcomes)

    async def _carry_out_layers(self, transfer: Transfer) -> None:
        outcomes: list[Outcome | None] = [None] * len(transfer.pages)
        self._by_layer.add(transfer)
        try:
            await self._copy_layers(transfer, outcomes)
        except (Exception, asyncio.CancelledError) as error:
            self._expect_no_cancellation()
            self._count_unexpected(f"{self.name}: a copy raised instead of reporting", error)
            outcomes = [outcome or Outcome.ERROR for outcome in outcomes]
        finally:
            self._by_layer.remove(transfer)
            self._copying_pages -= transfer._copying_pages
            self._settle([(transfer, index) for index in range(len(transfer.pages))], outcomes)

    async def _copy_layers(self, transfer: Transfer, outcomes: list[Outcome | None]) -> None:
        """Copy layer after layer until the transfer is stopped. Outcomes are entered where a page has one.

        The pages go in chunks. Two pieces, each one layer of a chunk, are under way at a time, so that the target need
        not wait for this loop; together they have the bytes that were set aside.
        """
        copier = self._layer_copier
        assert copier is not None
        pages, num_layers = transfer.pages, transfer.num_layers
        live: list[tuple[int, PageWrite]] = []
        for index in sorted(range(len(pages)), key=lambda index: self._copier.place(pages[index])):
            found = copier.begin(pages[index])
            if isinstance(found, Outcome):
                outcomes[index] = found
            else:
                live.append((index, found))
        size = max(1, transfer._copying_pages * num_layers // 2)
        chunks = [live[start : start + size] for start in range(0, len(live), size)]
        is_complete = False
        with ExitStack() as stack:
            writings: list[LayerWrites] = []
            for chunk in chunks:
                writings.append(await copier.open([write for _, write in chunk]))
                stack.callback(writings[-1].close)
            under_way: deque[tuple[int, int, Awaitable[list[Outcome]]]] = deque()

            async def end_one() -> None:
                layer, number, piece = under_way.popleft()
                chunk = chunks[number]
                found = await self._outcomes_of(piece, len(chunk))
                self._learn(len(chunk) / num_layers, found)
                if found.count(Outcome.OK) < len(found):
                    for (index, _), outcome in zip(chunk, found, strict=True):
                        if outcome is not Outcome.OK and outcomes[index] is None:
                            outcomes[index] = outcome
                if number == len(chunks) - 1 and layer < num_layers - 1 and not any(outcomes):
                    self._advance(transfer, layer)

            try:
                for layer, (number, writing) in product(range(num_layers), enumerate(writings)):
                    if transfer._stopped or all(outcomes):
                        break
                    under_way.append((layer, number, writing.start_layer(layer)))
                    if len(under_way) == 2:
                        await end_one()
                else:
                    is_complete = True
            finally:
                while under_way:
                    await end_one()
        for index, _ in live if is_complete else ():
            if outcomes[index] is None:
                outcomes[index] = copier.end(pages[index])
        if all(outcome is Outcome.OK for outcome in outcomes):
            self._advance(transfer, num_layers - 1)

    async def _outcomes_of(self, copy: Awaitable[list[Outcome]], num_pages: int) -> list[Outcome]:
        """What a copy reports; `ERROR` for all of its pages if it raises instead."""
        try:
            outcomes = await copy
            assert len(outcomes) == num_pages, f"{len(outcomes)} outcomes for {num_pages} pages"
            return outcomes
        except (Exception, asyncio.CancelledError) as error:
            self._expect_no_cancellation()
            self._count_unexpected(f"{self.name}: a copy raised instead of reporting", error)
            return [Outcome.ERROR] * num_pages

    def _expect_no_cancellation(self) -> None:
        """Raise the error being handled again if this task is being cancelled. Else it is the tier's bug: it may have
        let the cancellation of some future of its own escape."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # noqa: PLE0704  # called while an error is handled

    def _learn(self, num_pages: float, outcomes: Sequence[Outcome]) -> None:
        """A copy of so many pages has ended."""
        now = self.clock.monotonic()
        seconds = now - self._measured_at
        if all(outcome is Outcome.OK for outcome in outcomes):
            self._speed.add(seconds, num_pages=num_pages, batch_pages=self._batch_pages, exposed=self._exposed)
        self._busy_s += seconds
        self._measured_at = now
        self._exposed = False

    def _advance(self, transfer: Transfer, layer: int) -> None:
        """A layer of all pages of a transfer is there."""
        transfer._layers_done = layer + 1
        transfer._advanced.set()
        transfer._advanced = asyncio.Event()
        if transfer._on_layer is not None:
            try:
                transfer._on_layer(transfer, layer)
            except Exception as error:
                self._count_unexpected("an owner's on_layer raised", error)

    def _settle(self, batch: Sequence[tuple[Transfer, int]], outcomes: Sequence[Outcome | None]) -> None:
        """The copies of a batch have ended."""
        self._in_flight_pages -= len(batch)
        for (transfer, index), outcome in zip(batch, outcomes, strict=True):
            transfer._outcomes[index] = outcome
            transfer._under_way -= 1
            if outcome is Outcome.OK:
                self._copied += 1
            elif outcome is None:
                self._cancelled += 1
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
            for transfer in self._by_layer:
                transfer._stopped = True
        elif self._drain_until < float("inf"):
            loop = asyncio.get_running_loop()
            self._drain_timer = loop.call_later(self._seconds_until(self._drain_until), self._drain)
