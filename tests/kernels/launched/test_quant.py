"""Pages converted by the kernels, within what the module promises."""

from random import Random

import pytest
import torch

from hicache.kernels import language, quant
from hicache.kernels.launch import Path
from hicache.kernels.quant import STORED_MAX, KVLayers, gather_quantized, scatter_quantized
from tests.kernels.contexts import DTYPES
from tests.kernels.conversions import check_conversion
from tests.kernels.launched.device import DEVICE


def check_seeds(num_seeds: int, dtype: torch.dtype, stored: torch.dtype, **shape: int) -> None:
    for seed in range(num_seeds):
        check_conversion(Random(seed), dtype, stored, Path.TRITON, DEVICE, **shape)


@pytest.mark.parametrize("stored", STORED_MAX, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("page_size", "num_kv_heads", "head_dim"), [(16, 3, 64), (1, 2, 128), (63, 1, 96)])
def test_there_and_back(
    dtype: torch.dtype, stored: torch.dtype, page_size: int, num_kv_heads: int, head_dim: int
) -> None:
    check_seeds(2, dtype, stored, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("stored", STORED_MAX, ids=str)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_damage_stays_visible(stored: torch.dtype, wrong: float) -> None:
    layer = torch.ones(1, 2, 5, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    layer[0, 1, 3, 0, 7] = wrong
    ids = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    slots = torch.zeros(1, 1, 2, 5, 2, 64, dtype=stored, device=DEVICE)
    scales = torch.zeros(1, 1, 2, 2, device=DEVICE)
    gather_quantized(KVLayers.of([layer]), ids, slots, ids, scales, path=Path.TRITON)
    scatter_quantized(slots, ids, scales, KVLayers.of([layer]), ids, path=Path.TRITON)
    assert layer[0, 1, :, 0].isnan().all()
    assert (layer[0, 1, :, 1] == 1.0).all()
    assert (layer[0, 0] == 1.0).all()


def test_what_the_interpreter_does_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 truncated, and float8 without what its rounding carries: both faults of the interpreter."""
    if DEVICE != "cpu":
        return  # a GPU rounds
    shape = {"page_size": 16, "num_kv_heads": 3, "head_dim": 64}
    for module, flag, stored in (
        (language, "EMULATE_BFLOAT16", torch.int8),
        (quant, "EMULATE_FLOAT8", torch.float8_e4m3fn),
    ):
        monkeypatch.setattr(module, flag, False)
        with pytest.raises(AssertionError):
            check_seeds(3, torch.bfloat16, stored, **shape)
        monkeypatch.undo()
