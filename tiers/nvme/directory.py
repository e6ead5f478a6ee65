"""The directory of a store: is it ours to use, does this format version know it, is there room; then its segment files.

`hicache.manifest` and `hicache-000000.seg`, `hicache-000001.seg`, ... are the only names that are made here; every
other file stays as it is. Everything is checked before anything is created, renamed or removed, so a directory that is
refused has not been altered.

There is no recovery in this format version: segments of an earlier run are replaced by fresh ones.
"""

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from hicache.errors import BadRequest, TierUnavailable
from hicache.tiers.nvme.geometry import BLOCK, SEGMENT_HEADER_BYTES, Geometry
from hicache.tiers.nvme.header import (
    FORMAT_VERSION,
    MAX_MANIFEST_BYTES,
    STORE_ID_BYTES,
    encode_manifest,
    manifest_version,
    segment_version,
)
from hicache.tiers.nvme.health import Health
from hicache.tiers.nvme.io import (
    CREATE,
    OPEN_DIRECTORY,
    READ_ONLY,
    READ_WRITE,
    UNSUPPORTED,
    FileIO,
    aligned_buffer,
    is_own_file,
    lock_holder,
    own_uid,
    parent_of,
    read_fully,
    write_fully,
)
from hicache.tiers.nvme.segment import SegmentFile

MANIFEST: Final = "hicache.manifest"
MANIFEST_NEW: Final = "hicache.manifest.new"
"""The manifest while it is written: it becomes visible whole or not at all."""
MANIFEST_ASIDE: Final = "hicache.manifest.damaged"
"""Where a manifest goes that cannot be read."""
OVERHEAD_BYTES: Final = 256 << 10
"""Beyond the capacity a directory takes at most this: manifests, and the directory itself."""

_SEGMENT_NAME: Final = re.compile(r"hicache-(\d{6})\.seg")
_log = logging.getLogger(__name__)


def segment_name(number: int) -> str:
    return f"hicache-{number:06d}.seg"


@dataclass
class StoreDirectory:
    """An open, locked directory with its segments."""

    path: str
    fd: int
    """The directory, held open and locked."""
    store: bytes
    """Random id of this life of the directory."""
    segments: list[SegmentFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Fallbacks in use, one sentence each."""

    def note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)


def open_directory(path: str, *, tier: str, geometry: Geometry, files: FileIO, health: Health) -> StoreDirectory:
    """Check, lock and fill the directory. Blocks, for milliseconds.

    A missing directory is made, with mode 0700, if its parent exists. Raises `TierUnavailable`, with one line that
    names the directory, when it is not ours alone to write, is in use by another instance, has an unknown format
    version, or cannot be opened; `BadRequest` for a capacity beyond the free space. Nothing has been created or
    altered then.
    """
    made = locked = False
    opened: StoreDirectory | None = None
    try:
        made = _exists_or_make(files, path, tier, geometry)
        fd = files.open(path, OPEN_DIRECTORY)
        opened = StoreDirectory(path, fd, secrets.token_bytes(STORE_ID_BYTES))
        _check_owner(files.fstat(fd), path, tier)
        _lock(files, opened, tier)
        locked = True
        manifest = _check_manifest(files, opened, tier)
        old = _old_segments(files, opened, tier, known=manifest is _Manifest.WHOLE)
        _check_room(files, path, geometry, old)
        _fill(files, opened, geometry, health, old=old, damaged=manifest is _Manifest.DAMAGED)
        return opened
    except BaseException as error:
        if made and (locked or opened is None):
            # Whoever holds the lock instead may be about to fill the directory that was made here.
            with contextlib.suppress(OSError):
                files.rmdir(path)
        if opened is not None:
            close_directory(files, opened)
        if isinstance(error, OSError):
            raise TierUnavailable(tier, f"{path}: {error.strerror or error}") from error
        raise


def close_directory(files: FileIO, directory: StoreDirectory) -> None:
    """Close the files and give up the lock. Does not fail."""
    for fd in (*(segment.fd for segment in directory.segments), directory.fd):
        with contextlib.suppress(OSError):
            files.close(fd)
    directory.segments.clear()


# ---- checks: nothing here creates or alters anything but a missing directory


def _exists_or_make(files: FileIO, path: str, tier: str, geometry: Geometry) -> bool:
    """Whether the directory had to be made."""
    try:
        files.stat(path, follow=True)
    except FileNotFoundError:
        parent = parent_of(path)
        try:
            files.stat(parent, follow=True)
        except FileNotFoundError:
            raise TierUnavailable(tier, f"{path}: neither it nor the directory around it exists") from None
        _check_room(files, parent, geometry, ())
        with contextlib.suppress(FileExistsError):
            files.mkdir(path)
            return True
    return False


def _check_owner(status: os.stat_result, path: str, tier: str) -> None:
    if status.st_uid != own_uid():
        raise TierUnavailable(tier, f"{path}: belongs to user {status.st_uid}, not to user {own_uid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise TierUnavailable(tier, f"{path}: others may write to it (mode {mode:04o}); use mode 0700")


def _lock(files: FileIO, directory: StoreDirectory, tier: str) -> None:
    # The lock lies on the directory itself: it cannot be deleted or replaced like a lock file, and is the same by
    # whatever path the directory is reached.
    try:
        files.lock(directory.fd)
    except BlockingIOError:
        holder = lock_holder(files.fstat(directory.fd))
        who = f"process {holder}" if holder else "another process"
        raise TierUnavailable(tier, f"{directory.path}: in use by {who}") from None


class _Manifest(Enum):
    WHOLE = "whole"
    MISSING = "missing"
    DAMAGED = "damaged"


def _check_manifest(files: FileIO, directory: StoreDirectory, tier: str) -> _Manifest:
    """What the manifest is like. Refuses one of another version."""
    try:
        fd = files.open(MANIFEST, READ_ONLY, directory_fd=directory.fd)
    except FileNotFoundError:
        return _Manifest.MISSING
    except OSError as error:
        if error.errno == errno.ELOOP:
            return _Manifest.DAMAGED
        raise
    try:
        buffer = memoryview(bytearray(MAX_MANIFEST_BYTES))
        own = is_own_file(files.fstat(fd))
        version = manifest_version(bytes(buffer[: read_fully(files, fd, [buffer], 0)])) if own else None
    finally:
        files.close(fd)
    if version is not None and version != FORMAT_VERSION:
        raise _unknown_version(directory, tier, version)
    return _Manifest.DAMAGED if version is None else _Manifest.WHOLE


def _unknown_version(directory: StoreDirectory, tier: str, version: int) -> TierUnavailable:
    problem = f"format version {version} is not the one this program knows ({FORMAT_VERSION}); nothing was altered"
    return TierUnavailable(tier, f"{directory.path}: {problem}")


@dataclass(frozen=True, slots=True)
class _OldFile:
    """An entry with the name of a segment."""

    name: str
    number: int
    num_bytes: int
    """Bytes that its removal frees."""
    ours: bool


def _old_segments(files: FileIO, directory: StoreDirectory, tier: str, *, known: bool) -> list[_OldFile]:
    """Entries with names of segments. Ours are regular files of this user under one name that begin like a segment, or
    lie beside a manifest that is whole (`known`)."""
    found = []
    for name in sorted(files.listdir(directory.fd)):
        if not (match := _SEGMENT_NAME.fullmatch(name)):
            continue
        status = files.stat(name, directory_fd=directory.fd)
        ours = is_own_file(status)
        if ours:
            version = _version_of_segment(files, directory, name)
            if version not in (None, FORMAT_VERSION):
                raise _unknown_version(directory, tier, version)
            ours = known or version is not None
        found.append(_OldFile(name, int(match[1]), status.st_blocks * 512, ours))
    return found


def _version_of_segment(files: FileIO, directory: StoreDirectory, name: str) -> int | None:
    block = memoryview(bytearray(SEGMENT_HEADER_BYTES))
    fd = files.open(name, READ_ONLY, directory_fd=directory.fd)
    try:
        return segment_version(block[: read_fully(files, fd, [block], 0)])
    finally:
        files.close(fd)


def _check_room(files: FileIO, path: str, geometry: Geometry, old: Sequence[_OldFile]) -> None:
    space = files.statvfs(path)
    if not space.f_blocks:
        # A file system that does not say how large it is; what does not fit shows when it is allocated or written.
        return
    free = space.f_bavail * space.f_frsize + sum(each.num_bytes for each in old if each.ours)
    if geometry.total_bytes > free:
        raise BadRequest(
            "capacity_bytes",
            f"{geometry.total_bytes} bytes of segments do not fit into the {free} bytes that are free at {path}",
        )


# ---- changes


def _fill(
    files: FileIO,
    directory: StoreDirectory,
    geometry: Geometry,
    health: Health,
    *,
    old: Sequence[_OldFile],
    damaged: bool,
) -> None:
    """Replace what an earlier run left by a manifest and fresh segments. What was created is removed if that fails."""
    created: list[str] = []
    try:
        if damaged:
            files.rename(MANIFEST, MANIFEST_ASIDE, directory_fd=directory.fd)
            _log.warning("%s: the manifest cannot be read; set aside as %s", directory.path, MANIFEST_ASIDE)
        for each in old:
            if each.ours:
                files.unlink(each.name, directory_fd=directory.fd)
            else:
                _log.warning("%s: %s is not a segment file of ours; left alone", directory.path, each.name)
        if replaced := sum(each.ours for each in old):
            _log.info("%s: replacing %d segments of an earlier run", directory.path, replaced)
        _write_manifest(files, directory, geometry, created)
        taken = {each.number for each in old if not each.ours}
        numbers = (number for number in range(geometry.num_segments + len(taken)) if number not in taken)
        for ordinal, number in zip(range(geometry.num_segments), numbers):
            directory.segments.append(_create_segment(files, directory, geometry, health, ordinal, number, created))
        files.fsync(directory.fd)
    except BaseException:
        for name in created:
            with contextlib.suppress(OSError):
                files.unlink(name, directory_fd=directory.fd)
        raise
    for note in directory.notes:
        _log.warning("%s: %s", directory.path, note)


def _write_manifest(files: FileIO, directory: StoreDirectory, geometry: Geometry, created: list[str]) -> None:
    data = encode_manifest(
        directory.store,
        geometry.shape,
        slots_per_segment=geometry.slots_per_segment,
        num_slots=geometry.num_slots,
    )
    with contextlib.suppress(FileNotFoundError):
        files.unlink(MANIFEST_NEW, directory_fd=directory.fd)
    fd = files.open(MANIFEST_NEW, READ_WRITE | CREATE, directory_fd=directory.fd)
    created.append(MANIFEST_NEW)
    try:
        write_fully(files, fd, [memoryview(data)], 0)
        files.fsync(fd)
    finally:
        files.close(fd)
    files.rename(MANIFEST_NEW, MANIFEST, directory_fd=directory.fd)
    created[-1] = MANIFEST


def _create_segment(
    files: FileIO,
    directory: StoreDirectory,
    geometry: Geometry,
    health: Health,
    ordinal: int,
    number: int,
    created: list[str],
) -> SegmentFile:
    name = segment_name(number)
    fd = files.open(name, READ_WRITE | CREATE, directory_fd=directory.fd)
    created.append(name)
    try:
        _allocate(files, directory, fd, geometry.bytes_of(ordinal))
        block = aligned_buffer(BLOCK)
        segment = SegmentFile(
            files,
            fd,
            store=directory.store,
            number=number,
            num_slots=geometry.slots_of(ordinal),
            geometry=geometry,
            direct=_go_direct(files, directory, fd, block),
            health=health,
        )
        segment.write_header(block)
    except BaseException:
        with contextlib.suppress(OSError):
            files.close(fd)
        raise
    return segment


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
