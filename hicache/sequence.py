"""A running request: a lease on its cached prefix, private pages for what is being computed, and their block table.

The tree holds whole published pages only. Everything else a request needs lives here. The tokens of a sequence lie, in
page order, in four ranges (P is the page size):

    [0, published)            published pages, found or computed: in the tree, protected by the sequence's lease
    [published, whole)        whole pages that the tree has no room for: private device pages, mostly none
    [whole, length)           the tail, fewer than P tokens: one private device page, shared with forks until written
    [length, length + n)      tokens of a step under way: the rest of the tail page and fresh private pages

An engine that asks before each step how far to go (`next_step`) may have a fifth one, [length, found): cached pages
that are being loaded from their back while it computes from the front, and join the sequence where both ends meet
(`hicache.both_ends`).

Committing a step publishes the pages that became whole and keeps the rest as the new tail. Where the tree's metadata
budget refuses them, they stay private and the next commit tries again: the request goes on, and only whoever comes
later misses them. Forks share published pages through leases of their own and private pages by a count; the first of
them that writes into the tail gets a copy, and a whole private page is published once nobody else reads it.

A prefix that another tenant has published is copied when a sequence is opened: page by page into device pages that are
published as the sequence's own. So whatever is below a page belongs to the tenant of the page, a tenant's removals and
evictions end at its own pages, and what one tenant does with a copy shows in nobody else's tree.
"""

from collections.abc import Iterable
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from hicache.arguments import flag, whole
from hicache.arriving import Arrival, Arriving
from hicache.cache import Cache
from hicache.errors import BadRequest, Closed, DeadlineExceeded, NotResident, TierUnavailable
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.opening import Opening
from hicache.planner import PageRange
from hicache.residency import Residency
from hicache.step_plan import PageRef, PrivatePage, Run, StepPlan, Tokens
from hicache.tier import DEVICE, HOST, NVME, TierId
from hicache.tree import pack_tokens

__all__ = ["PageRef", "Run", "Sequence", "StepPlan"]


class Sequence(Opening):
    """One running request over the tokens of one prompt. All methods belong to the cache's loop.

    Made by `Sequence.open`. One step at a time: `begin`, then `commit` or `abort`.
    """

    @classmethod
    async def open(
        cls,
        cache: Cache,
        namespace: Namespace,
        tokens: npt.ArrayLike,
        *,
        owner: str,
        deadline: float,
        chunk_tokens: int | None = None,
        by_layer: bool = False,
    ) -> "Sequence":
        """Find what is cached of `tokens`, protect it, and bring it to the device as far as it fits.

        At most `len(tokens) - 1` tokens are taken from the cache: the logits of the last one have to be computed.
        A damaged page on the way shortens what is found; it is never an error. So does an NVMe tier that fails or does
        not answer: it is waited for while it still gives anything, at most for half of the time that is left.

        With `chunk_tokens`, the engine computes at most so many tokens in one step and asks `next_step` before each.
        Where that is faster, it is then asked to compute what is cached from the front while the rest is loaded from
        the back, and this returns as soon as that has begun.

        With `by_layer`, what is in the host is not waited for either: its copies to the device are begun, and steps
        read them layer by layer as they come (`Run.arriving`).

        Raises `BadRequest` for tokens that are empty or not int32 ids, a `chunk_tokens` below 1, or a namespace of
        another layout; `DeadlineExceeded` (nothing stays leased).
        """
        if chunk_tokens is not None:
            chunk_tokens = whole("chunk_tokens", chunk_tokens, 1)
        if namespace.layout != cache.layout:
            raise BadRequest("namespace.layout", "is not the layout of this cache")
        # Copied: whoever asks may write to the array again while this waits.
        packed = pack_tokens(tokens).copy()
        if not len(packed):
            raise BadRequest("tokens", "is empty; a sequence needs at least one token")
        sequence = cls(cache, namespace, owner=owner, by_layer=flag("by_layer", by_layer))
        sequence._num_asked = len(packed)
        sequence._prompt = packed
        try:
            await sequence._take_pages(chunk_tokens, deadline)
            if sequence._both_ends is None:
                await sequence._take_partial(deadline)
        except BaseException:
            sequence.close()
            raise
        sequence._count(len(packed))
        return sequence

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        """Whether more of the prompt may be found than `length` says: it is being loaded while the engine computes."""
        return self._both_ends is not None

    async def next_step(self, max_tokens: int, *, deadline: float) -> int:
        """How many tokens the next step computes, from `length` on: at most `max_tokens`, fewer while cached pages are
        on their way to what follows.

        For sequences that were opened with `chunk_tokens`, before each step; others are told `max_tokens`. `length` may
        have grown by then, as what was loaded has joined it. Waits for pages on their way where that is faster than to
        compute them, at most as long as computing them would take, and until `deadline`.

        Raises `BadRequest` (a `max_tokens` below 1, a step under way), `DeadlineExceeded`, `Closed`.
        """
        self._require_open()
        self._require_idle("how far to go is asked between steps")
        max_tokens = whole("max_tokens", max_tokens, 1)
        cache, page_size = self.cache, self.cache.layout.page_size
        self._beginning = True
        try:
            while self._both_ends is not None:
                self._join()
                if self._both_ends is None:
                    if path := cache.path(self._lease):
                        cache.writing_through.used(path[-1])
                    await self._take_partial(deadline)
                    break
                step = self._both_ends.next_compute()
                if isinstance(step, PageRange):
                    return min(max_tokens, step.stop * page_size - self.length)
                if (left := deadline - cache.clock.monotonic()) <= 0:
                    raise DeadlineExceeded("what was to be loaded did not come before the deadline")
                await self._both_ends.wait(min(step, left))
                self._require_open()
            self._require_open()
        finally:
            self._beginning = False
        return max_tokens

    async def load_rest(self, *, deadline: float) -> None:
        """Compute nothing of what is found: wait until it is loaded, as if the sequence had been opened without
        `chunk_tokens`. For an engine that turns out not to ask `next_step`. After a step has been taken, what has not
        joined yet is given up instead. Raises as `next_step` and `open` do.
        """
        self._require_open()
        self._require_idle("what is found is loaded between steps")
        if self._both_ends is None:
            return
        found = self._prompt[: self._both_ends.num_pages * self.cache.layout.page_size]
        self._stop_loading()
        if sum(self.cached_by_tier.values()) < self.length:
            return
        self._beginning = True
        try:
            if self._lease is not None:
                self.cache.release(self._lease)
                self._lease = None
            await self._promote(self.cache.tree.match(self.namespace, found, published=False), deadline)
            self._require_open()
            await self._take_partial(deadline)
        finally:
            self._beginning = False

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
        page_size = self.cache.layout.page_size
        if self._both_ends is not None and self.length + len(packed) > self._both_ends.limit * page_size:
            # The engine goes further than it was told: what it computes need not be loaded.
            self._stop_loading()
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
        arrivals = cache.arrivals() if self._by_layer else {}
        for node in cache.path(self._lease):
            tier_id = cache.fastest(node)
            by_tier.setdefault(tier_id, []).append(node)
            arriving = None
            if tier_id == HOST and (arrival := arrivals.get(node)) is not None:
                arriving = Arriving(arrival, node.slots(DEVICE).copy())
            refs = self._refs(node) if tier_id == NVME else ()
            runs.append(Run(tier_id, node.slots(tier_id).copy(), refs, arriving))
        if len(private):
            runs.append(Run(DEVICE, private, ()))
        slots = np.concatenate([np.array([self._tail.slot] if self._tail else [], np.int32), new_slots])
        positions = num_tail_tokens + np.arange(len(packed), dtype=np.int64)
        cache.enter(_arrivals(runs))
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
        if self._both_ends is not None:
            self._both_ends.computed(self.length // page_size, cache.clock.monotonic() - self._step_began)
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
        self.cache.leave(_arrivals(plan.runs))
        self.cache.unpin(plan.pins)

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
            await cache.promote(
                self._lease, max_device_pages=num_pages, deadline=deadline, by_layer=self._by_layer
            )

    # -- forks and the end --------------------------------------------------------------------------------------------

    def fork(self) -> "Sequence":
        """Another sequence with the same tokens, which shares every page until one of the two writes. Does not wait.

        Raises `BadRequest` while a step is under way, `Closed`, `NotResident` as `begin` does.
        """
        self._require_open()
        self._require_idle("a sequence cannot fork while a step is under way")
        child = Sequence(self.cache, self.namespace, owner=self.owner, by_layer=self._by_layer)
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
        self._stop_loading()
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


def _arrivals(runs: Iterable[Run]) -> set[Arrival]:
    """What a step reads while it comes to the device."""
    return {run.arriving.arrival for run in runs if run.arriving is not None}
