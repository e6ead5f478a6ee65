"""Merge of attention states: attention over several parts of the keys, made one.

With output `o_i` and natural-log LSE `s_i` of part `i`, the state over all parts is `s = log(sum_i exp(s_i))` and
`o = sum_i exp(s_i - s) o_i`: exact for any split of the keys, in any order. An empty part (-inf) has weight 0, and what
its output holds is not looked at.

Sums are taken in the order of the states: whoever puts each part's state where the part stands in the partition, not
where it arrived, gets the same bits whatever the order of arrival.
"""

import torch
import triton
import triton.language as tl

from hicache.kernels import language, launch
from hicache.kernels.checks import FLOAT_DTYPES, check_tensor
from hicache.kernels.errors import BadArgument
from hicache.kernels.language import narrow
from hicache.kernels.launch import Variant, ceil_div, next_power_of_2
from hicache.kernels.state import AttentionState, allocate_state


def merge_states(
    outputs: torch.Tensor,
    lses: torch.Tensor,
    *,
    initial: AttentionState | None = None,
    dtype: torch.dtype | None = None,
    output: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> AttentionState:
    """Merge `n` states by the Triton kernel.

    outputs [n, T, HQ, D], float16, bfloat16 or float32, any stride but in D; lses [n, T, HQ], float32, any stride but
    in HQ; n at least 1. `initial`: one more state, output [T, HQ, D] and LSE [T, HQ], float32, strides as `output` and
    `lse` may have, summed last. Writes into `output` [T, HQ, D] and `lse` [T, HQ] where given, which must not overlap
    the states, but may be those of `initial`; otherwise allocates them, the output in `dtype` (that of `outputs` by
    default). Computes in float32. Raises `BadArgument`.
    """
    check_tensor("outputs", outputs, (None, None, None, None), dtype=FLOAT_DTYPES)
    launch.require_launchable("outputs", outputs.device)
    n, num_tokens, num_heads, head_dim = outputs.shape
    if n < 1:
        raise BadArgument("outputs", "holds no state, expected at least 1")
    check_tensor("lses", lses, (n, num_tokens, num_heads), dtype=torch.float32, device=outputs.device)
    check_initial(initial, (num_tokens, num_heads), head_dim, outputs.device)
    merged = allocate_state(
        (num_tokens, num_heads),
        head_dim,
        dtype=dtype or outputs.dtype,
        device=outputs.device,
        output=output,
        lse=lse,
    )
    if merged.output.numel():
        variant = merge_variant(head_dim)
        num_rows = num_tokens * num_heads
        with launch.on(outputs.device):
            _merge_states_kernel[(ceil_div(num_rows, variant.constants["BR"]),)](
                p_outputs=outputs,
                p_lses=lses,
                p_initial=None if initial is None else initial.output,
                p_initial_lse=None if initial is None else initial.lse,
                p_output=merged.output,
                p_lse=merged.lse,
                n=n,
                num_rows=num_rows,
                num_heads=num_heads,
                stride_n=outputs.stride(0),
                stride_t=outputs.stride(1),
                stride_h=outputs.stride(2),
                stride_ln=lses.stride(0),
                stride_lt=lses.stride(1),
                stride_it=0 if initial is None else initial.output.stride(0),
                stride_ih=0 if initial is None else initial.output.stride(1),
                stride_ilt=0 if initial is None else initial.lse.stride(0),
                stride_ot=merged.output.stride(0),
                stride_oh=merged.output.stride(1),
                stride_olt=merged.lse.stride(0),
                **variant.constants,
                EMULATE_BFLOAT16=language.EMULATE_BFLOAT16,
                **launch.options(variant),
            )
    return merged


def merge_states_reference(
    outputs: torch.Tensor, lses: torch.Tensor, *, dtype: torch.dtype = torch.float64
) -> AttentionState:
    """The definition of `merge_states`, computed and returned in `dtype`. Shapes as there; n may be 0 too."""
    outputs, lses = outputs.to(dtype), lses.to(dtype)
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - torch.where(lse == -torch.inf, 0.0, lse))
    outputs = torch.where((lses == -torch.inf)[..., None], 0.0, outputs)
    return AttentionState((weights[..., None] * outputs).sum(dim=0), lse)


def check_initial(
    initial: AttentionState | None, shape: tuple[int, int], head_dim: int, device: torch.device
) -> None:
    """Refuse a state that is not over `shape` (tokens, heads), float32 and on `device`."""
    if initial is not None:
        check_tensor("initial.output", initial.output, (*shape, head_dim), dtype=torch.float32, device=device)
        check_tensor("initial.lse", initial.lse, shape, dtype=torch.float32, device=device)


def merge_variant(head_dim: int) -> Variant:
    """The form in which the kernel is compiled: a program merges rows of about 2,048 elements together."""
    block = next_power_of_2(head_dim)
    return Variant({"D": head_dim, "BR": max(1, 2048 // block), "BD": block}, num_warps=4, num_stages=1)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _add(
    p_lse: tl.tensor, p_block: tl.tensor, m_row: tl.tensor, m_d: tl.tensor, b_pivot: tl.tensor, b_sum: tl.tensor,
    b_acc: tl.tensor,
) -> tl.tuple:
    b_lse = tl.load(p_lse, mask=m_row, other=float("-inf"))
    b_weight = tl.exp(b_lse - b_pivot)
    # What an empty part left as its output is not read: nothing, or garbage that 0 times would not silence.
    b_o = tl.load(p_block, mask=(b_lse != float("-inf"))[:, None] & m_d[None, :], other=0.0)
    return b_sum + b_weight, b_acc + b_weight[:, None] * b_o.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _merge_states_kernel(
    p_outputs: tl.tensor, p_lses: tl.tensor, p_initial: tl.tensor, p_initial_lse: tl.tensor, p_output: tl.tensor,
    p_lse: tl.tensor, n: tl.tensor, num_rows: tl.tensor, num_heads: tl.tensor,
    stride_n: tl.tensor, stride_t: tl.tensor, stride_h: tl.tensor, stride_ln: tl.tensor, stride_lt: tl.tensor,
    stride_it: tl.tensor, stride_ih: tl.tensor, stride_ilt: tl.tensor,
    stride_ot: tl.tensor, stride_oh: tl.tensor, stride_olt: tl.tensor,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, EMULATE_BFLOAT16: tl.constexpr,
) -> None:
    # One program merges BR rows; a row is one head of one token.
    o_row = tl.program_id(0) * BR + tl.arange(0, BR)
    m_row = o_row < num_rows
    o_t = (o_row // num_heads).to(tl.int64)
    o_h = o_row % num_heads
    o_d = tl.arange(0, BD)
    m_d = o_d < D

    p_row = p_lses + o_t * stride_lt + o_h
    b_pivot = tl.full([BR], float("-inf"), tl.float32)
    for i in range(n):
        b_lse = tl.load(p_row + tl.cast(i, tl.int64) * stride_ln, mask=m_row, other=float("-inf"))
        b_pivot = tl.maximum(b_pivot, b_lse)
    if p_initial is not None:
        p_initial_row = p_initial_lse + o_t * stride_ilt + o_h
        b_pivot = tl.maximum(b_pivot, tl.load(p_initial_row, mask=m_row, other=float("-inf")))
    b_pivot = tl.where(b_pivot == float("-inf"), 0.0, b_pivot)

    b_sum = tl.zeros([BR], tl.float32)
    b_acc = tl.zeros([BR, BD], tl.float32)
    p_block = p_outputs + (o_t * stride_t + o_h * stride_h)[:, None] + o_d[None, :]
    for i in range(n):
        i_n = tl.cast(i, tl.int64)
        b_sum, b_acc = _add(p_row + i_n * stride_ln, p_block + i_n * stride_n, m_row, m_d, b_pivot, b_sum, b_acc)
    if p_initial is not None:
        p_block = p_initial + (o_t * stride_it + o_h * stride_ih)[:, None] + o_d[None, :]
        b_sum, b_acc = _add(p_initial_row, p_block, m_row, m_d, b_pivot, b_sum, b_acc)

    b_empty = b_sum == 0.0
    b_sum = tl.where(b_empty, 1.0, b_sum)
    b_out = narrow(b_acc / b_sum[:, None], p_output.dtype.element_ty, EMULATE_BFLOAT16)
    tl.store(
        p_output + (o_t * stride_ot + o_h * stride_oh)[:, None] + o_d[None, :],
        b_out,
        mask=m_row[:, None] & m_d[None, :],
    )
    b_lse = tl.where(b_empty, float("-inf"), b_pivot + tl.log(b_sum))
    tl.store(p_lse + o_t * stride_olt + o_h, b_lse, mask=m_row)
