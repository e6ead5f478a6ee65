"""An arena that outlives its server: with a supervisor of the test's own, and servers in processes of their own."""

import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from hicache.errors import LeaseExpired, TierUnavailable
from hicache.service.client import Client, Prompt, connect
from hicache.service.client.transport import say_hello
from hicache.service.proto import hicache_pb2 as pb
from hicache.tier import HOST, TierId
from hicache.tiers.arena import Arena
from tests.repository import ROOT
from tests.service.serving import WAIT_S, arguments
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, check, page_bytes, store

FIRST: Final = range(5 * PAGE + 3)
SECOND: Final = [*range(2 * PAGE), *range(9000, 9000 + 3 * PAGE)]
"""Shares two pages with the first."""

START: Final = """
import os, sys
inherited = [int(fd) for fd in sys.argv[1].split(",") if fd]
high = [os.dup(os.dup(os.dup(os.dup(os.dup(os.dup(fd)))))) for fd in inherited]
for place, fd in enumerate(high, start=3):
    os.dup2(fd, place)
os.environ.update(LISTEN_FDS=str(len(inherited)), LISTEN_PID=str(os.getpid()), LISTEN_FDNAMES=sys.argv[2])
os.execv(sys.executable, [sys.executable, "-m", "hicache.tools", "serve", "--keep-arena", *sys.argv[3:]])
"""
"""Becomes a server that inherits descriptors as a supervisor hands them on."""


class Keeping:
    """A supervisor as small as can be: it keeps descriptors by name, and starts servers with them."""

    def __init__(self, directory: Path) -> None:
        self.run = directory / "run"
        self.kept: dict[str, int] = {}
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(directory / "notify"))
        self._socket.setblocking(False)

    def start(self, *, host_pages: int = 32, **more: object) -> None:
        with (self._directory / "errors").open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START, ",".join(map(str, self.kept.values())), ":".join(self.kept),
                 "--socket-dir", str(self.run), "--verbose", *arguments(host_pages=host_pages, **more)],
                cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, pass_fds=tuple(self.kept.values()),
                env={**os.environ, "NOTIFY_SOCKET": str(self._directory / "notify")},
            )  # fmt: skip
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith(b"serving at"), self.errors()
        self._hear()

    def stop(self, number: int = signal.SIGTERM) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        assert self._process.wait(WAIT_S) == (0 if number == signal.SIGTERM else -number)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._hear()

    def errors(self) -> str:
        return (self._directory / "errors").read_text()

    def _hear(self) -> None:
        """Do what was asked for until now."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, 4096, 4)
            except BlockingIOError:
                return
            told = dict(line.split("=", 1) for line in data.decode().splitlines())
            if "FDSTOREREMOVE" in told:
                self._drop(told["FDNAME"])
            elif "FDSTORE" in told:
                self._drop(told["FDNAME"])
                (self.kept[told["FDNAME"]],) = fds

    def _drop(self, name: str) -> None:
        if name in self.kept:
            os.close(self.kept.pop(name))

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
        for name in list(self.kept):
            self._drop(name)
        self._socket.close()


@pytest.fixture
def keeping(tmp_path: Path) -> Iterator[Keeping]:
    supervisor = Keeping(tmp_path)
    try:
        yield supervisor
    finally:
        supervisor.close()


def test_what_was_in_the_arena_is_there_again_after_a_stop(keeping: Keeping) -> None:
    keeping.start()
    with connect(keeping.run) as client:
        store(client, FIRST)
        store(client, SECOND)
    keeping.stop()
    assert sorted(keeping.kept) == ["hicache-arena", "hicache-generations", "hicache-pages"]
    with connect_later(keeping) as client:
        assert client.lookup(Prompt(NAMESPACE, FIRST)).runs == (("host", 5 * PAGE),)
        assert check(client, FIRST) == check(client, SECOND) == 5 * PAGE
        store(client, range(5000, 5000 + 8 * PAGE))
        assert check(client, range(5000, 5000 + 8 * PAGE)) == 8 * PAGE
    keeping.stop()
    # One byte of a page in the middle has changed since: that page does not come back, nor what follows on it.
    _flip(keeping, page_bytes(FIRST, 3))
    with connect_later(keeping) as client:
        assert check(client, FIRST) == 3 * PAGE
        assert check(client, SECOND) == 5 * PAGE
        assert check(client, range(5000, 5000 + 8 * PAGE)) == 8 * PAGE
        for number in range(8):  # its room is used like any other
            store(client, range(20_000 + 1000 * number, 20_000 + 1000 * number + 6 * PAGE))
        assert check(client, range(27_000, 27_000 + 6 * PAGE)) == 6 * PAGE
    keeping.stop()


def connect_later(keeping: Keeping) -> Client:
    keeping.start()
    return connect(keeping.run)


def _flip(keeping: Keeping, page: bytes) -> None:
    """Change one byte of a page in the arena that nobody serves."""
    fd = keeping.kept["hicache-arena"]
    with mmap.mmap(fd, os.fstat(fd).st_size) as arena:
        at = arena.find(page)
        assert at >= 0
        arena[at + 100] ^= 1


@pytest.mark.faults
def test_after_a_kill_nothing_of_the_arena_is_believed(keeping: Keeping) -> None:
    """F20: also not what an earlier stop has written down of it."""
    keeping.start()
    with connect(keeping.run) as client:
        store(client, FIRST)
    keeping.stop()
    kept = os.dup(keeping.kept["hicache-pages"])
    keeping.start()
    with connect(keeping.run) as client:
        assert check(client, FIRST) == 5 * PAGE
    keeping.stop(signal.SIGKILL)
    # A supervisor that does not forget when it is told to makes no difference.
    keeping.kept["hicache-pages"] = kept
    keeping.start()
    with connect(keeping.run) as client:
        assert client.lookup(Prompt(NAMESPACE, FIRST)).num_tokens == 0
        assert store(client, FIRST) == check(client, FIRST) == 5 * PAGE
    keeping.stop()


@pytest.mark.faults
def test_a_lease_of_the_server_before_is_known_to_have_ended(keeping: Keeping) -> None:
    """I25, I37: the arena is the same memory, and other pages may be in it."""
    keeping.start()
    with connect(keeping.run) as client:
        store(client, FIRST)
        lease = client.acquire(Prompt(NAMESPACE, FIRST))
        view = lease[0]
        keeping.stop(signal.SIGKILL)
        keeping.start()
        with pytest.raises(LeaseExpired):
            lease.check()
        with connect(keeping.run) as other:
            for number in range(1, 9):
                store(other, range(1000 * number, 1000 * number + 6 * PAGE))
        assert bytes(view) != page_bytes(FIRST, 0), "it was other memory"
        with pytest.raises(LeaseExpired):
            lease.read()
        lease.release()
    keeping.stop()


@pytest.mark.faults
def test_an_arena_of_another_size_is_not_used(keeping: Keeping) -> None:
    keeping.start()
    with connect(keeping.run) as client:
        store(client, FIRST)
    keeping.stop()
    keeping.start(host_pages=48)
    assert "the arena that was kept is of no use" in keeping.errors()
    with connect(keeping.run) as client:
        assert client.lookup(Prompt(NAMESPACE, FIRST)).num_tokens == 0
        assert store(client, FIRST) == 5 * PAGE
    assert os.fstat(keeping.kept["hicache-arena"]).st_size == 48 * LAYOUT.page_bytes
    keeping.stop()


@pytest.mark.faults
def test_what_clients_are_given_cannot_be_mapped_for_writing(keeping: Keeping) -> None:
    """I34, of this mode: by the descriptor itself. Who may open it anew, which is the server's own user, could."""
    keeping.start()
    _, fds = say_hello(keeping.run, pb.Hello(protocol=1), WAIT_S)
    for fd in fds:
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        with pytest.raises(PermissionError):
            mmap.mmap(fd, os.fstat(fd).st_size)
        os.close(fd)
    keeping.stop()


def test_without_a_supervisor_it_is_refused(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "NOTIFY_SOCKET"}
    ended = subprocess.run(
        [sys.executable, "-m", "hicache.tools", "serve", "--keep-arena", "--socket-dir", str(tmp_path / "run"),
         *arguments()],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "NOTIFY_SOCKET" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_only_memory_that_an_arena_left_is_taken_over() -> None:
    first = Arena(HOST, 1 << 20, outlives=True)
    second = Arena(HOST, 1 << 20, outlives=True, fd=first.whole_fd)
    second.memory[:5] = b"pages"
    assert bytes(first.memory[:5]) == b"pages"
    sealed, loose = Arena(HOST, 1 << 20), os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 1 << 20)
    for fd, num_bytes in ((first.whole_fd, 2 << 20), (sealed.whole_fd, 1 << 20), (loose, 1 << 20)):
        with pytest.raises(TierUnavailable, match="what was kept"):
            Arena(TierId("host"), num_bytes, outlives=True, fd=fd)
    os.close(loose)
    for each in (first, second, sealed):
        each.close()
