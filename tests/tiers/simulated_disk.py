"""A disk in memory for the NVMe tier's seam: it forgets at a power cut what was not synced, and fails by a seed.

Every file and directory has a **volatile** image, which all calls see, and a **durable** one, which alone is sure to be
there after `power_up`. Between the two lie changes that the device has been given and may or may not have kept:

- The contents of a file change sector by sector (512 or 4,096 bytes); `fsync` or `fdatasync` of the file makes them
  durable. At a cut every sector takes its durable contents or those of any write since: writes are torn and reordered.
- Names (creation, rename, removal, also of directories) become durable with `fsync` of the directory that holds them,
  and with nothing else. A rename is whole or not there at all.
- A sync of a file that fails settles for good, at random, which changed sectors are kept. The volatile image still
  shows them and the next sync reports success, as Linux does: who trusts it loses them. Names and sizes are a journal's
  and stay what they were, neither durable nor lost: a file system that loses those too has stopped.

What may not happen, because nobody could survive it: what was synced changes by itself; a sector holds half of a write;
a call that ended lies about it. The last is given up by the rates `lost`, `misdirected` and `flip`, and by those alone.

Direct I/O takes multiples of 512 only: address, length and offset. Callable from several threads; a run repeats exactly
only if its calls come in the same order.
"""

import errno
import os
import random
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

import numpy as np

from hicache.tiers.nvme.io import FileIO

DIRECT_UNIT: Final = 512
"""What direct I/O asks of addresses, lengths and offsets."""
ALLOCATION: Final = 4096
"""Bytes that a file takes from the disk at a time."""
FIRST_DESCRIPTOR: Final = 1 << 20
"""Descriptors of the disk: never those of a file of this process."""

Keep = Callable[[int, object], bool]
"""Whether a change, by its number and its place, was kept at a power cut."""


@dataclass(frozen=True, slots=True)
class Rates:
    """How often what goes wrong. Probabilities from 0 to 1, of a call of that kind."""

    read_error: float = 0.0
    """EIO."""
    write_error: float = 0.0
    """EIO; a part of the bytes may have been written."""
    no_space: float = 0.0
    """ENOSPC of a write; a part of the bytes may have been written."""
    name_error: float = 0.0
    """EIO of a call that opens, makes, renames or removes a name; nothing was done."""
    sync_error: float = 0.0
    """EIO of `fsync` or `fdatasync`."""
    interrupted: float = 0.0
    """EINTR of a read or write; nothing was done."""
    short: float = 0.0
    """A part of the bytes is read or written, and the call says so."""
    lost: float = 0.0
    """A write that says it was done and was not."""
    misdirected: float = 0.0
    """A write that goes elsewhere in the same file."""
    flip: float = 0.0
    """A read of which one bit is another."""
    torn: float = 0.0
    """A write of which a part is written and that says it was whole."""

    @property
    def silent(self) -> bool:
        """Whether the device may lie: then nothing that it was given can be counted on."""
        return bool(self.lost or self.misdirected or self.flip or self.torn)


class Fail(Enum):
    """What can be made to happen in one call of a run (`SimulatedDisk.fail_at`)."""

    EIO = "eio"
    """Any call. A write may have been done in part; a sync settles at random what is kept."""
    ENOSPC = "enospc"
    """As `EIO`; writes and calls about names say that the disk is full, reads and syncs EIO."""
    SHORT = "short"
    """A read or write that moves a part and says so."""
    TORN = "torn"
    """A write that moves a part and says all."""
    EINTR = "eintr"
    """A read or write that does nothing and says so."""


_RATES_OF: Final = {
    Fail.EIO: {"read_error", "write_error", "sync_error"},
    Fail.ENOSPC: {"no_space", "read_error", "sync_error"},
    Fail.SHORT: {"short"},
    Fail.TORN: {"torn"},
    Fail.EINTR: {"interrupted"},
}
"""Which of the rates strikes in a call that was told to fail."""
_RATED_CALLS: Final = frozenset({"preadv", "pwritev", "fsync", "fdatasync"})
"""Calls that draw from more rates than those of names."""


class _Size(NamedTuple):
    change: int
    num_bytes: int


@dataclass(eq=False)
class _File:
    """A regular file. A sector or the size with one version only differs from what is durable, and stays so: the
    change between the two was lost in a sync that failed."""

    inode: int
    content: bytearray = field(default_factory=bytearray)
    blocks: set[int] = field(default_factory=set)
    """Allocation units that the file has taken."""
    sectors: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    """Of changed sectors: the durable contents, then those after each change, with its number."""
    sizes: list[_Size] = field(default_factory=lambda: [_Size(0, 0)])
    """The durable size, then that after each change."""
    holder: int | None = None
    """Descriptor that holds the lock."""


@dataclass(eq=False)
class _Directory:
    inode: int
    entries: dict[str, "_File | _Directory"] = field(default_factory=dict)
    durable: dict[str, "_File | _Directory"] = field(default_factory=dict)
    pending: list[tuple[int, str | None, str | None, "_File | _Directory"]] = field(default_factory=list)
    """Changes in order: their numbers, the name that goes, the name that comes, and what it names."""
    holder: int | None = None


@dataclass
class _Open:
    """An open file description."""

    node: _File | _Directory
    writable: bool
    direct: bool


class SimulatedDisk(FileIO):
    """See the module. `rng` decides everything random; `sector_bytes` (512 or 4,096) is what a cut does not tear;
    `misdirect_by` is how far a misdirected write goes astray.

    The root directory `/` is there and durable.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        rates: Rates | None = None,
        sector_bytes: int = 512,
        capacity_bytes: int = 1 << 30,
        misdirect_by: int = ALLOCATION,
    ) -> None:
        self.rng = rng
        self.rates = rates or Rates()
        self.sector_bytes = sector_bytes
        self.capacity_bytes = capacity_bytes
        self.misdirect_by = misdirect_by
        self.num_calls = 0
        self.recent: deque[tuple[int, str, object]] = deque(maxlen=60)
        """The last calls: number, name, and what they were about."""
        self.num_faults: dict[str, int] = {}
        """How often each rate struck."""
        self.off = False
        """The power is cut: every call fails with EIO and does nothing."""
        self._root = _Directory(1)
        self._num_inodes = 1
        self._num_changes = 0
        self._open: dict[int, _Open] = {}
        self._next_fd = FIRST_DESCRIPTOR
        self._cut_at: int | None = None
        self._on_cut: Callable[[], None] = lambda: None
        self._fail_at: int | None = None
        self._fail = Fail.EIO
        self._lock = threading.RLock()

    # ---- for tests

    def cut_power_at(self, call: int, on_cut: Callable[[], None]) -> None:
        """Cut the power in that call, counted from 1 from now on: it fails, and what it was to write is a change that
        may or may not be kept. `on_cut` is called at that moment."""
        self._cut_at = self.num_calls + call
        self._on_cut = on_cut

    def never_cut_power(self) -> None:
        self._cut_at = None

    def fail_at(self, call: int, fail: Fail) -> None:
        """Have that call fail, counted from 1 from now on. A call of a kind that cannot fail so goes well."""
        self._fail_at, self._fail = self.num_calls + call, fail

    def never_fail(self) -> None:
        """Every call goes well from here on, for all that `fail_at` and `rates` said."""
        self._fail_at, self.rates = None, Rates()

    def kill(self) -> None:
        """What the end of a process does: its descriptors and locks are gone, and nothing else. The power is on, or on
        again as if it had not failed."""
        for fd in list(self._open):
            self._release(fd)
        self.off = False
        self._cut_at = None

    @property
    def num_open(self) -> int:
        """Open descriptors."""
        return len(self._open)

    def power_up(self) -> None:
        """Power off if it is on, then on again: the volatile images are what the cut has left."""
        keep = _what_is_kept(self.rng, self._num_changes)
        self._open.clear()
        _settle_directory(self._root, keep, self.rng, self.sector_bytes)
        self.off = False
        self._cut_at = None

    def unsynced(self) -> int:
        """Changes that a cut could take back: sectors and names."""
        num = 0
        for node in _walk(self._root):
            if isinstance(node, _File):
                num += sum(len(versions) > 1 for versions in node.sectors.values()) + (len(node.sizes) > 1)
            else:
                num += len(node.pending)
        return num

    def image(self) -> dict[str, bytes | None]:
        """Every path with the volatile contents of its file, None for a directory."""
        return {
            path: bytes(node.content) if isinstance(node, _File) else None for path, node in _paths(self._root, "")
        }

    def nodes(self) -> Iterable[tuple[str, object]]:
        """Every path with what it names; paths of directories end in a slash."""
        for path, node in (("", self._root), *_paths(self._root, "")):
            yield path + "/" * isinstance(node, _Directory), node

    # ---- files by name

    def open(self, name: str, flags: int, *, directory_fd: int | None = None) -> int:
        with self._lock:
            last = self._begin("open", name)
            if self._strikes("name_error"):
                raise _error(errno.EIO)
            parent, leaf = self._locate(name, directory_fd)
            node = parent.entries.get(leaf) if leaf else parent
            if node is None:
                if not flags & os.O_CREAT:
                    raise _error(errno.ENOENT)
                node = _File(self._new_inode())
                self._change_name(parent, None, leaf, node)
                self._end(last)
            elif flags & os.O_CREAT and flags & os.O_EXCL:
                raise _error(errno.EEXIST)
            else:
                self._end(last)
            if isinstance(node, _File) and flags & os.O_DIRECTORY:
                raise _error(errno.ENOTDIR)
            writable = flags & os.O_ACCMODE != os.O_RDONLY
            if isinstance(node, _Directory) and writable:
                raise _error(errno.EISDIR)
            if isinstance(node, _File) and flags & os.O_TRUNC:
                self._truncate(node, 0)
            fd, self._next_fd = self._next_fd, self._next_fd + 1
            self._open[fd] = _Open(node, writable, bool(flags & os.O_DIRECT))
            return fd

    def stat(self, name: str, *, directory_fd: int | None = None, follow: bool = False) -> os.stat_result:
        with self._lock:
            self._end(self._begin("stat", name))
            parent, leaf = self._locate(name, directory_fd)
            node = parent.entries.get(leaf) if leaf else parent
            if node is None:
                raise _error(errno.ENOENT)
            return self._status(node)

    def mkdir(self, name: str) -> None:
        with self._lock:
            last = self._begin("mkdir", name)
            if self._strikes("name_error"):
                raise _error(errno.EIO)
            parent, leaf = self._locate(name, None)
            if not leaf or leaf in parent.entries:
                raise _error(errno.EEXIST)
            self._change_name(parent, None, leaf, _Directory(self._new_inode()))
            self._end(last)

    def rmdir(self, name: str) -> None:
        with self._lock:
            last = self._begin("rmdir", name)
            if self._strikes("name_error"):
                raise _error(errno.EIO)
            parent, leaf = self._locate(name, None)
            node = parent.entries.get(leaf)
            if node is None:
                raise _error(errno.ENOENT)
            if isinstance(node, _File):
                raise _error(errno.ENOTDIR)
            if node.entries:
                raise _error(errno.ENOTEMPTY)
            self._change_name(parent, leaf, None, node)
            self._end(last)

    def listdir(self, directory_fd: int) -> list[str]:
        with self._lock:
            self._end(self._begin("listdir", directory_fd))
            return list(self._directory(directory_fd).entries)

    def unlink(self, name: str, *, directory_fd: int) -> None:
        with self._lock:
            last = self._begin("unlink", name)
            if self._strikes("name_error"):
                raise _error(errno.EIO)
            parent, leaf = self._locate(name, directory_fd)
            node = parent.entries.get(leaf)
            if node is None:
                raise _error(errno.ENOENT)
            if isinstance(node, _Directory):
                raise _error(errno.EISDIR)
            self._change_name(parent, leaf, None, node)
            self._end(last)

    def rename(self, source: str, target: str, *, directory_fd: int) -> None:
        with self._lock:
            last = self._begin("rename", (source, target))
            if self._strikes("name_error"):
                raise _error(errno.EIO)
            parent = self._directory(directory_fd)
            node = parent.entries.get(source)
            if node is None:
                raise _error(errno.ENOENT)
            if isinstance(parent.entries.get(target), _Directory):
                raise _error(errno.EISDIR)
            self._change_name(parent, source, target, node)
            self._end(last)

    def statvfs(self, name: str) -> os.statvfs_result:
        with self._lock:
            self._end(self._begin("statvfs", name))
            self._locate(name, None)
            total = self.capacity_bytes // ALLOCATION
            free = max(0, total - self._used_blocks())
            return os.statvfs_result((ALLOCATION, ALLOCATION, total, free, free, 0, 0, 0, 0, 255))

    def lock(self, fd: int) -> None:
        with self._lock:
            self._end(self._begin("lock", fd))
            node = self._opened(fd).node
            if node.holder not in (None, fd):
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            node.holder = fd

    # ---- open files

    def close(self, fd: int) -> None:
        with self._lock:
            # As Linux does it: the descriptor is gone, whatever the call says.
            self._opened(fd)
            self._release(fd)
            self._end(self._begin("close", fd))

    def fstat(self, fd: int) -> os.stat_result:
        with self._lock:
            self._end(self._begin("fstat", fd))
            return self._status(self._opened(fd).node)

    def fchmod(self, fd: int, mode: int) -> None:
        """Modes are not kept: all files are 0600 and all directories 0700."""
        with self._lock:
            self._end(self._begin("fchmod", (fd, mode)))
            self._opened(fd)

    def fallocate(self, fd: int, num_bytes: int, offset: int = 0) -> None:
        with self._lock:
            last = self._begin("fallocate", (fd, offset, num_bytes))
            if self._strikes("no_space"):
                raise _error(errno.ENOSPC)
            file = self._file(fd, writing=True)
            self._take_blocks(file, offset, num_bytes)
            if offset + num_bytes > len(file.content):
                self._resize(file, offset + num_bytes)
            self._end(last)

    def ftruncate(self, fd: int, num_bytes: int) -> None:
        with self._lock:
            last = self._begin("ftruncate", (fd, num_bytes))
            if self._strikes("write_error"):
                raise _error(errno.EIO)
            file = self._file(fd, writing=False)
            if not self._opened(fd).writable:
                raise _error(errno.EINVAL)
            self._truncate(file, num_bytes)
            self._end(last)

    def set_direct(self, fd: int, on: bool) -> None:
        with self._lock:
            self._end(self._begin("set_direct", fd))
            self._opened(fd).direct = on

    def fsync(self, fd: int) -> None:
        self._sync("fsync", fd)

    def fdatasync(self, fd: int) -> None:
        """As `fsync`: the size of a file is among what is needed to read it."""
        self._sync("fdatasync", fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self._end(self._begin("preadv", (fd, offset, sum(map(len, buffers)))))
            file = self._file(fd, writing=False)
            total = self._checked_transfer(fd, buffers, offset)
            if self._strikes("interrupted"):
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
            if self._strikes("read_error"):
                raise _error(errno.EIO)
            data = bytearray(file.content[offset : offset + total])
            if len(data) > DIRECT_UNIT and self._strikes("short"):
                del data[self._some_of(fd, len(data)) :]
            if data and self._strikes("flip"):
                place, bit = divmod(self.rng.randrange(8 * len(data)), 8)
                data[place] ^= 1 << bit
            done = 0
            for buffer in buffers:
                part = data[done : done + len(buffer)]
                buffer[: len(part)] = part
                done += len(part)
            return done

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            last = self._begin("pwritev", (fd, offset, sum(map(len, buffers))))
            file = self._file(fd, writing=True)
            total = self._checked_transfer(fd, buffers, offset)
            if not last and self._strikes("interrupted"):
                raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
            data = b"".join(buffers)
            failed = None
            if self._strikes("write_error"):
                failed = errno.EIO
            elif self._strikes("no_space"):
                failed = errno.ENOSPC
            if failed is not None or (total > DIRECT_UNIT and self._strikes("short")):
                data = data[: self._some_of(fd, total)]
            if self._strikes("lost"):
                return total
            if total > DIRECT_UNIT and self._strikes("torn"):
                self._write(file, data[: self._some_of(fd, total)], offset)
                return total
            if self._strikes("misdirected"):
                back = offset >= self.misdirect_by and self.rng.random() < 0.5
                offset += -self.misdirect_by if back else self.misdirect_by
            self._take_blocks(file, offset, len(data))
            self._write(file, data, offset)
            self._end(last)
            if failed is not None:
                raise _error(failed)
            return len(data)

    # ---- inside: calls

    def _begin(self, name: str, about: object) -> bool:
        """Count a call. True if the power fails in it: the caller goes on up to `_end`."""
        if self.off:
            raise _error(errno.EIO)
        self.num_calls += 1
        self.recent.append((self.num_calls, name, about))
        if self.num_calls == self._fail_at and name not in _RATED_CALLS and self._fail in (Fail.EIO, Fail.ENOSPC):
            self._count_fault(self._fail.value)
            raise _error(errno.EIO if self._fail is Fail.EIO else errno.ENOSPC)
        return self.num_calls == self._cut_at

    def _end(self, last: bool) -> None:
        if last:
            self.off = True
            self._on_cut()
            raise _error(errno.EIO)

    def _strikes(self, name: str) -> bool:
        told = self.num_calls == self._fail_at and name in _RATES_OF[self._fail]
        rate: float = getattr(self.rates, name)
        if not told and (not rate or self.rng.random() >= rate):
            return False
        self._count_fault(name)
        return True

    def _count_fault(self, name: str) -> None:
        self.num_faults[name] = self.num_faults.get(name, 0) + 1

    def _some_of(self, fd: int, total: int) -> int:
        """A part of a transfer, in the units of the descriptor."""
        unit = DIRECT_UNIT if self._opened(fd).direct else 1
        return self.rng.randrange(1, max(2, total // unit)) * unit

    def _checked_transfer(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes in all. Raises EINVAL for what direct I/O does not take."""
        if self._opened(fd).direct:
            for buffer in buffers:
                address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
                if address % DIRECT_UNIT or len(buffer) % DIRECT_UNIT:
                    raise _error(errno.EINVAL)
            if offset % DIRECT_UNIT:
                raise _error(errno.EINVAL)
        return sum(map(len, buffers))

    def _opened(self, fd: int) -> _Open:
        if fd not in self._open:
            raise _error(errno.EBADF)
        return self._open[fd]

    def _file(self, fd: int, *, writing: bool) -> _File:
        description = self._opened(fd)
        if isinstance(description.node, _Directory):
            raise _error(errno.EISDIR)
        if writing and not description.writable:
            raise _error(errno.EBADF)
        return description.node

    def _directory(self, fd: int) -> _Directory:
        node = self._opened(fd).node
        if isinstance(node, _File):
            raise _error(errno.ENOTDIR)
        return node

    def _release(self, fd: int) -> None:
        node = self._open.pop(fd).node
        if node.holder == fd:
            node.holder = None

    def _locate(self, name: str, directory_fd: int | None) -> tuple[_Directory, str]:
        """The directory in which a name lies, and the name there; an empty name for the root."""
        node: _File | _Directory = self._root if directory_fd is None else self._directory(directory_fd)
        *parents, leaf = [part for part in name.split("/") if part] or [""]
        for part in parents:
            if isinstance(node, _File):
                raise _error(errno.ENOTDIR)
            if part not in node.entries:
                raise _error(errno.ENOENT)
            node = node.entries[part]
        if isinstance(node, _File):
            raise _error(errno.ENOTDIR)
        return node, leaf

    def _status(self, node: _File | _Directory) -> os.stat_result:
        if isinstance(node, _Directory):
            mode, size, blocks = stat.S_IFDIR | 0o700, ALLOCATION, 8
        else:
            mode, size, blocks = stat.S_IFREG | 0o600, len(node.content), 8 * len(node.blocks)
        links = 1 if isinstance(node, _File) else 2
        fields = (mode, node.inode, 0, links, os.geteuid(), os.getegid(), size, 0, 0, 0)
        return os.stat_result(fields, {"st_blocks": blocks})

    # ---- inside: changes

    def _new_inode(self) -> int:
        self._num_inodes += 1
        return self._num_inodes

    def _next_change(self) -> int:
        self._num_changes += 1
        return self._num_changes

    def _change_name(self, parent: _Directory, goes: str | None, comes: str | None, node: _File | _Directory) -> None:
        change = (self._next_change(), goes, comes, node)
        parent.pending.append(change)
        _apply_name(parent.entries, change)

    def _write(self, file: _File, data: bytes, offset: int) -> None:
        if not data:
            return
        change = self._next_change()
        end = offset + len(data)
        sector_bytes = self.sector_bytes
        touched = range(offset // sector_bytes, -(-end // sector_bytes))
        for sector in touched:
            if sector not in file.sectors:
                file.sectors[sector] = [(0, bytes(file.content[sector * sector_bytes : (sector + 1) * sector_bytes]))]
        if end > len(file.content):
            file.content.extend(bytes(end - len(file.content)))
            file.sizes.append(_Size(change, end))
        file.content[offset:end] = data
        for sector in touched:
            now = bytes(file.content[sector * sector_bytes : (sector + 1) * sector_bytes])
            file.sectors[sector].append((change, now))

    def _resize(self, file: _File, num_bytes: int) -> None:
        file.content.extend(bytes(num_bytes - len(file.content)))
        file.sizes.append(_Size(self._next_change(), num_bytes))

    def _truncate(self, file: _File, num_bytes: int) -> None:
        if num_bytes > len(file.content):
            self._resize(file, num_bytes)
        elif num_bytes < len(file.content):
            # What lies behind the new end is gone: should the file grow again, there are zeros.
            self._write(file, bytes(len(file.content) - num_bytes), num_bytes)
            del file.content[num_bytes:]
            file.sizes.append(_Size(self._next_change(), num_bytes))
            file.blocks = {block for block in file.blocks if block * ALLOCATION < num_bytes}

    def _take_blocks(self, file: _File, offset: int, num_bytes: int) -> None:
        wanted = set(range(offset // ALLOCATION, -(-(offset + num_bytes) // ALLOCATION))) - file.blocks
        if wanted:
            if self._used_blocks() + len(wanted) > self.capacity_bytes // ALLOCATION:
                raise _error(errno.ENOSPC)
            file.blocks |= wanted

    def _used_blocks(self) -> int:
        return sum(len(node.blocks) for node in _walk(self._root) if isinstance(node, _File))

    def _sync(self, name: str, fd: int) -> None:
        with self._lock:
            self._end(self._begin(name, fd))
            node = self._opened(fd).node
            failed = self._strikes("sync_error")
            if isinstance(node, _Directory):
                if not failed:
                    for change in node.pending:
                        _apply_name(node.durable, change)
                    node.pending.clear()
            elif failed:
                share = self.rng.choice((0.0, 0.0, 0.5, 1.0))
                for sector, versions in node.sectors.items():
                    kept = self.rng.choice(versions[1:] or versions) if self.rng.random() < share else versions[0]
                    node.sectors[sector] = [(0, kept[1])]
            else:
                node.sectors = {sector: versions for sector, versions in node.sectors.items() if len(versions) == 1}
                node.sizes = node.sizes[-1:]
            if failed:
                raise _error(errno.EIO)


# ---- what a power cut leaves


def _what_is_kept(rng: random.Random, num_changes: int) -> Keep:
    """One of the ways in which a device forgets: everything, nothing, early or late changes, whole changes or sectors
    here and there, one file alone; the last change before the cut is torn in half of the cases."""
    share, limit = rng.random(), rng.randrange(num_changes + 1)
    decided: dict[object, bool] = {}

    def once(key: object) -> bool:
        if key not in decided:
            decided[key] = rng.random() < share
        return decided[key]

    ways: list[Keep] = [
        lambda _change, _place: False,
        lambda _change, _place: True,
        lambda _change, _place: rng.random() < share,
        lambda change, _place: once(change),
        lambda change, _place: change <= limit,
        lambda change, _place: change > limit,
        lambda _change, place: once(place),
    ]
    way = rng.choice(ways)
    torn = num_changes if rng.random() < 0.5 else -1
    return lambda change, place: rng.random() < 0.5 if change == torn else way(change, place)


def _settle_directory(directory: _Directory, keep: Keep, rng: random.Random, sector_bytes: int) -> None:
    """Make the volatile image of a directory, and of all below it, what the cut leaves; that is durable then."""
    prefix = rng.randrange(len(directory.pending) + 1) if rng.random() < 0.5 else None
    for place, change in enumerate(directory.pending):
        if place < prefix if prefix is not None else keep(change[0], directory.inode):
            _apply_name(directory.durable, change)
    directory.pending.clear()
    directory.entries = dict(directory.durable)
    directory.holder = None
    for node in directory.entries.values():
        if isinstance(node, _Directory):
            _settle_directory(node, keep, rng, sector_bytes)
        else:
            _settle_file(node, keep, sector_bytes)


def _settle_file(file: _File, keep: Keep, sector_bytes: int) -> None:
    kept_sizes = [size for size in file.sizes[1:] if keep(size.change, (file.inode, "size"))]
    size = (kept_sizes or file.sizes)[-1 if kept_sizes else 0].num_bytes
    content = file.content
    content.extend(bytes(max(0, size - len(content))))
    for sector, versions in file.sectors.items():
        contents = versions[0][1]
        for change, later in versions[1:]:
            if keep(change, file.inode):
                contents = later
        start = sector * sector_bytes
        padded = contents.ljust(sector_bytes, b"\0")[: max(0, len(content) - start)]
        content[start : start + len(padded)] = padded
    del content[size:]
    file.sectors.clear()
    file.sizes = [_Size(0, size)]
    file.holder = None


def _apply_name(
    entries: dict[str, _File | _Directory], change: tuple[int, str | None, str | None, _File | _Directory]
) -> None:
    _, goes, comes, node = change
    if goes is not None:
        entries.pop(goes, None)
    if comes is not None:
        entries[comes] = node


# ---- small things


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _walk(directory: _Directory) -> Iterable[_File | _Directory]:
    yield directory
    for node in directory.entries.values():
        if isinstance(node, _Directory):
            yield from _walk(node)
        else:
            yield node


def _paths(directory: _Directory, path: str) -> Iterable[tuple[str, _File | _Directory]]:
    for name, node in directory.entries.items():
        yield f"{path}/{name}", node
        if isinstance(node, _Directory):
            yield from _paths(node, f"{path}/{name}")
