"""Random histories that end in a crash at any moment, and what the next life must find (I01, I05, I09, I12, I14)."""

import asyncio
import copy
from dataclasses import dataclass, field, replace

import pytest

from hicache.errors import DeadlineExceeded, NoRoom, NotResident, TierUnavailable
from hicache.namespace import Namespace
from hicache.tier import NVME, PageIdentity
from tests.hicache.durable import Image
from tests.hicache.test_restart import check_closed
from tests.hicache.worlds import LAYOUT, MODEL, OTHER, PAGE_SIZE, Setup, UnreadablePage, opened, prompt
from tests.simulation import Faults, World, run_simulated, seeds

REFUSALS = (DeadlineExceeded, NoRoom, NotResident, TierUnavailable, UnreadablePage)
FLUSHED = Namespace(model="a model", layout=LAYOUT, tenant="one who flushes")


@dataclass(slots=True)
class Crash:
    """A moment at which the machine may have stopped."""

    left: Image
    """What the medium holds then."""
    certain: set[PageIdentity]
    """What it must hold: durable, with everything before it, and not given up since."""
    is_flushed: bool
    """`FLUSHED` was removed durably and nobody has used it since."""


@dataclass(slots=True)
class History:
    """One life of a cache."""

    world: World
    setup: Setup
    crashes: list[Crash] = field(default_factory=list)
    is_flushed: bool = False

    def crash(self) -> None:
        durable = self.setup.durable
        certain = {page.identity for page in durable.certain().closed().values()}
        self.crashes.append(Crash(copy.deepcopy(durable.crash(self.world.rng)), certain, self.is_flushed))

    def tokens(self) -> list[int]:
        rng = self.world.rng
        length = rng.randrange(1, 50)
        return prompt(rng.randrange(4), length, branch=rng.randrange(3), shared=rng.randrange(length + 1))

    async def request(self, namespace: Namespace) -> None:
        request, tokens = self.setup.request(namespace), self.tokens()
        try:
            await request.open(tokens)
            assert request.sequence is not None
            while request.sequence.length < len(tokens):
                start = request.sequence.length
                await request.step(tokens[start : start + self.world.rng.randrange(1, 9)])
                await self.world.pause(0.01)
        except REFUSALS:
            pass
        finally:
            if request.sequence is not None:
                request.sequence.close()

    async def client(self) -> None:
        rng = self.world.rng
        for _ in range(6):
            await self.world.pause(0.01)
            await self.request(rng.choice([MODEL, MODEL, OTHER]))
            self.crash()
            if rng.random() < 0.5:
                await self.persist(rng.choice([MODEL, OTHER]))

    async def persist(self, namespace: Namespace) -> None:
        tokens = self.tokens()
        cache, durable = self.setup.cache, self.setup.durable
        try:
            persisted = await cache.persist(namespace, tokens, deadline=self.world.monotonic() + 10)
        except (DeadlineExceeded, TierUnavailable):
            return
        assert durable.durable >= persisted.number
        identities = [
            identity
            for node in cache.tree.match(namespace, tokens, published=False).nodes
            for identity in cache.tree.identities(node)
        ][: persisted.num_tokens // PAGE_SIZE]
        assert len(identities) * PAGE_SIZE == persisted.num_tokens
        certain = {page.identity for page in durable.certain().closed().values()}
        assert certain.issuperset(identities), "what was said to be durable is not"
        self.crash()

    async def flusher(self) -> None:
        for _ in range(4):
            self.is_flushed = False
            await self.request(FLUSHED)
            await self.world.pause(0.005)
            assert await self.setup.cache.flush_in_steps(FLUSHED) == 0
            self.crash()
            self.is_flushed = await self.setup.cache.settle(deadline=self.world.monotonic() + 10)
            self.crash()
            await self.world.pause(0.01)
            self.crash()


FAULTS = {
    "no faults": Faults(),
    "errors": Faults(error=0.05, stall=0.02, stall_s=0.5),
    "damage": Faults(error=0.03, corrupt=0.03),
}
"""With damage, flushes fail, too."""


@pytest.mark.parametrize("block", range(2))
@pytest.mark.parametrize("name", FAULTS)
def test_what_was_durable_comes_back_whenever_the_machine_stops(name: str, block: int) -> None:
    """Several clients over small tiers, one of whom flushes what is its own. At many moments the machine may stop: each
    is followed by a life that finds what it must, nothing that it must not, and never a wrong byte."""
    num_certain = num_flushed = 0
    for seed in seeds(4, block=block):
        image = Image()
        for life in range(2):
            crashes = run_simulated(lambda world: _life(world, FAULTS[name], image), 10 * seed + life)  # noqa: B023
            for crash in [*crashes[:: len(crashes) // 6 + 1], crashes[-1]]:
                num_certain += len(crash.certain)
                num_flushed += crash.is_flushed
                run_simulated(lambda world: _check(world, crash), seed)  # noqa: B023
            image = crashes[-1].left
    assert num_certain > 100
    assert num_flushed > 5


async def _life(world: World, faults: Faults, image: Image) -> list[Crash]:
    rng = world.rng
    async with opened(
        world,
        device_pages=rng.choice([6, 9, 14]),
        host_pages=rng.choice([3, 8, 20]),
        nvme_pages=40,
        faults=faults,
        image=copy.deepcopy(image),
    ) as setup:
        history = History(world, setup)

        async def watch() -> None:
            while True:
                await asyncio.sleep(rng.uniform(0, 0.02))
                setup.check()
                if faults.corrupt:
                    setup.durable.sync_fails = rng.random() < 0.2
                else:
                    check_closed(setup)
                history.crash()

        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch())
            clients = [group.create_task(history.client()) for _ in range(rng.choice([1, 2, 3]))]
            clients.append(group.create_task(history.flusher()))
            await asyncio.wait(clients)
            watching.cancel()
        await setup.quiet()
        setup.check_quiet()
        history.crash()
    return history.crashes


async def _check(world: World, crash: Crash) -> None:
    """The life after."""
    async with opened(world, device_pages=20, host_pages=20, nvme_pages=40, image=copy.deepcopy(crash.left)) as setup:
        tree = setup.cache.tree
        found = {
            identity for batch in tree.walk() for info in batch for identity in tree.identities(info.node)
        }
        assert found >= crash.certain, "what was durable did not come back"
        assert found <= {page.identity for page in crash.left.pages.values()}
        if crash.is_flushed:
            assert not any(identity.namespace == FLUSHED.digest for identity in found), "what was removed came back"
        assert setup.cache.recovered.pages == len(found) == tree.occupancy(NVME).resident
        check_closed(setup)
        setup.check_quiet()
        for namespace in (MODEL, OTHER, FLUSHED):
            for document in range(4):
                # Every byte of what is found is compared with its stamp.
                await setup.request(replace(namespace)).run(prompt(document, 49))
        setup.check_quiet()
