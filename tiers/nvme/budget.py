"""Two bounds on what may be written beside the number of slots: bytes a day, and space that others need."""

from collections.abc import Callable
from typing import Final

from hicache.clock import Clock
from hicache.errors import BadRequest

SECONDS_PER_DAY: Final = 86_400
BURST_SHARE: Final = 24
"""The bucket holds this part of the day's budget, an hour's share, or one page if that is more."""
LOOK_INTERVAL_S: Final = 1.0
"""Between two looks at the free space."""


def check_budget(bytes_per_day: int, slot_bytes: int) -> None:
    """Raises `BadRequest` for a budget below two slots."""
    if bytes_per_day < 2 * slot_bytes:
        raise BadRequest("write_bytes_per_day", f"{bytes_per_day} is below two pages, which take {2 * slot_bytes}")


class WriteBudget:
    """A token bucket of bytes: no 24 hours see more than `bytes_per_day`.

    The bucket holds a burst, and a day fills in the rest of the budget, so that whatever window one looks at, what was
    in the bucket at its beginning and what was filled in since are the budget together. It fills with the monotonic
    clock while the store is open, and never in between: a restart begins with the level that the log kept, and after a
    crash, when what was taken last may not be in the log, with nothing.
    """

    def __init__(self, bytes_per_day: int, slot_bytes: int, clock: Clock, level_bytes: int | None) -> None:
        """`level_bytes` is what the bucket begins with, None for all that it holds. The budget has been checked
        (`check_budget`)."""
        self.bytes_per_day = bytes_per_day
        self.burst_bytes = max(bytes_per_day // BURST_SHARE, slot_bytes)
        self._clock = clock
        self._level: float = self.burst_bytes if level_bytes is None else max(0, min(level_bytes, self.burst_bytes))
        self._filled_at = clock.monotonic()

    @property
    def level_bytes(self) -> int:
        """What is in the bucket."""
        now = self._clock.monotonic()
        filled = (now - self._filled_at) * (self.bytes_per_day - self.burst_bytes) / SECONDS_PER_DAY
        self._level = min(self.burst_bytes, self._level + filled)
        self._filled_at = now
        return int(self._level)

    def take(self, num_bytes: int) -> bool:
        """Take so many bytes; False, and nothing taken, when there are fewer in the bucket."""
        if num_bytes > self.level_bytes:
            return False
        self._level -= num_bytes
        return True

    def refusal(self, num_bytes: int) -> str:
        """Why so many bytes are refused."""
        return (
            f"the write budget of {self.bytes_per_day} bytes a day has {self.level_bytes} left now, and {num_bytes} "
            f"are asked for; it saves up {self.burst_bytes}"
        )


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
