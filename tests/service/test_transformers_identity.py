"""What a model's pages are stored under: everything that shaped them, and nothing else."""

import dataclasses
from typing import Any

import pytest
import torch

from hicache.errors import BadRequest
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import KeyEncoding
from hicache.service.engines.transformers import layout_of, namespace_of
from hicache.service.engines.transformers.identity import weights_digest
from tests.service.tiny_llama import tiny_model, tiny_tokenizer


def test_the_layout_is_the_models() -> None:
    model = tiny_model(num_heads=6, num_kv_heads=2)
    assert layout_of(model, page_size=32) == KVLayout.uniform(
        num_layers=3, num_kv_heads=2, head_dim=16, dtype=KVDtype.FLOAT32, page_size=32
    )
    assert layout_of(model.to(torch.bfloat16)).dtype is KVDtype.BFLOAT16


def test_equal_models_have_equal_namespaces() -> None:
    one, other = namespace_of(tiny_model()), namespace_of(tiny_model())
    assert one == other
    assert one.digest == other.digest
    assert one.model.startswith("sha256:")


def test_where_a_model_came_from_does_not_count(tmp_path: Any) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, local_files_only=True)
    assert loaded.config._name_or_path != model.config._name_or_path
    assert namespace_of(loaded) == namespace_of(model)


def test_every_weight_counts() -> None:
    model = tiny_model()
    seen = {weights_digest(model)}
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.view(-1)[-1] += 1e-3
        seen.add(weights_digest(model))
    assert len(seen) == 1 + len(list(model.parameters()))


@pytest.mark.parametrize(
    "config",
    [
        {"rms_norm_eps": 1e-5},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
    ],
    ids=["epsilon", "activation", "theta", "scaling"],
)
def test_configuration_counts_with_equal_weights(config: dict[str, Any]) -> None:
    plain, other = tiny_model(), tiny_model(**config)
    other.load_state_dict(plain.state_dict())
    assert namespace_of(plain).digest != namespace_of(other).digest


def test_positions_are_the_models() -> None:
    rope = {"rope_type": "linear", "rope_theta": 20_000.0, "factor": 2.0}
    positions = namespace_of(tiny_model(rope_parameters=rope)).positions
    assert (positions.kind, positions.base, positions.keys) == ("rope", 20_000.0, KeyEncoding.ROTATED)
    assert positions.scaling == '{"factor": 2.0, "rope_type": "linear"}'
    assert namespace_of(tiny_model()).positions.scaling == ""


def test_positions_may_differ_by_the_kind_of_layer() -> None:
    model = tiny_model("Gemma3", head_dim=16, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    positions = namespace_of(model).positions
    assert positions.base == 1_000_000.0
    assert positions.scaling == (
        '{"full_attention": {"rope_theta": 1000000.0, "rope_type": "default"}, '
        '"sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}'
    )


def test_dtype_page_size_tenant_and_salt_count() -> None:
    model = tiny_model()
    namespaces = [
        namespace_of(model),
        namespace_of(model, page_size=32),
        namespace_of(model, tenant="a"),
        namespace_of(model, salt=b"a"),
        namespace_of(tiny_model().to(torch.float16)),
    ]
    assert len({namespace.digest for namespace in namespaces}) == len(namespaces)


def test_the_tokenizer_counts() -> None:
    model = tiny_model()
    tokenizers = [tiny_tokenizer({"a": 0, "b": number}) for number in (1, 2, 1)]
    without, one, other, same = (namespace_of(model, tokenizer) for tokenizer in (None, *tokenizers))
    assert len({without.digest, one.digest, other.digest}) == 3
    assert one == same
    assert dataclasses.replace(one, tokenizer="") == without


@pytest.mark.parametrize(
    ("kind", "config", "problem"),
    [
        ("Llama", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ("Gemma3", {"head_dim": 16, "use_bidirectional_attention": True}, "causally"),
        (
            "Gemma3",
            {"head_dim": 16, "rope_parameters": {
                "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }},
            "'dynamic'",
        ),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ("GPTNeo", {}, "rope"),
        ("DeepseekV3", {"first_k_dense_replace": 3}, "latent"),
    ],
    ids=["chunked", "both_ways", "dynamic_rope_of_some", "dynamic_rope", "no_rope", "mla"],
)
def test_models_that_would_be_served_wrongly_are_refused(kind: str, config: dict[str, Any], problem: str) -> None:
    if kind == "GPTNeo":
        config = {"num_layers": 3, "num_heads": 6, "attention_types": [[["global"], 3]]}
    model = tiny_model(kind, **config)
    with pytest.raises(BadRequest, match=problem) as refusal:
        layout_of(model)
    assert refusal.value.field == "model"
    with pytest.raises(BadRequest, match=problem):
        namespace_of(model)


def test_more_models_that_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(BadRequest, match="decoder-only"):
        layout_of(model.model)
    model.peft_config = {}
    with pytest.raises(BadRequest, match="adapters"):
        layout_of(model)
    with pytest.raises(BadRequest, match="meta"):
        layout_of(tiny_model().to("meta"))
    model = tiny_model()
    model.compile(backend="eager")
    with pytest.raises(BadRequest, match="compiled"):
        layout_of(model)
    with pytest.raises(BadRequest, match="float64"):
        layout_of(tiny_model().to(torch.float64))
