"""What is loaded and what is computed although it is cached: never the slower one by prediction, and said in words."""

import asyncio
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.deciding import MARGIN, MAX_MODELS, STALE_S, PrefillSpeeds, decide
from hicache.errors import BadRequest
from hicache.movers import LaneSpeed
from hicache.planner import Route
from hicache.prefill import PrefillCurve, PrefillSpeed
from hicache.sequence import StepPlan
from hicache.tier import DEVICE, HOST, NVME, TierId
from tests.hicache.worlds import MODEL, PAGE_SIZE, Request, Setup, int32, opened, prompt
from tests.simulation import World, run_simulated

CURVE = PrefillCurve(token_s=1e-4, attend_s=1e-8)


def routes(host_page_s: float, nvme_page_s: float, *, is_measured: bool = True) -> Mapping[TierId, Route]:
    up = LaneSpeed("host->device", 0.0, 1e-5, host_page_s, 1, True)
    read = LaneSpeed("nvme->host", 0.0, 1e-4, nvme_page_s, 1, is_measured)
    return {DEVICE: (), HOST: (up,), NVME: (read, up)}


@given(
    host_page_s=st.floats(1e-6, 1e-2),
    nvme_page_s=st.floats(1e-6, 1e-1),
    runs=st.lists(st.tuples(st.sampled_from([DEVICE, HOST, NVME]), st.integers(1, 30)), min_size=1, max_size=6),
    num_new=st.integers(1, 300),
)
def test_it_is_never_slower_than_loading_all_or_computing_all(
    host_page_s: float, nvme_page_s: float, runs: list[tuple[TierId, int]], num_new: int
) -> None:
    cached = [(tier_id, pages * 16) for tier_id, pages in runs]
    num_tokens = sum(tokens for _, tokens in cached) + num_new
    found = decide(num_tokens, cached, routes(host_page_s, nvme_page_s), CURVE, page_size=16)
    borders = [sum(tokens for _, tokens in cached[:i]) for i in range(len(cached) + 1)]
    assert found.taken_tokens in borders
    assert found.left_tokens == borders[-1] - found.taken_tokens
    if found.seconds is None:
        assert {tier_id for tier_id, _ in cached} == {DEVICE}
        return
    assert found.load_seconds is not None
    assert found.recompute_seconds is not None
    assert found.seconds <= found.load_seconds
    assert found.seconds * (1 - MARGIN) <= found.recompute_seconds


def test_what_is_slow_is_left_and_what_is_fast_before_it_taken() -> None:
    cached = [(DEVICE, 160), (HOST, 160), (NVME, 320)]
    found = decide(700, cached, routes(1e-5, 1.0), CURVE, page_size=16)
    assert (found.taken_tokens, found.left_tokens) == (320, 320)
    assert "the first 320 cached tokens are taken" in found.reason
    found = decide(700, cached, routes(1e-5, 1e-5), CURVE, page_size=16)
    assert (found.taken_tokens, found.left_tokens) == (640, 0)
    assert "loading what is cached takes" in found.reason
    found = decide(700, [(NVME, 640)], routes(1e-5, 1.0), CURVE, page_size=16)
    assert found.taken_tokens == 0
    assert "not worth loading" in found.reason


def test_what_is_unknown_is_loaded() -> None:
    cached = [(NVME, 640)]
    assert decide(700, cached, routes(1e-5, 1.0), None, page_size=16).taken_tokens == 640
    unknown = decide(700, cached, routes(1e-5, 1.0, is_measured=False), CURVE, page_size=16)
    assert (unknown.taken_tokens, unknown.seconds) == (640, None)
    assert "nvme->host" in unknown.reason
    assert decide(700, [], {}, CURVE, page_size=16).reason.startswith("nothing")


def test_speeds_are_kept_by_model_and_bounded() -> None:
    speeds = PrefillSpeeds()
    for step in range(PrefillSpeed.SETTLED):
        assert speeds.curve("a") is None
        speeds.learn("a", 0, 100 + step, CURVE.seconds(0, 100 + step))
    curve = speeds.curve("a")
    assert curve is not None
    assert curve.seconds(0, 100) == pytest.approx(CURVE.seconds(0, 100), rel=0.02)
    assert speeds.curve("b") is None
    with pytest.raises(BadRequest, match="start"):
        speeds.learn("a", 5, 5, 1.0)
    for other in range(MAX_MODELS):
        speeds.learn(f"model {other}", 0, 1, 1.0)
    assert speeds.curve("a") is None


class Timed(Request):
    """A request whose steps take as long as the curve says."""

    async def _check_context(self, plan: StepPlan, before: list[int]) -> None:
        await super()._check_context(plan, before)
        await asyncio.sleep(CURVE.seconds(len(before), len(before) + len(plan.tokens)))


def timed(setup: Setup) -> Timed:
    return Timed(setup, MODEL, MODEL)


async def to_nvme(setup: Setup) -> None:
    for tier_id in (DEVICE, HOST):
        num_pages = setup.cache.tiers[tier_id].capacity_pages
        deadline = setup.cache.clock.monotonic() + 10
        setup.cache.free({tier_id: await setup.cache.allocate(tier_id, num_pages, deadline=deadline)})


def test_a_hit_on_a_slow_disk_is_computed_and_one_on_a_fast_disk_loaded() -> None:
    async def main(world: World) -> None:
        for latency_s, is_left in ((1e-5, False), (1.0, True)):
            async with opened(world, device_pages=40, host_pages=40, prefill=PrefillSpeeds()) as setup:
                assert setup.nvme is not None
                cache, tokens = setup.cache, prompt(1, 65)
                for document in range(2, 5):
                    await timed(setup).run(prompt(document, 65))
                await timed(setup).run(tokens)
                await to_nvme(setup)
                setup.nvme.latency_s = latency_s
                assert "copied nothing" in cache.explain(MODEL, tokens).reason
                began = world.monotonic()
                assert await timed(setup).run(tokens) == 64, "that it is slow has to be seen first"
                load_s = world.monotonic() - began
                await to_nvme(setup)
                said = cache.explain(MODEL, tokens)
                began = world.monotonic()
                assert await timed(setup).run(tokens) == (0 if is_left else 64)
                seconds = world.monotonic() - began
                assert said.seconds is not None
                assert seconds == pytest.approx(said.seconds, rel=0.5)
                assert said.left_tokens == cache.counters.tokens_left == (64 if is_left else 0)
                assert ("not worth loading" in said.reason) == is_left
                assert seconds <= 1.1 * load_s
                setup.check_quiet()

    run_simulated(main, 0)


def test_what_was_left_is_still_there_and_found_on_the_device_then() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=40, host_pages=40, prefill=CURVE) as setup:
            assert setup.nvme is not None
            tokens = prompt(1, 65)
            await timed(setup).run(tokens)
            await to_nvme(setup)
            setup.nvme.latency_s = 1.0
            assert await timed(setup).run(tokens) == 64
            await to_nvme(setup)
            assert await timed(setup).run(tokens) == 0
            assert setup.cache.counters.pages_duplicate == 0
            again = timed(setup)
            sequence = await again.open(tokens)
            assert sequence.cached_by_tier == {DEVICE: 64}
            sequence.close()
            assert setup.cache.tree.num_nodes == 1, "the computed pages are further copies of what was left"
            await to_nvme(setup)
            # A disk that was slow once is asked again.
            await asyncio.sleep(STALE_S)
            setup.nvme.latency_s = 1e-5
            assert await timed(setup).run(tokens) == 64
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_context_that_fills_the_device_is_loaded() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=12, host_pages=40, prefill=CURVE) as setup:
            assert setup.nvme is not None
            tokens = prompt(1, 12 * PAGE_SIZE + 1)
            await timed(setup).run(tokens)
            await to_nvme(setup)
            setup.nvme.latency_s = 1.0
            for _ in range(2):
                assert await timed(setup).run(tokens) == 12 * PAGE_SIZE
                await to_nvme(setup)
            assert "fills the device" in setup.cache.explain(MODEL, int32(tokens)).reason

    run_simulated(main, 0)
