"""Layers that see a window, and scores that are capped: the same tokens as plain transformers, wherever pages are."""

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from hicache.errors import BadRequest
from hicache.service.engines.transformers import TransformersEngine, layout_of
from hicache.service.engines.transformers.identity import windows_of
from hicache.tier import DEVICE, HOST, NVME
from tests.service.tiny_llama import (
    PAGE_SIZE,
    assert_same,
    counting,
    kept,
    open_cache,
    plain_generate,
    random_ids,
    tiny_model,
)

WINDOW: Final = 37
"""No multiple of the page size, and smaller than any prompt here."""
NEW: Final = 4
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mixtral": ("Mixtral", {"sliding_window": WINDOW, "num_local_experts": 2}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}),
    "gemma2_capped": ("Gemma2", {"head_dim": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16,
                          "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
}  # fmt: skip
"""Kind and configuration of models with windows."""


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    kind, config = MODELS[request.param]
    return tiny_model(kind, **config)


def test_the_configuration_says_which_layers_have_a_window(model: Any) -> None:
    windows = windows_of(model)
    assert len(windows) == 3
    assert WINDOW in windows
    assert set(windows) <= {WINDOW, None}


@pytest.mark.parametrize("chunk_size", [1000, 33])
def test_generates_what_plain_transformers_generates(model: Any, chunk_size: int) -> None:
    ids = random_ids(150)
    plain = plain_generate(model, ids, NEW)
    with (
        open_cache(layout_of(model, page_size=PAGE_SIZE)) as cache,
        TransformersEngine(model, cache) as engine,
        counting(model) as counter,
    ):
        for cached in (0, kept(150 + NEW - 1, 150)):
            with engine.request(ids) as request:
                assert request.cached == cached
                generation = request.generate(NEW, chunk_size=chunk_size, output_logits=True)
            assert_same(generation.tokens, generation.logits, plain)
            assert counter.take() == 150 - cached + NEW - 1


def test_pages_on_all_tiers_are_seen_where_they_are(tmp_path: Path) -> None:
    """A context on device, host and NVMe in turns: each part says where in the sequence it is."""
    kind, config = MODELS["gemma3"]
    model = tiny_model(kind, **config)
    ids = random_ids(600)
    plain = plain_generate(model, ids, NEW)
    layout = layout_of(model, page_size=PAGE_SIZE)
    with (
        open_cache(
            layout, device_pages=6, host_pages=10, nvme_dir=tmp_path / "nvme", nvme_bytes=64 << 20
        ) as cache,
        TransformersEngine(model, cache) as engine,
    ):
        for number in range(2):
            with engine.request(ids) as request:
                generation = request.generate(NEW, output_logits=True)
                if number:
                    assert {DEVICE, HOST, NVME} & set(request.cached_by_tier) >= {HOST, NVME}
            assert_same(generation.tokens, generation.logits, plain)


@pytest.mark.parametrize("name", ["gemma2_capped", "gemma3", "mistral"])
def test_calls_without_a_request_are_as_before(name: str) -> None:
    kind, config = MODELS[name]
    model = tiny_model(kind, **config)
    ids = random_ids(100)
    padded = torch.cat([ids, random_ids(100, seed=2)])
    mask = torch.ones_like(padded)
    mask[1, :40] = 0
    plain = plain_generate(model, ids, NEW)
    with torch.no_grad():
        of_batch = model(padded, attention_mask=mask).logits
    with open_cache(layout_of(model, page_size=PAGE_SIZE)) as cache, TransformersEngine(model, cache):
        again = plain_generate(model, ids, NEW)
        with torch.no_grad():
            again_of_batch = model(padded, attention_mask=mask).logits
    assert_same(again.tokens, again.logits, plain)
    torch.testing.assert_close(again_of_batch[mask == 1], of_batch[mask == 1], rtol=0, atol=5e-5)


def test_a_model_whose_attention_is_not_as_it_says_is_refused() -> None:
    model = tiny_model("Mistral", sliding_window=WINDOW)
    with open_cache(layout_of(model, page_size=PAGE_SIZE)) as cache, TransformersEngine(model, cache) as engine:
        model.model.layers[1].self_attn.config = tiny_model("Mistral", sliding_window=WINDOW + 1).config
        model.model.layers[1].self_attn.config._attn_implementation = model.config._attn_implementation
        with engine.request(random_ids(100)) as request:
            with pytest.raises(BadRequest, match="layer 1 with window 38, not 37"):
                request.prefill()
            assert request.length == 0
