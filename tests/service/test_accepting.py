"""Who connects over and over is in nobody else's way."""

import asyncio
import socket
from contextlib import ExitStack
from pathlib import Path

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
