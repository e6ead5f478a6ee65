"""What is accepted, what is durable, what a failed flush took, and who waits to hear. The event loop alone calls."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hicache.errors import TierUnavailable

MAX_LOSSES: Final = 256
"""Losses that are told apart; of more, the oldest are taken together."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """Changes that a failed flush took: from the first that was lost to the last accepted when that was known."""

    first: int
    last: int
    reason: str


@dataclass(frozen=True, slots=True)
class _Waiter:
    number: int
    is_frees_only: bool
    future: asyncio.Future[None]


class Promises:
    """Counts changes, and answers those who ask for durable ones."""

    def __init__(self, tier_id: str, sequence: int) -> None:
        self.accepted = sequence
        """The last change that was accepted."""
        self.durable = sequence
        """Every change up to here is durable, or lost."""
        self._tier_id = tier_id
        self._losses: list[_Loss] = []
        self._waiting: list[_Waiter] = []

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits."""
        return any(not waiter.future.done() for waiter in self._waiting)

    def accept(self) -> int:
        """A change was accepted; its number."""
        self.accepted += 1
        return self.accepted

    async def reach(self, number: int, begin: Callable[[], None], *, is_frees_only: bool = False) -> None:
        """Wait until everything up to `number` is durable; `begin` is called if that is not so yet. Raises
        `TierUnavailable` when it cannot be made so. That slots were freed is never lost (`is_frees_only`)."""
        if not is_frees_only and (loss := self._loss_of(number)) is not None:
            raise TierUnavailable(self._tier_id, loss.reason)
        if self.durable >= number:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiter(number, is_frees_only, future))
        begin()
        await future

    def keep(self, through: int) -> None:
        """Everything up to `through` is durable now, but for what was lost: tell those who wait for it."""
        self.durable = max(self.durable, through)
        still = []
        for waiter in self._waiting:
            loss = None if waiter.is_frees_only else self._loss_of(waiter.number)
            if waiter.future.done():
                continue
            if loss is not None:
                waiter.future.set_exception(TierUnavailable(self._tier_id, loss.reason))
            elif waiter.number <= self.durable:
                waiter.future.set_result(None)
            else:
                still.append(waiter)
        self._waiting = still

    def lose(self, first: int, reason: str) -> None:
        """Changes from `first` on may be lost: nobody is told that one of those accepted so far is durable."""
        self._losses.append(_Loss(first, self.accepted, reason))
        if len(self._losses) > MAX_LOSSES:
            oldest, second = self._losses[:2]
            self._losses[:2] = [_Loss(oldest.first, second.last, second.reason)]

    def fail(self, reason: str) -> None:
        """Tell everybody who waits that it cannot be done now."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.future.done():
                waiter.future.set_exception(TierUnavailable(self._tier_id, reason))

    def _loss_of(self, number: int) -> _Loss | None:
        return next((loss for loss in self._losses if loss.first <= number <= loss.last), None)
