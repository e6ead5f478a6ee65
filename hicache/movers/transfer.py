"""What goes through a lane: pages, and how their copying ended."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from hicache.tier import Outcome, PageIdentity


class Priority(IntEnum):
    """What goes first, within reason: see `Lane`, `age_s`. Equals go in order of arrival."""

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
    """One a page, in order. None: never copied, or not with all layers, because the transfer was cancelled, its
    deadline passed before the copy began, or the lane was closed."""
    seconds: float
    """From `submit` to the end, waiting included."""
    unwanted: bool
    """Somebody cancelled the transfer before it ended. Pages that are `OK` nevertheless are there."""

    @property
    def ok(self) -> tuple[bool, ...]:
        """Which pages are whole in the target, in order."""
        return tuple(outcome is Outcome.OK for outcome in self.outcomes)


class Transfer:
    """Pages on their way through a lane. Made by `Lane.submit` and `Lane.try_submit`.

    Its result may be had in three ways: `wait` for it, look at `result`, or be called back (`on_done`). Whoever changes
    state by the result is called back: a task that is cancelled while it waits learns nothing, and the copy went on.

    Where the lane copies layer by layer, the layers can be had one by one before the result: by `wait_layer`, by
    `layer_done`, or by `on_layer` for a consumer in another thread.
    """

    def __init__(
        self,
        pages: Iterable[PageMove],
        *,
        priority: Priority,
        deadline: float | None,
        on_done: "Callable[[Transfer], None] | None",
        on_layer: "Callable[[Transfer, int], None] | None" = None,
        num_layers: int = 1,
        now: float,
        withdraw: "Callable[[Transfer], None]",
        hasten: "Callable[[Transfer, Priority], None]",
    ) -> None:
        self.pages: Final = tuple(pages)
        self.priority = priority
        """Changed by `hasten` alone."""
        self.deadline: Final = deadline
        """Monotonic seconds. Pages whose copy has not begun by then are not copied."""
        self.num_layers: Final = num_layers
        """Steps in which the pages arrive: their layers, or 1 where whole pages are copied."""
        self.result: TransferResult | None = None
        """None until the transfer has ended."""
        # The rest is the lane's own note of how far it is; only this package looks at it.
        self._on_done = on_done
        self._on_layer = on_layer
        self._withdraw = withdraw
        self._hasten = hasten
        self._submitted_at = now
        self._outcomes: list[Outcome | None] = [None] * len(self.pages)
        # Pages [0, _next) have begun, `_under_way` of them have not ended; [_next, len) wait.
        self._next = 0
        self._under_way = 0
        self._unwanted = False
        self._stopped = False
        """No further layer of what has begun is copied."""
        self._copying_pages = 0
        """How many pages' bytes it copies at a time, where it goes by layers."""
        self._layers_done = 0
        """Layers `[0, _layers_done)` of all pages are in the target."""
        self._advanced = asyncio.Event()
        """Set, and replaced, when a layer is done."""
        self._timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> TransferResult:
        """Wait until the transfer has ended, for as long as that takes.

        Raises nothing for what a device does. Cancelling the waiting task does not cancel the transfer.
        """
        await self._ended.wait()
        assert self.result is not None
        return self.result

    def layer_done(self, layer: int) -> bool:
        """Whether that layer, from 0, of every page is in the target. What was there stays there if later ones fail."""
        return layer < self._layers_done or (self.result is not None and all(self.result.ok))

    async def wait_layer(self, layer: int) -> bool:
        """Wait until `layer_done`: True; or until the transfer has ended otherwise: False, and its result says how.

        Layers arrive in order. Where whole pages are copied, all arrive at the end.
        """
        while not self.layer_done(layer):
            if self.result is not None:
                return False
            await self._advanced.wait()
        return True

    def hasten(self, priority: Priority) -> None:
        """Give pages that have not begun a more urgent priority, in the place that they would have had there from the
        start: what was fetched ahead is demanded now. A less urgent one, or the end, changes nothing."""
        if self.result is None and priority < self.priority:
            self._hasten(self, priority)

    def cancel(self) -> bool:
        """Give the transfer up. True: no copy had begun, and it has now ended with None for every page. False: it had
        ended before, or copies had begun; pages not yet begun, and layers, are left out, and the end is reported as
        always, with `unwanted` set, as soon as no copy is under way."""
        if self.result is not None:
            return False
        self._unwanted = self._stopped = True
        never_started = self._next == 0
        self._withdraw(self)
        return never_started
