"""Both ends with a real model and a throttled disk: the rows `planner_demo_off` and `planner_demo_gain`.

SmolLM2-135M computes, in float32 on one core and in 12 steps of 128 tokens, a prompt of 1,537 tokens through the
embedded cache and its transformers engine. Its KV lies on the NVMe tier alone: each round opens the cache anew over the
same directory. A round computes the prompt under a salt that nothing is cached for, which teaches the cache what
computing costs, and throttles the disk to break-even, so that loading everything takes as long as that took. A few
short prompts are loaded, which show how slow the disk is. Then the prompt is asked for as it is stored, and served from
both ends. The logits of its last token must be those of the round's first half.

The optimum is that of two ends for the steps as they were timed in the same round, and the disk as it is throttled. The
round with the median ratio to it is shown. Needs two idle cores: one for the model, one for everything else.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hicache.tools.bench.results import Baseline, Row
from hicache.tools.bench.throttled import ThrottledFiles, throttled_nvme

if TYPE_CHECKING:
    from hicache.service.compose import HiCache
    from hicache.service.engines.transformers import TransformersEngine

PAGE_SIZE: Final = 16
NUM_STEPS: Final = 12
"""In which the prompt is computed, about: more than are needed for the cache to know what a step costs."""
OTHER_TOKENS: Final = (32, 64, 128)
"""Of the prompts that show how slow the disk is: latency and bandwidth can be told apart by several lengths."""
TOLERANCE: Final = 5e-4
"""Largest accepted difference of a logit: two orders of adding up float32 differ by up to 8e-5."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round took, in seconds."""

    computed: float
    """To compute everything, and to load everything, as the disk is throttled to that."""
    both: float
    """From both ends."""
    optimum: float
    """The best that two ends can do."""
    num_loaded: int
    """Tokens that were loaded."""


class DemoPrompt:
    """A prompt whose KV is on NVMe, and rounds that serve it. Loading the model takes seconds.

    Args:
        directory: of the NVMe tier.
        num_tokens: of the prompt but for its last one, a multiple of `PAGE_SIZE` and at least `NUM_STEPS` pages.

    Raises `UsageProblem` or `CommandFailed` when the demo's model is not installed.
    """

    def __init__(self, directory: Path, num_tokens: int) -> None:
        from hicache.tools.demo.model import find_model, quiet_transformers

        quiet_transformers()
        import torch

        from hicache.service.engines.models import load_model
        from hicache.service.engines.transformers import layout_of

        self._model: Any = load_model(find_model(None))
        self._layout: Final = layout_of(self._model, page_size=PAGE_SIZE)
        self._directory: Final = directory
        self._files: Final = ThrottledFiles()
        self.num_tokens: Final = num_tokens
        self._chunk_tokens: Final = num_tokens // NUM_STEPS // PAGE_SIZE * PAGE_SIZE
        generator = torch.Generator().manual_seed(0)
        size = self._model.config.vocab_size
        self._ids: Final = torch.randint(0, size, (num_tokens + 1,), generator=generator).numpy()
        self._others: Final = [torch.randint(0, size, (n + 1,), generator=generator).numpy() for n in OTHER_TOKENS]
        with self._opened() as (cache, engine):
            for ids in (self._ids, *self._others):
                with engine.request(ids) as request:
                    request.prefill()
                cache.persist(engine.namespace, ids)

    def round(self) -> Round:
        """Compute the prompt, then serve it from both ends.

        Raises `AssertionError` when the logits differ.
        """
        self._files.byte_s = 0.0
        with self._opened() as (cache, engine):
            seconds, expected, _ = self._serve(engine, salt=b"nothing is cached for it")
            self._files.byte_s = sum(seconds) / (self.num_tokens // PAGE_SIZE * self._layout.page_bytes)
            for ids in self._others:
                with cache.sequence(engine.namespace, ids):
                    pass  # loaded as a whole when it begins
            both, logits, num_loaded = self._serve(engine)
        difference = float((logits - expected).abs().max())
        assert difference <= TOLERANCE, f"logits differ by {difference}"
        return Round(sum(seconds), sum(both), self._optimum(seconds), num_loaded)

    def _serve(self, engine: "TransformersEngine", salt: bytes = b"") -> tuple[list[float], Any, int]:
        """Seconds from one step's end to the next, the last token's logits, and how many tokens were loaded."""
        ends = [perf_counter()]
        with engine.request(self._ids, namespace=replace(engine.namespace, salt=salt)) as request:
            logits = request.prefill(progress=lambda *_: ends.append(perf_counter()))
            return np.diff(ends).tolist(), logits, request.cached

    def _optimum(self, seconds: list[float]) -> float:
        """Seconds until both ends meet, and the last token is computed."""
        borders = [*range(0, self.num_tokens, self._chunk_tokens), self.num_tokens]
        computed = np.interp(np.arange(self.num_tokens + 1), borders, np.cumsum([0.0, *seconds[: len(borders) - 1]]))
        token_s = sum(seconds) / self.num_tokens
        meeting = np.maximum(computed, (self.num_tokens - np.arange(self.num_tokens + 1)) * token_s)
        return float(meeting.min()) + sum(seconds[len(borders) - 1 :])

    @contextmanager
    def _opened(self) -> "Iterator[tuple[HiCache, TransformersEngine]]":
        from hicache.service.compose import HiCache
        from hicache.service.engines.transformers import TransformersEngine

        # Room for the prompt twice and for the others, so that nothing has to leave while it is timed.
        num_pages = 2 * (self.num_tokens // PAGE_SIZE + 1) + sum(OTHER_TOKENS) // PAGE_SIZE + 4
        num_bytes = num_pages * self._layout.page_bytes
        with (
            throttled_nvme(self._files),
            HiCache.open(
                self._layout, device_bytes=num_bytes, host_bytes=num_bytes, nvme_dir=self._directory,
                nvme_bytes=2 * num_bytes + (256 << 20), prefill="measure",
            ) as cache,
            TransformersEngine(self._model, cache, chunk_size=self._chunk_tokens) as engine,
        ):  # fmt: skip
            yield cache, engine


def planner_demo_rows(*, num_tokens: int = 1536, num_rounds: int = 5) -> list[Row]:
    """Rows `planner_demo_off` and `planner_demo_gain`. Takes a minute or two.

    Raises `UsageProblem` or `CommandFailed` when the demo's model is not installed.
    """
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as directory:
            prompt = DemoPrompt(Path(directory) / "nvme", num_tokens)
            rounds = sorted((prompt.round() for _ in range(num_rounds)), key=lambda each: each.both / each.optimum)
    finally:
        torch.set_num_threads(num_threads)
    found = rounds[num_rounds // 2]
    return [
        Row("planner_demo_off", found.both, "s", Baseline("two ends at their best", found.optimum), found.optimum, 1.1,
            goal_is_ratio=True),
        Row("planner_demo_gain", found.computed / found.both, "x", Baseline("better single choice", 1.0),
            found.computed / found.optimum, 1.7, higher_is_better=True),
    ]  # fmt: skip
