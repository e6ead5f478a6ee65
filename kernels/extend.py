"""Paged extend: the new tokens of each sequence, against its cached prefix in pages and, causally, against each other.

This is chunked prefill over a cached prefix. The batch is ragged: tokens of all sequences lie one after the other, and
`indptr` says where each begins. Rows of a program are pairs of token and query head of one key/value head, so a group
of any size fills them without gaps.
"""

from itertools import pairwise

import torch
import triton
import triton.language as tl

from hicache.kernels import language, launch
from hicache.kernels.checks import (
    HEAD_DIM_MAX,
    check_group,
    check_indptr,
    check_launchable_query,
    check_most,
    check_pages_beside,
    check_positions,
    check_tables,
    check_tensor,
)
from hicache.kernels.errors import BadArgument
from hicache.kernels.language import absorb, attend_pages, finish, narrow, product, start, window_range
from hicache.kernels.launch import Variant, ceil_div, next_power_of_2
from hicache.kernels.scoring import PLAIN, Scoring, check_scoring, visible_reference
from hicache.kernels.splits import GRID_MAX
from hicache.kernels.state import AttentionState, allocate_state, attention_reference, pages_reference


def paged_extend(
    query: torch.Tensor,
    indptr: torch.Tensor,
    *,
    scale: float,
    pages: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    prefix_lens: torch.Tensor | None = None,
    page_scales: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    scoring: Scoring = PLAIN,
    first_positions: torch.Tensor | None = None,
    max_new_tokens: int | None = None,
    output: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> AttentionState:
    """Attend the new tokens of `B` sequences to their prefixes and to the new tokens up to themselves, by the kernel.

    query [N, HQ, D], float16, bfloat16 or float32: all new tokens, those of sequence `b` at `indptr[b]` to
    `indptr[b + 1]`; indptr int32 [B + 1], from 0 to N. All on one device; D contiguous everywhere
    and at most 256.

    The prefix is given by all of: pages [num_slots, 2, page_size, H, D], of the query's dtype or, for half precision,
    float8_e4m3fn or float8_e5m2, any stride but in D; block_tables int32 [B, max_pages], where a negative id is a page
    that is not in this memory and is passed over; prefix_lens int32 [B], tokens of each prefix, 0 to `max_pages *
    page_size`, each of which every new token of the sequence sees. page_scales float32 [num_slots, 2, H], any stride,
    at least 0, multiply what pages hold. The new tokens by both of: key and value [N, H, D], of the query's dtype.
    Without pages there is no prefix; without key and value the new tokens see the prefix only. One of the two must be
    given.

    first_positions int32 [B], where a window counts from: the index that the first new token of each sequence has or
    would have in the table, at least `prefix_lens`, which None stands for (0 without pages).

    `max_new_tokens`: the most new tokens that a sequence has, if the caller knows a smaller number than N; only then is
    a large batch launched without many programs that find nothing to do. What a sequence has beyond is not written.

    Writes into `output` [N, HQ, D], of any of these dtypes, and `lse` [N, HQ], float32, where given, and allocates them
    otherwise, the output in the query's dtype. Page ids, lengths and offsets are checked on the CPU only.
    Raises `BadArgument`.
    """
    check_launchable_query(query, HEAD_DIM_MAX)
    num_tokens, num_heads, head_dim = query.shape
    device = query.device
    check_tensor("indptr", indptr, (None,), dtype=torch.int32, device=device)
    num_seqs = indptr.shape[0] - 1
    if not 0 <= num_seqs <= GRID_MAX:
        raise BadArgument("indptr", f"has {num_seqs + 1} entries, expected 1 to {GRID_MAX + 1}")
    check_indptr("indptr", indptr, num_tokens)
    most = check_most("max_new_tokens", max_new_tokens, indptr, num_tokens)

    num_kv_heads, page_size = 0, 1
    if pages is not None:
        shape = check_pages_beside(query, pages, page_scales)
        if block_tables is None or prefix_lens is None:
            raise BadArgument("block_tables" if block_tables is None else "prefix_lens", "is None, but pages is given")
        check_tables(
            ("block_tables", "prefix_lens"), block_tables, prefix_lens, num_seqs,
            num_slots=shape.num_slots, page_size=shape.page_size, device=device,
        )  # fmt: skip
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
    belonging = {
        "pages": {"block_tables": block_tables, "prefix_lens": prefix_lens, "page_scales": page_scales},
        "key": {"value": value},
    }
    for whole, given in (("pages", pages), ("key", key)):
        for name, tensor in belonging[whole].items():
            if given is None and tensor is not None:
                raise BadArgument(name, f"is given, but {whole} is None")
    check_scoring(scoring, num_heads, device)
    check_positions("first_positions", first_positions, (num_seqs,), device, least=prefix_lens, offset=0)
    state = allocate_state(
        (num_tokens, num_heads), head_dim, dtype=query.dtype, device=device, output=output, lse=lse
    )
    if num_tokens == 0:
        return state

    group = num_heads // num_kv_heads
    variant = extend_variant(
        query.dtype,
        query.dtype if pages is None else pages.dtype,
        head_dim,
        page_size,
        group,
        has_prefix=pages is not None,
        has_new=key is not None,
        shared_bytes=launch.shared_bytes(device),
    )
    grid = (ceil_div(most * group, variant.constants["BM"]), num_kv_heads, num_seqs)
    scale_in, cap_log2 = launch.score_scales(scale, scoring.soft_cap)
    scale_strides = (0, 0, 0) if page_scales is None else page_scales.stride()
    with launch.on(device):
        _paged_extend_kernel[grid](
            p_query=query,
            p_indptr=indptr,
            p_pages=None if pages is None else launch.loadable(pages),
            p_scales=None if pages is None else page_scales,
            p_tables=block_tables,
            p_prefix_lens=None if pages is None else prefix_lens,
            p_first_positions=first_positions,
            p_sinks=scoring.sinks,
            p_key=key,
            p_value=value,
            p_output=state.output,
            p_lse=state.lse,
            window=scoring.window,
            keep_first=scoring.keep_first,
            scale_in=scale_in,
            cap_log2=cap_log2,
            stride_qt=query.stride(0),
            stride_qh=query.stride(1),
            stride_slot=pages.stride(0) if pages is not None else 0,
            stride_plane=pages.stride(1) if pages is not None else 0,
            stride_token=pages.stride(2) if pages is not None else 0,
            stride_head=pages.stride(3) if pages is not None else 0,
            stride_ss=scale_strides[0],
            stride_sp=scale_strides[1],
            stride_sh=scale_strides[2],
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
    page_scales: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    scoring: Scoring = PLAIN,
    first_positions: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> AttentionState:
    """The definition of `paged_extend`, computed and returned in `dtype`. Arguments and shapes as there."""
    state = AttentionState(torch.empty(query.shape, dtype=dtype), torch.empty(query.shape[:2], dtype=dtype))
    for i, (begin, end) in enumerate(pairwise(indptr.tolist())):
        first = 0 if prefix_lens is None else int(prefix_lens[i])
        if first_positions is not None:
            first = int(first_positions[i])
        new = first + torch.arange(end - begin)
        keys, values, positions = [], [], []
        if pages is not None and block_tables is not None and prefix_lens is not None:
            table, length = block_tables[i].tolist(), int(prefix_lens[i])
            stored = pages_reference(pages, table, length, scales=page_scales, dtype=dtype)
            keys.append(stored.key)
            values.append(stored.value)
            positions.append(stored.positions)
        if key is not None and value is not None:
            keys.append(key[begin:end].to(dtype))
            values.append(value[begin:end].to(dtype))
            positions.append(new)
        state.output[begin:end], state.lse[begin:end] = attention_reference(
            query[begin:end],
            torch.cat(keys),
            torch.cat(values),
            visible_reference(new, torch.cat(positions), scoring),
            scale=scale,
            scoring=scoring,
            dtype=dtype,
        )
    return state


def extend_variant(
    dtype: torch.dtype,
    stored: torch.dtype,
    head_dim: int,
    page_size: int,
    group: int,
    *,
    has_prefix: bool,
    has_new: bool,
    shared_bytes: int,
) -> Variant:
    """The form in which the kernel is compiled, for a query of `dtype` and a prefix `stored` in another or the same, on
    a GPU where a program may have `shared_bytes` of shared memory. `group`: query heads that share a key/value head.

    Found with the compile report: the largest blocks that spill nothing on sm_90 and next to nothing elsewhere.
    """
    constants = {
        "G": group,
        "D": head_dim,
        "PAGE": page_size,
        "BD": max(16, next_power_of_2(head_dim)),
        "HAS_PREFIX": has_prefix,
        "HAS_NEW": has_new,
    }
    is_float8 = stored != dtype
    if dtype == torch.float32:
        if head_dim > 128:
            return Variant({**constants, "BM": 16, "BN": 16}, num_warps=4, num_stages=2)
        # An address of its own for each key or few takes the registers that a second stage would need.
        num_stages = 1 if has_prefix and page_size < 16 and head_dim > 64 else 2
        return Variant({**constants, "BM": 32, "BN": 16}, num_warps=8, num_stages=num_stages)
    if head_dim > 128:
        num_stages = 3 if shared_bytes > launch.SHARED_BYTES_LEAST else 2
        return Variant({**constants, "BM": 32 if is_float8 else 64, "BN": 32}, num_warps=8, num_stages=num_stages)
    num_warps = 4 if head_dim <= 64 and not is_float8 else 8
    return Variant({**constants, "BM": 64, "BN": 64}, num_warps=num_warps, num_stages=3)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _paged_extend_kernel(
    p_query: tl.tensor, p_indptr: tl.tensor, p_pages: tl.tensor, p_scales: tl.tensor, p_tables: tl.tensor,
    p_prefix_lens: tl.tensor, p_first_positions: tl.tensor, p_sinks: tl.tensor, p_key: tl.tensor, p_value: tl.tensor,
    p_output: tl.tensor, p_lse: tl.tensor,
    window: tl.tensor, keep_first: tl.tensor, scale_in: tl.tensor, cap_log2: tl.tensor,
    stride_qt: tl.tensor, stride_qh: tl.tensor,
    stride_slot: tl.tensor, stride_plane: tl.tensor, stride_token: tl.tensor, stride_head: tl.tensor,
    stride_ss: tl.tensor, stride_sp: tl.tensor, stride_sh: tl.tensor, stride_tb: tl.tensor,
    stride_kt: tl.tensor, stride_kh: tl.tensor, stride_vt: tl.tensor, stride_vh: tl.tensor,
    stride_ot: tl.tensor, stride_oh: tl.tensor, stride_lt: tl.tensor,
    G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HAS_PREFIX: tl.constexpr, HAS_NEW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EMULATE_BFLOAT16: tl.constexpr,
) -> None:
    # A program attends BM rows of one sequence; row r is query head r % G of the key/value head, of new token r // G.
    i_kv = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    i_first = tl.load(p_indptr + i_b)
    num_new = tl.load(p_indptr + i_b + 1) - i_first
    i_row = tl.program_id(0) * BM
    if i_row < num_new * G:
        o_row = i_row + tl.arange(0, BM)
        o_new = o_row // G
        m_row = o_new < num_new
        o_h = i_kv * G + o_row % G
        o_t = (i_first + o_new).to(tl.int64)
        o_d = tl.arange(0, BD)
        m_d = o_d < D
        m_q = m_row[:, None] & m_d[None, :]
        b_q = tl.load(p_query + (o_t * stride_qt + o_h * stride_qh)[:, None] + o_d[None, :], mask=m_q, other=0.0)

        b_max, b_sum = start(o_h, m_row, p_sinks, True, BM)
        b_acc = tl.zeros([BM, BD], tl.float32)
        # Position of the first new token.
        position = 0
        if HAS_PREFIX:
            position = tl.load(p_prefix_lens + i_b)
        if p_first_positions is not None:
            position = tl.load(p_first_positions + i_b)
        first = None
        skip = None
        o_least = None
        if HAS_PREFIX:
            count = tl.load(p_prefix_lens + i_b)
            if window is not None:
                # The blocks are those that the first row sees; each later row sees no more, and less at their start.
                first, skip, count = window_range(position + i_row // G, count, window, keep_first)
                o_least = position + o_new + 1 - window
            p_head_scales = None
            if p_scales is not None:
                p_head_scales = p_scales + i_kv.to(tl.int64) * stride_sh
            b_max, b_sum, b_acc = attend_pages(
                b_q, p_tables + i_b * stride_tb, p_pages + i_kv.to(tl.int64) * stride_head, p_head_scales, 0, count,
                first, skip, o_least, keep_first, b_max, b_sum, b_acc,
                stride_slot, stride_plane, stride_token, stride_ss, stride_sp, scale_in, cap_log2,
                D, PAGE, BN, BD, EMULATE_BFLOAT16,
            )
        if HAS_NEW:
            # Up to the last token of these rows; what lies behind it, none of them sees.
            count = tl.minimum((i_row + BM - 1) // G + 1, num_new)
            if window is not None:
                keep_new = tl.maximum(keep_first - position, 0)
                first, skip, count = window_range(i_row // G, count, window, keep_new)
            for i_n in range(0, count, BN):
                o_n = i_n + tl.arange(0, BN)
                m_n = o_n < count
                if window is not None:
                    o_n += tl.where(o_n < first, 0, skip)
                o_key = (i_first + o_n).to(tl.int64)
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
                if window is not None:
                    m_s = m_s & ((o_n[None, :] > o_new[:, None] - window) | (o_n < keep_new)[None, :])
                b_max, b_sum, b_acc = absorb(
                    product(b_q, b_k, EMULATE_BFLOAT16), b_v, m_s, None, b_max, b_sum, b_acc, scale_in, cap_log2,
                    EMULATE_BFLOAT16,
                )
        b_out, b_lse = finish(b_max, b_sum, b_acc)
        tl.store(
            p_output + (o_t * stride_ot + o_h * stride_oh)[:, None] + o_d[None, :],
            narrow(b_out, p_output.dtype.element_ty, EMULATE_BFLOAT16),
            mask=m_q,
        )
        tl.store(p_lse + o_t * stride_lt + o_h, b_lse, mask=m_row)
