"""Contexts whose keys are scattered over several memories, as the tiers of a running sequence are, and their truth.

What is not a token of the context is NaN: other slots, the rest of last pages, gaps between pages. Whatever reads it
shows.
"""

from dataclasses import dataclass
from enum import Enum
from random import Random

import torch

from hicache.kernels.attend import PagedPart
from hicache.kernels.scoring import PLAIN, Scoring
from hicache.kernels.state import AttentionState, attention_reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GROUPS = (1, 3, 4, 8)
HEAD_DIMS = (64, 96, 128, 256)


class Memory(Enum):
    """How one layer of pages [num_slots, 2, page_size, H, D] lies in memory."""

    LAYER_FIRST = "layer-first"
    """Contiguous: a device pool."""
    PAGE_FIRST = "page-first"
    """One layer of an arena: other layers lie between its slots."""
    HEADS_FIRST = "heads-first"
    """Heads outside of tokens, and a gap between planes."""


def empty_pages(
    memory: Memory, num_slots: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Pages [num_slots, 2, page_size, H, D] full of NaN, lying as `memory` says."""
    if memory is Memory.LAYER_FIRST:
        return torch.full((num_slots, 2, page_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    if memory is Memory.PAGE_FIRST:
        return torch.full((num_slots, 3, 2, page_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)[:, 1]
    pages = torch.full((num_slots, 3, num_kv_heads, page_size, head_dim), torch.nan, dtype=dtype)
    return pages[:, :2].transpose(2, 3)


@dataclass
class Context:
    """Keys and values of a context, and the parts that hold them."""

    key: torch.Tensor
    """[L, H, D], in order; likewise `value`."""
    value: torch.Tensor
    parts: list[PagedPart]


def tensor(random: Random, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normally distributed numbers that depend on `random` alone."""
    generator = torch.Generator().manual_seed(random.getrandbits(60))
    return torch.randn(shape, generator=generator).to(dtype)


def scatter_context(
    random: Random,
    num_tokens: int,
    *,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    page_sizes: tuple[int, ...] = (1, 5, 16, 64),
) -> Context:
    """A context of `num_tokens` random keys, cut at random into parts over one to four memories.

    Some of the parts are empty.
    """
    key = tensor(random, num_tokens, num_kv_heads, head_dim, dtype=dtype)
    value = tensor(random, num_tokens, num_kv_heads, head_dim, dtype=dtype)
    cuts = sorted(random.randint(0, num_tokens) for _ in range(random.randint(0, 5)))
    segments = list(zip([0, *cuts], [*cuts, num_tokens], strict=True))
    memories = [(random.choice(list(Memory)), random.choice(page_sizes)) for _ in range(random.randint(1, 4))]
    homes = [random.randrange(len(memories)) for _ in segments]
    parts: list[PagedPart | None] = [None] * len(segments)
    for home, (memory, page_size) in enumerate(memories):
        mine = [i for i, at in enumerate(homes) if at == home]
        needed = [-(-(segments[i][1] - segments[i][0]) // page_size) for i in mine]
        num_slots = sum(needed) + random.randint(0, 3)
        pages = empty_pages(memory, num_slots, page_size, num_kv_heads, head_dim, dtype)
        slots = random.sample(range(num_slots), sum(needed))
        for i, count in zip(mine, needed, strict=True):
            table, slots = slots[:count], slots[count:]
            start, end = segments[i]
            for j, slot in enumerate(table):
                begin = start + j * page_size
                stop = min(begin + page_size, end)
                pages[slot, 0, : stop - begin] = key[begin:stop]
                pages[slot, 1, : stop - begin] = value[begin:stop]
            parts[i] = PagedPart(pages, torch.tensor(table, dtype=torch.int32), end - start)
    return Context(key, value, [part for part in parts if part is not None])


def causal(num_prefix: int, num_new: int) -> torch.Tensor:
    """Mask [num_new, num_prefix + num_new]: every prefix key, and new keys up to the query's own."""
    return torch.ones(num_new, num_prefix + num_new, dtype=torch.bool).tril(num_prefix)


def truth(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    scoring: Scoring = PLAIN,
) -> AttentionState:
    """Attention over all keys at once, in float64."""
    return attention_reference(query, key, value, visible, scale=scale, scoring=scoring, dtype=torch.float64)


def plain_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    scoring: Scoring = PLAIN,
) -> torch.Tensor:
    """What torch itself gives for the keys held together, in the dtype of the query: what we are measured against."""
    query, key, value = (x.transpose(0, 1) for x in (query, key.to(query.dtype), value.to(query.dtype)))
    mask = torch.zeros(visible.shape, dtype=query.dtype).masked_fill(~visible, -torch.inf)
    if scoring.soft_cap is None and scoring.sinks is None and key.shape[2] == value.shape[2]:
        output = torch.nn.functional.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, scale=scale, enable_gqa=True
        )[0]
    else:
        # Not with torch's fused attention; models write it out like this.
        group = query.shape[0] // key.shape[0]
        scores = query @ key.repeat_interleave(group, dim=0).transpose(1, 2) * scale
        if scoring.soft_cap is not None:
            scores = torch.tanh(scores / scoring.soft_cap) * scoring.soft_cap
        scores = scores + mask
        if scoring.sinks is not None:
            sinks = scoring.sinks.to(query.dtype)[:, None, None].expand(-1, query.shape[1], 1)
            scores = torch.cat([scores, sinks], dim=2)
        weights = torch.softmax(scores, dim=2, dtype=torch.float32).to(query.dtype)
        output = weights[..., : key.shape[1]] @ value.repeat_interleave(group, dim=0)
    return output.transpose(0, 1)


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the error over that of the truth; NaN if anything in `actual` is."""
    error = actual.double() - expected.double()
    return float(error.square().mean().sqrt() / expected.double().square().mean().sqrt().clamp_min(1e-300))


ERROR_RATIO_MAX = 1.2
"""Relative RMS error over a split, against that of torch over the keys held together, in the same dtype."""
FLOAT32_ERROR_MAX = 8 * 2**-23
"""Relative RMS error that is allowed in float32 even where torch has less, which with few keys is a matter of luck:
every merge rounds once. Half precision needs no such allowance."""
LSE_ERROR_MAX = 6e-6
"""Absolute error of an LSE, whatever the dtype: it is accumulated in float32, and of the order of 10."""


def assert_close(
    actual: AttentionState,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    scoring: Scoring = PLAIN,
) -> None:
    """Compare with attention over all keys at once, within the bounds above. Queries that see no key must have output 0
    and LSE -inf, or that of their sink."""
    seeing = visible.any(dim=1)
    assert torch.equal(actual.output[~seeing], torch.zeros_like(actual.output[~seeing]))
    empty = torch.full_like(actual.lse, -torch.inf) if scoring.sinks is None else scoring.sinks.expand_as(actual.lse)
    torch.testing.assert_close(actual.lse[~seeing], empty[~seeing].to(actual.lse.dtype), rtol=1e-6, atol=1e-6)
    if not seeing.any():
        return
    query, visible = query[seeing], visible[seeing]
    expected = truth(query, key, value, visible, scale, scoring)
    error = relative_rms(actual.output[seeing], expected.output)
    plain = plain_torch(query, key, value, visible, scale, scoring)
    allowed = ERROR_RATIO_MAX * relative_rms(plain, expected.output)
    if query.dtype == torch.float32:
        allowed = max(allowed, FLOAT32_ERROR_MAX)
    assert error <= allowed, f"relative RMS error {error:.3g}, allowed {allowed:.3g}"
    lse_error = float((actual.lse[seeing].double() - expected.lse).abs().max())
    assert lse_error <= LSE_ERROR_MAX, f"LSE is off by {lse_error:.3g}"
