"""The hello socket: who connects, as whom, and what they are given.

One plain connection is one hello: the kernel says which process is at the other end, the configuration which tenant it
may be, and the answer carries the session's token and the descriptors of its memory. gRPC could do neither.
"""

import asyncio
import logging
import os
import socket
import struct
from contextlib import suppress
from typing import Final, NoReturn

from hicache.errors import Closed, HicacheError
from hicache.service import wire
from hicache.service.errors import Forbidden, ServerFailure, to_wire
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.accepting import Acceptor
from hicache.service.server.session import Session
from hicache.service.server.shares import Peers, Pool
from hicache.service.server.welcoming import Welcoming
from hicache.tiers.host import HostTier

HELLO_S: Final = 5.0
"""How long a hello may take."""
MAX_HELLOS: Final = 64
"""Hellos under way at a time; who comes above that is hung up on. Users have each a part of them, as no tenant is known
before a hello has come."""
BACKLOG: Final = 128
_SO_PEERPIDFD: Final = 77  # has no name in `socket` yet; Linux 6.5
_CREDENTIALS: Final = struct.Struct("3i")

_log = logging.getLogger(__name__)


class HelloServer:
    """Answers hellos. Belongs to the event loop."""

    def __init__(self, path: str, welcoming: Welcoming, host: HostTier, *, has_group: bool = False) -> None:
        """Bind the socket at `path`, where nothing is. The arena that it hands out is the one of `host`. `has_group`:
        whoever could connect is let in; else the server's own user and root."""
        self._has_group: Final = has_group
        self._welcoming: Final = welcoming
        self._host: Final = host
        self._generations_fd: Final = host.share_generations()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listening.bind(path)
            os.chmod(path, 0o600)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
        self._acceptor: Final = Acceptor(listening, MAX_HELLOS, "hello")
        self._users: Final = Peers(has_group=has_group)
        self._under_way: Final = Pool(self._users, MAX_HELLOS)

    def close(self) -> None:
        """Let nobody in any more; `run` is cancelled by its owner."""
        self._acceptor.close()

    async def run(self) -> NoReturn:
        """Accept until cancelled. Waits for nothing else."""
        await self._acceptor.run(self._handle)

    async def _handle(self, connection: socket.socket) -> None:
        try:
            pid, uid = _peer(connection)
        except OSError:
            return
        user = self._users.of("", uid)
        if not self._under_way.fits(user):
            return
        self._under_way.note(user, 1)
        try:
            await self._welcome(connection, pid, uid)
        finally:
            self._under_way.note(user, -1)

    async def _welcome(self, connection: socket.socket, pid: int, uid: int) -> None:
        session: Session | None = None
        try:
            async with asyncio.timeout(HELLO_S):
                try:
                    session, answer, fds = await self._answer(connection, pid, uid)
                except HicacheError as error:
                    answer, fds = _refusal(error), []
                except (OSError, MemoryError) as error:
                    _log.warning("a hello failed: %s", error)
                    answer, fds = _refusal(ServerFailure("the server is out of descriptors or memory")), []
                socket.send_fds(connection, [answer], fds)
        except (OSError, TimeoutError):
            # Whoever it was is gone, or waits for something else; a session nobody was told of is of no use.
            if session is not None:
                self._welcoming.sessions.end(session, "its hello failed")

    async def _answer(self, connection: socket.socket, pid: int, uid: int) -> tuple[Session, bytes, list[int]]:
        """Begin a session for whoever is at the other end. Raises what is told to them."""
        hello = wire.parse(pb.Hello, await _read_frame(connection))
        if uid not in (os.geteuid(), 0) and not self._has_group:
            raise Forbidden("this user may not use this server")
        self._welcoming.check(hello)
        # Asked for before anything is allocated: the process may be gone.
        session, welcome = await self._welcoming.begin(hello, uid=uid, pid=pid, pidfd=_pidfd(connection))
        staging = session.staging
        fds = [self._host.fd, self._generations_fd, *([staging.fd] if staging is not None else [])]
        return session, wire.frame(pb.HelloReply(welcome=welcome)), fds


def _peer(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end, and its user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    return pid, uid


async def _read_frame(connection: socket.socket) -> bytes:
    head = await _read(connection, wire.FRAME_HEAD)
    return await _read(connection, wire.framed_length(head))


async def _read(connection: socket.socket, length: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < length:
        piece = await loop.sock_recv(connection, length - len(data))
        if not piece:
            raise Closed("the connection ended before its message")
        data += piece
    return data


def _pidfd(connection: socket.socket) -> int:
    """A descriptor that is readable once the process at the other end has ended; -1 where there is none to be had."""
    with suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    return -1


def _refusal(error: HicacheError) -> bytes:
    return wire.frame(pb.HelloReply(error=to_wire(error)[1]))
