"""The law, through the kernels: `attend` over any split of the keys equals attention over all of them."""

from collections.abc import Iterator
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.kernels import attend_triton
from hicache.kernels.attend import PagedPart, attend
from hicache.kernels.errors import BadArgument
from hicache.kernels.launch import Path
from hicache.kernels.scoring import Scoring
from hicache.kernels.state import AttentionState
from tests.kernels.contexts import (
    DTYPES,
    GROUPS,
    HEAD_DIMS,
    Context,
    assert_close,
    causal,
    scatter_context,
    tensor,
)
from tests.kernels.latents import run_latent
from tests.kernels.launched.device import DEVICE
from tests.kernels.positioned import SCORINGS, run_scored


def parts_of(context: Context, *, elsewhere: Random | None = None) -> Iterator[PagedPart]:
    """The parts on the device; some of them, if `elsewhere` says so, stay in host memory."""
    for part in context.parts:
        if elsewhere is not None and elsewhere.random() < 0.5:
            yield part
        else:
            yield PagedPart(part.pages.to(DEVICE), part.block_table.to(DEVICE), part.num_tokens)


def run(
    context: Context, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, elsewhere: Random | None = None
) -> None:
    """Attend over the context's parts by the kernels and compare with all keys at once."""
    scale = query.shape[2] ** -0.5
    output, lse = attend(
        query.to(DEVICE), parts_of(context, elsewhere=elsewhere), key=key.to(DEVICE), value=value.to(DEVICE),
        scale=scale, path=Path.TRITON,
    )
    assert output.dtype == query.dtype
    keys, values = torch.cat([context.key, key]), torch.cat([context.value, value])
    visible = causal(context.key.shape[0], query.shape[0])[:, : keys.shape[0]]
    assert_close(AttentionState(output.cpu(), lse.cpu()), query, keys, values, visible, scale)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=3)
@given(
    random=st.randoms(use_true_random=False),
    group=st.sampled_from(GROUPS),
    num_prefix=st.integers(0, 300),
    num_new=st.one_of(st.just(1), st.integers(2, 20)),
)
def test_any_split_over_memories_equals_the_whole(
    dtype: torch.dtype, head_dim: int, random: Random, group: int, num_prefix: int, num_new: int
) -> None:
    context = scatter_context(random, num_prefix, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    query = tensor(random, num_new, group, head_dim, dtype=dtype)
    key, value = (tensor(random, num_new, 1, head_dim, dtype=dtype) for _ in range(2))
    run(context, query, key, value, elsewhere=random)


@pytest.mark.parametrize("num_new", [1, 6])
def test_more_parts_than_states_are_collected(num_new: int) -> None:
    """19 parts: states are merged twice on the way, then at the end."""
    random = Random(0)
    pieces = [scatter_context(random, 5, num_kv_heads=2, head_dim=64, dtype=torch.float32) for _ in range(19)]
    context = Context(
        torch.cat([piece.key for piece in pieces]),
        torch.cat([piece.value for piece in pieces]),
        [part for piece in pieces for part in piece.parts],
    )
    assert len(context.parts) > 2 * attend_triton._STATES_MAX
    query = tensor(random, num_new, 4, 64, dtype=torch.float32)
    key, value = (tensor(random, num_new, 2, 64, dtype=torch.float32) for _ in range(2))
    run(context, query, key, value)


@pytest.mark.parametrize("num_new", [1, 6])
def test_without_new_keys_the_queries_see_the_parts_only(num_new: int) -> None:
    random = Random(num_new)
    context = scatter_context(random, 50, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    none = torch.empty(0, 2, 64, dtype=torch.bfloat16)
    run(context, tensor(random, num_new, 4, 64, dtype=torch.bfloat16), none, none)


def test_queries_without_any_key_have_output_0_and_lse_minus_infinity() -> None:
    query = tensor(Random(0), 3, 4, 64, dtype=torch.float16).to(DEVICE)
    none = torch.empty(0, 2, 64, dtype=torch.float16, device=DEVICE)
    output, lse = attend(query, [], key=none, value=none, scale=0.125, path=Path.TRITON)
    assert torch.equal(output, torch.zeros_like(query))
    assert torch.equal(lse.cpu(), torch.full((3, 4), -torch.inf))
    assert attend(query[:0], [], key=none, value=none, scale=0.125, path=Path.TRITON).output.shape == (0, 4, 64)


@pytest.mark.parametrize("num_new", [1, 7])
def test_a_part_is_used_up_when_the_next_is_asked_for(num_new: int) -> None:
    """One buffer serves all parts, as it does when pages are streamed."""
    random = Random(num_new)
    pages = [tensor(random, 2, 2, 16, 2, 64, dtype=torch.float32) for _ in range(3)]
    query = tensor(random, num_new, 4, 64, dtype=torch.float32)
    key, value = (tensor(random, num_new, 2, 64, dtype=torch.float32) for _ in range(2))

    def parts() -> Iterator[PagedPart]:
        buffer = torch.empty(2, 2, 16, 2, 64, device=DEVICE)
        for part in pages:
            buffer.copy_(part)
            yield PagedPart(buffer, torch.tensor([1, 0], dtype=torch.int32, device=DEVICE), 32)
        buffer.fill_(torch.nan)

    output, lse = attend(
        query.to(DEVICE), parts(), key=key.to(DEVICE), value=value.to(DEVICE), scale=0.125, path=Path.TRITON
    )
    keys, values = (torch.cat([part[slot, plane] for part in pages for slot in (1, 0)]) for plane in (0, 1))
    keys, values = torch.cat([keys, key]), torch.cat([values, value])
    assert_close(AttentionState(output.cpu(), lse.cpu()), query, keys, values, causal(96, num_new), 0.125)


@pytest.mark.parametrize("num_new", [1, 6])
@pytest.mark.parametrize("scoring", ["all", "first and more", "sinks"])
def test_a_cap_windows_and_sinks_over_any_split(scoring: str, num_new: int) -> None:
    run_scored(Random(4), SCORINGS[scoring], 63, num_new, torch.float32, path=Path.TRITON, device=torch.device(DEVICE))


@pytest.mark.parametrize("num_new", [1, 6])
def test_float8_pages_with_scales(num_new: int) -> None:
    run_scored(
        Random(5), SCORINGS["all"], 63, num_new, torch.float16, stored=torch.float8_e4m3fn, path=Path.TRITON,
        device=torch.device(DEVICE),
    )  # fmt: skip


@pytest.mark.parametrize("num_new", [1, 5])
@pytest.mark.parametrize("stored", [None, torch.float8_e5m2], ids=str)
def test_latent_attention_over_any_split(stored: torch.dtype | None, num_new: int) -> None:
    scoring = Scoring(soft_cap=2.0, sinks=torch.tensor([0.5, -torch.inf, 30.0, -2.0]))
    run_latent(
        Random(6), 40, num_new, torch.float16, scoring=scoring, stored=stored, path=Path.TRITON, device=str(DEVICE)
    )


def test_float64_is_refused() -> None:
    query = torch.zeros(1, 2, 64, dtype=torch.float64, device=DEVICE)
    with pytest.raises(BadArgument) as raised:
        attend(query, [], key=query, value=query, scale=1.0, path=Path.TRITON)
    assert raised.value.argument == "query"
