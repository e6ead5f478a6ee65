"""Merge of attention states: the kernel against its definition in float64, and the definition against the law."""

from itertools import pairwise
from random import Random

import pytest
import torch

from hicache.kernels.errors import BadArgument
from hicache.kernels.merge import merge_states, merge_states_reference
from hicache.kernels.state import AttentionState, attention_reference
from tests.kernels.contexts import DTYPES, HEAD_DIMS, relative_rms, tensor
from tests.kernels.launched.batches import nans
from tests.kernels.launched.device import DEVICE

ERROR_MAX = {torch.float32: 2 * 2**-23, torch.float16: 0.3 * 2**-10, torch.bfloat16: 0.3 * 2**-7}
"""Relative RMS error: of a few float32 operations, or of one rounding to half precision (0.29 of the last place)."""


def make_states(
    random: Random, n: int, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """States of which about a third are empty; the outputs of those are NaN, as of one that was never written."""
    outputs = tensor(random, n, num_tokens, num_heads, head_dim, dtype=dtype)
    lses = tensor(random, n, num_tokens, num_heads, dtype=torch.float32) * 5
    empty = torch.tensor([random.random() < 0.3 for _ in range(lses.numel())], dtype=torch.bool).view(lses.shape)
    return outputs.masked_fill(empty[..., None], torch.nan), lses.masked_fill(empty, -torch.inf)


def check(outputs: torch.Tensor, lses: torch.Tensor, dtype: torch.dtype) -> None:
    """Launch on outputs full of NaN and compare."""
    _, num_tokens, num_heads, head_dim = outputs.shape
    output = nans(num_tokens, num_heads, head_dim, dtype=dtype).to(DEVICE)
    lse = nans(num_tokens, num_heads).to(DEVICE)
    merge_states(outputs.to(DEVICE), lses.to(DEVICE), output=output, lse=lse)
    expected = merge_states_reference(outputs, lses)
    empty = expected.lse == -torch.inf
    assert torch.equal(output.cpu()[empty], torch.zeros_like(output.cpu()[empty]))
    assert torch.equal(lse.cpu() == -torch.inf, empty)
    if not empty.all():
        assert relative_rms(output.cpu(), expected.output) <= ERROR_MAX[dtype]
        torch.testing.assert_close(lse.cpu()[~empty].double(), expected.lse[~empty], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 1, 63])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 7])
def test_states_with_empty_parts(n: int, dtype: torch.dtype, head_dim: int) -> None:
    random = Random(n)
    check(*make_states(random, n, 11, 3, head_dim, dtype), dtype)


@pytest.mark.parametrize(("num_tokens", "num_heads"), [(0, 2), (1, 1), (63, 3), (111, 1)])
def test_sizes(num_tokens: int, num_heads: int) -> None:
    """Parts in float32, as `attend` keeps them, merged to bfloat16."""
    check(*make_states(Random(0), 3, num_tokens, num_heads, 64, torch.float32), torch.bfloat16)


def test_all_parts_empty() -> None:
    check(torch.full((3, 5, 2, 64), torch.nan), torch.full((3, 5, 2), -torch.inf), torch.float32)


def test_scores_far_apart() -> None:
    """Differences beyond the range of exponents, and LSEs beyond it themselves: the weaker part counts for nothing."""
    outputs = torch.stack([torch.full((2, 1, 64), 1.0), torch.full((2, 1, 64), 2.0)])
    for strong, weak in ((2000.0, -2000.0), (-3000.0, -6000.0), (500.0, 100.0)):
        state = merge_states(outputs.to(DEVICE), torch.tensor([[[strong]] * 2, [[weak]] * 2]).to(DEVICE))
        torch.testing.assert_close(state.output.cpu(), outputs[0])
        torch.testing.assert_close(state.lse.cpu(), torch.full((2, 1), strong))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_state_to_begin_with_is_one_more(dtype: torch.dtype) -> None:
    """Summed last; strided, in part empty with NaN as output, and in place."""
    random = Random(4)
    outputs, lses = make_states(random, 4, 11, 3, 96, torch.float32)
    expected = merge_states(outputs.to(DEVICE), lses.to(DEVICE), dtype=dtype)
    wide, wide_lse = nans(11, 3, 100), nans(11, 5)
    initial = AttentionState(wide[..., :96].to(DEVICE), wide_lse[:, :3].to(DEVICE))
    initial.output.copy_(outputs[3])
    initial.lse.copy_(lses[3])
    actual = merge_states(outputs[:3].to(DEVICE), lses[:3].to(DEVICE), initial=initial, dtype=dtype)
    assert torch.equal(actual.output, expected.output)
    assert torch.equal(actual.lse, expected.lse)
    merge_states(
        outputs[:3].to(DEVICE), lses[:3].to(DEVICE), initial=initial, output=initial.output, lse=initial.lse
    )
    assert torch.equal(initial.output.to(dtype), expected.output)
    assert torch.equal(initial.lse, expected.lse)


def test_nan_in_a_part_that_counts_is_not_hidden() -> None:
    outputs, lses = torch.zeros(2, 1, 1, 64), torch.zeros(2, 1, 1)
    outputs[1] = torch.nan
    assert merge_states(outputs.to(DEVICE), lses.to(DEVICE)).output.isnan().all()


def test_strides() -> None:
    random = Random(0)
    outputs, lses = make_states(random, 3, 6, 4, 100, torch.float32)
    outputs = outputs.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)[..., :96]
    lses = torch.stack([lses, lses], dim=1)[:, 1]
    output, lse = nans(4, 6, 96).transpose(0, 1).to(DEVICE), nans(6, 9)[:, :4].to(DEVICE)
    merge_states(outputs.to(DEVICE), lses.to(DEVICE), output=output, lse=lse)
    expected = merge_states_reference(outputs, lses)
    assert relative_rms(output.cpu(), expected.output) <= ERROR_MAX[torch.float32]


def test_the_reference_is_the_law() -> None:
    """Attention over parts, merged by the definition, equals attention over all keys, to float64's own precision."""
    random = Random(0)
    for _ in range(20):
        num_keys = random.randint(1, 60)
        query = tensor(random, 4, 6, 64, dtype=torch.float64)
        key, value = (tensor(random, num_keys, 2, 64, dtype=torch.float64) for _ in range(2))
        visible = torch.tensor([[random.random() < 0.7 for _ in range(num_keys)] for _ in range(4)])
        cuts = sorted(random.randint(0, num_keys) for _ in range(3))
        parts = [
            attention_reference(query, key[a:b], value[a:b], visible[:, a:b], scale=0.125)
            for a, b in pairwise([0, *cuts, num_keys])
        ]
        merged = merge_states_reference(
            torch.stack([part.output for part in parts]), torch.stack([part.lse for part in parts])
        )
        whole = attention_reference(query, key, value, visible, scale=0.125)
        torch.testing.assert_close(merged.output, whole.output, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(merged.lse, whole.lse, rtol=1e-12, atol=1e-12)


OUTPUTS, LSES = torch.zeros(2, 3, 4, 64), torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("argument", "outputs", "lses"),
    [
        ("outputs", OUTPUTS[0], LSES),
        ("outputs", OUTPUTS[:0], LSES[:0]),
        ("outputs", OUTPUTS.double(), LSES),
        ("outputs", OUTPUTS[..., ::2], LSES),
        ("lses", OUTPUTS, LSES[:1]),
        ("lses", OUTPUTS, LSES.half()),
    ],
)
def test_what_does_not_fit_is_refused_by_name(argument: str, outputs: torch.Tensor, lses: torch.Tensor) -> None:
    with pytest.raises(BadArgument) as raised:
        merge_states(outputs.to(DEVICE), lses.to(DEVICE))
    assert raised.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "initial"),
    [
        ("initial.output", AttentionState(OUTPUTS[0, :2], LSES[0])),
        ("initial.output", AttentionState(OUTPUTS[0].half(), LSES[0])),
        ("initial.lse", AttentionState(OUTPUTS[0], LSES[0, :, :3])),
    ],
)
def test_a_state_that_does_not_fit_the_others_is_refused(argument: str, initial: AttentionState) -> None:
    there = AttentionState(initial.output.to(DEVICE), initial.lse.to(DEVICE))
    with pytest.raises(BadArgument) as raised:
        merge_states(OUTPUTS.to(DEVICE), LSES.to(DEVICE), initial=there)
    assert raised.value.argument == argument
