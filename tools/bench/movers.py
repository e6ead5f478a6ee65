"""`hicache bench movers`: what overlapping, looking ahead and cancelling are worth, with the lanes as they are.

- `layerwise_overlap`: a prefix is loaded layer by layer while the tokens after it are computed on each layer that is
  there; both together against the longer of the two alone. In virtual time (32 layers; computing takes half, as long,
  and twice as long as loading; the worst of the three), where the bound is one layer more than the longer one.
- `layerwise_overlap_threads`: the same from the host tier to the device tier in memory, in real time and threads. What
  computes is a device that needs no core, as a GPU: each layer begins when it is there and the one before has ended,
  and takes its part of what the load takes alone. `layerwise_load` is what that load, layer by layer, takes beside one
  of whole pages, the best that the machine gives. All three take turns; the round with the median ratio is shown of
  each. Needs two idle cores.
- `prefetch_ttft`: time to first token of requests whose prefixes lie on NVMe, in virtual time, with the lanes and their
  priorities. An engine takes requests in order of arrival, one at a time. Look-ahead prefetches, host-ward, for the
  requests that wait for it; without, a prefix is asked for when its request's turn has come, and the engine waits. From
  the host to the device both go layer by layer under the computing. Model and engine as published for 8 thousand
  million parameters on one H100: pages of 64 tokens and 8 MiB, NVMe 7 GB/s, bus 55 GB/s, 4k to 16k tokens cached, 512
  new, 0.1 s of decoding before the next request's turn. 1,000 requests come at random (Poisson), at 0.9 of what can be
  served without look-ahead. Medians.
- `planner_demo_off`, `planner_demo_gain`: a prompt served from both ends by a real model: see
  `hicache.tools.bench.planner_demo`. Left out, with a note, where the demo's model is not installed.
- `cancel_returns_all`: share of a pool of 512 pages that can be had again after 32 promotions of 16 pages were
  cancelled before they began and 16 more at some moment of their copying, with others in between.
"""

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np

from hicache.clock import SystemClock
from hicache.layout import KVDtype, KVLayout
from hicache.movers import Lane, PageMove, Priority, Transfer
from hicache.prefill import PrefillCurve
from hicache.tier import DEVICE, HOST, NVME, PageIdentity, Tier
from hicache.tools.bench.planner_demo import NUM_STEPS, PAGE_SIZE, planner_demo_rows
from hicache.tools.bench.results import Baseline, Note, Report, Row
from hicache.tools.bench.virtual import TimedHost, TimedTier, VirtualClock, run_virtual
from hicache.tools.exits import CommandFailed, UsageProblem

CURVE: Final = PrefillCurve(token_s=22.6e-6, attend_s=0.452e-9)
PAGE_TOKENS: Final = 64
NUM_LAYERS: Final = 32
NVME_PAGE_S: Final = (8 << 20) / 7e9
BUS_PAGE_S: Final = (8 << 20) / 55e9
NVME_LATENCY_S: Final = 1e-4
BUS_LATENCY_S: Final = 2e-5
NEW_TOKENS: Final = 512
DECODE_S: Final = 0.1
LOOK_AHEAD: Final = 8
"""Waiting requests for which the prefix is fetched."""
_NOBODY: Final = PageIdentity(bytes(32), bytes(32), b"")


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the loads are."""

    divisor: int = 1
    """Counts are divided by it: 1 for figures, more for trying the code."""

    def of(self, count: int, *, least: int = 1) -> int:
        return max(least, count // self.divisor)


def run(report: Report, note: Note, scale: Scale) -> None:
    """Measure every row, one after the other."""
    report(_overlap())
    for row in _overlap_with_threads(scale):
        report(row)
    report(_prefetch(scale))
    report(_cancel())
    note("a prompt from both ends with a real model; takes a minute or two")
    try:
        rows = planner_demo_rows(
            num_tokens=scale.of(96, least=NUM_STEPS) * PAGE_SIZE, num_rounds=scale.of(5)
        )
    except (UsageProblem, CommandFailed) as problem:
        note(f"planner_demo_off and planner_demo_gain are left out: {problem}")
        return
    for row in rows:
        report(row)


def _moves(source: Tier, target: Tier, num_pages: int, identity: PageIdentity = _NOBODY) -> list[PageMove]:
    """Pages to copy between fresh slots of two tiers."""
    slots = zip(source.allocate(num_pages).tolist(), target.allocate(num_pages).tolist(), strict=True)
    return [PageMove(a, source.generation(a), b, target.generation(b), identity) for a, b in slots]


def _give_back(source: Tier, target: Tier, moves: Sequence[PageMove]) -> None:
    for tier, slots in ((source, [m.source_slot for m in moves]), (target, [m.target_slot for m in moves])):
        tier.free(np.array(slots, np.int32))


# -- layer by layer ---------------------------------------------------------------------------------------------------


def _overlap() -> Row:
    worst = max(run_virtual(partial(_overlapped, ratio=ratio)) for ratio in (0.5, 1.0, 2.0))
    one_after_the_other = Baseline("one after the other, at worst", 2.0)
    return Row("layerwise_overlap", worst, "x", one_after_the_other, 1 + 1 / NUM_LAYERS, 1.1)


async def _overlapped(clock: VirtualClock, ratio: float) -> float:
    """Loading and computing together, the latter taking `ratio` times as long, as a multiple of the longer one."""
    num_pages = 128
    host = TimedHost(HOST, capacity_pages=num_pages)
    device = TimedTier(
        DEVICE, capacity_pages=num_pages, page_s=BUS_PAGE_S, latency_s=BUS_LATENCY_S, num_layers=NUM_LAYERS
    )
    lane = Lane(host, device, clock=clock)
    layer_s = ratio * num_pages * BUS_PAGE_S / NUM_LAYERS
    async with asyncio.TaskGroup() as group:
        group.create_task(lane.run())
        transfer = await lane.submit(_moves(host, device, num_pages), priority=Priority.DEMAND, by_layer=True)
        for layer in range(NUM_LAYERS):
            assert await transfer.wait_layer(layer)
            await asyncio.sleep(layer_s)
        seconds = clock.monotonic()
        await lane.close(drain_until=None)
    return seconds / (max(1.0, ratio) * num_pages * BUS_PAGE_S)


def _overlap_with_threads(scale: Scale) -> list[Row]:
    # torch is loaded only where pages are really copied.
    from hicache.tiers.device import DeviceTier
    from hicache.tiers.host import HostTier

    layout = KVLayout.uniform(
        num_layers=NUM_LAYERS, num_kv_heads=8, head_dim=128, dtype=KVDtype.BFLOAT16, page_size=PAGE_TOKENS
    )
    num_pages = scale.of(64, least=4)

    async def main() -> list[Row]:
        device = DeviceTier(layout, capacity_pages=num_pages, num_threads=1)
        host = HostTier(page_bytes=layout.page_bytes, capacity_pages=num_pages, huge_pages=False, num_threads=1)
        try:
            lane = Lane(host, device, clock=SystemClock(), max_in_flight_bytes=1 << 30)
            async with asyncio.TaskGroup() as group:
                group.create_task(lane.run())
                moves = _moves(host, device, num_pages)
                for move in moves:
                    host.view(move.source_slot)[:] = bytes([move.source_slot % 251]) * layout.page_bytes
                    host.declare(move.source_slot, move.source_generation, move.identity)
                rows = await _measure_threads(lane, moves, scale.of(15, least=3))
                await lane.close(drain_until=None)
            return rows
        finally:
            await host.close()
            await device.close()

    return asyncio.run(main())


async def _measure_threads(lane: Lane, moves: list[PageMove], num_rounds: int) -> list[Row]:
    """Rounds in which loading alone, in whole pages and by layer, and loading while a device computes take turns."""
    await _timed_load(lane, moves, by_layer=False)  # slots are touched for the first time
    compute_s = median([await _timed_load(lane, moves, by_layer=True) for _ in range(3)])
    loads, overlaps = list[tuple[float, float]](), list[tuple[float, float]]()
    for _ in range(num_rounds):
        whole = await _timed_load(lane, moves, by_layer=False)
        alone = await _timed_load(lane, moves, by_layer=True)
        loads.append((alone, whole))
        overlaps.append((await _timed_both(lane, moves, compute_s / NUM_LAYERS), max(alone, compute_s)))
    together, longer = _median_ratio(overlaps)
    alone, whole = _median_ratio(loads)
    return [
        Row("layerwise_overlap_threads", 1e3 * together, "ms", Baseline("the longer of the two alone", 1e3 * longer),
            1e3 * longer * (1 + 1 / NUM_LAYERS), 1.1, goal_is_ratio=True),
        Row("layerwise_load", 1e3 * alone, "ms", Baseline("in whole pages", 1e3 * whole), 1e3 * whole),
    ]  # fmt: skip


def _median_ratio(rounds: list[tuple[float, float]]) -> tuple[float, float]:
    return sorted(rounds, key=lambda each: each[0] / each[1])[len(rounds) // 2]


async def _timed_load(lane: Lane, moves: list[PageMove], *, by_layer: bool) -> float:
    began = perf_counter()
    transfer = await lane.submit(moves, priority=Priority.DEMAND, by_layer=by_layer)
    assert all((await transfer.wait()).ok)
    return perf_counter() - began


async def _timed_both(lane: Lane, moves: list[PageMove], layer_s: float) -> float:
    began = computed_at = perf_counter()

    def compute(transfer: Transfer, layer: int) -> None:
        """Queue a layer that is there, as on a stream."""
        nonlocal computed_at
        computed_at = max(computed_at, perf_counter()) + layer_s

    transfer = await lane.submit(moves, priority=Priority.DEMAND, by_layer=True, on_layer=compute)
    assert all((await transfer.wait()).ok)
    await asyncio.sleep(computed_at - perf_counter())
    return perf_counter() - began


# -- looking ahead ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Request:
    arrives_at: float
    num_pages: int
    fetched: Transfer | None = None
    moves: list[PageMove] = field(default_factory=list)

    @property
    def compute_s(self) -> float:
        tokens = self.num_pages * PAGE_TOKENS
        return CURVE.seconds(tokens, tokens + NEW_TOKENS)


def _requests(num_requests: int) -> list[_Request]:
    """The same for both sides."""
    rng = random.Random(1)
    lengths = [rng.randint(4096, 16_384) // PAGE_TOKENS for _ in range(num_requests)]
    served_s = [pages * NVME_PAGE_S + _Request(0.0, pages).compute_s + DECODE_S for pages in lengths]
    rate = 0.9 / (sum(served_s) / num_requests)
    now, requests = 0.0, []
    for num_pages in lengths:
        now += rng.expovariate(rate)
        requests.append(_Request(now, num_pages))
    return requests


def _prefetch(scale: Scale) -> Row:
    num_requests = scale.of(1000, least=20)
    without, ahead = (
        median(run_virtual(partial(_serve, requests=_requests(num_requests), look_ahead=look_ahead)))
        for look_ahead in (0, LOOK_AHEAD)
    )
    return Row("prefetch_ttft", 1e3 * ahead, "ms", Baseline("without look-ahead", 1e3 * without), None, 1 / 3,
               goal_is_ratio=True)  # fmt: skip


async def _serve(clock: VirtualClock, requests: list[_Request], look_ahead: int) -> list[float]:
    """Times to first token."""
    largest = max(request.num_pages for request in requests)
    host_pages = (LOOK_AHEAD + 2) * largest
    disk = TimedTier(NVME, capacity_pages=host_pages, page_s=NVME_PAGE_S, latency_s=NVME_LATENCY_S)
    host = TimedHost(HOST, capacity_pages=2 * host_pages)
    device = TimedTier(
        DEVICE, capacity_pages=largest, page_s=BUS_PAGE_S, latency_s=BUS_LATENCY_S, num_layers=NUM_LAYERS
    )
    up, bus = Lane(disk, host, clock=clock), Lane(host, device, clock=clock)
    waiting: deque[_Request] = deque()
    arrived = asyncio.Event()
    times: list[float] = []

    async def fetch(request: _Request, priority: Priority) -> None:
        request.moves = _moves(disk, host, request.num_pages)
        request.fetched = await up.submit(request.moves, priority=priority)

    async def fetch_ahead() -> None:
        for request in list(waiting)[:look_ahead]:
            if request.fetched is None:
                await fetch(request, Priority.PREFETCH)

    async def arrive() -> None:
        for request in requests:
            await asyncio.sleep(request.arrives_at - clock.monotonic())
            waiting.append(request)
            arrived.set()
            await fetch_ahead()

    async def engine() -> None:
        for _ in requests:
            while not waiting:
                arrived.clear()
                await arrived.wait()
            request = waiting.popleft()
            if request.fetched is None:
                await fetch(request, Priority.DEMAND)
            assert request.fetched is not None
            assert all((await request.fetched.wait()).ok)
            moves = _moves(host, device, request.num_pages)
            transfer = await bus.submit(moves, priority=Priority.DEMAND, by_layer=True)
            for layer in range(NUM_LAYERS):
                assert await transfer.wait_layer(layer)
                await asyncio.sleep(request.compute_s / NUM_LAYERS)
            times.append(clock.monotonic() - request.arrives_at)
            _give_back(host, device, moves)
            _give_back(disk, host, request.moves)
            await fetch_ahead()
            await asyncio.sleep(DECODE_S)

    async with asyncio.TaskGroup() as group:
        for lane in (up, bus):
            group.create_task(lane.run())
        async with asyncio.TaskGroup() as parts:
            parts.create_task(arrive())
            parts.create_task(engine())
        for lane in (up, bus):
            await lane.close(drain_until=None)
    return times


# -- cancelling -------------------------------------------------------------------------------------------------------


def _cancel() -> Row:
    return Row("cancel_returns_all", run_virtual(_returned), "share", None, 1.0, 1.0, higher_is_better=True)


async def _returned(clock: VirtualClock) -> float:
    """Share of the host's pages that are free after everything was cancelled or given back."""
    num_pages, num_each, num_transfers = 512, 16, 32
    disk = TimedTier(NVME, capacity_pages=num_pages, page_s=NVME_PAGE_S, latency_s=NVME_LATENCY_S)
    host = TimedHost(HOST, capacity_pages=num_pages)
    lane = Lane(disk, host, clock=clock, batch_pages=4)

    def on_done(transfer: Transfer) -> None:
        _give_back(disk, host, transfer.pages)

    async def submit() -> Transfer:
        return await lane.submit(_moves(disk, host, num_each), priority=Priority.DEMAND, on_done=on_done)

    for transfer in [await submit() for _ in range(num_transfers)]:
        transfer.cancel()  # nothing has begun: the lane does not run yet
    async with asyncio.TaskGroup() as group:
        group.create_task(lane.run())
        transfers = [await submit() for _ in range(num_transfers)]
        for transfer in transfers[::2]:
            await asyncio.sleep(num_each * NVME_PAGE_S)
            transfer.cancel()
        for transfer in transfers:
            await transfer.wait()
        # Had a page been lost, or given back twice, this could not be done.
        for transfer in [await submit() for _ in range(num_transfers)]:
            assert all((await transfer.wait()).ok)
        await lane.close(drain_until=None)
    return host.num_free / num_pages
