"""Gather and scatter on the CPU, against their definitions and bit by bit."""

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.kernels import gather
from hicache.kernels.errors import BadArgument
from hicache.kernels.gather import LayerPages, gather_pages, gather_variant, scatter_pages
from hicache.kernels.launch import Path
from tests.kernels.transfers import SHAPES, Shape, bits, check_transfer, make_layers, make_slots


@settings(max_examples=40)
@given(
    random=st.randoms(use_true_random=False),
    shape=st.sampled_from(SHAPES),
    stage_bytes=st.sampled_from([1, 5000]),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_pages_come_through_bit_by_bit(
    random: Random, shape: Shape, stage_bytes: int, id_dtype: torch.dtype
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "_STAGE_BYTES", stage_bytes)
        check_transfer(random, shape, Path.TORCH, "cpu", id_dtype)


def test_a_slot_is_the_layers_one_after_the_other() -> None:
    """The layout that the host tier and the files have, spelled out for a page of two layers."""
    layers = [torch.arange(24, dtype=torch.float32).view(2, 2, 3, 1, 2) + 100 * layer for layer in range(2)]
    slots = torch.zeros(3, 2 * 12 * 4, dtype=torch.uint8)
    gather_pages(LayerPages.of(layers), torch.tensor([1]), slots, torch.tensor([2]))
    assert slots[2].view(torch.float32).tolist() == [*range(12, 24), *range(112, 124)]
    assert not slots[:2].any()


def test_memory_that_begins_between_words() -> None:
    """Pages at addresses of whole words, in memory that begins 4 bytes before one."""
    memory = np.zeros(5000, np.uint8)
    begin = (4 - memory.ctypes.data) % 8
    layer = torch.from_numpy(memory[begin : begin + 4100])[4:].view(4, 1024)
    layer.copy_(torch.randint(256, (4, 1024), dtype=torch.uint8))
    slots = torch.zeros(4, 1024, dtype=torch.uint8)
    gather_pages(LayerPages.of([layer]), IDS, slots, IDS)
    assert torch.equal(slots[IDS.long()], layer[IDS.long()])


def test_slots_are_plain_memory() -> None:
    """A bytearray, as a mapped arena is one; not even its address is aligned."""
    layers = make_layers(Random(0), SHAPES[0], 2, 4, "cpu")
    memory = bytearray(1 + 5 * 2 * 12288)
    slots = torch.frombuffer(memory, dtype=torch.uint8, offset=1).view(5, 2 * 12288)
    gather_pages(LayerPages.of(layers), torch.tensor([3, 0]), slots, torch.tensor([4, 1]))
    assert memory[1 + 4 * 24576 : 1 + 5 * 24576] == b"".join(bits(layer[3]).numpy().tobytes() for layer in layers)
    assert memory[1 + 24576 : 1 + 2 * 24576] == b"".join(bits(layer[0]).numpy().tobytes() for layer in layers)


LAYERS = make_layers(Random(0), SHAPES[0], 3, 6, "cpu")
PAGES = LayerPages.of(LAYERS)
SLOTS = make_slots(Random(0), SHAPES[0], 4, 5, "cpu")
IDS = torch.tensor([0, 3], dtype=torch.int32)


@pytest.mark.parametrize(
    ("argument", "page_ids", "slots", "slot_ids", "first_layer"),
    [
        ("page_ids", IDS[None], SLOTS, IDS, 0),
        ("page_ids", IDS.float(), SLOTS, IDS, 0),
        ("page_ids", torch.tensor([0, 6], dtype=torch.int32), SLOTS, IDS, 0),
        ("page_ids", torch.tensor([-1, 0], dtype=torch.int32), SLOTS, IDS, 0),
        ("slot_ids", IDS, SLOTS, IDS[:1], 0),
        ("slot_ids", IDS, SLOTS, IDS.long(), 0),
        ("slot_ids", IDS, SLOTS, torch.tensor([0, 5], dtype=torch.int32), 0),
        ("slots", IDS, SLOTS[:, :, 0, 0, 0, 0].T, IDS, 0),
        ("slots", IDS, SLOTS[..., ::2], IDS, 0),
        ("first_layer", IDS, SLOTS, IDS, 2),
        ("first_layer", IDS, SLOTS, IDS, -1),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    argument: str, page_ids: torch.Tensor, slots: torch.Tensor, slot_ids: torch.Tensor, first_layer: int
) -> None:
    before = bits(SLOTS), [bits(layer) for layer in LAYERS]
    with pytest.raises(BadArgument) as raised:
        gather_pages(PAGES, page_ids, slots, slot_ids, first_layer=first_layer)
    assert raised.value.argument == argument
    with pytest.raises(BadArgument) as raised:
        scatter_pages(slots, slot_ids, PAGES, page_ids, first_layer=first_layer)
    assert raised.value.argument == argument
    assert torch.equal(bits(SLOTS), before[0])
    assert all(torch.equal(bits(layer), old) for layer, old in zip(LAYERS, before[1], strict=True))


@pytest.mark.parametrize(
    ("argument", "layers"),
    [
        ("layers", []),
        ("layers[0]", [torch.zeros(3)]),
        ("layers[0]", [torch.zeros(3, 0)]),
        ("layers[1]", [torch.zeros(3, 4), torch.zeros(4, 3).T]),
        ("layers[1]", [torch.zeros(3, 4), torch.zeros(3, 5)]),
        ("layers[1]", [torch.zeros(3, 4), torch.zeros(3, 5)[:, :4]]),
        ("layers[1]", [torch.zeros(3, 4), torch.zeros(4, 4)]),
        ("layers[1]", [torch.zeros(3, 4), torch.zeros(3, 4).half()]),
    ],
)
def test_layers_that_differ_are_refused_by_name(argument: str, layers: list[torch.Tensor]) -> None:
    with pytest.raises(BadArgument) as raised:
        LayerPages.of(layers)
    assert raised.value.argument == argument


def test_the_kernel_moves_wide_words_where_it_can() -> None:
    """Words of 4 bytes, 16 bytes a thread at least, and no more threads than a small page has work for."""
    assert [gather_variant(alignment, 12288).constants["WORD"] for alignment in (16, 8, 4, 2, 1)] == [4, 4, 4, 2, 1]
    assert [gather_variant(16, size).num_warps for size in (256, 1024, 2048, 1 << 20)] == [1, 2, 4, 4]
