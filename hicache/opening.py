"""How a sequence gets the pages that are cached of its prompt: leased, copied from another tenant, and brought near.

The base of `hicache.sequence.Sequence`, where the ranges of a sequence are drawn. Everything in here waits for copies
and for room, and ends with a sequence that has the beginning of its prompt, however much of it could be had.
"""

import asyncio
from typing import Final

import numpy as np

from hicache.both_ends import BothEnds
from hicache.cache import PATIENCE_S, Cache, Coverage
from hicache.deciding import Decision
from hicache.errors import DeadlineExceeded, NoRoom, TierUnavailable
from hicache.lease import Lease
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.step_plan import PrivatePage, StepPlan, Tokens
from hicache.tier import DEVICE, NVME, PageIdentity, Slots, TierId
from hicache.tree import Inserted, Match

ADOPT_PAGES: Final = 16
"""Published pages of another tenant that are copied between two inserts: so many device pages are private meanwhile."""


class Opening:
    """The part of a sequence that finds and takes what is cached. All methods belong to the cache's loop."""

    def __init__(self, cache: Cache, namespace: Namespace, *, owner: str, by_layer: bool = False) -> None:
        self.cache: Final = cache
        self.namespace: Final = namespace
        self.owner: Final = owner
        self._by_layer: Final = by_layer
        """Whether steps read pages that are on their way to the device, layer by layer."""
        self.cached_by_tier: dict[TierId, int] = {}
        """Tokens that were found and not computed, by the fastest tier that had them when the sequence was opened."""
        self._tokens: Tokens = np.empty(0, np.int32)
        self._lease: Lease | None = None
        self._chain = namespace.digest
        self._published = 0
        self._private: list[PrivatePage] = []
        self._tail: PrivatePage | None = None
        self._step: StepPlan | None = None
        self._step_began = 0.0
        self._num_asked = 0
        """Tokens of the prompt; 0 once its use was told."""
        self._beginning = False
        self._closed = False
        self._prompt: Tokens = self._tokens
        self._coverage = Coverage(0, 0, ())
        """Where the prompt was found."""
        self._both_ends: BothEnds | None = None
        """What is still being loaded while the engine computes."""

    @property
    def length(self) -> int:
        """Tokens whose KV is there now."""
        return len(self._tokens)

    @property
    def published(self) -> int:
        """Tokens in published pages, a multiple of the page size."""
        return self._published

    @property
    def tokens(self) -> Tokens:
        """Ids of the `length` tokens. Not to be written to."""
        return self._tokens

    # -- opening ------------------------------------------------------------------------------------------------------

    async def _take_pages(self, chunk_tokens: int | None, deadline: float) -> None:
        """Lease the whole pages that are cached and worth it, and promote them, or begin to."""
        cache, tree, packed = self.cache, self.cache.tree, self._prompt
        match = tree.match(self.namespace, packed[:-1])
        coverage = self._coverage = cache.coverage(match)
        if match.owner != self.namespace.digest:
            await self._adopt(match, packed, self._half_way_to(deadline))
            if self._lease is not None:
                cache.release(self._lease)
                self._lease = None
            match = tree.match(self.namespace, packed[: match.num_tokens], published=False)
            coverage = cache.coverage(match)
        if cache.is_failing(NVME):
            chunk_tokens = None
        decision = cache.decide(self.namespace, len(packed), coverage, chunk_tokens=chunk_tokens)
        if decision.taken_tokens < match.num_tokens:
            cache.counters.tokens_left += match.num_tokens - decision.taken_tokens
            match = tree.match(self.namespace, packed[: decision.taken_tokens], published=False)
        if decision.both_ends is not None and chunk_tokens is not None:
            self._load_from_the_back(match, decision, chunk_tokens)
            # The loading end takes its first pages before the computing end looks at what is left.
            await asyncio.sleep(0)
        else:
            await self._promote(match, deadline)

    async def _promote(self, match: Match, deadline: float) -> None:
        """Lease a match and promote it; what cannot be read back is left out."""
        cache, tree, packed = self.cache, self.cache.tree, self._prompt
        while match.num_tokens:
            now = cache.clock.monotonic()
            self._lease = tree.lease(match, owner=self.owner, deadline=None, now=now)
            tree.touch(self._node, now)
            # Room is left for what this sequence is about to compute, within reason: the rest streams.
            device_pages = cache.tiers[DEVICE].capacity_pages
            reserve = min(cache.layout.pages_for(len(packed) - match.num_tokens) + 1, device_pages // 2)
            try:
                arrived = await cache.promote(
                    self._lease,
                    max_device_pages=device_pages - reserve,
                    deadline=self._half_way_to(deadline),
                    by_layer=self._by_layer,
                )
            except DeadlineExceeded:
                arrived = False
            if self._closed:
                return
            if cache.path(self._lease):
                cache.writing_through.used(self._node)
                if not arrived or cache.is_failing(NVME):
                    match = self._without_nvme(packed)
                break
            # A page turned out to be damaged and was forgotten with everything below it; some of it may be there again,
            # from somebody who computed it meanwhile.
            cache.release(self._lease)
            self._lease = None
            match = tree.match(self.namespace, packed[: match.num_tokens], published=False)
        self._has(match)

    def _has(self, match: Match) -> None:
        """The sequence is what is leased now: a match of its prompt."""
        is_empty = not match.num_tokens
        self._chain = self.namespace.digest if is_empty else self.cache.tree.identities(self._node)[-1].chain
        self._tokens = self._prompt[: match.num_tokens].copy()
        self._published = match.num_tokens
        self.cached_by_tier = _cut(self._coverage, 0, match.num_tokens)

    def _load_from_the_back(self, match: Match, decision: Decision, chunk_tokens: int) -> None:
        """Begin with what is on the device, and have the rest loaded from its back while the engine computes."""
        cache, tree = self.cache, self.cache.tree
        prefill = cache.deciding.speed(self.namespace.model)
        assert prefill is not None, "planned without knowing what computing costs"
        assert decision.both_ends is not None, "loaded as a whole"
        self._both_ends = BothEnds(
            cache, match, decision.both_ends, prefill=prefill, chunk_tokens=chunk_tokens, owner=self.owner
        )
        self._both_ends.start()
        there = self._prompt[: self._both_ends.joined * cache.layout.page_size]
        match = tree.match(self.namespace, there, published=False)
        if match.num_tokens:
            self._lease = tree.lease(match, owner=self.owner, deadline=None, now=cache.clock.monotonic())
        self._has(match)

    def _join(self) -> None:
        """Take in what has been loaded and has everything before it; with the last of it, loading is over."""
        assert self._both_ends is not None, "nothing is being loaded"
        cache, page_size = self.cache, self.cache.layout.page_size
        joined = self._both_ends.joined * page_size
        match = cache.tree.match(self.namespace, self._prompt[:joined], published=False)
        if match.num_tokens > self.length:
            assert self._tail is None, "the front stands within a page that it does not compute"
            # Pages that the tree had no room for: it has others of the same tokens.
            for page in self._private:
                self._drop(page)
            self._private = []
            for tier_id, num_tokens in _cut(self._coverage, self.length, match.num_tokens).items():
                self.cached_by_tier[tier_id] = self.cached_by_tier.get(tier_id, 0) + num_tokens
                found = cache.counters.tokens_by_tier
                found[tier_id] = found.get(tier_id, 0) + num_tokens
            now = cache.clock.monotonic()
            if self._lease is None:
                self._lease = cache.tree.lease(match, owner=self.owner, deadline=None, now=now)
            else:
                cache.tree.move_lease(self._lease, match, now)
            self._chain = cache.tree.identities(self._node)[-1].chain
            self._tokens = self._prompt[: match.num_tokens].copy()
            self._published = match.num_tokens
        if self._both_ends.is_over or match.num_tokens < joined:
            self._stop_loading()

    def _stop_loading(self) -> None:
        """What has not joined the sequence yet is not waited for: it is computed, or there already."""
        if self._both_ends is not None:
            both_ends, self._both_ends = self._both_ends, None
            both_ends.end()
            self.cache.counters.tokens_left += both_ends.num_computed * self.cache.layout.page_size

    def _half_way_to(self, deadline: float) -> float:
        now = self.cache.clock.monotonic()
        return now + (deadline - now) / 2

    def _patience_until(self, deadline: float) -> float:
        """For how long one page is waited for, which may be on a disk that does not answer."""
        return min(self._half_way_to(deadline), self.cache.clock.monotonic() + PATIENCE_S)

    def _without_nvme(self, packed: Tokens) -> Match:
        """Let the lease end before the first page that is on NVMe alone, which does not give its pages now."""
        cache, kept = self.cache, list[Node]()
        for node in cache.path(self._lease):
            if cache.fastest(node) == NVME:
                break
            kept.append(node)
        assert self._lease is not None
        if kept:
            cache.tree.move_lease(self._lease, kept[-1], cache.clock.monotonic())
        else:
            cache.release(self._lease)
            self._lease = None
        num_tokens = sum([node.num_pages for node in kept]) * cache.layout.page_size
        return cache.tree.match(self.namespace, packed[:num_tokens], published=False)

    async def _adopt(self, theirs: Match, packed: Tokens, deadline: float) -> None:
        """Copy what another tenant has published, beyond what is there already, and publish the copies as own pages.

        Ends early, without an error, where a page cannot be read back or room cannot be had. What was copied is leased.
        """
        cache, tree, page_size = self.cache, self.cache.tree, self.cache.layout.page_size
        num_pages = theirs.num_tokens // page_size
        now = cache.clock.monotonic()
        reading = tree.lease(theirs, owner=self.owner, deadline=None, now=now)
        try:
            if reading.node is not None:
                tree.touch(reading.node, now, reader=self.namespace)
            own = tree.match(self.namespace, packed[: theirs.num_tokens], published=False)
            if own.num_tokens:
                self._lease = tree.lease(own, owner=self.owner, deadline=None, now=now)
                self._chain = tree.identities(self._node)[-1].chain
            done = own.num_tokens // page_size
            most = max(1, min(ADOPT_PAGES, cache.tiers[DEVICE].capacity_pages // 4))
            while done < num_pages:
                slots = await self._copies_of(reading, done, min(most, num_pages - done), deadline)
                # What has been taken back meanwhile, or lost its beginning, is not published under another name.
                good = reading.node is not None and reading.node.is_published and self._num_leased() == done
                if not len(slots) or not good or self._insert(
                    packed[: (done + len(slots)) * page_size], slots, done
                ) is None:
                    cache.free({DEVICE: slots})
                    break
                done += len(slots)
                cache.counters.pages_adopted += len(slots)
        finally:
            cache.release(reading)

    async def _copies_of(self, reading: Lease, first_page: int, num_pages: int, deadline: float) -> Slots:
        """Device pages with copies of leased ones; as many as could be had, from the first on."""
        cache = self.cache
        try:
            slots = await cache.allocate(DEVICE, num_pages, deadline=deadline)
        except (NoRoom, TierUnavailable, DeadlineExceeded):
            return np.empty(0, np.int32)
        copied = 0
        try:
            while copied < num_pages and (found := self._find_page(reading, first_page + copied)) is not None:
                if not await cache.copy_page(*found, int(slots[copied]), deadline=self._patience_until(deadline)):
                    break
                copied += 1
        except DeadlineExceeded:
            pass
        except BaseException:
            copied = 0
            raise
        finally:
            cache.free({DEVICE: slots[copied:]})
        return slots[:copied]

    def _find_page(self, lease: Lease, page: int) -> tuple[Node, int] | None:
        """Where a page of a leased prefix is: its node and its index there. None when it was damaged and forgotten."""
        for node in self.cache.path(lease):
            if page < node.num_pages:
                return node, page
            page -= node.num_pages
        return None

    async def _take_partial(self, deadline: float) -> None:
        """Copy the page that shares some tokens beyond the last whole page into a private one."""
        cache, packed = self.cache, self._prompt
        deadline = self._patience_until(deadline)
        match = cache.tree.match(self.namespace, packed[:-1])
        if match.partial is None or match.num_tokens != self.length:
            return
        partial, tier_id, copied, slots = match.partial, DEVICE, False, np.empty(0, np.int32)
        try:
            # Without waiting for others: part of a page is not worth it.
            slots = await cache.allocate(DEVICE, 1, deadline=deadline, wait=False)
            # Room may have cost the page itself; what was matched is looked up again.
            match = cache.tree.match(self.namespace, packed[:-1])
            if match.partial is not None and match.num_tokens == self.length:
                partial = match.partial
                tier_id = cache.fastest(partial.node)
                copied = await cache.copy_page(partial.node, partial.page, int(slots[0]), deadline=deadline)
        except (NoRoom, TierUnavailable, DeadlineExceeded):
            return
        finally:
            if not copied or self._closed:
                cache.free({DEVICE: slots})
        if not copied or self._closed:
            return
        self._tail = PrivatePage(int(slots[0]))
        self._tokens = packed[: self.length + partial.num_tokens].copy()
        self.cached_by_tier[tier_id] = self.cached_by_tier.get(tier_id, 0) + partial.num_tokens

    def _count(self, num_asked: int) -> None:
        counters = self.cache.counters
        counters.lookups += 1
        counters.hits += self.length > 0 or self._both_ends is not None
        counters.tokens_asked += num_asked
        for tier_id, num_tokens in self.cached_by_tier.items():
            counters.tokens_by_tier[tier_id] = counters.tokens_by_tier.get(tier_id, 0) + num_tokens

    @property
    def _node(self) -> Node:
        node = self._lease.node if self._lease is not None else None
        assert node is not None, "nothing is leased"
        return node

    # -- pages in the tree --------------------------------------------------------------------------------------------

    def _insert(self, tokens: Tokens, slots: Slots, first_page: int) -> Inserted | None:
        """Insert device pages into the tree and let the lease end where they do; None when its metadata has no room."""
        cache, tree = self.cache, self.cache.tree
        now = cache.clock.monotonic()
        try:
            inserted = tree.insert(
                self.namespace, tokens, tier=DEVICE, slots=slots, first_page=first_page, now=now
            )
        except NoRoom:
            return None
        self._declare(tokens, slots, first_page)
        if self._lease is None:
            self._lease = tree.lease(inserted.node, owner=self.owner, deadline=None, now=now)
        else:
            tree.move_lease(self._lease, inserted.node, now)
        cache.counters.metadata_dropped_pages += inserted.num_dropped
        cache.writing_through.published(inserted.node)
        cache.free(inserted.freed)
        cache.free({DEVICE: inserted.duplicates})
        return inserted

    def _declare(self, tokens: Tokens, slots: Slots, first_page: int) -> None:
        """Tell the device tier which pages its slots hold now, and move the chain digest past them."""
        cache = self.cache
        device, generation = cache.device, cache.tiers[DEVICE].generation
        page_size = cache.layout.page_size
        namespace = self.namespace.digest
        for index, slot in enumerate(slots):
            start = (first_page + index) * page_size
            packed = tokens[start : start + page_size].astype("<i4").tobytes()
            identity = PageIdentity(namespace, self._chain, packed)
            device.declare(int(slot), generation(int(slot)), identity)
            self._chain = identity.chain

    def _num_leased(self) -> int:
        return sum(node.num_pages for node in self.cache.path(self._lease))

    def _drop(self, page: PrivatePage) -> None:
        page.num_readers -= 1
        if page.num_readers == 0:
            self.cache.free({DEVICE: np.array([page.slot], np.int32)})


def _cut(coverage: Coverage, start: int, stop: int) -> dict[TierId, int]:
    """`coverage.by_tier` of tokens `[start, stop)`."""
    by_tier: dict[TierId, int] = {}
    position = 0
    for tier_id, run_tokens in coverage.runs:
        take = min(stop, position + run_tokens) - max(start, position)
        position += run_tokens
        if take > 0:
            by_tier[tier_id] = by_tier.get(tier_id, 0) + take
    return by_tier
