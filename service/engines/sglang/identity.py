"""Which pages may be an engine's: the sidecar's layout, and the namespace of each pool.

A page of SGLang is opaque. What order its bytes have belongs to the release, the class and the layout of the host pool,
its dtype (for FP8 the pool has bytes, and the server's arguments say which ones), its geometry and its layers; whose
bytes they are, to the weights, the configuration of the model, the ranks and the pool's name. All of that is in the
namespace. Adapters and salts are in SGLang's keys.

Configurations and pools are duck-typed, so that this is tested where there is no SGLang.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hicache.errors import BadRequest
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.service.engines.generation import Generation
from hicache.service.engines.objects import MIN_PAGE_SIZE, opaque_layout
from hicache.service.engines.sglang.pools import Pool
from hicache.service.engines.weights import check_load_format, files_digest, model_directory

SUPPORTED: Final = ("0.5.23",)
"""Releases of SGLang that this backend was run with."""
SHARDED: Final = ("mamba",)
"""Pools of which every tensor-parallel rank has a part of its own, also where the others are the same on all ranks."""
ARGUMENTS: Final = (
    "dtype", "kv_cache_dtype", "quantization", "quantization_param_path", "json_model_override_args", "revision",
    "attention_backend", "prefill_attention_backend", "decode_attention_backend", "speculative_algorithm",
    "speculative_draft_model_path", "speculative_draft_model_revision",
)  # fmt: skip
"""The server's arguments that decide, beside the weights, what is written to its pools."""
_GEOMETRY: Final = (
    "layout", "size_per_token", "layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim",
    "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "head_group_num", "dcp_size", "storage_format_tag",
)  # fmt: skip


def check_version(version: str) -> None:
    """Refuse a release that was not tried. Raises `BadRequest`."""
    if version not in SUPPORTED:
        raise BadRequest("sglang", f"release {version} is not one of {', '.join(SUPPORTED)}")


def layout_of(pool: Pool) -> KVLayout:
    """The layout that the sidecar is given for the pool of keys and values: its own where it is one of keys and values
    of equal size, else bytes of as many as a page has. Raises `BadRequest`."""
    if pool.page_size < MIN_PAGE_SIZE:
        raise BadRequest("page_size", f"{pool.page_size} is below {MIN_PAGE_SIZE}: start SGLang with --page-size 64")
    host = pool.host_pool
    dtypes = {each.value: each for each in KVDtype}
    dtype = dtypes.get(str(host.dtype).removeprefix("torch.").replace("uint8", "int8"))
    shape = [getattr(host, name, 0) for name in ("layer_num", "head_num", "head_dim")]
    if dtype is not None and all(shape):
        layout = KVLayout.uniform(
            num_layers=shape[0], num_kv_heads=shape[1], head_dim=shape[2], dtype=dtype, page_size=pool.page_size
        )  # fmt: skip
        if layout.page_bytes == pool.page_bytes:
            return layout
    return opaque_layout(pool.page_bytes, pool.page_size)


def weights_of(arguments: Any, named: str) -> str:
    """What tells the engine's weights and the configuration of its model from others. `arguments`: SGLang's server
    arguments, None where there are none. `named`: the name that the settings give the weights; empty for the digest of
    their files. Raises `BadRequest` where there is neither."""
    if named:
        return json.dumps({"named": named})
    if arguments is None:
        raise BadRequest("weights", "SGLang has no server arguments here; name the weights with the setting `weights`")
    check_load_format(arguments)
    directory = model_directory(
        str(arguments.model_path), getattr(arguments, "revision", None), getattr(arguments, "download_dir", None)
    )
    config = Path(directory) / "config.json"
    return json.dumps({
        "files": files_digest(directory),
        "config": hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else "",
    })  # fmt: skip


class Identity:
    """The namespaces of one rank's pools."""

    def __init__(self, config: Any, arguments: Any, version: str, weights: str) -> None:
        """`config`: SGLang's `HiCacheStorageConfig`; `arguments`: its server arguments, or None; `weights`: what
        `weights_of` says."""
        self._config: Final = config
        self._engine: Final = {
            "engine": "sglang",
            "version": version,
            "arguments": {name: str(getattr(arguments, name, None)) for name in ARGUMENTS},
        }
        self._weights: Final = weights
        self._generation: Final = Generation()

    def forget(self) -> None:
        """Nothing of before may be used: other namespaces from now on. They are this process's own."""
        self._generation.forget()

    def of_pool(self, pool: Pool, layout: KVLayout, *, order: str) -> Namespace:
        """The namespace of a pool's pages. `order`: in which order a page's bytes are kept: "parts" as the pool gives
        their addresses, or "flat" as it makes one tensor of them."""
        host = pool.host_pool
        record = {
            **self._engine,
            "pool": pool.name,
            "order": order,
            "class": type(host).__qualname__,
            "dtype": str(getattr(host, "dtype", None)),
            "page_size": pool.page_size,
            "parts": pool.part_bytes,
            "geometry": {name: str(getattr(host, name, None)) for name in _GEOMETRY},
            "ranks": self._ranks(pool.name),
            "forgotten": self._generation.mark,
        }
        whole = hashlib.sha256(b"hicache-sglang\x01" + self._weights.encode())
        return Namespace(
            model=f"sha256:{whole.hexdigest()}",
            layout=layout,
            salt=hashlib.sha256(json.dumps(record, sort_keys=True).encode()).digest(),
        )

    def _ranks(self, name: str) -> Mapping[str, object]:
        """Which part of the model this rank has, of how many. Replicas (data parallel) share."""
        config = self._config
        is_replicated = config.is_mla_model and name not in SHARDED
        return {
            "tp": [0 if is_replicated else config.tp_rank, config.tp_size],
            "pp": [config.pp_rank, config.pp_size],
            "cp": [config.attn_cp_rank, config.attn_cp_size],
            "dcp": [getattr(config, "dcp_rank", 0), getattr(config, "dcp_size", 1)],
        }
