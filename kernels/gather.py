"""Gather and scatter: pages between layer-first device memory and page-first slots.

Engines and kernels want one tensor a layer; a page that is stored or sent wants to be one range of bytes. Gather
collects the layers of scattered device pages into slots, scatter distributes slots over the layers. Bytes are copied,
never converted. On CUDA one kernel does all pages and layers, reading or writing pinned host memory over the bus
directly; on the CPU it is `index_select` and `index_copy_`, once a layer.

One launch with a table of the layers' addresses, rather than one launch a layer: a model has 30 to 80 layers, and a
launch costs the host about what it takes to move a page, so that small batches would be bound by launching.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from hicache.kernels import launch
from hicache.kernels.checks import check_page_ids, check_tensor
from hicache.kernels.errors import BadArgument
from hicache.kernels.launch import Path, Variant, ceil_div, next_power_of_2

_STAGE_BYTES: Final = 1 << 20
"""Bytes of one layer that the CPU path copies at a time: what stays in a core's cache between its two steps."""
_WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Integer type for each number of bytes that the CPU path may move as one element."""


@dataclass(frozen=True)
class LayerPages:
    """The layer-first side: one tensor a layer, all alike, as `LayerPages.of` checked them. Build it once, keep it."""

    layers: tuple[torch.Tensor, ...]
    """Each uint8 [num_pages, layer_bytes], a view of the layer's memory; pages contiguous, any page stride."""
    offsets: torch.Tensor
    """int64 [num_layers], bytes from the first layer to each, on the layers' device."""
    alignment: int
    """Bytes, a power of two up to 16, of which every page's address and size is a multiple."""

    @classmethod
    def of(cls, layers: Sequence[torch.Tensor]) -> "LayerPages":
        """Describe `layers`, each [num_pages, ...] of one shape, dtype, page stride and device, contiguous within a
        page.

        The tensors are viewed, not copied. Raises `BadArgument`.
        """
        if not layers:
            raise BadArgument("layers", "is empty, expected at least one layer")
        views = tuple(_rows_of_bytes(f"layers[{i}]", layer) for i, layer in enumerate(layers))
        first = views[0]
        for i, view in enumerate(views):
            if (view.shape, view.stride(0), view.device) != (first.shape, first.stride(0), first.device):
                raise BadArgument(f"layers[{i}]", "differs from layers[0] in its shape, page stride or device")
        addresses = [view.data_ptr() for view in views]
        # Views in wider words need offsets of whole words too, wherever the memory itself begins.
        starts = [view.storage_offset() for view in views]
        return cls(
            views,
            torch.tensor([address - addresses[0] for address in addresses], dtype=torch.int64, device=first.device),
            math.gcd(16, first.shape[1], first.stride(0), *addresses, *starts),
        )

    @property
    def num_pages(self) -> int:
        """Pages of each layer."""
        return self.layers[0].shape[0]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one page."""
        return self.layers[0].shape[1]

    @property
    def device(self) -> torch.device:
        """Where the layers are."""
        return self.layers[0].device


def gather_pages(
    pages: LayerPages,
    page_ids: torch.Tensor,
    slots: torch.Tensor,
    slot_ids: torch.Tensor,
    *,
    first_layer: int = 0,
    path: Path | None = None,
) -> None:
    """Copy every layer of the pages `page_ids` into the slots `slot_ids`: layer-first to page-first.

    page_ids, slot_ids int32 or int64 [n], on the device of `pages`, no slot named twice. slots [num_slots, ...],
    contiguous within a slot, any slot stride, any dtype: its bytes are `[layer][layer_bytes]`; layer `i` of `pages` is
    layer `first_layer + i` of a slot. Where `pages` is on CUDA, `slots` is there too or in pinned host memory, and the
    copy is queued on the current stream; on the CPU it is done on return. Ids are checked on the CPU only. Raises
    `BadArgument`.
    """
    rows = _check(pages, page_ids, slots, slot_ids, first_layer)
    if launch.choose_path("pages", pages.device, path) is Path.TRITON:
        _launch(pages, page_ids, rows, slot_ids, first_layer, to_slots=True)
    else:
        for layer, slot_layer in _words(pages, rows, first_layer):
            _copy_rows(layer, page_ids, slot_layer, slot_ids)


def scatter_pages(
    slots: torch.Tensor,
    slot_ids: torch.Tensor,
    pages: LayerPages,
    page_ids: torch.Tensor,
    *,
    first_layer: int = 0,
    path: Path | None = None,
) -> None:
    """Copy the slots `slot_ids` into every layer of the pages `page_ids`: page-first to layer-first.

    The reverse of `gather_pages`, with the same arguments; no page may be named twice.
    """
    rows = _check(pages, page_ids, slots, slot_ids, first_layer)
    if launch.choose_path("pages", pages.device, path) is Path.TRITON:
        _launch(pages, page_ids, rows, slot_ids, first_layer, to_slots=False)
    else:
        for layer, slot_layer in _words(pages, rows, first_layer):
            _copy_rows(slot_layer, slot_ids, layer, page_ids)


def gather_pages_reference(
    pages: LayerPages, page_ids: torch.Tensor, slots: torch.Tensor, slot_ids: torch.Tensor, *, first_layer: int = 0
) -> None:
    """The definition of `gather_pages`: page by page, layer by layer."""
    for i, layer in enumerate(pages.layers, first_layer):
        for page, slot in zip(page_ids.tolist(), slot_ids.tolist(), strict=True):
            flat = slots[slot].view(-1).view(torch.uint8)
            flat[i * pages.layer_bytes : (i + 1) * pages.layer_bytes] = layer[page]


def scatter_pages_reference(
    slots: torch.Tensor, slot_ids: torch.Tensor, pages: LayerPages, page_ids: torch.Tensor, *, first_layer: int = 0
) -> None:
    """The definition of `scatter_pages`: page by page, layer by layer."""
    for i, layer in enumerate(pages.layers, first_layer):
        for page, slot in zip(page_ids.tolist(), slot_ids.tolist(), strict=True):
            flat = slots[slot].view(-1).view(torch.uint8)
            layer[page] = flat[i * pages.layer_bytes : (i + 1) * pages.layer_bytes]


def _rows_of_bytes(argument: str, tensor: torch.Tensor) -> torch.Tensor:
    """uint8 view [rows, row_bytes] of a tensor [rows, ...], refused unless every row is contiguous."""
    if tensor.dim() < 2 or not tensor.shape[1:].numel() or (tensor.shape[0] and not tensor[0].is_contiguous()):
        raise BadArgument(
            argument,
            f"has shape {list(tensor.shape)}, strides {list(tensor.stride())}; expected [n, ...] with contiguous rows",
        )
    return tensor.view(tensor.shape[0], tensor.shape[1:].numel()).view(torch.uint8)


def _check(
    pages: LayerPages, page_ids: torch.Tensor, slots: torch.Tensor, slot_ids: torch.Tensor, first_layer: int
) -> torch.Tensor:
    """Check the arguments of gather and scatter; returns the slots as uint8 [num_slots, slot_bytes]."""
    check_tensor("page_ids", page_ids, (None,), dtype=(torch.int32, torch.int64), device=pages.device)
    check_tensor("slot_ids", slot_ids, tuple(page_ids.shape), dtype=page_ids.dtype, device=pages.device)
    rows = _rows_of_bytes("slots", slots)
    if slots.device != pages.device and not (pages.device.type == "cuda" and slots.is_pinned()):
        raise BadArgument("slots", f"is on {slots.device}, expected {pages.device} or, if that is CUDA, pinned memory")
    end = (first_layer + len(pages.layers)) * pages.layer_bytes
    if first_layer < 0 or end > rows.shape[1]:
        raise BadArgument(
            "first_layer",
            f"is {first_layer}: expected {len(pages.layers)} layers of {pages.layer_bytes} bytes from there on to lie "
            f"within the {rows.shape[1]} bytes of a slot",
        )
    check_page_ids("page_ids", page_ids, pages.num_pages, negative=False)
    check_page_ids("slot_ids", slot_ids, slots.shape[0], negative=False)
    return rows


def _words(pages: LayerPages, rows: torch.Tensor, first_layer: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer of the pages with the same layer of the slots, in the widest words that both allow.

    Wide because `index_select` of single bytes is some ten times slower.
    """
    word = _WORDS[math.gcd(8, pages.alignment, rows.stride(0), rows.storage_offset())]
    for i, layer in enumerate(pages.layers, first_layer):
        yield layer.view(word), rows[:, i * pages.layer_bytes : (i + 1) * pages.layer_bytes].view(word)


def _copy_rows(source: torch.Tensor, source_ids: torch.Tensor, target: torch.Tensor, target_ids: torch.Tensor) -> None:
    """`target[target_ids] = source[source_ids]`, a cache-sized piece at a time."""
    step = max(1, _STAGE_BYTES // (source.shape[1] * source.element_size()))
    # `index_copy_` takes int64 only.
    target_ids = target_ids.long()
    for begin in range(0, source_ids.shape[0], step):
        piece = slice(begin, begin + step)
        target.index_copy_(0, target_ids[piece], source.index_select(0, source_ids[piece]))


def gather_variant(alignment: int, layer_bytes: int) -> Variant:
    """The form in which the kernel is compiled. `alignment`: bytes of which all addresses and sizes are multiples."""
    word = min(4, alignment)
    words = min(4096, next_power_of_2(layer_bytes // word))
    # At least 16 bytes a thread, so that small pages are moved in wide words too.
    num_warps = max(1, min(4, words * word // 512))
    return Variant({"ALIGN": alignment, "WORD": word, "BLOCK": words}, num_warps=num_warps, num_stages=1)


def _launch(
    pages: LayerPages,
    page_ids: torch.Tensor,
    rows: torch.Tensor,
    slot_ids: torch.Tensor,
    first_layer: int,
    *,
    to_slots: bool,
) -> None:
    if not page_ids.shape[0]:
        return
    offset = first_layer * pages.layer_bytes
    alignment = math.gcd(pages.alignment, rows.stride(0), rows.data_ptr(), rows.storage_offset(), offset)
    variant = gather_variant(alignment, pages.layer_bytes)
    word_bytes = variant.constants["WORD"]
    num_words, block = pages.layer_bytes // word_bytes, variant.constants["BLOCK"]
    first = pages.layers[0].view(_WORDS[word_bytes])
    rows = rows.view(_WORDS[word_bytes])
    with launch.on(pages.device):
        _gather_pages_kernel[(page_ids.shape[0], len(pages.layers), ceil_div(num_words, block))](
            p_pages=first,
            p_offsets=pages.offsets,
            p_page_ids=page_ids,
            p_slots=rows,
            p_slot_ids=slot_ids,
            first_layer=first_layer,
            num_words=num_words,
            stride_page=first.stride(0),
            stride_slot=rows.stride(0),
            TO_SLOTS=to_slots,
            **variant.constants,
            **launch.options(variant),
        )


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _gather_pages_kernel(
    p_pages: tl.tensor, p_offsets: tl.tensor, p_page_ids: tl.tensor, p_slots: tl.tensor, p_slot_ids: tl.tensor,
    first_layer: tl.tensor, num_words: tl.tensor, stride_page: tl.tensor, stride_slot: tl.tensor,
    TO_SLOTS: tl.constexpr, ALIGN: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    # A program copies BLOCK words of one layer of one page; strides are in words of WORD bytes.
    i_layer = tl.program_id(1).to(tl.int64)
    page = tl.load(p_page_ids + tl.program_id(0)).to(tl.int64)
    slot = tl.load(p_slot_ids + tl.program_id(0)).to(tl.int64)
    # The wrapper knows how offsets from a table are aligned; the compiler would not, and move single words.
    # `multiple_of` does nothing to a parameter, hence the division, which is exact.
    o_page = tl.multiple_of(tl.load(p_offsets + i_layer) // WORD + page * stride_page, ALIGN // WORD)
    o_slot = tl.multiple_of(slot * stride_slot + (first_layer + i_layer) * num_words, ALIGN // WORD)
    o_word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    m_word = o_word < num_words // (ALIGN // WORD) * (ALIGN // WORD)
    p_page = p_pages + o_page + o_word
    p_slot = p_slots + o_slot + o_word
    if TO_SLOTS:
        tl.store(p_slot, tl.load(p_page, mask=m_word), mask=m_word)
    else:
        tl.store(p_page, tl.load(p_slot, mask=m_word), mask=m_word)
