"""The parts of a context, what is asked of attention over them, and the state over none: what all ways share."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from hicache.kernels.checks import FLOAT8_DTYPES
from hicache.kernels.launch import ceil_div
from hicache.kernels.scoring import PLAIN, Scoring
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
    page_scales: torch.Tensor | None = None
    """float32 [num_slots, 2, kv_heads], beside the pages, any stride, at least 0: multiply what is stored."""
    first_position: int | None = None
    """Index of the part's first token in the sequence. Only a window asks for it, and takes the others to follow."""
    stays: bool = False
    """Whether the part stays valid until there are no more, and nothing is waited for when the next one is asked for:
    such parts may be attended to together."""

    def cut(self, begin: int, end: int) -> "PagedPart":
        """The part of pages `begin` to `end`, whose table names no other pages than those that hold tokens."""
        if begin == 0 and end == len(self.block_table):
            return self
        page_size = self.pages.shape[2]
        return PagedPart(
            self.pages,
            self.block_table[begin:end],
            min(self.num_tokens, end * page_size) - begin * page_size,
            self.page_scales,
            None if self.first_position is None else self.first_position + begin * page_size,
            self.stays,
        )


class PartSource(Protocol):
    """Where the parts of a context come from: a running sequence, in `tiers/` and above."""

    def parts(self, layer: int) -> Iterator[PagedPart]:
        """The context's parts in one layer, in any order, each token once. Called from the thread that attends.

        A part is valid until the next one is asked for, or longer if it `stays`, or the iterator is closed; asking may
        wait for a transfer, but must not itself call `attend`, which is in the middle of using its thread's buffer.
        """
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What attention is asked to do with scores, and where its queries are."""

    scale: float
    scoring: Scoring = PLAIN
    first_position: int = 0
    """Index of the first query in the sequence, where there is a window."""

    @property
    def is_plain(self) -> bool:
        """Whether a softmax over scaled products is all, but for sinks."""
        return self.scoring.soft_cap is None and self.scoring.window is None


def seen_tokens(part: PagedPart, asked: Asked) -> list[tuple[int, int]]:
    """The runs of the part's tokens, first and behind the last, that the first query sees: later ones see no more."""
    window, keep = asked.scoring.window, asked.scoring.keep_first
    if window is None:
        return [(0, part.num_tokens)] if part.num_tokens else []
    assert part.first_position is not None
    kept = min(max(0, keep - part.first_position), part.num_tokens)
    begin = max(kept, asked.first_position - window + 1 - part.first_position)
    return [(a, b) for a, b in ((0, kept), (begin, part.num_tokens)) if a < b]


def seen_parts(part: PagedPart, asked: Asked) -> list[PagedPart]:
    """The pages of the part, as parts of their own, in which a query sees anything."""
    page_size = part.pages.shape[2]
    runs = [(first // page_size, ceil_div(last, page_size)) for first, last in seen_tokens(part, asked)]
    if len(runs) == 2 and runs[1][0] <= runs[0][1]:
        runs = [(runs[0][0], runs[1][1])]
    return [part.cut(begin, end) for begin, end in runs]


def selectable(pages: torch.Tensor) -> torch.Tensor:
    """The pages as torch can select some of them: float8 as bytes."""
    return pages.view(torch.uint8) if pages.dtype in FLOAT8_DTYPES else pages


def state_dtype(query: torch.Tensor) -> torch.dtype:
    """Type in which states are kept and LSE is returned."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def no_keys(query: torch.Tensor, dtype: torch.dtype) -> AttentionState:
    """The state over no keys, its output in `dtype`."""
    lse = query.new_full(query.shape[:2], -torch.inf, dtype=state_dtype(query))
    return AttentionState(query.new_zeros(query.shape, dtype=dtype), lse)
