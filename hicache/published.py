"""Which prefixes a tenant has published to others, kept beside the tree.

A publication is of a prefix of whole pages. A page is published while it is in the tree and some publication covers
it; this keeps it true through every split, merge and departure:

1. The published nodes are exactly those on the paths from the root to the ends of publications: a node is published as
   a whole, and so is every node above it.
2. `below` names the published children of every published node and root, by key.
3. Where the end of a publication leaves the tree, the publication ends at the node before it from then on; without any
   page left it is over.
4. What readers of other tenants find is in `readable`, by scope: exactly the pages that publications of that scope
   cover (`hicache.readable`). They come near no other page.

Everything is reached from nodes, and whoever takes a node out of the tree calls `withdraw` first, so nothing is kept
alive. The collector sees none of it; `clear` undoes the references when the tree is dropped.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from hicache.collector import put, untrack
from hicache.metadata import MAX_READERS
from hicache.node import PUBLISHED, Node, Root
from hicache.readable import Readable, Run

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
    run: Run
    """Where it ends among what is readable."""
    num_pages: int = 0
    """Pages from the root that it covers now."""
    readers: dict[str, float] = field(default_factory=dict)
    """When each other tenant last used a page of it, monotonic seconds: of the `MAX_READERS` that did last."""

    def __post_init__(self) -> None:
        untrack(self)
        untrack(self.readers)


class Published:
    """The publications. Called by the tree alone; only this class sets and clears `PUBLISHED`."""

    def __init__(self) -> None:
        self.publications: Final[dict[bytes, Publication]] = {}
        self.ends: Final[dict[Node, list[Publication]]] = {}
        self.below: Final[dict[Node, dict[bytes, Node]]] = {}
        self.readable: Final[dict[bytes, Readable]] = {}
        self.num_readers = 0

    def publish(self, key: bytes, scope: bytes, path: list[Node], raw: bytes) -> None:
        """Publish the pages of a path, `raw` as tokens. A publication of the same prefix that has lost pages covers all
        again."""
        for node in path:
            parent = node._parent
            assert parent is not None, "a published node is in the tree"
            if not node._states & PUBLISHED:
                node._states |= PUBLISHED
                self._put_below(parent, node)
        end = path[-1]
        readable = self.readable.get(scope)
        if readable is None:
            readable = self.readable[scope] = Readable(len(node._key))
        publication = self.publications.get(key)
        if publication is None:
            publication = Publication(key, scope, end, readable.root)
            put(self.publications, key, publication)
        else:
            self._leave_end(publication)
            publication.node = end
        readable.cover(publication, raw)
        self._put_end(publication)

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
                self.readable[publication.scope].cut(publication, publication.num_pages - node._num_pages)
                publication.node = parent
                self._put_end(publication)

    def split(self, upper: Node, lower: Node) -> None:
        """A published node was split; publications that ended there end with the lower half, which is that node."""
        parent = upper._parent
        assert parent is not None, "just split"
        self._put_below(parent, upper)
        self._put_below(upper, lower)

    def merge(self, upper: Node, lower: Node) -> None:
        """Two published nodes, of which the upper one is nobody's end, were joined into the lower one."""
        parent = lower._parent
        assert parent is not None, "just merged"
        del self.below[upper]
        self._put_below(parent, lower)

    def read(self, node: Node, scope: bytes, tenant: str, now: float) -> None:
        """Note that another tenant, who reads in a scope, used a node: for every publication that covers it."""
        for publication in self._covering(node):
            if publication.scope == scope:
                self.num_readers += tenant not in publication.readers
                publication.readers[tenant] = now
                if len(publication.readers) > MAX_READERS:
                    del publication.readers[min(publication.readers, key=lambda each: publication.readers[each])]
                    self.num_readers -= 1

    def clear(self) -> None:
        """Undo all references: the tree is dropped."""
        for readable in self.readable.values():
            readable.clear()
        for part in (self.publications, self.ends, self.below, self.readable):
            part.clear()

    def _covering(self, node: Node) -> Iterator[Publication]:
        stack = [node] if node._states & PUBLISHED else []
        while stack:
            step = stack.pop()
            yield from self.ends.get(step, ())
            stack += self.below.get(step, NOTHING).values()

    def _put_below(self, parent: Node, node: Node) -> None:
        children = self.below.get(parent)
        if children is None:
            children = {}
            put(self.below, parent, children)
        put(children, node._key, node)

    def _put_end(self, publication: Publication) -> None:
        ends = self.ends.get(publication.node)
        if ends is None:
            ends = []
            untrack(ends)
            put(self.ends, publication.node, ends)
        ends.append(publication)

    def _leave_end(self, publication: Publication) -> None:
        others = self.ends[publication.node]
        others.remove(publication)
        if not others:
            del self.ends[publication.node]

    def _end(self, publication: Publication) -> None:
        del self.publications[publication.key]
        self.num_readers -= len(publication.readers)
        readable = self.readable[publication.scope]
        readable.cut(publication, 0)
        if not readable.root.children:
            del self.readable[publication.scope]
