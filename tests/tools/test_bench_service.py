"""`hicache bench service`: every row it promises is there, and nothing stays behind."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hicache.tools.cli import main

MOVED = {"131k_2x2_p16", "131k_2x2_p64", "4k_30x3_p16", "4k_30x3_p64"}


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose name leaves room for those of sockets, which may have 107 bytes."""
    with TemporaryDirectory(prefix="hicache-") as name:
        yield Path(name)


def test_every_row_is_measured_and_nothing_stays(
    tmp_path: Path, short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, directory = tmp_path / "service.json", short
    assert main(["bench", "service", "--scale", "2048", "--dir", str(directory), "--json", str(target)]) == 0
    assert list(directory.iterdir()) == []
    rows = {row["name"]: row for row in json.loads(target.read_text())["rows"]}
    looked_up = {f"{words}_{kind}_p{size}_c{clients}" for words in ("4k", "131k")
                 for kind in ("first", "append", "stream", "cpu")
                 for size in (16, 64) for clients in (1, 32)}  # fmt: skip
    assert set(rows) == {f"lookup_{name}" for name in looked_up} | {
        f"{side}_{name}" for side in ("store", "retrieve", "read") for name in MOVED
    }
    for name, row in rows.items():
        kind = name.split("_")[2] if name.startswith("lookup") else name.split("_")[0]
        baseline = {
            "cpu": "the echo's own", "first": "bare gRPC echo", "append": "bare gRPC echo",
            "stream": "gRPC echo on a stream",
        }.get(kind)  # fmt: skip
        assert row["baseline"]["name"] == (baseline or "memcpy between touched buffers")
        assert row["baseline"]["value"] > 0
        assert row["value"] > 0 or kind == "cpu"  # a difference
    assert rows["lookup_131k_first_p16_c1"]["goal"] == 2.0
    assert rows["lookup_131k_append_p16_c32"]["goal"] == 1.3
    assert rows["lookup_131k_cpu_p64_c1"]["goal"] == 2.0
    assert rows["store_4k_30x3_p16"]["goal"] == 0.6
    assert rows["retrieve_4k_30x3_p16"]["goal"] == 0.9
    assert "lookups of 131k" in capsys.readouterr().err


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "service", "--dir", str(tmp_path / "none")]) == 2
    assert "--dir: there is no directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
