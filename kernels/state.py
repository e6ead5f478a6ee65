"""Attention states: what attention over part of the keys leaves, so that parts can be merged."""

from typing import NamedTuple

import torch

from hicache.kernels.checks import FLOAT_DTYPES, check_tensor
from hicache.kernels.scoring import PLAIN, Scoring


class AttentionState(NamedTuple):
    """Attention of some queries over some keys. A query without a visible key has output 0 and LSE -inf."""

    output: torch.Tensor
    """[..., HQ, D], the values weighted by the softmax over these keys."""
    lse: torch.Tensor
    """[..., HQ], natural logarithm of the sum of the exponentials of the scaled scores; float32."""


def attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    *,
    scale: float,
    scoring: Scoring = PLAIN,
    dtype: torch.dtype = torch.float64,
) -> AttentionState:
    """The definition: softmax attention of every query over the keys it may see, computed in `dtype`.

    query [T, HQ, D]; key [L, H, D] and value [L, H, DV], head `h` shared by the query heads `h * HQ // H` and on;
    visible [T, L], bool: what a window hides is in there. Returns output [T, HQ, DV] and LSE [T, HQ], both in `dtype`.
    """
    group = query.shape[1] // key.shape[1]
    key = key.to(dtype).repeat_interleave(group, dim=1)
    value = value.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,lhd->thl", query.to(dtype), key) * scale
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
    scores = scores.masked_fill(~visible[:, None, :], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    if scoring.sinks is not None:
        lse = torch.logaddexp(lse, scoring.sinks.to(dtype))
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return AttentionState(torch.einsum("thl,lhd->thd", weights, value), lse)


def with_sinks(state: AttentionState, sinks: torch.Tensor | None) -> AttentionState:
    """The state once its softmax has the keys that `Scoring.sinks` stands for: float32 [HQ], or None for none."""
    if sinks is None:
        return state
    lse = torch.logaddexp(state.lse, sinks.to(state.lse.dtype))
    weight = torch.exp(state.lse - lse.masked_fill(lse == -torch.inf, 0.0))
    return AttentionState(state.output * weight[..., None].to(state.output.dtype), lse)


class StoredTokens(NamedTuple):
    """Keys and values that a table names, in order, without those whose page is elsewhere."""

    key: torch.Tensor
    """[L, H, D]; likewise `value`."""
    value: torch.Tensor
    positions: torch.Tensor
    """int64 [L], of each token in the sequence."""


def pages_reference(
    pages: torch.Tensor,
    page_ids: list[int],
    num_tokens: int,
    *,
    scales: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> StoredTokens:
    """Those of the first `num_tokens` tokens whose page is here (a negative id is not), in `dtype`.

    pages [num_slots, 2, page_size, H, D]; scales [num_slots, 2, H] multiply what is stored.
    """
    page_size = pages.shape[2]
    tokens = [
        (page, i * page_size + offset)
        for i, page in enumerate(page_ids)
        for offset in range(min(page_size, num_tokens - i * page_size))
        if page >= 0
    ]
    slots = torch.tensor([page for page, _ in tokens], dtype=torch.int64, device=pages.device)
    positions = torch.tensor([position for _, position in tokens], dtype=torch.int64, device=pages.device)
    planes = []
    for plane in (0, 1):
        stored = pages[slots, plane, positions % page_size].to(dtype)
        planes.append(stored if scales is None else stored * scales[slots, plane].to(dtype)[..., None])
    return StoredTokens(planes[0], planes[1], positions)


def allocate_state(
    shape: tuple[int, ...],
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    output: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> AttentionState:
    """The caller's `output` [*shape, head_dim] and `lse` [*shape], checked, or new ones; `dtype` is that of a new
    output.

    Given ones need a contiguous last dimension; `lse` is contiguous in its last dimension too.
    """
    if output is None:
        output = torch.empty((*shape, head_dim), dtype=dtype, device=device)
    else:
        check_tensor("output", output, (*shape, head_dim), dtype=FLOAT_DTYPES, device=device)
    if lse is None:
        lse = torch.empty(shape, dtype=torch.float32, device=device)
    else:
        check_tensor("lse", lse, shape, dtype=torch.float32, device=device)
    return AttentionState(output, lse)
