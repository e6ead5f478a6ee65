"""I33: what all sessions have together, of which one tenant cannot take the parts of the others."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from hicache.service import wire
from hicache.service.client import Client, Durability, Outcome, Prompt, connect
from hicache.service.client.transport import say_hello
from hicache.service.errors import LimitReached
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server import storing
from hicache.service.server.intake import AT_ONCE
from tests.service.http2 import RawChannel
from tests.service.serving import WAIT_S, ThreadServer, thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, check, page_bytes, store
from tests.service.test_deadlines import hung_disk
from tests.service.test_tcp import PLAIN, TOKEN, url
from tests.service.test_unread import ASK, LOOKUP, TOKENS, num_open, statuses

TENANTS: Final[dict[str, Any]] = {"red": {}, "blue": {}}


def _begun(stack: ExitStack, server: ThreadServer, field: str, **how: Any) -> list[Client]:
    """Sessions, until one more is refused for that limit."""
    clients: list[Client] = []

    def begin() -> None:
        while True:
            clients.append(stack.enter_context(connect(server.directory, **how)))

    with pytest.raises(LimitReached, match=field):
        begin()
    return clients


def _ended(server: ThreadServer, client: Client) -> None:
    """Close a client, and wait until the server knows it."""
    number = client.welcome.session_id
    client.close()
    server.until(lambda inside: number not in [each.number for each in inside.sessions], within_s=WAIT_S)


def test_one_tenant_leaves_the_others_sessions_to_begin(tmp_path: Path) -> None:
    """I21, I33: half of the sessions is divided among the tenants, also while some of them are not there."""
    with thread_server(tmp_path, limits__max_sessions=8, tenants=TENANTS) as server, ExitStack() as stack:
        reds = _begun(stack, server, "max_sessions", tenant="red")
        assert len(reds) == 6
        assert store(reds[0], range(PAGE), tenant="red") == PAGE
        blues = _begun(stack, server, "max_sessions", tenant="blue")
        assert len(blues) == 2
        assert store(blues[1], range(PAGE), tenant="blue") == PAGE
        _ended(server, blues[0])
        assert not _begun(stack, server, "max_sessions", tenant="red"), "it is blue's, who may come again"
        assert len(_begun(stack, server, "max_sessions", tenant="blue")) == 1
        for red in reds[:3]:
            _ended(server, red)
        assert len(_begun(stack, server, "max_sessions", tenant="blue")) == 3, "what none has a part of is free to all"
        assert not _begun(stack, server, "max_sessions", tenant="red")
        assert check(reds[3], range(PAGE), tenant="red") == check(blues[1], range(PAGE), tenant="blue") == PAGE


@pytest.mark.parametrize("tenants", [{}, {"red": {}}])
def test_a_tenant_that_is_alone_has_all(tmp_path: Path, tenants: dict[str, Any]) -> None:
    with thread_server(tmp_path, limits__max_sessions=8, tenants=tenants) as server, ExitStack() as stack:
        assert len(_begun(stack, server, "max_sessions", tenant="".join(tenants))) == 8


def test_one_tenant_leaves_the_others_staging_memory(tmp_path: Path) -> None:
    """I21, I33: as with the sessions themselves."""
    bound = {"limits__staging_bytes": 4 * LAYOUT.page_bytes, "limits__total_staging_bytes": 32 * LAYOUT.page_bytes}
    with thread_server(tmp_path, tenants=TENANTS, **bound) as server, ExitStack() as stack:
        reds = _begun(stack, server, "total_staging_bytes", tenant="red")
        assert len(reds) == 6
        blues = _begun(stack, server, "total_staging_bytes", tenant="blue")
        assert len(blues) == 2
        assert store(blues[1], range(4 * PAGE), tenant="blue") == 4 * PAGE


def test_a_session_has_no_more_staging_memory_than_is_its_tenants(tmp_path: Path) -> None:
    """I21, I33: or who comes after it finds less than a part."""
    names = [f"tenant{number}" for number in range(10)]
    bound = {"limits__staging_bytes": 32 * LAYOUT.page_bytes, "limits__total_staging_bytes": 64 * LAYOUT.page_bytes}
    with thread_server(tmp_path, tenants={name: {} for name in names}, **bound) as server, ExitStack() as stack:
        first, *others = names
        assert len(_begun(stack, server, "total_staging_bytes", tenant=first)) > 3, "what nobody has a part of, too"
        for name in others:
            (client, *_) = _begun(stack, server, "total_staging_bytes", tenant=name)
            assert store(client, range(5 * PAGE), tenant=name) == 3 * PAGE, "a tenth of the half, at a time"


def test_one_tenant_leaves_the_others_calls(tmp_path: Path) -> None:
    """I31, I33: 32 calls, of which eight are each tenant's; and beside them four of each session."""

    def opened(stack: ExitStack, tenant: str, num_calls: int, num_served: int) -> Client:
        """A session that makes so many calls whose answers it does not read."""
        client = stack.enter_context(connect(server.directory, tenant=tenant))
        raw = stack.enter_context(RawChannel(server.directory / wire.DATA_SOCKET, window=0))
        client.lookup(Prompt(NAMESPACE, TOKENS))
        before = server.call(num_open)
        for _ in range(num_calls):
            raw.call(LOOKUP, [ASK], token=client.welcome.token)
        refused = num_calls - num_served
        assert statuses(raw, refused) == {grpc.StatusCode.RESOURCE_EXHAUSTED: refused}
        server.until(lambda inside: num_open(inside) == before + num_served, within_s=WAIT_S)
        return client

    limits = {"limits__max_calls": 32, "limits__max_sessions": 8}
    with thread_server(tmp_path, tenants=TENANTS, **limits) as server, ExitStack() as stack:
        red = opened(stack, "red", 60, 32 - 8 + 4)
        opened(stack, "red", 20, 4)
        blue = opened(stack, "blue", 20, 8 + 4)
        for client in (red, blue):
            with pytest.raises(LimitReached, match="max_calls:"):
                client.pin(Prompt(NAMESPACE, TOKENS))
        with connect(server.directory, tenant="blue") as another:
            assert store(another, TOKENS, tenant="blue") == PAGE


def test_one_tenant_leaves_the_others_messages(tmp_path: Path) -> None:
    """I21, I26, I33: calls whose messages never come count as much as the longest, until their deadline."""
    max_tokens = 1 << 20
    num_messages = 32
    few = {"limits__max_tokens": max_tokens, "limits__message_bytes": num_messages * wire.longest_request(max_tokens)}
    with thread_server(tmp_path, tenants=TENANTS, **few) as server, ExitStack() as stack:
        is_over = threading.Event()
        channel = stack.enter_context(grpc.insecure_channel(wire.address(str(server.directory / wire.DATA_SOCKET))))
        look_up = channel.stream_unary(LOOKUP, bytes, bytes)
        stack.callback(is_over.set)

        def nothing() -> Iterator[bytes]:
            is_over.wait(WAIT_S)
            yield from ()

        def stuck(client: Client) -> "list[grpc.Future[bytes]]":
            metadata = ((wire.TOKEN_METADATA, client.welcome.token),)
            return [look_up.future(nothing(), timeout=WAIT_S, metadata=metadata) for _ in range(AT_ONCE)]

        *reds, last = [stack.enter_context(connect(server.directory, tenant="red", staging_bytes=0)) for _ in range(4)]
        calls = [call for red in reds for call in stuck(red)]
        server.until(lambda inside: sum(each.num_calls for each in inside.sessions) == len(calls), within_s=WAIT_S)
        with pytest.raises(LimitReached, match="message_bytes"):
            last.pin(Prompt(NAMESPACE, TOKENS))
        blue = stack.enter_context(connect(server.directory, tenant="blue"))
        for number in range(10):
            assert store(blue, _page(number), tenant="blue") == check(blue, _page(number), tenant="blue") == PAGE
        assert not any(call.done() for call in calls)


def test_what_sessions_send_leaves_the_owner_and_who_comes_their_messages(tmp_path: Path) -> None:
    """I21, I26, I33: where sessions have all message bytes there may be, a command and a hello over TCP are heard."""
    few = {"limits__max_tokens": 4096, "limits__message_bytes": AT_ONCE * wire.longest_request(4096)}
    with (
        thread_server(tmp_path, **few, **PLAIN) as server,
        RawChannel(server.directory / wire.DATA_SOCKET, window=1 << 16) as raw,
        connect(server.directory, staging_bytes=0) as client,
    ):
        for _ in range(AT_ONCE):
            raw.call(LOOKUP, [], token=client.welcome.token, is_over=False)
        server.until(lambda inside: sum(each.num_calls for each in inside.sessions) == AT_ONCE, within_s=WAIT_S)
        with connect(server.directory) as another, pytest.raises(LimitReached, match="message_bytes"):
            another.pin(Prompt(NAMESPACE, TOKENS))
        with grpc.insecure_channel(wire.address(str(server.directory / wire.ADMIN_SOCKET))) as channel:
            inspect = channel.unary_stream("/hicache.v1.Admin/Inspect", pb.InspectRequest.SerializeToString, bytes)
            assert b"".join(inspect(pb.InspectRequest(view=pb.VIEW_STATS), timeout=WAIT_S))
        with connect(url(server, "tcp"), token=TOKEN):
            assert server.call(lambda inside: len(inside.sessions)) >= 2


def test_hellos_from_one_machine_that_say_nothing_leave_others_theirs(tmp_path: Path) -> None:
    """I26, I33: as at the hello socket. They have a call's time to say something."""
    with thread_server(tmp_path, **PLAIN) as server:
        port = int(url(server).rpartition(":")[2])
        with RawChannel(port, window=1 << 16, source="127.0.0.2") as raw:
            for _ in range(2 * AT_ONCE):
                raw.call("/hicache.v1.Door/Enter", [], access=TOKEN.encode(), is_over=False)
            raw.call("/hicache.v1.Door/Nothing", [])
            assert statuses(raw, 1) == {grpc.StatusCode.UNIMPLEMENTED: 1}, "those before have come"
            with connect(url(server, "tcp"), token=TOKEN) as client:
                assert client.lookup(Prompt(NAMESPACE, TOKENS)).num_tokens == 0


def test_one_tenant_leaves_the_others_token_ids_to_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I21, I33: 16 pages' ids, of which four are each tenant's; and beside them two of each session."""
    monkeypatch.setattr(storing, "MAX_KEPT_BYTES", 16 * 4 * PAGE)
    with (
        thread_server(tmp_path, host_pages=128, limits__max_sessions=8, tenants=TENANTS) as server,
        ExitStack() as stack,
    ):
        for tenant, num_kept in (("red", 12 + 2), ("red", 2), ("blue", 4 + 2)):
            client = stack.enter_context(connect(server.directory, tenant=tenant))
            kept = [stack.enter_context(client.reserve(Prompt(NAMESPACE, _page(number)))) for number in range(16)]
            assert [each.reason for each in kept] == [""] * num_kept + ["limit"] * (16 - num_kept)


def test_sessions_that_begin_over_and_over_keep_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I21, I33, F17: the disk hangs, and each session leaves promises behind. It counts as long as it keeps token ids:
    there are no more than twice as many, and those of a session that is there are left to it."""
    monkeypatch.setattr(storing, "MAX_KEPT_BYTES", 16 * 4 * PAGE)
    nvme = {"nvme__bytes": 256 * LAYOUT.page_bytes, "nvme__dir": str(tmp_path / "nvme")}
    with (
        thread_server(tmp_path, host_pages=64, limits__max_sessions=4, **nvme) as server,
        connect(server.directory) as good,
    ):
        with hung_disk(server):
            for number, num_promised in enumerate((16 + 4, 4, 4), 1):
                with connect(server.directory) as client:
                    pages = [_page(100 * number + index) for index in range(22)]
                    assert sum([_is_promised(client, page) for page in pages]) == num_promised
                server.until(lambda inside: len(inside.sessions) == 1, within_s=WAIT_S)
                assert server.call(lambda inside: inside.sessions.num_lingering) == number
            with pytest.raises(LimitReached, match="max_sessions"):
                connect(server.directory)
            assert [_is_promised(good, _page(number)) for number in range(5)] == [True] * 4 + [False]
        server.until(lambda inside: not inside.sessions.num_lingering, within_s=WAIT_S)
        with connect(server.directory) as client:
            assert _is_promised(client, _page(50))


def test_a_hello_of_which_nothing_comes_is_counted_no_more(tmp_path: Path) -> None:
    """I23: nobody attaches, and the part is there again."""
    with thread_server(tmp_path, limits__max_sessions=4, times__attach_s=0.2, tenants=TENANTS) as server:
        for _ in range(3):
            for _ in range(3):
                _, fds = say_hello(server.directory, pb.Hello(protocol=wire.PROTOCOL, tenant="red"), WAIT_S)
                for fd in fds:
                    os.close(fd)
            with pytest.raises(LimitReached, match="max_sessions"):
                connect(server.directory, tenant="red")
            server.until(lambda inside: not len(inside.sessions), within_s=WAIT_S)


def _page(number: int) -> range:
    return range(1000 * number, 1000 * number + PAGE)


def _is_promised(client: Client, tokens: range) -> bool:
    """Store a page that is promised to become durable; False where that is refused, as too many wait for it."""
    with client.reserve(Prompt(NAMESPACE, tokens)) as reservation:
        if reservation.outcome is Outcome.REFUSED:
            assert reservation.reason == "limit"
            return False
        reservation[0][:] = page_bytes(tokens, 0)
        return reservation.commit(durability=Durability.BEHIND).outcome is Outcome.RESIDENT
