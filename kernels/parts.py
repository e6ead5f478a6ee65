"""The parts of a context, and the state over none: what both ways of attending share."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from hicache.kernels.state import AttentionState


@dataclass(frozen=True)
class PagedPart:
    """Keys and values of consecutive tokens in whole or partly filled pages, somewhere in one memory."""

    pages: torch.Tensor
    """[num_slots, 2, page_size, kv_heads, head_dim], keys in plane 0 and values in plane 1, on any device; head_dim is
    contiguous, every other stride is free: one layer of a page-first arena is such a view."""
    block_table: torch.Tensor
    """int32 [n], slots of the part's pages in order; each within `pages`."""
    num_tokens: int
    """Tokens that the part has, 0 to `n * page_size`: pages are full but for the last; slots beyond are not read."""


class PartSource(Protocol):
    """Where the parts of a context come from: a running sequence, in `tiers/` and above."""

    def parts(self, layer: int) -> Iterator[PagedPart]:
        """The context's parts in one layer, in any order, each token once. Called from the thread that attends.

        A part is valid until the next one is asked for, or the iterator is closed; asking may wait for a transfer, but
        must not itself call `attend`, which is in the middle of using its thread's buffer.
        """
        ...


def state_dtype(query: torch.Tensor) -> torch.dtype:
    """Type in which states are kept and LSE is returned."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def no_keys(query: torch.Tensor, dtype: torch.dtype) -> AttentionState:
    """The state over no keys, its output in `dtype`."""
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=state_dtype(query))
    return AttentionState(query.new_zeros(query.shape, dtype=dtype), lse)
