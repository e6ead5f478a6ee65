"""Bugs of other caches that were about moves, replayed through the cache, its lanes and its tiers.

C06, C08: a page in a copy is reused. C07: a removed page comes back. C12: a failed copy is dropped silently. C20: what
was cancelled keeps its pages. Pages have four tokens here; every byte that a request reads is checked.
"""

import asyncio

import pytest

from hicache.errors import NoRoom
from hicache.movers import Priority
from hicache.tier import DEVICE, HOST, NVME, TierId
from tests.hicache.worlds import MODEL, Setup, int32, opened, prompt
from tests.simulation import Faults, World, run_simulated


async def push_down(setup: Setup, tier_id: TierId) -> None:
    """Let everything leave a tier for the next one below."""
    cache = setup.cache
    tier = cache.tiers[tier_id]
    taken = await cache.allocate(tier_id, tier.capacity_pages, deadline=cache.clock.monotonic() + 60)
    cache.free({tier_id: taken})
    await setup.quiet()


async def store(setup: Setup, document: int, num_tokens: int, *, tier_id: TierId) -> None:
    """Compute a document's pages and let them sink to one tier, to be found in no other."""
    await setup.request().run(prompt(document, num_tokens))
    for each in (DEVICE, HOST):
        if each == tier_id:
            break
        await push_down(setup, each)
    assert where(setup, document, num_tokens) == {tier_id: num_tokens}


def where(setup: Setup, document: int, num_tokens: int) -> dict[TierId, int]:
    """Tokens of a document by the fastest tier that has them."""
    match = setup.cache.tree.match(MODEL, int32(prompt(document, num_tokens)))
    return setup.cache.coverage(match).by_tier


def used(setup: Setup) -> dict[TierId, int]:
    return {tier.tier_id: tier.capacity_pages - tier.num_free for tier in setup.tiers}


async def take_all(setup: Setup, tier_id: TierId) -> list[int]:
    """Every slot that can be had of a tier at once, without waiting for others."""
    cache, slots = setup.cache, list[int]()
    while True:
        try:
            taken = await cache.allocate(tier_id, 1, deadline=cache.clock.monotonic() + 1, wait=False)
        except NoRoom:
            return slots
        slots += taken.tolist()


@pytest.mark.parametrize("after_pages", range(4))
def test_case_c06_pages_under_promotion_are_not_handed_out(after_pages: int) -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=8, host_pages=8, nvme_pages=None) as setup:
            await store(setup, 1, 16, tier_id=HOST)
            (node,) = setup.cache.tree.match(MODEL, int32(prompt(1, 16))).nodes
            sources = set(node.slots(HOST).tolist())
            async with asyncio.TaskGroup() as group, setup.host.hold(after_pages=after_pages) as barrier:
                reading = group.create_task(setup.request().run(prompt(1, 17)))
                await barrier.reached()
                taken = await take_all(setup, HOST)
                assert len(taken) == 4
                assert not sources & set(taken)
                # Whoever gets a page writes to it at once.
                for slot in taken:
                    setup.host._view(slot)[:] = b"\xa5" * setup.host.page_bytes
                barrier.release()
                assert await reading == 16
            setup.cache.free({HOST: int32(taken)})
            assert where(setup, 1, 16) == {DEVICE: 16}
            await setup.quiet()
            setup.check_quiet()

    run_simulated(main, 0)


def test_case_c06_not_even_where_a_slower_copy_would_let_them_leave() -> None:
    """A lease keeps some copy, which NVMe has: that the source stays is the move's doing alone."""

    async def main(world: World) -> None:
        async with opened(world, device_pages=8, host_pages=8) as setup:
            await store(setup, 1, 16, tier_id=NVME)
            await setup.cache.prefetch(MODEL, prompt(1, 16), deadline=world.monotonic() + 1, max_pages=4).wait()
            (node,) = setup.cache.tree.match(MODEL, int32(prompt(1, 16))).nodes
            sources = set(node.slots(HOST).tolist())
            async with asyncio.TaskGroup() as group, setup.host.hold(after_pages=1) as barrier:
                reading = group.create_task(setup.request().run(prompt(1, 17)))
                await barrier.reached()
                taken = await take_all(setup, HOST)
                assert len(taken) == 4
                assert not sources & set(taken)
                barrier.release()
                assert await reading == 16
            setup.cache.free({HOST: int32(taken)})
            await setup.quiet()
            setup.check_quiet()

    run_simulated(main, 0)


@pytest.mark.parametrize("after_pages", range(4))
def test_case_c08_a_page_is_not_reused_before_the_copy_out_of_it_has_ended(after_pages: int) -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=4, host_pages=16, nvme_pages=None) as setup:
            await setup.request().run(prompt(1, 16))
            async with asyncio.TaskGroup() as group, setup.device.hold(after_pages=after_pages) as barrier:
                # B wants all four device pages, writes its stamps into them at once, and reads them back.
                other = group.create_task(setup.request().run(prompt(2, 16), chunk=16))
                await barrier.reached()
                await asyncio.sleep(1.0)
                assert not other.done()
                barrier.release()
                assert await other == 0
            assert where(setup, 1, 16) == {HOST: 16}
            assert where(setup, 2, 16) == {DEVICE: 16}
            assert await setup.request().run(prompt(1, 17)) == 16
            assert await setup.request().run(prompt(2, 17)) == 16
            await setup.quiet()
            setup.check_quiet()

    run_simulated(main, 0)


@pytest.mark.parametrize("move", ["demotion", "promotion"])
@pytest.mark.parametrize("after_pages", [0, 2])
def test_case_c07_what_was_removed_under_a_move_does_not_come_back(move: str, after_pages: int) -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=8, host_pages=8, nvme_pages=32) as setup:
            cache, tokens = setup.cache, int32(prompt(1, 16))
            assert setup.nvme is not None
            before = used(setup)
            await store(setup, 1, 16, tier_id=HOST if move == "demotion" else NVME)
            async with asyncio.TaskGroup() as group, setup.nvme.hold(after_pages=after_pages) as barrier:
                if move == "demotion":
                    group.create_task(push_down(setup, HOST))
                else:
                    (node,) = cache.tree.match(MODEL, tokens).nodes
                    slots = await cache.allocate(HOST, 4, deadline=world.monotonic() + 1)
                    cache.start_move(node, NVME, HOST, slots, Priority.PREFETCH)
                await barrier.reached()
                cache.free(cache.tree.remove(MODEL, tokens, first_page=0).freed)
                assert cache.tree.match(MODEL, tokens).num_tokens == 0
                barrier.release()
            await setup.quiet()
            assert cache.tree.match(MODEL, tokens).num_tokens == 0
            assert used(setup) == before
            assert await setup.request().run(prompt(1, 17)) == 0
            assert await setup.request().run(prompt(1, 17)) == 16
            await setup.quiet()
            setup.check_quiet()

    run_simulated(main, 0)


@pytest.mark.parametrize("fault", ["error once", "error", "corrupt"])
def test_case_c12_a_failed_read_is_reported_and_the_next_is_served(fault: str) -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=16, host_pages=32, nvme_pages=64) as setup:
            nvme = setup.nvme
            assert nvme is not None
            for document in (1, 2):
                await setup.request().run(prompt(document, 16))
            for tier_id in (DEVICE, HOST):
                await push_down(setup, tier_id)
            assert where(setup, 1, 16) == where(setup, 2, 16) == {NVME: 16}
            (node,) = setup.cache.tree.match(MODEL, int32(prompt(1, 16))).nodes
            if fault == "error once":
                nvme.fail_page = nvme.pages_begun + 2
            elif fault == "error":
                nvme.faults = Faults(error=1.0)
            else:
                nvme.fill(int(node.slots(NVME)[2]), setup.cache.tree.identities(node)[3], bytes(nvme.page_bytes))
            began = world.monotonic()
            sequence = await setup.request().open(prompt(1, 17), deadline_s=2.0)
            # What could be had is had; it never waits for more than the reads took to fail.
            assert world.monotonic() - began < 1.0
            assert sequence.length == (0 if fault == "error" else 8)
            sequence.close()
            nvme.faults = Faults()
            assert await setup.request().run(prompt(2, 17)) == 16
            if fault == "corrupt":
                assert await setup.request().run(prompt(1, 17)) == 8
            assert await setup.request().run(prompt(1, 17)) == 16
            await setup.quiet()
            assert setup.cache._holders == 0
            assert not any(setup.cache._under_way.values())
            setup.check_quiet()

    run_simulated(main, 0)


def test_case_c20_cancelled_promotions_that_never_began_give_their_pages_back() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=32, host_pages=512, nvme_pages=640) as setup:
            nvme = setup.nvme
            assert nvme is not None
            for document in range(32):
                await setup.request().run(prompt(document, 64), chunk=64)
            for tier_id in (DEVICE, HOST):
                await push_down(setup, tier_id)
            assert all(where(setup, document, 64) == {NVME: 64} for document in range(32))
            async with nvme.hold(after_pages=0) as barrier:
                for document in range(32):
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.5):
                            await setup.request().run(prompt(document, 65))
                barrier.release()
            await setup.quiet()
            # What had begun by then may have arrived: it is in the tree, and leaves when room is wanted.
            await push_down(setup, HOST)
            assert setup.host.num_free == 512
            assert await setup.request().run(prompt(99, 64), chunk=64) == 0
            for document in range(32):
                assert await setup.request().run(prompt(document, 65)) == 64
            await setup.quiet()
            setup.check_quiet()

    run_simulated(main, 0)
