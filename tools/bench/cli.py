"""`hicache bench cli`: CPU time that a command takes beyond that of a bare interpreter.

A server with a small arena runs in a process of its own. Each command is a process too, in turn with a bare interpreter
that does nothing; the least that either took is compared, as whatever else the machine does only adds to it.
"""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hicache.tools.bench.results import Baseline, Note, Report, Row
from hicache.tools.bench.scratch import scratch_directory
from hicache.tools.exits import CommandFailed

GOAL_MS: Final = 150.0
"""What a command may take beyond a bare interpreter."""
ROUNDS: Final = 20
HICACHE: Final = (sys.executable, "-m", "hicache.tools")
_SERVE: Final = (
    "--set", "layout.num_layers=2", "--set", "layout.num_kv_heads=1", "--set", "layout.head_dim=16",
    "--set", "layout.dtype=float32", "--set", "layout.page_size=16", "--host", "1MiB",
)  # fmt: skip


def run(report: Report, note: Note, directory: Path, *, divisor: int) -> None:
    """Measure, and report each row; `divisor` divides the rounds. The sockets lie in `directory` meanwhile."""
    with scratch_directory(directory) as scratch, _serving(scratch / "run") as sockets:
        asked = ("--socket-dir", os.fspath(sockets))
        for name, arguments in (
            ("help", ("--help",)), ("stats", ("stats", "--json", *asked)), ("tree", ("tree", *asked)),
            ("sessions", ("sessions", *asked)),
        ):  # fmt: skip
            note(f"hicache {arguments[0]}")
            bare, ours = _least_ms(((sys.executable, "-c", "pass"), (*HICACHE, *arguments)), max(ROUNDS // divisor, 1))
            goal = GOAL_MS if name in ("help", "stats") else None
            report(Row(f"{name}_cpu", ours - bare, "ms", Baseline("bare interpreter", bare), goal=goal))


def _least_ms(sides: Sequence[Sequence[str]], rounds: int) -> list[float]:
    """The least CPU time of each side, in milliseconds."""
    least = [float("inf")] * len(sides)
    for _ in range(rounds):
        for index, command in enumerate(sides):
            before = _children_s()
            result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
            if result.returncode:
                raise CommandFailed(f"a command of the bench failed: {result.stderr.strip()}")
            least[index] = min(least[index], 1e3 * (_children_s() - before))
    return least


def _children_s() -> float:
    """CPU seconds of all processes that this one has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def _serving(sockets: Path) -> Iterator[Path]:
    command = (*HICACHE, "serve", "--socket-dir", os.fspath(sockets), *_SERVE)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            if not process.stdout.readline():
                raise CommandFailed(f"the server of the bench did not start: {process.stderr.read().strip()}")
            yield sockets
        finally:
            process.send_signal(signal.SIGTERM)
