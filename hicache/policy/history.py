"""What is remembered of prefixes, also after their pages have left.

A policy that has seen a prefix before knows more about it than its age. Records are found by the digest of the chain
from the root to a node's end (`prefix_of`), so a node that comes back meets its own past; or, as part of a longer run,
that of its beginning (`History.within`). The memory is bounded: the records that were used longest ago are forgotten.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

from hicache.collector import put, untrack
from hicache.node import Node
from hicache.tier import chain_digest

RECORDS_MAX: Final = 1 << 18
"""Records kept by default. At about 300 bytes each, 80 MB when it is full."""

T = TypeVar("T")


def prefix_of(node: Node) -> bytes:
    """Digest of the tokens from the root to the end of a live node; kept with the node, so a path is hashed once."""
    if node._chain is not None:
        return node._chain
    unknown: list[Node] = []
    step: Node | None = node
    while step is not None and step._chain is None:
        unknown.append(step)
        step = step._parent
    assert step is not None, "a node that left the tree has no prefix"
    chain = step._chain
    assert chain is not None, "the way up ends at a digest"
    for each in reversed(unknown):
        page_bytes = len(each._key)
        data = each._key + each._buffer[each._start : each._start + (each._num_pages - 1) * page_bytes]
        for at in range(0, len(data), page_bytes):
            chain = chain_digest(chain, data[at : at + page_bytes])
        each._chain = chain
    return chain


def _prefixes_in(node: Node) -> Iterator[bytes]:
    """Digests of the prefixes that end with each page of a live node, in order."""
    above = node._parent
    assert above is not None, "a node that left the tree has no prefix"
    chain, page_bytes = prefix_of(above), len(node._key)
    data = node._key + node._buffer[node._start : node._start + (node._num_pages - 1) * page_bytes]
    for at in range(0, len(data), page_bytes):
        chain = chain_digest(chain, data[at : at + page_bytes])
        yield chain


class History(Generic[T]):
    """Records by prefix, at most `records_max` of them."""

    def __init__(self, records_max: int = RECORDS_MAX) -> None:
        self._records: OrderedDict[bytes, T] = OrderedDict()
        self._records_max = records_max
        untrack(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, node: Node) -> T | None:
        """What is known of the prefix that ends with a node."""
        return self.find(prefix_of(node))

    def find(self, prefix: bytes) -> T | None:
        """What is known of a prefix by its digest."""
        return self._records.get(prefix)

    def within(self, node: Node) -> T | None:
        """What is known of the longest prefix that ends in a node, at its end or before. What left the tree and comes
        back with more behind it is one run with that. Hashes the node page by page where its end is not known, so it is
        for new ones."""
        known = [record for _, record in self.parts(node) if record is not None]
        return known[-1] if known else None

    def parts(self, node: Node) -> list[tuple[int, T | None]]:
        """The pages of a node, cut where a known prefix ends: how many, and what is known of the prefix that ends
        there, in order; None for those behind the last one. A node whose end is known is one part. Costs as `within`.
        """
        # Nodes that stand for others, in a shadow or a replay, have a digest and no pages to hash.
        prefixes = None
        if node._chain is None:
            prefixes = list(_prefixes_in(node))
            node._chain = prefixes[-1]
        at_end = self.get(node)
        if at_end is not None:
            return [(node.num_pages, at_end)]
        parts, before = list[tuple[int, T | None]](), 0
        for place, prefix in enumerate(prefixes or _prefixes_in(node), 1):
            record = self._records.get(prefix)
            if record is not None:
                parts.append((place - before, record))
                before = place
        if before < node.num_pages:
            parts.append((node.num_pages - before, None))
        return parts

    def put(self, node: Node, record: T) -> None:
        """Remember it; counts as the newest record."""
        self.keep(prefix_of(node), record)

    def keep(self, prefix: bytes, record: T) -> None:
        """`put` for a prefix by its digest."""
        put(self._records, prefix, record)
        self._records.move_to_end(prefix)
        if len(self._records) > self._records_max:
            self._records.popitem(last=False)
