"""Virtual time for benches: lanes and planner run as they are, over tiers that only take the time that copying would.

A run is deterministic, and a minute of it takes milliseconds: what is measured is what the code decides, not what the
machine does meanwhile.
"""

import asyncio
import selectors
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, TypeVar

from hicache.tier import Outcome, PageIdentity, PageRead, PageWrite, Slots, TierId
from hicache.tiers.slots import SlotPool

T = TypeVar("T")

PAGE_BYTES: Final = 16
"""What a page has in memory here, where nothing else is asked for. How long it takes to copy is its tier's matter."""


class _JumpingSelector(selectors.SelectSelector):
    """Never sleeps: when nothing is ready, time jumps to the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if ready := super().select(0):
            return ready
        assert timeout is not None, "every task waits and no timer is set"
        self.now += timeout
        return []


class VirtualClock:
    """The time of a virtual loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return self._loop.time()


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Callable[[VirtualClock], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end in virtual time, which begins at 0. What a signal's handler raises comes out of here
    after the coroutine was cancelled and has ended, not in the middle of one of its tasks."""
    loop = _VirtualLoop()
    try:
        root = loop.create_task(main(VirtualClock(loop)))
        with _cancelled_by_signals(root):
            return loop.run_until_complete(root)
    finally:
        loop.close()


@contextmanager
def _cancelled_by_signals(root: asyncio.Task[Any]) -> Iterator[None]:
    """Within the block a signal that has a handler cancels a task; the handler is called at the end of the block."""
    if threading.current_thread() is not threading.main_thread():  # only there are handlers set and called
        yield
        return
    arrived: list[int] = []

    def cancel(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)
        root.cancel()

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, cancel)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])  # what its handler raises takes the cancellation's place


class SlotsOnly:
    """What every tier has that keeps no bytes: slots and their generations. Reads and writes are its subclasses'."""

    def __init__(self, tier_id: TierId, *, capacity_pages: int, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._slots = SlotPool(tier_id, capacity_pages)

    @property
    def tier_id(self) -> TierId:
        return self._slots.tier_id

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    @property
    def capacity_pages(self) -> int:
        return self._slots.capacity

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    def allocate(self, num_pages: int) -> Slots:
        return self._slots.allocate(num_pages)

    def free(self, slots: Slots) -> None:
        self._slots.free(slots)

    def generation(self, slot: int) -> int:
        return self._slots.generation(slot)

    async def close(self) -> None:
        """Nothing to wait for."""

    def _outcome(self, slot: int, generation: int) -> Outcome:
        return Outcome.OK if self._slots.generation(slot) == generation else Outcome.STALE


class TimedTier(SlotsOnly):
    """A tier whose calls wait `latency_s`, then pass their pages one after the other through one pipe.

    With several layers it also takes pages layer by layer, each in its part of a page's time.
    """

    def __init__(
        self,
        tier_id: TierId,
        *,
        capacity_pages: int,
        page_s: float,
        latency_s: float = 0.0,
        num_layers: int = 1,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        super().__init__(tier_id, capacity_pages=capacity_pages, page_bytes=page_bytes)
        self.num_layers = num_layers
        self.page_s = page_s
        """Seconds of one page in the pipe; may be changed at any time."""
        self._latency_s = latency_s
        self._pipe_free_at = 0.0

    async def write(self, pages: Sequence[PageWrite]) -> list[Outcome]:
        return await self._pass(len(pages))

    async def read(self, pages: Sequence[PageRead]) -> list[Outcome]:
        return await self._pass(len(pages))

    async def open_layer_writes(self, pages: Sequence[PageWrite]) -> "TimedLayerWrites":
        return TimedLayerWrites(self, len(pages))

    def declare(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        return self._outcome(slot, generation)

    async def _pass(self, num_pages: int) -> list[Outcome]:
        await asyncio.sleep(self._take_pipe(num_pages * self.page_s))
        return [Outcome.OK] * num_pages

    def _take_pipe(self, seconds: float) -> float:
        """Pass the pipe for so many seconds, after the latency and behind everybody before. Returns when that is over,
        in seconds from now."""
        now = asyncio.get_running_loop().time()
        self._pipe_free_at = max(now + self._latency_s, self._pipe_free_at) + seconds
        return self._pipe_free_at - now


class TimedLayerWrites:
    """Pages on their way into a tier layer by layer."""

    def __init__(self, tier: TimedTier, num_pages: int) -> None:
        self._tier = tier
        self._num_pages = num_pages

    def start_layer(self, layer: int) -> asyncio.Future[list[Outcome]]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[list[Outcome]] = loop.create_future()
        seconds = self._tier._take_pipe(self._num_pages * self._tier.page_s / self._tier.num_layers)
        loop.call_later(seconds, ended.set_result, [Outcome.OK] * self._num_pages)
        return ended

    def close(self) -> None:
        """Nothing is held."""


class TimedDevice(TimedTier):
    """A pool that sequences fill in place."""

    async def copy_page(self, source_slot: int, target_slot: int) -> Outcome:
        await asyncio.sleep(self._take_pipe(self.page_s))
        return Outcome.OK


class TimedHost(TimedTier):
    """Memory: one end of every lane, which takes no time of its own."""

    def __init__(self, tier_id: TierId, *, capacity_pages: int, page_bytes: int = PAGE_BYTES) -> None:
        super().__init__(tier_id, capacity_pages=capacity_pages, page_s=0.0, page_bytes=page_bytes)

    def view(self, slot: int) -> memoryview:
        return memoryview(bytearray(self.page_bytes))

    def check(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        return self._outcome(slot, generation)
