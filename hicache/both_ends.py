"""A prefix from both ends: it is loaded from its back while the engine of a sequence computes it from its front.

What to load and what to compute was planned when the sequence was opened (`hicache.planner`), and is settled as things
turn out (`hicache.movers.meeting`). Here is the loading end, made of the cache's own moves, and what the computing end
asks of it. The two ranges of a match of n pages, which meet somewhere:

    [0, joined)     of the sequence: published pages, under its own lease
    [joined, n)     on NVMe or in the host, and coming: leased here, no part of the sequence before the front is there

The second lease is its own because it may break: where a page turns out to be damaged, it and everything below it leave
the tree, and the front goes on alone. What has come lies in the host and on the device as ordinary copies of pages that
the tree has anyway; whoever else wants them finds them there.
"""

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from hicache.errors import Closed, DeadlineExceeded, NotResident
from hicache.movers import Priority
from hicache.movers.meeting import Meeting
from hicache.node import Node
from hicache.planner import PageRange, Plan
from hicache.prefill import PrefillSpeed
from hicache.tier import DEVICE, HOST, NVME, TierId
from hicache.tree import Match

if TYPE_CHECKING:
    from hicache.cache import Cache, Moving

LOAD_PAGES: Final = 16
"""Most pages that one of the loaders asks for at a time."""
NUM_LOADERS: Final = 3
"""Loaders of one sequence: so many batches are on their way at a time."""
PATIENCE_S: Final = 2.0
"""How long a loader waits for room in a tier before its pages are computed instead, and how often one whose pages do
not come looks whether it is still wanted."""


class BothEnds:
    """The loading end of one sequence, and how far both have come. Belongs to the cache's loop.

    Args:
        match: what was found, up to where it is worth taking; of the sequence's own namespace.
        plan: how it is divided.
        prefill: what computing costs; learns from the steps of this sequence.
        chunk_tokens: most tokens that the engine computes in one step.
        owner: of the lease.
    """

    def __init__(
        self, cache: "Cache", match: Match, plan: Plan, *, prefill: PrefillSpeed, chunk_tokens: int, owner: str
    ) -> None:
        now = cache.clock.monotonic()
        page_size = cache.layout.page_size
        self.num_pages: Final = match.num_tokens // page_size
        """Pages of the match."""
        self._cache: Final = cache
        self._meeting: Final = Meeting(
            plan, page_size=page_size, prefill=prefill, chunk_tokens=chunk_tokens, load_pages=LOAD_PAGES, now=now
        )
        self._lease: Final = cache.tree.lease(match, owner=owner, deadline=None, now=now)
        if self._lease.node is not None:
            cache.tree.touch(self._lease.node, now)
        self._changed: Final = asyncio.Event()
        self._computing: PageRange | None = None
        self._computing_s = 0.0
        self._is_ended = False

    def start(self) -> None:
        """Begin to load. Raises `Closed`."""
        if self._cache.is_closing:
            raise Closed("the cache is closed")
        for number in range(NUM_LOADERS):
            self._cache.start(self._load_on(), name=f"load from the back {number}")

    @property
    def joined(self) -> int:
        """Pages from the root that are there without a gap."""
        return self.num_pages if self._meeting.is_over else self._meeting.joined

    @property
    def is_over(self) -> bool:
        """All of them are."""
        return self._meeting.is_over

    @property
    def num_computed(self) -> int:
        """Pages that were computed although they are cached."""
        return self._meeting.num_computed

    def end(self) -> None:
        """Load nothing more, and let go of what is not the sequence's. Copies under way end as they do. Idempotent."""
        if not self._is_ended:
            self._is_ended = True
            self._changed.set()
            self._cache.release(self._lease)

    # -- the computing end --------------------------------------------------------------------------------------------

    def next_compute(self) -> PageRange | float:
        """Pages to compute: everything before them is there; the same ones until `computed` has had all of them. Or
        seconds for which to `wait`, and then to ask again."""
        if self._computing is None:
            self._changed.clear()
            step = self._meeting.next_compute(self._cache.clock.monotonic())
            if not isinstance(step, PageRange):
                return step
            self._computing, self._computing_s = step, 0.0
        return self._computing

    @property
    def limit(self) -> int:
        """Pages from the root beyond which nothing is to be computed yet."""
        return self._computing.stop if self._computing is not None else self.joined

    def computed(self, num_pages: int, seconds: float) -> None:
        """A step took so many seconds; the first `num_pages` pages from the root are whole now."""
        self._computing_s += seconds
        if self._computing is not None and num_pages >= self._computing.stop:
            self._meeting.computed(self._computing, self._computing_s)
            self._computing = None

    async def wait(self, seconds: float) -> None:
        """Wait until something has come, or could not, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    # -- the loading end ----------------------------------------------------------------------------------------------

    async def _load_on(self) -> None:
        """One loader. The tasks of a cache raise nothing."""
        while not self._is_ended and (pages := self._meeting.next_load()) is not None:
            with suppress(Closed, DeadlineExceeded, NotResident):
                await self._hop(pages, NVME, HOST)
                await self._hop(pages, HOST, DEVICE)
            self._meeting.loaded(pages, self._has_come(pages), self._cache.clock.monotonic())
            self._changed.set()

    def _has_come(self, pages: PageRange) -> list[bool]:
        """For each page, whether a step reads it where it is, without a disk."""
        cache, position, has_come = self._cache, 0, [False] * len(pages)
        for node in cache.path(self._lease):
            if cache.fastest(node) != NVME:
                for page in range(max(position, pages.start), min(position + node.num_pages, pages.stop)):
                    has_come[page - pages.start] = True
            position += node.num_pages
        return has_come

    async def _hop(self, pages: PageRange, source: TierId, target: TierId) -> None:
        """Copy pages of the match one tier up, as far as there is room, and wait for that and for those that are on
        their way. Raises `Closed`, `DeadlineExceeded`, and `NotResident` where a page has left the tree."""
        cache = self._cache
        if source not in cache.tiers or target not in cache.tiers:
            return
        deadline = cache.clock.monotonic() + PATIENCE_S
        moving: list[Moving] = []
        position = pages.start
        while position < pages.stop and not self._is_ended:
            node = self._piece(position, pages.stop)
            if not cache.wants(node, source, target):
                moving += cache.hasten([node], source, target, Priority.DEMAND)
                position += node.num_pages
                continue
            slots = await cache.allocate_up_to(target, node.num_pages, deadline=deadline)
            if not len(slots):
                break
            if self._is_ended:
                cache.free({target: slots})
                break
            # Looked at again: the node may have been split, joined, taken along by somebody else, or removed meanwhile.
            try:
                node = self._piece(position, min(pages.stop, position + len(slots)))
            except NotResident:
                cache.free({target: slots})
                raise
            if not cache.wants(node, source, target):
                cache.free({target: slots})
                continue
            cache.free({target: slots[node.num_pages :]})
            moving.append(cache.start_move(node, source, target, slots[: node.num_pages], Priority.DEMAND))
            position += node.num_pages
        while not self._is_ended and not all(move.done.is_set() for move in moving):
            with suppress(DeadlineExceeded):
                await cache.wait_for_progress(cache.clock.monotonic() + PATIENCE_S)

    def _piece(self, start: int, stop: int) -> Node:
        """The node of the match that begins with page `start`, cut where it is longer than to `stop`. Raises
        `NotResident` when the page is not in the tree any more."""
        position = 0
        for node in self._cache.path(self._lease):
            end = position + node.num_pages
            if start < end:
                if position < start:
                    _, node = self._cache.tree.split(node, start - position)
                if end > stop:
                    node, _ = self._cache.tree.split(node, stop - start)
                return node
            position = end
        raise NotResident("the cache", "a page that was to be loaded")
