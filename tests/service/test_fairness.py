"""What one tenant takes leaves room for the others, and what one client keeps is bounded: pins, leases, reservations,
and promises that a slow disk keeps open."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from hicache.errors import DeadlineExceeded
from hicache.service import wire
from hicache.service.client import Durability, Outcome, Prompt, connect, connect_async
from hicache.service.errors import LimitReached
from hicache.service.server import storing
from hicache.service.server.process import Server
from tests.service.serving import WAIT_S, ThreadServer, thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, check, page_bytes, store
from tests.service.test_deadlines import hung_disk

HOST_PAGES: Final = 16


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadServer]:
    with thread_server(tmp_path, host_pages=HOST_PAGES, tenants={"red": {}, "blue": {}}) as running:
        yield running


def _prompt(number: int) -> range:
    return range(1000 * number, 1000 * number + PAGE)


def test_pins_of_one_tenant_leave_room_for_others(server: ThreadServer) -> None:
    """I33: however many sessions it has, a tenant pins no more than its share, and is told so."""
    with ExitStack() as stack:
        reds = [stack.enter_context(connect(server.directory, tenant="red")) for _ in range(4)]
        blue = stack.enter_context(connect(server.directory, tenant="blue"))
        pinned = []
        for number in range(HOST_PAGES // 2):
            red = reds[number % len(reds)]
            assert store(red, _prompt(number), tenant="red") == PAGE
            pinned.append((red, red.pin(Prompt(NAMESPACE, _prompt(number)))))
        assert store(reds[0], _prompt(HOST_PAGES), tenant="red") == PAGE
        for red in reds:
            with pytest.raises(LimitReached, match="leased_share"):
                red.pin(Prompt(NAMESPACE, _prompt(HOST_PAGES)))
        assert store(blue, range(4 * PAGE), tenant="blue") == 4 * PAGE
        assert blue.pin(Prompt(NAMESPACE, range(4 * PAGE))).num_tokens == 4 * PAGE
        for red, pin in pinned[:2]:
            red.unpin(pin)
        assert reds[0].pin(Prompt(NAMESPACE, _prompt(0))).num_tokens == PAGE
        assert check(blue, range(4 * PAGE), tenant="blue") == 4 * PAGE


def test_leases_of_one_tenant_leave_room_for_others(server: ThreadServer) -> None:
    """I33: as for one session, so for several."""
    with ExitStack() as stack:
        reds = [stack.enter_context(connect(server.directory, tenant="red")) for _ in range(4)]
        blue = stack.enter_context(connect(server.directory, tenant="blue"))
        num_held = 0
        for number in range(HOST_PAGES):
            red = reds[number % len(reds)]
            num_held += len(stack.enter_context(red.reserve(Prompt(NAMESPACE, _prompt(number)))))
        assert num_held == HOST_PAGES // 2
        assert store(blue, range(4 * PAGE), tenant="blue") == 4 * PAGE


def test_calls_whose_message_never_comes_are_in_nobody_elses_way(tmp_path: Path) -> None:
    """I26, I31, I33, F34: as many as a session may have, in each of several sessions. They end by their deadline."""
    few = {"limits__max_tokens": 4096, "limits__message_bytes": "32MiB"}
    with thread_server(tmp_path, **few) as server, ExitStack() as stack:
        good = stack.enter_context(connect(server.directory))
        store(good, _prompt(1))
        is_over = threading.Event()
        stack.callback(is_over.set)
        channel = stack.enter_context(grpc.insecure_channel(wire.address(str(server.directory / wire.DATA_SOCKET))))
        look_up = channel.stream_unary("/hicache.v1.Cache/Lookup", bytes, bytes)

        def nothing() -> Iterator[bytes]:
            is_over.wait(WAIT_S)
            yield from ()

        calls = []
        for _ in range(2):
            token = stack.enter_context(connect(server.directory, staging_bytes=0)).welcome.token
            metadata = ((wire.TOKEN_METADATA, token),)
            calls += [look_up.future(nothing(), timeout=WAIT_S, metadata=metadata) for _ in range(64)]
        server.until(lambda inside: sum(each.num_calls for each in inside.sessions) == 128, within_s=WAIT_S)
        for number in range(2, 12):
            assert store(good, _prompt(number)) == check(good, _prompt(number)) == PAGE
        assert not any(call.done() for call in calls)
        is_over.set()
        assert {call.code() for call in calls} <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DEADLINE_EXCEEDED}


def test_reservations_at_the_same_moment_share_the_room_of_their_session(tmp_path: Path) -> None:
    """I24, I33: none of them finds what another one is about to take."""

    async def reserve_all(directory: Path) -> int:
        async with connect_async(directory) as client, asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(client.reserve(Prompt(NAMESPACE, _prompt(number)))) for number in range(24)]
            return sum([len(await each) for each in asked])

    nvme = {"nvme__bytes": 256 * LAYOUT.page_bytes, "nvme__dir": str(tmp_path / "nvme")}
    with thread_server(tmp_path, host_pages=HOST_PAGES, **nvme) as server, connect(server.directory) as client:
        for number in range(100, 100 + HOST_PAGES):  # so that calls wait for room, and meet
            store(client, _prompt(number))
        assert 0 < asyncio.run(reserve_all(server.directory)) <= HOST_PAGES // 2
        server.until(lambda inside: len(inside.sessions) == 1, within_s=WAIT_S)
        assert store(client, _prompt(200)) == PAGE


def test_what_a_slow_disk_leaves_open_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I21, F17: each promise behind a reply keeps the prompt's tokens. There are so many bytes of them, whatever a
    client asks; then it is told to wait, and when the disk has written them there is room again."""
    num_most = 6
    monkeypatch.setattr(storing, "MAX_KEPT_BYTES", num_most * 4 * PAGE)
    nvme = {"nvme__bytes": 256 * LAYOUT.page_bytes, "nvme__dir": str(tmp_path / "nvme")}
    with thread_server(tmp_path, host_pages=64, **nvme) as server, connect(server.directory) as client:
        with hung_disk(server):
            outcomes = []
            for number in range(num_most + 2):
                with client.reserve(Prompt(NAMESPACE, _prompt(number))) as reservation:
                    outcomes.append((reservation.outcome, reservation.reason))
                    if len(reservation):
                        reservation[0][:] = page_bytes(_prompt(number), 0)
                        assert reservation.commit(durability=Durability.BEHIND).outcome is Outcome.RESIDENT
            assert outcomes == [(Outcome.ACCEPTED, "")] * num_most + [(Outcome.REFUSED, "limit")] * 2
        server.until(_keeps(0), within_s=WAIT_S)
        assert store(client, _prompt(100), durability=Durability.WAIT) == PAGE
        assert client.durable_sequence == num_most + 1


def test_what_one_session_keeps_leaves_each_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I33: who has taken all token ids there may be is refused more, and others still have their share. They come back
    with a reservation, and with the session."""
    monkeypatch.setattr(storing, "MAX_KEPT_BYTES", 8 * 4 * PAGE)
    with thread_server(tmp_path, host_pages=64, limits__max_sessions=4) as server, ExitStack() as stack:
        good = stack.enter_context(connect(server.directory))
        with connect(server.directory) as greedy:
            taken = [greedy.reserve(Prompt(NAMESPACE, _prompt(number))) for number in range(12)]
            assert [each.reason for each in taken] == [""] * (8 + 2) + ["limit"] * 2
            kept = [good.reserve(Prompt(NAMESPACE, _prompt(number))) for number in range(100, 104)]
            assert [each.reason for each in kept] == [""] * 2 + ["limit"] * 2
            kept.pop(0).abandon()
            server.until(_keeps(8 + 2 + 1), within_s=WAIT_S)
            with greedy.reserve(Prompt(NAMESPACE, _prompt(30))) as refused:
                assert refused.reason == "limit", "it is above its share, and there is no more than that"
            assert store(good, _prompt(106)) == PAGE
        server.until(_keeps(1), within_s=WAIT_S)
        more = [good.reserve(Prompt(NAMESPACE, _prompt(number))) for number in range(200, 210)]
        assert [each.reason for each in more] == [""] * 9 + ["limit"]
        for each in more + kept:
            each.abandon()
        server.until(_keeps(0), within_s=WAIT_S)


def test_reservations_that_wait_count_as_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I24, I33: none of them finds what another one is about to keep; those that get no room in time give it back."""
    monkeypatch.setattr(storing, "MAX_KEPT_BYTES", 8 * 4 * PAGE)

    async def reserve_all(directory: Path) -> list[str]:
        async def reason(number: int) -> str:
            try:
                return (await client.reserve(Prompt(NAMESPACE, _prompt(number)), timeout_s=2.0)).reason
            except DeadlineExceeded as error:
                return error.reason

        async with connect_async(directory) as client:
            return await asyncio.gather(*[reason(number) for number in range(14)])

    with (
        thread_server(tmp_path, host_pages=64, limits__max_sessions=4) as server,
        connect(server.directory) as good,
        ThreadPoolExecutor(1) as threads,
    ):
        with _no_room(server, monkeypatch):
            asking = threads.submit(asyncio.run, reserve_all(server.directory))
            server.until(_keeps(8 + 2), within_s=WAIT_S)
            with pytest.raises(DeadlineExceeded):
                good.reserve(Prompt(NAMESPACE, _prompt(100)), timeout_s=0.5)
            assert Counter(asking.result()) == {"limit": 4, "deadline_exceeded": 8 + 2}
            server.until(_keeps(0), within_s=WAIT_S)
        assert store(good, _prompt(100)) == PAGE


def _keeps(num_pages: int) -> Callable[[Server], bool]:
    """Whether the server keeps the token ids of so many pages, all of them for sessions that there are."""
    return lambda inside: (
        not inside.sessions.num_lingering
        and sum([each.kept_bytes for each in inside.sessions]) == num_pages * 4 * PAGE
    )


@contextmanager
def _no_room(server: ThreadServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever asks for room in the arena waits, until the block ends."""
    go_on, cache = server.call(lambda inside: (asyncio.Event(), inside.cache))
    allocate_up_to = cache.allocate_up_to

    async def held(*asked: Any, **how: Any) -> Any:
        await go_on.wait()
        return await allocate_up_to(*asked, **how)

    with monkeypatch.context() as patched:
        patched.setattr(cache, "allocate_up_to", held)
        yield
    server.call(lambda _: go_on.set())
