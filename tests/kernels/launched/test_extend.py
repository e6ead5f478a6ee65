"""Paged extend: the kernel against attention in float64."""

from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.kernels.checks import FLOAT8_DTYPES
from hicache.kernels.errors import BadArgument
from hicache.kernels.extend import paged_extend, paged_extend_reference
from hicache.kernels.merge import merge_states
from hicache.kernels.scoring import PLAIN, Scoring, visible_reference
from hicache.kernels.state import AttentionState
from tests.kernels.contexts import DTYPES, GROUPS, HEAD_DIMS, Memory, assert_close, tensor
from tests.kernels.launched.batches import Batch, far_memory, make_batch, nans, on_device
from tests.kernels.launched.device import DEVICE


@dataclass
class Extension:
    """Prefixes in pages, and the new tokens of each sequence."""

    prefix: Batch
    indptr: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @property
    def paged(self) -> dict[str, torch.Tensor]:
        """The arguments that give the prefix."""
        prefix = self.prefix
        paged = {"pages": prefix.pages, "block_tables": prefix.tables, "prefix_lens": prefix.lengths}
        return paged if prefix.scales is None else paged | {"page_scales": prefix.scales}

    @property
    def new(self) -> dict[str, torch.Tensor]:
        """The arguments that give the new keys."""
        return {"key": self.key, "value": self.value}


def make_extension(
    random: Random,
    prefixes: list[int],
    new: list[int],
    *,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    stored: torch.dtype | None = None,
    memory: Memory = Memory.PAGE_FIRST,
) -> Extension:
    """Sequences with `prefixes` cached tokens and `new` tokens each."""
    prefix = make_batch(
        random, prefixes, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype, stored=stored,
        memory=memory,
    )  # fmt: skip
    offsets = torch.tensor([0, *new]).cumsum(0).int()
    query = tensor(random, sum(new), num_kv_heads * group, head_dim, dtype=dtype)
    key, value = (tensor(random, sum(new), num_kv_heads, head_dim, dtype=dtype) for _ in range(2))
    return Extension(prefix, offsets, query, key, value)


def extend(
    extension: Extension,
    arguments: dict[str, torch.Tensor],
    *,
    scoring: Scoring = PLAIN,
    max_new_tokens: int | None = None,
    part: bool = False,
) -> AttentionState:
    """Launch the kernel on outputs full of NaN; everything comes back to the CPU. `part`: with a float32 output."""
    query = extension.query
    output = nans(*query.shape, dtype=torch.float32 if part else query.dtype).to(DEVICE)
    lse = nans(*query.shape[:2]).to(DEVICE)
    there: dict[str, Any] = {name: argument.to(DEVICE) for name, argument in arguments.items()}
    state = paged_extend(
        query.to(DEVICE), extension.indptr.to(DEVICE), scale=query.shape[2] ** -0.5, scoring=on_device(scoring),
        max_new_tokens=max_new_tokens, output=output, lse=lse, **there,
    )  # fmt: skip
    assert state.output is output
    assert state.lse is lse
    return AttentionState(output.cpu(), lse.cpu())


def compare(
    state: AttentionState,
    extension: Extension,
    scoring: Scoring = PLAIN,
    positions: torch.Tensor | None = None,
    *,
    prefix: bool = True,
    new: bool = True,
) -> None:
    """Every sequence against attention over all the keys that its new tokens see."""
    offsets = extension.indptr.tolist()
    firsts = (extension.prefix.lengths if positions is None else positions).tolist()
    for i, (begin, end) in enumerate(pairwise(offsets)):
        key, value = extension.prefix.key[i], extension.prefix.value[i]
        place = firsts[i] + torch.arange(end - begin)
        visible = visible_reference(place, torch.cat([torch.arange(key.shape[0]), place]), scoring)
        if not prefix:
            visible[:, : key.shape[0]] = False
        if not new:
            visible[:, key.shape[0] :] = False
        rows = slice(begin, end)
        assert_close(
            AttentionState(state.output[rows], state.lse[rows]),
            extension.query[rows],
            torch.cat([key, extension.key[rows]]),
            torch.cat([value, extension.value[rows]]),
            visible,
            key.shape[2] ** -0.5,
            scoring,
        )


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_ragged_batch(dtype: torch.dtype, group: int) -> None:
    which = GROUPS.index(group) + DTYPES.index(dtype)
    page_size = (16, 1, 64, 5)[which % 4]
    extension = make_extension(
        Random(which), [0, 1, page_size - 1, page_size + 1, 111, 40], [33, 1, 0, 7, 20, 2],
        num_kv_heads=1 + which % 2, group=group, head_dim=HEAD_DIMS[which % 4], page_size=page_size, dtype=dtype,
        memory=list(Memory)[which % 3],
    )
    compare(extend(extension, extension.paged | extension.new), extension)


@pytest.mark.parametrize("group", [3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefix_and_new_tokens_apart_and_merged(dtype: torch.dtype, group: int) -> None:
    """Without new keys nothing is causal; without a prefix there is only the triangle; together they are the whole."""
    which = GROUPS.index(group) + DTYPES.index(dtype) + 1
    extension = make_extension(
        Random(which), [63, 0, 17], [5, 12, 18],
        num_kv_heads=2, group=group, head_dim=HEAD_DIMS[which % 4], page_size=16, dtype=dtype,
    )
    compare(extend(extension, extension.paged), extension, new=False)
    compare(extend(extension, extension.new), extension, prefix=False)
    parts = [extend(extension, arguments, part=True) for arguments in (extension.paged, extension.new)]
    merged = merge_states(
        torch.stack([part.output for part in parts]).to(DEVICE),
        torch.stack([part.lse for part in parts]).to(DEVICE),
        dtype=dtype,
    )
    compare(AttentionState(merged.output.cpu(), merged.lse.cpu()), extension)


@settings(max_examples=6)
@given(
    random=st.randoms(use_true_random=False),
    sizes=st.lists(st.tuples(st.integers(0, 120), st.integers(0, 25)), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    group=st.sampled_from(GROUPS),
    head_dim=st.sampled_from(HEAD_DIMS),
)
def test_residency_masks_split_a_prefix_over_memories(
    random: Random, sizes: list[tuple[int, int]], dtype: torch.dtype, group: int, head_dim: int
) -> None:
    """Each page of the prefixes is looked up in one of two launches, the new keys in the second."""
    extension = make_extension(
        random, [prefix for prefix, _ in sizes], [new for _, new in sizes],
        num_kv_heads=1, group=group, head_dim=head_dim, page_size=16, dtype=dtype,
    )
    tables = extension.prefix.tables
    here = torch.tensor([[random.random() < 0.5 for _ in row] for row in tables.tolist()])
    parts = [
        extend(extension, extension.paged | {"block_tables": torch.where(resident, tables, -1)} | new, part=True)
        for resident, new in ((here, {}), (~here, extension.new))
    ]
    merged = merge_states(
        torch.stack([part.output for part in parts]).to(DEVICE),
        torch.stack([part.lse for part in parts]).to(DEVICE),
        dtype=dtype,
    )
    compare(AttentionState(merged.output.cpu(), merged.lse.cpu()), extension)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("stored", FLOAT8_DTYPES, ids=str)
def test_a_prefix_in_float8(stored: torch.dtype, head_dim: int) -> None:
    which = HEAD_DIMS.index(head_dim) + FLOAT8_DTYPES.index(stored)
    extension = make_extension(
        Random(which), [0, 17, 70], [3, 9, 1], num_kv_heads=2, group=3, head_dim=head_dim,
        page_size=(16, 1, 64)[which % 3], dtype=(torch.bfloat16, torch.float16)[which % 2], stored=stored,
    )  # fmt: skip
    compare(extend(extension, extension.paged | extension.new), extension)


@pytest.mark.parametrize(
    ("dtype", "scoring"),
    [
        (torch.float32, Scoring(soft_cap=3.0)),
        (torch.bfloat16, Scoring(window=1)),
        (torch.float16, Scoring(window=10)),
        (torch.float32, Scoring(window=30, keep_first=25)),
        *((dtype, Scoring(soft_cap=5.0, window=17, keep_first=3)) for dtype in DTYPES),
    ],
    ids=str,
)
def test_caps_windows_and_sinks(dtype: torch.dtype, scoring: Scoring) -> None:
    """Windows that end in the prefix, in the new tokens and in neither, over several blocks of rows and of keys."""
    random = Random(5)
    extension = make_extension(
        random, [0, 20, 111], [50, 7, 9], num_kv_heads=1, group=3, head_dim=64, page_size=16, dtype=dtype
    )
    extension.query *= 3
    scoring = replace(scoring, sinks=tensor(random, 3, dtype=torch.float32) * 4)
    compare(extend(extension, extension.paged | extension.new, scoring=scoring), extension, scoring)


def test_a_window_that_begins_in_keys_given_elsewhere() -> None:
    """New tokens further on than the table's end: by part of a window, or by the first tokens alone, they see it."""
    extension = make_extension(
        Random(0), [40, 40, 0], [6, 6, 6], num_kv_heads=1, group=4, head_dim=64, page_size=16, dtype=torch.bfloat16
    )
    positions = torch.tensor([43, 500, 2], dtype=torch.int32)
    scoring = Scoring(window=8, keep_first=5)
    arguments = extension.paged | extension.new | {"first_positions": positions}
    compare(extend(extension, arguments, scoring=scoring), extension, scoring, positions)


def test_rows_of_several_programs() -> None:
    """300 new tokens of three heads each: blocks of rows begin and end within a token, and keys within a block."""
    extension = make_extension(
        Random(0), [20], [300], num_kv_heads=1, group=3, head_dim=64, page_size=16, dtype=torch.float16
    )
    compare(extend(extension, extension.paged | extension.new), extension)


def test_a_stated_greatest_number_of_new_tokens() -> None:
    extension = make_extension(
        Random(0), [20, 0, 30], [5, 9, 0], num_kv_heads=2, group=2, head_dim=64, page_size=16, dtype=torch.float32
    )
    compare(extend(extension, extension.paged | extension.new, max_new_tokens=9), extension)


def test_queries_that_see_nothing() -> None:
    extension = make_extension(
        Random(0), [0, 40], [3, 4], num_kv_heads=2, group=2, head_dim=64, page_size=16, dtype=torch.bfloat16
    )
    extension.prefix.tables.fill_(-1)
    state = extend(extension, extension.paged)
    assert torch.equal(state.output, torch.zeros_like(state.output))
    assert torch.equal(state.lse, torch.full_like(state.lse, -torch.inf))


def test_strided_inputs_and_outputs() -> None:
    random = Random(0)
    extension = make_extension(
        random, [40, 3], [6, 5], num_kv_heads=2, group=2, head_dim=96, page_size=16, dtype=torch.float32
    )
    extension.query = tensor(random, 4, 11, 100, dtype=torch.float32).transpose(0, 1)[:, :, :96]
    extension.key, extension.value = (tensor(random, 11, 5, 96, dtype=torch.float32)[:, 1:5:3] for _ in range(2))
    output, lse = nans(4, 11, 96).transpose(0, 1).to(DEVICE), nans(11, 6)[:, :4].to(DEVICE)
    arguments: dict[str, Any] = {
        name: argument.to(DEVICE) for name, argument in (extension.paged | extension.new).items()
    }
    paged_extend(
        extension.query.to(DEVICE), extension.indptr.to(DEVICE), scale=96**-0.5, output=output, lse=lse,
        **arguments,
    )
    compare(AttentionState(output.cpu(), lse.cpu()), extension)


def test_a_page_further_than_int32_reaches() -> None:
    extension = make_extension(
        Random(0), [16], [3], num_kv_heads=1, group=4, head_dim=64, page_size=16, dtype=torch.float16
    )
    pages, last = far_memory(1, 64, 16, torch.float16)
    pages[last] = extension.prefix.pages[extension.prefix.tables[0, 0]]
    extension.prefix.pages = pages
    extension.prefix.tables[0, 0] = last
    compare(extend(extension, extension.paged | extension.new), extension)


def test_nothing_to_do() -> None:
    for new in ([], [0, 0]):
        extension = make_extension(
            Random(0), [5] * len(new), new, num_kv_heads=1, group=2, head_dim=64, page_size=16, dtype=torch.float32
        )
        assert extend(extension, extension.paged | extension.new).output.shape == (0, 2, 64)


def test_the_reference_is_attention() -> None:
    extension = make_extension(
        Random(0), [30, 0, 17], [4, 6, 1], num_kv_heads=2, group=2, head_dim=64, page_size=16, dtype=torch.float32
    )
    for prefix, new in ((True, True), (True, False), (False, True)):
        arguments = (extension.paged if prefix else {}) | (extension.new if new else {})
        state = paged_extend_reference(
            extension.query, extension.indptr, scale=0.125, **arguments  # type: ignore[arg-type]  # tensors only
        )
        compare(AttentionState(state.output.float(), state.lse), extension, prefix=prefix, new=new)


GOOD = make_extension(
    Random(0), [20, 5], [3, 4], num_kv_heads=2, group=2, head_dim=64, page_size=16, dtype=torch.float32
)
ARGUMENTS: dict[str, Any] = {
    "query": GOOD.query, "indptr": GOOD.indptr, **GOOD.paged, **GOOD.new
}  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("query", {"query": GOOD.query[0]}),
        ("query", {"query": torch.zeros(7, 4, 257)}),
        ("indptr", {"indptr": GOOD.indptr.long()}),
        ("indptr", {"indptr": GOOD.indptr[:0]}),
        ("max_new_tokens", {"max_new_tokens": 8}),
        ("max_new_tokens", {"max_new_tokens": -1}),
        ("max_new_tokens", {"max_new_tokens": 0}),
        ("pages", {"pages": GOOD.prefix.pages.half()}),
        ("pages", {"pages": None, "key": None}),
        ("block_tables", {"block_tables": None}),
        ("block_tables", {"block_tables": GOOD.prefix.tables[:1]}),
        ("prefix_lens", {"prefix_lens": None}),
        ("prefix_lens", {"prefix_lens": GOOD.prefix.lengths.long()}),
        ("key", {"key": GOOD.key[:1]}),
        ("key", {"key": GOOD.key[:, :1]}),
        ("key", {"pages": None, "key": GOOD.key[:, :0]}),
        ("value", {"value": None}),
        ("value", {"value": GOOD.value.half()}),
        ("value", {"key": None}),
        ("block_tables", {"pages": None}),
        ("prefix_lens", {"pages": None, "block_tables": None}),
        ("page_scales", {"pages": None, "block_tables": None, "prefix_lens": None, "page_scales": torch.ones(1)}),
        ("page_scales", {"page_scales": torch.ones(1, 2, 2)}),
        ("first_positions", {"first_positions": GOOD.prefix.lengths.long()}),
        ("first_positions", {"first_positions": torch.zeros(3, dtype=torch.int32)}),
        ("scoring.window", {"scoring": Scoring(window=0)}),
        ("scoring.sinks", {"scoring": Scoring(sinks=torch.zeros(3).to(DEVICE))}),
        ("output", {"output": GOOD.query[:1]}),
        ("lse", {"lse": torch.empty(7, 3)}),
    ],
)
def test_what_does_not_fit_is_refused_by_name(argument: str, changes: dict[str, Any]) -> None:
    there: dict[str, Any] = {
        name: given.to(DEVICE) if isinstance(given, torch.Tensor) else given
        for name, given in (ARGUMENTS | changes).items()
    }
    with pytest.raises(BadArgument) as raised:
        paged_extend(**there, scale=0.125)
    assert raised.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("block_tables", {"block_tables": torch.full_like(GOOD.prefix.tables, 99)}),
        ("prefix_lens", {"prefix_lens": torch.tensor([33, 0], dtype=torch.int32)}),
        ("indptr", {"indptr": torch.tensor([0, 3, 6], dtype=torch.int32)}),
        ("indptr", {"indptr": torch.tensor([1, 3, 7], dtype=torch.int32)}),
        ("indptr", {"indptr": torch.tensor([0, 9, 7], dtype=torch.int32)}),
        ("first_positions", {"first_positions": torch.tensor([19, 5], dtype=torch.int32)}),
        ("max_new_tokens", {"max_new_tokens": 2}),
    ],
)
def test_numbers_out_of_bounds_are_refused_on_the_cpu(argument: str, changes: dict[str, Any]) -> None:
    if DEVICE != "cpu":
        return  # there the host does not look at them
    with pytest.raises(BadArgument) as raised:
        paged_extend(**(ARGUMENTS | changes), scale=0.125)
    assert raised.value.argument == argument
