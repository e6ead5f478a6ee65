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
"""For so long a call may follow the look-up that it belongs to."""
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


class Asked(NamedTuple):
    """One call for a prompt."""

    at_s: float
    session: int
    num_tokens: int
    ids: "array[int]"
    """Of its whole blocks."""
    num_found: int
    """Tokens that were cached."""
    first_page: int | None
    """From where on pages were acquired; None for a look-up."""

    def begins_with(self, other: "Asked") -> bool:
        """Whether the other prompt is this one, or its beginning, as far as whole blocks tell."""
        size = len(other.ids)
        known = self.ids[size - 1 : size] == other.ids[-1:] if size else not self.ids
        return known and self.num_tokens >= other.num_tokens


class Requests:
    """Tells which calls are one request. Some engines look a prompt up, perhaps again while it waits, and then acquire
    what there is, perhaps in several parts; others acquire at once. So these begin no request of their own:

    - a look-up that a session makes again, which finds no more than before, while nobody has acquired the prompt;
    - an acquire that follows a look-up of the same prompt, or of a longer one: one for each look-up;
    - an acquire of further pages of what the session has acquired last.
    """

    def __init__(self) -> None:
        self._waiting: Final[deque[Asked]] = deque(maxlen=MAX_WAITING)
        self._acquired: Final[dict[int, Asked]] = {}

    def is_new(self, asked: Asked) -> bool:
        """Whether a call begins a request; calls are in order of time."""
        while self._waiting and self._waiting[0].at_s < asked.at_s - SAME_S:
            self._waiting.popleft()
        if asked.first_page is None:
            return self._is_new_look_up(asked)
        last = self._acquired.get(asked.session)
        self._acquired[asked.session] = asked
        for index, each in enumerate(self._waiting):
            if each.begins_with(asked):
                del self._waiting[index]
                return False
        return not (asked.first_page and last is not None and last.begins_with(asked))

    def _is_new_look_up(self, asked: Asked) -> bool:
        before = next((each for each in self._waiting if _is_again(asked, each)), None)
        self._waiting.append(asked)
        if before is not None:
            self._waiting.remove(before)
        return before is None


def _is_again(asked: Asked, before: Asked) -> bool:
    same = (asked.session, asked.num_tokens) == (before.session, before.num_tokens)
    return same and asked.num_found <= before.num_found and asked.begins_with(before)


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
