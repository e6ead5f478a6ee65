"""Who watches a process that is to be killed: what it told is written to an expected-state file, synced, and read back
into the oracle before the next process starts on that directory.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from hicache.tier import RecoveredRun
from tests.faults.oracle import Broken, Life, Oracle, Page
from tests.repository import ROOT

UNKNOWN: Final = 1 << 62
"""Number of a free that has begun: it may or may not have been accepted."""
END_S: Final = 30.0
"""A process must have ended within this."""


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
    directory: Path, seed: int, *, steps: int, point: tuple[str, str, int, str] | None = None, hold: bool = False
) -> subprocess.Popen[bytes]:
    """A process that works on that directory (`tests.faults.victim`); with `hold` it keeps it until its input ends."""
    task = {"directory": str(directory), "seed": seed, "steps": steps, "point": point, "hold": hold}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faults.victim", json.dumps(task)],
        stdin=subprocess.PIPE if hold else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
