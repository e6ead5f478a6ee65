"""What `hicache bench service` runs in processes of their own: a server that can also echo, and clients.

    python -m hicache.tools.bench.service_process serve SOCKET_DIR PAGE_SIZE NUM_LAYERS NUM_KV_HEADS HOST_BYTES
    python -m hicache.tools.bench.service_process client SOCKET_DIR PAGE_SIZE NUM_LAYERS NUM_KV_HEADS STAGING_BYTES

`serve` prints a line once it answers, and waits to be killed. `client` reads a JSON `Task` a line from its input,
carries it out, and prints what it took as a JSON `Times` a line. Preparing what a task needs is not timed.
"""

import asyncio
import json
import mmap
import sys
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter, process_time
from typing import Any, Final

import grpc
import grpc.aio

from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.service import wire
from hicache.service.client import Prompt, connect
from hicache.service.client.calls import Request
from hicache.service.client.client import Client, directory_of
from hicache.service.client.transport import GrpcTransport
from hicache.service.config import ServeConfig
from hicache.service.server.edge import options
from hicache.service.server.process import Server, run

ECHO_SOCKET: Final = "echo.sock"
ECHO_METHOD: Final = "/hicache.bench.Echo/Echo"
STREAM_METHOD: Final = "/hicache.bench.Echo/Stream"
LENGTH_BYTES: Final = 4
"""The first bytes of an echo's request: how long its reply is, little-endian."""
MAX_CALLS: Final = 1024
"""Calls that the echo answers at once: more than there are clients, as with the server."""
TURN_TOKENS: Final = 256
"""Tokens of the turn that is appended."""
TIMEOUT_S: Final = 60.0
STRANGERS: Final = 1 << 24
"""Prompts begin so many tokens apart, so that no two share a page."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a client is to do, `calls` times."""

    side: str
    """`fill` stores a prompt for the lookups; then a name in `Worker.sides`."""
    num_tokens: int
    calls: int


@dataclass(frozen=True, slots=True)
class Times:
    """What a task took."""

    us: list[float]
    """Microseconds of each call."""
    cpu_us: float
    """Microseconds of CPU of this process, for all calls."""


def layout(page_size: int, num_layers: int, num_kv_heads: int) -> KVLayout:
    """The layout that the server keeps and clients store."""
    return KVLayout.uniform(
        num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=64, dtype=KVDtype.BFLOAT16, page_size=page_size
    )


async def serve(socket_dir: Path, page_layout: KVLayout, host_bytes: int) -> None:
    """A server as `hicache serve` runs it, and on its loop the echo: two processes that do the same may differ by half,
    as the kernel places their threads, which would drown what is to be compared."""
    (group,) = page_layout.groups
    shape = {"num_layers": group.num_layers, "num_kv_heads": group.num_kv_heads, "head_dim": group.head_dim}
    settings = {
        "socket_dir": str(socket_dir),
        "layout": {**shape, "dtype": page_layout.dtype.value, "page_size": page_layout.page_size},
        "host": {"bytes": host_bytes},
    }
    config = ServeConfig.checked(settings)
    async with asyncio.TaskGroup() as tasks:

        def ready(_: Server) -> None:
            tasks.create_task(echo(socket_dir, config))

        await run(config, ready=ready, stopping=lambda _: None)


async def echo(socket_dir: Path, config: ServeConfig) -> None:
    """Answer with as many bytes as the request asks for. gRPC is set up as on the server's own data socket."""

    async def answer(data: bytes, context: object) -> bytes:
        return bytes(int.from_bytes(data[:LENGTH_BYTES], "little"))

    async def answer_each(said: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        async for data in said:
            yield await answer(data, context)

    server = grpc.aio.server(options=options(config.limits, config.times), maximum_concurrent_rpcs=MAX_CALLS)
    service, _, method = ECHO_METHOD.strip("/").partition("/")
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        method: grpc.unary_unary_rpc_method_handler(answer),
        STREAM_METHOD.rpartition("/")[2]: grpc.stream_stream_rpc_method_handler(answer_each),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(wire.address(str(socket_dir / ECHO_SOCKET)))
    await server.start()
    print("serving", flush=True)
    await server.wait_for_termination()


class Weighing(GrpcTransport):
    """A connection that remembers how many bytes its last call sent and was answered with."""

    sizes = (0, 0)

    def call(self, request: Request, timeout_s: float) -> Any:
        reply = super().call(request, timeout_s)
        sent = wire.with_tokens(request.message.SerializeToString(), request.tokens)
        self.sizes = (len(sent), reply.ByteSize())
        return reply


class Worker:
    """One client, and its connection to the echo."""

    def __init__(self, socket_dir: Path, client: Client, page_layout: KVLayout) -> None:
        self._socket_dir: Final = socket_dir
        self._client: Final = client
        self._namespace: Final = Namespace(model="bench", layout=page_layout)
        self._page_bytes: Final = page_layout.page_bytes
        self._page_size: Final = page_layout.page_size
        self._strangers: Final = count(1)
        self._buffers: tuple[memoryview, memoryview] | None = None
        self._sizes: dict[tuple[str, int], tuple[int, int]] = {}
        self._prompts: dict[int, Prompt] = {}
        self._turns: dict[int, Prompt] = {}
        channel = grpc.insecure_channel(
            wire.address(str(socket_dir / ECHO_SOCKET)),
            options=(("grpc.max_send_message_length", -1), ("grpc.enable_retries", 0)),
        )
        self._echo: Final[Any] = channel.unary_unary(ECHO_METHOD)
        self._said: Final[SimpleQueue[bytes | None]] = SimpleQueue()
        stream: Any = channel.stream_stream(STREAM_METHOD)
        self._answers: Final[Iterator[bytes]] = stream(iter(self._said.get, None))
        self.sides: Final[dict[str, Callable[[int], Callable[[], object]]]] = {
            "first": self._first,
            "append": self._append,
            "echo_first": lambda num_tokens: self._echoing("first", num_tokens),
            "echo_append": lambda num_tokens: self._echoing("append", num_tokens),
            "echo_stream": lambda num_tokens: self._echoing("append", num_tokens, self._echo_on_stream),
            "memcpy": self._memcpy,
        }

    def carry_out(self, task: Task) -> Times:
        """Do what is asked, and say what it took."""
        if task.side == "fill":
            if task.num_tokens not in self._prompts:
                self._stored(task.num_tokens, self._prompt(task.num_tokens))
            return Times([], 0.0)
        if task.side in ("store", "retrieve", "read"):
            return Times([self._moved(task.side, task.num_tokens) for _ in range(task.calls)], 0.0)
        operation = self.sides[task.side](task.num_tokens)
        us, cpu_began = [], process_time()
        for _ in range(task.calls):
            began = perf_counter()
            operation()
            us.append((perf_counter() - began) * 1e6)
        return Times(us, (process_time() - cpu_began) * 1e6)

    # -- looking up ---------------------------------------------------------------------------------------------------

    def _prompt(self, num_tokens: int) -> Prompt:
        if num_tokens not in self._prompts:
            self._prompts[num_tokens] = self._known(num_tokens)
        return self._prompts[num_tokens]

    def _known(self, num_tokens: int) -> Prompt:
        """What is stored of this length. Its first token is its length: prompts of two lengths share nothing."""
        return Prompt(self._namespace, array("i", range(num_tokens, 2 * num_tokens)))

    def _turn(self, num_tokens: int) -> Prompt:
        """A prompt whose first `num_tokens` are stored, and were looked up; with a turn behind it that is new."""
        if num_tokens not in self._turns:
            prompt = self._turns[num_tokens] = self._known(num_tokens)
            self._require(prompt, num_tokens)
            prompt.extend(range(STRANGERS - TURN_TOKENS, STRANGERS))
        return self._turns[num_tokens]

    def _require(self, prompt: Prompt, num_tokens: int) -> None:
        found = self._client.lookup(prompt).num_tokens
        assert found == num_tokens, f"{found} of {num_tokens} tokens were found"

    def _first(self, num_tokens: int) -> Callable[[], object]:
        prompt = self._prompt(num_tokens)

        def look_up() -> None:
            prompt.forget()
            self._client.lookup(prompt)

        self._require(prompt, num_tokens)
        return look_up

    def _append(self, num_tokens: int) -> Callable[[], object]:
        prompt = self._turn(num_tokens)
        self._require(prompt, num_tokens)
        return lambda: self._client.lookup(prompt)

    def _echo_on_stream(self, request: bytes) -> Any:
        self._said.put(request)
        return next(self._answers)

    def _echoing(
        self, side: str, num_tokens: int, echo: Callable[[bytes], Any] | None = None
    ) -> Callable[[], object]:
        echo = echo or self._echo
        if (side, num_tokens) not in self._sizes:
            self._sizes[side, num_tokens] = self._weigh(side, num_tokens)
        sent, answered = self._sizes[side, num_tokens]
        request = answered.to_bytes(LENGTH_BYTES, "little") + bytes(sent - LENGTH_BYTES)
        assert len(echo(request)) == answered
        return lambda: echo(request)

    def _weigh(self, side: str, num_tokens: int) -> tuple[int, int]:
        """Bytes that a lookup sends and is answered with."""
        made: list[Weighing] = []

        def transport() -> Weighing:
            made.append(Weighing(directory_of(self._socket_dir)))
            return made[-1]

        with connect(self._socket_dir, staging_bytes=0, timeout_s=TIMEOUT_S, transport=transport) as client:
            prompt = self._known(num_tokens)
            client.lookup(prompt)
            if side == "append":
                prompt.extend(range(STRANGERS - TURN_TOKENS, STRANGERS))
                client.lookup(prompt)
            return made[-1].sizes

    # -- storing and retrieving ---------------------------------------------------------------------------------------

    def _touched(self, num_tokens: int) -> tuple[memoryview, memoryview]:
        """Two buffers of the size of so many tokens' pages, in memory that is there."""
        size = num_tokens // self._page_size * self._page_bytes
        if self._buffers is None or len(self._buffers[0]) != size:
            self._buffers = (_touched(size), _touched(size))
        return self._buffers

    def _memcpy(self, num_tokens: int) -> Callable[[], object]:
        target, source = self._touched(num_tokens)

        def copy() -> None:
            target[:] = source

        return copy

    def _stored(self, start: int, prompt: Prompt) -> float:
        """Store a prompt that is not there, whose first token is `start`; microseconds of its commit."""
        with self._client.reserve(prompt) as reservation:
            num_pages = len(prompt) // self._page_size
            problem = f"{len(reservation)} of {num_pages} pages: {reservation.outcome.name} {reservation.reason}"
            assert len(reservation) == num_pages, problem
            for number, page in enumerate(reservation):
                page[:] = self._content(start, number)
            began = perf_counter()
            reservation.commit()
            return (perf_counter() - began) * 1e6

    def _moved(self, side: str, num_tokens: int) -> float:
        """Store a prompt of its own, and read it; microseconds of the side asked for."""
        start = next(self._strangers) * STRANGERS
        prompt = Prompt(self._namespace, array("i", range(start, start + num_tokens)))
        stored_us = self._stored(start, prompt)
        if side == "store":
            return stored_us
        target, _ = self._touched(num_tokens)
        with self._client.acquire(prompt) as lease:
            began = perf_counter()
            if side == "read":
                target = memoryview(lease.read())
            else:
                lease.read_into(target)
            us = (perf_counter() - began) * 1e6
        last = len(prompt) // self._page_size - 1
        assert target[last * self._page_bytes :].tobytes() == self._content(start, last), "other bytes came back"
        return us

    def _content(self, start: int, page: int) -> bytes:
        """The bytes of a page: its first token, over and over."""
        return (start + page * self._page_size).to_bytes(4, "little") * (self._page_bytes // 4)


def _touched(size: int) -> memoryview:
    region = mmap.mmap(-1, size)
    region.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(region)
    for start in range(0, size, mmap.PAGESIZE):
        view[start] = 1
    return view


def tasks() -> Iterator[Task]:
    """What is asked for on standard input."""
    for line in sys.stdin:
        yield Task(**json.loads(line))


def client(socket_dir: Path, page_layout: KVLayout, staging_bytes: int) -> None:
    """Carry tasks out until the input ends."""
    with connect(socket_dir, staging_bytes=staging_bytes, timeout_s=TIMEOUT_S) as connected:
        worker = Worker(socket_dir, connected, page_layout)
        for task in tasks():
            print(json.dumps(asdict(worker.carry_out(task))), flush=True)


def main() -> None:
    role, socket_dir, *numbers = sys.argv[1:]
    page_size, num_layers, num_kv_heads, num_bytes = map(int, numbers)
    page_layout = layout(page_size, num_layers, num_kv_heads)
    if role == "serve":
        asyncio.run(serve(Path(socket_dir), page_layout, num_bytes))
    else:
        client(Path(socket_dir), page_layout, num_bytes)


if __name__ == "__main__":
    main()
