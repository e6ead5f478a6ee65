"""Page scores: how much a query could attend to a page at most, from a few numbers a page.

Two summaries of a page's keys, for each key/value head:

- **min/max** (Tang et al., "Quest"): the least and the greatest key in each element. `q·k <= Σ_d max(q_d lo_d, q_d
  hi_d)`. Four bytes an element in half precision: 1/8 of the keys for pages of 16 tokens.
- **centre and radius**: the mean key `c` and the greatest distance `r` of a key from it. `q·k <= q·c + |q| r`. Half the
  bytes, and tighter where a page's keys form a ball rather than a box.

Both are bounds of every key of the page, proved, not estimated: rounding on the way is added to them, from the sum of
the magnitudes of what was added up. The bound of a page without tokens is -inf.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from hicache.kernels import launch
from hicache.kernels.checks import FLOAT_DTYPES, check_group, check_page_ids, check_tensor
from hicache.kernels.errors import BadArgument
from hicache.kernels.launch import Path, Variant, ceil_div, next_power_of_2

_UP: Final = 1.0 + 2.0**-18
"""Radii and norms are multiplied by it: more than float32 sums of up to 1,024 squares, and a square root, are off."""


@dataclass(frozen=True)
class MinMax:
    """The box around the keys of each of `n` pages."""

    low: torch.Tensor
    """[n, H, D], the dtype of the pages: exact. +inf for a page without tokens."""
    high: torch.Tensor
    """[n, H, D]; -inf for a page without tokens."""


@dataclass(frozen=True)
class Ball:
    """A ball around the keys of each of `n` pages."""

    centre: torch.Tensor
    """[n, H, D], the dtype of the pages."""
    radius: torch.Tensor
    """float32 [n, H], of a ball around `centre` as it is stored; -inf for a page without tokens."""


def min_max_of(pages: torch.Tensor, page_ids: torch.Tensor, num_tokens: int) -> MinMax:
    """The boxes of pages [num_slots, 2, page_size, H, D], in order of `page_ids` int32 [n], which together hold
    `num_tokens` tokens: full but for the last. New tensors. Raises `BadArgument`."""
    keys, valid = _keys(pages, page_ids, num_tokens)
    return MinMax(torch.where(valid, keys, torch.inf).amin(dim=1), torch.where(valid, keys, -torch.inf).amax(dim=1))


def ball_of(pages: torch.Tensor, page_ids: torch.Tensor, num_tokens: int) -> Ball:
    """The balls of pages, with the arguments of `min_max_of`. New tensors. Raises `BadArgument`."""
    keys, valid = _keys(pages, page_ids, num_tokens)
    wide = keys.float().masked_fill(~valid, 0.0)
    centre = (wide.sum(dim=1) / valid.sum(dim=1).clamp_min(1)).to(pages.dtype)
    distance = (keys.float() - centre[:, None].float()).norm(dim=-1).masked_fill(~valid[..., 0], -torch.inf)
    return Ball(centre, distance.amax(dim=1) * _UP)


def page_scores(
    query: torch.Tensor, summary: MinMax | Ball, *, out: torch.Tensor | None = None, path: Path | None = None
) -> torch.Tensor:
    """Bounds of `q·k`, float32 [HQ, n]: no key of page `j` has a greater product with head `h` than `[h, j]`.

    query [HQ, D], one token, float16, bfloat16 or float32; `summary` of H heads that divide HQ, each shared by HQ / H
    query heads in order, on the query's device. Unscaled: multiply by a positive softmax scale yourself. Writes into
    `out` [HQ, n], contiguous, where given. On CUDA the work is queued on the current stream. Raises `BadArgument`.
    """
    first = summary.low if isinstance(summary, MinMax) else summary.centre
    check_tensor("query", query, (None, None), dtype=FLOAT_DTYPES)
    num_heads, head_dim = query.shape
    check_tensor("summary", first, (None, None, head_dim), dtype=FLOAT_DTYPES, device=query.device)
    check_group("summary", first.shape[1], query[None])
    if isinstance(summary, Ball):
        check_tensor("summary", summary.radius, tuple(first.shape[:2]), dtype=torch.float32, device=query.device)
    else:
        check_tensor("summary", summary.high, tuple(first.shape), dtype=first.dtype, device=query.device)
    if out is None:
        out = query.new_empty((num_heads, first.shape[0]), dtype=torch.float32)
    check_tensor("out", out, (num_heads, first.shape[0]), dtype=torch.float32, device=query.device)
    if not out.is_contiguous():
        raise BadArgument("out", "is not contiguous")
    if launch.choose_path("query", query.device, path) is Path.TRITON:
        _launch(query, summary, out)
    else:
        out.copy_(_scores_torch(query, summary))
    return out


def page_scores_reference(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What is bounded: the greatest `q·k` of each page, float64 [HQ, n]; query [HQ, D], keys [n, page_size, H, D]."""
    group = query.shape[0] // keys.shape[2]
    products = torch.einsum("hd,nthd->hnt", query.double(), keys.double().repeat_interleave(group, dim=2))
    return products.amax(dim=2)


def score_variant(head_dim: int, group: int) -> Variant:
    """The form in which the kernel is compiled: a program scores 16 pages for the query heads of one key/value head."""
    return Variant(
        {"D": head_dim, "G": group, "BN": 16, "BD": next_power_of_2(head_dim)}, num_warps=4, num_stages=2
    )


def _keys(pages: torch.Tensor, page_ids: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [n, page_size, H, D] of the pages, and which tokens exist, bool [n, page_size, 1, 1]."""
    check_tensor("pages", pages, (None, 2, None, None, None), dtype=FLOAT_DTYPES)
    check_tensor("page_ids", page_ids, (None,), dtype=torch.int32, device=pages.device)
    check_page_ids("page_ids", page_ids, pages.shape[0], negative=False)
    page_size, num_pages = pages.shape[2], page_ids.shape[0]
    if not 0 <= num_tokens <= num_pages * page_size:
        raise BadArgument("num_tokens", f"is {num_tokens}, expected 0 to {num_pages * page_size}")
    token = torch.arange(num_pages * page_size, device=pages.device).view(num_pages, page_size, 1, 1)
    return pages[page_ids.long(), 0], token < num_tokens


def _margin(num_terms: int) -> float:
    """By how much a float32 sum of `num_terms` products may be off, as a share of the sum of their magnitudes."""
    return (num_terms + 4) * 2.0**-24


def _scores_torch(query: torch.Tensor, summary: MinMax | Ball) -> torch.Tensor:
    num_heads, head_dim = query.shape
    wide = query.float()
    if isinstance(summary, MinMax):
        num_pages, num_kv_heads, _ = summary.low.shape
        by_head = wide.view(num_kv_heads, -1, 1, head_dim)
        low, high = (end.float().transpose(0, 1)[:, None] for end in (summary.low, summary.high))
        terms = torch.maximum(by_head * low, by_head * high)
        empty = (summary.low > summary.high).any(dim=-1).transpose(0, 1)[:, None]
        # 0 * inf is no number; what it belongs to is empty.
        scores = terms.sum(dim=-1) + terms.abs().sum(dim=-1) * _margin(head_dim)
        return scores.masked_fill(empty, -torch.inf).reshape(num_heads, num_pages)
    num_pages, num_kv_heads, _ = summary.centre.shape
    by_head = wide.view(num_kv_heads, -1, 1, head_dim)
    terms = by_head * summary.centre.float().transpose(0, 1)[:, None]
    reach = by_head.norm(dim=-1) * _UP * summary.radius.transpose(0, 1)[:, None]
    scores = terms.sum(dim=-1) + terms.abs().sum(dim=-1) * _margin(head_dim) + reach * _UP
    empty = (summary.radius == -torch.inf).transpose(0, 1)[:, None]
    bounded: torch.Tensor = scores.masked_fill(empty, -torch.inf).reshape(num_heads, num_pages)
    return bounded


def _launch(query: torch.Tensor, summary: MinMax | Ball, out: torch.Tensor) -> None:
    high = summary.high if isinstance(summary, MinMax) else None
    radius = summary.radius if isinstance(summary, Ball) else None
    first = summary.low if isinstance(summary, MinMax) else summary.centre
    num_pages, num_kv_heads, head_dim = first.shape
    if not num_pages:
        return
    variant = score_variant(head_dim, query.shape[0] // num_kv_heads)
    with launch.on(query.device):
        _page_scores_kernel[(ceil_div(num_pages, variant.constants["BN"]), num_kv_heads)](
            p_query=query,
            p_first=first,
            p_high=high,
            p_radius=radius,
            p_out=out,
            num_pages=num_pages,
            scale_margin=_margin(head_dim),
            scale_up=_UP,
            stride_qh=query.stride(0),
            stride_fn=first.stride(0),
            stride_fh=first.stride(1),
            stride_hn=high.stride(0) if high is not None else 0,
            stride_hh=high.stride(1) if high is not None else 0,
            stride_rn=radius.stride(0) if radius is not None else 0,
            **variant.constants,
            **launch.options(variant),
        )


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _page_scores_kernel(
    p_query: tl.tensor, p_first: tl.tensor, p_high: tl.tensor, p_radius: tl.tensor, p_out: tl.tensor,
    num_pages: tl.tensor, scale_margin: tl.tensor, scale_up: tl.tensor,
    stride_qh: tl.tensor, stride_fn: tl.tensor, stride_fh: tl.tensor, stride_hn: tl.tensor, stride_hh: tl.tensor,
    stride_rn: tl.tensor,
    D: tl.constexpr, G: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
) -> None:
    # A program scores BN pages for the G query heads that share one key/value head, and loads their summary once: a
    # box from `p_first` to `p_high`, or, where there is no such pointer, a ball around `p_first`.
    i_h = tl.program_id(1)
    o_n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    o_d = tl.arange(0, BD)
    m_n = o_n < num_pages
    m_d = o_d < D
    m_nd = m_n[:, None] & m_d[None, :]
    b_first = tl.load(
        p_first + o_n[:, None] * stride_fn + i_h * stride_fh + o_d[None, :], mask=m_nd, other=0.0
    ).to(tl.float32)
    if p_high is not None:
        p_box = p_high + o_n[:, None] * stride_hn + i_h * stride_hh + o_d[None, :]
        b_high = tl.load(p_box, mask=m_nd, other=0.0).to(tl.float32)
        b_empty = tl.max((b_first > b_high).to(tl.int32), 1) > 0
    else:
        b_radius = tl.load(p_radius + o_n * stride_rn + i_h, mask=m_n, other=0.0)
        b_empty = b_radius == float("-inf")
    for i_g in tl.static_range(G):
        head = i_h * G + i_g
        b_q = tl.load(p_query + head * stride_qh + o_d, mask=m_d, other=0.0).to(tl.float32)
        if p_high is not None:
            b_terms = tl.maximum(b_q[None, :] * b_first, b_q[None, :] * b_high)
        else:
            b_terms = b_q[None, :] * b_first
        b_score = tl.sum(b_terms, 1) + tl.sum(tl.abs(b_terms), 1) * scale_margin
        if p_high is None:
            b_norm = tl.sqrt(tl.sum(b_q * b_q, 0)) * scale_up
            b_score += b_norm * b_radius * scale_up
        b_score = tl.where(b_empty, float("-inf"), b_score)
        tl.store(p_out + head.to(tl.int64) * num_pages + o_n, b_score, mask=m_n)
