"""The law for latent attention, on the torch path: over any split of the vectors it is that over all of them."""

from random import Random

import pytest
import torch

from hicache.kernels import attend_latent as module
from hicache.kernels.attend_latent import LatentPart, attend_latent
from hicache.kernels.checks import FLOAT8_DTYPES
from hicache.kernels.errors import BadArgument
from hicache.kernels.scoring import PLAIN, Scoring
from tests.kernels.contexts import DTYPES
from tests.kernels.latents import LATENT, ROPE, run_latent

SCORINGS = [PLAIN, Scoring(soft_cap=2.0, sinks=torch.tensor([0.5, -torch.inf, 30.0, -2.0]))]


@pytest.mark.parametrize("scoring", SCORINGS, ids=["plain", "cap and sinks"])
@pytest.mark.parametrize("num_new", [1, 63])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_split_equals_the_whole(
    dtype: torch.dtype, num_new: int, scoring: Scoring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 33 * (LATENT + ROPE) * dtype.itemsize)
    for num_prefix in (0, 1, 17, 111):
        run_latent(Random(num_prefix), num_prefix, num_new, dtype, scoring=scoring)


@pytest.mark.parametrize("stored", FLOAT8_DTYPES, ids=str)
def test_float8_pages_with_scales(stored: torch.dtype) -> None:
    for num_new in (1, 5):
        run_latent(Random(num_new), 111, num_new, torch.bfloat16, stored=stored)


def test_without_any_vector_outputs_are_0() -> None:
    output, lse = attend_latent(torch.ones(2, 4, 48), [], vectors=torch.empty(0, 48), latent_dim=32, scale=1.0)
    assert torch.equal(output, torch.zeros(2, 4, 32))
    assert torch.equal(lse, torch.full((2, 4), -torch.inf))
    output, lse = attend_latent(torch.ones(0, 4, 48), [], vectors=torch.empty(0, 48), latent_dim=32, scale=1.0)
    assert output.shape == (0, 4, 32)
    assert lse.shape == (0, 4)


PAGES = torch.ones(3, 16, 48)
TABLE = torch.tensor([2, 0], dtype=torch.int32)
GOOD = LatentPart(PAGES, TABLE, 20)
BAD = [
    ("query", torch.ones(2, 48), GOOD, 32, PLAIN),
    ("latent_dim", torch.ones(2, 4, 48), GOOD, 49, PLAIN),
    ("vectors", torch.ones(3, 4, 48), GOOD, 32, PLAIN),
    ("scoring.window", torch.ones(2, 4, 48), GOOD, 32, Scoring(window=3)),
    ("part.pages", torch.ones(2, 4, 48), LatentPart(PAGES.half(), TABLE, 20), 32, PLAIN),
    ("part.pages", torch.ones(2, 4, 48), LatentPart(PAGES[..., :40], TABLE, 20), 32, PLAIN),
    ("part.pages", torch.ones(2, 4, 48), LatentPart(PAGES[:, :0], TABLE, 0), 32, PLAIN),
    ("part.page_scales", torch.ones(2, 4, 48), LatentPart(PAGES, TABLE, 20, torch.ones(2)), 32, PLAIN),
    ("part.block_table", torch.ones(2, 4, 48), LatentPart(PAGES, TABLE + 1, 20), 32, PLAIN),
    ("part.block_table", torch.ones(2, 4, 48), LatentPart(PAGES, TABLE.long(), 20), 32, PLAIN),
    ("part.num_tokens", torch.ones(2, 4, 48), LatentPart(PAGES, TABLE, 33), 32, PLAIN),
]


@pytest.mark.parametrize(("argument", "query", "part", "latent_dim", "scoring"), BAD)
def test_what_does_not_fit_is_refused_by_name(
    argument: str, query: torch.Tensor, part: LatentPart, latent_dim: int, scoring: Scoring
) -> None:
    with pytest.raises(BadArgument) as raised:
        attend_latent(
            query, [GOOD, part], vectors=torch.ones(2, 48), latent_dim=latent_dim, scale=1.0, scoring=scoring
        )
    assert raised.value.argument == argument
