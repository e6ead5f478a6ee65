"""The planner's rows of `hicache bench policy`: prompts served from both ends, beside the optimum in closed form.

A prefix lies on a disk alone, in a cache as it is with the lanes and sequences that serve, in virtual time. Of the disk
is known what one other prompt showed that was loaded from it; of the engine, what its first steps showed. It computes
at the speed published for a model of 8 thousand million parameters on one H100, in steps of 512 tokens, and asks before
each how far to go. The disk's bandwidth is given as a multiple of break-even, at which loading everything takes as long
as computing everything; the way from the host to the device has 55 GB/s:

    bandwidth   0.5, 0.7, 1, 1.4, 2, 4, 8 x break-even
    prefix      2,048, 8,192, 32,768 tokens in pages of 16, which are 2 MiB each

The optimum computes x tokens while the rest is loaded, so that both end at once, without steps, pages or latency:

    token_s x + attend_s x**2 = (n - x) seconds of a token on the disk
"""

import asyncio
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.cache import Cache
from hicache.deciding import PrefillSpeeds
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.prefill import PrefillCurve, PrefillSpeed
from hicache.sequence import Sequence
from hicache.tier import DEVICE, HOST, NVME
from hicache.tools.bench.results import Baseline, Row
from hicache.tools.bench.virtual import TimedDevice, TimedHost, TimedTier, VirtualClock, run_virtual

CURVE: Final = PrefillCurve(token_s=22.6e-6, attend_s=0.452e-9)
PAGE_SIZE: Final = 16
CHUNK_TOKENS: Final = 512
BANDWIDTHS: Final = (0.5, 0.7, 1.0, 1.4, 2.0, 4.0, 8.0)
"""As multiples of break-even."""
LENGTHS: Final = (2048, 8192, 32_768)
"""Tokens."""
BUS_PAGE_S: Final = (2 << 20) / 55e9
BUS_LATENCY_S: Final = 2e-5
OTHER_TOKENS: Final = CHUNK_TOKENS * PrefillSpeed.SETTLED
"""Of the prompt that shows what the engine and the disk can do."""
DEADLINE_S: Final = 1e6
_LAYOUT: Final = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype=KVDtype.INT8, page_size=PAGE_SIZE)
_MODEL: Final = Namespace(model="published", layout=_LAYOUT)


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
    """Serve a prefix."""
    compute_s = CURVE.seconds(0, num_tokens)
    token_s = compute_s / num_tokens / bandwidth
    linear = CURVE.token_s + token_s
    computed = (math.sqrt(linear**2 + 4 * CURVE.attend_s * token_s * num_tokens) - linear) / (2 * CURVE.attend_s)
    ours = run_virtual(lambda clock: _serve(clock, num_tokens, token_s * PAGE_SIZE))
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


async def _serve(clock: VirtualClock, num_tokens: int, page_s: float) -> float:
    """Seconds until a prefix is there whose pages take so long on the disk."""
    num_pages = 2 * (num_tokens + OTHER_TOKENS) // PAGE_SIZE
    page_bytes = _LAYOUT.page_bytes
    disk = TimedTier(NVME, capacity_pages=num_pages, page_s=0.0, page_bytes=page_bytes)
    host = TimedHost(HOST, capacity_pages=num_pages, page_bytes=page_bytes)
    device = TimedDevice(
        DEVICE, capacity_pages=num_pages, page_s=BUS_PAGE_S, latency_s=BUS_LATENCY_S, page_bytes=page_bytes
    )
    tiers = {DEVICE: device, HOST: host, NVME: disk}
    prefix = np.arange(num_tokens + 1, dtype=np.int32)
    other = np.arange(OTHER_TOKENS + 1, dtype=np.int32)[::-1]
    async with Cache(_LAYOUT, tiers, clock=clock, prefill=PrefillSpeeds()) as cache:
        for tokens in (other, prefix):
            await _prefill(cache, tokens)
        await _to_disk(cache)
        disk.page_s = page_s
        (await Sequence.open(cache, _MODEL, other, owner="bench", deadline=DEADLINE_S)).close()
        return await _prefill(cache, prefix)


async def _prefill(cache: Cache, tokens: npt.NDArray[np.int32]) -> float:
    """Serve a prompt but for its last token. Returns the seconds that took."""
    began = cache.clock.monotonic()
    sequence = await Sequence.open(
        cache, _MODEL, tokens, owner="bench", deadline=DEADLINE_S, chunk_tokens=CHUNK_TOKENS
    )
    try:
        while sequence.length < len(tokens) - 1:
            num_tokens = await sequence.next_step(CHUNK_TOKENS, deadline=DEADLINE_S)
            start, stop = sequence.length, min(sequence.length + num_tokens, len(tokens) - 1)
            if start < stop:
                step = await sequence.begin(tokens[start:stop], deadline=DEADLINE_S)
                await asyncio.sleep(CURVE.seconds(start, stop))
                sequence.commit(step)
        return cache.clock.monotonic() - began
    finally:
        sequence.close()


async def _to_disk(cache: Cache) -> None:
    """Let everything leave device and host."""
    for tier_id in (DEVICE, HOST):
        num_pages = cache.tiers[tier_id].capacity_pages
        cache.free({tier_id: await cache.allocate(tier_id, num_pages, deadline=DEADLINE_S)})
