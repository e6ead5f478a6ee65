"""What each call sends, and what it makes of the reply, without any I/O.

A call is a generator: it yields requests, is sent their replies (or has an error thrown into it), and returns its
result. `hicache.service.client.client` carries them out with a channel that blocks, `aio` with one that is awaited; so
there is one place for what a call means.
"""

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from hicache.errors import BadRequest, LeaseExpired
from hicache.namespace import Namespace
from hicache.service.client.memory import Memory
from hicache.service.client.prompt import Prompt
from hicache.service.client.results import (
    TIER_NAMES,
    Committed,
    Durability,
    Lookup,
    Outcome,
    Pinned,
    Prefetched,
    reason_name,
)
from hicache.service.errors import UnknownHandle, UnknownNamespace
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.wire import unpack_int32, unpack_int64
from hicache.service.work import EngineWork

MAX_ABANDONED: Final = 4096
"""Abandoned calls that one beat may name."""
MAX_NAMESPACES: Final = 1024
"""Numbers of namespaces that a client remembers. A server may let one go sooner, and is asked for it again then."""
TRIES: Final = 4
"""So often a call is made whose namespace the server has let go each time before the call came: other threads of the
session register as many meanwhile as it may have."""
MAX_WORK: Final = 4096
"""Reports of an engine that wait for the next beat; where there are more, the oldest are lost."""
_NUMBERS: Final = count(1)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """One call to be made: the name of a method of the service `Cache`, and its message."""

    method: str
    message: Message
    tokens: memoryview = memoryview(b"")  # noqa: RUF009  # immutable
    """Packed ids that belong into the message's prefix (`hicache.service.wire.with_tokens`)."""


Steps = Generator[Request, Any, T]
"""A call under way: yields requests, is sent their replies."""


@dataclass(slots=True, eq=False)
class Attachment:
    """One session with one server, from its hello on."""

    welcome: pb.Welcome
    memory: Memory
    namespaces: dict[tuple[Namespace, int], int] = field(default_factory=dict)
    """Their numbers, at most `MAX_NAMESPACES`; what was registered first goes first."""
    durable_sequence: int = 0
    lost: set[int] = field(default_factory=set)
    """Promises of durability that were not kept."""
    abandoned: deque[int] = field(default_factory=deque)
    """Calls whose reply never came: what they were lent is given back with the next beat."""
    work: deque[EngineWork] = field(default_factory=lambda: deque(maxlen=MAX_WORK))
    """What is to be told of the engine with the next beat."""
    is_draining: bool = False
    is_over: bool = False
    """The session has ended, or its server has."""

    def beat(self) -> pb.Beat:
        """What is to be sent on the session's stream."""
        beat = pb.Beat()
        while self.abandoned and len(beat.abandoned) < MAX_ABANDONED:
            beat.abandoned.append(self.abandoned.popleft())
        if self.work:
            total = EngineWork()
            while self.work:
                total += self.work.popleft()
            beat.work.CopyFrom(total.to_message())
        return beat

    def report(self, work: EngineWork) -> None:
        """Tell with the next beat what the engine has done. Raises `BadRequest`. Any thread may call."""
        work.check()
        self.work.append(work)

    def called(self, prompt: Prompt, number: int) -> None:
        """The server calls a prompt's namespace and rank by this number. Any thread may call."""
        self.namespaces[prompt.namespace, prompt.rank] = number
        if len(self.namespaces) > MAX_NAMESPACES:
            oldest, *_ = list(self.namespaces)  # a copy, which is made in one step, whatever other threads do
            self.namespaces.pop(oldest, None)

    def let_go(self, prompt: Prompt, number: int) -> None:
        """The server knows a prompt's namespace no more by this number. Any thread may call."""
        if self.namespaces.get((prompt.namespace, prompt.rank)) == number:
            self.namespaces.pop((prompt.namespace, prompt.rank), None)

    @contextmanager
    def numbered(self) -> Iterator[int]:
        """A number for a call that is lent something; abandoned if the block does not end well."""
        number = next(_NUMBERS)
        try:
            yield number
        except BaseException:
            self.abandoned.append(number)
            raise

    def hear(self, notice: pb.Notice) -> None:
        """The server tells something on the session's stream."""
        self.durable_sequence = max(self.durable_sequence, notice.durable_sequence)
        self.lost.update(notice.lost)
        self.is_draining = notice.draining


@dataclass(frozen=True, slots=True)
class Granted:
    """What a lease was given."""

    lease_id: int
    num_tokens: int
    first_page: int
    slots: Any
    """`array("i")`: arena slots of the pages from `first_page` on."""
    generations: Any
    """`array("q")`, one a slot."""
    partial_tokens: int
    """Tokens of the last slot's page that are the prompt's, where that is a further page; else 0."""
    cut_short: str
    call: int
    """The client's number of the call."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a reservation was given."""

    outcome: Outcome
    reason: str
    reservation_id: int
    first_page: int
    staging_slots: Any
    """`array("i")`."""
    call: int
    """The client's number of the call."""


def _with_prefix(
    attachment: Attachment, prompt: Prompt, num_tokens: int, method: str, message: Any
) -> Steps[Any]:
    """Make a call about the first tokens of a prompt; again with all of them if the server has forgotten the handle, or
    the namespace. `message` has a prefix, which is filled in here."""
    if not isinstance(prompt, Prompt):
        raise BadRequest("prompt", f"{type(prompt).__name__} is no Prompt")
    prefix, failed = message.prefix, 0
    while True:
        prefix.namespace_id = yield from _namespace_of(attachment, prompt)
        prefix.handle, tokens = prompt.since(attachment, num_tokens)
        try:
            return (yield Request(method, message, tokens))
        except UnknownHandle:
            if not prefix.handle:
                raise
        except UnknownNamespace:
            failed += 1
            if failed == TRIES:
                raise
            attachment.let_go(prompt, prefix.namespace_id)
        prompt.forget()


def _namespace_of(attachment: Attachment, prompt: Prompt) -> Steps[int]:
    """What the session calls a prompt's namespace and rank."""
    # Asked of the prompt first: a namespace is long, and its hash costs more than all else here.
    number = prompt.number(attachment) or attachment.namespaces.get((prompt.namespace, prompt.rank), 0)
    if not number:
        register = pb.RegisterRequest(record=prompt.namespace.encode(), rank=prompt.rank)
        number = (yield Request("Register", register)).namespace_id
        attachment.called(prompt, number)
    prompt.called(attachment, number)
    return number


def lookup(attachment: Attachment, prompt: Prompt) -> Steps[Lookup]:
    """How much of a prompt is cached, and where."""
    reply = yield from _with_prefix(attachment, prompt, len(prompt), "Lookup", pb.LookupRequest())
    prompt.learn(attachment, reply.handle, reply.num_tokens)
    runs = tuple([(TIER_NAMES.get(run.tier, "?"), run.num_tokens) for run in reply.runs])
    return Lookup(reply.num_tokens, reply.partial_tokens, runs)


def acquire(attachment: Attachment, prompt: Prompt, first_page: int, partial: bool) -> Steps[Granted]:
    """Have what is cached of a prompt brought to the arena and kept there."""
    with attachment.numbered() as call:
        message = pb.AcquireRequest(first_page=first_page, call=call, partial=partial)
        reply = yield from _with_prefix(attachment, prompt, len(prompt), "Acquire", message)
    prompt.learn(attachment, reply.handle, reply.num_tokens)
    return Granted(
        reply.lease,
        reply.num_tokens,
        reply.first_page,
        unpack_int32(reply.slots),
        unpack_int64(reply.generations),
        reply.partial_tokens,
        reason_name(reply.cut_short),
        call,
    )


def pin(attachment: Attachment, prompt: Prompt) -> Steps[Pinned]:
    """Have what is cached of a prompt kept in the cache."""
    with attachment.numbered() as call:
        reply = yield from _with_prefix(attachment, prompt, len(prompt), "Pin", pb.PinRequest(call=call))
    return Pinned(reply.lease, reply.num_tokens)


def release(attachment: Attachment, ids: list[int]) -> Steps[int]:
    """Give leases and reservations back."""
    reply = yield Request("Release", pb.ReleaseRequest(ids=ids))
    return int(reply.num_released)


def reserve(attachment: Attachment, prompt: Prompt, num_tokens: int | None, first_page: int) -> Steps[Reserved]:
    """Ask for room for the pages of a prompt that are not cached."""
    page_size = attachment.welcome.page_size
    whole = len(prompt) // page_size * page_size
    if num_tokens is None:
        num_tokens = whole
    if not 1 <= num_tokens <= whole or num_tokens % page_size:
        problem = f"{num_tokens} is not one or more whole pages of {page_size} within {len(prompt)} tokens"
        raise BadRequest("num_tokens", problem)
    with attachment.numbered() as call:
        message = pb.ReserveRequest(first_page=first_page, call=call)
        reply = yield from _with_prefix(attachment, prompt, num_tokens, "Reserve", message)
    return Reserved(
        Outcome(reply.outcome),
        reason_name(reply.reason),
        reply.reservation,
        reply.first_page,
        unpack_int32(reply.staging_slots),
        call,
    )


def commit(
    attachment: Attachment, of: Attachment, reserved: Reserved, prompt: Prompt, durability: Durability, checksums: bytes
) -> Steps[Committed]:
    """Say that a reservation's staging slots hold its pages. `of` is the session that it was made in."""
    if attachment is not of or of.is_over:
        raise LeaseExpired("reservation", "its session has ended")
    message = pb.CommitRequest(
        reservation=reserved.reservation_id, durability=durability.value, checksums=checksums
    )
    reply = yield Request("Commit", message)
    prompt.learn(attachment, reply.handle, reply.num_tokens)
    attachment.durable_sequence = max(attachment.durable_sequence, reply.durable_sequence)
    return Committed(Outcome(reply.outcome), reason_name(reply.reason), reply.num_tokens, reply.sequence)


def publish(attachment: Attachment, prompt: Prompt, num_tokens: int, withdraw: bool) -> Steps[int]:
    """Let other tenants have what is cached of a prompt's first tokens, or end that."""
    message = pb.PublishRequest(withdraw=withdraw)
    reply = yield from _with_prefix(attachment, prompt, num_tokens, "Publish", message)
    return int(reply.num_tokens)


def prefetch(attachment: Attachment, prompt: Prompt, within_s: float, max_pages: int) -> Steps[Prefetched]:
    """Have what NVMe alone has of a prompt brought to the arena."""
    milliseconds = max(1, round(within_s * 1000))
    message = pb.PrefetchRequest(within_ms=milliseconds, max_pages=max_pages)
    reply = yield from _with_prefix(attachment, prompt, len(prompt), "Prefetch", message)
    return Prefetched(reply.num_there, reply.num_begun, reply.num_left_out)


def hint(attachment: Attachment, prompt: Prompt, message: pb.HintRequest) -> Steps[int]:
    """Say what is known of the future of a prompt."""
    reply = yield from _with_prefix(attachment, prompt, len(prompt), "Hint", message)
    return int(reply.num_tokens)


def make_hint(
    priority: int, retain_s: float | None, expected_return_s: float | None, returns: bool | None
) -> pb.HintRequest:
    """The message of a hint. Raises `BadRequest` for numbers that no message can carry; the server knows the bounds."""
    if not -(2**31) <= priority < 2**31:
        raise BadRequest("priority", f"{priority} is not an integer of 32 bits")
    message = pb.HintRequest(priority=priority)
    if retain_s is not None:
        message.retain_ms = _milliseconds("retain_s", retain_s)
    if expected_return_s is not None:
        message.expected_return_ms = _milliseconds("expected_return_s", expected_return_s)
    if returns is not None:
        message.returns = returns
    return message


def _milliseconds(field: str, seconds: float) -> int:
    if not 0 <= seconds < 1e12:
        raise BadRequest(field, f"{seconds} is not a number of seconds from now")
    return round(seconds * 1000)


REPLIES: Final[Mapping[str, type[Message]]] = {
    "Register": pb.RegisterReply,
    "Lookup": pb.LookupReply,
    "Acquire": pb.AcquireReply,
    "Pin": pb.PinReply,
    "Release": pb.ReleaseReply,
    "Reserve": pb.ReserveReply,
    "Commit": pb.CommitReply,
    "Prefetch": pb.PrefetchReply,
    "Hint": pb.HintReply,
    "Publish": pb.PublishReply,
    "Read": pb.ReadReply,
    "Write": pb.WriteReply,
}
"""What each method answers."""
