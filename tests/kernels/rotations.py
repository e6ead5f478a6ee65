"""Pages of keys that are turned, by either implementation, for the tests of both."""

from random import Random

import torch

from hicache.kernels.launch import Path
from hicache.kernels.rope import Pairing, Rope, rotate_pages, rotate_pages_reference
from tests.kernels.contexts import Memory, empty_pages, relative_rms, tensor

ERROR_MAX = {torch.float32: 2 * 2**-23, torch.float16: 0.3 * 2**-10, torch.bfloat16: 0.3 * 2**-7}
"""Relative RMS error: of a few float32 operations, or of one rounding to half precision (0.29 of the last place)."""


def check_rotation(
    random: Random,
    dtype: torch.dtype,
    path: Path,
    device: str,
    *,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int | None = None,
    pairing: Pairing = Pairing.HALVES,
    memory: Memory = Memory.PAGE_FIRST,
    num_slots: int = 7,
) -> None:
    """Turn some pages far and near, compare their keys, and see that nothing else changed."""
    rope = Rope.plain(rotary_dim or head_dim, pairing=pairing)
    pages = empty_pages(memory, num_slots, page_size, num_kv_heads, head_dim, dtype)
    pages.copy_(tensor(random, *pages.shape, dtype=dtype))
    ids = random.sample(range(num_slots), random.randint(1, num_slots))
    # Some are not in this memory.
    page_ids = torch.tensor([page if random.random() < 0.8 else -1 for page in ids], dtype=torch.int32)
    deltas = torch.tensor([random.choice([0, 1, -17, 4096, 1_000_003]) for _ in ids])
    before = pages.clone()
    expected = rotate_pages_reference(before, page_ids, deltas, rope)
    moved = pages.to(device)
    rotate_pages(moved, page_ids.to(device), deltas.to(device), rope, path=path)
    after = moved.cpu()
    assert torch.equal(after[:, 1], before[:, 1])
    turned = page_ids[page_ids >= 0].long()
    stayed = [page for page in range(num_slots) if page not in turned.tolist()]
    assert torch.equal(after[stayed, 0], before[stayed, 0])
    rest = slice(rope.frequencies.shape[0] * 2, None)
    assert torch.equal(after[:, 0, ..., rest], before[:, 0, ..., rest])
    if len(turned):
        error = relative_rms(after[turned, 0], expected[turned])
        assert error <= ERROR_MAX[dtype], f"relative RMS error {error:.2e}"
