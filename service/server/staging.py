"""A session's staging memory: where its process puts new pages, and whence the server copies them.

The server makes it, of a size that it chose, allocated at once and sealed against shrinking, so that reading it can
never fail. The other process can write to it at any time: what is copied is looked at only afterwards, in the copy.
It is gathered into 2 MiB pages while it is used already: out of these a copy is nearly twice as fast.
"""

import fcntl
import os
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.errors import NoRoom
from hicache.tier import Slots, TierId
from hicache.tiers.arena import collapsing, map_shared, remove
from hicache.tiers.slots import SlotPool

STAGING: Final = TierId("staging")
"""What staging memory is called in errors."""


class Staging:
    """`num_slots` slots of `stride` bytes. Belongs to the event loop; `view` may be read in any thread."""

    def __init__(self, num_slots: int, stride: int) -> None:
        """Allocates all memory, some 0.3 s a GiB: for a thread. Raises `NoRoom` when it cannot be had."""
        self.stride: Final = stride
        self.num_slots: Final = num_slots
        self._pool: Final = SlotPool(STAGING, num_slots)
        self._num_bytes: Final = num_slots * stride
        num_bytes = self._num_bytes
        self._fd = -1
        try:
            self._fd = os.memfd_create("hicache-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(self._fd, 0, num_bytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._address, root, _ = map_shared(self._fd, num_bytes)
        except OSError as error:
            if self._fd >= 0:
                os.close(self._fd)
            problem = f"cannot have {num_bytes} bytes of memory: {error.strerror}"
            raise NoRoom(STAGING, pages_asked=num_slots, pages_free=0, problem=problem) from error
        self._view = memoryview(root).cast("B")
        self._stop_gathering: Final = threading.Event()
        self._num_users = 0
        self._is_closed = False

    @property
    def fd(self) -> int:
        """The descriptor that the session's process is given."""
        return self._fd

    @property
    def num_free(self) -> int:
        """Slots that `allocate` can give now."""
        return self._pool.num_free

    def allocate(self, num_slots: int) -> Slots:
        """Take slots; raises `NoRoom` when fewer are free."""
        return self._pool.allocate(num_slots)

    def free(self, slots: Slots) -> None:
        """Give slots back."""
        self._pool.free(slots)

    def view(self, slot: int, num_bytes: int) -> memoryview:
        """The first bytes of a slot. Only while the memory is `held`."""
        start = slot * self.stride
        return self._view[start : start + num_bytes]

    def pages(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """The first bytes of each slot: uint8 `[num_slots, num_bytes]`, by rows. Only while the memory is held."""
        return np.frombuffer(self._view, np.uint8).reshape(self.num_slots, self.stride)[:, :num_bytes]

    def gather(self) -> None:
        """Gather the memory into 2 MiB pages, some 3 s a GiB, until `stop_gathering` or `close`: for a thread. Only
        while it is held."""
        for _ in collapsing(self._address, self._num_bytes, self._stop_gathering):
            pass  # where the kernel has none, ordinary pages do

    def stop_gathering(self) -> None:
        """`gather` ends soon, or at once where it has not begun."""
        self._stop_gathering.set()

    def hold(self) -> None:
        """Keep the memory while a copy reads it, also if the session ends meanwhile. Ends with `let_go`."""
        self._num_users += 1

    def let_go(self) -> None:
        """End what `hold` began."""
        self._num_users -= 1
        if self._is_closed and not self._num_users:
            self._release()

    def close(self) -> None:
        """Give the memory back, as soon as nobody holds it. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._stop_gathering.set()
            if not self._num_users:
                self._release()

    def _release(self) -> None:
        # The other process may still have the memory mapped, or keep its descriptor: the pages go all the same.
        remove(self._address, self._num_bytes)
        self._view = memoryview(b"")  # what is left of it, in the traceback of an error say, keeps it mapped
        os.close(self._fd)
