"""What the server's owner may do."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final

import numpy as np
from aiofiles.os import wrap

from hicache.cache import Cache
from hicache.errors import BadRequest, DeadlineExceeded, TierUnavailable
from hicache.namespace import Namespace
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.browsing import Browsing
from hicache.service.server.data import prefetched
from hicache.service.server.edge import Call
from hicache.service.server.explaining import Explaining
from hicache.service.server.recording import Recording
from hicache.service.server.session import Tokens
from hicache.service.server.sessions import Sessions
from hicache.service.server.storing import Storing
from hicache.service.server.surveying import Surveying
from hicache.service.server.verifying import Verifying
from hicache.service.snapshot import moment_of, snapshot_of, stats_of
from hicache.tier import HOST, NVME, TierId

PIECE_BYTES: Final = 1 << 20
"""Bytes of a piece of JSON."""
EVICT_BYTES: Final = 64 << 20
"""Bytes that leave a tier at once where the owner evicts: engines get room in between."""
MAX_WITHIN_MS: Final = 600_000
_TIERS: Final = {pb.TIER_HOST: HOST, pb.TIER_NVME: NVME}


class AdminCalls:
    """The service `Admin`. Belongs to the event loop."""

    def __init__(
        self,
        cache: Cache,
        sessions: Sessions,
        storing: Storing,
        recording: Recording,
        *,
        status: Callable[[], dict[str, Any]],
        drain: Callable[[float], None],
        start: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`status`: what the server says of itself. `drain`: begin to stop, within so many seconds (0: its own).
        `start`: carry something out that no call waits for any more; it raises nothing."""
        self._cache: Final = cache
        self._sessions: Final = sessions
        self._recording: Final = recording
        self._status: Final = status
        self._drain: Final = drain
        self._browsing: Final = Browsing(cache, sessions.boot)
        self._explaining: Final = Explaining(cache, sessions)
        self._surveying: Final = Surveying(cache.tree, cache.clock, sessions.boot)
        self._verifying: Final = Verifying(cache, storing, sessions.boot, start)

    async def inspect(self, call: Call, request: pb.InspectRequest) -> AsyncIterator[pb.InspectPiece]:
        """See the proto. Others run between batches of nodes."""
        if request.view == pb.VIEW_STATS:
            shown = moment_of(self._cache) | stats_of(self._cache)
        elif request.view == pb.VIEW_SNAPSHOT:
            shown = await snapshot_of(self._cache)
        else:
            raise BadRequest("view", "says nothing")
        # A large tree takes a while to write down: in a thread, so that others run meanwhile.
        beside = {"server": self._status(), "namespaces": self._namespaces(), **self._sessions.stats()}
        text = await wrap(_written)(shown | beside)
        for start in range(0, len(text), PIECE_BYTES):
            yield pb.InspectPiece(json=text[start : start + PIECE_BYTES])

    def _namespaces(self) -> list[dict[str, str]]:
        return [
            {"namespace": each.digest.hex(), "tenant": each.tenant, "model": each.model, "adapter": each.adapter}
            for each in self._cache.tree.namespaces()
        ]

    async def evict(self, call: Call, request: pb.EvictRequest) -> pb.EvictReply:
        """See the proto. Waits for demotions, at most until the call's deadline."""
        tier_id = self._tier(request.tier)
        tier = self._cache.tiers[tier_id]
        if request.num_pages > tier.capacity_pages:
            raise BadRequest("num_pages", f"{request.num_pages} is not within 0 to {tier.capacity_pages}")
        step = max(1, EVICT_BYTES // self._cache.layout.page_bytes)
        while tier.num_free < request.num_pages:
            if self._cache.clock.monotonic() >= call.deadline:
                raise DeadlineExceeded(f"{tier.num_free} pages were free at the deadline")
            # Room that is taken and given back at once is room that the policy chose. Out of turn: who waits in a line
            # keeps those behind him from pages that are free.
            wanted = min(tier.num_free + step, request.num_pages)
            slots = await self._cache.allocate(tier_id, wanted, deadline=call.deadline, wait=False)
            self._cache.free({tier_id: slots})
            await asyncio.sleep(0)
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
        num_held = await self._cache.flush_in_steps(tenant=request.tenant or None)
        return pb.FlushReply(num_held=num_held, is_durable=await self._cache.settle(deadline=call.deadline))

    async def verify(self, call: Call, request: pb.VerifyRequest) -> pb.VerifyReply:
        """See the proto. Reads node by node; others run in between. Waits for disks, at most until the call's
        deadline."""
        return await self._verifying.verify(request)

    async def pin_prefix(self, call: Call, request: pb.NamedPrefix) -> pb.PinPrefixReply:
        """See the proto. Does not wait."""
        namespace, tokens = self._named(request)
        return pb.PinPrefixReply(num_tokens=self._cache.pin_prefix(namespace, tokens))

    async def unpin_prefix(self, call: Call, request: pb.NamedPrefix) -> pb.UnpinPrefixReply:
        """See the proto. Does not wait."""
        namespace, tokens = self._named(request)
        return pb.UnpinPrefixReply(was_pinned=self._cache.unpin_prefix(namespace, tokens))

    async def prefetch_prefix(self, call: Call, request: pb.PrefetchPrefixRequest) -> pb.PrefetchReply:
        """See the proto. Does not wait."""
        namespace, tokens = self._named(request.prefix)
        return prefetched(self._cache, namespace, tokens, request.within_ms, request.max_pages)

    async def explain(self, call: Call, request: pb.NamedPrefix) -> pb.ExplainReply:
        """See the proto. Does not wait."""
        return self._explaining.explain(*self._named(request))

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

    async def outline(self, call: Call, request: pb.OutlineRequest) -> pb.OutlineReply:
        """See the proto. Waits for its moment at most."""
        return await self._surveying.outline(request)

    async def rank(self, call: Call, request: pb.RankRequest) -> pb.RankReply:
        """See the proto. Waits for its moment at most."""
        return await self._surveying.rank(request)

    async def record(self, call: Call, request: pb.RecordRequest) -> pb.RecordReply:
        """See the proto. Waits until something is asked, at most until the call's deadline."""
        return await self._recording.fetch(request, call.deadline)

    async def drain(self, call: Call, request: pb.DrainRequest) -> pb.DrainReply:
        """See the proto. Does not wait."""
        if request.within_ms > MAX_WITHIN_MS:
            raise BadRequest("within_ms", f"{request.within_ms} is more than {MAX_WITHIN_MS}")
        num_sessions = len(self._sessions)
        self._drain(request.within_ms / 1000)
        return pb.DrainReply(num_sessions=num_sessions)


def _written(shown: dict[str, Any]) -> bytes:
    """JSON. Node by node: other threads wait for as long as one call of the encoder takes."""
    if "nodes" not in shown:
        return json.dumps(shown).encode()
    nodes = [json.dumps(node).encode() for node in shown["nodes"]]
    rest = json.dumps({name: value for name, value in shown.items() if name != "nodes"}).encode()
    return b"".join([rest[:-1], b', "nodes": [', b", ".join(nodes), b"]}"])
