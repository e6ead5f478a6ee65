"""That the tests would see the interpreter's faults with bfloat16, were the kernels not written around them.

The interpreter keeps bfloat16 as bit patterns, computes with the patterns, and truncates when it narrows. The flag
`EMULATE_BFLOAT16` makes the kernels cast before they compute and round before they narrow. Here it is off.
"""

from collections.abc import Callable
from random import Random

import pytest
import torch

from hicache.kernels import language
from hicache.kernels.attend import attend
from hicache.kernels.launch import Path
from hicache.kernels.merge import merge_states, merge_states_reference
from tests.kernels.contexts import assert_close, causal, relative_rms, scatter_context, tensor
from tests.kernels.launched.device import DEVICE
from tests.kernels.launched.test_cascade import cascade, make_sharing
from tests.kernels.launched.test_cascade import compare as compare_sharing
from tests.kernels.launched.test_merge import ERROR_MAX
from tests.kernels.launched.test_mla import compare as compare_latents
from tests.kernels.launched.test_mla import decode as decode_latents
from tests.kernels.launched.test_mla import make_latents


def attend_in_bfloat16(num_new: int) -> None:
    random = Random(0)
    context = scatter_context(random, 60, num_kv_heads=1, head_dim=64, dtype=torch.bfloat16)
    query = tensor(random, num_new, 4, 64, dtype=torch.bfloat16)
    key, value = (tensor(random, num_new, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    actual = attend(query, context.parts, key=key, value=value, scale=0.125, path=Path.TRITON)
    keys, values = torch.cat([context.key, key]), torch.cat([context.value, value])
    assert_close(actual, query, keys, values, causal(60, num_new), 0.125)


@pytest.mark.parametrize("num_new", [1, 5])
def test_computing_with_bit_patterns_is_seen(num_new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE != "cpu":
        return  # a GPU computes with bfloat16 itself
    attend_in_bfloat16(num_new)
    monkeypatch.setattr(language, "EMULATE_BFLOAT16", False)
    with pytest.raises(AssertionError, match=r"relative RMS error|LSE is off"):
        attend_in_bfloat16(num_new)


def mla_in_bfloat16() -> None:
    latents = make_latents(Random(0), [63], dtype=torch.bfloat16)
    compare_latents(decode_latents(latents), latents)


def cascade_in_bfloat16() -> None:
    sharing = make_sharing(Random(0), {40: [9, 3]}, dtype=torch.bfloat16)
    compare_sharing(cascade(sharing), sharing)


@pytest.mark.parametrize("attend", [mla_in_bfloat16, cascade_in_bfloat16])
def test_in_the_other_kernels_too(attend: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE != "cpu":
        return  # a GPU computes with bfloat16 itself
    attend()
    monkeypatch.setattr(language, "EMULATE_BFLOAT16", False)
    with pytest.raises(AssertionError, match=r"relative RMS error|LSE is off"):
        attend()


def test_truncating_instead_of_rounding_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging computes in float32 and narrows at the end: truncating has twice the error, more than is allowed."""
    if DEVICE != "cpu":
        return  # a GPU rounds
    random = Random(0)
    outputs, lses = tensor(random, 3, 20, 2, 64, dtype=torch.float32), tensor(random, 3, 20, 2, dtype=torch.float32)
    expected = merge_states_reference(outputs, lses).output
    allowed = ERROR_MAX[torch.bfloat16]
    assert relative_rms(merge_states(outputs, lses, dtype=torch.bfloat16).output, expected) <= allowed
    monkeypatch.setattr(language, "EMULATE_BFLOAT16", False)
    assert relative_rms(merge_states(outputs, lses, dtype=torch.bfloat16).output, expected) > 1.2 * allowed


def test_rounding_by_hand_is_that_of_torch() -> None:
    """Every kind of number, through a merge of one state: ties, subnormals, infinities, NaN, and what overflows."""
    patterns = torch.arange(1 << 16, dtype=torch.int64) << 16
    halves = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    numbers = (patterns[::37, None] + halves).flatten().to(torch.int32).view(torch.float32)
    numbers = numbers[: numbers.numel() // 64 * 64]
    numbers = torch.where(numbers.isnan(), torch.nan, numbers).view(-1, 1, 64)
    lses = torch.zeros(1, *numbers.shape[:2])
    merged = merge_states(numbers[None].to(DEVICE), lses.to(DEVICE), dtype=torch.bfloat16)
    torch.testing.assert_close(merged.output.cpu(), numbers.bfloat16(), rtol=0, atol=0, equal_nan=True)
