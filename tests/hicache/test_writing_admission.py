"""What NVMe admission does to a cache: which pages go down, which leave for nothing, which are never asked about."""

from collections import Counter
from random import Random

import pytest

from hicache.admissions import admission_named
from hicache.node import Node
from hicache.policy.admission import SecondTouchAdmission, Verdict
from hicache.policy.base import Use
from hicache.policy.predicted import PredictedAdmission
from hicache.tier import DEVICE, HOST, NVME, TierId
from hicache.write_policy import WritePolicy
from tests.hicache.durable import Image
from tests.hicache.worlds import MODEL, PAGE_SIZE, Setup, opened, prompt
from tests.simulation import World, run_simulated


async def clear(setup: Setup, *tier_ids: TierId) -> None:
    """Let everything leave some tiers, fast to slow."""
    for tier_id in tier_ids:
        deadline = setup.cache.clock.monotonic() + 10
        num_pages = setup.cache.tiers[tier_id].capacity_pages
        setup.cache.free({tier_id: await setup.cache.allocate(tier_id, num_pages, deadline=deadline)})


def written(setup: Setup) -> int:
    """Pages that the host has sent to NVMe."""
    return sum([lane.stats.pages for lane in setup.cache.lanes if lane.name == "host->nvme"])


def test_a_refused_page_leaves_the_host_for_nothing_and_is_counted() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=16, admission=SecondTouchAdmission()) as setup:
            once, twice = prompt(1, 33), prompt(2, 33)
            await setup.request().run(once)
            await clear(setup, DEVICE, HOST)
            assert written(setup) == 0
            assert setup.cache.counters.refused_pages == {Verdict.ONCE.value: 8}
            assert setup.cache.tree.match(MODEL, once).num_tokens == 0
            await setup.request().run(twice)
            assert await setup.request().run(twice) == 32
            await clear(setup, DEVICE, HOST)
            assert written(setup) == 8
            assert await setup.request().run(twice) == 32
            # What was refused once is known when it comes again.
            await setup.request().run(once)
            await clear(setup, DEVICE, HOST)
            assert written(setup) == 16
            assert setup.cache.counters.refused_pages == {Verdict.ONCE.value: 8}
            setup.check_quiet()

    run_simulated(main, 0)


def test_what_was_refused_is_known_again_within_a_longer_prompt() -> None:
    """It comes back as one run with what follows, up to the end of a prompt that was never there before."""

    async def main(world: World) -> None:
        async with opened(world, device_pages=24, admission=SecondTouchAdmission()) as setup:
            prompt_and_answer = prompt(1, 49)
            await setup.request().run(prompt_and_answer[:33])
            await clear(setup, DEVICE, HOST)
            assert setup.cache.tree.num_nodes == 0
            assert await setup.request().run(prompt_and_answer) == 0
            await clear(setup, DEVICE, HOST)
            assert written(setup) >= 8, "what follows may be a node of its own"
            setup.check_quiet()

    run_simulated(main, 0)


def test_what_is_needed_goes_down_unasked() -> None:
    """The last copy of pages that a request uses cannot leave: it goes down, whatever admission says."""

    async def main(world: World) -> None:
        async with opened(world, device_pages=16, admission=SecondTouchAdmission()) as setup:
            tokens = prompt(1, 33)
            await setup.request().run(tokens)
            await clear(setup, DEVICE)
            match = setup.cache.tree.match(MODEL, tokens)
            lease = setup.cache.tree.lease(match, owner="test", deadline=None, now=world.monotonic())
            await clear(setup, HOST)
            assert setup.cache.tree.occupancy(NVME).resident == 8
            assert setup.cache.counters.refused_pages == {}
            setup.cache.release(lease)
            setup.check_quiet()

    run_simulated(main, 0)


def test_writing_through_asks_too_and_persisting_does_not() -> None:
    async def main(world: World) -> None:
        async with opened(
            world, device_pages=24, image=Image(), write_policy=WritePolicy.THROUGH, admission=SecondTouchAdmission()
        ) as setup:
            first, second = prompt(1, 33), prompt(2, 33)
            await setup.request().run(first)
            await setup.quiet()
            assert setup.cache.tree.occupancy(NVME).resident == 0
            await setup.request().run(first)
            await setup.quiet()
            assert setup.cache.tree.occupancy(NVME).resident == 8
            await setup.request().run(second)
            persisted = await setup.cache.persist(MODEL, second, deadline=world.monotonic() + 10)
            assert persisted.num_tokens == 32
            setup.check_quiet()

    run_simulated(main, 0)


def test_the_policy_hears_of_every_use_and_every_write() -> None:
    """What it is told adds up to what NVMe got."""

    class Told(PredictedAdmission):
        num_uses = num_written = 0

        def used(self, use: Use) -> None:
            self.num_uses += 1
            super().used(use)

        def written(self, node: Node, now: float) -> None:
            self.num_written += node.num_pages
            super().written(node, now)

    async def main(world: World) -> None:
        policy = Told(capacity_pages=64)
        async with opened(world, device_pages=16, host_pages=16, admission=policy) as setup:
            assert setup.nvme is not None
            num_pages: Counter[str] = Counter()
            setup.nvme.watch = lambda call, pages: num_pages.update({call: len(pages)})
            rng = Random(3)
            for _ in range(40):
                document = rng.randrange(8)
                await setup.request().run(prompt(document, 9 + 4 * rng.randrange(6)))
            await setup.quiet()
            assert policy.num_uses == 40
            assert policy.num_written == num_pages["write"] > 0
            setup.check_quiet()

    run_simulated(main, 0)


@pytest.mark.parametrize("name", ["second-touch", "predicted"])
def test_every_byte_is_right_whatever_is_refused(name: str) -> None:
    async def main(world: World) -> None:
        admission = admission_named(name, 24, page_size=PAGE_SIZE)
        async with opened(world, device_pages=12, host_pages=8, admission=admission) as setup:
            rng = Random(world.rng.random())
            for _ in range(60):
                await setup.request().run(prompt(rng.randrange(10), 9 + 4 * rng.randrange(6)))
                setup.check()
            await setup.quiet()
            setup.check_quiet()

    for seed in range(3):
        run_simulated(main, seed)
