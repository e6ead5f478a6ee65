"""Page scores by torch: bounds of every product, as tight as they are meant to be, and what is refused."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.kernels.errors import BadArgument
from hicache.kernels.launch import Path
from hicache.kernels.score import Ball, MinMax, ball_of, min_max_of, page_scores, page_scores_reference
from tests.kernels.contexts import DTYPES, tensor
from tests.kernels.summaries import check_bounds

PAGES, IDS, QUERY = torch.zeros(5, 2, 4, 2, 8), torch.tensor([1, 3], dtype=torch.int32), torch.zeros(4, 8)


@settings(deadline=None, max_examples=60)
@given(
    random=st.randoms(use_true_random=False),
    dtype=st.sampled_from(DTYPES),
    num_pages=st.integers(0, 20),
    page_size=st.sampled_from([1, 5, 16]),
    head_dim=st.sampled_from([1, 63, 64, 128]),
    spread=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_bounds(
    random: Random, dtype: torch.dtype, num_pages: int, page_size: int, head_dim: int, spread: float
) -> None:
    check_bounds(
        random, dtype, Path.TORCH, "cpu", num_pages=num_pages, page_size=page_size, num_kv_heads=random.randint(1, 3),
        group=random.randint(1, 4), head_dim=head_dim, spread=spread,
    )  # fmt: skip


def test_keys_that_are_all_alike_are_bounded_by_their_product() -> None:
    """Nothing between bound and product but rounding: the case in which a bound that forgets it is wrong."""
    keys = tensor(Random(0), 1, 1, 1, 1, 128, dtype=torch.float32).expand(50, 2, 16, 1, 128).contiguous()
    query = tensor(Random(1), 4, 128, dtype=torch.float32)
    ids = torch.arange(50, dtype=torch.int32)
    exact = page_scores_reference(query, keys[:, 0])
    for summary in (min_max_of(keys, ids, 800), ball_of(keys, ids, 800)):
        over = page_scores(query, summary).double() - exact
        assert (over >= 0).all()
        assert (over <= 1e-3).all()


def test_a_page_without_tokens_can_be_passed_over() -> None:
    pages, ids = tensor(Random(0), 4, 2, 16, 2, 8, dtype=torch.float16), torch.arange(4, dtype=torch.int32)
    for summary in (min_max_of(pages, ids, 33), ball_of(pages, ids, 33)):
        scores = page_scores(tensor(Random(1), 2, 8, dtype=torch.float16), summary)
        assert torch.equal(scores == -torch.inf, torch.tensor([[False, False, False, True]] * 2))


@pytest.mark.parametrize(
    ("argument", "pages", "page_ids", "num_tokens"),
    [
        ("pages", PAGES[:, 0], IDS, 8),
        ("pages", PAGES.to(torch.int8), IDS, 8),
        ("page_ids", PAGES, IDS.long(), 8),
        ("page_ids", PAGES, torch.tensor([1, -1], dtype=torch.int32), 8),
        ("num_tokens", PAGES, IDS, 9),
        ("num_tokens", PAGES, IDS, -1),
    ],
)
def test_pages_that_do_not_fit_are_refused_by_name(
    argument: str, pages: torch.Tensor, page_ids: torch.Tensor, num_tokens: int
) -> None:
    for make in (min_max_of, ball_of):
        with pytest.raises(BadArgument) as raised:
            make(pages, page_ids, num_tokens)
        assert raised.value.argument == argument


@pytest.mark.parametrize(
    ("argument", "query", "summary", "out"),
    [
        ("query", QUERY[0], min_max_of(PAGES, IDS, 8), None),
        ("query", QUERY.double(), min_max_of(PAGES, IDS, 8), None),
        ("summary", QUERY[:, :4], min_max_of(PAGES, IDS, 8), None),
        ("summary", QUERY[:3], ball_of(PAGES, IDS, 8), None),
        ("out", QUERY, ball_of(PAGES, IDS, 8), torch.zeros(4, 3)),
        ("out", QUERY, ball_of(PAGES, IDS, 8), torch.zeros(4, 2).double()),
        ("out", QUERY, ball_of(PAGES, IDS, 8), torch.zeros(4, 4)[:, :2]),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(
    argument: str, query: torch.Tensor, summary: MinMax | Ball, out: torch.Tensor | None
) -> None:
    with pytest.raises(BadArgument) as raised:
        page_scores(query, summary, out=out)
    assert raised.value.argument == argument
