"""How a context is split over programs that run side by side, and where their states are kept until they are merged."""

from typing import Final

import torch

from hicache.kernels import launch
from hicache.kernels.errors import BadArgument
from hicache.kernels.launch import ceil_div
from hicache.kernels.scoring import Scoring

SPLIT_TOKENS_MIN: Final = 256
"""A split shorter than this many tokens costs more in merging than it gains."""
NUM_SPLITS_MAX: Final = 128
GRID_MAX: Final = 65535
"""Greatest second and third dimension of a CUDA grid."""


def choose_num_splits(num_programs: int, max_tokens: int, num_multiprocessors: int) -> int:
    """Splits that give the device about two programs a multiprocessor, none of them without some work to do.

    `num_programs` is how many there are without splitting, `max_tokens` the greatest length a sequence may have: the
    lengths themselves are on the device, and asking for them would make the host wait.
    """
    wanted = ceil_div(2 * num_multiprocessors, max(1, num_programs))
    return max(1, min(wanted, ceil_div(max_tokens, SPLIT_TOKENS_MIN), NUM_SPLITS_MAX))


def resolve_num_splits(
    argument: str, num_splits: int | None, num_programs: int, max_tokens: int, scoring: Scoring, device: torch.device
) -> int:
    """The caller's number of splits, checked, or the one chosen for at most `max_tokens`, of which a window hides the
    rest."""
    if num_splits is None:
        if scoring.window is not None:
            max_tokens = min(max_tokens, scoring.window + scoring.keep_first)
        return choose_num_splits(num_programs, max_tokens, launch.num_multiprocessors(device))
    if not 1 <= num_splits <= NUM_SPLITS_MAX:
        raise BadArgument(argument, f"is {num_splits}, expected 1 to {NUM_SPLITS_MAX}")
    return num_splits


def workspace_elements(num_tokens: int, num_heads: int, head_dim: int, num_splits: int = NUM_SPLITS_MAX) -> int:
    """float32 elements of a workspace for `num_splits` states over `num_tokens` queries: what `workspace` has to have
    at least. `head_dim` is that of values. By default enough whatever number of splits is chosen."""
    return num_splits * num_tokens * num_heads * (head_dim + 1)
