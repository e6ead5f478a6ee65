"""Local connections that nobody reads are cut off.

gRPC times a ping from when it was written. Into a full socket none is: it would keep such a connection, and all that
waits to be sent over it, for as long as the peer likes. One over TCP is ended by the kernel, whom gRPC tells how long
(`TCP_USER_TIMEOUT`); for Unix sockets there is nothing of that kind, so they are looked at here.

How full a socket is does not tell whether its peer reads: what it has read may have been replaced before the next look.
So who seems to have read nothing for a while is sent nothing more for the time that is allowed: what is in the socket
gets less by being read alone. The kernel counts that in pieces, as they were written, of at most 36 KiB.
"""

import asyncio
import fcntl
import logging
import os
import select
import socket
import stat
import struct
import termios
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, NoReturn

from hicache.clock import Clock

LOOKS: Final = 16
"""How often each connection is looked at within the time that it is allowed."""
SUSPECT: Final = 0.25
"""So much of that time, and before it, a connection must seem to be unread until it is sent nothing more."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Full:
    """A connection into which nothing fits, and of which nothing was seen to be read."""

    since: float
    """When it was seen first, or when it was held."""
    num_bytes: int
    """That were in it at the last look."""
    held_buffer: int = 0
    """Bytes that it may have in it once it is read again, of one that is held; else 0."""


class Unread:
    """Cuts off what nobody reads, among the connections of some Unix sockets of this process. Belongs to the event
    loop."""

    def __init__(self, paths: Iterable[str], clock: Clock, within_s: float) -> None:
        """`paths`: of the sockets, as they were bound. `within_s`: how long a full connection may go unread."""
        self.num_cut_off = 0
        """Connections that were cut off."""
        self._paths: Final = frozenset(paths)
        self._clock: Final = clock
        self._within_s: Final = within_s
        self._full: dict[int, _Full] = {}
        """By inode."""
        self._listing: Final = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
        self._spare: int | None = os.dup(self._listing)
        """A descriptor for what takes one: who is to be cut off may have taken all others."""

    def close(self) -> None:
        """Close its own descriptors."""
        os.close(self._listing)
        if self._spare is not None:
            os.close(self._spare)

    async def watch(self) -> NoReturn:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._within_s / LOOKS)
            self.look()

    def look(self) -> None:
        """Cut off what was full, and was not read, for so long. Does not wait."""
        fds = self._fds()
        if fds is None:
            return
        now, full, num_cut_off = self._clock.monotonic(), dict[int, _Full](), 0
        for inode, mine in self._connections(fds):
            with suppress(OSError):  # its peer has gone
                num_bytes, found = _unread_bytes(mine.fileno()), self._full.get(inode)
                if _is_writable(mine) or (found is not None and num_bytes < found.num_bytes):
                    if found is not None and found.held_buffer:
                        _set_send_buffer(mine, found.held_buffer)
                    continue
                full[inode] = found = found or _Full(now, num_bytes)
                found.num_bytes, unread_s = num_bytes, now - found.since
                if not found.held_buffer and unread_s >= self._within_s * SUSPECT:
                    found.since, found.held_buffer = now, mine.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
                    _set_send_buffer(mine, 0)
                elif found.held_buffer and unread_s >= self._within_s:
                    mine.shutdown(socket.SHUT_RDWR)
                    num_cut_off += 1
        self._full = full
        if num_cut_off:
            self.num_cut_off += num_cut_off
            _log.warning("connections were not read for %g s: %d cut off", self._within_s, num_cut_off)

    def _fds(self) -> list[int] | None:
        """Descriptors of this process; None if none was free to list them, so that the next look has to."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        try:
            fds = [int(name) for name in os.listdir(self._listing)]
            self._spare = os.dup(self._listing)
        except OSError:
            return None
        return fds

    def _connections(self, fds: list[int]) -> Iterator[tuple[int, socket.socket]]:
        """Those with something in them, and those that had, each once and until the next one is asked for."""
        seen = set[int]()
        for fd in fds:
            with suppress(OSError):  # it was closed meanwhile, or listens
                status = os.fstat(fd)
                if not stat.S_ISSOCK(status.st_mode) or status.st_ino in seen:
                    continue
                if not _unread_bytes(fd) and status.st_ino not in self._full:
                    continue  # nearly all end here
                with self._held(fd) as mine:
                    if mine.family == socket.AF_UNIX and mine.getsockname() in self._paths:
                        inode = os.fstat(mine.fileno()).st_ino
                        seen.add(inode)
                        yield inode, mine

    @contextmanager
    def _held(self, fd: int) -> Iterator[socket.socket]:
        """A socket under the spare descriptor: inside the block it is the same, whatever is closed meanwhile."""
        assert self._spare is not None
        os.dup2(fd, self._spare, inheritable=False)
        try:
            mine = socket.socket(fileno=self._spare)
            try:
                yield mine
            finally:
                mine.detach()
        finally:
            os.dup2(self._listing, self._spare, inheritable=False)


def _unread_bytes(fd: int) -> int:
    """Memory that what is in a socket takes, until its peer has read it."""
    (num_bytes,) = struct.unpack("i", fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)))
    return int(num_bytes)


def _is_writable(mine: socket.socket) -> bool:
    """Whether something fits, or its peer has gone."""
    poll = select.poll()
    poll.register(mine, select.POLLOUT)
    return bool(poll.poll(0))


def _set_send_buffer(mine: socket.socket, num_bytes: int) -> None:
    """`num_bytes`: as `getsockopt` says it, which is twice what `setsockopt` takes."""
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes // 2)
