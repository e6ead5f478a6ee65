"""Gather and scatter that convert: half-precision or float32 pages of a device, one byte an element in their slots.

The elements of one head in one plane (keys or values) of one layer of one page share a scale: the greatest magnitude
becomes the greatest number of the stored type. `value = stored * scale`, which attention over fp8 pages takes as it is
(`page_scales` of decode and extend). Copying and converting are one pass: each element is read once, in the wide type,
and half or a quarter of the bytes cross the bus.

What is lost: an element `x` of a group with greatest magnitude `m` comes back within `m / 254` as int8 (half a step),
and within `max(|x| / 16, m / 448 / 1024)` as float8 e4m3 (half of its last place), plus one rounding to the pages' own
dtype. A scale is at least 2⁻¹²⁶, so that its inverse is finite: a group of smaller numbers loses as much as one of just
that scale. A group with a NaN or an infinity comes back as NaN: damage stays visible.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl

from hicache.kernels import language, launch
from hicache.kernels.checks import FLOAT_DTYPES, check_page_ids, check_tensor
from hicache.kernels.errors import BadArgument
from hicache.kernels.gather import LayerPages
from hicache.kernels.language import narrow
from hicache.kernels.launch import Path, Variant, next_power_of_2

STORED_MAX: Final = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The types that elements are stored in, and the number that the greatest magnitude of a group becomes."""

EMULATE_FLOAT8 = language.INTERPRETED
"""The constexpr of that name: the interpreter converts to float8 wrongly, see the kernel. Off on a GPU."""

_SCALE_MIN: tl.constexpr = tl.constexpr(2.0**-126)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KVLayers:
    """The layer-first side, as `KVLayers.of` checked it. Build it once, keep it."""

    layers: tuple[torch.Tensor, ...]
    """Each [num_pages, 2, page_size, H, D], float16, bfloat16 or float32; pages contiguous, any page stride."""
    offsets: torch.Tensor
    """int64 [num_layers], elements from the first layer to each, on the layers' device."""
    alignment: int
    """Elements, a power of two, of which every page's address is a multiple."""

    @classmethod
    def of(cls, layers: Sequence[torch.Tensor]) -> "KVLayers":
        """Describe `layers`, alike in shape, dtype, page stride and device; not copied. Raises `BadArgument`."""
        for i, layer in enumerate(layers):
            check_tensor(f"layers[{i}]", layer, (None, 2, None, None, None), dtype=FLOAT_DTYPES)
            if not layer.shape[2:].numel():
                raise BadArgument(f"layers[{i}]", f"has shape {list(layer.shape)}, expected pages that hold something")
            if layer.dtype != layers[0].dtype:
                raise BadArgument(f"layers[{i}]", f"is {layer.dtype}, layers[0] is {layers[0].dtype}")
        rows = LayerPages.of(layers)
        itemsize = layers[0].element_size()
        return cls(tuple(layers), rows.offsets // itemsize, max(1, rows.alignment // itemsize))

    @property
    def device(self) -> torch.device:
        """Where the layers are."""
        return self.layers[0].device


def gather_quantized(
    pages: KVLayers,
    page_ids: torch.Tensor,
    slots: torch.Tensor,
    slot_ids: torch.Tensor,
    scales: torch.Tensor,
    *,
    path: Path | None = None,
) -> None:
    """Convert every layer of the pages `page_ids` into the slots `slot_ids`: layer-first to page-first.

    page_ids, slot_ids int32 or int64 [n], on the device of `pages`, no slot named twice; slots [num_slots, num_layers,
    2, page_size, H, D], int8 or float8_e4m3fn, contiguous; scales float32 [num_slots, num_layers, 2, H], contiguous,
    the rows `slot_ids` of which are written. On CUDA slots and scales are on the same device or in pinned host memory,
    and the work is queued on the current stream; for float8 a GPU before sm_89 has torch do it, and says so once. Ids
    are checked on the CPU only. Raises `BadArgument`.
    """
    _check(pages, page_ids, slots, slot_ids, scales)
    if _takes_kernel(pages, slots, path):
        _launch(pages, page_ids, slots, slot_ids, scales, to_slots=True)
        return
    for i, layer in enumerate(pages.layers):
        wide = layer[page_ids.long()].float()
        scale = (wide.abs().amax(dim=(2, 4)) / STORED_MAX[slots.dtype]).clamp_min(_SCALE_MIN.value)
        scale = torch.where(scale < torch.inf, scale, torch.nan)
        inverse = torch.where(scale > 0.0, 1.0 / scale, 0.0)[:, :, None, :, None]
        # What a damaged group holds is of no account: its scale is NaN.
        stored = torch.where(inverse > 0.0, wide * inverse, 0.0)
        stored = (stored.round() if slots.dtype == torch.int8 else stored).to(slots.dtype)
        slots[slot_ids.long().to(slots.device), i] = stored.to(slots.device)
        scales[slot_ids.long().to(scales.device), i] = scale.to(scales.device)


def scatter_quantized(
    slots: torch.Tensor,
    slot_ids: torch.Tensor,
    scales: torch.Tensor,
    pages: KVLayers,
    page_ids: torch.Tensor,
    *,
    path: Path | None = None,
) -> None:
    """Convert the slots `slot_ids` back into every layer of the pages `page_ids`: page-first to layer-first.

    The reverse of `gather_quantized`, with the same arguments; no page may be named twice.
    """
    _check(pages, page_ids, slots, slot_ids, scales)
    if _takes_kernel(pages, slots, path):
        _launch(pages, page_ids, slots, slot_ids, scales, to_slots=False)
        return
    for i, layer in enumerate(pages.layers):
        scale = scales[slot_ids.long().to(scales.device), i].to(layer.device)[:, :, None, :, None]
        wide = slots[slot_ids.long().to(slots.device), i].to(layer.device).float() * scale
        layer[page_ids.long()] = wide.to(layer.dtype)


def quantized_reference(pages: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition for one layer: what finite `pages` [n, 2, page_size, H, D] come back as, float64, and the scales
    [n, 2, H], float64."""
    wide = pages.double()
    scales = (wide.abs().amax(dim=(2, 4)) / STORED_MAX[dtype]).clamp_min(_SCALE_MIN.value)
    steps = scales[:, :, None, :, None]
    stored = wide / steps
    stored = stored.round() if dtype == torch.int8 else stored.float().to(dtype).double()
    return stored * steps, scales


def quantize_variant(page_size: int, head_dim: int, alignment: int) -> Variant:
    """The form in which the kernels are compiled: a program converts one head of one plane of one layer of one page.

    alignment: elements of which the addresses of pages are multiples."""
    rows, columns = next_power_of_2(page_size), next_power_of_2(head_dim)
    return Variant(
        {"ALIGN": alignment, "PAGE": page_size, "D": head_dim, "BP": rows, "BD": columns},
        num_warps=max(1, min(8, rows * columns // 512)),
        num_stages=1,
    )


def _check(
    pages: KVLayers, page_ids: torch.Tensor, slots: torch.Tensor, slot_ids: torch.Tensor, scales: torch.Tensor
) -> None:
    check_tensor("page_ids", page_ids, (None,), dtype=(torch.int32, torch.int64), device=pages.device)
    check_tensor("slot_ids", slot_ids, tuple(page_ids.shape), dtype=page_ids.dtype, device=pages.device)
    layer = pages.layers[0]
    shape = (None, len(pages.layers), *layer.shape[1:])
    check_tensor("slots", slots, shape, dtype=tuple(STORED_MAX))
    check_tensor("scales", scales, (slots.shape[0], len(pages.layers), 2, layer.shape[3]), dtype=torch.float32)
    for name, tensor in (("slots", slots), ("scales", scales)):
        if not tensor.is_contiguous():
            raise BadArgument(name, "is not contiguous")
        if tensor.device != pages.device and not (pages.device.type == "cuda" and tensor.is_pinned()):
            raise BadArgument(name, f"is on {tensor.device}, expected {pages.device} or, on CUDA, pinned memory")
    check_page_ids("page_ids", page_ids, layer.shape[0], negative=False)
    check_page_ids("slot_ids", slot_ids, slots.shape[0], negative=False)


def _takes_kernel(pages: KVLayers, slots: torch.Tensor, path: Path | None) -> bool:
    if launch.choose_path("pages", pages.device, path) is Path.TORCH:
        return False
    return slots.dtype != torch.float8_e4m3fn or _converts_e4m3(pages.device)


@cache
def _converts_e4m3(device: torch.device) -> bool:
    """Whether kernels can convert to float8_e4m3fn on `device`. If not, says so, once."""
    if launch.compute_capability(device) >= (8, 9):
        return True
    _log.warning("%s has no instructions for float8_e4m3fn (sm_89 and later do): torch converts pages there", device)
    return False


def _launch(
    pages: KVLayers,
    page_ids: torch.Tensor,
    slots: torch.Tensor,
    slot_ids: torch.Tensor,
    scales: torch.Tensor,
    *,
    to_slots: bool,
) -> None:
    layer = pages.layers[0]
    _, _, page_size, num_kv_heads, head_dim = layer.shape
    if not page_ids.shape[0]:
        return
    variant = quantize_variant(page_size, head_dim, pages.alignment)
    kernel = _gather_quantized_kernel if to_slots else _scatter_quantized_kernel
    arguments: dict[str, float | bool]
    if to_slots:
        arguments = {"STORED_MAX": STORED_MAX[slots.dtype], "ROUND": slots.dtype == torch.int8}
        arguments["EMULATE_FLOAT8"] = EMULATE_FLOAT8
    else:
        arguments = {"EMULATE_BFLOAT16": language.EMULATE_BFLOAT16}
    with launch.on(pages.device):
        kernel[(page_ids.shape[0], len(pages.layers), 2 * num_kv_heads)](
            p_pages=layer,
            p_offsets=pages.offsets,
            p_page_ids=page_ids,
            p_slots=slots,
            p_slot_ids=slot_ids,
            p_scales=scales,
            num_kv_heads=num_kv_heads,
            stride_page=layer.stride(0),
            **arguments,
            **variant.constants,
            **launch.options(variant),
        )


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _places(
    p_offsets: tl.tensor, p_page_ids: tl.tensor, p_slot_ids: tl.tensor, num_kv_heads: tl.tensor,
    stride_page: tl.tensor,
    ALIGN: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
) -> tl.tuple:
    """Where the elements of this program are in the pages and in the slots, its scale, and which elements exist."""
    i_layer = tl.program_id(1).to(tl.int64)
    plane, head = tl.program_id(2) // num_kv_heads, tl.program_id(2) % num_kv_heads
    page = tl.load(p_page_ids + tl.program_id(0)).to(tl.int64)
    slot = tl.load(p_slot_ids + tl.program_id(0)).to(tl.int64)
    o_t = tl.arange(0, BP)
    o_d = tl.arange(0, BD)
    m_td = (o_t < PAGE)[:, None] & (o_d < D)[None, :]
    o_td = ((plane * PAGE + o_t) * num_kv_heads + head)[:, None] * D + o_d[None, :]
    # The wrapper knows how offsets from a table are aligned; the compiler would not, and load single words.
    o_page = tl.multiple_of(tl.load(p_offsets + i_layer) + page * stride_page, ALIGN)
    o_group = (slot * tl.num_programs(1) + i_layer) * 2
    o_slot = o_group * PAGE * num_kv_heads * D
    return o_page + o_td, o_slot + o_td, o_group * num_kv_heads + tl.program_id(2), m_td


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _gather_quantized_kernel(
    p_pages: tl.tensor, p_offsets: tl.tensor, p_page_ids: tl.tensor, p_slots: tl.tensor, p_slot_ids: tl.tensor,
    p_scales: tl.tensor, num_kv_heads: tl.tensor,
    stride_page: tl.tensor,
    STORED_MAX: tl.constexpr, ROUND: tl.constexpr, EMULATE_FLOAT8: tl.constexpr,
    ALIGN: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
) -> None:
    o_page, o_slot, o_scale, m_td = _places(
        p_offsets, p_page_ids, p_slot_ids, num_kv_heads, stride_page, ALIGN, PAGE, D, BP, BD
    )
    b_x = tl.load(p_pages + o_page, mask=m_td, other=0.0).to(tl.float32)
    # Counted, because a maximum may pass over a NaN.
    num_damaged = tl.sum(tl.sum((tl.abs(b_x) < float("inf")).to(tl.int32), 1), 0) - BP * BD
    b_x = tl.where(num_damaged == 0, b_x, 0.0)
    scale = tl.maximum(tl.max(tl.max(tl.abs(b_x), 1), 0) / STORED_MAX, _SCALE_MIN)
    b_x = b_x * (1.0 / scale)
    scale = tl.where(num_damaged == 0, scale, float("nan"))
    if ROUND:
        # Adding and subtracting 1.5 * 2**23 leaves a small float32 rounded to a whole number, ties to even.
        b_x = (b_x + 12582912.0) - 12582912.0
    elif EMULATE_FLOAT8:
        # The interpreter loses what rounding carries into the exponent, and rounds small numbers to nothing. Rounded
        # to what the type holds before, they pass: steps of 2**-9 below 2**-6, 3 bits behind the first above.
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_normal = ((b_bits + 0x7FFFF + ((b_bits >> 20) & 1)) & ~0xFFFFF).to(tl.float32, bitcast=True)
        b_x = tl.where(tl.abs(b_x) < 0.015625, (b_x + 24576.0) - 24576.0, b_normal)
    tl.store(p_slots + o_slot, b_x.to(p_slots.dtype.element_ty), mask=m_td)
    tl.store(p_scales + o_scale, scale)


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _scatter_quantized_kernel(
    p_pages: tl.tensor, p_offsets: tl.tensor, p_page_ids: tl.tensor, p_slots: tl.tensor, p_slot_ids: tl.tensor,
    p_scales: tl.tensor, num_kv_heads: tl.tensor,
    stride_page: tl.tensor,
    ALIGN: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
    EMULATE_BFLOAT16: tl.constexpr,
) -> None:
    o_page, o_slot, o_scale, m_td = _places(
        p_offsets, p_page_ids, p_slot_ids, num_kv_heads, stride_page, ALIGN, PAGE, D, BP, BD
    )
    b_x = tl.load(p_slots + o_slot, mask=m_td, other=0.0).to(tl.float32) * tl.load(p_scales + o_scale)
    tl.store(p_pages + o_page, narrow(b_x, p_pages.dtype.element_ty, EMULATE_BFLOAT16), mask=m_td)
