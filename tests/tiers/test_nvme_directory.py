"""Which directories the NVMe tier takes, what it makes there, and what it leaves alone."""

import ast
import asyncio
import errno
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from hicache.errors import BadRequest, HicacheError, NoRoom, TierUnavailable
from hicache.layout import KVDtype, KVLayout
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.directory import overhead_bytes
from hicache.tiers.nvme.filling import ASIDE, MANIFEST, MANIFEST_ASIDE, MANIFEST_NEW
from hicache.tiers.nvme.geometry import Geometry
from hicache.tiers.nvme.log import LOG_NAMES
from hicache.tiers.nvme.records import log_bytes
from tests.stamps import identity_chain
from tests.tiers.contract import expect_page, run, store
from tests.tiers.faulty_files import Fault, FaultyFiles, PoorFiles
from tests.tiers.nvme import LANES, capacity_for, shape_of, small_tier

SHAPE = shape_of(12_288)
CAPACITY, SEGMENT = capacity_for(SHAPE, 8, slots_per_segment=3)
SEGMENTS = ["hicache-000000.seg", "hicache-000001.seg", "hicache-000002.seg"]
FILES = [*LOG_NAMES, *SEGMENTS, MANIFEST]
"""Everything that a store has in its directory, in order."""
OVERHEAD_BYTES = overhead_bytes(Geometry.plan(SHAPE, capacity_bytes=3 * CAPACITY, segment_bytes=SEGMENT))
ROOT = Path(__file__).parents[2]


def open_tier(directory: Path | str, **options: Any) -> NvmeTier:
    """A tier of eight pages in three segments."""
    arguments = {"layout": SHAPE, "capacity_bytes": CAPACITY, "segment_bytes": SEGMENT, **LANES, **options}
    return NvmeTier.open(directory, **arguments)


def close(tier: NvmeTier) -> None:
    asyncio.run(tier.close())


def open_and_close(directory: Path | str, **options: Any) -> None:
    close(open_tier(directory, **options))


def picture(directory: Path) -> dict[str, tuple[Any, ...]]:
    """Everything about a directory and what lies in it that opening a store could have altered."""
    found = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        status = path.lstat()
        content = None
        if stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        elif stat.S_ISLNK(status.st_mode):
            content = os.fsencode(path.readlink())
        found[str(path.relative_to(directory))] = (status.st_mode, status.st_ino, status.st_mtime_ns, content)
    return found


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def refused(directory: Path | str, error: type[HicacheError] = TierUnavailable, **options: Any) -> str:
    """The one line with which a directory is refused; nothing in it has been altered."""
    before = picture(Path(directory)) if Path(directory).is_dir() else None
    descriptors = num_descriptors()
    with pytest.raises(error) as caught:
        open_tier(directory, **options)
    assert num_descriptors() == descriptors
    assert (picture(Path(directory)) if Path(directory).is_dir() else None) == before
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- what is made


def test_a_missing_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    previous = os.umask(0o077)
    os.umask(0)
    try:
        tier = open_tier(tmp_path / "new")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert sorted(os.listdir(tmp_path / "new")) == sorted(FILES)
    for name in os.listdir(tmp_path / "new"):
        assert stat.S_IMODE((tmp_path / "new" / name).stat().st_mode) == 0o600
    assert (tier.capacity_pages, tier.num_free, tier.page_bytes) == (8, 8, 12_288)
    assert tier.notes == ()
    close(tier)


def test_the_size_on_disk_stays_within_the_capacity(tmp_path: Path) -> None:
    """C21, for a tier without recovery: old files are gone before new ones are made, so nothing adds up over runs."""
    directory = tmp_path / "store"

    def check(capacity_bytes: int) -> None:
        sizes = [path.stat() for path in directory.iterdir()]
        assert sum(status.st_size for status in sizes) <= capacity_bytes + OVERHEAD_BYTES
        assert sum(status.st_blocks * 512 for status in [*sizes, directory.stat()]) <= capacity_bytes + OVERHEAD_BYTES

    async def main(capacity_bytes: int) -> None:
        tier = open_tier(directory, capacity_bytes=capacity_bytes)
        check(capacity_bytes)
        for turn in range(3):
            slots = tier.allocate(tier.capacity_pages)
            await store(tier, slots, identity_chain(tier.capacity_pages, seed=turn))
            check(capacity_bytes)
            tier.free(slots)
        await tier.close()
        check(capacity_bytes)

    for capacity_bytes in (CAPACITY, CAPACITY, CAPACITY // 2, 3 * CAPACITY, SEGMENT):
        run(main(capacity_bytes))


def test_segments_are_allocated_at_once(tmp_path: Path) -> None:
    open_and_close(tmp_path / "store")
    for name in SEGMENTS:
        status = (tmp_path / "store" / name).stat()
        assert status.st_blocks * 512 >= status.st_size


def test_files_in_the_directory_that_are_not_the_stores_are_left_alone(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    open_and_close(directory)
    (directory / "notes.txt").write_text("mine")
    (directory / "hicache-12.seg").write_text("almost a segment's name")
    (directory / "hicache-000000.seg.bak").write_text("a copy")
    (directory / "folder").mkdir()
    (directory / "folder" / "hicache-000001.seg").write_text("below")
    before = picture(directory)
    open_and_close(directory)
    after = picture(directory)
    for name in ("notes.txt", "hicache-12.seg", "hicache-000000.seg.bak", "folder", "folder/hicache-000001.seg"):
        assert after[name] == before[name]


def test_a_directory_with_only_foreign_files_is_taken_and_they_stay(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"x" * 9000)
    before = picture(tmp_path)["photo.jpg"]
    tmp_path.chmod(0o755)
    open_and_close(tmp_path)
    assert picture(tmp_path)["photo.jpg"] == before
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def to_version_1(directory: Path) -> None:
    """Make it a directory of the version that had no journal."""
    text = b"hicache-nvme 1\n{}\n"
    (directory / MANIFEST).write_bytes(text + b"crc32c %08x\n" % crc32c(text))
    for name in SEGMENTS:
        segment = bytearray((directory / name).read_bytes())
        segment[8:10] = (1).to_bytes(2, "little")
        segment[4092:4096] = crc32c(bytes(segment[:4092])).to_bytes(4, "little")
        (directory / name).write_bytes(segment)
    for name in LOG_NAMES:
        (directory / name).unlink()


@pytest.mark.parametrize("manifest", ["whole", "damaged", "gone"])
def test_a_directory_of_version_1_is_taken_over_and_its_pages_are_gone(tmp_path: Path, manifest: str) -> None:
    directory = tmp_path / "store"
    identities = identity_chain(8)

    async def fill() -> None:
        async with open_tier(directory) as tier:
            await store(tier, tier.allocate(8), identities)

    run(fill())
    assert (directory / SEGMENTS[0]).read_bytes().count(identities[0].tokens)
    to_version_1(directory)
    if manifest == "damaged":
        (directory / MANIFEST).write_bytes(b"hicache-nvme 1\n{}\ncrc32c 00000000\n")
    elif manifest == "gone":
        (directory / MANIFEST).unlink()

    async def check() -> None:
        async with open_tier(directory) as tier:
            for name in SEGMENTS:
                assert identities[0].tokens not in (directory / name).read_bytes()
            assert (tier.num_free, tier.recovery.num_pages) == (8, 0)
            await store(tier, tier.allocate(8), identities)

    run(check())
    assert set(os.listdir(directory)) - {MANIFEST_ASIDE} == set(FILES)


# ---- what is refused


def test_a_budget_below_one_page_or_segment_creates_nothing(tmp_path: Path) -> None:
    """C23: an entry larger than the cap is refused when the cap is known, not when memory is gone."""
    smallest = 4096 + SHAPE.slot_bytes
    directory = tmp_path / "new"
    message = refused(directory, BadRequest, capacity_bytes=smallest - 1, segment_bytes=None)
    assert "capacity_bytes" in message
    assert str(smallest) in message
    message = refused(directory, BadRequest, capacity_bytes=SEGMENT - 1)
    assert "capacity_bytes" in message
    assert str(SEGMENT) in message
    refused(directory, BadRequest, segment_bytes=smallest - 1)
    for name in ("read_lanes", "write_lanes", "layer_lanes"):
        assert name in refused(directory, BadRequest, **{name: 0})
        assert name in refused(directory, BadRequest, **{name: 65})
    assert not directory.exists()
    layout = KVLayout.uniform(num_layers=30, num_kv_heads=3, head_dim=64, dtype=KVDtype.BFLOAT16, page_size=16)
    with pytest.raises(BadRequest, match="capacity_bytes"):
        NvmeTier.open(directory, layout=layout, capacity_bytes=layout.page_bytes)
    assert not directory.exists()


def test_more_pages_than_the_tier_has_are_refused_and_evict_nothing(tmp_path: Path) -> None:
    """C23: one entry of more pages than the cap, then entries below and above it in turn."""

    async def main() -> None:
        async with open_tier(tmp_path / "store") as tier:
            kept = tier.allocate(7)
            identities = identity_chain(7)
            await store(tier, kept, identities)
            for _ in range(100):
                with pytest.raises(NoRoom) as caught:
                    tier.allocate(9)
                assert (caught.value.pages_asked, caught.value.pages_free) == (9, 1)
                tier.free(tier.allocate(1))
            for slot, identity in zip(kept.tolist(), identities, strict=True):
                await expect_page(tier, slot, identity)

    run(main())


def test_a_capacity_beyond_the_free_space_creates_nothing(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    message = refused(tmp_path / "new", BadRequest, capacity_bytes=2 * free, segment_bytes=None)
    assert "capacity_bytes" in message
    assert str(tmp_path) in message
    assert not (tmp_path / "new").exists()
    (tmp_path / "there").mkdir(mode=0o700)
    refused(tmp_path / "there", BadRequest, capacity_bytes=2 * free, segment_bytes=None)
    before = picture(tmp_path)
    refused(tmp_path / "new", BadRequest, capacity_bytes=2 * free, segment_bytes=None)
    assert picture(tmp_path) == before, "not even made and removed again"


def test_space_that_old_segments_give_back_counts_as_free(tmp_path: Path) -> None:
    class Full(FaultyFiles):
        """A file system on which only the store itself has room."""

        def statvfs(self, name: str) -> os.statvfs_result:
            real = super().statvfs(name)
            values = list(real)
            values[4] = 0
            return os.statvfs_result(values)

    refused(tmp_path / "store", BadRequest, files=Full())
    open_and_close(tmp_path / "store")
    open_and_close(tmp_path / "store", files=Full())
    before = picture(tmp_path / "store")
    refused(tmp_path / "store", BadRequest, files=Full(), capacity_bytes=CAPACITY + SEGMENT)
    assert picture(tmp_path / "store") == before


def test_a_parent_that_is_missing_is_not_made(tmp_path: Path) -> None:
    message = refused(tmp_path / "no" / "such")
    assert str(tmp_path / "no" / "such") in message
    assert not (tmp_path / "no").exists()


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert str(tmp_path / "file") in refused(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    message = refused(tmp_path)
    assert str(tmp_path) in message
    assert f"{mode:04o}" in message


def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    class Others(FaultyFiles):
        def fstat(self, fd: int) -> os.stat_result:
            status = list(super().fstat(fd))
            status[stat.ST_UID] += 1
            return os.stat_result(status)

    assert str(tmp_path) in refused(tmp_path, files=Others())


@pytest.mark.parametrize("version", [0, 2, 4, 77])
def test_an_unknown_format_version_is_refused_and_the_directory_stays_as_it_is(tmp_path: Path, version: int) -> None:
    directory = tmp_path / "store"
    open_and_close(directory)
    text = f"hicache-nvme {version}\nsomething new\n".encode()
    (directory / MANIFEST).write_bytes(text + f"crc32c {crc32c(text):08x}\n".encode())
    message = refused(directory)
    assert f"version {version}" in message
    assert str(directory) in message
    # The segments alone say it, too, when the manifest is damaged or gone.
    segment = bytearray((directory / SEGMENTS[1]).read_bytes())
    segment[8:10] = version.to_bytes(2, "little")
    segment[4092:4096] = crc32c(bytes(segment[:4092])).to_bytes(4, "little")
    (directory / SEGMENTS[1]).write_bytes(segment)
    for damage in ("damaged", "gone"):
        (directory / MANIFEST).unlink()
        if damage == "damaged":
            (directory / MANIFEST).write_bytes(b"hicache-nvme 1\n{}\ncrc32c 00000000\n")
        assert f"version {version}" in refused(directory)


def test_a_read_only_file_system_is_refused(tmp_path: Path) -> None:
    class ReadOnly(FaultyFiles):
        def open(self, name: str, flags: int, *, directory_fd: int | None = None) -> int:
            if flags & os.O_CREAT:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return super().open(name, flags, directory_fd=directory_fd)

        def mkdir(self, name: str) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    message = refused(tmp_path / "new", files=ReadOnly())
    assert "Read-only file system" in message
    assert str(tmp_path / "new") in message
    tmp_path.chmod(0o700)
    assert "Read-only file system" in refused(tmp_path, files=ReadOnly())


# ---- damage between two runs


@pytest.mark.parametrize(
    "content",
    [b"", b"hicache-nvme 1\n", b"\0" * 300, b"hicache-nvme 3\n{}\ncrc32c 12345678\n", os.urandom(70_000)],
    ids=["empty", "cut", "zeros", "wrong checksum", "random"],
)
def test_a_damaged_manifest_is_set_aside_and_the_store_starts_cold(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "store"
    open_and_close(directory)
    (directory / MANIFEST).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        open_and_close(directory)
    assert (directory / MANIFEST_ASIDE).read_bytes() == content
    assert MANIFEST_ASIDE in caplog.text
    assert str(directory) in caplog.text
    assert sorted(os.listdir(directory)) == sorted([*FILES, MANIFEST_ASIDE])


@pytest.mark.parametrize("name", [MANIFEST, *SEGMENTS])
@pytest.mark.parametrize("damage", ["removed", "emptied", "cut", "zeroed", "swapped"])
def test_any_damaged_file_leads_to_a_start(tmp_path: Path, name: str, damage: str) -> None:
    directory = tmp_path / "store"
    open_and_close(directory)
    path = directory / name
    match damage:
        case "removed":
            path.unlink()
        case "emptied":
            path.write_bytes(b"")
        case "cut":
            os.truncate(path, path.stat().st_size // 2)
        case "zeroed":
            path.write_bytes(bytes(path.stat().st_size))
        case "swapped":
            other = SEGMENTS[0] if name != SEGMENTS[0] else MANIFEST
            path.rename(tmp_path / "other")
            (directory / other).rename(path)
            (tmp_path / "other").rename(directory / other)

    async def main() -> None:
        async with open_tier(directory) as tier:
            identities = identity_chain(8)
            slots = tier.allocate(8)
            await store(tier, slots, identities)
            for slot, identity in zip(slots.tolist(), identities, strict=True):
                await expect_page(tier, slot, identity)

    run(main())
    if name != MANIFEST and damage != "swapped":
        # Beside a whole manifest a segment is ours however it looks: damage does not eat up the disk.
        assert sorted(os.listdir(directory)) == sorted(FILES)


@pytest.mark.parametrize("name", [MANIFEST, LOG_NAMES[1]])
@pytest.mark.parametrize("taken", ["directory", "file", "link to nothing"])
def test_what_is_set_aside_takes_nobodys_place(
    tmp_path: Path, name: str, taken: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "store"
    open_and_close(directory)
    aside = directory / (name + ASIDE)
    match taken:
        case "directory":
            aside.mkdir()
            (aside / "mine").write_text("mine")
        case "file":
            aside.write_bytes(b"set aside before")
        case _:
            aside.symlink_to(tmp_path / "nothing")
    before = picture(directory)[aside.name]
    for number in (2, 3):
        (directory / name).unlink()
        if name == MANIFEST:
            (directory / name).write_bytes(b"damaged %d" % number)
        else:
            (directory / name).symlink_to(tmp_path / f"{number}")
        found = picture(directory)[name]
        with caplog.at_level(logging.WARNING):
            open_and_close(directory)
        assert picture(directory)[f"{aside.name}-{number}"] == found
        assert f"set aside as {aside.name}-{number}" in caplog.text
    assert picture(directory)[aside.name] == before
    assert sorted(os.listdir(directory)) == sorted([*FILES, *(aside.name + more for more in ("", "-2", "-3"))])


def test_a_directory_with_the_new_manifests_name_is_set_aside(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    open_and_close(directory)
    (directory / MANIFEST_NEW / "mine").mkdir(parents=True)
    open_and_close(directory, capacity_bytes=SEGMENT)
    assert (directory / (MANIFEST_NEW + ASIDE) / "mine").is_dir()
    assert not (directory / MANIFEST_NEW).exists()


def test_segments_of_a_store_that_cannot_be_continued_are_not_removed_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "store"
    open_and_close(directory)
    to_version_1(directory)
    with caplog.at_level(logging.WARNING):
        open_and_close(directory)
    assert f"{directory}: begins empty; removed 3 segments of an earlier store" in caplog.text


def test_a_store_shrinks_on_a_disk_that_is_full(tmp_path: Path) -> None:
    class Full(FaultyFiles):
        """No block is free but those that files give up; the manifest needs one, or more."""

        num_given = 0
        num_needed = 4096

        def ftruncate(self, fd: int, num_bytes: int) -> None:
            self.num_given += os.fstat(fd).st_blocks * 512 - num_bytes
            super().ftruncate(fd, num_bytes)

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if os.readlink(f"/proc/self/fd/{fd}").endswith(".new") and self.num_given < self.num_needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().pwritev(fd, buffers, offset)

    directory = tmp_path / "store"

    async def fill() -> None:
        async with open_tier(directory) as tier:
            tier.remember(identities[0].namespace, b"namespace" + bytes(8))
            await store(tier, tier.allocate(8), identities)

    identities = identity_chain(8)
    run(fill())
    # What was given up in vain is made whole by the next start.
    files = Full()
    files.num_needed = 1 << 40
    with pytest.raises(TierUnavailable, match="No space"):
        open_tier(directory, capacity_bytes=SEGMENT, files=files)
    assert files.num_given

    async def all_are_there() -> None:
        async with open_tier(directory) as tier:
            assert tier.recovery.num_pages == 8

    run(all_are_there())

    async def check() -> None:
        async with open_tier(directory, capacity_bytes=SEGMENT, files=Full()) as tier:
            [found] = tier.recovered()
            assert found.slots.tolist() == [0, 1, 2]
            for slot in range(3):
                await expect_page(tier, slot, identities[slot])

    run(check())
    assert sorted(os.listdir(directory)) == sorted([*LOG_NAMES, SEGMENTS[0], MANIFEST])
    for name in LOG_NAMES:
        assert (directory / name).stat().st_size == log_bytes(Geometry.plan(SHAPE, capacity_bytes=SEGMENT))
    # Nothing is given up for a manifest that a store needs in order to grow.
    before = picture(directory)
    with pytest.raises(TierUnavailable, match="No space"):
        open_tier(directory, capacity_bytes=CAPACITY, files=Full())
    assert {**picture(directory), ".": before["."]} == before


def test_a_file_of_another_user_is_left_alone(tmp_path: Path) -> None:
    class Others(FaultyFiles):
        """The second segment belongs to somebody else."""

        def stat(self, name: str, *, directory_fd: int | None = None, follow: bool = False) -> os.stat_result:
            status = super().stat(name, directory_fd=directory_fd, follow=follow)
            fields = list(status)
            fields[stat.ST_UID] += name == SEGMENTS[1]
            return os.stat_result(fields, {"st_blocks": status.st_blocks})

    directory = tmp_path / "store"
    open_and_close(directory)
    before = picture(directory)[SEGMENTS[1]]
    open_and_close(directory, files=Others())
    assert picture(directory)[SEGMENTS[1]] == before
    assert sorted(os.listdir(directory)) == sorted([*FILES, "hicache-000003.seg"])


def test_the_manifest_becomes_visible_whole(tmp_path: Path) -> None:
    """The directory's own name synced; then written aside, synced, renamed; and the directory synced before the log."""
    calls: list[str] = []

    class Noting(FaultyFiles):
        def __init__(self) -> None:
            super().__init__()
            self.names: dict[int, str] = {}

        def open(self, name: str, flags: int, *, directory_fd: int | None = None) -> int:
            fd = super().open(name, flags, directory_fd=directory_fd)
            self.names[fd] = name
            return fd

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            calls.append(f"write {self.names[fd]}")
            return super().pwritev(fd, buffers, offset)

        def fsync(self, fd: int) -> None:
            calls.append(f"sync {self.names[fd]}")
            super().fsync(fd)

        def rename(self, source: str, target: str, *, directory_fd: int) -> None:
            calls.append(f"rename {source} {target}")
            super().rename(source, target, directory_fd=directory_fd)

    directory = tmp_path / "store"
    open_and_close(directory, files=Noting())
    new = "hicache.manifest.new"
    assert calls[0] == f"sync {tmp_path}"
    assert calls[1:4] == [f"write {new}", f"sync {new}", f"rename {new} {MANIFEST}"]
    assert calls[calls.index(f"write {LOG_NAMES[0]}") - 1] == f"sync {directory}"


def test_a_segment_that_cannot_be_told_to_be_ours_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a manifest only files that begin like a segment are replaced; new segments take other names."""
    (tmp_path / SEGMENTS[1]).write_bytes(b"a film that somebody called so")
    before = picture(tmp_path)[SEGMENTS[1]]

    async def main() -> None:
        async with open_tier(tmp_path) as tier:
            await store(tier, tier.allocate(8), identity_chain(8))

    tmp_path.chmod(0o700)
    with caplog.at_level(logging.WARNING):
        run(main())
    assert picture(tmp_path)[SEGMENTS[1]] == before
    assert SEGMENTS[1] in caplog.text
    assert sorted(os.listdir(tmp_path)) == sorted([*FILES, "hicache-000003.seg"])


# ---- C28: links that lead outside


@pytest.mark.parametrize("replaced", ["segment", "next segment", "manifest", "new manifest", "aside"])
@pytest.mark.parametrize("target", ["file", "directory", "nothing"])
def test_c28_a_symbolic_link_leads_nothing_outside(
    tmp_path: Path, replaced: str, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory, outside = tmp_path / "store", tmp_path / "outside"
    open_and_close(directory)
    outside.mkdir()
    (outside / "file").write_bytes(b"known content " * 1000)
    (outside / "directory").mkdir()
    (outside / "directory" / "below").write_text("more")
    name = {
        "segment": SEGMENTS[1],
        "next segment": "hicache-000003.seg",
        "manifest": MANIFEST,
        "new manifest": "hicache.manifest.new",
        "aside": MANIFEST_ASIDE,
    }[replaced]
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(outside / target)
    if replaced == "aside":
        (directory / MANIFEST).write_bytes(b"damaged")
    before = picture(outside)

    async def main() -> None:
        # One segment more than before, so that the name of the link would be the next.
        async with open_tier(directory, capacity_bytes=CAPACITY + SEGMENT) as tier:
            for turn in range(2):
                slots = tier.allocate(tier.capacity_pages)
                await store(tier, slots, identity_chain(tier.capacity_pages, seed=turn))
                tier.free(slots)

    with caplog.at_level(logging.WARNING):
        run(main())
    assert picture(outside) == before
    for entry in directory.iterdir():
        assert entry.is_symlink() or stat.S_IMODE(entry.stat().st_mode) == 0o600
    if "segment" in replaced:
        assert name in caplog.text
        assert (directory / name).is_symlink()


def test_c28_a_hard_link_is_not_written_through(tmp_path: Path) -> None:
    directory, outside = tmp_path / "store", tmp_path / "outside"
    open_and_close(directory)
    outside.write_bytes(b"known content " * 1000)
    (directory / SEGMENTS[0]).unlink()
    os.link(outside, directory / SEGMENTS[0])
    open_and_close(directory)
    assert outside.read_bytes() == b"known content " * 1000
    assert (directory / SEGMENTS[0]).samefile(outside)


def test_a_pipe_in_the_place_of_a_file_does_not_stop_the_start(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    open_and_close(directory)
    for name in (MANIFEST, SEGMENTS[0]):
        (directory / name).unlink()
        os.mkfifo(directory / name)
    open_and_close(directory)
    assert stat.S_ISFIFO((directory / SEGMENTS[0]).stat().st_mode)


def test_loose_modes_of_our_own_files_do_not_last(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    open_and_close(directory)
    for name in os.listdir(directory):
        (directory / name).chmod(0o666)
    open_and_close(directory)
    assert {stat.S_IMODE((directory / name).stat().st_mode) for name in os.listdir(directory)} == {0o600}


# ---- C22: one instance a directory

HOLD = """
import asyncio, sys
from hicache.errors import HicacheError
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.geometry import PageShape
try:
    tier = NvmeTier.open(sys.argv[1], layout=PageShape((4096, 4096, 4096), 4), capacity_bytes=1 << 20)
except HicacheError as error:
    print("refused", error, flush=True)
    sys.exit(3)
print("open", flush=True)
sys.stdin.read()
asyncio.run(tier.close())
"""


def instance(path: Path | str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    """A process that opens the store, says so or why not, and holds it until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def let_end(process: subprocess.Popen[str]) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    code = process.wait(30)
    process.stdout.close()
    return code


def test_c22_a_second_instance_is_refused_by_whatever_path_it_comes(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    (tmp_path / "link").symlink_to(directory)
    holder = instance(directory)
    try:
        assert first_line(holder) == "open"
        before = picture(directory)
        # By its own path, by a symbolic link, by a relative path and from inside this process.
        others = [instance(directory), instance(tmp_path / "link"), instance("store", cwd=tmp_path)]
        for other in others:
            line = first_line(other)
            assert (line.startswith("refused") and "store" in line) or "link" in line
            assert f"process {holder.pid}" in line
            assert let_end(other) == 3
        assert f"process {holder.pid}" in refused(directory)
        assert picture(directory) == before
    finally:
        assert let_end(holder) == 0
    open_and_close(directory)


def test_c22_two_instances_in_one_process_are_refused_too(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "store")
    assert f"process {os.getpid()}" in refused(tmp_path / "store")
    close(tier)
    open_and_close(tmp_path / "store")


def test_c22_the_directory_is_free_as_soon_as_its_holder_was_killed(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    holder = instance(directory)
    assert first_line(holder) == "open"
    holder.send_signal(signal.SIGKILL)
    assert holder.wait(30) == -signal.SIGKILL
    open_and_close(directory)
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdin.close()
    holder.stdout.close()


@pytest.mark.faults
@pytest.mark.slow
def test_c22_of_two_that_start_at_once_exactly_one_wins(tmp_path: Path) -> None:
    for turn in range(20):
        directory = tmp_path / f"store-{turn}"
        pair = [instance(directory), instance(directory)]
        lines = sorted(first_line(process).split(" ")[0] for process in pair)
        assert lines == ["open", "refused"], f"turn {turn}"
        assert sorted(let_end(process) for process in pair) == [0, 3]


def test_c22_two_that_make_the_directory_at_once_do_not_take_it_from_each_other(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    others: list[NvmeTier] = []

    class OtherIsFirst(FaultyFiles):
        """Another instance comes just before one of our calls."""

        before = ""

        def _strike(self, name: str) -> Fault | None:
            if name == self.before and not others:
                others.append(open_tier(directory))
            return super()._strike(name)

    for before in ("mkdir", "open", "lock"):
        files = OtherIsFirst()
        files.before = before
        with pytest.raises(TierUnavailable, match="in use"):
            open_tier(directory, files=files)
        assert sorted(os.listdir(directory)) == sorted(FILES)
        close(others.pop())
        open_and_close(directory)
        shutil.rmtree(directory)


def test_c22_a_directory_that_another_holds_is_not_removed_by_who_made_it(tmp_path: Path) -> None:
    class Held(FaultyFiles):
        def lock(self, fd: int) -> None:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))

    with pytest.raises(TierUnavailable, match="in use"):
        open_tier(tmp_path / "store", files=Held())
    assert os.listdir(tmp_path / "store") == []


# ---- poor file systems


@pytest.mark.parametrize(
    ("lacks", "notes"),
    [
        (("fallocate",), ["fallocate"]),
        (("set_direct",), ["O_DIRECT"]),
        (("direct read",), ["O_DIRECT"]),
        (("fallocate", "set_direct"), ["fallocate", "O_DIRECT"]),
    ],
)
@pytest.mark.parametrize("page_bytes", [12_288, 10_000])
def test_without_direct_io_or_preallocation_it_works_and_says_so(
    tmp_path: Path, lacks: tuple[str, ...], notes: list[str], page_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        identities = identity_chain(8)
        async with small_tier(
            shape_of(page_bytes), 8, directory=tmp_path / "store", files=PoorFiles(*lacks)
        ) as tier:
            assert len(tier.notes) == len(notes)
            for word in notes:
                assert any(word in note for note in tier.notes)
                assert word in caplog.text
            slots = tier.allocate(8)
            await store(tier, slots, identities)
            for slot, identity in zip(slots.tolist(), identities, strict=True):
                await expect_page(tier, slot, identity)

    with caplog.at_level(logging.WARNING):
        run(main())


# ---- opening goes wrong half-way


def count_calls_of_open(directory: Path) -> int:
    files = FaultyFiles()
    tier = open_tier(directory, files=files)
    count = files.num_calls
    close(tier)
    return count


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC, Fault.EROFS, Fault.EINTR])
@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.faults)], ids=["fresh", "again"])
def test_whatever_call_fails_a_start_succeeds_or_leaves_nothing_behind(
    tmp_path: Path, fault: Fault, again: bool
) -> None:
    probe = tmp_path / "probe"
    if again:
        open_and_close(probe)
    num_calls = count_calls_of_open(probe)
    assert num_calls > 30
    num_refused = 0
    for at in range(1, num_calls + 1):
        directory = tmp_path / f"store-{at}"
        if again:
            open_and_close(directory)
            (directory / "foreign").write_text("mine")
        descriptors = num_descriptors()
        files = FaultyFiles(fault, at)
        refusal = ""
        try:
            open_and_close(directory, files=files)
        except TierUnavailable as error:
            refusal = str(error)
        assert files.hits
        assert num_descriptors() == descriptors
        if refusal:
            num_refused += 1
            assert str(directory) in refusal
            left = set(os.listdir(directory)) if directory.exists() else set()
            # Of an earlier run, files may still be there; of this one, nothing is.
            assert left <= ({*FILES, "foreign"} if again else set())
        # With the fault gone the same directory works.
        open_and_close(directory)
        if again:
            assert (directory / "foreign").read_text() == "mine"
    assert num_refused > 20


# ---- the directory goes away under a running tier


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced by a link"])
def test_a_directory_that_goes_away_under_load_harms_nothing(tmp_path: Path, how: str) -> None:
    directory, outside = tmp_path / "store", tmp_path / "outside"
    outside.mkdir()
    (outside / SEGMENTS[0]).write_bytes(b"not a segment")
    before = picture(outside)

    async def main() -> None:
        async with open_tier(directory) as tier:
            identities = identity_chain(8)
            slots = tier.allocate(8)
            await store(tier, slots[:4], identities[:4])
            if how == "removed":
                shutil.rmtree(directory)
            else:
                directory.rename(tmp_path / "elsewhere")
            if how == "replaced by a link":
                directory.symlink_to(outside)
            await store(tier, slots[4:], identities[4:])
            for slot, identity in zip(slots.tolist(), identities, strict=True):
                await expect_page(tier, slot, identity)

    run(main())
    assert picture(outside) == before


def test_only_the_seam_touches_the_operating_system() -> None:
    """A double can stand in for everything only if nothing else calls the system."""
    sources = sorted((ROOT / "tiers" / "nvme").glob("*.py"))
    assert len(sources) > 5
    for source in sources:
        if source.name == "io.py":
            continue
        for node in ast.walk(ast.parse(source.read_text())):
            match node:
                case ast.Import(names=names):
                    imported = {alias.name for alias in names}
                    assert imported.isdisjoint({"fcntl", "mmap", "ctypes", "time", "shutil", "pathlib"}), source.name
                case ast.Attribute(value=ast.Name(id="os"), attr=attr):
                    assert attr in ("fspath", "stat_result", "PathLike"), f"{source.name} uses os.{attr}"
                case ast.Call(func=ast.Name(id=called)):
                    assert called not in ("open", "Path"), f"{source.name} calls {called}"


def test_an_exception_that_is_no_error_of_the_system_is_not_swallowed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        open_tier(tmp_path / "new", files=FaultyFiles(Fault.RUNTIME, 12))
    assert not (tmp_path / "new").exists()


