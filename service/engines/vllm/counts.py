"""What both sides of the connector count, when it has happened: bytes that have arrived, not those that were hoped for.

Plain numbers by name, so that they travel from worker to scheduler to the process that publishes them.
"""

import threading
from collections.abc import Mapping
from typing import Final

COUNTERS: Final[Mapping[str, str]] = {
    "lookups": "Requests that the sidecar was asked about.",
    "unanswered_lookups": "Those that it did not answer, or not in time.",
    "asked_tokens": "Tokens that it was asked about.",
    "found_tokens": "Those that it has.",
    "loaded_pages": "Pages that were loaded.",
    "loaded_bytes": "Bytes that were loaded.",
    "load_seconds": "Seconds that loads took, one after the other.",
    "unloaded_pages": "Pages that were found and could not be loaded in time: they are computed.",
    "saved_pages": "Pages that were saved.",
    "saved_bytes": "Bytes that were saved.",
    "save_seconds": "Seconds that saves took, from the engine's order on.",
    "unsaved_pages": "Pages that were left out: no room, no sidecar, too much to save, or taken away.",
}
"""Names, and what they count."""


class Counts:
    """Numbers that only rise, and are taken now and then. Any thread may call."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._values: dict[str, float] = {}

    def add(self, **more: float) -> None:
        """Count. Names are those of `COUNTERS`."""
        with self._lock:
            for name, value in more.items():
                self._values[name] = self._values.get(name, 0) + value

    def take(self) -> dict[str, float]:
        """What was counted since the last time."""
        with self._lock:
            taken, self._values = self._values, {}
        return taken


def summed(*counts: Mapping[str, float]) -> dict[str, float]:
    """Several of them as one."""
    names = {name for each in counts for name in each}
    return {name: sum(each.get(name, 0) for each in counts) for name in sorted(names)}
