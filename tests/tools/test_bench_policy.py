"""`hicache bench policy`: every row it promises, from excerpts of the traces that it asks for."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from hicache.tools.bench import policy, policy_seeded
from hicache.tools.bench.policy import NOT_JUDGED, SHARES, Plan
from hicache.tools.bench.policy_points import OTHERS, POLICIES, distinct_tokens, hits_of
from hicache.tools.bench.results import Row
from hicache.tools.cli import main
from hicache.tools.replay.bound import min_hits
from hicache.tools.replay.readers import Request, Trace

EXCERPTS: Final = Path(__file__).parent / "traces"
FILES: Final = {
    "mooncake_conversation": "mooncake",
    "mooncake_synthetic": "mooncake",
    "agent_tools": "agent_tools",
    "agentic_coding": "agentic_coding",
    "ragpulse": "ragpulse",
    "ragpulse_chunks": "ragpulse_chunks",
}
"""Names that the bench looks for, and the excerpts that stand for them here."""


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(policy_seeded, "DEFAULT_REQUESTS", 160)
    directory = tmp_path / "traces"
    directory.mkdir()
    for name, excerpt in FILES.items():
        with gzip.open(directory / f"{name}.jsonl.gz", "wb") as packed:
            packed.write((EXCERPTS / f"{excerpt}.jsonl").read_bytes())
    return directory


def test_every_row_is_measured(traces: Path) -> None:
    measured: list[Row] = []
    notes: list[str] = []
    policy.run(measured.append, notes.append, Plan(traces))
    rows = {row.name: row for row in measured}
    points = [(name, share) for name in OTHERS for share in SHARES]
    assert list(rows) == [
        *(f"conversation_gap_{millions}m" for millions in (1, 2, 4, 8)),
        *(f"conversation_hinted_{millions}m" for millions in (1, 2, 4, 8)),
        *(f"{name}_{share}" for name, share in points),
        "worst_vs_best", "worst_vs_lru", "planner_worst_off", "planner_worst_vs_single", "planner_break_even",
        *(
            f"admission_{trace}{hinted}_{millions}m"
            for trace in ("conversation", "synthetic") for millions in (1, 2) for hinted in ("", "_hinted")
        ),
        *(f"seeded_{kind}" for kind in ("chat", "few_shot", "rag", "multi_turn")),
    ]  # fmt: skip
    for name, share in points:
        row = rows[f"{name}_{share}"]
        assert row.baseline is not None
        assert row.baseline.name in ("LRU", "S3-FIFO", "LRFU")
        assert row.bound is not None
        assert 0 <= row.value <= row.bound
        assert row.baseline.value <= row.bound
    # A million tokens hold all of the excerpt: there every policy finds what comes again, and LRU leaves no gap.
    assert [rows[f"conversation_gap_{millions}m"].value for millions in (1, 2, 4, 8)] == [0.0] * 4
    for millions in (1, 2, 4, 8):
        row = rows[f"conversation_hinted_{millions}m"]
        assert row.baseline is not None
        assert row.value == row.baseline.value > 0
    behind = [
        row.value - row.baseline.value
        for row in (rows[f"{name}_{share}"] for name, share in points if (name, share) not in NOT_JUDGED)
        if row.baseline is not None
    ]
    assert rows["worst_vs_best"].value == pytest.approx(min(0.0, *behind))
    assert 0 < rows["worst_vs_lru"].value <= 1
    assert sum(note.startswith(("furthest behind the best", "least over LRU")) for note in notes) == 2


def test_the_command_keeps_the_rows(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "policy.json"
    assert main(["bench", "policy", "--traces", str(traces), "--scale", "4", "--json", str(target)]) == 0
    found = json.loads(target.read_text())
    assert found["bench"] == "policy"
    assert {"conversation_gap_1m", "rag_10", "worst_vs_best", "worst_vs_lru"} <= {row["name"] for row in found["rows"]}
    assert "worst_vs_lru" in capsys.readouterr().out


def test_an_endless_cache_finds_all_that_was_there_before() -> None:
    paths = [request.blocks.tolist() for request in Trace(EXCERPTS / "mooncake.jsonl")]
    num_blocks = sum(map(len, paths))
    again = num_blocks - len({block for path in paths for block in path})
    assert again > 0
    assert min_hits(paths, num_blocks) == again
    assert {name: sum(hits_of(name, paths, num_blocks)) for name in POLICIES} == dict.fromkeys(POLICIES, again)


def test_distinct_tokens_count_a_block_once_and_the_last_one_by_what_it_holds() -> None:
    def request(blocks: list[int], tokens: int) -> Request:
        return Request(0.0, np.array(blocks, np.int32), tokens, 1)

    assert distinct_tokens([request([0, 1], 700), request([0, 2], 1024), request([0, 1], 700)], 512) == 512 + 188 + 512
    # Tokens behind the blocks are in no block.
    assert distinct_tokens([request([0], 700)], 512) == 512


def test_the_traces_are_asked_for_before_anything_is_measured(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "policy"]) == 2
    assert "--traces" in capsys.readouterr().err
    (traces / "ragpulse_chunks.jsonl.gz").unlink()
    assert main(["bench", "policy", "--traces", str(traces)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "there is no file" in printed.err
    assert "ragpulse_chunks" in printed.err
    shutil.rmtree(traces)
    assert main(["bench", "policy", "--traces", str(traces)]) == 2
    assert "mooncake_conversation.jsonl.gz: No such file" in capsys.readouterr().err


def test_a_trace_without_blocks_is_named(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gzip.open(traces / "mooncake_conversation.jsonl.gz", "wb") as packed:
        packed.write(b'{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}\n')
    assert main(["bench", "policy", "--traces", str(traces)]) == 2
    assert "mooncake_conversation.jsonl.gz: no prompt in it has a block" in capsys.readouterr().err
