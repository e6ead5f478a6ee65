"""The records of a log, as bytes. `tiers/FORMAT.md` is the description, with an example.

    log    := log header (4,096 bytes)  frame*
    frame  := head (40 bytes)  body  zeros up to a multiple of 8

A frame's head carries the log's random epoch, the frame's place in the log and a CRC32C over all of it, so that nothing
parses but what was appended here, in this life of the file. Every record says an **absolute** state of slots, never a
change: reading a log once or twice, or from a state that it has already, gives the same.

Everything read is untrusted: lengths are checked before they are used.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache.namespace import MAX_RECORD_BYTES
from hicache.tiers.nvme.geometry import BLOCK, CRC_BYTES, Geometry, PageShape
from hicache.tiers.nvme.header import DIGEST_BYTES, FORMAT_VERSION, checksum

LOG_MAGIC: Final = b"HICJRNL\0"
EPOCH_BYTES: Final = 16
LOG_HEADER_BYTES: Final = BLOCK
MAX_BODY_BYTES: Final = 1 << 20
"""Longest body of a frame."""
MAX_SEQUENCE: Final = 1 << 62
"""No store lives to see this number of a change, and every number below leaves room for more."""
MAX_STEP_SLOTS: Final = 4096
"""Most slots that one step of a checkpoint looks at."""

Rows = npt.NDArray[np.void]
"""Pages as the index keeps them, one `row_dtype` each."""

_HEAD: Final = struct.Struct("<IIHHIQ16s")
_LOG: Final = struct.Struct("<8s4H16s16sQ")
_CRC: Final = struct.Struct("<I")
_NAMESPACE: Final = struct.Struct("<II32s")
_BUDGET: Final = struct.Struct("<q")

HEAD_BYTES: Final = _HEAD.size
FREED_DTYPE: Final = np.dtype([("slot", "<u4"), ("zero", "<u4"), ("generation", "<u8")])
"""A slot that holds no page, and its generation."""


class RecordType(IntEnum):
    NAMESPACE = 1
    """A namespace's record, under the number that pages of this log name it by."""
    PAGES = 2
    """Pages that lie in their slots, synced."""
    FREED = 3
    """Slots that hold no page, with their generations."""
    BUDGET = 4
    """Bytes that may still be written before the write budget refuses."""
    END = 5
    """The checkpoint is whole; what follows is the journal."""
    CLEAN = 6
    """The store was closed, and everything accepted is in this log."""


@cache
def row_dtype(shape: PageShape) -> np.dtype[np.void]:
    """One page in a PAGES record, little-endian, without gaps."""
    return np.dtype([
        ("slot", "<u4"),
        ("namespace", "<u4"),
        ("generation", "<u8"),
        ("codec", "<u2"),
        ("zero", "<u2"),
        ("stored_bytes", "<u4"),
        ("prefix", "u1", (DIGEST_BYTES,)),
        ("tokens", "<i4", (shape.page_size,)),
        ("words", "<u4", (shape.num_words,)),
    ])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Record:
    """A record that is to be appended."""

    type: RecordType
    body: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of its frame."""
        return frame_bytes(len(self.body))


def frame_bytes(body_bytes: int) -> int:
    """Bytes of a frame around a body of so many."""
    return HEAD_BYTES + -(-body_bytes // 8) * 8


def namespace_record(number: int, digest: bytes, record: bytes) -> Record:
    return Record(RecordType.NAMESPACE, _NAMESPACE.pack(number, len(record), digest) + record)


def pages_records(rows: Rows) -> list[Record]:
    """The rows in as many records as it takes."""
    share = MAX_BODY_BYTES // rows.dtype.itemsize
    return [
        Record(RecordType.PAGES, rows[start : start + share].tobytes()) for start in range(0, rows.size, share)
    ]


def freed_records(slots: npt.NDArray[np.int64], generations: npt.NDArray[np.int64]) -> list[Record]:
    """The empty slots in as many records as it takes."""
    table = np.zeros(slots.size, FREED_DTYPE)
    table["slot"] = slots
    table["generation"] = generations
    share = MAX_BODY_BYTES // FREED_DTYPE.itemsize
    return [
        Record(RecordType.FREED, table[start : start + share].tobytes()) for start in range(0, table.size, share)
    ]


def budget_record(level_bytes: int) -> Record:
    return Record(RecordType.BUDGET, _BUDGET.pack(level_bytes))


# ---- frames


def encode_frames(records: Sequence[Record], epoch: bytes, *, first: int, sequence: int) -> bytes:
    """The records' frames, one after the other. `first` is the place of the first frame in its log; `sequence` the
    last change that they hold."""
    parts = []
    for ordinal, record in enumerate(records, first):
        rest = _HEAD.pack(0, len(record.body), record.type, 0, ordinal, sequence, epoch)[CRC_BYTES:]
        padding = bytes(-len(record.body) % 8)
        crc = checksum(record.body + padding, checksum(rest))
        parts += [_CRC.pack(crc), rest, record.body, padding]
    return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Frame:
    """A record that was read."""

    type: int
    sequence: int
    body: memoryview
    end: int
    """Where the next frame begins in the buffer."""


def decode_frame(data: memoryview, at: int, epoch: bytes, ordinal: int) -> Frame | None:
    """The frame at `at` of `data`, or None if there is no whole frame of that log and place."""
    if len(data) - at < HEAD_BYTES:
        return None
    crc, length, kind, zero, found_ordinal, sequence, found_epoch = _HEAD.unpack_from(data, at)
    end = at + frame_bytes(length)
    if found_epoch != epoch or found_ordinal != ordinal or zero or length > MAX_BODY_BYTES or end > len(data):
        return None
    if checksum(data[at + CRC_BYTES : end]) != crc:
        return None
    return Frame(kind, sequence, data[at + HEAD_BYTES : at + HEAD_BYTES + length], end)


def is_cut_off(data: memoryview, at: int, epoch: bytes, ordinal: int) -> bool:
    """Whether a file that ends with `data` ends where a frame of the log should go on, or the next one begin. Logs have
    their full length from the beginning and are not filled to the end, so that the file was cut."""
    if len(data) - at < HEAD_BYTES:
        return True
    _, length, _, zero, found_ordinal, _, found_epoch = _HEAD.unpack_from(data, at)
    is_ours = found_epoch == epoch and found_ordinal == ordinal and not zero and length <= MAX_BODY_BYTES
    return is_ours and at + frame_bytes(length) > len(data)


def decode_namespace(body: memoryview) -> tuple[int, bytes, bytes] | None:
    """Number, digest and record; None for a body of other lengths, or with a record that has another digest."""
    if len(body) < _NAMESPACE.size:
        return None
    number, length, digest = _NAMESPACE.unpack_from(body)
    if length > MAX_RECORD_BYTES or len(body) != _NAMESPACE.size + length:
        return None
    record = bytes(body[_NAMESPACE.size :])
    return (number, digest, record) if hashlib.sha256(record).digest() == digest else None


def decode_budget(body: memoryview) -> int | None:
    """The level; None for a body of another length."""
    level: int | None = _BUDGET.unpack(body)[0] if len(body) == _BUDGET.size else None
    return level


def table(bodies: Sequence[memoryview], dtype: np.dtype[Any]) -> npt.NDArray[np.void]:
    """The rows of several bodies, each a multiple of the row's length."""
    return np.frombuffer(b"".join(bodies), dtype)


# ---- the header of a log


@dataclass(frozen=True, slots=True)
class LogHeader:
    """First block of a log."""

    store: bytes
    """Random id of this life of the directory, 16 bytes."""
    epoch: bytes
    """Random id of this life of the file, 16 bytes."""
    number: int
    """Counts the logs of a store; the whole log with the highest one is valid."""


def encode_log_header(header: LogHeader) -> bytes:
    block = bytearray(LOG_HEADER_BYTES)
    _LOG.pack_into(block, 0, LOG_MAGIC, FORMAT_VERSION, 0, 0, 0, header.store, header.epoch, header.number)
    _CRC.pack_into(block, LOG_HEADER_BYTES - CRC_BYTES, checksum(bytes(block[:-CRC_BYTES])))
    return bytes(block)


def decode_log_header(block: memoryview) -> LogHeader | None:
    """The header, or None if this is not one of this version."""
    if len(block) < LOG_HEADER_BYTES:
        return None
    crc_at = LOG_HEADER_BYTES - CRC_BYTES
    magic, version, *zeros, store, epoch, number = _LOG.unpack_from(block)
    if (magic, version, zeros) != (LOG_MAGIC, FORMAT_VERSION, [0, 0, 0]):
        return None
    if _CRC.unpack_from(block, crc_at)[0] != checksum(block[:crc_at]):
        return None
    return LogHeader(store, epoch, number)


# ---- how much room logs need


def step_slots(shape: PageShape) -> int:
    """Slots that one step of a checkpoint looks at: one record's worth."""
    return min(MAX_STEP_SLOTS, MAX_BODY_BYTES // row_dtype(shape).itemsize)


def checkpoint_bytes(geometry: Geometry) -> int:
    """Most bytes of a whole index in a log, namespaces' records left aside."""
    row = row_dtype(geometry.shape).itemsize
    records = 2 * -(-geometry.num_slots // step_slots(geometry.shape)) + 4
    return geometry.num_slots * max(row, FREED_DTYPE.itemsize) + records * (HEAD_BYTES + 8)


def namespace_room(geometry: Geometry) -> int:
    """Most bytes of namespaces' records that a log may hold."""
    return min(4 << 20, max(256 << 10, geometry.num_slots << 10))


def journal_room(geometry: Geometry) -> int:
    """Bytes of a log behind its checkpoint: as many as the checkpoint takes, within 256 KiB and 64 MiB."""
    return max(256 << 10, min(64 << 20, checkpoint_bytes(geometry)))


def round_bytes(geometry: Geometry) -> int:
    """Most bytes of pages and frees that one round of a group commit appends."""
    return min(1 << 20, journal_room(geometry) // 8)


def log_bytes(geometry: Geometry) -> int:
    """Size of a log file, whole blocks."""
    total = LOG_HEADER_BYTES + checkpoint_bytes(geometry) + namespace_room(geometry) + journal_room(geometry)
    return -(-total // BLOCK) * BLOCK


def chunks(geometry: Geometry) -> Iterator[tuple[int, int]]:
    """Half-open ranges of slots, one a step of a checkpoint."""
    step = step_slots(geometry.shape)
    for start in range(0, geometry.num_slots, step):
        yield start, min(geometry.num_slots, start + step)
