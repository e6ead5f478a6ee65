"""Traces as `hicache trace record` writes them and `readers` reads them: one JSON a request.

    timestamp      milliseconds since the recording began
    input_length   tokens of the prompt
    output_length  0: a cache is not told how long an answer becomes
    block_size     tokens of a block, the same in every line
    hash_ids       one number a whole block, for it and everything before it, of one namespace
    found          tokens that were cached, by the fastest tier that had them
    tokens         the token ids themselves, only where they were asked for

The numbers are digests under a key that is made for one recording and written nowhere. So equal prefixes have equal
numbers within a recording, nobody can tell from them which tokens they stand for, and two recordings have nothing in
common. Digests are cut to 53 bits, which every reader of JSON keeps exactly: of 20 million different blocks, two are
taken for one with a probability of two in a hundred.
"""

import json
import os
import secrets
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple, Self

ID_MAX: Final = (1 << 53) - 1
"""Largest number of a block."""
SAME_S: Final = 60.0
"""For so long an acquire may follow the look-up that it belongs to."""
MAX_WAITING: Final = 4096
"""Look-ups whose acquires may still come."""


class BlockIds:
    """The numbers of blocks in one recording."""

    def __init__(self, block_tokens: int, key: bytes | None = None) -> None:
        """`key`: 32 bytes; None for new ones."""
        self._block_bytes: Final = 4 * block_tokens
        self._key: Final = secrets.token_bytes(32) if key is None else key

    def of(self, namespace: bytes, tokens: bytes) -> "array[int]":
        """One for each whole block of a prompt; `tokens` are its ids, packed int32."""
        running, ids = blake2b(namespace, key=self._key, digest_size=8), array("q")
        for start in range(0, len(tokens) - self._block_bytes + 1, self._block_bytes):
            running.update(tokens[start : start + self._block_bytes])
            ids.append(int.from_bytes(running.copy().digest(), "little") & ID_MAX)
        return ids


class _Waiting(NamedTuple):
    at_s: float
    num_tokens: int
    ids: "array[int]"


class Requests:
    """Tells which look-ups and acquires are one request: some engines look first and then acquire what there is, others
    acquire at once. An acquire that follows a look-up of the same prompt, or of a longer one, belongs to it."""

    def __init__(self) -> None:
        self._waiting: Final[deque[_Waiting]] = deque(maxlen=MAX_WAITING)

    def is_new(self, at_s: float, num_tokens: int, ids: "array[int]", *, is_acquire: bool) -> bool:
        """Whether what is asked at `at_s`, never before what was asked last, begins a request."""
        while self._waiting and self._waiting[0].at_s < at_s - SAME_S:
            self._waiting.popleft()
        if not is_acquire:
            self._waiting.append(_Waiting(at_s, num_tokens, ids))
            return True
        for index, each in enumerate(self._waiting):
            known = each.ids[len(ids) - 1 : len(ids)] == ids[-1:] if ids else not each.ids
            if known and each.num_tokens >= num_tokens:
                del self._waiting[index]
                return False
        return True


def line(
    at_s: float, num_tokens: int, block_tokens: int, ids: Sequence[int], found: Mapping[str, int],
    tokens: Sequence[int] | None = None,
) -> bytes:  # fmt: skip
    """A request as it is written, with the end of its line."""
    shown: dict[str, object] = {
        "timestamp": round(1000 * at_s, 3), "input_length": num_tokens, "output_length": 0,
        "block_size": block_tokens, "hash_ids": list(ids), "found": dict(found),
    }  # fmt: skip
    if tokens is not None:
        shown["tokens"] = list(tokens)
    return json.dumps(shown, separators=(",", ":")).encode() + b"\n"


class TraceFile:
    """A file of whole lines that never has more than `max_bytes`. With `max_files` above 1 a full one is kept beside it
    as PATH.1, the one before as PATH.2, up to as many files in all, and the oldest is removed.

    Raises `OSError` as opening and writing do; what a failed write has left of a line is taken away again.
    """

    def __init__(self, path: Path, *, max_bytes: int, max_files: int) -> None:
        self.path: Final = path
        self.num_bytes = 0
        """Of the file that is written now."""
        self._max_bytes: Final = max_bytes
        self._max_files: Final = max_files
        self._descriptor = self._opened()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def files(self) -> list[Path]:
        """What there is, oldest first."""
        kept = [self.kept(self.path, number) for number in range(self._max_files - 1, 0, -1)]
        return [path for path in (*kept, self.path) if path.exists()]

    @staticmethod
    def kept(path: Path, number: int) -> Path:
        """Where a full file is kept: `number` 1 for the last one."""
        return path.with_name(f"{path.name}.{number}")

    def fits(self, data: bytes) -> bool:
        """Whether a file can have a line at all."""
        return len(data) <= self._max_bytes

    def write(self, data: bytes) -> bool:
        """Write a line that `fits`; False where all files are full."""
        if self.num_bytes + len(data) > self._max_bytes:
            if self._max_files == 1:
                return False
            self._close()
            for number in range(self._max_files - 1, 1, -1):
                if self.kept(self.path, number - 1).exists():
                    self.kept(self.path, number - 1).replace(self.kept(self.path, number))
            self.path.replace(self.kept(self.path, 1))
            self._descriptor, self.num_bytes = self._opened(), 0
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            os.ftruncate(self._descriptor, self.num_bytes)
            raise
        self.num_bytes += len(data)
        return True

    def _opened(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _close(self) -> None:
        try:
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
