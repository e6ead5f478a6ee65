"""The planner against the closed form, against every plan there is, and on what it must refuse or say."""

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.errors import BadRequest
from hicache.movers import Lane, LaneSpeed
from hicache.planner import Arrival, Choice, PageRange, Plan, Route, TierRun, arrival, plan, routes_to
from hicache.prefill import PrefillCurve
from hicache.tier import DEVICE, HOST, NVME, TierId
from tests.simulation import SimulatedHost, World, run_simulated

PAGE = 64
TOKEN_BYTES = 131_072
"""bf16 KV of an 8B model with grouped queries."""
CURVE = PrefillCurve(token_s=22.6e-6, attend_s=0.452e-9)
"""The same model's prefill on one H100, as published."""
ONE_STEP = 1 << 30


def lane(
    name: str = "host->device",
    *,
    page_s: float,
    ahead_s: float = 0.0,
    latency_s: float = 0.0,
    batch_pages: int = 1,
    is_measured: bool = True,
) -> LaneSpeed:
    return LaneSpeed(name, ahead_s, latency_s, page_s, batch_pages, is_measured)


def optimum(num_tokens: int, bandwidth: float, curve: PrefillCurve = CURVE) -> float:
    """The closed form: compute x tokens while n - x are loaded, so that both end at once.

    token_s x + attend_s x**2 = (n - x) bytes / bandwidth
    """
    load = TOKEN_BYTES / bandwidth
    linear = curve.token_s + load
    computed = (math.sqrt(linear**2 + 4 * curve.attend_s * load * num_tokens) - linear) / (2 * curve.attend_s)
    return load * (num_tokens - computed)


def break_even(num_tokens: int) -> float:
    """Bytes a second at which loading everything and computing everything take the same time."""
    return TOKEN_BYTES * num_tokens / CURVE.seconds(0, num_tokens)


def plan_for(num_tokens: int, bandwidth: float) -> Plan:
    routes: dict[TierId, Route] = {HOST: (lane(page_s=PAGE * TOKEN_BYTES / bandwidth),)}
    return plan([TierRun(HOST, num_tokens // PAGE)], routes, CURVE, page_size=PAGE, chunk_tokens=ONE_STEP)


@pytest.mark.parametrize("num_tokens", [2048, 8192, 32_768, 131_072])
@pytest.mark.parametrize("ratio", [0.5, 0.7, 1.0, 1.4, 2.0, 4.0, 8.0])
def test_it_is_as_good_as_the_closed_form_up_to_one_page(num_tokens: int, ratio: float) -> None:
    bandwidth = ratio * break_even(num_tokens)
    found = plan_for(num_tokens, bandwidth)
    best = optimum(num_tokens, bandwidth)
    one_page = max(PAGE * TOKEN_BYTES / bandwidth, CURVE.seconds(num_tokens - PAGE, num_tokens))
    assert best - 1e-9 <= found.seconds <= best + one_page
    assert found.seconds <= 1.04 * best
    assert found.choice is Choice.BOTH


@pytest.mark.parametrize("num_tokens", [2048, 8192, 32_768, 131_072])
def test_at_break_even_two_ends_are_almost_twice_as_fast_as_either(num_tokens: int) -> None:
    found = plan_for(num_tokens, break_even(num_tokens))
    assert found.load_seconds == pytest.approx(found.recompute_seconds)
    assert found.load_seconds / found.seconds >= 1.85


def test_a_hit_that_is_not_worth_loading_is_computed_and_it_says_so() -> None:
    found = plan([TierRun(NVME, 4)], {NVME: (lane("nvme->host", page_s=0.1, latency_s=5.0),)}, CURVE, page_size=PAGE)
    assert found.choice is Choice.RECOMPUTE
    assert found.compute == (PageRange(0, 4),)
    assert found.load_first == found.load_back == ()
    assert "not worth loading" in found.explain()
    assert "5,400.0 ms" in found.explain()


def test_a_fast_tier_is_loaded_and_only_what_stands_on_what_is_there_is_computed() -> None:
    """The head is in the host, a long tail on a slow disk: the head is loaded, computing begins behind it."""
    routes: dict[TierId, Route] = {HOST: (lane(page_s=1e-5),), NVME: (lane("disk", page_s=2e-3),), DEVICE: ()}
    found = plan([TierRun(DEVICE, 10), TierRun(HOST, 100), TierRun(NVME, 100)], routes, CURVE, page_size=PAGE)
    assert found.choice is Choice.BOTH
    assert found.load_first == (PageRange(10, 110),)
    (computed,) = found.compute
    assert computed.start == 110
    assert found.load_back == (PageRange(computed.stop, 210),)
    assert "load first: pages 10-109" in found.explain()


def test_a_hopeless_tail_is_computed_with_the_new_tokens() -> None:
    routes: dict[TierId, Route] = {HOST: (lane(page_s=1e-5),), NVME: (lane("disk", page_s=1e-5, ahead_s=60.0),)}
    found = plan([TierRun(HOST, 100), TierRun(NVME, 2)], routes, CURVE, page_size=PAGE, new_tokens=100)
    assert (found.choice, found.load_first, found.load_back) == (Choice.BOTH, (PageRange(0, 100),), ())
    assert found.compute_last == (PageRange(100, 102),)
    assert "compute at last: pages 100-101" in found.explain()
    assert found.seconds < 0.1


def test_queues_ahead_count() -> None:
    quiet = plan([TierRun(HOST, 64)], {HOST: (lane(page_s=1e-4),)}, CURVE, page_size=PAGE)
    busy = plan([TierRun(HOST, 64)], {HOST: (lane(page_s=1e-4, ahead_s=0.03),)}, CURVE, page_size=PAGE)
    assert quiet.compute[0].stop < busy.compute[0].stop
    assert busy.seconds < quiet.load_seconds + 0.03


def test_what_is_there_costs_nothing() -> None:
    found = plan([TierRun(DEVICE, 8)], {DEVICE: ()}, CURVE, page_size=PAGE)
    assert (found.choice, found.seconds) == (Choice.NOTHING, 0.0)
    assert plan([], {}, CURVE, page_size=PAGE).choice is Choice.NOTHING
    assert found.explain().startswith("nothing: every page is there\n  predicted 0.0 ms; loading all 0.0 ms")


@pytest.mark.parametrize("unknown", ["lane", "prefill"])
def test_what_was_never_measured_is_loaded(unknown: str) -> None:
    routes: dict[TierId, Route] = {HOST: (lane(page_s=0.0, is_measured=unknown != "lane"),)}
    found = plan([TierRun(HOST, 8)], routes, None if unknown == "prefill" else CURVE, page_size=PAGE)
    assert found.choice is Choice.LOAD
    assert found.load_first == (PageRange(0, 8),)
    assert ("host->device has copied nothing yet" if unknown == "lane" else "no step") in found.reason


def test_computing_has_a_price_when_others_wait_for_the_engine() -> None:
    routes: dict[TierId, Route] = {HOST: (lane(page_s=PAGE * TOKEN_BYTES / (3 * break_even(8192))),)}
    free = plan([TierRun(HOST, 128)], routes, CURVE, page_size=PAGE)
    dear = plan([TierRun(HOST, 128)], routes, CURVE, page_size=PAGE, compute_price=1.0)
    assert free.choice is Choice.BOTH
    assert dear.choice is Choice.LOAD
    assert free.seconds < dear.seconds


def test_layers_that_arrive_while_others_are_attended_hide_the_shorter_of_the_two() -> None:
    routes: dict[TierId, Route] = {HOST: (lane(page_s=1e-3),)}
    new_tokens = 4000
    rest = CURVE.seconds(100 * PAGE, 100 * PAGE + new_tokens)
    whole = plan([TierRun(HOST, 100)], routes, CURVE, page_size=PAGE, new_tokens=new_tokens, chunk_tokens=ONE_STEP)
    layered = plan(
        [TierRun(HOST, 100)], routes, CURVE, page_size=PAGE, new_tokens=new_tokens, chunk_tokens=ONE_STEP, num_layers=32
    )
    assert whole.load_seconds == pytest.approx(0.1 + rest)
    assert layered.load_seconds == pytest.approx(max(0.1, rest) + min(0.1, rest) / 32)
    assert layered.choice is Choice.LOAD


def test_pages_pass_two_lanes_at_once() -> None:
    disk, bus = lane("disk", page_s=1.0, batch_pages=4), lane("bus", page_s=0.25, batch_pages=4, latency_s=0.5)
    # The bus passes the last batch on when the disk has read it.
    assert arrival({(disk, bus): 40}) == Arrival(40 + 0.5 + 1.0, 1.0)
    # It has more to do itself than the disk.
    assert arrival({(disk, bus): 4, (bus,): 400}) == Arrival(0.5 + 101.0, 101.0)
    # A slow bus waits for the first batch only.
    assert arrival({(lane("disk", page_s=0.25, batch_pages=4), lane("bus", page_s=1.0)): 40}).end_s == 1.0 + 40.0
    assert arrival({}) == Arrival(0.0, 0.0)


def test_routes_are_those_of_the_lanes_and_their_queues() -> None:
    async def main(world: World) -> None:
        tiers = {
            tier_id: SimulatedHost(tier_id, page_bytes=64, capacity_pages=64) for tier_id in (DEVICE, HOST, NVME)
        }
        pairs = ((DEVICE, HOST), (HOST, DEVICE), (HOST, NVME), (NVME, HOST))
        lanes = [Lane(tiers[source], tiers[target], clock=world, batch_pages=4) for source, target in pairs]
        routes = routes_to(DEVICE, lanes)
        assert {tier: [hop.name for hop in route] for tier, route in routes.items()} == {
            DEVICE: [],
            HOST: ["host->device"],
            NVME: ["nvme->host", "host->device"],
        }
        assert not any(hop.is_measured for route in routes.values() for hop in route)
        assert routes_to(HOST, lanes[:1]).keys() == {HOST, DEVICE}
        assert plan([TierRun(NVME, 3)], routes, CURVE, page_size=PAGE).choice is Choice.LOAD

    run_simulated(main, 0)


# -- beside every plan there is -------------------------------------------------------------------------------------


ROUTES: dict[TierId, Route] = {
    DEVICE: (),
    HOST: (lane(page_s=0.5e-3, latency_s=1e-4),),
    NVME: (lane("nvme->host", page_s=2e-3, latency_s=1e-3), lane(page_s=0.5e-3, latency_s=1e-4)),
}


def every_subset(runs: list[TierRun]) -> Iterator[float]:
    """How long it takes, for every choice of pages to compute: one page after the other, in order, each when all
    before it are there. Loads are given the order that helps most: the earliest page that is still needed first."""
    tiers = [run.tier_id for run in runs for _ in range(run.num_pages)]
    for chosen in range(1 << len(tiers)):
        if any(chosen >> i & 1 and not ROUTES[tier] for i, tier in enumerate(tiers)):
            continue
        loads: dict[Route, int] = {}
        now = 0.0
        for i, tier in enumerate(tiers):
            if chosen >> i & 1:
                now = max(now, arrival(loads).end_s) + CURVE.seconds(i * PAGE, (i + 1) * PAGE)
            elif ROUTES[tier]:
                loads[ROUTES[tier]] = loads.get(ROUTES[tier], 0) + 1
        yield max(now, arrival(loads).end_s)


@given(st.lists(st.tuples(st.sampled_from([DEVICE, HOST, NVME]), st.integers(1, 3)), min_size=1, max_size=4))
def test_no_choice_of_pages_beats_it_by_much(parts: list[tuple[TierId, int]]) -> None:
    runs = [TierRun(tier, num_pages) for tier, num_pages in parts]
    found = plan(runs, ROUTES, CURVE, page_size=PAGE, chunk_tokens=PAGE)
    best = min(every_subset(runs))
    # `every_subset` loads the front first where the plan may load from the back, so either may be ahead by a little.
    assert found.seconds <= best * 1.1 + 1e-3


@given(
    st.lists(st.tuples(st.sampled_from([DEVICE, HOST, NVME]), st.integers(1, 500)), max_size=12),
    st.floats(1e-6, 1e-2), st.floats(0, 1), st.integers(0, 5000), st.integers(1, 64), st.floats(0, 2),
)  # fmt: skip
def test_every_page_is_planned_once_and_nothing_simple_is_better(
    parts: list[tuple[TierId, int]], page_s: float, ahead_s: float, new_tokens: int, num_layers: int, price: float
) -> None:
    routes: dict[TierId, Route] = {
        DEVICE: (),
        HOST: (lane(page_s=page_s / 3),),
        NVME: (lane("nvme->host", page_s=page_s, ahead_s=ahead_s), lane(page_s=page_s / 3)),
    }
    runs = [TierRun(tier, num_pages) for tier, num_pages in parts]
    found = plan(
        runs, routes, CURVE, page_size=16, new_tokens=new_tokens, num_layers=num_layers, compute_price=price
    )
    tiers = [run.tier_id for run in runs for _ in range(run.num_pages)]
    planned = [page for r in (*found.load_first, *found.load_back) for page in range(r.start, r.stop)]
    computed = {page for r in (*found.compute, *found.compute_last) for page in range(r.start, r.stop)}
    assert len(planned) == len(set(planned))
    assert not computed & set(planned)
    assert computed | set(planned) >= {page for page, tier in enumerate(tiers) if tier != DEVICE}
    assert all(tiers[page] != DEVICE for page in planned)
    if price == 0:
        assert found.seconds <= min(found.load_seconds, found.recompute_seconds) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("page_size", {"page_size": 0}),
        ("new_tokens", {"new_tokens": -1}),
        ("chunk_tokens", {"chunk_tokens": 0}),
        ("num_layers", {"num_layers": 0}),
        ("compute_price", {"compute_price": -0.5}),
        ("compute_price", {"compute_price": float("nan")}),
    ],
)
def test_numbers_below_their_bounds_are_refused(field: str, arguments: dict[str, float]) -> None:
    with pytest.raises(BadRequest) as refused:
        plan([TierRun(DEVICE, 1)], {DEVICE: ()}, CURVE, **({"page_size": PAGE} | arguments))  # type: ignore[arg-type]  # wrong on purpose
    assert refused.value.field == field


@pytest.mark.parametrize("runs", [[TierRun(NVME, 1)], [TierRun(DEVICE, 0)]])
def test_runs_without_a_route_or_without_pages_are_refused(runs: list[TierRun]) -> None:
    with pytest.raises(BadRequest, match="runs"):
        plan(runs, {DEVICE: ()}, CURVE, page_size=PAGE)
