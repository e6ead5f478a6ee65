"""The planner's rows of `hicache bench policy`: plans carried out in virtual time, beside the optimum in closed form.

A prefix lies on a disk behind a real lane, of which is known what a few small copies showed; the engine computes at the
speed published for a model of 8 thousand million parameters on one H100, in steps of 512 tokens. The disk's bandwidth
is given as a multiple of break-even, at which loading everything takes as long as computing everything:

    bandwidth   0.5, 0.7, 1, 1.4, 2, 4, 8 x break-even
    prefix      2,048, 8,192, 32,768 tokens in pages of 16, which are 2 MiB each

The optimum computes x tokens while the rest is loaded, so that both end at once, without steps, pages or latency:

    token_s x + attend_s x**2 = (n - x) seconds of a token on the disk
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hicache.movers import Lane, PageMove, Priority
from hicache.movers.meeting import Meeting, meet
from hicache.planner import PageRange, TierRun, plan, routes_to
from hicache.prefill import PrefillCurve, PrefillSpeed
from hicache.tier import HOST, NVME, PageIdentity
from hicache.tools.bench.results import Baseline, Row
from hicache.tools.bench.virtual import TimedHost, TimedTier, VirtualClock, run_virtual

CURVE: Final = PrefillCurve(token_s=22.6e-6, attend_s=0.452e-9)
PAGE_SIZE: Final = 16
CHUNK_TOKENS: Final = 512
BANDWIDTHS: Final = (0.5, 0.7, 1.0, 1.4, 2.0, 4.0, 8.0)
"""As multiples of break-even."""
LENGTHS: Final = (2048, 8192, 32_768)
"""Tokens."""
_BATCH_PAGES: Final = 16
_NOBODY: Final = PageIdentity(bytes(32), bytes(32), b"")


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the grid; seconds."""

    num_tokens: int
    bandwidth: float
    """As a multiple of break-even."""
    ours: float
    optimum: float
    better_single: float
    """Loading everything or computing everything, whichever is faster: the closed form of each."""


def measure(num_tokens: int, bandwidth: float) -> Point:
    """Carry out what the planner plans for a prefix."""
    compute_s = CURVE.seconds(0, num_tokens)
    token_s = compute_s / num_tokens / bandwidth
    linear = CURVE.token_s + token_s
    computed = (math.sqrt(linear**2 + 4 * CURVE.attend_s * token_s * num_tokens) - linear) / (2 * CURVE.attend_s)
    ours = run_virtual(lambda clock: _carry_out(clock, num_tokens // PAGE_SIZE, token_s * PAGE_SIZE))
    return Point(
        num_tokens, bandwidth, ours, token_s * (num_tokens - computed), min(compute_s, token_s * num_tokens)
    )


def planner_rows() -> list[Row]:
    """Rows `planner_worst_off`, `planner_worst_vs_single` and `planner_break_even`. Takes a second or two."""
    points = [measure(num_tokens, bandwidth) for num_tokens in LENGTHS for bandwidth in BANDWIDTHS]
    worst_off = max(point.ours / point.optimum for point in points)
    worst_single = max(point.ours / point.better_single for point in points)
    gain = min(point.better_single / point.ours for point in points if point.bandwidth == 1.0)
    best_gain = min(point.better_single / point.optimum for point in points if point.bandwidth == 1.0)
    return [
        Row("planner_worst_off", worst_off, "x", Baseline("closed-form optimum", 1.0), 1.0, 1.04),
        Row("planner_worst_vs_single", worst_single, "x", Baseline("better single choice", 1.0), None, 1.02),
        Row("planner_break_even", gain, "x", Baseline("better single choice", 1.0), best_gain, 1.85,
            higher_is_better=True),
    ]  # fmt: skip


async def _carry_out(clock: VirtualClock, num_pages: int, page_s: float) -> float:
    """Seconds until a prefix is there."""
    disk = TimedTier(NVME, capacity_pages=num_pages, page_s=page_s)
    host = TimedHost(HOST, capacity_pages=num_pages)
    lane = Lane(disk, host, clock=clock, batch_pages=_BATCH_PAGES)
    moves = [PageMove(page, 0, page, 0, _NOBODY) for page in range(num_pages)]
    disk.allocate(num_pages)
    host.allocate(num_pages)
    prefill = PrefillSpeed()
    for start in range(0, 16_384, 1024):
        prefill.add(start, start + CHUNK_TOKENS, CURVE.seconds(start, start + CHUNK_TOKENS))

    async def compute(pages: PageRange) -> None:
        await asyncio.sleep(CURVE.seconds(pages.start * PAGE_SIZE, pages.stop * PAGE_SIZE))

    async def load(pages: PageRange) -> Sequence[bool]:
        transfer = await lane.submit(moves[pages.start : pages.stop], priority=Priority.DEMAND)
        return (await transfer.wait()).ok

    async with asyncio.TaskGroup() as group:
        group.create_task(lane.run())
        for num_warm in range(1, _BATCH_PAGES + 1):
            await (await lane.submit(moves[:num_warm], priority=Priority.DEMAND)).wait()
        began = clock.monotonic()
        runs = [TierRun(NVME, num_pages)]
        routes = routes_to(HOST, [lane])
        found = plan(runs, routes, prefill.curve, page_size=PAGE_SIZE, chunk_tokens=CHUNK_TOKENS)
        meeting = Meeting(
            found, page_size=PAGE_SIZE, prefill=prefill, chunk_tokens=CHUNK_TOKENS, load_pages=_BATCH_PAGES, now=began
        )
        await meet(meeting, compute=compute, load=load, clock=clock)
        seconds = clock.monotonic() - began
        await lane.close(drain_until=None)
    return seconds
