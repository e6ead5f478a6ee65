"""What a session was promised to survive a crash, by number."""

from collections.abc import Callable
from typing import Final

MAX_LOST: Final = 1024
"""Lost promises that are remembered until the client has been told."""


class Promises:
    """Promises of one session, numbered from 1 in the order in which they were asked for.

    `durable` is the number up to which all are settled: kept, but for those in `lost`.

    >>> promises = Promises(lambda: None)
    >>> first, second = promises.make(), promises.make()
    >>> promises.settle(second, is_kept=True); promises.durable
    0
    >>> promises.settle(first, is_kept=False); promises.durable, promises.take_lost()
    (2, [1])
    """

    def __init__(self, on_news: Callable[[], None]) -> None:
        self._on_news: Final = on_news
        self._last = 0
        self._open: Final[dict[int, None]] = {}
        self._lost: list[int] = []

    @property
    def durable(self) -> int:
        """The number up to which all promises are settled."""
        return next(iter(self._open), self._last + 1) - 1

    @property
    def num_open(self) -> int:
        """Promises that are not settled."""
        return len(self._open)

    def make(self) -> int:
        """Begin a promise; its number."""
        self._last += 1
        self._open[self._last] = None
        return self._last

    def settle(self, number: int, *, is_kept: bool) -> None:
        """A promise ends, once."""
        del self._open[number]
        if not is_kept:
            self._lost = [*self._lost, number][-MAX_LOST:]
        self._on_news()

    def take_lost(self) -> list[int]:
        """Numbers up to `durable` that were not kept and not taken before."""
        durable = self.durable
        told = [number for number in self._lost if number <= durable]
        self._lost = [number for number in self._lost if number > durable]
        return told
