"""Health means progress: what stands still is told of within a bound, and so is that it goes on."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Final

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hicache.service import wire
from hicache.service.client import Durability, Outcome, Prompt, connect
from hicache.service.server import health
from tests.punctual import in_time
from tests.service.serving import WAIT_S, ThreadServer, thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, check, page_bytes, store
from tests.service.test_deadlines import hung_disk, leave_the_host

Status = Callable[[str], int]
SERVING: Final = 1
NOT_SERVING: Final = 2
BUSY_S: Final = 1.0
"""What a busy machine is given beside each bound."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadServer]:
    nvme = {"nvme__bytes": 256 * LAYOUT.page_bytes, "nvme__dir": str(tmp_path / "nvme")}
    with thread_server(tmp_path, **nvme) as running:
        yield running


@pytest.fixture
def status(server: ThreadServer) -> Iterator[Status]:
    """Asks for a service's health."""
    with grpc.insecure_channel(wire.address(str(server.directory / wire.HEALTH_SOCKET))) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def ask(service: str) -> int:
            return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S).status)

        assert [ask(service) for service in ("", "hicache.v1.Cache", "nvme")] == [SERVING] * 3
        yield ask


def _until(ask: Callable[[], int], wanted: int, within_s: float) -> None:
    began = monotonic()
    with in_time(within_s + BUSY_S):
        while ask() != wanted:
            assert monotonic() - began < WAIT_S, "never"


def test_a_loop_that_stands_still_is_told_of_and_so_is_its_return(server: ThreadServer, status: Status) -> None:
    """I26, I28, I31: within `STALE_S`, under every name; and within a beat that it runs again."""
    held, go_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        held.set()
        go_on.wait(WAIT_S)

    server._loop.call_soon_threadsafe(stand_still)
    assert held.wait(WAIT_S)
    try:
        _until(lambda: status(""), NOT_SERVING, health.STALE_S)
        assert status("hicache.v1.Cache") == status("nvme") == NOT_SERVING
    finally:
        go_on.set()
    for service in ("", "hicache.v1.Cache", "nvme"):
        _until(lambda service=service: status(service), SERVING, health.BEAT_S)  # type: ignore[misc]  # bound at once


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_lane_that_stands_still_is_told_of_under_its_own_name_alone(
    server: ThreadServer, status: Status, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I28, F17, F18: something waits for NVMe and nothing moves for `STUCK_S`. The service itself serves on."""
    monkeypatch.setattr(health, "STUCK_S", 1.0)
    cold = range(2 * PAGE)
    with connect(server.directory) as client:
        store(client, cold, durability=Durability.WAIT)
        server.run(leave_the_host(server))
        with hung_disk(server):
            for number in range(64):
                if way == "read":
                    client.prefetch(Prompt(NAMESPACE, cold), within_s=30.0)
                else:
                    tokens = range(1000 * (number + 1), 1000 * (number + 1) + PAGE)
                    with client.reserve(Prompt(NAMESPACE, tokens)) as reservation:
                        reservation[0][:] = page_bytes(tokens, 0)
                        assert reservation.commit(durability=Durability.BEHIND).outcome is Outcome.RESIDENT
            _until(lambda: status("nvme"), NOT_SERVING, 1.0 + health.BEAT_S)
            assert status("") == status("hicache.v1.Cache") == SERVING
        _until(lambda: status("nvme"), SERVING, 5.0)
        assert check(client, cold) == len(cold)
