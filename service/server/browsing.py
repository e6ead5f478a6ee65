"""Walks through all that is cached, a bounded step at a time: what `hicache tree` and `hicache top` can show."""

from collections.abc import Iterator
from typing import Final

from hicache.cache import Cache
from hicache.clock import Clock
from hicache.errors import BadRequest
from hicache.residency import Residency
from hicache.results import NodeInfo
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.boot import Boot
from hicache.service.server.walks import Walks
from hicache.tier import HOST, NVME
from hicache.tree import HiRadixTree

MAX_NODES: Final = 10_000
"""Nodes of one step."""
MAX_REPLY_BYTES: Final = 4 << 20
"""So many bytes of token ids after which a step ends early."""
_TIERS: Final = {HOST: pb.TIER_HOST, NVME: pb.TIER_NVME}


class Browsing:
    """Walks that are under way. Belongs to the event loop."""

    def __init__(self, cache: Cache, boot: Boot) -> None:
        self._cache: Final = cache
        self._walks: Final = Walks[tuple[Iterator[NodeInfo], bool]](boot)

    def browse(self, request: pb.BrowseRequest) -> pb.BrowseReply:
        """See `BrowseRequest`. Does not wait. Raises `BadRequest`, and `LeaseExpired` for a walk that is forgotten."""
        if not 1 <= request.max_nodes <= MAX_NODES:
            raise BadRequest("max_nodes", f"{request.max_nodes} is not within 1 to {MAX_NODES}")
        if request.walk:
            infos, wants_tokens = self._walks.take(request.walk)
        else:
            infos, wants_tokens = self._begin(request.tenant), request.tokens
        reply, num_bytes = pb.BrowseReply(), 0
        for info in infos:
            node = reply.nodes.add()
            self._show(info, node, wants_tokens=wants_tokens)
            num_bytes += len(node.tokens)
            if len(reply.nodes) >= request.max_nodes or num_bytes >= MAX_REPLY_BYTES:
                reply.walk = self._walks.keep(request.walk, (infos, wants_tokens))
                break
        return reply

    def _begin(self, tenant: str) -> Iterator[NodeInfo]:
        # In steps of one node, so that nothing is looked at before it is shown.
        for batch in self._cache.tree.walk(batch=1, tenant=tenant or None):
            yield from batch

    def _show(self, info: NodeInfo, shown: pb.BrowsedNode, *, wants_tokens: bool) -> None:
        show(self._cache.tree, self._cache.clock, info, shown)
        if wants_tokens:
            shown.tokens = self._cache.tree.own_tokens_of(info.node).astype("<i4").tobytes()


def show(tree: HiRadixTree, clock: Clock, info: NodeInfo, shown: pb.BrowsedNode) -> None:
    """A node as it travels, without its tokens."""
    now = clock.monotonic()
    shown.namespace, shown.tenant = info.namespace, info.tenant
    shown.first_page, shown.num_pages = info.first_page, info.num_pages
    by_state = {Residency.RESIDENT: shown.tiers, Residency.ARRIVING: shown.arriving, Residency.CONDEMNED: shown.leaving}
    for tier_id, state in zip(tree.tiers, info.residency, strict=True):
        if state is not Residency.ABSENT:
            by_state[state].append(_TIERS[tier_id])
    shown.age_ms = max(0, int(1000 * (now - info.last_access)))
    shown.num_uses = info.num_uses
    shown.num_leases, shown.num_children = info.num_leases, info.num_children
    shown.priority, shown.published = tree.priority(info.node), info.is_published
    until = tree.retained_until(info.node)
    shown.retained_ms = max(0, int(1000 * (until - now))) if until is not None else 0
