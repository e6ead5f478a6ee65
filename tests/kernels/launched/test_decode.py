"""Paged decode: the kernel against attention in float64."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.kernels.decode import paged_decode, paged_decode_reference
from hicache.kernels.errors import BadArgument
from hicache.kernels.merge import merge_states
from hicache.kernels.state import AttentionState
from tests.kernels.contexts import DTYPES, GROUPS, HEAD_DIMS, Memory, assert_close, tensor
from tests.kernels.launched.batches import Batch, far_memory, make_batch, nans
from tests.kernels.launched.device import DEVICE


def decode(query: torch.Tensor, batch: Batch, tables: torch.Tensor | None = None, **options: int) -> AttentionState:
    """Launch the kernel on outputs full of NaN; everything comes back to the CPU."""
    output = nans(*query.shape, dtype=query.dtype).to(DEVICE)
    lse = nans(*query.shape[:2]).to(DEVICE)
    state = paged_decode(
        query.to(DEVICE),
        batch.pages.to(DEVICE),
        (batch.tables if tables is None else tables).to(DEVICE),
        batch.lengths.to(DEVICE),
        scale=query.shape[2] ** -0.5,
        output=output,
        lse=lse,
        **options,
    )
    assert state.output is output
    assert state.lse is lse
    return AttentionState(output.cpu(), lse.cpu())


def compare(state: AttentionState, query: torch.Tensor, batch: Batch) -> None:
    """Every sequence against attention over all its keys."""
    for i, (key, value) in enumerate(zip(batch.key, batch.value, strict=True)):
        visible = torch.ones(1, key.shape[0], dtype=torch.bool)
        row = AttentionState(state.output[i : i + 1], state.lse[i : i + 1])
        assert_close(row, query[i : i + 1], key, value, visible, query.shape[2] ** -0.5)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_ragged_batch(dtype: torch.dtype, group: int) -> None:
    which = GROUPS.index(group) + DTYPES.index(dtype)
    head_dim, page_size = HEAD_DIMS[which % 3], (16, 1, 64, 5)[which % 4]
    random = Random(which)
    lengths = [0, 1, page_size - 1, page_size + 1, 63, 111, 300]
    batch = make_batch(
        random, lengths, num_kv_heads=1 + which % 2, head_dim=head_dim, page_size=page_size, dtype=dtype,
        memory=list(Memory)[which % 3],
    )
    query = tensor(random, len(lengths), (1 + which % 2) * group, head_dim, dtype=dtype)
    compare(decode(query, batch, num_splits=1 + which % 3), query, batch)


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
    ],
)
def test_what_does_not_fit_is_refused_by_name(argument: str, changes: dict[str, torch.Tensor]) -> None:
    arguments = {"query": QUERY, "pages": GOOD.pages, "block_tables": GOOD.tables, "seq_lens": GOOD.lengths} | changes
    on_device = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    with pytest.raises(BadArgument) as raised:
        paged_decode(**on_device, scale=0.125)  # type: ignore[arg-type]  # wrong on purpose
    assert raised.value.argument == argument


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
