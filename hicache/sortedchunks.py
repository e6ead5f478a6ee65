"""A sorted set in chunks: neighbours by bisection, and a change moves few pointers however many members there are.

Kept outside the cyclic collector (`hicache.collector`), since it may have as many members as the tree has nodes.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from hicache.collector import untrack

if TYPE_CHECKING:
    from _typeshed import SupportsDunderLT

T = TypeVar("T", bound="SupportsDunderLT[Any]")

CHUNK: Final = 1024
"""Most members in one chunk; a fuller one is cut in half."""


ORDER_FROM: Final = 64
"""From this many siblings on, their order is kept with every change; below, it is made when a partial first asks."""


class SortedChunks(Generic[T]):
    """Members in ascending order.

    >>> order = SortedChunks([b"abcd", b"abzz", b"xxxx"])
    >>> order.neighbours(b"abyy")
    (b'abcd', b'abzz')
    """

    __slots__ = ("_chunks", "_firsts")

    def __init__(self, members: Iterable[T] = ()) -> None:
        ordered = sorted(members)
        half = CHUNK // 2
        self._chunks = [ordered[at : at + half] for at in range(0, len(ordered), half)]
        self._firsts = [chunk[0] for chunk in self._chunks]
        for part in (self, self._chunks, self._firsts, *self._chunks):
            untrack(part)

    def __iter__(self) -> Iterator[T]:
        for chunk in self._chunks:
            yield from chunk

    def add(self, member: T) -> None:
        """Insert a member that is not there yet."""
        if not self._chunks:
            self._chunks.append([member])
            self._firsts.append(member)
            untrack(self._chunks[0])
            return
        at = max(0, bisect_right(self._firsts, member) - 1)
        chunk = self._chunks[at]
        insort(chunk, member)
        self._firsts[at] = chunk[0]
        if len(chunk) > CHUNK:
            upper = chunk[CHUNK // 2 :]
            del chunk[CHUNK // 2 :]
            untrack(upper)
            self._chunks.insert(at + 1, upper)
            self._firsts.insert(at + 1, upper[0])

    def remove(self, member: T) -> None:
        """Take out a member that is there."""
        at = bisect_right(self._firsts, member) - 1
        chunk = self._chunks[at]
        del chunk[bisect_left(chunk, member)]
        if chunk:
            self._firsts[at] = chunk[0]
        else:
            del self._chunks[at], self._firsts[at]

    def following(self, member: T, limit: int) -> list[T]:
        """Up to `limit` members above `member`, from the least on: at least one where there is one."""
        at = max(0, bisect_right(self._firsts, member) - 1)
        for chunk in self._chunks[at : at + 2]:
            index = bisect_right(chunk, member)
            if index < len(chunk):
                return chunk[index : index + limit]
        return []

    def neighbours(self, query: T) -> tuple[T | None, T | None]:
        """The largest member below `query` and the smallest one not below it; None where there is none."""
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
