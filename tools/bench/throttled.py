"""A disk of chosen speed: the files of the NVMe tier, whose large reads take as long as they are told to."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from hicache.tiers.nvme.io import FileIO
from hicache.tiers.nvme.store import NvmeTier

SMALL_BYTES: Final = 4096
"""Reads up to this size are metadata and take no time of their own."""


class ThrottledFiles(FileIO):
    """Real files behind a pipe that all reads share. Its speed may be changed at any time, from any thread.

    A read holds the pipe for its bytes' time and then waits in its own thread, which costs no core, as a device would
    make it wait.
    """

    def __init__(self) -> None:
        self.byte_s = 0.0
        """Seconds of one byte; 0.0 for the disk as it is."""
        self.num_bytes = 0
        """Bytes read so far in large reads."""
        self._lock: Final = threading.Lock()
        self._free_at = 0.0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = super().preadv(fd, buffers, offset)
        if done > SMALL_BYTES:
            with self._lock:
                self._free_at = max(time.monotonic(), self._free_at) + done * self.byte_s
                wait_s = self._free_at - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            with self._lock:
                self.num_bytes += done
        return done


@contextmanager
def throttled_nvme(files: FileIO) -> Iterator[None]:
    """NVMe tiers that are opened meanwhile use `files`. The embedded cache opens its own tier: this is the way in."""
    opening = NvmeTier.open
    as_it_was = NvmeTier.__dict__["open"]

    def open_with(*args: Any, **options: Any) -> NvmeTier:
        return opening(*args, **options, files=files)

    NvmeTier.open = open_with  # type: ignore[method-assign]  # put back below
    try:
        yield
    finally:
        # The class method itself: what `opening` is would open tiers of this class for every class derived from it.
        NvmeTier.open = as_it_was  # type: ignore[method-assign]
