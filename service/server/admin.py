"""What the server's owner may do."""

import asyncio
import json
import mmap
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final

import numpy as np
from aiofiles.os import wrap

from hicache.cache import Cache
from hicache.errors import BadRequest, Closed, TierUnavailable
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.residency import Residency
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.browsing import Browsing
from hicache.service.server.edge import Call
from hicache.service.server.session import Tokens
from hicache.service.server.sessions import Sessions
from hicache.service.server.storing import Storing
from hicache.service.snapshot import snapshot_of, stats_of
from hicache.tier import HOST, NVME, Outcome, PageRead, TierId

PIECE_BYTES: Final = 1 << 20
"""Bytes of a piece of JSON."""
MAX_WITHIN_MS: Final = 600_000
_Find = Callable[[Node, pb.VerifyReply], Awaitable[set[int]]]
"""Reads a node's copy in one tier, counts, and says which slots are damaged."""
_TIERS: Final = {pb.TIER_HOST: HOST, pb.TIER_NVME: NVME}


class AdminCalls:
    """The service `Admin`. Belongs to the event loop."""

    def __init__(
        self,
        cache: Cache,
        sessions: Sessions,
        storing: Storing,
        *,
        status: Callable[[], dict[str, Any]],
        drain: Callable[[float], None],
        start: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`status`: what the server says of itself. `drain`: begin to stop, within so many seconds (0: its own).
        `start`: carry something out that no call waits for any more; it raises nothing."""
        self._cache: Final = cache
        self._sessions: Final = sessions
        self._storing: Final = storing
        self._status: Final = status
        self._drain: Final = drain
        self._start: Final = start
        self._browsing: Final = Browsing(cache, sessions.boot)

    async def inspect(self, call: Call, request: pb.InspectRequest) -> AsyncIterator[pb.InspectPiece]:
        """See the proto. Others run between batches of nodes."""
        if request.view == pb.VIEW_STATS:
            shown = stats_of(self._cache)
        elif request.view == pb.VIEW_SNAPSHOT:
            shown = await snapshot_of(self._cache)
        else:
            raise BadRequest("view", "says nothing")
        # A large tree takes a while to write down: in a thread, so that others run meanwhile.
        text = await wrap(_written)({**shown, "server": self._status(), **self._sessions.stats()})
        for start in range(0, len(text), PIECE_BYTES):
            yield pb.InspectPiece(json=text[start : start + PIECE_BYTES])

    async def evict(self, call: Call, request: pb.EvictRequest) -> pb.EvictReply:
        """See the proto. Waits for demotions, at most until the call's deadline."""
        tier_id = self._tier(request.tier)
        tier = self._cache.tiers[tier_id]
        if request.num_pages > tier.capacity_pages:
            raise BadRequest("num_pages", f"{request.num_pages} is not within 0 to {tier.capacity_pages}")
        # Room that is taken and given back at once is room that the policy chose.
        slots = await self._cache.allocate(tier_id, request.num_pages, deadline=call.deadline)
        self._cache.free({tier_id: slots})
        return pb.EvictReply(pages_free=tier.num_free)

    def _tier(self, tier: "pb.Tier") -> TierId:
        tier_id = _TIERS.get(tier)
        if tier_id is None:
            raise BadRequest("tier", "names no tier")
        if tier_id not in self._cache.tiers:
            raise TierUnavailable(tier_id, "this server has none")
        return tier_id

    async def flush(self, call: Call, request: pb.FlushRequest) -> pb.FlushReply:
        """See the proto. Waits until it is durable, at most until the call's deadline."""
        if request.tenant:
            removed = self._cache.tree.flush(tenant=request.tenant)
            self._cache.free(removed.freed)
            num_held = sum([node.num_pages for node in removed.held])
        else:
            num_held = await self._cache.flush_in_steps()
        return pb.FlushReply(num_held=num_held, is_durable=await self._cache.settle(deadline=call.deadline))

    async def verify(self, call: Call, request: pb.VerifyRequest) -> pb.VerifyReply:
        """See the proto. Reads node by node; others run in between. Waits for disks, at most until the call's
        deadline."""
        reply = pb.VerifyReply()
        for batch in self._cache.tree.walk(batch=100):
            for info in batch:
                for tier_id, find in ((HOST, self._damaged_in_arena), (NVME, self._damaged_on_nvme)):
                    if tier_id in self._cache.tiers:
                        # A read that hangs goes on without the call: its buffer and its pin are its own.
                        done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
                        self._start(self._carry_out(self._verify_copy(info.node, tier_id, find, reply), done))
                        await asyncio.wait([done])
                        if (error := done.result()) is not None:
                            raise error
        return reply

    async def _carry_out(
        self, work: Coroutine[Any, Any, None], done: "asyncio.Future[Exception | None]"
    ) -> None:
        """Do the work to its end; `done` has what it raised."""
        problem: Exception | None = Closed("the server stopped")
        try:
            await work
            problem = None
        except Exception as error:
            problem = error
        finally:
            done.set_result(problem)

    async def _verify_copy(self, node: Node, tier_id: TierId, find: "_Find", reply: pb.VerifyReply) -> None:
        """Verify a node's copy in one tier, which is kept there meanwhile."""
        cache = self._cache
        if not node.is_live or node.residency(tier_id) is not Residency.RESIDENT:
            return
        pins = cache.pin({tier_id: [node]})
        try:
            damaged = await find(node, reply)
        finally:
            # It may have been split meanwhile; a pin has all its parts.
            parts = [part for pin in pins for part in pin.nodes]
            cache.unpin(pins)
        reply.num_corrupt += len(damaged)
        for part in parts:
            if part.is_live and part.residency(tier_id) is Residency.RESIDENT:
                found = [page for page, slot in enumerate(part.slots(tier_id).tolist()) if slot in damaged]
                if found:
                    cache.forget(part, tier_id, found[0])

    async def _damaged_in_arena(self, node: Node, reply: pb.VerifyReply) -> set[int]:
        slots = node.slots(HOST).copy()
        found = await self._storing.is_whole(slots)
        reply.num_pages += len(found) - found.count(None)
        return {slot for slot, is_whole in zip(slots.tolist(), found, strict=True) if is_whole is False}

    async def _damaged_on_nvme(self, node: Node, reply: pb.VerifyReply) -> set[int]:
        nvme, damaged = self._cache.tiers[NVME], set[int]()
        buffer = memoryview(mmap.mmap(-1, self._cache.layout.page_bytes))  # aligned, for direct I/O
        for slot, identity in zip(node.slots(NVME).tolist(), self._cache.tree.identities(node), strict=True):
            (outcome,) = await nvme.read([PageRead(slot, nvme.generation(slot), identity, buffer)])
            reply.num_pages += 1
            reply.num_failed += outcome is Outcome.ERROR
            if outcome not in (Outcome.OK, Outcome.ERROR):
                damaged.add(slot)
        return damaged

    async def pin_prefix(self, call: Call, request: pb.NamedPrefix) -> pb.PinPrefixReply:
        """See the proto. Does not wait."""
        namespace, tokens = self._named(request)
        return pb.PinPrefixReply(num_tokens=self._cache.pin_prefix(namespace, tokens))

    async def unpin_prefix(self, call: Call, request: pb.NamedPrefix) -> pb.UnpinPrefixReply:
        """See the proto. Does not wait."""
        namespace, tokens = self._named(request)
        return pb.UnpinPrefixReply(was_pinned=self._cache.unpin_prefix(namespace, tokens))

    def _named(self, request: pb.NamedPrefix) -> tuple[Namespace, Tokens]:
        """What the owner means. Raises `BadRequest`, also for a namespace of which nothing is cached."""
        namespace = self._cache.tree.namespace_of(request.namespace)
        if namespace is None:
            raise BadRequest("namespace", f"nothing is cached of {request.namespace.hex() or 'no digest'}")
        if len(request.tokens) % 4:
            raise BadRequest("tokens", f"{len(request.tokens)} bytes are no whole ids of 4")
        return namespace, np.frombuffer(request.tokens, "<i4")

    async def browse(self, call: Call, request: pb.BrowseRequest) -> pb.BrowseReply:
        """See the proto. Does not wait."""
        return self._browsing.browse(request)

    async def drain(self, call: Call, request: pb.DrainRequest) -> pb.DrainReply:
        """See the proto. Does not wait."""
        if request.within_ms > MAX_WITHIN_MS:
            raise BadRequest("within_ms", f"{request.within_ms} is more than {MAX_WITHIN_MS}")
        num_sessions = len(self._sessions)
        self._drain(request.within_ms / 1000)
        return pb.DrainReply(num_sessions=num_sessions)


def _written(shown: dict[str, Any]) -> bytes:
    return json.dumps(shown).encode()
