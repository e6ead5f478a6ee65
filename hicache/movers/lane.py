"""A lane, as its owner and those who submit to it see it. The invariants are the package's."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

from hicache.movers.line import Turn
from hicache.movers.speed import LaneSpeed
from hicache.movers.transfer import PageMove, Priority, Transfer
from hicache.movers.working import Working


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


class Lane(Working):
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
