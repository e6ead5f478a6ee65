"""Clocks: what the system's gives, and that the manual one moves only when told to, and only forwards."""

import time

import pytest

from hicache.clock import Clock, ManualClock, SystemClock


def test_the_system_clock_is_the_systems() -> None:
    clock: Clock = SystemClock()
    before = time.monotonic(), time.time()
    now = clock.monotonic(), clock.wall()
    after = time.monotonic(), time.time()
    assert before[0] <= now[0] <= after[0]
    assert before[1] <= now[1] <= after[1]


def test_the_manual_clock_moves_when_told_to() -> None:
    clock = ManualClock(start=10.0)
    typed: Clock = clock
    wall = typed.wall()
    assert (typed.monotonic(), typed.monotonic()) == (10.0, 10.0)
    clock.advance(2.5)
    clock.advance(0)
    assert typed.monotonic() == 12.5
    assert typed.wall() == wall + 2.5


def test_a_step_of_the_wall_clock_leaves_monotonic_time_alone() -> None:
    clock = ManualClock()
    wall = clock.wall()
    clock.wall_offset -= 3600
    assert clock.wall() == wall - 3600
    assert clock.monotonic() == 0.0


@pytest.mark.parametrize("seconds", [-1e-9, float("-inf"), float("inf"), float("nan")])
def test_monotonic_time_goes_forwards_only(seconds: float) -> None:
    clock = ManualClock(start=5.0)
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(seconds)
    assert clock.monotonic() == 5.0
