"""What a lane has waiting: transfers in lines by priority, who waits to join them, and how a lane closes."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from hicache.clock import Clock
from hicache.errors import BadRequest
from hicache.movers.copier import find_copier, find_layer_copier
from hicache.movers.line import Line
from hicache.movers.speed import Speed
from hicache.movers.transfer import PageMove, Priority, Transfer, TransferResult
from hicache.tier import Tier

_log = logging.getLogger(__name__)


class Queueing:
    """The state of a lane, and what waits in it. The base of `hicache.movers.lane.Lane`, where it is described."""

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

    def _turn(self, transfer: Transfer) -> float:
        """What transfers are ordered by: when it came, later by what it is less urgent."""
        return transfer._submitted_at + transfer.priority * self._age_s

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
