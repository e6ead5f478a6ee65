"""The server's memory as this process maps it.

The arena and the table of generations are mapped for reading only: what is written to them is a fault of this process
alone. The table tells whether what was read was still the page that the server named: a slot's count rises before other
bytes come. A mapping outlives its server, so reading it can never fail.
"""

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from hicache.service.client.buffers import Buffers
from hicache.service.errors import ServerFailure
from hicache.service.proto import hicache_pb2 as pb


class Memory:
    """Arena, generations and staging of one session."""

    def __init__(self, welcome: pb.Welcome, fds: Sequence[int]) -> None:
        """Map the descriptors that came with a welcome, and close them. Raises `ServerFailure` when they do not fit
        what the welcome says."""
        self.page_bytes: Final = int(welcome.page_bytes)
        self._stride: Final = int(welcome.slot_stride)
        sizes = [welcome.arena_slots * self._stride, welcome.arena_slots * 8]
        if welcome.staging_slots:
            sizes.append(welcome.staging_slots * self._stride)
        maps: list[mmap.mmap] = []
        try:
            if len(fds) != len(sizes):
                raise ServerFailure(f"{len(fds)} descriptors came where {len(sizes)} belong")
            for index, (fd, size) in enumerate(zip(fds, sizes, strict=True)):
                if os.fstat(fd).st_size < size:
                    raise ServerFailure("its memory is smaller than it says")
                protection = mmap.PROT_READ if index < 2 else mmap.PROT_READ | mmap.PROT_WRITE
                maps.append(mmap.mmap(fd, size, mmap.MAP_SHARED, protection))
        except BaseException:
            for each in maps:
                each.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)
        self.buffers: Final = Buffers()
        self._maps: Final = maps
        self._is_closed = False
        self._arena: Final = memoryview(maps[0])
        self._generations: Final = memoryview(maps[1]).cast("q")
        self._staging: Final = memoryview(maps[2]) if len(maps) > 2 else None

    def page(self, slot: int) -> memoryview:
        """An arena page, read-only."""
        start = slot * self._stride
        return self._arena[start : start + self.page_bytes]

    def staging_page(self, slot: int) -> memoryview:
        """A staging page, writable."""
        assert self._staging is not None, "the server gave staging slots of memory that it did not give"
        start = slot * self._stride
        return self._staging[start : start + self.page_bytes]

    def are_current(self, slots: Sequence[int], generations: Sequence[int]) -> bool:
        """Whether every slot is still in the life in which it was named: then what was read until now was its page.
        False once this is closed."""
        table = self._generations
        if self._is_closed:
            return False
        return all(table[slot] == generation for slot, generation in zip(slots, generations, strict=True))

    def close(self) -> None:
        """Let go of the memory. What the caller still looks at stays mapped for as long as it does. Idempotent."""
        self._is_closed = True
        self.buffers.close()
        for view in (self._arena, self._generations, self._staging):
            if view is not None:
                view.release()
        for each in self._maps:
            with suppress(BufferError):  # somebody keeps a view; the mapping ends with it
                each.close()
