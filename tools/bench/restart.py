"""`hicache bench restart`: how long until a killed cache is warm again.

A process fills a store until all of it is durable, and is killed. Then, several times, another process opens it: reads
and checks the log, puts the tree together, finds a prompt, compares the bytes of one page, and is killed in turn. The
clock runs from the call that opens the store to the right answer, in a process that has imported everything; before
each round the page cache is told to forget the store. At the end it is opened, written to and closed, and opened again.

Two stores: `pages` of prompts of 64 pages that become one node each, and `single`, where every page is a node.

The baseline is the same prompts inserted into a tree one after the other, which is what a cache pays that is told of
them again; the bound is reading as many bytes as the store's log has, straight from the device.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

from hicache.tools.bench.restart_process import GROUP_PAGES, LONG_PAGES, Opened, capacity_bytes
from hicache.tools.bench.results import Baseline, Note, Report, Row
from hicache.tools.bench.scratch import check_directory, scratch_directory
from hicache.tools.exits import CommandFailed
from hicache.tools.terminal import printable

GOAL_S: Final = 1.0
"""Seconds for 100,000 pages."""
TIMEOUT_S: Final = 120.0
"""A process that takes longer to end has failed."""
_READ_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is stored."""

    directory: Path
    """Where files are made, in a directory of their own that is removed again."""
    divisor: int = 1
    """The store is so much smaller: 1 for figures, more for trying the code."""

    @property
    def rounds(self) -> int:
        """How often a store is opened."""
        return 3 if self.divisor == 1 else 1

    @property
    def num_pages(self) -> int:
        """Pages of a store; each kind of prompt rounds it down to whole ones."""
        return max(102_400 // self.divisor, LONG_PAGES, GROUP_PAGES)


def check(plan: Plan) -> None:
    """Raises `UsageProblem` for a directory in which the run cannot be made. Creates nothing."""
    check_directory(plan.directory, capacity_bytes(plan.num_pages) + (256 << 20))


def run(report: Report, note: Note, plan: Plan) -> None:
    """Measure every row. `check` first."""
    for kind, row in (("pages", "seconds_per_100k_pages"), ("single", "seconds_per_100k_single")):
        with scratch_directory(plan.directory) as directory:
            store = directory / "store"
            _fill(kind, plan.num_pages, store, note)
            note(f"{kind}: opening what was killed, {plan.rounds} times")
            killed = [_open(kind, plan.num_pages, store) for _ in range(plan.rounds)]
            if any(opened.clean_stop for opened in killed):
                raise CommandFailed("a store that was killed says that it was closed")
            log_s = _read_logs(store)
            note(f"{kind}: closing it, and opening it again")
            _run("close", kind, plan.num_pages, store)
            closed = [_open(kind, plan.num_pages, store) for _ in range(plan.rounds)]
            if not all(opened.clean_stop for opened in closed):
                raise CommandFailed("a store that was closed says that it was killed")
        _report(report, row, killed, log_s)
        _report(report, row.replace("seconds_", "seconds_closed_"), closed, log_s)
        for part in ("tier_s", "tree_s", "lookup_s"):
            seconds = median(getattr(opened, part) for opened in killed)
            report(Row(f"{kind}_{part[:-2]}_alone", seconds * 100_000 / killed[0].num_pages, "s"))


def _report(report: Report, name: str, rounds: list[Opened], log_s: float) -> None:
    scale = 100_000 / rounds[0].num_pages
    value = median(opened.tier_s + opened.tree_s + opened.lookup_s for opened in rounds)
    inserted = Baseline("inserted one by one", scale * median(opened.insert_s for opened in rounds))
    report(Row(name, scale * value, "s", inserted, scale * log_s, GOAL_S))


def _fill(kind: str, num_pages: int, store: Path, note: Note) -> None:
    """Have a process write a store, and kill it when everything is durable."""
    with _process("fill", kind, num_pages, store) as process:
        shown = 0
        for line in _lines(process):
            if "durable" in line:
                return
            if line["written"] - shown >= num_pages // 4 or not shown:
                shown = line["written"]
                note(f"{kind}: {shown:,} of {num_pages:,} pages written")
        _complain(process)


def _open(kind: str, num_pages: int, store: Path) -> Opened:
    """Have a process open the store, with nothing of it in memory."""
    for path in store.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    (line,) = _run("open", kind, num_pages, store)
    return Opened(**line)


def _run(action: str, kind: str, num_pages: int, store: Path) -> list[dict[str, Any]]:
    with _process(action, kind, num_pages, store) as process:
        found = list(_lines(process))
        if process.wait(TIMEOUT_S) not in (0, -9) or (action == "open" and not found):
            _complain(process)
    return found


@contextmanager
def _process(action: str, kind: str, num_pages: int, store: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process of `restart_process`, killed when the block ends."""
    command = [sys.executable, "-m", "hicache.tools.bench.restart_process", action, kind, str(num_pages), str(store)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


def _lines(process: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    assert process.stdout is not None, "its output is a pipe"
    for line in process.stdout:
        yield json.loads(line)


def _complain(process: "subprocess.Popen[str]") -> None:
    assert process.stderr is not None, "its errors are a pipe"
    process.kill()
    said = process.stderr.read().strip().splitlines()
    raise CommandFailed(f"a process ended early: {printable(said[-1]) if said else 'it said nothing'}")


def _read_logs(store: Path) -> float:
    """Seconds to read the bytes of the larger log from the device."""
    seconds = []
    for path in store.glob("*.log"):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = perf_counter()
            while file.read(_READ_BYTES):
                pass
            seconds.append(perf_counter() - began)
    return max(seconds, default=0.0)
