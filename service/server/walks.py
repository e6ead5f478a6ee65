"""Walks that a caller goes on with in a later call, by number: so many are remembered, for so long, and no caller is
trusted to end one."""

import asyncio
from collections import OrderedDict
from typing import Final, Generic, TypeVar

from hicache.errors import LeaseExpired
from hicache.service.server.boot import Boot

MAX_WALKS: Final = 16
"""Walks that are remembered; where there are more, the one that was gone on with longest ago is forgotten."""
FORGOTTEN_S: Final = 600.0
"""After so long without a call a walk is forgotten: it keeps what it has gathered, and nodes that have left."""
T = TypeVar("T")


class Walks(Generic[T]):
    """Walks of one kind that are under way. Belongs to the event loop."""

    def __init__(self, boot: Boot) -> None:
        self._boot: Final = boot
        self._walks: Final[OrderedDict[int, tuple[T, asyncio.TimerHandle]]] = OrderedDict()

    def take(self, number: int) -> T:
        """The walk of that number, to go on with. Raises `LeaseExpired` for one that is forgotten."""
        walk = self._forget(number)
        if walk is None:
            raise LeaseExpired("walk", f"{number} has ended or is forgotten; begin another one")
        return walk

    def keep(self, number: int, walk: T) -> int:
        """Remember a walk under its number, 0 for one that has none yet; the number."""
        number = number or self._boot.next_id()
        self._forget(number)
        self._walks[number] = walk, asyncio.get_running_loop().call_later(FORGOTTEN_S, self._forget, number)
        if len(self._walks) > MAX_WALKS:
            self._forget(next(iter(self._walks)))
        return number

    def _forget(self, number: int) -> T | None:
        walk, forgetting = self._walks.pop(number, (None, None))
        if forgetting is not None:
            forgetting.cancel()
        return walk
