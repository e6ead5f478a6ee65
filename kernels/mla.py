"""Paged decode of multi-head latent attention (MLA): all heads share one latent vector a token.

The vector has a latent, which serves as key and as value, and a rope part, which is key only. Queries come absorbed:
multiplied by the key projection, so that they meet the latent itself; the value projection is applied to what comes
out. One load of a token serves all heads, as key and as value.

Chunked prefill is the same call: once the new tokens' vectors are in their pages, each new token is a row of its own,
with its sequence's table and as many tokens as it sees. As a token alone has many heads, nothing is lost by that.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from hicache.kernels import language, launch
from hicache.kernels.checks import check_launchable_query, check_tables, check_tensor, stored_dtypes
from hicache.kernels.errors import BadArgument
from hicache.kernels.language import absorb, finish, narrow, product, start, widen
from hicache.kernels.launch import Variant, ceil_div, next_power_of_2
from hicache.kernels.merge import check_initial
from hicache.kernels.scoring import PLAIN, Scoring, check_scoring
from hicache.kernels.splits import GRID_MAX, allocate_reduction, resolve_num_splits
from hicache.kernels.state import AttentionState, attention_reference, pages_reference

_LATENT_DIM_MAX: Final = 512
_ROPE_DIM_MAX: Final = 64


def mla_decode(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    latent_dim: int,
    scale: float,
    scoring: Scoring = PLAIN,
    page_scales: torch.Tensor | None = None,
    num_splits: int | None = None,
    initial: AttentionState | None = None,
    output: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> AttentionState:
    """Attend one query token in each of `B` rows to the pages of its sequence, by the Triton kernel.

    query [B, HQ, DL + DR], float16, bfloat16 or float32: of each head the part that meets the latent, of DL =
    `latent_dim` elements, then that which meets the rope part; DL a power of two, 16 to 512, and DR 16 to 64. pages
    [num_slots, page_size, DL + DR], one layer of the vectors of all tokens, of the query's dtype or, for half
    precision, float8_e4m3fn or float8_e5m2; the last dimension contiguous, any other stride. page_scales float32
    [num_slots], any stride, at least 0: multiply what is stored; None for 1.

    block_tables int32 [B, max_pages], where a negative id is a page that is not in this memory and is passed over,
    seq_lens int32 [B], num_splits, initial and workspace as for `paged_decode`, and so is what is said there of CUDA
    graphs and waiting. `scoring` without a window: no model of this kind has one. Writes into `output` [B, HQ, DL] and
    `lse` [B, HQ]; allocates what is not given. Raises `BadArgument`.
    """
    check_launchable_query(query)
    num_rows, num_heads, head_dim = query.shape
    device = query.device
    if not 16 <= latent_dim <= _LATENT_DIM_MAX or latent_dim & (latent_dim - 1):
        raise BadArgument("latent_dim", f"is {latent_dim}, expected a power of two from 16 to {_LATENT_DIM_MAX}")
    if not 16 <= head_dim - latent_dim <= _ROPE_DIM_MAX:
        expected = f"{latent_dim + 16} to {latent_dim + _ROPE_DIM_MAX}"
        raise BadArgument("query", f"has heads of {head_dim} elements, expected {expected} with this latent_dim")
    check_tensor("pages", pages, (None, None, head_dim), dtype=stored_dtypes(query), device=device)
    num_slots, page_size = pages.shape[:2]
    if page_size < 1:
        raise BadArgument("pages", "has pages of 0 tokens, expected at least 1")
    if page_scales is not None:
        check_tensor(
            "page_scales", page_scales, (num_slots,), dtype=torch.float32, device=device, contiguous=False
        )
    max_tokens = check_tables(
        ("block_tables", "seq_lens"), block_tables, seq_lens, num_rows,
        num_slots=num_slots, page_size=page_size, device=device,
    )  # fmt: skip
    check_scoring(scoring, num_heads, device, takes_window=False)
    if num_rows > GRID_MAX:
        raise BadArgument("query", f"has {num_rows} rows, expected at most {GRID_MAX}")
    check_initial(initial, (num_rows, num_heads), latent_dim, device)

    variant = mla_variant(
        query.dtype, pages.dtype, latent_dim, head_dim - latent_dim, page_size, num_heads,
        shared_bytes=launch.shared_bytes(device),
    )  # fmt: skip
    num_blocks = ceil_div(num_heads, variant.constants["BM"])
    num_splits = resolve_num_splits("num_splits", num_splits, num_rows * num_blocks, max_tokens, scoring, device)
    reduction = allocate_reduction(
        num_splits, query, latent_dim, initial=initial, output=output, lse=lse, workspace=workspace
    )
    if num_rows == 0:
        return reduction.result
    parts = reduction.parts
    scale_in, cap_log2 = launch.score_scales(scale, scoring.soft_cap)
    stored = launch.loadable(pages)
    with launch.on(device):
        _mla_decode_kernel[(num_splits * num_blocks, 1, num_rows)](
            p_query=query,
            p_pages=stored,
            p_scales=page_scales,
            p_tables=block_tables,
            p_lens=seq_lens,
            p_sinks=scoring.sinks,
            p_output=parts.output,
            p_lse=parts.lse,
            num_heads=num_heads,
            num_splits=num_splits,
            num_blocks=num_blocks,
            scale_in=scale_in,
            cap_log2=cap_log2,
            stride_qt=query.stride(0),
            stride_qh=query.stride(1),
            stride_slot=stored.stride(0),
            stride_token=stored.stride(1),
            stride_ss=0 if page_scales is None else page_scales.stride(0),
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
    return reduction.finish()


def mla_decode_reference(
    query: torch.Tensor,
    pages: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    latent_dim: int,
    scale: float,
    scoring: Scoring = PLAIN,
    page_scales: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> AttentionState:
    """The definition of `mla_decode`, computed and returned in `dtype`. Arguments and shapes as there."""
    num_rows, num_heads, _ = query.shape
    state = AttentionState(
        torch.empty((num_rows, num_heads, latent_dim), dtype=dtype), torch.empty((num_rows, num_heads), dtype=dtype)
    )
    # One key/value head; its values are the latent again.
    planes = pages[:, None, :, None, :].expand(-1, 2, -1, -1, -1)
    scales = None if page_scales is None else page_scales[:, None, None].expand(-1, 2, 1)
    for i, (table, length) in enumerate(zip(block_tables.tolist(), seq_lens.tolist(), strict=True)):
        key = pages_reference(planes, table, length, scales=scales, dtype=dtype).key
        visible = torch.ones(1, key.shape[0], dtype=torch.bool)
        output, lse = attention_reference(
            query[i : i + 1], key, key[..., :latent_dim], visible, scale=scale, scoring=scoring, dtype=dtype
        )
        state.output[i], state.lse[i] = output[0], lse[0]
    return state


def mla_variant(
    dtype: torch.dtype, stored: torch.dtype, latent_dim: int, rope_dim: int, page_size: int, num_heads: int, *,
    shared_bytes: int,
) -> Variant:  # fmt: skip
    """The form in which the kernel is compiled, for a query of `dtype` and vectors `stored` in another or the same, on
    a GPU where a program may have `shared_bytes` of shared memory.

    Found with the compile report: the largest blocks that spill nothing on sm_90 and next to nothing elsewhere.
    """
    has_room = stored == dtype and shared_bytes > launch.SHARED_BYTES_LEAST  # for what tensor cores read from there
    rows_max = 16 if dtype == torch.float32 else 64 if has_room else 32
    constants = {
        "DL": latent_dim,
        "DR": rope_dim,
        "PAGE": page_size,
        "BM": min(rows_max, max(16, next_power_of_2(num_heads))),  # 16: the least that a tensor core takes
        "BR": next_power_of_2(rope_dim),
    }
    if dtype == torch.float32:
        return Variant({**constants, "BN": 16}, num_warps=8, num_stages=2)
    return Variant({**constants, "BN": 32}, num_warps=8, num_stages=3)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _mla_decode_kernel(
    p_query: tl.tensor, p_pages: tl.tensor, p_scales: tl.tensor, p_tables: tl.tensor, p_lens: tl.tensor,
    p_sinks: tl.tensor, p_output: tl.tensor, p_lse: tl.tensor,
    num_heads: tl.tensor, num_splits: tl.tensor, num_blocks: tl.tensor, scale_in: tl.tensor, cap_log2: tl.tensor,
    stride_qt: tl.tensor, stride_qh: tl.tensor, stride_slot: tl.tensor, stride_token: tl.tensor,
    stride_ss: tl.tensor, stride_tb: tl.tensor,
    stride_os: tl.tensor, stride_ot: tl.tensor, stride_oh: tl.tensor, stride_ls: tl.tensor, stride_lt: tl.tensor,
    DL: tl.constexpr, DR: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, EMULATE_BFLOAT16: tl.constexpr,
) -> None:
    # A program attends BM heads to one split of one sequence. The programs of one split lie side by side: what one of
    # them has loaded, the others find in the cache.
    i_split = tl.program_id(0) // num_blocks
    i_b = tl.program_id(2).to(tl.int64)
    length = tl.load(p_lens + i_b)
    split = tl.cdiv(tl.cdiv(length, BN), num_splits) * BN
    begin = i_split * split
    end = tl.minimum(begin + split, length)

    o_h = tl.program_id(0) % num_blocks * BM + tl.arange(0, BM)
    m_h = o_h < num_heads
    o_l = tl.arange(0, DL)
    o_r = tl.arange(0, BR)
    m_r = o_r < DR
    p_q = p_query + (i_b * stride_qt + o_h * stride_qh)[:, None]
    b_q = tl.load(p_q + o_l[None, :], mask=m_h[:, None], other=0.0)
    b_q_rope = tl.load(p_q + DL + o_r[None, :], mask=m_h[:, None] & m_r[None, :], other=0.0)

    b_max, b_sum = start(o_h, m_h, p_sinks, i_split == 0, BM)
    b_acc = tl.zeros([BM, DL], tl.float32)
    for i_n in range(begin, end, BN):
        o_n = i_n + tl.arange(0, BN)
        m_n = o_n < end
        b_page = tl.load(p_tables + i_b * stride_tb + o_n // PAGE, mask=m_n, other=-1)
        m_n = m_n & (b_page >= 0)
        # In int64: a slot of a large arena lies further than 2**31 elements away.
        b_slot = b_page.to(tl.int64)
        o_kv = b_slot * stride_slot + (o_n % PAGE) * stride_token
        b_latent = tl.load(p_pages + o_kv[:, None] + o_l[None, :], mask=m_n[:, None], other=0.0)
        b_rope = tl.load(
            p_pages + DL + o_kv[None, :] + o_r[:, None], mask=m_n[None, :] & m_r[:, None], other=0.0
        )
        b_latent = widen(b_latent, b_q.dtype, EMULATE_BFLOAT16)
        b_s = product(b_q, tl.trans(b_latent), EMULATE_BFLOAT16)
        b_s += product(b_q_rope, widen(b_rope, b_q.dtype, EMULATE_BFLOAT16), EMULATE_BFLOAT16)
        b_scale = None
        if p_scales is not None:
            b_scale = tl.load(p_scales + b_slot * stride_ss, mask=m_n, other=0.0)
            b_s *= b_scale[None, :]
        b_max, b_sum, b_acc = absorb(
            b_s, b_latent, m_n[None, :], b_scale, b_max, b_sum, b_acc, scale_in, cap_log2, EMULATE_BFLOAT16
        )
    b_out, b_lse = finish(b_max, b_sum, b_acc)
    p_out = p_output + i_split.to(tl.int64) * stride_os + i_b * stride_ot
    tl.store(
        p_out + (o_h * stride_oh)[:, None] + o_l[None, :],
        narrow(b_out, p_output.dtype.element_ty, EMULATE_BFLOAT16),
        mask=m_h[:, None],
    )
    tl.store(p_lse + i_split.to(tl.int64) * stride_ls + i_b * stride_lt + o_h, b_lse, mask=m_h)
