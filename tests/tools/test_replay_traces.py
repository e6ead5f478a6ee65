"""Traces are read in their four forms, and what is wrong with one is said with its file and line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hicache.tools.cli import main
from hicache.tools.replay.traces import BadTrace, read_trace

# The shape of Mooncake's FAST'25 traces (kvcache-ai/Mooncake, Apache-2.0), with numbers of our own.
MOONCAKE: list[dict[str, Any]] = [
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 6, "hash_ids": [7, 9]},
    {"timestamp": 3000, "input_length": 100, "output_length": 7, "hash_ids": [8]},
]


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_mooncake_ids_name_prefixes(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "a.jsonl", MOONCAKE))
    assert (trace.form, trace.block_tokens, trace.num_skipped) == ("mooncake", 512, 0)
    assert [request.time_s for request in trace.requests] == [0.0, 3.0, 3.0]
    first, second, third = (request.blocks for request in trace.requests)
    assert first[0] == second[0]
    assert len({first[1], second[1], third[0]}) == 3  # 8 after 7 is another prefix than 8 at the start


def test_sessions_are_staggered_and_regrouped(tmp_path: Path) -> None:
    session = {"session": "s", "block_size": 64, "requests": [
        {"t": 0.5, "in": 200, "out": 1, "h": [[1, 4]]}, {"t": 9.0, "in": 320, "out": 2, "h": [[1, 4], [9, 1]]},
    ]}  # fmt: skip
    trace = read_trace(write(tmp_path / "a.jsonl", [session, session]), regroup=2, stagger_s=5.0)
    assert trace.block_tokens == 128
    assert [request.time_s for request in trace.requests] == [0.5, 5.5, 9.0, 14.0]
    one, other, longer, _ = (request.blocks for request in trace.requests)
    assert longer[:2] == one
    assert len(longer) == 3
    assert set(one).isdisjoint(other)  # ids are a session's own
    shared = [{**session, "agent": "a"}] * 2
    trace = read_trace(write(tmp_path / "b.jsonl", shared), regroup=2, stagger_s=5.0)
    assert trace.requests[0].blocks == trace.requests[1].blocks
    assert len(read_trace(tmp_path / "a.jsonl", sessions_max=1).requests) == 2


def test_ragpulse_components_are_laid_out_in_blocks(tmp_path: Path) -> None:
    lengths = [{"id": 1, "kind": "sys_prompt", "token_length": 20}, {"id": 2, "kind": "passage", "token_length": 12},
               {"id": 3, "kind": "passage", "token_length": 12}]  # fmt: skip
    write(tmp_path / "r_chunks.jsonl", lengths)
    records = [
        {"timestamp": str(at), "output_length": 3, "hash_ids": {"sys_prompt": [1], "passages_ids": [passage]}}
        for at, passage in ((5, 2), (4, 3))
    ]
    path = write(tmp_path / "r.jsonl", records)
    with pytest.raises(BadTrace, match=r"line 2: its time, 4 s, is before the previous one's, 5 s"):
        read_trace(path)
    trace = read_trace(path, sort=True)
    assert [(request.time_s, request.num_tokens) for request in trace.requests] == [(4.0, 32), (5.0, 32)]
    one, other = (request.blocks for request in trace.requests)
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_azure_has_arrivals_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    text += "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,31,8\n"
    path.write_bytes(gzip.compress(text.encode()))
    trace = read_trace(path)
    assert [(request.num_tokens, request.num_output_tokens) for request in trace.requests] == [(4808, 10), (31, 8)]
    assert trace.requests[1].time_s == pytest.approx(0.052)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ({"timestamp": -1}, "timestamp: -1 is not a number from 0 on"),
        ({"timestamp": float("nan")}, "timestamp: nan"),
        ({"timestamp": 1}, "its time, 0.001 s, is before the previous one's, 3 s"),
        ({"input_length": 0}, "input_length: 0 is not within 1 to"),
        ({"input_length": True}, "input_length: True"),
        ({"hash_ids": [1, 2, 3]}, "hash_ids: 3 blocks of 512 do not hold 100 tokens"),
        ({"hash_ids": "x"}, "hash_ids: is not a list of ids"),
    ],
)
def test_a_bad_line_is_named_or_counted(tmp_path: Path, change: Any, reason: str) -> None:
    last = change if isinstance(change, str) else json.dumps({**MOONCAKE[2], **change})
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in MOONCAKE[:2]) + "\n" + last + "\n")
    with pytest.raises(BadTrace) as caught:
        read_trace(path)
    assert caught.value.line == 4
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)
    trace = read_trace(path, skip_bad=True)
    assert (len(trace.requests), trace.num_skipped) == (2, 1)


def test_a_file_that_is_no_trace_is_refused_even_with_skipping(tmp_path: Path) -> None:
    whole = gzip.compress("".join(json.dumps(record) + "\n" for record in MOONCAKE * 50).encode())
    bad_lines = "".join(json.dumps({**MOONCAKE[0], "timestamp": -1}) + "\n" for _ in range(3))
    for name, content, reason in (
        ("cut.jsonl.gz", whole[:-9], "cut short"),
        ("not.jsonl.gz", b"plain text", "is not whole gzip data"),
        ("empty.jsonl", b"\n", "is empty"),
        ("other.jsonl", b'{"what": 1}\n', "line 1: is of no known form"),
        ("text.jsonl", b"hello\n", "line 1: is of no known form"),
        ("bytes.jsonl", b"\xff\xfe", "is not UTF-8"),
        ("bad.jsonl", bad_lines.encode(), "has no good line (3 bad)"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadTrace) as caught:
            read_trace(tmp_path / name, skip_bad=True)
        assert reason in str(caught.value), name
    with pytest.raises(BadTrace, match="No such file"):
        read_trace(tmp_path / "missing.jsonl")


def test_the_bench_asks_for_its_traces_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "policy"]) == 2
    assert "--traces" in capsys.readouterr().err
    assert main(["bench", "policy", "--traces", str(tmp_path)]) == 2
    assert "there is no file" in capsys.readouterr().err
