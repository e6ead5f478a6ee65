"""One seeded run of an NVMe tier on the simulated disk: writes, frees, reads and syncs of stamped pages, several at a
time, with the end of the process or of the power in the midst of it, over and over; beside it the oracle.

What is checked after every restart: everything that was called durable is there with right bytes, nothing that was
removed durably comes back, nothing is offered without what is before it, no slot is lost; and, at all times, that no
read gives wrong bytes and nothing waits for ever.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from hicache.errors import DeadlineExceeded, NoRoom, TierUnavailable
from hicache.tier import LayerRead, Outcome, PageIdentity, PageRead, RecoveredRun
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.geometry import PageShape
from tests.faults.oracle import PAGE_SIZE, Broken, Life, Oracle, Page
from tests.faults.seeded import SeededTier
from tests.simulation import World
from tests.stamps import stamp
from tests.tiers.contract import GUARD, page_data, write_of
from tests.tiers.nvme import capacity_for
from tests.tiers.simulated_disk import Rates, SimulatedDisk

SHAPE: Final = PageShape((1500, 1000, 500), PAGE_SIZE)
NUM_PAGES: Final = 14
SLOTS_PER_SEGMENT: Final = 4
STORE: Final = "/disk/store"
STEPS: Final = 300
"""Steps of a run, in the programme."""
SYNC_S: Final = 60.0
"""Virtual seconds that a sync may take."""
OPENING_TRIES: Final = 6
"""Starts that may fail in a row while calls fail at random; then the calls stop failing, and the next must succeed."""

HONEST: Final = Rates()
FAILING: Final = Rates(
    read_error=0.004,
    write_error=0.01,
    no_space=0.004,
    name_error=0.01,
    sync_error=0.02,
    interrupted=0.02,
    short=0.02,
)
LYING: Final = Rates(lost=0.01, misdirected=0.005, flip=0.01, interrupted=0.01, short=0.02)


class PowerCut(Exception):
    """The process has ended; what it was about to do does not happen."""


@dataclass
class Tally:
    """What came up in a run: a test looks whether the runs met what they are for."""

    cuts: int = 0
    kills: int = 0
    stops: int = 0
    cuts_while_opening: int = 0
    failed_starts: int = 0
    pages_written: int = 0
    pages_recovered: int = 0
    reads: int = 0
    misses: int = 0
    faults: int = 0

    def add(self, other: "Tally") -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class PowerRun:
    """See the module. `disk` may be a kind that keeps less than it says: for tests that a broken tier is found out."""

    def __init__(self, world: World, rates: Rates, *, disk: Callable[..., SimulatedDisk] = SimulatedDisk) -> None:
        self.rng = random.Random(world.seed)
        self.world = world
        self.profile = rates
        self.rates = rates
        """What fails at present: the profile's rates, and nothing in the end."""
        self.oracle = Oracle(self.rng)
        self.tally = Tally()
        self.disk = disk(
            random.Random(world.seed + 1),
            sector_bytes=self.rng.choice((512, 4096)),
            misdirect_by=SHAPE.slot_bytes,
        )
        self.disk.mkdir("/disk")
        root = self.disk.open("/", 0)
        self.disk.fsync(root)
        self.disk.close(root)
        self.cuts_while_opening = 0.15
        """Share of starts in which the end comes before they are done."""
        self.tier: NvmeTier | None = None
        self.ended_at: int | None = None
        """What was durable when the process or the power ended; None while they live."""
        self._durable = 0
        """What the tier last called durable before it was opened again."""

    async def run(self, num_steps: int) -> Tally:
        """So many steps, then a phase without faults in which everything must work again."""
        await self._open()
        while num_steps > 0:
            burst = self.rng.choice((1, 1, 2, 4))
            num_steps -= burst
            await self._burst([self._step() for _ in range(burst)])
        await self._end(cut=False)
        self.rates = HONEST
        await self._open()
        await self.prove_well()
        self.tally.faults = sum(self.disk.num_faults.values())
        return self.tally

    # ---- ends and beginnings

    async def _burst(self, steps: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Steps at the same time; the process or the power may end in their midst."""
        cut = self.rng.random() < 0.5
        if self.rng.random() < 0.12:
            self.disk.cut_power_at(self.rng.randint(1, 40), self.on_end)
        try:
            async with asyncio.TaskGroup() as group:
                for step in steps:
                    group.create_task(step)
        except* PowerCut:
            pass
        if self.ended_at is not None:
            await self.begin_again(cut)
        elif self.rng.random() < 0.03:
            await self._end(cut)
            await self._open()

    def on_end(self) -> None:
        """The process or the power ends: what was durable at this moment counts."""
        self.ended_at = self.tier.durable if self.tier is not None else self._durable

    async def _end(self, cut: bool) -> None:
        """A clean stop; then perhaps a power cut, which must not matter."""
        assert self.tier is not None
        self.disk.never_cut_power()
        await self.tier.close()
        self._durable = self.tier.durable
        if not self._failing and self._durable != self.tier.accepted:
            raise Broken(f"a clean stop left {self.tier.accepted - self._durable} numbers that are not durable")
        if not self._failing and self.disk.num_open:
            raise Broken(f"{self.disk.num_open} descriptors are open after a clean stop")
        self.tier = None
        self.tally.stops += 1
        self.disk.kill()
        if cut:
            self.disk.power_up()

    async def begin_again(self, cut: bool) -> None:
        """Go on after the end: of the process alone, or of the power too."""
        assert self.ended_at is not None
        if self.tier is not None:
            self._durable = self.ended_at
            # What is left of the process runs into errors; that it ends shows that a dead device cannot hang it.
            await self.tier.close()
            self.tier = None
        self._revive(cut)
        await self._open()

    def _revive(self, cut: bool) -> None:
        self.ended_at = None
        if cut:
            self.disk.power_up()
            self.tally.cuts += 1
        else:
            self.disk.kill()
            self.tally.kills += 1

    async def _open(self) -> None:
        """Open the tier, and compare what it recovered with what the oracle knows."""
        self.tier = tier = await self._started()
        runs = tier.recovered()
        if self.cuts_while_opening and not self._lying and self.rng.random() < 0.1:
            tier, runs = await self._started_again(tier, runs)
        for digest, record in self.oracle.records.items():
            tier.remember(digest, record)
        recovered = self.oracle.restart(
            runs, tier.generation, durable=self._durable, lossy=self._failing, lying=self._lying
        )
        self.tally.pages_recovered += len(recovered)
        if tier.num_free + len(recovered) != tier.capacity_pages:
            raise Broken(f"{tier.num_free} free and {len(recovered)} used slots are not {tier.capacity_pages}")
        self._durable = tier.durable
        for page in recovered:
            await self._read_back(page)

    async def _started_again(
        self, tier: NvmeTier, runs: Sequence[RecoveredRun]
    ) -> tuple[NvmeTier, Sequence[RecoveredRun]]:
        """Kill the process that has just started, and start again: that must come to the same."""
        self.disk.off = True
        await tier.close()
        self.disk.kill()
        self.tier = None
        self.tier = tier = await self._started()
        again = tier.recovered()
        if self.oracle.slots_of(runs) != self.oracle.slots_of(again):
            raise Broken("a start that was killed and one after it recovered different pages")
        return tier, again

    async def _started(self) -> NvmeTier:
        """A tier that was opened, through whatever happened meanwhile."""
        tries = 0
        while True:
            self.disk.rates = self.rates if tries < OPENING_TRIES else HONEST
            if self.rng.random() < self.cuts_while_opening:
                self.disk.cut_power_at(self.rng.randint(1, 60), self.on_end)
            try:
                tier = self._opened()
            except TierUnavailable as error:
                if self.ended_at is None:
                    self.disk.never_cut_power()
                    if self.rates == HONEST or tries >= OPENING_TRIES:
                        raise Broken(f"a start was refused: {error}") from error
                    if self.disk.num_open:
                        raise Broken(f"{self.disk.num_open} descriptors are open after a start was refused") from error
                    tries += 1
                    self.tally.failed_starts += 1
                    self.disk.kill()
                    continue
            else:
                self.disk.never_cut_power()
                if self.ended_at is None:
                    break
                # The end came in a call that a start can do without.
                await tier.close()
            self.tally.cuts_while_opening += 1
            self._revive(cut=self.rng.random() < 0.5)
        self.disk.rates = self.rates
        return tier

    def _opened(self) -> NvmeTier:
        capacity_bytes, segment_bytes = capacity_for(SHAPE, NUM_PAGES, slots_per_segment=SLOTS_PER_SEGMENT)
        return SeededTier.open(
            STORE,
            layout=SHAPE,
            capacity_bytes=capacity_bytes,
            segment_bytes=segment_bytes,
            files=self.disk,
            clock=self.world,
        )

    @property
    def _failing(self) -> bool:
        """Whether calls of this run may have failed: then what is not confirmed may be lost."""
        return self.profile != HONEST

    @property
    def _lying(self) -> bool:
        """Whether the device may have lied: then nothing is sure but that no byte is wrong."""
        return self.profile.silent

    # ---- steps

    async def _step(self) -> None:
        if self.disk.off:
            raise PowerCut
        match self.rng.choices(("write", "free", "read", "stale", "layers", "sync", "wait"), (9, 4, 7, 1, 2, 3, 3)):
            case ["write"]:
                await self.write(self.rng.randint(1, 4))
            case ["free"]:
                self._free()
            case ["read"]:
                await self._read()
            case ["stale"]:
                await self._read_stale()
            case ["layers"]:
                self._read_layers()
            case ["sync"]:
                await self._sync()
            case _:
                await asyncio.sleep(self.rng.uniform(0, 0.3))
        self._still_alive()

    def _still_alive(self) -> NvmeTier:
        if self.disk.off:
            raise PowerCut
        assert self.tier is not None
        return self.tier

    async def write(self, num_pages: int) -> list[Page]:
        """Write at most so many new pages, each below the one before; those that were accepted."""
        tier = self._still_alive()
        path = self.oracle.new_path(num_pages)
        try:
            slots = tier.allocate(len(path)).tolist()
        except NoRoom:
            self._free()
            return []
        except TierUnavailable:
            self._still_alive()
            if not self._failing:
                raise
            await asyncio.sleep(1.5)
            return []
        self._still_alive()
        lives = [Life(slot, tier.generation(slot)) for slot in slots]
        for page, life in zip(path, lives, strict=True):
            page.lives.append(life)
        above = path[0].parent if path else None
        self._hold(path, above, 1)
        try:
            outcomes = await tier.write(
                [write_of(tier, slot, page.identity) for slot, page in zip(slots, path, strict=True)]
            )
            self._still_alive()
        finally:
            self._hold(path, above, -1)
        for life, outcome in zip(lives, outcomes, strict=True):
            if outcome is Outcome.OK:
                life.written = tier.accepted
                self.tally.pages_written += 1
            elif self._failing and outcome is Outcome.ERROR:
                life.failed = True
            else:
                raise Broken(f"a write was answered with {outcome}")
        # As the cache does: what lies below a page that failed is of no use.
        num_good = next((place for place, life in enumerate(lives) if life.failed), len(lives))
        self._give_back(path[num_good:])
        return path[:num_good]

    def _hold(self, path: Sequence[Page], above: Page | None, change: int) -> None:
        for page in (*path, *([above] if above is not None else [])):
            page.busy += change

    def _free(self) -> None:
        """Free a page and all below it, if nobody is about to put something there."""
        self._still_alive()
        there = self.oracle.there()
        if there:
            gone = list(self.rng.choice(there).below())
            if not any(page.busy for page in gone):
                self._give_back(gone)

    def _give_back(self, pages: Sequence[Page]) -> None:
        tier = self._still_alive()
        lives = [page.lives[-1] for page in pages]
        if lives:
            tier.free(np.array([life.slot for life in lives], np.int32))
            for life in lives:
                life.freed = tier.accepted

    async def _read(self) -> None:
        """Read pages that are there, and now and then one that is being written."""
        tier = self._still_alive()
        pages = [page for page in self.oracle.pages.values() if page.life is not None]
        pages = self.rng.sample(pages, min(len(pages), self.rng.randint(1, 6)))
        lives = [page.lives[-1] for page in pages]
        there = [page.is_there for page in pages]
        outcomes = await self._fetch([(page.identity, life) for page, life in zip(pages, lives, strict=True)])
        self._still_alive()
        for life, was_there, outcome in zip(lives, there, outcomes, strict=True):
            if outcome is Outcome.OK:
                continue
            self.tally.misses += 1
            if was_there and life.freed is None and not self._may_miss(life, outcome):
                raise Broken(f"a page that is there was answered with {outcome}: {life}, durable {tier.durable}")

    def _may_miss(self, life: Life, outcome: Outcome) -> bool:
        """Whether a page that was accepted may be missed: never without faults; a device that fails may err now, or
        have lost in a flush what was not yet durable; one that lies may have lost anything."""
        if self._lying:
            return True
        return self._failing and (outcome is Outcome.ERROR or not life.confirmed)

    async def _fetch(self, asked: Sequence[tuple[PageIdentity, Life]]) -> list[Outcome]:
        """Read; raises `Broken` for wrong bytes."""
        assert self.tier is not None
        buffers = [np.full(SHAPE.page_bytes, GUARD, np.uint8) for _ in asked]
        outcomes = await self.tier.read(
            [
                PageRead(life.slot, life.generation, identity, buffer.data)
                for (identity, life), buffer in zip(asked, buffers, strict=True)
            ]
        )
        for (identity, life), buffer, outcome in zip(asked, buffers, outcomes, strict=True):
            self.tally.reads += 1
            if outcome is Outcome.OK and buffer.tobytes() != page_data(identity, SHAPE.page_bytes).tobytes():
                raise Broken(f"wrong bytes: {life}")
        return outcomes

    async def _read_back(self, page: Page) -> None:
        """Read a page that was just recovered."""
        life = page.lives[-1]
        [outcome] = await self._fetch([(page.identity, life)])
        if outcome is not Outcome.OK and not (self._lying or (self._failing and outcome is Outcome.ERROR)):
            raise Broken(f"a recovered page was answered with {outcome}: {life}")

    async def _read_stale(self) -> None:
        """Ask for stays that are over: none may be served."""
        tier = self._still_alive()
        pages = self.oracle.pages.values()
        over = [(page.identity, life) for page in pages for life in page.lives if life.freed is not None]
        if over:
            asked = self.rng.sample(over, min(len(over), 4))
            for (_, life), outcome in zip(asked, await self._fetch(asked), strict=True):
                if outcome is Outcome.OK:
                    raise Broken(f"a stay that is over was served: {life}, now {tier.generation(life.slot)}")

    def _read_layers(self) -> None:
        tier = self._still_alive()
        there = self.oracle.there()
        for page in self.rng.sample(there, min(len(there), 2)):
            life = page.lives[-1]
            layer = self.rng.randrange(SHAPE.num_layers)
            start, stop = SHAPE.layer_ranges[layer]
            into = np.full(stop - start, GUARD, np.uint8)
            read = LayerRead(life.slot, life.generation, page.identity, layer, into.data)
            [outcome] = tier.start_layer_reads([read]).wait(0)
            if outcome is Outcome.OK:
                if into.tobytes() != stamp(page.identity, SHAPE.page_bytes)[start:stop].tobytes():
                    raise Broken(f"wrong bytes in layer {layer}: {life}")
            elif not self.disk.off and not self._may_miss(life, outcome):
                raise Broken(f"layer {layer} of a page that is there was answered with {outcome}: {life}")

    async def _sync(self) -> None:
        """Ask for what was accepted to be durable; where flushes fail, see what that has left and count on it."""
        tier = self._still_alive()
        number = tier.accepted
        covered = [(page, page.lives[-1]) for page in self.oracle.there()]
        try:
            await tier.sync(number, deadline=self.world.monotonic() + SYNC_S)
        except (TierUnavailable, DeadlineExceeded) as error:
            self._still_alive()
            if not self._failing:
                raise Broken(f"a sync failed on a device that does not: {error}") from error
            return
        self._still_alive()
        if tier.durable < number:
            raise Broken(f"a sync up to {number} ended at {tier.durable}")
        if self._failing and not self._lying:
            await self._confirm([(page, life) for page, life in covered if life.freed is None])

    async def _confirm(self, covered: Sequence[tuple[Page, Life]]) -> None:
        """Pages that a sync covers and that are served afterwards have not been lost by a flush that failed before it;
        of those that are not served, nothing below is of use either."""
        outcomes = await self._fetch([(page.identity, life) for page, life in covered])
        self._still_alive()
        # Those above come before those below: the pages are in the order in which they first came up.
        for (page, life), outcome in zip(covered, outcomes, strict=True):
            if life.freed is not None:
                continue
            if outcome is Outcome.OK:
                above = page.parent.life if page.parent is not None else None
                life.confirmed |= above is None or above.confirmed
            elif outcome is not Outcome.ERROR and not any(below.busy for below in page.below()):
                self._give_back(list(page.below()))

    async def prove_well(self) -> None:
        """Nothing fails any more: within seconds pages are written, durable, and there after a restart."""
        tier = self.tier
        assert tier is not None
        self.disk.never_fail()
        for _ in range(5):
            await asyncio.sleep(1.5)
            gone = [page for page in self.oracle.pages.values() if page.life is not None]
            if gone and tier.num_free < 2:
                self._give_back(gone)
            if await self.write(2):
                break
        else:
            raise Broken("five seconds after the last fault nothing can be written")
        await tier.sync(tier.accepted, deadline=self.world.monotonic() + SYNC_S)
        await self._end(cut=True)
        await self._open()
        await self._end(cut=False)


def rates_of(seed: int) -> Rates:
    """Two runs of five on a device without faults, two on one whose calls fail, one on one that lies."""
    return (HONEST, FAILING, LYING, HONEST, FAILING)[seed % 5]
