"""Readers of traces: what comes out of an excerpt of each format, and what is said about files that are wrong."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from hicache.tools.replay import readers
from hicache.tools.replay.readers import BadTrace, Request, Trace

EXCERPTS: Final = Path(__file__).parent / "traces"


def shared_tokens(trace: Trace, requests: list[Request]) -> int:
    """Tokens that an endless cache would have found."""
    seen: set[int] = set()
    found = 0
    for request in requests:
        blocks = request.blocks.tolist()
        num_blocks = next((place for place, block in enumerate(blocks) if block not in seen), len(blocks))
        found += min(num_blocks * trace.block_tokens, request.input_tokens)
        seen.update(blocks)
    return found


@pytest.mark.parametrize(
    ("name", "kind", "block_tokens", "num_requests", "tokens", "shared", "last_s"),
    [
        ("mooncake.jsonl", "mooncake", 512, 40, 101_660, 19_968, 41.999),
        ("agentic_coding.jsonl", "sessions", 64, 16, 937_735, 802_112, 246.0),
        ("agent_tools.jsonl", "sessions", 16, 36, 100_617, 69_892, 462.21),
        ("ragpulse.jsonl", "ragpulse", 64, 12, 38_170, 10_240, 358.0),
        ("azure.csv", "azure", 64, 24, 16_391, 0, 14.2933),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_excerpts_read_whole(
    name: str, kind: str, block_tokens: int, num_requests: int, tokens: int, shared: int, last_s: float, packed: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
    path, chunks = EXCERPTS / name, None
    if packed:
        # Neither the name of a file nor its ending tells what it is.
        path, chunks = tmp_path / "trace", EXCERPTS / "ragpulse_chunks.jsonl"
        path.write_bytes(gzip.compress((EXCERPTS / name).read_bytes()))
    trace = Trace(path, chunks=chunks)
    requests = list(trace)
    assert (trace.format, trace.block_tokens, trace.num_bad) == (kind, block_tokens, 0)
    assert (len(requests), sum(request.input_tokens for request in requests)) == (num_requests, tokens)
    assert shared_tokens(trace, requests) == shared
    assert requests[-1].time_s == pytest.approx(last_s, abs=1e-3)
    assert [request.time_s for request in requests] == sorted(request.time_s for request in requests)
    for request in requests:
        assert request.blocks.dtype == np.int32
        assert len(set(request.blocks.tolist())) == len(request.blocks)
    # Every time anew, and the same.
    assert [request.blocks.tolist() for request in trace] == [request.blocks.tolist() for request in requests]


def test_first_request_of_each_format_is_the_one_in_the_file() -> None:
    first = next(iter(Trace(EXCERPTS / "mooncake.jsonl")))
    line = json.loads((EXCERPTS / "mooncake.jsonl").read_text().splitlines()[0])
    assert first.blocks.tolist() == line["hash_ids"]
    assert (first.input_tokens, first.output_tokens) == (line["input_length"], line["output_length"])
    agent = next(iter(Trace(EXCERPTS / "agent_tools.jsonl")))
    assert (agent.session, agent.turn, agent.blocks.tolist()) == ("magagent-000", 0, list(range(21)))
    rag = next(iter(Trace(EXCERPTS / "ragpulse.jsonl")))
    assert rag.session.startswith("1757476916095")
    assert 0 < rag.document_tokens < rag.input_tokens
    assert len(rag.blocks) == -(-rag.input_tokens // 64)


def test_sessions_overlap_by_the_gap_and_keep_their_own_ids() -> None:
    path = EXCERPTS / "agentic_coding.jsonl"
    close = list(Trace(path, session_gap_s=0.0))
    assert [(request.time_s, request.session) for request in close][:2] == [(0.0, "trace_0001"), (0.0, "trace_0002")]
    by_session: dict[str, set[int]] = {}
    for request in close:
        by_session.setdefault(request.session, set()).update(request.blocks.tolist())
    first, second = by_session.values()
    assert first.isdisjoint(second)
    # Sessions of agents number their blocks together.
    agents: dict[str, set[int]] = {}
    for request in Trace(EXCERPTS / "agent_tools.jsonl"):
        agents.setdefault(request.session, set()).update(request.blocks.tolist())
    assert agents["magagent-000"] & agents["magagent-001"]


def test_only_the_first_sessions_are_read_when_asked(tmp_path: Path) -> None:
    path = EXCERPTS / "agent_tools.jsonl"
    whole = [request for request in Trace(path, session_gap_s=0.0) if request.session != "magagent-002"]
    part = list(Trace(path, session_gap_s=0.0, max_sessions=2))
    assert [(each.time_s, each.session, each.blocks.tolist()) for each in part] == [
        (each.time_s, each.session, each.blocks.tolist()) for each in whole
    ]
    # What lies behind them is not looked at.
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines(SESSION) + b"no JSON\n" + lines(SESSION))
    assert len(list(Trace(path, max_sessions=1))) == 1


def test_longer_blocks_share_exactly_where_all_their_parts_do() -> None:
    rng = random.Random(5)
    own = list(Trace(EXCERPTS / "mooncake.jsonl"))
    longer = list(Trace(EXCERPTS / "mooncake.jsonl", block_tokens=1024))
    for _ in range(300):
        i, j = rng.randrange(len(own)), rng.randrange(len(own))
        a, b = own[i].blocks.tolist(), own[j].blocks.tolist()
        for place in range(min(len(longer[i].blocks), len(longer[j].blocks))):
            same_parts = a[: 2 * place + 2] == b[: 2 * place + 2]
            assert (longer[i].blocks[place] == longer[j].blocks[place]) == same_parts


def test_ragpulse_blocks_are_equal_exactly_where_their_tokens_are(tmp_path: Path) -> None:
    lengths = {"sys_prompt": {1: 10, 2: 7}, "passage": {1: 33, 2: 16}, "user_input": {1: 5, 2: 6}}
    rng = random.Random(3)
    prompts: list[dict[str, Any]] = []
    for time_s in range(60):
        prompts.append({
            "timestamp": str(time_s), "output_length": 1, "session_id": "s",
            "hash_ids": {
                "sys_prompt": [rng.choice((1, 2))], "user_input": [rng.choice((1, 2))],
                "passages_ids": [rng.choice((1, 2)) for _ in range(rng.randrange(4))],
            },
        })  # fmt: skip
    kinds = {"sys_prompt": "sys_prompt", "passages_ids": "passage", "user_input": "user_input"}
    ids: dict[tuple[tuple[str, int, int], ...], int] = {}
    write_chunks(tmp_path / "rag_chunks.jsonl", lengths)
    path = tmp_path / "rag.jsonl"
    path.write_bytes(lines(*prompts))
    for prompt, request in zip(prompts, Trace(path, block_tokens=16), strict=True):
        parts = prompt["hash_ids"]
        tokens = [
            (kind, each, offset)
            for component, kind in kinds.items()
            for each in parts[component]
            for offset in range(lengths[kind][each])
        ]
        assert request.input_tokens == len(tokens)
        for place, block in enumerate(request.blocks.tolist()):
            assert ids.setdefault(tuple(tokens[: (place + 1) * 16]), block) == block
    assert len(set(ids.values())) == len(ids)


def write_chunks(path: Path, lengths: dict[str, dict[int, int]]) -> None:
    path.write_bytes(
        lines(
            *(
                {"id": each, "kind": kind, "token_length": length}
                for kind, of_kind in lengths.items()
                for each, length in of_kind.items()
            )
        )
    )


MOONCAKE: Final[dict[str, Any]] = {"timestamp": 5, "input_length": 700, "output_length": 1, "hash_ids": [0, 1]}
SESSION: Final[dict[str, Any]] = {
    "session": "a", "block_size": 4, "requests": [{"t": 0.0, "in": 9, "out": 1, "h": [[1, 2]]}],
}  # fmt: skip
RAG: Final[dict[str, Any]] = {"timestamp": "1", "output_length": 1, "session_id": "s", "hash_ids": {"history": [1]}}
AZURE: Final = b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"


def lines(*objects: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in objects)


def without(found: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key != name}


def session(**changes: Any) -> dict[str, Any]:
    return {**SESSION, "requests": [SESSION["requests"][0] | changes]}


BAD_SECOND_LINES: Final = {
    "not JSON": (lines(MOONCAKE) + b'{"timestamp": 6,\n', "line 2: is not JSON"),
    "JSON, no object": (lines(MOONCAKE) + b"[1]\n", "line 2: is not a JSON object"),
    "deep": (lines(MOONCAKE) + b"[" * 200_000 + b"\n", "line 2: is not JSON"),
    "no text": (lines(MOONCAKE) + b"\xff\xfe\n", "line 2: is not JSON"),
    "missing": (lines(MOONCAKE, without(MOONCAKE, "hash_ids")), "line 2: hash_ids is missing"),
    "type": (lines(MOONCAKE, MOONCAKE | {"input_length": "700"}), "line 2: input_length is not an integer"),
    "truth": (lines(MOONCAKE, MOONCAKE | {"input_length": True}), "line 2: input_length is not an integer"),
    "bound": (lines(MOONCAKE, MOONCAKE | {"input_length": -1}), "line 2: input_length -1 is not within 0 to"),
    "ids": (lines(MOONCAKE, MOONCAKE | {"hash_ids": [0, 1.5]}), "line 2: hash_ids holds something else than"),
    "ids beyond": (lines(MOONCAKE, MOONCAKE | {"hash_ids": [0, 2**31]}), "line 2: hash_ids holds something else"),
    "ids too many": (lines(MOONCAKE, MOONCAKE | {"hash_ids": [0, 1, 2]}), "line 2: names 3 blocks, but its 700 tokens"),
    "unsorted": (lines(MOONCAKE, MOONCAKE | {"timestamp": 4}), "line 2: its time, 0.004 s, lies before the last one's"),
    "negative": (lines(MOONCAKE, MOONCAKE | {"timestamp": -4}), "line 2: timestamp -4 is negative"),
    "no time": (lines(MOONCAKE, MOONCAKE | {"timestamp": None}), "line 2: timestamp is not a number"),
    "NaN": (lines(MOONCAKE, MOONCAKE | {"timestamp": float("nan")}), "line 2: timestamp is not a number"),
    "endless": (lines(MOONCAKE, MOONCAKE | {"timestamp": float("inf")}), "line 2: timestamp inf is more than"),
    "huge": (lines(MOONCAKE, MOONCAKE | {"timestamp": 10**400}), "line 2: timestamp 1000"),
    "session block": (lines(SESSION, SESSION | {"block_size": 8}), "line 2: block_size 8 is not 4, that of the first"),
    "session name": (lines(SESSION, SESSION | {"session": 1}), "line 2: session is not a string"),
    "session list": (lines(SESSION, SESSION | {"requests": {}}), "line 2: requests is not a list"),
    "session request": (lines(SESSION, SESSION | {"requests": [1]}), "line 2: requests[0]: is not an object"),
    "session runs": (lines(SESSION, session(h=[[1]])), "line 2: requests[0]: h holds something else than pairs"),
    "session bomb": (lines(SESSION, session(h=[[0, 1 << 40]])), "line 2: requests[0]: h has more than"),
    "session order": (
        lines(SESSION, SESSION | {"requests": [SESSION["requests"][0] | {"t": t} for t in (2.0, 1.0)]}),
        "line 2: requests[1]: t 1 lies before 2",
    ),
    "azure columns": (AZURE + b"2023-11-16 18:15:47,3\r\n", "line 3: has 2 columns, not 3"),
    "azure number": (AZURE + b"2023-11-16 18:15:47,x,1\r\n", "line 3: ContextTokens is not an integer"),
    "azure time": (AZURE + b"yesterday,1,1\r\n", "line 3: TIMESTAMP 'yesterday' is not a date and time"),
    "azure order": (AZURE + b"2023-11-16 18:15:45,1,1\r\n", "line 3: its time, -1.68"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SECOND_LINES)
def test_a_bad_line_is_named_and_skipped_only_when_asked(case: str, tmp_path: Path) -> None:
    data, reason = BAD_SECOND_LINES[case]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(data)
    with pytest.raises(BadTrace) as caught:
        list(Trace(path))
    assert str(caught.value).startswith(f"{path}: {reason}")
    trace = Trace(path, skip_bad=True)
    assert (len(list(trace)), trace.num_bad) == (1, 1)


@pytest.mark.parametrize(
    "data",
    [b"", b"\n\n", b"hello\n", b"{}\n", b"[]\n", b"TIMESTAMP,Context\n1,2\n", b'{"timestamp": 1}\n', b"\x00" * 99],
)
@pytest.mark.parametrize("skip_bad", [False, True])
def test_an_unknown_format_is_an_error_even_where_bad_lines_are_skipped(
    data: bytes, skip_bad: bool, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(data)
    with pytest.raises(BadTrace, match=r"known are recorded, mooncake, sessions, .* azure|no lines that can be read"):
        Trace(path, skip_bad=skip_bad)


@pytest.mark.parametrize("data", [lines(MOONCAKE), lines(SESSION), AZURE])
def test_a_bad_first_line_is_skipped_when_asked(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"{oops\n" + data)
    with pytest.raises(BadTrace, match="line 1: is of no known format"):
        Trace(path)
    trace = Trace(path, skip_bad=True)
    assert (len(list(trace)), trace.num_bad) == (1, 1)


@pytest.mark.parametrize("harm", [lambda data: data[:-300], lambda data: data[:-9] + b"x" * 9])
def test_cut_and_damaged_gzip_is_named(harm: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(harm(gzip.compress((EXCERPTS / "mooncake.jsonl").read_bytes())))
    with pytest.raises(BadTrace, match=r"line \d+: the gzip data is (cut off|damaged)"):
        list(Trace(path))
    trace = Trace(path, skip_bad=True)
    assert 0 < len(list(trace)) <= 40
    assert trace.num_bad >= 1


def test_ragpulse_needs_the_lengths_of_its_chunks(tmp_path: Path) -> None:
    path, chunks = tmp_path / "rag.jsonl", tmp_path / "lengths"
    path.write_bytes(lines(RAG, RAG | {"hash_ids": {"history": [2]}}, RAG | {"hash_ids": []}))
    with pytest.raises(BadTrace, match=r"there is no file .*rag_chunks\.jsonl"):
        Trace(path)
    chunks.write_bytes(lines({"id": 1, "kind": "history", "token_length": 8}, {"id": 2, "kind": "history"}))
    with pytest.raises(BadTrace, match="lengths: line 2: token_length is missing"):
        Trace(path, chunks=chunks)
    trace = Trace(path, chunks=chunks, skip_bad=True)
    assert [request.input_tokens for request in trace] == [8]
    assert trace.num_bad == 3


def test_times_out_of_order_can_be_put_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines(*(MOONCAKE | {"timestamp": at} for at in (5, 3, 9, 0))))
    assert [request.time_s for request in Trace(path, sort=True)] == [0.0, 0.003, 0.005, 0.009]


def test_a_long_line_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LINE_BYTES_MAX", 200)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines(MOONCAKE) + b" " * 201 + b"\n")
    with pytest.raises(BadTrace, match="line 2: is longer than 200 bytes"):
        list(Trace(path))


def test_blocks_must_be_multiples_of_those_of_the_file() -> None:
    with pytest.raises(BadTrace, match="blocks of 700 tokens are no multiple of its own 512"):
        Trace(EXCERPTS / "mooncake.jsonl", block_tokens=700)
