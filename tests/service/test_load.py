"""Many client processes, killed or stopped at any moment: no wrong byte, nothing leaks, health answers."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any, Final

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hicache.service import wire
from hicache.service.client import connect
from hicache.service.proto import hicache_pb2 as pb
from tests.repository import ROOT
from tests.service.serving import WAIT_S, ServerProcess, arguments
from tests.service.stored import LAYOUT, PAGE, check, store

KILLS: Final = 5
"""Kills in a round; a process is stopped about half as often."""
CLIENTS: Final = 6
SEED: Final = 20_261_130


class Loaders:
    """Client processes; who is killed is replaced."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._num_begun = 0
        self.num_killed = 0
        self.running = [self._begin() for _ in range(CLIENTS)]

    def _begin(self) -> "subprocess.Popen[bytes]":
        self._num_begun += 1
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.service.loader", str(self._directory), str(SEED + self._num_begun)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        return process

    def replace(self, chosen: int) -> None:
        """Kill one, which has seen no wrong byte until then."""
        self.running[chosen].kill()
        assert _ended(self.running[chosen]) == -signal.SIGKILL
        self.num_killed += 1
        self.running[chosen] = self._begin()

    def end(self) -> list[int]:
        """Let all end by themselves; their statuses."""
        return [_ended(process) for process in self.running]


def _ended(process: "subprocess.Popen[bytes]") -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        return process.wait(WAIT_S)
    finally:
        process.kill()
        process.stdout.close()


def _inspect(server: ServerProcess) -> dict[str, Any]:
    with grpc.insecure_channel(wire.address(str(server.directory / wire.ADMIN_SOCKET))) as channel:
        call = channel.unary_stream("/hicache.v1.Admin/Inspect", _packed, pb.InspectPiece.FromString)
        pieces = call(pb.InspectRequest(view=pb.VIEW_STATS), timeout=WAIT_S)
        shown: dict[str, Any] = json.loads(b"".join([piece.json for piece in pieces]))
        return shown


def _packed(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _taken(server: ServerProcess) -> dict[str, int]:
    """What the server's process takes of the machine."""
    of = f"/proc/{server.process.pid}"
    fields = dict(line.split(":", 1) for line in Path(f"{of}/status").read_text().splitlines())
    return {
        "threads": len(os.listdir(f"{of}/task")),
        "files": len(os.listdir(f"{of}/fd")),
        "memory": int(fields["RssAnon"].split()[0]),
    }


def _load(server: ServerProcess, draw: random.Random) -> None:
    """Clients at work, some killed and some stopped for a moment; then all leave, and nothing of theirs is left."""
    loaders = Loaders(server.directory)
    try:
        with grpc.insecure_channel(wire.address(str(server.directory / wire.HEALTH_SOCKET))) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while loaders.num_killed < KILLS:
                assert health.Check(health_pb2.HealthCheckRequest(), timeout=2.0).status == 1
                chosen = draw.randrange(CLIENTS)
                if draw.random() < 0.3:
                    loaders.running[chosen].send_signal(signal.SIGSTOP)
                    _inspect(server)
                    loaders.running[chosen].send_signal(signal.SIGCONT)
                else:
                    loaders.replace(chosen)
    finally:
        statuses = loaders.end()
    assert statuses == [0] * CLIENTS
    until = monotonic() + 5.0
    while (shown := _inspect(server))["sessions"] and monotonic() < until:
        pass
    assert (shown["sessions"], shown["num_leases"], shown["counters"]["corrupt_pages"]) == ([], 0, {})


@pytest.mark.faults
@pytest.mark.slow
def test_clients_that_are_killed_and_stopped_at_random_cost_nobody_else(tmp_path: Path) -> None:
    """I01, I10, I21, I23, I31: and once every part of the server has been at work, a further round takes nothing more
    of the machine."""
    draw = random.Random(SEED)
    options = [
        *arguments(host_pages=48, nvme__bytes=512 * LAYOUT.page_bytes, times__lease_s=1.0),
        "--nvme-dir", str(tmp_path / "nvme"),
    ]  # fmt: skip
    server = ServerProcess(tmp_path, options)
    try:
        _load(server, draw)
        _load(server, draw)
        first = _taken(server)
        _load(server, draw)
        second = _taken(server)
        for name, most in (("threads", 4), ("files", 4), ("memory", first["memory"] // 20)):
            assert second[name] <= first[name] + most, (first, second)
        with connect(server.directory) as client:
            assert store(client, range(5000, 5000 + PAGE)) == PAGE
            assert check(client, range(5000, 5000 + PAGE)) == PAGE
    finally:
        status = server.stop()
    assert (status, server.errors()) == (0, "")
