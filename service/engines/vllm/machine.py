"""What the machine decides about the bytes of a block of vLLM. Imports vLLM."""

from typing import Any

import torch
from vllm.platforms import current_platform


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
