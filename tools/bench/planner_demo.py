"""The planner with a real model and a throttled disk: the rows `planner_demo_off` and `planner_demo_gain`.

SmolLM2-135M in float32 on one core computes a prefix of 1,536 tokens in steps of 128, which teach it its speed. The KV
of all pages lies in a file, whose reads are slowed down to break-even: loading everything takes as long as computing
everything took. Then rounds alternate between computing everything, and what the planner plans, carried out by the
lanes into the host tier while the model computes in a thread. After each round the next token's logits are computed
over what was computed and loaded, and must be those of the plain model.

The optimum is that of two ends for the steps as they were timed in the same rounds, and the file as it is throttled.
Needs two idle cores: one for the model, one for everything else.
"""

import asyncio
import os
import tempfile
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache.clock import SystemClock
from hicache.movers import Lane, PageMove, Priority
from hicache.movers.meeting import Meeting, meet
from hicache.planner import PageRange, TierRun, plan, routes_to
from hicache.prefill import PrefillSpeed
from hicache.tier import HOST, NVME, Outcome, PageIdentity, PageRead
from hicache.tools.bench.results import Baseline, Row
from hicache.tools.bench.virtual import TimedTier

PAGE_SIZE: Final = 16
CHUNK_TOKENS: Final = 128
TOLERANCE: Final = 5e-4
"""Largest accepted difference of a logit: two orders of adding up float32 differ by up to 8e-5."""
_NOBODY: Final = PageIdentity(bytes(32), bytes(32), b"")


class ThrottledFile(TimedTier):
    """Pages in a file, one after the other, read no faster than `page_s` seconds each."""

    def __init__(self, descriptor: int, *, page_bytes: int, capacity_pages: int, page_s: float) -> None:
        super().__init__(NVME, capacity_pages=capacity_pages, page_s=page_s)
        self._descriptor = descriptor
        self._bytes = page_bytes

    @property
    def page_bytes(self) -> int:
        return self._bytes

    async def read(self, pages: Sequence[PageRead]) -> list[Outcome]:
        wait_s = self._take_pipe(len(pages) * self._page_s)
        began = perf_counter()
        for page in pages:
            await asyncio.to_thread(os.preadv, self._descriptor, [page.into], page.slot * self._bytes)
        await asyncio.sleep(began + wait_s - perf_counter())
        return [Outcome.OK] * len(pages)


class DemoPrefix:
    """A prefix of random tokens, and one request for it at a time. Loading the model takes seconds.

    Args:
        num_tokens: of the prefix, a multiple of `PAGE_SIZE`. One more is asked for.
    """

    def __init__(self, num_tokens: int) -> None:
        from hicache.tools.demo.model import find_model, quiet_transformers

        transformers = quiet_transformers()
        import torch

        from hicache.service.engines.models import load_model

        self._torch = torch
        self._new_cache = transformers.DynamicCache
        self._model: Any = load_model(find_model(None))
        self.num_pages: Final = num_tokens // PAGE_SIZE
        self._num_tokens = num_tokens
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(0, self._model.config.vocab_size, (1, num_tokens + 1), generator=generator)
        self.prefill: Final = PrefillSpeed()
        self.steps: list[list[float]] = [[] for _ in range(0, num_tokens, CHUNK_TOKENS)]
        """Seconds that each step took, of all times that everything was computed."""
        self._cache: Any = None
        self.compute_all()
        self.steps = [[] for _ in self.steps]
        self.compute_all()
        self._expected = self._next_logits()
        self.pages: Final = self._pages()
        """`[num_pages, page_bytes]`, uint8."""

    def compute_all(self) -> float:
        """Compute the prefix in steps. Returns the seconds that took."""
        self._cache = self._new_cache()
        for number, start in enumerate(range(0, self._num_tokens, CHUNK_TOKENS)):
            stop = min(start + CHUNK_TOKENS, self._num_tokens)
            began = perf_counter()
            self._forward(start, stop)
            seconds = perf_counter() - began
            self.steps[number].append(seconds)
            self.prefill.add(start, stop, seconds)
        return sum(times[-1] for times in self.steps)

    def optimum(self, page_s: float) -> float:
        """Seconds until both ends meet, where computing goes as its steps did and a page is loaded in `page_s`."""
        borders = np.minimum(np.arange(len(self.steps) + 1) * CHUNK_TOKENS, self._num_tokens)
        computed_s = np.concatenate([[0.0], np.cumsum([median(times) for times in self.steps])])
        tokens = np.arange(self._num_tokens + 1)
        both = np.maximum(np.interp(tokens, borders, computed_s), (self._num_tokens - tokens) * page_s / PAGE_SIZE)
        return float(both.min())

    async def carry_out(self, disk: ThrottledFile) -> float:
        """Plan, and compute and load as planned. Returns the seconds that took.

        Raises `AssertionError` when the next token's logits are not those of the plain model.
        """
        from hicache.tiers.host import HostTier

        clock = SystemClock()
        self._cache = self._new_cache()
        host = HostTier(page_bytes=disk.page_bytes, capacity_pages=self.num_pages, huge_pages=False)
        try:
            lane = Lane(disk, host, clock=clock, batch_pages=8)
            slots = host.allocate(self.num_pages).tolist()
            moves = [PageMove(page, 0, slot, 0, _NOBODY) for page, slot in enumerate(slots)]
            loaded: set[int] = set()

            def join(stop: int) -> None:
                """Append what was loaded to what the model attends over, up to a page."""
                first = self._cache.get_seq_length() // PAGE_SIZE
                if first < stop:
                    assert loaded >= set(range(first, stop))
                    self._append([np.frombuffer(host.view(moves[page].target_slot), np.uint8)
                                  for page in range(first, stop)])  # fmt: skip

            def compute_pages(pages: PageRange) -> None:
                join(pages.start)
                self._forward(pages.start * PAGE_SIZE, pages.stop * PAGE_SIZE)

            async def compute(pages: PageRange) -> None:
                await asyncio.to_thread(compute_pages, pages)

            async def load(pages: PageRange) -> Sequence[bool]:
                transfer = await lane.submit(moves[pages.start : pages.stop], priority=Priority.DEMAND)
                ok = (await transfer.wait()).ok
                loaded.update(page for page, good in zip(range(pages.start, pages.stop), ok, strict=True) if good)
                return ok

            async with asyncio.TaskGroup() as group:
                group.create_task(lane.run())
                for num_warm in (1, 2, 4):
                    await (await lane.submit(moves[:num_warm], priority=Priority.DEMAND)).wait()
                began = clock.monotonic()
                found = plan([TierRun(NVME, self.num_pages)], routes_to(HOST, [lane]), self.prefill.curve,
                             page_size=PAGE_SIZE, chunk_tokens=CHUNK_TOKENS)  # fmt: skip
                meeting = Meeting(found, page_size=PAGE_SIZE, prefill=self.prefill, chunk_tokens=CHUNK_TOKENS,
                                  load_pages=8, now=began)  # fmt: skip
                await meet(meeting, compute=compute, load=load, clock=clock)
                join(self.num_pages)
                seconds = clock.monotonic() - began
                await lane.close(drain_until=None)
        finally:
            await host.close()
        difference = float((self._next_logits() - self._expected).abs().max())
        assert difference <= TOLERANCE, f"logits differ by {difference}"
        return seconds

    # -- the model ----------------------------------------------------------------------------------------------------

    def _forward(self, start: int, stop: int) -> Any:
        with self._torch.inference_mode():
            return self._model(input_ids=self._ids[:, start:stop], cache=self._cache, logits_to_keep=1).logits[0, -1]

    def _next_logits(self) -> Any:
        return self._forward(self._num_tokens, self._num_tokens + 1).clone()

    def _pages(self) -> npt.NDArray[np.uint8]:
        """What is in the model's cache, page by page: `[layer][K, V][token][head][dim]`."""
        layers = [
            self._torch.stack([layer.keys[0], layer.values[0]])[:, :, : self._num_tokens].transpose(1, 2)
            for layer in self._cache.layers
        ]
        whole = self._torch.stack(layers)
        whole = whole.reshape(*whole.shape[:2], self.num_pages, PAGE_SIZE, *whole.shape[3:]).movedim(2, 0).contiguous()
        found: npt.NDArray[np.uint8] = whole.numpy().reshape(self.num_pages, -1).view(np.uint8)
        return found

    def _append(self, pages: Sequence[npt.NDArray[np.uint8]]) -> None:
        config = self._model.config
        shape = (len(pages), config.num_hidden_layers, 2, PAGE_SIZE, config.num_key_value_heads, config.head_dim)
        block = self._torch.from_numpy(np.stack(pages).view(np.float32).reshape(shape).copy())
        for layer in range(config.num_hidden_layers):
            # [pages, K/V, tokens, heads, dim] -> [K/V, heads, pages * tokens, dim]
            both = block[:, layer].permute(1, 3, 0, 2, 4).flatten(2, 3).contiguous()
            self._cache.update(both[0:1], both[1:2], layer)


def planner_demo_rows(*, num_tokens: int = 1536, num_rounds: int = 3) -> list[Row]:
    """Rows `planner_demo_off` and `planner_demo_gain`. Takes a minute or two.

    Raises `UsageProblem` or `CommandFailed` when the demo's model is not installed.
    """
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measured(DemoPrefix(num_tokens), num_rounds)
    finally:
        torch.set_num_threads(num_threads)


def _measured(prefix: DemoPrefix, num_rounds: int) -> list[Row]:
    page_bytes = prefix.pages.shape[1]
    with tempfile.TemporaryFile() as file:
        file.write(prefix.pages.tobytes())
        file.flush()
        page_s = sum(median(times) for times in prefix.steps) / prefix.num_pages
        alone, ours = list[float](), list[float]()
        for _ in range(num_rounds):
            alone.append(prefix.compute_all())
            disk = ThrottledFile(file.fileno(), page_bytes=page_bytes, capacity_pages=prefix.num_pages, page_s=page_s)
            ours.append(asyncio.run(prefix.carry_out(disk)))
    seconds, optimum = median(ours), prefix.optimum(page_s)
    single = min(median(alone), page_s * prefix.num_pages)
    return [
        Row("planner_demo_off", seconds, "s", Baseline("two ends at their best", optimum), optimum, 1.1,
            goal_is_ratio=True),
        Row("planner_demo_gain", single / seconds, "x", Baseline("better single choice", 1.0), single / optimum, 1.7,
            higher_is_better=True),
    ]  # fmt: skip
