"""Gather and scatter by the kernel, bit by bit."""

from random import Random

import pytest
import torch

from hicache.kernels.gather import LayerPages, gather_pages, scatter_pages
from hicache.kernels.launch import Path
from tests.kernels.launched.device import DEVICE
from tests.kernels.transfers import SHAPES, Shape, bits, check_transfer, make_layers, make_slots, random_bytes


@pytest.mark.parametrize("shape", SHAPES)
def test_pages_come_through_bit_by_bit(shape: Shape) -> None:
    for seed in range(4):
        check_transfer(Random(seed), shape, Path.TRITON, DEVICE)
    check_transfer(Random(9), shape, Path.TRITON, DEVICE, torch.int64)


def test_between_the_device_and_pinned_memory() -> None:
    """On a GPU the slots are in host memory, and the kernel reaches over the bus."""
    random = Random(0)
    layers = make_layers(random, SHAPES[0], 3, 9, DEVICE)
    slots = make_slots(random, SHAPES[0], 3, 7, "cpu")
    slots = slots.pin_memory() if DEVICE == "cuda" else slots
    page_ids, slot_ids = torch.tensor([8, 1, 4], device=DEVICE), torch.tensor([0, 6, 3], device=DEVICE)
    gather_pages(LayerPages.of(layers), page_ids, slots, slot_ids, path=Path.TRITON)
    targets = make_layers(random, SHAPES[0], 3, 9, DEVICE)
    scatter_pages(slots, slot_ids, LayerPages.of(targets), page_ids, path=Path.TRITON)
    for target, layer in zip(targets, layers, strict=True):
        assert torch.equal(bits(target[page_ids]), bits(layer[page_ids]))


def test_a_page_and_a_slot_further_than_int32_reaches() -> None:
    """Offsets are counted in words of 4 bytes: 8 GiB in, of which only the ends are touched."""
    far = 2**33 // 4096 + 1
    layer = torch.empty((far + 1) * 4096, dtype=torch.uint8, device=DEVICE).view(far + 1, 4096)
    slots = torch.empty((far + 1) * 4096, dtype=torch.uint8, device=DEVICE).view(far + 1, 4096)
    page = random_bytes(Random(0), 4096, dtype=torch.uint8).to(DEVICE)
    layer[far] = page
    ids = torch.tensor([far], dtype=torch.int32, device=DEVICE)
    gather_pages(LayerPages.of([layer]), ids, slots, ids, path=Path.TRITON)
    assert torch.equal(slots[far], page)
    layer[far] = 0
    scatter_pages(slots, ids, LayerPages.of([layer]), ids, path=Path.TRITON)
    assert torch.equal(layer[far], page)
