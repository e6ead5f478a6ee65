"""Paged decode: the kernel against attention in float64."""

import logging
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.kernels import launch
from hicache.kernels.checks import FLOAT8_DTYPES
from hicache.kernels.decode import paged_decode, paged_decode_reference
from hicache.kernels.errors import BadArgument
from hicache.kernels.merge import merge_states
from hicache.kernels.scoring import PLAIN, Scoring, visible_reference
from hicache.kernels.splits import workspace_elements
from hicache.kernels.state import AttentionState
from tests.kernels.contexts import DTYPES, GROUPS, HEAD_DIMS, LSE_ERROR_MAX, Memory, assert_close, relative_rms, tensor
from tests.kernels.launched.batches import Batch, far_memory, make_batch, nans, on_device
from tests.kernels.launched.device import DEVICE


def decode(
    query: torch.Tensor,
    batch: Batch,
    tables: torch.Tensor | None = None,
    *,
    scoring: Scoring = PLAIN,
    positions: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> AttentionState:
    """Launch the kernel on outputs full of NaN; everything comes back to the CPU."""
    output = nans(*query.shape, dtype=query.dtype).to(DEVICE)
    lse = nans(*query.shape[:2]).to(DEVICE)
    state = paged_decode(
        query.to(DEVICE),
        batch.pages.to(DEVICE),
        (batch.tables if tables is None else tables).to(DEVICE),
        batch.lengths.to(DEVICE),
        scale=query.shape[2] ** -0.5,
        scoring=on_device(scoring),
        page_scales=None if batch.scales is None else batch.scales.to(DEVICE),
        query_positions=None if positions is None else positions.to(DEVICE),
        num_splits=num_splits,
        output=output,
        lse=lse,
    )
    assert state.output is output
    assert state.lse is lse
    return AttentionState(output.cpu(), lse.cpu())


def compare(
    state: AttentionState,
    query: torch.Tensor,
    batch: Batch,
    scoring: Scoring = PLAIN,
    positions: torch.Tensor | None = None,
) -> None:
    """Every sequence against attention over all its keys."""
    for i, (key, value) in enumerate(zip(batch.key, batch.value, strict=True)):
        position = (batch.lengths - 1 if positions is None else positions)[i : i + 1]
        visible = visible_reference(position, torch.arange(key.shape[0]), scoring)
        row = AttentionState(state.output[i : i + 1], state.lse[i : i + 1])
        assert_close(row, query[i : i + 1], key, value, visible, query.shape[2] ** -0.5, scoring)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_ragged_batch(dtype: torch.dtype, group: int) -> None:
    which = GROUPS.index(group) + DTYPES.index(dtype)
    head_dim, page_size = HEAD_DIMS[which % 4], (16, 1, 64, 5)[which % 4]
    random = Random(which)
    lengths = [0, 1, page_size - 1, page_size + 1, 63, 111, 300]
    batch = make_batch(
        random, lengths, num_kv_heads=1 + which % 2, head_dim=head_dim, page_size=page_size, dtype=dtype,
        memory=list(Memory)[which % 3],
    )
    query = tensor(random, len(lengths), (1 + which % 2) * group, head_dim, dtype=dtype)
    compare(decode(query, batch, num_splits=1 + which % 3), query, batch)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("stored", FLOAT8_DTYPES, ids=str)
def test_float8_with_scales(stored: torch.dtype, head_dim: int) -> None:
    which = HEAD_DIMS.index(head_dim) + FLOAT8_DTYPES.index(stored)
    random = Random(which)
    dtype, page_size = (torch.bfloat16, torch.float16)[which % 2], (16, 1, 64)[which % 3]
    lengths = [0, 1, page_size + 1, 63, 111]
    batch = make_batch(
        random, lengths, num_kv_heads=2, head_dim=head_dim, page_size=page_size, dtype=dtype, stored=stored
    )
    query = tensor(random, len(lengths), 6, head_dim, dtype=dtype)
    compare(decode(query, batch, num_splits=1 + which % 2), query, batch)


def test_one_scale_a_head_and_none_at_all() -> None:
    """A stride of 0 shares a scale among pages; without scales values are what is stored."""
    random = Random(0)
    batch = make_batch(
        random, [40, 9], num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.bfloat16, stored=torch.float8_e4m3fn
    )
    query = tensor(random, 2, 4, 64, dtype=torch.bfloat16)
    for scales in (torch.tensor([[0.5, 2.0], [4.0, 0.125]]).expand(batch.pages.shape[0], 2, 2), None):
        batch.scales = scales
        expected = paged_decode_reference(
            query, batch.pages, batch.tables, batch.lengths, scale=0.125, page_scales=scales
        )
        state = decode(query, batch)
        assert relative_rms(state.output, expected.output) <= 2**-8
        assert float((state.lse - expected.lse).abs().max()) <= LSE_ERROR_MAX


def test_float8_on_a_gpu_that_cannot_convert_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before sm_89 kernels do it bit by bit. All finite bytes are tried, one a key, by making each weigh as much."""
    if DEVICE != "cpu":
        return  # its GPU is asked for what it can do
    launch.converts_e4m3.cache_clear()
    monkeypatch.setattr(launch, "compute_capability", lambda device: (8, 0))
    random = Random(0)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    every = every[every.float().isfinite()]
    pages = torch.zeros(16, 2, 16, 1, 64).to(torch.float8_e4m3fn)
    for i in range(len(every)):
        pages[i // 16, 1, i % 16, 0, i % 64] = every[i]
    batch = Batch(
        pages, None, torch.arange(16, dtype=torch.int32)[None], torch.tensor([254], dtype=torch.int32),
        [pages[:, 0].reshape(256, 1, 64)[:254].float()], [pages[:, 1].reshape(256, 1, 64)[:254].float()],
    )  # fmt: skip
    query = tensor(random, 1, 4, 64, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            compare(decode(query, batch, num_splits=1), query, batch)
    said = [record.getMessage() for record in caplog.records if "float8_e4m3fn" in record.getMessage()]
    assert len(said) == 1
    launch.converts_e4m3.cache_clear()


def sinks(random: Random, num_heads: int) -> torch.Tensor:
    """Sinks of which some outweigh every key, some count for nothing, and one does not exist."""
    sinks = tensor(random, num_heads, dtype=torch.float32) * 4
    sinks[0] = -torch.inf
    return sinks


@pytest.mark.parametrize(
    ("dtype", "scoring"),
    [
        (torch.bfloat16, Scoring(soft_cap=2.0)),
        (torch.float32, Scoring(soft_cap=50.0)),
        (torch.bfloat16, Scoring(window=1)),
        (torch.float32, Scoring(window=40)),
        (torch.float16, Scoring(window=30, keep_first=5)),
        (torch.float32, Scoring(window=3, keep_first=200)),
        *((dtype, Scoring(soft_cap=5.0, window=17, keep_first=20)) for dtype in DTYPES),
    ],
    ids=str,
)
def test_caps_windows_and_sinks(dtype: torch.dtype, scoring: Scoring) -> None:
    random = Random(3)
    batch = make_batch(random, [0, 1, 17, 111], num_kv_heads=2, head_dim=64, page_size=16, dtype=dtype)
    query = tensor(random, 4, 6, 64, dtype=dtype) * 4
    compare(decode(query, batch, scoring=scoring, num_splits=1), query, batch, scoring)
    scoring = replace(scoring, sinks=sinks(random, 6))
    compare(decode(query, batch, scoring=scoring, num_splits=3), query, batch, scoring)


def test_a_window_over_part_of_a_sequence() -> None:
    """A query further on sees the end of the table only, or nothing of it but the first tokens."""
    random = Random(0)
    batch = make_batch(random, [60, 60, 60, 0], num_kv_heads=1, head_dim=64, page_size=16, dtype=torch.bfloat16)
    query = tensor(random, 4, 3, 64, dtype=torch.bfloat16)
    positions = torch.tensor([59, 80, 1000, 1000], dtype=torch.int32)
    for scoring in (Scoring(window=30), Scoring(window=30, keep_first=4)):
        compare(decode(query, batch, scoring=scoring, positions=positions), query, batch, scoring, positions)


def test_a_state_to_begin_with_is_merged_in() -> None:
    """The state over part of the keys, handed to decode over the others, in place or not: the whole."""
    random = Random(0)
    batch = make_batch(random, [100, 40], num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.bfloat16)
    query = tensor(random, 2, 6, 64, dtype=torch.bfloat16)
    here = torch.tensor([[random.random() < 0.5 for _ in row] for row in batch.tables.tolist()])
    halves = [torch.where(resident, batch.tables, -1).to(DEVICE) for resident in (here, ~here)]
    arguments: dict[str, Any] = {
        "query": query.to(DEVICE), "pages": batch.pages.to(DEVICE), "seq_lens": batch.lengths.to(DEVICE),
    }  # fmt: skip
    for num_splits in (1, 2):
        first = paged_decode(**arguments, block_tables=halves[0], scale=0.125, output=nans(2, 6, 64).to(DEVICE))
        whole = paged_decode(
            **arguments, block_tables=halves[1], scale=0.125, initial=first, num_splits=num_splits,
            output=nans(2, 6, 64, dtype=torch.bfloat16).to(DEVICE),
        )  # fmt: skip
        compare(AttentionState(whole.output.cpu(), whole.lse.cpu()), query, batch)
        paged_decode(
            **arguments, block_tables=halves[1], scale=0.125, initial=first, num_splits=num_splits,
            output=first.output, lse=first.lse,
        )  # fmt: skip
        assert torch.equal(first.output.bfloat16(), whole.output)
        assert torch.equal(first.lse, whole.lse)


def test_the_caller_s_workspace() -> None:
    random = Random(0)
    batch = make_batch(random, [100, 40], num_kv_heads=1, head_dim=64, page_size=16, dtype=torch.float32)
    query = tensor(random, 2, 3, 64, dtype=torch.float32)
    workspace = nans(workspace_elements(2, 3, 64, 2)).to(DEVICE)
    arguments: dict[str, Any] = {
        "query": query.to(DEVICE), "pages": batch.pages.to(DEVICE), "block_tables": batch.tables.to(DEVICE),
        "seq_lens": batch.lengths.to(DEVICE), "scale": 0.125, "num_splits": 2,
    }  # fmt: skip
    state = paged_decode(**arguments, workspace=workspace)
    compare(AttentionState(state.output.cpu(), state.lse.cpu()), query, batch)
    assert workspace.isfinite().any()
    with pytest.raises(BadArgument, match="workspace: has 779 elements, expected at least 780"):
        paged_decode(**arguments, workspace=workspace[1:])


@settings(max_examples=6)
@given(
    random=st.randoms(use_true_random=False),
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    group=st.sampled_from(GROUPS),
    head_dim=st.sampled_from(HEAD_DIMS),
)
def test_residency_masks_split_a_sequence_over_memories(
    random: Random, lengths: list[int], dtype: torch.dtype, group: int, head_dim: int
) -> None:
    """Two memories hold the same slots, and each page is looked up in one of the two. In the other, it is garbage."""
    batch = make_batch(random, lengths, num_kv_heads=1, head_dim=head_dim, page_size=16, dtype=dtype)
    here = torch.tensor([[random.random() < 0.5 for _ in row] for row in batch.tables.tolist()])
    query = tensor(random, len(lengths), group, head_dim, dtype=dtype)
    states = []
    for resident in (here, ~here):
        tables = torch.where(resident, batch.tables, -1)
        pages = batch.pages.clone()
        pages[batch.tables[~resident & (batch.tables >= 0)].long()] = torch.nan
        memory = Batch(pages, None, batch.tables, batch.lengths, batch.key, batch.value)
        # Parts are kept in float32, as `attend` keeps them.
        states.append(
            paged_decode(
                query.to(DEVICE), memory.pages.to(DEVICE), tables.to(DEVICE), memory.lengths.to(DEVICE),
                scale=head_dim**-0.5, output=nans(*query.shape).to(DEVICE), num_splits=2,
            )
        )
    merged = merge_states(
        torch.stack([state.output for state in states]), torch.stack([state.lse for state in states]), dtype=dtype
    )
    compare(AttentionState(merged.output.cpu(), merged.lse.cpu()), query, batch)


def test_a_sequence_of_which_no_page_is_here() -> None:
    random = Random(0)
    batch = make_batch(random, [50, 7], num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.bfloat16)
    batch.tables[0] = -1
    query = tensor(random, 2, 6, 64, dtype=torch.bfloat16)
    for num_splits in (1, 2):
        state = decode(query, batch, num_splits=num_splits)
        assert torch.equal(state.output[0], torch.zeros_like(state.output[0]))
        assert torch.equal(state.lse[0], torch.full((6,), -torch.inf))
        assert state.lse[1].isfinite().all()
        assert not state.output.isnan().any()


@pytest.mark.parametrize("num_splits", [1, 2, 5, 40])
def test_any_number_of_splits_gives_the_same(num_splits: int) -> None:
    random = Random(0)
    batch = make_batch(random, [300, 3], num_kv_heads=1, head_dim=64, page_size=16, dtype=torch.float16)
    query = tensor(random, 2, 3, 64, dtype=torch.float16)
    compare(decode(query, batch, num_splits=num_splits), query, batch)


def test_a_group_larger_than_a_program_takes() -> None:
    random = Random(0)
    batch = make_batch(random, [20], num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.float32)
    query = tensor(random, 1, 2 * 80, 64, dtype=torch.float32)
    compare(decode(query, batch), query, batch)


def test_strided_queries_tables_and_outputs() -> None:
    random = Random(0)
    batch = make_batch(random, [40, 20], num_kv_heads=2, head_dim=96, page_size=16, dtype=torch.float32)
    query = tensor(random, 8, 2, 100, dtype=torch.float32).transpose(0, 1)[:, :, :96]
    wide = torch.full((2, 9), 99, dtype=torch.int32)
    wide[:, :3] = batch.tables
    output, lse = nans(8, 2, 96).transpose(0, 1), nans(2, 11)[:, :8]
    paged_decode(
        query.to(DEVICE), batch.pages.to(DEVICE), wide.to(DEVICE)[:, :3], batch.lengths.to(DEVICE), scale=96**-0.5,
        output=(on_device := output.to(DEVICE)), lse=(lse_on_device := lse.to(DEVICE)),
    )
    compare(AttentionState(on_device.cpu(), lse_on_device.cpu()), query, batch)


def test_a_page_further_than_int32_reaches() -> None:
    random = Random(0)
    pages, last = far_memory(1, 64, 16, torch.float16)
    key, value = (tensor(random, 16, 1, 64, dtype=torch.float16) for _ in range(2))
    pages[last, 0], pages[last, 1] = key, value
    query = tensor(random, 1, 4, 64, dtype=torch.float16)
    batch = Batch(
        pages, None, torch.tensor([[last]], dtype=torch.int32), torch.tensor([16], dtype=torch.int32), [key], [value]
    )
    compare(decode(query, batch), query, batch)


def test_an_empty_batch() -> None:
    batch = make_batch(Random(0), [], num_kv_heads=1, head_dim=64, page_size=16, dtype=torch.float32)
    assert decode(torch.empty(0, 2, 64), batch).output.shape == (0, 2, 64)


def test_the_reference_is_attention() -> None:
    """The definition that the project states is itself held against torch."""
    random = Random(0)
    batch = make_batch(random, [0, 30, 17], num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.float32)
    query = tensor(random, 3, 4, 64, dtype=torch.float32)
    state = paged_decode_reference(query, batch.pages, batch.tables, batch.lengths, scale=0.125)
    compare(AttentionState(state.output.float(), state.lse), query, batch)


RANDOM = Random(0)
GOOD = make_batch(RANDOM, [20, 5], num_kv_heads=2, head_dim=64, page_size=16, dtype=torch.float32)
QUERY = tensor(RANDOM, 2, 4, 64, dtype=torch.float32)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("query", {"query": QUERY[0]}),
        ("query", {"query": QUERY.double()}),
        ("query", {"query": torch.zeros(2, 4, 257)}),
        ("pages", {"pages": GOOD.pages[:, :1]}),
        ("pages", {"pages": GOOD.pages.half()}),
        ("pages", {"pages": GOOD.pages[..., :32]}),
        ("pages", {"query": QUERY[:, :3]}),
        ("block_tables", {"block_tables": GOOD.tables.long()}),
        ("block_tables", {"block_tables": GOOD.tables[:1]}),
        ("block_tables", {"block_tables": GOOD.tables.t().contiguous().t()}),
        ("seq_lens", {"seq_lens": GOOD.lengths[:1]}),
        ("seq_lens", {"seq_lens": GOOD.lengths.float()}),
        ("num_splits", {"num_splits": 0}),
        ("num_splits", {"num_splits": 129}),
        ("output", {"output": QUERY[:1]}),
        ("output", {"output": QUERY.int()}),
        ("lse", {"lse": torch.empty(2, 3)}),
        ("lse", {"lse": torch.empty(2, 4, dtype=torch.float64)}),
        ("pages", {"pages": GOOD.pages.to(torch.float8_e5m2)}),  # for half precision only
        ("page_scales", {"page_scales": torch.ones(1, 2, 2)}),
        ("page_scales", {"page_scales": torch.ones(GOOD.pages.shape[0], 2, 2).half()}),
        ("query_positions", {"query_positions": torch.zeros(3, dtype=torch.int32)}),
        ("scoring.soft_cap", {"scoring": Scoring(soft_cap=0.0)}),
        ("scoring.soft_cap", {"scoring": Scoring(soft_cap=float("nan"))}),
        ("scoring.window", {"scoring": Scoring(window=0)}),
        ("scoring.keep_first", {"scoring": Scoring(window=3, keep_first=-1)}),
        ("scoring.keep_first", {"scoring": Scoring(keep_first=1)}),
        ("scoring.sinks", {"scoring": Scoring(sinks=torch.zeros(3).to(DEVICE))}),
        ("scoring.sinks", {"scoring": Scoring(sinks=torch.zeros(4).half().to(DEVICE))}),
        ("initial.output", {"initial": AttentionState(QUERY.half().to(DEVICE), torch.zeros(2, 4).to(DEVICE))}),
        ("initial.lse", {"initial": AttentionState(QUERY.to(DEVICE), torch.zeros(2, 3).to(DEVICE))}),
        ("workspace", {"workspace": torch.zeros(9), "num_splits": 2}),
        ("workspace", {"workspace": torch.zeros(9999, dtype=torch.int32), "num_splits": 2}),
    ],
)
def test_what_does_not_fit_is_refused_by_name(argument: str, changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "query": QUERY, "pages": GOOD.pages, "block_tables": GOOD.tables, "seq_lens": GOOD.lengths,
    }  # fmt: skip
    arguments |= changes
    there: dict[str, Any] = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    with pytest.raises(BadArgument) as raised:
        paged_decode(**there, scale=0.125)
    assert raised.value.argument == argument


def test_a_query_before_the_end_of_its_table_is_refused() -> None:
    if DEVICE != "cpu":
        return  # there the host does not look at positions
    with pytest.raises(BadArgument, match="query_positions"):
        paged_decode(
            QUERY, GOOD.pages, GOOD.tables, GOOD.lengths, scale=0.125,
            query_positions=torch.tensor([18, 4], dtype=torch.int32),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "tables", "lengths"),
    [
        ("block_tables", [[0, 99], [0, 0]], [20, 5]),
        ("seq_lens", [[0, 1], [0, 0]], [33, 5]),
        ("seq_lens", [[0, 1], [0, 0]], [20, -1]),
    ],
)
def test_ids_and_lengths_out_of_bounds_are_refused_on_the_cpu(
    argument: str, tables: list[list[int]], lengths: list[int]
) -> None:
    if DEVICE != "cpu":
        return  # there the host does not look at them
    with pytest.raises(BadArgument) as raised:
        paged_decode(
            QUERY, GOOD.pages, torch.tensor(tables, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32),
            scale=0.125,
        )
    assert raised.value.argument == argument
