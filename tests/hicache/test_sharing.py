"""What requests share: a published prefix between tenants, a prompt between beams; and what a full index costs them.

Tenants that share pages have equal stamps here, since KV does not name a tenant: who may read what is checked apart.
"""

import asyncio
import dataclasses
import random

import pytest

from hicache.cache import Counters
from hicache.errors import BadRequest, DeadlineExceeded, NoRoom, NotResident, TierUnavailable
from hicache.namespace import Namespace
from hicache.tier import DEVICE, HOST, NVME, TierId
from tests.hicache.worlds import (
    MODEL,
    PAGE_SIZE,
    Request,
    Setup,
    UnreadablePage,
    int32,
    opened,
    prompt,
)
from tests.simulation import Faults, World, run_simulated, seeds

READER = dataclasses.replace(MODEL, tenant="reader")
THIRD = dataclasses.replace(MODEL, tenant="a third tenant")
SALTED = dataclasses.replace(READER, salt=b"salt")


def request(setup: Setup, namespace: Namespace) -> Request:
    return setup.request(namespace, stamped_as=MODEL)


# -- a published prefix ------------------------------------------------------------------------------------------------


def test_a_published_prefix_is_copied_instead_of_computed_and_continued_as_ones_own() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=64) as setup:
            tree = setup.cache.tree
            system = prompt(1, 18)
            await setup.request().run([*system, *prompt(7, 20)])
            assert await request(setup, READER).run(system[:9]) == 0, "nothing is published yet"
            assert setup.cache.flush(READER) == 0
            assert setup.cache.publish(MODEL, system) == 16
            before = [info for batch in tree.walk(tenant="") for info in batch]
            await asyncio.sleep(1)
            mine = [*system, *prompt(8, 14)]
            reader = request(setup, READER)
            sequence = await reader.open(mine)
            # Four whole pages; of the next one two tokens are the same, but that page is not published.
            assert sequence.length == 16
            assert setup.cache.counters.pages_adopted == 4
            await reader.step(mine[16:])
            sequence.close()
            assert await request(setup, READER).run(mine) == len(mine) - 1
            assert setup.cache.counters.pages_adopted == 4, "what was copied once is found as one's own"
            assert [info for batch in tree.walk(tenant="") for info in batch] == before, "the publisher noticed"
            (publication,) = tree.publications()
            assert publication.readers == {"reader": 1.0}
            assert setup.cache.unpublish(MODEL, system[:16])
            assert setup.cache.flush(MODEL) == 0
            assert await request(setup, READER).run(mine) == len(mine) - 1, "a copy is the reader's"
            assert await request(setup, THIRD).run(mine) == 0
            setup.check_quiet()

    run_simulated(main, 0)


@pytest.mark.parametrize("other", [SALTED, dataclasses.replace(READER, model="another model")])
def test_who_differs_in_more_than_the_tenant_reads_nothing(other: Namespace) -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=64) as setup:
            await setup.request().run(prompt(1, 20))
            assert setup.cache.publish(MODEL, prompt(1, 20)) == 20
            assert setup.cache.tree.match(READER, int32(prompt(1, 20))).num_tokens == 20
            assert setup.cache.tree.match(other, int32(prompt(1, 20))).num_tokens == 0
            assert await setup.request(other).run(prompt(1, 20)) == 0
            assert setup.cache.counters.pages_adopted == 0
            setup.check_quiet()

    run_simulated(main, 0)


def test_part_of_a_published_page_is_reused_and_of_no_other() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=64) as setup:
            await setup.request().run(prompt(1, 24))
            assert setup.cache.publish(MODEL, prompt(1, 16)) == 16
            # The third page is shared in part and published; the fifth is shared in part, but not published.
            assert await request(setup, READER).run(prompt(1, 20, branch=1, shared=10)) == 10
            assert await request(setup, THIRD).run(prompt(1, 24, branch=1, shared=18)) == 16
            setup.check_quiet()

    run_simulated(main, 0)


@pytest.mark.parametrize("tier_id", [DEVICE, HOST, NVME])
def test_a_published_prefix_is_copied_from_every_tier(tier_id: TierId) -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=6, host_pages=8, nvme_pages=64) as setup:
            cache = setup.cache
            await setup.request().run(prompt(1, 16))
            assert cache.publish(MODEL, prompt(1, 16)) == 16
            for document in range(2, 2 + {DEVICE: 0, HOST: 2, NVME: 6}[tier_id]):
                await setup.request().run(prompt(document, 16))
            assert cache.coverage(cache.tree.match(READER, int32(prompt(1, 16)))).by_tier == {tier_id: 16}
            assert await request(setup, READER).run(prompt(1, 20)) == 16
            assert cache.coverage(cache.tree.match(READER, int32(prompt(1, 20)), published=False)).num_tokens == 20
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_published_prefix_larger_than_the_device_is_copied_through_it() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=6, host_pages=40, nvme_pages=80) as setup:
            await setup.request().run(prompt(1, 80))
            assert setup.cache.publish(MODEL, prompt(1, 80)) == 80
            assert await request(setup, READER).run(prompt(1, 82)) == 80
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_copy_that_finds_no_room_ends_early() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=12, host_pages=1, nvme_pages=None) as setup:
            publisher = setup.request()
            published = await publisher.open(prompt(1, 32))
            await publisher.step(prompt(1, 32))
            assert setup.cache.publish(MODEL, prompt(1, 32)) == 32
            reader = request(setup, READER)
            sequence = await reader.open(prompt(1, 33))
            assert 0 < sequence.length < 32
            sequence.close()
            published.close()
            assert await request(setup, READER).run(prompt(1, 33)) > 0
            setup.check_quiet()

    run_simulated(main, 0)


@pytest.mark.parametrize("how", ["unpublish", "remove", "forget"])
def test_what_is_taken_back_while_it_is_copied_is_copied_no_further(how: str) -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=80, host_pages=1, nvme_pages=None) as setup:
            cache, tokens = setup.cache, prompt(1, 128)
            await setup.request().run(tokens)
            assert cache.publish(MODEL, tokens) == 128
            reader = request(setup, READER)

            async def take_back() -> None:
                for _ in range(10_000):
                    if cache.counters.pages_adopted:
                        break
                    await asyncio.sleep(1e-5)
                if how == "unpublish":
                    cache.unpublish(MODEL, tokens)
                elif how == "remove":
                    removed = cache.tree.remove(MODEL, tokens, first_page=0)
                    assert sum(node.num_pages for node in removed.held) == 31, "leased while they are read"
                    cache.free(removed.freed)
                else:
                    cache.forget(cache.tree.match(MODEL, int32(tokens)).nodes[0], DEVICE, 0)
                assert cache.tree.match(THIRD, int32(tokens)).num_tokens == 0
                assert cache.tree.publications() == []

            async with asyncio.TaskGroup() as group:
                group.create_task(take_back())
                sequence = await reader.open(tokens)
            assert 16 * PAGE_SIZE <= sequence.length < 127
            await reader.step(tokens[sequence.length :])
            sequence.close()
            assert await request(setup, READER).run(tokens) == 127
            setup.check_quiet()

    run_simulated(main, 0)


NO_FAULTS = Faults()
MANY_FAULTS = Faults(error=0.05, corrupt=0.03, stall=0.02, stall_s=0.5)


@pytest.mark.parametrize("faults", [NO_FAULTS, MANY_FAULTS], ids=["no faults", "many faults"])
def test_i33_a_tenant_finds_only_its_own_and_what_was_published(faults: Faults) -> None:
    counters = [run_simulated(lambda world: _tenants(world, faults), seed) for seed in seeds(8)]
    assert any(each.pages_adopted for each in counters), "nothing was shared"
    assert any(each.pages_refused for each in counters), "the index was never full"
    assert any(each.metadata_dropped_pages for each in counters), "nothing was dropped for it"


async def _tenants(world: World, faults: Faults) -> Counters:
    rng = world.rng
    async with opened(
        world,
        device_pages=rng.choice([9, 14, 40]),
        host_pages=rng.choice([3, 20]),
        nvme_pages=rng.choice([None, 40]),
        faults=faults,
        metadata_bytes=rng.choice([None, 8_000, 20_000]),
    ) as setup:
        tenants = [MODEL, READER, THIRD]
        own: dict[str, list[list[int]]] = {each.tenant: [] for each in tenants}
        published: list[list[int]] = []

        async def client(namespace: Namespace) -> None:
            for _ in range(10):
                await world.pause(0.01)
                length = rng.randrange(1, 50)
                tokens = prompt(rng.randrange(2), length, branch=rng.randrange(2), shared=rng.randrange(length + 1))
                if rng.random() < 0.3:
                    num_tokens = setup.cache.publish(namespace, tokens)
                    if num_tokens:
                        published.append(tokens[:num_tokens])
                elif rng.random() < 0.3 and published:
                    setup.cache.unpublish(namespace, rng.choice(published))
                one = request(setup, namespace)
                try:
                    sequence = await one.open(tokens, deadline_s=rng.choice([0.001, 30]))
                except (NoRoom, DeadlineExceeded):
                    continue
                known = [*own[namespace.tenant], *published]
                assert sequence.length <= max((_shared(each, tokens) for each in known), default=0)
                own[namespace.tenant].append(tokens)
                try:
                    while sequence.length < length:
                        await one.step(tokens[sequence.length : sequence.length + 8])
                        await world.pause(0.01)
                except (NoRoom, NotResident, DeadlineExceeded, TierUnavailable, UnreadablePage):
                    pass
                finally:
                    sequence.close()
                setup.check()

        async with asyncio.TaskGroup() as group:
            for namespace in tenants:
                group.create_task(client(namespace))
        await setup.quiet()
        setup.check_quiet()
        assert setup.cache.tree.num_leases == 0
        return setup.cache.counters


def _shared(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


# -- beams -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["first to last", "last to first", "at random"])
def test_eight_beams_over_a_long_prompt_use_one_copy_of_it(order: str) -> None:
    """4,098 tokens: 1,024 pages and a tail of two tokens, which every beam writes into."""
    tokens = prompt(0, 4098)
    num_beams = 8

    async def main(world: World) -> None:
        async with opened(world, device_pages=1100, host_pages=1, nvme_pages=None) as setup:
            first = setup.request()
            sequence = await first.open(tokens)
            await first.step(tokens)
            beams = [first]
            for _ in range(num_beams - 1):
                beam = setup.request()
                beam.sequence = sequence.fork()
                beams.append(beam)

            def used() -> int:
                return setup.device.capacity_pages - setup.device.num_free

            assert used() == 1025, "forks cost nothing"
            for number, beam in enumerate(beams):
                await beam.step([5_000_000 + number])
                assert used() == 1025 + min(number + 1, num_beams - 1), "a beam that writes has a tail of its own"
            for number, beam in enumerate(beams):
                # The first token fills the shared page, now a copy; the others are equal, and still not shared.
                await beam.step([6_000_000, 6_000_001])
                assert used() == 1024 + num_beams + number + 1
            assert setup.cache.tree.occupancy(DEVICE).resident == 1024 + num_beams
            if order == "last to first":
                beams.reverse()
            elif order == "at random":
                random.Random(8).shuffle(beams)
            for number, beam in enumerate(beams):
                assert beam.sequence is not None
                beam.sequence.close()
                setup.check_quiet(private_pages=num_beams - number - 1)
            assert setup.cache.flush() == 0
            assert setup.device.num_free == 1100
            assert setup.cache.tree.metadata_bytes == 0

    run_simulated(main, 0)


# -- a full index ------------------------------------------------------------------------------------------------------


def test_pages_that_the_index_has_no_room_for_stay_private_and_are_published_later() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=64, metadata_bytes=2_600) as setup:
            counters = setup.cache.counters
            keeper = setup.request()
            kept = await keeper.open(prompt(9, 24))
            await keeper.step(prompt(9, 8))
            await keeper.step(prompt(9, 24)[8:16])
            other = setup.request(MODEL)
            sequence = await other.open(prompt(1, 30))
            other_keeper = setup.request()
            other_kept = await other_keeper.open(prompt(8, 8))
            await other_keeper.step(prompt(8, 8))
            await other.step(prompt(1, 10))
            assert counters.pages_refused == 2, counters
            assert sequence.published == 0
            await other.step(prompt(1, 30)[10:21])
            assert sequence.length == 21
            assert sequence.published == 0
            fork = setup.request()
            fork.sequence = sequence.fork()
            setup.check_quiet(private_pages=6)
            other_kept.close()
            await fork.step([4_000_000])
            assert fork.sequence.published == 0, "the other reads these pages as its own"
            await other.step(prompt(1, 30)[21:25])
            assert sequence.published == 0
            fork.sequence.close()
            await other.step(prompt(1, 30)[25:29])
            assert sequence.published == 28
            assert setup.cache.tree.metadata_bytes <= 2_600
            assert counters.metadata_dropped_pages == 2, counters
            assert await setup.request().run(prompt(1, 30)[:28]) == 27
            sequence.close()
            kept.close()
            setup.check_quiet()

    run_simulated(main, 0)


def test_reaching_the_metadata_budget_drops_the_coldest_pages_from_all_tiers() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=8, host_pages=64, nvme_pages=64, metadata_bytes=20_000) as setup:
            for document in range(60):
                await setup.request().run(prompt(document, 9))
                await asyncio.sleep(1)
                assert setup.cache.tree.metadata_bytes <= 20_000 + 700
            assert setup.cache.counters.metadata_dropped_pages > 40
            assert setup.cache.counters.pages_refused == 0
            found = [await setup.request().run(prompt(document, 9)) > 0 for document in range(59, 40, -1)]
            assert found == sorted(found, reverse=True), "something warmer left"
            assert any(found)
            setup.check_quiet()

    run_simulated(main, 0)


def test_case_c16_reserved_pages_that_were_never_filled_are_not_found() -> None:
    async def main(world: World) -> None:
        async with opened(world) as setup:
            one = setup.request()
            sequence = await one.open(prompt(1, 16))
            plan = await sequence.begin(prompt(1, 16), deadline=world.monotonic() + 1)
            assert setup.cache.tree.match(MODEL, int32(prompt(1, 16))).num_tokens == 0
            sequence.abort(plan)
            sequence.close()
            assert await setup.request().run(prompt(1, 16)) == 0
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_budget_that_holds_nothing_is_refused() -> None:
    async def main(world: World) -> None:
        with pytest.raises(BadRequest, match="metadata_bytes"):
            async with opened(world, metadata_bytes=100):
                pass

    run_simulated(main, 0)
