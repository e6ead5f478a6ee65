"""What goes through a lane: pages, and how their copying ended."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from hicache.tier import Outcome, PageIdentity


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
    """Pages on their way through a lane. Made by `Lane.submit` and `Lane.try_submit`.

    Its result may be had in three ways: `wait` for it, look at `result`, or be called back (`on_done`). Whoever changes
    state by the result is called back: a task that is cancelled while it waits learns nothing, and the copy went on.
    """

    def __init__(
        self,
        pages: Iterable[PageMove],
        *,
        priority: Priority,
        deadline: float | None,
        on_done: "Callable[[Transfer], None] | None",
        now: float,
        withdraw: "Callable[[Transfer], None]",
    ) -> None:
        self.pages: Final = tuple(pages)
        self.priority: Final = priority
        self.deadline: Final = deadline
        """Monotonic seconds. Pages whose copy has not begun by then are not copied."""
        self.result: TransferResult | None = None
        """None until the transfer has ended."""
        # The rest is the lane's own note of how far it is; only this package looks at it.
        self._on_done = on_done
        self._withdraw = withdraw
        self._submitted_at = now
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
        self._withdraw(self)
        return never_started
