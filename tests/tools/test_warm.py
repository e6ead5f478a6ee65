"""`hicache warm` against a real HTTP server that speaks the engines' API."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

from hicache.service.client import Prompt
from hicache.tools import openai_engine
from hicache.tools.cli import main
from hicache.tools.commands import warm
from tests.service.stored import NAMESPACE, PAGE, store
from tests.tools.served import check_schema, known_server

Reply = tuple[int, Any]


class Engine:
    """An engine that answers what it is told to, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.keys: list[str | None] = []
        self.models = ["tiny"]
        self.failing: list[Reply] = []
        """What the next completions are answered with, in place of an answer."""
        self.computes: Callable[[Any], object] = lambda body: None
        self.says_cached = True
        self._seen: set[str] = set()
        handler = type("Handler", (_Handler,), {"engine": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="test-engine")
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, path: str, body: Any) -> Reply:
        """Status and JSON; None in place of a status breaks the connection."""
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": name} for name in self.models]}
        self.asked.append((path, body))
        if path == "/tokenize":
            return 200, {"tokens": [ord(each) for each in body["prompt"]]}
        if self.failing:
            return self.failing.pop(0)
        self.computes(body)
        text = json.dumps(body.get("prompt") or body.get("messages"))
        cached = len(text) if text in self._seen else 0
        self._seen.add(text)
        usage: dict[str, Any] = {"prompt_tokens": len(text), "completion_tokens": 1}
        if self.says_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return 200, {"choices": [{"text": "a"}], "usage": usage}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Nothing: whoever asked did not wait for the answer."""


class _Handler(BaseHTTPRequestHandler):
    engine: Engine

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        self.engine.keys.append(self.headers["Authorization"])
        status, reply = self.engine.answer(self.path, body)
        if not status:
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Nothing: standard error is the command's."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(openai_engine, "FIRST_WAIT_S", 0.001)
    running = Engine()
    try:
        yield running
    finally:
        running.close()


class Shell:
    """Runs the command in this process, with files of its own."""

    def __init__(self, directory: Path, capsys: "pytest.CaptureFixture[str]") -> None:
        self.directory = directory
        self._capsys = capsys

    def __call__(self, content: str, *arguments: str, name: str = "prompts.txt") -> tuple[int, str, str]:
        """The status, standard output and standard error."""
        file = self.directory / name
        file.write_text(content)
        status = main(["warm", str(file), *arguments])
        out, err = self._capsys.readouterr()
        return status, out, err.replace(str(self.directory), "DIR")

    def json(self, content: str, *arguments: str, status: int = 0, name: str = "prompts.txt") -> dict[str, Any]:
        got, out, err = self(content, *arguments, "--json", name=name)
        assert (got, [line for line in err.splitlines() if not line.startswith("prompts: ")]) == (status, [])
        told: dict[str, Any] = json.loads(out)
        check_schema("warm", told)
        return told


@pytest.fixture
def shell(tmp_path: Path, capsys: "pytest.CaptureFixture[str]") -> Shell:
    return Shell(tmp_path, capsys)


def test_each_prompt_is_asked_for_one_token(engine: Engine, shell: Shell) -> None:
    status, out, err = shell("first\n\n  second  \r\nfirst\n", "--engine", engine.url + "/v1/")
    assert (status, out.partition(" in ")[0]) == (0, "3 of 3 prompts computed: 26 tokens")
    assert out.endswith(", 7 of them found cached by the engine\n")
    assert err == "prompts: 1 of 3\nprompts: 2 of 3\n"
    rest = {"model": "tiny", "max_tokens": 1, "temperature": 0}
    assert engine.asked == [
        ("/v1/completions", {"prompt": prompt, **rest}) for prompt in ("first", "  second  ", "first")
    ]


def test_objects_are_texts_token_ids_and_chats(engine: Engine, shell: Shell) -> None:
    messages = [{"role": "user", "content": "Wer da?"}]
    lines: list[dict[str, Any]] = [{"prompt": "text"}, {"prompt": [1, 2, 3]}, {"messages": messages}]
    content = "".join(json.dumps(line) + "\n" for line in lines)
    told = shell.json(content, "--engine", engine.url, "--model", "other", name="prompts.jsonl")
    assert (told["computed"], told["model"], told["failures"], told["sidecar"], told["pinned"]) == (
        3, "other", [], None, None,
    )  # fmt: skip
    paths = ["/v1/completions", "/v1/completions", "/v1/chat/completions"]
    rest = {"model": "other", "max_tokens": 1, "temperature": 0}
    assert engine.asked == [(path, {**line, **rest}) for path, line in zip(paths, lines, strict=True)]


def test_standard_input_may_be_either(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO('{"prompt": "a"}\nb\n'))
    assert main(["warm", "-", "--engine", engine.url]) == 0
    assert [body["prompt"] for _, body in engine.asked] == ["a", "b"]
    assert capsys.readouterr().out.startswith("2 of 2 prompts computed")


def test_several_at_once(engine: Engine, shell: Shell) -> None:
    both = threading.Barrier(2, timeout=30)
    engine.computes = lambda body: both.wait()
    told = shell.json("a\nb\nc\nd\n", "--engine", engine.url, "--at-once", "2")
    assert told["computed"] == 4


def test_an_engine_that_does_not_say_what_was_cached(engine: Engine, shell: Shell) -> None:
    engine.says_cached = False
    assert shell.json("a\n", "--engine", engine.url)["cached_tokens"] is None


def test_a_key_goes_with_every_call(engine: Engine, shell: Shell) -> None:
    (shell.directory / "key").write_text("sesame\n")
    shell.json("a\n", "--engine", engine.url, "--api-key-file", str(shell.directory / "key"))
    assert engine.keys == ["Bearer sesame"] * 2


@pytest.mark.parametrize("failure", [(500, {"error": {"message": "busy"}}), (429, {"message": "slow"}), (0, None)])
def test_what_may_pass_is_tried_again(engine: Engine, shell: Shell, failure: Reply) -> None:
    engine.failing = [failure] * 3
    assert shell.json("a\n", "--engine", engine.url)["computed"] == 1
    assert len(engine.asked) == 4
    engine.failing = [failure] * 3
    told = shell.json("a\nb\n", "--engine", engine.url, "--retries", "2", status=1)
    assert told["computed"] == 1
    assert [each["line"] for each in told["failures"]] == [1]


def test_what_is_refused_is_not_tried_again_and_the_rest_goes_on(engine: Engine, shell: Shell) -> None:
    engine.failing = [(400, {"error": {"message": "the prompt is too long\x1b"}})]
    status, out, _ = shell("a\nb\n", "--engine", engine.url)
    assert status == 1
    assert len(engine.asked) == 2
    first, second = out.splitlines()
    assert first == "line 1 failed: /v1/completions was answered with status 400: the prompt is too long\\x1b"
    assert second.startswith("1 of 2 prompts computed")


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ((200, b"<html>"), "/v1/completions was answered with what is no JSON"),
        ((200, {"choices": []}), "the engine answered without saying how many tokens the prompt has"),
        ((404, b""), "/v1/completions was answered with status 404: nothing"),
    ],
)
def test_answers_of_no_engine_are_failures(engine: Engine, shell: Shell, reply: Reply, why: str) -> None:
    engine.failing = [reply]
    assert shell.json("a\n", "--engine", engine.url, status=1)["failures"] == [{"line": 1, "why": why}]


def test_more_failures_than_are_shown(engine: Engine, shell: Shell) -> None:
    engine.failing = [(400, {})] * 12
    status, out, _ = shell("a\n" * 12, "--engine", engine.url)
    assert status == 1
    assert len(out.splitlines()) == 12
    assert "\n2 more failed\n0 of 12 prompts computed" in out


def test_an_answer_longer_than_any_is_a_failure(
    engine: Engine, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_engine, "MAX_REPLY_BYTES", 1_000)
    engine.failing = [(200, {"text": "a" * 1_000})]
    assert shell.json("a\n", "--engine", engine.url, status=1)["computed"] == 0


def test_a_late_answer_is_a_failure(engine: Engine, shell: Shell) -> None:
    may_answer = threading.Event()
    engine.computes = lambda body: may_answer.wait(30)
    try:
        told = shell.json("a\n", "--engine", engine.url, "--timeout", "1", "--retries", "0", status=1)
    finally:
        may_answer.set()
    assert told["failures"] == [{"line": 1, "why": "no answer from 127.0.0.1: timed out"}]


def test_interrupted_it_ends_at_once(engine: Engine, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one call is under way, and another one waits to be repeated."""
    engine.failing = [(503, {})]
    monkeypatch.setattr(openai_engine, "FIRST_WAIT_S", 30.0)
    may_answer = threading.Event()
    engine.computes = lambda body: may_answer.wait(30)

    def interrupted(calls: Any) -> Any:
        while len(engine.asked) < 2:
            threading.Event().wait(0.001)
        raise KeyboardInterrupt

    monkeypatch.setattr(warm, "as_completed", interrupted)
    try:
        assert shell("a\nb\nc\n", "--engine", engine.url, "--at-once", "2")[::2] == (130, "hicache warm: interrupted\n")
    finally:
        may_answer.set()
    assert len(engine.asked) == 2


@pytest.mark.parametrize(
    ("models", "complaint"),
    [
        ([], "the engine serves no model"),
        (["a", "b\x1b"], "the engine serves 2 models; name one with --model: a, b\\x1b"),
    ],
)
def test_the_model_is_named_where_there_is_not_one(
    engine: Engine, shell: Shell, models: list[str], complaint: str
) -> None:
    engine.models = models
    assert shell("a\n", "--engine", engine.url) == (1, "", f"hicache warm: {complaint}\n")


def test_no_engine(engine: Engine, shell: Shell) -> None:
    url = engine.url
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        complaint = "hicache warm: no answer from 127.0.0.1: Connection refused\n"
        assert shell("a\n", "--engine", url) == (1, "", complaint)


@pytest.mark.parametrize(
    ("content", "arguments", "complaint"),
    [
        ("", [], "DIR/prompts.txt: there are no prompts"),
        ("a", ["--engine", "localhost:8000"], "--engine: 'localhost:8000' is no URL such as http://localhost:8000"),
        ("a", ["--engine", "http://u:p@h"], "--engine: a key belongs into --api-key-file, not into the URL"),
        ("a", ["--engine", "http://h:x"], "--engine: 'http://h:x' is no URL such as http://localhost:8000"),
        ("a", ["--pin"], "--pin and --namespace need --sidecar DIR"),
        ("a", ["--namespace", "a", "--sidecar", "x"], "--namespace is given together with --pin"),
        ("a", ["--api-key-file", "/nowhere"], "--api-key-file: /nowhere: No such file or directory"),
        ("a", ["--at-once", "x"], "argument --at-once: 'x' is not a whole number from 1 to 64"),
    ],
)
def test_bad_usage_is_one_line_and_nothing_is_asked(
    engine: Engine, shell: Shell, content: str, arguments: list[str], complaint: str
) -> None:
    arguments = arguments if "--engine" in arguments else ["--engine", engine.url, *arguments]
    hint = " (see hicache warm --help)" if complaint.startswith("argument ") else ""
    assert shell(content, *arguments) == (2, "", f"hicache warm: {complaint}{hint}\n")
    assert engine.keys == []


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "is no JSON: Expecting property name"),
        ("[1]", 'is not an object with "prompt" or "messages" alone'),
        ('{"prompt": "a", "model": "b"}', 'is not an object with "prompt" or "messages" alone'),
        ('{"prompt": ""}', "has neither text, nor token ids, nor messages"),
        ('{"prompt": [-1]}', "has neither text, nor token ids, nor messages"),
        ('{"prompt": [true]}', "has neither text, nor token ids, nor messages"),
        ('{"messages": []}', "has neither text, nor token ids, nor messages"),
        ('{"messages": [{"content": "a"}]}', "has a message without a role"),
    ],
)
def test_lines_that_are_no_prompts_are_bad_usage(engine: Engine, shell: Shell, line: str, complaint: str) -> None:
    status, out, err = shell(f'{{"prompt": "a"}}\n{line}\n', "--engine", engine.url, name="prompts.jsonl")
    assert (status, out) == (2, "")
    assert err.startswith(f"hicache warm: DIR/prompts.jsonl: line 2 {complaint}")
    assert engine.asked == []


def test_files_that_are_none(engine: Engine, shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    binary = shell.directory / "binary"
    binary.write_bytes(b"\xff\xfe")
    for file, why in ((binary, "is not text: invalid start byte"), (shell.directory / "none", "No such file")):
        assert main(["warm", str(file), "--engine", engine.url]) == 2
        assert why in capsys.readouterr().err


# -- with a sidecar ---------------------------------------------------------------------------------------------------

LINES: Final = "".join(json.dumps({"prompt": [*range(first, first + 2 * PAGE + 3)]}) + "\n" for first in (5_000, 6_000))
"""Two prompts of token ids with two whole pages each."""


def test_what_the_sidecar_has_is_told_and_pinned(engine: Engine, shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "sidecar").mkdir()
    with known_server(tmp_path / "sidecar") as (server, client):

        def compute(body: Any) -> None:
            tokens = body["prompt"][: 2 * PAGE]
            if not client.lookup(Prompt(NAMESPACE, tokens)).num_tokens:
                store(client, tokens)

        engine.computes = compute
        arguments = ["--engine", engine.url, "--sidecar", str(server.directory)]
        told = shell.json(LINES, *arguments, "--pin", name="prompts.jsonl")
        assert told["pinned"] == {"prompts": 2, "tokens": 4 * PAGE}
        assert told["sidecar"]["before"]["pages"] == {"host": 3, "nvme": 4}
        assert told["sidecar"]["after"]["pages"] == {"host": 7, "nvme": 4}
        status, out, _ = shell(LINES, *arguments, name="prompts.jsonl")
        assert status == 0
        assert "\nsidecar, host: 7 pages, 7 before\nsidecar, NVMe: 4 pages, 4 before\n" in out
        assert out.endswith("\nsidecar: 0 of 0 tokens that it was asked for meanwhile were found\n")
        status, out, _ = shell(LINES, *arguments, "--pin", name="prompts.jsonl")
        assert out.endswith("\npinned: 64 tokens, all of 2 prompts\n")


def test_what_does_not_come_to_the_sidecar_cannot_be_pinned(
    engine: Engine, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "SETTLE_S", 0.1)
    (tmp_path / "sidecar").mkdir()
    with known_server(tmp_path / "sidecar") as (server, _):
        told = shell.json(
            "text\n" + "b" * 20 + "\n", "--engine", engine.url, "--sidecar", str(server.directory), "--pin", status=1
        )
        # Nothing of four tokens is a whole page, so nothing of them is missing.
        assert told["pinned"] == {"prompts": 1, "tokens": 0}
        assert ("/tokenize", {"model": "tiny", "prompt": "text"}) in engine.asked


def test_no_sidecar(engine: Engine, shell: Shell, tmp_path: Path) -> None:
    status, _, err = shell("a\n", "--engine", engine.url, "--sidecar", str(tmp_path / "none"))
    assert (status, err) == (1, "hicache warm: no server runs at DIR/none; name its directory with --socket-dir\n")
    assert engine.asked == []
