"""The owner's `Verify`: damage in the arena and on NVMe is found, forgotten, and never served."""

from pathlib import Path
from typing import Any

import grpc

from hicache.service import wire
from hicache.service.client import Durability, Prompt, connect
from hicache.service.proto import hicache_pb2 as pb
from hicache.tier import HOST
from tests.service.serving import WAIT_S, ThreadServer, thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, check, page_bytes, store
from tests.service.test_deadlines import leave_the_host


def _verify(server: ThreadServer) -> tuple[int, int, int]:
    with grpc.insecure_channel(wire.address(str(server.directory / wire.ADMIN_SOCKET))) as channel:
        call = channel.unary_unary("/hicache.v1.Admin/Verify", bytes, pb.VerifyReply.FromString)
        reply = call(b"", timeout=WAIT_S)
    return reply.num_pages, reply.num_corrupt, reply.num_failed


def test_a_page_that_changed_in_the_arena_is_forgotten(tmp_path: Path) -> None:
    with thread_server(tmp_path) as server, connect(server.directory) as client:
        store(client, range(4 * PAGE))
        assert _verify(server) == (4, 0, 0)
        server.call(_damage_a_slot)
        assert _verify(server) == (4, 1, 0)
        assert client.lookup(Prompt(NAMESPACE, range(4 * PAGE))).num_tokens == 2 * PAGE
        assert check(client, range(4 * PAGE)) == 2 * PAGE
        assert _verify(server) == (2, 0, 0)
        server.call(lambda inside: inside.cache.tree.check_integrity())


def test_a_page_that_changed_on_nvme_is_forgotten(tmp_path: Path) -> None:
    """I04, F10: as a read of it would have found."""
    options = {"nvme__bytes": 256 * LAYOUT.page_bytes, "nvme__dir": str(tmp_path / "nvme")}
    with thread_server(tmp_path, **options) as server, connect(server.directory) as client:
        store(client, range(4 * PAGE), durability=Durability.WAIT)
        assert _verify(server) == (8, 0, 0)
        server.run(leave_the_host(server))
        assert _verify(server) == (4, 0, 0)
        _damage_a_segment(tmp_path / "nvme")
        assert _verify(server) == (4, 1, 0)
        assert check(client, range(4 * PAGE)) < 4 * PAGE


def test_a_page_that_changed_in_the_arena_is_found_when_it_comes_back_from_nvme(tmp_path: Path) -> None:
    """I04: its checksums were taken at the commit, and went to NVMe with it."""
    options = {"nvme__bytes": 256 * LAYOUT.page_bytes, "nvme__dir": str(tmp_path / "nvme")}
    with thread_server(tmp_path, **options) as server, connect(server.directory) as client:
        store(client, range(4 * PAGE))
        server.call(_damage_a_slot)
        server.run(leave_the_host(server))
        assert client.lookup(Prompt(NAMESPACE, range(4 * PAGE))).num_tokens == 4 * PAGE, "nobody has looked yet"
        assert check(client, range(4 * PAGE)) == 2 * PAGE
        server.call(lambda inside: inside.cache.tree.check_integrity())


def _damage_a_slot(inside: Any) -> None:
    """Flip a bit of the third page in the arena."""
    (session,) = inside.sessions
    (node,) = inside.cache.tree.match(session.namespaces[1].own, range(PAGE)).nodes
    inside.cache.tiers[HOST].view(int(node.slots(HOST)[2]))[17] ^= 1


def _damage_a_segment(directory: Path) -> None:
    """Flip a bit of the third page, wherever it lies in the files."""
    page = page_bytes(range(4 * PAGE), 2)
    for path in sorted(directory.rglob("*")):
        if path.is_file() and (at := path.read_bytes().find(page)) >= 0:
            with path.open("r+b") as file:
                file.seek(at + 99)
                file.write(bytes([page[99] ^ 1]))
            return
    raise AssertionError("the page is in none of the files")
