"""What is said about a store's directory, and that saying it alters nothing."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c

from hicache.errors import TierUnavailable
from hicache.tiers.nvme import inspect_directory
from hicache.tiers.nvme.filling import MANIFEST
from hicache.tiers.nvme.findings import Finding
from hicache.tiers.nvme.inspection import DirectoryReport, FileState
from hicache.tiers.nvme.log import LOG_NAMES
from tests.stamps import identity_chain
from tests.tiers.contract import run, store
from tests.tiers.nvme import SMALL, small_tier, write_raw
from tests.tiers.test_nvme_directory import picture

SEGMENT = "hicache-000001.seg"


def make_store(directory: Path) -> None:
    """Ten slots in three segments; seven pages, one of them freed again."""

    async def main() -> None:
        identities = identity_chain(7)
        async with small_tier(SMALL, 10, directory=directory) as tier:
            tier.remember(identities[0].namespace, b"namespace" + bytes(8))
            slots = tier.allocate(7)
            await store(tier, slots, identities)
            tier.free(slots[6:])

    run(main())


def inspected(directory: Path, *, verify: bool = False) -> DirectoryReport:
    """The report; nothing was altered for it."""
    before = picture(directory)
    report = inspect_directory(directory, verify=verify)
    assert picture(directory) == before
    return report


def test_a_healthy_store(tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    told: list[tuple[int, int]] = []
    report = inspect_directory(tmp_path / "store", verify=True, progress=lambda *each: told.append(each))
    assert inspected(tmp_path / "store").verified is None
    assert report.is_healthy
    assert report.is_store
    assert (report.version, report.holder, report.problems, report.others) == (3, None, [], [])
    assert report.manifest is not None
    assert report.manifest.geometry.num_slots == 10
    assert [each.state for each in report.segments] == [FileState.WHOLE] * 3
    assert [log.file.state for log in report.logs] == [FileState.COUNTS, FileState.RETIRED]
    counts = report.logs[0]
    assert (counts.number, counts.sequence, counts.is_clean, counts.damage) == (1, 8, True, "")
    assert report.recovery is not None
    assert (report.recovery.num_pages, report.recovery.clean_stop, report.sequence) == (6, True, 8)
    assert report.verified is not None
    assert report.verified.findings == {Finding.OK: 6}
    assert report.verified.num_bytes == 6 * SMALL.page_bytes
    assert told == [(done, 6) for done in range(1, 7)]
    assert report.num_bytes >= 10 * SMALL.slot_bytes


def test_a_store_in_use(tmp_path: Path) -> None:
    async def main() -> None:
        async with small_tier(SMALL, 10, directory=tmp_path / "store"):
            report = inspected(tmp_path / "store")
            assert report.holder == os.getpid()
            assert report.is_healthy

    run(main())


def test_damaged_pages_are_named(tmp_path: Path) -> None:
    make_store(tmp_path / "store")

    async def main() -> None:
        async with small_tier(SMALL, 10, directory=tmp_path / "store") as tier:
            write_raw(tier, 1, 0, b"\xff" * 100)
            write_raw(tier, 5, SMALL.header_bytes + 3, b"\xff\xfe")

    run(main())
    report = inspected(tmp_path / "store", verify=True)
    assert report.verified is not None
    assert report.verified.findings == {Finding.OK: 4, Finding.BAD_HEADER: 1, Finding.BAD_PAYLOAD: 1}
    first, second = report.verified.examples
    assert (first.slot, first.segment, first.offset) == (1, "hicache-000000.seg", 4096 + SMALL.slot_bytes)
    assert (second.slot, second.segment, second.finding) == (5, SEGMENT, Finding.BAD_PAYLOAD)
    assert report.problems == ["2 of 6 pages do not verify"]
    assert not report.is_healthy


@pytest.mark.parametrize("what", ["gone", "cut", "zeroed", "foreign", "other store", "other version"])
def test_a_damaged_segment(tmp_path: Path, what: str) -> None:
    directory = tmp_path / "store"
    make_store(directory)
    path = directory / SEGMENT
    expected, pages = FileState.DAMAGED, 6
    if what == "gone":
        path.unlink()
        expected, pages = FileState.MISSING, 4
    elif what == "cut":
        os.truncate(path, 4096 + SMALL.slot_bytes + 100)
        expected, pages = FileState.SHORT, 5
    elif what == "zeroed":
        path.write_bytes(bytes(4096) + path.read_bytes()[4096:])
    elif what == "foreign":
        path.unlink()
        path.symlink_to(tmp_path / "outside")
        expected, pages = FileState.NOT_OURS, 4
    elif what == "other store":
        make_store(tmp_path / "other")
        shutil.copy(tmp_path / "other" / SEGMENT, path)
        expected, pages = FileState.OTHER, 4
    else:
        block = bytearray(path.read_bytes())
        block[8:10] = (9).to_bytes(2, "little")
        block[4092:4096] = crc32c(bytes(block[:4092])).to_bytes(4, "little")
        path.write_bytes(block)
        expected, pages = FileState.OTHER_VERSION, 4
    report = inspected(directory, verify=True)
    assert [each.state for each in report.segments] == [FileState.WHOLE, expected, FileState.WHOLE]
    assert any(SEGMENT in problem for problem in report.problems)
    assert report.recovery is not None
    assert report.recovery.num_pages == pages
    assert report.verified is not None
    assert report.verified.findings[Finding.OK] == pages


@pytest.mark.parametrize("what", ["gone", "damaged", "foreign", "newer", "version 1"])
def test_a_manifest_that_is_not_ours_to_read(tmp_path: Path, what: str) -> None:
    directory = tmp_path / "store"
    make_store(directory)
    (directory / MANIFEST).unlink()
    state: FileState | None = None
    version: int | None = None
    if what == "damaged":
        (directory / MANIFEST).write_bytes(b"hicache-nvme 3\n{}\ncrc32c 00000000\n")
        state = FileState.DAMAGED
    elif what == "foreign":
        (directory / MANIFEST).symlink_to(tmp_path / "outside")
        state = FileState.NOT_OURS
    elif what != "gone":
        version = 1 if what == "version 1" else 4
        text = b"hicache-nvme %d\nmore\n" % version
        (directory / MANIFEST).write_bytes(text + b"crc32c %08x\n" % crc32c(text))
        state = FileState.FORGETFUL if what == "version 1" else FileState.OTHER_VERSION
    report = inspected(directory, verify=True)
    assert (report.manifest_file.state if report.manifest_file else None) is state
    assert report.version == version
    assert report.recovery is None
    assert report.verified is None
    assert report.manifest is None
    assert len(report.problems) == 1
    assert report.is_store
    assert [log.number for log in report.logs] == [1, 0]
    assert report.is_refused is (what == "newer")
    assert [each.state for each in report.segments] == [FileState.SURPLUS] * 3
    # What is said is what a start does.
    if report.is_refused:
        with pytest.raises(TierUnavailable, match="version 4"):
            open_again(directory)
        assert inspected(directory).segments == report.segments
    else:
        assert open_again(directory) == 0
        again = inspected(directory)
        assert [each.state for each in again.segments] == [FileState.WHOLE] * 3
        assert again.manifest is not None


def open_again(directory: Path) -> int:
    """Start the store; pages that are there."""
    found: list[int] = []

    async def main() -> None:
        async with small_tier(SMALL, 10, directory=directory) as tier:
            found.append(tier.recovery.num_pages)

    run(main())
    return found[0]


def test_what_has_only_a_segments_name_is_said_to_stay(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    make_store(directory)
    (directory / MANIFEST).unlink()
    (directory / SEGMENT).write_bytes(b"a film")
    report = inspected(directory)
    assert [each.state for each in report.segments] == [FileState.SURPLUS, FileState.UNCLEAR, FileState.SURPLUS]
    assert open_again(directory) == 0
    assert (directory / SEGMENT).read_bytes() == b"a film"


def test_one_of_several_directories_of_a_tier_has_lost_nothing(tmp_path: Path) -> None:
    """Seven pages of one path, the first two and the last in one directory, the others in the second."""
    directories = [tmp_path / "first", tmp_path / "second"]
    identities = identity_chain(7)

    async def main() -> None:
        for directory, part in zip(directories, ([0, 1, 6], [2, 3, 4, 5]), strict=True):
            async with small_tier(SMALL, 10, directory=directory, is_whole=False) as tier:
                tier.remember(identities[0].namespace, b"namespace" + bytes(8))
                await store(tier, tier.allocate(len(part)), [identities[place] for place in part])

    run(main())
    for directory, (connected, continuing) in zip(directories, ((2, 1), (0, 4)), strict=True):
        report = inspected(directory, verify=True)
        assert report.is_healthy
        assert report.recovery is not None
        assert (report.recovery.num_pages, report.num_continuing) == (connected, continuing)
        assert report.recovery.dropped == {}
        assert report.verified is not None
        assert report.verified.findings == {Finding.OK: connected + continuing}


@pytest.mark.parametrize("what", ["gone", "zeroed", "flipped", "cut", "foreign", "garbled tail"])
def test_a_damaged_log(tmp_path: Path, what: str) -> None:
    directory = tmp_path / "store"
    make_store(directory)
    path = directory / LOG_NAMES[0]
    used = inspect_directory(directory).logs[0].used_bytes
    data = bytearray(path.read_bytes())
    pages, num_problems = 0, 1
    if what == "gone":
        path.unlink()
        num_problems = 2
    elif what == "zeroed":
        path.write_bytes(bytes(len(data)))
    elif what == "flipped":
        # In the first frame: what follows it cannot be used.
        data[4096 + 60] ^= 1
        path.write_bytes(data)
    elif what == "cut":
        path.write_bytes(data[: used - 10])
        pages = 6
    elif what == "foreign":
        path.unlink()
        path.mkdir()
        num_problems = 2
    else:
        data[used:] = os.urandom(len(data) - used)
        path.write_bytes(data)
        pages, num_problems = 6, 0
    report = inspected(directory, verify=True)
    assert report.recovery is not None
    assert (report.recovery.num_pages, len(report.problems)) == (pages, num_problems), report.problems
    assert report.verified is not None
    assert report.verified.findings[Finding.OK] == pages


def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    report = inspected(tmp_path)
    assert not report.is_store
    assert report.is_healthy
    assert report.others == ["folder", "photo.jpg"]
    with pytest.raises(TierUnavailable, match="nothing"):
        inspect_directory(tmp_path / "nothing")
    with pytest.raises(TierUnavailable, match=r"photo\.jpg"):
        inspect_directory(tmp_path / "photo.jpg")


def test_segments_that_the_manifest_does_not_name(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    make_store(directory)
    shutil.copy(directory / SEGMENT, directory / "hicache-000007.seg")
    report = inspected(directory)
    assert [each.state for each in report.segments] == [FileState.WHOLE] * 3 + [FileState.SURPLUS]
    assert report.is_healthy


def test_random_damage_is_always_described(tmp_path: Path) -> None:
    """Whatever is flipped, cut or swapped: there is a report, and what verifies are pages that were written."""
    make_store(tmp_path / "store")
    random = np.random.default_rng(7)
    names = sorted(os.listdir(tmp_path / "store"))
    for turn in range(60):
        directory = Path(shutil.copytree(tmp_path / "store", tmp_path / f"copy-{turn}"))
        path = directory / names[random.integers(len(names))]
        data = bytearray(path.read_bytes())
        match random.integers(4):
            case 0:
                for place in random.integers(0, min(len(data), 8192), 3):
                    data[place] ^= 1 << random.integers(8)
                path.write_bytes(data)
            case 1:
                path.write_bytes(data[: random.integers(len(data))])
            case 2:
                path.write_bytes(random.bytes(len(data)))
            case _:
                other = directory / names[random.integers(len(names))]
                path.write_bytes(other.read_bytes())
                other.write_bytes(data)
        report = inspected(directory, verify=True)
        if report.verified is not None:
            assert report.verified.findings[Finding.OK] <= 6
        shutil.rmtree(directory)
