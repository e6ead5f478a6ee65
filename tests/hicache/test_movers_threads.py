"""Lanes on a real event loop between real tiers, whose copies run in threads: from the device to the host and back."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from hicache.clock import SystemClock
from hicache.layout import KVDtype, KVLayout
from hicache.movers import Lane, PageMove, Priority, Transfer
from hicache.tier import Outcome, PageIdentity, PageWrite, Slots, Tier
from hicache.tiers.device import DeviceTier
from hicache.tiers.host import HostTier
from tests.stamps import identity_chain, stamp
from tests.tiers.contract import expect_page, run

LAYOUT = KVLayout.uniform(num_layers=4, num_kv_heads=2, head_dim=32, dtype=KVDtype.BFLOAT16, page_size=16)
NUM_PAGES = 192


@asynccontextmanager
async def open_tiers() -> AsyncIterator[tuple[DeviceTier, HostTier]]:
    device = DeviceTier(LAYOUT, capacity_pages=2 * NUM_PAGES, num_threads=2)
    try:
        host = HostTier(page_bytes=LAYOUT.page_bytes, capacity_pages=NUM_PAGES, huge_pages=False, num_threads=2)
        try:
            yield device, host
        finally:
            await host.close()
    finally:
        await device.close()


async def fill(tier: Tier, slots: Slots, identities: Sequence[PageIdentity]) -> None:
    writes = [
        PageWrite(slot, tier.generation(slot), identity, stamp(identity, tier.page_bytes).data)
        for slot, identity in zip(slots.tolist(), identities, strict=True)
    ]
    assert await tier.write(writes) == [Outcome.OK] * len(writes)


def moves(
    source: Tier, source_slots: Slots, target: Tier, target_slots: Slots, identities: Sequence[PageIdentity]
) -> list[PageMove]:
    return [
        PageMove(from_slot, source.generation(from_slot), to_slot, target.generation(to_slot), identity)
        for from_slot, to_slot, identity in zip(source_slots.tolist(), target_slots.tolist(), identities, strict=True)
    ]


def test_pages_go_to_the_host_and_back_while_others_change_their_minds() -> None:
    async def main() -> None:
        rng = random.Random(0)
        identities = identity_chain(NUM_PAGES, page_size=LAYOUT.page_size)
        async with open_tiers() as (device, host), asyncio.TaskGroup() as group:
            clock = SystemClock()
            down = Lane(device, host, clock=clock, batch_pages=8, num_workers=3, max_queued_pages=32)
            up = Lane(host, device, clock=clock, batch_pages=8, num_workers=3, max_queued_pages=32)
            for lane in (down, up):
                group.create_task(lane.run())
            on_device, in_host = device.allocate(NUM_PAGES), host.allocate(NUM_PAGES)
            await fill(device, on_device, identities)
            back_on_device = device.allocate(NUM_PAGES)
            num_ended = 0

            def on_done(transfer: Transfer) -> None:
                nonlocal num_ended
                num_ended += 1

            async def round_trip(first: int) -> None:
                """Copy 12 pages down, then up; cancelled at any moment, a transfer is submitted again."""
                part = slice(first, first + 12)
                legs = (
                    (down, moves(device, on_device[part], host, in_host[part], identities[part])),
                    (up, moves(host, in_host[part], device, back_on_device[part], identities[part])),
                )
                for lane, pages in legs:
                    while True:
                        priority = rng.choice(tuple(Priority))
                        transfer = await lane.submit(pages, priority=priority, on_done=on_done)
                        for _ in range(rng.randrange(4)):
                            await asyncio.sleep(0)
                        if rng.random() < 0.5:
                            transfer.cancel()
                        result = await transfer.wait()
                        assert set(result.outcomes) <= {Outcome.OK, None}
                        if all(result.ok):
                            break

            async with asyncio.TaskGroup() as clients:
                for first in range(0, NUM_PAGES, 12):
                    clients.create_task(round_trip(first))
            for slot, identity in zip(in_host.tolist(), identities, strict=True):
                await expect_page(host, slot, identity)
            for slot, identity in zip(back_on_device.tolist(), identities, strict=True):
                await expect_page(device, slot, identity)
            for lane in (down, up):
                await lane.close(drain_until=clock.monotonic() + 10)
                stats = lane.stats
                assert stats.pages >= NUM_PAGES
                assert (stats.failed, stats.unexpected, stats.queued_pages, stats.in_flight_pages) == (0, 0, 0, 0)
                assert stats.submitted == stats.pages + stats.cancelled
                assert stats.bandwidth is not None
            assert num_ended * 12 == down.stats.submitted + up.stats.submitted

    run(main())


@pytest.mark.parametrize("num_steps", range(6))
def test_cancelling_run_under_copies_leaves_threads_and_slots_in_peace(num_steps: int) -> None:
    async def main() -> None:
        identities = identity_chain(64, page_size=LAYOUT.page_size)
        async with open_tiers() as (device, host):
            sources, targets = device.allocate(64), host.allocate(64)
            await fill(device, sources, identities)
            lane = Lane(device, host, clock=SystemClock(), batch_pages=8, num_workers=4)
            async with asyncio.TaskGroup() as group:
                run_task = group.create_task(lane.run())
                pages = moves(device, sources, host, targets, identities)
                transfer = await lane.submit(pages, priority=Priority.DEMAND)
                for _ in range(num_steps):
                    await asyncio.sleep(0)
                run_task.cancel()
            assert run_task.cancelled()
            # `run` may have been cancelled before its first step; then nobody but the owner can close the lane.
            await lane.close(drain_until=None)
            assert transfer.result is not None
            for page, outcome in zip(pages, transfer.result.outcomes, strict=True):
                assert outcome in (Outcome.OK, None)
                if outcome is Outcome.OK:
                    await expect_page(host, page.target_slot, page.identity)
            # Nobody uses the slots any more: what their next owner puts there stays.
            host.free(targets)
            again = host.allocate(64)
            others = identity_chain(64, namespace=1, page_size=LAYOUT.page_size)
            await fill(host, again, others)
            for slot, identity in zip(again.tolist(), others, strict=True):
                assert np.array_equal(np.frombuffer(host.view(slot), np.uint8), stamp(identity, host.page_bytes))

    run(main())


@pytest.mark.parametrize("cap_pages", [4, 192])
def test_a_thread_attends_over_each_layer_as_soon_as_it_is_there(cap_pages: int) -> None:
    """What an engine does: it waits for a layer in its own thread, and reads the pool while the next one arrives."""

    async def main() -> None:
        identities = identity_chain(NUM_PAGES, page_size=LAYOUT.page_size)
        async with open_tiers() as (device, host), asyncio.TaskGroup() as group:
            lane = Lane(
                host, device, clock=SystemClock(), batch_pages=32, max_in_flight_bytes=cap_pages * LAYOUT.page_bytes
            )
            group.create_task(lane.run())
            sources, targets = host.allocate(NUM_PAGES), device.allocate(NUM_PAGES)
            await fill(host, sources, identities)
            events = [threading.Event() for _ in range(LAYOUT.num_layers)]

            def on_layer(transfer: Transfer, layer: int) -> None:
                events[layer].set()

            def attend() -> int:
                """Layers whose bytes are those of their pages when their event says so."""
                for layer, event in enumerate(events):
                    assert event.wait(60)
                    pool = device.layer(layer)
                    size = LAYOUT.layer_bytes(0)
                    for slot, identity in zip(targets.tolist(), identities, strict=True):
                        piece = stamp(identity, size, start=layer * size)
                        assert np.array_equal(pool[slot].view(torch.uint8).numpy().reshape(-1), piece)
                return len(events)

            transfer = await lane.submit(
                moves(host, sources, device, targets, identities),
                priority=Priority.DEMAND,
                by_layer=True,
                on_layer=on_layer,
            )
            assert await asyncio.to_thread(attend) == LAYOUT.num_layers
            assert all((await transfer.wait()).ok)
            for slot, identity in zip(targets.tolist(), identities, strict=True):
                await expect_page(device, slot, identity)
            await lane.close(drain_until=None)

    run(main())


def test_loads_by_layer_that_are_given_up_leave_their_slots_in_peace() -> None:
    async def main() -> None:
        rng = random.Random(1)
        identities = identity_chain(NUM_PAGES, page_size=LAYOUT.page_size)
        async with open_tiers() as (device, host), asyncio.TaskGroup() as group:
            lane = Lane(host, device, clock=SystemClock(), batch_pages=8)
            group.create_task(lane.run())
            sources = host.allocate(NUM_PAGES)
            await fill(host, sources, identities)
            for _ in range(20):
                targets = device.allocate(NUM_PAGES)
                pages = moves(host, sources, device, targets, identities)
                transfer = await lane.submit(pages, priority=Priority.DEMAND, by_layer=True)
                if rng.random() < 0.5:
                    await transfer.wait_layer(rng.randrange(LAYOUT.num_layers))
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                transfer.cancel()
                result = await transfer.wait()
                assert set(result.outcomes) <= {Outcome.OK, None}
                # The slots are the owner's again: what their next owner puts there at once stays.
                device.free(targets)
                again = device.allocate(NUM_PAGES)
                others = identity_chain(NUM_PAGES, namespace=1, page_size=LAYOUT.page_size)
                await fill(device, again, others)
                for slot, identity in zip(again.tolist(), others, strict=True):
                    await expect_page(device, slot, identity)
                device.free(again)
            await lane.close(drain_until=None)

    run(main())
