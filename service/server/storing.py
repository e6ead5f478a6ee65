"""The write in two phases: `reserve` takes room and finds nothing wrong yet, `commit` copies and publishes.

    reserve   the pages before the new ones are leased, arena and staging slots are taken, the new pages' identities are
              hashed; nothing can be found
    (client)  writes its staging slots
    commit    threads copy staging to the arena and take checksums of the copy; then, in one step of the loop, the pages
              are published in the tree and the reservation ends

The checksums are those that travel with a page (`hicache.tiers.sums`): all of them where the arena keeps them, as there
is a slower tier that would have to take them otherwise; else the whole page's alone, which costs next to nothing.

A commit is carried out by a task of the server's own: a client that stops waiting, or ends, leaves neither a
half-copied page nor a lost slot. What the client changes in its staging memory meanwhile shows in its own pages alone.
"""

import asyncio
import os
import struct
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from crc32c import crc32c

from hicache.cache import Cache
from hicache.errors import BadRequest, DeadlineExceeded, HicacheError, NoRoom, TierUnavailable
from hicache.lease import Lease
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.service.errors import Draining, reason_of
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.session import Reservation, Session, Tokens
from hicache.service.server.sessions import Sessions
from hicache.tier import HOST, PageIdentity, PageSums, Slots, TierId, chain_digest
from hicache.tiers.host import HostTier
from hicache.tiers.memory import started_executor
from hicache.tiers.sums import payload_checksum, pieces_checksum, whole_sum
from hicache.tokens import check_ids

CHUNK_BYTES: Final = 2 << 20
"""A thread is handed at least so many bytes of pages to copy."""
PIECE_BYTES: Final = 512 << 10
"""Longer pages are copied and summed in pieces of this length, which stay in a core's cache between the two. Shorter
pieces cost more than they save: each is a hand-over of the interpreter's lock from thread to thread."""
GIL_KEPT_BELOW: Final = 32 << 10
"""Bytes of a page below which giving the interpreter's lock away for its checksum costs more than keeping it."""
MAX_THREADS: Final = 4
"""Threads that copy, at most one a core."""
MAX_KEPT_BYTES: Final = 256 << 20
"""Token ids of reservations and of promises behind replies, at most: each keeps those from the root on."""
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


class _Copy(NamedTuple):
    """What a thread that has copied a page knows of it."""

    sums: PageSums | None
    """All checksums that travel with it; None where only its own was taken."""
    whole: int
    """Its own checksum."""
    crc: int
    """Its CRC-32C, where the client has sent one; else 0."""


class Storing:
    """Reserves and commits for all sessions of a server. Belongs to its loop."""

    def __init__(self, cache: Cache, host: HostTier, sessions: Sessions, start: Start) -> None:
        self.cache: Final = cache
        self.sessions: Final = sessions
        self.num_commits = 0
        """Commits that were published."""
        self.bytes_stored = 0
        """Bytes that they copied."""
        self._kept_bytes = 0
        self._host: Final = host
        self._start: Final = start
        self._sums: Final = np.zeros(host.capacity_pages, np.uint32)
        """Checksums of whole pages."""
        self._sum_generations: Final = np.full(host.capacity_pages, -1, np.int64)
        """In which life of its slot each checksum was taken."""
        self._num_threads: Final = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._threads: Final = started_executor(TierId("commit"), self._num_threads, apart=True)

    def close(self) -> None:
        """Join the threads; no commit is under way any more."""
        self._threads.shutdown()

    async def is_whole(self, slots: Slots) -> list[bool | None]:
        """Whether arena pages still have the checksums that they had when they were committed, one a slot, which nobody
        may give to another page meanwhile. None for what came into the arena otherwise. Reads them in a thread."""
        generation = self._host.generation
        known = [
            (slot, int(self._sums[slot])) if self._sum_generations[slot] == generation(slot) else None
            for slot in slots.tolist()
        ]

        def compare() -> list[bool | None]:
            return [None if each is None else payload_checksum(self._host.view(each[0])) == each[1] for each in known]

        return await asyncio.get_running_loop().run_in_executor(self._threads, compare)

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
                session, request.prefix.namespace_id, namespace, tokens, first_page, lease, deadline
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

    async def _take_room(
        self,
        session: Session,
        namespace_id: int,
        namespace: Namespace,
        tokens: Tokens,
        first_page: int,
        lease: Lease,
        deadline: float,
    ) -> tuple[Reservation | None, "pb.Reason"]:
        """Slots for the pages from `first_page` on, as many as can be had, and why they are fewer."""
        cache, sessions, staging = self.cache, self.sessions, session.staging
        if staging is None:
            raise BadRequest("staging_bytes", "this session asked for none, so it cannot write")
        wanted = len(tokens) // cache.layout.page_size - first_page
        num_pages, reason = wanted, pb.REASON_NONE
        if sessions.room(session) < num_pages:
            num_pages, reason = sessions.room(session), pb.REASON_LIMIT
        if staging.num_free < num_pages:
            num_pages, reason = staging.num_free, pb.REASON_NO_ROOM
        if self._kept_bytes + tokens.nbytes > MAX_KEPT_BYTES:
            num_pages, reason = 0, pb.REASON_LIMIT
        if not num_pages:
            return None, reason
        staging_slots = staging.allocate(num_pages)
        session.num_pages += num_pages  # other calls of the session do not find the same room meanwhile
        try:
            slots = await cache.allocate_up_to(HOST, num_pages, deadline=deadline)
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
        # A copy: `tokens` may be a view of the whole message.
        kept = tokens[: (first_page + len(slots)) * cache.layout.page_size].copy()
        reservation = Reservation(
            namespace_id, namespace, kept, first_page, self._identities(namespace, kept, first_page, lease),
            slots, staging_slots, lease,
        )  # fmt: skip
        self._kept_bytes += kept.nbytes
        # Not when it ends: a promise behind the reply keeps it until the pages are durable.
        weakref.finalize(reservation, self._forget, kept.nbytes).atexit = False
        return reservation, reason

    def _identities(
        self, namespace: Namespace, tokens: Tokens, first_page: int, lease: Lease
    ) -> list[PageIdentity]:
        """Those of new pages. They stay right, whatever becomes of the pages before: `_publish` looks at that."""
        path = self.cache.path(lease)
        chain = self.cache.tree.identities(path[-1])[-1].chain if path else namespace.digest
        packed = tokens.astype("<i4").tobytes()
        page_bytes = 4 * self.cache.layout.page_size
        identities = []
        for start in range(first_page * page_bytes, len(packed), page_bytes):
            page = packed[start : start + page_bytes]
            identities.append(PageIdentity(namespace.digest, chain, page))
            chain = chain_digest(chain, page)
        return identities

    def _forget(self, num_bytes: int) -> None:
        self._kept_bytes -= num_bytes

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
                reason, copies = await self._copy(session, reservation, checksums)
            except BaseException:
                self.cache.free({HOST: reservation.slots})
                raise
            stored = Stored(None, 0, reason)
            if reason == pb.REASON_NONE:
                stored = self._publish(reservation, copies)
            else:
                self.cache.free({HOST: reservation.slots})
        finally:
            self.sessions.end_reservation(session, reservation)
            if not done.done():
                done.set_result(stored)

    async def _copy(
        self, session: Session, reservation: Reservation, checksums: bytes
    ) -> "tuple[pb.Reason, list[_Copy]]":
        """Copy the staging slots to the arena in threads, and compare checksums where some were sent; the copies."""
        staging = session.staging
        if staging is None or session.ended.is_set():
            return pb.REASON_UNKNOWN_SESSION, []
        page_bytes, num_pages = self.cache.layout.page_bytes, len(reservation.slots)
        todo = enumerate(zip(reservation.staging_slots.tolist(), reservation.slots.tolist(), strict=True))
        copies: dict[int, _Copy] = {}

        def copy_some(num_others: int) -> None:
            # The next thread is woken by this one, not by the loop: whoever has not begun when all is done can be left
            # out, where the loop would have to wait for it.
            other = self._threads.submit(copy_some, num_others - 1) if num_others else None
            try:
                # Each thread takes the next page that none has: that is one step under the interpreter's lock.
                for index, (source, slot) in todo:
                    with staging.view(source, page_bytes) as page:
                        copies[index] = self._copied(page, slot, bool(checksums))
            finally:
                if other is not None and not other.cancel():
                    other.result()

        num_threads = min(self._num_threads, num_pages, max(1, num_pages * page_bytes // CHUNK_BYTES))
        staging.hold()
        try:
            await _ended(asyncio.get_running_loop().run_in_executor(self._threads, copy_some, num_threads - 1))
        finally:
            staging.let_go()
        copied = [copies[index] for index in range(num_pages)]
        if checksums and list(struct.unpack(f"<{num_pages}I", checksums)) != [each.crc for each in copied]:
            return pb.REASON_CORRUPT_PAGE, []
        self._sums[reservation.slots] = [each.whole for each in copied]
        self._sum_generations[reservation.slots] = self._host.generations(reservation.slots)
        return pb.REASON_NONE, copied

    def _copied(self, source: memoryview, slot: int, has_crc: bool) -> _Copy:
        """Copy a page to its slot, and take the checksums of the copy while it is in the processor's cache."""
        page, sums = self._host.view(slot), None
        if self._host.num_sums:
            np.copyto(np.frombuffer(page, np.uint8), np.frombuffer(source, np.uint8))
            sums = self._host.take_sums(slot)
            whole = whole_sum(sums)
        else:
            whole = _copied_and_summed(source, page)
        return _Copy(sums, whole, checksum(page) if has_crc else 0)

    def _publish(self, reservation: Reservation, copies: Sequence[_Copy]) -> Stored:
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
        sums = [copy.sums for copy in copies if copy.sums is not None]
        self._host.declare_all(slots, identities, sums if self._host.num_sums else None)
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


async def _ended(work: "asyncio.Future[None]") -> None:
    """Wait until threads have ended their work, even when cancelled: until then the memory is in use. Raises what they
    raised."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    work.result()


def _copied_and_summed(source: memoryview, target: memoryview) -> int:
    """Copy a page; the checksum of the copy."""
    if len(target) > PIECE_BYTES:
        return pieces_checksum(_copied(source, target))
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
    return payload_checksum(target)


def _copied(source: memoryview, target: memoryview) -> Iterator[memoryview]:
    """Copy a page piece by piece; each piece of the copy once it is there."""
    into, out_of = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    for start in range(0, len(target), PIECE_BYTES):
        piece = slice(start, start + PIECE_BYTES)
        np.copyto(into[piece], out_of[piece])
        yield target[piece]


def checksum(page: memoryview) -> int:
    """CRC-32C of a page, as clients send it."""
    return int(crc32c(page, 0, len(page) >= GIL_KEPT_BELOW))
