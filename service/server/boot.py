"""One start of the server, and the ids that it gives out."""

import secrets
from typing import Final


class Boot:
    """One start of the server: its id, and the ids that it gives out."""

    def __init__(self) -> None:
        self.id: Final = secrets.randbits(63) | 1 << 32
        """Another number after each start; its upper half is not 0."""
        self._last = 0

    def next_id(self) -> int:
        """An id that was never given out, by this start or, but for one chance in four billion, by another."""
        self._last += 1
        return self.id >> 32 << 32 | self._last & 0xFFFF_FFFF
