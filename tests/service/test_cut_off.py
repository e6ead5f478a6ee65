"""Local connections that nobody reads are cut off; those of which a piece is read in time, however small, never."""

import os
import resource
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import pytest

from hicache.clock import ManualClock
from hicache.service import wire
from hicache.service.client import Prompt, connect
from hicache.service.server.unread import LOOKS, SUSPECT, Unread
from tests.service.http2 import CHUNK, RawChannel
from tests.service.serving import WAIT_S, thread_server
from tests.service.stored import NAMESPACE, check, store
from tests.service.test_metrics import measured, value
from tests.service.test_tcp import PLAIN, url
from tests.service.test_unread import ASK, LOOKUP, TOKENS, num_open

NUM_CALLS: Final = 96
"""Their answers take more than a quarter of a socket, which then says that nothing fits, and less than all of it."""
SO_PEEK_OFF: Final = 42
"""Of `socket(7)`: each peek begins where the last one ended."""
CALLS: Final = {
    wire.DATA_SOCKET: LOOKUP,
    wire.ADMIN_SOCKET: "/hicache.v1.Admin/Inspect",
    wire.HEALTH_SOCKET: "/grpc.health.v1.Health/Check",
}


def fill(raw: RawChannel, path: str) -> None:
    """Have a server fill a connection with answers, and read none. Into a Unix socket they are written one by one: each
    takes memory of its own."""
    is_local = raw.socket.family == socket.AF_UNIX
    if is_local:
        raw.socket.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, 0)
    with suppress(ConnectionError):  # where this takes long, it is cut off meanwhile
        for _ in range(NUM_CALLS):
            raw.call(path, [b""], token=b"nobody's")
            if is_local and not raw.socket.recv(CHUNK, socket.MSG_PEEK):
                break


@pytest.mark.parametrize("name", CALLS)
def test_a_full_connection_that_is_not_read_is_cut_off(tmp_path: Path, name: str) -> None:
    """I21, I23: gRPC itself keeps it. Others are served as ever."""
    with (
        thread_server(tmp_path, times__lease_s=1.0, metrics__port=0) as server,
        RawChannel(server.directory / name, window=0) as raw,
    ):
        fill(raw, CALLS[name])
        server.until(lambda inside: inside.unread.num_cut_off == 1, within_s=WAIT_S)
        while raw.socket.recv(CHUNK):
            pass  # what was on its way, to the end
        assert value(measured(server), "hicache_connections_cut_off_total") == 1
        with connect(server.directory) as good:
            assert store(good, TOKENS) == check(good, TOKENS) == len(TOKENS)


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "tcp"])
def test_calls_of_a_session_that_has_ended_go_with_their_full_connection(tmp_path: Path, is_local: bool) -> None:
    """I21: what gRPC keeps for them is freed."""
    with thread_server(tmp_path, times__lease_s=1.0, **PLAIN) as server:
        at: Path | int = server.directory / wire.DATA_SOCKET
        if not is_local:
            at = int(url(server).rpartition(":")[2])
        with connect(server.directory) as client, RawChannel(at, window=0) as raw:
            client.lookup(Prompt(NAMESPACE, TOKENS))
            raw.call(LOOKUP, [ASK], token=client.welcome.token)
            server.until(lambda inside: num_open(inside) == 1 + 1, within_s=WAIT_S)
            (session,) = server.call(lambda inside: list(inside.sessions))
            fill(raw, LOOKUP)
            client.close()
            server.until(lambda _: session.ended.is_set() and session.num_open == 0, within_s=WAIT_S)
            assert server.call(lambda inside: inside.unread.num_cut_off) == is_local, "TCP's are the kernel's to end"


class Watched:
    """Connections to a Unix socket, both ends of each, and what cuts them off in a time that is 1 by a manual clock."""

    def __init__(self, directory: Path) -> None:
        path = str(directory / "socket")
        self._open: Final = ExitStack()
        self._listening: Final = self._open.enter_context(socket.socket(socket.AF_UNIX))
        self._listening.bind(path)
        self._listening.listen()
        self._clock: Final = ManualClock()
        self.unread: Final = Unread([path], self._clock, 1.0)
        self._open.callback(self.unread.close)

    def close(self) -> None:
        self._open.close()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """The server's end and the peer's; neither waits."""
        theirs = self._open.enter_context(socket.socket(socket.AF_UNIX))
        theirs.connect(self._listening.getsockname())
        ours = self._open.enter_context(self._listening.accept()[0])
        ours.setblocking(False)
        theirs.setblocking(False)
        return ours, theirs

    def look(self) -> None:
        """The next look."""
        self._clock.advance(1 / LOOKS)
        self.unread.look()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.close()


def write(ours: socket.socket) -> None:
    """Fill a connection once it says that something fits, as gRPC does."""
    poll = select.poll()
    poll.register(ours, select.POLLOUT)
    if poll.poll(0):
        with suppress(BlockingIOError):
            while True:
                ours.send(bytes(CHUNK))


def read(theirs: socket.socket, num_bytes: int) -> bool:
    """Read at most so many bytes; whether the connection has ended."""
    with suppress(BlockingIOError):
        while num_bytes > 0:
            data = theirs.recv(num_bytes)
            if not data:
                return True
            num_bytes -= len(data)
    return False


def test_who_reads_nothing_is_cut_off_once(watched: Watched) -> None:
    """Not before the time has passed."""
    ours, theirs = watched.connect()
    write(ours)
    num_looks = 0
    while not watched.unread.num_cut_off:
        watched.look()
        num_looks += 1
    assert LOOKS < num_looks <= LOOKS * (1 + SUSPECT) + 2
    for _ in range(3 * LOOKS):
        watched.look()
    assert watched.unread.num_cut_off == 1
    assert read(theirs, 1 << 30)


@pytest.mark.parametrize("every", [1, LOOKS // 2, LOOKS - 1], ids="every {} looks".format)
@pytest.mark.parametrize("num_bytes", [CHUNK, 1 << 30], ids=["a piece", "all"])
def test_who_reads_is_not_cut_off(watched: Watched, num_bytes: int, every: int) -> None:
    """Neither who reads little, nor who reads all at once: it is replaced before the next look. Whoever is read may
    hold as much as ever."""
    ours, theirs = watched.connect()
    before = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    write(ours)
    for number in range(20 * LOOKS):
        watched.look()
        if number % every == every - 1:
            assert not read(theirs, num_bytes)
        write(ours)
    read(theirs, 1 << 30)
    watched.look()
    assert watched.unread.num_cut_off == 0
    assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before
    write(ours)
    assert not read(theirs, 1 << 30)


def test_who_is_told_nothing_and_other_sockets_are_left_alone(watched: Watched) -> None:
    idle = watched.connect()
    few = watched.connect()
    few[0].send(b"few")
    other = socket.socketpair()
    other[0].setblocking(False)
    write(other[0])
    for _ in range(3 * LOOKS):
        watched.look()
    assert watched.unread.num_cut_off == 0
    for ours, theirs in (idle, few, other):
        with ours, theirs:
            ours.shutdown(socket.SHUT_WR)
            theirs.setblocking(False)
            assert read(theirs, 1 << 30)


def test_who_has_taken_all_descriptors_is_cut_off(watched: Watched) -> None:
    """I21: to look takes none that is free."""
    ours, theirs = watched.connect()
    write(ours)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as taken:
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (theirs.fileno() + 64, before[1]))
        with suppress(OSError):
            while True:
                taken.callback(os.close, os.dup(ours.fileno()))
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(ours.fileno())
        for _ in range(2 * LOOKS):
            watched.look()
        assert watched.unread.num_cut_off == 1
        assert read(theirs, 1 << 30)
