"""Tells a supervisor how the server is doing, in systemd's protocol: one datagram a message, to the socket that the
environment names. Without one nothing is sent. A supervisor can also keep descriptors until the next server starts,
which then finds them among those that it inherits.
"""

import asyncio
import logging
import os
import socket
from collections.abc import MutableMapping, Sequence
from typing import Final, NoReturn

SOCKET: Final = "NOTIFY_SOCKET"
WATCHDOG_US: Final = "WATCHDOG_USEC"
WATCHDOG_PID: Final = "WATCHDOG_PID"
READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
ALIVE: Final = "WATCHDOG=1"
LISTEN_FDS: Final = "LISTEN_FDS"
LISTEN_PID: Final = "LISTEN_PID"
LISTEN_NAMES: Final = "LISTEN_FDNAMES"
FIRST_FD: Final = 3
"""The first of the descriptors that a supervisor hands on."""
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
        count = environment.pop(LISTEN_FDS, ""), environment.pop(LISTEN_PID, ""), environment.pop(LISTEN_NAMES, "")
        is_mine = count[0].isdecimal() and count[1] == str(os.getpid())
        self.kept: Final = dict(zip(count[2].split(":"), range(FIRST_FD, FIRST_FD + int(count[0])), strict=False)
                                if is_mine else ())  # fmt: skip
        """Descriptors that it has kept, by the names that `keep` gave them. They are the caller's now."""
        for fd in self.kept.values():
            os.set_inheritable(fd, False)

    @property
    def hears(self) -> bool:
        """Whether there is one."""
        return self._path.startswith(("/", "@"))

    def keep(self, fd: int, name: str) -> bool:
        """Have it keep a descriptor for the next process; whether that was said."""
        return self.tell("FDSTORE=1", f"FDNAME={name}", fds=(fd,))

    def forget(self, name: str) -> bool:
        """Have it keep the descriptors of that name no longer; whether that was said."""
        return self.tell("FDSTOREREMOVE=1", f"FDNAME={name}")

    def tell(self, *lines: str, fds: Sequence[int] = ()) -> bool:
        """Send a message of these lines, with descriptors; whether it was sent."""
        if not self.hears:
            return False
        # A leading "@" stands for the zero byte of a name that is in no file system.
        address = "\0" + self._path[1:] if self._path[0] == "@" else self._path
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.connect(address)
                socket.send_fds(sender, ["\n".join(lines).encode()], list(fds))
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
