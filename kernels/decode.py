"""Paged decode: one query token a sequence, against keys and values in pages named by block tables.

The keys of a sequence are cut into splits that run side by side (split-KV); their states are merged by
`hicache.kernels.merge`. The query heads that share a key/value head form the rows of one matrix, so that each key and
value is loaded once for all of them. `hicache.kernels.cascade` launches the same kernel with the rows of several
sequences, which share a table.
"""

import torch
import triton
import triton.language as tl

from hicache.kernels import language, launch
from hicache.kernels.checks import (
    HEAD_DIM_MAX,
    check_launchable_query,
    check_pages_beside,
    check_positions,
    check_tables,
)
from hicache.kernels.errors import BadArgument
from hicache.kernels.language import attend_pages, finish, narrow, start, window_range
from hicache.kernels.launch import Variant, ceil_div, next_power_of_2
from hicache.kernels.merge import check_initial
from hicache.kernels.scoring import PLAIN, Scoring, check_scoring, visible_reference
from hicache.kernels.splits import GRID_MAX, allocate_reduction, resolve_num_splits
from hicache.kernels.state import AttentionState, attention_reference, pages_reference


def paged_decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    scoring: Scoring = PLAIN,
    page_scales: torch.Tensor | None = None,
    query_positions: torch.Tensor | None = None,
    num_splits: int | None = None,
    initial: AttentionState | None = None,
    output: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> AttentionState:
    """Attend one query token of each of `B` sequences to its pages, by the Triton kernel.

    query [B, HQ, D], float16, bfloat16 or float32, D contiguous and at most 256. pages [num_slots, 2, page_size, H, D],
    of the query's dtype or, for half precision, float8_e4m3fn or float8_e5m2; D contiguous, any other stride: keys in
    plane 0, values in plane 1; HQ a multiple of H. page_scales float32 [num_slots, 2, H], any stride (0 for a scale
    that pages share), at least 0: multiply what is stored; None for 1. block_tables int32 [B, max_pages]: slots of each
    sequence's pages in order, of which the first `ceil(seq_lens / page_size)` are read; a negative id is a page that is
    not in this memory, and its tokens are passed over: that is the residency mask. seq_lens int32 [B], tokens of each
    sequence, 0 to `max_pages * page_size`. query_positions int32 [B], where a window counts from: the index that the
    query itself has or would have in the table, at least `seq_lens - 1`, which None stands for. All on one device.
    `scale` multiplies the scores. `num_splits`: into how many parts each sequence is cut, chosen from its greatest
    length and the device if None. `initial`: the state of the same queries over other keys, float32, to be merged in;
    it may be what `output` and `lse` are.

    Writes into `output` [B, HQ, D], of any of the query's dtypes, and `lse` [B, HQ], float32, and keeps partial states
    in `workspace`, float32 [n], n at least what `splits.workspace_elements` says. What is not given is allocated, the
    output in the query's dtype; where all three are, nothing is, and the call can be captured in a CUDA graph. It does
    not wait for the device. Page ids and lengths are checked on the CPU only. Raises `BadArgument`.
    """
    check_launchable_query(query, HEAD_DIM_MAX)
    shape = check_pages_beside(query, pages, page_scales)
    num_seqs, num_heads, head_dim = query.shape
    device = query.device
    max_tokens = check_tables(
        ("block_tables", "seq_lens"), block_tables, seq_lens, num_seqs,
        num_slots=shape.num_slots, page_size=shape.page_size, device=device,
    )  # fmt: skip
    check_scoring(scoring, num_heads, device)
    check_positions("query_positions", query_positions, (num_seqs,), device, least=seq_lens, offset=-1)
    if num_seqs > GRID_MAX:
        raise BadArgument("query", f"has {num_seqs} sequences, expected at most {GRID_MAX}")
    check_initial(initial, (num_seqs, num_heads), head_dim, device)

    variant = decode_variant(query.dtype, pages.dtype, head_dim, shape.page_size, num_heads // shape.num_kv_heads)
    num_programs = num_seqs * shape.num_kv_heads * num_row_blocks(variant, 1)
    num_splits = resolve_num_splits("num_splits", num_splits, num_programs, max_tokens, scoring, device)
    reduction = allocate_reduction(
        num_splits, query, head_dim, initial=initial, output=output, lse=lse, workspace=workspace
    )
    if num_seqs == 0:
        return reduction.result
    launch_decode(
        query, pages, block_tables, seq_lens, reduction.parts, variant, scale=scale, scoring=scoring,
        page_scales=page_scales, query_positions=query_positions,
    )  # fmt: skip
    return reduction.finish()


def paged_decode_reference(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    scoring: Scoring = PLAIN,
    page_scales: torch.Tensor | None = None,
    query_positions: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> AttentionState:
    """The definition of `paged_decode`, computed and returned in `dtype`. Arguments and shapes as there."""
    positions = (seq_lens - 1 if query_positions is None else query_positions).long()
    state = AttentionState(torch.empty(query.shape, dtype=dtype), torch.empty(query.shape[:2], dtype=dtype))
    for i, (table, length) in enumerate(zip(block_tables.tolist(), seq_lens.tolist(), strict=True)):
        stored = pages_reference(pages, table, length, scales=page_scales, dtype=dtype)
        visible = visible_reference(positions[i : i + 1], stored.positions, scoring)
        output, lse = attention_reference(
            query[i : i + 1], stored.key, stored.value, visible, scale=scale, scoring=scoring, dtype=dtype
        )
        state.output[i], state.lse[i] = output[0], lse[0]
    return state


def decode_variant(
    dtype: torch.dtype, stored: torch.dtype, head_dim: int, page_size: int, group: int, num_tokens: int = 1
) -> Variant:
    """The form in which the kernel is compiled, for a query of `dtype` and keys `stored` in another or the same.
    `group`: query heads that share a key/value head. `num_tokens`: most queries that share a table.

    Found with the compile report: the largest blocks that spill nothing on sm_90 and next to nothing elsewhere.
    """
    is_float8 = stored != dtype
    rows_max = 16 if dtype == torch.float32 else 128 if head_dim <= 128 else 64
    rows = min(rows_max, max(16, next_power_of_2(group * num_tokens)))  # 16: the least that a tensor core takes
    constants = {"G": group, "D": head_dim, "PAGE": page_size, "BM": rows, "BD": max(16, next_power_of_2(head_dim))}
    if dtype == torch.float32:
        if page_size < 16:  # an address of its own for each key or few, for which larger blocks lack the registers
            return Variant({**constants, "BN": 16}, num_warps=4, num_stages=2)
        return Variant({**constants, "BN": 32}, num_warps=8, num_stages=2)
    if rows > 16:
        return Variant({**constants, "BN": 32 if is_float8 or head_dim > 128 else 64}, num_warps=8, num_stages=3)
    if head_dim > 128:
        return Variant({**constants, "BN": 64}, num_warps=8 if is_float8 else 4, num_stages=3)
    # Five stages: of three the look-up of pages takes two, and a program would have one block on its way.
    return Variant({**constants, "BN": 64}, num_warps=4, num_stages=5)


def num_row_blocks(variant: Variant, num_tokens: int) -> int:
    """Programs that the rows of `num_tokens` queries take for one key/value head and split."""
    return ceil_div(num_tokens * variant.constants["G"], variant.constants["BM"])


def launch_decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    parts: AttentionState,
    variant: Variant,
    *,
    scale: float,
    scoring: Scoring,
    page_scales: torch.Tensor | None,
    query_positions: torch.Tensor | None = None,
    indptr: torch.Tensor | None = None,
    max_queries: int = 1,
) -> None:
    """Launch the kernel for arguments that are checked, and at least one sequence.

    `parts`: output [num_splits, N, HQ, D] and LSE [num_splits, N, HQ]. With `indptr` int32 [B + 1], the queries
    `indptr[b]` to `indptr[b + 1]`, at most `max_queries`, share sequence `b`, and all see all of it.
    """
    pages = launch.loadable(pages)
    num_splits, num_blocks = parts.output.shape[0], num_row_blocks(variant, max_queries)
    scale_in, cap_log2 = launch.score_scales(scale, scoring.soft_cap)
    scale_strides = (0, 0, 0) if page_scales is None else page_scales.stride()
    with launch.on(query.device):
        _paged_decode_kernel[(num_splits * num_blocks, pages.shape[3], seq_lens.shape[0])](
            p_query=query,
            p_indptr=indptr,
            p_pages=pages,
            p_scales=page_scales,
            p_tables=block_tables,
            p_lens=seq_lens,
            p_positions=query_positions,
            p_sinks=scoring.sinks,
            p_output=parts.output,
            p_lse=parts.lse,
            num_splits=num_splits,
            num_blocks=num_blocks,
            window=scoring.window,
            keep_first=scoring.keep_first,
            scale_in=scale_in,
            cap_log2=cap_log2,
            stride_qt=query.stride(0),
            stride_qh=query.stride(1),
            stride_slot=pages.stride(0),
            stride_plane=pages.stride(1),
            stride_token=pages.stride(2),
            stride_head=pages.stride(3),
            stride_ss=scale_strides[0],
            stride_sp=scale_strides[1],
            stride_sh=scale_strides[2],
            stride_tb=block_tables.stride(0),
            stride_os=parts.output.stride(0),
            stride_ot=parts.output.stride(1),
            stride_oh=parts.output.stride(2),
            stride_ls=parts.lse.stride(0),
            stride_lt=parts.lse.stride(1),
            **variant.constants,
            EMULATE_BFLOAT16=language.EMULATE_BFLOAT16,
            **launch.options(variant),
        )


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _paged_decode_kernel(
    p_query: tl.tensor, p_indptr: tl.tensor, p_pages: tl.tensor, p_scales: tl.tensor, p_tables: tl.tensor,
    p_lens: tl.tensor, p_positions: tl.tensor, p_sinks: tl.tensor, p_output: tl.tensor, p_lse: tl.tensor,
    num_splits: tl.tensor, num_blocks: tl.tensor, window: tl.tensor, keep_first: tl.tensor,
    scale_in: tl.tensor, cap_log2: tl.tensor,
    stride_qt: tl.tensor, stride_qh: tl.tensor,
    stride_slot: tl.tensor, stride_plane: tl.tensor, stride_token: tl.tensor, stride_head: tl.tensor,
    stride_ss: tl.tensor, stride_sp: tl.tensor, stride_sh: tl.tensor, stride_tb: tl.tensor,
    stride_os: tl.tensor, stride_ot: tl.tensor, stride_oh: tl.tensor, stride_ls: tl.tensor, stride_lt: tl.tensor,
    G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EMULATE_BFLOAT16: tl.constexpr,
) -> None:
    # A program attends BM rows to one split of one sequence; row r is query head r % G of the key/value head, of query
    # r // G. The programs of one split lie side by side: what one of them has loaded, the others find in the cache.
    i_split = tl.program_id(0) // num_blocks
    i_row = tl.program_id(0) % num_blocks * BM
    i_kv = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    if p_indptr is not None:
        i_query = tl.load(p_indptr + i_b).to(tl.int64)
        num_queries = tl.load(p_indptr + i_b + 1) - i_query
    else:
        i_query = i_b
        num_queries = 1
    if i_row < num_queries * G:
        # Splits are whole blocks of keys; those that a short sequence does not need stay empty.
        count = tl.load(p_lens + i_b)
        first = None
        skip = None
        if window is not None:
            position = count - 1
            if p_positions is not None:
                position = tl.load(p_positions + i_b)
            first, skip, count = window_range(position, count, window, keep_first)
        split = tl.cdiv(tl.cdiv(count, BN), num_splits) * BN
        begin = i_split * split
        end = tl.minimum(begin + split, count)

        o_row = i_row + tl.arange(0, BM)
        m_row = o_row < num_queries * G
        o_t = i_query + o_row // G
        o_h = i_kv * G + o_row % G
        o_d = tl.arange(0, BD)
        m_q = m_row[:, None] & (o_d < D)[None, :]
        b_q = tl.load(p_query + (o_t * stride_qt + o_h * stride_qh)[:, None] + o_d[None, :], mask=m_q, other=0.0)

        p_head_scales = None
        if p_scales is not None:
            p_head_scales = p_scales + i_kv.to(tl.int64) * stride_sh
        b_max, b_sum = start(o_h, m_row, p_sinks, i_split == 0, BM)
        b_acc = tl.zeros([BM, BD], tl.float32)
        b_max, b_sum, b_acc = attend_pages(
            b_q, p_tables + i_b * stride_tb, p_pages + i_kv.to(tl.int64) * stride_head, p_head_scales, begin, end,
            first, skip, None, keep_first, b_max, b_sum, b_acc,
            stride_slot, stride_plane, stride_token, stride_ss, stride_sp, scale_in, cap_log2,
            D, PAGE, BN, BD, EMULATE_BFLOAT16,
        )
        b_out, b_lse = finish(b_max, b_sum, b_acc)
        p_out = p_output + i_split.to(tl.int64) * stride_os
        tl.store(
            p_out + (o_t * stride_ot + o_h * stride_oh)[:, None] + o_d[None, :],
            narrow(b_out, p_output.dtype.element_ty, EMULATE_BFLOAT16),
            mask=m_q,
        )
        tl.store(p_lse + i_split.to(tl.int64) * stride_ls + o_t * stride_lt + o_h, b_lse, mask=m_row)
