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
from contextlib import ExitStack, suppress
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
    the directory for temporary files under the user's number.

    Raises `BadRequest` where somebody else has made that one: everybody may, to listen to what engines ask.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime:
        return Path(runtime) / "hicache"
    path = Path(f"/tmp/hicache-{os.getuid()}")  # noqa: S108  # made 0700
    with suppress(FileNotFoundError):
        if (owner := path.lstat().st_uid) != os.getuid():
            raise _refusal(path, f"belongs to user {owner}; remove it, or name another directory")
    return path


class SocketDirectory:
    """A claimed directory. `close` removes the sockets and lets go of it; one that was made for nothing goes, too."""

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
        self._was_made_for_nothing = False
        try:
            os.mkdir(self.path, 0o700)
            self._was_made_for_nothing = True
        except FileExistsError:
            pass
        except OSError as error:
            raise _refusal(self.path, f"cannot be made: {error.strerror}") from None
        self._group: Final = group
        with ExitStack() as undoing:
            self._fd = _open_own_directory(self.path, group)
            undoing.callback(os.close, self._fd)
            self._lock = self._take_lock()
            undoing.callback(os.close, self._lock)
            undoing.callback(self._unmake)
            for name in SOCKETS:
                self._clear(name)
            undoing.pop_all()

    def __truediv__(self, name: str) -> str:
        return os.fspath(self.path / name)

    def share(self, name: str) -> None:
        """Let the group connect to a socket, if there is one."""
        if self._group is not None:
            os.chown(name, -1, self._group, dir_fd=self._fd, follow_symlinks=False)
            os.chmod(self / name, 0o660)

    def keep(self) -> None:
        """The server serves: the directory stays when it ends."""
        self._was_made_for_nothing = False

    def close(self) -> None:
        """Remove the sockets and let go of the directory. It stays, unless it was made here and nothing came of it."""
        for name in SOCKETS:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._fd)
        self._unmake()
        os.close(self._lock)
        os.close(self._fd)

    def _unmake(self) -> None:
        """Remove what was made. For who holds the lock: it may be another server's directory by now."""
        if self._was_made_for_nothing:
            with suppress(FileNotFoundError):
                os.unlink(self.path / LOCK)
            with suppress(OSError):  # somebody has put something there
                os.rmdir(self.path)

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
        if not os.fstat(lock).st_nlink:
            os.close(lock)
            raise _refusal(self.path, "a server that could not start has just given it up; try again")
        return lock

    def _clear(self, name: str) -> None:
        """Remove a socket that nobody listens on."""
        try:
            status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(status.st_mode):
            raise _refusal(self.path, f"{name!r} is in the way and is no socket")
        try:
            is_in_use = is_in_use_at(self / name)
        except OSError as error:
            raise _refusal(self.path, f"{name!r} is in the way: {error.strerror or error}") from None
        if is_in_use:
            raise _refusal(self.path, f"{name!r} is in use by another program")
        os.unlink(name, dir_fd=self._fd)


def is_in_use_at(path: str) -> bool:
    """Whether somebody listens at a Unix socket. Waits a second at most. Raises `OSError` if that cannot be told."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
    return True


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
