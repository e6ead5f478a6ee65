"""Keys turned to new positions: by torch, against the definition, and against rotating at the new position."""

import math
from random import Random
from typing import Any

import pytest
import torch

from hicache.kernels.errors import BadArgument
from hicache.kernels.launch import Path
from hicache.kernels.rope import Pairing, Rope, rotate_pages, rotate_pages_reference
from tests.kernels.contexts import DTYPES, Memory, relative_rms, tensor
from tests.kernels.rotations import ERROR_MAX, check_rotation

PAGES = torch.zeros(5, 2, 4, 2, 64)
IDS, DELTAS = torch.tensor([1, 3], dtype=torch.int32), torch.tensor([1, 2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pairing", Pairing)
@pytest.mark.parametrize("memory", Memory)
def test_shapes(dtype: torch.dtype, pairing: Pairing, memory: Memory) -> None:
    for page_size, num_kv_heads, head_dim, rotary_dim in ((16, 3, 64, 64), (1, 8, 128, 128), (63, 1, 96, 32)):
        check_rotation(
            Random(page_size), dtype, Path.TORCH, "cpu", page_size=page_size, num_kv_heads=num_kv_heads,
            head_dim=head_dim, rotary_dim=rotary_dim, pairing=pairing, memory=memory,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_turned_is_rotated_at_the_new_position(dtype: torch.dtype) -> None:
    """Rotating once at `p + δ` and rounding once; the stored key was rounded at `p` too, hence twice the error."""
    rope = Rope.plain(128)
    plain = tensor(Random(0), 6, 2, 16, 2, 128, dtype=torch.float64)
    ids, start, delta = torch.arange(6, dtype=torch.int32), torch.arange(6) * 16, torch.arange(6) * 1000 - 2000
    stored = plain.clone()
    stored[:, 0] = rotate_pages_reference(plain, ids, start, rope)
    stored = stored.to(dtype)
    rotate_pages(stored, ids, delta, rope)
    expected = rotate_pages_reference(plain, ids, start + delta, rope)
    assert relative_rms(stored[:, 0], expected) <= 2 * ERROR_MAX[dtype]


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1_000_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        LLAMA3,
        YARN,
        {**YARN, "truncate": False, "beta_fast": 16.0},
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131_072, rope_parameters=parameters
    )
    if parameters["rope_type"] == "default":
        exponents = torch.arange(0, 128, 2, dtype=torch.int64).float() / 128
        expected = 1.0 / parameters["rope_theta"] ** exponents
    else:
        expected, _ = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    actual = Rope.of_config(parameters, 128).frequencies
    torch.testing.assert_close(actual, expected.double(), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize(
    ("argument", "parameters"),
    [
        ("rope_type", {"rope_type": "dynamic", "factor": 2.0}),
        ("rope_type", {"rope_type": "longrope", "factor": 2.0}),
        ("factor", {"rope_type": "linear"}),
        ("factor", {"rope_type": "yarn", "factor": 0.0}),
        ("low_freq_factor", {**LLAMA3, "low_freq_factor": 4.0}),
        ("base", {"rope_theta": 0.5}),
        ("rope_theta", {"rope_theta": "10000"}),
        ("rope_theta", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1.0}),
        ("partial_rotary_factor", {"partial_rotary_factor": math.nan}),
        ("beta_fast", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 0}),
        ("rotary_dim", {"partial_rotary_factor": 0.01}),
    ],
)
def test_embeddings_that_cannot_be_turned_are_refused(argument: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(BadArgument) as raised:
        Rope.of_config(parameters, 64)
    assert raised.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "pages", "page_ids", "deltas", "rope"),
    [
        ("pages", PAGES[:, 0], IDS, DELTAS, Rope.plain(64)),
        ("pages", PAGES.to(torch.int8), IDS, DELTAS, Rope.plain(64)),
        ("pages", PAGES[..., ::2], IDS, DELTAS, Rope.plain(32)),
        ("page_ids", PAGES, IDS.long(), DELTAS, Rope.plain(64)),
        ("page_ids", PAGES, torch.tensor([1, 5], dtype=torch.int32), DELTAS, Rope.plain(64)),
        ("deltas", PAGES, IDS, DELTAS[:1], Rope.plain(64)),
        ("deltas", PAGES, IDS, DELTAS.float(), Rope.plain(64)),
        ("rope", PAGES, IDS, DELTAS, Rope.plain(66)),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(
    argument: str, pages: torch.Tensor, page_ids: torch.Tensor, deltas: torch.Tensor, rope: Rope
) -> None:
    before = pages.clone()
    with pytest.raises(BadArgument) as raised:
        rotate_pages(pages, page_ids, deltas, rope)
    assert raised.value.argument == argument
    assert torch.equal(pages, before)


def test_kernels_need_a_device_that_runs_them() -> None:
    with pytest.raises(BadArgument, match="pages: is on cpu"):
        rotate_pages(PAGES, IDS, DELTAS, Rope.plain(64), path=Path.TRITON)
