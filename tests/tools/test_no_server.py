"""Every command where there is no server to ask: one clear line, the right status, no traceback."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest

from hicache.service import wire
from hicache.service.server import admin
from hicache.service.server.process import Server
from hicache.tools import owner
from hicache.tools.cli import main
from tests.service.serving import thread_server

NEVER_MADE = str(Path(gettempdir()) / f"hicache-trace-{os.getpid()}")
ASKING = [
    ["stats"], ["stats", "--json"], ["top", "--json"], ["tree"], ["sessions"], ["explain", "1,2"], ["pin", "1"],
    ["unpin", "1"], ["prefetch", "1"], ["evict", "--tier", "host", "--pages", "1"], ["flush", "--all"], ["verify"],
    ["trace", "record", NEVER_MADE],
]  # fmt: skip
"""One of each command that asks a server."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir(0o700)
    return path


def complaints(directory: Path, capsys: "pytest.CaptureFixture[str]") -> set[str]:
    """What all commands complain of, which is one line each and status 1."""
    found = set()
    for arguments in ASKING:
        status = main([*arguments, "--socket-dir", str(directory)])
        out, err = capsys.readouterr()
        assert (status, out, err.count("\n")) == (1, "", 1), arguments
        name, _, complaint = err.partition(": ")
        assert name == f"hicache {arguments[0]}"
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
