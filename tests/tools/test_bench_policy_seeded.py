"""The seeded rows of `hicache bench policy`, from fewer requests."""

import json

import pytest

from hicache.tools.bench.policy_seeded import GOALS, rows
from hicache.tools.bench.results import Row
from hicache.tools.cli import main
from hicache.tools.replay.generators import WORKLOADS
from hicache.tools.replay.machine import Machine


def test_every_kind_has_its_row() -> None:
    measured: list[Row] = []
    notes: list[str] = []
    rows(notes.append, measured.append, divisor=40)
    assert [row.name for row in measured] == ["seeded_chat", "seeded_few_shot", "seeded_rag", "seeded_multi_turn"]
    assert set(GOALS) == set(WORKLOADS)
    for row in measured:
        assert row.bound is not None
        # A hundred requests hold all there is; some come before the one that they go on from is stored.
        assert row.bound - 0.02 <= row.value <= row.bound < 1
    assert len(notes) == 4


def test_the_configuration_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--synthetic", "few-shot", "--limit", "5", "--json"]) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    default = Machine.default(64)
    for name in ("block_tokens", "token_bytes", "device_pages", "host_pages", "nvme_pages", "concurrency", "pace"):
        assert machine[name] == getattr(default, name)
    assert machine["prefill"] == {"token_s": 50e-6, "attend_s": 0.5e-9, "step_s": 5e-3}
