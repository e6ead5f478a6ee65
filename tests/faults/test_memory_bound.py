"""A server in a group that may have its pools and a stated overhead of memory, and no byte more: whatever clients do,
it is not killed, and a pool that would not fit is refused before it is allocated."""

import itertools
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hicache.errors import HicacheError
from hicache.service import wire
from hicache.service.client import Client, Prompt, connect
from hicache.service.client.transport import say_hello
from hicache.service.errors import LimitReached
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.edge import MAX_STREAMS
from tests.faults.machine import memory_group
from tests.repository import ROOT
from tests.service.http2 import RawChannel
from tests.service.serving import WAIT_S, ServerProcess, arguments
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, check, store

pytestmark = [pytest.mark.faults, pytest.mark.machine]

MIB: Final = 1 << 20
HOST_PAGES: Final = 4096
STAGING_BYTES: Final = 16 * MIB
"""Of all sessions together."""
MESSAGE_BYTES: Final = 64 * MIB
"""Of all calls together: of the longest kind there are fifteen at a time."""
OVERHEAD_BYTES: Final = 320 * MIB
"""What a server may take beside that: the interpreter and its libraries, gRPC's buffers, the tree's nodes."""
LIMIT_BYTES: Final = HOST_PAGES * LAYOUT.page_bytes + STAGING_BYTES + MESSAGE_BYTES + OVERHEAD_BYTES
FLOOD: Final = 300
"""Calls at once, each with a prompt of the longest kind."""


@contextmanager
def healthy(directory: Path) -> Iterator[None]:
    """Ask for health all the while, and fail unless it was good each time."""
    seen, is_over = Counter[int](), threading.Event()

    def ask() -> None:
        with grpc.insecure_channel(wire.address(str(directory / wire.HEALTH_SOCKET))) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not is_over.wait(0.05):
                try:
                    seen[stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0).status] += 1
                except grpc.RpcError:
                    seen[-1] += 1

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        is_over.set()
        asking.join()
    assert set(seen) == {1}, seen


def _flood(directory: Path, token: bytes, data: bytes) -> Counter[grpc.StatusCode]:
    """So many look-ups at once, over connections of their own; how they ended."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
    channels = [
        grpc.insecure_channel(wire.address(str(directory / wire.DATA_SOCKET)), options=options) for _ in range(10)
    ]
    try:
        path, metadata = "/hicache.v1.Cache/Lookup", ((wire.TOKEN_METADATA, token),)
        calls = [
            channels[number % 10].unary_unary(path, bytes, bytes).future(data, timeout=WAIT_S, metadata=metadata)
            for number in range(FLOOD)
        ]
        return Counter(call.code() for call in calls)
    finally:
        for channel in channels:
            channel.close()


def _many_sessions(directory: Path) -> int:
    """As many sessions as there may be, with staging memory; how many there were."""
    clients: list[Client] = []
    try:
        while True:
            clients.append(connect(directory, staging_bytes=STAGING_BYTES // 16))
    except LimitReached:
        return len(clients)
    finally:
        for client in clients:
            client.close()


@contextmanager
def _slow_readers(directory: Path) -> Iterator[None]:
    """Within the block some ask for the whole tree and read no more than its first piece."""
    with grpc.insecure_channel(wire.address(str(directory / wire.ADMIN_SOCKET))) as channel:
        call = channel.unary_stream("/hicache.v1.Admin/Inspect", bytes, pb.InspectPiece.FromString)
        request = pb.InspectRequest(view=pb.VIEW_SNAPSHOT).SerializeToString()
        readers = [call(request, timeout=WAIT_S) for _ in range(8)]
        for reader in readers:
            assert next(reader).json.startswith(b"{")
        yield
        for reader in readers:
            reader.cancel()


@contextmanager
def _unread(client: Client, directory: Path) -> Iterator[None]:
    """Within the block nobody reads answers: those of calls without a session and with one, as many as connections may
    have, and those of the longest beats on streams of as many sessions as there may be."""
    prefix = pb.Prefix(namespace_id=1, tokens=wire.pack_int32(range(PAGE)))
    asked = pb.LookupRequest(prefix=prefix).SerializeToString()
    long = pb.Prefix(namespace_id=1, tokens=wire.pack_int32(range(wire.MAX_BEAT_BYTES // 4 - 100)))
    beat = pb.Beat(number=1, lookup=pb.LookupRequest(prefix=long)).SerializeToString()
    record = pb.RegisterRequest(record=NAMESPACE.encode()).SerializeToString()
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    with ExitStack() as stack:
        for number in range(8):
            raw = stack.enter_context(RawChannel(directory / wire.DATA_SOCKET, window=0))
            token = client.welcome.token if number < 4 else b"nobody's"
            for _ in range(MAX_STREAMS):
                raw.call("/hicache.v1.Cache/Lookup", [asked], token=token)
        for _ in range(14):
            welcome, fds = say_hello(directory, pb.Hello(protocol=wire.PROTOCOL), WAIT_S)
            for fd in fds:
                os.close(fd)
            metadata = ((wire.TOKEN_METADATA, welcome.token),)
            channel = stack.enter_context(
                grpc.insecure_channel(wire.address(str(directory / wire.DATA_SOCKET)), options=options)
            )
            channel.unary_unary("/hicache.v1.Cache/Register", bytes, bytes)(record, timeout=WAIT_S, metadata=metadata)
            attach = channel.stream_stream("/hicache.v1.Cache/Attach", bytes, bytes)
            stack.callback(attach(itertools.repeat(beat), timeout=WAIT_S, metadata=metadata).cancel)
        yield


def test_what_clients_do_takes_no_more_than_pools_and_overhead(tmp_path: Path) -> None:
    """I21, I32, F23, F32, F34, F35: floods of the longest prompts with and without a session, ten MiB that are too
    long, as many sessions as there may be, and readers that do not read, some of whom offer no window."""
    limits = {
        "limits__total_staging_bytes": STAGING_BYTES,
        "limits__staging_bytes": MIB,
        "limits__message_bytes": MESSAGE_BYTES,
    }
    options = arguments(host_pages=HOST_PAGES, **limits)
    with memory_group(LIMIT_BYTES) as group:
        with group.joined():
            server = ServerProcess(tmp_path, options)
        try:
            with connect(server.directory) as client, healthy(server.directory):
                for number in range(2000):
                    assert store(client, range(100 * number, 100 * number + PAGE)) == PAGE
                longest = pb.LookupRequest(
                    prefix=pb.Prefix(namespace_id=1, tokens=wire.pack_int32(range(1 << 20)))
                ).SerializeToString()
                for token, data in ((client.welcome.token, longest), (b"x" * 32, longest), (b"", bytes(10 * MIB))):
                    ended = _flood(server.directory, token, data)
                    assert sum(ended.values()) == FLOOD
                    assert not {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN} & set(ended), ended
                assert _many_sessions(server.directory) == 15
                with _slow_readers(server.directory):
                    assert check(client, range(100 * 1999, 100 * 1999 + PAGE)) == PAGE
                    with suppress(HicacheError):
                        client.lookup(Prompt(NAMESPACE, range(1 << 20)))
                with connect(server.directory) as unread:
                    assert unread.lookup(Prompt(NAMESPACE, range(PAGE))).num_tokens == PAGE
                    with _unread(unread, server.directory):
                        for number in range(200):
                            assert check(client, range(100 * number, 100 * number + PAGE)) == PAGE
            assert server.process.poll() is None
            with connect(server.directory) as client:
                assert store(client, range(7_000_000, 7_000_000 + PAGE)) == PAGE
        finally:
            status = server.stop()
            peak = group.peak_bytes
        assert status == 0, f"{status} at {peak >> 20} of {LIMIT_BYTES >> 20} MiB: {server.errors()}"


def test_pools_that_do_not_fit_the_group_are_refused_at_the_start(tmp_path: Path) -> None:
    """F23, F25, I21: exit status 1 with a line, instead of an end by the kernel when the pool is touched."""
    with memory_group(OVERHEAD_BYTES) as group:
        with group.joined():
            done = subprocess.run(
                [sys.executable, "-m", "hicache.tools", "serve", "--socket-dir", os.fspath(tmp_path / "run"),
                 *arguments(host_pages=OVERHEAD_BYTES // LAYOUT.page_bytes)],
                cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False,
            )  # fmt: skip
        assert done.returncode == 1, done
        assert "bytes of memory" in done.stderr
        assert group.peak_bytes < OVERHEAD_BYTES
