"""The simulated disk fails where a real disk would, keeps what a real disk keeps, and answers as a real one does."""

import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from hicache.tiers.nvme.io import CREATE, OPEN_DIRECTORY, READ_ONLY, READ_WRITE, FileIO, aligned_buffer, write_fully
from tests.tiers.simulated_disk import Fail, Rates, SimulatedDisk

SEEDS = range(200)


def filled(byte: int, num_bytes: int = 8192) -> list[memoryview]:
    buffer = aligned_buffer(num_bytes)
    buffer[:] = bytes([byte]) * num_bytes
    return [buffer]


def disk_with_file(seed: int, *, rates: Rates | None = None, sector_bytes: int = 512) -> tuple[SimulatedDisk, int, int]:
    """A disk with `/d/f`, durable with 8,192 bytes of 1; the descriptors of directory and file."""
    disk = SimulatedDisk(random.Random(seed), sector_bytes=sector_bytes)
    disk.mkdir("/d")
    root = disk.open("/", OPEN_DIRECTORY)
    disk.fsync(root)
    directory = disk.open("/d", OPEN_DIRECTORY)
    file = disk.open("f", READ_WRITE | CREATE, directory_fd=directory)
    assert disk.pwritev(file, filled(1), 0) == 8192
    disk.fdatasync(file)
    disk.fsync(directory)
    assert disk.unsynced() == 0
    disk.rates = rates or Rates()
    return disk, directory, file


def contents(disk: SimulatedDisk, path: str = "/d/f") -> bytes | None:
    return disk.image().get(path)


def after_cut(change: Callable[[SimulatedDisk, int, int], object], *, sector_bytes: int = 512) -> set[bytes | None]:
    """Every content of `/d/f` that a cut after `change` leaves, over many seeds."""
    left = set()
    for seed in SEEDS:
        disk, directory, file = disk_with_file(seed, sector_bytes=sector_bytes)
        change(disk, directory, file)
        disk.power_up()
        assert disk.unsynced() == 0
        left.add(contents(disk))
    return left


# ---- contents


@pytest.mark.parametrize("sync", ["fsync", "fdatasync"])
def test_what_was_synced_is_there_after_a_cut(sync: str) -> None:
    def change(disk: SimulatedDisk, _: int, file: int) -> None:
        disk.pwritev(file, filled(2), 0)
        disk.pwritev(file, filled(3), 8192)
        getattr(disk, sync)(file)

    assert after_cut(change) == {b"\2" * 8192 + b"\3" * 8192}


@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_a_write_that_was_not_synced_is_there_gone_or_torn_at_sectors(sector_bytes: int) -> None:
    left = after_cut(lambda disk, _, file: disk.pwritev(file, filled(2), 0), sector_bytes=sector_bytes)
    assert {b"\1" * 8192, b"\2" * 8192} < left
    for data in left:
        assert data is not None
        for start in range(0, 8192, sector_bytes):
            assert data[start : start + sector_bytes] in (b"\1" * sector_bytes, b"\2" * sector_bytes)
    assert len(left) > (20 if sector_bytes == 512 else 3)


def test_writes_that_were_not_synced_are_reordered() -> None:
    def change(disk: SimulatedDisk, _: int, file: int) -> None:
        disk.pwritev(file, filled(2, 4096), 0)
        disk.pwritev(file, filled(3, 4096), 4096)

    left = after_cut(change)
    assert b"\1" * 4096 + b"\3" * 4096 in left
    assert b"\2" * 4096 + b"\1" * 4096 in left


def test_the_older_of_two_writes_may_be_what_is_left() -> None:
    def change(disk: SimulatedDisk, _: int, file: int) -> None:
        disk.pwritev(file, filled(2), 0)
        disk.pwritev(file, filled(3), 0)

    assert {b"\1" * 8192, b"\2" * 8192, b"\3" * 8192} < after_cut(change)


def test_a_size_that_was_not_synced_may_be_the_old_one_and_holes_are_zeros() -> None:
    left = after_cut(lambda disk, _, file: disk.ftruncate(file, 4096))
    assert {b"\1" * 8192, b"\1" * 4096} <= left
    grown = after_cut(lambda disk, _, file: disk.pwritev(file, filled(2, 4096), 8192))
    assert {b"\1" * 8192, b"\1" * 8192 + b"\2" * 4096, b"\1" * 8192 + b"\0" * 4096} <= grown


def test_truncated_bytes_do_not_come_back() -> None:
    disk, _, file = disk_with_file(0)
    disk.ftruncate(file, 1000)
    disk.ftruncate(file, 8192)
    assert contents(disk) == b"\1" * 1000 + b"\0" * 7192


def test_a_sync_that_failed_cannot_be_made_good_by_another() -> None:
    def change(disk: SimulatedDisk, _: int, file: int) -> None:
        disk.pwritev(file, filled(2), 0)
        disk.rates = Rates(sync_error=1.0)
        with pytest.raises(OSError, match="Input/output"):
            disk.fdatasync(file)
        disk.rates = Rates()
        assert contents(disk) == b"\2" * 8192
        disk.fdatasync(file)

    assert {b"\1" * 8192, b"\2" * 8192} < after_cut(change)


def test_what_is_written_again_after_a_failed_sync_is_durable_with_the_next() -> None:
    def change(disk: SimulatedDisk, _: int, file: int) -> None:
        disk.pwritev(file, filled(2), 0)
        disk.rates = Rates(sync_error=1.0)
        with pytest.raises(OSError, match="Input/output"):
            disk.fdatasync(file)
        disk.rates = Rates()
        disk.pwritev(file, filled(3), 0)
        disk.fdatasync(file)

    assert after_cut(change) == {b"\3" * 8192}


# ---- names


@pytest.mark.parametrize("synced", [False, True])
def test_a_name_is_durable_only_with_its_directory(synced: bool) -> None:
    seen = set()
    for seed in SEEDS:
        disk, directory, _ = disk_with_file(seed)
        file = disk.open("new", READ_WRITE | CREATE, directory_fd=directory)
        write_fully(disk, file, filled(2), 0)
        disk.fsync(file)
        if synced:
            disk.fsync(directory)
        disk.power_up()
        seen.add(contents(disk, "/d/new"))
    assert seen == ({b"\2" * 8192} if synced else {b"\2" * 8192, None})


def test_a_new_directory_is_durable_only_with_its_parent() -> None:
    seen = set()
    for seed in SEEDS:
        disk, _, _ = disk_with_file(seed)
        disk.mkdir("/d/below")
        below = disk.open("/d/below", OPEN_DIRECTORY)
        disk.open("f", READ_WRITE | CREATE, directory_fd=below)
        disk.fsync(below)
        disk.power_up()
        seen.add("/d/below/f" in disk.image())
    assert seen == {False, True}


def test_a_rename_is_whole_or_not_there() -> None:
    seen = set()
    for seed in SEEDS:
        disk, directory, _ = disk_with_file(seed)
        aside = disk.open("g", READ_WRITE | CREATE, directory_fd=directory)
        disk.pwritev(aside, filled(2), 0)
        disk.fsync(aside)
        disk.fsync(directory)
        disk.rename("g", "f", directory_fd=directory)
        assert contents(disk) == b"\2" * 8192
        disk.power_up()
        seen.add((contents(disk), contents(disk, "/d/g")))
    assert seen == {(b"\1" * 8192, b"\2" * 8192), (b"\2" * 8192, None)}


def test_a_rename_before_the_sync_of_its_file_may_leave_an_empty_one() -> None:
    seen = set()
    for seed in SEEDS:
        disk, directory, _ = disk_with_file(seed)
        aside = disk.open("g", READ_WRITE | CREATE, directory_fd=directory)
        disk.pwritev(aside, filled(2), 0)
        disk.rename("g", "f", directory_fd=directory)
        disk.fsync(directory)
        disk.power_up()
        seen.add(contents(disk))
    assert {b"", b"\2" * 8192} <= seen


def test_a_removal_that_was_not_synced_may_be_undone() -> None:
    seen = set()
    for seed in SEEDS:
        disk, directory, _ = disk_with_file(seed)
        disk.unlink("f", directory_fd=directory)
        disk.power_up()
        seen.add(contents(disk))
    assert seen == {None, b"\1" * 8192}


def test_names_of_a_failed_sync_are_neither_durable_nor_lost() -> None:
    for again, left in ((False, {None, b"\1" * 8192}), (True, {None})):
        seen = set()
        for seed in SEEDS:
            disk, directory, _ = disk_with_file(seed, rates=Rates(sync_error=1.0))
            disk.unlink("f", directory_fd=directory)
            with pytest.raises(OSError, match="Input/output"):
                disk.fsync(directory)
            disk.rates = Rates()
            if again:
                disk.fsync(directory)
            disk.power_up()
            seen.add(contents(disk))
        assert seen == left


# ---- the moment of a cut, the end of a process


def test_the_call_in_which_the_power_fails_may_be_half_done_and_nothing_works_after_it() -> None:
    left = set()
    for seed in SEEDS:
        disk, directory, file = disk_with_file(seed)
        moments: list[str] = []
        disk.cut_power_at(2, partial(moments.append, "cut"))
        disk.pwritev(file, filled(2, 4096), 0)
        assert moments == []
        with pytest.raises(OSError, match="Input/output"):
            disk.pwritev(file, filled(3, 4096), 4096)
        assert moments == ["cut"]
        for call, fd in ((disk.fsync, file), (disk.listdir, directory), (disk.close, file)):
            with pytest.raises(OSError, match="Input/output"):
                call(fd)
        disk.power_up()
        left.add(contents(disk))
        with pytest.raises(OSError, match="Bad file"):
            disk.fsync(file)
        assert disk.open("/d", OPEN_DIRECTORY) > file
    assert b"\1" * 4096 + b"\3" * 4096 in left
    assert any(data is not None and 0 < data[4096:].count(3) < 4096 for data in left)


def test_a_sync_in_which_the_power_fails_has_synced_nothing_for_sure() -> None:
    def change(disk: SimulatedDisk, _: int, file: int) -> None:
        disk.cut_power_at(2, lambda: None)
        disk.pwritev(file, filled(2), 0)
        with pytest.raises(OSError, match="Input/output"):
            disk.fsync(file)

    assert {b"\1" * 8192, b"\2" * 8192} < after_cut(change)


def test_a_killed_process_loses_locks_and_descriptors_alone() -> None:
    disk, directory, file = disk_with_file(0)
    disk.lock(directory)
    other = disk.open("/d", OPEN_DIRECTORY)
    with pytest.raises(BlockingIOError):
        disk.lock(other)
    disk.pwritev(file, filled(2), 0)
    disk.kill()
    disk.lock(disk.open("/d", OPEN_DIRECTORY))
    assert contents(disk) == b"\2" * 8192
    assert disk.unsynced() == 16


def test_the_same_seed_leaves_the_same() -> None:
    def left(seed: int) -> dict[str, bytes | None]:
        disk, directory, file = disk_with_file(seed)
        rng = random.Random(seed)
        for number in range(30):
            disk.pwritev(file, filled(number, 4096), 4096 * rng.randrange(4))
            disk.open(f"n{number}", READ_WRITE | CREATE, directory_fd=directory)
        disk.power_up()
        return disk.image()

    assert [left(seed) for seed in range(20)] == [left(seed) for seed in range(20)]
    assert len({str(left(seed)) for seed in range(20)}) > 10


# ---- faults


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("read_error", errno.EIO),
        ("write_error", errno.EIO),
        ("no_space", errno.ENOSPC),
        ("interrupted", errno.EINTR),
        ("sync_error", errno.EIO),
        ("name_error", errno.EIO),
    ],
)
def test_rates_strike_in_their_share_with_their_error(kind: str, number: int) -> None:
    disk, directory, file = disk_with_file(1, rates=Rates(**{kind: 0.25}))
    calls: dict[str, Callable[[], object]] = {
        "read_error": lambda: disk.preadv(file, filled(0), 0),
        "sync_error": lambda: disk.fsync(file),
        "name_error": lambda: disk.open("f", READ_ONLY, directory_fd=directory),
    }
    call = calls.get(kind, lambda: disk.pwritev(file, filled(2), 0))
    seen = [answer(call) for _ in range(400)]
    struck = seen.count(errno.errorcode[number])
    assert 60 < struck == disk.num_faults[kind] < 140
    assert sum(isinstance(each, str) for each in seen) == struck


def test_short_transfers_move_what_they_say() -> None:
    disk, _, file = disk_with_file(2, rates=Rates(short=1.0))
    for direct in (False, True):
        disk.set_direct(file, direct)
        for _ in range(50):
            into = filled(9)
            count = disk.preadv(file, into, 0)
            assert 0 < count < 8192
            assert count % 512 == 0 or not direct
            assert into[0].tobytes() == b"\1" * count + b"\11" * (8192 - count)
    count = disk.pwritev(file, filled(2), 0)
    assert contents(disk) == b"\2" * count + b"\1" * (8192 - count)


def test_a_device_that_lies() -> None:
    disk, _, file = disk_with_file(3, rates=Rates(lost=1.0))
    assert disk.pwritev(file, filled(2), 0) == 8192
    assert contents(disk) == b"\1" * 8192
    disk.rates = Rates(misdirected=1.0)
    assert disk.pwritev(file, filled(2, 4096), 0) == 4096
    assert contents(disk) == b"\1" * 4096 + b"\2" * 4096
    disk.rates = Rates(flip=1.0)
    into = filled(0, 4096)
    assert disk.preadv(file, into, 0) == 4096
    assert sum((byte ^ 1).bit_count() for byte in into[0].tobytes()) == 1
    assert not Rates(read_error=1.0).silent
    assert disk.rates.silent


@pytest.mark.parametrize(
    ("fail", "answers"),
    [
        (Fail.EIO, ("EIO", "EIO", "EIO", "EIO")),
        (Fail.ENOSPC, ("ENOSPC", "EIO", "EIO", "ENOSPC")),
        (Fail.EINTR, ("EINTR", "EINTR", None, None)),
        (Fail.SHORT, ("part", "part", None, None)),
        (Fail.TORN, (8192, 8192, None, None)),
    ],
)
def test_one_call_fails_as_told(fail: Fail, answers: tuple[object, ...]) -> None:
    """A write, a read, a sync and a call about names, each of them the second call from now on."""
    for place, expected in enumerate(answers):
        disk, directory, file = disk_with_file(4)
        calls: list[Callable[[], object]] = [
            partial(disk.pwritev, file, filled(2), 0),
            partial(disk.preadv, file, filled(0), 0),
            partial(disk.fsync, file),
            partial(disk.rename, "f", "r", directory_fd=directory),
        ]
        disk.fail_at(2, fail)
        disk.fstat(file)
        got = answer(calls[place])
        if expected == "part":
            assert isinstance(got, int)
            assert 0 < got < 8192
        else:
            assert got == expected
        struck = disk.num_faults
        assert bool(struck) == (expected is not None and (fail, place) != (Fail.TORN, 1))
        if (fail, place) == (Fail.TORN, 0):
            data = contents(disk)
            assert data is not None
            assert data[:1] + data[-1:] == b"\2\1"
        disk.fsync(file)


def test_a_disk_that_shall_never_fail_does_not() -> None:
    disk, _, file = disk_with_file(5, rates=Rates(write_error=1.0))
    disk.fail_at(1, Fail.EIO)
    disk.never_fail()
    assert disk.pwritev(file, filled(2), 0) == 8192
    assert disk.num_faults == {}


def test_the_disk_is_full_when_its_blocks_are_taken() -> None:
    disk = SimulatedDisk(random.Random(0), capacity_bytes=65_536)
    root = disk.open("/", OPEN_DIRECTORY)
    file = disk.open("f", READ_WRITE | CREATE, directory_fd=root)
    disk.fallocate(file, 40_960)
    assert disk.fstat(file).st_blocks == 80
    assert disk.statvfs("/").f_bavail == 6
    other = disk.open("g", READ_WRITE | CREATE, directory_fd=root)
    with pytest.raises(OSError, match="No space"):
        disk.fallocate(other, 28_672)
    assert disk.pwritev(other, filled(1, 24_576), 0) == 24_576
    with pytest.raises(OSError, match="No space"):
        disk.pwritev(other, filled(1, 512), 24_576)
    assert disk.pwritev(file, filled(1), 0) == 8192
    disk.close(file)
    disk.unlink("f", directory_fd=root)
    assert disk.statvfs("/").f_bavail == 10


def test_direct_io_takes_whole_sectors_only() -> None:
    disk, _, file = disk_with_file(0)
    disk.set_direct(file, True)
    good = aligned_buffer(4096)
    assert disk.preadv(file, [good], 512) == 4096
    for buffer, offset in ((good[1:513], 0), (good[:511], 0), (good, 1)):
        for call in (disk.preadv, disk.pwritev):
            with pytest.raises(OSError, match="Invalid argument"):
                call(file, [buffer], offset)
    disk.set_direct(file, False)
    assert disk.preadv(file, [good[1:8]], 3) == 7


# ---- beside a real file system


def test_no_call_of_the_seam_reaches_the_machine() -> None:
    calls = {name for name in vars(FileIO) if not name.startswith("_")}
    assert calls - set(vars(SimulatedDisk)) == set()


def answer(call: Callable[[], object]) -> object:
    """What a call returns, or the name of its error."""
    try:
        return call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]


@dataclass
class Side:
    """One of the two worlds that are compared."""

    files: FileIO
    path: str
    directory: int
    opened: list[int]


@dataclass(frozen=True)
class Step:
    """One call, drawn at random."""

    what: str
    name: str
    other: str
    flags: int
    place: int
    length: int
    byte: int
    pick: int

    def on(self, side: Side) -> object:
        """Make the call; what it answered, comparable."""
        files, directory = side.files, side.directory
        data = filled(self.byte)[0][: self.length]
        fd = side.opened[self.pick % len(side.opened)] if side.opened else 999_999
        match self.what:
            case "open":
                fd = files.open(self.name, self.flags, directory_fd=directory)
                side.opened.append(fd)
                return "opened"
            case "unlink":
                files.unlink(self.name, directory_fd=directory)
            case "rename":
                files.rename(self.name, self.other, directory_fd=directory)
            case "listdir":
                return sorted(files.listdir(directory))
            case "stat":
                return files.stat(self.name, directory_fd=directory).st_size
            case "mkdir":
                files.mkdir(f"{side.path}/{self.name}")
                files.rmdir(f"{side.path}/{self.name}")
            case "fstat":
                status = files.fstat(fd)
                return status.st_size, status.st_mode, status.st_uid
            case "pwritev":
                return files.pwritev(fd, [data], self.place)
            case "preadv":
                return files.preadv(fd, [data], self.place), bytes(data)
            case "ftruncate":
                files.ftruncate(fd, self.place)
            case "fsync":
                files.fsync(fd)
            case _:
                raise AssertionError(self.what)
        return "done"


NAMES = ("open", "open", "unlink", "rename", "listdir", "stat", "mkdir")
TRANSFERS = ("fstat", "pwritev", "preadv", "ftruncate", "fsync")
FLAGS = (READ_WRITE | CREATE, READ_WRITE, READ_ONLY, READ_WRITE | os.O_CREAT, READ_WRITE | os.O_TRUNC)


@pytest.mark.parametrize("seed", range(12))
def test_answers_are_those_of_a_real_file_system(tmp_path: Path, seed: int) -> None:
    """The same calls on a directory of the machine and on the disk, answer by answer; then the same files."""
    rng = random.Random(seed)
    disk = SimulatedDisk(rng)
    disk.mkdir("/d")
    real = FileIO()
    sides = [
        Side(real, str(tmp_path), real.open(str(tmp_path), OPEN_DIRECTORY), []),
        Side(disk, "/d", disk.open("/d", OPEN_DIRECTORY), []),
    ]
    try:
        for _ in range(300):
            step = Step(
                what=rng.choice(NAMES + TRANSFERS),
                name=rng.choice("abc"),
                other=rng.choice("abc"),
                flags=rng.choice(FLAGS),
                place=rng.randrange(9000),
                length=rng.choice((0, 1, 511, 512, 5000)),
                byte=rng.randrange(256),
                pick=rng.randrange(1000),
            )
            answers = [answer(partial(step.on, side)) for side in sides]
            assert answers[0] == answers[1], step
        image = {path.removeprefix("/d/"): data for path, data in disk.image().items() if path != "/d"}
        assert image == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    finally:
        for side in sides:
            for fd in (*side.opened, side.directory):
                side.files.close(fd)
