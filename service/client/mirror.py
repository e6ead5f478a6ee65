"""A session's memory where there is none to share: sparse, and in the forms in which a server would pass it.

Of the server's sizes, so that slots are the same numbers at both ends. A page is put at its slot before the table shows
its generation, and its memory is given back when no lease holds it any more.
"""

import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from crc32c import crc32c

from hicache.errors import CorruptPage
from hicache.service import wire
from hicache.service.client.calls import Request
from hicache.service.errors import ServerFailure
from hicache.service.proto import hicache_pb2 as pb

MAX_ARENA_BYTES: Final = 1 << 46
"""Largest arena of a server that is mirrored: addresses, not memory."""
_NOT_HERE: Final = -1
"""Generation of a slot of which this end has no page."""


class Mirror:
    """The memory of one session as this end has it. Any thread may call."""

    def __init__(self, welcome: pb.Welcome) -> None:
        self._page_bytes: Final = int(welcome.page_bytes)
        self._stride: Final = int(welcome.slot_stride)
        if welcome.arena_slots * welcome.slot_stride > MAX_ARENA_BYTES:
            raise ServerFailure(f"its arena of {welcome.arena_slots} slots is larger than can be")
        sizes = [welcome.arena_slots * self._stride, welcome.arena_slots * 8]
        if welcome.staging_slots:
            sizes.append(welcome.staging_slots * self._stride)
        self.fds: Final[list[int]] = []
        """Descriptors as a server passes them, for who maps them, who also closes them."""
        self._maps: Final[list[mmap.mmap]] = []
        try:
            for size in sizes:
                self.fds.append(os.memfd_create("hicache-mirror", os.MFD_CLOEXEC))
                os.ftruncate(self.fds[-1], size)  # sparse: memory comes with the pages
                self._maps.append(mmap.mmap(self.fds[-1], size))
        except BaseException:
            for each in self._maps:
                each.close()
            for fd in self.fds:
                os.close(fd)
            raise
        self._arena: Final = memoryview(self._maps[0])
        self._table: Final = memoryview(self._maps[1]).cast("q")
        for slot in range(len(self._table)):
            self._table[slot] = _NOT_HERE
        self._staging: Final = memoryview(self._maps[2]) if len(sizes) > 2 else memoryview(b"")
        # Guards the four below. A slot's generation is shown only when all of its page is here.
        self._lock: Final = threading.Lock()
        self._leases: Final[dict[int, tuple[int, list[int]]]] = {}
        """The number of the call that each lease came from, and its slots."""
        self._calls: Final[dict[int, int]] = {}
        """Leases by the number of their call."""
        self._users: Final[Counter[int]] = Counter()
        """How many leases each slot is in."""
        self._reserved: Final[dict[int, list[int]]] = {}

    # -- out of the server --------------------------------------------------------------------------------------------

    def take(self, request: pb.AcquireRequest, reply: pb.AcquireReply) -> list[tuple[Request, int]]:
        """A lease is this session's. What is to be fetched for it: requests, and where in the arena each answer
        belongs. Pages that another lease has brought are here already. Ends with `let_go`."""
        slots, wanted = list(wire.unpack_int32(reply.slots)), []
        if any(not 0 <= slot < len(self._table) for slot in slots):
            raise ServerFailure("it names a slot that its arena does not have")
        with self._lock:
            self._leases[reply.lease] = request.call, slots
            self._calls[request.call] = reply.lease
            self._users.update(slots)
            for index, (slot, generation) in enumerate(zip(slots, wire.unpack_int64(reply.generations), strict=True)):
                if self._table[slot] == generation:
                    continue
                self._table[slot] = _NOT_HERE
                for offset, length in _cut(self._page_bytes):
                    message = pb.ReadRequest(lease=reply.lease, index=index, offset=offset, length=length)
                    wanted.append((Request("Read", message), slot * self._stride + offset))
        return wanted

    def put(self, request: Request, at: int, reply: pb.ReadReply) -> None:
        """One piece has come. Raises `CorruptPage` for one that is not what the server sent."""
        message: Any = request.message
        if len(reply.data) != message.length or crc32c(reply.data) != reply.checksum:
            raise CorruptPage("host", at // self._stride, "a piece of it came with another checksum")
        self._arena[at : at + len(reply.data)] = reply.data

    def show(self, reply: pb.AcquireReply) -> None:
        """All pages of a lease are here."""
        with self._lock:
            for slot, generation in zip(
                wire.unpack_int32(reply.slots), wire.unpack_int64(reply.generations), strict=True
            ):
                self._table[slot] = generation

    def let_go(self, number: int) -> None:
        """A lease or reservation has ended. Again is harmless."""
        with self._lock:
            self._reserved.pop(number, None)
            call, slots = self._leases.pop(number, (0, []))
            self._calls.pop(call, None)
            for slot in slots:
                self._users[slot] -= 1
                if not self._users[slot]:
                    del self._users[slot]
                    self._table[slot] = _NOT_HERE
                    self._maps[0].madvise(mmap.MADV_REMOVE, slot * self._stride, self._stride)

    def beat(self, beat: pb.Beat) -> pb.Beat:
        """What a beat gives back is let go of here, too."""
        for call in beat.abandoned:
            self.let_go(self._calls.get(call, 0))
        return beat

    # -- into the server ----------------------------------------------------------------------------------------------

    def reserved(self, reply: pb.ReserveReply) -> None:
        """Staging slots are a reservation's from now on."""
        if reply.reservation:
            self._reserved[reply.reservation] = list(wire.unpack_int32(reply.staging_slots))

    def pieces_for(self, reservation: int) -> Iterator[Request]:
        """What is to be sent before a commit."""
        for index, slot in enumerate(self._reserved.get(reservation, ())):
            for offset, length in _cut(self._page_bytes):
                start = slot * self._stride + offset
                data = bytes(self._staging[start : start + length])
                yield Request("Write", pb.WriteRequest(
                    reservation=reservation, index=index, offset=offset, data=data, checksum=crc32c(data),
                ))  # fmt: skip

    def close(self) -> None:
        """Let go of the memory; what others have mapped stays theirs."""
        for view in (self._arena, self._table, self._staging):
            view.release()
        for each in self._maps:
            each.close()


def _cut(page_bytes: int) -> Iterator[tuple[int, int]]:
    """A page as pieces: (offset, length)."""
    for offset in range(0, page_bytes, wire.PIECE_BYTES):
        yield offset, min(wire.PIECE_BYTES, page_bytes - offset)
