"""Time, passed in. Nothing in `hicache/` or `tiers/` asks the operating system for it."""

import math
import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from. `monotonic` decides; `wall` is only ever shown to people."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never steps backwards."""
        ...

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC; may jump, so no lease, deadline or recency uses it."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told to: for tests and replays.

    >>> clock = ManualClock()
    >>> clock.advance(2.5)
    >>> clock.monotonic()
    2.5
    """

    def __init__(self, start: float = 0.0) -> None:
        self.now = start
        self.wall_offset = 1.7e9

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + self.wall_offset

    def advance(self, seconds: float) -> None:
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds: {seconds} is not a finite step forwards; monotonic time does not go back")
        self.now += seconds
