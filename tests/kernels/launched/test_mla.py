"""Decode of latent attention: the kernel against attention in float64."""

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch

from hicache.kernels.checks import FLOAT8_DTYPES
from hicache.kernels.errors import BadArgument
from hicache.kernels.mla import mla_decode, mla_decode_reference
from hicache.kernels.scoring import PLAIN, Scoring
from hicache.kernels.splits import workspace_elements
from hicache.kernels.state import AttentionState
from tests.kernels.contexts import DTYPES, assert_close, tensor
from tests.kernels.launched.batches import far_memory, make_batch, nans, on_device
from tests.kernels.launched.device import DEVICE

LATENT, ROPE = 512, 64
SMALL = (64, 24)
"""Sizes for what does not depend on them; a rope part that fills no block."""


@dataclass
class Latents:
    """Sequences of vectors in pages, and a query a row."""

    query: torch.Tensor
    """[B, HQ, DL + DR]."""
    pages: torch.Tensor
    """[num_slots, page_size, DL + DR]."""
    scales: torch.Tensor | None
    """[num_slots]."""
    tables: torch.Tensor
    lengths: torch.Tensor
    vectors: list[torch.Tensor]
    """[L, DL + DR] of each sequence."""
    latent_dim: int

    @property
    def arguments(self) -> dict[str, Any]:
        """What the wrapper takes, on the device."""
        arguments = {
            "query": self.query, "pages": self.pages, "page_scales": self.scales, "block_tables": self.tables,
            "seq_lens": self.lengths,
        }  # fmt: skip
        there = {name: argument if argument is None else argument.to(DEVICE) for name, argument in arguments.items()}
        return {**there, "latent_dim": self.latent_dim}


def make_latents(
    random: Random,
    lengths: list[int],
    *,
    num_heads: int = 5,
    sizes: tuple[int, int] = SMALL,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    stored: torch.dtype | None = None,
) -> Latents:
    """Random vectors in random distinct slots; whatever is no token is NaN."""
    width = sum(sizes)
    batch = make_batch(
        random, lengths, num_kv_heads=1, head_dim=width, page_size=page_size, dtype=dtype, stored=stored
    )
    scales = None if batch.scales is None else batch.scales[:, 0, 0]
    query = tensor(random, len(lengths), num_heads, width, dtype=dtype)
    vectors = [key[:, 0] for key in batch.key]
    return Latents(query, batch.pages[:, 0, :, 0], scales, batch.tables, batch.lengths, vectors, sizes[0])


def decode(latents: Latents, scoring: Scoring = PLAIN, **options: Any) -> AttentionState:
    """Launch the kernel on outputs full of NaN; everything comes back to the CPU."""
    shape = (*latents.query.shape[:2], latents.latent_dim)
    output, lse = nans(*shape, dtype=latents.query.dtype).to(DEVICE), nans(*shape[:2]).to(DEVICE)
    state = mla_decode(
        **latents.arguments, scale=latents.query.shape[2] ** -0.5, scoring=on_device(scoring), output=output, lse=lse,
        **options,
    )  # fmt: skip
    assert state.output is output
    assert state.lse is lse
    return AttentionState(output.cpu(), lse.cpu())


def compare(state: AttentionState, latents: Latents, scoring: Scoring = PLAIN) -> None:
    """Every row against attention over all its keys: one head of keys, whose values are the latent."""
    for i, vectors in enumerate(latents.vectors):
        key, value = vectors[:, None, :], vectors[:, None, : latents.latent_dim]
        row = AttentionState(state.output[i : i + 1], state.lse[i : i + 1])
        visible = torch.ones(1, key.shape[0], dtype=torch.bool)
        assert_close(row, latents.query[i : i + 1], key, value, visible, latents.query.shape[2] ** -0.5, scoring)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sizes_of_a_model(dtype: torch.dtype) -> None:
    latents = make_latents(
        Random(0), [0, 1, 63], num_heads=16, sizes=(LATENT, ROPE), page_size=(16, 1, 64)[DTYPES.index(dtype)],
        dtype=dtype,
    )  # fmt: skip
    compare(decode(latents, num_splits=1), latents)


@pytest.mark.parametrize("stored", FLOAT8_DTYPES, ids=str)
def test_float8_with_scales(stored: torch.dtype) -> None:
    latents = make_latents(Random(1), [0, 40], num_heads=16, sizes=(LATENT, ROPE), stored=stored)
    compare(decode(latents), latents)


@pytest.mark.parametrize("num_heads", [1, 20, 80])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_ragged_batch(page_size: int, num_heads: int) -> None:
    dtype = DTYPES[(page_size + num_heads) % 3]
    lengths = [0, 1, page_size + 1, max(0, page_size - 1), 111]
    latents = make_latents(Random(num_heads), lengths, num_heads=num_heads, page_size=page_size, dtype=dtype)
    compare(decode(latents, num_splits=1 + num_heads % 3), latents)


@pytest.mark.parametrize("num_splits", [2, 5, 40])
def test_any_number_of_splits_gives_the_same(num_splits: int) -> None:
    latents = make_latents(Random(0), [300, 3])
    compare(decode(latents, num_splits=num_splits), latents)


def test_chunked_prefill() -> None:
    """New tokens whose vectors are in their pages are rows of their own, each of which sees up to itself."""
    latents = make_latents(Random(0), [30, 21])
    rows = torch.tensor([0] * 7 + [1] * 5)
    latents.tables = latents.tables[rows]
    latents.lengths = torch.tensor([*range(24, 31), *range(17, 22)], dtype=torch.int32)
    latents.query = tensor(Random(1), 12, 5, sum(SMALL), dtype=torch.bfloat16)
    latents.vectors = [
        latents.vectors[row][:length] for row, length in zip(rows.tolist(), latents.lengths.tolist(), strict=True)
    ]
    compare(decode(latents), latents)


def test_a_cap_and_sinks() -> None:
    random = Random(0)
    latents = make_latents(random, [0, 70], dtype=torch.float32)
    scoring = Scoring(soft_cap=3.0, sinks=tensor(random, 5, dtype=torch.float32))
    compare(decode(latents, scoring, num_splits=3), latents, scoring)


def test_pages_that_are_not_here_and_a_state_over_them() -> None:
    latents = make_latents(Random(0), [70, 20])
    here = torch.tensor([[True, False, True, True, False], [False, True, True, True, True]])
    tables = latents.tables
    latents.tables = torch.where(here, tables, -1)
    first = mla_decode(**latents.arguments, scale=sum(SMALL) ** -0.5, output=nans(2, 5, SMALL[0]).to(DEVICE))
    latents.tables = torch.where(here, -1, tables)
    compare(decode(latents, initial=first), latents)


def test_no_page_here() -> None:
    latents = make_latents(Random(0), [40])
    latents.tables.fill_(-1)
    state = decode(latents, num_splits=2)
    assert torch.equal(state.output, torch.zeros_like(state.output))
    assert torch.equal(state.lse, torch.full_like(state.lse, -torch.inf))


def test_strides_and_the_caller_s_workspace() -> None:
    random = Random(0)
    latents = make_latents(random, [40, 20], dtype=torch.float32)
    latents.query = tensor(random, 5, 2, 100, dtype=torch.float32).transpose(0, 1)[:, :, :88]
    output, lse = nans(5, 2, 64).transpose(0, 1).to(DEVICE), nans(2, 7)[:, :5].to(DEVICE)
    mla_decode(
        **latents.arguments, scale=88**-0.5, num_splits=2, output=output, lse=lse,
        workspace=nans(workspace_elements(2, 5, 64, 2)).to(DEVICE),
    )  # fmt: skip
    compare(AttentionState(output.cpu(), lse.cpu()), latents)


def test_a_page_further_than_int32_reaches() -> None:
    latents = make_latents(Random(0), [16], dtype=torch.float16, sizes=(64, 64))
    pages, last = far_memory(1, 128, 16, torch.float16)
    pages[last, 0, :, 0] = latents.pages[latents.tables[0, 0]]
    latents.pages, latents.tables = pages[:, 0, :, 0], torch.tensor([[last]], dtype=torch.int32)
    compare(decode(latents), latents)


def test_an_empty_batch() -> None:
    assert decode(make_latents(Random(0), [])).output.shape == (0, 5, 64)


def test_the_reference_is_attention() -> None:
    latents = make_latents(Random(0), [0, 30, 17], stored=torch.float8_e4m3fn, dtype=torch.float16)
    there = latents.arguments
    arguments: dict[str, Any] = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in there.items()}
    state = mla_decode_reference(**arguments, scale=sum(SMALL) ** -0.5)
    compare(AttentionState(state.output.half(), state.lse), latents)


GOOD = make_latents(Random(0), [20, 5], dtype=torch.float32)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("query", {"query": GOOD.query[0]}),
        ("latent_dim", {"latent_dim": 48}),
        ("latent_dim", {"latent_dim": 8}),
        ("latent_dim", {"latent_dim": 1024}),
        ("query", {"latent_dim": 128}),
        ("query", {"latent_dim": 16}),
        ("pages", {"pages": GOOD.pages[:, None]}),
        ("pages", {"pages": GOOD.pages.half()}),
        ("pages", {"pages": GOOD.pages[:, :0]}),
        ("page_scales", {"page_scales": torch.ones(1)}),
        ("block_tables", {"block_tables": GOOD.tables[:1]}),
        ("seq_lens", {"seq_lens": GOOD.lengths.long()}),
        ("scoring.window", {"scoring": Scoring(window=5)}),
        ("scoring.sinks", {"scoring": Scoring(sinks=torch.zeros(3).to(DEVICE))}),
        ("num_splits", {"num_splits": 0}),
        ("initial.lse", {"initial": AttentionState(nans(2, 5, 64).to(DEVICE), nans(2, 4).to(DEVICE))}),
        ("output", {"output": GOOD.query}),
        ("workspace", {"workspace": torch.zeros(3), "num_splits": 2}),
    ],
)
def test_what_does_not_fit_is_refused_by_name(argument: str, changes: dict[str, Any]) -> None:
    there = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in changes.items()}
    arguments: dict[str, Any] = GOOD.arguments | there
    with pytest.raises(BadArgument) as raised:
        mla_decode(**arguments, scale=0.125)
    assert raised.value.argument == argument
