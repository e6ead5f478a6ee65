"""`hicache doctor` about a server: what it says of one that is well, of one that is not there, and of settings."""

from pathlib import Path

import pytest

from hicache.service import wire
from hicache.service.server.process import Server
from tests.tools.served import Shell, known_server


def _by_subject(content: dict[str, object], verdict: str) -> dict[str, str]:
    checks = content["checks"]
    assert isinstance(checks, list)
    return {check["subject"]: check["says"] for check in checks if check["verdict"] == verdict}


def test_a_server_that_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with known_server(tmp_path) as (server, _):
        shell = Shell(server.directory, capsys)
        text = shell.text("doctor")
        content = shell.json("doctor")
        server.directory.chmod(0o710)  # as `socket_group` makes it
        shared = f" ok sockets DIR is this user's, and group {server.directory.stat().st_gid} may connect (mode 0710)"
        assert shared in shell.text("doctor")
    assert text.startswith("DIR\n ok packages hicache ")
    assert " ok sockets DIR is this user's alone (mode 0700)\n" in text
    assert content["healthy"]
    assert not _by_subject(content, "fail")
    said = _by_subject(content, "ok")
    assert said["tier host"] == "12.0 KiB of 256 KiB in use"
    assert said["health"] == "takes new sessions"
    assert said["server"].endswith(", 1 session")


def test_a_server_that_is_not_there_or_not_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = Shell(tmp_path, capsys)
    content = shell.json("doctor", status=1)
    assert _by_subject(content, "fail")["server"].startswith("no server runs at ")
    tmp_path.chmod(0o755)
    assert _by_subject(shell.json("doctor", status=1), "fail")["sockets"].startswith("others may enter ")
    asked = Server.status
    monkeypatch.setattr(Server, "status", lambda self: {**asked(self), "version": "0.0.1"})
    with known_server(tmp_path) as (server, _):
        (server.directory / wire.HEALTH_SOCKET).unlink()
        content = Shell(server.directory, capsys).json("doctor", status=1)
    assert _by_subject(content, "warn")["server"].startswith("version 0.0.1, up ")
    assert _by_subject(content, "fail") == {"health": "not so: it takes new sessions"}


def test_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = '[layout]\nnum_layers = 2\nnum_kv_heads = 1\nhead_dim = 16\ndtype = "float32"\npage_size = 16\n'
    disk = tmp_path / "disk"
    disk.mkdir()
    config = tmp_path / "hicache.toml"
    config.write_text(f'[host]\nbytes = "1MiB"\n[nvme]\ndir = ["{disk}", "{tmp_path}/new"]\nbytes = "1MiB"\n{layout}')
    shell = Shell(tmp_path, capsys)
    content = shell.json("doctor", "--config", str(config), status=1)
    assert _by_subject(content, "ok")["memory"].startswith("host.bytes is 1.00 MiB of ")
    assert _by_subject(content, "ok")["disk"].startswith(f"{disk} has ")
    assert _by_subject(content, "warn")["disk"] == f"{tmp_path}/new does not exist yet"
    config.write_text('[host]\nbytes = "many"\n' + layout)
    content = shell.json("doctor", "--config", str(config), status=1)
    assert _by_subject(content, "fail")["configuration"].startswith("host.bytes: ")
    config.write_text('[host]\nbytes = "4PiB"\n' + layout)
    assert shell("doctor", "--config", str(tmp_path / "none"))[0] == 2
