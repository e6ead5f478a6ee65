"""Who connects over and over is in nobody else's way."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from hicache.errors import DeadlineExceeded
from hicache.service import wire
from hicache.service.client.transport import say_hello
from hicache.service.errors import Unreachable
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.accepting import Acceptor
from tests.tiers.contract import run


def test_many_that_wait_are_handled_in_turn_and_others_run_meanwhile(tmp_path: Path) -> None:
    """I26: none is hung up on for those before him that need nothing more, and the loop does not stand still."""
    num_waiting, num_handled, seen = 100, 0, set[int]()

    async def main(stack: ExitStack) -> None:
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(str(tmp_path / "socket"))
        listening.listen(num_waiting)
        listening.setblocking(False)
        for _ in range(num_waiting):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(listening.getsockname())
        done = asyncio.Event()

        async def handle(_: socket.socket) -> None:
            nonlocal num_handled
            num_handled += 1
            if num_handled == num_waiting:
                done.set()

        async def others() -> None:
            while not done.is_set():
                seen.add(num_handled)
                await asyncio.sleep(0)

        async with asyncio.timeout(10.0), asyncio.TaskGroup() as tasks:
            accepting = tasks.create_task(Acceptor(listening, 8, "test").run(handle))
            await tasks.create_task(others())
            accepting.cancel()
        assert len(seen) > num_waiting // 2, "they ran between two that were let in"

    with ExitStack() as stack:
        run(main(stack))


def test_a_hello_waits_for_those_before_it(tmp_path: Path) -> None:
    """Where the kernel keeps as many that wait to be let in as it does, one more waits for its own time, too."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(str(tmp_path / wire.HELLO_SOCKET))
        listening.listen(1)
        with suppress(BlockingIOError):
            while True:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(listening.getsockname())
        with pytest.raises(DeadlineExceeded):
            say_hello(tmp_path, pb.Hello(), 0.1)
        said = stack.enter_context(ThreadPoolExecutor(1)).submit(say_hello, tmp_path, pb.Hello(), 60.0)
        while not said.done():  # it is let in after the others, and hung up on
            listening.settimeout(0.1)
            with suppress(TimeoutError):
                listening.accept()[0].close()
        with pytest.raises(Unreachable):
            said.result()
