"""A server and its clients over real sockets: what is stored is found, read and given back."""

import asyncio
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from crc32c import crc32c
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hicache.errors import BadRequest, Closed, LeaseExpired
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.service import wire
from hicache.service.client import Durability, Outcome, Prompt, connect, connect_async
from hicache.service.errors import Draining, Forbidden, LayoutMismatch, LimitReached, Unreachable
from hicache.service.proto import hicache_pb2 as pb
from hicache.tier import HOST
from tests.repository import ROOT
from tests.service.serving import WAIT_S, ThreadServer, thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, check, page_bytes, store


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    """One server for the tests that leave nothing behind but cached pages; each uses token ids of its own."""
    with thread_server(tmp_path_factory.mktemp("server")) as running:
        # Threads of its pools begin with their first work, and are the server's.
        with connect(running.directory) as client:
            store(client, range(16 * PAGE))
        yield running


@pytest.fixture(autouse=True)
def sessions_have_ended(server: ThreadServer) -> Iterator[None]:
    """What a test's clients had is given back before it is looked whether the test has left something behind."""
    yield
    server.until(lambda inside: len(inside.sessions) == 0, within_s=WAIT_S)


def _free_pages(server: ThreadServer) -> int:
    return server.call(lambda inside: inside.cache.tiers[HOST].num_free)


def test_what_is_stored_is_found_and_read(server: ThreadServer) -> None:
    tokens = list(range(1000, 1000 + 5 * PAGE + 3))
    with connect(server.directory) as client:
        assert client.lookup(Prompt(NAMESPACE, tokens)).num_tokens == 0
        assert store(client, tokens) == 5 * PAGE
        found = client.lookup(Prompt(NAMESPACE, tokens))
        assert found.num_tokens == 5 * PAGE
        assert found.runs == (("host", 5 * PAGE),)
        assert check(client, tokens) == 5 * PAGE
    server.call(lambda inside: inside.cache.tree.check_integrity())


def test_tokens_travel_once(server: ThreadServer) -> None:
    tokens = list(range(2000, 2000 + 3 * PAGE))
    with connect(server.directory) as client:
        store(client, tokens)
        prompt = Prompt(NAMESPACE, tokens)
        client.lookup(prompt)
        prompt.extend(range(9000, 9000 + PAGE + 1))
        handle, rest = prompt.since(client._attachment, len(prompt))
        assert handle
        assert len(rest) == 4 * (PAGE + 1)
        assert client.lookup(prompt).num_tokens == 3 * PAGE
        with client.reserve(prompt) as reservation:
            assert (reservation.first_page, len(reservation)) == (3, 1)
            reservation[0][:] = bytes(LAYOUT.page_bytes)
            assert reservation.commit().num_tokens == 4 * PAGE
        assert client.lookup(prompt).num_tokens == 4 * PAGE


def test_a_handle_whose_prefix_has_left_is_no_error_of_the_caller(server: ThreadServer) -> None:
    tokens = list(range(3000, 3000 + 2 * PAGE))
    with connect(server.directory) as client:
        store(client, tokens)
        prompt = Prompt(NAMESPACE, tokens)
        assert client.lookup(prompt).num_tokens == 2 * PAGE
        server.call(lambda inside: inside.cache.flush())
        assert client.lookup(prompt).num_tokens == 0
        assert store(client, tokens) == 2 * PAGE


def test_nothing_is_found_before_it_is_committed(server: ThreadServer) -> None:
    """I11, C19."""
    tokens = list(range(4000, 4000 + 2 * PAGE))
    server.call(lambda inside: inside.cache.flush())  # what others have stored may fill it
    free = _free_pages(server)
    with connect(server.directory) as client:
        with client.reserve(Prompt(NAMESPACE, tokens)) as reservation:
            assert reservation.outcome is Outcome.ACCEPTED
            assert _free_pages(server) == free - 2
            assert client.lookup(Prompt(NAMESPACE, tokens)).num_tokens == 0
        assert client.lookup(Prompt(NAMESPACE, tokens)).num_tokens == 0
        assert _free_pages(server) == free
        with pytest.raises(LeaseExpired):
            reservation.commit()


def test_a_second_writer_of_the_same_pages_is_told_that_they_are_there(server: ThreadServer) -> None:
    """I08."""
    tokens = list(range(5000, 5000 + 2 * PAGE))
    with connect(server.directory) as client, connect(server.directory) as other:
        first, second = client.reserve(Prompt(NAMESPACE, tokens)), other.reserve(Prompt(NAMESPACE, tokens))
        for reservation in (first, second):
            for index, view in enumerate(reservation):
                view[:] = page_bytes(tokens, index)
        free = _free_pages(server)
        assert first.commit().outcome is Outcome.RESIDENT
        assert second.commit().outcome is Outcome.RESIDENT
        assert _free_pages(server) == free + 2
        assert other.reserve(Prompt(NAMESPACE, tokens)).outcome is Outcome.RESIDENT
        assert check(client, tokens) == 2 * PAGE


def test_a_page_whose_checksum_is_another_one_is_refused(server: ThreadServer) -> None:
    tokens = list(range(6000, 6000 + PAGE))
    with connect(server.directory) as client:
        data = page_bytes(tokens, 0)
        for checksum, outcome in ((crc32c(data) ^ 1, Outcome.REFUSED), (crc32c(data), Outcome.RESIDENT)):
            reservation = client.reserve(Prompt(NAMESPACE, tokens))
            reservation[0][:] = data
            committed = reservation.commit(checksums=struct.pack("<I", checksum))
            assert committed.outcome is outcome
        assert committed.reason == ""
        assert check(client, tokens) == PAGE


def test_leased_pages_stay_and_released_ones_may_leave(server: ThreadServer) -> None:
    """I10: what is leased is neither moved nor given to others, however much is stored."""
    tokens = list(range(7000, 7000 + 4 * PAGE))
    with connect(server.directory) as client:
        store(client, tokens)
        with client.acquire(Prompt(NAMESPACE, tokens)) as lease:
            for round_ in range(10):
                store(client, list(range(20_000 + 1000 * round_, 20_000 + 1000 * round_ + 10 * PAGE)))
            assert [bytes(view) for view in lease] == [page_bytes(tokens, index) for index in range(4)]
        for round_ in range(10):
            store(client, list(range(40_000 + 1000 * round_, 40_000 + 1000 * round_ + 10 * PAGE)))
        assert client.lookup(Prompt(NAMESPACE, tokens)).num_tokens < 4 * PAGE


def test_a_reader_that_outlives_its_lease_is_told_so(server: ThreadServer) -> None:
    """I25, C09: the slots are given to others while the reader still looks at them. Other leases are read on."""
    tokens, others = list(range(8000, 8000 + 2 * PAGE)), [list(range(at, at + PAGE)) for at in (8100, 8200)]
    with connect(server.directory) as client:
        for each in (tokens, *others):
            store(client, each)
        lease = client.acquire(Prompt(NAMESPACE, tokens))
        leases = [client.acquire(Prompt(NAMESPACE, each)) for each in others]
        kept = lease.array(0)

        def end(inside: Any) -> None:
            (session,) = inside.sessions
            inside.sessions.release(session, min(session.leases))
            inside.cache.flush()

        server.call(end)
        with pytest.raises(LeaseExpired):
            lease.read(0)
        for other, each in zip(leases, others, strict=True):
            with other:
                assert other.read(0) == page_bytes(each, 0)
        with pytest.raises(LeaseExpired), lease:
            assert kept.flags.writeable is False
        del kept


def test_views_cannot_be_written_to(server: ThreadServer) -> None:
    """I34."""
    tokens = list(range(8500, 8500 + PAGE))
    with connect(server.directory) as client:
        store(client, tokens)
        with client.acquire(Prompt(NAMESPACE, tokens)) as lease:
            with pytest.raises(TypeError):
                lease[0][0] = 1
            with pytest.raises(ValueError, match="read-only"):
                lease.array(0)[0] = 1


def test_arrays_and_tensors_are_the_same_memory(server: ThreadServer) -> None:
    tokens = list(range(8700, 8700 + PAGE))
    with connect(server.directory) as client:
        store(client, tokens)
        with client.acquire(Prompt(NAMESPACE, tokens)) as lease:
            array, tensor = lease.array(0), lease.tensor(0)
            assert array.tobytes() == tensor.numpy().tobytes() == page_bytes(tokens, 0)
            assert tensor.data_ptr() == array.ctypes.data
            del array, tensor


def test_pages_that_the_caller_has_are_left_out(server: ThreadServer) -> None:
    """From the middle of what is stored as one run: the pages before are kept in the cache, and not in place."""
    tokens = list(range(8900, 8900 + 6 * PAGE))
    with connect(server.directory) as client:
        store(client, tokens)
        with client.acquire(Prompt(NAMESPACE, tokens), first_page=4) as lease:
            assert (lease.first_page, len(lease), lease.num_tokens) == (4, 2, 6 * PAGE)
            assert lease.read() == page_bytes(tokens, 4) + page_bytes(tokens, 5)
            assert server.call(lambda inside: [session.num_pages for session in inside.sessions]) == [2]
            assert server.call(lambda inside: inside.cache.flush()) == 6
        for first_page in (6, 7):
            with client.acquire(Prompt(NAMESPACE, tokens), first_page=first_page) as lease:
                assert (lease.first_page, len(lease), lease.num_tokens) == (6, 0, 0)
        server.call(lambda inside: inside.cache.tree.check_integrity())


def test_part_of_a_page_can_be_read_too(server: ThreadServer) -> None:
    """The page that shares some tokens behind the last whole one: it is kept as the others are, if asked for."""
    tokens = list(range(8800, 8800 + 3 * PAGE))
    with connect(server.directory) as client:
        store(client, tokens)
        prompt = Prompt(NAMESPACE, [*tokens[: 2 * PAGE + 5], 1, 2, 3])
        assert client.lookup(prompt).partial_tokens == 5
        with client.acquire(prompt) as lease:
            assert (len(lease), lease.partial, lease.partial_tokens) == (2, None, 0)
        with client.acquire(prompt, partial=True) as lease:
            assert (len(lease), lease.num_tokens, lease.partial_tokens) == (2, 2 * PAGE, 5)
            assert lease.partial is not None
            assert lease.partial.tobytes() == page_bytes(tokens, 2)
            assert server.call(lambda inside: inside.cache.flush()) == 2
            lease.check()
            assert lease.partial.tobytes() == page_bytes(tokens, 2)
        with client.acquire(prompt, partial=True) as lease:
            assert (len(lease), lease.partial) == (2, None)


def test_a_client_without_staging_reads_and_cannot_write(server: ThreadServer) -> None:
    tokens = list(range(8600, 8600 + PAGE))
    with connect(server.directory) as writer, connect(server.directory, staging_bytes=0) as reader:
        store(writer, tokens)
        assert check(reader, tokens) == PAGE
        with pytest.raises(BadRequest, match="staging_bytes"):
            reader.reserve(Prompt(NAMESPACE, range(8700, 8700 + PAGE)))


def test_room_runs_out_by_parts(server: ThreadServer) -> None:
    """Staging for 16 pages holds 16; the others are left out with the reason, until these are given back."""
    tokens = list(range(60_000, 60_000 + 20 * PAGE))
    with connect(server.directory) as client:
        with client.reserve(Prompt(NAMESPACE, tokens)) as reservation:
            assert (len(reservation), reservation.reason) == (16, "no_room")
            refused = client.reserve(Prompt(NAMESPACE, range(61_000, 61_000 + PAGE)))
            assert (refused.outcome, refused.reason) == (Outcome.REFUSED, "no_room")
        with client.reserve(Prompt(NAMESPACE, tokens[: 4 * PAGE])) as reservation:
            assert (len(reservation), reservation.reason) == (4, "")


def test_pages_stand_on_what_is_before_them(server: ThreadServer) -> None:
    """I05: pages are refused when those before them are not cached."""
    with connect(server.directory) as client:
        reservation = client.reserve(Prompt(NAMESPACE, range(62_000, 62_000 + 3 * PAGE)), first_page=2)
        assert (reservation.outcome, reservation.reason) == (Outcome.REFUSED, "not_resident")


def test_durable_without_nvme_says_why_not(server: ThreadServer) -> None:
    tokens = list(range(63_000, 63_000 + PAGE))
    with connect(server.directory) as client, client.reserve(Prompt(NAMESPACE, tokens)) as reservation:
        committed = reservation.commit(durability=Durability.WAIT)
        assert (committed.outcome, committed.reason) == (Outcome.RESIDENT, "tier_unavailable")
        assert committed.sequence == 1
        assert client.durable_sequence == 1


def test_a_pin_keeps_a_prefix_until_it_is_taken_back(server: ThreadServer) -> None:
    tokens = list(range(64_000, 64_000 + 2 * PAGE))
    with connect(server.directory) as client:
        store(client, tokens)
        pinned = client.pin(Prompt(NAMESPACE, tokens))
        assert pinned.num_tokens == 2 * PAGE
        assert server.call(lambda inside: inside.cache.flush()) == 2
        assert client.lookup(Prompt(NAMESPACE, tokens)).num_tokens == 2 * PAGE
        client.unpin(pinned)
        assert server.call(lambda inside: inside.cache.flush()) == 0


def test_prefetching_what_is_there_begins_nothing(server: ThreadServer) -> None:
    tokens = list(range(65_000, 65_000 + 2 * PAGE))
    with connect(server.directory) as client:
        store(client, tokens)
        with pytest.raises(BadRequest, match="within_ms"):
            client.prefetch(Prompt(NAMESPACE, tokens), within_s=1e6)
        assert client.prefetch(Prompt(NAMESPACE, tokens), within_s=1.0).num_begun == 0


def test_hints_are_about_what_is_cached(server: ThreadServer) -> None:
    """What is retained stays when as much again is stored as there is room for; a hint on nothing is no error."""
    tokens = list(range(65_500, 65_500 + 2 * PAGE))
    with connect(server.directory) as client:
        assert client.hint(Prompt(NAMESPACE, tokens), returns=True) == 0
        store(client, tokens)
        assert client.hint(Prompt(NAMESPACE, [*tokens, 1]), retain_s=600.0, priority=1) == 2 * PAGE
        for round_ in range(10):
            store(client, range(80_000 + 1000 * round_, 80_000 + 1000 * round_ + 10 * PAGE))
        assert check(client, tokens) == 2 * PAGE
        assert client.hint(Prompt(NAMESPACE, tokens), expected_return_s=5.0, returns=True) == 2 * PAGE
        wrong: dict[str, Any]
        for wrong in ({"priority": 5}, {"retain_s": 1e9}, {"priority": 2**31}, {"retain_s": -1.0}):
            with pytest.raises(BadRequest, match=next(iter(wrong))):
                client.hint(Prompt(NAMESPACE, tokens), **wrong)


def test_a_namespace_that_does_not_fit_is_refused(server: ThreadServer) -> None:
    """F31."""
    other = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=16, dtype=KVDtype.FLOAT16, page_size=PAGE)
    with connect(server.directory) as client:
        with pytest.raises(LayoutMismatch):
            client.lookup(Prompt(Namespace(model="m", layout=other), [1]))
        with pytest.raises(BadRequest, match="tenant"):
            client.lookup(Prompt(Namespace(model="m", layout=LAYOUT, tenant="somebody"), [1]))
        assert client.lookup(Prompt(NAMESPACE, [1])).num_tokens == 0


def test_a_session_has_its_own_bounds(tmp_path: Path) -> None:
    """I24: leases are counted, and what is kept in place is bounded, each before anything is allocated."""
    with (
        thread_server(
            tmp_path, limits__max_leases=2, limits__leased_share=0.125, limits__max_tokens=20 * PAGE,
            limits__max_sessions=1,
        ) as server,
        connect(server.directory) as client,
    ):  # fmt: skip
        tokens = list(range(8 * PAGE))
        store(client, tokens)
        more = list(range(12 * PAGE))
        assert client.reserve(Prompt(NAMESPACE, more)).outcome is Outcome.ACCEPTED
        with client.acquire(Prompt(NAMESPACE, tokens)) as lease:
            assert (len(lease), lease.cut_short) == (4, "limit")
            with pytest.raises(LimitReached, match="max_leases"):
                client.acquire(Prompt(NAMESPACE, tokens))
        with pytest.raises(LimitReached, match="max_tokens"):
            client.lookup(Prompt(NAMESPACE, range(20 * PAGE + 1)))
        with pytest.raises(LimitReached, match="max_sessions"):
            connect(server.directory)
        assert check(client, tokens) == 4 * PAGE


def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    """I33: the tenant is the session's; the same prompt is another one's."""
    import hashlib

    secret = {"secret_sha256": hashlib.sha256(b"of red").hexdigest()}
    with thread_server(tmp_path, tenants={"red": secret, "blue": {}}) as server:
        for tenant, given in (("", b""), ("green", b""), ("red", b""), ("red", b"of blue"), ("red", b"x" * 300)):
            with pytest.raises(Forbidden) as refused:
                connect(server.directory, tenant=tenant, secret=given)
            assert "red" not in str(refused.value)
            assert "blue" not in str(refused.value)
        tokens = list(range(3 * PAGE))
        with (
            connect(server.directory, tenant="red", secret=b"of red") as red,
            connect(server.directory, tenant="blue") as blue,
        ):
            assert store(red, tokens, tenant="red") == 3 * PAGE
            assert blue.lookup(Prompt(NAMESPACE, tokens)).num_tokens == 0
            assert store(blue, tokens, tenant="blue") == 3 * PAGE
            assert check(red, tokens, tenant="red") == 3 * PAGE
            assert check(blue, tokens, tenant="blue") == 3 * PAGE
            # What one was told is nothing to the other.
            prompt = Prompt(NAMESPACE, tokens)
            red.lookup(prompt)
            handle, _ = prompt.since(red._attachment, len(prompt))
            prompt.learn(blue._attachment, handle, 3 * PAGE)
            assert blue.lookup(prompt).num_tokens == 3 * PAGE
            assert prompt.since(blue._attachment, len(prompt))[0] != handle


def test_what_a_session_held_is_given_back_when_it_ends(server: ThreadServer) -> None:
    """I23, C17: closed without giving anything back."""
    tokens = list(range(66_000, 66_000 + 2 * PAGE))
    client = connect(server.directory)
    store(client, tokens)
    leases = [client.acquire(Prompt(NAMESPACE, tokens)), client.acquire(Prompt(NAMESPACE, tokens))]
    reserved = client.reserve(Prompt(NAMESPACE, range(67_000, 67_000 + 4 * PAGE)))
    assert [len(each) for each in (*leases, reserved)] == [2, 2, 4]
    assert server.call(lambda inside: inside.cache.tree.num_leases) == 3
    free = _free_pages(server)
    client.close()
    server.until(lambda inside: len(inside.sessions) == 0, within_s=WAIT_S)
    assert server.call(lambda inside: inside.cache.tree.num_leases) == 0
    assert _free_pages(server) == free + 4
    with pytest.raises(Closed):
        client.lookup(Prompt(NAMESPACE, tokens))
    server.call(lambda inside: inside.cache.tree.check_integrity())


def test_the_awaited_client_means_the_same(server: ThreadServer) -> None:
    tokens = list(range(68_000, 68_000 + 2 * PAGE))

    async def use() -> None:
        async with connect_async(server.directory, name="awaited") as client:
            prompt = Prompt(NAMESPACE, tokens)
            assert (await client.lookup(prompt)).num_tokens == 0
            async with await client.reserve(prompt) as reservation:
                for index, view in enumerate(reservation):
                    view[:] = page_bytes(tokens, index)
                assert (await reservation.commit()).num_tokens == 2 * PAGE
            async with await client.acquire(prompt) as lease:
                assert lease.read() == page_bytes(tokens, 0) + page_bytes(tokens, 1)
            assert await client.hint(prompt, returns=True) == 2 * PAGE
            assert (await client.prefetch(prompt, within_s=1.0)).num_there == 2
            pinned = await client.pin(prompt)
            await client.unpin(pinned)
            with pytest.raises(BadRequest):
                await client.reserve(Prompt(NAMESPACE, [1]))

    asyncio.run(use())
    server.until(lambda inside: len(inside.sessions) == 0, within_s=WAIT_S)


def test_nobody_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(Unreachable):
        connect(tmp_path / "nowhere")


def test_importing_the_client_loads_neither_torch_nor_numpy() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, hicache.service.client; print(sorted(sys.modules))"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in ("torch", "numpy", "hicache.service.server", "hicache.cache"):
        assert f"'{name}'" not in loaded, name


# -- the owner's socket and health ------------------------------------------------------------------------------------


def _admin(server: ThreadServer, method: str, request: Any, reply: Any) -> Any:
    with grpc.insecure_channel(wire.address(str(server.directory / wire.ADMIN_SOCKET))) as channel:
        path = f"/hicache.v1.Admin/{method}"
        if method == "Inspect":
            pieces = channel.unary_stream(path, lambda each: each.SerializeToString(), reply.FromString)(request)
            return json.loads(b"".join([piece.json for piece in pieces]))
        call: Any = channel.unary_unary(path, lambda each: each.SerializeToString(), reply.FromString)
        return call(request, timeout=WAIT_S)


def test_the_owner_sees_and_clears(tmp_path: Path) -> None:
    """C27: what a flush says it cleared is cleared, and what it could not clear is counted."""
    with thread_server(tmp_path) as server, connect(server.directory, name="an engine") as client:
        tokens = list(range(6 * PAGE))
        store(client, tokens)
        shown = _admin(server, "Inspect", pb.InspectRequest(view=pb.VIEW_SNAPSHOT), pb.InspectPiece)
        assert shown["server"]["commits"] == 1
        assert [session["name"] for session in shown["sessions"]] == ["an engine"]
        assert sum(node["num_tokens"] for node in shown["nodes"]) == 6 * PAGE
        with client.acquire(Prompt(NAMESPACE, tokens[: 2 * PAGE])):
            reply = _admin(server, "Flush", pb.FlushRequest(), pb.FlushReply)
            assert (reply.num_held, reply.is_durable) == (2, True)
            assert client.lookup(Prompt(NAMESPACE, tokens)).num_tokens == 2 * PAGE
        assert _admin(server, "Flush", pb.FlushRequest(tenant="nobody"), pb.FlushReply).num_held == 0
        assert client.lookup(Prompt(NAMESPACE, tokens)).num_tokens == 2 * PAGE
        assert _admin(server, "Flush", pb.FlushRequest(), pb.FlushReply).num_held == 0
        assert client.lookup(Prompt(NAMESPACE, tokens)).num_tokens == 0
        store(client, tokens)
        evicted = _admin(server, "Evict", pb.EvictRequest(tier=pb.TIER_HOST, num_pages=64), pb.EvictReply)
        assert evicted.pages_free == 64


def test_the_owners_socket_describes_itself(server: ThreadServer) -> None:
    """gRPC reflection, for tools that know nothing of hicache."""
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel(wire.address(str(server.directory / wire.ADMIN_SOCKET))) as channel:
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {"hicache.v1.Admin", "hicache.v1.Cache"} <= set(services)


def test_the_owners_calls_are_refused_clearly(server: ThreadServer) -> None:
    """I35: they are not on the data socket; and what they are given is checked."""
    with pytest.raises(grpc.RpcError) as refused:
        _admin(server, "Evict", pb.EvictRequest(tier=pb.TIER_NVME), pb.EvictReply)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.RpcError) as refused:
        _admin(server, "Evict", pb.EvictRequest(), pb.EvictReply)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for method in wire.ADMIN.methods:
        with grpc.insecure_channel(wire.address(str(server.directory / wire.DATA_SOCKET))) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(wire.path_of(method), bytes, bytes)(b"", timeout=WAIT_S)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert (server.directory / wire.ADMIN_SOCKET).stat().st_mode & 0o777 == 0o600


def test_health_means_that_the_loop_runs(server: ThreadServer) -> None:
    """A loop that stands still does not answer; health does, and says so."""
    import threading

    with grpc.insecure_channel(wire.address(str(server.directory / wire.HEALTH_SOCKET))) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def status(service: str = "") -> int:
            return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S).status)

        serving, not_serving = 1, 2
        assert status() == status("hicache.v1.Cache") == serving
        with pytest.raises(grpc.RpcError) as refused:
            status("nvme")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        blocked, go_on = threading.Event(), threading.Event()

        def stand_still() -> None:
            blocked.set()
            go_on.wait(WAIT_S)

        server._loop.call_soon_threadsafe(stand_still)
        assert blocked.wait(WAIT_S)
        while status() == serving:
            pass
        assert status() == not_serving
        go_on.set()
        while status() != serving:
            pass


def test_a_drained_server_takes_nothing_new_and_stops(tmp_path: Path) -> None:
    """I41: sessions that hold nothing are not waited for."""
    with thread_server(tmp_path, times__drain_s=20.0) as server:
        with connect(server.directory) as client:
            lease = client.reserve(Prompt(NAMESPACE, range(PAGE)))
            assert _admin(server, "Drain", pb.DrainRequest(), pb.DrainReply).num_sessions == 1
            with pytest.raises(Draining):
                connect(server.directory)
            with pytest.raises(Draining):
                client.reserve(Prompt(NAMESPACE, range(PAGE)))
            lease.commit()
            lease.abandon()
        server._thread.join(WAIT_S)
        assert not server._thread.is_alive()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


