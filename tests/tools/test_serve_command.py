"""`hicache serve` as a process: what it says of itself, state by state, and to whom it goes on serving."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from hicache.service.client import Durability, connect
from hicache.tools.cli import main
from tests.repository import ROOT
from tests.service.serving import WAIT_S, arguments
from tests.service.stored import LAYOUT, PAGE, check, store
from tests.tools.served import check_schema

TOKENS: Final = range(2 * PAGE)


@contextmanager
def serving(directory: Path, *options: str, output: int = subprocess.PIPE) -> "Iterator[subprocess.Popen[bytes]]":
    """`hicache serve` on an NVMe tier of its own; ended if the block does not end it."""
    more: dict[str, Any] = {"nvme__dir": f'"{directory / "nvme"}"', "nvme__bytes": 64 * LAYOUT.page_bytes}
    with subprocess.Popen(
        [sys.executable, "-m", "hicache.tools", "serve", "--socket-dir", str(directory / "run"),
         *arguments(metrics__port=0, **more), *options],
        cwd=ROOT, stdout=output, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def state(line: bytes) -> dict[str, Any]:
    """An object of the output, which is of the schema."""
    told: dict[str, Any] = json.loads(line)
    check_schema("serve", told)
    return told


def test_every_state_is_a_line_of_json(tmp_path: Path) -> None:
    for number_of_start in range(2):
        with serving(tmp_path, "--json", "--http", "0", "--tcp", "127.0.0.1:0", *_plain_tcp()) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            starting, told = state(process.stdout.readline()), state(process.stdout.readline())
            assert (starting["state"], told["state"]) == ("starting", "serving")
            assert starting["server"]["pid"] == told["server"]["pid"] == process.pid
            assert told["prefixes"] == number_of_start, "what came back"
            assert told["tiers"]["host"]["capacity_bytes"] == 64 * LAYOUT.page_bytes
            assert told["tiers"]["nvme"]["used_bytes"] == number_of_start * 2 * LAYOUT.page_bytes
            for name in told["sockets"].values():
                assert (Path(told["socket_dir"]) / name).is_socket()
            assert told["tcp"].startswith("tcp://127.0.0.1:")
            assert "/#" in told["page"]
            assert told["metrics"].endswith("/metrics")
            with connect(Path(told["socket_dir"])) as client:
                if not number_of_start:
                    store(client, TOKENS, durability=Durability.WAIT)
                assert check(client, TOKENS) == 2 * PAGE
            process.send_signal(signal.SIGTERM)
            stopping, stopped = [state(line) for line in process.stdout.read().splitlines()]
            assert (stopping["state"], stopping["prefixes"]) == ("stopping", 1)
            assert (stopped["state"], stopped["seconds"] > told["seconds"]) == ("stopped", True)
            assert starting["time"] <= told["time"] <= stopping["time"] <= stopped["time"]
            assert (process.wait(WAIT_S), process.stderr.read()) == (0, b"")


def _plain_tcp() -> list[str]:
    return ["--set", "tcp.plain=true", "--set", f'tcp.token_sha256="{"0" * 64}"']


def test_who_wanted_to_know_may_leave(tmp_path: Path) -> None:
    """As in `hicache serve | head -1`: it goes on, and stops as ever."""
    with serving(tmp_path, "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        state(process.stdout.readline())
        state(process.stdout.readline())
        process.stdout.close()
        with connect(tmp_path / "run") as client:
            store(client, TOKENS)
        process.send_signal(signal.SIGTERM)
        assert (process.wait(WAIT_S), process.stderr.read()) == (0, b"")


def test_nobody_needs_to_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads the line that says where it serves: it serves all the same."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
            supervisor.bind(str(tmp_path / "notify"))
            supervisor.settimeout(WAIT_S)
            with serving(tmp_path, output=writer) as process:
                assert process.stderr is not None
                assert supervisor.recv(4096) == b"READY=1"
                with connect(tmp_path / "run") as client:
                    store(client, TOKENS)
                process.send_signal(signal.SIGTERM)
                assert (process.wait(WAIT_S), process.stderr.read()) == (0, b"")
    finally:
        os.close(writer)


def test_checked_settings_and_those_that_are_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--check", "--json", *arguments()]) == 0
    assert state(capsys.readouterr().out.encode())["state"] == "checked"
    assert main(["serve", "--json", *arguments(host_pages=0)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
