"""Which prefixes a tenant has published to others, as an index beside the tree.

A publication is of a prefix of whole pages. A page is published while it is in the tree and some publication covers
it; the index keeps this true through every split, merge and departure:

1. The published nodes are exactly those on the paths from the root to the ends of publications: a node is published as
   a whole, and so is every node above it.
2. `below` names the published children of every published node and root, by key. Readers of other tenants descend
   through it and nothing else: they never come near a page that is not published.
3. Where the end of a publication leaves the tree, the publication ends at the node before it from then on; without any
   page left it is over.

Everything is reached from nodes, and whoever takes a node out of the tree calls `withdraw` first, so the index keeps
nothing alive.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from hicache.metadata import MAX_READERS
from hicache.node import PUBLISHED, Node, Root
from hicache.tokens import common_bytes

NOTHING: Final[Mapping[bytes, Node]] = {}


@dataclass(slots=True, eq=False)
class Publication:
    """One published prefix."""

    key: bytes
    """Chain digest of the prefix as it was published. It names the publication, never a page."""
    scope: bytes
    """Of whom may read it: `Namespace.scope`."""
    node: Node
    """Where it ends now."""
    readers: dict[str, float] = field(default_factory=dict)
    """When each other tenant last used a page of it, monotonic seconds: of the `MAX_READERS` that did last."""


class Published:
    """The index. Called by the tree alone; only this class sets and clears `PUBLISHED`."""

    def __init__(self, max_publications: int) -> None:
        self.max_publications: Final = max_publications
        self.publications: Final[dict[bytes, Publication]] = {}
        self.ends: Final[dict[Node, list[Publication]]] = {}
        self.below: Final[dict[Node, dict[bytes, Node]]] = {}
        self.publishers: Final[dict[bytes, dict[Root, int]]] = {}
        """By scope: whose trees have publications, and how many."""
        self.num_readers = 0

    def readable(self, scope: bytes, reader: Root | None) -> list[Root]:
        """The roots of other tenants that have something published in a scope."""
        return [root for root in self.publishers.get(scope, ()) if root is not reader]

    def descend(self, root: Root, raw: memoryview | bytes, num_bytes: int, page_bytes: int) -> tuple[
        list[Node], int, int
    ]:
        """As `Structure._descend`, over published nodes only."""
        path: list[Node] = []
        node: Node = root
        position = inside = 0
        while position + page_bytes <= num_bytes:
            child = self.below.get(node, NOTHING).get(bytes(raw[position : position + page_bytes]))
            if child is None:
                break
            node = child
            path.append(node)
            position += page_bytes
            limit = min((node._num_pages - 1) * page_bytes, (num_bytes - position) // page_bytes * page_bytes)
            common = common_bytes(node._buffer, node._start, raw, position, limit) // page_bytes
            position += common * page_bytes
            inside = 1 + common
            if inside < node._num_pages:
                break
        return path, position, inside

    def publish(self, key: bytes, scope: bytes, path: list[Node]) -> None:
        """Publish the pages of a path. A publication of the same prefix that has lost pages covers all again."""
        for node in path:
            parent = node._parent
            assert parent is not None, "a published node is in the tree"
            if not node._states & PUBLISHED:
                node._states |= PUBLISHED
                self.below.setdefault(parent, {})[node._key] = node
        end = path[-1]
        publication = self.publications.get(key)
        if publication is None:
            publication = self.publications[key] = Publication(key, scope, end)
            publishers = self.publishers.setdefault(scope, {})
            publishers[end._root] = publishers.get(end._root, 0) + 1
        else:
            self._leave_end(publication)
            publication.node = end
        self.ends.setdefault(end, []).append(publication)

    def unpublish(self, key: bytes) -> Node | None:
        """End a publication; returns where it ended, None when there is no such publication."""
        publication = self.publications.get(key)
        if publication is None:
            return None
        self._leave_end(publication)
        self._end(publication)
        node = publication.node
        while not isinstance(node, Root) and node not in self.ends and node not in self.below:
            parent = node._parent
            assert parent is not None, "a published node is in the tree"
            self.withdraw(node)
            node = parent
        return publication.node

    def withdraw(self, node: Node) -> None:
        """A published node without published children leaves, or is to be read by others no more."""
        parent = node._parent
        assert parent is not None, "withdrawn before it leaves"
        siblings = self.below[parent]
        del siblings[node._key]
        if not siblings:
            del self.below[parent]
        node._states &= ~PUBLISHED
        for publication in self.ends.pop(node, ()):
            if isinstance(parent, Root):
                self._end(publication)
            else:
                publication.node = parent
                self.ends.setdefault(parent, []).append(publication)

    def split(self, upper: Node, lower: Node) -> None:
        """A published node was split; publications that ended there end with the lower half, which is that node."""
        parent = upper._parent
        assert parent is not None, "just split"
        self.below[parent][upper._key] = upper
        self.below[upper] = {lower._key: lower}

    def merge(self, upper: Node, lower: Node) -> None:
        """Two published nodes, of which the upper one is nobody's end, were joined into the lower one."""
        parent = lower._parent
        assert parent is not None, "just merged"
        del self.below[upper]
        self.below[parent][lower._key] = lower

    def read(self, node: Node, scope: bytes, tenant: str, now: float) -> None:
        """Note that another tenant, who reads in a scope, used a node: for every publication that covers it."""
        for publication in self._covering(node):
            if publication.scope == scope:
                self.num_readers += tenant not in publication.readers
                publication.readers[tenant] = now
                if len(publication.readers) > MAX_READERS:
                    del publication.readers[min(publication.readers, key=lambda each: publication.readers[each])]
                    self.num_readers -= 1

    def _covering(self, node: Node) -> Iterator[Publication]:
        stack = [node] if node._states & PUBLISHED else []
        while stack:
            step = stack.pop()
            yield from self.ends.get(step, ())
            stack += self.below.get(step, NOTHING).values()

    def _leave_end(self, publication: Publication) -> None:
        others = self.ends[publication.node]
        others.remove(publication)
        if not others:
            del self.ends[publication.node]

    def _end(self, publication: Publication) -> None:
        del self.publications[publication.key]
        self.num_readers -= len(publication.readers)
        publishers = self.publishers[publication.scope]
        root = publication.node._root
        publishers[root] -= 1
        if not publishers[root]:
            del publishers[root]
            if not publishers:
                del self.publishers[publication.scope]
