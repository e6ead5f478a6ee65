"""Memory for copies that `read` hands out, used again once nobody looks at it.

Fresh memory must be found and cleared by the kernel, page by page, which takes several times as long as the copy that
is put into it. So the memory of the last copies is remembered, and a new copy is put where an old one was of which
there is no view any more: no `memoryview` of part of it, no numpy array, no tensor. The map itself knows whether there
is one; nothing is told of an end, so that no order in which a garbage collection ends things matters.
"""

import mmap
import threading
from collections import deque
from typing import Final

KEPT_BYTES: Final = 256 << 20
"""Most memory of copies that a session remembers, and so most that stays when all of them are dropped."""
SMALL_BYTES: Final = 64 << 10
"""Shorter copies get memory of their own: the C library has touched memory for these."""
TRIES: Final = 4
"""So many remembered copies of the right size are looked at, oldest first, before new memory is taken."""


class Buffers:
    """Buffers of any size. Thread-safe."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_max = kept_bytes
        self._lock: Final = threading.Lock()
        # In the order in which they were lent last; each a power of two long.
        self._known: Final[deque[mmap.mmap]] = deque()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Memory that is remembered, in use or not."""
        return self._num_bytes

    def take(self, num_bytes: int) -> memoryview:
        """Writable memory of which nobody else has a view, with any content.

        Raises `OSError` where the system has none.
        """
        if num_bytes < SMALL_BYTES:
            return memoryview(bytearray(num_bytes))
        size = 1 << (num_bytes - 1).bit_length()
        with self._lock:
            region = self._unused(size)
            if region is None:
                region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                region.madvise(mmap.MADV_HUGEPAGE)
            view = memoryview(region)[:num_bytes]
            self._known.append(region)
            self._num_bytes += size
            while self._num_bytes > self._kept_max:
                self._num_bytes -= len(self._known.popleft())
        return view

    def close(self) -> None:
        """Remember nothing any more. What is in use stays as it is. Idempotent."""
        with self._lock:
            self._kept_max = self._num_bytes = 0
            self._known.clear()

    def _unused(self, size: int) -> mmap.mmap | None:
        """A region of that size of which there is no view, taken out of those that are known."""
        tries = TRIES
        for index, region in enumerate(self._known):
            if len(region) == size:
                if _is_unused(region):
                    del self._known[index]
                    self._num_bytes -= size
                    return region
                tries -= 1
                if not tries:
                    break
        return None


def _is_unused(region: mmap.mmap) -> bool:
    """Whether there is no view of a map, which otherwise refuses to be resized, also to its own size."""
    try:
        region.resize(len(region))
    except BufferError:
        return False
    return True
