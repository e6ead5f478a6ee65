"""How many threads to share a piece of work among, as was measured of the pieces before.

Threads that need the interpreter between two copies gain by sharing work while waking each other is cheap. Where it is
not, as in a virtual machine whose cores are taken by others for a while, two are slower than one; and which of the two
holds changes from minute to minute. So nobody has to know beforehand: it is tried now and then.
"""

from collections import deque
from statistics import median
from typing import Final

TRY_EVERY: Final = 16
"""One piece of so many is for a number that is not the best, in turn."""
NUM_KEPT: Final = 5
"""The last measurements of a number, of which the median counts: no single piece that was disturbed decides."""
NUM_NEEDED: Final = 3
"""Measurements of every number before any is the best."""


class Pace:
    """Which number of threads does a byte in the least time. For one thread."""

    def __init__(self, max_threads: int) -> None:
        """Numbers are the powers of two below `max_threads`, and itself."""
        numbers = [1 << power for power in range(max_threads.bit_length()) if 1 << power < max_threads]
        self._seconds: Final = {number: deque[float]((), NUM_KEPT) for number in [*numbers, max_threads]}
        """Of a byte, by number of threads."""
        self._num_chosen = 0

    def choose(self) -> int:
        """The number of threads for the next piece, which is measured."""
        number, measured = min(self._seconds.items(), key=lambda each: len(each[1]))
        if len(measured) < NUM_NEEDED:
            return number
        self._num_chosen += 1
        if self._num_chosen % TRY_EVERY == 0:
            numbers = list(self._seconds)
            return numbers[self._num_chosen // TRY_EVERY % len(numbers)]
        return self.best

    @property
    def best(self) -> int:
        """The number that was fastest; while that is not known, the most: a thread that comes when all is done costs
        less than a core that nobody uses."""
        if min(map(len, self._seconds.values())) < NUM_NEEDED:
            return max(self._seconds)
        return min(self._seconds, key=lambda number: median(self._seconds[number]))

    def took(self, num_threads: int, num_bytes: int, seconds: float) -> None:
        """A piece of `num_bytes` was done by the chosen number of threads in `seconds`, with nothing beside it."""
        self._seconds[num_threads].append(seconds / num_bytes)
