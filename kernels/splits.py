"""How a context is split over programs that run side by side, and where their states are kept until they are merged."""

from typing import Final, NamedTuple

import torch

from hicache.kernels import launch
from hicache.kernels.checks import check_tensor
from hicache.kernels.errors import BadArgument
from hicache.kernels.launch import ceil_div
from hicache.kernels.merge import merge_states
from hicache.kernels.scoring import Scoring
from hicache.kernels.state import AttentionState, allocate_state

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


class Reduction(NamedTuple):
    """The states of splits, which a kernel writes, and what they are merged to."""

    parts: AttentionState
    """Output [num_splits, T, HQ, D] and LSE [num_splits, T, HQ], float32; or the result itself, as the only part."""
    initial: AttentionState | None
    """A state that is merged in."""
    result: AttentionState
    """Output [T, HQ, D] and LSE [T, HQ]."""
    is_direct: bool
    """Whether the only part is the result, and nothing is left to merge."""

    def finish(self) -> AttentionState:
        """Merge, once the kernel is launched; returns the result."""
        if self.is_direct:
            return self.result
        return merge_states(
            self.parts.output, self.parts.lse, initial=self.initial, output=self.result.output, lse=self.result.lse
        )


def allocate_reduction(
    num_splits: int,
    query: torch.Tensor,
    head_dim: int,
    *,
    initial: AttentionState | None,
    output: torch.Tensor | None,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> Reduction:
    """Room for `num_splits` states over `query` [T, HQ, *], with values of `head_dim`, and for the result: in the
    caller's `output`, `lse` and `workspace`, checked, or new."""
    shape, device = (query.shape[0], query.shape[1]), query.device
    result = allocate_state(shape, head_dim, dtype=query.dtype, device=device, output=output, lse=lse)
    if num_splits == 1 and initial is None:
        return Reduction(AttentionState(result.output[None], result.lse[None]), None, result, is_direct=True)
    needed = workspace_elements(*shape, head_dim, num_splits)
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=device)
    else:
        check_tensor("workspace", workspace, (None,), dtype=torch.float32, device=device)
        if workspace.shape[0] < needed:
            raise BadArgument("workspace", f"has {workspace.shape[0]} elements, expected at least {needed}")
    num_rows = num_splits * shape[0] * shape[1]
    parts = AttentionState(
        workspace[: num_rows * head_dim].view(num_splits, *shape, head_dim),
        workspace[num_rows * head_dim : needed].view(num_splits, *shape),
    )
    return Reduction(parts, initial, result, is_direct=False)
