"""One tier over several stores: pages striped over the directories of several devices.

Each store is a whole `NvmeTier` with its own directory, log, lanes and health. This tier names their slots in one row,

    slots of store 0      [0, slots_0)
    slots of store 1      [slots_0, slots_0 + slots_1)
    ...

and spreads over them what is written, some neighbours at a time: a store gets pages in proportion to its free room
times the speed at which it took pages lately. A store that is down gets none, and its free slots do not count as room;
its pages are still read. When all are down, the tier is.

A path may lie on several stores. So what was accepted is durable when it is so in all of them, and after a restart the
pages of all are linked together: what has lost its parent with another device is dropped.
"""

import asyncio
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from hicache.clock import Clock, SystemClock
from hicache.errors import BadRequest, DeadlineExceeded, NoRoom, TierUnavailable
from hicache.layout import KVLayout
from hicache.tier import (
    NVME,
    LayerRead,
    Outcome,
    PageIdentity,
    PageRead,
    PageWrite,
    RecoveredRun,
    Slots,
    Ticket,
    TierId,
)
from hicache.tiers.nvme.directory import Room
from hicache.tiers.nvme.geometry import PageShape
from hicache.tiers.nvme.io import real_path
from hicache.tiers.nvme.recovery import Progress, Recovery, connect
from hicache.tiers.nvme.store import NvmeTier

_log = logging.getLogger(__name__)

Asked = TypeVar("Asked", PageWrite, PageRead, LayerRead)

MAX_STORES: Final = 64
STRIPE_BYTES: Final = 2 << 20
"""Pages that are handed to one store together: enough for one long I/O."""
SPEED_SHARE: Final = 0.2
"""How much the latest write counts in a store's running speed."""
MIN_MEASURED_BYTES: Final = 1 << 20
"""Shorter writes say more about latency than about speed."""
MAX_SNAPSHOTS: Final = 1024
"""Moments of which it is kept which changes of which store had been accepted."""


class StripedTier:
    """Several NVMe stores as one tier. Open with `StripedTier.open`. See the module's docstring."""

    def __init__(self, stores: Sequence[NvmeTier], *, clock: Clock, stripe_pages: int | None = None) -> None:
        """`stores` were opened with `is_whole=False`; `stripe_pages` neighbours go to one store, by default as many as
        make `STRIPE_BYTES`."""
        assert stores, "a striped tier has stores"
        assert len({store.page_bytes for store in stores}) == 1, "stores hold pages of one size"
        self._stores: Final = tuple(stores)
        self._clock: Final = clock
        sizes = [store.num_slots for store in stores]
        self._starts: Final = np.cumsum([0, *sizes])
        """First slot of each store, and the number of all."""
        self._handed_out: Final = np.zeros(self._starts[-1], np.bool_)
        self._num_handed_out: Final = [0] * len(stores)
        self._stripe_pages: Final = stripe_pages or max(1, STRIPE_BYTES // stores[0].page_bytes)
        self._speeds: list[float | None] = [None] * len(stores)
        """Bytes a second that each store took lately."""
        self._due = [0.0] * len(stores)
        """What each store was due of the stripes so far beyond those that it got."""
        self._snapshots: deque[tuple[int, tuple[int, ...]]] = deque()
        """Sums of accepted numbers, and what each store had accepted then; oldest first."""
        self._durable = sum(store.durable for store in stores)
        self._runs_recovered: list[RecoveredRun] = []
        self.recovery: Final = self._link()

    @classmethod
    def open(
        cls,
        directories: Sequence[str | os.PathLike[str]],
        *,
        layout: KVLayout | PageShape,
        capacity_bytes: int,
        tier_id: TierId = NVME,
        clock: Clock | None = None,
        segment_bytes: int | None = None,
        codec: str = "none",
        codec_ratio: float | None = None,
        min_free_bytes: int = 0,
        write_bytes_per_day: int | None = None,
        progress: Progress = lambda _done, _total: None,
    ) -> Self:
        """Open one store in each directory, with an equal share of `capacity_bytes` and `write_bytes_per_day`.

        Args:
            directories: 1 to `MAX_STORES` of them, no two the same; best each on a device of its own.
            min_free_bytes: floor for each directory's file system.
            progress: told how much of the recovery of all stores is done.
            layout, segment_bytes, codec, codec_ratio, tier_id, clock: as `NvmeTier.open` takes them.

        Raises `BadRequest` and `TierUnavailable` as `NvmeTier.open` does, naming the directory, and `BadRequest` when
        directories on one file system do not fit there together. Nothing has been created or altered then.
        """
        if not 1 <= len(directories) <= MAX_STORES:
            raise BadRequest("directories", f"{len(directories)} directories are not within 1 to {MAX_STORES}")
        paths = [real_path(os.fspath(directory)) for directory in directories]
        if (twice := [path for path, count in Counter(paths).items() if count > 1]):
            raise BadRequest("directories", f"{twice[0]} is named twice")
        clock = clock or SystemClock()
        share = len(directories)
        stores: dict[int, NvmeTier] = {}
        rooms: list[Room] = []

        def open_from(number: int) -> None:
            """Open store `number`, and those behind it after it has been checked and before it is filled. So all are
            checked and locked before any is altered."""

            def open_next(room: Room) -> None:
                rooms.append(room)
                if number + 1 < share:
                    open_from(number + 1)
                else:
                    _check_rooms(rooms)

            stores[number] = NvmeTier.open(
                directories[number],
                layout=layout,
                capacity_bytes=capacity_bytes // share,
                segment_bytes=segment_bytes,
                codec=codec,
                codec_ratio=codec_ratio,
                tier_id=tier_id,
                clock=clock,
                min_free_bytes=min_free_bytes,
                write_bytes_per_day=None if write_bytes_per_day is None else write_bytes_per_day // share,
                progress=_part_of(progress, number, share),
                is_whole=False,
                before_filling=open_next,
            )

        try:
            open_from(0)
            return cls([stores[number] for number in range(share)], clock=clock)
        except BaseException:
            for store in stores.values():
                store.abandon()
            raise

    # ---- what it is

    @property
    def tier_id(self) -> TierId:
        return self._stores[0].tier_id

    @property
    def stores(self) -> Sequence[NvmeTier]:
        """The stores, in the order of their slots."""
        return self._stores

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self._stores[0].page_bytes

    @property
    def capacity_pages(self) -> int:
        """Slots in all, but for the free ones of stores that are down while others are not."""
        return self.num_free + sum(self._num_handed_out)

    @property
    def num_free(self) -> int:
        """Slots that `allocate` can give now."""
        return sum(self._stores[number].num_free for number in self._giving())

    @property
    def total_bytes(self) -> int:
        """Bytes of all segment files."""
        return sum(store.total_bytes for store in self._stores)

    @property
    def notes(self) -> tuple[str, ...]:
        """Fallbacks in use, one sentence each."""
        return tuple(dict.fromkeys(note for store in self._stores for note in store.notes))

    @property
    def down(self) -> str | None:
        """Why no new pages are taken: the reason of the first store, when all are down."""
        reasons = [store.down for store in self._stores]
        return reasons[0] if all(reason is not None for reason in reasons) else None

    def counters(self) -> dict[str, int]:
        """The counters of `NvmeTier`, summed over the stores; what was recovered, as all of them together have it."""
        total: Counter[str] = Counter()
        for store in self._stores:
            total.update({name: count for name, count in store.counters().items() if not name.startswith("recovered.")})
        counts = {f"recovered.dropped.{reason}": count for reason, count in self.recovery.dropped.items()}
        counts["recovered.pages"] = self.recovery.num_pages
        return dict(total) | {name: count for name, count in counts.items() if count}

    def _giving(self) -> list[int]:
        """The stores whose free slots count: those that are up, or all when none is."""
        up = [number for number, store in enumerate(self._stores) if store.down is None]
        return up or list(range(len(self._stores)))

    # ---- slots

    def _place(self, slot: int) -> tuple[int, int]:
        """The store of a slot, and the slot's number there. Raises `BadRequest` for a slot that does not exist."""
        if not 0 <= slot < self._starts[-1]:
            raise BadRequest("slot", f"{slot} is not within 0 to {self._starts[-1] - 1}")
        number = int(np.searchsorted(self._starts, slot, side="right")) - 1
        return number, slot - int(self._starts[number])

    def allocate(self, num_pages: int) -> Slots:
        """Take slots of the stores that are up, in stripes; all or none. Never waits.

        Raises `NoRoom` when fewer are free; `TierUnavailable` when the tier is closed, all stores are down, or their
        write budgets used up. Stores that are down are probed when that is due.
        """
        if num_pages < 0:
            raise BadRequest("num_pages", f"{num_pages} is negative")
        for store in self._stores:
            store.probe()
        if self.down is not None:
            return self._stores[0].allocate(num_pages)  # which raises, saying why
        if num_pages > self.num_free:
            raise NoRoom(self.tier_id, pages_asked=num_pages, pages_free=self.num_free)
        taken: list[Slots] = []
        closed_to = set(range(len(self._stores))) - set(self._giving())
        problem: TierUnavailable | None = None
        left = num_pages
        while left:
            number = self._next_store(closed_to)
            if number is None:
                self._give_back(taken)
                raise problem or NoRoom(self.tier_id, pages_asked=num_pages, pages_free=self.num_free)
            store = self._stores[number]
            try:
                slots = store.allocate(min(left, self._stripe_pages, store.num_free))
            except TierUnavailable as refused:
                problem = refused
                closed_to.add(number)
                continue
            left -= len(slots)
            taken.append((slots + self._starts[number]).astype(np.int32))
        slots = np.concatenate(taken) if taken else np.empty(0, np.int32)
        self._mark(slots, True)
        return slots

    def _next_store(self, closed_to: set[int]) -> int | None:
        """Where the next stripe goes: each store's due grows by its weight, and the one that is due most pays one."""
        weights = {
            number: store.num_free * (self._speeds[number] or self._typical_speed())
            for number, store in enumerate(self._stores)
            if number not in closed_to and store.num_free
        }
        if not weights:
            return None
        total = sum(weights.values())
        for number, weight in weights.items():
            self._due[number] += weight / total
        chosen = max(weights, key=lambda number: self._due[number])
        self._due[chosen] -= 1.0
        return chosen

    def _typical_speed(self) -> float:
        """What a store that has not been measured yet is taken for."""
        known = [speed for speed in self._speeds if speed is not None]
        return sum(known) / len(known) if known else 1.0

    def _mark(self, slots: Slots, handed_out: bool) -> None:
        self._handed_out[slots] = handed_out
        counts = np.bincount(np.searchsorted(self._starts, slots, side="right") - 1, minlength=len(self._stores))
        for number, count in enumerate(counts.tolist()):
            self._num_handed_out[number] += count if handed_out else -count

    def _give_back(self, taken: Sequence[Slots]) -> None:
        for number, slots in self._by_store(np.concatenate(taken)) if taken else ():
            self._stores[number].free(slots)

    def _by_store(self, slots: Slots) -> list[tuple[int, Slots]]:
        """Slots by store, with the numbers that they have there, each store's in the order given."""
        numbers = np.searchsorted(self._starts, slots, side="right") - 1
        return [
            (int(number), (slots[numbers == number] - self._starts[number]).astype(np.int32))
            for number in np.unique(numbers)
        ]

    def free(self, slots: Slots) -> None:
        """Give slots back and bump their generations. `AssertionError`, and nothing freed, for a slot that is not
        handed out or is named twice."""
        if not len(slots):
            return
        if slots.min() < 0 or slots.max() >= self._starts[-1]:
            raise AssertionError(f"{self.tier_id}: a slot outside 0 to {self._starts[-1] - 1} was freed")
        if len(np.unique(slots)) < len(slots):
            raise AssertionError(f"{self.tier_id}: a slot was named twice in one free")
        if not self._handed_out[slots].all():
            raise AssertionError(f"{self.tier_id}: a slot was freed that is not handed out")
        for number, its_slots in self._by_store(slots):
            self._stores[number].free(its_slots)
        self._mark(slots, False)

    def generation(self, slot: int) -> int:
        """How often the slot has been freed, from 0. Raises `BadRequest` for a slot that does not exist."""
        number, its_slot = self._place(slot)
        return self._stores[number].generation(its_slot)

    def check(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        """`NvmeTier.check`: what a read would say now as far as memory knows."""
        number, its_slot = self._place(slot)
        return self._stores[number].check(its_slot, generation, identity)

    # ---- pages

    async def write(self, pages: Sequence[PageWrite]) -> list[Outcome]:
        """`NvmeTier.write`, each page in its store, all stores at once."""
        parts = self._share_out(pages)
        for number, part in parts.items():
            self._stores[number].requests.check_write(part.asked)

        async def write(number: int, asked: Sequence[PageWrite]) -> list[Outcome]:
            begun = self._clock.monotonic()
            found = await self._stores[number].write(asked)
            self._measure(number, found.count(Outcome.OK), self._clock.monotonic() - begun)
            return found

        return await _at_once(parts, write, len(pages))

    async def read(self, pages: Sequence[PageRead]) -> list[Outcome]:
        """`NvmeTier.read`, each page from its store, all stores at once."""
        parts = self._share_out(pages)
        for number, part in parts.items():
            self._stores[number].requests.check_read(part.asked)
        return await _at_once(parts, lambda number, asked: self._stores[number].read(asked), len(pages))

    def _share_out(self, asked: Sequence[Asked]) -> "dict[int, _Part[Asked]]":
        """What is asked of each store, by the slots that it has there. Raises `BadRequest` for one that is none."""
        parts: dict[int, _Part[Asked]] = {}
        for place, each in enumerate(asked):
            number, slot = self._place(each.slot)
            part = parts.setdefault(number, _Part([], []))
            part.places.append(place)
            part.asked.append(replace(each, slot=slot))
        return parts

    def _measure(self, number: int, num_pages: int, seconds: float) -> None:
        num_bytes = num_pages * self.page_bytes
        if num_bytes < MIN_MEASURED_BYTES or seconds <= 0:
            return
        speed, known = num_bytes / seconds, self._speeds[number]
        self._speeds[number] = speed if known is None else known + SPEED_SHARE * (speed - known)

    def start_layer_reads(self, reads: Sequence[LayerRead]) -> Ticket:
        """`NvmeTier.start_layer_reads`, each layer from its store."""
        parts = self._share_out(reads)
        for number, part in parts.items():
            self._stores[number].requests.check_layer_reads(part.asked)
        tickets = [
            (part.places, self._stores[number].start_layer_reads(part.asked)) for number, part in parts.items()
        ]
        return _Tickets(tickets, len(reads), self._clock)

    # ---- durability

    @property
    def accepted(self) -> int:
        """Number of the last change that was accepted: the sum over the stores."""
        return self._note()

    def _note(self) -> int:
        """Keep what each store has accepted by now under the sum of these numbers; the sum."""
        by_store = tuple(store.accepted for store in self._stores)
        total = sum(by_store)
        if not self._snapshots or self._snapshots[-1][0] < total:
            self._snapshots.append((total, by_store))
            self._thin_snapshots()
        return total

    @property
    def durable(self) -> int:
        """Every change up to this number is durable in its store. Never falls."""
        durable = tuple(store.durable for store in self._stores)
        self._note()
        while self._snapshots and _reached(durable, self._snapshots[0][1]):
            self._durable = max(self._durable, self._snapshots.popleft()[0])
        return self._durable

    def _thin_snapshots(self) -> None:
        """Where nothing becomes durable, keep every second moment: a number is then merely reached later."""
        if len(self._snapshots) > MAX_SNAPSHOTS:
            newest = self._snapshots[-1]
            self._snapshots = deque(list(self._snapshots)[1::2])
            if self._snapshots[-1] != newest:
                self._snapshots.append(newest)

    async def sync(self, number: int, *, deadline: float, is_frees_only: bool = False) -> None:
        """Wait until `durable` has reached `number`. `is_frees_only` and what is raised are as in `NvmeTier.sync`."""
        if number > self.accepted:
            raise BadRequest("number", f"{number} has not been accepted; the last was {self.accepted}")
        if number <= self.durable:
            return
        by_store = next(vector for total, vector in self._snapshots if total >= number)
        try:
            async with asyncio.TaskGroup() as group:
                for store, its_number in zip(self._stores, by_store, strict=True):
                    group.create_task(store.sync(its_number, deadline=deadline, is_frees_only=is_frees_only))
        except* (TierUnavailable, DeadlineExceeded) as failed:
            raise failed.exceptions[0] from None

    def remember(self, digest: bytes, record: bytes) -> None:
        """Keep a namespace's record in every store."""
        for store in self._stores:
            store.remember(digest, record)

    def recovered(self) -> Sequence[RecoveredRun]:
        """What all stores together still hold, parents before children. Once: later calls return nothing."""
        runs, self._runs_recovered = self._runs_recovered, []
        return runs

    def _link(self) -> Recovery:
        """Join what the stores recovered into whole paths; what belongs to none is freed."""
        rows = []
        namespaces: dict[int, tuple[bytes, bytes]] = {}
        for store, start in zip(self._stores, self._starts.tolist(), strict=False):
            its_rows, its_namespaces = store.unconnected()
            its_rows = its_rows.copy()
            its_rows["slot"] += start
            shift = max(namespaces, default=-1) + 1
            its_rows["namespace"] += shift
            namespaces |= {number + shift: names for number, names in its_namespaces.items()}
            rows.append(its_rows)
        all_rows = np.concatenate(rows)
        begun = self._clock.monotonic()
        dropped: Counter[str] = Counter()
        slots: npt.NDArray[np.int32] = all_rows["slot"].astype(np.int32)
        kept, self._runs_recovered = connect(all_rows, namespaces, dropped)
        self._mark(slots, True)
        self.free(np.delete(slots, kept))
        parts = [store.recovery for store in self._stores]
        for part in parts:
            dropped.update(part.dropped)
        damage = [sentence for part in parts for sentence in part.damage]
        for store in self._stores:
            if dropped["orphan"] and not store.accepted:
                damage.append(
                    f"{store.path} is new among stores that hold pages: {dropped['orphan']} pages were dropped because "
                    "the beginnings of their prompts lay elsewhere; is a device missing?"
                )
                _log.warning("%s", damage[-1])
        return Recovery(
            num_pages=len(kept),
            seconds=sum(part.seconds for part in parts) + self._clock.monotonic() - begun,
            clean_stop=all(part.clean_stop for part in parts),
            dropped=dict(dropped),
            damage=tuple(damage),
        )

    # ---- end

    def give_up(self) -> None:
        """Wait for no device any more: see `NvmeTier.give_up`."""
        for store in self._stores:
            store.give_up()

    async def close(self) -> None:
        """Close all stores, at once. Idempotent."""
        async with asyncio.TaskGroup() as group:
            for store in self._stores:
                group.create_task(store.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


@dataclass(frozen=True, slots=True)
class _Part(Generic[Asked]):
    """What one store is asked for."""

    places: list[int]
    """Where each stands in what was asked of the tier."""
    asked: list[Asked]


async def _at_once(
    parts: Mapping[int, _Part[Asked]],
    call: Callable[[int, Sequence[Asked]], Coroutine[Any, Any, list[Outcome]]],
    num_asked: int,
) -> list[Outcome]:
    """`call` for all stores side by side; the outcomes in the order of what was asked of the tier."""
    outcomes: list[Outcome] = [Outcome.ERROR] * num_asked

    async def ask(number: int, part: _Part[Asked]) -> None:
        for place, outcome in zip(part.places, await call(number, part.asked), strict=True):
            outcomes[place] = outcome

    async with asyncio.TaskGroup() as group:
        for number, part in parts.items():
            group.create_task(ask(number, part), name=f"store {number}")
    return outcomes


class _Tickets:
    """Layer reads in several stores."""

    def __init__(self, tickets: Sequence[tuple[list[int], Ticket]], num_reads: int, clock: Clock) -> None:
        self._tickets = tickets
        self._num_reads = num_reads
        self._clock = clock

    def wait(self, timeout_s: float) -> list[Outcome]:
        """See `hicache.tier.Ticket`."""
        deadline = self._clock.monotonic() + timeout_s
        outcomes: list[Outcome] = [Outcome.ERROR] * self._num_reads
        for places, ticket in self._tickets:
            for place, outcome in zip(places, ticket.wait(max(0.0, deadline - self._clock.monotonic())), strict=True):
                outcomes[place] = outcome
        return outcomes


def _check_rooms(rooms: Sequence[Room]) -> None:
    """Directories on one file system share its free space."""
    for file_system in {room.file_system for room in rooms}:
        together = [room for room in rooms if room.file_system == file_system]
        needed = sum(room.new_bytes for room in together)
        free = min((room.free_bytes for room in together if room.free_bytes is not None), default=None)
        if free is not None and needed > free:
            problem = f"{len(together)} directories on one file system need {needed} bytes more; {free} are free there"
            raise BadRequest("capacity_bytes", problem)


def _reached(numbers: Sequence[int], wanted: Sequence[int]) -> bool:
    return all(number >= its_wanted for number, its_wanted in zip(numbers, wanted, strict=True))


def _part_of(progress: Progress, number: int, num_parts: int) -> Progress:
    """Progress of one of several equal parts."""
    return lambda done, total: progress(number * total + done, num_parts * total)
