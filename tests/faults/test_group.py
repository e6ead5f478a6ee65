"""Engines of another user, in the group that may use the sockets: pages to read, but not to write (I34, I35)."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from hicache.errors import BadRequest
from hicache.service import wire
from hicache.service.client import connect
from hicache.service.sockets import SocketDirectory
from tests.faults.machine import need_root
from tests.repository import ROOT
from tests.service.serving import WAIT_S, ServerProcess, arguments
from tests.service.stored import PAGE, check, store
from tests.service.test_keeping import Keeping

pytestmark = [pytest.mark.faults, pytest.mark.machine]

GROUP: Final = 65534
ENGINE: Final = """
import os, socket, sys
from hicache.service.client import Prompt, connect
from hicache.service.client.transport import say_hello
from hicache.service.proto import hicache_pb2 as pb
from pathlib import Path
from tests.service.stored import NAMESPACE, PAGE, check, store
directory = Path(sys.argv[1])
with connect(directory) as client:
    assert store(client, range(3 * PAGE)) == 3 * PAGE
    print("stored", check(client, range(3 * PAGE)))
_, fds = say_hello(directory, pb.Hello(protocol=1), 10)
for fd in fds:
    for flags in (os.O_RDWR, os.O_WRONLY):
        try:
            os.open(f"/proc/self/fd/{fd}", flags)
            print("opened for writing")
        except PermissionError:
            print("refused")
for name in sys.argv[2:]:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(directory / name))
        print(name, "open")
    except OSError as error:
        print(name, type(error).__name__)
"""


GREEDY: Final = """
import sys
from hicache.service.client import connect
from hicache.service.errors import LimitReached
clients = []
try:
    while True:
        clients.append(connect(sys.argv[1], staging_bytes=0))
except LimitReached as refused:
    print(refused.field, len(clients), flush=True)
sys.stdin.read()
for client in clients:
    client.close()
"""
"""Begins sessions until one is refused, and holds them until its standard input ends."""


SILENT: Final = """
import socket, sys
connections = []
for _ in range(80):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1] + "/hello.sock")
    connections.append(connection)
print("connected", len(connections), flush=True)
sys.stdin.read()
"""
"""Connects over and over, says nothing, and waits for the end of its standard input."""


def _python(user: int, group: int, script: str, *arguments: object) -> list[str]:
    """A command that runs a script as a user."""
    rights = [f"--reuid={user}", f"--regid={group}", "--clear-groups", "--inh-caps=-all"]
    return ["setpriv", *rights, sys.executable, "-c", script, *map(str, arguments)]


def _as_user(user: int, group: int, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _python(user, group, ENGINE, directory, wire.ADMIN_SOCKET, wire.HEALTH_SOCKET),
        cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip


def test_the_group_has_its_engines_and_nobody_else_does() -> None:
    need_root()
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        home = Path(place)
        home.chmod(0o755)
        keeping = Keeping(home)
        stack.callback(keeping.close)
        keeping.start(socket_group=GROUP)
        mine = _as_user(65533, GROUP, keeping.run)
        assert mine.returncode == 0, mine.stderr
        assert mine.stdout.splitlines() == [
            f"stored {3 * PAGE}", *["refused"] * 4, "admin.sock PermissionError", "health.sock PermissionError",
        ]  # fmt: skip
        strangers = _as_user(65533, 65533, keeping.run)
        assert strangers.returncode == 1
        assert "Unreachable" in strangers.stderr
        with connect(keeping.run) as client:
            assert check(client, range(3 * PAGE)) == 3 * PAGE
        keeping.stop()


@contextmanager
def _holding(script: str, user: int, directory: Path) -> Iterator[str]:
    """A user's process that takes something until the block ends; what it says of that."""
    with subprocess.Popen(
        _python(user, GROUP, script, directory), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.communicate(timeout=WAIT_S)


def test_one_user_of_the_group_leaves_the_others_sessions_to_begin() -> None:
    """I33: where there are no tenants, also for the user who comes last."""
    need_root()
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        home = Path(place)
        home.chmod(0o755)
        server = ServerProcess(home, arguments(limits__max_sessions=8, socket_group=GROUP))
        stack.callback(server.stop)
        assert stack.enter_context(_holding(GREEDY, 65533, server.directory)) == "max_sessions 6"
        assert stack.enter_context(_holding(GREEDY, 65532, server.directory)) == "max_sessions 1"
        with connect(server.directory) as client:
            assert store(client, range(PAGE)) == PAGE


def test_one_user_of_the_group_leaves_the_others_hellos() -> None:
    """I26, I33: connections that say nothing are in nobody else's way."""
    need_root()
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        home = Path(place)
        home.chmod(0o755)
        server = ServerProcess(home, arguments(socket_group=GROUP))
        stack.callback(server.stop)
        assert stack.enter_context(_holding(SILENT, 65533, server.directory)) == "connected 80"
        for _ in range(3):
            with connect(server.directory) as client:
                assert check(client, range(PAGE)) == 0


def test_a_directory_of_another_group_or_for_all_is_refused(tmp_path: Path) -> None:
    need_root()
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    SocketDirectory(path, GROUP).close()
    assert (path.stat().st_gid, path.stat().st_mode & 0o777) == (GROUP, 0o710)
    SocketDirectory(path, GROUP).close()
    for group in (None, GROUP - 1):
        with pytest.raises(BadRequest, match="chmod 700"):
            SocketDirectory(path, group)
    path.chmod(0o711)
    with pytest.raises(BadRequest, match="chmod 700"):
        SocketDirectory(path, GROUP)
