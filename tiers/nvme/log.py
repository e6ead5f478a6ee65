"""One of the two files that a store's logs are written to in turn: a checkpoint, and the journal behind it.

Both files are preallocated in full, so that a full disk stops neither. A log begins with a checkpoint of the whole
index; once its END record is synced it is *whole*, and the whole log with the highest number is the one that counts.
The other file is then retired (its header is overwritten by zeros) and waits for its next turn.

    file 0   [ header 7 | checkpoint | END | journal ........ ]      counts
    file 1   [ zeros    | what log 6 was ...                  ]      retired

Nothing of a file's earlier life can parse: every frame carries the epoch of its log, which is random.

Calls that move bytes block and are made by one thread at a time.
"""

import secrets
from collections.abc import Sequence
from typing import Final

from hicache.tiers.nvme.io import FileIO, read_fully, sync_data, write_fully
from hicache.tiers.nvme.records import (
    EPOCH_BYTES,
    LOG_HEADER_BYTES,
    LogHeader,
    Record,
    RecordType,
    encode_frames,
    encode_log_header,
)

LOG_NAMES: Final = ("hicache-0.log", "hicache-1.log")


class LogFile:
    """One file, open, and what it holds of the log that is written to it."""

    def __init__(self, files: FileIO, fd: int, *, store: bytes, num_bytes: int) -> None:
        self.fd = fd
        self.number = 0
        """Number of the log in it; 0 before the first."""
        self.position = 0
        """Where the next frame goes."""
        self.journal_at = 0
        """Where the checkpoint ended."""
        self.namespaces: set[int] = set()
        """Numbers of the namespaces whose records are in the log."""
        self.written_bytes = 0
        """What was written to the file since it was opened."""
        self._files = files
        self._store = store
        self._num_bytes = num_bytes
        self._epoch = b""
        self._ordinal = 0

    @property
    def room(self) -> int:
        """Bytes that can still be appended."""
        return self._num_bytes - self.position

    def begin(self, number: int) -> None:
        """Begin a new log over what the file holds. Raises `OSError`."""
        self.number, self._epoch, self._ordinal = number, secrets.token_bytes(EPOCH_BYTES), 0
        self.namespaces.clear()
        header = encode_log_header(LogHeader(self._store, self._epoch, number))
        self._write(header, 0)
        self.position = LOG_HEADER_BYTES

    def append(self, records: Sequence[Record], sequence: int) -> None:
        """Append records in one write, unsynced. Raises `OSError`; the log is then to be abandoned."""
        if not records:
            return
        data = encode_frames(records, self._epoch, first=self._ordinal, sequence=sequence)
        assert len(data) <= self.room, "a log was filled beyond its end"
        self._write(data, self.position)
        self.position += len(data)
        self._ordinal += len(records)

    def end_checkpoint(self, sequence: int) -> None:
        """The checkpoint is complete: make it durable. Raises `OSError`."""
        self.append([Record(RecordType.END, b"")], sequence)
        self.sync()
        self.journal_at = self.position

    def sync(self) -> None:
        """Make durable what was appended. Raises `OSError`; the log is then to be abandoned, not synced again."""
        sync_data(self._files, self.fd)

    def write_again(self, num_bytes: int) -> None:
        """Write what the file holds over itself, and sync. Raises `OSError`.

        After a sync that failed, the page cache shows bytes that the medium does not have and that no later sync would
        bring there: only writing does.
        """
        block = memoryview(bytearray(1 << 20))
        for start in range(0, num_bytes, len(block)):
            count = read_fully(self._files, self.fd, [block[: num_bytes - start]], start)
            self._write(block[:count], start)
        sync_data(self._files, self.fd)

    def retire(self) -> None:
        """Overwrite the header, and cut what an earlier, larger capacity needed: the log in this file counts no more.
        Raises `OSError`."""
        self.number = 0
        self._write(bytes(LOG_HEADER_BYTES), 0)
        if self._files.fstat(self.fd).st_size > self._num_bytes:
            self._files.ftruncate(self.fd, self._num_bytes)
        sync_data(self._files, self.fd)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        write_fully(self._files, self.fd, [memoryview(data)], offset)
        self.written_bytes += len(data)
