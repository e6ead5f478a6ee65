"""The socket directory: whose it must be, what is in the way, and what is left over."""

import fcntl
import os
import socket
from pathlib import Path

import pytest

from hicache.errors import BadRequest
from hicache.service.client import connect
from hicache.service.sockets import SOCKETS, SocketDirectory, default_directory
from hicache.tools.cli import main


def test_a_missing_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    claimed = SocketDirectory(tmp_path / "run")
    try:
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
        assert claimed / "data.sock" == str(tmp_path / "run" / "data.sock")
    finally:
        claimed.close()
    assert list(tmp_path.iterdir()) == [], "no server came of it"


def test_a_directory_in_which_a_server_ran_stays(tmp_path: Path) -> None:
    (tmp_path / "found").mkdir(mode=0o700)
    SocketDirectory(tmp_path / "found").close()
    claimed = SocketDirectory(tmp_path / "made")
    claimed.keep()
    claimed.close()
    for name in ("found", "made"):
        assert [path.name for path in (tmp_path / name).iterdir()] == ["lock"]


def test_a_lock_that_was_given_up_meanwhile_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A server that cannot start makes the directory and its lock. 2. Another one opens the lock. 3. The first
    removes both and lets go. 4. The other one locks what no third would find."""
    first, lock = SocketDirectory(tmp_path / "run"), fcntl.flock

    def given_up_before(fd: int, operation: int) -> None:
        first.close()
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", given_up_before)
    with pytest.raises(BadRequest, match="try again"):
        SocketDirectory(tmp_path / "run")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o701, 0o777])
def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    with pytest.raises(BadRequest, match="others may enter"):
        SocketDirectory(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    os.chown(tmp_path / "run", 65534, 65534)
    with pytest.raises(BadRequest, match="belongs to user 65534"):
        SocketDirectory(tmp_path / "run")


def test_a_link_to_a_directory_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(BadRequest, match="socket_dir"):
            SocketDirectory(tmp_path / name)
    with pytest.raises(BadRequest, match="cannot be made"):
        SocketDirectory(tmp_path / "missing" / "run")
    with pytest.raises(BadRequest, match="too long"):
        SocketDirectory(tmp_path / ("x" * 100))


def test_a_second_server_is_refused_and_the_first_keeps_its_sockets(tmp_path: Path) -> None:
    claimed = SocketDirectory(tmp_path / "run")
    claimed.keep()
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(claimed / "data.sock")
            listener.listen()
            with pytest.raises(BadRequest, match="a server runs there already"):
                SocketDirectory(tmp_path / "run")
            assert (tmp_path / "run" / "data.sock").is_socket()
    finally:
        claimed.close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


def test_sockets_that_nobody_listens_on_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    for name in SOCKETS:
        with socket.socket(socket.AF_UNIX) as left_over:
            left_over.bind(str(tmp_path / "run" / name))
    claimed = SocketDirectory(tmp_path / "run")
    try:
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
    finally:
        claimed.close()


def test_a_socket_that_a_stranger_listens_on_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(tmp_path / "run" / "data.sock"))
        stranger.listen()
        with pytest.raises(BadRequest, match="in use by another program"):
            SocketDirectory(tmp_path / "run")
        assert (tmp_path / "run" / "data.sock").is_socket()


def test_a_file_where_a_socket_belongs_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "hello.sock").write_text("mine")
    with pytest.raises(BadRequest, match="in the way"):
        SocketDirectory(tmp_path / "run")
    assert (tmp_path / "run" / "hello.sock").read_text() == "mine"


def test_a_default_directory_that_somebody_else_has_made_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everybody may make one in the directory for temporary files, and wait there for prompts."""
    somebody = os.getuid()
    user = somebody + 3_000_000_000 + os.getpid()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: user)
    path = default_directory()
    assert path == Path(f"/tmp/hicache-{user}")
    path.mkdir(0o700)
    try:
        with pytest.raises(BadRequest, match=rf"^socket_dir: {path}: belongs to user {somebody}; remove it"):
            connect()
        assert main(["stats"]) == 1
        assert capsys.readouterr().err.startswith(f"hicache stats: socket_dir: {path}: belongs to user {somebody}")
    finally:
        path.rmdir()
