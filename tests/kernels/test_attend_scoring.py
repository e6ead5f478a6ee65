"""A cap, a window, first tokens kept, sinks and float8 pages, over any split of the keys, on the CPU's two ways."""

from dataclasses import replace
from random import Random

import pytest
import torch

from hicache.kernels import attend_scored, attend_torch, decode_cpu
from hicache.kernels.attend import PagedPart, attend
from hicache.kernels.checks import FLOAT8_DTYPES
from hicache.kernels.errors import BadArgument
from hicache.kernels.launch import Path
from hicache.kernels.scoring import Scoring
from tests.kernels.contexts import DTYPES, tensor
from tests.kernels.positioned import SCORINGS, run_scored


@pytest.fixture(autouse=True, scope="module")
def compiled_loops() -> None:
    """Unless torch is asked for, compiled loops do a single token; compiling them is no test's time."""
    assert all(decode_cpu.prepare(dtype) for dtype in DTYPES)


@pytest.mark.parametrize(("num_new", "path"), [(1, None), (1, Path.TORCH), (2, None), (70, None)])
@pytest.mark.parametrize("scoring", SCORINGS.values(), ids=SCORINGS)
def test_any_split_equals_the_whole(scoring: Scoring, num_new: int, path: Path | None) -> None:
    random = Random(num_new)
    for num_prefix in (0, 1, 63, 111):
        run_scored(random, scoring, num_prefix, num_new, torch.float32, path=path)


@pytest.mark.parametrize("num_new", [1, 65])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_of_any_size_and_few_queries_at_once(
    dtype: torch.dtype, num_new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attend_torch, "SCRATCH_BYTES", 50 * 2 * 2 * 64 * 4)
    monkeypatch.setattr(attend_scored, "_SCORES_BYTES", 7 * 4 * 50 * 4)
    for scoring in SCORINGS.values():
        run_scored(Random(3), scoring, 300, num_new, dtype, path=Path.TORCH)


@pytest.mark.parametrize("num_new", [1, 5])
@pytest.mark.parametrize("stored", FLOAT8_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_float8_pages_with_scales(dtype: torch.dtype, stored: torch.dtype, num_new: int) -> None:
    for scoring in (Scoring(), SCORINGS["all"]):
        run_scored(Random(num_new), scoring, 111, num_new, dtype, stored=stored)


def test_pages_outside_of_the_window_are_not_read() -> None:
    """They are NaN, and would show."""
    pages = torch.full((5, 2, 16, 1, 64), torch.nan)
    pages[0], pages[3:] = 1.0, 2.0
    part = PagedPart(pages, torch.arange(5, dtype=torch.int32), 80, first_position=0)
    scoring = Scoring(window=20, keep_first=16)
    for num_new in (1, 3):
        query, new = torch.ones(num_new, 2, 64), torch.ones(num_new, 1, 64)
        for path in (None, Path.TORCH):
            state = attend(
                query, [part], key=new, value=new, scale=1.0, scoring=scoring, first_position=80, path=path
            )
            assert not state.output.isnan().any()


def test_sinks_without_any_key_take_all_of_the_softmax() -> None:
    none = torch.empty(0, 2, 64)
    sinks = torch.tensor([1.0, -torch.inf, 0.0, 5.0])
    for num_new in (1, 2):
        query = torch.ones(num_new, 4, 64)
        output, lse = attend(query, [], key=none, value=none, scale=1.0, scoring=Scoring(sinks=sinks))
        assert torch.equal(output, torch.zeros_like(query))
        assert torch.equal(lse, sinks.expand(num_new, -1))


PAGES = tensor(Random(0), 4, 2, 16, 2, 64, dtype=torch.float32)
PART = PagedPart(PAGES, torch.tensor([3, 0], dtype=torch.int32), 20, first_position=0)
WINDOW = Scoring(window=4)
REFUSED = [
    ("scoring.soft_cap", PART, Scoring(soft_cap=-1.0), 20),
    ("scoring.sinks", PART, Scoring(sinks=torch.zeros(3)), 20),
    ("first_position", PART, WINDOW, None),
    ("first_position", PART, WINDOW, -1),
    ("part.first_position", replace(PART, first_position=None), WINDOW, 20),
    ("part.first_position", replace(PART, first_position=-1), WINDOW, 20),
    ("part.first_position", replace(PART, first_position=1), WINDOW, 20),
    ("part.page_scales", replace(PART, page_scales=torch.ones(4, 2)), Scoring(), None),
    ("part.page_scales", replace(PART, page_scales=torch.ones(4, 2, 2).double()), Scoring(), None),
    ("part.pages", replace(PART, pages=PAGES.to(torch.float8_e5m2)), Scoring(), None),
]


@pytest.mark.parametrize(("argument", "part", "scoring", "first_position"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(
    argument: str, part: PagedPart, scoring: Scoring, first_position: int | None
) -> None:
    query, new = torch.ones(2, 4, 64), torch.ones(2, 2, 64)
    with pytest.raises(BadArgument) as raised:
        attend(query, [part], key=new, value=new, scale=0.125, scoring=scoring, first_position=first_position)
    assert raised.value.argument == argument
