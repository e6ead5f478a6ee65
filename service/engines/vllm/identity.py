"""Which pages may be an engine's: layout and namespace, from vLLM's configuration.

A block of vLLM is opaque: what order its bytes have belongs to the release, the attention backends, the instruction
set and the layout that it chose. All of that is part of the namespace (`format_of`; the backends as workers say them),
as are the weights, those of a model that drafts included, the effective configuration of the model (rope included, also
where it was overridden), the adapter, the parallel ranks, and what a request brings: its salt and the pictures behind
its placeholder tokens.

Configurations are duck-typed, so that this is tested where there is no vLLM.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from hicache.errors import BadRequest
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.service.engines.generation import Generation
from hicache.service.engines.vllm.adapters import PATIENCE_S, Adapters
from hicache.service.engines.weights import check_load_format, files_digest, model_directory

SUPPORTED: Final = ((0, 32),)
"""Releases of vLLM, as (major, minor), that this connector was run with."""
KINDS: Final = ("FullAttentionSpec", "SlidingWindowSpec")
"""KV that is served: keys and values of every token, all of them or the last ones."""
Backends = tuple[str, ...]
"""Names of the attention backends of a worker's layers, group by group; empty for a worker without a cache."""
_DTYPES: Final = {"float": "float32", "half": "float16"}
_CONTENT_DIGEST: Final = re.compile("(.*:)?([0-9a-f]{64}|[0-9a-f]{128})")
"""How vLLM calls a picture by what is in it. Names that a client gives it say nothing to others."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The KV cache groups of an engine that take part in a page, alike but for how many layers they have."""

    ids: tuple[int, ...]
    """Which of the engine's groups."""
    layer_names: tuple[tuple[str, ...], ...]
    """Layers of each."""
    block_size: int
    """Tokens of a block."""
    layer_bytes: int
    """Bytes of one layer of one block."""
    num_kv_heads: int
    head_dim: int
    dtype: str
    windows: tuple[int | None, ...]
    """The window of each group, in tokens; None for full attention."""

    @property
    def num_layers(self) -> int:
        """Layers of all groups."""
        return sum(len(names) for names in self.layer_names)

    @property
    def has_window(self) -> bool:
        """Whether blocks may be given back, and taken by others, while their request runs."""
        return any(window is not None for window in self.windows)

    @classmethod
    def of(cls, kv_cache_config: Any) -> "Groups":
        """Take the groups that are transferred. Raises `BadRequest` naming what cannot be mapped to pages."""
        found = [(i, each) for i, each in enumerate(kv_cache_config.kv_cache_groups) if each.enable_kv_transfer]
        if not found:
            raise BadRequest("kv_cache_groups", "none of them is transferred")
        specs = [each.kv_cache_spec for _, each in found]
        for spec in specs:
            if type(spec).__name__ not in KINDS:
                raise BadRequest("kv_cache_groups", f"{type(spec).__name__} is not one of {', '.join(KINDS)}")
            if spec.page_size_bytes != spec.unpadded_page_size_bytes:
                raise BadRequest("kv_cache_groups", "blocks with padding cannot be mapped to pages")
        shapes = {(s.block_size, s.page_size_bytes, s.num_kv_heads, s.head_size, s.head_size_v, s.dtype) for s in specs}
        if len(shapes) > 1:
            raise BadRequest("kv_cache_groups", "blocks of different sizes cannot be mapped to pages")
        spec = specs[0]
        if spec.head_size != spec.head_size_v:
            raise BadRequest("kv_cache_groups", "keys and values of different sizes cannot be mapped to pages")
        dtype = str(spec.dtype).removeprefix("torch.")
        return cls(
            ids=tuple(i for i, _ in found),
            layer_names=tuple(tuple(each.layer_names) for _, each in found),
            block_size=spec.block_size,
            layer_bytes=spec.page_size_bytes,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_size,
            dtype=_DTYPES.get(dtype, dtype),
            windows=tuple(getattr(each, "sliding_window", None) for each in specs),
        )

    def layout(self) -> KVLayout:
        """The layout that the sidecar must have. Raises `BadRequest`."""
        dtypes = {each.value: each for each in KVDtype}
        # Quantized blocks are bytes whose meaning is part of the format.
        dtype = dtypes.get("int8" if self.dtype == "uint8" else self.dtype)
        if dtype is None:
            raise BadRequest("cache_dtype", f"{self.dtype} is not one of {', '.join(sorted(dtypes))}")
        layout = KVLayout.uniform(
            num_layers=self.num_layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=dtype,
            page_size=self.block_size,
        )  # fmt: skip
        if layout.page_bytes != self.layer_bytes * self.num_layers:
            raise BadRequest(
                "kv_cache_groups", f"a block has {self.layer_bytes} bytes a layer, not those of its keys and values"
            )
        return layout


def check_version(version: str) -> None:
    """Refuse a release that was not tried. Raises `BadRequest`."""
    parts = version.split(".")
    try:
        release = (int(parts[0]), int(parts[1]))
    except (IndexError, ValueError):
        release = (0, 0)
    if release not in SUPPORTED:
        known = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise BadRequest("vllm", f"release {version} is not one of {known}")


def check_parallel(parallel: Any) -> None:
    """Refuse what splits a context or the layers over ranks. Raises `BadRequest`."""
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise BadRequest(name, f"{getattr(parallel, name)} ranks are not supported, only 1")


def engine_record(vllm_config: Any, platform: Mapping[str, str], version: str) -> dict[str, Any]:
    """What decides the order of bytes in all blocks of an engine, beside its attention backends. `platform`: what the
    machine adds to it."""
    return {
        "engine": "vllm",
        "version": version,
        "platform": dict(platform),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
    }


def format_of(
    vllm_config: Any, kv_cache_config: Any, groups: Groups, platform: Mapping[str, str], version: str
) -> bytes:
    """What decides the order of bytes in a block of the connector's, beside the attention backends, as a digest."""
    record = {
        **engine_record(vllm_config, platform, version),
        "layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "dtype": groups.dtype,
        "block_size": groups.block_size,
        "layer_bytes": groups.layer_bytes,
        "groups": [[list(names), window] for names, window in zip(groups.layer_names, groups.windows, strict=True)],
    }
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).digest()


def model_digest(vllm_config: Any, weights: str) -> str:
    """`"sha256:"` and the digest of the weights, the effective configuration of the model with its rope, quantization
    and dtype, and the same of a model that drafts, whose layers have KV, too. `weights`: the name that the settings
    give, empty to digest the files. Raises `BadRequest` where there is neither."""
    model = vllm_config.model_config
    parts = _parts_of(model, vllm_config.load_config, weights)
    # How pictures are cut up is not in the names that vLLM gives them.
    pictures = getattr(model, "multimodal_config", None)
    processing = [getattr(pictures, name, None) for name in ("mm_processor_kwargs", "media_io_kwargs")]
    prepared = json.dumps(processing, sort_keys=True, default=str)
    parts.append(prepared)
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    # Some ways to draft have no model, for which vLLM names the one that is drafted for.
    if speculative is not None and draft is not None and draft is not model:
        load_config = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
        parts += [str(speculative.method), *_parts_of(draft, load_config, weights)]
    whole = hashlib.sha256(b"hicache-vllm\x03")
    for part in parts:
        whole.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    return f"sha256:{whole.hexdigest()}"


def _parts_of(model: Any, load_config: Any, weights: str) -> list[str]:
    """What a model's KV depends on. `model`: vLLM's `ModelConfig`. `weights`: their name; empty for the digest of their
    files. Raises `BadRequest`."""
    if not weights:
        check_load_format(load_config)
        # vLLM has loaded them already.
        weights = files_digest(model_directory(str(model.model), model.revision, load_config.download_dir))
    config = json.dumps(model.hf_text_config.to_dict(), sort_keys=True, default=str)
    return [weights, config, str(getattr(model, "quantization", None)), str(model.dtype)]


def lora_of(request: Any) -> Any:
    """The adapter of a request, vLLM's `LoRARequest`; None for none."""
    return getattr(request, "lora_request", None)


def counts_pictures(vllm_config: Any) -> bool:
    """Whether an engine has mere numbers for pictures, as vLLM does without both its caches; in another process these
    are other pictures'."""
    pictures = getattr(vllm_config.model_config, "multimodal_config", None)
    has_cache = pictures is None or pictures.mm_processor_cache_gb or vllm_config.cache_config.enable_prefix_caching
    return not has_cache


class Identity:
    """The namespaces of an engine's requests. Belongs to its scheduling thread."""

    def __init__(self, base: Namespace, *, knows_pictures: bool = True) -> None:
        """`base`: all but the attention backends. `knows_pictures`: whether the engine calls pictures by what is in
        them."""
        self._base: Final = base
        self._whole: Namespace | None = None
        """With the backends; None while they are not known, or where a worker has no cache."""
        self._knows_pictures: Final = knows_pictures
        self.adapters: Final = Adapters(base.num_ranks)
        """What workers have said of theirs."""
        self._generation: Final = Generation()
        self.knows_backends = False
        self._waits_from: float | None = None
        """When they were first missed."""

    @classmethod
    def of(cls, vllm_config: Any, groups: Groups, format_id: bytes, weights: str) -> "Identity":
        """`weights`: the name of the weights that the settings give, empty to digest their files. Raises `BadRequest`
        where there is neither."""
        base = Namespace(
            model=model_digest(vllm_config, weights),
            layout=groups.layout(),
            num_ranks=vllm_config.parallel_config.tensor_parallel_size,
            salt=format_id,
        )
        return cls(base, knows_pictures=not counts_pictures(vllm_config))

    def take_backends(self, backends: Iterable[Backends]) -> None:
        """What workers have said of their layers, each for itself: only vLLM's workers know what it chose. Where one of
        them has no cache, nothing is cached."""
        found = sorted(set(backends))
        self.knows_backends = True
        self._whole = None
        if all(found):
            digest = hashlib.sha256(self._base.salt + json.dumps(found).encode()).digest()
            self._whole = replace(self._base, salt=digest)

    def is_settled(self, request: Any) -> bool:
        """Whether `of_request` has its last word on a request that begins now. It has not while workers have not said
        their backends, or whether they have its adapter, for `PATIENCE_S` at most: ask again at the next step."""
        if not self.knows_backends:
            now = time.monotonic()
            self._waits_from = now if self._waits_from is None else self._waits_from
            return now - self._waits_from >= PATIENCE_S
        lora = lora_of(request)
        return self._whole is None or lora is None or self.adapters.is_settled(lora)

    def forget(self) -> None:
        """The weights were changed in place, or somebody else says that nothing of before may be used: other
        namespaces from now on."""
        self._generation.forget()

    def of_request(self, request: Any) -> Namespace | None:
        """The namespace of one request; None for one whose KV tokens do not tell, or whose adapter workers do not have
        yet, which is not cached."""
        # A prompt that is still growing may yet be given pictures.
        if getattr(request, "prompt_embeds", None) is not None or getattr(request, "resumable", False):
            return None
        namespace = self._whole
        if namespace is None:
            return None
        lora = lora_of(request)
        if lora is not None:
            adapter = self.adapters.digest(lora)
            if not adapter:
                return None
            namespace = replace(namespace, adapter=adapter)
        extra: list[Any] = []
        if request.cache_salt:
            extra.append(["salt", request.cache_salt])
        if self._generation.mark:
            extra.append(["process", *self._generation.mark])
        for feature in getattr(request, "mm_features", None) or ():
            if not self._knows_pictures or not _CONTENT_DIGEST.fullmatch(feature.identifier):
                return None
            position = feature.mm_position
            extra.append(["mm", feature.identifier, position.offset, position.length])
        if not extra:
            return namespace
        digest = hashlib.sha256(namespace.salt + json.dumps(extra).encode()).digest()
        return replace(namespace, salt=namespace.salt + digest)
