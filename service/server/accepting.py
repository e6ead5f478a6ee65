"""Accepting connections at a listening socket: so many at a time, and through times without free descriptors."""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, NoReturn

EXHAUSTED_S: Final = 0.2
"""How long nobody is let in after descriptors or memory ran out."""

_log = logging.getLogger(__name__)


class Acceptor:
    """Lets connections in. Belongs to the event loop, and owns the socket.

    Args:
        listening: a listening socket that does not block.
        connections_max: connections at a time; those above are closed at once.
        named: what is at this socket, for the log.
    """

    def __init__(self, listening: socket.socket, connections_max: int, named: str) -> None:
        self._socket: Final = listening
        self._max: Final = connections_max
        self._named: Final = named
        self._num_under_way = 0
        self._is_closed = False

    def close(self) -> None:
        """Let nobody in any more; `run` is cancelled by its owner. Again is harmless."""
        self._is_closed = True
        self._socket.close()

    async def run(self, handle: Callable[[socket.socket], Coroutine[Any, Any, None]]) -> NoReturn:
        """Accept until cancelled. Each connection is handled in a task, without blocking, and then closed."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._socket)
                except OSError as error:
                    if self._is_closed:
                        raise asyncio.CancelledError from error
                    # Those who wait are let in when there are descriptors and memory again.
                    _log.warning("%s: nobody is let in for a moment: %s", self._named, error.strerror)
                    await asyncio.sleep(EXHAUSTED_S)
                    continue
                if self._num_under_way < self._max:
                    connection.setblocking(False)
                    self._num_under_way += 1
                    # Not in a `finally` of the task: cancelled before its first step it would run none.
                    tasks.create_task(handle(connection)).add_done_callback(partial(self._end, connection))
                else:
                    connection.close()
                # To accept does not wait while somebody is there: others run meanwhile, also who lets this one go.
                await asyncio.sleep(0)
        raise AssertionError("accepting has no end")

    def _end(self, connection: socket.socket, task: "asyncio.Task[None]") -> None:
        connection.close()
        self._num_under_way -= 1
