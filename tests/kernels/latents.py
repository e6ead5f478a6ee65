"""Latent attention over contexts that are cut into parts, beside attention over all vectors at once."""

from dataclasses import replace
from random import Random

import torch

from hicache.kernels.attend_latent import LatentPart, attend_latent
from hicache.kernels.launch import Path
from hicache.kernels.scoring import PLAIN, Scoring
from hicache.kernels.state import AttentionState
from tests.kernels.contexts import assert_close, causal, tensor

LATENT, ROPE, HEADS = 32, 16, 4


def cut(random: Random, vectors: torch.Tensor, stored: torch.dtype | None) -> tuple[list[LatentPart], torch.Tensor]:
    """Parts over memories of their own, some empty, what is no token being NaN; and the vectors as pages have them."""
    held = vectors.float() if stored is not None else vectors.clone()
    cuts = sorted(random.randint(0, len(vectors)) for _ in range(3))
    parts = []
    for start, end in zip([0, *cuts], [*cuts, len(vectors)], strict=True):
        page_size = random.choice([1, 5, 16])
        table = random.sample(range(-(-(end - start) // page_size) + 2), -(-(end - start) // page_size))
        # Between pages lies another layer.
        pages = torch.full((len(table) + 2, 2, page_size, vectors.shape[1]), torch.nan, dtype=vectors.dtype)[:, 1]
        for i in range(start, end):
            pages[table[(i - start) // page_size], (i - start) % page_size] = vectors[i]
        scales = None
        if stored is not None:
            scales = tensor(random, len(pages), dtype=torch.float32).abs() + 0.1
            pages = (pages.float() / scales[:, None, None]).to(stored)
            for i in range(start, end):
                slot = table[(i - start) // page_size]
                held[i] = pages[slot, (i - start) % page_size].float() * scales[slot]
        parts.append(LatentPart(pages, torch.tensor(table, dtype=torch.int32), end - start, scales))
    random.shuffle(parts)
    return parts, held


def run_latent(
    random: Random,
    num_prefix: int,
    num_new: int,
    dtype: torch.dtype,
    *,
    scoring: Scoring = PLAIN,
    stored: torch.dtype | None = None,
    path: Path | None = None,
    device: str = "cpu",
) -> None:
    """Attend with and without the new tokens themselves, and compare."""
    parts, held = cut(random, tensor(random, num_prefix, LATENT + ROPE, dtype=dtype), stored)
    query = tensor(random, num_new, HEADS, LATENT + ROPE, dtype=dtype)
    new = tensor(random, num_new, LATENT + ROPE, dtype=dtype)
    sinks = None if scoring.sinks is None else scoring.sinks.to(device)
    # Every other part stays where it is.
    there = [replace(part, pages=part.pages.to(device), page_scales=None if part.page_scales is None
                     else part.page_scales.to(device)) if i % 2 else part for i, part in enumerate(parts)]  # fmt: skip
    for vectors in (new, new[:0]):
        state = attend_latent(
            query.to(device), iter(there), vectors=vectors.to(device), latent_dim=LATENT, scale=0.15,
            scoring=replace(scoring, sinks=sinks), path=path,
        )  # fmt: skip
        assert state.output.dtype == dtype
        keys = torch.cat([held, vectors.to(held.dtype)])[:, None]
        visible = causal(num_prefix, num_new)[:, : len(keys)]
        state = AttentionState(state.output.cpu(), state.lse.cpu())
        assert_close(state, query, keys, keys[..., :LATENT], visible, 0.15, scoring)
