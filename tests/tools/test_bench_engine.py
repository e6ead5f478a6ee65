"""`hicache bench engine`, as far as there is no engine; the rest of it is in `tests/engines`."""

import sys
from pathlib import Path

import pytest

from hicache.tools.bench.engine_process import Clock
from hicache.tools.cli import main


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--dir", "{}/none"], "--dir: there is no directory"),
        (["--python", "{}/none"], "No such file or directory"),
        (["--python", sys.executable], "has no vllm: give that of an environment with vLLM and hicache"),
    ],
)
def test_what_it_cannot_run_with_is_refused_before_anything_is_made(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--dir", str(tmp_path), *(each.format(tmp_path) for each in arguments)]
    assert main(["bench", "engine", "--scale", "9", *given]) == 2
    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


class Worker:
    """Something whose methods take time."""

    def outer(self) -> int:
        return self.inner()

    def inner(self) -> int:
        return sum(range(300_000))


def test_a_clock_counts_each_call_once_and_not_itself() -> None:
    clock, worker = Clock(Worker), Worker()
    worker.inner()
    alone = clock.seconds
    worker.outer()
    assert 0 < alone < clock.seconds < 3 * alone

    idle = Clock(Idle)
    for _ in range(1000):
        Idle().nothing()
    assert idle.seconds < alone


class Idle:
    """Something whose methods take none."""

    def nothing(self) -> None:
        """Nothing."""
