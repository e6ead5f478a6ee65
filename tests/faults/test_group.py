"""Engines of another user, in the group that may use the sockets: pages to read, but not to write (I34, I35)."""

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from hicache.errors import BadRequest
from hicache.service import wire
from hicache.service.client import connect
from hicache.service.sockets import SocketDirectory
from tests.faults.machine import need_root
from tests.repository import ROOT
from tests.service.serving import WAIT_S
from tests.service.stored import PAGE, check
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


def _as_user(user: int, group: int, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--inh-caps=-all", sys.executable, "-c",
         ENGINE, str(directory), wire.ADMIN_SOCKET, wire.HEALTH_SOCKET],
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
