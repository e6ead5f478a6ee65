"""Clients on other machines: the same calls, with pages in messages, behind a token and TLS."""

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import trustme
from crc32c import crc32c

from hicache.errors import BadRequest, CorruptPage, LeaseExpired
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.service import wire
from hicache.service.client import Client, Outcome, Prompt, connect, connect_async
from hicache.service.config import ServeConfig
from hicache.service.errors import Forbidden, Unreachable, error_of
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server import data, edge, pieces
from hicache.tier import HOST
from tests.repository import ROOT
from tests.service.serving import WAIT_S, ServerProcess, ThreadServer, arguments, settings, thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, check, page_bytes, store

TOKEN: Final = "an access token"
DIGEST: Final = hashlib.sha256(TOKEN.encode()).hexdigest()
PLAIN: Final[dict[str, Any]] = {
    "tcp__listen": "127.0.0.1:0", "tcp__token_sha256": DIGEST, "tcp__plain": True,
}  # fmt: skip


class Authority:
    """A certificate authority, with a server's and a client's certificate as files."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        self.ca = directory / "ca.pem"
        authority.cert_pem.write_to_path(self.ca)
        self.server = self._issue(authority, directory, "127.0.0.1", "server")
        self.client = self._issue(authority, directory, "engine@example.org", "client")

    def _issue(self, authority: trustme.CA, directory: Path, identity: str, name: str) -> tuple[Path, Path]:
        issued, cert, key = authority.issue_cert(identity), directory / f"{name}.pem", directory / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
        key.chmod(0o600)
        return cert, key


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


def tls(authority: Authority, **more: object) -> dict[str, Any]:
    cert, key = authority.server
    return {
        "tcp__listen": "127.0.0.1:0", "tcp__token_sha256": DIGEST, "tcp__cert": str(cert), "tcp__key": str(key), **more,
    }  # fmt: skip


def url(server: ThreadServer, scheme: str = "tls") -> str:
    return f"{scheme}://127.0.0.1:{server.call(lambda inside: inside.tcp_port)}"


@pytest.fixture
def remote(tmp_path: Path, authority: Authority) -> Iterator[tuple[ThreadServer, Client]]:
    with (
        thread_server(tmp_path, **tls(authority)) as server,
        connect(url(server), token=TOKEN, ca=authority.ca, name="far") as client,
    ):
        yield server, client


def test_what_is_stored_from_afar_is_found_near_and_from_afar(remote: tuple[ThreadServer, Client]) -> None:
    server, client = remote
    tokens = range(5 * PAGE + 3)
    assert client.lookup(Prompt(NAMESPACE, tokens)).num_tokens == 0
    assert store(client, tokens) == 5 * PAGE
    assert check(client, tokens) == 5 * PAGE
    with connect(server.directory) as near:
        assert check(near, tokens) == 5 * PAGE
        store(near, range(1000, 1000 + 2 * PAGE))
    assert check(client, range(1000, 1000 + 2 * PAGE)) == 2 * PAGE
    with client.reserve(Prompt(NAMESPACE, range(2000, 2000 + PAGE))) as reservation:
        wrong = reservation.commit(checksums=bytes(4))
    assert (wrong.outcome, wrong.reason) == (Outcome.REFUSED, "corrupt_page")
    server.call(lambda inside: inside.cache.tree.check_integrity())


def test_leases_that_overlap_share_pages_and_end_alone(remote: tuple[ThreadServer, Client]) -> None:
    server, client = remote
    tokens = list(range(4 * PAGE))
    store(client, tokens)
    with client.acquire(Prompt(NAMESPACE, tokens)) as long:
        with client.acquire(Prompt(NAMESPACE, tokens[: 2 * PAGE])) as short:
            assert short.read() == page_bytes(tokens, 0) + page_bytes(tokens, 1)
        assert [bytes(view) for view in long] == [page_bytes(tokens, index) for index in range(4)]
        assert long.array(3).tobytes() == page_bytes(tokens, 3)
        kept = client.acquire(Prompt(NAMESPACE, tokens))
        del kept  # given back with the next beat
    server.until(lambda inside: inside.cache.tree.num_leases == 0, within_s=WAIT_S)
    assert server.call(lambda inside: inside.cache.flush()) == 0
    # The same slots again, with other pages: nothing of before is taken for them.
    others = range(7000, 7000 + 8 * PAGE)
    store(client, others)
    assert check(client, others) == 8 * PAGE


def test_what_is_leased_afar_ends_with_the_connection(tmp_path: Path) -> None:
    """I23."""
    with thread_server(tmp_path, **PLAIN) as server:
        client = connect(url(server, "tcp"), token=TOKEN)
        store(client, range(2 * PAGE))
        lease = client.acquire(Prompt(NAMESPACE, range(2 * PAGE)))
        client.reserve(Prompt(NAMESPACE, range(3 * PAGE)))
        assert server.call(lambda inside: inside.cache.tree.num_leases) == 2
        client.close()
        server.until(lambda inside: len(inside.sessions) == 0, within_s=WAIT_S)
        assert server.call(lambda inside: inside.cache.tree.num_leases) == 0
        with pytest.raises(LeaseExpired):
            lease.check()


def test_a_piece_that_comes_wrong_is_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I04: the lease is given back with the next beat, and asked for again it is right."""
    read = pieces.read_piece

    def flipped(host: Any, session: Any, request: pb.ReadRequest) -> pb.ReadReply:
        reply = read(host, session, request)
        reply.data = bytes([reply.data[0] ^ 1]) + reply.data[1:]
        return reply

    with (
        thread_server(tmp_path, times__lease_s=1.0, **PLAIN) as server,
        connect(url(server, "tcp"), token=TOKEN) as client,
    ):
        store(client, range(3 * PAGE))
        with monkeypatch.context() as wrong:
            wrong.setattr(data, "read_piece", flipped)
            with pytest.raises(CorruptPage):
                client.acquire(Prompt(NAMESPACE, range(3 * PAGE)))
        server.until(lambda inside: inside.cache.tree.num_leases == 0, within_s=WAIT_S)
        assert check(client, range(3 * PAGE)) == 3 * PAGE


def test_pages_longer_than_a_message_come_in_pieces(tmp_path: Path) -> None:
    layout = KVLayout.uniform(num_layers=5, num_kv_heads=8, head_dim=128, dtype=KVDtype.FLOAT32, page_size=64)
    assert layout.page_bytes == 2.5 * wire.PIECE_BYTES
    keys = {"num_layers": 5, "num_kv_heads": 8, "head_dim": 128, "page_size": 64}
    namespace, tokens = Namespace(model="m", layout=layout), range(3 * 64)
    pages = [page_bytes(range(index), 0) * (layout.page_bytes // LAYOUT.page_bytes) for index in range(3)]
    options = {f"layout__{key}": value for key, value in keys.items()} | {
        "host__bytes": 8 * layout.page_bytes, "limits__staging_bytes": 4 * layout.page_bytes,
        "limits__max_tokens": 1000,
    }  # fmt: skip
    with thread_server(tmp_path, **PLAIN, **options) as server, connect(url(server, "tcp"), token=TOKEN) as client:
        with client.reserve(Prompt(namespace, tokens)) as reservation:
            for view, page in zip(reservation, pages, strict=True):
                view[:] = page
            assert reservation.commit().num_tokens == 3 * 64
        with client.acquire(Prompt(namespace, tokens)) as lease:
            assert lease.read() == b"".join(pages)


def test_pieces_wait_until_those_before_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I21: a client's threads ask for more at once than a server has on its way to one session, as over a slow
    connection; each gets all that it asked for."""
    monkeypatch.setattr(edge, "COUNTED_BYTES", 1)
    monkeypatch.setattr(edge, "MAX_UNREAD_BYTES", LAYOUT.page_bytes)
    prompts = [range(1000 * number, 1000 * number + 4 * PAGE) for number in range(8)]
    with (
        thread_server(tmp_path, host_pages=256, **PLAIN) as server,
        connect(server.directory) as near,
        connect(url(server, "tcp"), token=TOKEN) as far,
        ThreadPoolExecutor(len(prompts)) as threads,
    ):
        for tokens in prompts:
            store(near, tokens)
        for _ in range(5):
            assert list(threads.map(partial(check, far), prompts)) == [4 * PAGE] * len(prompts)


def test_the_awaited_client_means_the_same(tmp_path: Path, authority: Authority) -> None:
    tokens = range(3 * PAGE)

    async def use(server: ThreadServer) -> None:
        async with connect_async(url(server), token=TOKEN, ca=authority.ca) as client:
            async with await client.reserve(Prompt(NAMESPACE, tokens)) as reservation:
                for index, view in enumerate(reservation):
                    view[:] = page_bytes(tokens, index)
                assert (await reservation.commit()).num_tokens == 3 * PAGE
            async with await client.acquire(Prompt(NAMESPACE, tokens)) as lease:
                assert lease.read() == b"".join([page_bytes(tokens, index) for index in range(3)])

    with thread_server(tmp_path, **tls(authority)) as server:
        asyncio.run(use(server))
        server.until(lambda inside: len(inside.sessions) == 0, within_s=WAIT_S)


def test_who_has_no_token_or_no_certificate_is_not_let_in(tmp_path: Path, authority: Authority) -> None:
    client_ca = {"tcp__client_ca": str(authority.ca)}
    with thread_server(tmp_path, tenants={"red": {}}, **tls(authority, **client_ca)) as server:
        options: dict[str, Any] = {"ca": authority.ca, "certificate": authority.client, "timeout_s": 5.0}
        with connect(url(server), token=TOKEN, tenant="red", **options) as client:
            assert store(client, range(PAGE), tenant="red") == PAGE
            with connect(server.directory, tenant="red") as near:
                assert check(near, range(PAGE), tenant="red") == PAGE
        with pytest.raises(Forbidden):
            connect(url(server), token="another", tenant="red", **options)
        with pytest.raises(Forbidden):
            connect(url(server), token=TOKEN, **options)
        with pytest.raises(Unreachable):
            connect(url(server), token=TOKEN, tenant="red", **{**options, "certificate": None})
        with pytest.raises(Unreachable):
            connect(url(server), token=TOKEN, tenant="red", **{**options, "ca": None})
        with pytest.raises(Unreachable):
            connect(url(server, "tcp"), token=TOKEN, tenant="red", timeout_s=5.0)
        server.until(lambda inside: len(inside.sessions) == 0, within_s=WAIT_S)
        assert server.call(lambda inside: inside.sessions.num_begun) == 2


@contextmanager
def called(server: ThreadServer) -> Iterator[Callable[..., Any]]:
    """Calls methods at the TCP port, raw."""
    with grpc.insecure_channel(url(server, "tcp").removeprefix("tcp://")) as channel:

        def call(service: Any, method: str, request: Any, reply: Any, metadata: Any = ()) -> Any:
            path = wire.path_of(service.methods_by_name[method])
            asking: Any = channel.unary_unary(path, lambda each: each.SerializeToString(), reply.FromString)
            try:
                return asking(request, timeout=WAIT_S, metadata=metadata)
            except grpc.RpcError as error:
                raise error_of(error) from None

        yield call


def test_pieces_that_are_not_the_sessions_own_are_refused(tmp_path: Path) -> None:
    """I34: out of bounds, of another session, with another sum; and nothing but sessions begins without a token."""
    with thread_server(tmp_path, **PLAIN) as server, called(server) as call, connect(server.directory) as client:
        store(client, range(2 * PAGE))
        with pytest.raises(Forbidden):
            call(wire.DOOR, "Enter", pb.Hello(protocol=wire.PROTOCOL), pb.Welcome)
        access = ((wire.ACCESS_METADATA, TOKEN.encode()),)
        with pytest.raises(BadRequest, match="staging_bytes"):
            call(wire.DOOR, "Enter", pb.Hello(protocol=wire.PROTOCOL, staging_bytes=1), pb.Welcome, access)
        # Whoever has a session's token may have its pages this way too, shared memory or not.
        mine = ((wire.TOKEN_METADATA, client.welcome.token),)
        lease, page = client.acquire(Prompt(NAMESPACE, range(2 * PAGE))), LAYOUT.page_bytes
        ours: dict[str, Any] = {"lease": lease._granted.lease_id, "index": 1, "offset": 1, "length": page - 1}
        got = call(wire.CACHE, "Read", pb.ReadRequest(**ours), pb.ReadReply, mine)
        assert (got.data, got.checksum) == (page_bytes(range(2 * PAGE), 1)[1:], crc32c(got.data))
        for field, value in (
            ("index", 2), ("index", 2**63), ("offset", page), ("length", 0), ("length", page), ("length", 2**64 - 1),
        ):  # fmt: skip
            with pytest.raises(BadRequest, match=field):
                call(wire.CACHE, "Read", pb.ReadRequest(**{**ours, field: value}), pb.ReadReply, mine)
        other = call(wire.DOOR, "Enter", pb.Hello(protocol=wire.PROTOCOL), pb.Welcome, access)
        theirs = ((wire.TOKEN_METADATA, other.token),)
        with pytest.raises(LeaseExpired):
            call(wire.CACHE, "Read", pb.ReadRequest(**ours), pb.ReadReply, theirs)
        lease.release()
        with pytest.raises(LeaseExpired):
            call(wire.CACHE, "Read", pb.ReadRequest(**ours), pb.ReadReply, mine)

        with client.reserve(Prompt(NAMESPACE, range(3 * PAGE))) as reservation:
            piece: dict[str, Any] = {"reservation": reservation._reserved.reservation_id, "data": b"abc"}
            piece["checksum"] = crc32c(b"abc")
            call(wire.CACHE, "Write", pb.WriteRequest(**piece, offset=page - 3), pb.WriteReply, mine)
            assert reservation[0][-3:] == b"abc"
            for field, changed in (("index", {"index": 1}), ("data", {"offset": page - 2}), ("data", {"data": b""})):
                with pytest.raises(BadRequest, match=field):
                    call(wire.CACHE, "Write", pb.WriteRequest(**{**piece, **changed}), pb.WriteReply, mine)
            with pytest.raises(CorruptPage):
                call(wire.CACHE, "Write", pb.WriteRequest(**{**piece, "checksum": 1}), pb.WriteReply, mine)
            with pytest.raises(LeaseExpired):
                call(wire.CACHE, "Write", pb.WriteRequest(**piece), pb.WriteReply, theirs)
        assert server.call(lambda inside: inside.cache.tiers[HOST].num_free) == 62


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("tcp.listen", {"listen": "nowhere", "token_sha256": DIGEST}),
        ("tcp.listen", {"listen": "host:70000", "token_sha256": DIGEST}),
        ("tcp.listen", {"token_sha256": DIGEST}),
        ("tcp.token_sha256", {"listen": "127.0.0.1:0", "plain": True}),
        ("tcp.token_sha256", {"listen": "127.0.0.1:0", "plain": True, "token_sha256": "secret"}),
        ("tcp.plain", {"listen": "0.0.0.0:1", "token_sha256": DIGEST, "plain": True}),
        ("tcp.plain", {"listen": "example.org:1", "token_sha256": DIGEST, "plain": True}),
        ("tcp.cert", {"listen": "0.0.0.0:1", "token_sha256": DIGEST}),
        ("tcp.key", {"listen": "0.0.0.0:1", "token_sha256": DIGEST, "cert": "c"}),
        ("tcp.cert", {"listen": "[::1]:1", "token_sha256": DIGEST, "cert": "c", "plain": True}),
    ],
)
def test_settings_that_would_let_anybody_in_are_refused(tmp_path: Path, key: str, table: dict[str, object]) -> None:
    with pytest.raises(BadRequest) as refused:
        ServeConfig.checked({**settings(tmp_path), "tcp": table})
    assert refused.value.field == key


def test_files_and_ports_that_cannot_be_used_are_refused(tmp_path: Path, authority: Authority) -> None:
    _, key = authority.server
    loose = tmp_path / "loose.key"
    loose.write_bytes(key.read_bytes())
    loose.chmod(0o644)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("tcp.cert", {"tcp__cert": str(tmp_path / "none")}),
        ("tcp.key", {"tcp__key": str(loose)}),
        ("tcp.cert", {"tcp__key": str(authority.client[1])}),
        ("tcp.client_ca", {"tcp__client_ca": str(key)}),
    ]
    for field, changed in wrong:
        with pytest.raises(BadRequest) as refused:
            ThreadServer(settings(tmp_path, **tls(authority, **changed)))
        assert refused.value.field == field
    with thread_server(tmp_path, **PLAIN) as server:
        busy = {**PLAIN, "tcp__listen": url(server, "tcp").removeprefix("tcp://")}
        with pytest.raises(BadRequest, match="in use"):
            ThreadServer(settings(tmp_path, **busy, socket_dir=str(tmp_path / "other")))
        assert not list((tmp_path / "other").glob("*.sock"))


@pytest.mark.parametrize("wrong", ["tls://host", "tls://host:1/path", "tls://a@host:1", "tls://host:99999"])
def test_addresses_that_are_none_are_refused(wrong: str) -> None:
    with pytest.raises(BadRequest, match="socket_dir"):
        connect(wrong, token=TOKEN)
    with pytest.raises(BadRequest, match="token"):
        connect("tls://host:1")
    with pytest.raises(BadRequest, match="ca"):
        connect("tcp://host:1", token=TOKEN, ca=__file__)


def test_the_command_says_where_it_listens(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.server
    options: dict[str, Any] = {"tcp__token_sha256": f'"{DIGEST}"', "tcp__cert": f'"{cert}"', "tcp__key": f'"{key}"'}
    server = ServerProcess(tmp_path, ["--tcp", "127.0.0.1:0", *arguments(**options)])
    try:
        where = server.said.rpartition(" ")[2]
        assert where.startswith("tls://127.0.0.1:")
        with connect(where, token=TOKEN, ca=authority.ca) as client:
            assert store(client, range(PAGE)) == PAGE
            assert check(client, range(PAGE)) == PAGE
    finally:
        assert server.stop() == 0
    assert TOKEN not in server.errors()
    refused = subprocess.run(
        [sys.executable, "-m", "hicache.tools", "serve", "--tcp", "0.0.0.0:1", "--check", *arguments()],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "tcp.token_sha256" in refused.stderr
