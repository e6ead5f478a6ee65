"""Every command where there is no server to ask: one clear line, the right status, no traceback."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile, gettempdir
from typing import Any, Final

import pytest

from hicache.service import wire
from hicache.service.client import connect
from hicache.service.errors import VersionMismatch
from hicache.service.server import admin
from hicache.service.server.process import Server
from hicache.tools import owner
from hicache.tools.cli import COMMANDS, main
from tests.repository import ROOT
from tests.service.serving import WAIT_S, arguments, thread_server
from tests.tools.parsers import options_of

NEVER_MADE: Final = str(Path(gettempdir()) / f"hicache-trace-{os.getpid()}")
ASKING: Final[dict[str, list[list[str]]]] = {
    "stats": [[], ["--json"]],
    "top": [["--json"]],
    "tree": [[], ["--json"]],
    "sessions": [[]],
    "explain": [["1,2"]],
    "pin": [["1"], ["1", "--dry-run"]],
    "unpin": [["1"]],
    "prefetch": [["1"]],
    "evict": [["--tier", "host", "--pages", "1"]],
    "flush": [["--all"], ["--all", "--json"]],
    "verify": [[]],
    "doctor": [["--json"]],
    "trace": [["record", NEVER_MADE]],
    "warm": [["PROMPTS", "--engine", "http://127.0.0.1:1"]],
}
"""Arguments of each command that asks a server; `PROMPTS` is a file with a prompt."""
OTHERS: Final = {
    "serve": "is the server",
    "demo": "has a cache of its own",
    "replay": "reads a recording",
    "bench": "starts what it measures",
    "completion": "knows its words",
}
"""Those that ask none, and why."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir(0o700)
    return path


def test_no_command_is_forgotten() -> None:
    asking = {name for name in COMMANDS if options_of(name) & {"--socket-dir", "--sidecar"}}
    assert asking - {"serve"} == ASKING.keys()
    assert COMMANDS.keys() == ASKING.keys() | OTHERS.keys()


def complaints(directory: Path, capsys: "pytest.CaptureFixture[str]") -> set[str]:
    """What all commands complain of, which is one line each and status 1."""
    found = set()
    with NamedTemporaryFile("w+") as prompts:
        print("a prompt", file=prompts, flush=True)
        for command, forms in ASKING.items():
            named = "--sidecar" if command == "warm" else "--socket-dir"
            for form in forms:
                words = [prompts.name if word == "PROMPTS" else word for word in form]
                status = main([command, *words, named, str(directory)])
                out, err = capsys.readouterr()
                assert status == 1, command
                if command == "doctor":  # which tells of more than that
                    assert err == ""
                    (complaint,) = [each["says"] for each in json.loads(out)["checks"] if each["subject"] == "server"]
                else:
                    assert (out, err.count("\n")) == ("", 1), command
                    name, _, complaint = err.partition(": ")
                    assert name == f"hicache {command}"
                found.add(complaint.strip().replace(str(directory), "DIR"))
    assert not os.path.exists(NEVER_MADE)
    return found


def test_no_server(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nobody = {"no server runs at DIR; name its directory with --socket-dir"}
    assert complaints(directory, capsys) == nobody
    directory.rmdir()
    assert complaints(directory, capsys) == nobody
    directory.write_text("a file")
    assert complaints(directory, capsys) == nobody


def test_without_a_directory_the_default_one_is_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["stats"]) == 1
    assert f"no server runs at {tmp_path}/hicache; " in capsys.readouterr().err


def test_a_socket_that_a_dead_server_left(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(directory / wire.ADMIN_SOCKET))
    assert complaints(directory, capsys) == {"the server at DIR has ended and left its socket behind: start it again"}


def test_what_is_no_socket_or_too_long_a_name(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / wire.ADMIN_SOCKET).write_text("")
    assert complaints(directory, capsys) == {"DIR/admin.sock is no socket"}
    deep = directory / ("d" * 100)
    deep.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(directory / "s"))
    (deep / wire.ADMIN_SOCKET).symlink_to(directory / "s")
    assert complaints(deep, capsys) == {"the server at DIR cannot be asked: AF_UNIX path too long"}
    foreign = directory / "\udcff"
    complaint = f"the server at {directory}/\\udcff cannot be asked: its path is not UTF-8"
    assert {each.replace("DIR", str(directory)) for each in complaints(foreign, capsys)} == {complaint}


@contextmanager
def listening(path: Path, greeting: bytes) -> Iterator[None]:
    """Something else that listens at a path, greets and hangs up."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)

        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, suppress(OSError):  # whoever only looked has gone
                    connection.sendall(greeting)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_socket_of_something_else(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hung_up = {"what listens at DIR hung up: it is no hicache server, or has ended"}
    for greeting in (b"", b"220 mail.example ESMTP\r\n"):
        with listening(directory / wire.ADMIN_SOCKET, greeting):
            assert complaints(directory, capsys) == hung_up
        (directory / wire.ADMIN_SOCKET).unlink()


def test_a_server_that_is_silent(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "ANSWER_S", 0.1)
    path = directory / wire.ADMIN_SOCKET
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(128)
        assert complaints(directory, capsys) == {"the server at DIR does not answer in time"}


def test_another_kind_of_server_and_another_version(
    tmp_path: Path, directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says: dict[str, Any] = {"protocol": 99}
    monkeypatch.setattr(Server, "status", lambda self: says)
    (tmp_path / "other").mkdir()
    with thread_server(tmp_path / "other") as server:
        (directory / wire.ADMIN_SOCKET).symlink_to(server.directory / wire.DATA_SOCKET)
        assert complaints(directory, capsys) == {
            "the server at DIR does not know this call: it is of another version, or another kind of server"
        }
        assert complaints(server.directory, capsys) == {
            f"the server at DIR speaks protocol 99, this hicache protocol {wire.PROTOCOL}"
        }
        says["protocol"] = wire.PROTOCOL  # of the same protocol, but older: it says less
        monkeypatch.setattr(admin, "moment_of", lambda cache: {})
        assert complaints(server.directory, capsys) == {
            "the server at DIR answers in a form that this hicache does not know"
        }
        del says["protocol"]
        assert complaints(server.directory, capsys) == {
            "the server at DIR answers in a form that this hicache does not know"
        }


STRANGER: Final = """
import sys
from hicache.service import wire
wire.PROTOCOL = 99
from hicache.tools.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""A server that speaks another protocol."""


def test_a_server_of_another_protocol_and_one_that_was_killed(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both as processes of their own, as after an upgrade and after the kernel ran out of memory."""
    with subprocess.Popen(
        [sys.executable, "-c", STRANGER, "serve", "--socket-dir", str(directory), *arguments()],
        cwd=ROOT, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"serving at ")
            assert complaints(directory, capsys) == {
                f"the server at DIR speaks protocol 99, this hicache protocol {wire.PROTOCOL}"
            }
            assert main(["doctor", "--socket-dir", str(directory)]) == 1
            assert "or start it again with this one\n" in capsys.readouterr().out
            with pytest.raises(VersionMismatch, match=f"protocol {wire.PROTOCOL} is asked for, 99 is spoken here"):
                connect(directory)
        finally:
            process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)
    assert complaints(directory, capsys) == {"the server at DIR has ended and left its socket behind: start it again"}
