"""One server, from its first socket to its last: what is started in which order, and how it stops.

Starting: the socket directory is claimed first, because everything else is only then ours to make; the cache is opened
next, the longest step; then the calls, admin and health; the hello socket last, so that whoever is let in finds all.

Stopping has two phases. In the first no session is taken, those there are told, and whoever still holds a lease or a
reservation has `drain_s` seconds to finish. In the second all sessions end, what they hold is given back, calls are cut
off, and the cache lets its moves finish and closes. Both together take at most `STOP_S`, or `drain_s` and `CLOSE_S`
where that is more, also with a disk that does not answer. A second signal skips both: the process ends at once, which
loses nothing that was promised as durable.
"""

import asyncio
import ctypes
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from math import ceil
from typing import Any, Final

import grpc.aio
from grpc_reflection.v1alpha import reflection
from prometheus_client import Metric

import hicache
from hicache.clock import SystemClock
from hicache.errors import BadRequest, TierUnavailable
from hicache.service import wire
from hicache.service.config import ServeConfig
from hicache.service.dashboard.server import Dashboard
from hicache.service.dashboard.tree import Decode
from hicache.service.events.publisher import Publisher
from hicache.service.events.residency import CopyEvents
from hicache.service.metrics import CallTimes, families
from hicache.service.readiness import READY, SOCKET, STOPPING, Supervisor
from hicache.service.server.admin import AdminCalls
from hicache.service.server.cache import Served, open_cache, options_of
from hicache.service.server.data import DataCalls
from hicache.service.server.door import DoorCalls
from hicache.service.server.edge import Edge, options
from hicache.service.server.health import HealthServer, Progress
from hicache.service.server.hello import HelloServer
from hicache.service.server.intake import AT_ONCE, Intake
from hicache.service.server.keeping import Keeper
from hicache.service.server.metrics import MetricsServer
from hicache.service.server.recording import Recording
from hicache.service.server.sessions import Sessions
from hicache.service.server.shares import Peers
from hicache.service.server.storing import Storing
from hicache.service.server.unread import Unread
from hicache.service.server.welcoming import Welcoming
from hicache.service.snapshot import stats_of
from hicache.service.sockets import SocketDirectory
from hicache.service.tracing import Tracing
from hicache.tiers.host import HostTier

STOP_S: Final = 7.5
"""How long a stop may take, from the signal on; the interpreter takes a little more to end."""
CLOSE_S: Final = 2.5
"""How much of that is left to the second phase, however long the first may take."""
POLL_S: Final = 0.05
"""How often the first phase of a stop looks whether it may end."""
CUT_OFF_S: Final = 0.5
"""How long calls may take to end that are cut off."""
KEPT_BYTES: Final = 64 << 20
"""Freed memory that the process keeps for its next messages, at most."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
KEEPALIVE: Final = (
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # clients ask as often, also where beats are far apart
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 60_000),
)
"""Over TCP: connections over which nothing is asked are closed: anybody can open one, and each takes a descriptor."""
MAX_ADMIN_CALLS: Final = 16
"""Calls under way on the admin socket."""

_log = logging.getLogger(__name__)


class Server:
    """A running server. Made by `serving`; belongs to its loop."""

    def __init__(
        self,
        config: ServeConfig,
        served: Served,
        tasks: asyncio.TaskGroup,
        metrics: MetricsServer | None,
        unread: Unread,
    ) -> None:
        self.config: Final = config
        self.clock: Final = served.cache.clock
        self.cache: Final = served.cache
        peers = Peers(config.tenants, has_group=config.socket_group is not None)
        self.sessions: Final = Sessions(served.cache, config.limits, config.times, peers)
        self.storing: Final = Storing(served.cache, served.host, self.sessions, self.start)
        self.recording: Final = Recording(self.clock, self.sessions.boot)
        self.stopping: Final = asyncio.Event()
        """Set when the server is to stop."""
        self.call_times: Final = CallTimes()
        self.metrics: Final = metrics
        """Where metrics are served, if that was asked for."""
        self.unread: Final = unread
        """Cuts off local connections that nobody reads."""
        self.dashboard: Dashboard | None = None
        """Serves the page, if that was asked for."""
        self.publisher: Publisher | None = None
        """Publishes events, if that was asked for."""
        self.tcp_port: int | None = None
        """Where it listens for other machines, if that was asked for."""
        self._tasks: Final = tasks
        self._own: Final[set[asyncio.Task[None]]] = set()
        self._began: Final = self.clock.monotonic()
        self._drain_s = config.times.drain_s

    def start(self, work: Coroutine[Any, Any, None]) -> object:
        task = self._tasks.create_task(work)
        self._own.add(task)
        task.add_done_callback(self._own.discard)
        return task

    def stop(self, within_s: float = 0.0) -> None:
        """Begin to stop; sessions have so many seconds to finish, or the configuration's. Again is harmless."""
        if not self.stopping.is_set():
            self._drain_s = within_s or self.config.times.drain_s
            self.cache.leave_by(self.clock.monotonic() + max(STOP_S, self._drain_s + CLOSE_S))
            self.sessions.drain()
            self.stopping.set()

    def status(self) -> dict[str, Any]:
        """The server of itself, JSON-able: "version", "protocol", "boot_id" (hex), "pid", "up_s", "commits",
        "bytes_stored", "cut_off" (connections that were not read), "metrics_port" and "tcp_port" (or null), "tenants"
        (the configuration's names)."""
        return {
            "version": hicache.__version__,
            "protocol": wire.PROTOCOL,
            "boot_id": f"{self.sessions.boot.id:016x}",
            "pid": os.getpid(),
            "up_s": self.clock.monotonic() - self._began,
            "commits": self.storing.num_commits,
            "bytes_stored": self.storing.bytes_stored,
            "cut_off": self.unread.num_cut_off,
            "metrics_port": self.metrics.port if self.metrics is not None else None,
            "tcp_port": self.tcp_port,
            "tenants": sorted(self.config.tenants),
        }

    def measured(self) -> list[Metric]:
        """All metrics, as they are now."""
        return families(
            stats_of(self.cache),
            self.status(),
            self.sessions.stats(),
            calls=self.call_times,
            leases=self.sessions.lease_times,
            layout=self.cache.layout,
        )

    async def finish(self) -> None:
        """The first phase of a stop, to its end or its deadline."""
        for _ in range(ceil(self._drain_s / POLL_S)):
            if all(session.is_idle for session in self.sessions):
                return
            await asyncio.sleep(POLL_S)

    async def cut_off(self) -> None:
        """The second phase, as far as it is about sessions: all end, and what was begun for them is waited for."""
        for session in self.sessions:
            self.sessions.end(session, "the server stopped")
        if self._own:
            # Copies take less. What waits longer waits for a disk, and promises nothing yet.
            _, waiting = await asyncio.wait(set(self._own), timeout=CUT_OFF_S)
            for task in waiting:
                task.cancel()


@asynccontextmanager
async def serving(
    config: ServeConfig, keeper: Keeper | None = None, decode: Decode | None = None
) -> AsyncIterator[Server]:
    """A server that takes sessions inside the block; leaving it stops the server, in both phases. With a `keeper` it
    goes on with the arena of the server before, and leaves its own to the next. With `decode` its page shows text
    instead of token ids.

    Raises `BadRequest` naming a key, before anything is made that stays; `TierUnavailable`.
    """
    clock, opened_with = SystemClock(), options_of(config)
    async with AsyncExitStack() as stack:
        directory = SocketDirectory(config.socket_dir, config.socket_group)
        stack.callback(directory.close)
        tracing = Tracing.asked_for(os.environ)
        if tracing is not None:
            stack.callback(tracing.close)
        remote, tcp_port = None, None
        if config.tcp is not None:
            config.tcp.check_free()
            credentials = config.tcp.credentials()
            remote = _grpc_server(config, None, tracing, KEEPALIVE)
            stack.push_async_callback(remote.stop, None)
            tcp_port = _bind(remote, str(config.tcp.address), credentials)
        metrics = None
        if config.metrics_port is not None:
            metrics = MetricsServer(config.metrics_port)
            stack.callback(metrics.close)
        dashboard = None
        if config.http is not None:
            dashboard = Dashboard(config.http, decode)
            stack.callback(dashboard.close)
        publisher, listeners = None, list[CopyEvents]()
        if config.events_endpoint is not None:
            publisher = Publisher(config.events_endpoint, config.events_replay_endpoint, clock)
            stack.callback(publisher.close)
            listeners.append(CopyEvents(publisher.tell))
        make_host = keeper.make_host if keeper is not None else HostTier
        served = await open_cache(opened_with, clock, listeners=listeners, make_host=make_host)
        for each in listeners:
            each.tree = served.cache.tree
        await stack.enter_async_context(served.cache)
        if keeper is not None:
            keeper.restore(served.cache, served.host)
            stack.push_async_callback(keeper.save, served.cache, served.host)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        spoken = [directory / name for name in (wire.DATA_SOCKET, wire.ADMIN_SOCKET, wire.HEALTH_SOCKET)]
        unread = Unread(spoken, clock, config.times.lease_s)
        stack.callback(unread.close)
        server = Server(config, served, tasks, metrics, unread)
        server.publisher, server.dashboard = publisher, dashboard
        stack.callback(server.storing.close)

        data = _grpc_server(config, None, tracing)
        times = server.call_times
        longest = wire.longest_request(config.limits.max_tokens)
        intake = Intake(longest, config.limits.message_bytes, server.sessions.peers)
        edge = Edge(
            clock, max_call_s=config.times.max_call_s, sessions=server.sessions, times=times, intake=intake,
            tracing=tracing,
        )  # fmt: skip
        calls = DataCalls(
            server.cache, served.host, server.sessions, server.storing, server.recording, server.start
        )
        data.add_generic_rpc_handlers((edge.handler(wire.CACHE, calls),))
        await _listen(data, directory / wire.DATA_SOCKET)
        directory.share(wire.DATA_SOCKET)
        stack.push_async_callback(data.stop, CUT_OFF_S)
        welcoming = Welcoming(server.sessions, served.host, config.tenants)
        stack.callback(welcoming.close)
        if config.tcp is not None and remote is not None:
            server.tcp_port = tcp_port
            door = Edge(
                clock, max_call_s=config.times.max_call_s, sessions=None, times=times, intake=_own_intake(longest),
                access_sha256=config.tcp.token_sha256,
            )  # fmt: skip
            remote.add_generic_rpc_handlers((
                door.handler(wire.DOOR, DoorCalls(welcoming)), edge.handler(wire.CACHE, calls),
            ))  # fmt: skip
            await remote.start()
            stack.push_async_callback(remote.stop, CUT_OFF_S)

        admin = _grpc_server(config, MAX_ADMIN_CALLS, tracing)
        owners = AdminCalls(
            server.cache, server.sessions, server.storing, server.recording,
            status=server.status, drain=server.stop, start=server.start,
        )  # fmt: skip
        alone = Edge(
            clock, max_call_s=config.times.max_call_s, sessions=None, times=times, intake=_own_intake(longest)
        )
        admin.add_generic_rpc_handlers((alone.handler(wire.ADMIN, owners),))
        reflection.enable_server_reflection((wire.ADMIN.full_name, wire.CACHE.full_name), admin)
        await _listen(admin, directory / wire.ADMIN_SOCKET)
        stack.push_async_callback(admin.stop, CUT_OFF_S)

        progress = Progress(
            clock,
            server.cache.lanes,
            has_nvme=bool(config.nvme_dirs),
            is_accepting=lambda: not server.sessions.is_draining,
        )
        watches: list[Coroutine[Any, Any, Any]] = [progress.watch(), server.sessions.watch(), unread.watch()]
        if metrics is not None:
            watches.append(metrics.run(server.measured))
        if publisher is not None:
            watches.append(publisher.run())
        if dashboard is not None:
            watches.append(dashboard.run(server.cache, server.sessions, server.status))
        for watching in watches:
            stack.callback(tasks.create_task(watching).cancel)
        health = HealthServer(directory / wire.HEALTH_SOCKET, progress, clock)
        stack.callback(health.close)
        hello = HelloServer(
            directory / wire.HELLO_SOCKET, welcoming, served.host, has_group=config.socket_group is not None
        )
        stack.callback(hello.close)
        directory.share(wire.HELLO_SOCKET)
        stack.callback(tasks.create_task(hello.run()).cancel)
        stack.push_async_callback(server.cut_off)
        directory.keep()
        try:
            yield server
        finally:
            server.stop()
            await server.finish()


async def run(
    config: ServeConfig,
    *,
    ready: Callable[[Server], None],
    stopping: Callable[[Server], None],
    decode: Decode | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, or until told to drain; then stop. `ready` is called once it serves,
    `stopping` as it begins to stop; for `decode` see `serving`.

    For the main thread of a process of its own: it sets the umask and signal handlers, and tells systemd, where it was
    started by that, when it is ready, that it is alive, and when it stops. Raises as `serving` does.
    """
    os.umask(0o077)
    _keep_freed_memory()
    loop, supervisor = asyncio.get_running_loop(), Supervisor(os.environ)
    keeper = None
    if config.keep_arena:
        if not supervisor.hears:
            raise BadRequest("host.keep_arena", f"nobody is there to keep it: {SOCKET} is not in the environment")
        keeper = Keeper(supervisor)
    async with serving(config, keeper, decode) as server, asyncio.TaskGroup() as tasks:

        def stop() -> None:
            if server.stopping.is_set():
                _log.warning("a second signal: ending at once")
                os._exit(128 + signal.SIGTERM)
            server.stop()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, stop)
        alive = tasks.create_task(supervisor.keep_alive()) if supervisor.watchdog_s else None
        supervisor.tell(READY)
        ready(server)
        await server.stopping.wait()
        supervisor.tell(STOPPING)
        stopping(server)
        if alive is not None:
            alive.cancel()


def _keep_freed_memory() -> None:
    """Have the C library keep memory that messages give back, up to a bound, instead of returning it to the kernel each
    time: zeroing fresh pages for a long prompt's half megabyte costs several times what copying it does."""
    with suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def _grpc_server(
    config: ServeConfig, max_calls: int | None, tracing: Tracing | None, more: Sequence[tuple[str, int]] = ()
) -> grpc.aio.Server:
    """`max_calls`: gRPC refuses those above, whoever makes them; None where the edge counts those of sessions alone, so
    that nobody who has no session is in their way."""
    return grpc.aio.server(
        interceptors=[tracing] if tracing is not None else None,
        options=[*options(config.limits, config.times), *more],
        maximum_concurrent_rpcs=max_calls,
    )


def _own_intake(longest: int) -> Intake:
    """For calls that belong to no session: whatever sessions send, the owner is heard, and who comes. Twice what is
    received at a time."""
    return Intake(longest, 2 * AT_ONCE * longest, Peers())


async def _listen(server: grpc.aio.Server, path: str) -> None:
    try:
        server.add_insecure_port(wire.address(path))
    except RuntimeError as error:
        raise TierUnavailable("data", f"cannot listen at {path}: {error}") from None
    os.chmod(path, 0o600)
    await server.start()


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """The port. Nobody is let in before the server is started. Raises `BadRequest`."""
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:  # somebody was faster
        raise BadRequest("tcp.listen", f"{address}: {error}") from None
