"""Snapshot files: read back whole, damaged or foreign, and drawn."""

import json
import os
import random
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.tools import snapshot as snapshot_module
from hicache.tools.cli import main
from hicache.tools.exits import CommandFailed, UsageProblem
from hicache.tools.snapshot import load, wrap
from tests.tools import snapshots
from tests.tools.served import check_schema
from tests.tools.snapshots import content, node, write


def test_a_snapshot_is_read_back(tmp_path: Path) -> None:
    snapshot = load(write(tmp_path))
    assert list(snapshot.nodes) == [0, 1, 2, 3, 4, 5]
    assert [root.node_id for root in snapshot.roots] == [0]
    root = snapshot.roots[0]
    assert [child.node_id for child in root.children] == [1, 2]
    assert (root.subtree_nodes, root.subtree_bytes) == (6, 227 * snapshots.PAGE_BYTES)
    assert snapshot.nodes[4].residency == {"device": "absent", "host": "arriving", "nvme": "resident"}
    assert (snapshot.nodes[1].title, snapshot.nodes[4].title) == ("argparse", "")
    assert snapshot.num_damaged == 0


def refused(path: Path) -> str:
    with pytest.raises(UsageProblem) as caught:
        load(path)
    return str(caught.value)


def damaged(path: Path) -> str:
    with pytest.raises(CommandFailed) as caught:
        load(path)
    return str(caught.value)


def test_what_is_not_a_snapshot_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path / "missing").endswith("missing does not exist")
    assert refused(tmp_path).endswith("is a directory, not a snapshot file")
    for name, data in {"empty": b"", "text": b"hello", "list": b"[]", "other": b'{"a": 1}', "binary": b"\x80\xff" * 50,
                       "deep": b"[" * 100_000, "nan": b"NaN"}.items():  # fmt: skip
        path = tmp_path / name
        path.write_bytes(data)
        assert refused(path).endswith("is not a snapshot file"), name
    message = refused(write(tmp_path, content(version=2)))
    assert message.endswith("is a snapshot of version 2; this hicache reads version 1")


def test_a_snapshot_that_breaks_off_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path)
    data = path.read_bytes()
    for length in (60, len(data) // 2, len(data) - 3):
        path.write_bytes(data[:length])
        assert "is damaged: " in damaged(path)


@pytest.mark.parametrize("field", ["tiers", "lanes", "counters", "nodes", "time", "layout", "format"])
def test_a_snapshot_without_a_part_is_damaged(tmp_path: Path, field: str) -> None:
    values: list[Any] = [None, "x", -1, [], 10**40]
    for value in values:
        cache = snapshots.cache_snapshot() | {field: value}
        if (field, value) in (("nodes", []), ("time", -1)):
            continue
        assert "is damaged: " in damaged(write(tmp_path, content(cache=cache)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "1"), ("id", 0), ("parent", 77), ("parent", "0"), ("first_token", 16), ("num_tokens", 0),
        ("num_tokens", 99), ("tokens", [1, 2]), ("tokens", "x"), ("bytes", -1), ("age_s", -1.0),
        ("leases", True), ("uses", -1), ("uses", "x"), ("residency", {}),
        ("residency", {"device": "on fire", "host": "absent", "nvme": "absent"}),
        ("namespace", None),
    ],
)  # fmt: skip
def test_a_damaged_node_is_left_out_with_what_hangs_on_it(
    tmp_path: Path, field: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = snapshots.cache_snapshot()
    cache["nodes"][1][field] = value
    path = write(tmp_path, content(cache=cache))
    snapshot = load(path)
    assert list(snapshot.nodes) == [0, 2, 5]
    assert snapshot.num_damaged == 3
    assert main(["tree", str(path)]) == 1
    out, err = capsys.readouterr()
    assert "2 documents" in out
    assert err == "hicache tree: 3 prefixes of the file are damaged and left out\n"
    assert main(["stats", str(path)]) == 1


def test_a_file_of_a_writer_that_counted_no_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = snapshots.cache_snapshot()
    for each in cache["nodes"]:
        del each["uses"]
    path = str(write(tmp_path, content(cache=cache)))
    assert main(["tree", "--json", path]) == 0
    told = json.loads(capsys.readouterr().out)
    check_schema("tree", told)
    assert {each["uses"] for each in told["prefixes"]} == {None}
    assert main(["tree", path]) == 0
    assert "D H N        now       -      1" in capsys.readouterr().out


def test_a_pipe_is_read_and_what_never_ends_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path).read_bytes()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for limit, num_pieces, status in ((1 << 30, 1, 0), (len(data) - 1, 1, 1), (len(data), 1, 0), (1 << 20, 1 << 16, 1)):
        monkeypatch.setattr(snapshot_module, "MAX_FILE_BYTES", limit)
        thread = threading.Thread(target=_write, args=(pipe, data, num_pieces))
        thread.start()
        assert main(["stats", str(pipe)]) == status
        thread.join()
        err = capsys.readouterr().err
        assert err == "" if not status else err.startswith(f"hicache stats: {pipe} is longer than ")


def _write(pipe: Path, data: bytes, num_pieces: int) -> None:
    """Write for as long as somebody reads."""
    with suppress(BrokenPipeError), pipe.open("wb", buffering=0) as file:
        for _ in range(num_pieces):
            file.write(data)


def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text().replace('"age_s": 75.0', '"age_s": 1e999'))
    assert list(load(path).nodes) == [0, 1, 3, 4]
    path.write_text(path.read_text().replace('"age_s": 1e999', '"age_s": Infinity'))
    assert "Infinity is not JSON" in damaged(path)


def test_labels_are_optional_and_may_be_nonsense(tmp_path: Path) -> None:
    nonsense: list[Any] = [None, [], {"0": 7, "1": {"title": 5, "text": None}, "x": {}}]
    for labels in nonsense:
        snapshot = load(write(tmp_path, content(labels=labels)))
        assert all(each.title == each.text == "" for each in snapshot.nodes.values())


@given(st.randoms(use_true_random=False), st.integers(1, 5))
def test_random_damage_is_a_refusal_or_a_partial_view_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, rng: random.Random, changes: int
) -> None:
    path = tmp_path_factory.mktemp("damage") / "snapshot"
    data = bytearray(json.dumps(content()).encode())
    for _ in range(changes):
        data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)
    assert main(["tree", str(path)]) in (0, 1, 2)
    assert main(["stats", "--json", str(path)]) in (0, 1, 2)


def test_titles_say_what_the_prompts_of_a_prefix_share() -> None:
    system, json_text, csv_text = [900] * 16, [901] * 32, [902] * 32
    cache = snapshots.cache_snapshot()
    cache["nodes"] = [
        node(0, None, 0, 1, "+++") | {"tokens": system},
        node(1, 0, 1, 2, "+++") | {"tokens": json_text},
        node(2, 1, 3, 1, "+..") | {"tokens": [7] * 8 + [3] * 8},  # question and answer
        node(3, 1, 3, 2, "+..") | {"tokens": csv_text},  # another document behind the first
        node(4, 0, 1, 2, "+..") | {"tokens": csv_text},
        node(5, None, 0, 1, "+..") | {"tokens": [1] * 16},  # nobody's
    ]
    wrapped = wrap(
        cache,
        prompts=[
            (("json",), [*system, *json_text, *[7] * 8]),
            (("json", "csv"), [*system, *json_text, *csv_text]),
            (("csv",), [*system, *csv_text]),
        ],
        decode=lambda tokens: f"{len(tokens)}\n times {tokens[0]}",
    )
    titles = {node_id: label.get("title", "") for node_id, label in wrapped["labels"].items()}
    assert titles == {"0": "2 documents", "1": "json", "2": "json", "3": "json+csv", "4": "csv", "5": ""}
    assert wrapped["labels"]["1"]["text"] == "32 times 901"
    assert wrapped["cache"] is cache


HEADING = "{path}  taken 2026-05-28 20:26:40 UTC, float32 pages of 16 tokens"


def test_the_tree_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    assert main(["tree", str(path)]) == 0
    assert capsys.readouterr().out == (
        HEADING.format(path=path)
        + """

  device      42.2 MiB of 70.3 MiB  ███████████████████▎············  60.0%         60 of 100 pages
  host         141 MiB of 141 MiB   ████████████████████████████████ 100.0%        200 of 200 pages
  NVMe         720 KiB of 281 MiB   ▏·······························   0.2%          1 of 400 pages

namespace 8a8a8a8a8a8a8a8a…: 6 prefixes, 160 MiB
                                                              tokens      bytes  tiers   last use    uses leases
└─ 2 documents                                                    48   2.11 MiB  D H N        now      41      1
   ├─ evil\\x1b[31m\\nname                                       1,920   84.4 MiB  . H N 1 min 15 s   1,200      -
   │  tokens 5000 5001 5002 5003 …                                16    720 KiB  . . N 1 h 07 min       -      -
   └─ argparse                                                 1,600   70.3 MiB  D H N     2.50 s       -      1
      ├─ argparse                                                 32   1.41 MiB  D . .     2.50 s       -      1
      └─ tokens 4000 4001 4002 4003 …                             16    720 KiB  . h N 1 h 07 min       -      -
"""
    )


def test_depth_and_width_hide_the_rest_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path))
    assert main(["tree", path, "--depth", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("5 more prefixes, 158 MiB")
    assert main(["tree", path, "--width", "1"]) == 0
    last = capsys.readouterr().out.splitlines()[-2:]
    assert "tokens 5000 5001" in last[0]
    assert "… 3 more prefixes" in last[1]
    assert main(["tree", "--json", path, "--width", "1", "--depth", "2"]) == 0
    prefixes = json.loads(capsys.readouterr().out)["prefixes"]
    assert [(each["id"], each["depth"], each["hidden"]) for each in prefixes] == [(0, 1, 3), (2, 2, 1)]


def test_the_text_of_a_prefix_is_shown_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path))
    assert main(["tree", "--snapshot", path, "--text"]) == 0
    out = capsys.readouterr().out
    assert "text\\x07 with a bell" in out
    assert "NAME argparse - Command" in out
    assert main(["tree", "--snapshot", path, "--text", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prefixes"][0]["text"] == "system You are a careful assistant."


def test_tokens_are_decoded_with_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"zero": 0, "one": 1, "two": 2}, unk_token="zero")).save(str(tmp_path / "tokenizer.json"))
    path = str(write(tmp_path))
    assert main(["tree", path, "--tokenizer", str(tmp_path), "--json"]) == 0
    texts = [each["text"] for each in json.loads(capsys.readouterr().out)["prefixes"]]
    assert texts[0] == "zero one two"  # node 0 has the tokens 0 to 47, of which the tokenizer knows three
    assert texts[1] == ""
    (tmp_path / "tokenizer.json").write_text("{")
    assert main(["tree", path, "--tokenizer", str(tmp_path)]) == 2
    assert "is not a tokenizer" in capsys.readouterr().err
    assert main(["tree", path, "--tokenizer", str(tmp_path / "nowhere")]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


def test_stats_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    assert main(["stats", "--snapshot", str(path)]) == 0
    assert capsys.readouterr().out == (
        HEADING.format(path=path)
        + """

Tiers
  device      42.2 MiB of 70.3 MiB  ███████████████████▎············  60.0%         60 of 100 pages
  host         141 MiB of 141 MiB   ████████████████████████████████ 100.0%        200 of 200 pages
  NVMe         720 KiB of 281 MiB   ▏·······························   0.2%          1 of 400 pages

Lanes
                         moved      pages   failed      busy        speed
  device → host       7.03 MiB         10        0   5.00 ms   1.40 GiB/s
  NVMe → host         2.81 MiB          4        1   2.00 ms            -

Counters
  lookups                     12
  hits                        9
  tokens asked                20,000
  tokens by tier              device 9,000, host 1,000
  evicted pages               none
  prefixes                    6
"""
    )
    assert main(["stats", "--json", str(path)]) == 0
    form = json.loads(capsys.readouterr().out)
    assert (form["format"], form["version"], form["num_prefixes"], form["num_damaged"]) == ("hicache-stats", 1, 6, 0)
    assert form["lanes"] == snapshots.cache_snapshot()["lanes"]
    assert form["tiers"] == snapshots.cache_snapshot()["tiers"]


def test_an_empty_cache_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path, content(cache=snapshots.cache_snapshot() | {"nodes": []})))
    assert main(["tree", path]) == 0
    assert "nothing is cached" in capsys.readouterr().out


def test_a_long_chain_and_a_very_deep_tree_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = [node(index, index - 1 if index else None, index, 1, "+..") for index in range(3_000)]
    path = str(write(tmp_path, content(cache=snapshots.cache_snapshot() | {"nodes": chain}, labels={})))
    assert main(["tree", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3_000 + 8
    assert lines[-1].startswith("   tokens 2999000")
    # Each has a sibling that is smaller: now every level is one rail further in.
    deep = [
        node(2 * level + side, 2 * (level - 1) if level else None, level, 2 - side, "+..")
        | ({"first_token": 32 * level})
        for level in range(1_000)
        for side in range(2)
    ]
    path = str(write(tmp_path, content(cache=snapshots.cache_snapshot() | {"nodes": deep}, labels={})))
    assert main(["tree", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2_000 + 8
    assert max(map(len, lines[1:])) <= 120
    assert any(line.startswith("1000└─ tokens") for line in lines)


@pytest.mark.parametrize("command", ["tree", "stats"])
def test_one_file_may_be_named(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "a", "--snapshot", "b"]) == 2
    assert capsys.readouterr().err == f"hicache {command}: name one snapshot file\n"
    assert main([command, str(tmp_path / "\x1b[31m")]) == 2
    assert capsys.readouterr().err.endswith("/\\x1b[31m does not exist\n")
