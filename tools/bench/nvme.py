"""`hicache bench nvme`: pages in and out of the NVMe tier, beside what the device gives without it.

Both sides move pages of one size between the same memory (an arena in 2 MiB pages, as the host tier's) and the same
file system, in one process. A disk's speed changes within seconds, and some stretches of it are written 1.6 times as
fast as others: by more than what is measured here. So the sides take turns in short rounds, of two turns each in which
either begins; they have every second stretch of one file, and after half of the turns each other's. Beside the raw loop
a row shows that round of which the ratio is the median one; other figures are medians over the rounds.

- The tier is used as the movers use it: batches of 16 pages, several under way, checksums on, commits running. As
  there, pages come with the checksums that were taken when they entered memory; what that costs has a row of its own,
  `enter`: one thread copies pages in and takes them, beside the copy alone.
- The raw loop (`raw_io`) is direct I/O from threads, at the depth of 1 to 32 that is best when the run begins, in slots
  of the tier's own file.
- Reads are cold: both sides go around the page cache, and no page is read twice in a turn.
- Turns are of 1 GiB (of a third of that into new slots), since what is compared is sustained: each begins with nothing
  under way and ends when the last page is checked or handed on. What that costs shows in the rows of short turns.
- Writes go half into slots that were never used and half into slots that are freed to make room, as in a full tier.
  What was accepted counts; `synced` counts the time until all of it is durable too, on both sides. The store is large
  enough to keep back as many slots as any larger one does (`RESERVE_BYTES`): with fewer, a full tier waits for commits.
- One file a page through the page cache is what a cache without a format of its own does: written, then synced; and
  read after the page cache was told to forget it.

The bound is the best bandwidth that the raw loop had in that direction, at any depth and page size of the run.
"""

import asyncio
import random
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np

from hicache.layout import KVDtype, KVLayout
from hicache.tier import HOST
from hicache.tiers.arena import Arena
from hicache.tiers.nvme.store import RESERVE_SHARE
from hicache.tiers.sums import page_sums
from hicache.tools.bench.nvme_sides import (
    BATCH_PAGES,
    MAX_IN_FLIGHT_BYTES,
    FileSide,
    Load,
    Memory,
    RawSide,
    TierSide,
)
from hicache.tools.bench.raw_io import DEPTHS
from hicache.tools.bench.results import Baseline, Note, Report, Row
from hicache.tools.bench.scratch import check_directory, scratch_directory

GOAL: Final = 0.95
"""Share of the raw loop's bandwidth that the tier is to reach, checksums included."""
DEPTH_ROUNDS: Final = 5
"""Rounds in which every depth is tried."""
FILE_ROUNDS: Final = 3
ENTER_ROUNDS: Final = 5
DURABLE_ROUNDS: Final = 12


def _order(*, tier_first: bool) -> tuple[str, str]:
    """The sides of a turn."""
    return ("tier", "raw") if tier_first else ("raw", "tier")


def _layout(num_layers: int, num_kv_heads: int, head_dim: int) -> KVLayout:
    return KVLayout.uniform(
        num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=KVDtype.BFLOAT16, page_size=16
    )


LOADS: Final = (Load("2m", _layout(32, 8, 128)), Load("368640", _layout(30, 3, 64)))
"""Pages of 16 tokens, in 16 bits, of models with 8 thousand million and with 135 million parameters."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is moved."""

    directory: Path
    """Where files are made, in a directory of their own that is removed again."""
    divisor: int = 1
    """All sizes are divided by it: 1 for figures, more for trying the code."""

    @property
    def rounds(self) -> int:
        """Rounds of each measurement."""
        return max(6 // self.divisor, 2)

    @property
    def new_turn_bytes(self) -> int:
        """What one side writes in a turn, of which it has two in a round, into slots that were never used. All rounds
        together fill a store that keeps all of `RESERVE_BYTES` back."""
        return (344 << 20) // self.divisor

    def turn_batches(self, load: Load) -> int:
        """Batches in a turn of writes into used slots, or of reads: a quarter of what a side has then, 1 GiB."""
        return load.batches(self.new_turn_bytes) * self.rounds // 2

    @property
    def short_read_bytes(self) -> int:
        """What is read in a turn of which the ends are to be seen."""
        return (256 << 20) // self.divisor

    @property
    def short_turn_bytes(self) -> int:
        """The same for trying one depth, and for one file a page."""
        return (96 << 20) // self.divisor

    @property
    def arena_bytes(self) -> int:
        """Memory that pages come from and go to: more than any side has under way."""
        return max((256 << 20) // self.divisor, 2 * MAX_IN_FLIGHT_BYTES)

    def store_batches(self, load: Load) -> int:
        """Batches that the store has room for, of both sides."""
        return 4 * load.batches(self.new_turn_bytes) * self.rounds + load.batches(self.short_turn_bytes)

    def needed_bytes(self) -> int:
        """Free space that the run takes at most at one time."""
        stores = ((self.store_batches(load) + 1) * BATCH_PAGES * load.shape.slot_bytes for load in LOADS)
        return int(max(stores) / (1 - RESERVE_SHARE)) + 2 * self.short_turn_bytes + (128 << 20)


def check(plan: Plan) -> None:
    """Raises `UsageProblem` for a directory in which the run cannot be made. Creates nothing."""
    check_directory(plan.directory, plan.needed_bytes())


def run(report: Report, note: Note, plan: Plan) -> None:
    """Measure every row, one page size after the other. `check` first."""
    arena = Arena(HOST, plan.arena_bytes)
    try:
        note("gathering memory into 2 MiB pages")
        refusal = arena.collapse(threading.Event())
        if refusal is not None:
            note(f"memory stays in small pages ({refusal}): both sides are slower")
        words = np.frombuffer(arena.memory, np.uint64)
        words[:] = np.random.default_rng(1).integers(0, 1 << 64, words.size, np.uint64)  # nothing that compresses
        benches = []
        for load in LOADS:
            with scratch_directory(plan.directory) as directory:
                benches.append(_Bench(plan, load, arena.memory, directory, note))
                asyncio.run(benches[-1].measure())
        bound = {way: max(bench.best_rate[way] for bench in benches) for way in ("read", "write")}
        for bench in benches:
            bench.report(report, bound)
    finally:
        arena.close()


class _Bench:
    """All measurements of one page size."""

    def __init__(self, plan: Plan, load: Load, memory: memoryview, directory: Path, note: Note) -> None:
        self._plan = plan
        self._load = load
        self._memory = memory
        self._directory = directory
        self._note = note
        self._rng = random.Random(2)
        self._depth = {"read": DEPTHS[0], "write": DEPTHS[0]}
        self.best_rate = {"read": 0.0, "write": 0.0}
        """Of the raw loop, GB/s."""
        self._seconds: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * plan.rounds)
        """Of every round that has turns of both sides, by measurement and side."""
        self._figures: defaultdict[str, list[float]] = defaultdict(list)
        """GB/s of every round, or milliseconds, by measurement and side."""

    async def measure(self) -> None:
        """Everything, one after the other."""
        plan, load = self._plan, self._load
        memory = Memory(self._memory, load.shape)
        num_batches, num_short = plan.turn_batches(load), load.batches(plan.short_turn_bytes)
        num_new, num_short_read = load.batches(plan.new_turn_bytes), load.batches(plan.short_read_bytes)
        num_stored = 2 * num_new * plan.rounds
        tier = TierSide(load, memory, self._directory / "tier", plan.store_batches(load))
        raw = RawSide(tier, memory, self._directory / "tier")
        files = FileSide(memory, self._directory / "files")
        try:
            self._note(f"{load.name}: into memory")
            self._enter(memory)
            self._note(f"{load.name}: the raw loop at depths {', '.join(map(str, DEPTHS))}")
            self._try_depths(raw, num_short)
            self._note(f"{load.name}: writing")
            memory.take_sums()  # not sooner: what was read so far has come into the same memory
            await raw.share(num_stored, is_first=True)
            for turn in range(2 * plan.rounds):
                await self._write(tier, raw, num_new, turn // 2, reuse=False, tier_first=turn % 2 == 0)
            for is_swapped in (False, True):
                if is_swapped:
                    memory.take_sums()
                    await self._swap(tier, raw, num_stored)
                await tier.go_to_first()
                for index in range(plan.rounds):
                    await self._write(tier, raw, num_batches, index, reuse=True, tier_first=is_swapped == index % 2)
                self._note(f"{load.name}: reading")
                for name, count in (("read", num_batches), ("short_read", num_short_read)):
                    for index in range(plan.rounds):
                        await self._read(name, tier, raw, count, index, tier_first=is_swapped == index % 2)
            self._count_rounds({"new": num_new, "used": num_batches, "read": num_batches, "short_read": num_short_read})
            self._raise_bounds()
            self._note(f"{load.name}: single batches until they are durable")
            memory.take_sums()
            for _ in range(DURABLE_ROUNDS):
                self._figures["durable.tier"].append(1e3 * (await tier.write(1, reuse=True)).durable_s)
                durable_s = raw.write(1, reuse=True, depth=self._depth["write"]).durable_s
                self._figures["durable.raw"].append(1e3 * durable_s)
            self._note(f"{load.name}: one file a page")
            for _ in range(FILE_ROUNDS):
                self._add("written_synced.files", num_short, files.write(num_short).durable_s)
                self._add("read.files", num_short, files.read(num_short, self._rng))
        finally:
            files.close()
            raw.close()
            await tier.close()

    def _enter(self, memory: Memory) -> None:
        """Copy pages from buffers to others, as a thread does that brings them into memory."""
        num_batches = self._load.batches(self._plan.short_turn_bytes)
        ranges = self._load.shape.layer_ranges
        for with_sums in (False, True) * ENTER_ROUNDS:
            pairs = [(page, into) for _ in range(num_batches) for page, into in zip(memory.batch(), memory.batch())]
            began = perf_counter()
            for page, into in pairs:
                np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(page, np.uint8))
                if with_sums:
                    page_sums(into, ranges)
            self._add("enter.sums" if with_sums else "enter.copy", num_batches, perf_counter() - began)

    def _try_depths(self, raw: RawSide, num_batches: int) -> None:
        raw.take(num_batches)
        raw.write(num_batches, reuse=False, depth=DEPTHS[-1])
        for _ in range(DEPTH_ROUNDS):
            for depth in DEPTHS:
                write_s = raw.write(num_batches, reuse=True, depth=depth).accepted_s
                self._add(f"write.depth{depth}", num_batches, write_s)
                self._add(f"read.depth{depth}", num_batches, raw.read(num_batches, self._rng, depth=depth))
        for way in self._depth:
            rates = {depth: self._median(f"{way}.depth{depth}") for depth in DEPTHS}
            self._depth[way] = max(rates, key=rates.__getitem__)
            self.best_rate[way] = max(rates.values())
            tried = ", ".join(f"{depth}: {rate:.2f}" for depth, rate in rates.items())
            self._note(f"{self._load.name}: the raw loop, {way}, GB/s by depth: {tried}")

    async def _write(
        self, tier: TierSide, raw: RawSide, num_batches: int, index: int, *, reuse: bool, tier_first: bool
    ) -> None:
        """A turn of each side, of round `index`."""
        kind = "used" if reuse else "new"
        for side in _order(tier_first=tier_first):
            if side == "tier":
                written = await tier.write(num_batches, reuse=reuse)
            else:
                written = raw.write(num_batches, reuse=reuse, depth=self._depth["write"])
            self._took(f"{kind}.{side}", index, written.accepted_s)
            self._took(f"{kind}_synced.{side}", index, written.durable_s)

    async def _read(
        self, name: str, tier: TierSide, raw: RawSide, num_batches: int, index: int, *, tier_first: bool
    ) -> None:
        """A turn of each side, of round `index` of that measurement."""
        for side in _order(tier_first=tier_first):
            if side == "tier":
                seconds = await tier.read(num_batches, self._rng)
            else:
                seconds = raw.read(num_batches, self._rng, depth=self._depth["read"])
            self._took(f"{name}.{side}", index, seconds)

    async def _swap(self, tier: TierSide, raw: RawSide, num_batches: int) -> None:
        """Give each side the slots that the other had, and write into all of them."""
        await tier.go_to_first()
        await tier.empty()
        await raw.give_back()
        await raw.share(num_batches, is_first=False)
        await tier.write(num_batches, reuse=False)
        raw.write(num_batches, reuse=False, depth=self._depth["write"])

    def _took(self, name: str, index: int, seconds: float) -> None:
        """One of the two turns that a side has in round `index` took so long."""
        self._seconds[name][index] += seconds

    def _count_rounds(self, num_batches: Mapping[str, int]) -> None:
        """Take what all rounds took, in turns of so many batches by measurement, into the figures; and rounds into new
        and into used slots, as many bytes each, together."""
        for name, rounds in self._seconds.items():
            measured = name.partition(".")[0].removesuffix("_synced")
            for seconds in rounds:
                self._add(name, 2 * num_batches[measured], seconds)
        for suffix in ("", "_synced"):
            for side in ("tier", "raw"):
                new, used = self._figures[f"new{suffix}.{side}"], self._figures[f"used{suffix}.{side}"]
                self._figures[f"written{suffix}.{side}"] = [
                    2 / (1 / first + 1 / second) for first, second in zip(new, used, strict=True)
                ]

    def _raise_bounds(self) -> None:
        """The long rounds may have been faster than those in which depths were tried."""
        self.best_rate["write"] = max(self.best_rate["write"], *map(self._median, ("new.raw", "used.raw")))
        self.best_rate["read"] = max(self.best_rate["read"], self._median("read.raw"))

    def _add(self, name: str, num_batches: int, seconds: float) -> None:
        self._figures[name].append(num_batches * BATCH_PAGES * self._load.page_bytes / seconds / 1e9)

    def _median(self, name: str) -> float:
        return median(self._figures[name])

    def report(self, report: Report, bound: dict[str, float]) -> None:
        """The rows. `bound` is GB/s, of reads and of writes."""
        name = self._load.name

        def beside_raw(row: str, way: str, measured: str, goal: float | None = None) -> None:
            rounds = zip(self._figures[f"{measured}.tier"], self._figures[f"{measured}.raw"], strict=True)
            by_ratio = sorted(rounds, key=lambda rates: rates[0] / rates[1])
            value, of_raw = by_ratio[(len(by_ratio) - 1) // 2]
            raw = Baseline(f"raw O_DIRECT, depth {self._depth[way]}", of_raw)
            report(Row(row, value, "GB/s", raw, bound[way], goal, goal_is_ratio=True, higher_is_better=True))

        def beside_files(row: str, way: str, value: float, measured: str) -> None:
            files = Baseline("one file a page", self._median(measured))
            report(Row(row, value, "GB/s", files, bound[way], higher_is_better=True))

        copy = Baseline("the copy alone", self._median("enter.copy"))
        report(Row(f"enter_{name}", self._median("enter.sums"), "GB/s", copy, higher_is_better=True))
        beside_raw(f"read_{name}", "read", "read", goal=GOAL)
        beside_raw(f"read_{name}_short_turns", "read", "short_read")
        beside_raw(f"write_{name}", "write", "written", goal=GOAL)
        beside_raw(f"write_{name}_new_slots", "write", "new")
        beside_raw(f"write_{name}_used_slots", "write", "used")
        beside_raw(f"write_{name}_synced", "write", "written_synced")
        beside_files(f"read_{name}_files", "read", self._median("read.tier"), "read.files")
        synced = self._median("written_synced.tier")
        beside_files(f"write_{name}_synced_files", "write", synced, "written_synced.files")
        raw = Baseline("raw O_DIRECT, then synced", self._median("durable.raw"))
        report(Row(f"durable_16_pages_{name}", self._median("durable.tier"), "ms", raw))
