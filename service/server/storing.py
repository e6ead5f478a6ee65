"""The write in two phases: `reserve` takes room and finds nothing wrong yet, `commit` copies and publishes.

    reserve   the pages before the new ones are leased, arena and staging slots are taken, the new pages' identities are
              hashed; nothing can be found
    (client)  writes its staging slots
    commit    threads copy staging to the arena and take checksums of the copy; then, in one step of the loop, the pages
              are published in the tree and the reservation ends

A commit is carried out by a task of the server's own: a client that stops waiting, or ends, leaves neither a
half-copied page nor a lost slot. What the client changes in its staging memory meanwhile shows in its own pages alone.
"""

import asyncio
import struct
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from hicache.cache import Cache
from hicache.errors import BadRequest, DeadlineExceeded, HicacheError, NoRoom, TierUnavailable
from hicache.lease import Lease
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.service.errors import Draining, reason_of
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.copying import Copying
from hicache.service.server.session import Reservation, Session, Tokens
from hicache.service.server.sessions import Sessions
from hicache.service.server.shares import Pool, beyond
from hicache.tier import HOST, PageIdentity, PageSums, chain_digest
from hicache.tiers.host import HostTier
from hicache.tokens import check_ids

MAX_KEPT_BYTES: Final = 256 << 20
"""Token ids of reservations and of promises behind replies: each keeps those from the root on. So many are divided
among tenants (`shares.py`), and beside them each session has its own share of as many again, one `max_sessions`-th. One
that has ended counts as a session as long as it keeps any: there are no more than twice so many."""
BEHIND_S: Final = 60.0
"""How long a promise behind the reply may take before it counts as lost."""

Start = Callable[[Coroutine[Any, Any, None]], object]
"""Runs a coroutine as a task of the server's own."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of a commit: it was published up to `node`, or refused for `reason`."""

    node: Node | None
    num_tokens: int
    reason: "pb.Reason"


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a session wants to write, with what is cached of it."""

    session: Session
    namespace_id: int
    namespace: Namespace
    tokens: Tokens
    """From the root on, whole pages. May be a view of the whole message."""
    first_page: int
    """The first that is not cached."""
    lease: Lease
    """On the pages before."""
    deadline: float
    """Monotonic seconds until which it may wait for room."""


class Storing:
    """Reserves and commits for all sessions of a server. Belongs to its loop."""

    def __init__(self, cache: Cache, host: HostTier, sessions: Sessions, start: Start) -> None:
        self.cache: Final = cache
        self.sessions: Final = sessions
        self.num_commits = 0
        """Commits that were published."""
        self.bytes_stored = 0
        """Bytes that they copied."""
        self._kept: Final = Pool(sessions.peers, MAX_KEPT_BYTES)
        """Bytes of token ids that are kept, beyond each session's own."""
        self._own_kept: Final = MAX_KEPT_BYTES // sessions.limits.max_sessions
        self._host: Final = host
        self._start: Final = start
        self.copying: Final = Copying(host, cache.clock)

    def close(self) -> None:
        """Join the threads; no commit is under way any more."""
        self.copying.close()

    # -- the first phase ----------------------------------------------------------------------------------------------

    async def reserve(self, session: Session, request: pb.ReserveRequest, deadline: float) -> pb.ReserveReply:
        """See `ReserveRequest`. Waits for room in the arena, at most until `deadline` (monotonic seconds)."""
        cache, sessions, page_size = self.cache, self.sessions, self.cache.layout.page_size
        if sessions.is_draining:
            raise Draining("the server is about to stop")
        sessions.require_lease(session)
        namespace, tokens = sessions.names.resolve(session, request.prefix)
        check_ids("prefix.tokens", tokens)
        num_pages, odd = divmod(len(tokens), page_size)
        if odd or not num_pages:
            raise BadRequest("prefix.tokens", f"{len(tokens)} tokens are not one or more whole pages of {page_size}")
        if request.first_page >= num_pages:
            raise BadRequest("first_page", f"{request.first_page} is not within 0 to {num_pages - 1}")
        match = cache.tree.match(namespace, tokens, published=False)
        first_page = match.num_tokens // page_size
        if first_page == num_pages:
            return pb.ReserveReply(outcome=pb.OUTCOME_RESIDENT, first_page=num_pages)
        if request.first_page > first_page:
            return pb.ReserveReply(outcome=pb.OUTCOME_REFUSED, reason=pb.REASON_NOT_RESIDENT, first_page=first_page)
        # What is cached before is kept until the commit: new pages stand on it.
        now = cache.clock.monotonic()
        lease = cache.tree.lease(match, owner=session.owner, deadline=None, now=now)
        try:
            if lease.node is not None:
                cache.tree.touch(lease.node, now)
            reservation, reason = await self._take_room(
                _Asked(session, request.prefix.namespace_id, namespace, tokens, first_page, lease, deadline)
            )
        except BaseException:
            cache.release(lease)
            raise
        if reservation is None:
            cache.release(lease)
            return pb.ReserveReply(outcome=pb.OUTCOME_REFUSED, reason=reason, first_page=first_page)
        return pb.ReserveReply(
            outcome=pb.OUTCOME_ACCEPTED,
            reason=reason,
            reservation=sessions.reserve(session, reservation, call=request.call),
            first_page=first_page,
            staging_slots=reservation.staging_slots.astype("<i4").tobytes(),
        )

    async def _take_room(self, asked: _Asked) -> tuple[Reservation | None, "pb.Reason"]:
        """Slots for the pages that are asked for, as many as can be had, and why they are fewer. The tokens count as
        kept from now on: other calls do not find the same room meanwhile."""
        session, num_bytes = asked.session, asked.tokens.nbytes
        if not self._may_keep(session, num_bytes):
            return None, pb.REASON_LIMIT
        self._note_kept(session, num_bytes)
        try:
            reservation, reason = await self._take_slots(asked)
        finally:
            self._note_kept(session, -num_bytes)
        if reservation is not None:
            self._note_kept(session, reservation.tokens.nbytes)
            # Not when it ends: a promise behind the reply keeps it until the pages are durable.
            weakref.finalize(reservation, self._note_kept, session, -reservation.tokens.nbytes).atexit = False
        return reservation, reason

    def _may_keep(self, session: Session, num_bytes: int) -> bool:
        """Whether token ids of so many bytes more may be kept for a session."""
        return self._kept.fits(session.peer, beyond(self._own_kept, session.kept_bytes, session.kept_bytes + num_bytes))

    def _note_kept(self, session: Session, num_bytes: int) -> None:
        more = beyond(self._own_kept, session.kept_bytes, session.kept_bytes + num_bytes)
        self._kept.note(session.peer, more)
        self.sessions.note_kept(session, num_bytes)

    async def _take_slots(self, asked: _Asked) -> tuple[Reservation | None, "pb.Reason"]:
        """See `_take_room`."""
        cache, sessions, session = self.cache, self.sessions, asked.session
        staging = session.staging
        if staging is None:
            raise BadRequest("staging_bytes", "this session asked for none, so it cannot write")
        num_pages = len(asked.tokens) // cache.layout.page_size - asked.first_page
        reason = pb.REASON_NONE
        if sessions.room(session) < num_pages:
            num_pages, reason = sessions.room(session), pb.REASON_LIMIT
        if staging.num_free < num_pages:
            num_pages, reason = staging.num_free, pb.REASON_NO_ROOM
        if not num_pages:
            return None, reason
        staging_slots = staging.allocate(num_pages)
        session.num_pages += num_pages  # other calls of the session do not find the same room meanwhile
        try:
            slots = await cache.allocate_up_to(HOST, num_pages, deadline=asked.deadline)
        except BaseException:
            if not session.ended.is_set():
                staging.free(staging_slots)
            raise
        finally:
            session.num_pages -= num_pages
        if session.ended.is_set() or not len(slots):
            cache.free({HOST: slots})
            sessions.require(session)
            staging.free(staging_slots)
            return None, pb.REASON_NO_ROOM
        if len(slots) < num_pages:
            staging.free(staging_slots[len(slots) :])
            staging_slots, reason = staging_slots[: len(slots)], pb.REASON_NO_ROOM
        kept = asked.tokens[: (asked.first_page + len(slots)) * cache.layout.page_size].copy()
        reservation = Reservation(
            asked.namespace_id, asked.namespace, kept, asked.first_page, self._identities(asked, kept),
            slots, staging_slots, asked.lease,
        )  # fmt: skip
        return reservation, reason

    def _identities(self, asked: _Asked, tokens: Tokens) -> list[PageIdentity]:
        """Those of new pages, up to the last of `tokens`. They stay right, whatever becomes of the pages before:
        `_publish` looks at that."""
        namespace, path = asked.namespace, self.cache.path(asked.lease)
        chain = self.cache.tree.identities(path[-1])[-1].chain if path else namespace.digest
        packed = tokens.astype("<i4").tobytes()
        page_bytes = 4 * self.cache.layout.page_size
        identities = []
        for start in range(asked.first_page * page_bytes, len(packed), page_bytes):
            page = packed[start : start + page_bytes]
            identities.append(PageIdentity(namespace.digest, chain, page))
            chain = chain_digest(chain, page)
        return identities

    # -- the second phase ---------------------------------------------------------------------------------------------

    async def commit(self, session: Session, request: pb.CommitRequest, deadline: float) -> pb.CommitReply:
        """See `CommitRequest`. Waits for the copy, and where it was asked for until the pages are durable."""
        reservation = session.reservations.get(request.reservation)
        if reservation is not None and request.checksums and len(request.checksums) != 4 * len(reservation.slots):
            raise BadRequest(
                "checksums", f"{len(request.checksums)} bytes are not 4 for each of {len(reservation.slots)} pages"
            )
        reservation = self.sessions.take_reservation(session, request.reservation)
        done: asyncio.Future[Stored] = asyncio.get_running_loop().create_future()
        self._start(self._carry_out(session, reservation, request.checksums, done))
        await asyncio.wait([done])  # giving up waiting leaves the copy alone
        stored = done.result()
        if stored.node is None:
            return pb.CommitReply(outcome=pb.OUTCOME_REFUSED, reason=stored.reason)
        self.sessions.require(session)
        num_pages = stored.num_tokens // self.cache.layout.page_size
        reply = pb.CommitReply(
            outcome=pb.OUTCOME_RESIDENT,
            tier=pb.TIER_HOST,
            num_tokens=stored.num_tokens,
            handle=self.sessions.names.handle(session, reservation.namespace_id, stored.node, num_pages),
        )
        if request.durability == pb.DURABILITY_BEHIND:
            reply.sequence = session.promises.make()
            self._start(self._keep_promise(session, reservation, reply.sequence))
        elif request.durability == pb.DURABILITY_WAIT:
            reply.sequence = session.promises.make()
            reply.reason = await self._persist(session, reservation, reply.sequence, deadline)
            if reply.reason == pb.REASON_NONE:
                reply.outcome = pb.OUTCOME_DURABLE
        reply.durable_sequence = session.promises.durable
        return reply

    async def _carry_out(
        self, session: Session, reservation: Reservation, checksums: bytes, done: "asyncio.Future[Stored]"
    ) -> None:
        """Copy and publish, whatever becomes of the caller; sets `done`."""
        stored = Stored(None, 0, pb.REASON_CLOSED)
        try:
            try:
                reason, sums = await self._copy(session, reservation, checksums)
            except BaseException:
                self.cache.free({HOST: reservation.slots})
                raise
            stored = Stored(None, 0, reason)
            if reason == pb.REASON_NONE:
                stored = self._publish(reservation, sums)
            else:
                self.cache.free({HOST: reservation.slots})
        finally:
            self.sessions.end_reservation(session, reservation)
            if not done.done():
                done.set_result(stored)

    async def _copy(
        self, session: Session, reservation: Reservation, checksums: bytes
    ) -> "tuple[pb.Reason, list[PageSums] | None]":
        """Copy the staging slots to the arena, and compare checksums where some were sent. The checksums of the copies,
        where the arena keeps them."""
        staging = session.staging
        if staging is None or session.ended.is_set():
            return pb.REASON_UNKNOWN_SESSION, None
        copies = await self.copying.copy(
            staging, reservation.staging_slots, reservation.slots, has_crcs=bool(checksums)
        )
        if checksums and list(struct.unpack(f"<{len(copies.crcs)}I", checksums)) != copies.crcs:
            return pb.REASON_CORRUPT_PAGE, None
        return pb.REASON_NONE, copies.sums

    def _publish(self, reservation: Reservation, sums: list[PageSums] | None) -> Stored:
        """Put copied pages into the tree, all at once."""
        cache, tree, slots, first_page = self.cache, self.cache.tree, reservation.slots, reservation.first_page
        identities = reservation.identities
        path = cache.path(reservation.lease)
        if sum([node.num_pages for node in path]) != first_page:
            # Damaged and forgotten meanwhile: there is nothing that these pages could stand on.
            cache.free({HOST: slots})
            return Stored(None, 0, pb.REASON_NOT_RESIDENT)
        now = cache.clock.monotonic()
        try:
            inserted = tree.insert(
                reservation.namespace, reservation.tokens, tier=HOST, slots=slots, first_page=first_page,
                chain=identities[-1].chain, now=now,
            )  # fmt: skip
        except NoRoom:
            cache.counters.pages_refused += len(slots)
            cache.free({HOST: slots})
            return Stored(None, 0, pb.REASON_NO_ROOM)
        self._host.declare_all(slots, identities, sums)
        identities.clear()  # a promise behind the reply keeps the reservation, for its tokens alone
        cache.counters.metadata_dropped_pages += inserted.num_dropped
        cache.counters.pages_published += len(slots) - len(inserted.duplicates)
        cache.counters.pages_duplicate += len(inserted.duplicates)
        cache.counters.tokens_computed += len(slots) * cache.layout.page_size
        cache.writing_through.published(inserted.node)
        cache.free(inserted.freed)
        cache.free({HOST: inserted.duplicates})
        self.num_commits += 1
        self.bytes_stored += len(slots) * cache.layout.page_bytes
        return Stored(inserted.node, len(reservation.tokens), pb.REASON_NONE)

    # -- durability ---------------------------------------------------------------------------------------------------

    async def _persist(
        self, session: Session, reservation: Reservation, sequence: int, deadline: float
    ) -> "pb.Reason":
        """Write a commit to NVMe; why it is not durable, NONE when it is. Settles the promise, whatever happens."""
        is_kept = False
        try:
            persisted = await self.cache.persist(reservation.namespace, reservation.tokens, deadline=deadline)
            is_kept = persisted.num_tokens >= len(reservation.tokens)
        except (DeadlineExceeded, TierUnavailable) as error:
            return reason_of(error)
        finally:
            session.promises.settle(sequence, is_kept=is_kept)
        return pb.REASON_NONE if is_kept else pb.REASON_NO_ROOM

    async def _keep_promise(self, session: Session, reservation: Reservation, sequence: int) -> None:
        deadline = self.cache.clock.monotonic() + BEHIND_S
        try:
            await self._persist(session, reservation, sequence, deadline)
        except HicacheError:
            return  # the cache closes; the promise is settled as lost
