"""Pages that are gathered into slots and scattered back, by either implementation, for the tests of both."""

from dataclasses import dataclass
from random import Random

import torch

from hicache.kernels.gather import (
    LayerPages,
    gather_pages,
    gather_pages_reference,
    scatter_pages,
    scatter_pages_reference,
)
from hicache.kernels.launch import Path


@dataclass(frozen=True)
class Shape:
    """One layer of one page, and how the memories around it lie."""

    dtype: torch.dtype
    page: tuple[int, ...]
    """Shape of one layer of one page."""
    page_gap: int = 0
    """Elements between pages of a layer."""
    slot_gap: int = 0
    """Elements between slots."""
    slot_shift: int = 0
    """Elements before the first slot."""


SHAPES = (
    Shape(torch.bfloat16, (2, 16, 3, 64)),
    Shape(torch.float32, (2, 5, 1, 96), page_gap=4, slot_gap=12),
    Shape(torch.float16, (2, 64, 1, 128), slot_gap=1024),
    Shape(torch.float16, (2, 1, 1, 64), page_gap=2, slot_shift=2),
    Shape(torch.float16, (2, 3, 1, 5), slot_gap=1),
    Shape(torch.uint8, (2, 1, 1, 7), page_gap=1, slot_gap=3, slot_shift=1),
    Shape(torch.int8, (1, 64, 576)),
)
"""Sizes and alignments of 16, 8, 4, 2 and 1 bytes."""


def random_bytes(random: Random, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of arbitrary bits: NaNs of all kinds must come through unchanged."""
    generator = torch.Generator().manual_seed(random.getrandbits(60))
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (num_bytes,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in order, comparable."""
    return tensor.cpu().contiguous().flatten().view(torch.uint8)


def make_layers(random: Random, shape: Shape, num_layers: int, num_pages: int, device: str) -> list[torch.Tensor]:
    """Layers [num_pages, *shape.page] of random bits."""
    size = torch.Size(shape.page).numel()
    width = size + shape.page_gap
    flat = [random_bytes(random, num_pages, width, dtype=shape.dtype).to(device) for _ in range(num_layers)]
    return [rows[:, :size].view(num_pages, *shape.page) for rows in flat]


def make_slots(random: Random, shape: Shape, num_layers: int, num_slots: int, device: str) -> torch.Tensor:
    """Slots [num_slots, num_layers, *shape.page] of random bits."""
    size = num_layers * torch.Size(shape.page).numel()
    flat = random_bytes(random, num_slots * (size + shape.slot_gap) + shape.slot_shift, dtype=shape.dtype).to(device)
    rows = flat[shape.slot_shift :].view(num_slots, size + shape.slot_gap)
    return rows[:, :size].view(num_slots, num_layers, *shape.page)


def check_transfer(random: Random, shape: Shape, path: Path, device: str, id_dtype: torch.dtype = torch.int32) -> None:
    """Gather some pages and scatter them elsewhere; what they should not touch is compared too."""
    num_layers, first_layer = random.randint(1, 4), random.randint(0, 2)
    num_pages, num_slots = random.randint(1, 12), random.randint(1, 12)
    count = random.randint(0, min(num_pages, num_slots))
    layers = make_layers(random, shape, num_layers, num_pages, device)
    slots = make_slots(random, shape, first_layer + num_layers + random.randint(0, 1), num_slots, device)
    page_ids, slot_ids = (
        torch.tensor(random.sample(range(n), count), dtype=id_dtype, device=device) for n in (num_pages, num_slots)
    )

    expected = slots.clone()
    gather_pages_reference(LayerPages.of(layers), page_ids, expected, slot_ids, first_layer=first_layer)
    before = [bits(layer) for layer in layers]
    gather_pages(LayerPages.of(layers), page_ids, slots, slot_ids, first_layer=first_layer, path=path)
    assert torch.equal(bits(slots), bits(expected))
    assert all(torch.equal(bits(layer), old) for layer, old in zip(layers, before, strict=True))

    targets = make_layers(random, shape, num_layers, num_pages, device)
    expected_targets = [layer.clone() for layer in targets]
    scatter_pages_reference(slots, slot_ids, LayerPages.of(expected_targets), page_ids, first_layer=first_layer)
    scatter_pages(slots, slot_ids, LayerPages.of(targets), page_ids, first_layer=first_layer, path=path)
    for layer, target, wanted in zip(layers, targets, expected_targets, strict=True):
        assert torch.equal(bits(target), bits(wanted))
        assert torch.equal(bits(target[page_ids]), bits(layer[page_ids]))
    assert torch.equal(bits(slots), bits(expected))
