"""What a server held and did, moment by moment: what the page's curves are drawn from.

A row is a list of numbers with the names of `columns`: "row" (its own number), "time" (seconds since 1970), for each
tier "used TIER" (bytes) and "found TIER" (tokens), "asked" (tokens), for each lane "lane NAME" (bytes), and "saved"
(seconds of prefill). All but the time and what is used only grow while the server runs.
"""

from collections import deque
from typing import Final, NamedTuple

from hicache.cache import Cache
from hicache.errors import BadRequest
from hicache.service.server.sessions import Sessions

EVERY_S: Final = 2.0
"""Between two rows."""


class Span(NamedTuple):
    """How much is remembered, and how finely."""

    every: int
    """One of so many rows."""
    rows_max: int


SPANS: Final = {"minutes": Span(1, 450), "day": Span(30, 1_440)}
"""A quarter of an hour as it was, and a day by the minute."""


class History:
    """Remembers. Belongs to the loop of the cache."""

    def __init__(self, cache: Cache, sessions: Sessions) -> None:
        self._cache: Final = cache
        self._sessions: Final = sessions
        self._num_rows = 0
        self._rows: Final = {name: deque[list[float]](maxlen=span.rows_max) for name, span in SPANS.items()}
        self.columns: Final = [
            "row",
            "time",
            *[f"used {tier}" for tier in cache.tiers],
            *[f"found {tier}" for tier in cache.tiers],
            "asked",
            *[f"lane {lane.name}" for lane in cache.lanes],
            "saved",
        ]
        self.note()

    def note(self) -> None:
        """Remember this moment. Called every `EVERY_S`."""
        row = [self._num_rows, *self._row()]
        for name, span in SPANS.items():
            if self._num_rows % span.every == 0:
                self._rows[name].append(row)
        self._num_rows += 1

    def rows(self, span: str, first: int) -> list[list[float]]:
        """Those from a number on, oldest first. Raises `BadRequest` for a span that there is not."""
        if span not in SPANS:
            raise BadRequest("span", f"{span!r:.40} is none of {', '.join(SPANS)}")
        return [row for row in self._rows[span] if row[0] >= first]

    def _row(self) -> list[float]:
        cache, page_bytes = self._cache, self._cache.layout.page_bytes
        counters = cache.counters
        return [
            cache.clock.wall(),
            *[(tier.capacity_pages - tier.num_free) * page_bytes for tier in cache.tiers.values()],
            *[counters.tokens_by_tier.get(tier, 0) for tier in cache.tiers],
            counters.tokens_asked,
            *[lane.stats.bytes for lane in cache.lanes],
            self._sessions.saved_s,
        ]
