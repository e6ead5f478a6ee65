"""The seam to the operating system: every call that the NVMe tier makes goes through one `FileIO`.

Tests put a double in its place that fails the n-th call, returns short, tears, or flips. Below it stand the loops that
carry a transfer to its end whatever the calls return, and memory that direct I/O accepts.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from hicache.tiers.nvme.geometry import BLOCK, PageShape, round_up

MAX_STALLS: Final = 64
"""Calls in a row without progress (interrupted, or less than a block moved) before a transfer is given up."""
READ_ONLY: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Does not wait for the other end, should the name be a pipe's."""
READ_WRITE: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
CREATE: Final = os.O_CREAT | os.O_EXCL
OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
"""What a file system answers that does not know a call."""

_libc: Final = ctypes.CDLL(None, use_errno=True)


class FileIO:
    """The calls themselves, each of them one system call that releases the interpreter lock. Raises `OSError`.

    `name` and `directory_fd` together name a file: nothing is ever opened by a path that somebody could redirect.
    """

    # ---- files by name

    def open(self, name: str, flags: int, *, directory_fd: int | None = None) -> int:
        """A descriptor. New files get mode 0600."""
        return os.open(name, flags, 0o600, dir_fd=directory_fd)

    def stat(self, name: str, *, directory_fd: int | None = None, follow: bool = False) -> os.stat_result:
        return os.stat(name, dir_fd=directory_fd, follow_symlinks=follow)

    def mkdir(self, name: str) -> None:
        os.mkdir(name, 0o700)

    def rmdir(self, name: str) -> None:
        os.rmdir(name)

    def listdir(self, directory_fd: int) -> list[str]:
        return os.listdir(directory_fd)

    def unlink(self, name: str, *, directory_fd: int) -> None:
        os.unlink(name, dir_fd=directory_fd)

    def rename(self, source: str, target: str, *, directory_fd: int) -> None:
        os.rename(source, target, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)

    def statvfs(self, name: str) -> os.statvfs_result:
        return os.statvfs(name)

    def lock(self, fd: int) -> None:
        """Lock for this process, without waiting. Raises `BlockingIOError` when another holds it. Goes with the
        process.
        """
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    # ---- open files

    def close(self, fd: int) -> None:
        os.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def fchmod(self, fd: int, mode: int) -> None:
        os.fchmod(fd, mode)

    def fallocate(self, fd: int, num_bytes: int) -> None:
        """Give the file real blocks. Not `posix_fallocate`: where the file system cannot, libc would write byte by
        byte.
        """
        if _libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(num_bytes)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def ftruncate(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)

    def set_direct(self, fd: int, on: bool) -> None:
        """Read and write around the page cache, or through it. EINVAL where the file system cannot."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        """Make the file's bytes, and as much of its metadata as reading them takes, survive a power cut."""
        os.fdatasync(fd)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def own_uid() -> int:
    """Effective user id of this process."""
    return os.geteuid()


def is_own_file(status: os.stat_result) -> bool:
    """Whether this is a regular file of ours that no other name leads to: one we may replace."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == own_uid() and status.st_nlink == 1


def lock_holder(status: os.stat_result) -> int | None:
    """Process id of who holds a lock on that file, as far as the kernel tells. For messages only."""
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            found = re.fullmatch(r"\d+: FLOCK +ADVISORY +WRITE (\d+) (\S+) .*", line)
            if found and found[2] == device:
                return int(found[1])
    return None


def real_path(path: str) -> str:
    """The same place without links and detours, to tell whether two paths are one."""
    return os.path.realpath(path)


def parent_of(path: str) -> str:
    """The directory in which `path` lies or would lie."""
    return os.path.dirname(os.path.abspath(path))


# ---- whole transfers


def read_fully(files: FileIO, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill the buffers from `offset` on. Returns the bytes read: fewer than asked only where the file ends.

    Interrupted and short reads are continued from the last whole block, since direct I/O takes no other place.
    Raises `OSError` as the device does, and EINTR after `MAX_STALLS` interruptions in a row.
    """
    total = sum(map(len, buffers))
    done = reached = stalls = 0
    while True:
        try:
            count = files.preadv(fd, _rest(buffers, done) if done else buffers, offset + done)
        except InterruptedError:
            stalls += 1
            if stalls > MAX_STALLS:
                raise
            continue
        if done + count >= total:
            return total
        if count == 0:
            return reached
        # The end of a file inside a block looks like a device that is slow to give the rest of it.
        stalls = 0 if done + count > reached else stalls + 1
        if stalls > MAX_STALLS:
            return reached
        reached = max(reached, done + count)
        done = reached // BLOCK * BLOCK


def write_fully(files: FileIO, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write the buffers from `offset` on, all of them. Continues interrupted and short writes as `read_fully` does.

    Raises `OSError` as the device does; EIO for one that takes nothing more without saying why.
    """
    total = sum(map(len, buffers))
    done = reached = stalls = 0
    while reached < total:
        try:
            count = files.pwritev(fd, _rest(buffers, done) if done else buffers, offset + done)
        except InterruptedError:
            stalls += 1
            if stalls > MAX_STALLS:
                raise
            continue
        stalls = 0 if done + count > reached else stalls + 1
        if stalls > MAX_STALLS:
            raise OSError(errno.EIO, f"the device took {reached} of {total} bytes")
        reached = max(reached, done + count)
        done = reached // BLOCK * BLOCK


def sync_data(files: FileIO, fd: int) -> None:
    """`fdatasync`, begun again when interrupted. Raises `OSError` as the device does: what was written since the last
    one that went well is then lost, whatever a later one says. ENOENT for a file that was deleted: whatever is written
    to it goes with the process.
    """
    stalls = 0
    while True:
        try:
            files.fdatasync(fd)
            break
        except InterruptedError:
            stalls += 1
            if stalls > MAX_STALLS:
                raise
    if not files.fstat(fd).st_nlink:
        raise OSError(errno.ENOENT, "the file was deleted")


def _rest(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What remains of the buffers after their first `done` bytes."""
    rest = []
    for buffer in buffers:
        if done >= len(buffer):
            done -= len(buffer)
        else:
            rest.append(buffer[done:])
            done = 0
    return rest


# ---- memory


def flat(buffer: memoryview) -> memoryview:
    """The same bytes as a one-dimensional view of bytes. Raises `TypeError` where they are not contiguous."""
    return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")


def is_aligned(buffer: memoryview) -> bool:
    """Whether the bytes begin at a multiple of `BLOCK`."""
    if buffer.readonly:
        address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    else:  # a sixth of the time, and asked for every page
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return address % BLOCK == 0


def aligned_buffer(num_bytes: int) -> memoryview:
    """Zeroed private memory that begins at a multiple of `BLOCK`; pages come into being when touched."""
    return memoryview(mmap.mmap(-1, num_bytes))


class Scratch:
    """Aligned memory of one lane thread: page headers, last blocks and encoded pages of a run, and one page for buffers
    that are not aligned. Takes memory only where it is used."""

    def __init__(self, shape: PageShape, max_run_pages: int) -> None:
        header_bytes = shape.header_bytes
        headers = aligned_buffer(header_bytes * max_run_pages)
        tails = aligned_buffer(BLOCK * max_run_pages)
        self.headers = [headers[start : start + header_bytes] for start in range(0, len(headers), header_bytes)]
        self.tails = [tails[start : start + BLOCK] for start in range(0, len(tails), BLOCK)]
        self.page = aligned_buffer(round_up(max(shape.page_bytes, shape.room_bytes)))
        self.encoded: list[memoryview] = []
        if shape.coding is not None:
            room_bytes = round_up(shape.room_bytes)
            rooms = aligned_buffer(room_bytes * max_run_pages)
            self.encoded = [rooms[start : start + room_bytes] for start in range(0, len(rooms), room_bytes)]
