"""Transfers that go layer by layer: a consumer begins on the first layer while later ones arrive. A page takes the
device one second, a layer of it a quarter."""

import asyncio
from collections.abc import Sequence

import pytest

from hicache.movers import PageMove, Priority, Transfer
from hicache.tier import Outcome, PageRead, PageWrite
from tests.hicache.lanes import LayeredDevice, Rig, free, stamped
from tests.simulation import Faults, World, run_simulated

OK, STALE, ERROR = Outcome.OK, Outcome.STALE, Outcome.ERROR
DEMAND, PREFETCH, WRITE_BACK = Priority
NUM_LAYERS = LayeredDevice.num_layers


def layered(world: World, **options: object) -> Rig:
    return Rig(world, layered=True, **options)  # type: ignore[arg-type]  # options of Rig and of Lane, mixed


def check_layers(rig: Rig, pages: Sequence[PageMove], num_layers: int) -> None:
    """The first layers of all pages lie in their slots."""
    assert isinstance(rig.device, LayeredDevice)
    for page in pages:
        size = rig.device.page_bytes // NUM_LAYERS
        for layer in range(num_layers):
            expected = stamped(page.identity)[layer * size : (layer + 1) * size]
            assert rig.device.raw_layer(page.target_slot, layer) == expected


def test_each_layer_is_there_before_the_next_one_begins() -> None:
    async def main(world: World) -> None:
        rig = layered(world, batch_pages=4)
        arrived: list[tuple[float, int]] = []
        ended: list[int] = []

        def on_layer(transfer: Transfer, layer: int) -> None:
            check_layers(rig, transfer.pages, layer + 1)
            assert not ended
            arrived.append((world.monotonic(), layer))

        async with rig.running():
            transfer = await rig.lane.submit(
                rig.pages(8), priority=DEMAND, by_layer=True, on_layer=on_layer, on_done=lambda _: ended.append(1)
            )
            assert transfer.num_layers == NUM_LAYERS
            for layer in range(NUM_LAYERS):
                assert not transfer.layer_done(layer)
                assert await transfer.wait_layer(layer)
                assert world.monotonic() == 2.0 * (layer + 1)
                assert transfer.layer_done(layer)
            assert (await transfer.wait()).outcomes == (OK,) * 8
        assert arrived == [(2.0, 0), (4.0, 1), (6.0, 2), (8.0, 3)]
        assert ended == [1]
        rig.check_arrived(transfer)
        stats = rig.lane.stats
        assert (stats.pages, stats.bytes, stats.busy_s) == (8, 8 * rig.device.page_bytes, 8.0)
        assert stats.bandwidth == pytest.approx(rig.device.page_bytes, rel=0.01)

    run_simulated(main, 0)


def test_computing_on_layers_as_they_arrive_hides_the_shorter_of_the_two() -> None:
    """The consumer takes as long for each layer as its load: both together take one layer longer than either."""

    async def main(world: World) -> None:
        rig = layered(world)
        async with rig.running():
            transfer = await rig.lane.submit(rig.pages(8), priority=DEMAND, by_layer=True)
            for layer in range(NUM_LAYERS):
                assert await transfer.wait_layer(layer)
                await asyncio.sleep(2.0)
            assert world.monotonic() == 8.0 + 2.0

    run_simulated(main, 0)


def test_bytes_in_flight_stay_below_their_cap_although_all_pages_have_begun() -> None:
    async def main(world: World) -> None:
        rig = layered(world, batch_pages=4, max_in_flight_bytes=2 * 64 + 1)
        calls: list[int] = []

        def watch(operation: str, pages: Sequence[PageRead] | Sequence[PageWrite]) -> None:
            calls.append(len(pages))
            assert rig.lane.stats.in_flight_bytes <= 2 * 64
            # The device counts a layer of a page as one.
            assert rig.device.in_flight_pages <= 2 * NUM_LAYERS

        rig.device.watch = watch
        async with rig.running():
            transfer = await rig.lane.submit(rig.pages(20), priority=DEMAND, by_layer=True)
            assert await transfer.wait_layer(0)
            assert rig.lane.stats.in_flight_pages == 20
            # A quarter of what is under way has been copied already.
            assert rig.lane.estimate_seconds(0) == pytest.approx(15, rel=0.05)
            assert all((await transfer.wait()).ok)
        # Two pages' bytes are eight layers, in two pieces.
        assert calls == [4] * 5 * NUM_LAYERS

    run_simulated(main, 0)


def test_others_are_copied_beside_it() -> None:
    async def main(world: World) -> None:
        rig = layered(world, batch_pages=4)
        async with rig.running():
            long = await rig.lane.submit(rig.pages(40), priority=PREFETCH, by_layer=True)
            await long.wait_layer(0)
            short = await rig.lane.submit(rig.pages(2), priority=DEMAND)
            assert (await short.wait()).seconds < 10
            assert not long.layer_done(1)
            assert all((await long.wait()).ok)
        rig.check_arrived(long)
        rig.check_arrived(short)

    run_simulated(main, 0)


@pytest.mark.parametrize("failing", range(8 * NUM_LAYERS))
def test_a_piece_that_fails_fails_its_page_alone(failing: int) -> None:
    async def main(world: World) -> None:
        rig = layered(world, batch_pages=2)
        rig.device.fail_page = failing
        async with rig.running():
            transfer = await rig.lane.submit(rig.pages(8), priority=DEMAND, by_layer=True)
            failed_layer = failing // 8
            if failed_layer:
                assert await transfer.wait_layer(failed_layer - 1)
            assert not await transfer.wait_layer(failed_layer)
            assert not await transfer.wait_layer(NUM_LAYERS - 1)
            result = transfer.result
            assert result is not None
            assert sorted(outcome.value for outcome in result.outcomes if outcome) == ["error"] + ["ok"] * 7
            for layer in range(NUM_LAYERS):
                assert transfer.layer_done(layer) == (layer < failed_layer)
        rig.check_arrived(transfer)
        failed = transfer.pages[result.outcomes.index(ERROR)]
        assert rig.device.holds(failed.target_slot) is None

    # A page that failed takes no further pieces, so later numbers are those of other pages.
    run_simulated(main, 0)


@pytest.mark.parametrize("num_pieces", range(0, 8 * NUM_LAYERS, 3))
@pytest.mark.parametrize("how", ["cancel", "drain is over", "run cancelled"])
def test_stopping_waits_for_the_pieces_under_way_and_leaves_the_rest(how: str, num_pieces: int) -> None:
    async def main(world: World) -> None:
        rig = layered(world, batch_pages=1)
        ended: list[Transfer] = []
        async with asyncio.TaskGroup() as group:
            run = group.create_task(rig.lane.run())
            async with rig.device.hold(after_pages=num_pieces) as barrier:
                transfer = await rig.lane.submit(rig.pages(8), priority=DEMAND, by_layer=True, on_done=ended.append)
                await barrier.reached()
                if how == "cancel":
                    assert not transfer.cancel()
                elif how == "run cancelled":
                    run.cancel()
                closing = group.create_task(rig.lane.close(drain_until=world.monotonic() if how != "cancel" else None))
                await asyncio.sleep(100)
                assert ended == []
                barrier.release()
            await closing
        assert ended == [transfer]
        result = transfer.result
        assert result is not None
        # Two pieces of two pages are under way; only where the last ones had begun is anything whole.
        whole = num_pieces >= 8 * NUM_LAYERS - 4
        assert result.outcomes == ((OK,) if whole else (None,)) * 8
        assert result.unwanted == (how == "cancel")
        assert not await transfer.wait_layer(NUM_LAYERS - 1) or whole
        rig.check_at_rest()
        rig.recycle(transfer.pages)
        assert rig.source.num_free == rig.target.num_free == 256

    run_simulated(main, 0)


@pytest.mark.parametrize("end", ["source", "target"])
def test_a_slot_freed_between_two_layers_makes_its_page_stale(end: str) -> None:
    async def main(world: World) -> None:
        rig = layered(world)
        async with rig.running():
            transfer = await rig.lane.submit(rig.pages(4), priority=DEMAND, by_layer=True)
            assert await transfer.wait_layer(0)
            page = transfer.pages[1]
            if end == "target":
                rig.free_targets([page])
            else:
                free(rig.source, [page.source_slot])
            assert not await transfer.wait_layer(NUM_LAYERS - 1)
            assert transfer.result is not None
            assert transfer.result.outcomes == (OK, STALE, OK, OK)
            assert rig.device.holds(page.target_slot) is None

    run_simulated(main, 0)


def test_a_device_that_raises_costs_its_pieces_and_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: World) -> None:
        rig = layered(world, num_workers=1, faults=Faults(raises=1.0))
        async with rig.running():
            transfer = await rig.lane.submit(rig.pages(4), priority=DEMAND, by_layer=True)
            assert (await transfer.wait()).outcomes == (ERROR,) * 4
            rig.device.faults = Faults()
            again = await rig.lane.submit(transfer.pages, priority=DEMAND, by_layer=True)
            assert all((await again.wait()).ok)
            rig.check_arrived(again)
        # The pages go in one piece a layer, and when the first failed the next one had been begun.
        assert rig.lane.stats.unexpected == 2

    run_simulated(main, 0)
    assert "a copy raised instead of reporting" in caplog.text


def test_a_device_that_reports_nonsense_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: World) -> None:
        rig = layered(world)

        async def too_few(layer: int, pages: Sequence[PageWrite]) -> list[Outcome]:
            return [OK]

        rig.device.write_layer = too_few  # type: ignore[attr-defined]  # a rig's device may take layers
        async with rig.running():
            transfer = await rig.lane.submit(rig.pages(4), priority=DEMAND, by_layer=True)
            assert (await transfer.wait()).outcomes == (ERROR,) * 4
        assert rig.lane.stats.unexpected == 2

    run_simulated(main, 0)
    assert "a copy raised instead of reporting" in caplog.text


def test_a_callback_that_raises_or_cancels_costs_nobody_else_his(caplog: pytest.LogCaptureFixture) -> None:
    async def main(world: World) -> None:
        rig = layered(world)

        def fail(transfer: Transfer, layer: int) -> None:
            raise RuntimeError("an owner's mistake")

        def change_mind(transfer: Transfer, layer: int) -> None:
            if layer == 1:
                transfer.cancel()

        async with rig.running():
            first = await rig.lane.submit(rig.pages(2), priority=DEMAND, by_layer=True, on_layer=fail)
            second = await rig.lane.submit(rig.pages(2), priority=DEMAND, by_layer=True, on_layer=change_mind)
            assert all((await first.wait()).ok)
            assert (await second.wait()).outcomes == (None, None)
            # The layer after it had been begun.
            assert second.layer_done(2)
            assert not second.layer_done(3)
        assert rig.lane.stats.unexpected == NUM_LAYERS

    run_simulated(main, 0)
    assert "an owner's on_layer raised" in caplog.text


def test_where_the_target_takes_whole_pages_the_layers_come_at_the_end() -> None:
    async def main(world: World) -> None:
        rig = Rig(world)
        async with rig.running():
            transfer = await rig.lane.submit(rig.pages(3), priority=DEMAND, by_layer=True)
            assert transfer.num_layers == 1
            assert not transfer.layer_done(0)
            assert await transfer.wait_layer(31)
            assert transfer.result is not None
        rig.check_arrived(transfer)

    run_simulated(main, 0)


def test_waiting_for_a_layer_may_be_given_up() -> None:
    async def main(world: World) -> None:
        rig = layered(world)
        async with rig.running():
            transfer = await rig.lane.submit(rig.pages(4), priority=DEMAND, by_layer=True)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await transfer.wait_layer(0)
            assert await transfer.wait_layer(3)
        rig.check_arrived(transfer)

    run_simulated(main, 0)
