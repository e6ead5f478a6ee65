"""Tiers that are broken on purpose, as stores have been broken before: the power programme finds each out."""

from collections.abc import Callable
from typing import Final

import numpy as np
import pytest

from hicache.tiers.nvme import records, recovery
from hicache.tiers.nvme.commits import Commits
from hicache.tiers.nvme.findings import Finding
from hicache.tiers.nvme.header import decode_page_header
from hicache.tiers.nvme.io import Scratch
from hicache.tiers.nvme.reading import LogContents, read_log
from hicache.tiers.nvme.segment import PageGet, SegmentFile
from tests.faults.oracle import Broken
from tests.faults.power import STEPS, PowerRun, Tally, rates_of
from tests.faults.seeded import SeededTier, run_seeded
from tests.simulation import World
from tests.tiers.simulated_disk import SimulatedDisk

pytestmark = pytest.mark.faults

MAX_SEEDS: Final = 200
"""A broken tier is found out within so many seeds."""

Breaks = Callable[[pytest.MonkeyPatch], type[SimulatedDisk]]


class Unsynced(SimulatedDisk):
    """A disk for a tier that leaves out some of its syncs: they report success and do nothing."""

    left_out = ""
    """How the names of the files end that are not synced; "/" for directories."""

    def _sync(self, name: str, fd: int) -> None:
        node = self._opened(fd).node
        names = [path for path, each in self.nodes() if each is node]
        if not any(path.endswith(self.left_out) for path in names):
            super()._sync(name, fd)


class SegmentsUnsynced(Unsynced):
    left_out = ".seg"


class LogsUnsynced(Unsynced):
    left_out = ".log"


class DirectoriesUnsynced(Unsynced):
    left_out = "/"


class FailuresSwallowed(SimulatedDisk):
    """A disk for a tier that does not look at what a sync returns, or tries again until it succeeds."""

    def _sync(self, name: str, fd: int) -> None:
        while not self.off:
            try:
                return super()._sync(name, fd)
            except OSError:
                continue
        return super()._sync(name, fd)


def page_data_is_not_synced(_: pytest.MonkeyPatch) -> type[SimulatedDisk]:
    return SegmentsUnsynced


def the_log_is_not_synced(_: pytest.MonkeyPatch) -> type[SimulatedDisk]:
    return LogsUnsynced


def directories_are_not_synced(_: pytest.MonkeyPatch) -> type[SimulatedDisk]:
    return DirectoriesUnsynced


def a_sync_that_failed_is_tried_again_and_trusted(_: pytest.MonkeyPatch) -> type[SimulatedDisk]:
    return FailuresSwallowed


def pages_that_a_failed_sync_took_stay_in_the_index(patch: pytest.MonkeyPatch) -> type[SimulatedDisk]:
    patch.setattr(Commits, "_lose", lambda self, ordinal, error: None)
    return SimulatedDisk


def a_slot_is_used_again_before_its_removal_is_durable(patch: pytest.MonkeyPatch) -> type[SimulatedDisk]:
    patch.setattr(Commits, "is_reusable", lambda self, slot: True)
    return SimulatedDisk


def the_end_of_the_log_is_not_checked(patch: pytest.MonkeyPatch) -> type[SimulatedDisk]:
    patch.setattr(records, "checksum", lambda data, before=0: 0)
    return SimulatedDisk


def a_page_is_known_by_its_checksum_alone(patch: pytest.MonkeyPatch) -> type[SimulatedDisk]:
    def verify(self: SegmentFile, get: PageGet, position: int, scratch: Scratch) -> Finding:
        header = decode_page_header(scratch.headers[position])
        if header is None:
            return Finding.BAD_HEADER
        return self._payloads.complete(get.into, header.payload_sum, get.ends, position, scratch)

    patch.setattr(SegmentFile, "_verify", verify)
    return SimulatedDisk


def what_was_accepted_is_called_durable(patch: pytest.MonkeyPatch) -> type[SimulatedDisk]:
    patch.setattr(SeededTier, "durable", property(lambda self: self.accepted))
    return SimulatedDisk


def removals_are_not_read_back(patch: pytest.MonkeyPatch) -> type[SimulatedDisk]:
    def forgetful(*args: object, **options: object) -> LogContents | None:
        contents = read_log(*args, **options)  # type: ignore[arg-type]  # handed through as they came
        if contents is not None:
            contents.freed.clear()
            contents.freed_positions.clear()
        return contents

    patch.setattr(recovery, "read_log", forgetful)
    return SimulatedDisk


def a_log_that_was_only_read_is_trusted(patch: pytest.MonkeyPatch) -> type[SimulatedDisk]:
    patch.setattr(Commits, "write_log_now", lambda self: None)
    return SimulatedDisk


def pages_are_taken_for_the_first_of_their_prompts(patch: pytest.MonkeyPatch) -> type[SimulatedDisk]:
    connect = recovery.connect

    def rootless(rows, namespaces, *args):  # type: ignore[no-untyped-def]  # as the function it stands for
        rows = rows.copy()
        for row in rows:
            row["prefix"] = np.frombuffer(namespaces[int(row["namespace"])][0], np.uint8)
        return connect(rows, namespaces, *args)

    patch.setattr(recovery, "connect", rootless)
    return SimulatedDisk


MUTANTS: Final[tuple[Breaks, ...]] = (
    page_data_is_not_synced,
    the_log_is_not_synced,
    directories_are_not_synced,
    a_sync_that_failed_is_tried_again_and_trusted,
    pages_that_a_failed_sync_took_stay_in_the_index,
    a_slot_is_used_again_before_its_removal_is_durable,
    the_end_of_the_log_is_not_checked,
    a_page_is_known_by_its_checksum_alone,
    what_was_accepted_is_called_durable,
    removals_are_not_read_back,
    a_log_that_was_only_read_is_trusted,
    pages_are_taken_for_the_first_of_their_prompts,
)


def failure_of(error: BaseException) -> BaseException:
    """The first error inside groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def seed_that_finds(breaks: Breaks) -> int | None:
    """The first seed whose run ends in `Broken`; None if none does. Raises what else a run ends in."""
    for seed in range(MAX_SEEDS):
        with pytest.MonkeyPatch.context() as patch:
            disk = breaks(patch)

            async def main(world: World, disk: type[SimulatedDisk] = disk) -> Tally:
                return await PowerRun(world, rates_of(world.seed), disk=disk).run(STEPS)

            try:
                run_seeded(main, seed)
            except (Broken, ExceptionGroup) as error:
                if isinstance(failure_of(error), Broken):
                    return seed
                raise
    return None


@pytest.mark.timeout(600)  # most are found at once, the rarest after some sixty runs
@pytest.mark.parametrize("breaks", MUTANTS, ids=lambda breaks: breaks.__name__)
def test_a_broken_tier_is_found_out(breaks: Breaks) -> None:
    assert seed_that_finds(breaks) is not None


def test_the_tier_as_it_is_is_not() -> None:
    """The same seeds that find the mutants, without one."""
    for seed in range(10):
        run_seeded(lambda world: PowerRun(world, rates_of(world.seed)).run(STEPS), seed)
