"""The hello socket: who connects, as whom, and what they are given.

One plain connection is one hello: the kernel says which process is at the other end, the configuration which tenant it
may be, and the answer carries the session's token and the descriptors of its memory. gRPC could do neither.
"""

import asyncio
import hashlib
import hmac
import logging
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NoReturn

from hicache.errors import BadRequest, Closed, HicacheError
from hicache.service import wire
from hicache.service.errors import Forbidden, ServerFailure, VersionMismatch, to_wire
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.accepting import Acceptor
from hicache.service.server.session import Session
from hicache.service.server.sessions import Sessions
from hicache.service.server.staging import Staging
from hicache.tiers.host import HostTier

HELLO_S: Final = 5.0
"""How long a hello may take."""
MAX_HELLOS: Final = 64
"""Hellos under way at a time; who comes above that is hung up on."""
BACKLOG: Final = 128
_SO_PEERPIDFD: Final = 77  # has no name in `socket` yet; Linux 6.5
_CREDENTIALS: Final = struct.Struct("3i")

_log = logging.getLogger(__name__)


class HelloServer:
    """Answers hellos. Belongs to the event loop."""

    def __init__(
        self, path: str, sessions: Sessions, host: HostTier, tenants: Mapping[str, bytes | None]
    ) -> None:
        """Bind the socket at `path`, where nothing is."""
        self._sessions: Final = sessions
        self._host: Final = host
        self._tenants: Final = tenants
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

    def close(self) -> None:
        """Let nobody in any more; `run` is cancelled by its owner."""
        self._acceptor.close()

    async def run(self) -> NoReturn:
        """Accept until cancelled. Waits for nothing else."""
        await self._acceptor.run(self._handle)

    async def _handle(self, connection: socket.socket) -> None:
        session: Session | None = None
        try:
            async with asyncio.timeout(HELLO_S):
                try:
                    session, answer, fds = await self._answer(connection)
                except HicacheError as error:
                    answer, fds = _refusal(error), []
                except (OSError, MemoryError) as error:
                    _log.warning("a hello failed: %s", error)
                    answer, fds = _refusal(ServerFailure("the server is out of descriptors or memory")), []
                socket.send_fds(connection, [answer], fds)
        except (OSError, TimeoutError):
            # Whoever it was is gone, or waits for something else; a session nobody was told of is of no use.
            if session is not None:
                self._sessions.end(session, "its hello failed")

    async def _answer(self, connection: socket.socket) -> tuple[Session, bytes, list[int]]:
        """Begin a session for whoever is at the other end. Raises what is told to them."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(credentials)
        hello = wire.parse(pb.Hello, await _read_frame(connection))
        if hello.protocol != wire.PROTOCOL:
            raise VersionMismatch(f"protocol {hello.protocol} is asked for, {wire.PROTOCOL} is spoken here")
        if uid not in (os.geteuid(), 0):
            raise Forbidden("this user may not use this server")
        self._check_tenant(hello)
        if len(hello.name) > wire.MAX_NAME_CHARS:
            raise BadRequest("name", f"{len(hello.name)} characters are more than {wire.MAX_NAME_CHARS}")
        stride = self._host.slot_stride
        num_slots = min(hello.staging_bytes, self._sessions.limits.staging_bytes) // stride
        if hello.staging_bytes and not num_slots:
            raise BadRequest("staging_bytes", f"{hello.staging_bytes} bytes hold no slot of {stride}")
        self._sessions.reserve_staging(num_slots * stride)
        staging: Staging | None = None
        try:
            # Asked for before anything is allocated, and after: the process may be gone.
            pidfd = _pidfd(connection)
            try:
                if num_slots:
                    staging = await _make_staging(num_slots, stride)
                session, token = self._sessions.begin(
                    tenant=hello.tenant, name=hello.name, uid=uid, pid=pid, pidfd=pidfd, staging=staging
                )
            except BaseException:
                if pidfd >= 0:
                    os.close(pidfd)
                if staging is not None:
                    staging.close()
                raise
        except BaseException:
            self._sessions.unreserve_staging(num_slots * stride)
            raise
        fds = [self._host.fd, self._generations_fd, *([staging.fd] if staging is not None else [])]
        return session, wire.frame(pb.HelloReply(welcome=self._welcome(session, token))), fds

    def _check_tenant(self, hello: pb.Hello) -> None:
        """The tenant is one of the configuration's, and the secret its own."""
        if not self._tenants:
            if hello.tenant:
                raise Forbidden("this server has no tenants")
            return
        secret = self._tenants.get(hello.tenant)
        given = hashlib.sha256(hello.secret[: wire.MAX_SECRET_BYTES]).digest()
        # One answer for a tenant that there is not and for a wrong secret, after the same comparison.
        is_right = hmac.compare_digest(given, secret if secret is not None else given)
        if hello.tenant not in self._tenants or not is_right or len(hello.secret) > wire.MAX_SECRET_BYTES:
            raise Forbidden("there is no such tenant, or its secret is another one")

    def _welcome(self, session: Session, token: bytes) -> pb.Welcome:
        sessions, layout = self._sessions, self._sessions.cache.layout
        return pb.Welcome(
            protocol=wire.PROTOCOL,
            boot_id=sessions.boot.id,
            token=token,
            session_id=session.number,
            page_size=layout.page_size,
            page_bytes=layout.page_bytes,
            slot_stride=self._host.slot_stride,
            arena_slots=self._host.capacity_pages,
            staging_slots=session.staging.num_slots if session.staging is not None else 0,
            attach_ms=int(sessions.times.attach_s * 1000),
            lease_ms=int(sessions.times.lease_s * 1000),
            max_tokens=sessions.limits.max_tokens,
            max_leases=sessions.limits.max_leases,
            max_leased_pages=sessions.max_pages,
        )


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


async def _make_staging(num_slots: int, stride: int) -> Staging:
    """Staging memory, allocated by a thread. What nobody waits for any more is given back."""
    making = asyncio.get_running_loop().run_in_executor(None, Staging, num_slots, stride)
    try:
        await asyncio.wait([making])
    except asyncio.CancelledError:
        making.add_done_callback(lambda made: None if made.exception() else made.result().close())
        raise
    return making.result()


def _pidfd(connection: socket.socket) -> int:
    """A descriptor that is readable once the process at the other end has ended; -1 where there is none to be had."""
    with suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    return -1


def _refusal(error: HicacheError) -> bytes:
    return wire.frame(pb.HelloReply(error=to_wire(error)[1]))
