"""Which chunks of vLLM's primary tier may be an engine's, and how many bytes they have.

vLLM tells its tiers little of its configuration, and keys say no weights. The rest has to come from
`HicacheOffloadingConnector`, which knows all of it, or from whoever names the weights. Configurations are duck-typed,
so that this is tested where there is no vLLM.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from hicache.errors import BadRequest
from hicache.namespace import Namespace
from hicache.service.engines.objects import MIN_PAGE_SIZE, opaque_layout
from hicache.service.engines.vllm.identity import counts_pictures, engine_record, model_digest

MAX_PAGE_SIZE: Final = 256
"""Most tokens of a page of the sidecar; a chunk may have more."""
HASHES: Final = ("sha256", "sha256_cbor")
"""Digests that tell prompts apart, and are the same in every process."""


def chunk_bytes(spec: Any) -> int:
    """Bytes of a chunk: the blocks of all ranks, without what fills the row up. `spec`: vLLM's offloading spec."""
    num_copies = 1 if spec.replicated_layout else spec.config.parallel.world_size
    return int(spec.cpu_page_size_per_worker) * num_copies


def namespace_of(spec: Any, *, identity: str, weights: str, machine: Mapping[str, str], version: str) -> Namespace:
    """Where an engine's chunks are kept. Raises `BadRequest` where nobody has said whose they are, or they have no
    bytes."""
    if not identity and not weights:
        raise BadRequest(
            "weights",
            "vLLM does not tell a tier of its OffloadingConnector which weights and configuration the engine has: use "
            "HicacheOffloadingConnector in its place, or name all of it with the setting `weights`",
        )
    config, num_bytes = spec.config, chunk_bytes(spec)
    if num_bytes <= 0:
        raise BadRequest("cpu_bytes_to_use", "vLLM's primary tier has no chunks")
    parallel = config.parallel
    record = {
        "engine": "vllm chunks",
        "version": version,
        "machine": dict(machine),
        "dtype": config.model.dtype,
        "layout": str(config.kv_cache_layout),
        "canonical": bool(config.canonical_layout),
        "groups": [[list(each.layer_names), each.tokens_per_block, each.group_id] for each in config.groups],
        "chunk": [num_bytes, spec.blocks_per_chunk, spec.tokens_per_hash],
        "ranks": [getattr(parallel, name) for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")],
    }
    named = identity or json.dumps({"named": weights})
    num_tokens = spec.blocks_per_chunk * max(each.tokens_per_block for each in config.groups)
    return Namespace(
        model=f"sha256:{hashlib.sha256(b'hicache-vllm-chunks' + named.encode()).hexdigest()}",
        layout=opaque_layout(num_bytes, min(max(num_tokens, MIN_PAGE_SIZE), MAX_PAGE_SIZE)),
        salt=hashlib.sha256(json.dumps(record, sort_keys=True).encode()).digest(),
    )


def identity_of(vllm_config: Any, machine: Mapping[str, str], version: str, weights: str) -> str:
    """What the weights and all of an engine's configuration come to, as far as keys do not have it. `weights`: their
    name; empty for the digest of their files. Raises `BadRequest` for what keys have no safe name for."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in HASHES:
        raise BadRequest("prefix_caching_hash_algo", f"{algorithm} is not one of {', '.join(HASHES)}")
    if getattr(vllm_config, "lora_config", None) is not None:
        raise BadRequest("enable_lora", "keys have an adapter's name alone, which may carry other weights tomorrow")
    if counts_pictures(vllm_config):
        raise BadRequest("mm_processor_cache_gb", "0 without prefix caching leaves keys a picture's number alone")
    record = engine_record(vllm_config, machine, version)
    model = model_digest(vllm_config, weights)
    return hashlib.sha256(json.dumps([model, record], sort_keys=True).encode()).hexdigest()
