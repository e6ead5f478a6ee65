"""A disk that hangs or fails is a miss for what it alone has, and never keeps a request from its answer."""

import asyncio

import pytest

from hicache.cache import FAILING_S
from hicache.errors import DeadlineExceeded
from hicache.tier import DEVICE, HOST, NVME
from tests.hicache.worlds import MODEL, OTHER, Setup, UnreadablePage, int32, opened, prompt
from tests.simulation import Faults, World, run_simulated


async def on_nvme(setup: Setup, tokens: list[int]) -> None:
    """Have a prompt on NVMe alone."""
    await setup.request().run(tokens)
    for tier_id in (DEVICE, HOST):
        num_pages = setup.cache.tiers[tier_id].capacity_pages
        deadline = setup.cache.clock.monotonic() + 10
        setup.cache.free({tier_id: await setup.cache.allocate(tier_id, num_pages, deadline=deadline)})
    found = setup.cache.coverage(setup.cache.tree.match(MODEL, int32(tokens)))
    assert set(found.by_tier) == {NVME}


@pytest.mark.parametrize("deadline_s", [0.5, 60.0])
def test_a_prefix_on_a_hung_disk_is_a_miss_within_the_deadline(deadline_s: float) -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=16, host_pages=16) as setup:
            tokens = prompt(1, 33)
            await on_nvme(setup, tokens)
            assert setup.nvme is not None
            async with setup.nvme.hold(after_pages=0):
                began, request = world.monotonic(), setup.request()
                sequence = await request.open(tokens, deadline_s=deadline_s)
                assert world.monotonic() - began < min(deadline_s, 5)
                assert sequence.length == 0
                assert sequence.cached_by_tier == {}
                await request.step(tokens[:16])
                # Part of a page of it is no reason to wait, either.
                other = setup.request()
                assert (await other.open(prompt(1, 33, branch=1, shared=18), deadline_s=deadline_s)).length == 16
                assert world.monotonic() - began < 2 * min(deadline_s, 5)
                for each in (sequence, other.sequence):
                    assert each is not None
                    each.close()
            await setup.quiet()
            assert await setup.request().run(tokens) == 32, "the pages were not forgotten"
            setup.check_quiet()

    run_simulated(main, 0)


def test_what_arrives_before_the_disk_hangs_is_used() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=30, host_pages=30) as setup:
            assert setup.nvme is not None
            tokens = prompt(1, 65)
            await on_nvme(setup, tokens)
            await setup.request().run(prompt(1, 33))
            async with setup.nvme.hold(after_pages=0):
                sequence = await setup.request().open(tokens)
                assert sequence.length == 32
                sequence.close()
            await setup.quiet()
            assert await setup.request().run(tokens) == 64
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_slow_disk_is_waited_for_while_it_gives_anything() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=70, host_pages=70) as setup:
            assert setup.nvme is not None
            tokens = prompt(1, 257)
            await on_nvme(setup, tokens)
            setup.nvme.latency_s = 1.5
            began = world.monotonic()
            assert (await setup.request().open(tokens)).length == 256
            assert world.monotonic() - began > 1.5

    run_simulated(main, 0)


def test_a_read_that_fails_once_costs_a_hit_and_no_page() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=16, host_pages=16) as setup:
            assert setup.nvme is not None
            tokens = prompt(1, 33)
            await on_nvme(setup, tokens)
            setup.nvme.fail_page = setup.nvme.pages_begun + 2
            sequence = await setup.request().open(tokens)
            assert sequence.length == 8
            sequence.close()
            assert setup.cache.counters.corrupt_pages == {}
            assert await setup.request().run(tokens) == 32
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_disk_that_fails_under_a_step_is_asked_again_later() -> None:
    """The context streams from NVMe, as neither the device nor the host can hold it."""

    async def main(world: World) -> None:
        async with opened(world, device_pages=6, host_pages=2) as setup:
            assert setup.nvme is not None
            tokens = prompt(1, 65)
            await setup.request().run(tokens)
            request = setup.request()
            sequence = await request.open(tokens)
            assert sequence.length == 64
            setup.nvme.faults = Faults(error=1.0)
            with pytest.raises(UnreadablePage):
                await request.step(tokens[64:])
            # Who gives up and opens again computes what is there alone, instead of failing again and again.
            again = setup.request()
            assert (await again.open(tokens)).length < 64
            await again.step(tokens[again.sequence.length :][:8] if again.sequence is not None else [])
            setup.nvme.faults = Faults()
            await request.step(tokens[64:])
            for each in (sequence, again.sequence):
                assert each is not None
                each.close()
            await asyncio.sleep(FAILING_S)
            assert (await setup.request().open(tokens)).length == 64
            assert setup.cache.counters.corrupt_pages == {}
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_published_prefix_on_a_hung_disk_is_a_miss_for_other_tenants() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=16, host_pages=16) as setup:
            assert setup.nvme is not None
            tokens = prompt(1, 33)
            await on_nvme(setup, tokens)
            assert setup.cache.publish(MODEL, tokens) == 32
            async with setup.nvme.hold(after_pages=0):
                began = world.monotonic()
                sequence = await setup.request(OTHER, stamped_as=MODEL).open(tokens)
                assert world.monotonic() - began < 5
                assert sequence.length == 0
                sequence.close()
            await asyncio.sleep(1)
            await setup.quiet()
            setup.check_quiet()

    run_simulated(main, 0)


def test_who_is_in_a_hurry_has_nobodys_pages_dropped_for_a_slow_disk() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=16, host_pages=16) as setup:
            prompts = [prompt(number, 33) for number in (1, 2, 3)]
            for tokens in prompts:
                await setup.request().run(tokens)
            cache = setup.cache
            assert setup.nvme is not None
            cache.free({DEVICE: await cache.allocate(DEVICE, 16, deadline=world.monotonic() + 10)})
            async with setup.nvme.hold(after_pages=0):
                for num_pages in (11, 13, 15):
                    with pytest.raises(DeadlineExceeded):
                        await cache.allocate(HOST, num_pages, deadline=world.monotonic() + 0.2)
            await setup.quiet()
            found = [cache.coverage(cache.tree.match(MODEL, int32(tokens))).num_tokens for tokens in prompts]
            assert found == [32] * 3

    run_simulated(main, 0)
