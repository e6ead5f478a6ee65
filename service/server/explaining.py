"""What would come of a prompt: what is cached of it, what of that a session would be lent, and what that takes."""

from collections.abc import Mapping
from typing import Final

from hicache.cache import Cache, Coverage
from hicache.deciding import Decision, decide
from hicache.namespace import Namespace
from hicache.planner import Route, arrival, routes_to
from hicache.prefill import PrefillCurve
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.data import runs_of
from hicache.service.server.session import Tokens
from hicache.service.server.sessions import Sessions
from hicache.tier import HOST, TierId


class Explaining:
    """Answers `Explain`. Belongs to the event loop."""

    def __init__(self, cache: Cache, sessions: Sessions) -> None:
        self._cache: Final = cache
        self._sessions: Final = sessions

    def explain(self, namespace: Namespace, tokens: Tokens) -> pb.ExplainReply:
        """See `ExplainReply`. Does not wait."""
        cache, page_size = self._cache, self._cache.layout.page_size
        match = cache.tree.match(namespace, tokens)
        coverage = cache.coverage(match)
        taken_tokens = min(coverage.num_tokens, self._sessions.max_pages * page_size)
        routes = routes_to(HOST, cache.lanes)
        decision = cache.cared_for(self._decision(len(tokens), coverage, routes), match)
        reply = pb.ExplainReply(
            num_tokens=coverage.num_tokens,
            partial_tokens=coverage.partial_tokens,
            runs=runs_of(coverage),
            pinned_tokens=decision.pinned_tokens,
            priority=decision.priority,
            retained_ms=int(1000 * (decision.retained_s or 0)),
            published=match.owner != match.asked,
            taken_tokens=taken_tokens,
            reason=self._reason(coverage, taken_tokens, decision),
        )
        load_s = self._load_s(coverage, taken_tokens, routes)
        if load_s is not None:
            reply.load_us = round(1e6 * load_s)
        if self._token_s is not None:
            reply.token_ns = round(1e9 * self._token_s)
        return reply

    @property
    def _token_s(self) -> float | None:
        work = self._sessions.work
        return work.prefill_s / work.prefill_tokens if work.prefill_tokens else None

    def _decision(self, num_tokens: int, coverage: Coverage, routes: Mapping[TierId, Route]) -> Decision:
        """What the planner would choose, whose engine attends over the arena."""
        curve = PrefillCurve(self._token_s) if self._token_s else None
        return decide(num_tokens, coverage.runs, routes, curve, page_size=self._cache.layout.page_size)

    def _reason(self, coverage: Coverage, taken_tokens: int, decision: Decision) -> str:
        if taken_tokens < coverage.num_tokens:
            most = self._sessions.max_pages
            return f"a session is lent {most} pages of the arena at most, so an engine computes what is behind them"
        if coverage.num_tokens and all(tier_id == HOST for tier_id, _ in coverage.runs):
            return "all that is cached is in host memory: nothing has to be loaded"
        if decision.taken_tokens < coverage.num_tokens:
            return f"{decision.reason}; what is acquired is loaded all the same, unless an engine acquires less"
        return decision.reason

    def _load_s(self, coverage: Coverage, taken_tokens: int, routes: Mapping[TierId, Route]) -> float | None:
        """Seconds until what is taken is in the arena; None while that is not known."""
        pages: dict[Route, int] = {}
        position = 0
        for tier_id, num_tokens in coverage.runs:
            taken = min(num_tokens, max(0, taken_tokens - position))
            if taken and (route := routes[tier_id]):
                pages[route] = pages.get(route, 0) + taken // self._cache.layout.page_size
            position += num_tokens
        if not all(lane.is_measured for route in pages for lane in route):
            return None
        return arrival(pages).end_s
