"""Requests in virtual time, through a cache and its sequences: what overlapping and looking ahead are worth.

Model and engine as published for 8 thousand million parameters on one H100: 32 layers, pages of 64 tokens and 8 MiB,
NVMe 7 GB/s, bus 55 GB/s. A request's context goes to the device layer by layer; the engine takes its part of the
computing time for each layer, once that layer is there.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.cache import Cache
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.prefill import PrefillCurve
from hicache.sequence import Sequence
from hicache.tier import DEVICE, HOST, NVME, TierId
from hicache.tools.bench.virtual import TimedDevice, TimedHost, TimedTier, VirtualClock

CURVE: Final = PrefillCurve(token_s=22.6e-6, attend_s=0.452e-9)
PAGE_TOKENS: Final = 64
NUM_LAYERS: Final = 32
NVME_PAGE_S: Final = (8 << 20) / 7e9
NVME_LATENCY_S: Final = 1e-4
BUS_PAGE_S: Final = (8 << 20) / 55e9
BUS_LATENCY_S: Final = 2e-5
NEW_TOKENS: Final = 512
DECODE_S: Final = 0.1
LOOK_AHEAD: Final = 8
"""Waiting requests for which the prefix is fetched."""
CACHED_TOKENS: Final = (4096, 16_384)
"""Of a request, least and most."""
HOST_PAGES: Final = 16_384
"""128 GiB."""
DEVICE_PAGES: Final = 2048
WITHIN_S: Final = 10.0
"""A waiting request is expected within so many seconds."""
DEADLINE_S: Final = 1e9
_PAGE_BYTES: Final = 2 * PAGE_TOKENS
_LAYOUT: Final = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype=KVDtype.INT8, page_size=PAGE_TOKENS)
_MODEL: Final = Namespace(model="published", layout=_LAYOUT)

Tokens = npt.NDArray[np.int32]


@dataclass(slots=True)
class Prompt:
    """One request: cached pages, and new tokens after them."""

    arrives_at: float
    tokens: Tokens
    is_fetched: bool = False

    @property
    def cached(self) -> Tokens:
        return self.tokens[:-NEW_TOKENS]

    @property
    def compute_s(self) -> float:
        return CURVE.seconds(len(self.cached), len(self.tokens))


def prompt(number: int, num_pages: int, arrives_at: float = 0.0) -> Prompt:
    """A prompt that shares nothing with those of other numbers."""
    num_tokens = num_pages * PAGE_TOKENS + NEW_TOKENS
    tokens = np.arange(num_tokens, dtype=np.int32)
    tokens[::PAGE_TOKENS] = number
    return Prompt(arrives_at, tokens)


def queue_of(num_requests: int) -> list[Prompt]:
    """Prompts that come at random (Poisson), at 0.9 of what can be served without looking ahead. The same each time."""
    rng = random.Random(1)
    low, high = CACHED_TOKENS
    prompts = [prompt(number, rng.randint(low, high) // PAGE_TOKENS) for number in range(num_requests)]
    served_s = [len(each.cached) / PAGE_TOKENS * NVME_PAGE_S + each.compute_s + DECODE_S for each in prompts]
    rate = 0.9 / (sum(served_s) / num_requests)
    now = 0.0
    for each in prompts:
        now += rng.expovariate(rate)
        each.arrives_at = now
    return prompts


async def first_tokens(clock: VirtualClock, prompts: list[Prompt], look_ahead: int) -> list[float]:
    """Seconds from the arrival of each prompt to its first token, with a prefix that is on NVMe when it arrives.

    An engine takes them in order of arrival, one at a time. Of those that wait, the first `look_ahead` are fetched
    ahead."""
    waiting: deque[Prompt] = deque()
    arrived = asyncio.Event()
    times: list[float] = []
    async with _opened(clock, NVME, prompts) as cache:

        def fetch_ahead() -> None:
            for each in list(waiting)[:look_ahead]:
                if not each.is_fetched:
                    each.is_fetched = True
                    cache.prefetch(_MODEL, each.cached, deadline=clock.monotonic() + WITHIN_S)

        async def arrive() -> None:
            for each in prompts:
                await asyncio.sleep(each.arrives_at - clock.monotonic())
                waiting.append(each)
                arrived.set()
                fetch_ahead()

        async def engine() -> None:
            for _ in prompts:
                while not waiting:
                    arrived.clear()
                    await arrived.wait()
                each = waiting.popleft()
                await _serve(cache, each.tokens, each.compute_s)
                times.append(clock.monotonic() - each.arrives_at)
                fetch_ahead()
                await asyncio.sleep(DECODE_S)

        async with asyncio.TaskGroup() as parts:
            parts.create_task(arrive())
            parts.create_task(engine())
    return times


async def overlapped(clock: VirtualClock, ratio: float) -> float:
    """Seconds to the first token of a prompt whose prefix is in the host, where computing takes `ratio` times as long
    as loading, as a multiple of the longer of the two."""
    num_pages = 128
    load_s = num_pages * BUS_PAGE_S
    each = prompt(0, num_pages)
    async with _opened(clock, HOST, [each]) as cache:
        await _serve(cache, each.tokens, ratio * load_s)
        return clock.monotonic() / (max(1.0, ratio) * load_s)


@asynccontextmanager
async def _opened(clock: VirtualClock, tier_id: TierId, prompts: list[Prompt]) -> AsyncIterator[Cache]:
    """A cache that has what is cached of the prompts in one tier."""
    stored_pages = sum(len(each.tokens) for each in prompts) // PAGE_TOKENS
    device = TimedDevice(
        DEVICE, capacity_pages=DEVICE_PAGES, page_s=BUS_PAGE_S, latency_s=BUS_LATENCY_S, num_layers=NUM_LAYERS,
        page_bytes=_PAGE_BYTES,
    )  # fmt: skip
    host = TimedHost(HOST, capacity_pages=HOST_PAGES, page_bytes=_PAGE_BYTES)
    disk = TimedTier(
        NVME, capacity_pages=stored_pages, page_s=NVME_PAGE_S, latency_s=NVME_LATENCY_S, page_bytes=_PAGE_BYTES
    )
    async with Cache(_LAYOUT, {DEVICE: device, HOST: host, NVME: disk}, clock=clock) as cache:
        for each in prompts:
            slots = cache.tiers[tier_id].allocate(len(each.cached) // PAGE_TOKENS)
            cache.tree.insert(_MODEL, each.cached, tier=tier_id, slots=slots, now=clock.monotonic())
        yield cache


async def _serve(cache: Cache, tokens: Tokens, compute_s: float) -> None:
    """Up to the first token: compute what is not cached, each layer once the context has come to it."""
    sequence = await Sequence.open(cache, _MODEL, tokens, owner="bench", deadline=DEADLINE_S, by_layer=True)
    try:
        assert sequence.length == len(tokens) - NEW_TOKENS, "something that is cached was not found"
        step = await sequence.begin(tokens[sequence.length :], deadline=DEADLINE_S)
        for layer in range(NUM_LAYERS):
            for run in step.runs:
                if run.arriving is not None:
                    assert await cache.has_come(run.arriving.arrival, layer), "a copy did not come"
            await asyncio.sleep(compute_s / NUM_LAYERS)
        sequence.commit(step)
    finally:
        sequence.close()
