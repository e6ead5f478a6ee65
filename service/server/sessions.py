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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final, NoReturn

from hicache.cache import Cache
from hicache.errors import LeaseExpired
from hicache.service.config import Limits, Times
from hicache.service.errors import Draining, LimitReached, UnknownSession
from hicache.service.metrics import LEASE_BOUNDS_S, Histogram
from hicache.service.server.boot import Boot
from hicache.service.server.naming import Names
from hicache.service.server.session import Lent, Reservation, Session
from hicache.service.server.shares import Peer, Peers, Pool, beyond
from hicache.service.server.staging import Staging
from hicache.service.wire import TOKEN_BYTES
from hicache.service.work import EngineWork
from hicache.tier import HOST

TICK_S: Final = 0.2
"""How often sessions are looked at for silence."""
HANDLE_TICKS: Final = 16
"""Every so many ticks a session's handles and calls are looked through."""
MAX_ABANDONED: Final = 4096
"""Abandoned calls of a session that are remembered, and that one beat may name."""

_log = logging.getLogger(__name__)


class Sessions:
    """All sessions of a server."""

    def __init__(self, cache: Cache, limits: Limits, times: Times, peers: Peers) -> None:
        self.cache: Final = cache
        self.limits: Final = limits
        self.times: Final = times
        self.boot: Final = Boot()
        self.names: Final = Names(cache, limits, self.boot)
        self.is_draining = False
        self.num_begun = 0
        """Sessions since the start."""
        self.ended: Final[dict[str, int]] = {}
        """How many ended for which reason."""
        self.lease_times: Final = Histogram(LEASE_BOUNDS_S)
        """How long leases were held that were given back."""
        self.work = EngineWork()
        """What all engines say that they have done."""
        self.saved_s = 0.0
        """How long computing what was lent would have taken, where an engine has said how fast it is."""
        self.max_pages: Final = max(1, int(cache.tiers[HOST].capacity_pages * limits.leased_share))
        """Arena pages that one session may keep in place, or all sessions of a tenant that has a name."""
        slowest = list(cache.tiers.values())[-1]
        self.max_pinned: Final = max(1, int(slowest.capacity_pages * limits.leased_share))
        """Pages that their pins may keep in the cache."""
        self.peers: Final = peers
        self._by_key: Final[dict[bytes, Session]] = {}
        self._counted: Final = Pool(peers, limits.max_sessions)
        """Sessions that there are, are about to be, or linger."""
        self._staged: Final = Pool(peers, limits.total_staging_bytes)
        """Bytes of staging memory."""
        self._open: Final = Pool(peers, limits.max_calls)
        """Calls and streams that gRPC has not done with, beyond each session's own."""
        self._own_open: Final = max(1, limits.max_calls // limits.max_sessions) + 1
        """A session's own: its share of as many calls again, and its stream."""
        self._lingering: Final[set[Session]] = set()
        """Sessions that have ended and left something, so that nobody leaves it over and over: answers that their
        clients have not read, which gRPC keeps until they have or hang up; token ids that a promise keeps."""

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    # -- beginning and end --------------------------------------------------------------------------------------------

    @property
    def staging_part(self) -> int:
        """Bytes of staging memory that are each tenant's own; all where nothing is divided among tenants."""
        return self._staged.part

    def reserve_staging(self, peer: Peer, num_bytes: int) -> None:
        """Count a peer's session that is about to begin, and its staging memory, before that is allocated. Raises
        `LimitReached`, `Draining`."""
        if self.is_draining:
            raise Draining("the server is about to stop")
        if not self._counted.fits(peer):
            raise LimitReached(f"{self._counted.held(peer)} are there, and no more may be", field="max_sessions")
        if not self._staged.fits(peer, num_bytes):
            problem = f"{self._staged.held(peer)} bytes are in use, and {num_bytes} more may not be"
            raise LimitReached(problem, field="total_staging_bytes")
        self._staged.note(peer, num_bytes)
        self._counted.note(peer, 1)

    def unreserve_staging(self, peer: Peer, num_bytes: int) -> None:
        """Take back what `reserve_staging` counted: no session came of it."""
        self._staged.note(peer, -num_bytes)
        self._counted.note(peer, -1)

    @property
    def num_lingering(self) -> int:
        """Sessions that have ended and count on."""
        return len(self._lingering)

    def may_open(self, session: Session) -> bool:
        """Whether the session may have one call or stream more, as far as others are concerned."""
        return self._open.fits(session.peer, beyond(self._own_open, session.num_open, session.num_open + 1))

    def note_call(self, session: Session) -> None:
        """The current task carries out a call of the session, or its stream: it is open until gRPC, whose task that is,
        has sent the last of its answer."""
        self._note_open(session, 1)
        _current_task().add_done_callback(lambda _: self._note_open(session, -1))

    def _note_open(self, session: Session, more: int) -> None:
        self._open.note(session.peer, beyond(self._own_open, session.num_open, session.num_open + more))
        session.num_open += more
        self._settle(session)

    def note_kept(self, session: Session, num_bytes: int) -> None:
        """So many bytes of token ids more, or fewer, are kept for the session."""
        session.kept_bytes += num_bytes
        self._settle(session)

    def _settle(self, session: Session) -> None:
        """Let a session go that has ended, once nothing of it is left."""
        if session in self._lingering and not session.has_left:
            self._lingering.remove(session)
            self._counted.note(session.peer, -1)

    def note_reply(self, session: Session, num_bytes: int) -> None:
        """The current task, which carries out a call of the session, sends so many bytes."""

        def done(_: object) -> None:
            session.unread_bytes -= num_bytes
            session.was_read.set()

        session.unread_bytes += num_bytes
        _current_task().add_done_callback(done)

    def begin(
        self, *, tenant: str, name: str, uid: int, pid: int, pidfd: int, staging: Staging | None
    ) -> tuple[Session, bytes]:
        """A new session, and its token. `pidfd` and the staging memory, which was counted, are the session's now."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self.num_begun += 1
        session = Session(
            number=self.num_begun, tenant=tenant, peer=self.peers.of(tenant, uid), name=name, uid=uid, pid=pid,
            key=_key(token), staging=staging, last_heard=self.cache.clock.monotonic(), pidfd=pidfd,
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
        self._staged.note(session.peer, -session.staging_bytes)
        if session.staging is not None:
            session.staging.close()
        session.handles.clear()
        self._lingering.add(session)
        self._settle(session)
        session.ended.set()
        session.was_read.set()
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
                    self.names.forget(session)
                    self._forget_calls(session)
        raise AssertionError("counting has no end")

    def _forget_calls(self, session: Session) -> None:
        """Calls are of no use when what they were lent has been given back."""
        held = session.leases.keys() | session.reservations.keys()
        for call in [call for call, number in session.calls.items() if number not in held]:
            del session.calls[call]

    # -- what sessions hold -------------------------------------------------------------------------------------------

    def require(self, session: Session) -> None:
        """Raise `UnknownSession` if it has ended, which may happen while one of its calls waits."""
        if session.ended.is_set():
            raise UnknownSession("it has ended")

    def require_lease(self, session: Session) -> None:
        """Raise `LimitReached` if the session may not have one more lease or reservation."""
        num_held = len(session.leases) + len(session.reservations)
        if num_held >= self.limits.max_leases:
            raise LimitReached(f"{num_held} are all that the session may have", field="max_leases")

    def room(self, session: Session) -> int:
        """Arena pages that the session may still keep in place."""
        return max(0, self.max_pages - sum([each.num_pages for each in self._beside(session)]))

    def require_pins(self, session: Session, num_pages: int) -> None:
        """Raise `LimitReached` if the session may not keep so many pages more in the cache."""
        num_pinned = sum([each.num_pinned for each in self._beside(session)])
        if num_pinned + num_pages > self.max_pinned:
            problem = f"pins of {num_pinned} pages, and {num_pages} more, are above {self.max_pinned}"
            raise LimitReached(problem, field="leased_share")

    def _beside(self, session: Session) -> list[Session]:
        """The sessions that have a share together: a tenant has no more of it for having more sessions."""
        if not session.tenant:
            return [session]
        return [each for each in self._by_key.values() if each.tenant == session.tenant]

    def lend(self, session: Session, lent: Lent, *, call: int) -> int:
        """Give a lease to the session, which must not have ended; the lease's id. `call` is the client's own number of
        the call, 0 for none."""
        number = self.boot.next_id()
        lent.began = self.cache.clock.monotonic()
        session.leases[number] = lent
        session.num_pages += lent.num_pages
        session.num_pinned += lent.num_pinned
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
            session.num_pinned -= lent.num_pinned
            self.lease_times.note(self.cache.clock.monotonic() - lent.began)
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
        for pin in lent.pins:
            self.cache.free(self.cache.tree.unpin(pin))
        for lease in lent.leases:
            self.cache.release(lease)

    def end_reservation(self, session: Session, reservation: Reservation) -> None:
        """Give back what a reservation took beside its arena slots, which are somebody's already."""
        if session.staging is not None and not session.ended.is_set():
            session.staging.free(reservation.staging_slots)
        self.cache.release(reservation.lease)

    # -- what engines report --------------------------------------------------------------------------------------

    def note_work(self, session: Session, work: EngineWork) -> None:
        """The session's engine has done something."""
        session.work += work
        self.work += work

    def note_lent(self, session: Session, num_tokens: int) -> None:
        """The session need not compute so many tokens."""
        if session.work.prefill_tokens:
            self.saved_s += num_tokens * session.work.prefill_s / session.work.prefill_tokens

    def stats(self) -> dict[str, Any]:
        """The sessions as JSON-able values: "draining", "begun", "ended" (by reason), "work" (the fields of
        `EngineWork`, all sessions since the start), "saved_s" (prefill that hits have saved), and "sessions", each as
        `Session.told` has it."""
        now = self.cache.clock.monotonic()
        return {
            "draining": self.is_draining,
            "begun": self.num_begun,
            "ended": dict(self.ended),
            "work": asdict(self.work),
            "saved_s": self.saved_s,
            "sessions": [session.told(now) for session in self],
        }


def _current_task() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    assert task is not None, "calls are carried out by tasks"
    return task


def _key(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
