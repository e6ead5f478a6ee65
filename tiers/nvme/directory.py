"""The directory of a store: is it ours to use, does this format version know it, is there room, and what does it still
hold; then its files.

`hicache.manifest`, `hicache-NNNNNN.seg`, `hicache-0.log` and `hicache-1.log` are the only names that are made here, and
those beside them that `filling` writes by way of; every other file stays as it is. Everything is checked and recovered
before anything is created, renamed or removed, so a directory that is refused has not been altered, and a start that is
killed can be repeated.
"""

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np

from hicache.errors import BadRequest, TierUnavailable
from hicache.layout import KVLayout
from hicache.tiers.nvme.filling import (
    FILE_MODE,
    MANIFEST,
    FoundLog,
    FoundSegment,
    Inventory,
    StoreDirectory,
    close_directory,
    fill,
)
from hicache.tiers.nvme.geometry import SEGMENT_HEADER_BYTES, Geometry, PageShape
from hicache.tiers.nvme.header import (
    FORGETFUL_VERSION,
    FORMAT_VERSION,
    STORE_ID_BYTES,
    decode_segment_place,
    segment_version,
)
from hicache.tiers.nvme.health import Health
from hicache.tiers.nvme.io import (
    OPEN_DIRECTORY,
    READ_ONLY,
    FileIO,
    is_own_file,
    lock_holder,
    own_uid,
    parent_of,
    read_fully,
)
from hicache.tiers.nvme.log import LOG_NAMES
from hicache.tiers.nvme.manifest import MAX_MANIFEST_BYTES, Manifest, decode_manifest, manifest_version
from hicache.tiers.nvme.namespaces import other_layout
from hicache.tiers.nvme.records import log_bytes
from hicache.tiers.nvme.recovery import NO_FILES, NO_LOG, Progress, holds_pages, nothing_recovered, recover

_log: Final = logging.getLogger(__name__)
_SEGMENT_NAME: Final = re.compile(r"hicache-(\d{6})\.seg")
_BESIDE_BYTES: Final = 256 << 10
"""Manifests, and the directory itself."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a directory that has been checked is about to take."""

    file_system: int
    """Which one, as `st_dev` names it."""
    new_bytes: int
    """More than its files have now; below zero where a store shrinks."""
    free_bytes: int | None
    """What the file system has left for this user; None where it does not say."""


_NOTHING: Final = Inventory(None, is_manifest_damaged=False, is_manifest_loose=False, segments=(), logs=())


def overhead_bytes(geometry: Geometry) -> int:
    """Beyond the capacity a directory takes at most this: two logs, manifests, and the directory itself."""
    return 2 * log_bytes(geometry) + _BESIDE_BYTES


def open_directory(
    path: str,
    *,
    tier: str,
    shape: PageShape,
    capacity_bytes: int,
    segment_bytes: int | None,
    files: FileIO,
    health: Health,
    progress: Progress,
    is_whole: bool = True,
    layout: KVLayout | None = None,
    before_filling: Callable[[Room], None] = lambda _room: None,
) -> StoreDirectory:
    """Check and lock the directory, recover what it holds, and bring its files to the capacity. Blocks: for
    milliseconds, and for what recovery takes.

    A missing directory is made, with mode 0700, if its parent exists. Raises `TierUnavailable`, with one line that
    names the directory, when it is not ours alone to write, is in use by another instance, has an unknown format
    version, pages of another shape or, with `layout`, of a namespace with another one, or cannot be opened;
    `BadRequest` for a capacity that is too small or beyond the free space. Nothing has been created or altered then.
    Nor has it when `before_filling` raises, which is called when everything has been checked.
    """
    plan = Geometry.plan(shape, capacity_bytes=capacity_bytes, segment_bytes=segment_bytes)
    made = locked = False
    opened: StoreDirectory | None = None
    try:
        made = _exists_or_make(files, path, tier, plan)
        fd = files.open(path, OPEN_DIRECTORY)
        opened = StoreDirectory(path, fd, secrets.token_bytes(STORE_ID_BYTES), plan, nothing_recovered(plan))
        _check_owner(files.fstat(fd), path, tier)
        _lock(files, opened, tier)
        locked = True
        found, manifest, is_loose = _check_manifest(files, opened, tier)
        if manifest is not None:
            _check_shape(opened, tier, manifest, shape)
            opened.store = manifest.store
            opened.geometry = manifest.geometry.resized(capacity_bytes)
        inventory = Inventory(
            manifest,
            is_manifest_damaged=found is _Found.DAMAGED,
            is_manifest_loose=is_loose,
            segments=_find_segments(files, opened, tier, known=found in (_Found.WHOLE, _Found.FORGETFUL)),
            logs=_find_logs(files, opened),
        )
        room = _check_room(files, path, opened.geometry, inventory)
        opened.recovered = nothing_recovered(opened.geometry)
        if manifest is not None:
            _recover(files, opened, manifest, inventory, progress, is_whole=is_whole)
            if not inventory.segments and not any(log.exists for log in inventory.logs):
                # A crash leaves this behind, too, before anything was stored: no damage, then, and no warning.
                _log.info("%s: %s", path, NO_FILES)
            _check_layout(opened, tier, layout)
        elif found is not _Found.FORGETFUL and inventory.holds_anything:
            opened.recovered.damage.append(f"the manifest is {found.value}: the store starts cold")
            opened.recovered.clean = False
        before_filling(Room(files.fstat(opened.fd).st_dev, *room))
        _sync_name(files, path)
        fill(files, opened, health, inventory)
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
        _check_room(files, parent, geometry, _NOTHING)
        with contextlib.suppress(FileExistsError):
            files.mkdir(path)
            return True
    return False


def _sync_name(files: FileIO, path: str) -> None:
    """Make the directory's own name durable; whoever made it may have been killed before. A directory around it that
    may not be opened is somebody else's to sync."""
    try:
        fd = files.open(parent_of(path), OPEN_DIRECTORY)
    except PermissionError:
        return
    try:
        files.fsync(fd)
    finally:
        files.close(fd)


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


class _Found(Enum):
    """What the manifest is like."""

    WHOLE = "whole"
    FORGETFUL = "forgetful"
    """Of the version that kept nothing over a restart."""
    MISSING = "missing"
    DAMAGED = "damaged"


def _check_manifest(files: FileIO, directory: StoreDirectory, tier: str) -> tuple[_Found, Manifest | None, bool]:
    """What the manifest is like, the manifest if it is whole, and whether its mode is another than ours. Refuses one of
    an unknown version."""
    try:
        fd = files.open(MANIFEST, READ_ONLY, directory_fd=directory.fd)
    except FileNotFoundError:
        return _Found.MISSING, None, False
    except OSError as error:
        if error.errno == errno.ELOOP:
            return _Found.DAMAGED, None, False
        raise
    try:
        buffer = memoryview(bytearray(MAX_MANIFEST_BYTES))
        status = files.fstat(fd)
        own = is_own_file(status)
        data = bytes(buffer[: read_fully(files, fd, [buffer], 0)]) if own else b""
    finally:
        files.close(fd)
    version = manifest_version(data)
    if version not in (None, FORMAT_VERSION, FORGETFUL_VERSION):
        raise _unknown_version(directory, tier, version)
    if version == FORGETFUL_VERSION:
        return _Found.FORGETFUL, None, False
    manifest = decode_manifest(data)
    is_loose = stat.S_IMODE(status.st_mode) != FILE_MODE
    return (_Found.DAMAGED if manifest is None else _Found.WHOLE), manifest, is_loose


def _unknown_version(directory: StoreDirectory, tier: str, version: int | None) -> TierUnavailable:
    problem = f"format version {version} is not the one this program knows ({FORMAT_VERSION}); nothing was altered"
    return TierUnavailable(tier, f"{directory.path}: {problem}")


def _check_shape(directory: StoreDirectory, tier: str, manifest: Manifest, shape: PageShape) -> None:
    there = manifest.geometry.shape
    if (there.page_size, there.layer_bytes) != (shape.page_size, shape.layer_bytes):
        raise TierUnavailable(
            tier,
            f"{directory.path}: holds pages of {there.page_size} tokens, {there.num_layers} layers and "
            f"{there.page_bytes} bytes, not of {shape.page_size} tokens, {shape.num_layers} layers and "
            f"{shape.page_bytes} bytes; nothing was altered",
        )
    if there.coding != shape.coding:
        raise TierUnavailable(
            tier,
            f"{directory.path}: holds pages with codec {there.codec_text!r} in {there.room_bytes} bytes, not with "
            f"{shape.codec_text!r} in {shape.room_bytes} bytes; nothing was altered",
        )


def _check_layout(directory: StoreDirectory, tier: str, layout: KVLayout | None) -> None:
    """Pages of another layout may have the same lengths. They are nobody's to drop who merely named the wrong
    directory."""
    recovered = directory.recovered
    found = [recovered.namespaces[number] for number in np.unique(recovered.rows["namespace"]).tolist()]
    if layout is not None and (difference := other_layout(found, layout)) is not None:
        raise TierUnavailable(
            tier,
            f"{directory.path}: holds pages of another layout ({difference}); nothing was altered: name another "
            "directory, or empty this one",
        )


def _find_segments(files: FileIO, directory: StoreDirectory, tier: str, *, known: bool) -> list[FoundSegment]:
    """Entries with names of segments. Ours are regular files of this user under one name that begin like a segment, or
    lie beside a manifest that is whole (`known`)."""
    found = []
    for name in sorted(files.listdir(directory.fd)):
        if not (match := _SEGMENT_NAME.fullmatch(name)):
            continue
        status = files.stat(name, directory_fd=directory.fd)
        is_ours, place = is_own_file(status), None
        if is_ours:
            block = memoryview(bytearray(SEGMENT_HEADER_BYTES))
            fd = files.open(name, READ_ONLY, directory_fd=directory.fd)
            try:
                block = block[: read_fully(files, fd, [block], 0)]
            finally:
                files.close(fd)
            version = segment_version(block)
            if version not in (None, FORMAT_VERSION, FORGETFUL_VERSION):
                raise _unknown_version(directory, tier, version)
            is_ours = known or version is not None
            place = decode_segment_place(block)
        found.append(FoundSegment(name, int(match[1]), status.st_size, status.st_blocks * 512, is_ours, place))
    return found


def _find_logs(files: FileIO, directory: StoreDirectory) -> list[FoundLog]:
    found = []
    for name in LOG_NAMES:
        try:
            status = files.stat(name, directory_fd=directory.fd)
        except FileNotFoundError:
            found.append(FoundLog(name, 0, exists=False, is_ours=False))
        else:
            found.append(FoundLog(name, status.st_blocks * 512, exists=True, is_ours=is_own_file(status)))
    return found


def _check_room(files: FileIO, path: str, geometry: Geometry, inventory: Inventory) -> tuple[int, int | None]:
    """Bytes that the files will take more than now, and bytes that are free."""
    space = files.statvfs(path)
    needed = geometry.total_bytes + 2 * log_bytes(geometry)
    if not space.f_blocks:
        # A file system that does not say how large it is; what does not fit shows when it is allocated or written.
        return needed - inventory.num_bytes, None
    unused = space.f_bavail * space.f_frsize
    free = unused + inventory.num_bytes
    if needed > free:
        raise BadRequest(
            "capacity_bytes",
            f"{needed} bytes of segments and logs do not fit into the {free} bytes that are free at {path}",
        )
    return needed - inventory.num_bytes, unused


def _recover(
    files: FileIO,
    directory: StoreDirectory,
    manifest: Manifest,
    inventory: Inventory,
    progress: Progress,
    *,
    is_whole: bool,
) -> None:
    """Find out what the store still holds, at the sizes that it had, and cut that to the sizes that it gets."""
    geometry = manifest.geometry
    num_present = np.zeros(geometry.num_segments, np.int64)
    num_kept = np.array([_slots_after(directory, ordinal) for ordinal in range(geometry.num_segments)])
    by_number = {each.number: each for each in inventory.segments}
    for ordinal, number in enumerate(manifest.segments):
        segment = by_number.get(number)
        if segment is not None and segment.is_part_of(manifest.store):
            reached = (segment.num_bytes - SEGMENT_HEADER_BYTES) // geometry.shape.slot_bytes
            num_present[ordinal] = min(max(reached, 0), geometry.slots_of(ordinal))
    logs: list[int | None] = []
    try:
        for log in inventory.logs:
            logs.append(files.open(log.name, READ_ONLY, directory_fd=directory.fd) if log.is_ours else None)
        recovered = recover(
            files, logs, manifest.store, geometry, num_present, progress, num_kept=num_kept, is_whole=is_whole
        )
    finally:
        for fd in logs:
            if fd is not None:
                with contextlib.suppress(OSError):
                    files.close(fd)
    if recovered.log is None and not recovered.damage:
        ours = [each.name for each in inventory.segments if each.is_part_of(manifest.store)]
        if any(_holds_pages(files, directory, manifest, name) for name in ours):
            recovered.damage.append(NO_LOG)
            recovered.clean = False
    directory.recovered = recovered.cut_to(directory.geometry)


def _holds_pages(files: FileIO, directory: StoreDirectory, manifest: Manifest, name: str) -> bool:
    fd = files.open(name, READ_ONLY, directory_fd=directory.fd)
    try:
        return holds_pages(files, fd, manifest.store, manifest.geometry)
    finally:
        files.close(fd)


def _slots_after(directory: StoreDirectory, ordinal: int) -> int:
    """Slots of that segment in the capacity that the store gets."""
    return max(0, directory.geometry.slots_of(ordinal))

