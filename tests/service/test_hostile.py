"""A client that sends what no client should: each message is refused clearly, and others notice nothing."""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from typing import Any, Final, Self

import grpc
import pytest

from hicache.errors import BadRequest, HicacheError
from hicache.service import wire
from hicache.service.client import Client, Prompt, connect
from hicache.service.client.transport import say_hello
from hicache.service.errors import VersionMismatch, error_of
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.process import Server
from hicache.service.server.sessions import MAX_ABANDONED
from hicache.tier import HOST
from tests.service.serving import WAIT_S, ThreadServer, thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, check, store

UNKNOWN_FIELD: Final = b"\xba\x3e\x03abc"
"""Field 999 of any message."""
TOKENS: Final = range(3 * PAGE)
"""What a well-behaved client has stored."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    with thread_server(tmp_path_factory.mktemp("server"), limits__max_tokens=4096) as running:
        with connect(running.directory) as client:
            store(client, range(16 * PAGE))
        running.until(lambda inside: len(inside.sessions) == 0, within_s=WAIT_S)
        yield running


@pytest.fixture(autouse=True)
def sessions_have_ended(server: ThreadServer) -> Iterator[None]:
    """What a test's clients had is given back before it is looked whether the test has left something behind."""
    yield
    server.until(lambda inside: len(inside.sessions) == 0, within_s=WAIT_S)


@pytest.fixture
def good(server: ThreadServer) -> Iterator[Client]:
    """A client that does nothing wrong, before and after: it finds what it stored, and nothing has leaked."""
    with connect(server.directory, staging_bytes=4 * LAYOUT.page_bytes) as client:
        before = server.call(_state)
        yield client
        assert check(client, TOKENS) == 3 * PAGE
        server.until(lambda inside: _state(inside) == before, within_s=WAIT_S)
        server.call(lambda inside: inside.cache.tree.check_integrity())


def _state(inside: Any) -> tuple[int, int, int]:
    return len(inside.sessions), inside.cache.tree.num_leases, inside.cache.tiers[HOST].num_free


class Raw:
    """A session whose calls are bytes."""

    def __init__(self, server: ThreadServer) -> None:
        self._client = connect(server.directory, staging_bytes=4 * LAYOUT.page_bytes)
        self.token: bytes = self._client.welcome.token
        self._client.lookup(Prompt(NAMESPACE, [1]))  # registers namespace 1
        self._channel = grpc.insecure_channel(
            wire.address(str(server.directory / wire.DATA_SOCKET)), options=[("grpc.max_send_message_length", -1)]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._client.close()

    def send(self, method: str, data: bytes, *, token: bytes | None = None, **how: Any) -> bytes:
        """One call; the bytes of its reply. Raises the error that it stands for."""
        metadata = ((wire.TOKEN_METADATA, self.token if token is None else token),)
        call = self._channel.unary_unary(f"/hicache.v1.Cache/{method}", bytes, bytes)
        try:
            return bytes(call(data, timeout=WAIT_S, metadata=metadata, **how))
        except grpc.RpcError as error:
            raise error_of(error) from None

    def refused(self, method: str, data: bytes | Any, **how: Any) -> str:
        """The reason with which a call is refused."""
        with pytest.raises(HicacheError) as refused:
            self.send(method, data if isinstance(data, bytes) else data.SerializeToString(), **how)
        return refused.value.reason


@pytest.fixture
def raw(server: ThreadServer, good: Client) -> Iterator[Raw]:
    with Raw(server) as session:
        yield session


def _prefix(tokens: bytes = b"", **more: Any) -> pb.Prefix:
    return pb.Prefix(**{"namespace_id": 1, "tokens": tokens, **more})


def _ids(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\xff", b"\x00" * 9, b"\x0a\x05abc", bytes(range(200, 256))])
def test_bytes_that_are_no_message(raw: Raw, data: bytes) -> None:
    """F33, I32."""
    for method in ("Register", "Lookup", "Acquire", "Pin", "Release", "Reserve", "Commit", "Prefetch"):
        assert raw.refused(method, data) == "bad_request"


@pytest.mark.parametrize("method", [method.name for method in wire.CACHE.methods if not method.client_streaming])
def test_fields_of_another_version(raw: Raw, method: str) -> None:
    """I32, I36, F30: what this version does not know is refused by every method, instead of being left out."""
    assert raw.refused(method, UNKNOWN_FIELD) == "bad_request"


@pytest.mark.parametrize("method", [method.name for method in wire.ADMIN.methods])
def test_fields_of_another_version_from_the_owner(server: ThreadServer, method: str) -> None:
    """I32, I36, F30."""
    path = wire.path_of(wire.ADMIN.methods_by_name[method])
    with grpc.insecure_channel(wire.address(str(server.directory / wire.ADMIN_SOCKET))) as channel:
        call = channel.unary_stream(path, bytes, bytes)  # of one answer or several
        with pytest.raises(grpc.RpcError) as refused:
            list(call(UNKNOWN_FIELD, timeout=WAIT_S))
    assert isinstance(error_of(refused.value), BadRequest)


def test_fields_and_enum_values_of_another_version_at_any_depth(raw: Raw) -> None:
    """I32, I36, F30."""
    assert raw.refused("Lookup", b"\x0a" + bytes([len(UNKNOWN_FIELD)]) + UNKNOWN_FIELD) == "bad_request"
    assert raw.refused("Commit", b"\x10\x09") == "bad_request"  # durability 9


@pytest.mark.parametrize("protocol", [0, wire.PROTOCOL + 1, 2**32 - 1])
def test_other_protocols_are_refused_before_a_session_begins(server: ThreadServer, protocol: int) -> None:
    """I36, F30: an older client and newer ones, and a hello with a field of a later version."""
    before = server.call(lambda inside: inside.sessions.num_begun)
    with pytest.raises(VersionMismatch):
        say_hello(server.directory, pb.Hello(protocol=protocol), WAIT_S)
    with pytest.raises(BadRequest):
        say_hello(server.directory, pb.Hello.FromString(b"\x08\x01" + UNKNOWN_FIELD), WAIT_S)
    assert server.call(lambda inside: inside.sessions.num_begun) == before


def test_tokens_that_are_none(raw: Raw) -> None:
    """F32."""
    for method, kind in (("Lookup", pb.LookupRequest), ("Acquire", pb.AcquireRequest), ("Reserve", pb.ReserveRequest)):
        for tokens in (b"abc", _ids(-1) * PAGE, _ids(*range(PAGE - 1), -(2**31))):
            assert raw.refused(method, kind(prefix=_prefix(tokens))) == "bad_request"
        assert raw.refused(method, kind(prefix=_prefix(_ids(1) * 4097))) == "limit"
        for other in (2, 2**32 - 1, 2**64 - 1):
            assert raw.refused(method, kind(prefix=_prefix(namespace_id=other))) == "unknown_namespace"
        assert raw.refused(method, kind(prefix=_prefix(namespace_id=0))) == "bad_request"
        assert raw.refused(method, kind(prefix=_prefix(handle=7))) == "unknown_handle"
        assert raw.refused(method, kind()) == "bad_request"


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_a_message_that_is_too_long_is_not_read(
    raw: Raw, compression: grpc.Compression, caplog: pytest.LogCaptureFixture
) -> None:
    """I32, F32: a hundred MiB, of which nothing is looked at; packed, they would be a hundred KiB."""
    assert raw.refused("Lookup", bytes(100 << 20), compression=compression) == "limit"
    assert raw.refused("Lookup", b"\xff", compression=compression) == "bad_request"
    assert caplog.text == "", "neither is a mistake of the server's"


def test_numbers_at_their_ends(raw: Raw) -> None:
    """F32, I34: nothing is allocated for them, and nothing is found out of bounds."""
    most = 2**64 - 1
    tokens = _ids(*range(1 << 20, (1 << 20) + 2 * PAGE))
    assert raw.refused("Reserve", pb.ReserveRequest(prefix=_prefix(tokens), first_page=most)) == "bad_request"
    reply = pb.AcquireReply.FromString(
        raw.send("Acquire", pb.AcquireRequest(prefix=_prefix(tokens), first_page=most).SerializeToString())
    )
    assert (reply.lease, reply.slots) == (0, b"")
    assert raw.refused("Prefetch", pb.PrefetchRequest(prefix=_prefix(tokens), within_ms=2**32 - 1)) == "bad_request"
    raw.send("Prefetch", pb.PrefetchRequest(prefix=_prefix(tokens), within_ms=1, max_pages=most).SerializeToString())
    assert raw.refused("Release", pb.ReleaseRequest(ids=[1] * 4097)) == "limit"
    assert raw.refused("Commit", pb.CommitRequest(reservation=most)) == "lease_expired"


def test_calls_out_of_order(raw: Raw, good: Client) -> None:
    """I24: a commit of nothing, twice, or of another's; a release of another's, and of what never was."""
    reserve = pb.ReserveRequest(prefix=_prefix(_ids(*range(1 << 20, (1 << 20) + PAGE))))
    reserved = pb.ReserveReply.FromString(raw.send("Reserve", reserve.SerializeToString()))
    assert reserved.outcome == pb.OUTCOME_ACCEPTED
    commit = pb.CommitRequest(reservation=reserved.reservation, checksums=b"1234567")
    assert raw.refused("Commit", commit) == "bad_request"
    release = pb.ReleaseRequest(ids=[reserved.reservation])
    assert pb.ReleaseReply.FromString(raw.send("Release", release.SerializeToString())).num_released == 1
    assert pb.ReleaseReply.FromString(raw.send("Release", release.SerializeToString())).num_released == 0
    assert raw.refused("Commit", pb.CommitRequest(reservation=reserved.reservation)) == "lease_expired"
    with good.acquire(Prompt(NAMESPACE, TOKENS)) as lease:
        theirs = lease._granted.lease_id
        reply = raw.send("Release", pb.ReleaseRequest(ids=[theirs, theirs + 1, 0]).SerializeToString())
        assert pb.ReleaseReply.FromString(reply).num_released == 0
        assert raw.refused("Commit", pb.CommitRequest(reservation=theirs)) == "lease_expired"
        lease.check()


def test_tokens_of_no_session(raw: Raw) -> None:
    for token in (b"", b"x" * 32, raw.token[:-1], raw.token + b"x", bytes(32)):
        assert raw.refused("Lookup", pb.LookupRequest(prefix=_prefix()), token=token) == "unknown_session"


def test_methods_that_there_are_not(raw: Raw) -> None:
    assert raw.refused("Nonsense", b"") == "version_mismatch"


def test_records_that_are_none(raw: Raw, server: ThreadServer) -> None:
    """F31, I02."""
    record = NAMESPACE.encode()
    for each in (b"", b"x", record[:-1], record + b"x", bytes(1 << 18)):
        assert raw.refused("Register", pb.RegisterRequest(record=each)) == "bad_request"
    assert server.call(lambda inside: max(len(session.namespaces) for session in inside.sessions)) == 1


def test_a_flood_of_beats_and_odd_ones(server: ThreadServer, good: Client) -> None:
    """A stream that says nonsense ends with its session; one that abandons what it never asked for is harmless."""
    welcome, fds = say_hello(server.directory, pb.Hello(protocol=1), WAIT_S)
    for fd in fds:
        os.close(fd)
    with grpc.insecure_channel(wire.address(str(server.directory / wire.DATA_SOCKET))) as channel:
        attach = channel.stream_stream("/hicache.v1.Cache/Attach", bytes, bytes)
        metadata = ((wire.TOKEN_METADATA, welcome.token),)
        harmless = pb.Beat(abandoned=range(MAX_ABANDONED)).SerializeToString()
        stream = attach(iter([harmless] * 100 + [b"\xff"]), metadata=metadata, timeout=WAIT_S)
        with pytest.raises(grpc.RpcError) as ended:
            for _ in stream:
                pass
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert server.call(lambda inside: len(inside.sessions)) == 1
        with pytest.raises(grpc.RpcError) as ended:
            for _ in attach(iter([]), metadata=metadata, timeout=WAIT_S):
                pass
        assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_shared_memory_cannot_be_shrunk_or_written(server: ThreadServer, good: Client) -> None:
    """I34, F26: neither through the descriptors that a client is given, nor by opening them again."""
    welcome, fds = say_hello(server.directory, pb.Hello(protocol=1, staging_bytes=1 << 16), WAIT_S)
    try:
        arena, generations, staging = fds
        for fd in fds:
            for change in (
                lambda fd=fd: os.ftruncate(fd, 0),
                lambda fd=fd: os.ftruncate(fd, 1 << 30),
                lambda fd=fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
            ):
                with pytest.raises(PermissionError):
                    change()
        for fd in (arena, generations):
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 8)
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", 0)
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            try:
                with pytest.raises(PermissionError):
                    os.pwrite(again, b"x", 0)
            finally:
                os.close(again)
        assert os.fstat(staging).st_size == welcome.staging_slots * welcome.slot_stride
    finally:
        for fd in fds:
            os.close(fd)

    def end(inside: Server) -> None:
        for session in inside.sessions:
            if not session.is_attached:
                inside.sessions.end(session, "the test has ended")

    server.call(end)
