"""Attention over parts on the CPU: a single token by compiled loops where they are ready, everything else by torch."""

from collections.abc import Iterable, Iterator

import torch

from hicache.kernels import decode_cpu
from hicache.kernels.attend_torch import Running, attend_torch
from hicache.kernels.checks import PageShape, check_page_ids
from hicache.kernels.parts import Asked, PagedPart, no_keys, seen_tokens
from hicache.kernels.state import AttentionState


def attend_cpu(
    query: torch.Tensor,
    parts: Iterable[tuple[PagedPart, PageShape]],
    key: torch.Tensor,
    value: torch.Tensor,
    asked: Asked,
) -> AttentionState:
    """As `attend_torch`, which see; but the slots of parts need not be there. Raises `BadArgument` if one is not."""
    if not decode_cpu.takes(query, query.dtype):
        return attend_torch(query, _there(parts), key, value, asked)
    decoding = decode_cpu.Decoding(query, key.shape[1], asked.scale, asked.scoring.soft_cap)
    running = Running()
    if len(key):
        decoding.add_token(key, value)
    for part, shape in parts:
        if part.page_scales is None and decode_cpu.takes(query, part.pages.dtype, part.pages.device):
            for first, last in seen_tokens(part, asked):
                decoding.add(part.pages, part.block_table, first, last)
        else:
            # A part that the loops do not take is torch's; its state is merged in the end.
            only = _there([(part, shape)])
            running.add(*attend_torch(query.float(), only, key[:0].float(), value[:0].float(), asked))
        if not part.stays:
            decoding.run()
    state = decoding.result()
    if state is not None:
        running.add(*state)
    return no_keys(query, torch.float32) if running.state is None else running.state


def _there(parts: Iterable[tuple[PagedPart, PageShape]]) -> Iterator[tuple[PagedPart, PageShape]]:
    """The parts, each when it is known that its slots are there, which the loops look at themselves."""
    for part, shape in parts:
        check_page_ids("part.block_table", part.block_table, shape.num_slots, negative=False)
        yield part, shape
