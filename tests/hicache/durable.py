"""A simulated NVMe tier that survives a crash, and what must be found again after one."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hicache.errors import DeadlineExceeded, TierUnavailable
from hicache.tier import NVME, Outcome, PageIdentity, PageWrite, RecoveredRun, Slots
from tests.simulation import SimulatedTier


@dataclass(frozen=True, slots=True)
class Page:
    """A page as the medium holds it."""

    identity: PageIdentity
    data: bytes
    number: int
    """When it was accepted."""


@dataclass(slots=True)
class Image:
    """What a medium holds at one moment."""

    pages: dict[int, Page] = field(default_factory=dict)
    records: dict[bytes, bytes] = field(default_factory=dict)

    def closed(self) -> dict[int, Page]:
        """The pages whose whole path is there, each before those that continue it."""
        after: dict[bytes, list[int]] = {}
        for slot, page in sorted(self.pages.items(), key=lambda item: item[1].number):
            after.setdefault(page.identity.prefix, []).append(slot)
        found: dict[int, Page] = {}
        chains = list(self.records)
        for chain in chains:
            for slot in after.get(chain, ()):
                found[slot] = self.pages[slot]
                chains.append(self.pages[slot].identity.chain)
        return found


@dataclass(frozen=True, slots=True)
class _Freed:
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Written:
    slot: int
    page: Page


@dataclass(frozen=True, slots=True)
class _Remembered:
    digest: bytes
    record: bytes


class SimulatedDurableTier(SimulatedTier):
    """A simulated tier whose writes and frees become durable later, in order.

    `crash` says what a crash now would leave: everything that is durable, and by chance some of what was accepted after
    it. `image` is what the tier finds when it opens.

    Args:
        eager: how likely each accepted write or free takes part of what waits to the medium.
        sync_s: seconds that a flush takes, at most.
    """

    def __init__(
        self, *, image: Image | None = None, eager: float = 0.2, sync_s: float = 1e-3, **options: Any
    ) -> None:
        super().__init__(NVME, **options)
        self.eager: Final = eager
        self.sync_s: Final = sync_s
        self.sync_fails = False
        """Every flush fails from now on, and takes with it what waited for it."""
        self.sync_hangs = False
        """Every flush takes longer than anybody waits."""
        self.num_syncs = 0
        self._medium = image or Image()
        self._waiting: list[_Freed | _Written | _Remembered] = []
        self._numbers: list[int] = []
        self._accepted = self._durable = max([page.number for page in self._medium.pages.values()], default=0)
        self._freed_at: dict[int, int] = {}
        self._recovered: list[RecoveredRun] = []
        if image is not None:
            self._recover(image)

    def _recover(self, image: Image) -> None:
        found = image.closed()
        namespace_of: dict[bytes, bytes] = {digest: digest for digest in image.records}
        # Slots are handed out from the front: all are taken, and those that hold nothing given back.
        every = self._slots.allocate(self.capacity_pages)
        for slot, page in found.items():
            namespace = namespace_of[page.identity.chain] = namespace_of[page.identity.prefix]
            self.fill(slot, page.identity, page.data)
            identity = page.identity
            self._recovered.append(RecoveredRun(
                image.records[namespace], identity.prefix, identity.chain, identity.tokens, np.array([slot], np.int32)
            ))
        unused = np.setdiff1d(every, np.fromiter(found, np.int32, len(found)))
        if len(unused):
            self._slots.free(unused.astype(np.int32))
        image.pages = found

    # -- the contract -------------------------------------------------------------------------------------------------

    @property
    def accepted(self) -> int:
        return self._accepted

    @property
    def durable(self) -> int:
        return self._durable

    async def sync(self, number: int, *, deadline: float, is_frees_only: bool = False) -> None:
        self.num_syncs += 1
        await self.sleep(self.sync_s, deadline)
        if self.sync_fails:
            self._lose()
            if not is_frees_only:
                raise TierUnavailable(self.tier_id, "a flush failed")
        self._reach(number)

    def check(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        if self.generation(slot) != generation:
            return Outcome.STALE
        return Outcome.OK if self.holds(slot) == identity else Outcome.NOT_FOUND

    def remember(self, digest: bytes, record: bytes) -> None:
        self._log(_Remembered(digest, record))

    def recovered(self) -> Sequence[RecoveredRun]:
        runs, self._recovered = self._recovered, []
        return runs

    def free(self, slots: Slots) -> None:
        super().free(slots)
        self._accepted += 1
        self._log(_Freed(tuple(slots.tolist())))
        self._freed_at.update(dict.fromkeys(slots.tolist(), self._accepted))

    async def write(self, pages: Sequence[PageWrite]) -> list[Outcome]:
        # Removed is durable before it is reused.
        self._reach(max([self._freed_at.get(page.slot, 0) for page in pages], default=0))
        outcomes = await super().write(pages)
        for page, outcome in zip(pages, outcomes, strict=True):
            if outcome is Outcome.OK:
                self._accepted += 1
                data = self.raw_page(page.slot)
                self._log(_Written(page.slot, Page(page.identity, data, self._accepted)))
        return outcomes

    # -- for tests ----------------------------------------------------------------------------------------------------

    async def sleep(self, seconds: float, deadline: float) -> None:
        """Wait, at most until the deadline."""
        loop = asyncio.get_running_loop()
        left = deadline - loop.time()
        await asyncio.sleep(max(0.0, min(seconds, left)))
        if self.sync_hangs or seconds > left:
            await asyncio.sleep(max(0.0, deadline - loop.time()))
            raise DeadlineExceeded("the flush did not end before the deadline")

    def crash(self, rng: random.Random) -> Image:
        """What a crash now would leave."""
        return self._image(rng.randint(0, len(self._waiting)))

    def certain(self) -> Image:
        """What every crash from now on would leave: durable, and not given up since."""
        image = self._image(0)
        for entry in self._waiting:
            if isinstance(entry, _Freed):
                for slot in entry.slots:
                    image.pages.pop(slot, None)
        return image

    def _log(self, entry: "_Freed | _Written | _Remembered") -> None:
        self._waiting.append(entry)
        self._numbers.append(self._accepted)
        if self._happens(self.eager):
            self._reach(self._rng.randint(self._durable, self._accepted))

    def _lose(self) -> None:
        """Pages that wait for a flush are gone, for readers as well; frees and records wait for the next one."""
        for entry in self._waiting:
            if isinstance(entry, _Written) and self.holds(entry.slot) == entry.page.identity:
                self._held[entry.slot] = None
        kept = [
            (number, entry)
            for number, entry in zip(self._numbers, self._waiting, strict=True)
            if not isinstance(entry, _Written)
        ]
        self._numbers, self._waiting = [number for number, _ in kept], [entry for _, entry in kept]

    def _reach(self, number: int) -> None:
        """Everything up to a number goes to the medium."""
        if number <= self._durable:
            return
        count = sum(each <= number for each in self._numbers)
        self._medium = self._image(count)
        del self._waiting[:count], self._numbers[:count]
        self._durable = number

    def _image(self, num_entries: int) -> Image:
        image = Image(dict(self._medium.pages), dict(self._medium.records))
        for entry in self._waiting[:num_entries]:
            match entry:
                case _Freed(slots):
                    for slot in slots:
                        image.pages.pop(slot, None)
                case _Written(slot, page):
                    image.pages[slot] = page
                case _Remembered(digest, record):
                    image.records[digest] = record
        return image
