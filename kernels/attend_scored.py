"""Attention over a piece of keys by plain torch, with all that `Scoring` may ask for: what torch's fused one lacks."""

from typing import Final

import torch

from hicache.kernels.scoring import Scoring
from hicache.kernels.state import AttentionState

_SCORES_BYTES: Final = 8 << 20
"""Scores that are held at once; at least those of one query."""


def scored(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    scoring: Scoring,
    visible: torch.Tensor | None,
) -> AttentionState:
    """The state of queries [H, G, T, D] over key [L, H, D] and value [L, H, DV], all of one floating dtype.

    visible: bool [T, L], None for all. `scoring` for its cap: the window is in `visible`, sinks are the caller's.
    Returns output [H, G, T, DV] and LSE [H, G, T], of that dtype; 0 and -inf for a query that sees nothing.
    """
    num_kv_heads, group, num_tokens, head_dim = query.shape
    num_keys = key.shape[0]
    keys, values = key.permute(1, 2, 0), value.transpose(0, 1)
    output = query.new_empty((num_kv_heads, group, num_tokens, value.shape[2]))
    lse = query.new_empty((num_kv_heads, group, num_tokens))
    row_bytes = num_kv_heads * group * num_keys * query.dtype.itemsize
    step = max(1, _SCORES_BYTES // row_bytes)
    for first in range(0, num_tokens, step):
        some = slice(first, first + step)
        rows = query[:, :, some].reshape(num_kv_heads, -1, head_dim)
        scores = torch.bmm(rows, keys).mul_(scale).view(num_kv_heads, group, -1, num_keys)
        if scoring.soft_cap is not None:
            scores.div_(scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
        if visible is not None:
            scores.masked_fill_(~visible[some], -torch.inf)
        lse[:, :, some] = torch.logsumexp(scores, dim=-1)
        # A query that sees nothing has exponents of -inf, not of -inf - (-inf).
        pivot = lse[:, :, some].masked_fill(lse[:, :, some] == -torch.inf, 0.0)
        weights = scores.sub_(pivot[..., None]).exp_().view(num_kv_heads, -1, num_keys)
        output[:, :, some] = torch.bmm(weights, values).view(num_kv_heads, group, -1, value.shape[2])
    return AttentionState(output, lse)
