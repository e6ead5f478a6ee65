"""Pages converted by torch, within what the module promises, and what is refused."""

from random import Random

import pytest
import torch

from hicache.kernels.errors import BadArgument
from hicache.kernels.launch import Path
from hicache.kernels.quant import STORED_MAX, KVLayers, gather_quantized, scatter_quantized
from tests.kernels.contexts import DTYPES
from tests.kernels.conversions import check_conversion

PAGES = KVLayers.of([torch.zeros(5, 2, 4, 2, 8), torch.zeros(5, 2, 4, 2, 8)])
SLOTS, SCALES = torch.zeros(3, 2, 2, 4, 2, 8, dtype=torch.int8), torch.zeros(3, 2, 2, 2)
IDS = torch.tensor([1, 2], dtype=torch.int32)


@pytest.mark.parametrize("stored", STORED_MAX, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("page_size", "num_kv_heads", "head_dim"), [(16, 3, 64), (1, 2, 128), (63, 1, 96)])
def test_there_and_back(
    dtype: torch.dtype, stored: torch.dtype, page_size: int, num_kv_heads: int, head_dim: int
) -> None:
    for seed in range(8):
        check_conversion(
            Random(seed), dtype, stored, Path.TORCH, "cpu", page_size=page_size, num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )  # fmt: skip


@pytest.mark.parametrize("stored", STORED_MAX, ids=str)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_damage_stays_visible(stored: torch.dtype, wrong: float) -> None:
    layer = torch.ones(1, 2, 5, 2, 64, dtype=torch.bfloat16)
    layer[0, 1, 3, 0, 7] = wrong
    ids = torch.zeros(1, dtype=torch.int32)
    slots, scales = torch.zeros(1, 1, 2, 5, 2, 64, dtype=stored), torch.zeros(1, 1, 2, 2)
    gather_quantized(KVLayers.of([layer]), ids, slots, ids, scales)
    scatter_quantized(slots, ids, scales, KVLayers.of([layer]), ids)
    assert layer[0, 1, :, 0].isnan().all()
    assert (layer[0, 1, :, 1] == 1.0).all()
    assert (layer[0, 0] == 1.0).all()


@pytest.mark.parametrize(
    ("argument", "page_ids", "slots", "slot_ids", "scales"),
    [
        ("page_ids", IDS.float(), SLOTS, IDS, SCALES),
        ("page_ids", IDS + 3, SLOTS, IDS, SCALES),
        ("slot_ids", IDS, SLOTS, IDS.long(), SCALES),
        ("slot_ids", IDS, SLOTS, IDS + 1, SCALES),
        ("slots", IDS, SLOTS.view(torch.uint8), IDS, SCALES),
        ("slots", IDS, SLOTS[:, :1], IDS, SCALES),
        ("slots", IDS, SLOTS.transpose(3, 4).contiguous().transpose(3, 4), IDS, SCALES),
        ("scales", IDS, SLOTS, IDS, SCALES[:2]),
        ("scales", IDS, SLOTS, IDS, SCALES.double()),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(
    argument: str, page_ids: torch.Tensor, slots: torch.Tensor, slot_ids: torch.Tensor, scales: torch.Tensor
) -> None:
    with pytest.raises(BadArgument) as raised:
        gather_quantized(PAGES, page_ids, slots, slot_ids, scales)
    assert raised.value.argument == argument
    with pytest.raises(BadArgument) as raised:
        scatter_quantized(slots, slot_ids, scales, PAGES, page_ids)
    assert raised.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "layers"),
    [
        ("layers", []),
        ("layers[0]", [torch.zeros(3, 2, 4, 8)]),
        ("layers[0]", [torch.zeros(3, 2, 4, 0, 8)]),
        ("layers[1]", [torch.zeros(3, 2, 4, 1, 8), torch.zeros(3, 2, 4, 1, 8, dtype=torch.int8)]),
        ("layers[1]", [torch.zeros(3, 2, 4, 1, 8), torch.zeros(3, 2, 4, 1, 8).half()]),
        ("layers[1]", [torch.zeros(3, 2, 4, 1, 8), torch.zeros(4, 2, 4, 1, 8)]),
    ],
)
def test_layers_that_differ_are_refused_by_name(argument: str, layers: list[torch.Tensor]) -> None:
    with pytest.raises(BadArgument) as raised:
        KVLayers.of(layers)
    assert raised.value.argument == argument
