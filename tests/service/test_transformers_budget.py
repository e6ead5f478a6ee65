"""What `model.generate` takes on the device for a context of four times the budget, looked at in every layer."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from hicache.kernels import attend_torch
from hicache.service import compose
from hicache.service.engines.transformers import TransformersEngine, layout_of
from hicache.tier import NVME
from hicache.tiers.context import STAGING_BYTES, Staging
from tests.service.test_transformers_layers import after_each_layer
from tests.service.tiny_llama import PAGE_SIZE, open_cache, plain_generate, random_ids, tiny_model

NUM_TOKENS: Final = 2000
NEW: Final = 6
CHUNK: Final = 4 * PAGE_SIZE


@pytest.mark.slow
def test_a_context_of_four_budgets_stays_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget holds the device tier, the buffers through which pages stream from NVMe, and the memory that attention
    keeps: on the CPU all of them are memory of the device."""
    # What attention keeps belongs to a thread: in a new one nothing is there yet that other tests needed.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(generate_within_the_budget, tmp_path, monkeypatch).result()


def generate_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Many heads of keys and values over few hidden ones: pages of a real model's size, and little to compute.
    model = tiny_model(num_heads=96, num_kv_heads=96, head_dim=64, hidden_size=96)
    layout = layout_of(model, page_size=PAGE_SIZE)
    budget = NUM_TOKENS // PAGE_SIZE * layout.page_bytes // 4
    ids = random_ids(NUM_TOKENS)
    plain = plain_generate(model, ids, NEW)
    stagings: weakref.WeakSet[Staging] = weakref.WeakSet()

    class CountedStaging(Staging):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            stagings.add(self)

    monkeypatch.setattr(compose, "Staging", CountedStaging)
    device_pages = (budget - 2 * STAGING_BYTES - attend_torch.SCRATCH_BYTES) // layout.page_bytes
    with (
        open_cache(
            layout, device_pages=device_pages, host_pages=NUM_TOKENS // PAGE_SIZE // 3, nvme_dir=tmp_path / "nvme",
            nvme_bytes=512 << 20,
        ) as cache,
        TransformersEngine(model, cache) as engine,
    ):  # fmt: skip
        taken: list[int] = []
        streams: list[bool] = []

        def look(layer: int) -> None:
            staging = sum(len(buffer) for each in stagings for buffer in each.buffers)
            device = cache.stats()["tiers"]["device"]
            taken.append(device["used_bytes"] + staging + attend_torch.scratch_bytes())
            streams.append(bool(staging))

        for is_found in (False, True):
            taken.clear()
            streams.clear()
            with engine.request(ids) as request, after_each_layer(model, look):
                assert (request.cached >= NUM_TOKENS - PAGE_SIZE) is is_found
                output = model.generate(
                    ids, cache=request.cache, max_new_tokens=NEW, do_sample=False, prefill_chunk_size=CHUNK
                )
                assert tuple(output[0, NUM_TOKENS:].tolist()) == plain.tokens
                assert cache.match(engine.namespace, ids[0]).by_tier[NVME] > NUM_TOKENS // 4
            num_passes = (1 if is_found else -(-NUM_TOKENS // CHUNK)) + NEW - 1
            assert len(taken) == num_passes * layout.num_layers
            assert any(streams), "nothing streamed: its buffers were no part of it"
            assert max(taken) <= budget
            assert max(taken) > budget // 2, "less than it was given: the measure misses something"
