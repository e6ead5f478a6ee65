"""`hicache replay`: what it prints agrees with what can be known otherwise, and wrong input is named."""

import dataclasses
import gc
import gzip
import json
import signal
import xml.etree.ElementTree as ElementTree
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pytest
from PIL import Image

from hicache.admissions import ADMISSIONS
from hicache.policies import NAMES
from hicache.policy.lru import LruPolicy
from hicache.prefill import PrefillCurve
from hicache.tools.cli import main
from hicache.tools.commands import replay as command
from hicache.tools.replay.blocks import BlockCache
from hicache.tools.replay.bound import min_hits
from hicache.tools.replay.generators import WORKLOADS, generate
from hicache.tools.replay.machine import NODES_MAX, Machine
from hicache.tools.replay.plot import HEIGHT, WIDTH
from hicache.tools.replay.readers import Request, Trace, whole_blocks
from hicache.tools.replay.router import ROUTERS
from hicache.tools.replay.run import replay
from hicache.write_policy import WritePolicy
from tests.tools.served import check_schema

EXCERPTS: Final = Path(__file__).parent / "traces"
TRACE: Final = str(EXCERPTS / "mooncake.jsonl")
CHAT: Final = [
    whole_blocks(each, 64) for each in generate(WORKLOADS["chat"], seed=1, num_requests=150, block_tokens=64)
]


def machine(device: int, host: int, nvme: int = 0, **changes: Any) -> Machine:
    return dataclasses.replace(
        Machine(block_tokens=64, token_bytes=4096, device_pages=device, host_pages=host, nvme_pages=nvme), **changes
    )


def shown(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    assert main(["replay", *map(str, args), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    check_schema("replay", found)
    return found


def test_names_of_the_command_line_are_those_of_the_code() -> None:
    assert set(NAMES) == set(command.POLICIES)
    assert set(ADMISSIONS) == set(command.ADMISSIONS)
    assert list(ROUTERS) == list(command.ROUTERS)
    assert NODES_MAX == command.NODES_MAX
    assert set(WORKLOADS) == set(command.WORKLOADS)
    assert {each.value for each in WritePolicy} == set(command.WRITE_POLICIES)


@pytest.mark.parametrize("policy", NAMES)
def test_with_room_for_all_of_it_everything_that_came_before_is_found(policy: str) -> None:
    # One at a time, so that no prompt comes before the one that it goes on from is stored.
    found = replay(CHAT, machine(4000, 4000, concurrency=1), policy)
    paths = [request.blocks.tolist() for request in CHAT]
    assert found.blocks_found == min_hits(paths, 1 << 30)
    assert found.num_refused == 0
    assert set(found.tokens_found) == {"device"}
    assert found.tokens == sum(request.input_tokens for request in CHAT)
    assert found.nvme_written_bytes == 0


def test_a_device_that_is_too_small_demotes_and_nothing_is_lost_below() -> None:
    paths = [request.blocks.tolist() for request in CHAT]
    found = replay(CHAT, machine(100, 300, 4000, concurrency=1), "lru")
    assert found.num_refused == 0
    assert found.blocks_found == min_hits(paths, 1 << 30)
    assert set(found.tokens_found) == {"device", "host", "nvme"}
    page_bytes = 64 * 4096
    assert all(copied % page_bytes == 0 for copied in found.lane_bytes.values())
    assert found.lane_bytes["nvme->host"] >= found.tokens_found["nvme"] // 64 * page_bytes
    assert found.nvme_written_bytes >= found.lane_bytes["host->nvme"] > 0


def test_the_same_replay_twice_is_the_same() -> None:
    assert replay(CHAT, machine(100, 200, 400), "value") == replay(CHAT, machine(100, 200, 400), "value")


def test_first_tokens_come_after_what_the_stated_speed_takes() -> None:
    spec = machine(4000, 4000, concurrency=1)
    first = CHAT[0]
    alone = replay([first], spec, "lru")
    steps = -(-len(first.blocks) // (spec.step_tokens // 64))
    assert alone.ttft_s == pytest.approx([spec.prefill.seconds(0, first.input_tokens, steps=steps)])
    again = replay([first, dataclasses.replace(first, time_s=1e3)], spec, "lru")
    known = 64 * len(first.blocks)
    assert 0 < known < first.input_tokens, "what is behind the last whole page is not kept"
    assert again.ttft_s[1] == pytest.approx(spec.prefill.seconds(known, first.input_tokens))
    # A slower disk is waited for longer.
    slow = [
        replay(CHAT, machine(100, 300, 4000, concurrency=1, nvme_read_bandwidth=rate), "lru").ttft(0.5)
        for rate in (6e9, 6e6)
    ]
    assert slow[1] > slow[0]


def test_what_does_not_fit_is_computed_and_counted() -> None:
    big = Request(0.0, CHAT[0].blocks, CHAT[0].input_tokens, 0)
    assert len(big.blocks) > 16
    found = replay([big], machine(8, 8), "lru")
    assert found.num_refused == 1
    assert found.ttft_s[0] > 0


@pytest.mark.parametrize(("kind", "goal"), [("chat", 0.85), ("few-shot", 0.95), ("multi-turn", 0.90), ("rag", 0.98)])
def test_made_up_loads_reach_what_their_kind_allows(kind: str, goal: float) -> None:
    requests = list(generate(WORKLOADS[kind], seed=0, num_requests=4000, block_tokens=64))
    assert [request.time_s for request in requests] == sorted(request.time_s for request in requests)
    # Half of what all its blocks take, under LRU.
    cache = BlockCache(LruPolicy(), len({block for request in requests for block in request.blocks.tolist()}) // 2)
    found = documents = 0
    for request in requests:
        tokens = min(64 * cache.request(request.blocks.tolist(), request.time_s), request.input_tokens)
        found += tokens
        documents += min(tokens, request.document_tokens)
    assert found >= goal * sum(request.input_tokens for request in requests)
    if kind == "rag":
        assert documents >= 0.99 * sum(request.document_tokens for request in requests)


def test_the_command_says_what_its_parts_do(capsys: pytest.CaptureFixture[str]) -> None:
    path = EXCERPTS / "mooncake.jsonl"
    found = shown(
        capsys, path, "--device", "20ktok", "--host", "40ktok", "--nvme", "100ktok", "--compare", "lru,s3-fifo"
    )
    requests = list(Trace(path))
    assert found["format"] == "hicache-replay"
    assert found["load"]["num_requests"] == 40
    assert found["load"]["tokens"] == 101_660
    assert found["machine"]["device_pages"] == 20_000 // 512
    expected = replay(requests, Machine(512, 128 << 10, 39, 78, 195), "lru")
    assert [each["policy"] for each in found["replays"]] == ["lru", "s3-fifo"]
    assert [each["router"] for each in found["replays"]] == [None, None]
    lru = found["replays"][0]
    assert lru["blocks_found"] == expected.blocks_found
    assert lru["tokens_found"] == expected.tokens_found
    assert lru["nodes"] == [{"requests": 40, "hit_rate": pytest.approx(expected.hit_rate)}]
    best = found["min_blocks_found"]
    paths = [whole_blocks(request, 512).blocks.tolist() for request in requests]
    assert best == min_hits(paths, 39 + 78 + 195)
    assert all(each["blocks_found_alone"] <= best for each in found["replays"])


def test_the_table_has_a_column_for_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--device", "100MiB", "--host", "1GiB", "--nvme", "0", "--token-bytes", "4KiB"]
    assert main(["replay", "--synthetic", "rag", "--limit", "20", *size, "--compare", "lru,slru"]) == 0
    printed = capsys.readouterr().out
    rows = {
        line[:28].strip(): line[28:].split()
        for line in printed.splitlines()
        if line.startswith(("tok", "TTFT", "  of"))
    }
    assert [text.replace(".", "").isdigit() for text in rows["tokens found"]] == [True, False, True, False]
    assert "of documents" in rows
    assert "rag (synthetic, seed 0): 20 requests" in printed


def test_the_plot_is_whole_and_names_its_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "curves.svg"
    found = shown(capsys, EXCERPTS / "mooncake.jsonl", "--device", "20ktok", "--host", "40ktok", "--nvme", "0",
                  "--compare", "lru,lrfu", "--plot", target)  # fmt: skip
    assert set(found["curves"]) == {"lru", "lrfu", "MIN"}
    for points in found["curves"].values():
        assert [capacity for capacity, _ in points] == sorted(capacity for capacity, _ in points)
        assert all(rate <= best for (_, rate), (_, best) in zip(points, found["curves"]["MIN"], strict=True))
    root = ElementTree.fromstring(target.read_text())
    texts = [each.text for each in root.iter() if each.tag.endswith("text")]
    assert {"lru", "lrfu", "MIN", "capacity in tokens"} <= set(texts)
    named = {each.get("stroke") for each in root.iter() if each.tag.endswith("polyline")}
    assert {"#0b6fb8", "#c2410c", "#8a8a8a"} < named
    assert sum(each.tag.endswith("circle") for each in root.iter()) == 2


def test_the_plot_as_png_shows_the_same_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "curves.png"
    shown(capsys, TRACE, "--device", "20ktok", "--host", "40ktok", "--compare", "lru,lrfu", "--plot", target)
    with Image.open(target) as image:
        assert (image.format, image.size) == ("PNG", (2 * WIDTH, 2 * HEIGHT))
        colours = {colour for _, colour in image.getcolors(1 << 24) or []}
    assert {(0x0B, 0x6F, 0xB8), (0xC2, 0x41, 0x0C), (0x8A, 0x8A, 0x8A), (0xFF, 0xFF, 0xFF)} <= colours


def test_without_pillow_png_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main(["replay", TRACE, "--plot", "curve.png"]) == 2
    assert "pip install hicache[plot]" in capsys.readouterr().err


def test_first_requests_only_and_bad_lines_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (EXCERPTS / "mooncake.jsonl").read_text().splitlines(keepends=True)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join([*lines[:5], "{\n", *lines[5:]]))
    assert shown(capsys, path, "--limit", 5)["load"]["num_requests"] == 5
    found = shown(capsys, path, "--limit", 7, "--skip-bad")["load"]
    assert (found["num_requests"], found["num_bad"]) == (7, 1)
    assert found["tokens"] == sum(request.input_tokens for request in islice(Trace(EXCERPTS / "mooncake.jsonl"), 7))


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ([], "either TRACE or --synthetic"),
        ([TRACE, "--synthetic", "chat"], "either TRACE or --synthetic"),
        (["nowhere.jsonl"], "nowhere.jsonl: there is no such file"),
        ([TRACE, "--policy", "best"], "--policy: invalid choice: 'best'"),
        ([TRACE, "--compare", "lru,best"], "--compare: unknown policy 'best'; known are lru, slru"),
        ([TRACE, "--compare", "lru,lru"], "--compare: a policy is named twice"),
        ([TRACE, "--device", "many"], "--device: 'many' is not a size"),
        ([TRACE, "--device", "xtok"], "--device: 'xtok' is not a size"),
        ([TRACE, "--device", "100tok"], "--device: holds no page of 512 tokens; 0 leaves the tier out"),
        ([TRACE, "--device", "2ktok"], "--device: 3 pages of 512 tokens are not within 8 to 67108864, or 0"),
        ([TRACE, "--nvme", "100tok"], "--nvme: holds no page of 512 tokens; 0 leaves the tier out"),
        ([TRACE, "--host", "0"], "--host: '0' is not within 1 byte"),
        ([TRACE, "--block", "700"], "blocks of 700 tokens are no multiple of its own 512"),
        ([TRACE, "--block", "0"], "--block: 0 is not within 1 to 65536"),
        ([TRACE, "--limit", "0"], "--limit: 0 is not within 1 to"),
        ([TRACE, "--pace", "nan"], "--pace: nan is not within"),
        ([TRACE, "--seed", "1"], "--seed: is for --synthetic loads"),
        ([TRACE, "--set", "turns=2"], "--set: is for --synthetic loads"),
        (["--synthetic", "chat", "--skip-bad"], "--skip-bad: is for a TRACE"),
        (["--synthetic", "chat", "--set", "speed=2"], "--set: unknown name 'speed'; chat has sessions_per_s=0.5"),
        (["--synthetic", "chat", "--set", "turns=few"], "--set: turns: 'few' is not a whole number"),
        (["--synthetic", "chat", "--set", "turns=0"], "--set: turns: 0 is not within 1 to 1000"),
        ([TRACE, "--nodes", "0"], "--nodes: 0 is not within 1 to 64"),
        ([TRACE, "--admission", "never"], "--admission: invalid choice: 'never'"),
        ([TRACE, "--exclusive", "--nvme", "0"], "--exclusive: is about NVMe, and there is none"),
        ([TRACE, "--write-policy", "write-through", "--nvme", "0"], "--write-policy: is about NVMe"),
        ([TRACE, "--admission", "predicted", "--nvme", "0"], "--admission: is about NVMe, and there is none"),
        ([TRACE, "--plot", "curve.pdf"], "--plot: curve.pdf does not end in .svg or .png"),
        ([TRACE, "--plot", "nowhere/curve.svg"], "--plot: there is no directory nowhere"),
        ([TRACE, "--exclusive", "--write-policy", "write-through"], "--exclusive: does not go with write-through"),
    ],
)
def test_bad_usage_is_one_line_with_the_flag(args: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *args]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert reason in printed.err


def test_a_bad_trace_ends_without_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress((EXCERPTS / "mooncake.jsonl").read_bytes())[:-300])
    assert main(["replay", str(path), "--plot", str(tmp_path / "curve.svg")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "the gzip data is cut off" in printed.err
    assert not (tmp_path / "curve.svg").exists()


@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_ends_it_with_one_line(
    number: int, status: int, word: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It comes in the midst of one request while others are under way."""
    seconds = PrefillCurve.seconds

    def interrupted(curve: PrefillCurve, start: int, stop: int, *, steps: int = 1) -> float:
        signal.raise_signal(number)
        return seconds(curve, start, stop, steps=steps)

    monkeypatch.setattr(PrefillCurve, "seconds", interrupted)
    assert main(["replay", "--synthetic", "chat", "--limit", "60", "--pace", "10"]) == status
    gc.collect()  # whatever was left behind would complain now
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", f"hicache replay: {word}\n")
