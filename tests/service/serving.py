"""Servers for tests: one in a thread of this process, and one in a process of its own."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc.aio

from hicache.service.config import ServeConfig
from hicache.service.server.process import Server, serving
from hicache.tier import TierId
from hicache.tiers.memory import started_executor
from tests.repository import ROOT
from tests.service.stored import LAYOUT, PAGE

WAIT_S: Final = 60.0
"""How long anything may take that is not what a test is about."""

T = TypeVar("T")

# The poller of grpc.aio is the process's: it begins before any test looks for threads that it has left behind.
grpc.aio.init_grpc_aio()


def settings(directory: Path, *, host_pages: int = 64, **more: object) -> dict[str, object]:
    """A server's settings; `more` by key, with "__" for the dot. What was used longest ago leaves first, so that a test
    can foresee it."""
    tree: dict[str, Any] = {
        "socket_dir": str(directory / "run"),
        "policy": "lru",
        "layout": {"num_layers": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": "float32", "page_size": PAGE},
        "host": {"bytes": host_pages * LAYOUT.page_bytes},
        "limits": {"staging_bytes": 16 * LAYOUT.page_bytes},
    }
    for key, value in more.items():
        *tables, last = key.split("__")
        inside = tree
        for table in tables:
            inside = inside.setdefault(table, {})
        inside[last] = value
    return tree


NUM_THREADS: Final = 4
"""Threads of a server's default executor."""


class ThreadServer:
    """A server on a loop in a thread of this process, so that a test can look inside it."""

    def __init__(self, tree: dict[str, object]) -> None:
        self.config = ServeConfig.checked(tree)
        self.directory = self.config.socket_dir
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="test-server")
        self._thread.start()
        assert self._started.wait(WAIT_S)
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        # All its threads begin now: none is left behind by the test in which it happens to begin.
        asyncio.get_running_loop().set_default_executor(started_executor(TierId("test-server"), NUM_THREADS))
        async with serving(self.config) as server:
            self.server, self._loop = server, asyncio.get_running_loop()
            self._started.set()
            await server.stopping.wait()

    def call(self, ask: Callable[[Server], T]) -> T:
        """What `ask` says of the server, asked on its loop."""

        async def asked() -> T:
            return ask(self.server)

        return self.run(asked())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def until(self, condition: Callable[[Server], bool], *, within_s: float) -> float:
        """Wait on the server's loop until a condition holds; how long that took. Raises `TimeoutError`."""

        async def waited() -> float:
            loop = asyncio.get_running_loop()
            began = loop.time()
            async with asyncio.timeout(within_s):
                while not condition(self.server):
                    tick: asyncio.Future[None] = loop.create_future()
                    loop.call_later(0.01, tick.set_result, None)
                    await tick
            return loop.time() - began

        return self.run(waited())

    def close(self) -> None:
        """Stop it, as SIGTERM would."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the server did not stop"
        if self._failure is not None:
            raise self._failure


@contextmanager
def thread_server(directory: Path, **more: Any) -> Iterator[ThreadServer]:
    """A `ThreadServer` with these settings."""
    server = ThreadServer(settings(directory, **more))
    try:
        yield server
    finally:
        server.close()


class ServerProcess:
    """`hicache serve` in a process of its own."""

    def __init__(self, directory: Path, arguments: Sequence[str], *, name: str = "run") -> None:
        """`name`: of the socket directory, in `directory`."""
        self.directory = directory / name
        self._errors = directory / "errors"
        with self._errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hicache.tools", "serve", "--socket-dir", str(self.directory), *arguments],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.said = line.decode().strip()
        """What it said when it served."""
        if not line.startswith(b"serving at"):
            self.stop()
            raise AssertionError(f"it did not start: {line!r} {self.errors()}")

    def errors(self) -> str:
        """What it wrote to standard error."""
        return self._errors.read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait; its exit status."""
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        status = self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


def arguments(*, host_pages: int = 64, **more: object) -> list[str]:
    """The settings of a `ServerProcess` as options; `more` as `settings` takes it, each value as TOML has it."""
    values = {
        "layout.num_layers": 2,
        "layout.num_kv_heads": 1,
        "layout.head_dim": 16,
        "layout.dtype": '"float32"',
        "layout.page_size": PAGE,
        "host.bytes": host_pages * LAYOUT.page_bytes,
        "limits.staging_bytes": 16 * LAYOUT.page_bytes,
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
