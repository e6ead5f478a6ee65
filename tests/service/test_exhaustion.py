"""More than the server has: descriptors, calls under way, memory that staging may take. It refuses, and recovers."""

import asyncio
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache.errors import HicacheError
from hicache.service import wire
from hicache.service.client import Client, Durability, Prompt, connect, connect_async
from hicache.service.client.transport import say_hello
from hicache.service.errors import LimitReached
from hicache.service.proto import hicache_pb2 as pb
from tests.service.serving import WAIT_S, ServerProcess, arguments, thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, check, store
from tests.service.test_deadlines import hung_disk, leave_the_host


def test_a_server_without_descriptors_goes_on_with_those_it_has(tmp_path: Path) -> None:
    """F27: who comes is refused, or has no answer in time; who is there notices nothing; later others are let in."""
    server = ServerProcess(tmp_path, arguments(times__attach_s=1.0))
    clients: list[Client] = []
    try:
        first = connect(server.directory)
        clients.append(first)
        store(first, range(2 * PAGE))
        pid = server.process.pid
        limit = len(os.listdir(f"/proc/{pid}/fd")) + 8
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
        num_refused = 0
        for _ in range(12):
            try:
                client = connect(server.directory, timeout_s=0.5)
                clients.append(client)
                client.lookup(Prompt(NAMESPACE, [1]))
            except HicacheError:
                num_refused += 1
        assert num_refused
        assert check(first, range(2 * PAGE)) == 2 * PAGE
        for client in clients[1:]:
            client.close()
        while True:
            try:
                with connect(server.directory) as client:
                    assert check(client, range(2 * PAGE)) == 2 * PAGE
                break
            except HicacheError:
                continue  # those who left have not been given back yet
    finally:
        for client in clients:
            client.close()
        assert server.stop() == 0
    assert "Traceback" not in server.errors()


def test_a_flood_of_calls_is_refused_above_the_bound(tmp_path: Path) -> None:
    """F34, I31: one session's calls that wait are bounded; another session's are answered meanwhile."""
    options = {"nvme__bytes": 256 * LAYOUT.page_bytes, "nvme__dir": str(tmp_path / "nvme")}

    async def flood(directory: Path) -> tuple[int, int]:
        async with connect_async(directory) as client:
            asked = [client.acquire(Prompt(NAMESPACE, range(4 * PAGE)), timeout_s=3.0) for _ in range(200)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            refused = [each for each in answers if isinstance(each, LimitReached)]
            assert {each.field for each in refused} == {"max_calls_per_session"}
            return len(refused), len(answers) - len(refused)

    with (
        thread_server(tmp_path, limits__max_calls_per_session=8, **options) as server,
        connect(server.directory) as other,
    ):
        store(other, range(4 * PAGE), durability=Durability.WAIT)
        server.run(leave_the_host(server))
        store(other, range(1000, 1000 + PAGE))
        with hung_disk(server):
            refused, waited = asyncio.run(flood(server.directory))
            # On a busy machine some come only when the first have had their time.
            assert waited >= 8
            assert refused >= 100
            assert check(other, range(1000, 1000 + PAGE)) == PAGE
        assert check(other, range(4 * PAGE)) == 4 * PAGE


def test_staging_memory_is_bounded_and_comes_back(tmp_path: Path) -> None:
    """I21: what all sessions have together; the end of one makes room for the next."""
    bound = {"limits__staging_bytes": 16 * LAYOUT.page_bytes, "limits__total_staging_bytes": 32 * LAYOUT.page_bytes}
    with thread_server(tmp_path, **bound) as server, connect(server.directory) as first:
        second = connect(server.directory)
        with pytest.raises(LimitReached, match="total_staging_bytes"):
            connect(server.directory)
        with connect(server.directory, staging_bytes=0) as reader:
            assert reader.lookup(Prompt(NAMESPACE, [1])).num_tokens == 0
        second.close()
        server.until(lambda inside: len(inside.sessions) == 1, within_s=WAIT_S)
        with connect(server.directory) as third:
            assert store(third, range(PAGE)) == PAGE
        assert check(first, range(PAGE)) == PAGE


def test_sessions_that_begin_at_the_same_moment_are_no_more_than_there_may_be(tmp_path: Path) -> None:
    """I21: also while the staging memory of each is being made."""

    def hello(_: int) -> int:
        try:
            _welcome, fds = say_hello(server.directory, pb.Hello(protocol=wire.PROTOCOL, staging_bytes=4096), WAIT_S)
        except LimitReached:
            return 0
        for fd in fds:
            os.close(fd)
        return 1

    with thread_server(tmp_path, limits__max_sessions=2) as server, ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(hello, range(32))) == 2
        assert server.call(lambda inside: len(inside.sessions)) == 2
