"""Connections to a server on another machine: the same calls, and pages that travel in messages.

There is no memory to share over TCP, so this end makes some that looks the same: a sparse arena and a generation table
of its own, of the server's sizes, and staging memory. What a lease is given is fetched into the arena's slots before
`Acquire` answers, every piece of it with its checksum; what was written to staging is sent before `Commit` asks for it.
Everything above the transport, leases and reservations included, is as on the server's own machine; pages that no lease
holds any more give their memory back, and their slots show another generation.
"""

import asyncio
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import grpc
import grpc.aio

from hicache.errors import BadRequest, DeadlineExceeded
from hicache.service import wire
from hicache.service.client.calls import Request
from hicache.service.client.mirror import Mirror
from hicache.service.client.transport import OPTIONS, AsyncGrpcTransport, Beat, GrpcTransport, OnEnd, OnNotice
from hicache.service.errors import error_of
from hicache.service.proto import hicache_pb2 as pb

MAX_PIECES: Final = 4
"""Pieces that are under way at a time."""
_ENTER: Final = wire.path_of(wire.DOOR.methods_by_name["Enter"])
_KEEPALIVE: Final = (("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 10_000))

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Remote:
    """A server on another machine, and what it asks for."""

    target: str
    """HOST:PORT."""
    is_plain: bool
    token: bytes
    ca: bytes | None
    """Certificates that the server's must derive from, PEM; None for those that this machine trusts."""
    certificate: tuple[bytes, bytes] | None
    """This client's own certificate chain and key, PEM, where the server asks for one."""

    @classmethod
    def of(
        cls, url: str, token: bytes | str, ca: str | os.PathLike[str] | None,
        certificate: "tuple[str | os.PathLike[str], str | os.PathLike[str]] | None",
    ) -> "Remote":  # fmt: skip
        """From what `connect` is given. Raises `BadRequest`."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise BadRequest("socket_dir", f"{url!r:.120}: {error}") from None
        if not parts.hostname or port is None or parts.path or parts.query or parts.username is not None:
            raise BadRequest("socket_dir", f"{url!r:.120} is not tls://HOST:PORT")
        if not token:
            raise BadRequest("token", "is missing: the access token of the server")
        if parts.scheme == "tcp" and (ca or certificate):
            raise BadRequest("ca", "is for tls://; tcp:// is not encrypted")
        return cls(
            target=parts.netloc,
            is_plain=parts.scheme == "tcp",
            token=token.encode() if isinstance(token, str) else bytes(token),
            ca=None if ca is None else _read("ca", ca),
            certificate=(
                None
                if certificate is None
                else (_read("certificate", certificate[0]), _read("certificate", certificate[1]))
            ),
        )

    def credentials(self) -> grpc.ChannelCredentials:
        """What a secure channel is made with."""
        chain, key = self.certificate if self.certificate is not None else (None, None)
        return grpc.ssl_channel_credentials(self.ca, key, chain)

    @property
    def access(self) -> tuple[tuple[str, bytes]]:
        """Metadata of the call that begins a session."""
        return ((wire.ACCESS_METADATA, self.token),)


def is_remote(socket_dir: object) -> bool:
    """Whether what `connect` is given names a server on another machine."""
    return isinstance(socket_dir, str) and socket_dir.startswith(("tls://", "tcp://"))


def _read(field: str, path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadRequest(field, f"{path}: {error.strerror}") from None


def _remaining(deadline: float) -> float:
    remaining = deadline - monotonic()
    if remaining <= 0:
        raise DeadlineExceeded("the call reached its deadline")
    return remaining


class RemoteTransport(GrpcTransport):
    """A `Transport` to a server on another machine."""

    def __init__(self, remote: Remote) -> None:
        self._remote: Final = remote
        self._mirror: Mirror | None = None
        super().__init__(Path())

    def _open_channel(self) -> grpc.Channel:
        options = (*OPTIONS, *_KEEPALIVE)
        if self._remote.is_plain:
            return grpc.insecure_channel(self._remote.target, options)
        return grpc.secure_channel(self._remote.target, self._remote.credentials(), options)

    def hello(self, hello: pb.Hello, timeout_s: float) -> tuple[pb.Welcome, list[int]]:
        """See `Transport.hello`. The descriptors are those of a mirror."""
        enter = self._channel.unary_unary(
            _ENTER, request_serializer=pb.Hello.SerializeToString, response_deserializer=pb.Welcome.FromString
        )
        try:
            welcome = enter(hello, timeout=max(timeout_s, 0.001), metadata=self._remote.access)
        except grpc.RpcError as error:
            raise error_of(error) from None
        self._mirror = Mirror(welcome)
        return welcome, self._mirror.fds

    def attach(self, token: bytes, beat_s: float, beat: Beat, on_notice: OnNotice, on_end: OnEnd) -> None:
        """See `Transport.attach`."""
        mirror = self._mirror
        assert mirror is not None, "it comes after the hello"
        super().attach(token, beat_s, lambda: mirror.beat(beat()), on_notice, on_end)

    def call(self, request: Request, timeout_s: float) -> Any:
        """See `Transport.call`. Fetches what a lease was given, and sends what is to be committed."""
        deadline, mirror, message = monotonic() + timeout_s, self._mirror, request.message
        assert mirror is not None, "calls come after the hello"
        if isinstance(message, pb.CommitRequest):
            self._send(mirror, message.reservation, deadline)
        reply = super().call(request, _remaining(deadline))
        if isinstance(reply, pb.AcquireReply) and reply.lease:
            try:
                self._fetch(mirror, message, reply, deadline)
            except BaseException:
                mirror.let_go(reply.lease)  # the next beat gives it back: the caller has not had it
                raise
        _note(mirror, message, reply)
        return reply

    def _send(self, mirror: Mirror, reservation: int, deadline: float) -> None:
        for batch in _batches(mirror.pieces_for(reservation)):
            self._at_once(batch, deadline)

    def _fetch(self, mirror: Mirror, message: Any, reply: pb.AcquireReply, deadline: float) -> None:
        for batch in _batches(iter(mirror.take(message, reply))):
            answers = self._at_once([request for request, _ in batch], deadline)
            for (request, at), answer in zip(batch, answers, strict=True):
                mirror.put(request, at, answer)
        mirror.show(reply)

    def _at_once(self, requests: list[Request], deadline: float) -> list[Any]:
        """Make calls side by side; their replies, in order. Waits for all, also where one fails."""
        timeout_s = _remaining(deadline)
        futures = [
            self._calls[each.method].future(each, timeout=timeout_s, metadata=self._metadata) for each in requests
        ]
        for future in futures:
            if (error := future.exception()) is not None:
                raise error_of(error) from None
        return [future.result() for future in futures]

    def close(self) -> None:
        """See `Transport.close`."""
        super().close()
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None


class AsyncRemoteTransport(AsyncGrpcTransport):
    """An `AsyncTransport` to a server on another machine."""

    def __init__(self, remote: Remote) -> None:
        self._remote: Final = remote
        self._mirror: Mirror | None = None
        super().__init__(Path())

    def _open_channel(self) -> grpc.aio.Channel:
        options = (*OPTIONS, *_KEEPALIVE)
        if self._remote.is_plain:
            return grpc.aio.insecure_channel(self._remote.target, options)
        return grpc.aio.secure_channel(self._remote.target, self._remote.credentials(), options)

    async def hello(self, hello: pb.Hello, timeout_s: float) -> tuple[pb.Welcome, list[int]]:
        """See `RemoteTransport.hello`."""
        enter = self._channel.unary_unary(
            _ENTER, request_serializer=pb.Hello.SerializeToString, response_deserializer=pb.Welcome.FromString
        )
        try:
            welcome = await enter(hello, timeout=max(timeout_s, 0.001), metadata=self._remote.access)
        except grpc.RpcError as error:
            raise error_of(error) from None
        self._metadata = ((wire.TOKEN_METADATA, welcome.token),)
        self._mirror = Mirror(welcome)
        return welcome, self._mirror.fds

    async def attach(self, token: bytes, beat_s: float, beat: Beat, on_notice: OnNotice) -> None:
        """See `AsyncTransport.attach`."""
        mirror = self._mirror
        assert mirror is not None, "it comes after the hello"
        await super().attach(token, beat_s, lambda: mirror.beat(beat()), on_notice)

    async def call(self, request: Request, timeout_s: float) -> Any:
        """See `RemoteTransport.call`."""
        deadline, mirror = monotonic() + timeout_s, self._mirror
        message: Any = request.message
        assert mirror is not None, "calls come after the hello"
        if isinstance(message, pb.CommitRequest):
            for requests in _batches(mirror.pieces_for(message.reservation)):
                await self._at_once(requests, deadline)
        reply = await super().call(request, _remaining(deadline))
        if isinstance(reply, pb.AcquireReply) and reply.lease:
            try:
                for batch in _batches(iter(mirror.take(message, reply))):
                    answers = await self._at_once([each for each, _ in batch], deadline)
                    for (piece, at), answer in zip(batch, answers, strict=True):
                        mirror.put(piece, at, answer)
                mirror.show(reply)
            except BaseException:
                mirror.let_go(reply.lease)
                raise
        _note(mirror, message, reply)
        return reply

    async def _at_once(self, requests: list[Request], deadline: float) -> list[Any]:
        """See `RemoteTransport._at_once`."""
        timeout_s = _remaining(deadline)
        answers: list[Any] = await asyncio.gather(
            *[super(AsyncRemoteTransport, self).call(each, timeout_s) for each in requests], return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    async def close(self) -> None:
        """See `AsyncTransport.close`."""
        await super().close()
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None


def _batches(pieces: Iterator[T]) -> Iterator[list[T]]:
    while batch := list(itertools.islice(pieces, MAX_PIECES)):
        yield batch


def _note(mirror: Mirror, message: object, reply: object) -> None:
    """Keep track of what the session holds."""
    if isinstance(reply, pb.ReserveReply):
        mirror.reserved(reply)
    elif isinstance(message, pb.CommitRequest):
        mirror.let_go(message.reservation)
    elif isinstance(message, pb.ReleaseRequest):
        for number in message.ids:
            mirror.let_go(number)
