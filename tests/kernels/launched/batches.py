"""Batches of sequences in pages, for the kernels that take block tables."""

from dataclasses import dataclass, replace
from random import Random

import torch

from hicache.kernels.scoring import Scoring
from tests.kernels.contexts import Memory, empty_pages, tensor
from tests.kernels.launched.device import DEVICE


@dataclass
class Batch:
    """Sequences whose keys are all in one memory."""

    pages: torch.Tensor
    """[num_slots, 2, page_size, H, D]."""
    scales: torch.Tensor | None
    """float32 [num_slots, 2, H], if the pages are float8."""
    tables: torch.Tensor
    """int32 [B, max_pages]; -1 behind the pages that a sequence has."""
    lengths: torch.Tensor
    """int32 [B]."""
    key: list[torch.Tensor]
    """[L, H, D] of each sequence, as pages and scales give it; likewise `value`."""
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
    stored: torch.dtype | None = None,
    memory: Memory = Memory.PAGE_FIRST,
) -> Batch:
    """Sequences of random keys in random distinct slots; whatever is no token is NaN. `stored`: float8, with scales of
    each page and head that differ by three powers of two; some pages are empty, with scale 0."""
    counts = [-(-length // page_size) for length in lengths]
    num_slots = sum(counts) + 2
    pages = empty_pages(memory, num_slots, page_size, num_kv_heads, head_dim, stored or dtype)
    slots = random.sample(range(num_slots), sum(counts))
    scales = None
    if stored is not None:
        scales = torch.exp2(tensor(random, num_slots, 2, num_kv_heads, dtype=torch.float32).clamp(-1.5, 1.5))
        scales[torch.tensor([random.random() < 0.1 for _ in range(num_slots)])] = 0.0
    tables = torch.full((len(lengths), max([*counts, 1])), -1, dtype=torch.int32)
    batch = Batch(pages, scales, tables, torch.tensor(lengths, dtype=torch.int32), [], [])
    for i, length in enumerate(lengths):
        planes = [tensor(random, length, num_kv_heads, head_dim, dtype=stored or dtype) for _ in range(2)]
        for j, tokens in enumerate(batch.visible_pages(i)):
            slot = slots.pop()
            tables[i, j] = slot
            for plane in (0, 1):
                pages[slot, plane, : tokens.stop - tokens.start] = planes[plane][tokens]
        if scales is not None:
            per_token = scales[tables[i].long()].repeat_interleave(page_size, dim=0)[:length]
            planes = [planes[plane].float() * per_token[:, plane, :, None] for plane in (0, 1)]
        batch.key.append(planes[0])
        batch.value.append(planes[1])
    return batch


def nans(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An output in which whatever is not written shows."""
    return torch.full(shape, torch.nan, dtype=dtype)


def on_device(scoring: Scoring) -> Scoring:
    """The same, with its sinks where kernels are launched."""
    return scoring if scoring.sinks is None else replace(scoring, sinks=scoring.sinks.to(DEVICE))


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
