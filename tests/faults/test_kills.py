"""Real processes ended by `kill -9`, at random moments and in named calls of the seam, on one directory over and over.

What each process told before its end is written to an expected-state file beside the directory, synced, and read back
into the oracle before the next one starts: what was called durable must be there with right bytes, what was removed
durably must not. A failure names seed and round, and the command that repeats the draws, though not the timing.
"""

import random
import signal
import time
from pathlib import Path
from typing import Final

import pytest

from tests.faults.witness import END_S, Witness, start
from tests.simulation import repeating, seeds

POINT_STEPS: Final = 60
"""Steps of a process that ends in a named call, unless it ends before."""


def stop_whole(directory: Path, witness: Witness, seed: int, *, steps: int) -> None:
    """A process that starts, is right, works, and stops."""
    with start(directory, seed, steps=steps) as process:
        assert process.stdout is not None
        lines = list(process.stdout)
        assert process.wait(END_S) == 0
    witness.note(lines)
    assert witness.clean


def end_at_random(directory: Path, witness: Witness, rng: random.Random, seed: int) -> None:
    """A process that is killed: while it starts, or while it serves."""
    lines = []
    with start(directory, seed, steps=1_000_000) as process:
        assert process.stdout is not None
        if rng.random() < 0.25:
            time.sleep(rng.uniform(0.1, 0.5))
            process.kill()
        kill_at = None
        for line in process.stdout:
            lines.append(line)
            if kill_at is None and b'"serving"' in line:
                kill_at = time.monotonic() + rng.uniform(0.0, 0.4)
            if kill_at is not None and time.monotonic() >= kill_at:
                process.kill()
        assert process.wait(END_S) == -signal.SIGKILL
    witness.note(lines)


def end_at_point(
    directory: Path, witness: Witness, rng: random.Random, seed: int, counts: list[tuple[str, str, int]]
) -> str:
    """A process that ends in one of the calls that another made, every kind of call as likely. The call it was."""
    call, kind, count = rng.choice(counts)
    point = call, kind, rng.randint(1, count), rng.choice(("before", "half", "after"))
    with start(directory, seed, steps=POINT_STEPS, point=point) as process:
        assert process.stdout is not None
        lines = list(process.stdout)
        # Work is not the same in two processes: now and then the call does not come up.
        status = process.wait(END_S)
    witness.note(lines)
    assert status in (0, -signal.SIGKILL), f"ended with status {status}"
    return f"{call} {kind}" if status else "stopped"


def rounds(place: Path, num_rounds: int, seed: int) -> list[str]:
    """So many ends of processes on a few directories; how each came about."""
    rng = random.Random(seed)
    directory = place / "0"
    witness = Witness(place / "0.expected")
    stop_whole(directory, witness, seed, steps=POINT_STEPS)
    fresh = witness.counts
    stop_whole(directory, witness, seed, steps=POINT_STEPS)
    usual = witness.counts
    ends: list[str] = []
    for number in range(num_rounds):
        try:
            way = rng.choices(("random", "point", "fresh"), (5, 5, 2))[0]
            if way == "fresh":
                directory = place / f"{number + 1}"
                witness = Witness(directory.with_suffix(".expected"))
                ends.append(end_at_point(directory, witness, rng, 1000 * seed + number, fresh))
            elif way == "point":
                ends.append(end_at_point(directory, witness, rng, 1000 * seed + number, usual))
            else:
                end_at_random(directory, witness, rng, 1000 * seed + number)
                ends.append("random")
        except BaseException as error:
            error.add_note(f"seed {seed}, round {number}; to repeat the draws: {repeating(seed)}")
            raise
    stop_whole(directory, witness, seed, steps=0)
    return ends


def test_a_few_kills_lose_nothing(tmp_path: Path) -> None:
    [seed] = list(seeds(1))
    assert len(rounds(tmp_path, 4, seed)) == 4


@pytest.mark.faults
@pytest.mark.parametrize("block", range(1, 5))
def test_seventy_kills_lose_nothing(tmp_path: Path, block: int) -> None:
    [seed, *_] = list(seeds(1, block=block))
    ends = rounds(tmp_path, 20, seed)
    assert ends.count("stopped") <= 5
    assert len(set(ends)) > 4


@pytest.mark.faults
def test_c22_of_two_that_start_at_once_one_wins_and_is_not_disturbed(tmp_path: Path) -> None:
    """Twenty times, one of the two through a symbolic link, now and then on what a killed process has left."""
    directory, link = tmp_path / "store", tmp_path / "link"
    link.symlink_to(directory)
    witness = Witness(tmp_path / "expected")
    stop_whole(directory, witness, 0, steps=30)
    for turn in range(20):
        lines: dict[bool, list[bytes]] = {}
        ends = []
        with start(directory, turn, steps=10, hold=True) as first, start(link, turn, steps=10, hold=True) as second:
            for process in (first, second):
                assert process.stdout is not None
                told = [process.stdout.readline()]
                while b'"serving"' not in told[-1] and b'"refused"' not in told[-1]:
                    told.append(process.stdout.readline())
                lines[b'"refused"' in told[-1]] = told
            for process in (first, second):
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.close()
                rest = list(process.stdout)
                lines[process.wait(END_S) != 0] += rest
                ends.append(process.returncode)
        assert sorted(ends) == [0, 3], f"turn {turn}"
        assert b"in use by process" in lines[True][-1]
        witness.note(lines[False])
        assert witness.clean
        if turn % 5 == 0:
            # The next two find what a kill leaves.
            end_at_random(directory, witness, random.Random(turn), turn)
