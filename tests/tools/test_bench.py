"""`hicache bench`: every row it promises is there, in the form that others read."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache.tools.bench.restart_process import identities, prompts
from hicache.tools.bench.results import Baseline, Row, line
from hicache.tools.cli import main
from hicache.tools.terminal import Style

TREE_ROWS = {
    "match_4k_p64", "insert_4k_p64", "match_128k_p64", "insert_128k_p64", "match_128k_200_nodes_p16",
    "match_short_100k_p64", "insert_short_100k_p64", "partial_miss_100k_siblings", "victim_100k", "bytes_per_node",
    "match_128k_after_probes", "match_128k_after_2000_inserts", "match_1m_vs_1k", "array_equal_131k", "gc_pause_1m",
    "match_4k_p1_vs_p16", "match_short_100k_p16", "match_short_20k_p1", "match_short_1m_p64", "insert_short_1m_p64",
}  # fmt: skip


def test_bench_tree_measures_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "tree.json"
    assert main(["bench", "tree", "--scale", "200", "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert found["bench"] == "tree"
    assert {"cpu", "cores", "memory_bytes", "kernel", "python"} <= set(found["machine"])
    rows = {row["name"]: row for row in found["rows"]}
    assert set(rows) >= TREE_ROWS
    for row in rows.values():
        assert set(row) == {"name", "value", "unit", "baseline", "ratio", "bound", "goal", "ok"}
        assert row["value"] > 0
    assert rows["array_equal_131k"]["baseline"]["name"] == "numpy.array_equal"
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows)


NVME_ROWS = {"read_2m", "write_2m", "read_368640", "write_368640"}


def test_bench_nvme_measures_every_row_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, directory = tmp_path / "nvme.json", tmp_path / "disk"
    directory.mkdir()
    assert main(["bench", "nvme", "--scale", "16", "--dir", str(directory), "--json", str(target)]) == 0
    assert list(directory.iterdir()) == []
    rows = {row["name"]: row for row in json.loads(target.read_text())["rows"]}
    assert set(rows) >= NVME_ROWS
    assert rows["enter_2m"]["baseline"]["name"] == "the copy alone"
    for name, row in rows.items():
        assert row["value"] > 0
        assert row["baseline"]["value"] > 0
        if name in NVME_ROWS:
            assert row["unit"] == "GB/s"
            assert row["goal"] == 0.95
            assert row["baseline"]["name"].startswith("raw O_DIRECT, depth ")
            assert row["bound"] > 0
    assert "reading" in capsys.readouterr().err


def test_bench_restart_measures_every_row_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, directory = tmp_path / "restart.json", tmp_path / "disk"
    directory.mkdir()
    assert main(["bench", "restart", "--scale", "1000", "--dir", str(directory), "--json", str(target)]) == 0
    assert list(directory.iterdir()) == []
    rows = {row["name"]: row for row in json.loads(target.read_text())["rows"]}
    for name in ("seconds_per_100k_pages", "seconds_per_100k_single", "seconds_closed_per_100k_pages"):
        assert rows[name]["unit"] == "s"
        assert rows[name]["goal"] == 1.0
        assert rows[name]["value"] > 0
        assert rows[name]["baseline"]["name"] == "inserted one by one"
    assert "opening what was killed" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["pages", "single"])
def test_prompts_have_as_many_pages_as_they_should(kind: str) -> None:
    chains = {identity.chain for tokens in prompts(kind, 300) for identity in identities(tokens)}
    assert len(chains) == (256 if kind == "pages" else 300)


@pytest.mark.parametrize(
    ("full", "problem"),
    [(False, "there is no directory"), (True, "free, the run takes")],
)
def test_benches_refuse_a_directory_before_they_make_anything(
    full: bool, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path if full else tmp_path / "missing"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    for name in ("nvme", "restart"):
        assert main(["bench", name, "--dir", str(directory)]) == 2
        assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_row_is_judged_by_its_value_or_by_its_ratio() -> None:
    assert Row("a", 3.0, "µs", None, None, 4.0).ok is True
    assert Row("a", 5.0, "µs", None, None, 4.0).ok is False
    assert Row("a", 5.0, "µs").ok is None
    slower = Row("a", 30.0, "µs", Baseline("plain", 10.0), None, 2.0, goal_is_ratio=True)
    assert slower.ratio == 3.0
    assert slower.ok is False
    raw = Baseline("raw", 1.0)
    assert Row("a", 0.96, "GB/s", raw, None, 0.95, goal_is_ratio=True, higher_is_better=True).ok is True
    assert "MISSED" in line(slower, Style())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["bench"], "NAME"),
        (["bench", "nothing"], "unknown bench"),
        (["bench", "tree", "--scale", "0"], "--scale"),
        (["bench", "tree", "--json", "/nowhere/at/all.json"], "--json"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert problem in printed.err
    assert printed.err.count("\n") == 1
