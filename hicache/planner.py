"""The planner: what of a cached prefix is worth loading, and what is computed faster than it could be loaded.

`plan` is a pure function from what a match found, how fast the engine computes and how fast the lanes copy to a `Plan`.
A page is loaded, computed again, or there already. A prompt is computed from its front, and a page can be computed only
when everything before it is there; loading knows no order. So the pages of a match are divided as

        0                             x                          t            n
        |  compute, while all else    |  load, from the back     |  compute   |
        |  loads; load fast tiers     |  down to here            |  at last   |

x is where both ends meet at the same moment, t a border between tiers, behind which a hopelessly slow one is not waited
for. Before x the pages of fast tiers are loaded and skipped, so that nothing is computed that comes sooner. The
everyday choices are special cases: load everything (x = 0, t = n), compute everything (x = n, no tier is fast), compute
from the front and load from the back (0 < x < t = n).

Nothing in here decides alone: a plan rests on estimates, and `hicache.movers.meeting` follows what they turn out to be.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from hicache.errors import BadRequest
from hicache.movers.lane import Lane
from hicache.movers.speed import LaneSpeed
from hicache.movers.transfer import Priority
from hicache.prefill import PrefillCurve
from hicache.tier import TierId

MAX_BORDERS: Final = 5
"""Borders between tiers at which a plan may begin or stop loading; of a match that has more, those of its longest runs
are tried."""

Route = tuple[LaneSpeed, ...]
"""The lanes that a page passes on its way to where it is attended over, in order; empty where it is there already."""


class Choice(Enum):
    """What a plan does, in one word."""

    NOTHING = "nothing"
    """Every page is there."""
    LOAD = "load"
    """Every page that is not there is loaded."""
    RECOMPUTE = "recompute"
    """None is loaded: the hit is not worth it."""
    BOTH = "both"
    """Some are loaded while others are computed."""


@dataclass(frozen=True, slots=True)
class TierRun:
    """Consecutive pages of a match that lie in one tier."""

    tier_id: TierId
    num_pages: int


@dataclass(frozen=True, slots=True)
class PageRange:
    """Pages `[start, stop)` of a match, counted from the root."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Plan:
    """What to load and what to compute. Pages that are in no range are there already."""

    choice: Choice
    load_first: tuple[PageRange, ...]
    """To load at once, front first: what lies before or between the pages to compute."""
    compute: tuple[PageRange, ...]
    """To compute, in order, each as soon as everything before it is there, while `load_back` is loaded."""
    load_back: tuple[PageRange, ...]
    """To load last page first, down to where the computing end has come by then. Last range first."""
    compute_last: tuple[PageRange, ...]
    """To compute with the tokens after the match, as if they had not been found; empty mostly."""
    seconds: float
    """Predicted until the match and the tokens after it are computed or loaded."""
    load_seconds: float
    """What loading every page would take, the tokens after the match included."""
    recompute_seconds: float
    """What computing every page that is not there would take, the same included."""
    load_wait_s: float
    """Predicted seconds before the first page of `load_back` comes."""
    load_page_s: float
    """Predicted seconds from one page of `load_back` to the next."""
    reason: str
    """Why this was chosen, in words and figures."""

    def explain(self) -> str:
        """The plan in a few lines, for people."""
        lines = [f"{self.choice.value}: {self.reason}"]
        for what, ranges in (
            ("load first", self.load_first),
            ("compute from the front", self.compute),
            ("load from the back", self.load_back),
            ("compute at last", self.compute_last),
        ):
            if ranges:
                lines.append(f"  {what}: pages {', '.join(f'{r.start}-{r.stop - 1}' for r in ranges)}")
        lines.append(
            f"  predicted {in_words(self.seconds)}; loading all {in_words(self.load_seconds)}, "
            f"recomputing all {in_words(self.recompute_seconds)}"
        )
        return "\n".join(lines)


def routes_to(
    target: TierId, lanes: Iterable[Lane], *, priority: Priority = Priority.DEMAND
) -> Mapping[TierId, Route]:
    """How pages of every tier from which there is a way reach `target`, at the lanes' speeds and queues of now."""
    routes: dict[TierId, Route] = {target: ()}
    remaining = list(lanes)
    # Breadth first, away from the target: the shortest way wins.
    while found := [lane for lane in remaining if lane.target.tier_id in routes]:
        for lane in found:
            routes.setdefault(lane.source.tier_id, (lane.speed(priority=priority), *routes[lane.target.tier_id]))
        remaining = [lane for lane in remaining if lane not in found]
    return routes


def plan(
    runs: Sequence[TierRun],
    routes: Mapping[TierId, Route],
    prefill: PrefillCurve | None,
    *,
    page_size: int,
    new_tokens: int = 0,
    chunk_tokens: int = 512,
    num_layers: int = 1,
    compute_price: float = 0.0,
) -> Plan:
    """Choose what to load and what to compute so that the tokens after the match are computed soonest.

    Args:
        runs: the match in order from the root, by the fastest tier that has each page.
        routes: for each of these tiers, the lanes on the way to where attention runs (`routes_to`).
        prefill: what computing costs; None while nothing is known, and then everything is loaded.
        page_size: tokens of a page, at least 1.
        new_tokens: tokens after the match, which are computed in any case.
        chunk_tokens: tokens that the engine computes in one step.
        num_layers: layers in which the last lane delivers, 1 if it delivers whole pages. With more, the tokens after
            the match are computed on layer 0 while later layers arrive, where everything is loaded.
        compute_price: seconds of waiting that a second of computing is worth: 0 where the engine has nothing else to
            do, 1 where a queue waits for it.

    A lane that has copied nothing yet costs nothing by its own account, so its pages are loaded: that is how it becomes
    known. Raises `BadRequest` for numbers below their bounds, and a tier without a route.
    """
    for name, value, least in (
        ("page_size", page_size, 1),
        ("new_tokens", new_tokens, 0),
        ("chunk_tokens", chunk_tokens, 1),
        ("num_layers", num_layers, 1),
        ("compute_price", compute_price, 0),
    ):
        if not value >= least:
            raise BadRequest(name, f"{value} is below {least}")
    for run in runs:
        if run.tier_id not in routes:
            raise BadRequest("runs", f"there is no route from {run.tier_id}")
        if run.num_pages < 1:
            raise BadRequest("runs", f"a run of {run.num_pages} pages")
    return _Planning(runs, routes, prefill, page_size, new_tokens, chunk_tokens, num_layers, compute_price).plan()


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run with its place in the match."""

    start: int
    stop: int
    route: Route


@dataclass(frozen=True, slots=True)
class _Cut:
    """A candidate, by the names of the module's picture."""

    fast: frozenset[Route]
    """Whose pages before `meet` are loaded, not computed."""
    meet: int
    """x."""
    last: int
    """t."""
    seconds: float
    cost: float
    """`seconds` and the price of what is computed."""


class _Planning:
    """One call of `plan`."""

    def __init__(
        self,
        runs: Sequence[TierRun],
        routes: Mapping[TierId, Route],
        prefill: PrefillCurve | None,
        page_size: int,
        new_tokens: int,
        chunk_tokens: int,
        num_layers: int,
        compute_price: float,
    ) -> None:
        self._pieces = _pieces(runs, routes)
        self._num_pages = self._pieces[-1].stop if self._pieces else 0
        self._prefill = prefill
        self._page_size = page_size
        self._chunk_tokens = chunk_tokens
        self._num_layers = num_layers
        self._price = compute_price
        self._suffix_s = self._seconds(self._num_pages * page_size, new_tokens)

    def plan(self) -> Plan:
        num_pages = self._num_pages
        load_all = self._evaluate(frozenset(), 0, num_pages)
        missing = [piece for piece in self._pieces if piece.route]
        if not missing or self._prefill is None:
            choice = Choice.LOAD if missing else Choice.NOTHING
            reason = "no step of the engine was measured yet" if missing else "every page is there"
            return self._made(choice, load_all, load_all, load_all, reason)
        recompute_all = self._evaluate(frozenset(), num_pages, num_pages)
        if unknown := next((lane for piece in missing for lane in piece.route if not lane.is_measured), None):
            reason = f"{unknown.name} has copied nothing yet: loading shows what it costs"
            return self._made(Choice.LOAD, load_all, load_all, recompute_all, reason)
        # The simple choices come first, and another has to be better than they are.
        simple = min(load_all, recompute_all, key=lambda cut: cut.cost)
        best = min((simple, *self._candidates()), key=lambda cut: cut.cost)
        loads, computes = self._loaded(best), self._computed(best)
        if not computes:
            choice = Choice.LOAD
            reason = self._compared("loading", best, "recomputing", recompute_all)
        elif not loads:
            choice = Choice.RECOMPUTE
            reason = "not worth loading, " + self._compared("recomputing", best, "loading", load_all)
        else:
            choice = Choice.BOTH
            what = "loading" if simple is load_all else "recomputing"
            reason = self._compared("loading one part while the other is computed", best, f"{what} all", simple)
        return self._made(choice, best, load_all, recompute_all, reason)

    def _candidates(self) -> Iterable[_Cut]:
        longest = sorted(self._pieces, key=lambda piece: piece.start - piece.stop)[:MAX_BORDERS]
        borders = sorted({self._num_pages, *(piece.start for piece in longest)})
        # Fast tiers are the first ones by the time of a page.
        routes = sorted(
            {piece.route for piece in self._pieces if piece.route}, key=lambda route: max(lane.page_s for lane in route)
        )
        for num_fast in range(len(routes)):
            fast = frozenset(routes[:num_fast])
            for last in borders:
                # Where the two ends meet at the same moment, or one page before.
                low, high = 0, last
                while low < high:
                    middle = (low + high) // 2
                    front, back = self._ends(fast, middle, last)
                    low, high = (middle + 1, high) if front < back.end_s else (low, middle)
                for meet in {max(0, low - 1), low, 0}:
                    yield self._evaluate(fast, meet, last)

    def _evaluate(self, fast: frozenset[Route], meet: int, last: int) -> _Cut:
        front, back = self._ends(fast, meet, last)
        computed = self._compute_seconds(frozenset(), last, self._num_pages) + self._suffix_s
        seconds = max(front, back.end_s) + computed
        if self._num_layers > 1 and front <= back.end_s - back.spread_s:
            # Layer by layer: while one layer of the new tokens is computed, the next one of the prefix arrives.
            layer_0 = back.end_s - back.spread_s * (1 - 1 / self._num_layers)
            seconds = max(back.end_s + computed / self._num_layers, layer_0 + computed)
        computed += self._compute_seconds(fast, 0, meet)
        return _Cut(fast, meet, last, seconds, seconds + self._price * computed)

    def _ends(self, fast: frozenset[Route], meet: int, last: int) -> tuple[float, "Arrival"]:
        """When the computing end has come to `meet`, and when everything that is loaded has come."""
        front = 0.0
        loads: dict[Route, int] = {}
        for piece in self._pieces:
            if piece.start >= meet:
                break
            if piece.route in fast:
                _add(loads, piece, 0, meet)
            elif piece.route:
                front = max(front, arrival(loads).end_s)
                front += self._tokens_seconds(piece.start, min(piece.stop, meet))
        for piece in self._pieces:
            _add(loads, piece, meet, last)
        # The loading end asks for less and less at a time as it comes near the other one.
        return front, arrival(loads, last_pages=1 if front else None)

    def _compute_seconds(self, fast: frozenset[Route], start: int, stop: int) -> float:
        """Computing the pages of a range that are not there, except those of fast tiers."""
        return sum(self._tokens_seconds(each.start, each.stop) for each in self._missing(start, stop, without=fast))

    def _tokens_seconds(self, start: int, stop: int) -> float:
        """Computing the tokens of pages `[start, stop)`."""
        return self._seconds(start * self._page_size, (stop - start) * self._page_size)

    def _seconds(self, position: int, num_tokens: int) -> float:
        if self._prefill is None:
            return 0.0
        return self._prefill.seconds(position, position + num_tokens, steps=-(-num_tokens // self._chunk_tokens))

    def _missing(
        self, start: int, stop: int, *, within: frozenset[Route] | None = None, without: frozenset[Route] = frozenset()
    ) -> tuple[PageRange, ...]:
        """The parts of a range that are not there, in order; those of some routes only, or except those of some."""
        return tuple(
            PageRange(max(start, piece.start), min(stop, piece.stop))
            for piece in self._pieces
            if piece.route
            and (within is None or piece.route in within)
            and piece.route not in without
            and max(start, piece.start) < min(stop, piece.stop)
        )

    def _loads(self, ranges: Iterable[PageRange]) -> dict[Route, int]:
        """Pages of ranges by their route."""
        loads: dict[Route, int] = {}
        for each in ranges:
            for piece in self._pieces:
                _add(loads, piece, each.start, each.stop)
        return loads

    def _loaded(self, cut: _Cut) -> tuple[PageRange, ...]:
        return self._missing(0, cut.meet, within=cut.fast) + self._missing(cut.meet, cut.last)

    def _computed(self, cut: _Cut) -> tuple[PageRange, ...]:
        return self._missing(0, cut.meet, without=cut.fast) + self._missing(cut.last, self._num_pages)

    def _compared(self, ours: str, cut: _Cut, theirs: str, other: _Cut) -> str:
        text = f"{ours} takes {in_words(cut.seconds)}, {theirs} {in_words(other.seconds)}"
        if self._price and cut.seconds > other.seconds:
            text += f", but it leaves the engine free (a second of computing is priced at {self._price:g} s)"
        return text

    def _made(self, choice: Choice, cut: _Cut, load_all: _Cut, recompute_all: _Cut, reason: str) -> Plan:
        compute = self._missing(0, cut.meet, without=cut.fast)
        # Where there is no front to meet, the front is loaded first: if a page fails, what lies before it is of use.
        back = self._missing(cut.meet, cut.last) if compute else ()
        back_pages = self._loads(back)
        num_back = sum(back_pages.values())
        load_page_s = max(_lane_seconds(back_pages).values(), default=0.0) / max(1, num_back)
        load_s = arrival(self._loads(self._loaded(cut)), last_pages=1 if compute else None).end_s
        return Plan(
            choice=choice,
            load_first=self._missing(0, cut.meet, within=cut.fast) if compute else self._loaded(cut),
            compute=compute,
            load_back=back[::-1],
            compute_last=self._missing(cut.last, self._num_pages),
            seconds=cut.seconds,
            load_seconds=load_all.seconds,
            recompute_seconds=recompute_all.seconds,
            load_wait_s=max(0.0, load_s - num_back * load_page_s) if num_back else 0.0,
            load_page_s=load_page_s,
            reason=reason,
        )


def _add(loads: dict[Route, int], piece: _Piece, start: int, stop: int) -> None:
    """Add what of a piece lies in a range to what is loaded over its route."""
    num_pages = min(stop, piece.stop) - max(start, piece.start)
    if piece.route and num_pages > 0:
        loads[piece.route] = loads.get(piece.route, 0) + num_pages


def _lane_seconds(loads: Mapping[Route, int]) -> dict[str, float]:
    """How long each lane copies what passes it."""
    seconds: dict[str, float] = {}
    for route, num_pages in loads.items():
        for lane in route:
            seconds[lane.name] = seconds.get(lane.name, 0.0) + num_pages * lane.page_s
    return seconds


@dataclass(frozen=True, slots=True)
class Arrival:
    """When pages that are loaded are there."""

    end_s: float
    """Seconds until the last byte."""
    spread_s: float
    """How long before that the last lane began with the last of what it had to do without waiting for another lane.
    Where it delivers layer by layer, the layers arrive spread over this time."""


def arrival(pages: Mapping[Route, int], *, last_pages: int | None = None) -> Arrival:
    """When so many pages have come over each route, all lanes working at once.

    A lane that only passes on what another one brings begins with that one's first batch; and it ends one batch of its
    own after the other one at the earliest, or as long as `last_pages` pages take where the last batch has only these.
    """
    ends: dict[str, Arrival] = {}
    # Lanes by how many hops before the target they are, those farthest away first.
    for depth in range(max((len(route) for route in pages), default=0), 0, -1):
        for lane in {route[-depth].name: route[-depth] for route in pages if len(route) >= depth}.values():
            direct, feeders = 0, dict[str, tuple[LaneSpeed, int]]()
            for route, num_pages in pages.items():
                if len(route) < depth or route[-depth].name != lane.name:
                    continue
                if len(route) == depth:
                    direct += num_pages
                else:
                    before = route[-depth - 1]
                    feeders[before.name] = (before, feeders.get(before.name, (before, 0))[1] + num_pages)
            fed = sum(num_pages for _, num_pages in feeders.values())
            begin_s = lane.ahead_s
            if fed and not direct:
                begin_s = max(begin_s, min(each.wait_s + min(n, each.batch_pages) * each.page_s
                                           for each, n in feeders.values()))  # fmt: skip
            spread_s = (direct + fed) * lane.page_s
            end_s = begin_s + lane.latency_s + spread_s
            for name, (_, n) in feeders.items():
                last_batch_s = min(n, last_pages or lane.batch_pages) * lane.page_s
                if ends[name].end_s + lane.latency_s + last_batch_s > end_s:
                    end_s, spread_s = ends[name].end_s + lane.latency_s + last_batch_s, last_batch_s
            ends[lane.name] = Arrival(end_s, spread_s)
    return max(ends.values(), key=lambda each: each.end_s, default=Arrival(0.0, 0.0))


def _pieces(runs: Sequence[TierRun], routes: Mapping[TierId, Route]) -> list[_Piece]:
    """The runs with their places; neighbours of one route are one, and of very many the smallest are taken together."""
    pieces: list[_Piece] = []
    start = 0
    for run in runs:
        piece = _Piece(start, start + run.num_pages, routes[run.tier_id])
        start = piece.stop
        if pieces and pieces[-1].route == piece.route:
            piece = _Piece(pieces.pop().start, piece.stop, piece.route)
        pieces.append(piece)
    return pieces


def in_words(seconds: float) -> str:
    """Seconds, for people."""
    return f"{seconds * 1e3:,.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"
