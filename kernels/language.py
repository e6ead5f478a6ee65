"""Device functions that several kernels share.

Letters as in `README.md`: `b_` a loaded block, `o_` offsets, `m_` a mask. Sizes in capitals are constexpr. Parameters
that may be None cost nothing when they are: the branch is left out when the kernel is compiled.
"""

from typing import Final

import triton
import triton.language as tl

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
"""Whether `TRITON_INTERPRET=1` was set when the kernels were imported: they then run on CPU tensors, in numpy."""

EMULATE_BFLOAT16 = INTERPRETED
"""The constexpr of that name. The interpreter keeps bfloat16 as bit patterns in `uint16` and computes with the
patterns, silently; with this flag kernels cast to float32 before they compute and round by hand before they narrow. It
also widens float8_e5m2 wrongly below 2**-14. Off on a GPU, where the casts would only cost registers."""

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


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
def widen(b_x: tl.tensor, dtype: tl.constexpr, EMULATE_BFLOAT16: tl.constexpr) -> tl.tensor:
    """Stored keys or values in the type `dtype` of the query; exact.

    `uint8` stands for float8_e4m3fn on a GPU that cannot convert it: exponent and mantissa are those of a float16 that
    is 256 times too small, subnormals included.
    """
    if b_x.dtype == dtype:
        b_y = b_x
    elif b_x.dtype == tl.uint8:
        b_bits = b_x.to(tl.uint16)
        b_half = (((b_bits & 0x80) << 8) | ((b_bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        b_y = tl.where((b_bits & 0x7F) == 0x7F, float("nan"), b_half).to(dtype)
    elif EMULATE_BFLOAT16 and b_x.dtype == tl.float8e5:
        # The upper half of a float16.
        b_y = (b_x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    else:
        b_y = b_x.to(dtype)
    return b_y


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def product(b_a: tl.tensor, b_b: tl.tensor, EMULATE_BFLOAT16: tl.constexpr) -> tl.tensor:
    """Matrix product, accumulated in float32."""
    if EMULATE_BFLOAT16:
        b_c = tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), input_precision="ieee")
    else:
        b_c = tl.dot(b_a, b_b, input_precision="ieee")
    return b_c


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def tanh(b_x: tl.tensor) -> tl.tensor:
    """Hyperbolic tangent of float32, to a few units of the last place.

    Near 0, where `1 - t` would cancel, by its series; the first term left out is below 1e-8 of it.
    """
    b_t = tl.exp2(tl.abs(b_x) * (-2.0 * _LOG2_E))
    b_far = (1.0 - b_t) / (1.0 + b_t)
    b_far = tl.where(b_x < 0.0, -b_far, b_far)
    b_2 = b_x * b_x
    b_near = b_x * (1.0 + b_2 * (-1.0 / 3 + b_2 * (2.0 / 15 + b_2 * (-17.0 / 315 + b_2 * (62.0 / 2835)))))
    return tl.where(b_2 < 0.0625, b_near, b_far)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def window_range(position: tl.tensor, length: tl.tensor, window: tl.tensor, keep_first: tl.tensor) -> tl.tuple:
    """Which of the tokens 0 to `length` a query at `position` sees through a window.

    They are counted without the gap: token `i` of `count` is `i` for `i < first`, and `i + skip` otherwise.
    Returns first, skip, count.
    """
    least = tl.minimum(tl.maximum(position + 1 - window, 0), length)
    first = tl.minimum(keep_first, least)
    return first, least - first, length - least + first


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def start(o_h: tl.tensor, m_row: tl.tensor, p_sinks: tl.tensor, counts: tl.tensor, BM: tl.constexpr) -> tl.tuple:
    """Greatest score [BM], in units of `log2`, and sum [BM] of rows that have seen no key yet.

    With sinks, row `r` starts with that of head `o_h[r]`, if `counts`: of a query's splits only one may have it.
    """
    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    if p_sinks is not None:
        b_max = tl.load(p_sinks + o_h, mask=m_row & counts, other=float("-inf")) * _LOG2_E
        b_sum = tl.where(b_max == float("-inf"), 0.0, 1.0)
    return b_max, b_sum


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def absorb(
    b_s: tl.tensor, b_v: tl.tensor, m_s: tl.tensor, b_value_scale: tl.tensor, b_max: tl.tensor, b_sum: tl.tensor,
    b_acc: tl.tensor, scale_in: tl.tensor, cap_log2: tl.tensor,
    EMULATE_BFLOAT16: tl.constexpr,
) -> tl.tuple:
    """Take a block of keys into the state of rows, by their products `b_s` [BM, BN] and values `b_v` [BN, BD]: one step
    of online softmax.

    `m_s` [BM or 1, BN] says which key each row may see; `b_value_scale` [BN], at least 0, multiplies each value, None
    for 1. `scale_in` turns products into scores in units of `log2`, or, with `cap_log2`, the cap in the same units,
    into fractions of the cap. The running state is, in units of `log2`, the greatest score `b_max` [BM] (-inf before
    the first visible key), the sum `b_sum` [BM] of `exp2(score - b_max)`, and the values weighted likewise, `b_acc`
    [BM, BD]; all float32. Returns the new state.
    """
    b_s = b_s * scale_in
    if cap_log2 is not None:
        b_s = tanh(b_s) * cap_log2
    b_s = tl.where(m_s, b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    # A row that has seen no key yet has -inf here; 0 in its place keeps -inf - -inf out of the exponents.
    b_pivot = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - b_pivot[:, None])
    b_decay = tl.exp2(b_max - b_pivot)
    b_sum = b_sum * b_decay + tl.sum(b_p, 1)
    b_acc = b_acc * b_decay[:, None]
    if b_value_scale is None:
        b_acc += product(narrow(b_p, b_v.dtype, EMULATE_BFLOAT16), b_v, EMULATE_BFLOAT16)
    else:
        # Relative to the greatest scale: weights stay within the range of float16.
        most = tl.max(b_value_scale, 0)
        most = tl.where(most == 0.0, 1.0, most)
        b_p = narrow(b_p * (b_value_scale / most)[None, :], b_v.dtype, EMULATE_BFLOAT16)
        b_acc += product(b_p, b_v, EMULATE_BFLOAT16) * most
    return b_new, b_sum, b_acc


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def attend_pages(
    b_q: tl.tensor, p_table: tl.tensor, p_pages: tl.tensor, p_scales: tl.tensor, begin: tl.tensor, end: tl.tensor,
    first: tl.tensor, skip: tl.tensor, o_least: tl.tensor, keep_first: tl.tensor,
    b_max: tl.tensor, b_sum: tl.tensor, b_acc: tl.tensor,
    stride_slot: tl.tensor, stride_plane: tl.tensor, stride_token: tl.tensor, stride_ss: tl.tensor,
    stride_sp: tl.tensor, scale_in: tl.tensor, cap_log2: tl.tensor,
    D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EMULATE_BFLOAT16: tl.constexpr,
) -> tl.tuple:
    """Attend rows `b_q` to the tokens `begin` to `end` (exclusive) of one sequence's pages, for one key/value head.

    `p_table` points to the sequence's row of the block table, `p_pages` to the head's first element in slot 0, and
    `p_scales` to its scale there, None without scales. A negative page id is a page that is not in this memory: its
    tokens are passed over. With a window, `begin` and `end` count as `window_range` does, by `first` and `skip`, and
    row `r` sees tokens from `o_least[r]` on and those before `keep_first`; `o_least` is None if all rows see the same,
    `skip` without a window. Returns the state as `absorb`.
    """
    o_d = tl.arange(0, BD)
    m_d = o_d < D
    for i_n in range(begin, end, BN):
        o_n = i_n + tl.arange(0, BN)
        m_n = o_n < end
        if skip is not None:
            o_n += tl.where(o_n < first, 0, skip)
        b_page = tl.load(p_table + o_n // PAGE, mask=m_n, other=-1)
        m_n = m_n & (b_page >= 0)
        # In int64: a slot of a large arena lies further than 2**31 elements away.
        b_slot = b_page.to(tl.int64)
        o_kv = b_slot * stride_slot + (o_n % PAGE) * stride_token
        b_k = tl.load(p_pages + o_kv[None, :] + o_d[:, None], mask=m_n[None, :] & m_d[:, None], other=0.0)
        b_v = tl.load(
            p_pages + stride_plane + o_kv[:, None] + o_d[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0
        )
        b_s = product(b_q, widen(b_k, b_q.dtype, EMULATE_BFLOAT16), EMULATE_BFLOAT16)
        b_value_scale = None
        if p_scales is not None:
            b_s *= tl.load(p_scales + b_slot * stride_ss, mask=m_n, other=0.0)[None, :]
            b_value_scale = tl.load(p_scales + b_slot * stride_ss + stride_sp, mask=m_n, other=0.0)
        m_s = m_n[None, :]
        if o_least is not None:
            m_s = m_s & ((o_n[None, :] >= o_least[:, None]) | (o_n < keep_first)[None, :])
        b_max, b_sum, b_acc = absorb(
            b_s, widen(b_v, b_q.dtype, EMULATE_BFLOAT16), m_s, b_value_scale, b_max, b_sum, b_acc, scale_in, cap_log2,
            EMULATE_BFLOAT16,
        )
    return b_max, b_sum, b_acc


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def finish(b_max: tl.tensor, b_sum: tl.tensor, b_acc: tl.tensor) -> tl.tuple:
    """Output [BM, BD] and natural-log LSE [BM] of a state, both float32; 0 and -inf for a row that saw no key."""
    b_empty = b_sum == 0.0
    b_sum = tl.where(b_empty, 1.0, b_sum)
    b_out = b_acc / b_sum[:, None]
    b_lse = tl.where(b_empty, float("-inf"), (b_max + tl.log2(b_sum)) * _LN_2)
    return b_out, b_lse
