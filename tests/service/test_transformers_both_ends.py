"""A prompt from both ends through the real engine: the same greedy tokens, whatever was loaded and what was computed.

What the lanes and the model are said to take is given, so the cache decides for both ends on any machine. The disk
gives nothing before the model's first pass, and the second waits until something has come, so that both take part.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from hicache.movers import Lane
from hicache.movers.speed import LaneSpeed
from hicache.prefill import PrefillCurve
from hicache.service.compose import HiCache
from hicache.service.engines.transformers import TransformersEngine, layout_of
from hicache.tier import NVME
from hicache.tiers.nvme.io import FileIO
from hicache.tools.bench.throttled import SMALL_BYTES, throttled_nvme
from tests.service.tiny_llama import (
    PAGE_SIZE,
    assert_same,
    counting,
    open_cache,
    plain_generate,
    random_ids,
    tiny_model,
)

NUM_PAGES: Final = 32
NUM_TOKENS: Final = NUM_PAGES * PAGE_SIZE
PAGE_S: Final = 4e-3
"""Of the disk, and of the model by its curve."""
COME_WITHIN_S: Final = 30.0
CHUNK: Final = 2 * PAGE_SIZE
NEW: Final = 6


class GatedFiles(FileIO):
    """Gives pages while its gate is open, or none at all."""

    def __init__(self) -> None:
        self.gate: Final = threading.Event()
        self.gate.set()
        self.fails = False

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if sum(map(len, buffers)) > SMALL_BYTES:
            if self.fails:
                raise OSError(5, "the disk gives nothing")
            assert self.gate.wait(COME_WITHIN_S), "the model made no pass"
        return super().preadv(fd, buffers, offset)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def given_speed(lane: Lane, **_: object) -> LaneSpeed:
    """The disk takes its time, the memories take none."""
    page_s = PAGE_S if lane.name.startswith(NVME) else 0.0
    return LaneSpeed(lane.name, ahead_s=0.0, latency_s=0.0, page_s=page_s, batch_pages=1, is_measured=True)


@contextmanager
def on_nvme(
    model: Any, directory: Path, ids: torch.Tensor
) -> Iterator[tuple[HiCache, TransformersEngine, GatedFiles]]:
    """A cache that has a prompt on NVMe alone and knows how slow that is."""
    files = GatedFiles()
    with (
        throttled_nvme(files),
        pytest.MonkeyPatch.context() as patched,
        open_cache(
            layout_of(model, page_size=PAGE_SIZE), device_pages=40, host_pages=40, nvme_dir=directory,
            nvme_bytes=64 << 20, prefill=PrefillCurve(token_s=PAGE_S / PAGE_SIZE),
        ) as cache,
        TransformersEngine(model, cache, chunk_size=CHUNK) as engine,
    ):  # fmt: skip
        patched.setattr(Lane, "speed", given_speed)
        for seed in (1, 2, 3, 4, 5):
            with engine.request(ids if seed == 1 else random_ids(NUM_TOKENS, seed)) as request:
                request.generate(1)
        assert cache.match(engine.namespace, ids[0]).by_tier.keys() == {NVME}
        yield cache, engine, files


@contextmanager
def meeting(model: Any, cache: HiCache, engine: TransformersEngine, files: GatedFiles) -> Iterator[None]:
    """The disk gives nothing before the model's first pass; the passes after it wait until some of that has come."""
    num_passes, ids = 0, random_ids(NUM_TOKENS)

    def hook(*_: object) -> None:
        nonlocal num_passes
        num_passes += 1
        files.gate.set()
        until = time.monotonic() + COME_WITHIN_S
        while num_passes == 2 and cache.match(engine.namespace, ids[0]).by_tier.get(NVME, 0) > NUM_TOKENS - 2 * CHUNK:
            assert time.monotonic() < until, "nothing comes"

    files.gate.clear()
    handle = model.get_decoder().layers[0].register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
        files.gate.set()


@pytest.mark.parametrize("driven_by", ["generate", "prefill"])
def test_the_same_tokens_from_both_ends(model: Any, tmp_path: Path, driven_by: str) -> None:
    ids = random_ids(NUM_TOKENS)
    plain = plain_generate(model, ids, NEW)
    with on_nvme(model, tmp_path / "nvme", ids) as (cache, engine, files):
        said = cache.explain(engine.namespace, ids[0], chunk_tokens=CHUNK)
        assert said.both_ends is not None, said
        with meeting(model, cache, engine, files), counting(model) as counter, engine.request(ids) as request:
            assert request.cached == 0
            if driven_by == "prefill":
                request.extend([int(request.prefill().argmax())])
                assert int(request.tokens[-1]) == plain.tokens[0]
                generation = request.generate(NEW - 1, output_logits=True)
                assert generation.tokens == plain.tokens[1:]
            else:
                generation = request.generate(NEW, output_logits=True)
                assert_same(generation.tokens, generation.logits, plain)
            assert 0 < request.cached < NUM_TOKENS - 2 * PAGE_SIZE, "one end did all"
            assert request.cached_by_tier == {NVME: request.cached}
            assert counter.tokens == NUM_TOKENS - request.cached + NEW - 1
            assert request.num_lost == 0
        with engine.request(ids) as request:
            assert request.cached >= NUM_TOKENS - PAGE_SIZE
            assert_same(*_generated(request), plain)


def _generated(request: Any) -> tuple[tuple[int, ...], torch.Tensor]:
    generation = request.generate(NEW, output_logits=True)
    return generation.tokens, generation.logits


def test_whoever_drives_the_model_himself_finds_all_of_it(model: Any, tmp_path: Path) -> None:
    ids = random_ids(NUM_TOKENS)
    plain = plain_generate(model, ids, NEW)
    with on_nvme(model, tmp_path / "nvme", ids) as (_, engine, _), engine.request(ids) as request:
        output = model.generate(ids, cache=request.cache, max_new_tokens=NEW, do_sample=False)
        assert tuple(output[0, NUM_TOKENS:].tolist()) == plain.tokens
        assert request.cached == NUM_TOKENS - 1


def test_a_disk_that_fails_meanwhile_costs_its_hits(model: Any, tmp_path: Path) -> None:
    ids = random_ids(NUM_TOKENS)
    plain = plain_generate(model, ids, NEW)
    with on_nvme(model, tmp_path / "nvme", ids) as (_, engine, files), engine.request(ids) as request:
        files.fails = True
        assert_same(*_generated(request), plain)
        assert request.cached < NUM_TOKENS // 2
