"""Cascade decode: shared and own tokens against attention over both in one."""

from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch

from hicache.kernels.cascade import cascade_decode, cascade_decode_reference
from hicache.kernels.errors import BadArgument
from hicache.kernels.scoring import PLAIN, Scoring
from hicache.kernels.splits import workspace_elements
from hicache.kernels.state import AttentionState
from tests.kernels.contexts import DTYPES, HEAD_DIMS, assert_close, tensor
from tests.kernels.launched.batches import Batch, make_batch, nans, on_device
from tests.kernels.launched.device import DEVICE


@dataclass
class Sharing:
    """Groups of sequences, what each group shares, and what each sequence has for itself."""

    query: torch.Tensor
    indptr: torch.Tensor
    tokens: Batch
    """First of all groups' shared tokens, then of all sequences' own."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What the wrapper takes, on the device."""
        num_groups = self.indptr.shape[0] - 1
        arguments = {
            "query": self.query, "pages": self.tokens.pages, "page_scales": self.tokens.scales,
            "group_indptr": self.indptr,
            "shared_tables": self.tokens.tables[:num_groups], "shared_lens": self.tokens.lengths[:num_groups],
            "block_tables": self.tokens.tables[num_groups:], "seq_lens": self.tokens.lengths[num_groups:],
        }  # fmt: skip
        return {name: argument if argument is None else argument.to(DEVICE) for name, argument in arguments.items()}


def make_sharing(
    random: Random,
    groups: dict[int, list[int]] | list[tuple[int, list[int]]],
    *,
    group: int = 3,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    stored: torch.dtype | None = None,
) -> Sharing:
    """Groups, each of so many shared tokens and of sequences with so many own ones."""
    pairs = list(groups.items()) if isinstance(groups, dict) else groups
    own = [length for _, lengths in pairs for length in lengths]
    tokens = make_batch(
        random, [shared for shared, _ in pairs] + own,
        num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size, dtype=dtype, stored=stored,
    )  # fmt: skip
    indptr = torch.tensor([0, *(len(lengths) for _, lengths in pairs)]).cumsum(0).int()
    return Sharing(tensor(random, len(own), num_kv_heads * group, head_dim, dtype=dtype), indptr, tokens)


def cascade(sharing: Sharing, scoring: Scoring = PLAIN, **options: Any) -> AttentionState:
    """Launch the kernels on outputs full of NaN; everything comes back to the CPU."""
    output = nans(*sharing.query.shape, dtype=sharing.query.dtype).to(DEVICE)
    lse = nans(*sharing.query.shape[:2]).to(DEVICE)
    scale = sharing.query.shape[2] ** -0.5
    state = cascade_decode(
        **sharing.arguments, scale=scale, scoring=on_device(scoring), output=output, lse=lse, **options
    )
    assert state.output is output
    assert state.lse is lse
    return AttentionState(output.cpu(), lse.cpu())


def compare(state: AttentionState, sharing: Sharing, scoring: Scoring = PLAIN) -> None:
    """Every sequence against attention over what it shares and what it has for itself, held together."""
    num_groups = sharing.indptr.shape[0] - 1
    tokens = sharing.tokens
    for c, (begin, end) in enumerate(pairwise(sharing.indptr.tolist())):
        for i in range(begin, end):
            key = torch.cat([tokens.key[c], tokens.key[num_groups + i]])
            value = torch.cat([tokens.value[c], tokens.value[num_groups + i]])
            row = AttentionState(state.output[i : i + 1], state.lse[i : i + 1])
            visible = torch.ones(1, key.shape[0], dtype=torch.bool)
            scale = sharing.query.shape[2] ** -0.5
            assert_close(row, sharing.query[i : i + 1], key, value, visible, scale, scoring)


# Not the product of both: the kernel is that of decode, whose tests have it.
@pytest.mark.parametrize(("dtype", "head_dim"), [*zip(DTYPES, HEAD_DIMS, strict=False), (torch.bfloat16, 256)])
def test_groups_of_several_sizes(dtype: torch.dtype, head_dim: int) -> None:
    which = HEAD_DIMS.index(head_dim)
    sharing = make_sharing(
        Random(which), [(63, [1, 0, 17]), (0, [5]), (17, []), (111, [0, 20]), (1, [3])],
        group=(1, 3, 8)[which % 3], page_size=(16, 1, 64)[which % 3], dtype=dtype, head_dim=head_dim,
    )  # fmt: skip
    compare(cascade(sharing, num_shared_splits=1 + which % 3, num_splits=1 + which % 2), sharing)


def test_more_rows_than_a_program_takes() -> None:
    """300 shared tokens, 45 sequences of 4 heads: rows of one sequence are in two programs, keys in several splits."""
    sharing = make_sharing(Random(0), {300: [i % 4 for i in range(45)]}, group=4, num_kv_heads=1)
    compare(cascade(sharing, num_shared_splits=3), sharing)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8(stored: torch.dtype) -> None:
    sharing = make_sharing(Random(1), {40: [9, 0, 3], 9: [0, 1]}, stored=stored)
    compare(cascade(sharing, num_shared_splits=2), sharing)


def test_a_cap_and_sinks_count_once() -> None:
    random = Random(2)
    sharing = make_sharing(random, {40: [9, 0, 3], 0: [0, 1]}, dtype=torch.float32)
    scoring = Scoring(soft_cap=2.0, sinks=tensor(random, 6, dtype=torch.float32))
    compare(cascade(sharing, scoring, num_shared_splits=3, num_splits=2), sharing, scoring)


def test_pages_that_are_not_here() -> None:
    sharing = make_sharing(Random(3), {40: [20, 0], 20: [1]})
    sharing.tokens.tables[0, 1] = -1
    sharing.tokens.tables[2, 0] = -1
    for i, gone in ((0, slice(16, 32)), (2, slice(0, 16))):
        keep = torch.ones(sharing.tokens.key[i].shape[0], dtype=torch.bool)
        keep[gone] = False
        sharing.tokens.key[i], sharing.tokens.value[i] = sharing.tokens.key[i][keep], sharing.tokens.value[i][keep]
    compare(cascade(sharing), sharing)


def test_the_caller_s_workspace_and_greatest_group() -> None:
    sharing = make_sharing(Random(4), {40: [20, 0], 20: [1]}, dtype=torch.float32)
    workspace = nans(workspace_elements(3, 6, 64, 2 + 3)).to(DEVICE)
    compare(cascade(sharing, max_group=2, num_shared_splits=2, num_splits=3, workspace=workspace), sharing)


def test_nothing_to_do() -> None:
    no_groups: list[tuple[int, list[int]]] = []
    empty: list[tuple[int, list[int]]] = [(5, []), (0, [])]
    for groups in (no_groups, empty):
        assert cascade(make_sharing(Random(0), groups)).output.shape == (0, 6, 64)


def test_the_reference_is_attention() -> None:
    sharing = make_sharing(Random(5), {40: [20, 0], 20: [1]}, dtype=torch.float32)
    arguments: dict[str, Any] = {name: x if x is None else x.cpu() for name, x in sharing.arguments.items()}
    state = cascade_decode_reference(**arguments, scale=0.125)
    compare(AttentionState(state.output.float(), state.lse), sharing)


GOOD = make_sharing(Random(0), {20: [5, 1], 7: [3]}, dtype=torch.float32)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("query", {"query": GOOD.query[0]}),
        ("query", {"query": torch.zeros(3, 6, 257)}),
        ("pages", {"pages": GOOD.tokens.pages.half()}),
        ("page_scales", {"page_scales": torch.ones(1, 2, 2)}),
        ("group_indptr", {"group_indptr": GOOD.indptr.long()}),
        ("group_indptr", {"group_indptr": GOOD.indptr[:0]}),
        ("shared_tables", {"shared_tables": GOOD.tokens.tables[:1]}),
        ("shared_lens", {"shared_lens": GOOD.tokens.lengths[:1]}),
        ("block_tables", {"block_tables": GOOD.tokens.tables[:1]}),
        ("seq_lens", {"seq_lens": GOOD.tokens.lengths[2:].long()}),
        ("max_group", {"max_group": 4}),
        ("max_group", {"max_group": -1}),
        ("max_group", {"max_group": 0}),
        ("num_splits", {"num_splits": 0}),
        ("num_shared_splits", {"num_shared_splits": 129}),
        ("scoring.window", {"scoring": Scoring(window=5)}),
        ("scoring.soft_cap", {"scoring": Scoring(soft_cap=-1.0)}),
        ("workspace", {"workspace": torch.zeros(7)}),
        ("output", {"output": GOOD.query[:1]}),
    ],
)
def test_what_does_not_fit_is_refused_by_name(argument: str, changes: dict[str, Any]) -> None:
    there = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in changes.items()}
    arguments: dict[str, Any] = GOOD.arguments | there
    with pytest.raises(BadArgument) as raised:
        cascade_decode(**arguments, scale=0.125)
    assert raised.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("group_indptr", {"group_indptr": torch.tensor([0, 2, 4], dtype=torch.int32)}),
        ("max_group", {"max_group": 1}),
        ("shared_tables", {"shared_tables": torch.full((2, 2), 99, dtype=torch.int32)}),
        ("shared_lens", {"shared_lens": torch.tensor([33, 0], dtype=torch.int32)}),
    ],
)
def test_numbers_out_of_bounds_are_refused_on_the_cpu(argument: str, changes: dict[str, Any]) -> None:
    if DEVICE != "cpu":
        return  # there the host does not look at them
    arguments: dict[str, Any] = GOOD.arguments | changes
    with pytest.raises(BadArgument) as raised:
        cascade_decode(**arguments, scale=0.125)
    assert raised.value.argument == argument
