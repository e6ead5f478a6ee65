"""Two bounds on what may be written beside the number of slots: bytes a day, and space that others need."""

from collections.abc import Callable
from typing import Final

from hicache.clock import Clock

SECONDS_PER_DAY: Final = 86_400
BURST_SHARE: Final = 1 / 24
"""The bucket holds an hour's share of the day: so much may be written at once after a pause."""
LOOK_INTERVAL_S: Final = 1.0
"""Between two looks at the free space."""


class WriteBudget:
    """A token bucket of bytes. It fills with the monotonic clock while the store is open, and never in between: a
    restart begins with the level that the log kept.

    A request is granted while the bucket is not empty, and may take it below: nothing is too large to be written ever.
    """

    def __init__(self, bytes_per_day: int, clock: Clock, level_bytes: int | None) -> None:
        self.bytes_per_day = bytes_per_day
        self._clock = clock
        self._burst = bytes_per_day * BURST_SHARE
        self._level = self._burst if level_bytes is None else min(level_bytes, self._burst)
        self._filled_at = clock.monotonic()

    @property
    def level_bytes(self) -> int:
        """What is in the bucket; below zero after a request that was larger."""
        self._fill()
        return int(self._level)

    def take(self, num_bytes: int) -> bool:
        """Take so many bytes; False, and nothing taken, while the bucket is empty."""
        self._fill()
        if self._level <= 0:
            return False
        self._level -= num_bytes
        return True

    def _fill(self) -> None:
        now = self._clock.monotonic()
        self._level = min(self._burst, self._level + (now - self._filled_at) * self.bytes_per_day / SECONDS_PER_DAY)
        self._filled_at = now


class SpaceFloor:
    """Whether the file system still has `min_free_bytes`. The event loop asks; a lane thread looks."""

    def __init__(self, min_free_bytes: int, clock: Clock, look: Callable[[], int]) -> None:
        """`look` gives the bytes that are free, and may block; it raises `OSError` as the device does."""
        self.min_free_bytes = min_free_bytes
        self._clock = clock
        self._look = look
        self._free_bytes = min_free_bytes
        self._looked_at: float | None = None
        self._is_looking = False

    @property
    def problem(self) -> str | None:
        """Why nothing may be written, by the last look; None when it may."""
        if self._free_bytes >= self.min_free_bytes:
            return None
        return f"free space below {self.min_free_bytes} bytes: {self._free_bytes} are left"

    def claim_look(self) -> bool:
        """Whether a look is due. True at most once until `look` has run."""
        now = self._clock.monotonic()
        due = not self._is_looking and (self._looked_at is None or now - self._looked_at >= LOOK_INTERVAL_S)
        if due:
            self._is_looking, self._looked_at = True, now
        return due

    def look(self) -> None:
        """Look. Blocks. A file system that does not answer counts as it did before: its writes will tell."""
        try:
            self._free_bytes = self._look()
        except OSError:
            pass
        finally:
            self._is_looking = False
