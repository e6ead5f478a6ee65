"""`hicache bench engine` through a real vLLM: every row it promises is there, and nothing stays behind."""

import json
from pathlib import Path

import pytest

from hicache.tools.cli import main
from tests.engines.running import PYTHON
from tests.repository import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


def test_every_row_is_measured_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    target, directory = tmp_path / "engine.json", tmp_path / "b"
    directory.mkdir()
    options = ("--python", str(PYTHON), "--scale", "7", "--dir", str(directory), "--json", str(target))
    assert main(["bench", "engine", *options]) == 0
    assert list(directory.iterdir()) == []
    rows = {row["name"]: row for row in json.loads(target.read_text())["rows"]}
    assert set(rows) == {
        "tiny_ttft_hit_vs_recompute", "tiny_no_reuse_wall", "tiny_no_reuse_wall_least", "tiny_no_reuse_wall_most",
        "tiny_no_reuse_engines", "tiny_no_reuse_engines_least", "tiny_no_reuse_engines_most", "tiny_no_reuse_overhead",
        "tiny_no_reuse_sidecar",
    }  # fmt: skip
    hit = rows["tiny_ttft_hit_vs_recompute"]
    assert hit["baseline"]["name"] == "computing the prompt"
    assert hit["bound"] < hit["baseline"]["value"]
    assert hit["ok"] is True
    assert all(row["value"] > 0 for row in rows.values())
