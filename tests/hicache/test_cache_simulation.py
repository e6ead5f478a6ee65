"""A whole cache under everything at once: one seed a run, in virtual time, over tiers that are too small.

The seed draws the policies of eviction, writing and admission, exclusive or inclusive tiers, quotas, the index's budget
and faults. Clients of three tenants then send prompts, hint, pin, fetch ahead, publish, flush and change their minds.
After that everything that there is gets pinned while more is asked for; then the faults end and all must work again;
then nothing may be left.

What is asserted, by the numbers of the reliability notes:

    I10   a page that a step reads is the one that it asked for, each time it looks while others want room (C06, C08)
          also layer by layer, while it is on its way to the device, and when a later layer fails
    I11   whatever a tier offers is whole, byte for byte
    I12   what a flush removed is not there again, whatever was on its way (C07)
    I13   a page that NVMe did not take is in the tier that it came from, or gone: never said to be below (C12)
    I26   with all tiers full, pinned and faulty, each request has its answer by its deadline
    I27   and none waits for ever: the loop would say that nothing can go on
    I28   once faults and pins are gone, requests find what was computed, within 5 seconds
    I29   a request that is cancelled at any moment, before its first step too, has given everything back (C20)
    I38   the counters are what the clients saw, and what is in the tiers and the tree
    I42   the same seed is the same run, event for event
"""

import asyncio
import dataclasses
from collections import Counter
from functools import partial

import numpy as np
import pytest

from hicache.admissions import ADMISSIONS, admission_named
from hicache.errors import DeadlineExceeded, NoRoom, NotResident, TierUnavailable
from hicache.namespace import Namespace
from hicache.policies import NAMES
from hicache.prefetch import Prefetch
from hicache.quotas import TenantQuota, TenantQuotas
from hicache.residency import IN_TIER, Residency
from hicache.sequence import Sequence
from hicache.write_policy import WritePolicy
from tests.hicache.worlds import LAYOUT, MODEL, PAGE_SIZE, TOKEN_BYTES, Request, Setup, UnreadablePage, opened, prompt
from tests.hicache.worlds import stamps as stamps_of
from tests.simulation import Faults, World, run_simulated, seeds

TENANTS = [dataclasses.replace(MODEL, tenant=name) for name in ("one", "two", "three")]
STEP_S = 2.0
"""Deadline of what is asked for while everything is pinned."""
SLACK_S = 0.3
ALIVE_AGAIN_S = 5.0
REFUSALS = (NoRoom, NotResident, DeadlineExceeded, TierUnavailable, UnreadablePage)


class Run:
    """One cache, and its clients."""

    def __init__(self, world: World, setup: Setup, *, publishes: bool) -> None:
        self.world = world
        self.rng = world.rng
        self.setup = setup
        self.cache = setup.cache
        self.publishes = publishes
        self.cancels = self.rng.random() < 0.5
        self.seen: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        """Tokens, by the tier that had them."""
        self.pinned: list[tuple[Namespace, list[int]]] = []
        self.computed: list[tuple[Namespace, list[int]]] = []

    def tokens(self) -> list[int]:
        rng = self.rng
        length = rng.randrange(1, 45)
        return prompt(rng.randrange(3), length, branch=rng.randrange(2), shared=rng.randrange(length + 1))

    # -- what clients do ----------------------------------------------------------------------------------------------

    async def client(self) -> None:
        rng = self.rng
        for _ in range(rng.choice([4, 8])):
            await self.world.pause(0.01)
            namespace, tokens = rng.choice(TENANTS), self.tokens()
            what = rng.random()
            if what < 0.6:
                await self.request(namespace, tokens)
            elif what < 0.75 and self.cancels:
                await self.changes_its_mind(namespace, tokens)
            else:
                if self.computed and rng.random() < 0.7:
                    namespace, tokens = rng.choice(self.computed)
                self.ask(namespace, tokens)
            self.world.note("done", namespace.tenant, self.cache.tree.num_nodes)
            self.setup.check()

    async def request(
        self, namespace: Namespace, tokens: list[int], *, deadline_s: float | None = None
    ) -> int | None:
        """A prompt, from the look-up to its last step; how many tokens were found, None when it was refused."""
        rng = self.rng
        request = self.begun(namespace)
        try:
            sequence = await request.open(
                tokens, deadline_s=deadline_s or rng.choice([0.001, 30.0]), by_layer=rng.random() < 0.5
            )
        except REFUSALS:
            return None
        found = sequence.length
        self.opened(sequence, tokens)
        forks: list[Sequence] = []
        try:
            while sequence.length < len(tokens):
                new = tokens[sequence.length :][: rng.randrange(1, 9)]
                fail = deadline_s is None and rng.random() < 0.05
                try:
                    await request.step(new, deadline_s=deadline_s or rng.choice([0.001, 30.0]), fail=fail)
                except RuntimeError:
                    continue
                self.seen["computed"] += len(new)
                if rng.random() < 0.1:
                    forks.append(sequence.fork())
                await self.world.pause(0.01)
        except REFUSALS:
            return None
        finally:
            for each in (sequence, *forks):
                each.close()
            self.seen.update({f"layers read in {tier_id}": num for tier_id, num in request.num_layers_read.items()})
        self.computed.append((namespace, tokens))
        self.hint(namespace, tokens)
        return found

    def begun(self, namespace: Namespace) -> Request:
        """A request; where tenants share pages, all have the same stamps."""
        request = self.setup.request(namespace, stamped_as=MODEL if self.publishes else namespace)
        request.pause = partial(self.world.pause, 0.001)
        return request

    def opened(self, sequence: Sequence, tokens: list[int]) -> None:
        self.seen["lookups"] += 1
        self.seen["hits"] += sequence.length > 0
        self.seen["asked"] += len(tokens)
        self.found.update(sequence.cached_by_tier)

    async def changes_its_mind(self, namespace: Namespace, tokens: list[int]) -> None:
        """A request that is cancelled at some moment of its life (I29)."""
        self.seen["cancelled"] += 1
        async with asyncio.TaskGroup() as group:
            child = group.create_task(self.request(namespace, tokens))
            after_s = self.rng.choice([None, 0.0, 0.0003, 0.003])
            if after_s is None:
                child.cancel()  # before its first step
            else:
                asyncio.get_running_loop().call_later(after_s, child.cancel)

    def hint(self, namespace: Namespace, tokens: list[int]) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            known = self.cache.hint(
                namespace,
                tokens,
                priority=rng.randint(-4, 4),
                retain_s=rng.choice([None, 0.01, 1e5]),
                returns=(returns := rng.choice([None, True, False])),
                expected_return_s=None if returns is False else rng.choice([None, 1.0]),
            )
            assert known <= len(tokens)
            self.seen["hints"] += known > 0

    def ask(self, namespace: Namespace, tokens: list[int]) -> None:
        """Something that does not wait."""
        rng, cache = self.rng, self.cache
        what = rng.random()
        if what < 0.3:
            self.hint(namespace, tokens)
        elif what < 0.5:
            self.prefetch(namespace, tokens)
        elif what < 0.65:
            try:
                if cache.pin_prefix(namespace, tokens) and (namespace, tokens) not in self.pinned:
                    self.pinned.append((namespace, tokens))
            except NoRoom:
                self.seen["pins refused"] += 1
            assert cache.pinned_pages <= cache.pinned_pages_max
        elif what < 0.75 and self.pinned:
            assert cache.unpin_prefix(*self.pinned.pop(rng.randrange(len(self.pinned))))
        elif self.publishes:
            cache.publish(namespace, tokens)

    def prefetch(self, namespace: Namespace, tokens: list[int]) -> Prefetch:
        rng = self.rng
        deadline = self.world.monotonic() + rng.choice([0.0001, 0.01, 30.0])
        prefetch = self.cache.prefetch(namespace, tokens, deadline=deadline, max_pages=rng.choice([None, 1, 30]))
        if rng.random() < 0.3:
            asyncio.get_running_loop().call_later(rng.choice([0.0, 0.001]), prefetch.cancel)
        return prefetch

    # -- what must hold -----------------------------------------------------------------------------------------------

    async def flushed_stays_flushed(self) -> None:
        """A tenant's pages are removed while moves are under way; nothing brings one back (I12)."""
        namespace = self.rng.choice(TENANTS)
        for _ in range(4):
            self.prefetch(namespace, self.tokens())
        for pin in [pin for pin in self.pinned if pin[0] is namespace]:
            self.pinned.remove(pin)
            assert self.cache.unpin_prefix(*pin)
        held = await self.cache.flush_in_steps(namespace)
        assert held == 0, "nobody has a lease"
        await self.setup.quiet()
        nodes = [info for batch in self.cache.tree.walk(tenant=namespace.tenant) for info in batch]
        assert nodes == [], "a removed page came back"

    async def all_pinned(self) -> None:
        """Every copy is in use, for ever or as if for a step, and more is asked for: everybody has an answer in time
        (I26, I27)."""
        cache = self.cache
        nodes = [info.node for batch in cache.tree.walk() for info in batch]
        resident = {
            tier_id: [node for node in nodes if node.residency(tier_id) is Residency.RESIDENT]
            for tier_id in cache.tiers
        }
        ends_soon = self.rng.random() < 0.5  # then it is waited for
        pins = cache.pin(resident) if ends_soon else [cache.tree.pin(of, tier_id) for tier_id, of in resident.items()]
        kept = {
            tier_id: [(node, node.slots(tier_id).tolist()) for node in pin.nodes]
            for tier_id, pin in zip(cache.tiers, pins, strict=True)
        }
        began = self.world.monotonic()

        async def asks() -> None:
            request = self.begun(self.rng.choice(TENANTS))
            try:
                sequence = await request.open(prompt(self.rng.randrange(50, 90), 60), deadline_s=STEP_S)
            except REFUSALS:
                return
            self.opened(sequence, [0] * 60)
            deadline = self.world.monotonic() + STEP_S
            try:
                plan = await sequence.begin(np.arange(40, dtype=np.int32), deadline=deadline)
                sequence.abort(plan)
            except REFUSALS:
                pass
            finally:
                assert self.world.monotonic() <= deadline + SLACK_S
                sequence.close()

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(asks())
        assert self.world.monotonic() <= began + 2 * (STEP_S + SLACK_S)
        for tier_id, nodes_kept in kept.items():
            for node, slots in nodes_kept:
                assert node.slots(tier_id).tolist() == slots[-node.num_pages :], "a pinned page was moved (I10)"
        if ends_soon:
            cache.unpin(pins)
        for pin in pins:
            cache.free(cache.tree.unpin(pin))

    async def alive_again(self) -> None:
        """Faults and pins are gone (I28)."""
        for tier in self.setup.tiers:
            tier.faults = Faults()
        await self.setup.quiet()
        began = self.world.monotonic()
        tokens, namespace = prompt(99, 17), TENANTS[0]
        assert await self.request(namespace, tokens, deadline_s=ALIVE_AGAIN_S) == 0
        again = await self.request(namespace, tokens, deadline_s=ALIVE_AGAIN_S)
        assert again == 16 or self.is_starved(), "what was just computed is not found"
        assert self.world.monotonic() <= began + ALIVE_AGAIN_S

    def is_starved(self) -> bool:
        """Whether a small index, or pins of others, may keep out a prompt of four pages."""
        return self.cache.tree.metadata_budget is not None or bool(self.pinned)

    def whole(self) -> None:
        """Every page that memory holds is what its tokens say, and what NVMe holds it was given (I11, I13)."""
        for batch in self.cache.tree.walk():
            for info in batch:
                namespace = MODEL if self.publishes else next(each for each in TENANTS if each.tenant == info.tenant)
                tokens = self.cache.tree.tokens_of(info.node).tolist()
                stamps = stamps_of(namespace, tokens)[info.first_page * PAGE_SIZE :]
                for tier_id in self.cache.tiers:
                    if info.node.residency(tier_id) is not Residency.RESIDENT:
                        continue
                    for page, slot in enumerate(info.node.slots(tier_id).tolist()):
                        expected = b"".join(stamps[page * PAGE_SIZE : (page + 1) * PAGE_SIZE])
                        assert len(expected) == PAGE_SIZE * TOKEN_BYTES
                        assert self.setup.raw(tier_id, slot) == expected, f"{tier_id} holds something else"

    def counted(self) -> None:
        """Counters are what clients saw, and what can be counted again (I38)."""
        cache, counters = self.cache, self.cache.counters
        assert counters.hints == self.seen["hints"]
        if not self.seen["cancelled"]:
            assert counters.lookups == self.seen["lookups"]
            assert counters.hits == self.seen["hits"]
            assert counters.tokens_asked == self.seen["asked"]
            assert counters.tokens_computed == self.seen["computed"]
            assert counters.tokens_by_tier == self.found
        for tier_id, tier in cache.tiers.items():
            pages: Counter[str] = Counter()
            for batch in cache.tree.walk():
                for info in batch:
                    if info.node.residency(tier_id) in IN_TIER:
                        pages[info.tenant] += info.num_pages
            assert cache.pages_by_tenant(tier_id) == pages
            assert cache.tree.occupancy(tier_id).total == tier.capacity_pages - tier.num_free
        for lane in cache.lanes:
            assert lane.stats.pages * LAYOUT.page_bytes == lane.stats.bytes

    async def nothing_left(self) -> None:
        """Everything is given back: pins, then all pages."""
        for namespace, tokens in self.pinned:
            assert self.cache.unpin_prefix(namespace, tokens)
        assert self.cache.tree.num_leases == self.cache.num_pins == 0
        await self.cache.flush_in_steps()
        await self.setup.quiet()
        self.setup.check_quiet()
        assert self.cache.tree.num_nodes == self.cache.tree.num_ranked == 0
        assert all(tier.num_free == tier.capacity_pages for tier in self.setup.tiers), "a slot was lost"


async def everything(world: World) -> list[object]:
    rng = world.rng
    faults = rng.choice([Faults(), Faults(), Faults(error=0.05, corrupt=0.03, stall=0.02, stall_s=0.5)])
    nvme_pages = rng.choice([None, 6, 16, 40])
    write_policy = rng.choice(list(WritePolicy)) if nvme_pages is not None else WritePolicy.DEMOTE
    admission = admission_named(rng.choice(list(ADMISSIONS)), nvme_pages) if nvme_pages is not None else None
    small = TenantQuota(host=2 * LAYOUT.page_bytes, nvme=0.25)
    quotas: list[TenantQuotas | None] = [None, {"one": 0.5}, {"two": small, "three": 0.1}]
    async with opened(
        world,
        device_pages=rng.choice([8, 14]),
        host_pages=rng.choice([3, 8, 20]),
        nvme_pages=nvme_pages,
        faults=faults,
        metadata_bytes=rng.choice([None, None, None, 12_000]),
        policy=rng.choice(list(NAMES)),
        tenant_quotas=rng.choice(quotas),
        admission=admission,
        write_policy=write_policy,
        exclusive=write_policy is WritePolicy.DEMOTE and rng.random() < 0.5,
    ) as setup:
        run = Run(world, setup, publishes=rng.random() < 0.4)
        async with asyncio.TaskGroup() as group:
            for _ in range(rng.choice([1, 2, 3])):
                group.create_task(run.client())
        await setup.quiet()
        if rng.random() < 0.5:
            await run.flushed_stays_flushed()
        await run.all_pinned()
        await setup.quiet()
        await run.alive_again()
        run.counted()
        if not (faults.error or faults.corrupt):
            run.whole()
        await run.nothing_left()
        return [*world.trace, world.monotonic(), dataclasses.asdict(setup.cache.counters)]


@pytest.mark.parametrize("block", range(17))
def test_everything_at_once(block: int) -> None:
    for seed in seeds(30, block=block):
        run_simulated(everything, seed)


def test_the_same_seed_is_the_same_run() -> None:
    for seed in seeds(12, block=1):
        assert run_simulated(everything, seed) == run_simulated(everything, seed)
