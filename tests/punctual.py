"""Bounds in seconds that hold on any machine: what the machine itself is late by is not held against the code."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final, Self

TICK_S: Final = 0.01
HANDS: Final = 4
"""How often a call may have to wait for a processor on its way to a server and back."""


class Lateness:
    """What this process is kept from running, while the block lasts: by others on its processors, by a quota, by a
    machine that stands still."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lateness")
        self.seconds = 0.0
        """What ticks came too late by, all together."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        last = monotonic()
        while not self._is_over.wait(TICK_S):
            now = monotonic()
            self._count(now - last)
            last = now
        self._count(monotonic() - last)

    def _count(self, tick_s: float) -> None:
        self.seconds += max(0.0, tick_s - 2 * TICK_S)

    @property
    def allowed_s(self) -> float:
        """How much later than elsewhere a call may end here."""
        return HANDS * self.seconds


@contextmanager
def in_time(within_s: float) -> Iterator[None]:
    """Raise `AssertionError` if the block takes longer than that and the machine is not to blame."""
    began = monotonic()
    with Lateness() as late:
        yield
        took = monotonic() - began
    assert took < within_s + late.allowed_s, f"it took {took:.2f} s, {late.seconds:.2f} s of which nothing ran"
