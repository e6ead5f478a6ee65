"""The check of a GPU, on a machine without one: what can run runs, the rest says what it needs, nothing stops it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache.tools.bench.results import Baseline, Row
from hicache.tools.demo.stdlib import SOURCES, render
from hicache.tools.exits import Exit
from hicache.tools.gpu_check.__main__ import PARTS, main, run_parts
from hicache.tools.gpu_check.demo import run_demo
from hicache.tools.gpu_check.goals import GOALS, Goal, table, to_json
from hicache.tools.gpu_check.parts import Part, Place, report_difference
from hicache.tools.terminal import Style
from tests.tools.tiny_model import write_model


def results_in(out: Path) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in json.loads((out / "gpu_check.json").read_text())["parts"]}


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one, nobody sees it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("hicache.tools.gpu_check.__main__._has_gpu", lambda: False)


WITHOUT_A_GPU = {
    "kernels": "ok", "copies": "ok", "registration": "needs a GPU; copied without one",
    "connector": "needs a GPU; copied without one", "tiers": "ok",
    "demo": "needs a GPU",
} | {name: "needs a GPU; rehearsed with small sizes" for name, part in PARTS.items() if part.measures}  # fmt: skip
"""What each part says here."""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_can_run_without_a_gpu_is_right_and_the_rest_needs_one(
    without_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    parts = [part for part in PARTS.values() if not part.measures]
    rehearsal = Part("speed", "tests.tools.gpu_parts:rehearses", "all that measure", 1, 200, interprets=True)
    status = run_parts([*parts, rehearsal], tmp_path)
    printed = capsys.readouterr().out
    assert status == Exit.OK, printed
    found = results_in(tmp_path)
    assert {name: outcome["status"] for name, outcome in found.items()} == {
        name: WITHOUT_A_GPU.get(name, "ok") for name in [part.name for part in parts] + ["speed"]
    }
    for name in ("kernels", "copies", "registration", "connector", "tiers"):
        compared = [row for row in found[name]["rows"] if row["goal"] is not None]
        assert compared
        assert all(row["ok"] for row in compared)
    rows = {row["name"] for row in found["kernels"]["rows"]}
    assert rows >= {
        *(f"{kernel}_{dtype}" for kernel in ("decode", "extend", "cascade", "mla")
          for dtype in ("float16", "bfloat16", "float32")),
        "merge_bfloat16", "gather_scatter_wrong", "convert_int8", "convert_float8_e4m3fn", "rotate_halves",
        "score_box_over_least", "decode_float8_e4m3fn",
    }  # fmt: skip
    assert [(row["name"], row["value"]) for row in found["speed"]["rows"]] == [
        ("rehearsed", sum(part.measures for part in PARTS.values()))
    ]
    assert "demo: the demo with --device cuda, in short — needs a GPU" in printed
    assert not list(tmp_path.glob("hicache-gpu-check-*"))


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_the_whole_check_says_of_every_part_what_became_of_it(
    without_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["--out", str(tmp_path)])
    printed = capsys.readouterr().out.splitlines()
    assert status == Exit.OK, printed
    assert {name: outcome["status"] for name, outcome in results_in(tmp_path).items()} == WITHOUT_A_GPU
    assert list(WITHOUT_A_GPU) == list(PARTS)
    assert printed[-1].endswith("wrong: none")
    assert sum(line.endswith("not measured") for line in printed) == len(GOALS)


@pytest.mark.faults
def test_the_part_with_the_demo_understands_what_the_demo_says(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", [render(source.module) for source in SOURCES[:4]])
    rows: list[Row] = []
    run_demo(Place(torch.device("cpu"), tmp_path), rows.append, "--device", "cpu", "--model", str(model))
    assert {row.name for row in rows} >= {"demo_identical_outputs", "demo_hit_rate"}
    assert all(row.ok is not False for row in rows)


@pytest.mark.slow
def test_a_package_that_is_missing_fails_the_part_that_needs_it_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("aiofiles", "crc32c", "lz4", "xxhash", "zstandard"):
        error = f"raise ModuleNotFoundError({f'No module named {package!r}'!r}, name={package!r})"
        (tmp_path / f"{package}.py").write_text(error + "\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    out = tmp_path / "out"
    out.mkdir()
    assert run_parts([PARTS[name] for name in ("copies", "tiers")], out) == Exit.FAILED
    found = results_in(out)
    assert found["copies"]["status"] == "ok"
    assert found["tiers"]["status"] == "failed"
    assert found["tiers"]["detail"].splitlines()[-1].startswith("ModuleNotFoundError: No module named ")


def part(function: str, *, limit_s: float = 60, measures: bool = False) -> Part:
    return Part(function, f"tests.tools.gpu_parts:{function}", "a part", 1, limit_s, measures=measures)


@pytest.mark.slow
def test_a_part_that_goes_wrong_takes_nothing_from_the_others(
    without_gpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    parts = [part("fails"), part("dies"), part("hangs", limit_s=15), part("is_left_out"), part("is_well")]
    assert run_parts(parts, tmp_path) == Exit.FAILED
    printed = capsys.readouterr().out
    assert "RuntimeError: as it was told to" in printed
    assert printed.splitlines()[-1].endswith("wrong: fails, dies, hangs")
    found = results_in(tmp_path)
    statuses = {name: outcome["status"] for name, outcome in found.items()}
    assert statuses == {
        "fails": "failed", "dies": "failed", "hangs": "timed out", "is_left_out": "needs more than there is",
        "is_well": "ok",
    }  # fmt: skip
    assert all([row["name"] for row in found[name]["rows"]] == ["before"] for name in ("fails", "dies", "hangs"))
    assert "as it was told to" in found["fails"]["detail"]


@pytest.mark.slow
@pytest.mark.parametrize(("measures", "status"), [(False, Exit.FAILED), (True, Exit.OK)])
def test_a_comparison_that_is_off_is_wrong_and_a_figure_that_misses_its_goal_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measures: bool, status: Exit
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    assert run_parts([part("is_off", measures=measures)], tmp_path) == status


def test_a_difference_that_is_not_allowed_fails_a_part_that_measures() -> None:
    rows: list[Row] = []
    expected = torch.ones(9)
    report_difference(rows.append, "near", expected * 1.001, expected, 0.01)
    for actual in (expected * 1.1, torch.full_like(expected, torch.nan)):
        with pytest.raises(AssertionError, match="far is"):
            report_difference(rows.append, "far", actual, expected, 0.01)
    assert [(row.name, row.ok) for row in rows] == [("near", True), ("far", False), ("far", False)]


def test_a_goal_is_judged_by_the_worst_of_its_rows() -> None:
    goal = Goal("", ("a", "b"), "ratio", 0.85, 0.93)
    assert goal.found({"a": {"ratio": 0.9}, "b": {"ratio": 0.86}}) == 0.86
    assert goal.found({"a": {"ratio": 0.9}}) is None
    assert goal.found({"a": {"ratio": 0.9}, "b": {"ratio": None}}) is None
    assert [goal.verdict(found) for found in (None, 0.84, 0.85, 0.93)] == ["not measured", "MISSED", "ok", "moonshot"]
    goal = Goal("", ("a", "b"), "value", 1.15, 1.03, higher_is_better=False)
    assert goal.found({"a": {"value": 1.0}, "b": {"value": 1.1}}) == 1.1
    assert [goal.verdict(found) for found in (1.16, 1.15, 1.03)] == ["MISSED", "ok", "moonshot"]


def test_every_goal_has_rows_that_the_check_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows: dict[str, Any] = {}
    for goal in GOALS:
        rows |= {name: Row(name, goal.goal, "", Baseline("", 1.0)).to_json() for name in goal.rows}
    assert [found["verdict"] for found in to_json(rows.values())] == ["ok"] * len(GOALS)
    assert all(line.rstrip().endswith("ok") for line in table(rows.values(), Style(colour=False))[1:])


def test_by_estimate_all_of_it_takes_less_than_six_minutes() -> None:
    assert sum(part.estimate_s for part in PARTS.values()) < 360


@pytest.mark.parametrize(
    "arguments",
    [[], ["--out", "x", "--part", "unknown"], ["--out", "/proc/self/cmdline/x"], ["--out", "/proc"]],
    ids=str,
)
def test_bad_usage_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == Exit.USAGE
    assert "usage:" in capsys.readouterr().err
