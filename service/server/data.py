"""What engines call. Each call translates its message, asks the cache, and says what happened."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import numpy as np

from hicache.cache import Cache, Coverage
from hicache.errors import BadRequest, DeadlineExceeded, TierUnavailable
from hicache.lease import Lease
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.residency import Residency
from hicache.service.errors import LimitReached, UnknownSession, reason_of
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.adopting import Adopting
from hicache.service.server.edge import Call, Stream
from hicache.service.server.pieces import read_piece, write_piece
from hicache.service.server.recording import Recording
from hicache.service.server.session import Lent, Registered, Session, Tokens
from hicache.service.server.sessions import MAX_ABANDONED, Sessions
from hicache.service.server.storing import Storing
from hicache.service.wire import CACHE, MAX_BEAT_BYTES, parse, path_of
from hicache.service.work import EngineWork
from hicache.tier import HOST, NVME
from hicache.tiers.host import HostTier
from hicache.tree import Match, Partial

MAX_RELEASED: Final = 4096
"""Most ids of one release."""
MAX_WITHIN_MS: Final = 600_000
NOTICES_A_LEASE: Final = 3
"""Notices and beats that are sent within the lease time, at least."""
_LOOKUP: Final = path_of(CACHE.methods_by_name["Lookup"])
_TIERS: Final = {HOST: pb.TIER_HOST, NVME: pb.TIER_NVME}


class DataCalls:
    """The service `Cache`. Belongs to the event loop."""

    def __init__(
        self,
        cache: Cache,
        host: HostTier,
        sessions: Sessions,
        storing: Storing,
        recording: Recording,
        start: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`start`: carry something out that no call waits for any more; it raises nothing."""
        self._cache: Final = cache
        self._host: Final = host
        self._sessions: Final = sessions
        self._storing: Final = storing
        self._recording: Final = recording
        self._adopting: Final = Adopting(cache, host, start)

    # -- the session --------------------------------------------------------------------------------------------------

    async def attach(self, stream: Stream) -> None:
        """The session's stream: its end ends the session."""
        session = stream.session
        if session.is_attached:
            raise BadRequest("attach", "the session has a stream already")
        session.is_attached = True
        try:
            async with asyncio.TaskGroup() as tasks:
                talking = [tasks.create_task(self._listen(stream)), tasks.create_task(self._tell(stream))]
                for each in talking:
                    each.add_done_callback(lambda _: self._sessions.end(session, "its stream ended"))
                await session.ended.wait()
                for each in talking:
                    each.cancel()  # also from a client that does not read
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._sessions.end(session, "its stream ended")
        raise UnknownSession("the session has ended")

    async def _listen(self, stream: Stream) -> None:
        session = stream.session
        async for data in stream.said:
            if len(data) > MAX_BEAT_BYTES:
                raise LimitReached(f"{len(data)} bytes are more than {MAX_BEAT_BYTES}", field="message")
            beat = parse(pb.Beat, data)
            session.last_heard = self._cache.clock.monotonic()
            if beat.HasField("work"):
                self._sessions.note_work(session, EngineWork.of_message(beat.work))
            if len(beat.abandoned) > MAX_ABANDONED:
                raise LimitReached(f"{len(beat.abandoned)} calls are more than {MAX_ABANDONED}", field="abandoned")
            for call in beat.abandoned:
                self._sessions.abandon(session, call)
            if beat.HasField("lookup"):
                await stream.send(self._answer(stream, beat))
            elif beat.number:
                raise BadRequest("lookup", f"is missing, though there is a number, {beat.number}")

    def _answer(self, stream: Stream, beat: pb.Beat) -> pb.Notice:
        if not beat.number:
            raise BadRequest("number", "is missing")
        reply = stream.answer(_LOOKUP, beat.lookup, lambda: self._look_up(stream.session, beat.lookup))
        if isinstance(reply, pb.Error):
            return pb.Notice(number=beat.number, error=reply)
        return pb.Notice(number=beat.number, lookup=reply)

    async def _tell(self, stream: Stream) -> None:
        session = stream.session
        while True:
            session.news.clear()
            await stream.send(
                pb.Notice(
                    boot_id=self._sessions.boot.id,
                    durable_sequence=session.promises.durable,
                    lost=session.promises.take_lost(),
                    draining=self._sessions.is_draining,
                )
            )
            try:
                async with asyncio.timeout(self._sessions.times.lease_s / (NOTICES_A_LEASE + 1)):
                    await session.news.wait()
            except TimeoutError:
                continue

    async def register(self, call: Call, request: pb.RegisterRequest) -> pb.RegisterReply:
        """See the proto."""
        return pb.RegisterReply(namespace_id=self._sessions.names.register(call.session, request))

    # -- looking and leasing ------------------------------------------------------------------------------------------

    async def lookup(self, call: Call, request: pb.LookupRequest) -> pb.LookupReply:
        """See the proto. Does not wait."""
        return self._look_up(call.session, request)

    def _look_up(self, session: Session, request: pb.LookupRequest) -> pb.LookupReply:
        match = self._sessions.names.match(session, request.prefix)
        theirs = self._published(session, request.prefix, match) if self._cache.tree.num_publications else None
        coverage = self._cache.coverage(match if theirs is None else theirs)
        if self._recording.is_on:
            registered = session.registered(request.prefix.namespace_id)
            _, tokens = self._sessions.names.resolve(session, request.prefix)
            self._record(session, registered, tokens, coverage, None)
        if theirs is not None:
            return pb.LookupReply(num_tokens=coverage.num_tokens, runs=runs_of(coverage))
        return pb.LookupReply(
            num_tokens=coverage.num_tokens,
            partial_tokens=coverage.partial_tokens,
            runs=runs_of(coverage),
            handle=self._handle(session, request.prefix.namespace_id, match),
        )

    def _record(
        self, session: Session, registered: Registered, tokens: Tokens, coverage: Coverage, first_page: int | None
    ) -> None:
        """Tell who records. Parallel ranks ask for one prompt together: the first one's asking counts."""
        if registered.rank == 0:
            self._recording.note(session, registered.own, tokens, runs_of(coverage), first_page)

    def _published(self, session: Session, prefix: pb.Prefix, own: Match) -> Match | None:
        """What another tenant has published of a prefix, if that is more than the session's tenant has. Parallel ranks
        have only their own."""
        if len(session.registered(prefix.namespace_id).ranks) > 1:
            return None
        theirs = self._cache.tree.match(*self._sessions.names.resolve(session, prefix))
        return theirs if theirs.num_tokens > own.num_tokens else None

    def _handle(self, session: Session, namespace_id: int, match: Match) -> int:
        if not match.nodes:
            return 0
        num_pages = match.num_tokens // self._cache.layout.page_size
        return self._sessions.names.handle(session, namespace_id, match.nodes[-1], num_pages)

    async def acquire(self, call: Call, request: pb.AcquireRequest) -> pb.AcquireReply:
        """See the proto. Waits for copies from NVMe and for room in the arena, at most until the call's deadline: it
        then answers with what is there."""
        cache, sessions, session = self._cache, self._sessions, call.session
        page_size = cache.layout.page_size
        sessions.require_lease(session)
        # Asked for once: the session may let its namespace or the handle go while the call waits.
        registered = session.registered(request.prefix.namespace_id)
        namespace, tokens = sessions.names.resolve(session, request.prefix)
        match = sessions.names.match(session, request.prefix)
        if cache.tree.num_publications and self._published(session, request.prefix, match):
            most = request.first_page + sessions.room(session)
            await self._adopting.adopt(namespace, tokens[: most * page_size], deadline=call.deadline)
            sessions.require(session)
            match = cache.tree.match(namespace, tokens, published=False)
        coverage = cache.coverage(match)
        self._count(tokens, coverage)
        if self._recording.is_on:
            self._record(session, registered, tokens, coverage, request.first_page)
        reason, most = pb.REASON_NONE, request.first_page + sessions.room(session)
        may_share = request.partial and len(registered.ranks) == 1
        if most * page_size < match.num_tokens:
            match, reason = cache.tree.match(namespace, tokens[: most * page_size], published=False), pb.REASON_LIMIT
        while match.num_tokens > request.first_page * page_size:
            now = cache.clock.monotonic()
            lease = cache.tree.lease(match, owner=session.owner, deadline=None, now=now)
            try:
                cut_short = await self._promote(lease, call.deadline)
                sessions.require(session)
                path = cache.path(lease)
                if path:
                    cache.writing_through.used(path[-1])
                    cache.tell_use(lease)
                    reply = self._lend(session, lease, path, request, tokens if may_share else None)
                    if reply is None:
                        cache.release(lease)
                        return pb.AcquireReply(first_page=request.first_page, cut_short=cut_short or reason)
                    sessions.note_lent(session, reply.num_tokens - request.first_page * page_size)
                    reply.cut_short = reason
                    if reply.num_tokens < match.num_tokens:
                        reply.cut_short = cut_short or pb.REASON_NO_ROOM
                    return reply
            except BaseException:
                cache.release(lease)
                raise
            # A damaged page was forgotten, with everything below it; what is left is leased anew.
            cache.release(lease)
            match = cache.tree.match(namespace, tokens[: match.num_tokens], published=False)
        return pb.AcquireReply(
            first_page=min(request.first_page, match.num_tokens // page_size), cut_short=reason
        )

    async def _promote(self, lease: Lease, deadline: float) -> "pb.Reason":
        """Bring leased pages to the arena as far as they can; why not all of them, as far as that is known."""
        cache = self._cache
        if lease.node is not None:
            cache.tree.touch(lease.node, cache.clock.monotonic())
        try:
            arrived = await cache.promote(lease, max_device_pages=0, deadline=deadline)
        except (DeadlineExceeded, TierUnavailable) as error:
            return reason_of(error)
        return pb.REASON_NONE if arrived else pb.REASON_TIER_UNAVAILABLE

    def _lend(
        self, session: Session, lease: Lease, path: list[Node], request: pb.AcquireRequest, tokens: Tokens | None
    ) -> pb.AcquireReply | None:
        """Keep the arena's copies from `first_page` on in place, as far as they follow one another; the session's lease
        then ends there. `tokens`: of the whole prompt, where a page that shares some behind them is lent as well. None
        if the first of them is not there."""
        cache, page_size, first_page = self._cache, self._cache.layout.page_size, request.first_page
        # Looked at again: other calls of the session have been lent pages while this one waited.
        self._sessions.require_lease(session)
        room = self._sessions.room(session)
        start, kept, parts = 0, list[Node](), list[np.ndarray[Any, np.dtype[np.int32]]]()
        for node in path:
            end = start + node.num_pages
            if end > first_page:
                if start < first_page:
                    cache.tree.split(node, first_page - start)  # `node` stays the lower part
                room -= node.num_pages
                if node.residency(HOST) is not Residency.RESIDENT or room < 0:
                    break
                kept.append(node)
                parts.append(node.slots(HOST))
            start = end
        if not kept:
            return None
        partial = self._partial(kept[-1], start, tokens[start * page_size :], room) if tokens is not None else None
        if partial is not None:
            parts.append(partial.node.slots(HOST)[partial.page :][:1])
        slots = np.concatenate(parts)
        # Before the lease moves: that may join nodes of the path which nothing else holds; `kept` would name dead ones.
        pins = [cache.tree.pin(nodes, HOST) for nodes in (kept, [partial.node] if partial else []) if nodes]
        cache.tree.move_lease(lease, kept[-1], cache.clock.monotonic())
        generation = cache.tiers[HOST].generation
        generations = np.array([generation(slot) for slot in slots.tolist()], np.dtype("<i8"))
        lent = Lent((lease,), tuple(pins), sum([pin.num_pages for pin in pins]), slots=slots)
        return pb.AcquireReply(
            partial_tokens=partial.num_tokens if partial is not None else 0,
            handle=self._sessions.names.handle(session, request.prefix.namespace_id, kept[-1], start),
            lease=self._sessions.lend(session, lent, call=request.call),
            num_tokens=start * page_size,
            first_page=first_page,
            slots=slots.astype("<i4").tobytes(),
            generations=generations.tobytes(),
        )

    def _partial(self, node: Node, num_pages: int, tokens: Tokens, room: int) -> Partial | None:
        """The page that shares further tokens with the prompt, which has `tokens` behind the `num_pages` on the path to
        a node, if it follows these, is in the arena (part of a page is not worth a read from a disk) and its node has
        at most `room` pages."""
        match = self._cache.tree.match_after(node, num_pages, tokens)
        partial = match.partial if match.num_tokens == num_pages * self._cache.layout.page_size else None
        if partial is None or partial.node.residency(HOST) is not Residency.RESIDENT:
            return None
        return partial if partial.node.num_pages <= room else None

    def _count(self, tokens: Tokens, coverage: Coverage) -> None:
        counters = self._cache.counters
        counters.lookups += 1
        counters.hits += coverage.num_tokens > 0
        counters.tokens_asked += len(tokens)
        for tier_id, num_tokens in coverage.by_tier.items():
            counters.tokens_by_tier[tier_id] = counters.tokens_by_tier.get(tier_id, 0) + num_tokens

    async def pin(self, call: Call, request: pb.PinRequest) -> pb.PinReply:
        """See the proto. Does not wait."""
        sessions, session, tree = self._sessions, call.session, self._cache.tree
        sessions.require_lease(session)
        matches = sessions.names.match_each(session, request.prefix)
        if not matches[0].nodes:
            return pb.PinReply()
        num_pages = sum([match.num_tokens for match in matches]) // self._cache.layout.page_size
        sessions.require_pins(session, num_pages)
        now = self._cache.clock.monotonic()
        leases = tuple([tree.lease(match, owner=session.owner, deadline=None, now=now) for match in matches])
        number = sessions.lend(session, Lent(leases, (), 0, num_pages), call=request.call)
        return pb.PinReply(lease=number, num_tokens=matches[0].num_tokens)

    async def release(self, call: Call, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        """See the proto. Does not wait."""
        if len(request.ids) > MAX_RELEASED:
            raise LimitReached(f"{len(request.ids)} ids are more than {MAX_RELEASED}", field="ids")
        num_released = sum([self._sessions.release(call.session, number) for number in request.ids])
        return pb.ReleaseReply(num_released=num_released)

    async def publish(self, call: Call, request: pb.PublishRequest) -> pb.PublishReply:
        """See the proto. Does not wait."""
        registered = call.session.registered(request.prefix.namespace_id)
        if len(registered.ranks) > 1:
            raise BadRequest("prefix.namespace_id", "pages of several parallel ranks cannot be published")
        namespace, tokens = self._sessions.names.resolve(call.session, request.prefix)
        if not request.withdraw:
            return pb.PublishReply(num_tokens=self._cache.publish(namespace, tokens))
        return pb.PublishReply(num_tokens=len(tokens) if self._cache.unpublish(namespace, tokens) else 0)

    # -- writing ------------------------------------------------------------------------------------------------------

    async def reserve(self, call: Call, request: pb.ReserveRequest) -> pb.ReserveReply:
        """See the proto. Waits for room in the arena."""
        return await self._storing.reserve(call.session, request, call.deadline)

    async def commit(self, call: Call, request: pb.CommitRequest) -> pb.CommitReply:
        """See the proto. Waits for the copy, and for the disk only where that was asked for."""
        return await self._storing.commit(call.session, request, call.deadline)

    # -- for who maps no memory ---------------------------------------------------------------------------------------

    async def read(self, call: Call, request: pb.ReadRequest) -> pb.ReadReply:
        """See the proto. Does not wait."""
        return read_piece(self._host, call.session, request)

    async def write(self, call: Call, request: pb.WriteRequest) -> pb.WriteReply:
        """See the proto. Does not wait."""
        return write_piece(self._cache.layout.page_bytes, call.session, request)

    # -- what is to come ----------------------------------------------------------------------------------------------

    async def prefetch(self, call: Call, request: pb.PrefetchRequest) -> pb.PrefetchReply:
        """See the proto. Does not wait."""
        namespace, tokens = self._sessions.names.resolve(call.session, request.prefix)
        return prefetched(self._cache, namespace, tokens, request.within_ms, request.max_pages)

    async def hint(self, call: Call, request: pb.HintRequest) -> pb.HintReply:
        """See the proto. Does not wait."""
        namespace, tokens = self._sessions.names.resolve(call.session, request.prefix)
        num_tokens = self._cache.hint(
            namespace,
            tokens,
            priority=request.priority,
            retain_s=request.retain_ms / 1000 if request.HasField("retain_ms") else None,
            expected_return_s=request.expected_return_ms / 1000 if request.HasField("expected_return_ms") else None,
            returns=request.returns if request.HasField("returns") else None,
        )
        return pb.HintReply(num_tokens=num_tokens)


def prefetched(
    cache: Cache, namespace: Namespace, tokens: Tokens, within_ms: int, max_pages: int
) -> pb.PrefetchReply:
    """Begin to fetch what `PrefetchRequest` asks for. Raises `BadRequest`."""
    if not 1 <= within_ms <= MAX_WITHIN_MS:
        raise BadRequest("within_ms", f"{within_ms} is not within 1 to {MAX_WITHIN_MS}")
    deadline = cache.clock.monotonic() + within_ms / 1000
    begun = cache.prefetch(namespace, tokens, deadline=deadline, max_pages=max_pages or None)
    return pb.PrefetchReply(num_there=begun.num_there, num_begun=begun.num_begun, num_left_out=begun.num_left_out)


def runs_of(coverage: Coverage) -> list[pb.Run]:
    """Where a match is, with neighbours in one tier joined: how nodes are cut is nobody's concern."""
    runs: list[pb.Run] = []
    for tier_id, num_tokens in coverage.runs:
        if runs and runs[-1].tier == _TIERS[tier_id]:
            runs[-1].num_tokens += num_tokens
        else:
            runs.append(pb.Run(tier=_TIERS[tier_id], num_tokens=num_tokens))
    return runs


