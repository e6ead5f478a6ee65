"""`hicache bench cli`: every row it promises is there, and nothing stays behind."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hicache.tools.cli import main
from tests.tools.served import check_schema


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose name leaves room for those of sockets, which may have 107 bytes."""
    with TemporaryDirectory(prefix="hicache-") as name:
        yield Path(name)


def test_every_row_is_measured_and_nothing_stays(tmp_path: Path, short: Path) -> None:
    target, directory = tmp_path / "cli.json", short
    assert main(["bench", "cli", "--scale", "20", "--dir", str(directory), "--json", str(target)]) == 0
    assert list(directory.iterdir()) == []
    told = json.loads(target.read_text())
    check_schema("bench", told)
    rows = {row["name"]: row for row in told["rows"]}
    assert set(rows) == {"help_cpu", "stats_cpu", "tree_cpu", "sessions_cpu"}
    assert rows["help_cpu"]["goal"] == rows["stats_cpu"]["goal"] == 150
    assert all(row["baseline"]["value"] > 0 for row in rows.values())


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cli", "--dir", str(tmp_path / "none")]) == 2
    assert "--dir: there is no directory" in capsys.readouterr().err
