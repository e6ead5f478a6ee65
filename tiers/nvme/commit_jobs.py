"""The work of group commits that blocks: what one lane thread does between a decision of the event loop and the next.

See `commits`. Every job runs on the thread and lands on the loop; one is under way at a time.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.tiers.nvme.io import FileIO, Scratch, sync_data
from hicache.tiers.nvme.log import LogFile
from hicache.tiers.nvme.records import Record, RecordType

_log: Final = logging.getLogger(__name__)
Numbers = npt.NDArray[np.int64]


@dataclass
class Round:
    """Sync the segments, append the records, sync the log."""

    files: FileIO
    segments: Mapping[int, int]
    """Descriptor of each segment that pages of the round were written to, by ordinal."""
    active: LogFile
    fresh: LogFile | None
    """A log that is being written beside; it is not synced yet."""
    through: int
    """The last change in the round."""
    pages: Numbers
    """Slots that hold pages, as the round records them."""
    emptied: Numbers
    """Slots that hold none."""
    common: Sequence[Record]
    """Records that depend on no segment."""
    namespaces: Mapping[int, Record]
    """What a log must hold before the pages, by number."""
    by_segment: Mapping[int, Sequence[Record]]
    """Pages, by the ordinal of their segment."""
    landed: Callable[["Round"], None]
    failed_segments: dict[int, OSError] = field(default_factory=dict)
    """Segments whose sync failed: their pages are in no log."""
    log_error: OSError | None = None
    fresh_error: OSError | None = None

    def run(self, scratch: Scratch) -> None:
        for ordinal, fd in self.segments.items():
            try:
                sync_data(self.files, fd)
            except OSError as error:
                self.failed_segments[ordinal] = error
        try:
            self._append(self.active)
            self.active.sync()
        except OSError as error:
            self.log_error = error
            return
        if self.fresh is not None:
            try:
                self._append(self.fresh)
            except OSError as error:
                self.fresh_error = error

    def _append(self, log: LogFile) -> None:
        missing = {number: record for number, record in self.namespaces.items() if number not in log.namespaces}
        pages = [
            record
            for ordinal, records in self.by_segment.items()
            if ordinal not in self.failed_segments
            for record in records
        ]
        log.append([*missing.values(), *self.common, *pages], self.through)
        log.namespaces.update(missing)

    def land(self, error: Exception | None) -> None:
        if error is not None:
            self.log_error = OSError(0, str(error) or type(error).__name__)
        self.landed(self)


@dataclass
class Step:
    """One part of a fresh log: its beginning, some records, or its end."""

    log: LogFile
    records: Sequence[Record]
    sequence: int
    begin: int | None
    """Begin the log with this number."""
    namespaces: frozenset[int]
    """Namespaces whose records are among the records."""
    is_end: bool
    """End the checkpoint, and sync."""
    retired: LogFile | None
    """The log that counts no more then."""
    landed: Callable[["Step"], None]
    error: OSError | None = None

    def run(self, scratch: Scratch | None) -> None:
        try:
            if self.begin is not None:
                self.log.begin(self.begin)
            self.log.append(self.records, self.sequence)
            self.log.namespaces |= self.namespaces
            if self.is_end:
                self.log.end_checkpoint(self.sequence)
        except OSError as error:
            self.error = error
            with contextlib.suppress(OSError):
                # What is not on the medium must not look whole to the next process either.
                self.log.retire()
            return
        if self.retired is not None:
            try:
                self.retired.retire()
            except OSError as error:
                # The fresh log counts all the same: it has the higher number.
                _log.warning("the header of an old log could not be overwritten: %s", error.strerror)

    def land(self, error: Exception | None) -> None:
        if error is not None:
            self.error = OSError(0, str(error) or type(error).__name__)
        self.landed(self)


@dataclass
class Closing:
    """The last record of a log."""

    log: LogFile
    sequence: int
    _future: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def run(self, scratch: Scratch) -> None:
        try:
            self.log.append([Record(RecordType.CLEAN, b"")], self.sequence)
            self.log.sync()
        except OSError as error:
            _log.warning("the mark of a clean stop could not be written: %s", error.strerror)

    def land(self, error: Exception | None) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def done(self) -> None:
        await self._future
