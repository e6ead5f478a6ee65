"""What the owner does to prefixes over the admin socket: pins them, and walks through all that is cached."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from hicache.errors import BadRequest, LeaseExpired, NoRoom
from hicache.service import wire
from hicache.service.client import Durability, Prompt, connect
from hicache.service.errors import error_of
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.walks import MAX_WALKS
from hicache.tier import HOST
from tests.service.serving import WAIT_S, ThreadServer, thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, check, store
from tests.service.test_deadlines import leave_the_host

Ask = Callable[[str, Any, Any], Any]


@contextmanager
def owner(server: ThreadServer) -> Iterator[Ask]:
    """Calls methods of the service `Admin`."""
    with grpc.insecure_channel(wire.address(str(server.directory / wire.ADMIN_SOCKET))) as channel:

        def ask(method: str, request: Any, reply: Any) -> Any:
            path = wire.path_of(wire.ADMIN.methods_by_name[method])
            try:
                return channel.unary_unary(path, lambda each: each.SerializeToString(), reply.FromString)(
                    request, timeout=WAIT_S
                )
            except grpc.RpcError as error:
                raise error_of(error) from None

        yield ask


def walked(ask: Ask, max_nodes: int, **begin: Any) -> list[list[pb.BrowsedNode]]:
    """All steps of a walk."""
    steps, walk = [], 0
    while True:
        request = pb.BrowseRequest(walk=walk, max_nodes=max_nodes, **({} if walk else begin))
        reply = ask("Browse", request, pb.BrowseReply)
        steps.append(list(reply.nodes))
        walk = reply.walk
        if not walk:
            return steps


def test_a_pinned_prefix_stays_until_it_is_unpinned(tmp_path: Path) -> None:
    tokens = list(range(4 * PAGE))
    with thread_server(tmp_path, host_pages=16) as server, connect(server.directory) as client, owner(server) as ask:
        store(client, tokens)
        named = pb.NamedPrefix(namespace=NAMESPACE.digest, tokens=wire.pack_int32(tokens))
        assert ask("PinPrefix", named, pb.PinPrefixReply).num_tokens == 4 * PAGE
        assert ask("PinPrefix", named, pb.PinPrefixReply).num_tokens == 4 * PAGE
        for number in range(1, 6):
            store(client, range(1000 * number, 1000 * number + 8 * PAGE))
        assert check(client, tokens) == 4 * PAGE
        store(client, range(50_000, 50_000 + 4 * PAGE))
        more = pb.NamedPrefix(
            namespace=NAMESPACE.digest, tokens=wire.pack_int32(range(50_000, 50_000 + 4 * PAGE))
        )
        with pytest.raises(NoRoom, match="pins"):
            ask("PinPrefix", more, pb.PinPrefixReply)
        assert ask("UnpinPrefix", named, pb.UnpinPrefixReply).was_pinned
        assert not ask("UnpinPrefix", named, pb.UnpinPrefixReply).was_pinned
        assert ask("PinPrefix", more, pb.PinPrefixReply).num_tokens == 4 * PAGE
        for number in range(6, 12):
            store(client, range(1000 * number, 1000 * number + 8 * PAGE))
        assert client.lookup(Prompt(NAMESPACE, tokens)).num_tokens == 0


def test_a_prefix_that_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with thread_server(tmp_path) as server, connect(server.directory) as client, owner(server) as ask:
        for method, reply in (("PinPrefix", pb.PinPrefixReply), ("UnpinPrefix", pb.UnpinPrefixReply)):
            for digest in (b"", NAMESPACE.digest, b"x" * 100):
                with pytest.raises(BadRequest, match="namespace"):
                    ask(method, pb.NamedPrefix(namespace=digest, tokens=bytes(4)), reply)
        store(client, range(PAGE))
        for packed in (b"123", np.array([-1], "<i4").tobytes()):
            with pytest.raises(BadRequest, match="tokens"):
                ask("PinPrefix", pb.NamedPrefix(namespace=NAMESPACE.digest, tokens=packed), pb.PinPrefixReply)


def test_a_walk_shows_every_page_once_in_bounded_steps(tmp_path: Path) -> None:
    with thread_server(tmp_path, tenants={"red": {}, "blue": {}}) as server, owner(server) as ask:
        with connect(server.directory, tenant="red") as red, connect(server.directory, tenant="blue") as blue:
            red_prompts = [[*range(2 * PAGE), *range(1000 * n, 1000 * n + 3 * PAGE)] for n in range(1, 5)]
            for tokens in red_prompts:
                store(red, tokens, tenant="red")
            store(blue, range(4 * PAGE), tenant="blue")
            red.hint(Prompt(NAMESPACE, red_prompts[0]), priority=2, retain_s=60.0)
            with red.acquire(Prompt(NAMESPACE, red_prompts[1])):
                steps = walked(ask, 2, tokens=True)
        assert max(map(len, steps)) == 2
        nodes = [node for step in steps for node in step]
        assert sum(node.num_pages for node in nodes if node.tenant == "red") == 2 + 4 * 3
        assert sum(node.num_pages for node in nodes if node.tenant == "blue") == 4
        assert all(list(node.tiers) == [pb.TIER_HOST] for node in nodes)
        assert sum(node.num_leases for node in nodes) == 1
        assert [(node.priority, node.retained_ms > 50_000) for node in nodes if node.priority] == [(2, True)]
        # From the nodes alone each prompt can be put together again: parents come first.
        prefixes: list[tuple[bytes, int, bytes]] = []
        whole = set()
        for node in nodes:
            while prefixes and prefixes[-1][:2] != (node.namespace, node.first_page):
                prefixes.pop()
            assert prefixes or not node.first_page
            packed = (prefixes[-1][2] if prefixes else b"") + node.tokens
            prefixes.append((node.namespace, node.first_page + node.num_pages, packed))
            if not node.num_children:
                whole.add((node.tenant, packed))
        expected = {("red", wire.pack_int32(tokens)) for tokens in red_prompts}
        assert whole == expected | {("blue", wire.pack_int32(range(4 * PAGE)))}
        (only_blue,) = walked(ask, 100, tenant="blue")
        assert {node.tenant for node in only_blue} == {"blue"}
        assert not any(node.tokens for node in only_blue)
        assert walked(ask, 100, tenant="green") == [[]]


def test_walks_are_bounded_and_survive_what_changes_meanwhile(tmp_path: Path) -> None:
    with thread_server(tmp_path) as server, connect(server.directory) as client, owner(server) as ask:
        for number in range(6):
            store(client, range(1000 * number, 1000 * number + 2 * PAGE))

        def begin() -> int:
            return int(ask("Browse", pb.BrowseRequest(max_nodes=1), pb.BrowseReply).walk)

        first = begin()
        server.call(lambda inside: inside.cache.flush())
        assert not ask("Browse", pb.BrowseRequest(walk=first, max_nodes=10), pb.BrowseReply).nodes
        store(client, range(2 * PAGE))
        store(client, range(1000, 1000 + 2 * PAGE))
        walks = [begin() for _ in range(MAX_WALKS + 1)]
        for gone in (first, walks[0], 12345):
            with pytest.raises(LeaseExpired, match="walk"):
                ask("Browse", pb.BrowseRequest(walk=gone, max_nodes=1), pb.BrowseReply)
        for wrong in (0, 10_001, 2**32 - 1):
            with pytest.raises(BadRequest, match="max_nodes"):
                ask("Browse", pb.BrowseRequest(max_nodes=wrong), pb.BrowseReply)
        assert len(ask("Browse", pb.BrowseRequest(walk=walks[-1], max_nodes=10), pb.BrowseReply).nodes) == 1


def test_walks_that_nobody_goes_on_with_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with thread_server(tmp_path) as server, connect(server.directory) as client, owner(server) as ask:
        for number in range(3):
            store(client, range(1000 * number, 1000 * number + PAGE))
        lasting = ask("Browse", pb.BrowseRequest(max_nodes=1), pb.BrowseReply).walk
        with monkeypatch.context() as patched:
            patched.setattr("hicache.service.server.walks.FORGOTTEN_S", 0.0)
            browsed = ask("Browse", pb.BrowseRequest(max_nodes=1), pb.BrowseReply)
            verified = ask("Verify", pb.VerifyRequest(max_pages=1), pb.VerifyReply)
        with pytest.raises(LeaseExpired, match=str(browsed.walk)):
            ask("Browse", pb.BrowseRequest(walk=browsed.walk, max_nodes=1), pb.BrowseReply)
        with pytest.raises(LeaseExpired, match=str(verified.walk)):
            ask("Verify", pb.VerifyRequest(walk=verified.walk), pb.VerifyReply)
        step = ask("Browse", pb.BrowseRequest(walk=lasting, max_nodes=1), pb.BrowseReply)
        assert len(ask("Browse", pb.BrowseRequest(walk=step.walk, max_nodes=10), pb.BrowseReply).nodes) == 1


def test_a_verification_in_steps_reads_every_copy_once(tmp_path: Path) -> None:
    with thread_server(tmp_path) as server, connect(server.directory) as client, owner(server) as ask:
        for number in range(6):
            store(client, range(1000 * number, 1000 * number + 2 * PAGE))
        steps, walk = [], 0
        while True:
            reply = ask("Verify", pb.VerifyRequest(walk=walk, max_pages=3), pb.VerifyReply)
            steps.append(reply.num_pages)
            walk = reply.walk
            if not walk:
                break
        assert sum(steps) == 12
        assert len(steps) == 4  # two nodes of two pages make up three pages; the last step finds that none is left
        sample = ask("Verify", pb.VerifyRequest(one_in=2**32 - 1), pb.VerifyReply)
        assert sample.num_pages == 0
        with pytest.raises(LeaseExpired, match="walk"):
            ask("Verify", pb.VerifyRequest(walk=12345), pb.VerifyReply)
        with pytest.raises(BadRequest, match="one_in"):
            ask("Verify", pb.VerifyRequest(walk=12345, one_in=2), pb.VerifyReply)


def test_what_would_be_found_is_told_and_what_is_on_nvme_alone_is_fetched(tmp_path: Path) -> None:
    options = {"nvme__bytes": 256 * LAYOUT.page_bytes, "nvme__dir": str(tmp_path / "nvme")}
    tokens = list(range(4 * PAGE))
    named = pb.NamedPrefix(namespace=NAMESPACE.digest, tokens=wire.pack_int32([*tokens[: 3 * PAGE + 5], 7, 7]))
    with thread_server(tmp_path, **options) as server, connect(server.directory) as client, owner(server) as ask:
        store(client, tokens, durability=Durability.WAIT)
        client.hint(Prompt(NAMESPACE, tokens), priority=1)
        ask("PinPrefix", pb.NamedPrefix(namespace=NAMESPACE.digest, tokens=wire.pack_int32(range(PAGE))),
            pb.PinPrefixReply)  # fmt: skip
        server.run(leave_the_host(server))
        found = ask("Explain", named, pb.ExplainReply)
        assert (found.num_tokens, found.partial_tokens, found.pinned_tokens) == (3 * PAGE, 5, PAGE)
        assert [(run.tier, run.num_tokens) for run in found.runs] == [(pb.TIER_NVME, 3 * PAGE)]
        assert found.priority == 1
        fetch = pb.PrefetchPrefixRequest(prefix=named, within_ms=10_000, max_pages=2)
        begun = ask("PrefetchPrefix", fetch, pb.PrefetchReply)
        assert (begun.num_there, begun.num_begun, begun.num_left_out) == (0, 2, 1)
        server.until(lambda inside: inside.cache.tiers[HOST].num_free == 62, within_s=WAIT_S)
        fetch.within_ms = 0
        with pytest.raises(BadRequest, match="within_ms"):
            ask("PrefetchPrefix", fetch, pb.PrefetchReply)
