"""Errors that only a service has, and how every error travels.

    HicacheError (hicache.errors)
    └── ServiceError
        ├── UnknownSession     the session ended, or was another boot's: say hello again
        ├── Forbidden          the user or its secret is not accepted
        ├── LimitReached       a bound of the session or of the server
        ├── UnknownHandle      what a handle named has left the cache: send the tokens
        ├── UnknownNamespace   the session's number of it was let go: register it again
        ├── LayoutMismatch     the server keeps pages of another layout
        ├── VersionMismatch    server and client speak other protocols
        ├── Draining           the server is about to stop and takes nothing new
        ├── Unreachable        no server answers
        └── ServerFailure      a mistake of the server's own, which has logged it

`WIRE` is the one table between types, gRPC status codes and reason codes. Both ends decide by the reason; the status is
for tools that know gRPC only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import grpc

from hicache.errors import (
    BadRequest,
    Closed,
    CorruptPage,
    DeadlineExceeded,
    HicacheError,
    LeaseExpired,
    NoRoom,
    NotResident,
    TierUnavailable,
)
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.wire import ERROR_METADATA

MAX_PROBLEM_CHARS: Final = 400
"""Longest text that an error carries over the wire."""


class ServiceError(HicacheError):
    """Base of what only a service raises. `field` names what it is about, empty where there is nothing to name."""

    reason: ClassVar[str] = "service"

    def __init__(self, problem: str, *, field: str = "") -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field
        self.problem = problem


class UnknownSession(ServiceError):
    """No session has this token. The client says hello again by itself; leases and handles of before are gone."""

    reason = "unknown_session"


class Forbidden(ServiceError):
    """The peer's user, its tenant or its secret is not accepted, or the call is the owner's alone."""

    reason = "forbidden"


class LimitReached(ServiceError):
    """A bound of the session or of the server is reached; `field` names it. Nothing was allocated."""

    reason = "limit"


class UnknownHandle(ServiceError):
    """The prefix that a handle named has left the cache, or the handle is not this session's: send all tokens."""

    reason = "unknown_handle"


class UnknownNamespace(ServiceError):
    """The session has no namespace of this number, or no more: register it again, and send all tokens. The client does
    both by itself."""

    reason = "unknown_namespace"


class LayoutMismatch(ServiceError):
    """The layout of a namespace is not the one that the server keeps pages of."""

    reason = "layout_mismatch"


class VersionMismatch(ServiceError):
    """The other end does not speak this protocol."""

    reason = "version_mismatch"


class Draining(ServiceError):
    """The server is about to stop and takes nothing new."""

    reason = "draining"


class Unreachable(ServiceError):
    """No server answers at the socket. Raised by clients alone; never sent."""

    reason = "unreachable"


class ServerFailure(ServiceError):
    """A mistake of the server's own. It has logged what happened; the call may have had an effect."""

    reason = "internal"


@dataclass(frozen=True, slots=True)
class Wire:
    """How one type of error travels."""

    status: grpc.StatusCode
    reason: "pb.Reason"
    rebuild: Callable[[pb.Error], HicacheError]
    """The error as the client raises it."""


def _service(kind: type[ServiceError]) -> Callable[[pb.Error], HicacheError]:
    return lambda error: kind(error.problem, field=error.field)


def _no_room(error: pb.Error) -> HicacheError:
    return NoRoom(
        error.field, pages_asked=error.pages_asked, pages_free=error.pages_free, problem=error.problem
    )


_Code = grpc.StatusCode
WIRE: Final[Mapping[type[HicacheError], Wire]] = {
    BadRequest: Wire(
        _Code.INVALID_ARGUMENT, pb.REASON_BAD_REQUEST, lambda error: BadRequest(error.field, error.problem)
    ),
    NoRoom: Wire(_Code.RESOURCE_EXHAUSTED, pb.REASON_NO_ROOM, _no_room),
    NotResident: Wire(
        _Code.NOT_FOUND, pb.REASON_NOT_RESIDENT, lambda error: NotResident(error.field, error.problem or "a page")
    ),
    LeaseExpired: Wire(
        _Code.FAILED_PRECONDITION, pb.REASON_LEASE_EXPIRED, lambda error: LeaseExpired(error.field, error.problem)
    ),
    DeadlineExceeded: Wire(
        _Code.DEADLINE_EXCEEDED, pb.REASON_DEADLINE_EXCEEDED, lambda error: DeadlineExceeded(error.problem)
    ),
    CorruptPage: Wire(
        _Code.DATA_LOSS, pb.REASON_CORRUPT_PAGE, lambda error: CorruptPage(error.field, error.slot, error.problem)
    ),
    TierUnavailable: Wire(
        _Code.UNAVAILABLE, pb.REASON_TIER_UNAVAILABLE, lambda error: TierUnavailable(error.field, error.problem)
    ),
    Closed: Wire(_Code.UNAVAILABLE, pb.REASON_CLOSED, lambda error: Closed(error.problem)),
    UnknownSession: Wire(_Code.UNAUTHENTICATED, pb.REASON_UNKNOWN_SESSION, _service(UnknownSession)),
    Forbidden: Wire(_Code.PERMISSION_DENIED, pb.REASON_FORBIDDEN, _service(Forbidden)),
    LimitReached: Wire(_Code.RESOURCE_EXHAUSTED, pb.REASON_LIMIT, _service(LimitReached)),
    UnknownHandle: Wire(_Code.NOT_FOUND, pb.REASON_UNKNOWN_HANDLE, _service(UnknownHandle)),
    UnknownNamespace: Wire(_Code.NOT_FOUND, pb.REASON_UNKNOWN_NAMESPACE, _service(UnknownNamespace)),
    LayoutMismatch: Wire(_Code.FAILED_PRECONDITION, pb.REASON_LAYOUT_MISMATCH, _service(LayoutMismatch)),
    VersionMismatch: Wire(_Code.FAILED_PRECONDITION, pb.REASON_VERSION_MISMATCH, _service(VersionMismatch)),
    Draining: Wire(_Code.UNAVAILABLE, pb.REASON_DRAINING, _service(Draining)),
    ServerFailure: Wire(_Code.INTERNAL, pb.REASON_INTERNAL, _service(ServerFailure)),
}
"""Every type that is sent. `ServiceError`, `HicacheError` and `Unreachable` themselves are not."""

_BY_REASON: Final = {wire.reason: wire for wire in WIRE.values()}
_BY_STATUS: Final[Mapping[grpc.StatusCode, type[ServiceError]]] = {
    _Code.UNAVAILABLE: Unreachable,
    _Code.CANCELLED: Unreachable,
    _Code.UNAUTHENTICATED: UnknownSession,
    _Code.PERMISSION_DENIED: Forbidden,
    _Code.RESOURCE_EXHAUSTED: LimitReached,
    _Code.UNIMPLEMENTED: VersionMismatch,
}
"""What gRPC itself answered, without an `Error`: nobody there, too many calls, too large a message."""


def to_wire(error: HicacheError) -> tuple[grpc.StatusCode, pb.Error]:
    """How `error` is sent: its status, and the message that goes with it. Types that are not in `WIRE` go as the
    nearest one that they derive from."""
    kind = next((each for each in type(error).__mro__ if each in WIRE), ServerFailure)
    wire = WIRE[kind]
    message = pb.Error(reason=wire.reason)
    problem = str(error)
    if isinstance(error, BadRequest | LeaseExpired | ServiceError):
        message.field, problem = error.field, error.problem
    elif isinstance(error, NoRoom | NotResident | CorruptPage | TierUnavailable):
        message.field = error.tier
        # What names the tier is put around it again at the other end.
        problem = problem.removeprefix(f"{error.tier}: ").removesuffix(f" is not resident in {error.tier}")
    if isinstance(error, NoRoom):
        message.pages_asked, message.pages_free = error.pages_asked, error.pages_free
    if isinstance(error, CorruptPage):
        message.slot, problem = error.slot, problem.removeprefix(f"{error.tier} slot {error.slot}: ")
    message.problem = problem[:MAX_PROBLEM_CHARS]
    return wire.status, message


def from_error(error: pb.Error) -> HicacheError:
    """The error that a message tells of."""
    wire = _BY_REASON.get(error.reason)
    return wire.rebuild(error) if wire is not None else _service(ServerFailure)(error)


def from_wire(status: grpc.StatusCode, details: str, message: bytes | None) -> HicacheError:
    """The error that a failed call stands for: `message` is its `Error`, packed, or None where gRPC itself failed."""
    if message is not None:
        return from_error(pb.Error.FromString(message))
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(details or "the call reached its deadline")
    return _BY_STATUS.get(status, ServerFailure)(details or status.name)


def error_of(error: Any) -> HicacheError:
    """The error that a failed call of gRPC, an `RpcError`, stands for."""
    packed = next((value for key, value in error.trailing_metadata() or () if key == ERROR_METADATA), None)
    return from_wire(error.code(), error.details() or "", packed)


def reason_of(error: HicacheError) -> "pb.Reason":
    """The reason code that stands for `error` in a reply."""
    return to_wire(error)[1].reason
