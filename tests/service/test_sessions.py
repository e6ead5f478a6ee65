"""Sessions whose processes die, fall silent or never come; and servers that are killed and started again."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from hicache.errors import LeaseExpired
from hicache.service import wire
from hicache.service.client import Client, Durability, Outcome, Prompt, connect, connect_async
from hicache.service.client.calls import Request
from hicache.service.client.transport import AsyncGrpcTransport, GrpcTransport, say_hello
from hicache.service.errors import UnknownSession, Unreachable, VersionMismatch, error_of
from hicache.service.proto import hicache_pb2 as pb
from hicache.tier import HOST
from tests.leaks import named_memory
from tests.punctual import in_time
from tests.repository import ROOT
from tests.service.serving import WAIT_S, ServerProcess, ThreadServer, arguments, thread_server
from tests.service.stored import NAMESPACE, PAGE, check, page_bytes, store

HOLDER = """
import sys
from tests.service.stored import NAMESPACE, PAGE, store
from hicache.service.client import Prompt, connect
client = connect(sys.argv[1], name="holder")
store(client, range(3 * PAGE))
lease = client.acquire(Prompt(NAMESPACE, range(3 * PAGE)))
reservation = client.reserve(Prompt(NAMESPACE, range(1000, 1000 + 5 * PAGE)))
print(len(lease), len(reservation), flush=True)
sys.stdin.read()
"""
"""A process that leases three pages, reserves five, and holds them until its standard input ends."""


def _holder(server: ThreadServer) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(server.directory)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"3 5\n"
    return process


def _leave(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait(WAIT_S)
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def _holds(inside: Any) -> tuple[int, int, int]:
    """Sessions, leases in the tree, and arena pages that are not free."""
    host = inside.cache.tiers[HOST]
    return len(inside.sessions), inside.cache.tree.num_leases, host.capacity_pages - host.num_free


def test_a_killed_client_gives_everything_back_within_a_second(tmp_path: Path) -> None:
    """I23, F21, C17: kill -9 with a lease and a reservation. What it stored stays."""
    with thread_server(tmp_path) as server:
        process = _holder(server)
        try:
            assert server.call(_holds) == (1, 2, 8)
            with in_time(1.0):
                process.kill()
                server.until(lambda inside: _holds(inside) == (0, 0, 3), within_s=WAIT_S)
        finally:
            _leave(process)
        server.call(lambda inside: inside.cache.tree.check_integrity())
        with connect(server.directory) as client:
            assert check(client, range(3 * PAGE)) == 3 * PAGE


def test_a_stopped_client_is_ended_after_the_lease_time(tmp_path: Path) -> None:
    """I23, F22: SIGSTOP; others notice nothing, and what it finds when it goes on is a session that has ended."""
    with thread_server(tmp_path, times__lease_s=1.0) as server:
        process = _holder(server)
        try:
            os.kill(process.pid, signal.SIGSTOP)
            with connect(server.directory) as client:
                assert check(client, range(3 * PAGE)) == 3 * PAGE
                with in_time(2.0):
                    server.until(lambda inside: len(inside.sessions) == 1, within_s=WAIT_S)
                assert server.call(_holds) == (1, 0, 3)
                assert server.call(lambda inside: inside.sessions.ended["it was silent"]) == 1
                assert check(client, range(3 * PAGE)) == 3 * PAGE
        finally:
            _leave(process)


def test_a_session_that_never_attaches_is_dropped(tmp_path: Path) -> None:
    """I23: half a handshake holds nothing for long."""
    with thread_server(tmp_path, times__attach_s=0.3) as server:
        welcome, fds = say_hello(server.directory, pb.Hello(protocol=1, staging_bytes=1 << 16), WAIT_S)
        for fd in fds:
            os.close(fd)
        assert welcome.attach_ms == 300
        server.until(lambda inside: len(inside.sessions) == 0, within_s=WAIT_S)
        assert server.call(lambda inside: inside.sessions.ended) == {"it never attached": 1}


def test_what_a_client_drops_is_given_back_with_its_next_beat(tmp_path: Path) -> None:
    """C17: leases and reservations that nobody in the process has any more, and nobody released."""
    with thread_server(tmp_path, times__lease_s=1.0) as server, connect(server.directory) as client:
        store(client, range(2 * PAGE))
        client.acquire(Prompt(NAMESPACE, range(2 * PAGE)))
        client.reserve(Prompt(NAMESPACE, range(1000, 1000 + PAGE)))
        server.until(lambda inside: _holds(inside) == (1, 0, 2), within_s=WAIT_S)
        assert check(client, range(2 * PAGE)) == 2 * PAGE


@pytest.mark.parametrize("method", sorted(method.name for method in wire.CACHE.methods if method.name != "Attach"))
def test_a_call_whose_session_ends_while_its_message_comes_is_lent_nothing(tmp_path: Path, method: str) -> None:
    """I23: the session was there when the call began and its message was not."""
    with thread_server(tmp_path) as server, connect(server.directory) as client:
        store(client, range(PAGE))
        welcome, fds = say_hello(server.directory, pb.Hello(protocol=wire.PROTOCOL, staging_bytes=1 << 16), WAIT_S)
        for fd in fds:
            os.close(fd)
        data = _request(method)
        has_ended = threading.Event()

        def late() -> Iterator[bytes]:
            assert has_ended.wait(WAIT_S)
            yield data

        with grpc.insecure_channel(wire.address(str(server.directory / wire.DATA_SOCKET))) as channel:
            how: Any = {"timeout": WAIT_S, "metadata": ((wire.TOKEN_METADATA, welcome.token),)}
            channel.unary_unary("/hicache.v1.Cache/Register", bytes, bytes)(_request("Register"), **how)
            answer = channel.stream_unary(f"/hicache.v1.Cache/{method}", bytes, bytes).future(late(), **how)
            server.until(lambda inside: _session(inside, welcome).num_calls == 1, within_s=WAIT_S)
            server.call(lambda inside: inside.sessions.end(_session(inside, welcome), "a test"))
            has_ended.set()
            assert isinstance(error_of(answer.exception()), UnknownSession)
        assert server.call(_holds) == (1, 0, 1)


def _session(inside: Any, welcome: "pb.Welcome") -> Any:
    return inside.sessions.of_token(welcome.token)


def _request(method: str) -> bytes:
    """A request of that method, which a session that lasts would be granted where one page is cached."""
    prefix = pb.Prefix(namespace_id=1, tokens=wire.pack_int32(range(PAGE)))
    new = pb.Prefix(namespace_id=1, tokens=wire.pack_int32(range(1000, 1000 + PAGE)))
    requests: dict[str, Any] = {
        "Register": pb.RegisterRequest(record=NAMESPACE.encode()),
        "Reserve": pb.ReserveRequest(prefix=new),
        "Prefetch": pb.PrefetchRequest(prefix=prefix, within_ms=1000),
        "Commit": pb.CommitRequest(reservation=1),
        "Release": pb.ReleaseRequest(ids=[1]),
        "Read": pb.ReadRequest(lease=1, length=1),
        "Write": pb.WriteRequest(reservation=1, data=b"x"),
    }
    request = requests.get(method) or getattr(pb, f"{method}Request")(prefix=prefix)
    return bytes(request.SerializeToString())


def test_a_second_stream_of_a_session_is_refused_and_the_first_lives(tmp_path: Path) -> None:
    with thread_server(tmp_path) as server, connect(server.directory) as client:
        store(client, range(PAGE))
        transport, heard = GrpcTransport(server.directory), list[pb.Notice]()
        transport.attach(client.welcome.token, 1.0, pb.Beat, heard.append, lambda: None)
        transport._threads[0].join(WAIT_S)
        transport.close()
        assert not heard
        assert check(client, range(PAGE)) == PAGE
        assert server.call(lambda inside: len(inside.sessions)) == 1


def test_odd_hellos_are_hung_up_on(tmp_path: Path) -> None:
    """F33, I32, I36: random bytes, half a message, a length of four gigabytes, another version. Others are let in."""
    with thread_server(tmp_path) as server:
        for data in (b"\xff" * 64, b"\xff\xff\xff\xff", b"\x05\x00\x00\x00ab", b"", b"\x02\x00\x00\x00\xff\xff"):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(server.directory / wire.HELLO_SOCKET))
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(WAIT_S)
                answer = connection.recv(4096)
                reply = pb.HelloReply.FromString(answer[4:])
                assert not reply.HasField("welcome")
                assert reply.error.reason in (pb.REASON_BAD_REQUEST, pb.REASON_CLOSED)
        with pytest.raises(VersionMismatch):
            say_hello(server.directory, pb.Hello(protocol=2), WAIT_S)
        with connect(server.directory) as client:
            assert store(client, range(PAGE)) == PAGE
        server.until(lambda inside: len(inside.sessions) == 0, within_s=WAIT_S)
        assert server.call(lambda inside: inside.sessions.num_begun) == 1


def _client(server: ServerProcess) -> Client:
    return connect(server.directory, name="survivor")


def test_clients_find_a_restarted_server_by_themselves_and_nvme_warm(tmp_path: Path) -> None:
    """I37, I14 over the wire: kill -9; what was promised as durable is there, what was not may be gone, and the same
    client goes on, in a session of another boot."""
    options = [*arguments(nvme__bytes=256 * 4096), "--nvme-dir", str(tmp_path / "nvme")]
    server = ServerProcess(tmp_path, options)
    try:
        with _client(server) as client:
            boot = client.welcome.boot_id
            durable, volatile = range(4 * PAGE), range(5000, 5000 + 4 * PAGE)
            with client.reserve(Prompt(NAMESPACE, durable)) as reservation:
                for index, view in enumerate(reservation):
                    view[:] = page_bytes(durable, index)
                committed = reservation.commit(durability=Durability.WAIT, timeout_s=WAIT_S)
            assert (committed.outcome, committed.sequence) == (Outcome.DURABLE, 1)
            assert client.durable_sequence == 1
            store(client, volatile)
            lease = client.acquire(Prompt(NAMESPACE, durable))
            pending = client.reserve(Prompt(NAMESPACE, range(9000, 9000 + PAGE)))
            assert server.stop(signal.SIGKILL) == -signal.SIGKILL
            with pytest.raises(Unreachable):
                client.lookup(Prompt(NAMESPACE, durable))
            # Its memory outlives it: what was leased was right, and nobody writes there any more.
            with lease:
                assert lease.read(1) == page_bytes(durable, 1)
            server = ServerProcess(tmp_path, options)
            assert check(client, durable) == 4 * PAGE
            assert client.welcome.boot_id != boot
            with pytest.raises(LeaseExpired):
                pending.commit()
            assert check(client, volatile) in (0, 4 * PAGE)
            assert store(client, volatile) == 4 * PAGE
    finally:
        assert server.stop() == 0, server.errors()
    assert server.errors() == ""


def test_a_clean_stop_keeps_what_was_promised_behind(tmp_path: Path) -> None:
    """I41: SIGTERM with a client attached; the promise behind the reply is kept, and told."""
    options = [*arguments(nvme__bytes=256 * 4096, times__drain_s=5.0), "--nvme-dir", str(tmp_path / "nvme")]
    server = ServerProcess(tmp_path, options)
    with _client(server) as client:
        store(client, range(4 * PAGE), durability=Durability.BEHIND)
        assert server.stop() == 0, server.errors()
        server = ServerProcess(tmp_path, options)
        try:
            assert check(client, range(4 * PAGE)) == 4 * PAGE
        finally:
            assert server.stop() == 0, server.errors()


def test_a_second_server_on_the_same_directory_refuses_to_start(tmp_path: Path) -> None:
    """I22, F29, F38: and the first goes on."""
    server = ServerProcess(tmp_path, arguments())
    try:
        second = subprocess.run(
            [sys.executable, "-m", "hicache.tools", "serve", "--socket-dir", str(server.directory), *arguments()],
            cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip
        assert second.returncode == 2
        assert "a server runs there already" in second.stderr
        assert second.stdout == ""
        with _client(server) as client:
            assert store(client, range(PAGE)) == PAGE
    finally:
        assert server.stop(signal.SIGINT) == 0


READER = """
import sys
from tests.service.stored import NAMESPACE, PAGE, page_bytes
from hicache.errors import LeaseExpired
from hicache.service.client import Prompt, connect
client = connect(sys.argv[1], name="slow reader")
lease = client.acquire(Prompt(NAMESPACE, range(4 * PAGE)))
print(len(lease), flush=True)
sys.stdin.readline()
try:
    copy = lease.read()
    print("right" if copy == b"".join(page_bytes(range(4 * PAGE), index) for index in range(4)) else "WRONG")
except LeaseExpired:
    print("expired")
with client.acquire(Prompt(NAMESPACE, range(4 * PAGE))) as again:
    print(again.num_tokens)
"""
"""A process that leases four pages and reads them only when it is told to."""


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_slow_reader_has_its_own_pages_or_is_told_that_they_are_gone(tmp_path: Path, is_stopped: bool) -> None:
    """C09, I25, I10: stopped beyond the lease time, its pages are given to others; slow within it, they stay."""
    with thread_server(tmp_path, host_pages=16, times__lease_s=1.0) as server, connect(server.directory) as client:
        store(client, range(4 * PAGE))
        process = subprocess.Popen(
            [sys.executable, "-c", READER, str(server.directory)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == b"4\n"
            if is_stopped:
                process.send_signal(signal.SIGSTOP)
                server.until(lambda inside: len(inside.sessions) == 1, within_s=WAIT_S)
            for round_ in range(4):
                store(client, range(1000 * (round_ + 1), 1000 * (round_ + 1) + 10 * PAGE))
            process.send_signal(signal.SIGCONT)
            process.stdin.write(b"\n")
            process.stdin.flush()
            answer, found = process.stdout.read().split()
            assert (answer, int(found)) == ((b"expired", 0) if is_stopped else (b"right", 4 * PAGE))
        finally:
            _leave(process)


@pytest.mark.faults
def test_killed_servers_leave_nothing_behind(tmp_path: Path) -> None:
    """C25: memory has no name that could outlive its holders, and sockets of the dead are replaced."""
    before = named_memory()
    for _ in range(3):
        server = ServerProcess(tmp_path, arguments())
        with connect(server.directory) as client:
            assert store(client, range(PAGE)) == PAGE
            assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        assert not named_memory() - before
    server = ServerProcess(tmp_path, arguments())
    assert server.stop() == 0
    assert [path.name for path in server.directory.iterdir()] == ["lock"]


def test_the_awaited_client_finds_a_restarted_server_too(tmp_path: Path) -> None:
    """I37, with calls that are awaited."""

    async def use() -> None:
        server = ServerProcess(tmp_path, arguments())
        try:
            async with connect_async(server.directory) as client:
                boot, prompt = client.welcome.boot_id, Prompt(NAMESPACE, range(PAGE))
                async with await client.reserve(prompt) as reservation:
                    server.stop(signal.SIGKILL)
                    with pytest.raises(Unreachable):
                        await client.lookup(prompt)
                    server = ServerProcess(tmp_path, arguments())
                    assert (await client.lookup(prompt)).num_tokens == 0
                    assert client.welcome.boot_id != boot
                    with pytest.raises(LeaseExpired):
                        await reservation.commit()
        finally:
            assert server.stop() == 0

    asyncio.run(use())


def test_a_new_connection_knows_nothing_of_one_that_was_refused(tmp_path: Path) -> None:
    """I37: a client that attaches again is not made to wait for the pause after an earlier try of its process."""
    request = Request("Register", pb.RegisterRequest())

    async def use() -> None:
        before, after = AsyncGrpcTransport(tmp_path), AsyncGrpcTransport(tmp_path)
        server = grpc.aio.server()
        try:
            with pytest.raises(Unreachable):
                await before.call(request, WAIT_S)
            server.add_insecure_port(wire.address(str(tmp_path / wire.DATA_SOCKET)))
            await server.start()
            with pytest.raises(VersionMismatch):  # it has no method at all, and says so
                await after.call(request, WAIT_S)
        finally:
            await server.stop(0)
            await before.close()
            await after.close()

    asyncio.run(use())
