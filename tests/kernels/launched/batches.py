"""Batches of sequences in pages, for the kernels that take block tables."""

from dataclasses import dataclass
from random import Random

import torch

from tests.kernels.contexts import Memory, empty_pages, tensor


@dataclass
class Batch:
    """Sequences whose keys are all in one memory."""

    pages: torch.Tensor
    """[num_slots, 2, page_size, H, D]."""
    tables: torch.Tensor
    """int32 [B, max_pages]; -1 behind the pages that a sequence has."""
    lengths: torch.Tensor
    """int32 [B]."""
    key: list[torch.Tensor]
    """[L, H, D] of each sequence; likewise `value`."""
    value: list[torch.Tensor]

    def visible_pages(self, i: int) -> list[slice]:
        """Tokens of each page of sequence `i`, in order."""
        length, page_size = int(self.lengths[i]), self.pages.shape[2]
        return [slice(begin, min(begin + page_size, length)) for begin in range(0, length, page_size)]


def make_batch(
    random: Random,
    lengths: list[int],
    *,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    memory: Memory = Memory.PAGE_FIRST,
) -> Batch:
    """Sequences of random keys in random distinct slots; whatever is no token is NaN."""
    counts = [-(-length // page_size) for length in lengths]
    num_slots = sum(counts) + 2
    pages = empty_pages(memory, num_slots, page_size, num_kv_heads, head_dim, dtype)
    slots = random.sample(range(num_slots), sum(counts))
    tables = torch.full((len(lengths), max([*counts, 1])), -1, dtype=torch.int32)
    batch = Batch(pages, tables, torch.tensor(lengths, dtype=torch.int32), [], [])
    for i, length in enumerate(lengths):
        key, value = (tensor(random, length, num_kv_heads, head_dim, dtype=dtype) for _ in range(2))
        batch.key.append(key)
        batch.value.append(value)
        for j, tokens in enumerate(batch.visible_pages(i)):
            slot = slots.pop()
            tables[i, j] = slot
            pages[slot, 0, : tokens.stop - tokens.start] = key[tokens]
            pages[slot, 1, : tokens.stop - tokens.start] = value[tokens]
    return batch


def nans(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An output in which whatever is not written shows."""
    return torch.full(shape, torch.nan, dtype=dtype)


def far_memory(num_kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Pages [num_slots, 2, page_size, H, D] of which the last, whose id is returned, lies more than 2**31 elements in.

    Memory that is not touched costs nothing.
    """
    slot_elements = 2 * page_size * num_kv_heads * head_dim
    num_slots = 2**31 // slot_elements + 2
    flat = torch.empty(num_slots * slot_elements, dtype=dtype)
    pages = flat.view(num_slots, 2, page_size, num_kv_heads, head_dim)
    assert (num_slots - 1) * pages.stride(0) > 2**31
    return pages, num_slots - 1
