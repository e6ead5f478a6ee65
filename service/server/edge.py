"""The edge of every call: limits, parsing, session and deadline on the way in, errors on the way out.

What stands behind it sees a parsed message, a session and a deadline, and raises errors of `hicache.errors` or
`hicache.service.errors`. Nothing that a client sends ends more than its own call.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from hicache.clock import Clock
from hicache.errors import DeadlineExceeded, HicacheError
from hicache.service.config import Limits, Times
from hicache.service.errors import Forbidden, LimitReached, ServerFailure, UnknownSession, to_wire
from hicache.service.metrics import CallTimes
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.intake import AT_ONCE, NOTHING, Intake, Received
from hicache.service.server.session import Session
from hicache.service.server.sessions import Sessions
from hicache.service.tracing import Tracing
from hicache.service.wire import ACCESS_METADATA, ERROR_METADATA, TOKEN_METADATA, longest_request, parse

REPLY_S: Final = 0.25
"""So long before a call's deadline the server stops waiting, or a fifth of its time before where that is less: an
answer with what there is then still arrives."""

LOOKAHEAD_BYTES: Final = 256 << 10
"""What a connection may hold of a message that is not being received yet."""
MAX_UNREAD_BYTES: Final = 8 << 20
"""Replies of a session that its client has not read: where there are more, no call of it is carried out until it has
read some."""
COUNTED_BYTES: Final = 64 << 10
"""Shorter replies are not counted there: what calls may be under way bounds them well enough."""
MAX_STREAMS: Final = 256
"""Calls of a connection, if a session may not have half as many. Far more than one client makes: those beyond wait at
their client, or fail where they come before it knows the bound."""
_NO_BOUND: Final = (1 << 31) - 1

R = TypeVar("R", bound=Message)
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """One call under way."""

    deadline: float
    """Monotonic seconds until which what stands behind the edge may wait."""
    owner: Session | None
    """The session whose token it carried; None on the admin socket."""

    @property
    def session(self) -> Session:
        """The session that the call belongs to."""
        assert self.owner is not None, "a call of the data socket has a session"
        return self.owner


class Stream:
    """A session's stream: what the client says, what it is told, and the calls that travel on it."""

    def __init__(
        self,
        session: Session,
        said: AsyncIterator[bytes],
        context: Context,
        clock: Clock,
        times: CallTimes,
        tracing: Tracing | None,
    ) -> None:
        self.session: Final = session
        self.said: Final = said
        """The client's messages."""
        self._context: Final = context
        self._clock: Final = clock
        self._times: Final = times
        self._tracing: Final = tracing
        self._turn: Final = asyncio.Lock()

    async def send(self, message: Message) -> None:
        """Tell the client something. Waits for a client that does not read, and for others who send. Raises
        `CancelledError` when it has gone."""
        async with self._turn:
            try:
                await self._context.write(message.SerializeToString())
            except grpc.aio.InternalError:
                raise asyncio.CancelledError from None

    def answer(self, path: str, request: Message, answer: Callable[[], R]) -> R | pb.Error:
        """Carry out a call that travelled on the stream, under its name on the wire: its reply, or why it has
        failed. It is counted and traced as a call of its own would be."""
        began, code = self._clock.monotonic(), grpc.StatusCode.OK
        reply: R | pb.Error
        try:
            reply = answer()
        except Exception as error:
            code, reply = _refusal(error)
        took_s = self._clock.monotonic() - began
        self._times.note(path.rpartition("/")[2], code.name, took_s)
        if self._tracing is not None:
            self._tracing.note(path, code, took_s, request.ByteSize(), reply.ByteSize())
        return reply


Unary = Callable[[Call, Any], Awaitable[Message]]
"""Answers one message with one."""
Streaming = Callable[[Call, Any], AsyncIterator[Message]]
"""Answers one message with several."""


class Edge:
    """The edge of one service. Belongs to the event loop."""

    def __init__(
        self,
        clock: Clock,
        *,
        max_call_s: float,
        sessions: Sessions | None,
        times: CallTimes,
        intake: Intake,
        access_sha256: bytes | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`sessions`: where tokens are looked up; None for a service whose calls carry none. `times`: where calls are
        counted, but for a session's stream. `intake`: receives the calls' messages, but for a stream's.
        `access_sha256`: of the access token that every call must carry. `tracing`: told of calls that gRPC does not
        see."""
        self._clock: Final = clock
        self._max_call_s: Final = max_call_s
        self._sessions: Final = sessions
        self._times: Final = times
        self._intake: Final = intake
        self._turns: Final = WeakValueDictionary[str, asyncio.Semaphore]()
        """For calls that belong to no session, by where they come from; while there are any."""
        self._access_sha256: Final = access_sha256
        self._tracing: Final = tracing

    def handler(self, service: ServiceDescriptor, calls: object) -> grpc.GenericRpcHandler:
        """The service as gRPC takes it. `calls` has for each method a coroutine function (or, for one that streams, an
        asynchronous generator function) of the method's name as Python writes it; one whose client streams is given a
        `Stream`."""
        return grpc.method_handlers_generic_handler(
            service.full_name,
            {method.name: self._method(method, getattr(calls, _snake(method.name))) for method in service.methods},
        )

    def _method(self, method: MethodDescriptor, call: Callable[..., Any]) -> "grpc.RpcMethodHandler[Any, Any]":
        kind = GetMessageClass(method.input_type)
        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(self._stream(call))
        if method.server_streaming:
            return grpc.stream_stream_rpc_method_handler(self._unary_stream(method.name, kind, call))
        return grpc.stream_unary_rpc_method_handler(self._unary(method.name, kind, call))

    # The one message of the next two is received by `Intake`, not by gRPC, which would do it unasked.

    def _unary(self, name: str, kind: type[Message], answer: Unary) -> Callable[[object, Context], Awaitable[bytes]]:
        async def handle(_: object, context: Context) -> bytes:
            remaining, received = self._remaining(context), NOTHING
            try:
                with self._timed(name), self._admitted(context, remaining) as call:
                    async with asyncio.timeout(remaining):
                        received = await self._received(context, call)
                        reply = (await answer(call, parse(kind, received.data))).SerializeToString()
                        self._note_reply(call, reply)
                        return reply
            except Exception as error:
                await _refuse(context, error)
                raise
            finally:
                self._intake.let_go(received)

        return handle

    def _unary_stream(
        self, name: str, kind: type[Message], answer: Streaming
    ) -> Callable[[object, Context], AsyncIterator[bytes]]:
        async def handle(_: object, context: Context) -> AsyncIterator[bytes]:
            remaining, received = self._remaining(context), NOTHING
            try:
                with self._timed(name), self._admitted(context, remaining) as call:
                    async with asyncio.timeout(remaining):
                        received = await self._received(context, call)
                        async for reply in answer(call, parse(kind, received.data)):
                            yield reply.SerializeToString()
            except Exception as error:
                await _refuse(context, error)
                raise
            finally:
                self._intake.let_go(received)

        return handle

    def _stream(
        self, answer: Callable[[Stream], Awaitable[None]]
    ) -> Callable[[AsyncIterator[bytes], Context], Awaitable[None]]:
        sessions = self._sessions
        assert sessions is not None, "a stream belongs to a session"

        async def handle(said: AsyncIterator[bytes], context: Context) -> None:
            try:
                session = self._session(context)
                self._check_open(session, sessions)
                sessions.note_call(session)
                await _begin(context)
                await answer(Stream(session, said, context, self._clock, self._times, self._tracing))
            except Exception as error:
                await _refuse(context, error)
                raise

        return handle

    def _remaining(self, context: Context) -> float:
        """Seconds that the call has."""
        given = context.time_remaining()
        return self._max_call_s if given is None else max(0.0, min(given, self._max_call_s))

    def _timed(self, name: str) -> "_Timed":
        return _Timed(self._times, self._clock, name)

    def _admitted(self, context: Context, remaining: float) -> "_Admitted":
        """One call more of its session while the block runs."""
        deadline = self._clock.monotonic() + remaining - min(REPLY_S, remaining / 5)
        if self._sessions is None:
            self._check_access(context)
            return _Admitted(Call(deadline, None))
        session, limits = self._session(context), self._sessions.limits
        most = limits.max_calls_per_session
        if session.num_calls >= most:
            raise LimitReached(f"{most} calls are under way", field="max_calls_per_session")
        self._check_open(session, self._sessions)
        self._sessions.note_call(session)
        return _Admitted(Call(deadline, session))

    def _check_open(self, session: Session, sessions: Sessions) -> None:
        """Raise `LimitReached` if gRPC holds as many calls and streams of the session as it may, by itself or with
        others."""
        limits = sessions.limits
        most = limits.max_calls_per_session
        if session.num_open > 2 * most:
            raise LimitReached(f"answers of more than {most} calls were not read", field="max_calls_per_session")
        if not sessions.may_open(session):
            raise LimitReached(f"{session.num_open} are under way, and no more may be", field="max_calls")

    async def _received(self, context: Context, call: Call) -> Received:
        """The call's message, once the session's long replies are read. Raises `UnknownSession` where its session has
        ended meanwhile: who is lent nothing need give nothing back."""
        owner = call.owner
        if owner is None:
            machine = context.peer().rpartition(":")[0]  # "ipv4:192.0.2.1:50000"; "unix:" for all that are local
            return await self._intake.receive(context, self._turns.setdefault(machine, asyncio.Semaphore(AT_ONCE)))
        received = await self._intake.receive(context, owner.turns, owner.peer)
        try:
            # Who asks for many pieces at once over a slow connection waits here for those before.
            while owner.unread_bytes > MAX_UNREAD_BYTES and not owner.ended.is_set():
                owner.was_read.clear()
                await owner.was_read.wait()
            if owner.ended.is_set():
                raise UnknownSession("it has ended while the message came")
        except BaseException:
            self._intake.let_go(received)
            raise
        return received

    def _note_reply(self, call: Call, reply: bytes) -> None:
        """A call's reply is about to be sent."""
        if call.owner is not None and self._sessions is not None and len(reply) >= COUNTED_BYTES:
            self._sessions.note_reply(call.owner, len(reply))

    def _check_access(self, context: Context) -> None:
        if self._access_sha256 is not None:
            given = hashlib.sha256(_carried(context, ACCESS_METADATA) or b"").digest()
            if not hmac.compare_digest(given, self._access_sha256):
                raise Forbidden("the call carries no access token, or another one")

    def _session(self, context: Context) -> Session:
        assert self._sessions is not None
        token = _carried(context, TOKEN_METADATA)
        if token is None:
            raise UnknownSession(f"the call carries no {TOKEN_METADATA}")
        return self._sessions.of_token(token)


# The next two are entered for every call, and cost half of what a generator would.


class _Timed:
    """Counts how long the block took, and how it ended; left by a cancellation means that nobody waits any more."""

    __slots__ = ("_began", "_clock", "_name", "_times")

    def __init__(self, times: CallTimes, clock: Clock, name: str) -> None:
        self._times: Final = times
        self._clock: Final = clock
        self._name: Final = name

    def __enter__(self) -> None:
        self._began = self._clock.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = grpc.StatusCode.OK
        if isinstance(error, Exception):
            code, _ = to_wire(_known(error) or ServerFailure("has a bug"))
        elif error is not None:
            code = grpc.StatusCode.CANCELLED
        self._times.note(self._name, code.name, self._clock.monotonic() - self._began)


class _Admitted:
    """Counts a call as its session's while the block runs."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call: Final = call

    def __enter__(self) -> Call:
        if self._call.owner is not None:
            self._call.owner.num_calls += 1
        return self._call

    def __exit__(self, *_: object) -> None:
        if self._call.owner is not None:
            self._call.owner.num_calls -= 1


def _carried(context: Context, name: str) -> bytes | None:
    """What a call carries as metadata of that name."""
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, bytes):
            return value
    return None


def _snake(name: str) -> str:
    """`PinPrefix` as `pin_prefix`."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


async def _begin(context: Context) -> None:
    """Send the headers of a stream's answers. gRPC takes them for unsent where the first answer is given up while it
    waits for a client that does not read, sends them again with the status, and by that fails to send that."""
    try:
        await context.send_initial_metadata(())
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None  # the caller has gone


async def _refuse(context: Context, error: Exception) -> None:
    """End the call with the status of an error. Raises what gRPC's `abort` does; `CancelledError` where nobody waits
    for an answer any more."""
    if isinstance(error, grpc.aio.AbortError):
        return
    status, message = _refusal(error)
    # gRPC's details are one line of a header, in which only printable ASCII is safe.
    details = message.problem.encode("ascii", "replace").decode()
    try:
        await context.abort(status, details, ((ERROR_METADATA, message.SerializeToString()),))
    except grpc.aio.InternalError:
        # gRPC has ended the call itself: its message was too long, or the caller has gone.
        raise asyncio.CancelledError from None


def _refusal(error: Exception) -> tuple[grpc.StatusCode, pb.Error]:
    """What an error is on the wire. One that nobody expects is logged, under a number that the client is told."""
    known = _known(error)
    if known is None:
        number = secrets.token_hex(4)
        _log.error("a call failed, number %s", number, exc_info=error)
        known = ServerFailure(f"the server has logged it as number {number}")
    return to_wire(known)


def _known(error: Exception) -> HicacheError | None:
    """An error in the project's words; None for one that nobody expects."""
    if isinstance(error, HicacheError):
        return error
    return DeadlineExceeded("the call reached its deadline") if isinstance(error, TimeoutError) else None


def options(limits: Limits, times: Times) -> Sequence[tuple[str, int]]:
    """Settings of a server: nothing longer than the longest message is read from a socket."""
    silent_ms = int(times.lease_s * 1000)
    return (
        ("grpc.max_receive_message_length", longest_request(limits.max_tokens)),
        # What a connection holds that is not read from is bounded by these: so many calls, for as long as its session
        # may be silent, and as long again. Where not even the ping fits into the socket any more the kernel ends it
        # that is TCP's, and `Unread` others.
        ("grpc.max_concurrent_streams", max(MAX_STREAMS, 2 * limits.max_calls_per_session)),
        # Those of all connections that wait to be looked at are not counted together: gRPC would cancel any client's
        # call, without a reason, because of what others have sent.
        ("grpc.server.max_pending_requests", _NO_BOUND),
        ("grpc.server.max_pending_requests_hard_limit", _NO_BOUND),
        ("grpc.keepalive_time_ms", silent_ms),
        ("grpc.keepalive_timeout_ms", silent_ms),
        ("grpc.http2.ping_timeout_ms", silent_ms),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", 8 << 10),
        ("grpc.so_reuseport", 0),
        # Otherwise windows grow with the speed of a connection, and hold what nobody has asked for yet.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
    )
