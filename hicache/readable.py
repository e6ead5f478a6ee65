"""What tenants may read of each other, as one tree a scope over the pages of all publishers.

A reader's lookup must cost the same however many tenants publish and however much. So it does not go through their
trees: it descends through this one, which knows published pages and nothing else, each once, whoever published it. A
`Run` is a line of such pages that the same publications cover. A run is cut where one of them ends or leaves the
others, and joined again when that is over.

The tokens of published pages are kept here once more. Nodes play no part: what is split, joined or moved in the
publishers' trees changes nothing here.
"""

from typing import TYPE_CHECKING, Final

from hicache.collector import put, untrack
from hicache.sortedchunks import ORDER_FROM, SortedChunks
from hicache.tokens import TOKEN_BYTES, common_bytes, most_shared

if TYPE_CHECKING:
    from hicache.published import Publication


class Run:
    """Pages that the same publications cover. The run without pages is where prompts begin."""

    __slots__ = ("children", "covering", "key", "num_pages", "order", "parent", "rest")

    def __init__(self, parent: "Run | None", key: bytes, rest: bytes, num_pages: int) -> None:
        self.parent = parent
        self.key = key
        """Its first page."""
        self.rest = rest
        """The pages after it."""
        self.num_pages = num_pages
        self.children: dict[bytes, Run] = {}
        self.order: SortedChunks[bytes] | None = None
        self.covering: dict[Publication, None] = {}
        """In the order in which they were published."""
        for part in (self, self.children, self.covering):
            untrack(part)

    def publication(self) -> "Publication":
        """One of those that cover the run: the one published first."""
        return next(iter(self.covering))


class Readable:
    """The runs of one scope. Called by `Published` and by the tree's `match`."""

    def __init__(self, page_bytes: int) -> None:
        self.root: Final = Run(None, b"", b"", 0)
        self.num_bytes = 0
        """Of the tokens of all pages, each once."""
        self._page_bytes: Final = page_bytes
        untrack(self)

    # -- reading ------------------------------------------------------------------------------------------------------

    def descend(self, raw: memoryview | bytes, num_bytes: int) -> tuple[Run, int, int]:
        """The run in which `raw` ends to be published, the bytes that match (whole pages), pages of that run."""
        page_bytes = self._page_bytes
        run, position = self.root, 0
        while position + page_bytes <= num_bytes:
            child = run.children.get(bytes(raw[position : position + page_bytes]))
            if child is None:
                break
            run = child
            position += page_bytes
            limit = min(len(run.rest), (num_bytes - position) // page_bytes * page_bytes)
            common = common_bytes(run.rest, 0, raw, position, limit) // page_bytes
            position += common * page_bytes
            if 1 + common < run.num_pages:
                return run, position, 1 + common
        return run, position, run.num_pages

    def partial(self, run: Run, inside: int, raw: memoryview | bytes, position: int, num_bytes: int) -> tuple[Run, int]:
        """Of the pages that follow the first `inside` ones of a run, the run of the one that shares most tokens with
        `raw[position:]`, and how many; 0 for none."""
        limit = min(self._page_bytes, num_bytes - position)
        if inside < run.num_pages:
            start = (inside - 1) * self._page_bytes
            return run, common_bytes(run.rest, start, raw, position, limit) // TOKEN_BYTES
        if run.order is None and len(run.children) > 1:
            run.order = SortedChunks(run.children)
        keys = run.children if run.order is None else run.order.neighbours(bytes(raw[position : position + limit]))
        best, most = most_shared(keys, raw, position, limit)
        return (run.children[best], most) if best is not None else (run, 0)

    # -- changing -----------------------------------------------------------------------------------------------------

    def cover(self, publication: "Publication", raw: bytes) -> None:
        """A publication covers exactly the pages of `raw` from now on; it covered the first of them, or none."""
        run, at, before = self.root, 0, publication.run
        while at < len(raw):
            first = at + self._page_bytes
            child = run.children.get(raw[at:first])
            if child is None:
                child = Run(run, raw[at:first], raw[first:], (len(raw) - at) // self._page_bytes)
                self._link(run, child)
                self.num_bytes += len(raw) - at
                at = len(raw)
            else:
                limit = min(len(child.rest), len(raw) - first)
                common = 1 + common_bytes(child.rest, 0, raw, first, limit) // self._page_bytes
                if common < child.num_pages:
                    child = self._split(child, common)
                at += common * self._page_bytes
            put(child.covering, publication, None)
            run = child
        publication.run, publication.num_pages = run, len(raw) // self._page_bytes
        if before is not run:
            self._join(before)  # it ended there, and does not any more

    def cut(self, publication: "Publication", num_pages: int) -> None:
        """A publication covers no more than its first `num_pages` pages from now on."""
        run, end = publication.run, publication.num_pages
        while end > num_pages:
            begins = end - run.num_pages
            above = self._split(run, num_pages - begins) if begins < num_pages else run.parent
            assert above is not None, "a publication covers no more pages than there are above its end"
            del run.covering[publication]
            if run.covering:
                self._join(run)
            else:
                del above.children[run.key]
                self.num_bytes -= run.num_pages * self._page_bytes
                if above.order is not None:
                    above.order.remove(run.key)
                run.parent = None
            run, end = above, max(begins, num_pages)
        publication.run, publication.num_pages = run, num_pages
        self._join(run)

    def clear(self) -> None:
        """Undo all references among runs and publications: the collector does not see them."""
        runs = [self.root]
        while runs:
            run = runs.pop()
            runs += run.children.values()
            run.parent = None
            run.children.clear()
            run.covering.clear()

    def _link(self, parent: Run, child: Run) -> None:
        put(parent.children, child.key, child)
        if parent.order is not None:
            parent.order.add(child.key)
        elif len(parent.children) >= ORDER_FROM:
            parent.order = SortedChunks(parent.children)

    def _split(self, run: Run, num_pages: int) -> Run:
        """Cut a run after its first pages; returns the upper part, which is new."""
        parent, border = run.parent, (num_pages - 1) * self._page_bytes
        assert parent is not None, "the run without pages is not cut"
        upper = Run(parent, run.key, run.rest[:border], num_pages)
        for publication in run.covering:
            put(upper.covering, publication, None)
        put(parent.children, upper.key, upper)
        run.key = run.rest[border : border + self._page_bytes]
        run.rest = run.rest[border + self._page_bytes :]
        run.num_pages -= num_pages
        run.parent = upper
        put(upper.children, run.key, run)
        return upper

    def _join(self, run: Run) -> None:
        """Join a run with the one below it, which lives on, where the same publications cover both."""
        if run.parent is None or len(run.children) != 1:
            return
        (child,) = run.children.values()
        # What covers the child covers the run: as many are the same.
        if len(child.covering) == len(run.covering):
            child.rest = run.rest + child.key + child.rest
            child.key = run.key
            child.num_pages += run.num_pages
            child.parent = run.parent
            put(run.parent.children, child.key, child)
            run.parent = None
            run.children.clear()
            run.covering.clear()
