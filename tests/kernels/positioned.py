"""Contexts whose parts say where they are in the sequence, in half precision or float8, and attention over them."""

from dataclasses import replace
from random import Random
from typing import Final

import torch

from hicache.kernels.attend import attend
from hicache.kernels.launch import Path
from hicache.kernels.scoring import Scoring, visible_reference
from hicache.kernels.state import AttentionState
from tests.kernels.contexts import Context, assert_close, scatter_context, tensor

SCORINGS: Final = {
    "cap": Scoring(soft_cap=2.0),
    "window": Scoring(window=20),
    "window of one": Scoring(window=1),
    "window beyond": Scoring(window=1000),
    "first": Scoring(window=10, keep_first=7),
    "first and more": Scoring(window=30, keep_first=90),
    "sinks": Scoring(sinks=torch.tensor([0.5, -torch.inf, 30.0, -2.0])),
    "all": Scoring(soft_cap=5.0, window=25, keep_first=3, sinks=torch.tensor([1.0, 2.0, 0.0, -1.0])),
}
"""For 4 query heads."""


def positioned(random: Random, context: Context) -> Context:
    """The same with parts that know where they are, in another order."""
    parts, position = [], 0
    for part in context.parts:
        parts.append(replace(part, first_position=position))
        position += part.num_tokens
    random.shuffle(parts)
    return replace(context, parts=parts)


def float8(random: Random, context: Context, stored: torch.dtype) -> Context:
    """The same with pages in `stored` and scales, and with keys and values as these pages have them."""
    parts = []
    key, value = (held.to(torch.float32) for held in (context.key, context.value))
    for part in context.parts:
        slots, _, page_size, num_kv_heads, _ = part.pages.shape
        scales = tensor(random, slots, 2, num_kv_heads, dtype=torch.float32).abs() + 0.1
        pages = (part.pages.float() / scales[:, :, None, :, None]).to(stored)
        parts.append(replace(part, pages=pages, page_scales=scales))
        widened = pages.float() * scales[:, :, None, :, None]
        assert part.first_position is not None
        for i in range(part.num_tokens):
            for plane, held in enumerate((key, value)):
                slot = int(part.block_table[i // page_size])
                held[part.first_position + i] = widened[slot, plane, i % page_size]
    return Context(key, value, parts)


def run_scored(
    random: Random,
    scoring: Scoring,
    num_prefix: int,
    num_new: int,
    dtype: torch.dtype,
    *,
    stored: torch.dtype | None = None,
    path: Path | None = None,
    device: torch.device | None = None,
) -> None:
    """Attend with 4 query heads over 2 of keys, and compare with all keys at once."""
    context = scatter_context(random, num_prefix, num_kv_heads=2, head_dim=64, dtype=dtype)
    context = positioned(random, context)
    if stored is not None:
        context = float8(random, context, stored)
    query = tensor(random, num_new, 4, 64, dtype=dtype)
    key, value = (tensor(random, num_new, 2, 64, dtype=dtype) for _ in range(2))
    parts = context.parts
    there, there_new = query, (key, value)
    if device is not None:
        parts = [
            replace(
                part,
                pages=part.pages.to(device),
                block_table=part.block_table.to(device),
                page_scales=None if part.page_scales is None else part.page_scales.to(device),
            )
            for part in parts
        ]
        there, there_new = query.to(device), (key.to(device), value.to(device))
    sinks = None if scoring.sinks is None else scoring.sinks.to(there.device)
    state = attend(
        there, iter(parts), key=there_new[0], value=there_new[1], scale=0.125,
        scoring=replace(scoring, sinks=sinks), first_position=num_prefix, path=path,
    )  # fmt: skip
    positions = torch.arange(num_prefix + num_new)
    visible = visible_reference(positions[num_prefix:], positions, scoring)
    keys, values = (
        torch.cat([held, new.to(held.dtype)]) for held, new in ((context.key, key), (context.value, value))
    )
    assert_close(AttentionState(state.output.cpu(), state.lse.cpu()), query, keys, values, visible, 0.125, scoring)
