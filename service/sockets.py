"""The directory in which a server's sockets lie: whose it is, and who may enter: its owner alone or, where that was
asked for, one group as well, for the sockets that engines need.

A server claims the directory before it makes a socket there, and holds it by a lock on a file inside for as long as it
runs; the kernel lets go of the lock with the process. So a socket that is found under the lock belongs to nobody,
unless a stranger put it there and listens.
"""

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Final

from hicache.errors import BadRequest
from hicache.service.wire import ADMIN_SOCKET, DATA_SOCKET, HEALTH_SOCKET, HELLO_SOCKET

MAX_PATH_BYTES: Final = 107
"""Longest path of a socket: what the kernel has room for."""
LOCK: Final = "lock"
"""Name of the file that is locked."""
SOCKETS: Final = (HELLO_SOCKET, DATA_SOCKET, ADMIN_SOCKET, HEALTH_SOCKET)


def default_directory() -> Path:
    """Where a server's sockets are unless something else is asked for: "hicache" in the user's runtime directory, or in
    the directory for temporary files under the user's number."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime) / "hicache" if runtime else Path(f"/tmp/hicache-{os.getuid()}")  # noqa: S108  # made 0700


class SocketDirectory:
    """A claimed directory. `close` removes the sockets and lets go of it."""

    def __init__(self, path: Path, group: int | None = None) -> None:
        """Make the directory if it is missing, claim it, and remove sockets that a server before has left. `group`: who
        may enter beside its owner, which alone lets nobody do anything there: see `share`.

        Raises `BadRequest` naming "socket_dir" for one that is not this user's alone or that a server uses, for a path
        that is too long, and for a file or a foreign socket in the way. Only a missing directory is made; nothing that
        is not ours is removed.
        """
        self.path: Final = Path(os.path.abspath(path))
        longest = max(SOCKETS, key=len)
        if len(os.fsencode(self.path / longest)) > MAX_PATH_BYTES:
            raise _refusal(self.path, f"is too long: with {longest!r} it must fit {MAX_PATH_BYTES} bytes")
        try:
            os.mkdir(self.path, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise _refusal(self.path, f"cannot be made: {error.strerror}") from None
        self._group: Final = group
        self._fd = _open_own_directory(self.path, group)
        try:
            self._lock = self._take_lock()
            try:
                for name in SOCKETS:
                    self._clear(name)
            except BaseException:
                os.close(self._lock)
                raise
        except BaseException:
            os.close(self._fd)
            raise

    def __truediv__(self, name: str) -> str:
        return os.fspath(self.path / name)

    def share(self, name: str) -> None:
        """Let the group connect to a socket, if there is one."""
        if self._group is not None:
            os.chown(name, -1, self._group, dir_fd=self._fd, follow_symlinks=False)
            os.chmod(self / name, 0o660)

    def close(self) -> None:
        """Remove the sockets and let go of the directory, which stays."""
        for name in SOCKETS:
            try:
                os.unlink(name, dir_fd=self._fd)
            except FileNotFoundError:
                continue
        os.close(self._lock)
        os.close(self._fd)

    def _take_lock(self) -> int:
        try:
            lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        except OSError as error:
            raise _refusal(self.path, f"its lock cannot be opened: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            problem = "a server runs there already" if error.errno == errno.EWOULDBLOCK else str(error.strerror)
            raise _refusal(self.path, problem) from None
        return lock

    def _clear(self, name: str) -> None:
        """Remove a socket that nobody listens on."""
        try:
            status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(status.st_mode):
            raise _refusal(self.path, f"{name!r} is in the way and is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(self / name)
            except ConnectionRefusedError:
                os.unlink(name, dir_fd=self._fd)
                return
            except OSError as error:
                raise _refusal(self.path, f"{name!r} is in the way: {error.strerror or error}") from None
        raise _refusal(self.path, f"{name!r} is in use by another program")


def _open_own_directory(path: Path, group: int | None) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _refusal(path, f"is no directory that can be used: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        others = 0o077 if group is None or status.st_gid != group else 0o067
        if status.st_uid != os.geteuid():
            raise _refusal(path, f"belongs to user {status.st_uid}, not to {os.geteuid()} who runs the server")
        if status.st_mode & others:
            raise _refusal(path, f"others may enter it (mode {status.st_mode & 0o777:04o}); chmod 700 it")
        if group is not None:
            try:
                os.fchown(fd, -1, group)
                os.fchmod(fd, 0o710)
            except OSError as error:
                raise BadRequest("socket_group", f"{path} cannot be given to group {group}: {error.strerror}") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refusal(path: Path, problem: str) -> BadRequest:
    return BadRequest("socket_dir", f"{path}: {problem}")
