"""`hicache bench movers`: what overlapping, looking ahead and cancelling are worth, with the lanes as they are.

- `layerwise_overlap`: a prefix is loaded layer by layer while the tokens after it are computed on each layer that is
  there; both together against the longer of the two alone. In virtual time, through a sequence and its step (32 layers;
  computing takes half, as long, and twice as long as loading; the worst of the three), where the bound is one layer
  more than the longer one.
- `layerwise_overlap_threads`: the same from the host tier to the device tier in memory, in real time and threads. What
  computes is a device that needs no core, as a GPU: each layer begins when it is there and the one before has ended,
  and takes its part of what the load takes alone. `layerwise_load` is what that load, layer by layer, takes beside one
  of whole pages, the best that the machine gives. All three take turns; the round with the median ratio is shown of
  each. Needs two idle cores.
- `prefetch_ttft`: time to first token of requests whose prefixes lie on NVMe, in virtual time, through a cache, its
  sequences and its prefetch. An engine takes requests in order of arrival, one at a time. Look-ahead fetches, to the
  host, for the requests that wait for it; without, a prefix is asked for when its request's turn has come, and the
  engine waits. From the host to the device both go layer by layer under the computing. Model and engine are those of
  `hicache.tools.bench.virtual_serving`; 4k to 16k tokens cached, 512 new, 0.1 s of decoding before the next request's
  turn. 1,000 requests come at random (Poisson), at 0.9 of what can be served without look-ahead. Medians.
- `planner_demo_off`, `planner_demo_gain`: a prompt served from both ends by a real model: see
  `hicache.tools.bench.planner_demo`. Left out, with a note, where the demo's model is not installed.
- `cancel_returns_all`: share of a pool of 512 pages that can be had again after 32 promotions of 16 pages were
  cancelled before they began and 16 more at some moment of their copying, with others in between.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np

from hicache.clock import SystemClock
from hicache.layout import KVDtype, KVLayout
from hicache.movers import Lane, PageMove, Priority, Transfer
from hicache.tier import HOST, NVME, PageIdentity, Tier
from hicache.tools.bench.planner_demo import NUM_STEPS, PAGE_SIZE, planner_demo_rows
from hicache.tools.bench.results import Baseline, Note, Report, Row
from hicache.tools.bench.virtual import TimedHost, TimedTier, VirtualClock, run_virtual
from hicache.tools.bench.virtual_serving import (
    LOOK_AHEAD,
    NUM_LAYERS,
    NVME_LATENCY_S,
    NVME_PAGE_S,
    PAGE_TOKENS,
    first_tokens,
    overlapped,
    queue_of,
)
from hicache.tools.exits import CommandFailed, UsageProblem

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
    worst = max(run_virtual(partial(overlapped, ratio=ratio)) for ratio in (0.5, 1.0, 2.0))
    one_after_the_other = Baseline("one after the other, at worst", 2.0)
    return Row("layerwise_overlap", worst, "x", one_after_the_other, 1 + 1 / NUM_LAYERS, 1.1)


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


def _prefetch(scale: Scale) -> Row:
    num_requests = scale.of(1000, least=20)
    without, ahead = (
        median(run_virtual(partial(first_tokens, prompts=queue_of(num_requests), look_ahead=look_ahead)))
        for look_ahead in (0, LOOK_AHEAD)
    )
    return Row("prefetch_ttft", 1e3 * ahead, "ms", Baseline("without look-ahead", 1e3 * without), None, 1 / 3,
               goal_is_ratio=True)  # fmt: skip


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
