"""Every call that the NVMe tier makes goes wrong once, in every way: right bytes or a typed outcome, no hang."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache.clock import Clock
from hicache.errors import TierUnavailable
from hicache.tier import Outcome, PageIdentity
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.health import Health
from hicache.tiers.nvme.io import FileIO
from tests.stamps import identity_chain
from tests.tiers.contract import expect_miss, expect_page, fetch, run, store, write_of
from tests.tiers.faulty_files import Fault, FaultyFiles
from tests.tiers.nvme import (
    DATA_CALLS,
    SMALL,
    data_faults,
    place_of,
    read_all,
    read_layers,
    shape_of,
    small_tier,
    write_all,
)

CONTINUED = (Fault.EINTR, Fault.SHORT)
"""Faults that a transfer goes on after."""
ERRORS = (Fault.EIO, Fault.ENOSPC, Fault.EROFS, Fault.RUNTIME)
SILENT = (Fault.TORN, Fault.LOST, Fault.MISDIRECTED, Fault.FLIP)
"""Faults that a device does not tell of."""
ALL_FAULTS = (*CONTINUED, *ERRORS, *SILENT)


@dataclass
class Ledger:
    """What a scripted run was told."""

    writes: list[Outcome]
    reads: list[Outcome]
    layers: list[Outcome]

    @property
    def all(self) -> list[Outcome]:
        return [*self.writes, *self.reads, *self.layers]


async def script(tier: NvmeTier, files: FaultyFiles) -> Ledger:
    """Two generations of pages in two segments, written and read in every way; then the fault goes, and all is well."""
    told = Ledger([], [], [])
    first, second = identity_chain(6), identity_chain(4, seed=1)
    held: dict[int, PageIdentity] = {}

    async def fill(slots: Sequence[int], identities: Sequence[PageIdentity]) -> None:
        written = await write_all(tier, slots, identities)
        assert set(written) <= {Outcome.OK, Outcome.ERROR}
        held.update(zip(slots, identities, strict=True))
        told.writes += written
        for together in (True, False):
            read = await read_all(tier, slots, identities, together=together)
            told.reads += read
            for before, after in zip(written, read, strict=True):
                # A write that failed is never served; one that went well may have been lost by the device.
                assert after is Outcome.NOT_FOUND if before is Outcome.ERROR else after is not Outcome.NOT_FOUND
        told.layers += await read_layers(tier, slots, identities)
        assert tier.num_free + len(held) == tier.capacity_pages

    slots = tier.allocate(6).tolist()
    await fill(slots, first)
    tier.free(np.array(slots[1:4], np.int32))
    for slot in slots[1:4]:
        del held[slot]
    again = tier.allocate(4).tolist()
    await fill(again, second)
    for slot, identity in zip(slots[1:4], first[1:4], strict=True):
        assert (await fetch(tier, slot, identity, generation=0))[0] is Outcome.STALE
        await expect_miss(tier, slot, identity, Outcome.NOT_FOUND)

    files.heal()
    assert set(await write_all(tier, list(held), list(held.values()))) == {Outcome.OK}
    assert set(await read_all(tier, list(held), list(held.values()), together=True)) == {Outcome.OK}
    assert set(await read_layers(tier, list(held), list(held.values()))) == {Outcome.OK}
    tier.free(np.array(list(held), np.int32))
    assert tier.num_free == tier.capacity_pages
    assert tier.down is None
    return told


def scripted_run(
    directory: Path, fault: Fault | None = None, at: int = 0, *, lanes: int, flip_bit: int = 0
) -> tuple[Ledger, FaultyFiles]:
    """Run the script with one fault."""
    files = data_faults(flip_bit=flip_bit)
    ledgers = []

    async def main() -> None:
        options: dict[str, Any] = dict.fromkeys(("read_lanes", "write_lanes", "layer_lanes"), lanes)
        # Commits come when somebody waits for one, not by the clock: so a run has the same calls each time.
        options["commit_interval_s"] = 1000.0
        async with small_tier(SMALL, 8, directory=directory, files=files, **options) as tier:
            if fault is not None:
                files.arm(fault, at)
            else:
                files.num_calls = 0
            ledgers.append(await script(tier, files))

    run(main())
    return ledgers[0], files


def check_ledger(told: Ledger, fault: Fault, files: FaultyFiles, at: int) -> None:
    """What one fault may cost."""
    assert len(files.hits) == 1, f"call {at} never came"
    missed = [outcome for outcome in told.all if outcome is not Outcome.OK]
    if fault in CONTINUED:
        assert missed == []
    elif fault in ERRORS and fault is not Fault.RUNTIME:
        # One read or layer; or one write, and then the page is missed by the reads after it.
        assert set(missed) <= {Outcome.ERROR, Outcome.NOT_FOUND}
        assert told.writes.count(Outcome.ERROR) <= 1
        assert (told.reads + told.layers).count(Outcome.ERROR) <= 1
    elif fault in SILENT:
        # Whole pages of the right place and life never fail; the others were told apart.
        assert set(missed) <= {Outcome.CORRUPT, Outcome.STALE}
        if fault is not Fault.LOST:
            assert told.writes.count(Outcome.ERROR) == 0


def run_every_call(directory: Path, fault: Fault, lanes: int, calls: Iterable[int]) -> int:
    """One run for each number of a call; how many of them noticed something."""
    noticed = 0
    for at in calls:
        told, files = scripted_run(directory, fault, at, lanes=lanes, flip_bit=40_009 * at)
        check_ledger(told, fault, files, at)
        noticed += any(outcome is not Outcome.OK for outcome in told.all)
    return noticed


def num_data_calls(directory: Path, lanes: int) -> int:
    """Reads and writes of a run without a fault, up to where faults would be healed."""
    told, files = scripted_run(directory, lanes=lanes)
    assert set(told.all) == {Outcome.OK}
    return files.num_calls_when_healed


@pytest.mark.parametrize("fault", ALL_FAULTS)
def test_some_calls_fail_once(tmp_path: Path, fault: Fault) -> None:
    """A share of the complete loop below: every seventh call, starting somewhere else for each fault."""
    num_calls = num_data_calls(tmp_path / "store", lanes=1)
    start = 1 + ALL_FAULTS.index(fault) % 7
    noticed = run_every_call(tmp_path / "store", fault, 1, range(start, num_calls + 1, 7))
    assert (noticed > 0) == (fault not in CONTINUED)


@pytest.mark.faults
@pytest.mark.parametrize("fault", ALL_FAULTS)
@pytest.mark.parametrize("lanes", [1, 4])
def test_every_call_fails_once(tmp_path: Path, fault: Fault, lanes: int) -> None:
    num_calls = num_data_calls(tmp_path / "store", lanes=lanes)
    assert num_calls > 40
    noticed = run_every_call(tmp_path / "store", fault, lanes, range(1, num_calls + 1))
    assert (noticed > 0) == (fault not in CONTINUED)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(150))
def test_random_faults_in_a_row(tmp_path: Path, seed: int) -> None:
    """Many faults of all kinds in one run, at random calls, over a longer history. Repeat one with `-k "[SEED]"`."""
    rng = random.Random(seed)
    files = data_faults(flip_bit=rng.randrange(1 << 20))

    async def main() -> None:
        async with small_tier(SMALL, 12, directory=tmp_path / "store", files=files, health=never_down) as tier:
            held: dict[int, PageIdentity] = {}
            for turn in range(40):
                files.arm(rng.choice(ALL_FAULTS), rng.randint(1, 6), lasting=rng.random() < 0.2)
                match rng.choice(("write", "write", "free", "read", "layers")):
                    case "write" if tier.num_free:
                        identities = identity_chain(rng.randint(1, tier.num_free), seed=1000 * seed + turn)
                        try:
                            slots = tier.allocate(len(identities)).tolist()
                        except TierUnavailable:  # the log was hit, and is tried again later
                            continue
                        outcomes = await write_all(tier, slots, identities)
                        assert set(outcomes) <= {Outcome.OK, Outcome.ERROR}
                        held.update(zip(slots, identities, strict=True))
                    case "free" if held:
                        gone = rng.sample(sorted(held), rng.randint(1, len(held)))
                        tier.free(np.array(gone, np.int32))
                        for slot in gone:
                            del held[slot]
                    case "layers":
                        await read_layers(tier, list(held), list(held.values()))
                    case _:
                        await read_all(tier, list(held), list(held.values()), together=rng.random() < 0.7)
                assert tier.num_free + len(held) == tier.capacity_pages
            files.heal()
            await read_all(tier, list(held), list(held.values()), together=True)
            assert set(await write_all(tier, list(held), list(held.values()))) <= {Outcome.OK}
            assert set(await read_all(tier, list(held), list(held.values()), together=False)) <= {Outcome.OK}

    run(main())


def never_down(name: str, clock: Clock) -> Health:
    return Health(name, clock, errors_to_down=1 << 30)


# ---- C10, C11, C13


def test_c10_a_failed_store_is_not_visible_and_counted_once() -> None:
    """Pages of an entry whose third write fails: the first two are served, the third never, until it is written."""
    files = data_faults()

    async def main() -> None:
        async with small_tier(SMALL, 4, files=files) as tier:
            identities = identity_chain(4)
            slots = tier.allocate(4).tolist()
            outcomes = []
            for place, (slot, identity) in enumerate(zip(slots, identities, strict=True)):
                if place == 2:
                    files.arm(Fault.EIO, 1)
                outcomes += await tier.write([write_of(tier, slot, identity)])
            assert outcomes == [Outcome.OK, Outcome.OK, Outcome.ERROR, Outcome.OK]
            read = await read_all(tier, slots, identities, together=True)
            assert read == [Outcome.OK, Outcome.OK, Outcome.NOT_FOUND, Outcome.OK]
            assert tier.counters()["write.device_error"] == 1
            assert await tier.write([write_of(tier, slots[2], identities[2])]) == [Outcome.OK]
            assert await read_all(tier, slots, identities, together=True) == [Outcome.OK] * 4

    run(main())


def test_c10_a_page_that_cannot_be_written_fails_alone_in_its_run() -> None:
    """One I/O holds four neighbours; the device refuses one of their places for good."""

    class BadSector(FileIO):
        bad = -1

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if offset <= self.bad < offset + sum(map(len, buffers)):
                raise OSError(5, "Input/output error")
            return super().pwritev(fd, buffers, offset)

    files = BadSector()

    async def main() -> None:
        async with small_tier(SMALL, 4, files=files, write_lanes=1, read_lanes=1) as tier:
            identities = identity_chain(4)
            slots = tier.allocate(4).tolist()
            files.bad = place_of(tier, 2)[1] + 5000
            expected = [Outcome.OK, Outcome.OK, Outcome.ERROR, Outcome.OK]
            assert await write_all(tier, slots, identities) == expected
            expected[2] = Outcome.NOT_FOUND
            assert await read_all(tier, slots, identities, together=True) == expected

    run(main())


def test_c11_a_file_that_ends_inside_a_page_serves_the_pages_before(tmp_path: Path) -> None:
    async def main() -> None:
        for cut in (1, SMALL.header_bytes, SMALL.header_bytes + 5000, SMALL.slot_bytes - 1):
            async with small_tier(SMALL, 4, directory=tmp_path / "store", read_lanes=1) as tier:
                identities = identity_chain(4)
                slots = tier.allocate(4).tolist()
                await store(tier, np.array(slots, np.int32), identities)
                path, offset = place_of(tier, 2)
                with path.open("r+b") as file:
                    file.truncate(offset + cut)
                for together in (True, False):
                    read = await read_all(tier, slots, identities, together=together)
                    assert read == [Outcome.OK, Outcome.OK, Outcome.CORRUPT, Outcome.CORRUPT]
                assert tier.counters()["read.short"] == 4
                layers = await read_layers(tier, slots, identities)
                assert layers[:6] == [Outcome.OK] * 6
                assert set(layers[9:]) == {Outcome.CORRUPT}
                assert tier.counters()["read_layer.short"] >= 3
                assert tier.down is None
                assert await write_all(tier, slots, identities) == [Outcome.OK] * 4
                assert await read_all(tier, slots, identities, together=True) == [Outcome.OK] * 4

    run(main())


@pytest.mark.parametrize("at", [1, 2, 3])
def test_c11_a_read_in_two_halves_is_continued_and_its_neighbours_are_right(at: int) -> None:
    files = data_faults()

    async def main() -> None:
        async with small_tier(SMALL, 4, files=files, read_lanes=1) as tier:
            identities = identity_chain(4)
            slots = tier.allocate(4).tolist()
            await store(tier, np.array(slots, np.int32), identities)
            files.arm(Fault.SHORT, at)
            assert await read_all(tier, slots, identities, together=False) == [Outcome.OK] * 4
            # A read of another page fails on the same thread just before.
            files.arm(Fault.EIO, 1)
            assert (await fetch(tier, slots[0], identities[0]))[0] is Outcome.ERROR
            assert await read_all(tier, slots[1:], identities[1:], together=True) == [Outcome.OK] * 3

    run(main())


@pytest.mark.parametrize("step", [1, 511, 512, 4095, 4096, 5000])
@pytest.mark.parametrize("page_bytes", [12_288, 10_000])
def test_a_device_that_moves_little_at_a_time_is_followed_to_the_end(step: int, page_bytes: int) -> None:
    """Calls that move `step` bytes at most: short of a block, a direct transfer must begin the block again."""

    class Slow(FileIO):
        def __init__(self) -> None:
            self.limit = 0

        def _limited(self, buffers: Sequence[memoryview]) -> int:
            # Never less than what brings a stuck transfer on: real devices give whole sectors.
            self.limit = min(sum(map(len, buffers)), step if step >= 4096 else self.limit + step)
            return self.limit

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return min(super().preadv(fd, buffers, offset), self._limited(buffers))

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return min(super().pwritev(fd, buffers, offset), self._limited(buffers))

    async def main() -> None:
        async with small_tier(shape_of(page_bytes), 2, files=Slow(), read_lanes=1, write_lanes=1) as tier:
            identities = identity_chain(2)
            slots = tier.allocate(2)
            await store(tier, slots, identities)
            for slot, identity in zip(slots.tolist(), identities, strict=True):
                await expect_page(tier, slot, identity)

    run(main())


@pytest.mark.parametrize("name", DATA_CALLS)
@pytest.mark.parametrize("answer", ["nothing", "interrupted"])
def test_a_device_that_never_gets_on_is_given_up(name: str, answer: str) -> None:
    class Stuck(FaultyFiles):
        stuck = False

        def _stick(self, own: str) -> int | None:
            if own != name or not self.stuck:
                return None
            self.num_calls += 1
            if answer == "interrupted":
                raise InterruptedError(4, "Interrupted system call")
            return 0

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            got = self._stick("preadv")
            return super().preadv(fd, buffers, offset) if got is None else got

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            got = self._stick("pwritev")
            return super().pwritev(fd, buffers, offset) if got is None else got

    async def main() -> None:
        files = Stuck()
        async with small_tier(SMALL, 1, files=files) as tier:
            [identity] = identity_chain(1)
            slots = tier.allocate(1)
            await store(tier, slots, [identity])
            files.stuck, files.num_calls = True, 0
            if name == "preadv":
                # Nothing at all is what the end of a file looks like.
                expected = Outcome.CORRUPT if answer == "nothing" else Outcome.ERROR
                await expect_miss(tier, 0, identity, expected)
            else:
                assert await tier.write([write_of(tier, 0, identity)]) == [Outcome.ERROR]
            assert 1 <= files.num_calls < 100
            files.stuck = False
            assert await tier.write([write_of(tier, 0, identity)]) == [Outcome.OK]
            await expect_page(tier, 0, identity)

    run(main())


def test_a_copy_that_raises_what_no_device_raises_is_an_error_and_the_thread_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = data_faults()

    async def main() -> None:
        async with small_tier(SMALL, 2, files=files, read_lanes=1, write_lanes=1, layer_lanes=1) as tier:
            identities = identity_chain(2)
            slots = tier.allocate(2).tolist()
            files.arm(Fault.RUNTIME, 1)
            assert await write_all(tier, slots, identities) == [Outcome.ERROR] * 2
            assert await write_all(tier, slots, identities) == [Outcome.OK] * 2
            files.arm(Fault.RUNTIME, 1)
            assert await read_all(tier, slots, identities, together=True) == [Outcome.ERROR] * 2
            assert await read_all(tier, slots, identities, together=True) == [Outcome.OK] * 2
            files.arm(Fault.RUNTIME, 3)
            layers = await read_layers(tier, slots, identities)
            assert layers == [Outcome.OK] * 2 + [Outcome.ERROR] * 4
            assert await read_layers(tier, slots, identities) == [Outcome.OK] * 6
            assert tier.counters()["write.bug"] == 2

    run(main())
    assert caplog.text.count("RuntimeError: injected") == 3
