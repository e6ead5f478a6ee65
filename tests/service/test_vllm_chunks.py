"""Whose the chunks of vLLM's own offloading are, without vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest

from hicache.errors import BadRequest
from hicache.namespace import Namespace
from hicache.service.engines.vllm.chunks import chunk_bytes, identity_of, namespace_of
from tests.service.test_vllm import engine_config

PARALLEL = {"world_size": 2, "tp_size": 2, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}


def offloading(*, parallel: dict[str, int] | None = None, **change: Any) -> SimpleNamespace:
    """vLLM's offloading spec, as a tier sees it."""
    config = {
        "model": SimpleNamespace(name="m", dtype="bfloat16"), "kv_cache_layout": "LBHNC", "canonical_layout": False,
        "groups": (SimpleNamespace(layer_names=("a", "b"), tokens_per_block=16, group_id=0),),
        "parallel": SimpleNamespace(**{**PARALLEL, **(parallel or {})}),
    }  # fmt: skip
    values = {
        "cpu_page_size_per_worker": 4000, "replicated_layout": False, "blocks_per_chunk": 4, "tokens_per_hash": 16,
    }  # fmt: skip
    return SimpleNamespace(
        config=SimpleNamespace(**{key: change.pop(key, value) for key, value in config.items()}), **{**values, **change}
    )


def namespace(spec: SimpleNamespace, **change: Any) -> Namespace:
    told: dict[str, Any] = {"identity": "i", "weights": "", "machine": {"device": "cpu"}, "version": "0.32.0", **change}
    return namespace_of(spec, **told)


def test_a_chunk_is_the_blocks_of_all_ranks() -> None:
    assert chunk_bytes(offloading()) == 8000
    assert chunk_bytes(offloading(replicated_layout=True)) == 4000
    layout = namespace(offloading()).layout
    assert layout.page_size == 64
    assert 8000 <= layout.page_bytes < 8000 + 2 * 64
    assert namespace(offloading(blocks_per_chunk=64)).layout.page_size == 256, "the sidecar's most"


def test_whatever_changes_the_bytes_of_a_chunk_changes_whose_it_is() -> None:
    groups = (SimpleNamespace(layer_names=("a",), tokens_per_block=16, group_id=0),)
    found = [
        namespace(offloading()),
        namespace(offloading(), identity="other"),
        namespace(offloading(), identity="", weights="i"),
        namespace(offloading(), machine={"device": "cuda"}),
        namespace(offloading(), version="0.32.1"),
        namespace(offloading(kv_cache_layout="BLHNC")),
        namespace(offloading(canonical_layout=True)),
        namespace(offloading(groups=groups)),
        namespace(offloading(model=SimpleNamespace(name="m", dtype="float8"))),
        namespace(offloading(blocks_per_chunk=2)),
        namespace(offloading(replicated_layout=True)),
        namespace(offloading(parallel={"tp_size": 1, "pp_size": 2})),
    ]
    assert len({each.digest for each in found}) == len(found)
    assert namespace(offloading(model=SimpleNamespace(name="elsewhere", dtype="bfloat16"))) == found[0]


def test_chunks_of_nobody_are_refused() -> None:
    with pytest.raises(BadRequest, match="weights: vLLM does not tell a tier"):
        namespace(offloading(), identity="")
    with pytest.raises(BadRequest, match="cpu_bytes_to_use: vLLM's primary tier has no chunks"):
        namespace(offloading(cpu_page_size_per_worker=0))


def test_the_engine_behind_keys_is_known_or_refused() -> None:
    def identity(weights: str = "w", machine: str = "avx", algorithm: str = "sha256", **change: Any) -> str:
        config = engine_config(**change)
        config.cache_config.prefix_caching_hash_algo = algorithm
        return identity_of(config, {"isa": machine}, "0.32.0", weights)

    assert identity() == identity(algorithm="sha256_cbor"), "keys differ themselves"
    assert len({identity(), identity("other"), identity(machine="amx")}) == 3
    with pytest.raises(BadRequest, match="prefix_caching_hash_algo: xxhash is not one of sha256, sha256_cbor"):
        identity(algorithm="xxhash")
    config = engine_config()
    config.cache_config.prefix_caching_hash_algo = "sha256"
    config.lora_config = object()
    with pytest.raises(BadRequest, match="enable_lora: keys have an adapter's name alone"):
        identity_of(config, {}, "0.32.0", "w")
    with pytest.raises(BadRequest, match="mm_processor_cache_gb: 0 without prefix caching"):
        identity(model={"multimodal_config": SimpleNamespace(mm_processor_cache_gb=0)})
