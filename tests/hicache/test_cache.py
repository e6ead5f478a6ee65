"""The cache and its sequences over simulated tiers: every byte checked, every slot accounted for."""

import asyncio

import pytest

from hicache.errors import BadRequest, Closed, DeadlineExceeded, NoRoom, NotResident, TierUnavailable
from hicache.movers import Priority
from hicache.policies import NAMES
from hicache.sequence import Sequence
from hicache.tier import DEVICE, HOST, NVME, TierId
from hicache.write_policy import WritePolicy
from tests.hicache.worlds import (
    LAYOUT,
    MODEL,
    OTHER,
    PAGE_SIZE,
    Request,
    Setup,
    UnreadablePage,
    int32,
    opened,
    prompt,
)
from tests.simulation import Faults, World, run_simulated, seeds


def test_what_was_computed_once_is_found_again() -> None:
    async def main(world: World) -> None:
        async with opened(world) as setup:
            assert await setup.request().run(prompt(1, 22)) == 0
            # 22 tokens are five whole pages and a tail that nobody else can have; the last token is always computed.
            assert await setup.request().run(prompt(1, 22)) == 20
            assert await setup.request().run(prompt(1, 20)) == 19
            setup.check_quiet()

    run_simulated(main, 0)


@pytest.mark.parametrize("length", [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE, 13])
def test_at_most_all_but_the_last_token_come_from_the_cache(length: int) -> None:
    async def main(world: World) -> None:
        async with opened(world) as setup:
            await setup.request().run(prompt(1, 20))
            assert await setup.request().run(prompt(1, length)) == length - 1
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_page_that_matches_in_part_is_copied_and_never_written() -> None:
    async def main(world: World) -> None:
        async with opened(world) as setup:
            await setup.request().run(prompt(1, 20))
            # 14 shared tokens: three whole pages, and two tokens of the fourth.
            assert await setup.request().run(prompt(1, 20, branch=1, shared=14)) == 14
            assert await setup.request().run(prompt(1, 20)) == 19
            assert await setup.request().run(prompt(1, 20, branch=1, shared=14)) == 19
            setup.check_quiet()

    run_simulated(main, 0)


@pytest.mark.parametrize("tier_id", [DEVICE, HOST, NVME])
def test_a_partial_page_is_found_in_every_tier(tier_id: TierId) -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=6, host_pages=8, nvme_pages=64) as setup:
            await setup.request().run(prompt(1, 16))
            others = {DEVICE: 0, HOST: 2, NVME: 6}[tier_id]
            for document in range(2, 2 + others):
                await setup.request().run(prompt(document, 16))
            coverage = setup.cache.coverage(setup.cache.tree.match(MODEL, int32(prompt(1, 16))))
            assert coverage.by_tier == {tier_id: 16}
            assert await setup.request().run(prompt(1, 16, branch=1, shared=14)) == 14
            setup.check_quiet()

    run_simulated(main, 0)


def test_pages_go_down_tier_by_tier_and_come_back_from_each() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=6, host_pages=12, nvme_pages=64) as setup:
            for document in range(8):
                await setup.request().run(prompt(document, 17))
            found = {}
            for document in reversed(range(8)):
                request = setup.request()
                sequence = await request.open(prompt(document, 17))
                found[document] = dict(sequence.cached_by_tier)
                await request.step(prompt(document, 17)[sequence.length :])
                sequence.close()
            assert all(sum(by_tier.values()) == 16 for by_tier in found.values()), found
            assert {tier for by_tier in found.values() for tier in by_tier} >= {HOST, NVME}
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_context_larger_than_the_device_runs_and_streams() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=6, host_pages=10, nvme_pages=64) as setup:
            tokens = prompt(1, 80)
            assert await setup.request().run(tokens, chunk=8) == 0
            request = setup.request()
            sequence = await request.open(tokens)
            assert sequence.length == 79
            await request.step(tokens[79:])
            for token in range(5):
                await request.step([7_000_000 + token])
            sequence.close()
            setup.check_quiet()

    run_simulated(main, 0)


def test_namespaces_share_nothing() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=16) as setup:
            await setup.request(MODEL).run(prompt(1, 20))
            assert await setup.request(OTHER).run(prompt(1, 20)) == 0
            assert await setup.request(OTHER).run(prompt(1, 20)) == 19
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_failed_step_leaves_nothing_and_can_be_repeated() -> None:
    async def main(world: World) -> None:
        async with opened(world) as setup:
            request = setup.request()
            sequence = await request.open(prompt(1, 20))
            await request.step(prompt(1, 20)[:6])
            free = setup.device.num_free
            with pytest.raises(RuntimeError, match="the model failed"):
                await request.step(prompt(1, 20)[6:12], fail=True)
            assert sequence.length == 6
            assert setup.device.num_free == free
            await request.step(prompt(1, 20)[6:12])
            sequence.close()
            setup.check_quiet()

    run_simulated(main, 0)


def test_forks_share_pages_until_they_write() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=16) as setup:
            request = setup.request()
            sequence = await request.open(prompt(1, 19))
            await request.step(prompt(1, 19))
            used = setup.device.capacity_pages - setup.device.num_free
            forks = []
            for _ in range(3):
                fork = setup.request()
                fork.sequence = sequence.fork()
                forks.append(fork)
            assert setup.device.capacity_pages - setup.device.num_free == used
            for index, fork in enumerate(forks):
                await fork.step([5_000_000 + index])
                await fork.step([6_000_000 + index])
            # Four whole pages once; a tail for the parent and for each fork, which became a page and a new tail.
            assert setup.device.capacity_pages - setup.device.num_free == used + 2 * len(forks)
            await request.step(prompt(1, 20)[19:])
            for fork in forks:
                assert fork.sequence is not None
                fork.sequence.close()
            sequence.close()
            setup.check_quiet()

    run_simulated(main, 0)


def test_two_requests_for_the_same_prompt_store_it_once() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=16) as setup:
            first, second = setup.request(), setup.request()
            await first.open(prompt(1, 18))
            await second.open(prompt(1, 18))
            await first.step(prompt(1, 18))
            await second.step(prompt(1, 18))
            assert setup.cache.counters.pages_duplicate == 4
            for request in (first, second):
                assert request.sequence is not None
                request.sequence.close()
            assert setup.cache.tree.occupancy(DEVICE).resident == 4
            setup.check_quiet()

    run_simulated(main, 0)


def test_input_is_refused_before_anything_is_taken() -> None:
    async def main(world: World) -> None:
        async with opened(world) as setup:
            request = setup.request()
            deadline = world.monotonic() + 1
            with pytest.raises(BadRequest, match="tokens"):
                await Sequence.open(setup.cache, MODEL, int32([]), owner="test", deadline=deadline)
            with pytest.raises(BadRequest, match="tokens"):
                await Sequence.open(setup.cache, MODEL, [-1], owner="test", deadline=deadline)
            sequence = await request.open(prompt(1, 20))
            with pytest.raises(BadRequest, match="tokens"):
                await sequence.begin([], deadline=deadline)
            with pytest.raises(NoRoom):
                await sequence.begin(prompt(1, 500), deadline=deadline)
            plan = await sequence.begin(prompt(1, 4), deadline=deadline)
            with pytest.raises(BadRequest, match="step"):
                await sequence.begin(prompt(1, 4), deadline=deadline)
            with pytest.raises(BadRequest, match="step"):
                sequence.fork()
            sequence.abort(plan)
            with pytest.raises(BadRequest, match="step"):
                sequence.commit(plan)
            sequence.close()
            sequence.close()
            with pytest.raises(Closed):
                await sequence.begin(prompt(1, 4), deadline=deadline)
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_damaged_page_shortens_what_is_found() -> None:
    """A page that NVMe cannot give back whole is forgotten with everything after it, and can be stored again."""

    async def main(world: World) -> None:
        async with opened(world, device_pages=6, host_pages=6, nvme_pages=64) as setup:
            await setup.request().run(prompt(1, 17))
            for document in range(2, 5):
                await setup.request().run(prompt(document, 17))
            match = setup.cache.tree.match(MODEL, int32(prompt(1, 17)))
            assert setup.cache.coverage(match).by_tier == {NVME: 16}
            assert setup.nvme is not None
            slots = [int(slot) for node in match.nodes for slot in node.slots(NVME)]
            setup.nvme._held[slots[2]] = None
            request = setup.request()
            sequence = await request.open(prompt(1, 17))
            assert sequence.length == 8
            assert sequence.cached_by_tier == {NVME: 8}
            await request.step(prompt(1, 17)[8:])
            sequence.close()
            assert setup.cache.counters.corrupt_pages == {NVME: 1}
            assert await setup.request().run(prompt(1, 17)) == 16
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_damaged_page_that_somebody_else_recomputes_meanwhile_is_found_again() -> None:
    """The lease of the first request is on pages that left; those that took their place look just the same."""

    async def main(world: World) -> None:
        async with opened(world, device_pages=30, host_pages=30, nvme_pages=64) as setup:
            cache, nvme = setup.cache, setup.nvme
            assert nvme is not None
            tokens = prompt(1, 73)
            await setup.request().run(tokens)
            await setup.request().run(prompt(1, 73, branch=1, shared=64))
            for tier_id in (DEVICE, HOST):
                cache.free({tier_id: await cache.allocate(tier_id, 30, deadline=world.monotonic() + 10)})
            match = cache.tree.match(MODEL, int32(tokens))
            assert cache.coverage(match).by_tier == {NVME: 72}
            assert [node.num_pages for node in match.nodes] == [16, 2], "they are read in two calls"
            nvme._held[int(match.nodes[0].slots(NVME)[0])] = None

            def slow_down(operation: str, pages: object) -> None:
                nvme.latency_s = 5 if nvme.in_flight_pages > 16 else 1e-4

            nvme.watch = slow_down
            first = setup.request()
            async with asyncio.TaskGroup() as group:
                opening = group.create_task(first.open(tokens))
                await asyncio.sleep(1)
                assert cache.counters.corrupt_pages == {NVME: 1}
                assert await setup.request().run(tokens) == 0
                assert not opening.done()
            assert opening.result().length == 72
            await first.step(tokens[72:])
            opening.result().close()
            setup.check_quiet()

    run_simulated(main, 0)


def test_tokens_are_those_that_were_given_whatever_becomes_of_the_array() -> None:
    async def main(world: World) -> None:
        async with opened(world) as setup:
            request = setup.request()
            sequence = await request.open(prompt(1, 9))
            array, deadline = int32(prompt(1, 8)), world.monotonic() + 1
            plan = await sequence.begin(array, deadline=deadline)
            request._write(plan, [], prompt(1, 8))
            array[:] = 7
            sequence.commit(plan)
            assert sequence.tokens.tolist() == prompt(1, 8)
            sequence.close()
            assert await setup.request().run(prompt(1, 9)) == 8

    run_simulated(main, 0)


def test_a_partial_page_is_not_waited_for() -> None:
    """Somebody's step has the whole device for a while: a request that could use part of a page opens all the same."""

    async def main(world: World) -> None:
        async with opened(world, device_pages=6, host_pages=8, nvme_pages=64) as setup:
            await setup.request().run(prompt(1, 8))
            other = setup.request()
            sequence = await other.open(prompt(2, 24))
            plan = await sequence.begin(prompt(2, 24), deadline=world.monotonic() + 1)
            request = setup.request()
            assert (await request.open(prompt(1, 8, branch=1, shared=6), deadline_s=1)).length == 4
            sequence.abort(plan)
            for each in (sequence, request.sequence):
                assert each is not None
                each.close()
            setup.check_quiet()

    run_simulated(main, 0)


def test_case_c13_a_demotion_without_room_below_claims_nothing() -> None:
    """Device and host of 4 pages, the host full of pinned pages: room on the device is made by dropping, or refused."""

    async def main(world: World) -> None:
        async with opened(world, device_pages=4, host_pages=4, nvme_pages=None) as setup:
            cache = setup.cache
            await setup.request().run(prompt(9, 16))
            match = cache.tree.match(MODEL, int32(prompt(9, 16)))
            slots = cache.tiers[HOST].allocate(4)
            await cache.start_move(match.nodes[-1], DEVICE, HOST, slots, Priority.WRITE_BACK).done.wait()
            pin = cache.tree.pin(list(cache.tree.match(MODEL, int32(prompt(9, 16))).nodes), HOST)
            await setup.request().run(prompt(1, 16))
            assert await setup.request().run(prompt(2, 9)) == 0
            found = cache.tree.match(MODEL, int32(prompt(1, 16)))
            assert cache.coverage(found).by_tier in ({}, {DEVICE: found.num_tokens})
            assert found.num_tokens < 16
            cache.free(cache.tree.unpin(pin))
            await setup.request().run(prompt(1, 16))
            cache.free({DEVICE: await cache.allocate(DEVICE, 4, deadline=world.monotonic() + 10)})
            assert cache.coverage(cache.tree.match(MODEL, int32(prompt(1, 16)))).by_tier == {HOST: 16}
            assert await setup.request().run(prompt(1, 16)) == 15
            setup.check_quiet()

    run_simulated(main, 0)


def test_case_c14_eviction_frees_exactly_what_is_asked() -> None:
    """Twenty one-page sequences, used in order; room for three: exactly the three oldest leave."""

    async def main(world: World) -> None:
        async with opened(world, device_pages=20, host_pages=1, nvme_pages=None) as setup:
            for document in range(1, 21):
                await setup.request().run(prompt(document, PAGE_SIZE))
                await asyncio.sleep(1)
            slots = await setup.cache.allocate(DEVICE, 3, deadline=world.monotonic() + 10)
            found = [
                setup.cache.coverage(setup.cache.tree.match(MODEL, int32(prompt(document, PAGE_SIZE)))).by_tier
                for document in range(1, 21)
            ]
            assert found[3:] == [{DEVICE: PAGE_SIZE}] * 17
            assert sum(by_tier == {} for by_tier in found[:3]) == 2, "one found room on the host, two left"
            setup.cache.free({DEVICE: slots})
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_wait_for_room_ends_when_a_step_does_or_at_its_deadline() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=4, host_pages=8) as setup:
            first, second = setup.request(), setup.request()
            one, two = await first.open(prompt(1, 16)), await second.open(prompt(2, 16))
            plan = await one.begin(prompt(1, 16), deadline=world.monotonic() + 1)
            with pytest.raises(DeadlineExceeded):
                await two.begin(prompt(2, 4), deadline=world.monotonic() + 1)

            async def finish() -> None:
                await asyncio.sleep(5)
                first._write(plan, [], prompt(1, 16))
                one.commit(plan)

            async with asyncio.TaskGroup() as group:
                group.create_task(finish())
                await second.step(prompt(2, 8), deadline_s=60)
            assert world.monotonic() >= 5
            one.close()
            two.close()
            setup.check_quiet()

    run_simulated(main, 0)


def test_nobody_who_waits_for_room_is_passed_over_for_ever() -> None:
    """One asks for most of the device while others keep taking and giving back a page: it has its turn, in order."""

    async def main(world: World) -> None:
        async with opened(world, device_pages=8, host_pages=8, nvme_pages=None) as setup:
            cache, order = setup.cache, list[str]()
            holder = setup.request()
            sequence = await holder.open(prompt(1, 4))
            plan = await sequence.begin(prompt(1, 4), deadline=world.monotonic() + 1)  # a pin that others wait for

            async def busy(number: int) -> None:
                for _ in range(20):
                    slots = await cache.allocate(DEVICE, 3, deadline=world.monotonic() + 100)
                    order.append(f"small {number}")
                    await asyncio.sleep(world.rng.uniform(0.1, 0.3))
                    cache.free({DEVICE: slots})

            async def large() -> None:
                await asyncio.sleep(1)
                order.append("asks")
                slots = await cache.allocate(DEVICE, 6, deadline=world.monotonic() + 100)
                order.append("has it")
                cache.free({DEVICE: slots})

            async with asyncio.TaskGroup() as group:
                for number in range(3):
                    group.create_task(busy(number))
                group.create_task(large())
            asked, served = order.index("asks"), order.index("has it")
            assert served - asked <= 3, "who came later was served first, again and again"
            assert len(order) == 62
            sequence.abort(plan)
            sequence.close()
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_disk_that_hangs_costs_hits_and_no_request() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=8, host_pages=8, nvme_pages=64) as setup:
            assert setup.nvme is not None
            for document in range(1, 4):
                await setup.request().run(prompt(document, 17))
            async with setup.nvme.hold(after_pages=0):
                for document in range(10, 20):
                    began = world.monotonic()
                    assert await setup.request().run(prompt(document, 17)) == 0
                    assert world.monotonic() < began + 3
                assert await setup.request().run(prompt(19, 17)) == 16
            await setup.quiet()
            setup.check_quiet()
            for document in range(20, 24):
                await setup.request().run(prompt(document, 17))
            assert await setup.request().run(prompt(20, 17)) == 16

    run_simulated(main, 0)


NO_FAULTS = Faults()
MANY_FAULTS = Faults(error=0.05, corrupt=0.03, stall=0.02, stall_s=0.5)


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("faults", [NO_FAULTS, MANY_FAULTS], ids=["no faults", "many faults"])
def test_random_requests_never_see_a_wrong_byte_and_leave_nothing_behind(faults: Faults, block: int) -> None:
    """Several clients at once over small tiers; then no faults, and all works again (I01, I08, I09, I10, I28)."""
    for seed in seeds(15, block=block):
        run_simulated(lambda world: _history(world, faults), seed)


async def _history(world: World, faults: Faults) -> None:
    rng = world.rng
    async with opened(
        world,
        device_pages=rng.choice([6, 9, 14]),
        host_pages=rng.choice([3, 8, 20]),
        nvme_pages=(nvme_pages := rng.choice([None, 5, 40])),
        faults=faults,
        write_policy=(write_policy := rng.choice(list(WritePolicy)) if nvme_pages else WritePolicy.DEMOTE),
        exclusive=write_policy is WritePolicy.DEMOTE and rng.random() < 0.5,
        policy=rng.choice(list(NAMES)),
    ) as setup:

        async def client() -> None:
            for _ in range(8):
                await world.pause(0.01)
                await _request(world, setup.request(rng.choice([MODEL, MODEL, OTHER])))
                setup.check()
                _prefetch(world, setup)

        async with asyncio.TaskGroup() as group:
            for _ in range(rng.choice([1, 2, 4])):
                group.create_task(client())
        # Room for one request at a time is there again: the system is live, whatever happened before.
        for tier in setup.tiers:
            tier.faults = Faults()
        await setup.quiet()
        setup.check_quiet()
        assert await setup.request().run(prompt(99, 17), chunk=8) == 0
        assert await setup.request().run(prompt(99, 17), chunk=8) in (16, 0)
        setup.check_quiet()
        assert setup.cache.tree.num_leases == 0


def _prefetch(world: World, setup: Setup) -> None:
    """Expect something of a random request, and sometimes change one's mind, soon or late."""
    rng = world.rng
    if rng.random() < 0.5:
        prefetch = setup.cache.prefetch(
            rng.choice([MODEL, OTHER]),
            prompt(rng.randrange(4), 50, branch=rng.randrange(3), shared=rng.randrange(50)),
            deadline=world.monotonic() + rng.choice([0.0001, 0.01, 30]),
            max_pages=rng.choice([None, 1, 30]),
        )
        if rng.random() < 0.3:
            asyncio.get_running_loop().call_later(rng.choice([0, 0.001]), prefetch.cancel)


async def _request(world: World, request: Request) -> None:
    rng = world.rng
    length = rng.randrange(1, 50)
    tokens = prompt(rng.randrange(4), length, branch=rng.randrange(3), shared=rng.randrange(length + 1))
    try:
        sequence = await request.open(tokens, deadline_s=rng.choice([0.001, 30]))
    except (NoRoom, DeadlineExceeded):
        return
    forks: list[Sequence] = []
    try:
        while sequence.length < length + 6:
            chunk = rng.randrange(1, 9)
            new = tokens[sequence.length : sequence.length + chunk] or [9_000_000 + rng.randrange(3)]
            try:
                await request.step(new, deadline_s=rng.choice([0.001, 30]), fail=rng.random() < 0.05)
            except RuntimeError:
                continue
            await world.pause(0.01)
            if rng.random() < 0.1:
                forks.append(sequence.fork())
                if rng.random() < 0.5:
                    request.sequence, forks[-1] = forks[-1], sequence
                    sequence = request.sequence
    except (NoRoom, NotResident, DeadlineExceeded, TierUnavailable, UnreadablePage):
        pass
    finally:
        for each in (sequence, *forks):
            each.close()


def test_the_same_seed_is_the_same_history() -> None:
    async def main(world: World) -> list[object]:
        async with opened(world, faults=MANY_FAULTS) as setup:
            async with asyncio.TaskGroup() as group:
                for _ in range(3):
                    group.create_task(_request(world, setup.request()))
            lanes = [(lane.name, lane.stats.pages, lane.stats.failed) for lane in setup.cache.lanes]
            return [world.monotonic(), lanes, setup.cache.counters.tokens_by_tier]

    assert run_simulated(main, 5) == run_simulated(main, 5)


def test_layouts_and_tiers_must_agree() -> None:
    async def main(world: World) -> None:
        async with opened(world) as setup:
            other = type(LAYOUT).uniform(
                num_layers=2, num_kv_heads=1, head_dim=8, dtype=LAYOUT.dtype, page_size=PAGE_SIZE
            )
            namespace = type(MODEL)(model="a model", layout=other)
            with pytest.raises(BadRequest, match=r"namespace\.layout"):
                await Sequence.open(setup.cache, namespace, [1, 2], owner="test", deadline=world.monotonic() + 1)

    run_simulated(main, 0)
