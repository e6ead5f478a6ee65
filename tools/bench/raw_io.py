"""The device itself: direct I/O in a loop of threads, one page a call, without checksums or headers.

What the NVMe tier is compared with. The file is a preallocated segment of the tier's, and the buffers are the tier's
own, so that both sides meet the same device, the same blocks and the same memory.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Final, Self

DEPTHS: Final = (1, 2, 4, 8, 16, 32)
"""Threads of which the best number is the baseline."""

Transfer = tuple[int, memoryview]
"""Where in the file, in bytes, and from or into which buffer."""


class RawFile:
    """A file that is there, read and written around the page cache. Raises `OSError` as the system does, EINVAL where
    the file system takes no direct I/O."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        self._threads = ThreadPoolExecutor(max(DEPTHS), "bench-raw")

    def read(self, transfers: Sequence[Transfer], depth: int) -> float:
        """Seconds to read all of it with so many threads."""
        return self._timed(transfers, depth, write=False)

    def write(self, transfers: Sequence[Transfer], depth: int) -> float:
        """Seconds to write all of it with so many threads; nothing is flushed."""
        return self._timed(transfers, depth, write=True)

    def sync(self) -> float:
        """Seconds to make durable what was written."""
        began = perf_counter()
        os.fdatasync(self._fd)
        return perf_counter() - began

    def close(self) -> None:
        """Close the file; it stays where it is."""
        self._threads.shutdown()
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _timed(self, transfers: Sequence[Transfer], depth: int, *, write: bool) -> float:
        shared = iter(transfers)  # `next` of a list's iterator is one step for the interpreter: threads may share it
        began = perf_counter()
        for end in [self._threads.submit(self._work, shared, write) for _ in range(depth)]:
            end.result()
        return perf_counter() - began

    def _work(self, shared: Iterator[Transfer], write: bool) -> None:
        call = os.pwritev if write else os.preadv
        for offset, buffer in shared:
            if (count := call(self._fd, [buffer], offset)) != len(buffer):
                raise OSError(f"{count} of {len(buffer)} bytes were moved")
