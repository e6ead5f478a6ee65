"""The children of one node in order, so that the two neighbours of any key are found by bisection.

Keys are the packed tokens of a child's first page. They are ordered as bytes, which is not the order of token ids, but
keys that share k whole tokens still stand together: the key that shares most with a query is one of its two neighbours.

A sorted list cut into chunks: `add` and `discard` move at most `CHUNK` pointers, whatever the number of children.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import Final

CHUNK: Final = 1024
"""Most keys in one chunk; a fuller one is cut in half."""


class SiblingOrder:
    """A sorted set of keys.

    >>> order = SiblingOrder([b"abcd", b"abzz", b"xxxx"])
    >>> order.neighbours(b"abyy")
    (b'abcd', b'abzz')
    """

    __slots__ = ("_chunks", "_firsts")

    def __init__(self, keys: Iterable[bytes]) -> None:
        ordered = sorted(keys)
        half = CHUNK // 2
        self._chunks = [ordered[at : at + half] for at in range(0, len(ordered), half)]
        self._firsts = [chunk[0] for chunk in self._chunks]

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            yield from chunk

    def add(self, key: bytes) -> None:
        """Insert a key that is not there yet."""
        if not self._chunks:
            self._chunks, self._firsts = [[key]], [key]
            return
        at = max(0, bisect_right(self._firsts, key) - 1)
        chunk = self._chunks[at]
        insort(chunk, key)
        self._firsts[at] = chunk[0]
        if len(chunk) > CHUNK:
            upper = chunk[CHUNK // 2 :]
            del chunk[CHUNK // 2 :]
            self._chunks.insert(at + 1, upper)
            self._firsts.insert(at + 1, upper[0])

    def remove(self, key: bytes) -> None:
        """Take out a key that is there."""
        at = bisect_right(self._firsts, key) - 1
        chunk = self._chunks[at]
        del chunk[bisect_left(chunk, key)]
        if chunk:
            self._firsts[at] = chunk[0]
        else:
            del self._chunks[at], self._firsts[at]

    def neighbours(self, query: bytes) -> tuple[bytes | None, bytes | None]:
        """The largest key below `query` and the smallest one not below it; None where there is none."""
        chunks = self._chunks
        at = bisect_right(self._firsts, query) - 1
        if at < 0:
            return None, (chunks[0][0] if chunks else None)
        chunk = chunks[at]
        index = bisect_left(chunk, query)
        left = chunk[index - 1] if index else (chunks[at - 1][-1] if at else None)
        if index < len(chunk):
            return left, chunk[index]
        return left, (chunks[at + 1][0] if at + 1 < len(chunks) else None)
