"""What the machine decides about the bytes of a block of vLLM. Imports vLLM."""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.selector import get_attn_backend

from hicache.errors import BadRequest


def machine_of(dtype: Any, block_size: int, head_dim: int) -> dict[str, str]:
    """Device, and the instruction set or compute capability that vLLM has chosen the order of bytes for. `dtype`: of
    the cache, torch's."""
    found = {"device": str(current_platform.device_type)}
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        found["isa"] = _get_attn_isa(dtype, block_size, head_dim)
    else:
        found["capability"] = str(current_platform.get_device_capability())
    return found


def kind_of_machine() -> dict[str, str]:
    """The same where nobody says what the blocks are: all that the choice may depend on."""
    found = {"device": str(current_platform.device_type)}
    if current_platform.is_cpu():
        found["capability"] = str(torch.backends.cpu.get_cpu_capability())
    else:
        found["capability"] = str(current_platform.get_device_capability())
    return found


def backends_of(vllm_config: Any, layer_names: Iterable[str]) -> tuple[str, ...]:
    """The attention backend of each layer of this worker. Raises `BadRequest` for a layer that has none."""
    layers = vllm_config.compilation_config.static_forward_context
    try:
        return tuple(str(layers[name].get_attn_backend().get_name()) for name in layer_names)
    except (KeyError, AttributeError) as error:
        raise BadRequest("attention_backend", f"a layer does not say which one it has: {error!r}") from error


def chosen_backends(vllm_config: Any) -> list[str]:
    """The attention backends that vLLM chooses for layers of this engine without and with a window, where its workers
    cannot be asked. Raises `BadRequest` where it cannot be told."""
    model, found = vllm_config.model_config, []
    try:
        with set_current_vllm_config(vllm_config):
            for has_window in (False, True):
                backend = get_attn_backend(
                    model.get_head_size(), model.dtype, vllm_config.cache_config.cache_dtype, use_mla=model.use_mla,
                    has_sliding_window=has_window,
                )  # fmt: skip
                found.append(str(backend.get_name()))
    except (AssertionError, AttributeError, ImportError, NotImplementedError, ValueError) as error:
        raise BadRequest("attention_backend", f"it cannot be told which one vLLM chooses: {error!r}") from error
    return found
