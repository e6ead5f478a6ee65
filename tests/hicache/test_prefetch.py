"""What is fetched ahead comes before its request, harms within its bound, and holds nothing when given up."""

import asyncio

import pytest

from hicache.errors import BadRequest, Closed
from hicache.prefetch import SHARE
from hicache.tier import DEVICE, HOST, NVME, TierId
from tests.hicache.worlds import MODEL, OTHER, Setup, int32, opened, prompt
from tests.simulation import World, run_simulated


async def clear(setup: Setup, *tier_ids: TierId) -> None:
    """Let everything leave some tiers, fast to slow."""
    for tier_id in tier_ids:
        num_pages = setup.cache.tiers[tier_id].capacity_pages
        deadline = setup.cache.clock.monotonic() + 10
        setup.cache.free({tier_id: await setup.cache.allocate(tier_id, num_pages, deadline=deadline)})


async def on_nvme(setup: Setup, *prompts: list[int]) -> None:
    """Have prompts on NVMe alone."""
    for tokens in prompts:
        await setup.request().run(tokens)
    await clear(setup, DEVICE, HOST)
    for tokens in prompts:
        assert set(where(setup, tokens)) == {NVME}


def where(setup: Setup, tokens: list[int]) -> dict[TierId, int]:
    return setup.cache.coverage(setup.cache.tree.match(MODEL, int32(tokens))).by_tier


def test_a_request_finds_in_the_host_what_was_fetched_ahead() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=16, host_pages=32) as setup:
            tokens = prompt(1, 33)
            await on_nvme(setup, tokens)
            prefetch = setup.cache.prefetch(MODEL, tokens, deadline=world.monotonic() + 5)
            assert (prefetch.num_begun, prefetch.num_left_out, prefetch.is_done) == (8, 0, False)
            assert await prefetch.wait() == prefetch.num_arrived == 8
            assert where(setup, tokens) == {HOST: 32}
            again = setup.cache.prefetch(MODEL, tokens, deadline=world.monotonic() + 5)
            assert (again.num_begun, again.num_there, again.is_done) == (0, 8, True)
            sequence = await setup.request().open(tokens)
            assert sequence.cached_by_tier == {HOST: 32}
            sequence.close()
            setup.check_quiet()

    run_simulated(main, 0)


def test_the_beginning_comes_where_not_all_has_room() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=16, host_pages=16) as setup:
            tokens = prompt(1, 41)
            await on_nvme(setup, tokens)
            prefetch = setup.cache.prefetch(MODEL, tokens, deadline=world.monotonic() + 5)
            assert (prefetch.num_begun, prefetch.num_left_out) == (16 // SHARE, 10 - 16 // SHARE)
            await prefetch.wait()
            found = setup.cache.coverage(setup.cache.tree.match(MODEL, int32(tokens)))
            assert found.runs[0] == (HOST, 16)
            assert found.by_tier == {HOST: 16, NVME: 24}
            more = setup.cache.prefetch(MODEL, tokens, deadline=world.monotonic() + 5, max_pages=100)
            assert (more.num_there, more.num_begun, more.num_left_out) == (4, 6, 0)
            await more.wait()
            setup.check_quiet()

    run_simulated(main, 0)


@pytest.mark.parametrize("age_s", [1.0, 100.0])
def test_only_what_is_cold_leaves_for_it(age_s: float) -> None:
    """Pages used within as long as the request may take to come are as likely to be wanted first: they stay."""

    async def main(world: World) -> None:
        async with opened(world, device_pages=8, host_pages=8) as setup:
            tokens, others = prompt(1, 17), prompt(2, 33)
            await on_nvme(setup, tokens, others)
            await (setup.cache.prefetch(MODEL, others, deadline=world.monotonic() + 1, max_pages=8)).wait()
            assert where(setup, others) == {HOST: 32}
            await asyncio.sleep(age_s)
            prefetch = setup.cache.prefetch(MODEL, tokens, deadline=world.monotonic() + 10, max_pages=4)
            await prefetch.wait()
            if age_s < 10:
                assert (prefetch.num_begun, prefetch.num_left_out) == (0, 4)
                assert where(setup, others) == {HOST: 32}
            else:
                assert (prefetch.num_begun, prefetch.num_left_out) == (4, 0)
                assert where(setup, others) == {HOST: 16, NVME: 16}
            setup.check_quiet()

    run_simulated(main, 0)


def test_what_a_running_request_leases_or_nvme_does_not_have_stays() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=13, host_pages=8) as setup:
            cache, tokens, leased = setup.cache, prompt(1, 17), prompt(2, 17)
            await on_nvme(setup, tokens, leased)
            sequence = await setup.request().open(leased)
            # Half of the host has what the request leases, the other half what is nowhere below.
            await setup.request().run(prompt(3, 17))
            await clear(setup, DEVICE)
            assert (setup.host.num_free, where(setup, prompt(3, 17))) == (0, {HOST: 16})
            await asyncio.sleep(100)
            before = cache.tree.occupancy(HOST)
            prefetch = cache.prefetch(MODEL, tokens, deadline=world.monotonic() + 10, max_pages=4)
            assert (prefetch.num_begun, cache.tree.occupancy(HOST)) == (0, before)
            sequence.close()
            prefetch = cache.prefetch(MODEL, tokens, deadline=world.monotonic() + 10, max_pages=4)
            assert prefetch.num_begun == 4
            assert await prefetch.wait() == 4
            assert where(setup, prompt(3, 17)) == {HOST: 16}
            setup.check_quiet()

    run_simulated(main, 0)


def test_cancel_gives_everything_back_once() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=260, host_pages=270, nvme_pages=300) as setup:
            tokens = prompt(1, 1025)
            await on_nvme(setup, tokens)
            assert setup.nvme is not None
            prefetch = setup.cache.prefetch(MODEL, tokens, deadline=world.monotonic() + 10, max_pages=256)
            assert setup.host.num_free == 14
            async with setup.nvme.hold(after_pages=16):
                await asyncio.sleep(0.1)
                prefetch.cancel()
                prefetch.cancel()
            num_arrived = await prefetch.wait()
            assert 0 < num_arrived < 256
            prefetch.cancel()
            await setup.quiet()
            assert setup.host.num_free == 270 - num_arrived
            assert sum(where(setup, tokens).values()) == 1024
            assert setup.cache.counters.failed_moves == {}
            setup.check_quiet()

    run_simulated(main, 0)


def test_what_has_not_begun_by_its_deadline_is_left() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=260, host_pages=270, nvme_pages=300) as setup:
            tokens = prompt(1, 1025)
            await on_nvme(setup, tokens)
            assert setup.nvme is not None
            assert setup.cache.prefetch(MODEL, tokens, deadline=world.monotonic() - 1, max_pages=256).num_begun == 0
            # Two batches of 16 begin at once, and take far longer than there is time for.
            setup.nvme.latency_s = 3.0
            prefetch = setup.cache.prefetch(MODEL, tokens, deadline=world.monotonic() + 1, max_pages=256)
            assert (prefetch.num_begun, await prefetch.wait()) == (256, 32)
            assert setup.host.num_free == 270 - 32
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_request_hastens_what_is_on_its_way_and_keeps_it() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=70, host_pages=140, nvme_pages=160) as setup:
            assert setup.nvme is not None
            wanted, unwanted = prompt(1, 129), prompt(2, 257)
            await on_nvme(setup, wanted, unwanted)
            # Nobody overtakes what comes first at the same priority; the disk takes a second for each batch.
            setup.nvme.latency_s = 1.0
            first = setup.cache.prefetch(MODEL, unwanted, deadline=world.monotonic() + 100, max_pages=64)
            second = setup.cache.prefetch(MODEL, wanted, deadline=world.monotonic() + 100, max_pages=32)
            num_read = setup.nvme.pages_begun
            await asyncio.sleep(0)

            async def change_minds() -> None:
                await asyncio.sleep(0.2)
                first.cancel()
                second.cancel()

            async with asyncio.TaskGroup() as group:
                group.create_task(change_minds())
                sequence = await setup.request().open(wanted)
            assert sequence.length == 128
            assert await second.wait() == 32, "it was the request's, and cancelling took nothing from it"
            assert setup.nvme.pages_begun - num_read <= 32 + 64, "a page was read twice"
            sequence.close()
            await setup.quiet()
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_request_that_comes_after_a_change_of_mind_finds_all() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=70, host_pages=70, nvme_pages=128) as setup:
            assert setup.nvme is not None
            tokens = prompt(1, 257)
            await on_nvme(setup, tokens)
            async with setup.nvme.hold(after_pages=8):
                prefetch = setup.cache.prefetch(MODEL, tokens, deadline=world.monotonic() + 10, max_pages=64)
                await asyncio.sleep(0.01)
                prefetch.cancel()
            sequence = await setup.request().open(tokens)
            assert sequence.length == 256
            assert set(where(setup, tokens)) <= {DEVICE, HOST}
            sequence.close()
            await setup.quiet()
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_removed_page_does_not_come_back() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=16, host_pages=32) as setup:
            tokens = prompt(1, 33)
            await on_nvme(setup, tokens)
            prefetch = setup.cache.prefetch(MODEL, tokens, deadline=world.monotonic() + 10)
            assert setup.cache.flush() == 0, "a prefetch holds nothing"
            await prefetch.wait()
            assert setup.cache.tree.match(MODEL, int32(tokens)).num_tokens == 0
            await setup.quiet()
            assert setup.host.num_free == 32
            setup.check_quiet()

    run_simulated(main, 0)


def test_what_is_wrong_or_not_there_takes_nothing() -> None:
    async def main(world: World) -> None:
        async with opened(world, nvme_pages=None) as setup:
            await setup.request().run(prompt(1, 17))
            none = setup.cache.prefetch(MODEL, prompt(1, 17), deadline=world.monotonic() + 1)
            assert (none.num_begun, none.num_there, await none.wait()) == (0, 4, 0)
        async with opened(world) as setup:
            now = world.monotonic()
            await setup.request().run(prompt(1, 17))
            assert setup.cache.prefetch(OTHER, prompt(1, 17), deadline=now + 1).num_there == 0
            with pytest.raises(BadRequest, match="max_pages"):
                setup.cache.prefetch(MODEL, prompt(1, 17), deadline=now + 1, max_pages=0)
            with pytest.raises(BadRequest, match="deadline"):
                setup.cache.prefetch(MODEL, prompt(1, 17), deadline=float("nan"))
            with pytest.raises(BadRequest, match="token"):
                setup.cache.prefetch(MODEL, [-1] * 8, deadline=now + 1)
            setup.check_quiet()
        with pytest.raises(Closed):
            setup.cache.prefetch(MODEL, prompt(1, 17), deadline=world.monotonic() + 1)

    run_simulated(main, 0)
