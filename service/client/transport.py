"""The one seam between what a client means and how it gets there.

`Transport` and `AsyncTransport` are what a client asks of a connection: a hello, calls, and the session's stream.
Behind them stand a Unix socket and gRPC; a test may put a server in the same process there.
"""

import asyncio
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from hicache.errors import DeadlineExceeded
from hicache.service import wire
from hicache.service.client.asking import Asking
from hicache.service.client.calls import REPLIES, Request
from hicache.service.errors import ServerFailure, Unreachable, error_of, from_error
from hicache.service.proto import hicache_pb2 as pb

MAX_FDS: Final = 3
"""Descriptors that come with a welcome, at most."""
_METHODS: Final = {method.name: wire.path_of(method) for method in wire.CACHE.methods}
OPTIONS: Final = (
    ("grpc.max_receive_message_length", wire.MAX_REPLY_BYTES),
    ("grpc.max_send_message_length", -1),
    # A server that is started again is another session anyway: nobody waits for a channel to come back.
    ("grpc.enable_retries", 0),
    # Otherwise a channel shares connections with others of the process to the same socket, and with them the pause
    # after one that was refused: a client that attaches to a restarted server would be told of the old server's end.
    ("grpc.use_local_subchannel_pool", 1),
)

Beat = Callable[[], pb.Beat]
OnNotice = Callable[[pb.Notice], None]
OnEnd = Callable[[], None]


class Transport(Protocol):
    """A connection whose calls block. Thread-safe."""

    def hello(self, hello: pb.Hello, timeout_s: float) -> tuple[pb.Welcome, list[int]]:
        """Begin a session: the welcome, and its descriptors, which are the caller's. Raises what the server refused it
        with; `Unreachable` when there is none."""
        ...

    def attach(self, token: bytes, beat_s: float, beat: Beat, on_notice: OnNotice, on_end: OnEnd) -> None:
        """Open the session's stream, and send what `beat` says every `beat_s` seconds until `close`. `on_notice` is
        called in a thread of the transport for each notice, `on_end` once when the stream has ended."""
        ...

    def call(self, request: Request, timeout_s: float) -> Any:
        """Make one call and wait for its reply. Raises the error that it failed with."""
        ...

    def close(self) -> None:
        """End the stream and all calls. Idempotent."""
        ...


class AsyncTransport(Protocol):
    """A connection whose calls are awaited, on one event loop."""

    async def hello(self, hello: pb.Hello, timeout_s: float) -> tuple[pb.Welcome, list[int]]:
        """See `Transport.hello`."""
        ...

    async def attach(self, token: bytes, beat_s: float, beat: Beat, on_notice: OnNotice) -> None:
        """Keep the session's stream until it ends, or the task is cancelled."""
        ...

    async def call(self, request: Request, timeout_s: float) -> Any:
        """See `Transport.call`."""
        ...

    async def close(self) -> None:
        """End all calls. Idempotent."""
        ...


class GrpcTransport:
    """A `Transport` over the sockets in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory: Final = directory
        self._channel: Final = self._open_channel()
        self._calls: Final = {
            name: self._channel.unary_unary(
                _METHODS[name], request_serializer=_packed, response_deserializer=kind.FromString
            )
            for name, kind in REPLIES.items()
        }
        self._metadata: tuple[tuple[str, bytes], ...] = ()
        self._asking: Final = Asking()
        self._threads: Final[list[threading.Thread]] = []

    def _open_channel(self) -> grpc.Channel:
        return grpc.insecure_channel(wire.address(os.fspath(self._directory / wire.DATA_SOCKET)), OPTIONS)

    def hello(self, hello: pb.Hello, timeout_s: float) -> tuple[pb.Welcome, list[int]]:
        """See `Transport.hello`."""
        return say_hello(self._directory, hello, timeout_s)

    def attach(self, token: bytes, beat_s: float, beat: Beat, on_notice: OnNotice, on_end: OnEnd) -> None:
        """See `Transport.attach`."""
        self._metadata = ((wire.TOKEN_METADATA, token),)

        stream = self._channel.stream_stream(
            _METHODS["Attach"], request_serializer=bytes, response_deserializer=pb.Notice.FromString
        )(self._asking.beats(beat_s, beat), metadata=self._metadata)

        def listen() -> None:
            with suppress(grpc.RpcError):
                for notice in stream:
                    if notice.number:
                        self._asking.hear(notice)
                    else:
                        on_notice(notice)
            self._asking.close()
            on_end()

        thread = threading.Thread(target=listen, name="hicache-session", daemon=True)
        self._threads.append(thread)
        thread.start()

    def call(self, request: Request, timeout_s: float) -> Any:
        """See `Transport.call`. Short look-ups travel on the session's stream."""
        if request.method == "Lookup" and len(request.tokens) < wire.SHORT_BYTES:
            return self._asking.look_up(_packed(request), timeout_s)
        try:
            return self._calls[request.method](request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_of(error) from None

    def close(self) -> None:
        """See `Transport.close`."""
        self._asking.close()
        self._channel.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


class AsyncGrpcTransport:
    """An `AsyncTransport` over the sockets in one directory. Made on the loop that uses it."""

    def __init__(self, directory: Path) -> None:
        self._directory: Final = directory
        self._channel: Final = self._open_channel()
        self._calls: Final = {
            name: self._channel.unary_unary(
                _METHODS[name], request_serializer=_packed, response_deserializer=kind.FromString
            )
            for name, kind in REPLIES.items()
        }
        self._metadata: tuple[tuple[str, bytes], ...] = ()

    def _open_channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(wire.address(os.fspath(self._directory / wire.DATA_SOCKET)), OPTIONS)

    async def hello(self, hello: pb.Hello, timeout_s: float) -> tuple[pb.Welcome, list[int]]:
        """See `Transport.hello`."""
        loop = asyncio.get_running_loop()
        welcome, fds = await loop.run_in_executor(None, say_hello, self._directory, hello, timeout_s)
        self._metadata = ((wire.TOKEN_METADATA, welcome.token),)
        return welcome, fds

    async def attach(self, token: bytes, beat_s: float, beat: Beat, on_notice: OnNotice) -> None:
        """See `AsyncTransport.attach`."""

        async def beats() -> AsyncIterator[pb.Beat]:
            while True:
                yield beat()
                await asyncio.sleep(beat_s)

        stream = self._channel.stream_stream(
            _METHODS["Attach"], request_serializer=_serialize, response_deserializer=pb.Notice.FromString
        )(beats(), metadata=((wire.TOKEN_METADATA, token),))
        try:
            async for notice in stream:
                on_notice(notice)
        except grpc.RpcError:
            return  # it has ended, for whatever reason
        finally:
            stream.cancel()

    async def call(self, request: Request, timeout_s: float) -> Any:
        """See `Transport.call`."""
        try:
            return await self._calls[request.method](request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_of(error) from None

    async def close(self) -> None:
        """See `AsyncTransport.close`."""
        await self._channel.close()


def say_hello(directory: Path, hello: pb.Hello, timeout_s: float) -> tuple[pb.Welcome, list[int]]:
    """One hello over the hello socket of a server. See `Transport.hello`."""
    timeout_s = max(timeout_s, 0.001)
    with socket.socket(socket.AF_UNIX) as connection:
        fds: list[int] = []
        try:
            try:
                _connect(connection, directory / wire.HELLO_SOCKET, timeout_s)
                connection.settimeout(timeout_s)
                connection.sendall(wire.frame(hello))
                data, fds, _, _ = socket.recv_fds(connection, wire.FRAME_HEAD + wire.MAX_HELLO_BYTES, MAX_FDS)
                while len(data) < wire.FRAME_HEAD or len(data) < wire.FRAME_HEAD + wire.framed_length(data[:4]):
                    if not (piece := connection.recv(wire.MAX_HELLO_BYTES)):
                        raise Unreachable("the server hung up")
                    data += piece
            except TimeoutError:
                raise DeadlineExceeded(f"no answer to the hello within {timeout_s:g} s") from None
            except OSError as error:
                raise Unreachable(f"{directory}: {error.strerror or error}") from None
            try:
                reply = pb.HelloReply.FromString(data[wire.FRAME_HEAD :])
            except DecodeError:
                raise ServerFailure("its answer to the hello cannot be read") from None
            if not reply.HasField("welcome"):
                raise from_error(reply.error)
            return reply.welcome, fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise


def _connect(connection: socket.socket, path: Path, timeout_s: float) -> None:
    """Wait also where others do whom the server has not let in yet: a socket with a timeout of Python's does not, it is
    refused."""
    connection.setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    )
    try:
        connection.connect(os.fspath(path))
    except BlockingIOError:
        raise TimeoutError from None


def _serialize(message: Any) -> bytes:
    return message.SerializeToString()  # type: ignore[no-any-return]  # of any message


def _packed(request: Request) -> bytes:
    return wire.with_tokens(request.message.SerializeToString(), request.tokens)
