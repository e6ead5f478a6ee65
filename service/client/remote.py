"""Connections to a server on another machine: the same calls, and pages that travel in messages.

There is no memory to share over TCP, so this end makes some that looks the same: a sparse arena and a generation table
of its own, of the server's sizes, and staging memory. What a lease is given is fetched into the arena's slots before
`Acquire` answers, every piece of it with its checksum; what was written to staging is sent before `Commit` asks for it.
Everything above the transport, leases and reservations included, is as on the server's own machine; pages that no lease
holds any more give their memory back, and their slots show another generation.
"""

import asyncio
import itertools
import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import grpc
import grpc.aio
from crc32c import crc32c

from hicache.errors import BadRequest, CorruptPage, DeadlineExceeded, HicacheError
from hicache.service import wire
from hicache.service.client.calls import Request
from hicache.service.client.transport import (
    OPTIONS,
    AsyncGrpcTransport,
    Beat,
    GrpcTransport,
    OnEnd,
    OnNotice,
    error_of,
)
from hicache.service.errors import ServerFailure
from hicache.service.proto import hicache_pb2 as pb

MAX_PIECES: Final = 4
"""Pieces that are under way at a time."""
MAX_ARENA_BYTES: Final = 1 << 46
"""Largest arena of a server that is mirrored: addresses, not memory."""
_ENTER: Final = wire.path_of(wire.DOOR.methods_by_name["Enter"])
_KEEPALIVE: Final = (("grpc.keepalive_time_ms", 30_000), ("grpc.keepalive_timeout_ms", 10_000))
_NOT_HERE: Final = -1
"""Generation of a slot of which this end has no page."""

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
                mirror.let_go(reply.lease)
                with suppress(HicacheError):
                    super().call(Request("Release", pb.ReleaseRequest(ids=[reply.lease])), timeout_s)
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
                with suppress(HicacheError):
                    await super().call(Request("Release", pb.ReleaseRequest(ids=[reply.lease])), timeout_s)
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
