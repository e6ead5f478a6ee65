"""Another user of the machine: neither the modes of the files nor the server itself let him in; and more connections
than anybody needs."""

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hicache.service import wire
from hicache.service.client import Prompt, connect
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.hello import HELLO_S
from hicache.service.sockets import SOCKETS
from tests.faults.machine import need_root
from tests.repository import ROOT
from tests.service.serving import WAIT_S, ServerProcess, arguments, thread_server
from tests.service.stored import NAMESPACE, PAGE, check, store
from tests.service.test_tcp import PLAIN, TOKEN

pytestmark = [pytest.mark.faults, pytest.mark.machine]

CONNECTIONS: Final = 100
"""At each socket: more than may say hello at a time."""
HANDSHAKE_S: Final = 10.0
"""How long a connection over TCP may take to say which HTTP it speaks."""

STRANGER: Final = """
import socket, sys
from hicache.errors import HicacheError
from hicache.service.client import connect
directory = sys.argv[1]
for name in sys.argv[2:]:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"{directory}/{name}")
        print(name, "open")
    except OSError as error:
        print(name, type(error).__name__)
try:
    connect(directory)
    print("let in")
except HicacheError as error:
    print(error.reason, error)
"""
"""Tries every socket, and then to begin a session; says what became of each."""


def _as_another_user(directory: Path) -> list[str]:
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
    done = subprocess.run(
        [*drop, sys.executable, "-c", STRANGER, str(directory), *SOCKETS],
        cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_another_user_is_not_let_in() -> None:
    """I33, I35: the directory and each socket are the owner's alone; where somebody has opened the directory and the
    hello socket to all, it is the server that asks who comes."""
    need_root()
    # Not below tmp_path, into which nobody but its owner may look.
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        home.chmod(0o755)
        server = ServerProcess(home, arguments())
        try:
            with connect(server.directory) as client:
                assert store(client, range(PAGE)) == PAGE
                *tried, session = _as_another_user(server.directory)
                assert tried == [f"{name} PermissionError" for name in SOCKETS]
                assert session.startswith(("forbidden", "unreachable")), session
                server.directory.chmod(0o755)
                *tried, session = _as_another_user(server.directory)
                assert tried == [f"{name} PermissionError" for name in SOCKETS]
                (server.directory / wire.HELLO_SOCKET).chmod(0o666)
                *tried, session = _as_another_user(server.directory)
                assert f"{wire.HELLO_SOCKET} open" in tried
                assert session.startswith("forbidden"), session
                assert check(client, range(PAGE)) == PAGE
        finally:
            assert server.stop() == 0
        assert server.errors() == ""


def test_more_connections_than_anybody_needs(tmp_path: Path) -> None:
    """I23, I31, F34: who connects and says nothing is hung up on, and until then others are served; once he has been,
    new ones are let in."""
    server = ServerProcess(tmp_path, arguments())
    try:
        with connect(server.directory) as client, ExitStack() as stack:
            store(client, range(PAGE))
            idle: dict[str, list[socket.socket]] = {name: [] for name in SOCKETS}
            for name in SOCKETS:
                for _ in range(CONNECTIONS):
                    connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                    connection.settimeout(WAIT_S)
                    connection.connect(str(server.directory / name))
                    idle[name].append(connection)
            assert check(client, range(PAGE)) == PAGE
            assert store(client, range(1000, 1000 + PAGE)) == PAGE
            with grpc.insecure_channel(wire.address(str(server.directory / wire.HEALTH_SOCKET))) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                assert health.Check(health_pb2.HealthCheckRequest(), timeout=5.0).status == 1
            with grpc.insecure_channel(wire.address(str(server.directory / wire.ADMIN_SOCKET))) as channel:
                inspect = channel.unary_stream("/hicache.v1.Admin/Inspect", bytes, pb.InspectPiece.FromString)
                assert list(inspect(pb.InspectRequest(view=pb.VIEW_STATS).SerializeToString(), timeout=5.0))
            for connection in idle[wire.HELLO_SOCKET]:
                connection.settimeout(HELLO_S + 5.0)
                assert connection.recv(4096) == b""
            with connect(server.directory) as another:
                assert another.lookup(Prompt(NAMESPACE, range(PAGE))).num_tokens == PAGE
    finally:
        assert server.stop() == 0
    assert server.errors() == ""


def test_connections_over_tcp_that_ask_nothing_are_closed(tmp_path: Path) -> None:
    """F27, F34: anybody on the network can open one, and each takes a descriptor. A session's own stays."""
    with thread_server(tmp_path, **PLAIN) as server, ExitStack() as stack:
        port = server.server.tcp_port
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(CONNECTIONS)]
        client = stack.enter_context(connect(f"tcp://127.0.0.1:{port}", token=TOKEN))
        assert store(client, range(PAGE)) == PAGE
        for connection in silent:
            connection.settimeout(HANDSHAKE_S + 10.0)
            while connection.recv(4096):  # it says which HTTP it speaks
                pass
        assert check(client, range(PAGE)) == PAGE
