"""Real processes ended by `kill -9`, at random moments and in named calls of the seam, on one directory over and over.

What each process told before its end is written to an expected-state file beside the directory, synced, and read back
into the oracle before the next one starts: what was called durable must be there with right bytes, what was removed
durably must not. A failure names seed and round; `HICACHE_SEED=N` repeats the draws, though not the timing.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from hicache.tier import RecoveredRun
from tests.faults.oracle import Broken, Life, Oracle, Page
from tests.repository import ROOT
from tests.simulation import seeds

UNKNOWN: Final = 1 << 62
"""Number of a free that has begun: it may or may not have been accepted."""
END_S: Final = 30.0
"""A process must have served, or ended, within this."""
POINT_STEPS: Final = 60
"""Steps of a process that ends in a named call, unless it ends before."""


@dataclass
class Witness:
    """The expected state: what the processes told, and the oracle that follows from it."""

    state_file: Path
    oracle: Oracle = field(default_factory=lambda: Oracle(random.Random(0)))
    durable: int = 0
    clean: bool = False
    num_written: int = 0
    num_recovered: int = 0
    counts: list[tuple[str, str, int]] = field(default_factory=list)
    """Calls that the last process to stop had made: name, what they were about, how many."""

    def note(self, lines: list[bytes]) -> None:
        """Write the lines down, synced, and read them back from there."""
        with self.state_file.open("ab") as file:
            start = file.tell()
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
        with self.state_file.open("rb") as file:
            file.seek(start)
            for line in file:
                # The last line of a process that was killed may be cut.
                if line.endswith(b"\n"):
                    self._apply(json.loads(line))

    def _apply(self, told: dict[str, Any]) -> None:
        match told["event"]:
            case "recovered":
                self._recovered(told)
            case "writing":
                for page, slot, generation in self._stays(told):
                    page.lives.append(Life(slot, generation))
            case "written":
                for page, slot, generation in self._stays(told):
                    _life(page, slot, generation).written = told["number"]
                    self.num_written += 1
            case "freeing" | "freed":
                for page, slot, generation in self._stays(told):
                    _life(page, slot, generation).freed = told.get("number", UNKNOWN)
            case "durable":
                self.durable = max(self.durable, told["number"])
            case "closed":
                assert told["durable"] == told["accepted"]
                self.durable, self.clean = told["durable"], True
                self.counts = told["counts"]
            case "serving" | "closing":
                pass
            case other:
                raise Broken(f"{other}: {told}")

    def _recovered(self, told: dict[str, Any]) -> None:
        generations: dict[int, int] = {}
        runs = []
        for run in told["runs"]:
            generations.update(zip(run["slots"], run["generations"], strict=True))
            namespace, prefix, chain, tokens = (
                bytes.fromhex(run[name]) for name in ("namespace", "prefix", "chain", "tokens")
            )
            runs.append(RecoveredRun(namespace, prefix, chain, tokens, np.array(run["slots"], np.int32)))
        pages = self.oracle.restart(runs, generations.__getitem__, durable=self.durable)
        if told["num_free"] + len(pages) != told["capacity"]:
            raise Broken(f"{told['num_free']} free and {len(pages)} used slots are not {told['capacity']}")
        self.num_recovered += len(pages)
        self.durable, self.clean = told["durable"], False

    def _stays(self, told: dict[str, Any]) -> Iterator[tuple[Page, int, int]]:
        for path, slot, generation in told["stays"]:
            yield self.oracle.page_at(path), slot, generation


def _life(page: Page, slot: int, generation: int) -> Life:
    return next(life for life in page.lives if (life.slot, life.generation) == (slot, generation))


def start(
    directory: Path, seed: int, *, steps: int, point: tuple[str, str, int, str] | None = None
) -> subprocess.Popen[bytes]:
    task = {"directory": str(directory), "seed": seed, "steps": steps, "point": point}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faults.victim", json.dumps(task)], stdout=subprocess.PIPE, cwd=ROOT
    )


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
            error.add_note(f"seed {seed}, round {number}; to repeat the draws: HICACHE_SEED={seed}")
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
