"""Every call of the wire, without exception, is answered by its deadline and 0.3 s: with a disk that hangs, with an
arena that is all leased, with a peer that is stopped, and with all of that at once.

The calls' own deadline is much later than the one that the server sets: it is the server that has to answer in time,
not gRPC on this side. What is called is taken from the description of the services, so a method that is added later is
in the test or fails it.
"""

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from hicache.service import wire
from hicache.service.client import Client, Durability, Outcome, Prompt, connect
from hicache.service.client.transport import say_hello
from hicache.service.proto import hicache_pb2 as pb
from tests.faults.machine import hung
from tests.punctual import Lateness
from tests.repository import ROOT
from tests.service.serving import WAIT_S, ServerProcess, arguments
from tests.service.stored import NAMESPACE, PAGE, check, page_bytes, store
from tests.service.test_load import inspected
from tests.service.test_tcp import DIGEST, TOKEN

DEADLINE_S: Final = 1.0
"""The server's own, of a call that brings none or a later one."""
LATE_S: Final = 0.3
"""How much later a call may end."""
GIVEN_UP_S: Final = 5.0
"""When this side stops waiting for a call that has failed the test."""
HOST_PAGES: Final = 16
COLD: Final = range(4 * PAGE)
"""On NVMe alone."""
NEW: Final = range(5_000, 5_000 + PAGE)
"""Reserved before anything goes wrong, and committed afterwards."""
METHODS: Final[dict[str, MethodDescriptor]] = {
    method.name: method for service in pb.DESCRIPTOR.services_by_name.values() for method in service.methods
}

PEER: Final = """
import sys
from tests.service.stored import NAMESPACE, PAGE, store
from hicache.service.client import Prompt, connect
client = connect(sys.argv[1], name="peer")
number = 0
while True:  # until no page of the arena is left, which the server says within its own deadline
    tokens = range(100_000 + 1000 * number, 100_000 + 1000 * number + PAGE)
    if client.reserve(Prompt(NAMESPACE, tokens), timeout_s=30.0).outcome.name != "ACCEPTED":
        break
    number += 1
print(number, flush=True)
sys.stdin.read()
"""
"""A process that takes every page of the arena that can be had, and keeps them until its standard input ends."""


def _requests(reservation: int) -> dict[str, Any]:
    """One request for each method, of the kind that has to wait where anything does."""
    cold = pb.Prefix(namespace_id=1, tokens=wire.pack_int32(COLD))
    new = pb.Prefix(namespace_id=1, tokens=wire.pack_int32(range(9_000, 9_000 + 2 * PAGE)))
    return {
        "Register": pb.RegisterRequest(record=NAMESPACE.encode()),
        "Lookup": pb.LookupRequest(prefix=cold),
        "Acquire": pb.AcquireRequest(prefix=cold),
        "Pin": pb.PinRequest(prefix=cold),
        "Release": pb.ReleaseRequest(ids=[1]),
        "Reserve": pb.ReserveRequest(prefix=new),
        "Commit": pb.CommitRequest(reservation=reservation, durability=pb.DURABILITY_WAIT),
        "Prefetch": pb.PrefetchRequest(prefix=cold, within_ms=60_000),
        "Hint": pb.HintRequest(prefix=cold, returns=True),
        "Attach": pb.Beat(lookup=pb.LookupRequest(prefix=cold), number=1),
        "Inspect": pb.InspectRequest(view=pb.VIEW_SNAPSHOT),
        "Evict": pb.EvictRequest(tier=pb.TIER_HOST, num_pages=HOST_PAGES),
        "Verify": pb.VerifyRequest(),
        "Flush": pb.FlushRequest(),
        "Publish": pb.PublishRequest(prefix=cold),
        "Read": pb.ReadRequest(lease=1, length=1),
        "Write": pb.WriteRequest(reservation=1, data=b"x"),
        "PinPrefix": pb.NamedPrefix(namespace=NAMESPACE.digest, tokens=wire.pack_int32(COLD)),
        "UnpinPrefix": pb.NamedPrefix(namespace=NAMESPACE.digest, tokens=wire.pack_int32(COLD)),
        "PrefetchPrefix": pb.PrefetchPrefixRequest(
            prefix=pb.NamedPrefix(namespace=NAMESPACE.digest, tokens=wire.pack_int32(COLD)), within_ms=60_000
        ),
        "Explain": pb.NamedPrefix(namespace=NAMESPACE.digest, tokens=wire.pack_int32(COLD)),
        "Browse": pb.BrowseRequest(max_nodes=10),
        "Outline": pb.OutlineRequest(max_branches=10),
        "Rank": pb.RankRequest(order=pb.ORDER_USES, max_nodes=10),
        "Record": pb.RecordRequest(wait_ms=30_000),
        "Drain": pb.DrainRequest(),
        "Enter": pb.Hello(protocol=wire.PROTOCOL, staging_bytes=1 << 16),
    }


AT_ONCE: Final = [
    {method.name for method in (*wire.CACHE.methods, *wire.DOOR.methods)},
    {method.name for method in wire.ADMIN.methods} - {"Flush", "Drain"},
    {"Flush"},
]
"""What is called together. A flush leaves the others nothing to wait for, and a drain is the last that is answered."""


class Caller:
    """Calls methods by their names and takes the time of each. `token` is that of the session."""

    def __init__(self, server: ServerProcess, token: bytes) -> None:
        self._directory = server.directory
        places = {
            wire.CACHE.full_name: wire.address(str(server.directory / wire.DATA_SOCKET)),
            wire.ADMIN.full_name: wire.address(str(server.directory / wire.ADMIN_SOCKET)),
            wire.DOOR.full_name: f"127.0.0.1:{inspected(server)['server']['tcp_port']}",
        }
        self._channels = {service: grpc.insecure_channel(place) for service, place in places.items()}
        self._metadata = ((wire.TOKEN_METADATA, token), (wire.ACCESS_METADATA, TOKEN.encode()))

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def in_time(self, names: set[str], requests: Mapping[str, Any]) -> dict[str, grpc.StatusCode]:
        """Call all of them at once; the status of each. Fails for those that end too late."""
        with ThreadPoolExecutor(len(names)) as threads, Lateness() as machine:
            calls = {name: threads.submit(self._timed, METHODS[name], requests[name]) for name in sorted(names)}
            ended = {name: call.result() for name, call in calls.items()}
        most = DEADLINE_S + LATE_S + machine.allowed_s
        late = {name: f"{took:.2f} s" for name, (_, took) in ended.items() if took > most}
        assert not late, f"ended late: {late} of {ended}"
        return {name: status for name, (status, _) in ended.items()}

    def _timed(self, method: MethodDescriptor, request: Message) -> tuple[grpc.StatusCode, float]:
        began = monotonic()
        try:
            self._call(method, request.SerializeToString())
        except grpc.RpcError as error:
            return error.code(), monotonic() - began
        return grpc.StatusCode.OK, monotonic() - began

    def _call(self, method: MethodDescriptor, request: bytes) -> None:
        channel, path = self._channels[method.containing_service.full_name], wire.path_of(method)
        how: dict[str, Any] = {"timeout": GIVEN_UP_S, "metadata": self._metadata}
        if method.client_streaming:
            # A session's stream has no end of its own: here it brings one, in a session of its own.
            welcome, fds = say_hello(self._directory, pb.Hello(protocol=wire.PROTOCOL), WAIT_S)
            for fd in fds:
                os.close(fd)
            metadata = ((wire.TOKEN_METADATA, welcome.token),)
            with lasting(request) as beats:
                list(channel.stream_stream(path, bytes, bytes)(beats, timeout=DEADLINE_S, metadata=metadata))
        elif method.server_streaming:
            list(channel.unary_stream(path, bytes, bytes)(request, **how))
        else:
            channel.unary_unary(path, bytes, bytes)(request, **how)


@contextmanager
def lasting(beat: bytes) -> Iterator[Iterator[bytes]]:
    """A stream of one message that does not end before the block does."""
    is_over = threading.Event()

    def beats() -> Iterator[bytes]:
        yield beat
        is_over.wait(WAIT_S)

    try:
        yield beats()
    finally:
        is_over.set()


class Peer:
    """Another client's process, which holds all of the arena that was left."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER, str(directory)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        assert int(self.process.stdout.readline()) > 0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def every_call_ends(tmp_path: Path, nvme: Path, troubles: set[str]) -> None:
    """The whole of it, with some of "disk", "full" and "peer" going wrong; "disk" needs `nvme` to be on a disk of its
    own."""
    assert set().union(*AT_ONCE) | {"Drain"} == set(METHODS) == set(_requests(0)), "a method is not called here"
    more: dict[str, Any] = {"nvme__bytes": '"8MiB"', "times__max_call_s": DEADLINE_S, "limits__leased_share": 1.0}
    more |= {"tcp__listen": '"127.0.0.1:0"', "tcp__plain": "true", "tcp__token_sha256": f'"{DIGEST}"'}
    options = arguments(host_pages=HOST_PAGES, times__lease_s=30.0, **more)
    server = ServerProcess(tmp_path, [*options, "--nvme-dir", str(nvme)])
    with ExitStack() as stack:
        stack.callback(server.stop, signal.SIGKILL)
        client = stack.enter_context(connect(server.directory))
        caller = Caller(server, client.welcome.token)
        stack.callback(caller.close)
        assert store(client, COLD, durability=Durability.WAIT) == len(COLD)
        requests = _requests(0)
        assert caller.in_time({"Evict"}, requests) == {"Evict": grpc.StatusCode.OK}
        assert client.lookup(Prompt(NAMESPACE, COLD)).runs == (("nvme", len(COLD)),)
        reservation = client.reserve(Prompt(NAMESPACE, NEW))
        reservation[0][:] = page_bytes(NEW, 0)
        requests = _requests(reservation._reserved.reservation_id)
        peers: list[Peer] = []
        if troubles & {"full", "peer"}:
            peers.append(Peer(server.directory))
            stack.callback(peers[0].end)

        @contextmanager
        def trouble() -> Iterator[None]:
            with ExitStack() as wrong:
                if "disk" in troubles:
                    wrong.enter_context(hung(nvme.parent, server.process.pid))
                if "peer" in troubles:
                    wrong.enter_context(peers[0].stopped())
                yield

        with trouble():
            statuses: dict[str, grpc.StatusCode] = {}
            for names in AT_ONCE:
                statuses |= caller.in_time(names, requests)
        answered = {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
        # What is asked of a lease that there is not is refused at once.
        assert statuses.pop("Read") is statuses.pop("Write") is grpc.StatusCode.FAILED_PRECONDITION
        assert set(statuses.values()) <= answered, statuses
        for peer in peers:
            peer.end()
        _goes_on(client, 5.0)
        with trouble():
            assert caller.in_time({"Drain"}, requests) == {"Drain": grpc.StatusCode.OK}
    assert "Traceback" not in server.errors()


def _goes_on(client: Client, within_s: float) -> None:
    """Stores, promises and reads work again by then."""
    began = monotonic()
    for number in itertools.count():
        tokens = range(20_000 + 1000 * number, 20_000 + 1000 * number + 2 * PAGE)
        with client.reserve(Prompt(NAMESPACE, tokens)) as reservation:
            for index, view in enumerate(reservation):
                view[:] = page_bytes(tokens, reservation.first_page + index)
            if len(reservation) == 2 and reservation.commit(durability=Durability.WAIT).outcome is Outcome.DURABLE:
                break
        assert monotonic() < began + within_s, reservation.reason
    assert check(client, tokens) == len(tokens)


def test_every_call_ends_with_a_full_arena_and_a_stopped_peer(tmp_path: Path) -> None:
    """I26, I27, I28, F22."""
    every_call_ends(tmp_path, tmp_path / "nvme", {"full", "peer"})
