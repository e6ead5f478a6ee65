"""A double of the NVMe tier's seam to the operating system: real files, and calls that go wrong when told to."""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from enum import Enum

from hicache.tiers.nvme.io import FileIO, aligned_buffer


class Fault(Enum):
    """What goes wrong in one call."""

    EIO = "eio"
    ENOSPC = "enospc"
    EROFS = "erofs"
    EINTR = "eintr"
    SHORT = "short"
    """Half of the bytes are moved, and the call says so. Other calls than reads and writes: as EIO."""
    TORN = "torn"
    """Half of the bytes are written, and the call claims all of them. A read leaves the second half as it was."""
    LOST = "lost"
    """Nothing is written or read, and the call claims that everything was."""
    MISDIRECTED = "misdirected"
    """The bytes go to, or come from, a place one slot away."""
    FLIP = "flip"
    """One bit changes on the way."""
    RUNTIME = "runtime"
    """The call raises what no device raises."""


ERRNOS = {Fault.EIO: errno.EIO, Fault.ENOSPC: errno.ENOSPC, Fault.EROFS: errno.EROFS, Fault.EINTR: errno.EINTR}


class FaultyFiles(FileIO):
    """Counts calls from 1 and lets `fault` happen in call number `at`, or in every call from there on if `lasting`.

    `counts` says which calls count, by the name of the method; by default all.
    """

    def __init__(
        self,
        fault: Fault | None = None,
        at: int = 0,
        *,
        lasting: bool = False,
        counts: Callable[[str], bool] = lambda _name: True,
        misdirect_by: int = 0,
        flip_bit: int = 0,
    ) -> None:
        self.fault = fault
        self.at = at
        self.lasting = lasting
        self.counts = counts
        self.misdirect_by = misdirect_by
        self.flip_bit = flip_bit
        self.num_calls = 0
        self.num_calls_when_healed = 0
        self.hits: list[str] = []
        """Names of the calls that went wrong."""
        self._lock = threading.Lock()

    def arm(self, fault: Fault, at: int, *, lasting: bool = False) -> None:
        """From here on count calls from 1 again, and fail call number `at`."""
        self.fault, self.at, self.lasting, self.num_calls = fault, at, lasting, 0

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        self.fault = None
        self.num_calls_when_healed = self.num_calls

    def _strike(self, name: str) -> Fault | None:
        """The fault that this call has, if any."""
        with self._lock:
            if not self.counts(name):
                return None
            self.num_calls += 1
            struck = self.num_calls >= self.at if self.lasting else self.num_calls == self.at
            if self.fault is None or not struck:
                return None
            self.hits.append(name)
            return self.fault

    def _raise(self, fault: Fault | None) -> None:
        if fault is Fault.RUNTIME:
            raise RuntimeError("injected")
        if fault is not None:
            number = ERRNOS.get(fault, errno.EIO)
            raise OSError(number, os.strerror(number))

    # ---- calls that move no page bytes

    def open(self, name: str, flags: int, *, directory_fd: int | None = None) -> int:
        self._raise(self._strike("open"))
        return super().open(name, flags, directory_fd=directory_fd)

    def stat(self, name: str, *, directory_fd: int | None = None, follow: bool = False) -> os.stat_result:
        self._raise(self._strike("stat"))
        return super().stat(name, directory_fd=directory_fd, follow=follow)

    def mkdir(self, name: str) -> None:
        self._raise(self._strike("mkdir"))
        super().mkdir(name)

    def listdir(self, directory_fd: int) -> list[str]:
        self._raise(self._strike("listdir"))
        return super().listdir(directory_fd)

    def unlink(self, name: str, *, directory_fd: int) -> None:
        self._raise(self._strike("unlink"))
        super().unlink(name, directory_fd=directory_fd)

    def rename(self, source: str, target: str, *, directory_fd: int) -> None:
        self._raise(self._strike("rename"))
        super().rename(source, target, directory_fd=directory_fd)

    def statvfs(self, name: str) -> os.statvfs_result:
        self._raise(self._strike("statvfs"))
        return super().statvfs(name)

    def lock(self, fd: int) -> None:
        self._raise(self._strike("lock"))
        super().lock(fd)

    def close(self, fd: int) -> None:
        # As Linux does it: the descriptor is gone, whatever the call says.
        fault = self._strike("close")
        super().close(fd)
        self._raise(fault)

    def fstat(self, fd: int) -> os.stat_result:
        self._raise(self._strike("fstat"))
        return super().fstat(fd)

    def fallocate(self, fd: int, num_bytes: int) -> None:
        self._raise(self._strike("fallocate"))
        super().fallocate(fd, num_bytes)

    def ftruncate(self, fd: int, num_bytes: int) -> None:
        self._raise(self._strike("ftruncate"))
        super().ftruncate(fd, num_bytes)

    def set_direct(self, fd: int, on: bool) -> None:
        self._raise(self._strike("set_direct"))
        super().set_direct(fd, on)

    def fsync(self, fd: int) -> None:
        self._raise(self._strike("fsync"))
        super().fsync(fd)

    def fdatasync(self, fd: int) -> None:
        self._raise(self._strike("fdatasync"))
        super().fdatasync(fd)

    def fchmod(self, fd: int, mode: int) -> None:
        self._raise(self._strike("fchmod"))
        super().fchmod(fd, mode)

    # ---- calls that do

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._move("preadv", super().preadv, fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._move("pwritev", super().pwritev, fd, buffers, offset)

    def _move(self, name: str, call: Callable[..., int], fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        total = sum(map(len, buffers))
        match self._strike(name):
            case None:
                return call(fd, buffers, offset)
            case Fault.SHORT if total > 1:
                return call(fd, _first(buffers, total // 2 // 512 * 512 or total // 2), offset)
            case Fault.TORN if total > 1:
                call(fd, _first(buffers, total // 2 // 512 * 512 or total // 2), offset)
                return total
            case Fault.LOST:
                return total
            case Fault.MISDIRECTED:
                away = offset - self.misdirect_by if offset > 2 * self.misdirect_by else offset + self.misdirect_by
                call(fd, buffers, away)
                return total
            case Fault.FLIP:
                return self._flipped(name, call, fd, buffers, offset)
            case fault:
                self._raise(fault)
                raise AssertionError("unreachable")

    def _flipped(self, name: str, call: Callable[..., int], fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        place, bit = divmod(self.flip_bit % (8 * sum(map(len, buffers))), 8)
        if name == "preadv":
            count = call(fd, buffers, offset)
            _toggle(buffers, place, bit)
            return count
        copies = _aligned_copies(buffers)
        _toggle(copies, place, bit)
        return call(fd, copies, offset)


def _first(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    first = []
    for buffer in buffers:
        if num_bytes:
            first.append(buffer[:num_bytes])
            num_bytes -= len(first[-1])
    return first


def _toggle(buffers: Sequence[memoryview], place: int, bit: int) -> None:
    for buffer in buffers:
        if place < len(buffer):
            buffer[place] ^= 1 << bit
            return
        place -= len(buffer)


def _aligned_copies(buffers: Sequence[memoryview]) -> list[memoryview]:
    copies = []
    for buffer in buffers:
        copies.append(aligned_buffer(-(-len(buffer) // 4096) * 4096)[: len(buffer)])
        copies[-1][:] = buffer
    return copies


class HeldFiles(FileIO):
    """Reads, writes and syncs wait at a gate: for tests that need them under way."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Semaphore(0)
        """Released once for every call that has come to the closed gate."""
        self.num_waiting = 0

    def hold(self) -> None:
        self.gate.clear()

    def let_go(self) -> None:
        self.gate.set()

    def _wait(self, name: str) -> None:
        if name in self.names and not self.gate.is_set():
            self.num_waiting += 1
            self.arrived.release()
            assert self.gate.wait(60), "the test never opened the gate"

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._wait("preadv")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._wait("pwritev")
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._wait("fdatasync")
        super().fdatasync(fd)


class PoorFiles(FileIO):
    """A file system without O_DIRECT, without fallocate, or one that takes O_DIRECT and refuses the first read."""

    def __init__(self, *lacks: str) -> None:
        self.lacks = lacks
        self._direct: set[int] = set()

    def fallocate(self, fd: int, num_bytes: int) -> None:
        if "fallocate" in self.lacks:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        super().fallocate(fd, num_bytes)

    def set_direct(self, fd: int, on: bool) -> None:
        if on and "set_direct" in self.lacks:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        (self._direct.add if on else self._direct.discard)(fd)
        super().set_direct(fd, on)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fd in self._direct and "direct read" in self.lacks:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().preadv(fd, buffers, offset)
