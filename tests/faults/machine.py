"""File systems of the machine, made for one test: ext4 on a loop device, tmpfs, ramfs; and disks that hang. They need
root on Linux.

Who has neither leaves out the tests that are marked `machine`; where such a test runs and the facility is missing, it
fails: a fault test that is left out silently is a lost one.
"""

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

FS_IOC_SHUTDOWN: Final = 0x8004587D
"""Has a file system fail every later call with EIO, as a disk that was pulled."""
_NOLOGFLUSH: Final = 2
"""What is not yet in the file system's journal is lost."""
_BLKIO: Final = Path("/sys/fs/cgroup/blkio")


def need_root() -> None:
    if os.geteuid() != 0:
        raise AssertionError("this test mounts file systems and needs root; leave it out with -m 'not machine'")


def call(*command: str) -> None:
    """Run a program of the machine; its own words in the error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


@contextmanager
def mounted(kind: str, where: Path, source: str | Path = "none", options: str = "") -> Iterator[Path]:
    """A file system at a directory that is made for it."""
    need_root()
    where.mkdir()
    call("mount", "-t", kind, *(("-o", options) if options else ()), str(source), str(where))
    try:
        yield where
    finally:
        unmount(where)


def unmount(where: Path) -> None:
    """Unmount, also while somebody still has files open there."""
    with contextlib.suppress(AssertionError):
        call("umount", str(where))
        return
    call("umount", "--lazy", str(where))


def make_ext4(image: Path, num_bytes: int) -> None:
    """A file with an empty ext4 file system."""
    with image.open("wb") as file:
        file.truncate(num_bytes)
    call("mkfs.ext4", "-q", "-F", str(image))


def shut_down(where: Path) -> None:
    """Have the file system fail from here on."""
    fd = os.open(where, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, FS_IOC_SHUTDOWN, _NOLOGFLUSH.to_bytes(4, "little"))
    finally:
        os.close(fd)


@contextmanager
def hung(where: Path, pid: int | None = None) -> Iterator[None]:
    """Within the block the disk below a file system answers no call of a process, this one or another; after it, all
    that waited goes on. Its bandwidth is throttled to nothing: a call waits in the kernel, where no signal ends it.
    """
    need_root()
    held = os.getpid() if pid is None else pid
    if not _BLKIO.is_dir():
        raise AssertionError(f"this test throttles a disk and needs the blkio controller of cgroup v1 at {_BLKIO}")
    status = where.stat()
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    groups = Path(f"/proc/{held}/cgroup").read_text().splitlines()
    [own] = [line.split(":", 2)[2] for line in groups if ":blkio:" in line]
    group = _BLKIO / f"hicache-{held}"
    group.mkdir()
    try:
        _throttle(group, device, 1)
        (group / "cgroup.procs").write_text(str(held))
        yield
    finally:
        _throttle(group, device, 0)
        with contextlib.suppress(ProcessLookupError):  # it has ended
            (_BLKIO / own.lstrip("/") / "cgroup.procs").write_text(str(held))
        group.rmdir()


def _throttle(group: Path, device: str, bytes_per_s: int) -> None:
    """0 for no bound."""
    for way in ("read", "write"):
        (group / f"blkio.throttle.{way}_bps_device").write_text(f"{device} {bytes_per_s}")


class MemoryGroup:
    """A group of processes that may not have more memory together than it was made for: who wants more is killed."""

    def __init__(self, directory: Path, peak: str) -> None:
        self._directory = directory
        self._peak = peak

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Processes that are begun within the block belong to the group for good."""
        own = _group_of(os.getpid(), self._directory.parent)
        (self._directory / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (own / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def peak_bytes(self) -> int:
        """The most memory that its processes have had together."""
        return int((self._directory / self._peak).read_text())


@contextmanager
def memory_group(num_bytes: int) -> Iterator[MemoryGroup]:
    """A group whose processes, which end within the block, have so many bytes of memory together. Takes cgroup v2 or
    v1, whatever has a memory controller here."""
    need_root()
    kinds = (
        (Path("/sys/fs/cgroup"), "cgroup.controllers", "memory.max", "memory.peak"),
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    )
    for root, sign, limit, peak in kinds:
        if (root / sign).exists():
            group = root / f"hicache-memory-{os.getpid()}"
            group.mkdir()
            try:
                (group / limit).write_text(str(num_bytes))
                yield MemoryGroup(group, peak)
            finally:
                group.rmdir()
            return
    raise AssertionError("this test limits memory and needs the memory controller of a control group")


def _group_of(pid: int, root: Path) -> Path:
    """Where a process is among the groups below `root`."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if root.name in controllers.split(",") or (not controllers and root.name == "cgroup"):
            return root / path.lstrip("/")
    raise AssertionError(f"process {pid} is in no group below {root}")
