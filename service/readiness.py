"""Tells a supervisor how the server is doing, in systemd's protocol: one datagram a message, to the socket that the
environment names. Without one nothing is sent.
"""

import asyncio
import logging
import os
import socket
from collections.abc import MutableMapping
from typing import Final, NoReturn

SOCKET: Final = "NOTIFY_SOCKET"
WATCHDOG_US: Final = "WATCHDOG_USEC"
WATCHDOG_PID: Final = "WATCHDOG_PID"
READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
ALIVE: Final = "WATCHDOG=1"
BEATS: Final = 3
"""Signs of life within the time after which the supervisor ends a process that gives none."""

_log = logging.getLogger(__name__)


class Supervisor:
    """Whoever started this process and wants to know how it is. Does not wait, and never raises for what it meets."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Takes its variables out of the environment: processes that this one starts are not to answer for it."""
        self._path: Final = environment.pop(SOCKET, "")
        times = environment.pop(WATCHDOG_US, ""), environment.pop(WATCHDOG_PID, str(os.getpid()))
        self.watchdog_s: Final = int(times[0]) / 1e6 if times[0].isdecimal() and times[1] == str(os.getpid()) else 0.0
        """Within so many seconds the supervisor wants a sign of life; 0 if it wants none."""

    def tell(self, *lines: str) -> bool:
        """Send a message of these lines; whether it was sent."""
        if not self._path.startswith(("/", "@")):
            return False
        # A leading "@" stands for the zero byte of a name that is in no file system.
        address = "\0" + self._path[1:] if self._path[0] == "@" else self._path
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto("\n".join(lines).encode(), address)
        except OSError as error:
            _log.warning("the supervisor does not hear: %s", error.strerror)
            return False
        return True

    async def keep_alive(self) -> NoReturn:
        """Give signs of life until cancelled. Runs on the loop, so that they end when it stands still."""
        assert self.watchdog_s > 0, "nobody wants them"
        while True:
            self.tell(ALIVE)
            await asyncio.sleep(self.watchdog_s / BEATS)
