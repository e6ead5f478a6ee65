"""Device functions that several kernels share.

Letters as in `README.md`: `b_` a loaded block, `o_` offsets, `m_` a mask. Sizes in capitals are constexpr.
"""

from typing import Final

import triton
import triton.language as tl

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
"""Whether `TRITON_INTERPRET=1` was set when the kernels were imported: they then run on CPU tensors, in numpy."""

EMULATE_BFLOAT16 = INTERPRETED
"""The constexpr of that name. The interpreter keeps bfloat16 as bit patterns in `uint16` and computes with the
patterns, silently; with this flag kernels cast to float32 before they compute and round by hand before they narrow.
Off on a GPU, where the casts would only cost registers."""


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def narrow(b_x: tl.tensor, dtype: tl.constexpr, EMULATE_BFLOAT16: tl.constexpr) -> tl.tensor:
    """`b_x`, float32, rounded to nearest even in `dtype`.

    The interpreter truncates to bfloat16 whatever rounding is asked for, so there the rounding is done on the bits
    first.
    """
    if EMULATE_BFLOAT16 and dtype == tl.bfloat16:
        b_bits = b_x.to(tl.uint32, bitcast=True)
        b_rounded = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) >> 16
        # Rounding up would carry a NaN into the sign.
        b_half = tl.where(b_x == b_x, b_rounded, (b_bits >> 16) | 0x40)
        b_y = b_half.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        b_y = b_x.to(dtype)
    return b_y


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def attend_block(
    b_q: tl.tensor, b_k: tl.tensor, b_v: tl.tensor, m_s: tl.tensor, b_max: tl.tensor, b_sum: tl.tensor,
    b_acc: tl.tensor, scale_log2: tl.tensor,
    EMULATE_BFLOAT16: tl.constexpr,
) -> tl.tuple:
    """Attend rows `b_q` [BM, BD] to one block of keys `b_k` [BD, BN] and values `b_v` [BN, BD]: one step of online
    softmax.

    `m_s` [BM or 1, BN] says which key each row may see. The running state is, in units of `log2`, the greatest score
    `b_max` [BM] (-inf before the first visible key), the sum `b_sum` [BM] of `exp2(score - b_max)`, and the values
    weighted likewise, `b_acc` [BM, BD]; all float32. Returns the new state.
    """
    if EMULATE_BFLOAT16:
        b_s = tl.dot(b_q.to(tl.float32), b_k.to(tl.float32), input_precision="ieee")
    else:
        b_s = tl.dot(b_q, b_k, input_precision="ieee")
    b_s = tl.where(m_s, b_s * scale_log2, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    # A row that has seen no key yet has -inf here; 0 in its place keeps -inf - -inf out of the exponents.
    b_pivot = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - b_pivot[:, None])
    b_decay = tl.exp2(b_max - b_pivot)
    b_sum = b_sum * b_decay + tl.sum(b_p, 1)
    b_acc = b_acc * b_decay[:, None]
    b_p = narrow(b_p, b_v.dtype, EMULATE_BFLOAT16)
    if EMULATE_BFLOAT16:
        b_acc += tl.dot(b_p.to(tl.float32), b_v.to(tl.float32), input_precision="ieee")
    else:
        b_acc += tl.dot(b_p, b_v, input_precision="ieee")
    return b_new, b_sum, b_acc


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def attend_pages(
    b_q: tl.tensor, p_table: tl.tensor, p_pages: tl.tensor, start: tl.tensor, end: tl.tensor, b_max: tl.tensor,
    b_sum: tl.tensor, b_acc: tl.tensor,
    stride_slot: tl.tensor, stride_plane: tl.tensor, stride_token: tl.tensor, scale_log2: tl.tensor,
    D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EMULATE_BFLOAT16: tl.constexpr,
) -> tl.tuple:
    """Attend rows `b_q` to the tokens `start` to `end` (exclusive) of one sequence's pages, for one key/value head.

    `p_table` points to the sequence's row of the block table, `p_pages` to the head's first element in slot 0. A
    negative page id is a page that is not in this memory: its tokens are passed over. Returns the state as
    `attend_block`.
    """
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    for i_n in range(start, end, BN):
        o_n = i_n + tl.arange(0, BN)
        m_n = o_n < end
        b_page = tl.load(p_table + o_n // PAGE, mask=m_n, other=-1)
        m_n = m_n & (b_page >= 0)
        # In int64: a slot of a large arena lies further than 2**31 elements away.
        o_kv = b_page.to(tl.int64) * stride_slot + (o_n % PAGE) * stride_token
        b_k = tl.load(p_pages + o_kv[None, :] + o_d[:, None], mask=m_n[None, :] & m_d[:, None], other=0.0)
        b_v = tl.load(
            p_pages + stride_plane + o_kv[:, None] + o_d[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0
        )
        b_max, b_sum, b_acc = attend_block(
            b_q, b_k, b_v, m_n[None, :], b_max, b_sum, b_acc, scale_log2, EMULATE_BFLOAT16
        )
    return b_max, b_sum, b_acc


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def finish(b_max: tl.tensor, b_sum: tl.tensor, b_acc: tl.tensor) -> tl.tuple:
    """Output [BM, BD] and natural-log LSE [BM] of a state, both float32; 0 and -inf for a row that saw no key."""
    b_empty = b_sum == 0.0
    b_sum = tl.where(b_empty, 1.0, b_sum)
    b_out = b_acc / b_sum[:, None]
    b_lse = tl.where(b_empty, float("-inf"), (b_max + tl.log2(b_sum)) * 0.6931471805599453)
    return b_out, b_lse
