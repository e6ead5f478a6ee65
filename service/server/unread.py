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
from contextlib import suppress
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

    async def watch(self) -> NoReturn:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(self._within_s / LOOKS)
            self.look()

    def look(self) -> None:
        """Cut off what was full, and was not read, for so long. Does not wait."""
        now, full = self._clock.monotonic(), dict[int, _Full]()
        for inode, mine in self._connections():
            with mine, suppress(OSError):  # it was closed meanwhile
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
                    _log.warning("a connection was not read for %.1f s: it is cut off", unread_s)
                    mine.shutdown(socket.SHUT_RDWR)
                    self.num_cut_off += 1
        self._full = full

    def _connections(self) -> Iterator[tuple[int, socket.socket]]:
        """Those with something in them, and those that had, each once and by a descriptor of its own: what it stands
        for stays the same."""
        try:
            fds = [int(name) for name in os.listdir("/proc/self/fd")]
        except OSError:
            return  # no descriptor is free: the next look may find one
        seen = set[int]()
        for fd in fds:
            with suppress(OSError):  # it was closed meanwhile, or listens
                status = os.fstat(fd)
                if not stat.S_ISSOCK(status.st_mode) or status.st_ino in seen:
                    continue
                if not _unread_bytes(fd) and status.st_ino not in self._full:
                    continue  # nearly all end here
                mine = _copy(fd)
                inode = os.fstat(mine.fileno()).st_ino
                if mine.family == socket.AF_UNIX and mine.getsockname() in self._paths:
                    seen.add(inode)
                    yield inode, mine
                else:
                    mine.close()


def _copy(fd: int) -> socket.socket:
    copied = os.dup(fd)
    try:
        return socket.socket(fileno=copied)
    except OSError:
        os.close(copied)
        raise


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
