"""How much of what is cached a request takes: what is slower to load than to compute stays where it is.

A sequence takes the beginning of a match, up to some page, and computes what follows. Loading costs the same for every
page of a tier, computing more for later pages, and so the best border lies between two tiers, at the end of the match,
or at its beginning: those few are compared. Everything is loaded unless something else is predicted to be at least
`MARGIN` faster, and while any of the figures is unknown or old.

For an engine that asks before each step how far it may go (`Sequence.next_step`), a further choice is compared: compute
from the front while the rest is loaded from the back (`hicache.planner`, carried out by `hicache.both_ends`).
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hicache.clock import Clock
from hicache.movers import Lane, LaneSpeed
from hicache.planner import Choice, Plan, Route, TierRun, arrival, in_words, plan, routes_to
from hicache.prefill import PrefillCurve, PrefillSpeed
from hicache.tier import DEVICE, Tier, TierId

MARGIN: Final = 0.02
"""Part of the time for loading everything that must be saved to leave anything."""
CHUNK_TOKENS: Final = 512
"""Tokens that an engine is taken to compute in one step, if it does not say."""
STALE_S: Final = 60.0
"""A lane that has copied nothing for so long is taken for unknown: what was left because it was slow is tried again."""
MAX_MODELS: Final = 64
"""Models whose speed is remembered; of more, those that computed last."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a request for a prompt would take from the cache, and why."""

    num_tokens: int
    """Tokens of the prompt."""
    cached: tuple[tuple[TierId, int], ...]
    """What is cached in whole pages, in order from the root: runs of (fastest tier that has them, tokens)."""
    taken_tokens: int
    """The first so many of them are taken: loaded where they are not on the device. The rest of the prompt is computed,
    but for a partly matching page that may be copied."""
    seconds: float | None
    """Predicted until the prompt is computed; None while that cannot be said."""
    load_seconds: float | None
    """The same if everything cached is taken."""
    recompute_seconds: float | None
    """The same if nothing is."""
    reason: str
    """Why, in words and figures."""
    both_ends: Plan | None = None
    """How what is taken is divided between loading and computing, in pages; None where all of it is loaded."""
    computed_tokens: int = 0
    """Tokens of what is taken that are computed while the others are loaded."""
    pinned_tokens: int = 0
    """Tokens of what is cached that operators have pinned: they stay in some tier."""
    priority: int = 0
    """Of the end of what is cached, by the last hint about it."""
    retained_s: float | None = None
    """Seconds for which that end is retained by a hint; None for not."""

    @property
    def left_tokens(self) -> int:
        """Cached tokens that are computed all the same."""
        return sum([num_tokens for _, num_tokens in self.cached]) - self.taken_tokens + self.computed_tokens


class PrefillSpeeds:
    """What computing costs, by model, learnt from steps. Lives on the cache's loop."""

    def __init__(self) -> None:
        self._speeds: OrderedDict[str, PrefillSpeed] = OrderedDict()
        self._num_steps: dict[str, int] = {}

    def learn(self, model: str, start: int, stop: int, seconds: float) -> None:
        """A step computed tokens `[start, stop)` of one prompt. Raises `BadRequest` as `PrefillSpeed.add` does."""
        speed = self._speeds.get(model) or PrefillSpeed()
        speed.add(start, stop, seconds)
        self._speeds[model] = speed
        self._speeds.move_to_end(model)
        self._num_steps[model] = self._num_steps.get(model, 0) + 1
        if len(self._speeds) > MAX_MODELS:
            forgotten, _ = self._speeds.popitem(last=False)
            del self._num_steps[forgotten]

    def curve(self, model: str) -> PrefillCurve | None:
        """What is known of a model; None before it rests on `PrefillSpeed.SETTLED` steps."""
        if self._num_steps.get(model, 0) < PrefillSpeed.SETTLED:
            return None
        return self._speeds[model].curve

    def speed(self, model: str) -> PrefillSpeed | None:
        """What is known of a model, to learn on alone; None as `curve` is."""
        return self._speeds[model].copy() if self.curve(model) is not None else None


class Deciding:
    """What a cache knows of the cost of loading and of computing, and what it decides by it. Belongs to its loop.

    Args:
        prefill: what computing costs; with `PrefillSpeeds` it is learnt. None: everything is loaded.
        lanes: those of the cache.
        device: the tier where attention runs; None where there is none.
    """

    def __init__(
        self,
        prefill: PrefillCurve | PrefillSpeeds | None,
        lanes: Collection[Lane],
        *,
        clock: Clock,
        page_size: int,
        device: Tier | None,
    ) -> None:
        self._prefill: Final = prefill
        self._lanes: Final = lanes
        self._clock: Final = clock
        self._page_size: Final = page_size
        self._device: Final = device
        self._copied_at: Final[dict[str, float]] = {}

    def copied(self, lane: Lane) -> None:
        """Pages have come whole through a lane: for `STALE_S` its speed counts as known."""
        self._copied_at[lane.name] = self._clock.monotonic()

    def learn(self, model: str, start: int, stop: int, seconds: float) -> None:
        """A step computed tokens `[start, stop)` of one prompt. Nothing, where the cache does not learn. Raises
        `BadRequest` as `PrefillSpeed.add` does."""
        if isinstance(self._prefill, PrefillSpeeds):
            self._prefill.learn(model, start, stop, seconds)

    def speed(self, model: str) -> PrefillSpeed | None:
        """What computing costs, to learn on alone; None while that is not known."""
        known = self._prefill
        if isinstance(known, PrefillCurve):
            return PrefillSpeed.like(known)
        return known.speed(model) if known is not None else None

    def decide(
        self, model: str, num_tokens: int, cached: Sequence[tuple[TierId, int]], *, chunk_tokens: int | None
    ) -> Decision:
        """`decide` with what is known now."""
        num_cached = sum([run_tokens for _, run_tokens in cached])
        num_pages = num_cached // self._page_size + -(-(num_tokens - num_cached) // self._page_size)
        if self._device is None or num_pages >= self._device.capacity_pages:
            # It streams, or something else has to leave for it: how long that takes is not known.
            reason = "the context fills the device, so it is loaded as far as it fits, and streams"
            return Decision(num_tokens, tuple(cached), num_cached, None, None, None, reason)
        now = self._clock.monotonic()
        routes = {
            tier_id: tuple(
                replace(lane, is_measured=lane.is_measured and now - self._copied_at.get(lane.name, now) < STALE_S)
                for lane in route
            )
            for tier_id, route in routes_to(DEVICE, self._lanes).items()
        }
        known = self._prefill
        curve = known.curve(model) if isinstance(known, PrefillSpeeds) else known
        return decide(
            num_tokens, cached, routes, curve, page_size=self._page_size, chunk_tokens=chunk_tokens
        )


def decide(
    num_tokens: int,
    cached: Sequence[tuple[TierId, int]],
    routes: Mapping[TierId, Route],
    curve: PrefillCurve | None,
    *,
    page_size: int,
    chunk_tokens: int | None = None,
) -> Decision:
    """Choose how much of a match to take. Pure.

    Args:
        num_tokens: tokens of the prompt.
        cached: the match, as `Decision.cached`.
        routes: for each tier in it, the lanes on the way to the device (`routes_to`); a lane that is not measured, or
            not lately, says so.
        curve: what computing costs; None while that is not known.
        page_size: tokens of a page.
        chunk_tokens: tokens that the engine computes in one step, at least 1, if it may be asked to compute from the
            front while the rest is loaded from the back. None: what is taken is loaded before the first step.
    """
    num_cached = sum([run_tokens for _, run_tokens in cached])

    def decision(taken: int, reason: str, known: Mapping[int, float] | None = None) -> Decision:
        seconds = known or {}
        return Decision(
            num_tokens, tuple(cached), taken,
            seconds.get(taken), seconds.get(num_cached), seconds.get(0), reason,
        )  # fmt: skip

    if not num_cached:
        return decision(0, "nothing of it is cached in whole pages")
    lanes = [lane for tier_id in dict.fromkeys(tier_id for tier_id, _ in cached) for lane in routes[tier_id]]
    if not lanes:
        return decision(num_cached, "all that is cached is on the device")
    if curve is None:
        return decision(num_cached, "what computing costs is not known, or rests on too few steps: it is loaded")
    if unknown := _unmeasured(lanes):
        return decision(num_cached, f"{unknown.name} has copied nothing lately: loading shows what it costs")
    pages: dict[Route, int] = {}
    step_tokens = chunk_tokens or CHUNK_TOKENS
    seconds = {0: _compute(curve, 0, num_tokens, step_tokens)}
    position = 0
    for tier_id, run_tokens in cached:
        position += run_tokens
        if route := routes[tier_id]:
            pages[route] = pages.get(route, 0) + run_tokens // page_size
        seconds[position] = arrival(pages).end_s + _compute(curve, position, num_tokens, step_tokens)
    load_s = seconds[num_cached]
    if chunk_tokens is not None and (both := _from_both_ends(
        num_tokens, cached, routes, curve, page_size, chunk_tokens, min(seconds.values())
    )) is not None:
        computed = page_size * sum(map(len, both.compute))
        taken = page_size * max(each.stop for each in (*both.compute, *both.load_first, *both.load_back))
        reason = f"{both.reason}: {computed} of its cached tokens are computed from the front meanwhile"
        return Decision(
            num_tokens, tuple(cached), _end_of_what_is_there(cached, routes, taken), both.seconds, load_s, seconds[0],
            reason, both, computed,
        )  # fmt: skip
    best = min(seconds, key=lambda taken: (seconds[taken], -taken))
    if seconds[best] > load_s * (1 - MARGIN):
        others = f"computing all of it {in_words(seconds[0])}"
        return decision(num_cached, f"loading what is cached takes {in_words(load_s)}, {others}", seconds)
    what = f"the first {best} cached tokens are taken and the rest" if best else "all of it"
    comparison = f"if {what} is computed, it takes {in_words(seconds[best])}, else {in_words(load_s)}"
    return decision(best, f"not worth loading more: {comparison}", seconds)


def _from_both_ends(
    num_tokens: int,
    cached: Sequence[tuple[TierId, int]],
    routes: Mapping[TierId, Route],
    curve: PrefillCurve,
    page_size: int,
    chunk_tokens: int,
    simple_s: float,
) -> Plan | None:
    """The plan that computes from the front while it loads, if it is at least `MARGIN` faster than `simple_s`."""
    runs = [TierRun(tier_id, run_tokens // page_size) for tier_id, run_tokens in cached]
    new_tokens = num_tokens - sum([run_tokens for _, run_tokens in cached])
    found = plan(runs, routes, curve, page_size=page_size, new_tokens=new_tokens, chunk_tokens=chunk_tokens)
    is_both = found.choice is Choice.BOTH and bool(found.compute)
    return found if is_both and found.seconds <= simple_s * (1 - MARGIN) else None


def _end_of_what_is_there(cached: Sequence[tuple[TierId, int]], routes: Mapping[TierId, Route], taken: int) -> int:
    """`taken`, and what follows it on the device already."""
    position = 0
    for tier_id, run_tokens in cached:
        if not routes[tier_id] and position <= taken:
            taken = max(taken, position + run_tokens)
        position += run_tokens
    return taken


def _unmeasured(lanes: Sequence[LaneSpeed]) -> LaneSpeed | None:
    return next((lane for lane in lanes if not lane.is_measured), None)


def _compute(curve: PrefillCurve, start: int, stop: int, step_tokens: int) -> float:
    return curve.seconds(start, stop, steps=-(-(stop - start) // step_tokens))
