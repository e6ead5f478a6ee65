"""What the store finds when it looks at one page, and the outcome that callers are told."""

import threading
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import Final

from hicache.tier import Outcome


class Finding(Enum):
    """One page of one request, in more detail than `Outcome`. The values name counters."""

    # Members are one of a kind. What `Enum` hashes by is their name, in Python, which shows where pages are counted.
    __hash__ = object.__hash__

    OK = "ok"
    FREED = "freed"
    """The slot's generation in memory is another one, before or after the copy."""
    EMPTY = "empty"
    """Nothing was written to this life of the slot, or its last write failed."""
    OTHER_PAGE = "other_page"
    """The slot holds another page than the one asked, by the index in memory or by a whole header on disk."""
    OLDER_LIFE = "older_life"
    """A whole header of another generation lies on disk: the write of this one was lost."""
    BAD_HEADER = "bad_header"
    """The header's checksum, magic, version, lengths or codec are wrong: torn, flipped or never written."""
    MISPLACED = "misplaced"
    """A whole header that belongs elsewhere: another store, segment or slot. The device wrote to the wrong place."""
    OTHER_PAYLOAD = "other_payload"
    """A whole header with another payload checksum than the one written: an earlier write of the same page, or a later
    one that was never acknowledged."""
    BAD_PAYLOAD = "bad_payload"
    """The payload fails its checksum."""
    SPOILT = "spoilt"
    """The page that was to be written is no longer that of which its checksums were taken, in host memory."""
    SHORT = "short"
    """The file ends inside the page."""
    DEVICE_ERROR = "device_error"
    """The device failed, with an errno."""
    INCOMPRESSIBLE = "incompressible"
    """The codec does not make the page short enough for its slot, or cannot represent it."""
    LOSSY_REFUSED = "lossy_refused"
    """The tier's codec is lossy, and the page's namespace does not name it."""
    CLOSED = "closed"
    """The tier was closed, or the system gives it no thread."""
    BUG = "bug"
    """A copy raised what no device raises; logged with its traceback."""


OUTCOMES: Final[Mapping[Finding, Outcome]] = {
    Finding.OK: Outcome.OK,
    Finding.FREED: Outcome.STALE,
    Finding.OLDER_LIFE: Outcome.STALE,
    Finding.EMPTY: Outcome.NOT_FOUND,
    Finding.OTHER_PAGE: Outcome.NOT_FOUND,
    Finding.BAD_HEADER: Outcome.CORRUPT,
    Finding.MISPLACED: Outcome.CORRUPT,
    Finding.OTHER_PAYLOAD: Outcome.CORRUPT,
    Finding.BAD_PAYLOAD: Outcome.CORRUPT,
    Finding.SPOILT: Outcome.CORRUPT,
    Finding.SHORT: Outcome.CORRUPT,
    Finding.DEVICE_ERROR: Outcome.ERROR,
    Finding.INCOMPRESSIBLE: Outcome.ERROR,
    Finding.LOSSY_REFUSED: Outcome.ERROR,
    Finding.CLOSED: Outcome.ERROR,
    Finding.BUG: Outcome.ERROR,
}


class Operation(Enum):
    __hash__ = object.__hash__

    WRITE = "write"
    READ = "read"
    READ_LAYER = "read_layer"


_BYTES: Final[Mapping[Operation, str]] = {
    Operation.WRITE: "write.device_bytes",
    Operation.READ: "read.bytes",
    Operation.READ_LAYER: "read_layer.bytes",
}
"""Names of what was moved: into the device, headers included and as it is stored; or into callers' buffers."""


class Counters:
    """How often what was found, since the tier was opened. Any thread may call."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[Operation, Finding]] = Counter()
        self._bytes: Counter[Operation] = Counter()
        self._lock = threading.Lock()

    def add(self, operation: Operation, finding: Finding, num_bytes: int = 0) -> None:
        """Count one page or layer; `num_bytes` are those that were moved."""
        with self._lock:
            self._counts[operation, finding] += 1
            self._bytes[operation] += num_bytes

    def snapshot(self) -> dict[str, int]:
        """All counters that are not zero, by names like `read.bad_payload` and `write.device_bytes`."""
        with self._lock:
            counts = {f"{operation.value}.{finding.value}": n for (operation, finding), n in self._counts.items()}
            counts |= {_BYTES[operation]: n for operation, n in self._bytes.items()}
        return {name: counts[name] for name in sorted(counts) if counts[name]}
