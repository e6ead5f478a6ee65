"""What comes back when a store is opened again: after a clean stop, after a crash, with another capacity."""

import asyncio
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache.clock import ManualClock, SystemClock
from hicache.errors import BadRequest, DeadlineExceeded, NoRoom, TierUnavailable
from hicache.tier import Outcome, PageIdentity, RecoveredRun, SupportsDurability
from hicache.tiers.nvme import NvmeTier, inspect_directory
from hicache.tiers.nvme.budget import WriteBudget
from hicache.tiers.nvme.directory import overhead_bytes
from hicache.tiers.nvme.geometry import Geometry
from hicache.tiers.nvme.io import FileIO
from hicache.tiers.nvme.records import MAX_STEP_SLOTS
from tests.stamps import identity_chain
from tests.tiers.contract import expect_miss, expect_page, run, store
from tests.tiers.faulty_files import Fault, FaultyFiles, HeldFiles
from tests.tiers.nvme import SMALL, capacity_for, small_tier, write_all

RECORD = b"namespace" + bytes(8)
"""The record whose digest the namespace of `identity_chain` is."""


async def synced(tier: NvmeTier) -> None:
    await tier.sync(tier.accepted, deadline=tier._clock.monotonic() + 30)


async def keep(tier: NvmeTier, identities: Sequence[PageIdentity]) -> list[int]:
    """Store pages under a namespace that has a record; their slots."""
    tier.remember(identities[0].namespace, RECORD)
    slots = tier.allocate(len(identities))
    await store(tier, slots, identities)
    return [int(slot) for slot in slots]


def crash(directory: Path, after: Path) -> Path:
    """What a process that was killed now would leave behind."""
    return Path(shutil.copytree(directory, after))


def pages_of(runs: Sequence[RecoveredRun]) -> dict[tuple[bytes, bytes], int]:
    """The slot of each recovered page, by its prefix and tokens; checks that parents come before children."""
    found: dict[tuple[bytes, bytes], int] = {}
    chains: set[bytes] = set()
    for each in runs:
        assert each.namespace == RECORD
        assert len(each.tokens) == SMALL.token_bytes * len(each.slots)
        digest, prefix = None, each.prefix
        for place, slot in enumerate(each.slots.tolist()):
            tokens = each.tokens[place * SMALL.token_bytes : (place + 1) * SMALL.token_bytes]
            found[prefix, tokens] = slot
            prefix = PageIdentity(digest or b"", prefix, tokens).chain
        assert prefix == each.chain
        # A run begins at a root, or where an earlier run ends.
        assert each.prefix in chains or all(each.prefix != other.chain for other in runs)
        chains.add(each.chain)
    return found


async def expect_recovered(tier: NvmeTier, identities: Sequence[PageIdentity]) -> list[int]:
    """Exactly these pages come back, handed out, with the right bytes; their slots."""
    found = pages_of(tier.recovered())
    assert found.keys() == {(identity.prefix, identity.tokens) for identity in identities}
    assert tier.recovery.num_pages == len(identities)
    assert tier.num_free == tier.capacity_pages - len(identities)
    slots = [found[identity.prefix, identity.tokens] for identity in identities]
    for slot, identity in zip(slots, identities, strict=True):
        await expect_page(tier, slot, identity)
    assert tier.recovered() == []
    return slots


# ---- what comes back


def test_a_tier_is_durable_by_its_contract(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_tier(SMALL, 4, directory=tmp_path / "store") as tier:
            assert isinstance(tier, SupportsDurability)
            assert (tier.accepted, tier.durable, list(tier.recovered())) == (0, 0, [])

    run(main())


def test_everything_comes_back_after_a_clean_stop(tmp_path: Path) -> None:
    identities = identity_chain(7)

    async def main() -> None:
        async with small_tier(SMALL, 8, directory=tmp_path / "store") as tier:
            slots = await keep(tier, identities)
        async with small_tier(SMALL, 8, directory=tmp_path / "store") as tier:
            assert tier.recovery.clean_stop
            assert (tier.recovery.dropped, tier.recovery.damage) == ({}, ())
            assert await expect_recovered(tier, identities) == slots
            assert tier.durable == tier.accepted == 7
        # Nothing changed: nothing is written, and the stop still counts as clean.
        async with small_tier(SMALL, 8, directory=tmp_path / "store") as tier:
            assert tier.recovery.clean_stop
            await expect_recovered(tier, identities)

    run(main())


def test_what_was_durable_comes_back_after_a_crash_and_layers_can_be_read(tmp_path: Path) -> None:
    identities = identity_chain(6)

    async def main() -> None:
        async with small_tier(SMALL, 8, directory=tmp_path / "store") as tier:
            await keep(tier, identities[:4])
            assert (tier.accepted, tier.durable) == (4, 0)
            await synced(tier)
            assert tier.durable == 4
            await keep(tier, identities[4:])
            assert (tier.accepted, tier.durable) == (6, 4)
            left = crash(tmp_path / "store", tmp_path / "left")
        for turn in range(3):
            # Whoever is killed while recovering, or just afterwards, leaves what he found.
            async with small_tier(SMALL, 8, directory=left) as tier:
                assert not tier.recovery.clean_stop
                again = crash(left, tmp_path / f"left-{turn}")
                await expect_recovered(tier, identities[:4])
            left = again

    run(main())


def test_changes_go_on_with_the_numbers_and_generations_of_an_earlier_life(tmp_path: Path) -> None:
    identities = identity_chain(4)

    async def main() -> None:
        async with small_tier(SMALL, 4, directory=tmp_path / "store") as tier:
            slots = await keep(tier, identities)
            tier.free(np.array(slots[3:], np.int32))
            assert (tier.accepted, tier.generation(slots[3])) == (5, 1)
        async with small_tier(SMALL, 4, directory=tmp_path / "store") as tier:
            await expect_recovered(tier, identities[:3])
            assert (tier.accepted, tier.durable) == (5, 5)
            assert [tier.generation(slot) for slot in slots] == [0, 0, 0, 1]
            tier.free(np.array(slots[:1], np.int32))
            await synced(tier)
            assert tier.durable == 6
            left = crash(tmp_path / "store", tmp_path / "left")
        async with small_tier(SMALL, 4, directory=left) as tier:
            # Two pages have lost the one before them.
            assert tier.recovery.num_pages == 0
            assert tier.recovery.dropped == {"orphan": 2}
            assert tier.num_free == 4
            assert [tier.generation(slot) for slot in slots] == [1, 1, 1, 1]

    run(main())


def test_removed_stays_removed(tmp_path: Path) -> None:
    """I12: also when the slot is used again, by a page that is not durable."""
    first, second = identity_chain(4), identity_chain(4, seed=1)

    async def main() -> None:
        async with small_tier(SMALL, 4, directory=tmp_path / "store") as tier:
            slots = await keep(tier, first)
            await synced(tier)
            tier.free(np.array(slots[1:], np.int32))
            await synced(tier)
            removed = crash(tmp_path / "store", tmp_path / "removed")
            await keep(tier, second[:2])
            reused = crash(tmp_path / "store", tmp_path / "reused")
        for left in (removed, reused):
            async with small_tier(SMALL, 4, directory=left) as tier:
                await expect_recovered(tier, first[:1])
                again = tier.allocate(3)
                await store(tier, again, second[:3])

    run(main())


def test_c03_a_slot_is_written_again_only_when_its_removal_is_durable(tmp_path: Path) -> None:
    """C03: neither a record without its page nor a page without its record brings back an earlier life."""
    [first], [second] = identity_chain(1), identity_chain(1, seed=1)
    copies: list[Path] = []

    class Watched(FileIO):
        """Copies the directory before and after every write and sync: what a power cut could leave."""

        is_watching = False

        def note(self) -> None:
            if self.is_watching:
                copies.append(crash(tmp_path / "store", tmp_path / f"copy-{len(copies)}"))

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            self.note()
            count = super().pwritev(fd, buffers, offset)
            self.note()
            return count

        def fdatasync(self, fd: int) -> None:
            super().fdatasync(fd)
            self.note()

    files = Watched()

    async def main() -> None:
        async with small_tier(SMALL, 1, directory=tmp_path / "store", files=files) as tier:
            [slot] = await keep(tier, [first])
            await synced(tier)
            tier.free(np.array([slot], np.int32))
            files.is_watching = True
            rounds = tier.counters()["commit.rounds"]
            assert await keep(tier, [second]) == [slot]
            assert tier.counters()["commit.rounds"] == rounds + 1, "the removal was committed first"
            assert tier.durable == 2
            await synced(tier)
            files.is_watching = False
        assert len(copies) >= 6
        seen = set()
        for copy in copies:
            async with small_tier(SMALL, 1, directory=copy) as tier:
                found = pages_of(tier.recovered())
                if (first.prefix, first.tokens) in found:
                    await expect_page(tier, slot, first)
                    seen.add("first")
                elif found:
                    await expect_page(tier, slot, second)
                    seen.add("second")
                else:
                    assert tier.num_free == 1
                    seen.add("nothing")
        assert seen == {"first", "nothing", "second"}

    run(main())


def test_a_child_is_offered_only_with_its_whole_path(tmp_path: Path) -> None:
    """Design section 2: durable with everything before it, or not at all."""
    trunk = identity_chain(4)
    branch = [trunk[0], *_continued(trunk[0], 3, seed=9)]

    async def main() -> None:
        async with small_tier(SMALL, 12, directory=tmp_path / "store") as tier:
            # Children first: the order in which pages are accepted says nothing about the tree.
            slots = await keep(tier, [*reversed(trunk), *reversed(branch[1:])])
            by_identity = dict(zip([*reversed(trunk), *reversed(branch[1:])], slots, strict=True))
            await synced(tier)
            tier.free(np.array([by_identity[trunk[2]]], np.int32))
        async with small_tier(SMALL, 12, directory=tmp_path / "store") as tier:
            assert tier.recovery.dropped == {"orphan": 1}
            await expect_recovered(tier, [*trunk[:2], *branch[1:]])

    run(main())


def _continued(identity: PageIdentity, num_pages: int, seed: int) -> list[PageIdentity]:
    """Pages behind another."""
    chain, prefix = [], identity.chain
    for other in identity_chain(num_pages, seed=seed):
        chain.append(PageIdentity(identity.namespace, prefix, other.tokens))
        prefix = chain[-1].chain
    return chain


def test_of_two_slots_with_the_same_page_one_comes_back(tmp_path: Path) -> None:
    identities = identity_chain(3)

    async def main() -> None:
        async with small_tier(SMALL, 8, directory=tmp_path / "store") as tier:
            await keep(tier, identities)
            await keep(tier, identities[:2])
        async with small_tier(SMALL, 8, directory=tmp_path / "store") as tier:
            assert tier.recovery.dropped == {"duplicate": 2}
            await expect_recovered(tier, identities)

    run(main())


def test_pages_of_a_namespace_without_record_do_not_come_back(tmp_path: Path) -> None:
    known, unknown = identity_chain(2), identity_chain(3, namespace=1)

    async def main() -> None:
        async with small_tier(SMALL, 8, directory=tmp_path / "store") as tier:
            await keep(tier, known)
            await store(tier, tier.allocate(3), unknown)
        async with small_tier(SMALL, 8, directory=tmp_path / "store") as tier:
            assert tier.recovery.dropped == {"unknown_namespace": 3}
            assert tier.counters()["recovered.dropped.unknown_namespace"] == 3
            await expect_recovered(tier, known)

    run(main())


def test_records_of_namespaces_have_bounds(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_tier(SMALL, 4, directory=tmp_path / "store") as tier:
            with pytest.raises(BadRequest, match="digest"):
                tier.remember(b"short", RECORD)
            with pytest.raises(BadRequest, match="record"):
                tier.remember(bytes(32), bytes((1 << 17) + 1))
            with pytest.raises(BadRequest, match="record"):
                tier.remember(bytes(32), RECORD)
            # Two namespaces have a page each; the others' records make room for each other, never those two.
            for number in range(2):
                record = bytes([number]) * 100_000
                digest = hashlib.sha256(record).digest()
                tier.remember(digest, record)
                await store(tier, tier.allocate(1), [PageIdentity(digest, digest, bytes(SMALL.token_bytes))])
            for number in range(2, 30):
                record = bytes([number]) * 50_000
                tier.remember(hashlib.sha256(record).digest(), record)
            with pytest.raises(NoRoom, match="namespaces"):
                tier.remember(hashlib.sha256(bytes(90_000)).digest(), bytes(90_000))
            await synced(tier)
        async with small_tier(SMALL, 4, directory=tmp_path / "store") as tier:
            assert {each.namespace for each in tier.recovered()} == {b"\0" * 100_000, b"\1" * 100_000}

    run(main())


def test_many_pages_come_back_from_a_checkpoint_of_several_steps(tmp_path: Path) -> None:
    identities = identity_chain(2 * MAX_STEP_SLOTS + 5)

    async def main() -> None:
        options: dict[str, Any] = {"directory": tmp_path / "store", "slots_per_segment": 1000}
        num_slots = len(identities) + 1000  # more than the reserve
        async with small_tier(SMALL, num_slots, **options) as tier:
            await keep(tier, identities)
        for turn in range(2):
            calls: list[tuple[int, int]] = []

            def told(done: int, total: int, calls: list[tuple[int, int]] = calls) -> None:
                calls.append((done, total))

            async with small_tier(
                SMALL, num_slots + turn, **options, progress=told
            ) as tier:
                found = pages_of(tier.recovered())
                assert len(found) == len(identities)
                for place in (0, MAX_STEP_SLOTS, len(identities) - 1):
                    identity = identities[place]
                    await expect_page(tier, found[identity.prefix, identity.tokens], identity)
            assert [done for done, _ in calls] == sorted(done for done, _ in calls)
            assert {total for _, total in calls} == {calls[-1][0]}
            assert calls[0][0] == 0

    run(main())


# ---- another capacity


@pytest.mark.parametrize("stop", ["clean", "killed"])
@pytest.mark.parametrize(
    ("capacity", "kept"), [(16, 12), (13, 12), (12, 12), (10, 10), (9, 9), (5, 5), (4, 4), (1, 1)]
)
def test_c21_a_store_opened_with_another_capacity_grows_or_shrinks(
    tmp_path: Path, capacity: int, kept: int, stop: str
) -> None:
    """C21: what lies beyond the new capacity is gone, the rest stays; the directory never has more than it may."""
    identities = identity_chain(12)
    directory = tmp_path / "store"

    def size() -> int:
        return sum(max(path.stat().st_size, path.stat().st_blocks * 512) for path in directory.iterdir())

    async def main() -> None:
        async with small_tier(SMALL, 12, directory=directory) as tier:
            assert await keep(tier, identities) == list(range(12))
            if stop == "killed":
                await synced(tier)
                killed = crash(directory, tmp_path / "killed")
        if stop == "killed":
            shutil.rmtree(directory)
            killed.rename(directory)
        for _ in range(2):
            async with small_tier(SMALL, capacity, directory=directory) as tier:
                most = capacity_for(SMALL, capacity, slots_per_segment=min(4, capacity))[0]
                geometry = Geometry(SMALL, 4, capacity)
                assert tier.capacity_pages == capacity
                assert size() <= most + overhead_bytes(geometry)
                await expect_recovered(tier, identities[:kept])
                free = tier.allocate(tier.num_free)
                await store(tier, free, identity_chain(len(free), seed=1) if len(free) else [])
                assert size() <= most + overhead_bytes(geometry)
                tier.free(free)

    run(main())


def test_a_store_cannot_grow_beyond_the_number_of_its_segments(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_tier(SMALL, 1, directory=tmp_path / "store", slots_per_segment=1):
            pass
        with pytest.raises(BadRequest, match="capacity_bytes"):
            NvmeTier.open(tmp_path / "store", layout=SMALL, capacity_bytes=600 * (4096 + SMALL.slot_bytes))

    run(main())


def test_another_layout_is_refused_and_nothing_is_altered(tmp_path: Path) -> None:
    from tests.tiers.nvme import shape_of

    async def main() -> None:
        async with small_tier(SMALL, 4, directory=tmp_path / "store") as tier:
            await keep(tier, identity_chain(2))
        before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "store").iterdir()}
        for other in (shape_of(12_289), shape_of(12_288, num_layers=2)):
            with pytest.raises(TierUnavailable, match="holds pages of 4 tokens, 3 layers and 12288 bytes") as caught:
                NvmeTier.open(tmp_path / "store", layout=other, capacity_bytes=1 << 20)
            assert "\n" not in str(caught.value)
        after = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "store").iterdir()}
        assert after == before
        async with small_tier(SMALL, 4, directory=tmp_path / "store") as tier:
            await expect_recovered(tier, identity_chain(2))

    run(main())


# ---- waiting for durability


def test_who_does_not_ask_never_waits_for_a_flush(tmp_path: Path) -> None:
    files = HeldFiles("fdatasync")

    async def main() -> None:
        async with small_tier(SMALL, 8, directory=tmp_path / "store", files=files) as tier:
            files.hold()
            slots = await keep(tier, identity_chain(4))
            waiting = asyncio.ensure_future(synced(tier))  # noqa: TID251 a test holds two waiters at once
            await asyncio.to_thread(files.arrived.acquire)
            await keep(tier, identity_chain(2, seed=1))
            await expect_page(tier, slots[0], identity_chain(4)[0])
            assert tier.durable == 0
            with pytest.raises(DeadlineExceeded):
                await tier.sync(tier.accepted, deadline=SystemClock().monotonic() + 0.01)
            files.let_go()
            await waiting
            assert tier.durable >= 4

    run(main())


def test_changes_become_durable_by_themselves_and_then_nothing_happens(tmp_path: Path) -> None:
    calls: list[str] = []

    class Noting(FileIO):
        def fdatasync(self, fd: int) -> None:
            calls.append("fdatasync")
            super().fdatasync(fd)

    async def main() -> None:
        async with small_tier(
            SMALL, 8, directory=tmp_path / "store", files=Noting(), commit_interval_s=0.001
        ) as tier:
            assert tier._commits._timer is None
            await keep(tier, identity_chain(4))
            assert tier._commits._timer is not None or tier._commits._is_busy or tier.durable == 4
            await tier._commits.reach(4)
            assert tier.durable == 4
            assert tier._commits._timer is None
            assert not tier._commits._is_busy
            done = len(calls)
            await synced(tier)
            assert len(calls) == done, "nothing is flushed when nothing has changed"

    run(main())


def test_sync_refuses_numbers_that_nobody_was_given(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_tier(SMALL, 2, directory=tmp_path / "store") as tier:
            for number in (-1, 1):
                with pytest.raises(BadRequest, match="number"):
                    await tier.sync(number, deadline=0)
            await tier.sync(0, deadline=0)

    run(main())


# ---- failing flushes


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC])
def test_i18_a_failed_flush_loses_its_pages_and_says_so(tmp_path: Path, fault: Fault) -> None:
    """I18: whatever sync fails, once: nothing that was called durable is missing, and everything works again."""
    first, second, third = (identity_chain(4, seed=seed) for seed in range(3))
    num_syncs, num_lost = 0, 0

    async def attempt(at: int) -> bool:
        nonlocal num_syncs, num_lost
        directory = tmp_path / f"store-{at}"
        files = FaultyFiles(counts=lambda name: name == "fdatasync")
        durable: list[PageIdentity] = []
        async with small_tier(SMALL, 16, directory=directory, files=files) as tier:
            files.arm(fault, at)
            for identities in (first, second):
                slots = await keep(tier, identities)
                number = tier.accepted
                try:
                    await synced(tier)
                except TierUnavailable:
                    lost = tier.counters().get("commit.lost", 0)
                    assert lost in (0, 4)
                    num_lost += lost
                    if not lost:
                        # A fresh log could not be written; it is tried again.
                        assert tier.down is not None
                        await synced(tier)
                        assert tier.down is None
                        durable += identities
                        continue
                    for slot, identity in zip(slots, identities, strict=True):
                        await expect_miss(tier, slot, identity, Outcome.NOT_FOUND)
                        assert tier.check(slot, 0, identity) is Outcome.NOT_FOUND
                        with pytest.raises(TierUnavailable, match="flush"):
                            await tier.sync(number, deadline=SystemClock().monotonic() + 30)
                else:
                    assert tier.durable >= number
                    durable += identities
            num_syncs = files.num_calls
            files.heal()
            left = crash(directory, tmp_path / f"left-{at}")
            await keep(tier, third)
            await synced(tier)
        for where, more in ((left, []), (directory, third)):
            async with small_tier(SMALL, 16, directory=where) as tier:
                found = pages_of(tier.recovered())
                for identity in [*durable, *more]:
                    await expect_page(tier, found[identity.prefix, identity.tokens], identity)
        return bool(files.hits)

    for at in range(1, 40):
        hit = False

        async def once(number: int = at) -> None:
            nonlocal hit
            hit = await attempt(number)

        run(once())
        if not hit:
            break
    assert not hit, "there is no end to the syncs"
    assert at > 4
    assert num_lost > 0


def test_a_write_under_way_when_a_flush_of_its_segment_fails_is_lost(tmp_path: Path) -> None:
    identities = identity_chain(3)

    class Files(HeldFiles):
        fails = False

        def fdatasync(self, fd: int) -> None:
            if self.fails:
                self.fails = False
                raise OSError(5, os.strerror(5))
            super().fdatasync(fd)

    files = Files("pwritev")

    async def main() -> None:
        async with small_tier(SMALL, 4, directory=tmp_path / "store", files=files) as tier:
            await keep(tier, identities[:1])
            await synced(tier)
            await keep(tier, identities[1:2])
            files.fails = True
            slots = tier.allocate(1).tolist()
            files.hold()
            # The page is on its way, the flush of what was written before it fails meanwhile.
            writing = asyncio.ensure_future(  # noqa: TID251 two things at once, which is what is tested
                write_all(tier, slots, identities[2:])
            )
            await asyncio.to_thread(files.arrived.acquire)
            with pytest.raises(TierUnavailable, match="flush"):
                await synced(tier)
            files.let_go()
            assert await writing == [Outcome.ERROR]
            assert tier.counters()["commit.lost"] == 1
            await expect_miss(tier, slots[0], identities[2], Outcome.NOT_FOUND)
            await expect_miss(tier, 1, identities[1], Outcome.NOT_FOUND)
            await expect_page(tier, 0, identities[0])

    run(main())


def test_a_log_that_cannot_be_written_takes_the_tier_down_until_it_can(tmp_path: Path) -> None:
    identities = identity_chain(6)
    logs: set[int] = set()

    class Files(FileIO):
        fails = False

        def open(self, name: str, flags: int, *, directory_fd: int | None = None) -> int:
            fd = super().open(name, flags, directory_fd=directory_fd)
            if name.endswith(".log"):
                logs.add(fd)
            return fd

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.fails and fd in logs:
                raise OSError(5, os.strerror(5))
            return super().pwritev(fd, buffers, offset)

    files = Files()

    async def main() -> None:
        async with small_tier(SMALL, 8, directory=tmp_path / "store", files=files) as tier:
            slots = await keep(tier, identities[:2])
            await synced(tier)
            files.fails = True
            await keep(tier, identities[2:4])
            with pytest.raises(TierUnavailable, match="log"):
                await synced(tier)
            assert tier.down is not None
            assert "log" in tier.down
            with pytest.raises(TierUnavailable, match="log"):
                tier.allocate(1)
            for slot, identity in zip(slots, identities, strict=False):
                await expect_page(tier, slot, identity)
            files.fails = False
            await synced(tier)
            assert tier.down is None
            assert tier.durable == 4
            left = crash(tmp_path / "store", tmp_path / "left")
        async with small_tier(SMALL, 8, directory=left) as tier:
            await expect_recovered(tier, identities[:4])

    run(main())


def test_of_two_whole_logs_the_newer_is_made_sure_of_before_the_older_goes(tmp_path: Path) -> None:
    """The older log could not be retired: both are whole, and the next start must not lose the newer's pages."""
    identities = identity_chain(6)
    logs: set[int] = set()
    again: list[int] = []

    class Files(FileIO):
        retires = True

        def open(self, name: str, flags: int, *, directory_fd: int | None = None) -> int:
            fd = super().open(name, flags, directory_fd=directory_fd)
            if name.endswith(".log"):
                logs.add(fd)
            return fd

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if fd in logs and offset == 0:
                if not any(buffers[0]) and not self.retires:
                    raise OSError(5, os.strerror(5))
                again.append(sum(map(len, buffers)))
            return super().pwritev(fd, buffers, offset)

    async def main() -> None:
        directory = tmp_path / "store"
        async with small_tier(SMALL, 8, directory=directory) as tier:
            await keep(tier, identities[:2])
        files = Files()
        files.retires = False
        async with small_tier(SMALL, 8, directory=directory, files=files) as tier:
            await keep(tier, identities[2:])
            await synced(tier)
            left = crash(directory, tmp_path / "left")
        again.clear()
        async with small_tier(SMALL, 8, directory=left, files=Files()) as tier:
            await expect_recovered(tier, identities)
            assert [num_bytes > 4096 for num_bytes in again] == [True, False, False], "again, begun, retired"
            assert not inspect_directory(left).problems
            assert [log.number for log in inspect_directory(left).logs].count(0) == 1

    run(main())


def test_closing_does_not_wait_for_ever_for_a_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = HeldFiles("fdatasync")

    async def main() -> None:
        async with small_tier(SMALL, 8, directory=tmp_path / "store", files=files) as tier:
            files.hold()
            await keep(tier, identity_chain(2))
            waiting = asyncio.ensure_future(synced(tier))  # noqa: TID251 somebody waits while the tier is closed
            await asyncio.to_thread(files.arrived.acquire)
            with monkeypatch.context() as patched:
                patched.setattr("hicache.tiers.nvme.store.CLOSE_TIMEOUT_S", 0.05)
                await tier.close()
            with pytest.raises(TierUnavailable, match="closed"):
                await waiting
            files.let_go()

    run(main())


# ---- one of several stores


def test_a_store_that_is_not_whole_gives_its_pages_unlinked(tmp_path: Path) -> None:
    identities = identity_chain(6)

    async def main() -> None:
        async with small_tier(SMALL, 8, directory=tmp_path / "store") as tier:
            await keep(tier, identities[3:])
        tier = NvmeTier.open(tmp_path / "store", layout=SMALL, capacity_bytes=1 << 20, is_whole=False)
        tier.abandon()
        async with small_tier(SMALL, 8, directory=tmp_path / "store", is_whole=False) as tier:
            assert tier.recovered() == []
            rows, namespaces = tier.unconnected()
            assert tier.num_free == 5
            assert [row["tokens"].tobytes() for row in rows] == [identity.tokens for identity in identities[3:]]
            assert list(namespaces.values()) == [(identities[0].namespace, RECORD)]
            assert {*rows["namespace"].tolist()} == {*namespaces}
            for slot, identity in zip(rows["slot"].tolist(), identities[3:], strict=True):
                await expect_page(tier, slot, identity)
            rows, namespaces = tier.unconnected()
            assert (rows.size, namespaces) == (0, {})
        async with small_tier(SMALL, 8, directory=tmp_path / "store") as tier:
            assert tier.recovery.dropped == {"orphan": 3}

    run(main())


# ---- bounded space


def test_i20_logs_take_bounded_space_however_much_changes(tmp_path: Path) -> None:
    """Ten times the capacity and more goes through; the logs are written anew within the same two files."""
    identities = identity_chain(64)
    capacity_bytes, _ = capacity_for(SMALL, 64, slots_per_segment=32)
    most = capacity_bytes + overhead_bytes(Geometry(SMALL, 32, 64))

    def size() -> int:
        return sum(path.stat().st_size for path in (tmp_path / "store").iterdir())

    async def main() -> None:
        async with small_tier(SMALL, 64, directory=tmp_path / "store", slots_per_segment=32) as tier:
            slots = await keep(tier, identities)
            await synced(tier)
            logs = tier.counters()["commit.logs"]
            turn = 0
            while tier.counters()["commit.logs"] < logs + 3:
                turn += 1
                assert turn < 2000
                # Rewriting a page in place takes its record out of the log first, then puts it back.
                assert await write_all(tier, slots, identities) == [Outcome.OK] * 64
                await synced(tier)
                assert size() <= most
            assert turn > 20
            left = crash(tmp_path / "store", tmp_path / "left")
        async with small_tier(SMALL, 64, directory=left, slots_per_segment=32) as tier:
            assert await expect_recovered(tier, identities) == slots

    run(main())


# ---- budgets


def test_i39_the_write_budget_refuses_and_fills_with_the_clock_alone(tmp_path: Path) -> None:
    clock = ManualClock()
    per_day = 24 * 4 * SMALL.slot_bytes
    budget: dict[str, Any] = {"write_bytes_per_day": per_day, "clock": clock, "directory": tmp_path / "store"}
    hour = 3600 * 24 / 23
    """An hour's share is in the bucket from the beginning; the rest of the day fills it 23 times."""

    async def main() -> None:
        async with small_tier(SMALL, 64, **budget) as tier:
            await keep(tier, identity_chain(4))
            with pytest.raises(TierUnavailable, match="write budget"):
                tier.allocate(1)
            assert tier.counters()["refused.budget"] == 1
            clock.advance(hour * 0.49)
            with pytest.raises(TierUnavailable, match="write budget"):
                tier.allocate(2)
            clock.advance(hour * 0.02)
            await keep(tier, identity_chain(2, seed=1))
            # Days are not saved up, and no request is granted that takes more than an hour's share.
            clock.advance(10 * 86_400)
            with pytest.raises(TierUnavailable, match="write budget"):
                tier.allocate(5)
            await keep(tier, identity_chain(3, seed=2))
            await synced(tier)
            left = crash(tmp_path / "store", tmp_path / "left")
        clock.advance(86_400)
        clock.wall_offset += 1e9
        async with small_tier(SMALL, 64, **budget) as tier:
            assert tier.recovery.clean_stop
            tier.free(tier.allocate(1))
            with pytest.raises(TierUnavailable, match="write budget"):
                tier.allocate(1)
        async with small_tier(SMALL, 64, **(budget | {"directory": left})) as tier:
            # What was taken just before a crash may not be known: nothing is left.
            with pytest.raises(TierUnavailable, match="write budget"):
                tier.allocate(1)
            clock.advance(hour)
            tier.free(tier.allocate(4))
            with pytest.raises(TierUnavailable, match="write budget"):
                tier.allocate(1)

    run(main())


@given(
    steps=st.lists(st.tuples(st.floats(0, 20_000), st.integers(1, 6)), min_size=1, max_size=60),
    pages_a_day=st.integers(2, 200),
)
@settings(max_examples=200, deadline=None)
def test_i39_no_window_of_a_day_sees_more_than_the_budget(steps: list[tuple[float, int]], pages_a_day: int) -> None:
    clock = ManualClock()
    budget = WriteBudget(pages_a_day * 1000, 1000, clock, None)
    taken: list[tuple[float, int]] = []
    for pause, num_pages in steps:
        clock.advance(pause)
        if budget.take(num_pages * 1000):
            taken.append((clock.monotonic(), num_pages * 1000))
        for start, _ in taken:
            window = [num_bytes for at, num_bytes in taken if start <= at < start + 86_400]
            assert sum(window) <= budget.bytes_per_day
    clock.advance(86_400)
    assert budget.take(1000), "a page a day is always granted"


def test_the_tier_is_down_while_others_need_the_space(tmp_path: Path) -> None:
    clock = ManualClock()

    class Files(FaultyFiles):
        free_blocks = 1000
        looks = 0

        def statvfs(self, name: str) -> os.statvfs_result:
            self.looks += 1
            values = list(super().statvfs(name))
            values[1], values[4] = 4096, self.free_blocks
            return os.statvfs_result(values)

    files = Files()

    async def main() -> None:
        async with small_tier(
            SMALL, 8, directory=tmp_path / "store", files=files, clock=clock, min_free_bytes=1 << 20
        ) as tier:

            slots = await keep(tier, identity_chain(2))
            files.free_blocks = 10
            assert tier.down is None
            looks = files.looks
            clock.advance(1)
            tier.free(tier.allocate(1))
            await tier._commits.reach(tier.accepted)
            assert files.looks == looks + 1
            assert tier.down is not None
            assert "free space below 1048576 bytes" in tier.down
            for _ in range(3):
                with pytest.raises(TierUnavailable, match="free space below"):
                    tier.allocate(1)
            assert files.looks == looks + 1, "looked at most once a second"
            assert tier.counters()["refused.floor"] == 3
            await expect_page(tier, slots[0], identity_chain(2)[0])
            files.free_blocks = 1000
            clock.advance(1)
            with pytest.raises(TierUnavailable, match="free space below"):
                tier.allocate(1)
            tier.free(np.array(slots[1:], np.int32))
            await tier._commits.reach(tier.accepted)
            assert tier.down is None
            tier.free(tier.allocate(1))

    run(main())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_free_bytes", -1),
        ("write_bytes_per_day", 2 * SMALL.slot_bytes - 1),
        ("commit_interval_s", 0.0),
        ("commit_interval_s", float("inf")),
        ("commit_interval_s", float("nan")),
    ],
)
def test_options_out_of_bounds_are_refused_and_nothing_is_made(tmp_path: Path, name: str, value: float) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(BadRequest, match=name):
        NvmeTier.open(tmp_path / "store", layout=SMALL, capacity_bytes=1 << 20, **options)
    assert not (tmp_path / "store").exists()
