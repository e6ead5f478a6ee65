"""RoPE re-rotation: keys that were stored at one position, turned to another.

A rotated key is `R(p θ) k`: its pairs of elements, turned by the position times a frequency each. Rotations add up, so
`R((p + δ) θ) k = R(δ θ) R(p θ) k`: a stored key is moved by `δ` tokens without knowing where it was. That makes pages
of a document usable wherever the document stands in a prompt. Values carry no position.

How exact this is. In exact arithmetic the turned key *is* the key at the new position. Computed, it differs from one
that was rotated once by one more rounding to the pages' dtype, and by what the model's own angles were off: models
compute `p θ` in float32, wrong by up to `p · 2⁻²⁴` radians, while the angle turned by here is computed in float64. It
is **not** what the model would compute for the document at the new place: keys and values of every layer but the first
depend on what stood before. That is for the caller to judge; nothing in the cache turns keys on its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import triton
import triton.language as tl

from hicache.kernels import language, launch
from hicache.kernels.checks import FLOAT_DTYPES, check_page_ids, check_tensor
from hicache.kernels.errors import BadArgument
from hicache.kernels.language import narrow
from hicache.kernels.launch import Path, Variant, ceil_div, next_power_of_2


class Pairing(Enum):
    """Which two elements of a key are turned together."""

    HALVES = "halves"
    """Element `i` and element `i + rotary_dim / 2`: Llama, Qwen, Mistral, GPT-NeoX."""
    NEIGHBOURS = "neighbours"
    """Elements `2 i` and `2 i + 1`: GPT-J, DeepSeek as published."""


@dataclass(frozen=True)
class Rope:
    """Frequencies of a model's rotary embedding."""

    frequencies: torch.Tensor
    """float64 [rotary_dim / 2], radians a token. Where pages are on another device, each call copies them there, for
    which the host waits."""
    pairing: Pairing = Pairing.HALVES

    @classmethod
    def plain(cls, rotary_dim: int, *, base: float = 10_000.0, pairing: Pairing = Pairing.HALVES) -> "Rope":
        """`base ** (-2 i / rotary_dim)`. Raises `BadArgument` for an odd or empty dimension, or a base below 1."""
        if rotary_dim < 2 or rotary_dim % 2:
            raise BadArgument("rotary_dim", f"is {rotary_dim}, expected an even number of at least 2")
        if not 1.0 <= base < math.inf:
            raise BadArgument("base", f"is {base}, expected a number of at least 1")
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
        return cls(base**-exponents, pairing)

    @classmethod
    def of_config(cls, parameters: Mapping[str, Any], head_dim: int, *, pairing: Pairing = Pairing.HALVES) -> "Rope":
        """From a model's `rope_parameters`, as transformers names them: `rope_theta`, `partial_rotary_factor`,
        `rope_type` and what that type needs.

        Types whose frequencies are the same at every position can be turned: `default`, `linear`, `llama3` and `yarn`
        (which scales keys as well; turning leaves that alone). Those whose frequencies follow the length of the prompt
        (`dynamic`, `longrope`) cannot: `BadArgument`, as for a type that is not known here.
        """
        kind = parameters.get("rope_type", "default")
        base = _positive(parameters, "rope_theta", 10_000.0)
        rotary_dim = int(head_dim * _positive(parameters, "partial_rotary_factor", 1.0))
        plain = cls.plain(rotary_dim, base=base, pairing=pairing)
        if kind == "default":
            return plain
        if kind == "linear":
            return cls(plain.frequencies / _positive(parameters, "factor"), pairing)
        if kind == "llama3":
            return cls(_llama3(plain.frequencies, parameters), pairing)
        if kind == "yarn":
            return cls(_yarn(plain.frequencies, base, parameters), pairing)
        raise BadArgument("rope_type", f"is {kind!r}, expected default, linear, llama3 or yarn: frequencies that stay")


def rotate_pages(
    pages: torch.Tensor, page_ids: torch.Tensor, deltas: torch.Tensor, rope: Rope, *, path: Path | None = None
) -> None:
    """Turn the keys of some pages to new positions, in place.

    pages [num_slots, 2, page_size, H, D], float16, bfloat16 or float32, D contiguous and at least as long as what
    `rope` turns (the rest of a key stays); page_ids int32 [n], no page twice, a negative one is passed over; deltas
    int32 or int64 [n], by how many tokens each page moves on, negative for back; all on one device. Values are not
    touched. On CUDA the work is queued on the current stream; on the CPU it is done on return. Ids are checked on the
    CPU only. Raises `BadArgument`.
    """
    check_tensor("pages", pages, (None, 2, None, None, None), dtype=FLOAT_DTYPES)
    check_tensor("page_ids", page_ids, (None,), dtype=torch.int32, device=pages.device)
    check_tensor("deltas", deltas, tuple(page_ids.shape), dtype=(torch.int32, torch.int64), device=pages.device)
    half = rope.frequencies.shape[0]
    if 2 * half > pages.shape[4]:
        raise BadArgument("rope", f"turns {2 * half} elements, the keys have {pages.shape[4]}")
    check_page_ids("page_ids", page_ids, pages.shape[0], negative=True)
    turns = _turns(deltas, rope)
    if launch.choose_path("pages", pages.device, path) is Path.TRITON:
        _launch(pages, page_ids, turns, rope)
    else:
        _rotate_torch(pages, page_ids, turns, rope)


def rotate_pages_reference(
    pages: torch.Tensor, page_ids: torch.Tensor, deltas: torch.Tensor, rope: Rope
) -> torch.Tensor:
    """The definition: the keys of all slots after `rotate_pages`, float64 [num_slots, page_size, H, D]."""
    keys = pages[:, 0].to(torch.float64, copy=True)
    for page, delta in zip(page_ids.tolist(), deltas.tolist(), strict=True):
        if page >= 0:
            turned = _halves(keys[page], rope)
            pairs = torch.complex(*turned) * torch.polar(torch.ones_like(rope.frequencies), delta * rope.frequencies)
            turned[0].copy_(pairs.real)
            turned[1].copy_(pairs.imag)
    return keys


def rotate_variant(rotary_dim: int, rows: int) -> Variant:
    """The form in which the kernel is compiled, for pages of `rows` keys: a program turns about 2,048 pairs."""
    block = next_power_of_2(rotary_dim // 2)
    return Variant(
        {"HALF": rotary_dim // 2, "BR": min(next_power_of_2(rows), max(1, 2048 // block)), "BD": block},
        num_warps=4,
        num_stages=1,
    )


def _positive(parameters: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = parameters.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or not 0.0 < value < math.inf:
        raise BadArgument(name, f"is {value!r}, expected a number above 0")
    return float(value)


def _llama3(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths stretched, short ones kept, between them a blend: what Llama 3.1 is trained with."""
    factor, low, high, length = (
        _positive(parameters, name)
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if low >= high:
        raise BadArgument("low_freq_factor", f"is {low}, expected less than high_freq_factor, {high}")
    turns = length * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / factor)


def _yarn(frequencies: torch.Tensor, base: float, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Peng et al., "YaRN", section 3.2: frequencies that turn less than `beta_slow` times over the original length are
    stretched, those above `beta_fast` kept, and a ramp over the elements between."""
    factor, length = (_positive(parameters, name) for name in ("factor", "original_max_position_embeddings"))
    if base == 1.0:
        raise BadArgument("rope_theta", "is 1, expected more: all frequencies are the same")
    half = frequencies.shape[0]

    def element(turns: float) -> float:
        """Where in the frequencies one turns so often."""
        return half * math.log(length / (turns * 2 * math.pi)) / math.log(base)

    low, high = element(_positive(parameters, "beta_fast", 32.0)), element(_positive(parameters, "beta_slow", 1.0))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    stretched = ((torch.arange(half, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return frequencies * (1.0 - stretched + stretched / factor)


def _turns(deltas: torch.Tensor, rope: Rope) -> torch.Tensor:
    """float32 [n, 2, rotary_dim / 2]: cosines and sines, from angles in float64: in float32 the angle of a million
    tokens would be off by 0.03."""
    angles = deltas.double()[:, None] * rope.frequencies.to(deltas.device)
    return torch.stack([angles.cos(), angles.sin()], dim=1).float()


def _halves(keys: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and second elements of the pairs, [..., rotary_dim / 2] each."""
    half = rope.frequencies.shape[0]
    if rope.pairing is Pairing.HALVES:
        return keys[..., :half], keys[..., half : 2 * half]
    return keys[..., 0 : 2 * half : 2], keys[..., 1 : 2 * half : 2]


def _rotate_torch(pages: torch.Tensor, page_ids: torch.Tensor, turns: torch.Tensor, rope: Rope) -> None:
    here = page_ids >= 0
    ids = page_ids[here].long()
    cos, sin = turns[here][:, :, None, None].unbind(1)
    keys = pages[ids, 0].float()
    first, second = _halves(keys, rope)
    # Both before either is written: they are views of what they are computed from.
    turned = first * cos - second * sin, second * cos + first * sin
    first.copy_(turned[0])
    second.copy_(turned[1])
    pages[ids, 0] = keys.to(pages.dtype)


def _launch(pages: torch.Tensor, page_ids: torch.Tensor, turns: torch.Tensor, rope: Rope) -> None:
    _, _, page_size, num_kv_heads, _ = pages.shape
    rows = page_size * num_kv_heads
    if not page_ids.shape[0] or not rows:
        return
    variant = rotate_variant(2 * rope.frequencies.shape[0], rows)
    with launch.on(pages.device):
        _rotate_pages_kernel[(page_ids.shape[0], ceil_div(rows, variant.constants["BR"]))](
            p_pages=pages,
            p_page_ids=page_ids,
            p_turns=turns,
            num_rows=rows,
            num_kv_heads=num_kv_heads,
            stride_slot=pages.stride(0),
            stride_token=pages.stride(2),
            stride_head=pages.stride(3),
            NEIGHBOURS=rope.pairing is Pairing.NEIGHBOURS,
            **variant.constants,
            EMULATE_BFLOAT16=language.EMULATE_BFLOAT16,
            **launch.options(variant),
        )


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _rotate_pages_kernel(
    p_pages: tl.tensor, p_page_ids: tl.tensor, p_turns: tl.tensor, num_rows: tl.tensor, num_kv_heads: tl.tensor,
    stride_slot: tl.tensor, stride_token: tl.tensor, stride_head: tl.tensor,
    HALF: tl.constexpr, NEIGHBOURS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, EMULATE_BFLOAT16: tl.constexpr,
) -> None:
    # A program turns BR keys of one page; a row is one head of one token.
    i_page = tl.program_id(0)
    page = tl.load(p_page_ids + i_page).to(tl.int64)
    o_row = tl.program_id(1) * BR + tl.arange(0, BR)
    o_d = tl.arange(0, BD)
    m_d = o_d < HALF
    m_pair = ((o_row < num_rows) & (page >= 0))[:, None] & m_d[None, :]
    o_key = page * stride_slot + (o_row // num_kv_heads).to(tl.int64) * stride_token
    o_key += (o_row % num_kv_heads).to(tl.int64) * stride_head
    p_turn = p_turns + i_page.to(tl.int64) * 2 * HALF + o_d
    b_cos = tl.load(p_turn, mask=m_d, other=1.0)[None, :]
    b_sin = tl.load(p_turn + HALF, mask=m_d, other=0.0)[None, :]
    if NEIGHBOURS:
        p_first = p_pages + o_key[:, None] + (2 * o_d)[None, :]
        p_second = p_first + 1
    else:
        p_first = p_pages + o_key[:, None] + o_d[None, :]
        p_second = p_first + HALF
    b_first = tl.load(p_first, mask=m_pair, other=0.0).to(tl.float32)
    b_second = tl.load(p_second, mask=m_pair, other=0.0).to(tl.float32)
    dtype: tl.constexpr = p_pages.dtype.element_ty
    tl.store(p_first, narrow(b_first * b_cos - b_second * b_sin, dtype, EMULATE_BFLOAT16), mask=m_pair)
    tl.store(p_second, narrow(b_second * b_cos + b_first * b_sin, dtype, EMULATE_BFLOAT16), mask=m_pair)
