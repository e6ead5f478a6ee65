"""All lanes between three tiers under random work and faults: one seed a run, in virtual time, with full pools.

Clients do what a cache does with lanes, but know everything, so that they can assert it. Pages live on the disk; a
promotion takes a host slot and a device slot for each page, reads it into the host, copies it to the device layer by
layer and looks at every layer as soon as it is said to be there; a demotion computes a page on the device, takes it
down to the host and to the disk. Pools are smaller than what the clients want at a time: they wait, set deadlines and
change their minds. A run has three phases: faults; then none, and everything is finished and must work again within a
stated time; then the end, at which every slot is back where it came from.

What is asserted throughout, by the numbers of the reliability notes: a slot in a move is nobody else's (I10), a page is
served only when it is whole (I11), a source keeps its page whatever becomes of the move (I13), waits end (I26, I27),
work goes on once faults are gone (I28), what is cancelled gives everything back once (I29), and counters agree with
what clients saw (I38).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

import pytest

from hicache.movers import Lane, PageMove, Priority, Transfer
from hicache.tier import DEVICE, HOST, NVME, Outcome, PageIdentity, Tier
from tests.hicache.lanes import IDENTITIES, PAGE_BYTES, LayeredDevice, check_conserved, free, stamped
from tests.simulation import Faults, SimulatedHost, SimulatedTier, World, run_simulated, seeds

ALIVE_AGAIN_S = 300.0
"""Once faults are gone, everything that is under way ends within this time. The slowest call that a run can have taken
before that is 50 s long, and a disk page at most 1 s; a client holds fewer than 40."""


class World3:
    """Three tiers, their lanes, and the clients."""

    def __init__(self, world: World) -> None:
        rng = self.rng = world.rng
        self.world = world
        faults = Faults(
            error=rng.choice((0.0, 0.02, 0.3)),
            corrupt=rng.choice((0.0, 0.02, 0.2)),
            raises=rng.choice((0.0, 0.0, 0.1)),
            stall=rng.choice((0.0, 0.02, 0.2)),
            stall_s=50.0,
        )
        self.promoting = rng.random() < 0.7
        self.cancel_rate = rng.choice((0.0, 0.2, 0.7))
        self.deadline_rate = rng.choice((0.0, 0.2, 0.7))
        capacity = rng.choice((4, 12, 40))
        self.disk = SimulatedTier(
            NVME, page_bytes=PAGE_BYTES, capacity_pages=len(IDENTITIES) // 2, rng=rng, latency_s=rng.choice((0.0, 0.1)),
            bandwidth=PAGE_BYTES / rng.choice((0.02, 0.5)), jitter=0.5, faults=faults,
        )  # fmt: skip
        self.host = SimulatedHost(HOST, page_bytes=PAGE_BYTES, capacity_pages=capacity)
        self.device = LayeredDevice(
            DEVICE, page_bytes=PAGE_BYTES, capacity_pages=rng.choice((4, 12, 40)), rng=rng, latency_s=0.01,
            bandwidth=PAGE_BYTES / 0.01, jitter=0.5, faults=Faults(error=faults.error / 4, raises=faults.raises / 2),
        )  # fmt: skip
        options: dict[str, object] = {
            "clock": world,
            "batch_pages": rng.choice((1, 3, 8)),
            "num_workers": rng.choice((1, 2, 4)),
            "max_queued_pages": rng.choice((4, 64)),
            "max_in_flight_bytes": PAGE_BYTES * rng.choice((1, 3, 16)),
            "age_s": rng.choice((0.5, 10.0)),
        }
        self.up = self.lane(self.disk, self.host, options)
        self.on_device = self.lane(self.host, self.device, options)
        self.off_device = self.lane(self.device, self.host, options)
        self.down = self.lane(self.host, self.disk, options)
        self.lanes = (self.up, self.on_device, self.off_device, self.down)
        self.room = asyncio.Event()
        self.outcomes = {lane.name: Counter[Outcome | None]() for lane in self.lanes}
        self.layers_seen = 0
        # Half of the identities are on the disk already; the other half is computed on the device.
        self.slots = {identity: slot for slot, identity in enumerate(self.on_disk)}
        self.disk.allocate(len(self.slots))
        for identity, slot in self.slots.items():
            self.disk.fill(slot, identity, stamped(identity))

    @property
    def on_disk(self) -> Sequence[PageIdentity]:
        return IDENTITIES[: len(IDENTITIES) // 4]

    def lane(self, source: Tier, target: Tier, options: dict[str, object]) -> Lane:
        return Lane(source, target, **options)  # type: ignore[arg-type]  # options of several types

    # -- what a cache does with lanes ---------------------------------------------------------------------------------

    async def take(self, tier: SimulatedTier, num_pages: int) -> list[int]:
        """Slots of a tier; waits until others have given theirs back."""
        while tier.num_free < num_pages:
            self.room.clear()
            await self.room.wait()
        return [int(slot) for slot in tier.allocate(num_pages)]

    def give(self, tier: SimulatedTier, slots: Sequence[int]) -> None:
        free(tier, slots)
        self.room.set()

    async def move(
        self, lane: Lane, sources: Sequence[int], targets: Sequence[int], identities: Sequence[PageIdentity]
    ) -> list[bool]:
        """Copy pages. Which arrived; waits for the end, so that the slots are the caller's again."""
        source, target = lane.source, lane.target
        assert isinstance(source, SimulatedTier)
        assert isinstance(target, SimulatedTier)
        pages = [
            PageMove(a, source.generation(a), b, target.generation(b), identity)
            for a, b, identity in zip(sources, targets, identities, strict=True)
        ]
        now, num_ends = self.world.monotonic(), Counter[int]()

        def on_done(transfer: Transfer) -> None:
            num_ends.update([id(transfer)])

        def on_layer(transfer: Transfer, layer: int) -> None:
            self.layers_seen += 1
            assert num_ends.total() == 0
            size = PAGE_BYTES // LayeredDevice.num_layers
            for page in transfer.pages:
                piece = stamped(page.identity)[layer * size : (layer + 1) * size]
                assert self.device.raw_layer(page.target_slot, layer) == piece
                assert self.device.holds(page.target_slot) is None or layer == LayeredDevice.num_layers - 1

        transfer = await lane.submit(
            pages,
            priority=self.rng.choice(tuple(Priority)),
            deadline=now + self.rng.uniform(0, 30) if self.rng.random() < self.deadline_rate else None,
            by_layer=self.rng.random() < 0.7,
            on_done=on_done,
            on_layer=on_layer,
        )
        if self.rng.random() < self.cancel_rate:
            await self.world.pause(3.0)
            transfer.cancel()
        result = await transfer.wait()
        assert num_ends.total() == 1
        self.world.note(lane.name, result.seconds, *[outcome.value if outcome else None for outcome in result.outcomes])
        self.outcomes[lane.name].update(result.outcomes)
        for page, outcome in zip(pages, result.outcomes, strict=True):
            # A tier that raised may have copied the page before: then it is whole, and nobody was told.
            held = target.holds(page.target_slot)
            assert held == page.identity or (held is None and outcome is not Outcome.OK)
            if held is not None:
                assert target.raw_page(page.target_slot) == stamped(page.identity)
            assert source.holds(page.source_slot) == page.identity
            assert source.raw_page(page.source_slot) == stamped(page.identity)
        for each in self.lanes:
            stats = each.stats
            assert stats.submitted == (
                stats.pages + stats.failed + stats.cancelled + stats.queued_pages + stats.in_flight_pages
            )
            assert stats.in_flight_bytes <= each._max_in_flight_pages * PAGE_BYTES
        return list(result.ok)

    async def promote(self) -> bool:
        """Some pages from the disk to the device. True if all arrived."""
        wanted = self.rng.randint(1, min(self.host.capacity_pages, self.device.capacity_pages))
        first = self.rng.randrange(len(self.on_disk) - wanted)
        identities = self.on_disk[first : first + wanted]
        host = await self.take(self.host, wanted)
        try:
            ok = await self.move(self.up, [self.slots[each] for each in identities], host, identities)
            arrived = [i for i, whole in enumerate(ok) if whole]
            if not arrived:
                return False
            device = await self.take(self.device, len(arrived))
            ok = await self.move(
                self.on_device, [host[i] for i in arrived], device, [identities[i] for i in arrived]
            )
            await self.world.pause(2.0)
            self.give(self.device, device)
            return len(arrived) == wanted and all(ok)
        finally:
            self.give(self.host, host)

    async def demote(self) -> bool:
        """A page from the device to the disk. True if it arrived; it then is given up there again."""
        identity = self.rng.choice(IDENTITIES[len(IDENTITIES) // 4 :])
        (device,) = await self.take(self.device, 1)
        self.device.fill(device, identity, stamped(identity))
        try:
            (host,) = await self.take(self.host, 1)
            try:
                if not all(await self.move(self.off_device, [device], [host], [identity])):
                    return False
                (disk,) = await self.take(self.disk, 1)
                try:
                    return all(await self.move(self.down, [host], [disk], [identity]))
                finally:
                    self.give(self.disk, [disk])
            finally:
                self.give(self.host, [host])
        finally:
            self.give(self.device, [device])

    # -- phases -------------------------------------------------------------------------------------------------------

    async def client(self, until: float) -> None:
        while self.world.monotonic() < until:
            await self.world.pause(2.0)
            # Demotions take device before host, promotions the other way round: in full pools a mixture of them would
            # wait for each other. That is their owner's matter, not the lanes'.
            await (self.promote() if self.promoting else self.demote())

    async def run(self) -> None:
        rng, world = self.rng, self.world
        async with asyncio.TaskGroup() as group:
            for lane in self.lanes:
                group.create_task(lane.run())
            until = world.monotonic() + rng.uniform(5, 60)
            async with asyncio.TaskGroup() as clients:
                for _ in range(rng.randint(1, 4)):
                    clients.create_task(self.client(until))
                await asyncio.sleep(until - world.monotonic())
                self.disk.faults = self.device.faults = Faults()
                self.cancel_rate = self.deadline_rate = 0.0
                world.note("no more faults")
                alive_by = world.monotonic() + ALIVE_AGAIN_S
            assert world.monotonic() <= alive_by, "what was under way did not end in time"
            # A call that stalled before may still be in the pipe's way, and no more.
            async with asyncio.timeout(ALIVE_AGAIN_S):
                assert await self.promote()
                assert await self.demote()
            for lane in self.lanes:
                await lane.close(drain_until=world.monotonic() + rng.uniform(0, 5))
        self.check_end()

    def check_end(self) -> None:
        assert self.host.num_free == self.host.capacity_pages
        assert self.device.num_free == self.device.capacity_pages
        assert self.disk.num_free == self.disk.capacity_pages - len(self.slots)
        assert self.device.num_open == 0
        for tier in (self.disk, self.host, self.device):
            assert (tier.in_flight_pages, tier.cancelled_calls) == (0, 0)
        for lane in self.lanes:
            stats, outcomes = lane.stats, self.outcomes[lane.name]
            check_conserved(stats)
            assert stats.submitted == outcomes.total()
            assert stats.pages == outcomes[Outcome.OK]
            assert stats.cancelled == outcomes[None]
        for identity, slot in self.slots.items():
            assert self.disk.holds(slot) == identity


async def random_world(world: World) -> list[tuple[object, ...]]:
    run = World3(world)
    await run.run()
    world.note("layers", run.layers_seen)
    return world.trace


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Tiers that raise are logged."""
    caplog.set_level(logging.CRITICAL, "hicache.movers")


@pytest.mark.parametrize("block", range(6))
def test_random_worlds(block: int) -> None:
    for seed in seeds(40, block=block):
        run_simulated(random_world, seed)


def test_the_same_seed_gives_the_same_run_and_runs_are_worth_something() -> None:
    first, second = ([run_simulated(random_world, seed) for seed in range(24)] for _ in range(2))
    assert first == second
    assert len({tuple(trace) for trace in first}) == len(first)
    ends = Counter(outcome for trace in first for event in trace if "->" in str(event[1]) for outcome in event[3:])
    assert {"ok", "error", "corrupt", None} <= ends.keys()
    assert ends["ok"] > ends.total() / 4
    assert sum(trace[-1][2] for trace in first if isinstance(trace[-1][2], int)) > 300
