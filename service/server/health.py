"""Health that means progress, answered by threads of its own: when the loop stands still, it is they who say so.

Speaks `grpc.health.v1`. Names of services, and what SERVING means for them:

    ""                  the event loop has run within the last `STALE_S` seconds
    "hicache.v1.Cache"  that, and new sessions are taken
    "nvme"              that, and what waits for NVMe has moved within the last `STUCK_S` seconds; unknown without NVMe

A disk that fails or hangs costs hits, not the service: it shows under its own name alone.
"""

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hicache.clock import Clock
from hicache.movers import Lane
from hicache.service.wire import CACHE, address
from hicache.tier import NVME, TierId
from hicache.tiers.memory import started_executor

BEAT_S: Final = 0.25
"""How often the loop shows that it runs."""
STALE_S: Final = 2.0
"""A loop that has not shown itself for so long stands still."""
STUCK_S: Final = 10.0
"""A lane on which nothing has ended for so long, although something waits or is under way, is stuck."""
MAX_CHECKS: Final = 16
"""Checks under way at a time."""

_Status = health_pb2.HealthCheckResponse


@dataclass(frozen=True, slots=True)
class Pulse:
    """What the loop last said of itself. One object, replaced whole, so that a thread reads it without a lock."""

    at: float
    """Monotonic seconds."""
    is_accepting: bool
    nvme_moves: bool | None
    """Whether NVMe gives what it is asked for; None without NVMe."""


class Progress:
    """Watches the loop and the lanes from within the loop."""

    def __init__(
        self, clock: Clock, lanes: Iterable[Lane], *, has_nvme: bool, is_accepting: Callable[[], bool]
    ) -> None:
        self._clock: Final = clock
        self._lanes: Final = [lane for lane in lanes if NVME in lane.name]
        self._has_nvme: Final = has_nvme
        self._is_accepting: Final = is_accepting
        self._moved: Final[dict[str, tuple[int, float]]] = {}
        self.pulse = self._look()

    async def watch(self) -> NoReturn:
        """Keep `pulse` fresh until cancelled."""
        while True:
            self.pulse = self._look()
            await asyncio.sleep(BEAT_S)

    def _look(self) -> Pulse:
        now = self._clock.monotonic()
        for lane in self._lanes:
            stats = lane.stats
            num_ended = stats.pages + stats.failed + stats.cancelled
            before = self._moved.get(lane.name)
            if before is None or before[0] != num_ended or not (stats.queued_pages or stats.in_flight_pages):
                self._moved[lane.name] = num_ended, now
        moves = all(now - at < STUCK_S for _, at in self._moved.values()) if self._has_nvme else None
        return Pulse(now, self._is_accepting(), moves)


class HealthServer:
    """Serves health at a socket until it is closed."""

    def __init__(self, path: str, progress: Progress, clock: Clock) -> None:
        self._threads: Final = started_executor(TierId("health"), 2)
        self._server: Final = grpc.server(self._threads, maximum_concurrent_rpcs=MAX_CHECKS)
        health_pb2_grpc.add_HealthServicer_to_server(_Servicer(progress, clock), self._server)
        self._server.add_insecure_port(address(path))
        os.chmod(path, 0o600)
        self._server.start()

    def close(self) -> None:
        """Stop answering. Waits for checks under way."""
        self._server.stop(grace=None).wait()
        self._threads.shutdown()


class _Servicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # generated without types
    """Answers from the last pulse. `Watch` stays unimplemented: it would take a thread for each watcher."""

    def __init__(self, progress: Progress, clock: Clock) -> None:
        self._progress: Final = progress
        self._clock: Final = clock

    def Check(self, request: Any, context: grpc.ServicerContext) -> Any:
        """One service's health."""
        pulse = self._progress.pulse
        runs = self._clock.monotonic() - pulse.at < STALE_S
        known = {"": True, CACHE.full_name: pulse.is_accepting, str(NVME): pulse.nvme_moves}
        serves = known.get(request.service)
        if serves is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return _Status(status=_Status.SERVING if runs and serves else _Status.NOT_SERVING)
