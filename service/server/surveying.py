"""Tells what matters most of all that is cached, in memory that does not grow with it and a moment at a time: what
`hicache tree` and `hicache top` show."""

from collections.abc import Callable
from heapq import heappush, heapreplace
from typing import Final

from hicache.clock import Clock
from hicache.errors import BadRequest, LeaseExpired
from hicache.node import Node
from hicache.residency import Residency
from hicache.service.dashboard.heaviest import Branch
from hicache.service.dashboard.pace import Pace
from hicache.service.dashboard.walk import Key, Round, View
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.boot import Boot
from hicache.service.server.browsing import show
from hicache.service.server.walks import Walks
from hicache.tree import HiRadixTree

MAX_OUTLINED: Final = 10_000
"""Branches of an outline."""
MAX_RANKED: Final = 1_000
"""Nodes of a ranking."""
MAX_TOKENS: Final = 64
"""Token ids that are told of each node."""
MAX_CONTAINS: Final = 256
"""Characters of `RankRequest.contains`."""
FIRST_TOKENS: Final = 4
"""Token ids of a node that `RankRequest.contains` is compared with."""
LOOK_S: Final = 0.5
"""How long one call walks on at most."""
OUTLINE_SHARE: Final = 0.5
"""Part of that time that an outline works: somebody waits for its end, and only once."""
_ALL: Final = 1 << 31
Rank = tuple[float, float]
_RANKS: Final[dict["pb.Order", Callable[[Node], Rank]]] = {
    pb.ORDER_USES: lambda node: (node.num_uses, node.last_access),
    pb.ORDER_LATEST: lambda node: (node.last_access, 0),
    pb.ORDER_BYTES: lambda node: (node.num_pages, 0),
    pb.ORDER_LEASES: lambda node: (node.num_leases, node.last_access),
}
"""What is greater for a node that comes first."""


class Ranking(Round):
    """The nodes that come first in some order, found round after round; of equal ones those that were met first.

    Args:
        rank: greater for what comes first.
        is_wanted: which nodes count at all.
        limit: nodes that are kept.
    """

    def __init__(
        self,
        tree: HiRadixTree,
        clock: Clock,
        *,
        rank: Callable[[Node], Rank],
        is_wanted: Callable[[Node], bool] | None,
        limit: int,
    ) -> None:
        self._rank: Final = rank
        self._is_wanted: Final = is_wanted
        self._limit: Final = limit
        self._last: tuple[list[Node], int] | None = None
        super().__init__(tree, clock, None)

    @property
    def found(self) -> tuple[list[Node], int]:
        """The first ones, and of how many: by the last round that has ended, or by the first one so far."""
        return self._last if self._last is not None else self._ordered()

    def _begin(self) -> None:
        self._heap: list[tuple[Rank, int, Node]] = []
        self._num_wanted = 0

    def _meet(self, node: Node) -> None:
        if self._is_wanted is not None and not self._is_wanted(node):
            return
        self._num_wanted += 1
        rank = self._rank(node)
        if len(self._heap) < self._limit:
            heappush(self._heap, (rank, -self._num_wanted, node))
        elif rank > self._heap[0][0]:
            heapreplace(self._heap, (rank, -self._num_wanted, node))

    def _end(self) -> None:
        self._last = self._ordered()

    def _ordered(self) -> tuple[list[Node], int]:
        return [node for _, _, node in sorted(self._heap, reverse=True)], self._num_wanted


class Surveying:
    """Outlines and rankings that are under way. Belongs to the event loop. Both raise `BadRequest`."""

    def __init__(self, tree: HiRadixTree, clock: Clock, boot: Boot) -> None:
        self._tree: Final = tree
        self._clock: Final = clock
        self._outlines: Final = Walks[tuple[View, int]](boot)
        self._rankings: Final = Walks[Ranking](boot)

    async def outline(self, request: pb.OutlineRequest) -> pb.OutlineReply:
        """See `OutlineRequest`. Waits for about `LOOK_S` at most. Raises `LeaseExpired` for one that is forgotten."""
        if request.walk:
            view, max_tokens = self._outlines.take(request.walk)
        else:
            max_tokens = _within("max_tokens", request.max_tokens, 0, MAX_TOKENS)
            view = self._view(request)
        pace = Pace(self._clock, OUTLINE_SHARE)
        if not request.end:
            await view.go_on(pace, self._clock.monotonic() + LOOK_S)
        if not (view.is_whole or request.end):
            walk = self._outlines.keep(request.walk, (view, max_tokens))
            return pb.OutlineReply(walk=walk, num_seen=view.num_met)
        top = view.top
        reply = pb.OutlineReply(num_seen=top.total[1], whole=view.is_whole)
        await self._tell(top, reply, max_tokens, pace)
        return reply

    def _view(self, request: pb.OutlineRequest) -> View:
        max_branches = _within("max_branches", request.max_branches, 1, MAX_OUTLINED)
        # A namespace is a branch, too, one level above its nodes.
        max_depth = 1 + (request.max_depth or _ALL)
        return View(self._tree, self._clock, None, page_bytes=1, limit=max_branches, max_depth=max_depth)

    async def _tell(self, top: Branch[Key], reply: pb.OutlineReply, max_tokens: int, pace: Pace) -> None:
        ends: dict[Node, int] = {}
        pending = [(branch, 0) for branch in reversed(top.children)]
        while pending:
            branch, above = pending.pop()
            if not isinstance(branch.key, Node) or branch.key.is_live:
                told = reply.branches.add(above=above)
                self._tell_itself(branch.key, told.node, max_tokens, ends)
                told.total_pages, told.total_nodes = branch.total[:2]
                told.hidden_pages, told.hidden_nodes = branch.hidden[:2] if branch.hidden is not None else (0, 0)
                above = len(reply.branches)
            # What hung on a node that was merged into one below it hangs on what that one hangs on.
            pending += [(child, above) for child in reversed(branch.children)]
            await pace.rest()
        reply.hidden_pages, reply.hidden_nodes = top.hidden[:2] if top.hidden is not None else (0, 0)

    def _tell_itself(self, key: Key, told: pb.BrowsedNode, max_tokens: int, ends: dict[Node, int]) -> None:
        if isinstance(key, Node):
            self._show(key, told, max_tokens, ends)
        elif key is not None:
            told.namespace = key
            known = self._tree.namespace_of(key)
            told.tenant = known.tenant if known is not None else ""

    async def rank(self, request: pb.RankRequest) -> pb.RankReply:
        """See `RankRequest`. Waits for about `LOOK_S` at most."""
        max_tokens = _within("max_tokens", request.max_tokens, 0, MAX_TOKENS)
        try:
            ranking = self._rankings.take(request.walk)
        except LeaseExpired:
            ranking = self._ranking(request)
        pace = Pace(self._clock)
        await ranking.go_on(pace, self._clock.monotonic() + LOOK_S)
        nodes, num_matched = ranking.found
        reply = pb.RankReply(num_matched=num_matched, whole=ranking.is_whole)
        ends: dict[Node, int] = {}
        for node in nodes:
            if node.is_live:
                self._show(node, reply.nodes.add(), max_tokens, ends)
            await pace.rest()
        reply.walk = self._rankings.keep(request.walk, ranking)
        return reply

    def _ranking(self, request: pb.RankRequest) -> Ranking:
        rank = _RANKS.get(request.order)
        if rank is None:
            raise BadRequest("order", "says nothing")
        max_nodes = _within("max_nodes", request.max_nodes, 1, MAX_RANKED)
        _within("contains", len(request.contains), 0, MAX_CONTAINS)
        wanted = request.contains.lower()

        def is_wanted(node: Node) -> bool:
            return wanted in self._text(node).lower()

        return Ranking(
            self._tree, self._clock, rank=rank, is_wanted=is_wanted if wanted else None, limit=max_nodes
        )

    def _text(self, node: Node) -> str:
        tree = self._tree
        tiers = [tier for tier in tree.tiers if node.residency(tier) is Residency.RESIDENT]
        ids = tree.own_tokens_of(node, FIRST_TOKENS).tolist()
        return " ".join(map(str, (node.namespace.hex(), node.tenant, *tiers, *ids)))

    def _show(self, node: Node, shown: pb.BrowsedNode, max_tokens: int, ends: dict[Node, int]) -> None:
        show(self._tree, self._clock, self._tree.info(node, ends), shown)
        if max_tokens:
            shown.tokens = self._tree.own_tokens_of(node, max_tokens).astype("<i4").tobytes()


def _within(field: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise BadRequest(field, f"{value} is not within {least:,} to {most:,}")
    return value
