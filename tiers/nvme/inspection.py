"""Look at a store's directory without altering anything: for people who want to know what lies there.

Works on directories that are damaged, somebody else's, of another format version, or in use. Of one in use a log may be
read while it is written: what is said is then a moment old. Nothing is locked, created, or written.
"""

import contextlib
import os
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

import numpy as np

from hicache.clock import Clock, SystemClock
from hicache.errors import TierUnavailable
from hicache.tier import PageIdentity
from hicache.tiers.nvme.filling import MANIFEST, segment_name
from hicache.tiers.nvme.findings import Finding
from hicache.tiers.nvme.geometry import SEGMENT_HEADER_BYTES
from hicache.tiers.nvme.header import FORGETFUL_VERSION, FORMAT_VERSION, decode_segment_place, segment_version
from hicache.tiers.nvme.health import Health
from hicache.tiers.nvme.index import Index
from hicache.tiers.nvme.io import (
    OPEN_DIRECTORY,
    READ_ONLY,
    FileIO,
    Scratch,
    is_own_file,
    lock_holder,
    read_fully,
)
from hicache.tiers.nvme.log import LOG_NAMES
from hicache.tiers.nvme.manifest import MAX_MANIFEST_BYTES, Manifest, decode_manifest, manifest_version
from hicache.tiers.nvme.reading import LogContents, read_log, read_log_header
from hicache.tiers.nvme.recovery import NO_FILES, NO_LOG, Progress, Recovered, Recovery, connect, holds_pages, recover
from hicache.tiers.nvme.segment import PageGet, SegmentFile

_SEGMENT_NAME: Final = re.compile(r"hicache-\d{6}\.seg")
MAX_EXAMPLES: Final = 20
"""Damaged pages that are named one by one."""


class FileState(Enum):
    """What a file is to the store."""

    WHOLE = "whole"
    COUNTS = "counts"
    """A log: the one that is read when the store is opened."""
    RETIRED = "retired"
    """A log's file that waits for its next turn."""
    UNFINISHED = "unfinished"
    """A log whose checkpoint was not completed: a crash, or one that is being written now."""
    OLDER = "older"
    """A whole log with a lower number than the one that counts."""
    MISSING = "missing"
    SHORT = "short"
    """A segment that ends before its last slot."""
    DAMAGED = "damaged"
    """A header or a manifest that cannot be read."""
    OTHER = "other"
    """Of another store, or in another's place."""
    OTHER_VERSION = "other_version"
    """Of a version that is not known; one of these is enough for the cache to refuse the directory."""
    FORGETFUL = "forgetful"
    """A manifest of the version that kept nothing over a restart: a start replaces what lies there."""
    NOT_OURS = "not_ours"
    """Not a regular file of this user with one name."""
    SURPLUS = "surplus"
    """A segment that no manifest names: removed by the next opening, unless the directory is refused."""
    UNCLEAR = "unclear"
    """What has a segment's name and does not begin like one, without a manifest that could name it: left alone."""


_USABLE: Final = frozenset({FileState.WHOLE, FileState.SHORT, FileState.DAMAGED})
"""States of a segment that may hold pages of the store."""


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file of the store, or one that should be there."""

    name: str
    state: FileState
    num_bytes: int = 0
    """Its length."""
    allocated_bytes: int = 0
    """What it takes on the file system."""
    detail: str = ""
    """More, in words; empty where there is nothing to say."""


@dataclass(frozen=True, slots=True)
class LogReport:
    """One of the two logs."""

    file: FileReport
    number: int = 0
    """0 for none."""
    num_frames: int = 0
    used_bytes: int = 0
    """Up to the last whole frame."""
    sequence: int = 0
    """The last change in it."""
    is_clean: bool = False
    """Whether its last record says that the store was closed."""
    damage: str = ""


@dataclass(frozen=True, slots=True)
class DamagedPage:
    """A page that does not verify."""

    slot: int
    segment: str
    """Name of its file."""
    offset: int
    """Where its header begins there."""
    finding: Finding


@dataclass
class Verified:
    """What reading every page that is recorded has shown, those too whose beginnings do not lie here."""

    num_pages: int = 0
    num_bytes: int = 0
    findings: Counter[Finding] = field(default_factory=Counter)
    """How many pages of each finding; `Finding.OK` for those that are as they should be."""
    examples: list[DamagedPage] = field(default_factory=list)
    """The first `MAX_EXAMPLES` that are not."""


@dataclass
class DirectoryReport:
    """What lies in a directory."""

    path: str
    version: int | None = None
    """Format version of the manifest; None where there is no manifest, or a damaged one."""
    manifest: Manifest | None = None
    """None unless it is whole and of this program's version."""
    manifest_file: FileReport | None = None
    holder: int | None = None
    """Process that has the store open, as far as the system tells."""
    free_bytes: int = 0
    """What the file system has left for this user."""
    segments: list[FileReport] = field(default_factory=list)
    logs: list[LogReport] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Names of entries that are not the store's; they are left alone."""
    recovery: Recovery | None = None
    """What an opening with the same capacity would bring back, were it not in use; None without a whole manifest."""
    num_continuing: int = 0
    """Pages whose beginnings do not lie here, beside those of `recovery`. Where the directory is one of several of a
    striped tier, they may lie in the others, and nothing is lost; a tier with this directory alone drops them."""
    sequence: int = 0
    """The last change that is in the log."""
    write_budget_bytes: int | None = None
    """What the write budget still grants; None where none was kept."""
    verified: Verified | None = None
    problems: list[str] = field(default_factory=list)
    """What is wrong, one sentence each."""

    @property
    def num_bytes(self) -> int:
        """What the store's files take on the file system."""
        files = [*self.segments, *(log.file for log in self.logs)]
        return sum(each.allocated_bytes for each in files)

    @property
    def is_store(self) -> bool:
        """Whether anything in the directory is a store's."""
        return self.manifest_file is not None or any(
            each.state is not FileState.MISSING for each in (*self.segments, *(log.file for log in self.logs))
        )

    @property
    def is_bare(self) -> bool:
        """Whether there is a whole manifest and none of the files that it names, so that it is one problem and not many
        (`NO_FILES`)."""
        files = [*self.segments, *(log.file for log in self.logs)]
        return self.manifest is not None and all(each.state is FileState.MISSING for each in files)

    @property
    def is_refused(self) -> bool:
        """Whether the cache refuses the directory, and leaves it as it is, because of an unknown format version."""
        files = [*self.segments, *([self.manifest_file] if self.manifest_file is not None else [])]
        return any(each.state is FileState.OTHER_VERSION for each in files)

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong. A torn end of a log, as a crash leaves it, is nothing wrong."""
        return not self.problems


def inspect_directory(
    path: str | os.PathLike[str],
    *,
    verify: bool = False,
    progress: Progress = lambda _done, _total: None,
    files: FileIO | None = None,
    clock: Clock | None = None,
) -> DirectoryReport:
    """Say what lies in a directory, and with `verify` read every page that is recorded there. Blocks.

    `progress` is told the pages that are verified, of how many. Raises `TierUnavailable`, with one line, only where the
    directory itself cannot be read.
    """
    files, clock, name = files or FileIO(), clock or SystemClock(), os.fspath(path)
    try:
        fd = files.open(name, OPEN_DIRECTORY)
    except OSError as error:
        raise TierUnavailable("nvme", f"{name}: {error.strerror or error}") from error
    try:
        return _Inspection(files, clock, name, fd).run(verify, progress)
    except OSError as error:
        raise TierUnavailable("nvme", f"{name}: {error.strerror or error}") from error
    finally:
        files.close(fd)


class _Inspection:
    """One look at one directory."""

    def __init__(self, files: FileIO, clock: Clock, path: str, fd: int) -> None:
        self._files = files
        self._clock = clock
        self._fd = fd
        self._report = DirectoryReport(path)
        self._names = frozenset(files.listdir(fd))

    def run(self, verify: bool, progress: Progress) -> DirectoryReport:
        report = self._report
        report.holder = lock_holder(self._files.fstat(self._fd))
        space = self._files.statvfs(report.path)
        report.free_bytes = space.f_bavail * space.f_frsize
        self._look_at_manifest()
        self._look_at_segments()
        recovered = self._look_at_logs()
        if report.is_bare:
            report.problems = [NO_FILES]
        known = {MANIFEST, *LOG_NAMES, *(segment.name for segment in report.segments)}
        report.others = sorted(self._names - known)
        if verify and recovered is not None and report.manifest is not None:
            report.verified = self._verify(report.manifest, recovered, progress)
            if damaged := report.verified.num_pages - report.verified.findings[Finding.OK]:
                report.problems.append(f"{damaged} of {report.verified.num_pages} pages do not verify")
        return report

    # ---- files

    def _status(self, name: str) -> os.stat_result | None:
        if name not in self._names:
            return None
        try:
            return self._files.stat(name, directory_fd=self._fd)
        except FileNotFoundError:
            return None

    def _first_bytes(self, name: str, num_bytes: int) -> memoryview:
        """What a file begins with; nothing where it cannot be read, which is a problem of its own."""
        buffer = memoryview(bytearray(num_bytes))
        try:
            fd = self._files.open(name, READ_ONLY, directory_fd=self._fd)
        except OSError as error:
            self._report.problems.append(f"{name} cannot be opened: {error.strerror}")
            return buffer[:0]
        try:
            return buffer[: read_fully(self._files, fd, [buffer], 0)]
        except OSError as error:
            self._report.problems.append(f"{name} cannot be read: {error.strerror}")
            return buffer[:0]
        finally:
            self._files.close(fd)

    def _look_at_manifest(self) -> None:
        report, status = self._report, self._status(MANIFEST)
        if status is None:
            if any(_SEGMENT_NAME.fullmatch(name) or name in LOG_NAMES for name in self._names):
                report.problems.append("there is no manifest: the store would start cold")
            return
        sizes = status.st_size, status.st_blocks * 512
        if not is_own_file(status):
            report.manifest_file = FileReport(MANIFEST, FileState.NOT_OURS, *sizes)
            report.problems.append("the manifest is not a file of ours: it would be set aside; the store starts cold")
            return
        data = bytes(self._first_bytes(MANIFEST, MAX_MANIFEST_BYTES))
        report.version = manifest_version(data)
        report.manifest = decode_manifest(data)
        if report.manifest is not None:
            report.manifest_file = FileReport(MANIFEST, FileState.WHOLE, *sizes)
        elif report.version in (None, FORMAT_VERSION):
            report.manifest_file = FileReport(MANIFEST, FileState.DAMAGED, *sizes)
            report.problems.append("the manifest is damaged: it would be set aside, and the store start cold")
        elif report.version == FORGETFUL_VERSION:
            report.manifest_file = FileReport(MANIFEST, FileState.FORGETFUL, *sizes)
            report.problems.append(
                f"format version {report.version} kept nothing over a restart: what lies here would be replaced"
            )
        else:
            report.manifest_file = FileReport(MANIFEST, FileState.OTHER_VERSION, *sizes)
            report.problems.append(f"format version {report.version} is not the one this program knows")

    def _look_at_segments(self) -> None:
        manifest = self._report.manifest
        expected: dict[str, int] = {}
        if manifest is not None:
            expected = {segment_name(number): ordinal for ordinal, number in enumerate(manifest.segments)}
        for name in sorted({*expected, *filter(_SEGMENT_NAME.fullmatch, self._names)}):
            found = self._look_at_segment(name, manifest, expected.get(name))
            self._report.segments.append(found)
            harmless = {FileState.WHOLE, FileState.SURPLUS, FileState.UNCLEAR}
            if name not in expected:
                harmless.add(FileState.NOT_OURS)
            if found.state not in harmless:
                self._report.problems.append(f"{name} is {found.state.value.replace('_', ' ')}{found.detail}")

    def _look_at_segment(self, name: str, manifest: Manifest | None, ordinal: int | None) -> FileReport:
        status = self._status(name)
        if status is None:
            return FileReport(name, FileState.MISSING, detail=": its pages are lost")
        sizes = status.st_size, status.st_blocks * 512
        if not is_own_file(status):
            return FileReport(name, FileState.NOT_OURS, *sizes)
        block = self._first_bytes(name, SEGMENT_HEADER_BYTES)
        version, place = segment_version(block), decode_segment_place(block)
        if version not in (None, FORMAT_VERSION, FORGETFUL_VERSION):
            return FileReport(name, FileState.OTHER_VERSION, *sizes, f": {version}")
        if manifest is None or ordinal is None:
            is_ours = manifest is not None or self._report.version == FORGETFUL_VERSION or version is not None
            return FileReport(name, FileState.SURPLUS if is_ours else FileState.UNCLEAR, *sizes)
        if place is None:
            return FileReport(name, FileState.DAMAGED, *sizes, ": its header, which is written again")
        if place[:2] != (manifest.store, manifest.segments[ordinal]):
            return FileReport(name, FileState.OTHER, *sizes, ": its pages are lost")
        if status.st_size < manifest.geometry.bytes_of(ordinal):
            return FileReport(name, FileState.SHORT, *sizes, ": pages beyond its end are lost")
        return FileReport(name, FileState.WHOLE, *sizes)

    # ---- logs

    def _look_at_logs(self) -> Recovered | None:
        """Look at the two logs, and at what they would bring back."""
        report, manifest = self._report, self._report.manifest
        descriptors: list[int | None] = []
        try:
            states = []
            for name in LOG_NAMES:
                status = self._status(name)
                fd = None
                if status is not None and is_own_file(status):
                    with contextlib.suppress(OSError):
                        fd = self._files.open(name, READ_ONLY, directory_fd=self._fd)
                descriptors.append(fd)
                states.append((name, status, fd))
            recovered = None
            if manifest is not None:
                begun = self._clock.monotonic()
                # Pages may continue what lies in another directory of the same tier: that is told apart from damage.
                recovered = recover(
                    self._files, descriptors, manifest.store, manifest.geometry, self._present(manifest), _silent,
                    is_whole=False,
                )  # fmt: skip
                found = recovered.summary(self._clock.monotonic() - begun)
                dropped = Counter(found.dropped)
                kept, _ = connect(recovered.rows, recovered.namespaces, dropped)
                report.num_continuing = dropped.pop("orphan", 0)
                report.recovery = replace(found, num_pages=int(kept.size), dropped=dict(+dropped))
                report.sequence, report.write_budget_bytes = recovered.sequence, recovered.budget
                report.problems += report.recovery.damage
                if recovered.log is None and not recovered.damage and self._holds_pages(manifest):
                    report.problems.append(NO_LOG)
            current = recovered.log if recovered is not None else None
            for which, (name, status, fd) in enumerate(states):
                report.logs.append(self._look_at_log(name, status, fd, counts=current == which))
            return recovered
        finally:
            for fd in descriptors:
                if fd is not None:
                    self._files.close(fd)

    def _holds_pages(self, manifest: Manifest) -> bool:
        """Whether pages of the store were ever written."""
        expected = {segment_name(number) for number in manifest.segments}
        for each in self._report.segments:
            if each.name in expected and each.state in _USABLE:
                fd = self._files.open(each.name, READ_ONLY, directory_fd=self._fd)
                try:
                    if holds_pages(self._files, fd, manifest.store, manifest.geometry):
                        return True
                finally:
                    self._files.close(fd)
        return False

    def _look_at_log(self, name: str, status: os.stat_result | None, fd: int | None, *, counts: bool) -> LogReport:
        manifest = self._report.manifest
        if status is None:
            if manifest is not None:
                self._report.problems.append(f"{name} is missing")
            return LogReport(FileReport(name, FileState.MISSING))
        sizes = status.st_size, status.st_blocks * 512
        if fd is None:
            if manifest is not None:
                self._report.problems.append(f"{name} is not a file of ours: it would be set aside")
            return LogReport(FileReport(name, FileState.NOT_OURS, *sizes))
        header = read_log_header(self._files, fd)
        if header is None:
            return LogReport(FileReport(name, FileState.RETIRED, *sizes))
        if manifest is None or header.store != manifest.store:
            return LogReport(FileReport(name, FileState.OTHER, *sizes), header.number)
        contents = read_log(self._files, fd, manifest.geometry.shape)
        if contents is None:
            return LogReport(FileReport(name, FileState.RETIRED, *sizes))
        return _report_of(name, sizes, contents, counts=counts)

    def _present(self, manifest: Manifest) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """How many slots of each segment its file reaches."""
        geometry = manifest.geometry
        present = np.zeros(geometry.num_segments, np.int64)
        by_name = {each.name: each for each in self._report.segments}
        for ordinal, number in enumerate(manifest.segments):
            found = by_name[segment_name(number)]
            if found.state in _USABLE:
                reached = (found.num_bytes - SEGMENT_HEADER_BYTES) // geometry.shape.slot_bytes
                present[ordinal] = min(max(reached, 0), geometry.slots_of(ordinal))
        return present

    # ---- pages

    def _verify(self, manifest: Manifest, recovered: Recovered, progress: Progress) -> Verified:
        verified = Verified()
        geometry, shape = manifest.geometry, manifest.geometry.shape
        index = Index(shape, geometry.num_slots)
        index.restore(recovered.rows, recovered.digests)
        digests = {int(slot): digest.tobytes() for slot, digest in zip(recovered.rows["slot"], recovered.digests)}
        rows = np.sort(recovered.rows, order="slot")
        scratch = Scratch(shape, 1)
        into = memoryview(bytearray(shape.page_bytes))
        ordinals = rows["slot"] // geometry.slots_per_segment
        for ordinal in np.unique(ordinals).tolist():
            name = segment_name(manifest.segments[ordinal])
            fd = self._files.open(name, READ_ONLY, directory_fd=self._fd)
            try:
                segment = self._segment(fd, manifest, ordinal)
                for row in rows[ordinals == ordinal]:
                    slot = int(row["slot"])
                    place = geometry.locate(slot)[1]
                    identity = PageIdentity(digests[slot], row["prefix"].tobytes(), row["tokens"].tobytes())
                    get = PageGet(
                        place, int(row["generation"]), identity, index.payload_sum(slot), index.layer_ends(slot), into
                    )
                    [finding] = segment.read_pages([get], scratch)
                    verified.num_pages += 1
                    verified.num_bytes += shape.page_bytes
                    verified.findings[finding] += 1
                    if finding is not Finding.OK and len(verified.examples) < MAX_EXAMPLES:
                        verified.examples.append(DamagedPage(slot, name, geometry.slot_offset(place), finding))
                    progress(verified.num_pages, rows.size)
            finally:
                self._files.close(fd)
        return verified

    def _segment(self, fd: int, manifest: Manifest, ordinal: int) -> SegmentFile:
        """The segment, for reading through the page cache."""
        return SegmentFile(
            self._files,
            fd,
            store=manifest.store,
            number=manifest.segments[ordinal],
            num_slots=manifest.geometry.slots_of(ordinal),
            geometry=manifest.geometry,
            direct=False,
            health=Health("inspection", self._clock),
        )


def _report_of(name: str, sizes: tuple[int, int], contents: LogContents, *, counts: bool) -> LogReport:
    state = FileState.COUNTS if counts else FileState.OLDER if contents.is_whole else FileState.UNFINISHED
    return LogReport(
        FileReport(name, state, *sizes),
        contents.header.number,
        contents.num_frames,
        contents.num_bytes,
        contents.sequence,
        contents.is_clean,
        contents.damage,
    )


def _silent(_done: int, _total: int) -> None:
    """Recovery takes less than a second of what verifying takes."""
