"""Page scores by the kernel: bounds of every product, as tight as they are meant to be."""

from random import Random

import pytest
import torch

from hicache.kernels.launch import Path
from hicache.kernels.score import ball_of, min_max_of, page_scores
from tests.kernels.contexts import DTYPES, relative_rms, tensor
from tests.kernels.launched.device import DEVICE
from tests.kernels.summaries import check_bounds


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_pages", "page_size", "num_kv_heads", "group", "head_dim"),
    [(0, 16, 1, 1, 64), (1, 1, 2, 4, 64), (15, 16, 3, 3, 96), (17, 16, 1, 8, 128), (63, 5, 2, 1, 256)],
)
def test_bounds(
    dtype: torch.dtype, num_pages: int, page_size: int, num_kv_heads: int, group: int, head_dim: int
) -> None:
    for spread in (1.0, 0.01):
        check_bounds(
            Random(num_pages), dtype, Path.TRITON, DEVICE, num_pages=num_pages, page_size=page_size,
            num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, spread=spread,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_computes_what_torch_does(dtype: torch.dtype) -> None:
    pages, ids = tensor(Random(0), 9, 2, 16, 2, 96, dtype=dtype), torch.arange(9, dtype=torch.int32)
    query = tensor(Random(1), 6, 96, dtype=dtype)
    for make in (min_max_of, ball_of):
        expected = page_scores(query, make(pages, ids, 130), path=Path.TORCH)
        actual = page_scores(query.to(DEVICE), make(pages.to(DEVICE), ids.to(DEVICE), 130), path=Path.TRITON)
        assert relative_rms(actual.cpu(), expected) <= 2 * 2**-23
