"""How kernels are launched: in which form they are compiled, and whether this process interprets them.

Everything here is host code, and loads no Triton: a CPU that does not interpret kernels needs none. Device functions
that kernels share are in `hicache.kernels.language`.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Final

import torch

from hicache.kernels.errors import BadArgument

_log = logging.getLogger(__name__)

SHARED_BYTES_LEAST: Final = 99 << 10
"""Shared memory that a program may have on the GPUs that have the least of those that Triton compiles for."""
LOG2_E: Final = 1.4426950408889634
"""Kernels use `exp2`, the instruction the hardware has; scores are scaled by this once, with the softmax scale."""


class Path(Enum):
    """Which of the two implementations does the work."""

    TORCH = "torch"
    """Operators of torch, on the CPU."""
    TRITON = "triton"
    """The Triton kernels: on CUDA, or interpreted on the CPU."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled form of a kernel: what the wrapper launches and what the compile report compiles."""

    constants: dict[str, int]
    """Values of the kernel's constexpr parameters, except `EMULATE_BFLOAT16`."""
    num_warps: int
    num_stages: int


def options(variant: Variant) -> dict[str, int | bool]:
    """Compiler options of a variant. Fusing multiply and add is pinned: Triton's default for it is about to change."""
    return {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": True}


def on(device: torch.device) -> AbstractContextManager[object]:
    """A block in which `device` is the current one: Triton launches there, whatever device its arguments are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def require_launchable(argument: str, device: torch.device) -> None:
    """Refuse a device on which no Triton kernel runs in this process."""
    if device.type != "cuda" and not (device.type == "cpu" and _interprets()):
        raise BadArgument(
            argument, f"is on {device}; the Triton kernels need CUDA, or the CPU with TRITON_INTERPRET=1 set"
        )


def loadable(stored: torch.Tensor) -> torch.Tensor:
    """`stored` as kernels can load it on its device: float8_e4m3fn becomes bytes where the GPU cannot convert it, which
    kernels then do bit by bit."""
    if stored.dtype == torch.float8_e4m3fn and not converts_e4m3(stored.device):
        return stored.view(torch.uint8)
    return stored


@cache
def converts_e4m3(device: torch.device) -> bool:
    """Whether kernels can convert float8_e4m3fn on `device`. If not, says so, once."""
    if compute_capability(device) >= (8, 9):
        return True
    _log.warning("%s has no instructions for float8_e4m3fn (sm_89 and later do): kernels convert it bit by bit", device)
    return False


def compute_capability(device: torch.device) -> tuple[int, int]:
    """(9, 0) for sm_90; for the CPU more than any GPU has: the interpreter can do all that kernels ask for."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (99, 0)


def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have on `device`; on the CPU as much as on the largest GPU. What is not known
    is taken to have the least."""
    return shared_bytes_of(*compute_capability(device)) if device.type == "cuda" else shared_bytes_of(9, 0)


def shared_bytes_of(major: int, minor: int) -> int:
    """The same by compute capability: CUDA C++ programming guide, feature tables."""
    if major in (9, 10):
        return 227 << 10
    return 163 << 10 if (major, minor) in ((8, 0), (8, 7)) else SHARED_BYTES_LEAST


def score_scales(scale: float, soft_cap: float | None) -> tuple[float, float | None]:
    """`scale_in` and `cap_log2` of the kernels: what turns products into scores in units of `log2`; with a cap, what
    turns them into fractions of it, and the cap in those units."""
    return (scale * LOG2_E, None) if soft_cap is None else (scale / soft_cap, soft_cap * LOG2_E)


def choose_path(argument: str, device: torch.device, path: Path | None) -> Path:
    """The path to take for tensors on `device`: kernels on CUDA and torch on the CPU, unless the caller chose.

    Raises `BadArgument` where the caller's choice cannot work there.
    """
    if path is None:
        path = Path.TORCH if device.type == "cpu" else Path.TRITON
    if path is Path.TRITON:
        require_launchable(argument, device)
    elif device.type != "cpu":
        raise BadArgument(argument, f"is on {device}; the torch path works on the CPU")
    return path


def ceil_div(a: int, b: int) -> int:
    """`a / b`, rounded up, for positive `b`."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least `n`, for `n >= 1`."""
    return 1 << (n - 1).bit_length()


def _interprets() -> bool:
    from hicache.kernels import language  # Triton

    return language.INTERPRETED


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 for the CPU, where the interpreter runs programs one by one."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
