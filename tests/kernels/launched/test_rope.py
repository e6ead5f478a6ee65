"""Keys turned to new positions by the kernel, against the definition in float64."""

from random import Random

import pytest
import torch

from hicache.kernels import language
from hicache.kernels.launch import Path
from hicache.kernels.rope import Pairing, Rope, rotate_pages
from tests.kernels.contexts import DTYPES, Memory
from tests.kernels.launched.batches import far_memory
from tests.kernels.launched.device import DEVICE
from tests.kernels.rotations import check_rotation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("page_size", "num_kv_heads", "head_dim", "rotary_dim"),
    [(16, 3, 64, 64), (1, 8, 128, 128), (64, 1, 96, 32), (15, 2, 256, 256), (5, 1, 63, 62)],
)
@pytest.mark.parametrize("pairing", Pairing)
def test_shapes(
    dtype: torch.dtype, page_size: int, num_kv_heads: int, head_dim: int, rotary_dim: int, pairing: Pairing
) -> None:
    for memory in Memory:
        check_rotation(
            Random(page_size), dtype, Path.TRITON, DEVICE, page_size=page_size, num_kv_heads=num_kv_heads,
            head_dim=head_dim, rotary_dim=rotary_dim, pairing=pairing, memory=memory,
        )  # fmt: skip


def test_a_page_further_than_int32_reaches() -> None:
    pages, far = far_memory(1, 64, 16, torch.float16)
    pages = pages.to(DEVICE)
    pages[far] = 1.0
    ids = torch.tensor([far], dtype=torch.int32, device=DEVICE)
    rotate_pages(pages, ids, torch.tensor([3], device=DEVICE), Rope.plain(64), path=Path.TRITON)
    expected = torch.ones(1, 2, 16, 1, 64, dtype=torch.float16, device=DEVICE)
    rotate_pages(expected, torch.zeros_like(ids), torch.tensor([3], device=DEVICE), Rope.plain(64), path=Path.TRITON)
    assert torch.equal(pages[far], expected[0])
    assert not torch.equal(pages[far, 0], pages[far, 1])


def test_computing_with_bit_patterns_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE != "cpu":
        return  # a GPU rounds
    monkeypatch.setattr(language, "EMULATE_BFLOAT16", False)
    with pytest.raises(AssertionError, match="relative RMS error"):
        check_rotation(Random(0), torch.bfloat16, Path.TRITON, DEVICE, page_size=16, num_kv_heads=3, head_dim=64)
