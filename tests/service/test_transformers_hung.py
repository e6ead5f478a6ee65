"""A disk that does not answer costs the transformers engine its hits, and nobody waits longer than for one load."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import hicache.tiers.context
from hicache.service.compose import HiCache
from hicache.service.engines.transformers import Request, TransformersEngine, layout_of
from hicache.tier import NVME
from hicache.tools.bench.throttled import throttled_nvme
from tests.service.tiny_llama import (
    PAGE_SIZE,
    Plain,
    open_cache,
    plain_generate,
    random_ids,
    tiny_model,
)
from tests.tiers.faulty_files import HeldFiles

NEW: Final = 6
NUM_TOKENS: Final = 30 * PAGE_SIZE
DEVICE_PAGES: Final = 7
HOST_PAGES: Final = 80
"""Beside what waits for the disk there is room for a context."""
LOAD_S: Final = 0.5
"""How long a step waits for a batch of reads in these tests."""
SLACK_S: Final = 10.0
"""For a load's time, for the patience with which room is asked of a disk, and for computing all of it on a busy
machine. Without an end of its own, a wait would last for `hicache.service.requests.DEFAULT_TIMEOUT_S`."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def plain(model: Any) -> Plain:
    return plain_generate(model, random_ids(NUM_TOKENS), NEW)


@pytest.fixture(autouse=True)
def _short_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hicache.tiers.context, "READ_TIMEOUT_S", LOAD_S)


@contextmanager
def pushed_out(
    model: Any, directory: Path, files: HeldFiles, num_computed: int
) -> Iterator[tuple[HiCache, TransformersEngine, Request]]:
    """A request whose context is four times the device, and which other requests have pushed out to NVMe."""
    layout = layout_of(model, page_size=PAGE_SIZE)
    ids = random_ids(NUM_TOKENS)
    with (
        throttled_nvme(files),
        open_cache(
            layout, device_pages=DEVICE_PAGES, host_pages=HOST_PAGES, nvme_dir=directory, nvme_bytes=64 << 20
        ) as cache,
        TransformersEngine(model, cache) as engine,
    ):
        assert NUM_TOKENS > 4 * DEVICE_PAGES * PAGE_SIZE
        with engine.request(ids[:, :num_computed]) as request:
            request.prefill()
            request.extend(ids[:, num_computed:])
            for seed in (2, 3, 4, 5):
                with engine.request(random_ids(NUM_TOKENS, seed)) as other:
                    other.prefill()
            by_tier = cache.match(engine.namespace, ids[0, :num_computed]).by_tier
            assert by_tier[NVME] > num_computed // 2
            try:
                yield cache, engine, request
            finally:
                files.let_go()


def generated(model: Any, request: Request, driven_by: str) -> tuple[int, ...]:
    """By the request, by transformers itself, or by one pass after the other."""
    ids = random_ids(NUM_TOKENS)
    if driven_by == "request":
        return request.generate(NEW).tokens
    if driven_by == "transformers":
        output = model.generate(ids, cache=request.cache, max_new_tokens=NEW, do_sample=False)
        return tuple(output[0, NUM_TOKENS:].tolist())
    tokens: list[int] = []
    logits = request.prefill()
    while True:
        tokens.append(int(logits.argmax()))
        if len(tokens) == NEW:
            return tuple(tokens)
        with torch.no_grad():
            logits = model(torch.tensor([tokens[-1:]]), cache=request.cache).logits[0, -1]


ALL: Final = ("preadv", "pwritev", "fdatasync")


@pytest.mark.parametrize(
    ("hangs", "driven_by"),
    [(("preadv",), "request"), (ALL, "request"), (ALL, "transformers"), (ALL, "passes")],
    ids=["reads-request", "all-request", "all-transformers", "all-passes"],
)
def test_a_context_that_a_disk_does_not_give_is_computed_again(
    model: Any, plain: Plain, tmp_path: Path, hangs: tuple[str, ...], driven_by: str
) -> None:
    files = HeldFiles(*hangs)
    num_computed = NUM_TOKENS - 20
    with pushed_out(model, tmp_path / "nvme", files, num_computed) as (_, _, request):
        files.hold()
        began = time.monotonic()
        assert generated(model, request, driven_by) == plain.tokens
        assert time.monotonic() - began < LOAD_S + SLACK_S
        assert files.num_waiting > 0, "nothing was asked of the disk"


def test_a_request_that_begins_while_the_disk_hangs_is_computed(model: Any, plain: Plain, tmp_path: Path) -> None:
    files = HeldFiles(*ALL)
    with pushed_out(model, tmp_path / "nvme", files, NUM_TOKENS - 20) as (cache, engine, before):
        before.close()
        files.hold()
        began = time.monotonic()
        with engine.request(random_ids(NUM_TOKENS)) as request:
            assert request.generate(NEW).tokens == plain.tokens
        assert time.monotonic() - began < LOAD_S + SLACK_S
        assert files.num_waiting > 0, "nothing was asked of the disk"
        files.let_go()
        # What the disk has stayed in the cache: it is found again.
        assert cache.match(engine.namespace, random_ids(NUM_TOKENS)[0]).num_tokens >= NUM_TOKENS - 2 * PAGE_SIZE


@pytest.mark.faults
def test_rows_of_a_batch_go_on_without_the_disk(model: Any, plain: Plain, tmp_path: Path) -> None:
    files = HeldFiles(*ALL)
    short = random_ids(40, seed=9)
    plain_short = plain_generate(model, short, NEW)
    with pushed_out(model, tmp_path / "nvme", files, NUM_TOKENS - 20) as (_, engine, before):
        before.close()
        files.hold()
        began = time.monotonic()
        with engine.batch([random_ids(NUM_TOKENS)[0], short[0]]) as batch:
            rows = batch.generate(NEW)
        assert [row.tokens for row in rows] == [plain.tokens, plain_short.tokens]
        assert time.monotonic() - began < LOAD_S + SLACK_S
