"""Bring a directory's files to what the store needs: everything that alters a directory when a store is opened.

The manifest is written first, so that whatever of the rest a crash leaves undone is done by the next start: a segment
that the manifest names and that is missing is made, one that it does not name is removed.
"""

import contextlib
import errno
import logging
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from hicache.tiers.nvme.geometry import BLOCK, Geometry
from hicache.tiers.nvme.health import Health
from hicache.tiers.nvme.io import (
    CREATE,
    READ_WRITE,
    UNSUPPORTED,
    FileIO,
    aligned_buffer,
    read_fully,
    write_fully,
)
from hicache.tiers.nvme.log import LogFile
from hicache.tiers.nvme.manifest import Manifest, encode_manifest
from hicache.tiers.nvme.records import log_bytes
from hicache.tiers.nvme.recovery import Recovered
from hicache.tiers.nvme.segment import SegmentFile

MANIFEST: Final = "hicache.manifest"
MANIFEST_NEW: Final = "hicache.manifest.new"
"""The manifest while it is written: it becomes visible whole or not at all."""
ASIDE: Final = ".damaged"
"""What is added to the name of a manifest that cannot be read, and of what took a name that the store needs; and a
number, where that name is taken too."""
MANIFEST_ASIDE: Final = MANIFEST + ASIDE
FILE_MODE: Final = 0o600

_log = logging.getLogger(__name__)


def segment_name(number: int) -> str:
    return f"hicache-{number:06d}.seg"


@dataclass
class StoreDirectory:
    """An open, locked directory with its files."""

    path: str
    fd: int
    """The directory, held open and locked."""
    store: bytes
    """Random id of this life of the directory."""
    geometry: Geometry
    recovered: Recovered
    """What was there already."""
    segments: list[SegmentFile] = field(default_factory=list)
    logs: list[LogFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Fallbacks in use, one sentence each."""
    is_resized: bool = False
    """Whether the store had another number of slots before."""

    def note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """An entry with the name of a segment."""

    name: str
    number: int
    num_bytes: int
    """Its length."""
    allocated_bytes: int
    """Bytes that its removal frees."""
    is_ours: bool
    place: tuple[bytes, int, int] | None
    """Store, number and slots that its header names; None for a header that cannot be read."""

    def is_part_of(self, store: bytes) -> bool:
        """Whether it may hold pages of the store: a header that cannot be read says nothing, and pages have their
        own."""
        return self.is_ours and (self.place is None or self.place[:2] == (store, self.number))


@dataclass(frozen=True, slots=True)
class FoundLog:
    """An entry with the name of a log, or the lack of one."""

    name: str
    allocated_bytes: int
    exists: bool
    is_ours: bool


@dataclass(frozen=True, slots=True)
class Inventory:
    """What lies in a directory before anything is altered."""

    manifest: Manifest | None
    """The one that the store goes on with; None where it begins anew."""
    is_manifest_damaged: bool
    is_manifest_loose: bool
    """Whether others may read it."""
    segments: Sequence[FoundSegment]
    logs: Sequence[FoundLog]

    @property
    def holds_anything(self) -> bool:
        """Whether anything in the directory is a store's, beside a manifest."""
        return any(each.is_ours for each in self.segments) or any(each.is_ours for each in self.logs)

    @property
    def num_bytes(self) -> int:
        """Bytes that are ours already."""
        segments = sum(each.allocated_bytes for each in self.segments if each.is_ours)
        return segments + sum(each.allocated_bytes for each in self.logs if each.is_ours)


def close_directory(files: FileIO, directory: StoreDirectory) -> None:
    """Close the files and give up the lock. Does not fail."""
    held = (*(segment.fd for segment in directory.segments), *(log.fd for log in directory.logs), directory.fd)
    for fd in held:
        with contextlib.suppress(OSError):
            files.close(fd)
    directory.segments.clear()
    directory.logs.clear()


def fill(files: FileIO, directory: StoreDirectory, health: Health, inventory: Inventory) -> None:
    """Make what is missing, resize what has another size, remove what is too much. What was created is removed if that
    fails; of a store that was there, everything else stays."""
    created: list[str] = []
    before = inventory.manifest
    try:
        if inventory.is_manifest_damaged:
            _set_aside(files, directory, MANIFEST, "cannot be read")
        manifest = _plan(directory, inventory)
        wanted = dict.fromkeys(manifest.segments) if before is not None else {}
        kept = {each.number: each for each in inventory.segments if each.number in wanted}
        if manifest != before or inventory.is_manifest_loose:
            _write_manifest_or_shrink(files, directory, manifest, created, inventory)
        surplus = [each for each in inventory.segments if each.is_ours and each.number not in kept]
        _remove(files, directory, surplus, is_replaced=before is None)
        for ordinal, number in enumerate(manifest.segments):
            found = kept.get(number)
            if found is not None and not found.is_part_of(directory.store):
                _log.warning("%s: %s belongs to another store or place; replaced", directory.path, found.name)
                files.unlink(found.name, directory_fd=directory.fd)
                found = None
            directory.segments.append(_open_segment(files, directory, health, ordinal, number, found, created))
        for log in inventory.logs:
            directory.logs.append(_open_log(files, directory, log, created))
        files.fsync(directory.fd)
    except BaseException:
        for name in created:
            with contextlib.suppress(OSError):
                files.unlink(name, directory_fd=directory.fd)
        raise
    directory.is_resized = before is not None and before.geometry != directory.geometry
    for note in directory.notes:
        _log.warning("%s: %s", directory.path, note)


def _plan(directory: StoreDirectory, inventory: Inventory) -> Manifest:
    """Which numbers the segments have: those they had, and new ones where there was none or somebody took the name."""
    foreign = {each.number for each in inventory.segments if not each.is_ours}
    numbers: list[int] = []
    if inventory.manifest is not None:
        numbers += inventory.manifest.segments[: directory.geometry.num_segments]
    for each in inventory.segments:
        if not each.is_ours:
            _log.warning("%s: %s is not a segment file of ours; left alone", directory.path, each.name)
    taken = foreign | set(numbers)
    unused = _numbers_but(taken)
    numbers = [next(unused) if number in foreign else number for number in numbers]
    while len(numbers) < directory.geometry.num_segments:
        numbers.append(next(unused))
    return Manifest(directory.store, directory.geometry, tuple(numbers))


def _numbers_but(taken: set[int]) -> Iterator[int]:
    return (number for number in range(1_000_000) if number not in taken)


def _set_aside(files: FileIO, directory: StoreDirectory, name: str, why: str) -> None:
    """Rename what has that name. What was set aside before is kept: it may be all that somebody has to look at."""
    taken = set(files.listdir(directory.fd))
    aside = name + ASIDE
    number = 1
    while aside in taken:
        number += 1
        aside = f"{name}{ASIDE}-{number}"
    files.rename(name, aside, directory_fd=directory.fd)
    _log.warning("%s: %s %s; set aside as %s", directory.path, name, why, aside)


def _remove(
    files: FileIO, directory: StoreDirectory, segments: Sequence[FoundSegment], *, is_replaced: bool
) -> None:
    """Remove segments that the store does not need, or that belonged to one that cannot be gone on with."""
    for each in segments:
        files.unlink(each.name, directory_fd=directory.fd)
    if not segments:
        return
    if is_replaced:
        _log.warning("%s: begins empty; removed %d segments of an earlier store", directory.path, len(segments))
    else:
        _log.info("%s: removed %d segments that the store no longer needs", directory.path, len(segments))


def _write_manifest_or_shrink(
    files: FileIO, directory: StoreDirectory, manifest: Manifest, created: list[str], inventory: Inventory
) -> None:
    """Write the manifest. Where the disk is full and the store is to shrink, the log that waits for its turn makes
    room: it holds nothing, and gets its blocks back from what the segments give up."""
    before, is_new = inventory.manifest, inventory.manifest is None
    try:
        _write_manifest(files, directory, manifest, created, is_new=is_new)
    except OSError as error:
        counts, logs = directory.recovered.log, inventory.logs
        is_shrunk = before is not None and manifest.geometry.num_slots < before.geometry.num_slots
        if error.errno != errno.ENOSPC or not is_shrunk or counts is None or directory.recovered.is_contested:
            raise
        waiting = logs[1 - counts]
        if not waiting.is_ours:
            raise
        fd = files.open(waiting.name, READ_WRITE, directory_fd=directory.fd)
        try:
            files.ftruncate(fd, BLOCK)
        finally:
            files.close(fd)
        _write_manifest(files, directory, manifest, created, is_new=is_new)


def _write_manifest(
    files: FileIO, directory: StoreDirectory, manifest: Manifest, created: list[str], *, is_new: bool
) -> None:
    try:
        files.unlink(MANIFEST_NEW, directory_fd=directory.fd)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        _set_aside(files, directory, MANIFEST_NEW, "is a directory")
    fd = files.open(MANIFEST_NEW, READ_WRITE | CREATE, directory_fd=directory.fd)
    if MANIFEST_NEW not in created:
        created.append(MANIFEST_NEW)
    try:
        write_fully(files, fd, [memoryview(encode_manifest(manifest))], 0)
        files.fsync(fd)
    finally:
        files.close(fd)
    files.rename(MANIFEST_NEW, MANIFEST, directory_fd=directory.fd)
    created.remove(MANIFEST_NEW)
    if is_new:
        created.append(MANIFEST)
    files.fsync(directory.fd)


def _open_segment(
    files: FileIO,
    directory: StoreDirectory,
    health: Health,
    ordinal: int,
    number: int,
    found: FoundSegment | None,
    created: list[str],
) -> SegmentFile:
    geometry = directory.geometry
    num_slots, num_bytes = geometry.slots_of(ordinal), geometry.bytes_of(ordinal)
    fd = _open_file(files, directory, segment_name(number), num_bytes, created, is_new=found is None)
    try:
        block = aligned_buffer(BLOCK)
        segment = SegmentFile(
            files,
            fd,
            store=directory.store,
            number=number,
            num_slots=num_slots,
            geometry=geometry,
            direct=_go_direct(files, directory, fd, block),
            health=health,
        )
        if found is None or found.place != (directory.store, number, num_slots):
            # Synced with the first pages. One that is lost is written again: pages have headers of their own.
            segment.write_header(block)
    except BaseException:
        with contextlib.suppress(OSError):
            files.close(fd)
        raise
    return segment


def _open_log(files: FileIO, directory: StoreDirectory, found: FoundLog, created: list[str]) -> LogFile:
    """One of the two logs. What an earlier life of the directory left in it cannot be taken for ours: it has another
    store id."""
    if found.exists and not found.is_ours:
        _set_aside(files, directory, found.name, "is not a file of ours")
    num_bytes = log_bytes(directory.geometry)
    # The log that counts may be longer than the new capacity allows: it is cut when it is retired.
    counts = directory.recovered.log == len(directory.logs)
    fd = _open_file(files, directory, found.name, num_bytes, created, is_new=not found.is_ours, shrink=not counts)
    return LogFile(files, fd, store=directory.store, num_bytes=num_bytes)


def _open_file(
    files: FileIO,
    directory: StoreDirectory,
    name: str,
    num_bytes: int,
    created: list[str],
    *,
    is_new: bool,
    shrink: bool = True,
) -> int:
    """A file of that length, with blocks of its own. One that is longer stays so unless it is to `shrink`."""
    fd = files.open(name, READ_WRITE | CREATE if is_new else READ_WRITE, directory_fd=directory.fd)
    if is_new:
        created.append(name)
    try:
        status = files.fstat(fd)
        if stat.S_IMODE(status.st_mode) != FILE_MODE:
            files.fchmod(fd, FILE_MODE)
        if status.st_size > num_bytes and shrink:
            files.ftruncate(fd, num_bytes)
        if status.st_size < num_bytes or status.st_blocks * 512 < num_bytes:
            _allocate(files, directory, fd, num_bytes)
    except BaseException:
        with contextlib.suppress(OSError):
            files.close(fd)
        raise
    return fd


def _allocate(files: FileIO, directory: StoreDirectory, fd: int, num_bytes: int) -> None:
    try:
        files.fallocate(fd, num_bytes)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        files.ftruncate(fd, num_bytes)
        directory.note("this file system cannot reserve blocks (fallocate): a full disk will show as failed writes")


def _go_direct(files: FileIO, directory: StoreDirectory, fd: int, block: memoryview) -> bool:
    """Switch the file to direct I/O, and try it: some file systems take the flag and refuse the first read."""
    try:
        files.set_direct(fd, True)
        read_fully(files, fd, [block], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        files.set_direct(fd, False)
        directory.note("this file system refuses direct I/O (O_DIRECT): pages go through the page cache")
        return False
    return True
