"""The check of a GPU, on a machine without one: what can run runs, the rest says what it needs, nothing stops it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache.tools.bench.results import Row
from hicache.tools.exits import Exit
from hicache.tools.gpu_check.__main__ import PARTS, main, run_parts
from hicache.tools.gpu_check.parts import Part, report_difference


def results_in(out: Path) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in json.loads((out / "gpu_check.json").read_text())["parts"]}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_can_run_without_a_gpu_is_right_and_the_rest_needs_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["kernels", "copies", "registration", "tiers", "decode"]
    status = main(["--out", str(tmp_path), *(word for name in names for word in ("--part", name))])
    printed = capsys.readouterr().out
    assert status == Exit.OK, printed
    found = results_in(tmp_path)
    assert list(found) == names
    for name in ("kernels", "copies", "tiers"):
        assert found[name]["status"] == "ok"
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
    if not torch.cuda.is_available():
        assert found["registration"]["status"] == found["decode"]["status"] == "needs a GPU"
        assert "decode: decode beside reading alone — needs a GPU" in printed
    assert not list(tmp_path.glob("hicache-gpu-check-*"))


def part(function: str, *, limit_s: float = 60, measures: bool = False) -> Part:
    return Part(function, f"tests.tools.gpu_parts:{function}", "a part", 1, limit_s, measures=measures)


@pytest.mark.slow
def test_a_part_that_goes_wrong_takes_nothing_from_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
