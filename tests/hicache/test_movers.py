"""Lanes, one behaviour at a time, in virtual time. A page takes the device one second unless a test says otherwise."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from hicache.clock import ManualClock
from hicache.errors import BadRequest
from hicache.movers import Lane, LaneStats, PageMove, Priority, Transfer, TransferResult
from hicache.tier import HOST, NVME, Outcome, PageRead, PageWrite
from tests.hicache.lanes import PAGE_BYTES, Direction, Rig, check_conserved, free, stamped
from tests.simulation import DeadlockError, Faults, SimulatedHost, SimulatedTier, World, run_simulated

OK, STALE, ERROR = Outcome.OK, Outcome.STALE, Outcome.ERROR
DEMAND, PREFETCH, WRITE_BACK = Priority
both_directions = pytest.mark.parametrize("direction", Direction)


def record_calls(rig: Rig) -> list[list[int]]:
    """Of each call that the device gets from now on, the slots."""
    calls: list[list[int]] = []

    def watch(operation: str, pages: Sequence[PageRead] | Sequence[PageWrite]) -> None:
        calls.append([page.slot for page in pages])

    rig.device.watch = watch
    return calls


def sources(pages: Sequence[PageMove]) -> list[int]:
    return [page.source_slot for page in pages]


# -- copying ----------------------------------------------------------------------------------------------------------


@both_directions
def test_pages_arrive_and_the_source_keeps_its_copy(direction: Direction) -> None:
    async def main(world: World) -> None:
        rig = Rig(world, direction, batch_pages=4)
        assert rig.lane.name == direction.value
        async with rig.running():
            transfer = await rig.lane.submit(rig.pages(10), priority=DEMAND)
            assert transfer.result is None
            await asyncio.sleep(2.5)
            assert rig.lane.stats.busy_s == 2.5
            result = await transfer.wait()
        assert result == TransferResult((OK,) * 10, seconds=10.0, unwanted=False)
        assert result.ok == (True,) * 10
        rig.check_arrived(transfer)
        stats = rig.lane.stats
        assert (stats.submitted, stats.pages, stats.bytes) == (10, 10, 640)
        assert (stats.failed, stats.cancelled, stats.unexpected, stats.busy_s) == (0, 0, 0, 10.0)

    run_simulated(main, 0)


def test_an_empty_transfer_ends_at_once() -> None:
    async def main(world: World) -> None:
        rig = Rig(world)
        ended: list[Transfer] = []
        transfer = await rig.lane.submit([], priority=DEMAND, on_done=ended.append)
        assert ended == [transfer]
        assert await transfer.wait() == TransferResult((), 0.0, unwanted=False)

    run_simulated(main, 0)


@both_directions
def test_a_batch_names_its_slots_in_order_and_outcomes_find_their_pages(direction: Direction) -> None:
    async def main(world: World) -> None:
        rig = Rig(world, direction, num_workers=1)
        pages = rig.pages(8)
        first, second = [pages[i] for i in (5, 0, 7, 2)], [pages[i] for i in (6, 1, 3, 4)]
        free(rig.source, [first[0].source_slot])
        free(rig.target, [second[2].target_slot])
        calls = record_calls(rig)
        transfers = [await rig.lane.submit(each, priority=PREFETCH) for each in (first, second)]
        async with rig.running():
            results = [await transfer.wait() for transfer in transfers]
        assert [result.outcomes for result in results] == [(STALE, OK, OK, OK), (OK, OK, STALE, OK)]
        assert len(calls) == 1
        assert calls[0] == sorted(calls[0])
        for transfer in transfers:
            rig.check_arrived(transfer)

    run_simulated(main, 0)


@both_directions
def test_a_page_that_fails_fails_alone_whichever_it_is(direction: Direction) -> None:
    """The n-th page fails, for n = 0, 1, 2, ... until a run meets no failure."""

    async def main(world: World) -> int:
        rig = Rig(world, direction, batch_pages=3, num_workers=2)
        rig.device.fail_page = world.seed
        async with rig.running():
            transfers = [await rig.lane.submit(rig.pages(4), priority=DEMAND) for _ in range(3)]
            outcomes = [outcome for transfer in transfers for outcome in (await transfer.wait()).outcomes]
            for transfer in transfers:
                rig.check_arrived(transfer)
            num_failed = rig.lane.stats.failed
            assert (outcomes.count(OK), outcomes.count(ERROR)) == (12 - num_failed, num_failed)
            # Nothing is left locked: what failed can be asked for again.
            again = [page for each in transfers for page in each.pages if rig.target.holds(page.target_slot) is None]
            assert len(again) == num_failed
            rig.device.fail_page = None
            assert all((await (await rig.lane.submit(again, priority=DEMAND)).wait()).ok)
        return num_failed

    failures = 0
    while run_simulated(main, failures):
        failures += 1
    assert failures == 12


def test_a_corrupt_page_is_reported_and_not_served() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, faults=Faults(corrupt=1.0))
        async with rig.running():
            transfer = await rig.lane.submit(rig.pages(3), priority=DEMAND)
            result = await transfer.wait()
        assert result.outcomes == (Outcome.CORRUPT,) * 3
        assert [rig.target.holds(page.target_slot) for page in transfer.pages] == [None] * 3

    run_simulated(main, 0)


def test_a_failed_demand_ends_before_its_deadline_and_the_next_is_served() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, page_s=0.1, num_workers=1)
        asked, other = rig.pages(4), rig.pages(2)
        async with rig.running():
            for _ in range(3):
                rig.device.fail_page = rig.device.pages_begun + 2
                async with asyncio.timeout(2.0):
                    failed = await (await rig.lane.submit(asked, priority=DEMAND)).wait()
                    assert failed.outcomes == (OK, OK, ERROR, OK)
                    assert all((await (await rig.lane.submit(other, priority=DEMAND)).wait()).ok)
            rig.device.fail_page = None
            assert all((await (await rig.lane.submit(asked, priority=DEMAND)).wait()).ok)

    run_simulated(main, 0)


# -- slots that were freed meanwhile ----------------------------------------------------------------------------------


@both_directions
@pytest.mark.parametrize("end", ["source", "target"])
def test_a_slot_freed_while_its_page_waits_is_left_alone(direction: Direction, end: str) -> None:
    async def main(world: World) -> None:
        rig = Rig(world, direction, capacity_pages=2)
        gone, kept = rig.pages(2)
        transfer = await rig.lane.submit([gone, kept], priority=WRITE_BACK)
        # The slot has a new owner, with a page of his own in it, before the move begins.
        tier, slot = (rig.source, gone.source_slot) if end == "source" else (rig.target, gone.target_slot)
        free(tier, [slot])
        assert tier.allocate(1).tolist() == [slot]
        tier.fill(slot, kept.identity, stamped(kept.identity))
        async with rig.running():
            assert (await transfer.wait()).outcomes == (STALE, OK)
        assert (tier.holds(slot), tier.raw_page(slot)) == (kept.identity, stamped(kept.identity))
        if end == "source":
            assert rig.target.holds(gone.target_slot) is None
            assert rig.target.raw_page(gone.target_slot) == bytes(PAGE_BYTES)

    run_simulated(main, 0)


@both_directions
@pytest.mark.parametrize("end", ["source", "target"])
def test_a_slot_freed_under_its_copy_makes_the_page_stale(direction: Direction, end: str) -> None:
    async def main(world: World) -> None:
        rig = Rig(world, direction)
        pages = rig.pages(4)
        async with rig.running(), rig.device.hold(after_pages=2) as barrier:
            transfer = await rig.lane.submit(pages, priority=WRITE_BACK)
            await barrier.reached()
            gone = pages[2]
            tier, slot = (rig.source, gone.source_slot) if end == "source" else (rig.target, gone.target_slot)
            free(tier, [slot])
            barrier.release()
            assert (await transfer.wait()).outcomes == (OK, OK, STALE, OK)
        assert tier.holds(slot) is None
        rig.check_arrived(transfer)

    run_simulated(main, 0)


@both_directions
def test_a_source_slot_that_holds_another_page_is_not_copied(direction: Direction) -> None:
    async def main(world: World) -> None:
        rig = Rig(world, direction)
        wrong, right = rig.pages(2)
        rig.source.fill(wrong.source_slot, right.identity, stamped(right.identity))
        async with rig.running():
            transfer = await rig.lane.submit([wrong, right], priority=DEMAND)
            assert (await transfer.wait()).outcomes == (Outcome.NOT_FOUND, OK)
        assert rig.target.holds(wrong.target_slot) is None

    run_simulated(main, 0)


@both_directions
def test_transfers_submitted_back_to_back_land_at_their_own_places(direction: Direction) -> None:
    async def main(world: World) -> None:
        rig = Rig(world, direction, batch_pages=4, num_workers=2)
        async with rig.running(), rig.device.hold(after_pages=1) as barrier:
            first = await rig.lane.submit(rig.pages(4), priority=WRITE_BACK)
            second = await rig.lane.submit(rig.pages(4), priority=WRITE_BACK)
            await barrier.reached()
            assert first.result is None
            assert second.result is None
            # What is being copied belongs to the copy: new pages get other slots.
            third = await rig.lane.submit(rig.pages(4), priority=WRITE_BACK)
            barrier.release()
            for transfer in (first, second, third):
                assert all((await transfer.wait()).ok)
        for transfer in (first, second, third):
            rig.check_arrived(transfer)

    run_simulated(main, 0)


# -- order ------------------------------------------------------------------------------------------------------------


def test_a_demand_overtakes_what_is_queued_and_equals_keep_their_order() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=3, num_workers=1)
        order: list[str] = []

        async def submit(name: str, num_pages: int, priority: Priority) -> None:
            await rig.lane.submit(rig.pages(num_pages), priority=priority, on_done=lambda _: order.append(name))

        async with rig.running():
            await submit("write-back 1", 4, WRITE_BACK)
            await asyncio.sleep(0.5)
            # The first three pages of write-back 1 are under way; everything else has yet to begin.
            await submit("write-back 2", 1, WRITE_BACK)
            await submit("prefetch 1", 2, PREFETCH)
            await submit("demand 1", 2, DEMAND)
            await submit("prefetch 2", 2, PREFETCH)
            await submit("demand 2", 2, DEMAND)
        assert order == [
            *("demand 1", "demand 2", "prefetch 1", "prefetch 2"),
            *("write-back 1", "write-back 2"),
        ]

    run_simulated(main, 0)


def test_batches_join_neighbours_in_the_queue_but_never_two_priorities() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=4, num_workers=1)
        calls = record_calls(rig)
        late = rig.pages(3)
        demands = [rig.pages(num_pages) for num_pages in (1, 2, 3)]
        prefetches = [rig.pages(num_pages) for num_pages in (1, 2)]
        for pages in prefetches:
            await rig.lane.submit(pages, priority=PREFETCH)
        for pages in demands:
            await rig.lane.submit(pages, priority=DEMAND)
        await rig.lane.submit(late, priority=PREFETCH)
        async with rig.running():
            pass
        flat = [slot for pages in demands for slot in sources(pages)]
        assert calls[:2] == [flat[:4], flat[4:]]
        flat = [slot for pages in (*prefetches, late) for slot in sources(pages)]
        assert calls[2:] == [sorted(flat[:4]), sorted(flat[4:])]

    run_simulated(main, 0)


def test_a_demand_waits_for_no_more_than_the_batches_under_way() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=2, num_workers=2, max_queued_pages=20)
        calls = record_calls(rig)
        async with rig.running(), asyncio.TaskGroup() as group:
            # A queue full of write-backs, with more waiting to get in.
            for _ in range(5):
                group.create_task(rig.lane.submit(rig.pages(20), priority=WRITE_BACK))
            await asyncio.sleep(4.5)
            num_calls, asked_at, pages = len(calls), world.monotonic(), rig.pages(2)
            demand = await rig.lane.submit(pages, priority=DEMAND)
            assert world.monotonic() == asked_at
            await demand.wait()
            assert calls[num_calls] == sources(pages)

    run_simulated(main, 0)


def test_what_was_fetched_ahead_is_hastened_when_it_is_demanded() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=2, num_workers=1, max_queued_pages=8)
        calls = record_calls(rig)
        async with rig.running(), asyncio.TaskGroup() as group:
            ahead = [await rig.lane.submit(rig.pages(2), priority=PREFETCH) for _ in range(4)]
            late = group.create_task(rig.lane.submit(rig.pages(8), priority=PREFETCH))
            await asyncio.sleep(0.5)
            demands = [await rig.lane.submit(rig.pages(2), priority=DEMAND)]
            ahead[2].hasten(WRITE_BACK)
            assert ahead[2].priority is PREFETCH
            ahead[2].hasten(DEMAND)
            ahead[2].hasten(DEMAND)
            # Its pages have begun: nothing waits that could be hastened.
            ahead[0].hasten(DEMAND)
            # It came before the demand, so it goes before it.
            result = await ahead[2].wait()
            assert result.seconds == 4.0
            assert rig.lane.stats.queued_pages == 4
            await demands[0].wait()
            ahead[2].hasten(DEMAND)
            for transfer in ahead:
                assert all((await transfer.wait()).ok)
            assert all((await (await late).wait()).ok)
            order = [sources(each.pages) for each in (ahead[0], ahead[2], demands[0], ahead[1], ahead[3])]
            assert calls[:5] == order

    run_simulated(main, 0)


def test_hastening_at_any_moment_loses_and_repeats_nothing() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=3, num_workers=2, max_queued_pages=10, jitter=0.5)
        async with rig.running(), asyncio.TaskGroup() as group:

            async def client() -> None:
                for _ in range(5):
                    pages = rig.pages(world.rng.randint(1, 9))
                    transfer = await rig.lane.submit(pages, priority=world.rng.choice(tuple(Priority)))
                    await world.pause(4.0)
                    transfer.hasten(world.rng.choice(tuple(Priority)))
                    if world.rng.random() < 0.2:
                        transfer.cancel()
                    result = await transfer.wait()
                    assert set(result.outcomes) <= {OK, None}
                    assert None not in result.outcomes or result.unwanted
                    rig.check_arrived(transfer)
                    check_conserved(rig.lane.stats)
                    rig.recycle(pages)

            for _ in range(4):
                group.create_task(client())

    for seed in range(50):
        run_simulated(main, seed)


@pytest.mark.parametrize("priority", [PREFETCH, WRITE_BACK])
def test_nothing_waits_for_ever_behind_demands_that_keep_coming(priority: Priority) -> None:
    """A transfer that is `p` steps less urgent goes before every demand that came more than `p * age_s` after it: it
    begins after what came before that, which is bounded by what the demands bring in that time."""

    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=2, num_workers=1, age_s=20.0, capacity_pages=2048)
        begun: list[float] = []
        async with rig.running(), asyncio.TaskGroup() as group:

            async def demands() -> None:
                # A little more than the lane can copy, for long: without ageing nobody else would have a turn.
                for _ in range(200):
                    group.create_task(rig.lane.submit(rig.pages(2), priority=DEMAND))
                    await asyncio.sleep(1.9)

            group.create_task(demands())
            await asyncio.sleep(9.0)
            waiting = await rig.lane.submit(rig.pages(2), priority=priority, on_done=lambda _: begun.append(1))
            result = await waiting.wait()
            # Everything that came before its turn, which the lane needs 2.0 s for where it came within 1.9 s; itself;
            # and the demand that was under way.
            assert 20.0 * priority <= result.seconds <= (9.0 + 20.0 * priority) * 2.0 / 1.9 - 9.0 + 4.0
        assert begun == [1]

    run_simulated(main, 0)


def test_what_has_aged_counts_as_ahead_of_new_demands() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, age_s=5.0)
        async with rig.running():
            await move_random(rig, world, 20, pages_max=8)
            await rig.lane.submit(rig.pages(200), priority=PREFETCH)
            await asyncio.sleep(0.5)
            # One batch of 16 is under way.
            assert rig.lane.estimate_seconds(1) == pytest.approx(17, rel=0.01)
            assert rig.lane.speed().ahead_s == pytest.approx(16, rel=0.01)
            await asyncio.sleep(5.0)
            assert rig.lane.estimate_seconds(1) == pytest.approx(201, rel=0.01)
            assert rig.lane.speed().ahead_s == pytest.approx(200, rel=0.01)
            assert rig.lane.speed(priority=PREFETCH) == rig.lane.speed()

    run_simulated(main, 0)


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_a_full_queue_makes_submitters_wait_in_order() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=2, num_workers=1, max_queued_pages=4)
        entered: list[tuple[str, float]] = []

        async def submit(name: str, num_pages: int) -> None:
            await rig.lane.submit(rig.pages(num_pages), priority=PREFETCH)
            entered.append((name, world.monotonic()))
            assert rig.lane.stats.queued_pages <= 4

        async with rig.running(), asyncio.TaskGroup() as group:
            await submit("a", 4)
            await asyncio.sleep(0)
            for name, num_pages in (("b", 2), ("c", 3), ("d", 1), ("e", 4)):
                group.create_task(submit(name, num_pages))
            await asyncio.sleep(0.5)
            assert rig.lane.stats.queued_pages == 4
            assert rig.lane.try_submit(rig.pages(1), priority=PREFETCH) is None
            # Another priority has a queue of its own.
            other = rig.lane.try_submit(rig.pages(4), priority=WRITE_BACK)
            assert other is not None
            assert other.cancel()
        # Two pages leave the queue every two seconds. d would have fitted earlier, and did not overtake c.
        assert entered == [("a", 0.0), ("b", 0.0), ("c", 4.0), ("d", 4.0), ("e", 8.0)]

    run_simulated(main, 0)


def test_nobody_slips_in_before_those_who_wait() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, max_queued_pages=4)
        await rig.lane.submit(rig.pages(3), priority=DEMAND)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(rig.lane.submit(rig.pages(2), priority=DEMAND))
            await asyncio.sleep(1)
            assert rig.lane.try_submit(rig.pages(1), priority=DEMAND) is None
            async with rig.running():
                assert all((await (await waiting).wait()).ok)

    run_simulated(main, 0)


def test_a_transfer_larger_than_the_queue_is_taken_alone() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=2, num_workers=1, max_queued_pages=4)
        async with rig.running(), asyncio.TaskGroup() as group:
            small = await rig.lane.submit(rig.pages(3), priority=DEMAND)
            large_waits = group.create_task(rig.lane.submit(rig.pages(25), priority=DEMAND))
            after_waits = group.create_task(rig.lane.submit(rig.pages(1), priority=DEMAND))
            await small.wait()
            large = await large_waits
            assert rig.lane.try_submit(rig.pages(1), priority=DEMAND) is None
            after = await after_waits
            # It has let the next one in as soon as its rest was smaller than the queue, and not before.
            assert rig.lane.stats.queued_pages == 4
            for transfer in (small, large, after):
                assert all((await transfer.wait()).ok)

    run_simulated(main, 0)


@pytest.mark.parametrize("num_workers", [1, 3, 8])
def test_no_more_bytes_are_in_flight_than_allowed_and_no_less(num_workers: int) -> None:
    async def main(world: World) -> None:
        cap_pages = 7
        rig = Rig(
            world, batch_pages=3, num_workers=num_workers, max_in_flight_bytes=cap_pages * PAGE_BYTES + PAGE_BYTES - 1
        )
        async with rig.running():
            for _ in range(6):
                await rig.lane.submit(rig.pages(10), priority=WRITE_BACK)
        assert rig.device.in_flight_pages_max == min(cap_pages, 3 * num_workers)

    run_simulated(main, 0)


@pytest.mark.parametrize(
    ("num_workers", "num_prefetches", "most"), [(3, None, 1), (8, None, 2), (8, 1, 1), (8, 5, 5)]
)
def test_what_is_fetched_ahead_leaves_workers_to_demands(
    num_workers: int, num_prefetches: int | None, most: int
) -> None:
    """A demand that comes waits for few batches, whatever is queued; and once it is over, fetching goes on."""

    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=4, num_workers=num_workers, num_prefetches=num_prefetches)
        async with rig.running():
            ahead = await rig.lane.submit(rig.pages(64), priority=PREFETCH)
            await asyncio.sleep(0.5)
            assert rig.device.in_flight_pages == 4 * most
            began = world.monotonic()
            demand = await rig.lane.submit(rig.pages(4), priority=DEMAND)
            assert all((await demand.wait()).ok)
            # All share the device's pipe, page by page: those of the batches under way, and its own.
            assert world.monotonic() - began <= 4 * most + 4
            assert all((await ahead.wait()).ok)
        assert rig.device.in_flight_pages_max <= 4 * most + 4

    run_simulated(main, 0)


def test_a_hastened_prefetch_takes_all_workers() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=4, num_workers=8)
        async with rig.running():
            ahead = await rig.lane.submit(rig.pages(64), priority=PREFETCH)
            await asyncio.sleep(0.5)
            ahead.hasten(DEMAND)
            assert all((await ahead.wait()).ok)
        assert rig.device.in_flight_pages_max == 32

    run_simulated(main, 0)


@pytest.mark.parametrize("closing", [False, True])
def test_a_worker_that_found_no_room_in_flight_looks_again(closing: bool) -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=4, num_workers=2, max_in_flight_bytes=4 * PAGE_BYTES)
        calls: list[tuple[float, int]] = []
        rig.device.watch = lambda _, pages: calls.append((world.monotonic(), len(pages)))
        async with rig.running():
            await rig.lane.submit(rig.pages(8), priority=WRITE_BACK)
            await asyncio.sleep(0.5)
            await rig.lane.submit(rig.pages(1), priority=DEMAND)
            await asyncio.sleep(0.0 if closing else 4.0)
        # The demand leaves room for three, which the other worker takes at the same time.
        assert calls[:3] == [(0.0, 4), (4.0, 1), (4.0, 3)]

    run_simulated(main, 0)


def test_a_submitter_cancelled_while_it_waits_has_submitted_nothing() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=1, num_workers=1, max_queued_pages=2)
        ended: list[Transfer] = []
        async with rig.running(), asyncio.TaskGroup() as group:
            full = await rig.lane.submit(rig.pages(2), priority=DEMAND)
            gone = group.create_task(rig.lane.submit(rig.pages(2), priority=DEMAND, on_done=ended.append))
            stays = group.create_task(rig.lane.submit(rig.pages(1), priority=DEMAND))
            await asyncio.sleep(0)
            gone.cancel()
            assert all((await (await stays).wait()).ok)
            assert full.result is not None
        assert gone.cancelled()
        assert ended == []
        assert rig.lane.stats.submitted == 3

    run_simulated(main, 0)


def test_room_granted_in_the_tick_of_a_cancellation_goes_to_the_next() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, max_queued_pages=2)
        async with asyncio.TaskGroup() as group:
            first = await rig.lane.submit(rig.pages(2), priority=DEMAND)
            gone = group.create_task(rig.lane.submit(rig.pages(2), priority=DEMAND))
            next_one = group.create_task(rig.lane.submit(rig.pages(2), priority=DEMAND))
            await asyncio.sleep(0)
            assert first.cancel()  # makes room, which is granted to `gone`
            gone.cancel()
            transfer = await next_one
            assert gone.cancelled()
            assert rig.lane.stats.queued_pages == 2
            assert transfer.cancel()
        assert rig.lane.stats.submitted == 4

    run_simulated(main, 0)


# -- cancelling -------------------------------------------------------------------------------------------------------


@both_directions
def test_cancelling_what_never_started_ends_it_at_once(direction: Direction) -> None:
    async def main(world: World) -> None:
        rig = Rig(world, direction)
        ended: list[Transfer] = []
        transfer = await rig.lane.submit(rig.pages(3), priority=DEMAND, on_done=ended.append)
        await asyncio.sleep(2)
        assert transfer.cancel()
        assert ended == [transfer]
        assert transfer.result == TransferResult((None,) * 3, seconds=2.0, unwanted=True)
        assert not transfer.cancel()
        # The slots are the owner's again, and the lane knows nothing of them.
        rig.free_targets(transfer.pages)
        calls = record_calls(rig)
        async with rig.running():
            assert await transfer.wait() is transfer.result
        assert (calls, len(ended), rig.lane.stats.cancelled) == ([], 1, 3)

    run_simulated(main, 0)


@both_directions
@pytest.mark.parametrize("num_copied", range(6))
def test_cancelling_at_each_page_reports_when_the_copies_have_ended(direction: Direction, num_copied: int) -> None:
    async def main(world: World) -> None:
        rig = Rig(world, direction, batch_pages=2, num_workers=1)
        ended: list[Transfer] = []
        async with rig.running(), rig.device.hold(after_pages=num_copied) as barrier:
            transfer = await rig.lane.submit(rig.pages(6), priority=DEMAND, on_done=ended.append)
            other = await rig.lane.submit(rig.pages(2), priority=DEMAND)
            await barrier.reached()
            assert not transfer.cancel()
            assert not transfer.cancel()
            assert (transfer.result, ended) == (None, [])
            await asyncio.sleep(100)
            assert ended == []
            barrier.release()
            result = await transfer.wait()
            assert ended == [transfer]
            assert all((await other.wait()).ok)
            assert not transfer.cancel()
        # The batch that stood at the barrier was copied to its end, later ones were never begun.
        num_begun = num_copied // 2 * 2 + 2
        assert result.outcomes == (OK,) * num_begun + (None,) * (6 - num_begun)
        assert result.unwanted
        assert len(ended) == 1
        rig.check_arrived(transfer)

    run_simulated(main, 0)


def test_cancelling_and_finishing_at_the_same_moment_ends_once() -> None:
    async def main(world: World) -> bool:
        rig = Rig(world, num_workers=1)
        ended: list[Transfer] = []
        answers: list[bool] = []
        async with rig.running():
            transfer = await rig.lane.submit(rig.pages(1), priority=DEMAND, on_done=ended.append)

            def cancel() -> None:
                answers.append(transfer.cancel())

            # The copy ends at 1.0. Cancel a few steps of the loop before and after, or before it could begin.
            if world.rng.random() < 0.1:
                cancel()
            else:
                await asyncio.sleep(1.0 if world.rng.random() < 0.5 else 0.0)
                for _ in range(world.rng.randrange(8)):
                    await asyncio.sleep(0)
                asyncio.get_running_loop().call_soon(cancel)
            async with asyncio.TaskGroup() as group:
                waiters = [group.create_task(transfer.wait()) for _ in range(2)]
                for _ in range(world.rng.randrange(8)):
                    await asyncio.sleep(0)
                waiters[0].cancel()
        assert ended == [transfer]
        assert len(answers) == 1
        result = waiters[1].result()
        assert result.outcomes == ((None,) if answers == [True] else (OK,))
        return result.unwanted

    unwanted = [run_simulated(main, seed) for seed in range(200)]
    assert 20 < sum(unwanted) < 180


def test_cancelling_from_a_callback_what_ended_in_the_same_batch_ends_it_once() -> None:
    async def main(world: World) -> None:
        rig = Rig(world)
        ended: list[Transfer] = []

        def on_done(transfer: Transfer) -> None:
            ended.append(transfer)
            assert [other.cancel() for other in transfers if other is not transfer] == [False]

        transfers = [await rig.lane.submit(rig.pages(2), priority=DEMAND, on_done=on_done) for _ in range(2)]
        async with rig.running():
            results = [await transfer.wait() for transfer in transfers]
        assert ended == [transfers[0], transfers[1]] or ended == [transfers[1], transfers[0]]
        assert [result.outcomes for result in results] == [(OK, OK), (OK, OK)]

    run_simulated(main, 0)


def test_cancelling_a_waiter_leaves_the_transfer_alone() -> None:
    async def main(world: World) -> None:
        rig = Rig(world)
        async with rig.running():
            transfer = await rig.lane.submit(rig.pages(4), priority=DEMAND)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2.5):
                    await transfer.wait()
            assert transfer.result is None
            result = await transfer.wait()
        assert result == TransferResult((OK,) * 4, seconds=4.0, unwanted=False)

    run_simulated(main, 0)


def test_cancelled_reads_give_the_whole_pool_back() -> None:
    """32 reads of 16 pages into a host of 512, each cancelled before its first page moved."""

    async def main(world: World) -> None:
        rig = Rig(world, capacity_pages=512, page_s=0.001)
        wanted = [rig.pages(16) for _ in range(32)]
        assert rig.target.num_free == 0
        transfers = [
            await rig.lane.submit(pages, priority=PREFETCH, on_done=lambda ended: rig.free_targets(ended.pages))
            for pages in wanted
        ]
        assert all(transfer.cancel() for transfer in transfers)
        assert rig.target.num_free == 512
        async with rig.running():
            slots = rig.target.allocate(16)
            rig.target.free(slots)
            # Asked for again, into whichever slots there are now, all of them come.
            again = []
            for pages in wanted:
                targets = rig.target.allocate(16).tolist()
                moves = [
                    replace(page, target_slot=slot, target_generation=rig.target.generation(slot))
                    for page, slot in zip(pages, targets, strict=True)
                ]
                again.append(await rig.lane.submit(moves, priority=DEMAND))
            for transfer in again:
                assert all((await transfer.wait()).ok)
                rig.check_arrived(transfer)

    run_simulated(main, 0)


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_pages_not_begun_at_the_deadline_are_not_copied() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=2, num_workers=1)
        async with rig.running():
            transfer = await rig.lane.submit(rig.pages(8), priority=DEMAND, deadline=5.0)
            other = await rig.lane.submit(rig.pages(1), priority=DEMAND, deadline=7.5)
            assert (await transfer.wait()).outcomes == (OK,) * 6 + (None,) * 2
            assert world.monotonic() == 6.0
            assert all((await other.wait()).ok)
        assert rig.lane.stats.cancelled == 2

    run_simulated(main, 0)


def test_a_transfer_behind_a_stuck_device_ends_at_its_deadline() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=2, num_workers=1)
        async with rig.running(), rig.device.hold(after_pages=0) as barrier:
            stuck = await rig.lane.submit(rig.pages(2), priority=DEMAND, deadline=3.0)
            await barrier.reached()
            behind = await rig.lane.submit(rig.pages(2), priority=DEMAND, deadline=4.0)
            assert await behind.wait() == TransferResult((None, None), seconds=4.0, unwanted=False)
            assert world.monotonic() == 4.0
            assert stuck.result is None
            barrier.release()
            assert all((await stuck.wait()).ok)

    run_simulated(main, 0)


def test_waiting_for_room_ends_at_the_deadline() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, max_queued_pages=2)
        await rig.lane.submit(rig.pages(2), priority=DEMAND)
        ended: list[Transfer] = []
        late = await rig.lane.submit(rig.pages(1), priority=DEMAND, deadline=9.0, on_done=ended.append)
        assert world.monotonic() == 9.0
        assert ended == [late]
        assert late.result == TransferResult((None,), seconds=9.0, unwanted=False)
        # Its turn is over, not just its transfer.
        async with rig.running():
            assert all((await (await rig.lane.submit(rig.pages(1), priority=DEMAND)).wait()).ok)

    run_simulated(main, 0)


def test_deadlines_are_those_of_the_clock_not_of_the_loop() -> None:
    async def main(world: World) -> None:
        rig = Rig(world)
        clock = ManualClock()
        lane = Lane(rig.source, rig.target, clock=clock, max_queued_pages=2)
        queued = await lane.submit(rig.pages(2), priority=DEMAND, deadline=5.0)
        # Waiting for room ends by the loop's time, whatever the clock says, and never overfills the queue.
        waited = await lane.submit(rig.pages(1), priority=DEMAND, deadline=8.0)
        assert waited.result == TransferResult((None,), seconds=0.0, unwanted=False)
        await asyncio.sleep(100.0)
        assert queued.result is None
        clock.advance(5.0)
        assert await queued.wait() == TransferResult((None, None), seconds=5.0, unwanted=False)
        assert world.monotonic() < 114.0
        # A clock ahead of the loop: late is late before the timer says so.
        late = await lane.submit(rig.pages(2), priority=DEMAND, deadline=1_000.0)
        clock.advance(1_000.0)
        calls = record_calls(rig)
        async with asyncio.TaskGroup() as group:
            group.create_task(lane.run())
            await late.wait()
            await lane.close(drain_until=None)
        assert calls == []
        assert world.monotonic() < 114.0

    run_simulated(main, 0)


def test_a_deadline_that_has_passed_already_is_not_begun() -> None:
    async def main(world: World) -> None:
        rig = Rig(world)
        calls = record_calls(rig)
        async with rig.running():
            await asyncio.sleep(2)
            waited = await rig.lane.submit(rig.pages(1), priority=DEMAND, deadline=2.0)
            tried = rig.lane.try_submit(rig.pages(1), priority=DEMAND, deadline=1.0)
            assert tried is not None
            for transfer in (waited, tried):
                assert transfer.result == TransferResult((None,), seconds=0.0, unwanted=False)
        assert calls == []

    run_simulated(main, 0)


# -- closing ----------------------------------------------------------------------------------------------------------


def test_closing_drains_what_is_queued() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=2, num_workers=1)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(rig.lane.run())
            transfers = [await rig.lane.submit(rig.pages(3), priority=priority) for priority in Priority]
            await asyncio.sleep(0.5)
            await rig.lane.close(drain_until=100.0)
            assert world.monotonic() == 9.0
            assert all(transfer.result is not None and all(transfer.result.ok) for transfer in transfers)
            await running
        rig.check_at_rest()

    run_simulated(main, 0)


def test_a_drain_ends_when_what_it_waits_for_is_cancelled() -> None:
    async def main(world: World) -> None:
        rig = Rig(world)
        async with rig.running(), asyncio.TaskGroup() as group:
            transfer = await rig.lane.submit(rig.pages(2), priority=DEMAND)
            closing = group.create_task(rig.lane.close(drain_until=None))
            # Whichever comes first, the worker, the closer, or the canceller.
            for _ in range(world.seed):
                await asyncio.sleep(0)
            assert transfer.cancel() == (world.seed == 0)
            await closing
            assert world.monotonic() == (0.0 if world.seed == 0 else 2.0)

    for seed in range(3):
        run_simulated(main, seed)


def test_no_timer_outlives_what_it_was_set_for() -> None:
    worlds: list[World] = []

    async def main(world: World) -> None:
        worlds.append(world)
        rig = Rig(world, max_queued_pages=4)
        async with asyncio.TaskGroup() as group:
            group.create_task(rig.lane.run())
            await rig.lane.submit(rig.pages(1), priority=DEMAND, deadline=1e6)
            cancelled = await rig.lane.submit(rig.pages(3), priority=DEMAND, deadline=2e6)
            waits = group.create_task(rig.lane.submit(rig.pages(4), priority=DEMAND, deadline=3e6))
            await asyncio.sleep(0.5)
            cancelled.cancel()
            await waits
            await rig.lane.close(drain_until=4e6)
        await asyncio.Event().wait()  # for ever, or until a timer is found

    with pytest.raises(DeadlockError):
        run_simulated(main, 0)
    assert worlds[0].monotonic() < 100.0


def test_what_is_left_when_draining_is_over_was_never_copied() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=2, num_workers=2)
        async with asyncio.TaskGroup() as group:
            group.create_task(rig.lane.run())
            transfers = [await rig.lane.submit(rig.pages(4), priority=priority) for priority in Priority]
            await asyncio.sleep(0.5)
            await rig.lane.close(drain_until=3.9)
            # Four pages of one second each; the next four began at 3 and 4 seconds.
        results = [await transfer.wait() for transfer in transfers]
        assert results[0].outcomes == (OK,) * 4
        assert results[1].outcomes == (OK, OK, None, None)
        assert results[2].outcomes == (None,) * 4
        assert not any(result.unwanted for result in results)
        rig.check_at_rest()

    run_simulated(main, 0)


def test_closing_waits_for_a_copy_however_long_it_takes() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=2)
        async with asyncio.TaskGroup() as group, rig.device.hold(after_pages=1) as barrier:
            group.create_task(rig.lane.run())
            transfer = await rig.lane.submit(rig.pages(2), priority=DEMAND)
            await barrier.reached()
            closing = group.create_task(rig.lane.close(drain_until=2.0))
            await asyncio.sleep(1_000)
            assert not closing.done()
            barrier.release()
        assert transfer.result is not None
        assert all(transfer.result.ok)

    run_simulated(main, 0)


def test_closing_ends_the_waiting_of_submitters() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=1, num_workers=1, max_queued_pages=3)
        async with asyncio.TaskGroup() as group:
            group.create_task(rig.lane.run())
            first = await rig.lane.submit(rig.pages(3), priority=DEMAND)
            waiting = [group.create_task(rig.lane.submit(rig.pages(3), priority=DEMAND)) for _ in range(3)]
            await asyncio.sleep(0.5)
            closing = group.create_task(rig.lane.close(drain_until=None))
            for task in waiting:
                assert (await task).result == TransferResult((None,) * 3, seconds=0.5, unwanted=False)
            assert not closing.done()
        assert first.result is not None
        assert all(first.result.ok)
        rig.check_at_rest()

    run_simulated(main, 0)


def test_a_closed_lane_takes_nothing() -> None:
    async def main(world: World) -> None:
        rig = Rig(world)
        async with rig.running() as run:
            await rig.lane.close(drain_until=None)
            await run
            ended: list[Transfer] = []
            transfer = await rig.lane.submit(rig.pages(2), priority=DEMAND, on_done=ended.append)
            assert ended == [transfer]
            assert transfer.result == TransferResult((None, None), seconds=0.0, unwanted=False)
            assert rig.lane.try_submit(rig.pages(1), priority=DEMAND) is None
            assert rig.lane.stats.cancelled == 2

    run_simulated(main, 0)


def test_a_lane_that_does_not_run_drains_nothing() -> None:
    async def main(world: World) -> None:
        rig = Rig(world)
        transfer = await rig.lane.submit(rig.pages(2), priority=DEMAND)
        await rig.lane.close(drain_until=None)
        assert transfer.result == TransferResult((None, None), seconds=0.0, unwanted=False)
        await rig.lane.run()
        assert world.monotonic() == 0.0

    run_simulated(main, 0)


def test_a_later_close_may_shorten_the_drain() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=1, num_workers=1)
        async with asyncio.TaskGroup() as group:
            group.create_task(rig.lane.run())
            transfer = await rig.lane.submit(rig.pages(100), priority=DEMAND)
            await asyncio.sleep(0)
            # The first closer gives up waiting, which opens nothing again.
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.5):
                    await rig.lane.close(drain_until=None)
            assert rig.lane.try_submit(rig.pages(1), priority=PREFETCH) is None
            async with asyncio.TaskGroup() as closers:
                for drain_until in (50.0, 4.5, 30.0):
                    closers.create_task(rig.lane.close(drain_until=drain_until))
            assert world.monotonic() == 5.0
        assert (await transfer.wait()).outcomes == (OK,) * 5 + (None,) * 95

    run_simulated(main, 0)


@both_directions
def test_cancelling_run_waits_for_copies_and_ends_the_rest(direction: Direction) -> None:
    async def main(world: World) -> None:
        rig = Rig(world, direction, batch_pages=2, num_workers=2, max_queued_pages=4)
        async with asyncio.TaskGroup() as group, rig.device.hold(after_pages=1) as barrier:
            run = group.create_task(rig.lane.run())
            begun = await rig.lane.submit(rig.pages(4), priority=DEMAND)
            await barrier.reached()
            queued = await rig.lane.submit(rig.pages(4), priority=DEMAND)
            waiting = group.create_task(rig.lane.submit(rig.pages(1), priority=DEMAND))
            await asyncio.sleep(1)
            for _ in range(3):
                run.cancel()
                await asyncio.sleep(1)
            assert queued.result == TransferResult((None,) * 4, seconds=1.0, unwanted=False)
            assert (await waiting).result == TransferResult((None,), seconds=1.0, unwanted=False)
            assert not run.done()
            assert begun.result is None
            barrier.release()
            with pytest.raises(asyncio.CancelledError):
                await run
        assert begun.result is not None
        assert begun.result.outcomes == (OK,) * 4
        rig.check_arrived(begun)
        rig.check_at_rest()
        await rig.lane.close(drain_until=None)

    run_simulated(main, 0)


def test_an_owner_that_fails_leaves_no_copy_behind() -> None:
    async def main(world: World) -> None:
        rig = Rig(world)
        transfers: list[Transfer] = []

        async def own() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(rig.lane.run())
                transfers.append(await rig.lane.submit(rig.pages(3), priority=DEMAND))
                await asyncio.sleep(1.5)
                raise KeyError("the owner's own error")

        with pytest.raises(ExceptionGroup, match="unhandled errors"):
            await own()
        # The block was left when the copy had ended, not before.
        assert world.monotonic() == 3.0
        assert [transfer.result for transfer in transfers] == [TransferResult((OK,) * 3, seconds=3.0, unwanted=False)]
        rig.check_at_rest()

    run_simulated(main, 0)


def test_workers_that_are_cancelled_end_and_leave_nobody_waiting() -> None:
    """What a loop does that is torn down with everything in it, or an owner whose `run` was never waited for."""

    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=1, num_workers=2)
        async with asyncio.TaskGroup() as group:
            group.create_task(rig.lane.run())
            transfer = await rig.lane.submit(rig.pages(4), priority=DEMAND)
            await asyncio.sleep(0.5)
            workers = [task for task in asyncio.all_tasks() if "worker" in task.get_name()]
            assert len(workers) == 2
            for worker in workers:
                worker.cancel()
            assert (await transfer.wait()).outcomes == (ERROR, ERROR, None, None)
            await rig.lane.close(drain_until=None)
        assert (rig.device.cancelled_calls, rig.lane.stats.unexpected) == (2, 0)

    run_simulated(main, 0)


# -- what nobody may do -----------------------------------------------------------------------------------------------


@both_directions
def test_a_tier_that_raises_costs_its_batch_and_no_worker(
    direction: Direction, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(world: World) -> None:
        rig = Rig(world, direction, batch_pages=2, num_workers=3, faults=Faults(raises=1.0))
        async with rig.running():
            with caplog.at_level(logging.ERROR, "hicache.movers"):
                for _ in range(10):
                    transfer = await rig.lane.submit(rig.pages(2), priority=DEMAND)
                    assert (await transfer.wait()).outcomes == (ERROR, ERROR)
            assert rig.lane.stats.unexpected == 10
            assert rig.lane.stats.failed == 20
            rig.device.faults = Faults()
            # All three workers are still there: six pages are in flight at once.
            transfer = await rig.lane.submit(rig.pages(6), priority=DEMAND)
            await asyncio.sleep(0.5)
            assert rig.lane.stats.in_flight_pages == 6
            assert all((await transfer.wait()).ok)
        # The 1st, 2nd, 4th and 8th were logged, with their traces.
        assert len(caplog.records) == 4
        assert "UnexpectedFault" in caplog.text

    run_simulated(main, 0)


class ShortTier(SimulatedTier):
    """Forgets to report its last page."""

    async def read(self, pages: Sequence[PageRead]) -> list[Outcome]:
        return (await super().read(pages))[:-1]


class CancellingTier(SimulatedTier):
    """Lets the cancellation of a future of its own escape."""

    async def read(self, pages: Sequence[PageRead]) -> list[Outcome]:
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(1.0, future.cancel)
        await future
        return []


@pytest.mark.parametrize("kind", [ShortTier, CancellingTier])
def test_a_tier_that_reports_nonsense_is_not_believed_and_kills_no_worker(
    kind: type[SimulatedTier], caplog: pytest.LogCaptureFixture
) -> None:
    async def main(world: World) -> None:
        rig = Rig(world)
        broken = kind(NVME, page_bytes=PAGE_BYTES, capacity_pages=256)
        pages = rig.pages(2)
        for page in pages:
            [slot] = broken.allocate(1).tolist()
            broken.fill(slot, page.identity, stamped(page.identity))
            assert slot == page.source_slot
        lane = Lane(broken, rig.host, clock=world, num_workers=1)
        async with asyncio.TaskGroup() as group:
            group.create_task(lane.run())
            for _ in range(2):
                transfer = await lane.submit(pages, priority=DEMAND)
                assert (await transfer.wait()).outcomes == (ERROR, ERROR)
            await lane.close(drain_until=None)
        assert lane.stats.unexpected == 2
        assert [rig.host.holds(page.target_slot) for page in pages] == [None, None]

    run_simulated(main, 0)
    assert len(caplog.records) == 2


def test_a_callback_that_raises_costs_nobody_else_his(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: World) -> None:
        rig = Rig(world)
        ended: list[Transfer] = []

        def broken(transfer: Transfer) -> None:
            raise KeyError("an owner's bug")

        transfers = [
            await rig.lane.submit(rig.pages(2), priority=DEMAND, on_done=on_done)
            for on_done in (broken, ended.append, broken, ended.append)
        ]
        async with rig.running():
            for transfer in transfers:
                assert all((await transfer.wait()).ok)
        assert ended == [transfers[1], transfers[3]]
        assert rig.lane.stats.unexpected == 2

    run_simulated(main, 0)
    assert "an owner's bug" in caplog.text


def test_a_callback_sees_a_lane_in_order_and_may_use_it() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, batch_pages=2, num_workers=1)
        seen: list[LaneStats] = []
        chained: list[Transfer | None] = []
        victim = await rig.lane.submit(rig.pages(4), priority=WRITE_BACK)

        def on_done(transfer: Transfer) -> None:
            assert transfer.result is not None
            seen.append(rig.lane.stats)
            check_conserved(seen[-1])
            if not chained:
                chained.append(rig.lane.try_submit(rig.pages(1), priority=DEMAND, on_done=on_done))
                assert victim.cancel()

        await rig.lane.submit(rig.pages(1), priority=DEMAND, on_done=on_done)
        async with rig.running():
            assert await victim.wait() == TransferResult((None,) * 4, seconds=1.0, unwanted=True)
        assert [(stats.pages, stats.queued_pages) for stats in seen] == [(1, 4), (2, 0)]

    run_simulated(main, 0)


def test_what_does_not_fit_together_is_refused() -> None:
    async def main(world: World) -> None:
        def device(page_bytes: int = 64) -> SimulatedTier:
            return SimulatedTier(NVME, page_bytes=page_bytes, capacity_pages=2)

        host = SimulatedHost(HOST, page_bytes=64, capacity_pages=2)
        builds: dict[str, Callable[[], Lane]] = {
            "target.page_bytes": lambda: Lane(device(32), host, clock=world),
            "source, target": lambda: Lane(device(), device(), clock=world),
            "max_in_flight_bytes": lambda: Lane(device(), host, clock=world, max_in_flight_bytes=63),
            "max_queued_pages": lambda: Lane(device(), host, clock=world, max_queued_pages=0),
            "batch_pages": lambda: Lane(device(), host, clock=world, batch_pages=0),
            "num_workers": lambda: Lane(device(), host, clock=world, num_workers=-1),
            "age_s": lambda: Lane(device(), host, clock=world, age_s=0.0),
        }
        for field, build in builds.items():
            with pytest.raises(BadRequest) as caught:
                build()
            assert caught.value.field == field

    run_simulated(main, 0)


# -- estimates --------------------------------------------------------------------------------------------------------


async def move_random(rig: Rig, world: World, num_transfers: int, pages_max: int) -> None:
    """Copy transfers of random sizes, one after the other, and give their slots back."""
    for _ in range(num_transfers):
        pages = rig.pages(world.rng.randint(1, pages_max))
        await (await rig.lane.submit(pages, priority=DEMAND)).wait()
        rig.recycle(pages)


def test_nothing_is_estimated_before_something_was_measured() -> None:
    async def main(world: World) -> None:
        rig = Rig(world)
        assert rig.lane.estimate_seconds(100) == 0.0
        assert (rig.lane.stats.bandwidth, rig.lane.stats.latency_s) == (None, None)
        rig.device.faults = Faults(error=1.0)
        async with rig.running():
            await (await rig.lane.submit(rig.pages(3), priority=DEMAND)).wait()
        # Failed copies teach nothing: a dead device is fast.
        assert (rig.lane.stats.bandwidth, rig.lane.stats.latency_s) == (None, None)

    run_simulated(main, 0)


@pytest.mark.parametrize(("jitter", "tolerance"), [(0.0, 0.01), (0.2, 0.15)])
@pytest.mark.parametrize("num_workers", [1, 4])
def test_estimates_converge_and_follow_a_change(num_workers: int, jitter: float, tolerance: float) -> None:
    async def main(world: World) -> None:
        rig = Rig(world, latency_s=5.0, page_s=2.0, jitter=jitter, batch_pages=8, num_workers=num_workers)
        async with rig.running():
            # One batch at a time, so that latency and bytes can be told apart with any number of workers.
            await move_random(rig, world, 100, pages_max=8)
            stats = rig.lane.stats
            assert stats.latency_s == pytest.approx(5.0, rel=tolerance)
            assert stats.bandwidth == pytest.approx(PAGE_BYTES / 2.0, rel=tolerance)
            rig.device.latency_s, rig.device.bandwidth = 1.0, PAGE_BYTES / 10.0
            await move_random(rig, world, 300, pages_max=8)
            stats = rig.lane.stats
            assert stats.latency_s == pytest.approx(1.0, abs=0.01 if not jitter else 2.0)
            assert stats.bandwidth == pytest.approx(PAGE_BYTES / 10.0, rel=tolerance)

    for seed in range(3):
        run_simulated(main, seed)


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("page_s", [0.01, 1.0])
def test_a_busy_lane_ends_when_it_said_it_would(num_workers: int, page_s: float) -> None:
    async def main(world: World) -> None:
        rig = Rig(world, latency_s=0.5, page_s=page_s, batch_pages=8, num_workers=num_workers)
        async with rig.running():
            for _ in range(4):
                pages = rig.pages(64)
                await (await rig.lane.submit(pages, priority=WRITE_BACK)).wait()
                rig.recycle(pages)
            await rig.lane.submit(rig.pages(40), priority=WRITE_BACK)
            await asyncio.sleep(page_s * 2)
            # Whoever is more urgent does not wait for what is queued, only for what is under way.
            urgent = rig.lane.estimate_seconds(16, priority=DEMAND)
            estimate = rig.lane.estimate_seconds(16, priority=WRITE_BACK)
            assert estimate > urgent > rig.lane.estimate_seconds(1, priority=DEMAND)
            transfer = await rig.lane.submit(rig.pages(16), priority=WRITE_BACK)
            result = await transfer.wait()
        assert estimate == pytest.approx(result.seconds, rel=0.15)

    run_simulated(main, 0)


def test_equal_batches_are_predicted_although_they_cannot_be_told_apart() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, latency_s=4.0, page_s=1.0, batch_pages=8, num_workers=1)
        async with rig.running():
            await (await rig.lane.submit(rig.pages(80), priority=DEMAND)).wait()
        assert rig.lane.estimate_seconds(8) == pytest.approx(12.0, rel=0.01)
        assert rig.lane.estimate_seconds(32) == pytest.approx(48.0, rel=0.01)

    run_simulated(main, 0)


def test_noise_never_makes_a_speed_negative() -> None:
    async def main(world: World) -> None:
        rig = Rig(world, latency_s=1.0, page_s=world.rng.choice((0.0, 0.01)), jitter=0.9, num_workers=1)
        async with rig.running():
            for _ in range(40):
                await move_random(rig, world, 1, pages_max=4)
                stats = rig.lane.stats
                assert stats.latency_s is not None
                assert stats.latency_s >= 0.0
                assert stats.bandwidth is None or stats.bandwidth > 0.0
                assert rig.lane.estimate_seconds(5) > 0.0

    for seed in range(10):
        run_simulated(main, seed)
