"""The demo from end to end, on a small model with random weights: real tiers, real files, real attention."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.tools.cli import main
from hicache.tools.demo.compare import plain_answer
from hicache.tools.demo.stdlib import SOURCES, render
from hicache.tools.snapshot import load
from tests.tools.served import check_schema
from tests.tools.test_cli import ENVIRONMENT, everything_below
from tests.tools.tiny_model import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory."""
    return write_model(tmp_path_factory.mktemp("tiny"), [render(source.module) for source in SOURCES[:4]])


@dataclasses.dataclass
class Run:
    """One run of the demo as a process, and all it left."""

    process: "subprocess.CompletedProcess[str]"
    result: dict[str, Any]
    snapshot: Path
    temporary: Path


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demo with its own documents, in quick mode."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "tmp").mkdir()
    arguments = [
        "demo",
        "--quick",
        "--model",
        str(model),
        "--json",
        "run.json",
        "--snapshot",
        "run.snapshot",
        "--seed",
        "3",
    ]
    process = subprocess.run(
        [sys.executable, "-m", "hicache.tools", *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env=ENVIRONMENT | {"TMPDIR": str(folder / "tmp"), "PYTHONWARNINGS": "ignore"}, timeout=280,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    assert sorted(os.listdir(folder)) == ["run.json", "run.snapshot", "tmp"]
    return Run(process, json.loads((folder / "run.json").read_text()), folder / "run.snapshot", folder / "tmp")


def test_it_serves_from_every_tier_and_its_answers_are_the_plain_ones(run: Run) -> None:
    summary = run.result["summary"]
    assert min(summary["tokens"].values()) > 0
    assert summary["identical_outputs"]["compared"] >= 5
    assert summary["identical_outputs"]["equal"] + summary["identical_outputs"]["near_ties"] >= 5
    assert summary["identical_outputs"]["max_logit_difference"] < 1e-3
    assert summary["ok"] is True
    assert run.process.stderr == ""
    assert f"identical outputs: {summary['identical_outputs']['equal']}/" in run.process.stdout


def test_every_kind_of_request_and_the_oversized_one_were_compared(run: Run) -> None:
    by_number = {request["number"]: request for request in run.result["requests"]}
    compared = [by_number[comparison["number"]] for comparison in run.result["comparisons"]]
    assert {request["served_by"] for request in compared} >= {request["served_by"] for request in by_number.values()}
    oversized = [request for request in compared if request["oversized"]]
    assert len(oversized) == 1
    model, budgets = run.result["model"], run.result["budgets"]
    assert oversized[0]["prompt_tokens"] * model["token_bytes"] > budgets["device_bytes"]
    assert len(oversized[0]["documents"]) > 1


def test_every_request_has_a_line_and_adds_up(run: Run) -> None:
    requests = run.result["requests"]
    assert [request["number"] for request in requests] == list(range(1, 16))
    for request in requests:
        assert sum(request["tokens"].values()) == request["prompt_tokens"]
        assert request["tokens"]["recomputed"] >= 1
        assert 0 < request["ttft_s"] <= request["total_s"]
        assert len(request["answer_tokens"]) <= 8
        assert f"{request['number']:>2}/15" in run.process.stdout
    assert {document["title"] for document in run.result["documents"]} == {
        title for request in requests if not request["oversized"] for title in request["documents"]
    }
    assert all(1_500 <= document["tokens"] <= 3_000 for document in run.result["documents"])


def test_what_was_reported_as_read_from_nvme_was_read_from_the_device(run: Run) -> None:
    io = run.result["summary"]["device_io"]
    assert io["nvme_lane_read_bytes"] > 0
    if io["read_bytes"] is not None and _is_on_a_disk(run.temporary):
        assert io["read_bytes"] >= io["nvme_lane_read_bytes"] + io["nvme_streamed_bytes"]


def _is_on_a_disk(folder: Path) -> bool:
    """Whether files of `folder` lie on a block device, and not in memory."""
    return os.path.exists(f"/sys/dev/block/{os.major(folder.stat().st_dev)}:{os.minor(folder.stat().st_dev)}")


def test_nothing_temporary_stays(run: Run) -> None:
    assert everything_below(run.temporary) == []


def test_the_snapshot_can_be_looked_at(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = load(run.snapshot)
    assert snapshot.num_damaged == 0
    assert len(snapshot.nodes) > len(run.result["documents"])
    titles = {document["title"] for document in run.result["documents"]}
    assert titles <= {node.title for node in snapshot.nodes.values()}
    assert any(node.text for node in snapshot.nodes.values())
    # What the tree says per tier is what the tiers say.
    for tier, values in snapshot.tiers.items():
        in_tree = sum(node.size_bytes for node in snapshot.nodes.values() if node.residency[tier] == "resident")
        assert in_tree == values["used_bytes"]
    assert main(["tree", str(run.snapshot), "--text"]) == 0
    assert "documents" in capsys.readouterr().out
    assert main(["stats", "--json", "--snapshot", str(run.snapshot)]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert stats["counters"]["lookups"] == 15
    assert {lane: values["bytes"] for lane, values in stats["lanes"].items()} == run.result["summary"]["bytes_by_lane"]


def test_own_documents_of_any_length_are_asked_about(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.txt").write_text("x")
    (docs / "b.md").write_text("One line after the other.\n" * 30)
    (docs / "long.txt").write_text("".join(f"Line {number} of a long text.\n" for number in range(6_000)))
    (docs / "void.txt").write_text("\n")
    (tmp_path / "questions").write_text("What is it?\nWhy?\n")
    status = main([
        "demo", "--docs", str(docs), "--questions", str(tmp_path / "questions"), "--model", str(model), "--quick",
        "--requests", "8", "--max-new-tokens", "4", "--nvme-dir", str(tmp_path / "nvme"),
        "--json", str(tmp_path / "out"),
    ])  # fmt: skip
    out = capsys.readouterr().out
    assert status == 0, out
    assert "note: 1 empty file left out: void.txt" in out
    assert "note: long.txt is longer than the model's context: cut to " in out
    result = json.loads((tmp_path / "out").read_text())
    check_schema("demo", result)
    assert [document["title"] for document in result["documents"]] == ["a.txt", "b.md", "long.txt"]
    assert {request["question"] for request in result["requests"]} == {"What is it?", "Why?"}
    assert max(request["prompt_tokens"] for request in result["requests"]) <= 8_192 - 4
    assert len(list((tmp_path / "nvme").iterdir())) >= 1, "the user's directory stays"


def test_a_wrong_answer_is_a_failure(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def other_answer(*args: Any) -> Any:
        plain = plain_answer(*args)
        tokens = tuple(reversed(plain.tokens))
        return dataclasses.replace(plain, tokens=(tokens[0] + 1, *tokens[1:]))

    monkeypatch.setattr("hicache.tools.demo.run.plain_answer", other_answer)
    (tmp_path / "a.txt").write_text("A text.\n" * 40)
    arguments = ["--docs", str(tmp_path), "--model", str(model), "--requests", "2", "--json", str(tmp_path / "out")]
    status = main(["demo", *arguments])
    out = capsys.readouterr().out
    assert status == 1, out
    assert "different at token 1" in out
    result = json.loads((tmp_path / "out").read_text())
    check_schema("demo", result)
    assert result["summary"]["ok"] is False
    assert result["comparisons"][0]["verdict"] == "different"


@pytest.fixture
def docs(tmp_path: Path) -> Iterator[Path]:
    """A directory with a document, in which nothing may appear."""
    (tmp_path / "a.txt").write_text("A text.\n")
    before = everything_below(tmp_path)
    yield tmp_path
    assert everything_below(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--device-bytes", "100"], "--device-bytes: 100 B is smaller than one page of 16 tokens (8.00 KiB)"),
        (["--device-bytes", "9KiB"], "--device-bytes: 9.00 KiB is less than 8 times one page of 16 tokens (8.00 KiB)"),
        (["--host-bytes", "8191"], "--host-bytes: 8.00 KiB is smaller than one page of 16 tokens (8.00 KiB)"),
        (["--host-bytes", "100TiB"], "the tiers in memory need 100 TiB of "),
        (["--device", "cuda:99"], "--device: there is no cuda:99 here: "),
        (["--device", "abacus"], "--device: abacus is not a device such as cpu or cuda:0"),
        (["--device", "meta"], "--device: meta is neither cpu nor cuda"),
    ],
)
def test_what_the_model_makes_impossible_is_refused_before_anything_is_made(
    model: Path, docs: Path, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--docs", str(docs), "--model", str(model), "--nvme-dir", str(docs / "nvme"), *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"hicache demo: {complaint}")
    assert err.count("\n") == 1


def test_a_directory_that_others_may_write_to_is_refused(
    model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    open_to_all = tmp_path_factory.mktemp("nvme")
    open_to_all.chmod(0o777)
    assert main(["demo", "--docs", str(docs), "--model", str(model), "--nvme-dir", str(open_to_all)]) == 2
    err = capsys.readouterr().err
    assert err == f"hicache demo: nvme: {open_to_all}: others may write to it (mode 0777); use mode 0700\n"
    assert list(open_to_all.iterdir()) == []


@pytest.mark.parametrize(
    "damage", ["no config", "bad config", "foreign config", "no tokenizer", "no weights", "short context"]
)
def test_a_directory_without_a_usable_model_is_refused(
    model: Path, docs: Path, damage: str, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path_factory.mktemp("model")
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    match damage:
        case "no config":
            (broken / "config.json").unlink()
        case "bad config":
            (broken / "config.json").write_text("{")
        case "foreign config":
            (broken / "config.json").write_text('{"model_type": "abacus"}')
        case "no tokenizer":
            (broken / "tokenizer.json").unlink()
            (broken / "tokenizer_config.json").unlink()
        case "no weights":
            (broken / "model.safetensors").unlink()
        case "short context":
            (broken / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    assert main(["demo", "--docs", str(docs), "--model", str(broken), "--nvme-dir", str(docs / "nvme")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("hicache demo: --model: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGHUP, 129, "terminated")]
)
def test_stopping_it_cleans_up_with_one_line(model: Path, tmp_path: Path, number: int, status: int, word: str) -> None:
    (tmp_path / "tmp").mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "hicache.tools", "demo", "--model", str(model), "--requests", "400"],
        env=ENVIRONMENT | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        # The first request has been answered: the tiers are open.
        assert any(line.startswith("   1/401") for line in process.stdout)
        assert everything_below(tmp_path / "tmp") != []
        process.send_signal(number)
        process.stdout.read()
        assert process.stderr.read() == f"hicache demo: {word}\n"
        assert process.wait(60) == status
    assert everything_below(tmp_path / "tmp") == []


def test_a_reader_that_leaves_stops_the_demo_quietly(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "hicache.tools", "demo", "--model", str(model), "--requests", "400"],
        env=ENVIRONMENT | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "reading the documents\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 1
    assert everything_below(tmp_path / "tmp") == []
