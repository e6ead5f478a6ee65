"""How much of what is cached a request takes: what is slower to load than to compute stays where it is.

A sequence takes the beginning of a match, up to some page, and computes what follows. Loading costs the same for every
page of a tier, computing more for later pages, and so the best border lies between two tiers, at the end of the match,
or at its beginning: those few are compared. Everything is loaded unless something else is predicted to be at least
`MARGIN` faster, and while any of the figures is unknown or old.

`hicache.planner` also knows plans that compute from the front while they load from the back. A sequence does not carry
those out, as its pages are published from the front; they are for engines that drive `hicache.movers.meeting`.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hicache.movers.speed import LaneSpeed
from hicache.planner import Route, arrival
from hicache.prefill import PrefillCurve, PrefillSpeed
from hicache.tier import TierId

MARGIN: Final = 0.02
"""Part of the time for loading everything that must be saved to leave anything."""
CHUNK_TOKENS: Final = 512
"""Tokens that an engine is taken to compute in one step."""
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

    @property
    def left_tokens(self) -> int:
        """Cached tokens that are computed all the same."""
        return sum([num_tokens for _, num_tokens in self.cached]) - self.taken_tokens


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


def decide(
    num_tokens: int,
    cached: Sequence[tuple[TierId, int]],
    routes: Mapping[TierId, Route],
    curve: PrefillCurve | None,
    *,
    page_size: int,
) -> Decision:
    """Choose how much of a match to take. Pure.

    Args:
        num_tokens: tokens of the prompt.
        cached: the match, as `Decision.cached`.
        routes: for each tier in it, the lanes on the way to the device (`routes_to`); a lane that is not measured, or
            not lately, says so.
        curve: what computing costs; None while that is not known.
        page_size: tokens of a page.
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
    seconds = {0: _compute(curve, 0, num_tokens)}
    position = 0
    for tier_id, run_tokens in cached:
        position += run_tokens
        if route := routes[tier_id]:
            pages[route] = pages.get(route, 0) + run_tokens // page_size
        seconds[position] = arrival(pages).end_s + _compute(curve, position, num_tokens)
    load_s = seconds[num_cached]
    best = min(seconds, key=lambda taken: (seconds[taken], -taken))
    if seconds[best] > load_s * (1 - MARGIN):
        others = f"computing all of it {_ms(seconds[0])}"
        return decision(num_cached, f"loading what is cached takes {_ms(load_s)}, {others}", seconds)
    what = f"the first {best} cached tokens are taken and the rest" if best else "all of it"
    reason = f"not worth loading more: if {what} is computed, it takes {_ms(seconds[best])}, else {_ms(load_s)}"
    return decision(best, reason, seconds)


def _unmeasured(lanes: Sequence[LaneSpeed]) -> LaneSpeed | None:
    return next((lane for lane in lanes if not lane.is_measured), None)


def _compute(curve: PrefillCurve, start: int, stop: int) -> float:
    return curve.seconds(start, stop, steps=-(-(stop - start) // CHUNK_TOKENS))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"
