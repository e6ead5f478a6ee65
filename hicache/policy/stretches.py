"""What is remembered of prompts stretch by stretch, whatever nodes they lie in.

A node ends where a prompt ended or two prompts part. When pages leave and a later prompt brings them back, they are
inserted as one run up to the end of that prompt: a node that was never there before. So what should be known again when
it comes back is remembered by its place in the prompt instead. A prompt is cut every `stride` pages from its beginning;
a stretch is named by a digest of everything up to its end. What is behind the last cut is a shorter stretch, which a
prompt that goes on has no more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Generic, TypeVar

from hicache.errors import BadRequest
from hicache.node import Node
from hicache.policy.history import RECORDS_MAX, History

DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece of a prompt."""

    digest: bytes
    """Of the namespace and all tokens up to its end."""
    num_pages: int


T = TypeVar("T")


def cut(path: Sequence[Node], stride: int) -> list[Stretch]:
    """The stretches of a prompt whose path begins at the root. Hashes all of it: about 1 ms for 500,000 tokens."""
    digest = path[0]._root.digest
    page_bytes = len(path[0]._key)
    data = b"".join([
        part
        for node in path
        for part in (node._key, node._buffer[node._start : node._start + (node._num_pages - 1) * page_bytes])
    ])
    found = []
    for at in range(0, len(data), stride * page_bytes):
        piece = data[at : at + stride * page_bytes]
        digest = blake2b(digest + piece, digest_size=DIGEST_BYTES).digest()
        found.append(Stretch(digest, len(piece) // page_bytes))
    return found


class Stretches(Generic[T]):
    """Records of stretches, at most `records_max`, and which of them each node lies in.

    Args:
        stride: pages of a stretch, at least 1.
        records_max: records kept, those used longest ago are forgotten; at least 1.

    Raises `BadRequest` naming what is out of bounds.
    """

    def __init__(self, *, stride: int = 1, records_max: int = RECORDS_MAX) -> None:
        for name, value in (("stride", stride), ("records_max", records_max)):
            if value < 1:
                raise BadRequest(name, f"{value} is not above 0")
        self.stride: Final = stride
        self._records: History[T] = History(records_max)
        self._of_nodes: History[list[T]] = History(records_max)

    def known(self, stretches: Sequence[Stretch]) -> list[T | None]:
        """What is remembered of each."""
        return [self._records.find(stretch.digest) for stretch in stretches]

    def keep(self, path: Sequence[Node], stretches: Sequence[Stretch], records: Sequence[T]) -> None:
        """Remember records of the stretches of a path, and which of them its nodes lie in."""
        # The tail first, so that it is forgotten first.
        for stretch, record in zip(reversed(stretches), reversed(records), strict=True):
            self._records.keep(stretch.digest, record)
        begins = 0
        for node in path:
            ends = begins + node.num_pages
            self._of_nodes.put(node, list(records[begins // self.stride : -(-ends // self.stride)]))
            begins = ends

    def of(self, node: Node) -> list[T]:
        """The records of the stretches that a node lies in; none if its use was not told, or is long forgotten."""
        return self._of_nodes.get(node) or []

    def split(self, upper: Node, lower: Node) -> None:
        """See `HearsShape`."""
        records = self._of_nodes.get(lower)
        if records is not None:
            share = upper.num_pages / (upper.num_pages + lower.num_pages) * len(records)
            self._of_nodes.put(upper, records[: -int(-share // 1)])
            self._of_nodes.put(lower, records[int(share) :])

    def joined(self, upper: Node, lower: Node) -> None:
        """See `HearsShape`."""
        above, below = self.of(upper), self.of(lower)
        if above or below:
            shared = bool(above and below and above[-1] is below[0])
            self._of_nodes.put(lower, above + below[shared:])
