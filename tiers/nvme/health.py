"""Whether the device behind a tier may be given new pages.

    up    -- `errors_to_down` failures in a row of one kind --> down
    down  -- a probe that succeeds ---------------------------> up

Failures of reads and of writes are counted apart: a disk that was remounted read-only still reads well. While down, new
pages are refused, reads are still tried, and one probe at a time is due every `probe_interval_s`. Any thread may call.
"""

import logging
import threading
from enum import Enum
from typing import Final

from hicache.clock import Clock

ERRORS_TO_DOWN: Final = 8
"""Failures in a row that mark the device down."""
PROBE_INTERVAL_S: Final = 1.0
"""Between two probes of a device that is down."""

_log = logging.getLogger(__name__)


class Kind(Enum):
    READ = "read"
    WRITE = "write"


class Health:
    """Counts a device's failures. See the module's docstring."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        *,
        errors_to_down: int = ERRORS_TO_DOWN,
        probe_interval_s: float = PROBE_INTERVAL_S,
    ) -> None:
        self._name = name
        self._clock = clock
        self._errors_to_down = errors_to_down
        self._probe_interval_s = probe_interval_s
        self._in_a_row = dict.fromkeys(Kind, 0)
        self._down: str | None = None
        self._probe_at = 0.0
        self._probing = False
        self._lock = threading.Lock()

    @property
    def down(self) -> str | None:
        """Why the device counts as down; None while it is up."""
        return self._down

    def succeeded(self, kind: Kind) -> None:
        if self._in_a_row[kind]:
            with self._lock:
                self._in_a_row[kind] = 0

    def failed(self, kind: Kind, error: OSError) -> None:
        with self._lock:
            self._in_a_row[kind] += 1
            if self._down is None and self._in_a_row[kind] >= self._errors_to_down:
                self._down = f"{self._in_a_row[kind]} {kind.value}s in a row failed, the last with: {error.strerror}"
                self._probe_at = self._clock.monotonic() + self._probe_interval_s
                _log.warning("%s is down: %s; probing every %g s", self._name, self._down, self._probe_interval_s)

    def claim_probe(self) -> bool:
        """Whether a probe is due. True at most once until `probed`."""
        with self._lock:
            due = self._down is not None and not self._probing and self._clock.monotonic() >= self._probe_at
            self._probing |= due
            return due

    def probed(self, problem: str | None) -> None:
        """A probe ended; None: the device wrote and read back."""
        with self._lock:
            self._probing = False
            if problem is None:
                self._down = None
                self._in_a_row = dict.fromkeys(Kind, 0)
                _log.warning("%s is up again", self._name)
            else:
                self._probe_at = self._clock.monotonic() + self._probe_interval_s
