"""How many threads share a copy follows what was measured, and goes on following it."""

from collections.abc import Callable

import pytest

from hicache.service.server.pace import NUM_KEPT, NUM_NEEDED, TRY_EVERY, Pace

PIECE_BYTES = 1 << 20


def chosen(pace: Pace, num_pieces: int, seconds: Callable[[int], float]) -> list[int]:
    """The numbers of threads that pieces of work were done by, each in the seconds that its number takes."""
    numbers = []
    for _ in range(num_pieces):
        numbers.append(pace.choose())
        pace.took(numbers[-1], PIECE_BYTES, seconds(numbers[-1]))
    return numbers


@pytest.mark.parametrize(("max_threads", "numbers"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4])])
def test_every_number_is_tried_first(max_threads: int, numbers: list[int]) -> None:
    first = chosen(Pace(max_threads), NUM_NEEDED * len(numbers), lambda _: 1.0)
    assert sorted(first) == sorted(numbers * NUM_NEEDED)


@pytest.mark.parametrize("best", [1, 2, 4])
def test_the_fastest_number_does_all_but_a_few(best: int) -> None:
    pace = Pace(4)
    chosen(pace, 3 * NUM_NEEDED, lambda number: 1.0 if number == best else 1.5)
    later = chosen(pace, 10 * TRY_EVERY, lambda number: 1.0 if number == best else 1.5)
    assert later.count(best) >= len(later) * (TRY_EVERY - 1) // TRY_EVERY


def test_a_machine_that_changes_is_followed_both_ways() -> None:
    pace = Pace(2)
    two_are_faster: Callable[[int], float] = {1: 1.5, 2: 1.0}.__getitem__
    one_is_faster: Callable[[int], float] = {1: 1.5, 2: 2.0}.__getitem__
    chosen(pace, 8 * TRY_EVERY, two_are_faster)
    # What got slower is known after most of what was kept of it is new; what got faster, after as many tries.
    chosen(pace, NUM_KEPT + TRY_EVERY, one_is_faster)
    assert chosen(pace, TRY_EVERY - 1, one_is_faster).count(1) >= TRY_EVERY - 2
    chosen(pace, 2 * NUM_KEPT * TRY_EVERY, two_are_faster)
    assert chosen(pace, TRY_EVERY - 1, two_are_faster).count(2) >= TRY_EVERY - 2


def test_one_piece_that_was_disturbed_decides_nothing() -> None:
    pace = Pace(2)
    before = chosen(pace, 4 * TRY_EVERY, {1: 1.5, 2: 1.0}.__getitem__)
    assert before[-2] == 2
    pace.took(2, PIECE_BYTES, 100.0)
    assert pace.choose() == 2


def test_until_all_are_measured_the_most_are_best() -> None:
    pace = Pace(4)
    assert pace.best == 4
    for _ in range(NUM_NEEDED):
        assert pace.best == 4
        for number in (1, 2, 4):
            pace.took(number, PIECE_BYTES, 1.0 if number == 2 else 1.5)
    assert pace.best == 2


def test_long_pieces_are_not_slow_ones() -> None:
    pace = Pace(2)
    for _ in range(NUM_NEEDED):
        pace.took(1, PIECE_BYTES, 1.5)
        pace.took(2, 8 * PIECE_BYTES, 8.0)
    assert pace.choose() == 2
