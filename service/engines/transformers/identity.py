"""What a transformers model's KV is: its layout, the namespace it belongs to, and whether hicache can serve it at all.

A page depends on everything that shaped its keys and values. So the model's part of the namespace is a digest of the
weights themselves, of the configuration and of what computes with them, never of a name; models whose KV is not a
function of the tokens before it (positions that depend on the length, pictures behind placeholder tokens) are refused.
"""

import hashlib
import json
import os
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hicache.errors import BadRequest
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace, PositionScheme

ROPE_TYPES: Final = frozenset({"default", "linear", "yarn", "llama3"})
"""Rope rules whose rotation of a token depends on its position alone. "dynamic" and "longrope" are not here: they
rotate by the length of the whole input, so a page would be right for one length only."""

_OTHER_ATTENTION: Final = ("attention_chunk_size", "kv_sharing_modes", "num_kv_shared_layers")
_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})
_NOT_IDENTITY: Final = frozenset({
    "transformers_version", "architectures", "dtype", "return_dict", "use_cache", "output_attentions",
    "output_hidden_states", "id2label", "label2id", "problem_type", "pad_token_id", "bos_token_id", "eos_token_id",
})  # fmt: skip
"""Configuration that says what a call returns or how the model was saved, not what it computes; so do names that begin
with an underscore, like the path it was loaded from. The dtype is hashed with every tensor."""

_Fingerprint = tuple[tuple[int, int], ...]
_digests: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[_Fingerprint, str]]" = weakref.WeakKeyDictionary()


def layout_of(model: PreTrainedModel, *, page_size: int = 16) -> KVLayout:
    """The layout of the KV that `model` computes, in the model's own dtype, cut into pages of `page_size` tokens.

    Raises `BadRequest` naming `model` when hicache cannot serve it (see `check_supported`), or for a bad page size.
    """
    check_supported(model)
    config = _text_config(model)
    num_heads = config.num_attention_heads
    return KVLayout.uniform(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        dtype=KVDtype(str(model.dtype).removeprefix("torch.")),
        page_size=page_size,
    )


def namespace_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    page_size: int = 16,
    tenant: str = "",
    salt: bytes = b"",
) -> Namespace:
    """The namespace of `model`'s pages: SHA-256 over weights and configuration, layout, rope, tokenizer.

    Hashes every weight the first time (about half a second a GB); remembered for as long as the weights stay.
    Raises `BadRequest` as `layout_of` does.
    """
    layout = layout_of(model, page_size=page_size)
    return Namespace(
        model=weights_digest(model),
        layout=layout,
        tenant=tenant,
        tokenizer="" if tokenizer is None else _tokenizer_digest(tokenizer),
        positions=_positions(model),
        salt=salt,
    )


def weights_digest(model: PreTrainedModel) -> str:
    """`"sha256:"` and the digest of all weights, names, dtypes and the configuration of `model`, and of what computes
    with them: the release of transformers, the kind of device and its instructions.

    Remembered per model while `weights_fingerprint` stays what it was.
    """
    fingerprint = weights_fingerprint(model)
    remembered = _digests.get(model)
    if remembered is not None and remembered[0] == fingerprint:
        return remembered[1]
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in _NOT_IDENTITY and not name.startswith("_")
    }
    tensors = sorted(model.state_dict(keep_vars=False).items())
    # hashlib releases the interpreter lock, and no tensor waits for another one.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(_tensor_digest, (tensor for _, tensor in tensors)))
    record = hashlib.sha256(b"hicache-transformers\x02")
    computing = f"transformers {transformers.__version__} on {_instructions(model.device)}".encode()
    settings = json.dumps(config, sort_keys=True, default=str).encode()
    for part in (computing, settings, *_named(tensors, digests)):
        record.update(len(part).to_bytes(8, "little") + part)
    digest = f"sha256:{record.hexdigest()}"
    _digests[model] = (fingerprint, digest)
    return digest


def weights_fingerprint(model: PreTrainedModel) -> _Fingerprint:
    """Address and version of every weight: differs after any change that torch sees.

    Writing through `.data`, from outside torch, or to weights made in inference mode is not seen.
    """
    return tuple((tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in _weights(model))


def windows_of(model: PreTrainedModel) -> tuple[int | None, ...]:
    """For each layer how many tokens a query sees, its own included; None for all before it. Pages have all tokens of
    all layers, whatever a layer sees."""
    config = _text_config(model)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def check_supported(model: PreTrainedModel) -> None:
    """Refuse a model that hicache would serve wrongly, with a `BadRequest` for `model` that says why."""
    config = model.config
    text = _text_config(model)
    if config.is_encoder_decoder or not model.can_generate():
        raise BadRequest("model", "is not a decoder-only language model")
    if text is not config:
        raise BadRequest("model", "takes more than text: placeholder tokens do not say which KV stands behind them")
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", False):
        raise BadRequest("model", "does not attend causally")
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise BadRequest("model", "has adapters; merge them into the weights first")
    if getattr(text, "_heterogeneity_spec", None) is not None:
        raise BadRequest("model", "is configured layer by layer, which is not supported")
    others = set(getattr(text, "layer_types", None) or _LAYERS) - _LAYERS
    if others:
        raise BadRequest("model", f"has layers of {', '.join(sorted(others))}; full and sliding attention only")
    for name in _OTHER_ATTENTION:
        if getattr(text, name, None):
            raise BadRequest("model", f"attends with {name}={getattr(text, name)!r}, which is not supported")
    if getattr(text, "kv_lora_rank", None) is not None:
        raise BadRequest("model", "stores latent KV (MLA); keys and values only")
    _positions(model)
    if str(model.dtype).removeprefix("torch.") not in {dtype.value for dtype in KVDtype}:
        raise BadRequest("model", f"has dtype {model.dtype}, which no layout has")
    if len(devices := {str(tensor.device) for tensor in _weights(model)}) > 1 or "meta" in devices:
        raise BadRequest("model", f"has weights on {', '.join(sorted(devices))}; all on one device only")
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise BadRequest("model", "is compiled: its passes cannot be followed; use it uncompiled")


def _positions(model: PreTrainedModel) -> PositionScheme:
    rope = getattr(_text_config(model), "rope_parameters", None)
    if not isinstance(rope, dict):
        raise BadRequest("model", "has no rope parameters; other position schemes are not supported")
    # One set for all layers, or one for each kind of layer.
    by_kind = {kind: each for kind, each in rope.items() if kind in _LAYERS}
    for each in by_kind.values() if by_kind else (rope,):
        if not isinstance(each, dict) or "rope_theta" not in each:
            raise BadRequest("model", "has rope parameters without a theta; other position schemes are not supported")
        if each.get("rope_type", "default") not in ROPE_TYPES:
            supported = ", ".join(sorted(ROPE_TYPES))
            raise BadRequest("model", f"rotates by rope type {each['rope_type']!r}; supported are {supported}")
    if by_kind:
        full = by_kind.get("full_attention") or next(iter(by_kind.values()))
        return PositionScheme(base=float(full["rope_theta"]), scaling=json.dumps(by_kind, sort_keys=True))
    rest = {name: value for name, value in rope.items() if name not in ("rope_theta", "rope_type", "type")}
    rope_type = rope.get("rope_type", "default")
    plain = rope_type == "default" and not rest
    scaling = "" if plain else json.dumps({"rope_type": rope_type, **rest}, sort_keys=True)
    return PositionScheme(base=float(rope["rope_theta"]), scaling=scaling)


def _text_config(model: PreTrainedModel) -> Any:
    # Any: every model has a configuration class of its own, and the fields read here are each checked where used.
    return model.config.get_text_config(decoder=True)


def _weights(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _instructions(device: torch.device) -> str:
    """The kind of device and of its instructions, by which results differ in their last bits."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_capability(device)}"
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).digest() if flat.numel() else b""


def _named(tensors: Iterable[tuple[str, torch.Tensor]], digests: Iterable[bytes]) -> Iterator[bytes]:
    for (name, tensor), digest in zip(tensors, digests, strict=True):
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield digest


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
