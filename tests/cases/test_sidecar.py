"""C17, C19, C25 and C27 on the sidecar: what clients leave behind that look up and never fetch, that reserve and die,
that are killed; and a flush with leases held and writes under way."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from hicache.errors import HicacheError
from hicache.service import wire
from hicache.service.client import Client, Durability, Outcome, Prompt, connect
from hicache.service.proto import hicache_pb2 as pb
from hicache.tier import HOST
from tests.leaks import named_memory
from tests.repository import ROOT
from tests.service.serving import WAIT_S, ThreadServer, thread_server
from tests.service.stored import NAMESPACE, PAGE, check, page_bytes, store

CAPACITY = 64
"""Pages of the arena."""


def _free_pages(inside: Any) -> int:
    return int(inside.cache.tiers[HOST].num_free)


def _clear(server: ThreadServer) -> None:
    """Wait until nothing is held, then evict everything: each page of the arena is free again."""
    server.until(lambda inside: inside.cache.tree.num_leases == 0, within_s=WAIT_S)

    def flush(inside: Any) -> None:
        inside.cache.flush()
        inside.cache.tree.check_integrity()

    server.call(flush)
    server.until(lambda inside: _free_pages(inside) == CAPACITY, within_s=WAIT_S)


@pytest.mark.parametrize("rounds", [90, pytest.param(1000, marks=pytest.mark.faults)])
def test_c17_looked_up_leased_and_never_fetched(tmp_path: Path, rounds: int) -> None:
    """I23, I28: a third of the leases are dropped with a call that is cancelled, a third with a session that is closed,
    a third are forgotten. Others go on storing, and no session ever holds more than its bound."""
    prompts = [range(1000 * number, 1000 * number + 4 * PAGE) for number in range(16)]
    with thread_server(tmp_path, times__lease_s=1.0, limits__max_leases=32) as server:
        with connect(server.directory) as other, connect(server.directory) as forgetful:
            num_stored = 0
            for number in range(rounds):
                tokens = prompts[number % 16]
                with suppress(HicacheError):  # no room, for as long as all is leased
                    store(other, tokens)
                if number % 3 == 0:
                    with suppress(HicacheError):
                        forgetful.acquire(Prompt(NAMESPACE, tokens), timeout_s=0.001)
                elif number % 3 == 1:
                    with connect(server.directory, staging_bytes=0) as closing:
                        closing.acquire(Prompt(NAMESPACE, tokens))
                else:
                    with suppress(HicacheError):
                        forgetful.acquire(Prompt(NAMESPACE, tokens))
                assert server.call(lambda inside: all(len(each.leases) <= 32 for each in inside.sessions))
                if number % 5 == 4:
                    fresh = range(100_000 + PAGE * number, 100_000 + PAGE * (number + 1))
                    assert store(other, fresh, timeout_s=WAIT_S) == PAGE
                    num_stored += 1
            assert num_stored == rounds // 5
            server.until(lambda inside: inside.cache.tree.num_leases == 0, within_s=WAIT_S)
            assert server.call(lambda inside: sum(each.num_pages for each in inside.sessions)) == 0
            assert check(other, fresh) == PAGE
        _clear(server)


def test_c19_who_dies_between_reserve_and_commit_is_as_if_it_had_never_been(tmp_path: Path) -> None:
    """I11, I23: its prompt is stored by another at once; what it wrote is never seen."""
    tokens = range(4 * PAGE)
    with thread_server(tmp_path, host_pages=CAPACITY) as server, connect(server.directory) as client:
        dead = _dying(server)
        assert client.lookup(Prompt(NAMESPACE, tokens)).num_tokens == 0
        dead.kill()
        _end(dead)
        assert store(client, tokens) == check(client, tokens) == 4 * PAGE
        for number in range(50):
            begun = connect(server.directory)
            reservation = begun.reserve(Prompt(NAMESPACE, range(5000, 5000 + 8 * PAGE)))
            assert reservation.outcome is Outcome.ACCEPTED, f"client {number}: {reservation.reason}"
            begun.close()
            server.until(lambda inside: len(inside.sessions) == 1, within_s=WAIT_S)
        assert server.call(_free_pages) == CAPACITY - 4
        assert client.lookup(Prompt(NAMESPACE, range(5000, 5000 + 8 * PAGE))).num_tokens == 0
        assert check(client, tokens) == 4 * PAGE
        _clear(server)


def test_c19_what_is_abandoned_is_free_at_once(tmp_path: Path) -> None:
    with thread_server(tmp_path, host_pages=CAPACITY) as server, connect(server.directory) as client:
        reservation = client.reserve(Prompt(NAMESPACE, range(4 * PAGE)))
        assert server.call(_free_pages) == CAPACITY - 4
        reservation.abandon()
        assert server.call(_free_pages) == CAPACITY


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.faults)])
def test_c25_killed_clients_leave_neither_memory_nor_descriptors(tmp_path: Path, kills: int) -> None:
    """I21, I23: staging memory has no name, and is unmapped with the session."""

    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("memfd:")

    names = named_memory()
    with thread_server(tmp_path, host_pages=CAPACITY) as server:
        for number in range(kills):
            process = _dying(server)
            process.kill()
            server.until(lambda inside: len(inside.sessions) == 0, within_s=WAIT_S)
            _end(process)
            assert server.call(_free_pages) == CAPACITY
            if not number:
                files, maps = server.call(lambda _: held())
        # gRPC keeps a descriptor or two of its own for a while; a session's would be three each.
        server.until(lambda _: held()[0] - files < kills and held()[1] <= maps, within_s=WAIT_S)
    assert not named_memory() - names


def test_c27_a_flush_clears_all_tiers_and_what_is_under_way_or_says_what_is_held(tmp_path: Path) -> None:
    """I30, I12: durable pages, pages that are still being written, and leased ones; and again after a restart."""
    leased, durable, moving = range(4 * PAGE), range(1000, 1000 + 4 * PAGE), range(2000, 2000 + 4 * PAGE)
    nvme = {"nvme__dir": str(tmp_path / "nvme"), "nvme__bytes": "64MiB"}

    def found(client: Client) -> list[int]:
        return [client.lookup(Prompt(NAMESPACE, each)).num_tokens for each in (leased, durable, moving)]

    with thread_server(tmp_path, **nvme) as server, connect(server.directory) as client:
        for tokens in (leased, durable):
            store(client, tokens, durability=Durability.WAIT)
        with client.acquire(Prompt(NAMESPACE, leased)) as lease:
            store(client, moving, durability=Durability.BEHIND)
            reply = _flush(server)
            still = found(client)
            assert reply.num_held * PAGE == sum(still), "it says how much it could not clear"
            assert still[0] == 4 * PAGE
            assert still[1] == 0
            assert lease.read(0) == page_bytes(leased, 0)
        # The write that was under way holds its pages until it ends.
        server.until(lambda inside: inside.cache.tree.num_leases == 0, within_s=WAIT_S)
        reply = _flush(server)
        assert (reply.num_held, reply.is_durable) == (0, True)
        assert found(client) == [0, 0, 0]
    with thread_server(tmp_path, **nvme) as server, connect(server.directory) as client:
        assert found(client) == [0, 0, 0]


def _flush(server: ThreadServer) -> pb.FlushReply:
    """What the owner's flush of everything answers."""
    with grpc.insecure_channel(wire.address(str(server.directory / wire.ADMIN_SOCKET))) as channel:
        call = channel.unary_unary(
            "/hicache.v1.Admin/Flush", pb.FlushRequest.SerializeToString, pb.FlushReply.FromString
        )
        reply: pb.FlushReply = call(pb.FlushRequest(), timeout=WAIT_S)
        return reply


DYING = """
import sys
from tests.service.stored import NAMESPACE, PAGE
from hicache.service.client import Prompt, connect
client = connect(sys.argv[1])
reservation = client.reserve(Prompt(NAMESPACE, range(4 * PAGE)))
for page in reservation[:2]:
    page[:] = b"x" * len(page)
print(len(reservation), flush=True)
sys.stdin.read()
"""
"""A process that reserves four pages, writes two of them, and waits to be killed."""


def _dying(server: ThreadServer) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-c", DYING, str(server.directory)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"4\n"
    return process


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.wait(WAIT_S)
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()
