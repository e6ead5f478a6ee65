"""A lane between a simulated device and a simulated host, and pages for it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from functools import cache
from typing import Any, Final

import numpy as np

from hicache.movers import Lane, LaneStats, PageMove, Transfer
from hicache.tier import DEVICE, HOST, NVME, Outcome, PageIdentity, PageWrite, Tier, TierId
from tests.simulation import Faults, SimulatedHost, SimulatedTier, World
from tests.stamps import identity_chain, stamp

PAGE_BYTES: Final = 64
IDENTITIES: Final = identity_chain(512)


class Direction(Enum):
    """Which end of the lane is the host."""

    INTO_HOST = "nvme->host"
    OUT_OF_HOST = "host->nvme"


@cache
def stamped(identity: PageIdentity) -> bytes:
    """The page's bytes."""
    return stamp(identity, PAGE_BYTES).tobytes()


class LayeredDevice(SimulatedTier):
    """A simulated device that takes pages layer by layer. Its faults, latency and barriers apply to each layer."""

    num_layers: Final = 4
    num_open: int = 0
    """Layer writes that were opened and not closed."""

    def __init__(self, tier_id: TierId, **options: Any) -> None:
        super().__init__(tier_id, **options)
        self._in_order = asyncio.Lock()

    async def open_layer_writes(self, pages: Sequence[PageWrite]) -> "SimulatedLayerWrites":
        return SimulatedLayerWrites(self, pages)

    async def write_layer(self, layer: int, pages: Sequence[PageWrite]) -> list[Outcome]:
        """One layer of pages."""
        data = [self._checked(page.slot, page.data) for page in pages]
        size = self.page_bytes // self.num_layers
        outcomes = []
        async with self._call(f"layer {layer}", pages), self._in_order:
            for page, source in zip(pages, data, strict=True):
                piece = slice(layer * size, (layer + 1) * size)
                if not self._slots.is_allocated(page.slot) or self.generation(page.slot) != page.generation:
                    outcomes.append(Outcome.STALE)
                    continue
                self._held[page.slot] = None
                outcome = await self._pass_pipe()
                if outcome is Outcome.OK and self.generation(page.slot) != page.generation:
                    outcome = Outcome.STALE
                if outcome is Outcome.OK:
                    self._view(page.slot)[piece] = source[piece]
                outcomes.append(outcome)
        return outcomes

    def declare(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        if not self._slots.is_allocated(slot) or self.generation(slot) != generation:
            return Outcome.STALE
        self._held[slot] = identity
        return Outcome.OK

    def raw_layer(self, slot: int, layer: int) -> bytes:
        """The bytes of one layer that lie in the slot."""
        size = self.page_bytes // self.num_layers
        return self.raw_page(slot)[layer * size : (layer + 1) * size]


class SimulatedLayerWrites:
    """Pages on their way into a `LayeredDevice`."""

    def __init__(self, device: LayeredDevice, pages: Sequence[PageWrite]) -> None:
        self._device = device
        self._pages = pages
        device.num_open += 1

    def start_layer(self, layer: int) -> asyncio.Task[list[Outcome]]:
        return asyncio.get_running_loop().create_task(self._device.write_layer(layer, self._pages))

    def close(self) -> None:
        self._device.num_open -= 1


class Rig:
    """A lane, its two tiers, and the pages that go through it. The device has latency, bandwidth and faults; the host
    is memory.

    Args:
        layered: the device takes pages layer by layer, each layer in its part of the time; it is then the target.
        options: those of `Lane`; priorities do not age unless `age_s` says so.
    """

    def __init__(
        self,
        world: World,
        direction: Direction = Direction.INTO_HOST,
        *,
        layered: bool = False,
        capacity_pages: int = 256,
        latency_s: float = 0.0,
        page_s: float = 1.0,
        jitter: float = 0.0,
        faults: Faults | None = None,
        **options: Any,
    ) -> None:
        # What passes the device's pipe is a page, or a layer of one that takes its part of the time.
        page_s /= LayeredDevice.num_layers if layered else 1
        self.device: SimulatedTier = (LayeredDevice if layered else SimulatedTier)(
            DEVICE if layered else NVME,
            page_bytes=PAGE_BYTES,
            capacity_pages=capacity_pages,
            rng=world.rng,
            latency_s=latency_s,
            bandwidth=PAGE_BYTES / page_s if page_s else float("inf"),
            jitter=jitter,
            faults=faults,
        )
        self.host = SimulatedHost(HOST, page_bytes=PAGE_BYTES, capacity_pages=capacity_pages)
        into_host = direction is Direction.INTO_HOST and not layered
        self.source: SimulatedTier = self.device if into_host else self.host
        self.target: SimulatedTier = self.host if into_host else self.device
        self.lane = Lane(self.source, self.target, clock=world, **({"age_s": 1e6} | options))
        self._num_pages = 0

    def pages(self, num_pages: int) -> list[PageMove]:
        """New pages in the source, and slots for them in the target."""
        identities = [IDENTITIES[(self._num_pages + i) % len(IDENTITIES)] for i in range(num_pages)]
        self._num_pages += num_pages
        sources, targets = self.source.allocate(num_pages).tolist(), self.target.allocate(num_pages).tolist()
        for slot, identity in zip(sources, identities, strict=True):
            self.source.fill(slot, identity, stamped(identity))
        return [
            PageMove(source, self.source.generation(source), target, self.target.generation(target), identity)
            for source, target, identity in zip(sources, targets, identities, strict=True)
        ]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """The lane's `run` as a task. Afterwards the lane is drained and closed, and nothing was ever cut short."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.lane.run(), name="run")
            await asyncio.sleep(0)  # a lane that has yet to begin to run would drain nothing
            yield task
            await self.lane.close(drain_until=None)
        self.check_at_rest()

    def check_at_rest(self) -> None:
        """Nothing is queued or under way, and no copy was ever cancelled."""
        stats = self.lane.stats
        assert (stats.queued_pages, stats.in_flight_pages, stats.in_flight_bytes) == (0, 0, 0)
        assert self.device.in_flight_pages == self.host.in_flight_pages == 0
        assert not isinstance(self.device, LayeredDevice) or self.device.num_open == 0
        assert self.device.cancelled_calls == self.host.cancelled_calls == 0
        check_conserved(stats)

    def check_arrived(self, transfer: Transfer) -> None:
        """The target serves the pages of an ended transfer that are `OK`, with their own bytes, and the source still
        has all of them; except where a slot was freed meanwhile."""
        assert transfer.result is not None
        assert len(transfer.result.outcomes) == len(transfer.pages)
        for page, outcome in zip(transfer.pages, transfer.result.outcomes, strict=True):
            if outcome is Outcome.OK and self.target.generation(page.target_slot) == page.target_generation:
                assert self.target.holds(page.target_slot) == page.identity
                assert self.target.raw_page(page.target_slot) == stamped(page.identity)
            if self.source.generation(page.source_slot) == page.source_generation:
                assert self.source.holds(page.source_slot) == page.identity
                assert self.source.raw_page(page.source_slot) == stamped(page.identity)

    def free_targets(self, pages: Sequence[PageMove]) -> None:
        """Give the target slots of a move back, as its owner does when it failed."""
        free(self.target, [page.target_slot for page in pages])

    def recycle(self, pages: Sequence[PageMove]) -> None:
        """Give all slots of a move back."""
        free(self.source, [page.source_slot for page in pages])
        self.free_targets(pages)


def free(tier: Tier, slots: Sequence[int]) -> None:
    tier.free(np.array(slots, np.int32))


def check_conserved(stats: LaneStats) -> None:
    """Every page that was submitted is in one place."""
    places = (stats.pages, stats.failed, stats.cancelled, stats.queued_pages, stats.in_flight_pages)
    assert all(count >= 0 for count in places)
    assert stats.submitted == sum(places)
    assert stats.in_flight_bytes == stats.in_flight_pages * PAGE_BYTES
    assert stats.bytes == stats.pages * PAGE_BYTES
