"""When pages are written to NVMe under each policy, and what host and NVMe hold together."""

import pytest

from hicache.cache import Cache
from hicache.errors import BadRequest
from hicache.residency import Residency
from hicache.tier import DEVICE, HOST, NVME, TierId
from hicache.write_policy import WritePolicy
from tests.hicache.durable import Image
from tests.hicache.worlds import LAYOUT, MODEL, OTHER, Setup, int32, opened, prompt
from tests.simulation import World, run_simulated


async def clear(setup: Setup, *tier_ids: TierId) -> None:
    """Let everything leave some tiers, fast to slow."""
    for tier_id in tier_ids:
        num_pages = setup.cache.tiers[tier_id].capacity_pages
        deadline = setup.cache.clock.monotonic() + 10
        setup.cache.free({tier_id: await setup.cache.allocate(tier_id, num_pages, deadline=deadline)})


def pages_in(setup: Setup, tier_id: TierId, tokens: list[int]) -> int:
    """How many pages of a prompt a tier has, whatever others have."""
    match = setup.cache.tree.match(MODEL, int32(tokens))
    return sum(node.num_pages for node in match.nodes if node.residency(tier_id) is Residency.RESIDENT)


@pytest.mark.parametrize(
    ("write_policy", "after_one", "after_two"),
    [(WritePolicy.DEMOTE, 0, 0), (WritePolicy.THROUGH, 8, 8), (WritePolicy.SELECTIVE, 0, 8)],
)
def test_pages_are_on_nvme_after_so_many_uses(write_policy: WritePolicy, after_one: int, after_two: int) -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=16, write_policy=write_policy) as setup:
            tokens = prompt(1, 33)
            await setup.request().run(tokens)
            await setup.quiet()
            assert pages_in(setup, NVME, tokens) == after_one
            await setup.request().run(tokens)
            await setup.quiet()
            assert pages_in(setup, NVME, tokens) == after_two
            assert setup.cache.counters.pages_written_through == after_two
            assert pages_in(setup, DEVICE, tokens) == 8, "writing through takes nothing from where it is"
            setup.check_quiet()

    run_simulated(main, 0)


def test_each_namespace_has_its_own() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=24) as setup:
            setup.cache.set_write_policy(OTHER, WritePolicy.THROUGH)
            await setup.request(MODEL).run(prompt(1, 33))
            await setup.request(OTHER).run(prompt(1, 33))
            await setup.quiet()
            assert setup.cache.tree.occupancy(NVME).resident == 8
            setup.cache.set_write_policy(OTHER, WritePolicy.DEMOTE)
            await setup.request(OTHER).run(prompt(2, 33))
            await setup.quiet()
            assert setup.cache.tree.occupancy(NVME).resident == 8
            setup.check_quiet()

    run_simulated(main, 0)


def test_what_was_written_through_leaves_the_host_without_a_write() -> None:
    async def main(world: World) -> None:
        for write_policy, num_writes in ((WritePolicy.DEMOTE, 8), (WritePolicy.THROUGH, 0)):
            async with opened(world, device_pages=16, write_policy=write_policy) as setup:
                assert setup.nvme is not None
                tokens = prompt(1, 33)
                await setup.request().run(tokens)
                await clear(setup, DEVICE)
                await setup.quiet()
                begun = setup.nvme.pages_begun
                await clear(setup, HOST)
                assert setup.nvme.pages_begun - begun == num_writes
                assert await setup.request().run(tokens) == 32
                setup.check_quiet()

    run_simulated(main, 0)


def test_what_was_written_through_survives_a_crash() -> None:
    async def main(world: World) -> None:
        image = Image()
        tokens = prompt(1, 33)
        async with opened(world, device_pages=16, image=image, write_policy=WritePolicy.THROUGH) as setup:
            await setup.request().run(tokens)
            await setup.quiet()
            await setup.durable.sync(setup.durable.accepted, deadline=world.monotonic() + 10)
            image = setup.durable.crash(world.rng)
        async with opened(world, device_pages=16, image=image) as setup:
            assert await setup.request().run(tokens) == 32
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_disk_that_hangs_ties_up_one_batch_and_no_request() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=40, write_policy=WritePolicy.THROUGH) as setup:
            assert setup.nvme is not None
            async with setup.nvme.hold(after_pages=0):
                for document in range(4):
                    began = world.monotonic()
                    await setup.request().run(prompt(document, 33))
                    assert world.monotonic() - began < 1
            await setup.quiet()
            for document in range(4):
                assert await setup.request().run(prompt(document, 33)) == 32
            await setup.quiet()
            setup.check_quiet()

    run_simulated(main, 0)


def test_exclusive_keeps_one_copy_and_so_more_pages() -> None:
    """Two prompts of 8 pages in a host of 8 and an NVMe tier of 8: only together have they room for both, and only
    where none of them has a page of the other."""

    async def main(world: World) -> None:
        for exclusive in (False, True):
            async with opened(world, device_pages=9, host_pages=8, nvme_pages=10, exclusive=exclusive) as setup:
                first, second = prompt(1, 33), prompt(2, 33)
                await setup.request().run(first)
                await clear(setup, DEVICE, HOST)
                assert await setup.request().run(first) == 32
                assert pages_in(setup, NVME, first) == (0 if exclusive else 8)
                await clear(setup, DEVICE)
                await setup.request().run(second)
                await clear(setup, DEVICE)
                await setup.quiet()
                found = [pages_in(setup, HOST, each) + pages_in(setup, NVME, each) for each in (first, second)]
                assert found == [8, 8]
                setup.check_quiet()

    run_simulated(main, 0)


def test_exclusive_leaves_what_is_above_a_page_on_nvme_and_what_was_persisted() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=20, host_pages=20, image=Image(), exclusive=True) as setup:
            cache, short, long = setup.cache, prompt(1, 17), prompt(1, 33)
            await setup.request().run(long)
            await clear(setup, DEVICE, HOST)
            assert await setup.request().run(short) == 16
            assert (pages_in(setup, NVME, long), pages_in(setup, HOST, long)) == (8, 4)
            assert await setup.request().run(long) == 32
            assert (pages_in(setup, NVME, long), pages_in(setup, HOST, long)) == (0, 8)
            deadline = world.monotonic() + 10
            assert (await cache.persist(MODEL, short, deadline=deadline)).num_tokens == 16
            await clear(setup, DEVICE, HOST)
            assert await setup.request().run(long) == 32
            # With what it was joined to on NVMe.
            assert (pages_in(setup, NVME, long), pages_in(setup, HOST, long)) == (8, 8)
            setup.check_quiet()

    run_simulated(main, 0)


def test_writing_through_needs_an_nvme_tier_that_may_keep_copies() -> None:
    async def main(world: World) -> None:
        async with opened(world, exclusive=True) as setup:
            with pytest.raises(BadRequest, match="write_policy"):
                setup.cache.set_write_policy(MODEL, WritePolicy.SELECTIVE)
            with pytest.raises(BadRequest, match="write_policy"):
                Cache(LAYOUT, setup.cache.tiers, clock=world, write_policy=WritePolicy.THROUGH, exclusive=True)
            with pytest.raises(BadRequest, match="exclusive"):
                Cache(LAYOUT, setup.cache.tiers, clock=world, exclusive="yes")  # type: ignore[arg-type]  # a mistake
        async with opened(world, nvme_pages=None) as setup:
            setup.cache.set_write_policy(MODEL, WritePolicy.DEMOTE)
            with pytest.raises(BadRequest, match="write_policy: write-through writes to NVMe"):
                setup.cache.set_write_policy(MODEL, WritePolicy.THROUGH)
            with pytest.raises(BadRequest, match="write_policy"):
                Cache(LAYOUT, setup.cache.tiers, clock=world, write_policy=WritePolicy.SELECTIVE)

    run_simulated(main, 0)


def test_policies_go_by_their_names() -> None:
    assert [WritePolicy.named(each.value) for each in WritePolicy] == list(WritePolicy)
    with pytest.raises(BadRequest, match="demote-on-evict, write-through, write-through-selective"):
        WritePolicy.named("write-around")
