"""Paged extend: the new tokens of each sequence, against its cached prefix in pages and, causally, against each other.

This is chunked prefill over a cached prefix. The batch is ragged: tokens of all sequences lie one after the other, and
`indptr` says where each begins. Rows of a program are pairs of token and query head of one key/value head, so a group
of any size fills them without gaps.
"""

from itertools import pairwise
from typing import Final

import torch
import triton
import triton.language as tl

from hicache.kernels import language, launch
from hicache.kernels.checks import (
    check_group,
    check_indptr,
    check_lengths,
    check_page_ids,
    check_pages,
    check_query,
    check_tensor,
)
from hicache.kernels.errors import BadArgument
from hicache.kernels.language import attend_block, attend_pages, finish, narrow
from hicache.kernels.launch import LOG2_E, Variant, ceil_div, next_power_of_2
from hicache.kernels.state import AttentionState, allocate_state, attention_reference, pages_reference

_GRID_MAX: Final = 65535
"""Greatest second and third dimension of a CUDA grid."""


def paged_extend(
    query: torch.Tensor,
    indptr: torch.Tensor,
    *,
    scale: float,
    pages: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    prefix_lens: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    max_new_tokens: int | None = None,
    output: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> AttentionState:
    """Attend the new tokens of `B` sequences to their prefixes and to the new tokens up to themselves, by the kernel.

    query [N, HQ, D], float16, bfloat16 or float32: all new tokens, those of sequence `b` at `indptr[b]` to
    `indptr[b + 1]`; indptr int32 [B + 1], from 0 to N. All on one device; D contiguous everywhere.

    The prefix is given by all of: pages [num_slots, 2, page_size, H, D], of the query's dtype and any stride but in D;
    block_tables int32 [B, max_pages], where a negative id is a page that is not in this memory and is passed over;
    prefix_lens int32 [B], tokens of each prefix, 0 to `max_pages * page_size`, each of which every new token of the
    sequence sees. The new tokens by both of: key and value [N, H, D], of the query's dtype. Without pages there is no
    prefix; without key and value the new tokens see the prefix only. One of the two must be given.

    `max_new_tokens`: the most new tokens that a sequence has, if the caller knows a smaller number than N; only then is
    a large batch launched without many programs that find nothing to do.

    Writes into `output` [N, HQ, D], of any of these dtypes, and `lse` [N, HQ], float32, where given, and allocates them
    otherwise, the output in the query's dtype. Page ids, lengths and offsets are checked on the CPU only.
    Raises `BadArgument`.
    """
    check_query(query)
    launch.require_launchable("query", query.device)
    num_tokens, num_heads, head_dim = query.shape
    device = query.device
    check_tensor("indptr", indptr, (None,), dtype=torch.int32, device=device)
    num_seqs = indptr.shape[0] - 1
    if not 0 <= num_seqs <= _GRID_MAX:
        raise BadArgument("indptr", f"has {num_seqs + 1} entries, expected 1 to {_GRID_MAX + 1}")
    check_indptr("indptr", indptr, num_tokens)
    most = num_tokens if max_new_tokens is None else max_new_tokens
    if not 0 <= most <= num_tokens:
        raise BadArgument("max_new_tokens", f"is {most}, expected 0 to {num_tokens}")

    num_kv_heads, page_size = 0, 1
    if pages is not None:
        shape = check_pages("pages", pages, query)
        if pages.device != device:
            raise BadArgument("pages", f"is on {pages.device}, expected {device}")
        if block_tables is None or prefix_lens is None:
            raise BadArgument("block_tables" if block_tables is None else "prefix_lens", "is None, but pages is given")
        check_tensor("block_tables", block_tables, (num_seqs, None), dtype=torch.int32, device=device)
        check_tensor("prefix_lens", prefix_lens, (num_seqs,), dtype=torch.int32, device=device)
        check_page_ids("block_tables", block_tables, shape.num_slots, negative=True)
        check_lengths("prefix_lens", prefix_lens, block_tables.shape[1] * shape.page_size)
        num_kv_heads, page_size = shape.num_kv_heads, shape.page_size
    if key is not None:
        check_tensor("key", key, (num_tokens, num_kv_heads or None, head_dim), dtype=query.dtype, device=device)
        check_group("key", key.shape[1], query)
        num_kv_heads = key.shape[1]
        if value is None:
            raise BadArgument("value", "is None, but key is given")
        check_tensor("value", value, (num_tokens, num_kv_heads, head_dim), dtype=query.dtype, device=device)
    if pages is None and key is None:
        raise BadArgument("pages", "and key are both None: there is nothing to attend to")
    state = allocate_state(
        (num_tokens, num_heads), head_dim, dtype=query.dtype, device=device, output=output, lse=lse
    )
    if num_tokens == 0 or most == 0:
        return state

    group = num_heads // num_kv_heads
    variant = extend_variant(
        query.dtype, head_dim, page_size, group, has_prefix=pages is not None, has_new=key is not None
    )
    grid = (ceil_div(most * group, variant.constants["BM"]), num_kv_heads, num_seqs)
    with launch.on(device):
        _paged_extend_kernel[grid](
            p_query=query,
            p_indptr=indptr,
            p_pages=pages,
            p_tables=block_tables,
            p_prefix_lens=prefix_lens,
            p_key=key,
            p_value=value,
            p_output=state.output,
            p_lse=state.lse,
            scale_log2=scale * LOG2_E,
            stride_qt=query.stride(0),
            stride_qh=query.stride(1),
            stride_slot=pages.stride(0) if pages is not None else 0,
            stride_plane=pages.stride(1) if pages is not None else 0,
            stride_token=pages.stride(2) if pages is not None else 0,
            stride_head=pages.stride(3) if pages is not None else 0,
            stride_tb=block_tables.stride(0) if block_tables is not None else 0,
            stride_kt=key.stride(0) if key is not None else 0,
            stride_kh=key.stride(1) if key is not None else 0,
            stride_vt=value.stride(0) if value is not None else 0,
            stride_vh=value.stride(1) if value is not None else 0,
            stride_ot=state.output.stride(0),
            stride_oh=state.output.stride(1),
            stride_lt=state.lse.stride(0),
            **variant.constants,
            EMULATE_BFLOAT16=language.EMULATE_BFLOAT16,
            **launch.options(variant),
        )
    return state


def paged_extend_reference(
    query: torch.Tensor,
    indptr: torch.Tensor,
    *,
    scale: float,
    pages: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    prefix_lens: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> AttentionState:
    """The definition of `paged_extend`, computed and returned in `dtype`. Arguments and shapes as there."""
    state = AttentionState(torch.empty(query.shape, dtype=dtype), torch.empty(query.shape[:2], dtype=dtype))
    offsets = indptr.tolist()
    for i, (start, end) in enumerate(pairwise(offsets)):
        num_new = end - start
        keys, values, visible = [], [], []
        if pages is not None and block_tables is not None and prefix_lens is not None:
            prefix_key, prefix_value = pages_reference(pages, block_tables[i].tolist(), int(prefix_lens[i]))
            keys.append(prefix_key)
            values.append(prefix_value)
            visible.append(torch.ones(num_new, prefix_key.shape[0], dtype=torch.bool))
        if key is not None and value is not None:
            keys.append(key[start:end])
            values.append(value[start:end])
            visible.append(torch.ones(num_new, num_new, dtype=torch.bool).tril())
        state.output[start:end], state.lse[start:end] = attention_reference(
            query[start:end], torch.cat(keys), torch.cat(values), torch.cat(visible, 1), scale=scale, dtype=dtype
        )
    return state


def extend_variant(
    dtype: torch.dtype, head_dim: int, page_size: int, group: int, *, has_prefix: bool, has_new: bool
) -> Variant:
    """The form in which the kernel is compiled. `group`: query heads that share a key/value head.

    Found with the compile report: the largest blocks that spill nothing on sm_90 and at most 16 bytes elsewhere.
    """
    constants = {
        "G": group,
        "D": head_dim,
        "PAGE": page_size,
        "BD": max(16, next_power_of_2(head_dim)),
        "HAS_PREFIX": has_prefix,
        "HAS_NEW": has_new,
    }
    if dtype == torch.float32:
        return Variant({**constants, "BM": 32, "BN": 16}, num_warps=8, num_stages=2)
    return Variant({**constants, "BM": 64, "BN": 64}, num_warps=4 if head_dim <= 64 else 8, num_stages=3)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _paged_extend_kernel(
    p_query: tl.tensor, p_indptr: tl.tensor, p_pages: tl.tensor, p_tables: tl.tensor, p_prefix_lens: tl.tensor,
    p_key: tl.tensor, p_value: tl.tensor,
    p_output: tl.tensor, p_lse: tl.tensor, scale_log2: tl.tensor,
    stride_qt: tl.tensor, stride_qh: tl.tensor,
    stride_slot: tl.tensor, stride_plane: tl.tensor, stride_token: tl.tensor, stride_head: tl.tensor,
    stride_tb: tl.tensor,
    stride_kt: tl.tensor, stride_kh: tl.tensor, stride_vt: tl.tensor, stride_vh: tl.tensor,
    stride_ot: tl.tensor, stride_oh: tl.tensor, stride_lt: tl.tensor,
    G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HAS_PREFIX: tl.constexpr, HAS_NEW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EMULATE_BFLOAT16: tl.constexpr,
) -> None:
    # A program attends BM rows of one sequence; row r is query head r % G of the key/value head, of new token r // G.
    i_kv = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    first = tl.load(p_indptr + i_b)
    num_new = tl.load(p_indptr + i_b + 1) - first
    i_row = tl.program_id(0) * BM
    if i_row < num_new * G:
        o_row = i_row + tl.arange(0, BM)
        o_new = o_row // G
        m_row = o_new < num_new
        o_h = i_kv * G + o_row % G
        o_t = (first + o_new).to(tl.int64)
        o_d = tl.arange(0, BD)
        m_d = o_d < D
        m_q = m_row[:, None] & m_d[None, :]
        b_q = tl.load(p_query + (o_t * stride_qt + o_h * stride_qh)[:, None] + o_d[None, :], mask=m_q, other=0.0)

        b_max = tl.full([BM], float("-inf"), tl.float32)
        b_sum = tl.zeros([BM], tl.float32)
        b_acc = tl.zeros([BM, BD], tl.float32)
        if HAS_PREFIX:
            b_max, b_sum, b_acc = attend_pages(
                b_q, p_tables + i_b * stride_tb, p_pages + i_kv.to(tl.int64) * stride_head,
                0, tl.load(p_prefix_lens + i_b), b_max, b_sum, b_acc,
                stride_slot, stride_plane, stride_token, scale_log2, D, PAGE, BN, BD, EMULATE_BFLOAT16,
            )
        if HAS_NEW:
            # Up to the last token of these rows; what lies behind it, none of them sees.
            end = tl.minimum((i_row + BM - 1) // G + 1, num_new)
            for i_n in range(0, end, BN):
                o_n = i_n + tl.arange(0, BN)
                m_n = o_n < end
                o_key = (first + o_n).to(tl.int64)
                b_k = tl.load(
                    p_key + (o_key * stride_kt + i_kv * stride_kh)[None, :] + o_d[:, None],
                    mask=m_n[None, :] & m_d[:, None],
                    other=0.0,
                )
                b_v = tl.load(
                    p_value + (o_key * stride_vt + i_kv * stride_vh)[:, None] + o_d[None, :],
                    mask=m_n[:, None] & m_d[None, :],
                    other=0.0,
                )
                m_s = m_n[None, :] & (o_n[None, :] <= o_new[:, None])
                b_max, b_sum, b_acc = attend_block(
                    b_q, b_k, b_v, m_s, b_max, b_sum, b_acc, scale_log2, EMULATE_BFLOAT16
                )
        b_out, b_lse = finish(b_max, b_sum, b_acc)
        tl.store(
            p_output + (o_t * stride_ot + o_h * stride_oh)[:, None] + o_d[None, :],
            narrow(b_out, p_output.dtype.element_ty, EMULATE_BFLOAT16),
            mask=m_q,
        )
        tl.store(p_lse + o_t * stride_lt + o_h, b_lse, mask=m_row)
