"""Sessions, and everything that is lent over the wire: each thing has one session, whose end gives it back.

A session ends when its stream ends, when its process ends (a pidfd tells at once, where the kernel gives one), when it
was silent for the lease time, when it never came to its stream, or when the server stops. Whatever the reason, `end`
gives back exactly what the session holds, without waiting: the one thing that outlives it is a copy under way, which
gives its slots back by itself (`hicache.service.server.storing`).
"""

import asyncio
import hashlib
import itertools
import logging
import os
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from hicache.cache import Cache
from hicache.errors import BadRequest, LeaseExpired
from hicache.lease import Lease, Pin
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.service.config import Limits, Times
from hicache.service.errors import Draining, LayoutMismatch, LimitReached, UnknownHandle, UnknownSession
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.promises import Promises
from hicache.service.server.staging import Staging
from hicache.service.wire import TOKEN_BYTES
from hicache.tier import HOST, Slots
from hicache.tree import Match

TICK_S: Final = 0.2
"""How often sessions are looked at for silence."""
HANDLE_TICKS: Final = 16
"""Every so many ticks a session's handles and calls are looked through."""
MAX_ABANDONED: Final = 4096
"""Abandoned calls of a session that are remembered, and that one beat may name."""

Tokens = npt.NDArray[np.int32]
_INT32: Final = np.dtype("<i4")
_log = logging.getLogger(__name__)


class Boot:
    """One start of the server: its id, and the ids that it gives out."""

    def __init__(self) -> None:
        self.id: Final = secrets.randbits(63) | 1 << 32
        """Another number after each start; its upper half is not 0."""
        self._last = 0

    def next_id(self) -> int:
        """An id that was never given out, by this start or, but for one chance in four billion, by another."""
        self._last += 1
        return self.id >> 32 << 32 | self._last & 0xFFFF_FFFF


@dataclass(slots=True, eq=False)
class Lent:
    """A lease that a session has."""

    lease: Lease
    pin: Pin | None
    """Keeps pages in place in the arena; None for a lease that keeps them in the cache alone."""
    num_pages: int
    """Pages kept in place."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for pages that a session is about to write. Its slots are in no tree."""

    namespace_id: int
    namespace: Namespace
    tokens: Tokens
    """From the root to the end of the last page."""
    first_page: int
    slots: Slots
    """In the host tier."""
    staging_slots: Slots
    lease: Lease
    """Keeps the pages before `first_page`."""


@dataclass(frozen=True, slots=True)
class Handle:
    """A prefix that was told to the session: the first `num_pages` pages on the path to a node's end."""

    namespace_id: int
    node: Node
    num_pages: int


@dataclass(slots=True, eq=False)
class Session:
    """One attached process, and all it holds. Belongs to the event loop."""

    number: int
    """Shown to people."""
    tenant: str
    name: str
    """As the client calls itself."""
    uid: int
    pid: int
    key: bytes
    """SHA-256 of its token."""
    staging: Staging | None
    last_heard: float
    """Monotonic seconds: when the session was made, or its last beat."""
    is_attached: bool = False
    num_calls: int = 0
    """Calls under way."""
    num_pages: int = 0
    """Arena pages that leases and reservations keep in place."""
    namespaces: list[Namespace] = field(default_factory=list)
    handles: OrderedDict[int, Handle] = field(default_factory=OrderedDict)
    calls: dict[int, int] = field(default_factory=dict)
    """What was lent to which call of the client's numbering, while it lasts."""
    abandoned: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Calls that were given up before they were lent anything."""
    leases: dict[int, Lent] = field(default_factory=dict)
    reservations: dict[int, Reservation] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the stream has something to tell."""
    pidfd: int = -1
    promises: Promises = field(init=False)

    def __post_init__(self) -> None:
        self.promises = Promises(self.news.set)

    @property
    def owner(self) -> str:
        """What the session's leases are owned by in the tree."""
        return f"session-{self.number}"

    @property
    def is_idle(self) -> bool:
        """Whether it holds nothing and waits for nothing."""
        return not (self.leases or self.reservations or self.num_calls or self.promises.num_open)

    def namespace(self, namespace_id: int) -> Namespace:
        """A namespace that was registered. Raises `BadRequest`."""
        if not 1 <= namespace_id <= len(self.namespaces):
            raise BadRequest("prefix.namespace_id", f"{namespace_id} was not registered by this session")
        return self.namespaces[namespace_id - 1]


class Sessions:
    """All sessions of a server."""

    def __init__(self, cache: Cache, limits: Limits, times: Times) -> None:
        self.cache: Final = cache
        self.limits: Final = limits
        self.times: Final = times
        self.boot: Final = Boot()
        self.is_draining = False
        self.num_begun = 0
        """Sessions since the start."""
        self.ended: Final[dict[str, int]] = {}
        """How many ended for which reason."""
        self.max_pages: Final = max(1, int(cache.tiers[HOST].capacity_pages * limits.leased_share))
        """Arena pages that one session may keep in place."""
        self._by_key: Final[dict[bytes, Session]] = {}
        self._staged_bytes = 0

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    # -- beginning and end --------------------------------------------------------------------------------------------

    def reserve_staging(self, num_bytes: int) -> None:
        """Count staging memory that is about to be allocated, before it is. Raises `LimitReached`, `Draining`."""
        if self.is_draining:
            raise Draining("the server is about to stop")
        if len(self) >= self.limits.max_sessions:
            raise LimitReached(f"{len(self)} are all that there may be", field="max_sessions")
        if self._staged_bytes + num_bytes > self.limits.total_staging_bytes:
            raise LimitReached(f"all sessions have {self._staged_bytes} bytes already", field="total_staging_bytes")
        self._staged_bytes += num_bytes

    def unreserve_staging(self, num_bytes: int) -> None:
        """Take back what `reserve_staging` counted: no session came of it, or it has ended."""
        self._staged_bytes -= num_bytes

    def begin(
        self, *, tenant: str, name: str, uid: int, pid: int, pidfd: int, staging: Staging | None
    ) -> tuple[Session, bytes]:
        """A new session, and its token. `pidfd` and the staging memory, which was counted, are the session's now."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self.num_begun += 1
        session = Session(
            number=self.num_begun, tenant=tenant, name=name, uid=uid, pid=pid, key=_key(token), staging=staging,
            last_heard=self.cache.clock.monotonic(), pidfd=pidfd,
        )  # fmt: skip
        self._by_key[session.key] = session
        if pidfd >= 0:
            asyncio.get_running_loop().add_reader(pidfd, self.end, session, "its process ended")
        return session, token

    def of_token(self, token: bytes) -> Session:
        """The session that a token names. Raises `UnknownSession`."""
        # Looked up by a digest: how long it takes tells nothing about tokens.
        session = self._by_key.get(_key(token))
        if session is None:
            raise UnknownSession("it has ended, or the server was started again; say hello again")
        return session

    def end(self, session: Session, why: str) -> None:
        """End a session and give back what it holds. Does not wait; again is harmless."""
        if self._by_key.pop(session.key, None) is None:
            return
        self.ended[why] = self.ended.get(why, 0) + 1
        _log.info("session %d ended: %s", session.number, why)
        if session.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(session.pidfd)
            os.close(session.pidfd)
        for number in [*session.leases, *session.reservations]:
            self.release(session, number)
        if session.staging is not None:
            self.unreserve_staging(session.staging.num_slots * session.staging.stride)
            session.staging.close()
        session.handles.clear()
        session.ended.set()
        session.news.set()

    def drain(self) -> None:
        """Take no new session, and tell those there are."""
        self.is_draining = True
        for session in self:
            session.news.set()

    async def watch(self) -> NoReturn:
        """End sessions that are silent, until cancelled. Also forgets handles whose prefix has left."""
        for tick in itertools.count():
            await asyncio.sleep(TICK_S)
            now = self.cache.clock.monotonic()
            for session in self:
                if now - session.last_heard > (self.times.lease_s if session.is_attached else self.times.attach_s):
                    self.end(session, "it was silent" if session.is_attached else "it never attached")
                elif (session.number + tick) % HANDLE_TICKS == 0:
                    self._forget_handles(session)
        raise AssertionError("counting has no end")

    # -- what sessions hold -------------------------------------------------------------------------------------------

    def require(self, session: Session) -> None:
        """Raise `UnknownSession` if it has ended, which may happen while one of its calls waits."""
        if session.ended.is_set():
            raise UnknownSession("it has ended")

    def register(self, session: Session, record: bytes) -> int:
        """The number of a namespace in the session's calls, from 1. Raises `BadRequest`, `LayoutMismatch`,
        `LimitReached`."""
        named = Namespace.decode(record)
        if named.tenant:
            raise BadRequest("record", "names a tenant; that is the session's")
        if named.layout != self.cache.layout:
            raise LayoutMismatch(
                f"pages of {named.layout.page_bytes} bytes and {named.layout.page_size} tokens are not those of this "
                f"server, or are laid out otherwise", field="record",
            )  # fmt: skip
        if named.num_ranks != 1:
            raise BadRequest("record", f"{named.num_ranks} parallel ranks; this server keeps pages of 1")
        owned = replace(named, tenant=session.tenant)
        if owned in session.namespaces:
            return session.namespaces.index(owned) + 1
        if len(session.namespaces) >= self.limits.max_namespaces:
            raise LimitReached(f"{len(session.namespaces)} are all that there may be", field="max_namespaces")
        session.namespaces.append(owned)
        return len(session.namespaces)

    def resolve(self, session: Session, prefix: pb.Prefix) -> tuple[Namespace, Tokens]:
        """What a prefix means: its namespace, and all its token ids. Raises `BadRequest`, `UnknownHandle`,
        `LimitReached`."""
        namespace, node, num_known, tokens = self._parts(session, prefix)
        if node is None:
            return namespace, tokens
        return namespace, np.concatenate([self.cache.tree.tokens_of(node)[:num_known], tokens])

    def match(self, session: Session, prefix: pb.Prefix) -> Match:
        """What is cached of a prefix; only what lies behind its handle is compared. Raises as `resolve` does."""
        namespace, node, num_known, tokens = self._parts(session, prefix)
        if node is None:
            return self.cache.tree.match(namespace, tokens, published=False)
        return self.cache.tree.match_after(node, num_known // self.cache.layout.page_size, tokens)

    def _parts(self, session: Session, prefix: pb.Prefix) -> tuple[Namespace, Node | None, int, Tokens]:
        """A prefix as its namespace, the node that its handle names, the tokens that this stands for, and those behind
        them."""
        namespace, packed = session.namespace(prefix.namespace_id), prefix.tokens
        if len(packed) % 4:
            raise BadRequest("prefix.tokens", f"{len(packed)} bytes are no whole ids of 4")
        tokens = np.frombuffer(packed, _INT32)
        num_known, node = 0, None
        if prefix.handle:
            handle = session.handles.get(prefix.handle)
            node = self.cache.tree.current(handle.node) if handle is not None else None
            if handle is None or node is None:
                session.handles.pop(prefix.handle, None)
                raise UnknownHandle("its prefix has left the cache, or it is not this session's", field="prefix.handle")
            if handle.namespace_id != prefix.namespace_id:
                raise BadRequest("prefix.handle", "is about another namespace")
            session.handles.move_to_end(prefix.handle)
            num_known = handle.num_pages * self.cache.layout.page_size
        if num_known + len(tokens) > self.limits.max_tokens:
            problem = f"{num_known + len(tokens)} tokens are more than {self.limits.max_tokens}"
            raise LimitReached(problem, field="max_tokens")
        return namespace, node, num_known, tokens

    def handle(self, session: Session, namespace_id: int, node: Node, num_pages: int) -> int:
        """Name the first `num_pages` pages on the path to a node, which reaches as far, to the session."""
        last = next(reversed(session.handles), None)
        if last is not None and session.handles[last] == Handle(namespace_id, node, num_pages):
            return last
        number = self.boot.next_id()
        session.handles[number] = Handle(namespace_id, node, num_pages)
        if len(session.handles) > self.limits.max_handles:
            session.handles.popitem(last=False)
        return number

    def _forget_handles(self, session: Session) -> None:
        """A node that left the tree keeps memory for as long as something names it; and calls are of no use when what
        they were lent is gone."""
        held = session.leases.keys() | session.reservations.keys()
        for call in [call for call, number in session.calls.items() if number not in held]:
            del session.calls[call]
        for number in [each for each, handle in session.handles.items() if not handle.node.is_live]:
            handle = session.handles[number]
            node = self.cache.tree.current(handle.node)
            if node is None:
                del session.handles[number]
            else:
                session.handles[number] = Handle(handle.namespace_id, node, handle.num_pages)

    def require_lease(self, session: Session) -> None:
        """Raise `LimitReached` if the session may not have one more lease or reservation."""
        num_held = len(session.leases) + len(session.reservations)
        if num_held >= self.limits.max_leases:
            raise LimitReached(f"{num_held} are all that the session may have", field="max_leases")

    def room(self, session: Session) -> int:
        """Arena pages that the session may still keep in place."""
        return max(0, self.max_pages - session.num_pages)

    def lend(self, session: Session, lent: Lent, *, call: int) -> int:
        """Give a lease to the session, which must not have ended; the lease's id. `call` is the client's own number of
        the call, 0 for none."""
        number = self.boot.next_id()
        session.leases[number] = lent
        session.num_pages += lent.num_pages
        self._note_call(session, call, number)
        return number

    def reserve(self, session: Session, reservation: Reservation, *, call: int) -> int:
        """Give a reservation to the session, which must not have ended; its id. `call` as `lend` takes it."""
        number = self.boot.next_id()
        session.reservations[number] = reservation
        session.num_pages += len(reservation.slots)
        self._note_call(session, call, number)
        return number

    def _note_call(self, session: Session, call: int, number: int) -> None:
        if call in session.abandoned:
            del session.abandoned[call]
            self.release(session, number)
        elif call:
            session.calls[call] = number

    def abandon(self, session: Session, call: int) -> None:
        """The client did not hear what a call was lent: give it back, now or as soon as the call is lent it."""
        number = session.calls.pop(call, None)
        if number is not None:
            self.release(session, number)
            return
        session.abandoned[call] = None
        if len(session.abandoned) > MAX_ABANDONED:
            session.abandoned.popitem(last=False)

    def take_reservation(self, session: Session, number: int) -> Reservation:
        """Take a reservation out of the session, to commit it. Raises `LeaseExpired`."""
        reservation = session.reservations.pop(number, None)
        if reservation is None:
            raise LeaseExpired("reservation", f"{number} has ended or was never this session's")
        session.num_pages -= len(reservation.slots)
        return reservation

    def release(self, session: Session, number: int) -> bool:
        """Give one lease or reservation back; False if the session has none of that id."""
        if (lent := session.leases.pop(number, None)) is not None:
            session.num_pages -= lent.num_pages
            self.give_back(lent)
            return True
        with suppress(LeaseExpired):
            reservation = self.take_reservation(session, number)
            self.cache.free({HOST: reservation.slots})
            self.end_reservation(session, reservation)
            return True
        return False

    def give_back(self, lent: Lent) -> None:
        """End a lease that no session has."""
        if lent.pin is not None:
            self.cache.free(self.cache.tree.unpin(lent.pin))
        self.cache.release(lent.lease)

    def end_reservation(self, session: Session, reservation: Reservation) -> None:
        """Give back what a reservation took beside its arena slots, which are somebody's already."""
        if session.staging is not None and not session.ended.is_set():
            session.staging.free(reservation.staging_slots)
        self.cache.release(reservation.lease)

    def stats(self) -> dict[str, Any]:
        """The sessions as JSON-able values: "draining", "begun", "ended" (by reason), and "sessions", each with its
        "session", "tenant", "name", "pid", "attached", "silent_s", "calls", "leases", "reservations", "pages" (kept in
        place), "staging_bytes" and "namespaces"."""
        now = self.cache.clock.monotonic()
        return {
            "draining": self.is_draining,
            "begun": self.num_begun,
            "ended": dict(self.ended),
            "sessions": [
                {
                    "session": session.number,
                    "tenant": session.tenant,
                    "name": session.name,
                    "pid": session.pid,
                    "attached": session.is_attached,
                    "silent_s": max(0.0, now - session.last_heard),
                    "calls": session.num_calls,
                    "leases": len(session.leases),
                    "reservations": len(session.reservations),
                    "pages": session.num_pages,
                    "staging_bytes": session.staging.num_slots * session.staging.stride if session.staging else 0,
                    "namespaces": len(session.namespaces),
                }
                for session in self
            ],
        }


def _key(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
