"""Paged decode: one query token a sequence, against keys and values in pages named by block tables.

The keys of a sequence are cut into splits that run side by side (split-KV); their states are merged by
`hicache.kernels.merge`. The query heads that share a key/value head form the rows of one matrix, so that each key and
value is loaded once for all of them.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from hicache.kernels import language, launch
from hicache.kernels.checks import check_lengths, check_page_ids, check_pages, check_query, check_tensor
from hicache.kernels.errors import BadArgument
from hicache.kernels.language import attend_pages, finish, narrow
from hicache.kernels.launch import LOG2_E, Variant, ceil_div, next_power_of_2
from hicache.kernels.merge import merge_states
from hicache.kernels.state import AttentionState, allocate_state, attention_reference, pages_reference

SPLIT_TOKENS_MIN: Final = 256
"""A split shorter than this many tokens costs more in merging than it gains."""
NUM_SPLITS_MAX: Final = 128
_GRID_MAX: Final = 65535
"""Greatest second and third dimension of a CUDA grid."""


def paged_decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    num_splits: int | None = None,
    output: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> AttentionState:
    """Attend one query token of each of `B` sequences to its pages, by the Triton kernel.

    query [B, HQ, D], float16, bfloat16 or float32, D contiguous. pages [num_slots, 2, page_size, H, D] of the same
    dtype, D contiguous, any other stride: keys in plane 0, values in plane 1; HQ a multiple of H. block_tables int32
    [B, max_pages]: slots of each sequence's pages in order, of which the first `ceil(seq_lens / page_size)` are read; a
    negative id is a page that is not in this memory, and its tokens are passed over: that is the residency mask.
    seq_lens int32 [B], tokens of each sequence, 0 to `max_pages * page_size`. All on one device. `scale` multiplies the
    scores. `num_splits`: into how many parts each sequence is cut, chosen from its greatest length and the device if
    None.

    Writes into `output` [B, HQ, D], of any of these dtypes, and `lse` [B, HQ], float32, where given, and allocates them
    otherwise, the output in the query's dtype. Page ids and lengths are checked on the CPU only. Raises `BadArgument`.
    """
    check_query(query)
    launch.require_launchable("query", query.device)
    shape = check_pages("pages", pages, query)
    num_seqs, num_heads, head_dim = query.shape
    device = query.device
    if pages.device != device:
        raise BadArgument("pages", f"is on {pages.device}, expected {device}")
    check_tensor("block_tables", block_tables, (num_seqs, None), dtype=torch.int32, device=device)
    check_tensor("seq_lens", seq_lens, (num_seqs,), dtype=torch.int32, device=device)
    check_page_ids("block_tables", block_tables, shape.num_slots, negative=True)
    max_tokens = block_tables.shape[1] * shape.page_size
    check_lengths("seq_lens", seq_lens, max_tokens)
    if num_seqs > _GRID_MAX:
        raise BadArgument("query", f"has {num_seqs} sequences, expected at most {_GRID_MAX}")
    state = allocate_state(
        (num_seqs, num_heads), head_dim, dtype=query.dtype, device=device, output=output, lse=lse
    )
    if num_seqs == 0:
        return state

    group = num_heads // shape.num_kv_heads
    variant = decode_variant(query.dtype, head_dim, shape.page_size, group)
    num_blocks = shape.num_kv_heads * ceil_div(group, variant.constants["BH"])
    if num_splits is None:
        num_splits = choose_num_splits(num_seqs * num_blocks, max_tokens, launch.num_multiprocessors(device))
    elif not 1 <= num_splits <= NUM_SPLITS_MAX:
        raise BadArgument("num_splits", f"is {num_splits}, expected 1 to {NUM_SPLITS_MAX}")
    if num_splits == 1:
        parts = AttentionState(state.output[None], state.lse[None])
    else:
        parts = AttentionState(
            torch.empty((num_splits, num_seqs, num_heads, head_dim), dtype=torch.float32, device=device),
            torch.empty((num_splits, num_seqs, num_heads), dtype=torch.float32, device=device),
        )
    with launch.on(device):
        _paged_decode_kernel[(num_splits, num_blocks, num_seqs)](
            p_query=query,
            p_pages=pages,
            p_tables=block_tables,
            p_lens=seq_lens,
            p_output=parts.output,
            p_lse=parts.lse,
            num_splits=num_splits,
            scale_log2=scale * LOG2_E,
            stride_qb=query.stride(0),
            stride_qh=query.stride(1),
            stride_slot=pages.stride(0),
            stride_plane=pages.stride(1),
            stride_token=pages.stride(2),
            stride_head=pages.stride(3),
            stride_tb=block_tables.stride(0),
            stride_os=parts.output.stride(0),
            stride_ob=parts.output.stride(1),
            stride_oh=parts.output.stride(2),
            stride_ls=parts.lse.stride(0),
            stride_lb=parts.lse.stride(1),
            **variant.constants,
            EMULATE_BFLOAT16=language.EMULATE_BFLOAT16,
            **launch.options(variant),
        )
    if num_splits > 1:
        merge_states(parts.output, parts.lse, output=state.output, lse=state.lse)
    return state


def paged_decode_reference(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> AttentionState:
    """The definition of `paged_decode`, computed and returned in `dtype`. Arguments and shapes as there."""
    state = AttentionState(torch.empty(query.shape, dtype=dtype), torch.empty(query.shape[:2], dtype=dtype))
    for i, (table, length) in enumerate(zip(block_tables.tolist(), seq_lens.tolist(), strict=True)):
        key, value = pages_reference(pages, table, length)
        visible = torch.ones(1, key.shape[0], dtype=torch.bool)
        output, lse = attention_reference(query[i : i + 1], key, value, visible, scale=scale, dtype=dtype)
        state.output[i], state.lse[i] = output[0], lse[0]
    return state


def choose_num_splits(num_programs: int, max_tokens: int, num_multiprocessors: int) -> int:
    """Splits that give the device about two programs a multiprocessor, none of them without some work to do.

    `num_programs` is how many there are without splitting, `max_tokens` the greatest length a sequence may have: the
    lengths themselves are on the device, and asking for them would make the host wait.
    """
    wanted = ceil_div(2 * num_multiprocessors, max(1, num_programs))
    return max(1, min(wanted, ceil_div(max_tokens, SPLIT_TOKENS_MIN), NUM_SPLITS_MAX))


def decode_variant(dtype: torch.dtype, head_dim: int, page_size: int, group: int) -> Variant:
    """The form in which the kernel is compiled. `group`: query heads that share a key/value head.

    Found with the compile report: the largest blocks that spill nothing on sm_90 and at most 16 bytes elsewhere.
    """
    rows = min(64, max(16, next_power_of_2(group)))  # 16: the least that a tensor core takes
    constants = {"G": group, "D": head_dim, "PAGE": page_size, "BH": rows, "BD": max(16, next_power_of_2(head_dim))}
    if dtype == torch.float32:
        return Variant({**constants, "BN": 32}, num_warps=8, num_stages=2)
    return Variant({**constants, "BN": 64}, num_warps=4, num_stages=3)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _paged_decode_kernel(
    p_query: tl.tensor, p_pages: tl.tensor, p_tables: tl.tensor, p_lens: tl.tensor, p_output: tl.tensor,
    p_lse: tl.tensor,
    num_splits: tl.tensor, scale_log2: tl.tensor,
    stride_qb: tl.tensor, stride_qh: tl.tensor,
    stride_slot: tl.tensor, stride_plane: tl.tensor, stride_token: tl.tensor, stride_head: tl.tensor,
    stride_tb: tl.tensor,
    stride_os: tl.tensor, stride_ob: tl.tensor, stride_oh: tl.tensor, stride_ls: tl.tensor, stride_lb: tl.tensor,
    G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EMULATE_BFLOAT16: tl.constexpr,
) -> None:
    # A program attends BH query heads of one key/value head to one split of one sequence.
    i_s = tl.program_id(0).to(tl.int64)
    i_kv = tl.program_id(1) // tl.cdiv(G, BH)
    i_block = tl.program_id(1) % tl.cdiv(G, BH)
    i_b = tl.program_id(2).to(tl.int64)

    # Splits are whole blocks of keys; those that a short sequence does not need stay empty.
    length = tl.load(p_lens + i_b)
    split = tl.cdiv(tl.cdiv(length, BN), num_splits) * BN
    start = tl.program_id(0) * split
    end = tl.minimum(start + split, length)

    o_g = i_block * BH + tl.arange(0, BH)
    m_g = o_g < G
    o_h = i_kv * G + o_g
    o_d = tl.arange(0, BD)
    m_q = m_g[:, None] & (o_d < D)[None, :]
    b_q = tl.load(p_query + i_b * stride_qb + (o_h * stride_qh)[:, None] + o_d[None, :], mask=m_q, other=0.0)

    b_max = tl.full([BH], float("-inf"), tl.float32)
    b_sum = tl.zeros([BH], tl.float32)
    b_acc = tl.zeros([BH, BD], tl.float32)
    b_max, b_sum, b_acc = attend_pages(
        b_q, p_tables + i_b * stride_tb, p_pages + i_kv.to(tl.int64) * stride_head, start, end, b_max, b_sum, b_acc,
        stride_slot, stride_plane, stride_token, scale_log2, D, PAGE, BN, BD, EMULATE_BFLOAT16,
    )
    b_out, b_lse = finish(b_max, b_sum, b_acc)
    p_out = p_output + i_s * stride_os + i_b * stride_ob
    tl.store(
        p_out + (o_h * stride_oh)[:, None] + o_d[None, :],
        narrow(b_out, p_output.dtype.element_ty, EMULATE_BFLOAT16),
        mask=m_q,
    )
    tl.store(p_lse + i_s * stride_ls + i_b * stride_lb + o_h, b_lse, mask=m_g)
