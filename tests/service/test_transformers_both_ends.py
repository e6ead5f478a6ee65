"""A prompt from both ends through the real engine: the same greedy tokens, whatever was loaded and what was computed.

The disk is as slow as the model is said to be, so the cache decides for both ends; then the model is made to wait, in
its second pass, until the disk has brought the first pages, so that both ends take part on any machine.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from hicache.prefill import PrefillCurve
from hicache.service.compose import HiCache
from hicache.service.engines.transformers import TransformersEngine, layout_of
from hicache.tier import NVME
from hicache.tools.bench.throttled import SMALL_BYTES, ThrottledFiles, throttled_nvme
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
CHUNK: Final = 2 * PAGE_SIZE
NEW: Final = 6


class CountingFiles(ThrottledFiles):
    """Tells when the first pages have come, and can refuse to give any."""

    def __init__(self) -> None:
        super().__init__()
        self.come: Final = threading.Event()
        self.fails = False

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.fails and sum(map(len, buffers)) > SMALL_BYTES:
            raise OSError(5, "the disk gives nothing")
        done = super().preadv(fd, buffers, offset)
        if self.byte_s and done > SMALL_BYTES:
            self.come.set()
        return done


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@contextmanager
def on_nvme(
    model: Any, directory: Path, ids: torch.Tensor
) -> Iterator[tuple[HiCache, TransformersEngine, CountingFiles]]:
    """A cache that has a prompt on NVMe alone and knows how slow that is."""
    layout = layout_of(model, page_size=PAGE_SIZE)
    files = CountingFiles()
    with (
        throttled_nvme(files),
        open_cache(
            layout, device_pages=40, host_pages=40, nvme_dir=directory, nvme_bytes=64 << 20,
            prefill=PrefillCurve(token_s=PAGE_S / PAGE_SIZE),
        ) as cache,
        TransformersEngine(model, cache, chunk_size=CHUNK) as engine,
    ):  # fmt: skip
        for seed in (1, 2, 3, 4, 5):
            with engine.request(ids if seed == 1 else random_ids(NUM_TOKENS, seed)) as request:
                request.generate(1)
        assert cache.match(engine.namespace, ids[0]).by_tier.keys() == {NVME}
        files.byte_s = PAGE_S / layout.page_bytes
        # One prompt is loaded as a whole: what is not known is tried.
        with engine.request(random_ids(NUM_TOKENS, 2)[:, : NUM_TOKENS // 2]):
            pass
        files.come.clear()
        yield cache, engine, files


@contextmanager
def waiting_for(files: CountingFiles, model: Any) -> Iterator[None]:
    """The model's second pass and those after it wait until the first pages have come."""
    num_passes = 0

    def hook(*_: object) -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes > 1:
            assert files.come.wait(30)

    handle = model.get_decoder().layers[0].register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("driven_by", ["generate", "prefill"])
def test_the_same_tokens_from_both_ends(model: Any, tmp_path: Path, driven_by: str) -> None:
    ids = random_ids(NUM_TOKENS)
    plain = plain_generate(model, ids, NEW)
    with on_nvme(model, tmp_path / "nvme", ids) as (cache, engine, files):
        said = cache.explain(engine.namespace, ids[0], chunk_tokens=CHUNK)
        assert said.both_ends is not None, said
        with counting(model) as counter, waiting_for(files, model), engine.request(ids) as request:
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
