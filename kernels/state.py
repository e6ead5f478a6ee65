"""Attention states: what attention over part of the keys leaves, so that parts can be merged."""

from typing import NamedTuple

import torch

from hicache.kernels.checks import FLOAT_DTYPES, check_tensor


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
    dtype: torch.dtype = torch.float64,
) -> AttentionState:
    """The definition: softmax attention of every query over the keys it may see, computed in `dtype`.

    query [T, HQ, D]; key, value [L, H, D], head `h` shared by the query heads `h * HQ // H` and on; visible [T, L],
    bool. Returns output [T, HQ, D] and LSE [T, HQ], both in `dtype`.
    """
    group = query.shape[1] // key.shape[1]
    key = key.to(dtype).repeat_interleave(group, dim=1)
    value = value.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,lhd->thl", query.to(dtype), key) * scale
    scores = scores.masked_fill(~visible[:, None, :], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return AttentionState(torch.einsum("thl,lhd->thd", weights, value), lse)


def pages_reference(pages: torch.Tensor, page_ids: list[int], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [L, H, D] of those of the first `num_tokens` tokens whose page is here (a negative id is not).

    pages [num_slots, 2, page_size, H, D].
    """
    page_size = pages.shape[2]
    tokens = [
        (page, offset)
        for i, page in enumerate(page_ids)
        for offset in range(min(page_size, num_tokens - i * page_size))
        if page >= 0
    ]
    slots = torch.tensor([page for page, _ in tokens], dtype=torch.int64, device=pages.device)
    offsets = torch.tensor([offset for _, offset in tokens], dtype=torch.int64, device=pages.device)
    return pages[slots, 0, offsets], pages[slots, 1, offsets]


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
