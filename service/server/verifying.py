"""Reads what is cached and compares it with its checksums: all of it, or a sample, at once or in steps.

A copy stays where it is while it is read. What is damaged is forgotten, with everything that rests on it; what cannot
be read stays.
"""

import asyncio
import mmap
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hicache.cache import Cache
from hicache.errors import BadRequest, Closed
from hicache.node import Node
from hicache.residency import Residency
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.boot import Boot
from hicache.service.server.storing import Storing
from hicache.service.server.walks import Walks
from hicache.tier import HOST, NVME, Outcome, PageIdentity, PageRead, Slots, TierId

BATCH: Final = 100
"""Nodes that are listed at once."""


@dataclass(frozen=True, slots=True)
class _Walk:
    """A verification under way."""

    nodes: Iterator[Node]
    one_in: int
    """Of so many pages one is read."""


class Verifying:
    """Verifications that are under way. Belongs to the event loop.

    Args:
        start: carry something out that no call waits for any more; it raises nothing.
    """

    def __init__(
        self, cache: Cache, storing: Storing, boot: Boot, start: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        self._cache: Final = cache
        self._storing: Final = storing
        self._start: Final = start
        self._walks: Final = Walks[_Walk](boot)

    async def verify(self, request: pb.VerifyRequest) -> pb.VerifyReply:
        """See `VerifyRequest`. Waits for disks; others run between nodes. Raises `BadRequest`, and `LeaseExpired` for a
        walk that is forgotten."""
        if request.walk:
            if request.one_in:
                raise BadRequest("one_in", "is said as a walk begins")
            walk = self._walks.take(request.walk)
        else:
            walk = _Walk(self._nodes(), max(1, request.one_in))
        reply = pb.VerifyReply()
        for node in walk.nodes:
            for tier_id in (HOST, NVME):
                if tier_id in self._cache.tiers:
                    await self._waited_for(self._verify_copy(node, tier_id, walk.one_in, reply))
            if request.max_pages and reply.num_pages + reply.num_failed >= request.max_pages:
                reply.walk = self._walks.keep(request.walk, walk)
                break
        return reply

    def _nodes(self) -> Iterator[Node]:
        for batch in self._cache.tree.walk(batch=BATCH):
            for info in batch:
                yield info.node

    async def _waited_for(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work that goes on without the call: a read that hangs has a buffer and a pin of its own."""
        done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._start(_carry_out(work, done))
        await asyncio.wait([done])
        if (error := done.result()) is not None:
            raise error

    async def _verify_copy(self, node: Node, tier_id: TierId, one_in: int, reply: pb.VerifyReply) -> None:
        """Verify a node's copy in one tier, which is kept there meanwhile."""
        cache = self._cache
        if not node.is_live or node.residency(tier_id) is not Residency.RESIDENT:
            return
        pages = [page for page in range(node.num_pages) if one_in == 1 or not random.randrange(one_in)]
        if not pages:
            return
        pins = cache.pin({tier_id: [node]})
        try:
            slots = node.slots(tier_id)[pages]
            if tier_id == HOST:
                damaged = await self._damaged_in_arena(slots, reply)
            else:
                identities = cache.tree.identities(node)
                damaged = await self._damaged_on_nvme(slots, [identities[page] for page in pages], reply)
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

    async def _damaged_in_arena(self, slots: Slots, reply: pb.VerifyReply) -> set[int]:
        found = await self._storing.copying.is_whole(slots)
        reply.num_pages += len(found) - found.count(None)
        return {slot for slot, is_whole in zip(slots.tolist(), found, strict=True) if is_whole is False}

    async def _damaged_on_nvme(
        self, slots: Slots, identities: Sequence[PageIdentity], reply: pb.VerifyReply
    ) -> set[int]:
        nvme, damaged = self._cache.tiers[NVME], set[int]()
        buffer = memoryview(mmap.mmap(-1, self._cache.layout.page_bytes))  # aligned, for direct I/O
        for slot, identity in zip(slots.tolist(), identities, strict=True):
            (outcome,) = await nvme.read([PageRead(slot, nvme.generation(slot), identity, buffer)])
            reply.num_pages += 1
            reply.num_failed += outcome is Outcome.ERROR
            if outcome not in (Outcome.OK, Outcome.ERROR):
                damaged.add(slot)
        return damaged


async def _carry_out(work: Coroutine[Any, Any, None], done: "asyncio.Future[Exception | None]") -> None:
    """Do the work to its end; `done` has what it raised."""
    problem: Exception | None = Closed("the server stopped")
    try:
        await work
        problem = None
    except Exception as error:
        problem = error
    finally:
        done.set_result(problem)
