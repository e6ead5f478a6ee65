"""A running request: a lease on its cached prefix, private pages for what is being computed, and their block table.

The tree holds whole published pages only. Everything else a request needs lives here. The tokens of a sequence lie, in
page order, in four ranges (P is the page size):

    [0, published)            published pages, found or computed: in the tree, protected by the sequence's lease
    [published, whole)        whole pages that the tree has no room for: private device pages, mostly none
    [whole, length)           the tail, fewer than P tokens: one private device page, shared with forks until written
    [length, length + n)      tokens of a step under way: the rest of the tail page and fresh private pages

Committing a step publishes the pages that became whole and keeps the rest as the new tail. Where the tree's metadata
budget refuses them, they stay private and the next commit tries again: the request goes on, and only whoever comes
later misses them. Forks share published pages through leases of their own and private pages by a count; the first of
them that writes into the tail gets a copy, and a whole private page is published once nobody else reads it.

A prefix that another tenant has published is copied when a sequence is opened: page by page into device pages that are
published as the sequence's own. So whatever is below a page belongs to the tenant of the page, a tenant's removals and
evictions end at its own pages, and what one tenant does with a copy shows in nobody else's tree.
"""

from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.cache import PATIENCE_S, Cache, Coverage
from hicache.errors import BadRequest, Closed, DeadlineExceeded, NoRoom, NotResident, TierUnavailable
from hicache.lease import Lease, Pin
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.residency import Residency
from hicache.tier import DEVICE, NVME, PageIdentity, Slots, TierId
from hicache.tree import Inserted, Match, pack_tokens

Tokens = npt.NDArray[np.int32]
ADOPT_PAGES: Final = 16
"""Published pages of another tenant that are copied between two inserts: so many device pages are private meanwhile."""


@dataclass(slots=True, eq=False)
class PrivatePage:
    """A device page that is not in the tree, and how many sequences, forks of each other, read it."""

    slot: int
    num_readers: int = 1


@dataclass(frozen=True, slots=True)
class PageRef:
    """One page in one tier, with all that is needed to read it and to notice that it is not the same any more."""

    slot: int
    generation: int
    identity: PageIdentity


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive context pages of a step that are read from one tier."""

    tier_id: TierId
    slots: Slots
    refs: tuple[PageRef, ...]
    """One a page where reading verifies it (NVMe); empty where pages are read in place, under the step's pins."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Where everything is while one step runs: pinned, and unchanged until `commit` or `abort`."""

    tokens: Tokens
    """Ids of the new tokens."""
    runs: tuple[Run, ...]
    """Whole pages before the new tokens, root side first."""
    tail: PrivatePage | None
    """The page that the first new token is written to, if it is not the first of its page."""
    num_tail_tokens: int
    """Tokens already in `tail`, all before the new ones."""
    new_slots: Slots
    """Device slots of the fresh pages."""
    slot_mapping: npt.NDArray[np.int64]
    """`[num_new]`, flat device slot `slot * page_size + offset` of each new token."""
    pins: tuple[Pin, ...]


class Sequence:
    """One running request over the tokens of one prompt. All methods belong to the cache's loop.

    Made by `Sequence.open`. One step at a time: `begin`, then `commit` or `abort`.
    """

    def __init__(self, cache: Cache, namespace: Namespace, *, owner: str) -> None:
        self.cache: Final = cache
        self.namespace: Final = namespace
        self.owner: Final = owner
        self.cached_by_tier: dict[TierId, int] = {}
        """Tokens found when the sequence was opened, by the fastest tier that had them."""
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

    @classmethod
    async def open(
        cls, cache: Cache, namespace: Namespace, tokens: npt.ArrayLike, *, owner: str, deadline: float
    ) -> "Sequence":
        """Find what is cached of `tokens`, protect it, and bring it to the device as far as it fits.

        At most `len(tokens) - 1` tokens are taken from the cache: the logits of the last one have to be computed.
        A damaged page on the way shortens what is found; it is never an error. So does an NVMe tier that fails or does
        not answer: it is waited for while it still gives anything, at most for half of the time that is left.

        Raises `BadRequest` for tokens that are empty or not int32 ids, or a namespace of another layout;
        `DeadlineExceeded` (nothing stays leased).
        """
        if namespace.layout != cache.layout:
            raise BadRequest("namespace.layout", "is not the layout of this cache")
        # Copied: whoever asks may write to the array again while this waits.
        packed = pack_tokens(tokens).copy()
        if not len(packed):
            raise BadRequest("tokens", "is empty; a sequence needs at least one token")
        sequence = cls(cache, namespace, owner=owner)
        sequence._num_asked = len(packed)
        try:
            found = await sequence._take_pages(packed, deadline)
            await sequence._take_partial(packed, found, sequence._patience_until(deadline))
        except BaseException:
            sequence.close()
            raise
        sequence._count(len(packed))
        return sequence

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

    async def _take_pages(self, packed: Tokens, deadline: float) -> Match:
        """Lease the whole pages that are cached and promote them; what cannot be read back is left out."""
        cache, tree = self.cache, self.cache.tree
        match = tree.match(self.namespace, packed[:-1])
        coverage = cache.coverage(match)
        if match.owner != self.namespace.digest:
            await self._adopt(match, packed, self._half_way_to(deadline))
            if self._lease is not None:
                cache.release(self._lease)
                self._lease = None
            match = tree.match(self.namespace, packed[: match.num_tokens], published=False)
        match = self._worth_taking(packed, match)
        while match.num_tokens:
            now = cache.clock.monotonic()
            self._lease = tree.lease(match, owner=self.owner, deadline=None, now=now)
            tree.touch(self._node, now)
            # Room is left for what this sequence is about to compute, within reason: the rest streams.
            device_pages = cache.tiers[DEVICE].capacity_pages
            reserve = min(cache.layout.pages_for(len(packed) - match.num_tokens) + 1, device_pages // 2)
            try:
                arrived = await cache.promote(
                    self._lease, max_device_pages=device_pages - reserve, deadline=self._half_way_to(deadline)
                )
            except DeadlineExceeded:
                arrived = False
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
        self._chain = tree.identities(self._node)[-1].chain if match.num_tokens else self.namespace.digest
        self._tokens = packed[: match.num_tokens].copy()
        self._published = match.num_tokens
        self.cached_by_tier = _cut(coverage, match.num_tokens)
        return match

    def _worth_taking(self, packed: Tokens, match: Match) -> Match:
        """The beginning of a match that is not slower to load than to compute."""
        cache = self.cache
        taken = cache.decide(self.namespace, len(packed), cache.coverage(match)).taken_tokens
        if taken == match.num_tokens:
            return match
        cache.counters.tokens_left += match.num_tokens - taken
        return cache.tree.match(self.namespace, packed[:taken], published=False)

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

    async def _take_partial(self, packed: Tokens, found: Match, deadline: float) -> None:
        """Copy the page that shares some tokens beyond the last whole page into a private one."""
        cache = self.cache
        match = cache.tree.match(self.namespace, packed[:-1])
        if match.partial is None or match.num_tokens != found.num_tokens:
            return
        partial, tier_id, copied, slots = match.partial, DEVICE, False, np.empty(0, np.int32)
        try:
            # Without waiting for others: part of a page is not worth it.
            slots = await cache.allocate(DEVICE, 1, deadline=deadline, wait=False)
            # Room may have cost the page itself; what was matched is looked up again.
            match = cache.tree.match(self.namespace, packed[:-1])
            if match.partial is not None and match.num_tokens == found.num_tokens:
                partial = match.partial
                tier_id = cache.fastest(partial.node)
                copied = await cache.copy_page(partial.node, partial.page, int(slots[0]), deadline=deadline)
        except (NoRoom, TierUnavailable, DeadlineExceeded):
            return
        finally:
            if not copied:
                cache.free({DEVICE: slots})
        if not copied:
            return
        self._tail = PrivatePage(int(slots[0]))
        self._tokens = packed[: found.num_tokens + partial.num_tokens].copy()
        self.cached_by_tier[tier_id] = self.cached_by_tier.get(tier_id, 0) + partial.num_tokens

    def _count(self, num_asked: int) -> None:
        counters = self.cache.counters
        counters.lookups += 1
        counters.hits += self.length > 0
        counters.tokens_asked += num_asked
        for tier_id, num_tokens in self.cached_by_tier.items():
            counters.tokens_by_tier[tier_id] = counters.tokens_by_tier.get(tier_id, 0) + num_tokens

    @property
    def _node(self) -> Node:
        node = self._lease.node if self._lease is not None else None
        assert node is not None, "nothing is leased"
        return node

    # -- steps --------------------------------------------------------------------------------------------------------

    async def begin(self, tokens: npt.ArrayLike, *, deadline: float) -> StepPlan:
        """Make pages ready for the next `tokens` and pin everything before them where it is.

        Waits for room in the device tier, at most until `deadline`. Own pages may leave for it: a context need not fit.

        Raises `BadRequest` (no tokens, a step already under way), `NoRoom` when the tokens need more device pages than
        there can be, `TierUnavailable` when the device fails, `DeadlineExceeded`, `Closed`; the sequence is as before.
        `NotResident` when part of the context was damaged and forgotten since: the sequence can only be closed then.
        """
        self._require_open()
        self._require_idle("another step of this sequence is under way; commit or abort it first")
        # Copied: an engine may write its next token to the array before it commits.
        packed = pack_tokens(tokens).copy()
        if not len(packed):
            raise BadRequest("tokens", "is empty; a step needs at least one token")
        self._beginning = True
        try:
            self._step = await self._plan(packed, deadline)
        finally:
            self._beginning = False
        self._step_began = self.cache.clock.monotonic()
        return self._step

    async def _plan(self, packed: Tokens, deadline: float) -> StepPlan:
        cache = self.cache
        page_size = cache.layout.page_size
        num_tail_tokens = self.length % page_size
        private = np.array([page.slot for page in self._private], np.int32)
        num_new_pages = cache.layout.pages_for(num_tail_tokens + len(packed)) - (self._tail is not None)
        await self._own_tail(deadline)
        await self._return_to_device(num_new_pages, deadline)
        new_slots = await cache.allocate(DEVICE, num_new_pages, deadline=deadline)
        # From here on nothing waits: what is pinned is what was looked at.
        if self._closed or self._is_cut():
            cache.free({DEVICE: new_slots})
            self._require_open()
            raise NotResident("the cache", "part of the context, damaged in the meantime,")
        by_tier: dict[TierId, list[Node]] = {}
        runs: list[Run] = []
        for node in cache.path(self._lease):
            tier_id = cache.fastest(node)
            by_tier.setdefault(tier_id, []).append(node)
            runs.append(Run(tier_id, node.slots(tier_id).copy(), self._refs(node) if tier_id == NVME else ()))
        if len(private):
            runs.append(Run(DEVICE, private, ()))
        slots = np.concatenate([np.array([self._tail.slot] if self._tail else [], np.int32), new_slots])
        positions = num_tail_tokens + np.arange(len(packed), dtype=np.int64)
        return StepPlan(
            tokens=packed,
            runs=tuple(runs),
            tail=self._tail,
            num_tail_tokens=num_tail_tokens,
            new_slots=new_slots,
            slot_mapping=slots[positions // page_size].astype(np.int64) * page_size + positions % page_size,
            pins=cache.pin(by_tier),
        )

    def _is_cut(self) -> bool:
        """Whether published pages were forgotten because their last copy was damaged, which no lease prevents."""
        return self._num_leased() * self.cache.layout.page_size != self._published

    def _num_leased(self) -> int:
        return sum(node.num_pages for node in self.cache.path(self._lease))

    def _require_open(self) -> None:
        if self._closed:
            raise Closed("the sequence is closed")

    def _require_idle(self, problem: str) -> None:
        if self._step is not None or self._beginning:
            raise BadRequest("step", problem)

    def _refs(self, node: Node) -> tuple[PageRef, ...]:
        generation = self.cache.tiers[NVME].generation
        return tuple(
            PageRef(int(slot), generation(int(slot)), identity)
            for slot, identity in zip(node.slots(NVME), self.cache.tree.identities(node), strict=True)
        )

    def commit(self, plan: StepPlan) -> None:
        """The step's tokens are written: publish the pages that are whole now. Does not wait.

        Raises `NotResident` when part of the context was damaged and forgotten since `begin`: the step is then aborted.
        """
        cache = self.cache
        if self._is_cut():
            self.abort(plan)
            raise NotResident("the cache", "part of the context, damaged in the meantime,")
        self._end(plan)
        self._learn(plan)
        page_size = cache.layout.page_size
        self._tokens = np.concatenate([self._tokens, plan.tokens])
        cache.counters.tokens_computed += len(plan.tokens)
        filled = [*([plan.tail] if plan.tail else []), *(PrivatePage(int(slot)) for slot in plan.new_slots)]
        pages = self._private + filled
        num_whole = (self.length - self._published) // page_size
        assert len(pages) - num_whole <= 1, "more than one page is partly filled"
        self._tail = pages[num_whole] if len(pages) > num_whole else None
        self._private = pages[:num_whole]
        self._publish()
        if self.length >= self._num_asked:
            self._tell_use()

    def _learn(self, plan: StepPlan) -> None:
        """What a step took whose context was all on the device tells what computing costs."""
        seconds = self.cache.clock.monotonic() - self._step_began
        if seconds > 0 and all(run.tier_id == DEVICE for run in plan.runs):
            self.cache.learn(self.namespace, self.length, self.length + len(plan.tokens), seconds)

    def _publish(self) -> None:
        """Give the whole private pages to the tree, up to the first that a fork reads as its own; none where the
        tree has no room."""
        counters, page_size = self.cache.counters, self.cache.layout.page_size
        pages = list(takewhile(lambda page: page.num_readers == 1, self._private))
        if not pages:
            return
        first_page = self._published // page_size
        end = self._published + len(pages) * page_size
        inserted = self._insert(self._tokens[:end], np.array([page.slot for page in pages], np.int32), first_page)
        if inserted is None:
            counters.pages_refused += len(pages)
            return
        self._published = end
        del self._private[: len(pages)]
        counters.pages_published += len(pages) - len(inserted.duplicates)
        counters.pages_duplicate += len(inserted.duplicates)

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

    def abort(self, plan: StepPlan) -> None:
        """The step failed: forget its tokens and give its fresh pages back. Does not wait."""
        self._end(plan)
        self.cache.free({DEVICE: plan.new_slots})

    def report_bad(self, tier_id: TierId, slot: int) -> None:
        """A step found that a page of the context cannot be read back from a tier: it is forgotten there. Not for a
        device that fails (`Outcome.ERROR`), where the page may well be: see `Cache.report_failing`.

        If that was its last copy, the page and everything after it leave the cache, and this sequence cannot go on.
        """
        for node in self.cache.path(self._lease):
            if node.residency(tier_id) is Residency.RESIDENT:
                (pages,) = np.nonzero(node.slots(tier_id) == slot)
                if len(pages):
                    self.cache.forget(node, tier_id, int(pages[0]))
                    return

    def _end(self, plan: StepPlan) -> None:
        if plan is not self._step:
            raise BadRequest("step", "is not the step under way of this sequence")
        self._step = None
        self.cache.unpin(plan.pins)

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

    async def _own_tail(self, deadline: float) -> None:
        """Copy on write: the tail page is written to next, so it must be nobody else's."""
        if self._tail is None or self._tail.num_readers == 1:
            return
        cache = self.cache
        slots = await cache.allocate(DEVICE, 1, deadline=deadline)
        shared, copied = self._tail, False
        try:
            if not self._closed:
                # One reader more: until the copy has ended the page is nobody's to reuse, whoever closes meanwhile.
                shared.num_readers += 1
                try:
                    copied = await cache.copy_device_page(shared.slot, int(slots[0]))
                finally:
                    self._drop(shared)
        finally:
            if not copied or self._closed:
                cache.free({DEVICE: slots})
        self._require_open()
        if not copied:
            raise TierUnavailable(DEVICE, "a page could not be copied within the tier")
        self._tail = PrivatePage(int(slots[0]))
        self._drop(shared)

    async def _return_to_device(self, num_new_pages: int, deadline: float) -> None:
        """Bring back pages that left the device for others, if the whole context fits: decode prefers residency.

        A context that does not fit is left where it is and streams: moving it would push out its own other end.
        """
        cache = self.cache
        if self._lease is None:
            return
        path = cache.path(self._lease)
        cache.tree.touch(self._node, cache.clock.monotonic())
        num_pages = sum(node.num_pages for node in path)
        if all(node.residency(DEVICE) is Residency.RESIDENT for node in path):
            return
        if num_pages + len(self._private) + num_new_pages + 1 <= cache.tiers[DEVICE].capacity_pages:
            await cache.promote(self._lease, max_device_pages=num_pages, deadline=deadline)

    # -- forks and the end --------------------------------------------------------------------------------------------

    def fork(self) -> "Sequence":
        """Another sequence with the same tokens, which shares every page until one of the two writes. Does not wait.

        Raises `BadRequest` while a step is under way, `Closed`, `NotResident` as `begin` does.
        """
        self._require_open()
        self._require_idle("a sequence cannot fork while a step is under way")
        child = Sequence(self.cache, self.namespace, owner=self.owner)
        if self._lease is not None:
            now = self.cache.clock.monotonic()
            child._lease = self.cache.tree.lease(self._node, owner=self.owner, deadline=None, now=now)
        child._tokens, child._chain, child._published = self._tokens, self._chain, self._published
        child._private, child._tail = list(self._private), self._tail
        for page in self._private_pages():
            page.num_readers += 1
        return child

    def _private_pages(self) -> list[PrivatePage]:
        return [*self._private, *([self._tail] if self._tail is not None else [])]

    def close(self) -> None:
        """Give up the lease and the private pages; what was published stays cached. Idempotent, does not wait."""
        if self._closed:
            return
        self._closed = True
        if self._step is not None:
            self.abort(self._step)
        self._tell_use()
        for page in self._private_pages():
            self._drop(page)
        self._private, self._tail = [], None
        if self._lease is not None:
            self.cache.release(self._lease)
            self._lease = None

    def _tell_use(self) -> None:
        """The prompt was computed as far as it will be: a use, once. What is decoded afterwards is none."""
        if self._num_asked:
            self._num_asked = 0
            self.cache.tell_use(self._lease)

    def _drop(self, page: PrivatePage) -> None:
        page.num_readers -= 1
        if page.num_readers == 0:
            self.cache.free({DEVICE: np.array([page.slot], np.int32)})


def _cut(coverage: Coverage, num_tokens: int) -> dict[TierId, int]:
    """`coverage.by_tier` of the first `num_tokens` tokens."""
    by_tier: dict[TierId, int] = {}
    for tier_id, run_tokens in coverage.runs:
        take = min(run_tokens, num_tokens)
        num_tokens -= take
        if take:
            by_tier[tier_id] = by_tier.get(tier_id, 0) + take
    return by_tier
