"""When two answers are the same, and when a difference is a near tie."""

import math

import pytest
import torch

from hicache.tools.demo.compare import NEAR_TIE, Answer, compare


def answer(*best: int, margin: float = 5.0, shift: float = 0.0) -> Answer:
    """An answer of these tokens, each chosen by `margin` from a vocabulary of ten."""
    logits = torch.full((len(best), 10), shift)
    for step, token in enumerate(best):
        logits[step, token] += margin
    return Answer(best, logits)


def test_equal_tokens_are_equal_however_far_the_logits_are_apart() -> None:
    compared = compare(3, answer(1, 2, 3), answer(1, 2, 3, shift=0.25), 1e-3)
    assert (compared.number, compared.verdict, compared.first_difference, compared.gap) == (3, "equal", None, None)
    assert compared.max_logit_difference == pytest.approx(0.25)


def test_another_token_is_different_unless_the_plain_run_nearly_chose_it() -> None:
    ours = answer(1, 2, 3)
    compared = compare(1, ours, answer(1, 4, 3), 1e-3)
    assert (compared.verdict, compared.first_difference, compared.gap) == ("different", 1, 5.0)
    close = answer(1, 4, 3)
    close.logits[1, 2] = close.logits[1, 4] - 5e-4
    compared = compare(1, ours, close, 1e-3)
    assert (compared.verdict, compared.first_difference) == ("near tie", 1)
    assert compared.gap == pytest.approx(5e-4, rel=0.01)
    assert compare(1, ours, close, 1e-4).verdict == "different"


def test_logits_are_compared_up_to_where_the_answers_part() -> None:
    ours, plain = answer(1, 2, 3), answer(1, 4, 3)
    ours.logits[2] += 100.0  # after the difference the contexts are others
    assert compare(1, ours, plain, 1e-3).max_logit_difference == 5.0
    ours.logits[0] += 7.0
    assert compare(1, ours, plain, 1e-3).max_logit_difference == 7.0


def test_answers_of_different_length_are_different() -> None:
    assert compare(1, answer(1, 2), answer(1, 2, 3), 1e-3).verdict == "different"
    assert compare(1, answer(), answer(1), 1e-3).verdict == "different"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_different_even_with_equal_tokens(bad: float) -> None:
    ours = answer(1, 2, 3)
    ours.logits[1, 7] = bad
    assert compare(1, ours, answer(1, 2, 3), 1e-3).verdict == "different"


def test_every_dtype_of_the_demo_has_a_tolerance() -> None:
    from hicache.tools.demo.options import DTYPES

    assert set(NEAR_TIE) == {getattr(torch, name) for name in DTYPES}
