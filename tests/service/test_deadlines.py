"""Every call ends by its deadline and 0.3 s, whatever hangs, and what is given up is given back."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from hicache.errors import DeadlineExceeded
from hicache.service.client import Durability, Outcome, Prompt, connect
from hicache.service.server import admin
from hicache.service.server.process import Server
from hicache.tier import HOST, NVME
from hicache.tools.owner import reached
from tests.punctual import in_time
from tests.service.serving import WAIT_S, ServerProcess, ThreadServer, arguments, thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, check, page_bytes, store

DEADLINE_S: Final = 1.0
LATE_S: Final = 0.3
"""How much later than its deadline a call may end."""


@contextmanager
def hung_disk(server: ThreadServer) -> Iterator[None]:
    """Reads and writes of the NVMe tier do not return within the block."""
    go_on = server.run(_event())
    nvme: Any = server.call(lambda inside: inside.cache.tiers[NVME])
    read, write = nvme.read, nvme.write

    async def held_read(pages: Any) -> Any:
        await go_on.wait()
        return await read(pages)

    async def held_write(pages: Any) -> Any:
        await go_on.wait()
        return await write(pages)

    nvme.read, nvme.write = held_read, held_write
    try:
        yield
    finally:
        nvme.read, nvme.write = read, write
        server.call(lambda inside: go_on.set())


async def _event() -> asyncio.Event:
    return asyncio.Event()


def test_a_hung_disk_costs_hits_and_no_call(tmp_path: Path) -> None:
    """I26, I28, F18: what is in the arena is served, what is on the disk is not waited for beyond the deadline, and
    when the disk answers again so does the cache."""
    options = {"nvme__bytes": 256 * LAYOUT.page_bytes, "nvme__dir": str(tmp_path / "nvme")}
    with thread_server(tmp_path, **options) as server, connect(server.directory) as client:
        cold, warm = range(4 * PAGE), range(1000, 1000 + 4 * PAGE)
        store(client, cold, durability=Durability.WAIT)
        server.run(leave_the_host(server))
        store(client, warm)
        found = client.lookup(Prompt(NAMESPACE, cold))
        assert found.runs == (("nvme", 4 * PAGE),)
        numbers = count(2000, 1000)

        def acquire() -> None:
            with in_time(DEADLINE_S + LATE_S), client.acquire(Prompt(NAMESPACE, cold), timeout_s=DEADLINE_S) as lease:
                assert (len(lease), lease.cut_short) == (0, "deadline_exceeded")

        def commit() -> None:
            tokens = range(first := next(numbers), first + PAGE)
            with client.reserve(Prompt(NAMESPACE, tokens)) as reservation:
                reservation[0][:] = page_bytes(tokens, 0)
                with in_time(DEADLINE_S + LATE_S):
                    committed = reservation.commit(durability=Durability.WAIT, timeout_s=DEADLINE_S)
            assert (committed.outcome, committed.reason) == (Outcome.RESIDENT, "deadline_exceeded")

        with hung_disk(server):
            _answered(acquire)
            assert check(client, warm) == 4 * PAGE
            _answered(commit)
            assert client.prefetch(Prompt(NAMESPACE, cold), within_s=0.1).num_left_out == 0
        server.until(lambda inside: inside.cache.tree.num_leases == 0, within_s=WAIT_S)
        assert check(client, cold) == 4 * PAGE
        server.call(lambda inside: inside.cache.tree.check_integrity())


def _answered(ask: Callable[[], None]) -> None:
    """Ask, and again where the answer came too late: the server leaves a fifth of the time for its way back, and a busy
    machine may take that."""
    for _ in range(4):
        try:
            return ask()
        except DeadlineExceeded:
            continue
    return ask()


async def leave_the_host(server: ThreadServer) -> None:
    host = server.server.cache.tiers[HOST]
    deadline = server.server.clock.monotonic() + WAIT_S
    slots = await server.server.cache.allocate(HOST, host.capacity_pages, deadline=deadline)
    server.server.cache.free({HOST: slots})


def test_a_full_arena_that_is_all_leased_answers(tmp_path: Path) -> None:
    """I26, I27: no room is an answer, not a wait for ever; with a lease less there is room again."""
    with (
        thread_server(tmp_path, host_pages=8, limits__leased_share=1.0) as server,
        connect(server.directory) as client,
        connect(server.directory) as other,
    ):
        store(client, range(8 * PAGE))
        lease = client.acquire(Prompt(NAMESPACE, range(8 * PAGE)))
        assert len(lease) == 8

        def reserve() -> None:
            with in_time(DEADLINE_S + LATE_S):
                refused = other.reserve(Prompt(NAMESPACE, range(1000, 1000 + PAGE)), timeout_s=DEADLINE_S)
            assert (refused.outcome, refused.reason) == (Outcome.REFUSED, "no_room")

        _answered(reserve)
        assert check(other, range(8 * PAGE)) == 8 * PAGE
        lease.release()
        assert store(other, range(1000, 1000 + PAGE)) == PAGE


def test_a_stopped_server_is_not_waited_for(tmp_path: Path) -> None:
    """I26, F22: SIGSTOP of the server; the caller has its answer in time, and goes on when the server does."""
    server = ServerProcess(tmp_path, arguments())
    try:
        with connect(server.directory) as client:
            store(client, range(PAGE))
            server.process.send_signal(signal.SIGSTOP)
            try:
                with in_time(DEADLINE_S + LATE_S), pytest.raises(DeadlineExceeded):
                    client.acquire(Prompt(NAMESPACE, range(PAGE)), timeout_s=DEADLINE_S)
            finally:
                server.process.send_signal(signal.SIGCONT)
            assert check(client, range(PAGE)) == PAGE
    finally:
        assert server.stop() == 0


def test_a_reply_that_nobody_heard_is_given_back(tmp_path: Path) -> None:
    """I29: the client's call ended before the server's answer came. The lease that it does not know of is ended."""
    with thread_server(tmp_path, times__lease_s=1.0) as server, connect(server.directory) as client:
        store(client, range(2 * PAGE))
        go_on, held = threading.Event(), threading.Event()

        def stand_still() -> None:
            held.set()
            go_on.wait(WAIT_S)

        server._loop.call_soon_threadsafe(stand_still)
        assert held.wait(WAIT_S)
        with pytest.raises(DeadlineExceeded):
            client.acquire(Prompt(NAMESPACE, range(2 * PAGE)), timeout_s=0.2)
        go_on.set()
        server.until(_nothing_is_lent, within_s=WAIT_S)
        assert check(client, range(2 * PAGE)) == 2 * PAGE


def test_what_a_call_was_lent_is_given_back_when_the_client_says_so(tmp_path: Path) -> None:
    """I29: before and after the lease was made."""
    with thread_server(tmp_path) as server, connect(server.directory) as client:
        store(client, range(2 * PAGE))
        first = client.acquire(Prompt(NAMESPACE, range(2 * PAGE)))

        def abandon(inside: Server) -> None:
            (session,) = inside.sessions
            call = max(session.calls)
            inside.sessions.abandon(session, call)
            inside.sessions.abandon(session, call + 1)

        server.call(abandon)
        assert server.call(_nothing_is_lent)
        second = client.acquire(Prompt(NAMESPACE, range(2 * PAGE)))
        assert server.call(_nothing_is_lent)
        for lease in (first, second):
            lease.release()


def _nothing_is_lent(inside: Server) -> bool:
    return inside.cache.tree.num_leases == 0 and not any(session.leases for session in inside.sessions)


def test_an_eviction_of_much_keeps_nobody_from_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes few pages at a time, and while it waits for the disk others get what is free, and make room as well."""
    monkeypatch.setattr(admin, "EVICT_BYTES", 2 * LAYOUT.page_bytes)
    options = {"nvme__bytes": 256 * LAYOUT.page_bytes, "nvme__dir": str(tmp_path / "nvme")}
    with (
        thread_server(tmp_path, host_pages=16, **options) as server,
        connect(server.directory) as client,
        reached(server.directory) as owner,
        ThreadPoolExecutor(1) as threads,
    ):
        for number in range(6):
            store(client, range(1000 * number, 1000 * number + 2 * PAGE))
        with hung_disk(server):
            evicting = threads.submit(owner.evict, "host", 16)
            server.until(lambda inside: _leaving(inside) > 0, within_s=WAIT_S)
            for number in range(2):
                with client.reserve(Prompt(NAMESPACE, range(50_000 + number, 50_000 + number + PAGE))) as reservation:
                    assert len(reservation) == 1
                    assert not evicting.done(), "it waited for the eviction"
                    assert server.call(_leaving) <= 2
        assert evicting.result() == 16


def _leaving(inside: Server) -> int:
    """Pages of the host that are being copied down or wait for that."""
    (stats,) = [lane.stats for lane in inside.cache.lanes if lane.name == "host->nvme"]
    return stats.queued_pages + stats.in_flight_pages
