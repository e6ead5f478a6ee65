"""Plans carried out in virtual time with a real lane: as fast as the optimum whatever was predicted, whatever fails.

A page is 64 tokens; the engine computes at a curve, the lane reads from a simulated device into host slots.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from hicache.errors import BadRequest
from hicache.movers import LaneSpeed, PageMove, Priority, Transfer
from hicache.movers.meeting import Meeting
from hicache.planner import Choice, PageRange, Route, TierRun, plan
from hicache.prefill import PrefillCurve, PrefillSpeed
from hicache.tier import DEVICE, HOST, NVME, TierId
from tests.hicache.lanes import Rig
from tests.hicache.meeting_loop import meet
from tests.hicache.test_planner import CURVE, PAGE, TOKEN_BYTES, break_even, optimum
from tests.simulation import Faults, World, run_simulated, seeds

CHUNK = 512


def learnt(curve: PrefillCurve) -> PrefillSpeed:
    """What an engine knows that has computed steps of this curve."""
    speed = PrefillSpeed()
    for start in range(0, 16_384, 1024):
        for length in (64, CHUNK):
            speed.add(start, start + length, curve.seconds(start, start + length))
    return speed


@dataclass
class Request:
    """One prefix of `num_pages` pages behind a lane, and everything that is done for it."""

    rig: Rig
    world: World
    curve: PrefillCurve
    moves: list[PageMove]
    there: set[int] = field(default_factory=set)
    computed: list[int] = field(default_factory=list)
    loaded: set[int] = field(default_factory=set)
    joined: list[int] = field(default_factory=list)
    num_ended: int = 0
    private_max: int = 0
    """Most pages that were loaded while the front had not come to them."""

    async def compute(self, pages: PageRange) -> None:
        assert self.there >= set(range(pages.start)), "computed before everything in front was there"
        await asyncio.sleep(self.curve.seconds(pages.start * PAGE, pages.stop * PAGE))
        self.there.update(range(pages.start, pages.stop))
        self.computed += range(pages.start, pages.stop)

    async def load(self, pages: PageRange) -> Sequence[bool]:
        def on_done(transfer: Transfer) -> None:
            self.num_ended += len(transfer.pages)

        moves = self.moves[pages.start : pages.stop]
        transfer = await self.rig.lane.submit(moves, priority=Priority.DEMAND, on_done=on_done)
        try:
            result = await transfer.wait()
        except asyncio.CancelledError:
            transfer.cancel()
            raise
        arrived = {page for page, ok in zip(range(pages.start, pages.stop), result.ok, strict=True) if ok}
        self.there |= arrived
        self.loaded |= arrived
        joined = self.joined[-1] if self.joined else 0
        self.private_max = max(self.private_max, sum(page > joined for page in self.loaded))
        return result.ok

    def on_joined(self, joined: int) -> None:
        assert self.there >= set(range(joined))
        self.joined.append(joined)


async def carry_out(
    world: World,
    num_tokens: int,
    *,
    page_s: float,
    curve: PrefillCurve = CURVE,
    expected_page_s: float | None = None,
    expected_curve: PrefillCurve | None = None,
    latency_s: float = 0.0,
    faults: Faults | None = None,
    runs: list[TierRun] | None = None,
    num_loads: int = 2,
    price: float = 0.0,
) -> tuple[float, Request, Meeting]:
    """Plan with what is expected, then meet with what is. Returns the seconds it took."""
    num_pages = num_tokens // PAGE
    rig = Rig(world, capacity_pages=max(1, num_pages), page_s=page_s, latency_s=latency_s, num_workers=2)
    speed = LaneSpeed("nvme->host", 0.0, latency_s, page_s if expected_page_s is None else expected_page_s, 16, True)
    routes: dict[TierId, Route] = {NVME: (speed,), DEVICE: ()}
    prefill = learnt(expected_curve or curve)
    runs = runs or [TierRun(NVME, num_pages)]
    found = plan(runs, routes, prefill.curve, page_size=PAGE, chunk_tokens=CHUNK, compute_price=price)
    request = Request(rig, world, curve, rig.pages(num_pages))
    position = 0
    for run in runs:
        if run.tier_id == DEVICE:
            request.there.update(range(position, position + run.num_pages))
        position += run.num_pages
    async with rig.running():
        if faults is not None:
            rig.device.faults = faults
        began = world.monotonic()
        meeting = Meeting(
            found, page_size=PAGE, prefill=prefill, chunk_tokens=CHUNK, load_pages=16, now=began
        )
        await meet(
            meeting, compute=request.compute, load=request.load, clock=world, num_loads=num_loads,
            on_joined=request.on_joined,
        )  # fmt: skip
        seconds = world.monotonic() - began
        rig.device.faults = Faults()
    assert request.there == set(range(num_pages))
    assert meeting.is_over
    assert request.joined == sorted(set(request.joined))
    assert len(set(request.computed)) == len(request.computed) == meeting.num_computed
    return seconds, request, meeting


def seconds_of(num_tokens: int, page_s: float, **options: object) -> float:
    async def main(world: World) -> float:
        seconds, _, _ = await carry_out(world, num_tokens, page_s=page_s, **options)  # type: ignore[arg-type]  # mixed
        return seconds

    return run_simulated(main, 0)


def page_seconds(num_tokens: int, ratio: float) -> float:
    """What a page takes on a lane so many times as fast as break-even."""
    return PAGE * TOKEN_BYTES / (ratio * break_even(num_tokens))


@pytest.mark.parametrize("num_tokens", [2048, 8192, 32_768])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0, 4.0, 8.0])
def test_it_takes_as_long_as_the_optimum(num_tokens: int, ratio: float) -> None:
    seconds = seconds_of(num_tokens, page_seconds(num_tokens, ratio))
    best = optimum(num_tokens, ratio * break_even(num_tokens))
    assert best * 0.999 <= seconds <= best * 1.06
    # And never slower than either choice alone.
    assert seconds <= 1.02 * min(num_tokens // PAGE * page_seconds(num_tokens, ratio), CURVE.seconds(0, num_tokens))


@pytest.mark.parametrize("num_tokens", [2048, 8192, 32_768])
def test_at_break_even_it_is_almost_twice_as_fast_as_either(num_tokens: int) -> None:
    assert CURVE.seconds(0, num_tokens) / seconds_of(num_tokens, page_seconds(num_tokens, 1.0)) >= 1.7


@pytest.mark.parametrize("num_tokens", [8192, 32_768])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("lane_factor", [0.25, 0.5, 2.0, 4.0])
def test_what_the_lane_was_thought_to_do_matters_little(num_tokens: int, ratio: float, lane_factor: float) -> None:
    page_s = page_seconds(num_tokens, ratio)
    seconds = seconds_of(num_tokens, page_s, expected_page_s=page_s * lane_factor)
    assert seconds <= 1.1 * optimum(num_tokens, ratio * break_even(num_tokens))


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_what_the_engine_was_thought_to_do_matters_little(ratio: float, factor: float) -> None:
    thought = PrefillCurve(token_s=CURVE.token_s * factor, attend_s=CURVE.attend_s * factor)
    seconds = seconds_of(32_768, page_seconds(32_768, ratio), expected_curve=thought)
    assert seconds <= 1.15 * optimum(32_768, ratio * break_even(32_768))


def test_a_disk_that_hangs_costs_its_hits_and_a_wait() -> None:
    for ratio in (1.0, 2.0, 8.0):
        seconds = seconds_of(8192, page_seconds(8192, ratio), faults=Faults(stall=1.0, stall_s=1e4))
        assert seconds <= 2.2 * CURVE.seconds(0, 8192)


def test_a_lane_much_slower_than_planned_is_helped() -> None:
    """The plan was to load everything, because a page was thought to cost nothing worth mentioning."""
    seconds = seconds_of(8192, page_seconds(8192, 0.5), expected_page_s=1e-7)
    # The first batches were taken from the front, where the engine had to wait for them.
    assert seconds <= 1.4 * CURVE.seconds(0, 8192)


def test_what_the_lane_cannot_give_is_computed() -> None:
    async def main(world: World) -> None:
        ratio = 4.0
        page_s = page_seconds(8192, ratio)
        _, request, meeting = await carry_out(world, 8192, page_s=page_s, faults=Faults(error=0.2, corrupt=0.1))
        assert meeting.num_lost > 5
        assert request.loaded
        assert set(request.computed) >= set(range(128)) - request.loaded

    run_simulated(main, 0)


def test_what_was_loaded_from_the_back_is_private_until_the_front_has_come() -> None:
    async def main(world: World) -> None:
        _, request, _ = await carry_out(world, 8192, page_s=page_seconds(8192, 1.0))
        # The front grows step by step, and reaches what was loaded at the end only.
        growth = [joined for joined in request.joined if joined <= min(request.loaded)]
        assert len(growth) >= 5
        assert growth[-1] > 40
        assert request.joined[-1] == 128
        assert request.private_max > 40

    run_simulated(main, 0)


def test_pages_that_are_there_are_stepped_over() -> None:
    async def main(world: World) -> None:
        runs = [TierRun(DEVICE, 20), TierRun(NVME, 40), TierRun(DEVICE, 10), TierRun(NVME, 30)]
        _, request, _ = await carry_out(world, 6400, page_s=page_seconds(6400, 1.0), runs=runs)
        assert not ({*request.computed} | request.loaded) & {*range(20), *range(60, 70)}

    run_simulated(main, 0)


def test_nothing_to_do_is_over_at_once() -> None:
    async def main(world: World) -> None:
        seconds, _, meeting = await carry_out(world, 640, page_s=1.0, runs=[TierRun(DEVICE, 10)])
        assert seconds == 0.0
        assert meeting.plan.choice is Choice.NOTHING

    run_simulated(main, 0)


def test_an_engine_that_fails_ends_the_meeting_with_its_own_error() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, page_s=page_seconds(8192, 1.0))
        request = Request(rig, world, CURVE, rig.pages(128))
        found = plan(
            [TierRun(NVME, 128)], {NVME: (LaneSpeed("nvme->host", 0, 0, page_seconds(8192, 1.0), 16, True),)}, CURVE,
            page_size=PAGE,
        )  # fmt: skip
        meeting = Meeting(found, page_size=PAGE, prefill=learnt(CURVE), chunk_tokens=CHUNK, load_pages=16, now=0.0)

        async def fail(pages: PageRange) -> None:
            await asyncio.sleep(0.01)
            raise ZeroDivisionError("the model failed")

        async with rig.running():
            with pytest.raises(ZeroDivisionError):
                await meet(meeting, compute=fail, load=request.load, clock=world)
        assert request.num_ended == rig.lane.stats.submitted

    run_simulated(main, 0)


def test_cancelling_at_any_moment_leaves_nothing_behind() -> None:
    async def main(world: World) -> None:
        page_s = page_seconds(8192, 1.0)
        rig = Rig(world, page_s=page_s, faults=Faults(error=0.1), jitter=0.5)
        request = Request(rig, world, CURVE, rig.pages(128))
        routes: dict[TierId, Route] = {NVME: (LaneSpeed("nvme->host", 0, 0, page_s, 16, True),)}
        found = plan([TierRun(NVME, 128)], routes, CURVE, page_size=PAGE)
        meeting = Meeting(found, page_size=PAGE, prefill=learnt(CURVE), chunk_tokens=CHUNK, load_pages=16, now=0.0)
        async with rig.running():
            try:
                async with asyncio.timeout(world.rng.uniform(0, 0.2)):
                    await meet(meeting, compute=request.compute, load=request.load, clock=world)
            except TimeoutError:
                pass
        # Every transfer has ended once: its owner can give all slots back.
        assert request.num_ended == rig.lane.stats.submitted
        rig.recycle(request.moves)

    for seed in range(100):
        run_simulated(main, seed)


@pytest.mark.parametrize("block", range(4))
def test_random_meetings(block: int) -> None:
    """Whatever was predicted, and whatever fails: every page is there, computed at most once, in order (`carry_out`
    asserts it); and it takes little longer than computing everything twice, however long a disk stands still."""

    async def main(world: World) -> None:
        rng = world.rng
        num_tokens = PAGE * rng.randint(1, 200)
        ratio = 2.0 ** rng.uniform(-2, 4)
        runs: list[TierRun] = []
        while (left := num_tokens // PAGE - sum(run.num_pages for run in runs)) > 0:
            runs.append(TierRun(rng.choice((NVME, NVME, DEVICE)), rng.randint(1, left)))
        faults = Faults(
            error=rng.choice((0.0, 0.05, 0.5)),
            corrupt=rng.choice((0.0, 0.1)),
            stall=rng.choice((0.0, 0.1)),
            stall_s=100.0,
        )
        page_s = page_seconds(num_tokens, ratio)
        seconds, _, meeting = await carry_out(
            world, num_tokens, page_s=page_s, expected_page_s=page_s * 2.0 ** rng.uniform(-3, 3), runs=runs,
            faults=faults, latency_s=rng.choice((0.0, 1e-3)), num_loads=rng.randint(1, 4),
            price=rng.choice((0.0, 0.0, 1.0)),
        )  # fmt: skip
        world.note("took", seconds, meeting.num_loaded, meeting.num_computed, meeting.num_lost)
        assert seconds <= 2.5 * CURVE.seconds(0, num_tokens) + 0.05

    for seed in seeds(50, block=block):
        run_simulated(main, seed)


@pytest.mark.parametrize("field_name", ["page_size", "chunk_tokens", "load_pages"])
def test_sizes_below_one_are_refused(field_name: str) -> None:
    found = plan([TierRun(HOST, 1)], {HOST: ()}, CURVE, page_size=PAGE)
    sizes = {"page_size": 1, "chunk_tokens": 1, "load_pages": 1} | {field_name: 0}
    with pytest.raises(BadRequest) as refused:
        Meeting(found, prefill=PrefillSpeed(), now=0.0, **sizes)
    assert refused.value.field == field_name


def test_outcomes_that_do_not_fit_are_refused() -> None:
    speed = LaneSpeed("nvme->host", 0.0, 0.0, 1e-6, 16, True)
    found = plan([TierRun(NVME, 4)], {NVME: (replace(speed, page_s=1e-5),)}, CURVE, page_size=PAGE)
    meeting = Meeting(found, page_size=PAGE, prefill=PrefillSpeed(), chunk_tokens=64, load_pages=16, now=0.0)
    taken = meeting.next_load()
    assert taken == PageRange(0, 4)
    with pytest.raises(BadRequest, match="3 values for 4 pages"):
        meeting.loaded(taken, [True] * 3, 1.0)
    meeting.loaded(taken, [True] * 4, 1.0)
    assert meeting.is_over
