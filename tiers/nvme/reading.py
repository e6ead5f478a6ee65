"""Read a log from its beginning to the first frame that is not whole. Alters nothing; everything read is untrusted.

A log that was being appended to when the power went ends in a frame that is torn, or in zeros, or in whatever the file
held before: none of it parses, so what was synced is a prefix of what is read. Whole frames behind a bad one say that
the damage lies in the middle: it is stated, and what follows it is not used, because it may build on what is lost.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.tiers.nvme.geometry import PageShape
from hicache.tiers.nvme.io import FileIO, read_fully
from hicache.tiers.nvme.records import (
    FREED_DTYPE,
    HEAD_BYTES,
    LOG_HEADER_BYTES,
    MAX_BODY_BYTES,
    MAX_SEQUENCE,
    Frame,
    LogHeader,
    RecordType,
    Rows,
    decode_budget,
    decode_frame,
    decode_log_header,
    decode_namespace,
    is_cut_off,
    row_dtype,
    table,
)

READ_BYTES: Final = 8 << 20
"""Read at once."""
_LONGEST_FRAME: Final = HEAD_BYTES + MAX_BODY_BYTES + 8
_EPOCH_AT: Final = HEAD_BYTES - 16

Positions = npt.NDArray[np.int64]


@dataclass
class LogContents:
    """What a log says."""

    header: LogHeader
    is_whole: bool = False
    """Whether the checkpoint's END was read."""
    is_clean: bool = False
    """Whether the last record says that the store was closed."""
    sequence: int = 0
    """The last change in it."""
    num_frames: int = 0
    num_bytes: int = LOG_HEADER_BYTES
    """Where the first frame would go that was not read."""
    damage: str = ""
    """What is wrong beyond a torn end; empty for nothing."""
    num_bad_records: int = 0
    """Whole frames with a body or a sequence that no program of this version writes."""
    budget: int | None = None
    """Level of the write budget, where one was kept."""
    namespaces: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    """Digest and record by number."""
    pages: list[Rows] = field(default_factory=list)
    page_positions: list[Positions] = field(default_factory=list)
    """The frame in which each of these pages stood."""
    freed: list[npt.NDArray[np.void]] = field(default_factory=list)
    freed_positions: list[Positions] = field(default_factory=list)


def read_log(
    files: FileIO, fd: int, shape: PageShape, progress: Callable[[int], None] = lambda _num_pages: None
) -> LogContents | None:
    """What the log in that file says; None where there is none. `progress` is told the pages read so far.

    Raises `OSError` where the device does.
    """
    reader = _Reader(files, fd)
    reader.fill()
    header = decode_log_header(reader.data)
    if header is None:
        return None
    contents = LogContents(header)
    reader.at = LOG_HEADER_BYTES
    batch = _Batch(shape)
    num_pages = 0
    while True:
        if reader.needs_more():
            num_pages += batch.flush(contents)
            progress(num_pages)
            reader.fill()
        frame = decode_frame(reader.data, reader.at, header.epoch, contents.num_frames)
        if frame is None or frame.sequence < contents.sequence:
            break
        if frame.sequence >= MAX_SEQUENCE:
            contents.num_bad_records += 1
        else:
            contents.sequence = frame.sequence
            if not batch.take(frame, contents):
                contents.num_bad_records += 1
        reader.at = frame.end
        contents.num_frames += 1
    num_pages += batch.flush(contents)
    progress(num_pages)
    contents.num_bytes = reader.offset
    if (later := sum(1 for _ in reader.later_frames(header.epoch, contents.num_frames))) > 0:
        contents.damage = f"frame {contents.num_frames} at byte {reader.offset} is damaged; {later} behind it not used"
    elif reader.is_cut_off(header.epoch, contents.num_frames):
        contents.damage = f"the file ends within the log, behind frame {contents.num_frames} at byte {reader.offset}"
    return contents


def read_log_header(files: FileIO, fd: int) -> LogHeader | None:
    """The header of the log in that file; None where there is none. Raises `OSError` where the device does."""
    block = memoryview(bytearray(LOG_HEADER_BYTES))
    return decode_log_header(block[: read_fully(files, fd, [block], 0)])


class _Reader:
    """A window on a file that moves forward; `at` is where the next frame begins in it."""

    def __init__(self, files: FileIO, fd: int) -> None:
        self._files = files
        self._fd = fd
        self._start = 0
        self._at_end = False
        self.data = memoryview(b"")
        self.at = 0

    @property
    def offset(self) -> int:
        """Where the next frame begins in the file."""
        return self._start + self.at

    def needs_more(self) -> bool:
        """Whether the next frame may reach beyond the window."""
        return not self._at_end and len(self.data) - self.at < _LONGEST_FRAME

    def fill(self) -> None:
        """Move the window so that it begins with the next frame."""
        rest = self.data[self.at :]
        window = memoryview(bytearray(len(rest) + READ_BYTES))
        window[: len(rest)] = rest
        begin = self._start + len(self.data)
        count = read_fully(self._files, self._fd, [window[len(rest) :]], begin)
        self._at_end = count < READ_BYTES
        self._start += self.at
        self.data, self.at = window[: len(rest) + count], 0

    def is_cut_off(self, epoch: bytes, ordinal: int) -> bool:
        """Whether the file ends within the log, of which frame `ordinal` should come next."""
        return self._at_end and is_cut_off(self.data, self.at, epoch, ordinal)

    def later_frames(self, epoch: bytes, ordinal: int) -> Iterator[Frame]:
        """Whole frames of the log in the window, behind the place where frame `ordinal` should be."""
        data = bytes(self.data[self.at :])
        found = data.find(epoch)
        while found >= 0:
            at = found - _EPOCH_AT
            if at > 0:
                place = int.from_bytes(data[at + 12 : at + 16], "little")
                frame = decode_frame(memoryview(data), at, epoch, place) if place > ordinal else None
                if frame is not None:
                    yield frame
            found = data.find(epoch, found + 1)


class _Batch:
    """Bodies of a window, taken apart together: a frame costs no array of its own."""

    def __init__(self, shape: PageShape) -> None:
        self._row = row_dtype(shape)
        self._pages: list[memoryview] = []
        self._page_frames: list[int] = []
        self._freed: list[memoryview] = []
        self._freed_frames: list[int] = []

    def take(self, frame: Frame, contents: LogContents) -> bool:
        """Note what the frame says. False for a body that does not fit its type."""
        contents.is_clean = False
        match frame.type:
            case RecordType.PAGES if frame.body and len(frame.body) % self._row.itemsize == 0:
                self._pages.append(frame.body)
                self._page_frames.append(contents.num_frames)
            case RecordType.FREED if frame.body and len(frame.body) % FREED_DTYPE.itemsize == 0:
                self._freed.append(frame.body)
                self._freed_frames.append(contents.num_frames)
            case RecordType.NAMESPACE if (namespace := decode_namespace(frame.body)) is not None:
                number, digest, record = namespace
                contents.namespaces[number] = digest, record
            case RecordType.BUDGET if (level := decode_budget(frame.body)) is not None:
                contents.budget = level
            case RecordType.END if not frame.body:
                contents.is_whole = True
            case RecordType.CLEAN if not frame.body:
                contents.is_clean = True
            case _:
                return False
        return True

    def flush(self, contents: LogContents) -> int:
        """Hand over what was taken; how many pages it was."""
        num_pages = 0
        if self._pages:
            rows = table(self._pages, self._row)
            counts = [len(body) // self._row.itemsize for body in self._pages]
            contents.pages.append(rows)
            contents.page_positions.append(np.repeat(np.array(self._page_frames, np.int64), counts))
            num_pages = rows.size
        if self._freed:
            counts = [len(body) // FREED_DTYPE.itemsize for body in self._freed]
            contents.freed.append(table(self._freed, FREED_DTYPE))
            contents.freed_positions.append(np.repeat(np.array(self._freed_frames, np.int64), counts))
        for taken in (self._pages, self._freed):
            taken.clear()
        for frames in (self._page_frames, self._freed_frames):
            frames.clear()
        return num_pages
