"""The NVMe tier on file systems of the machine that are full, cut off, read-only, poor, or somebody else's."""

import copy
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from hicache.errors import BadRequest, DeadlineExceeded, TierUnavailable
from hicache.tier import Outcome
from hicache.tiers.nvme import NvmeTier
from tests.faults.machine import call, make_ext4, mounted, shut_down, unmount
from tests.faults.oracle import Oracle, Page
from tests.faults.store import open_store, read_pages, snapshot, write_path
from tests.faults.witness import END_S, UNKNOWN, Witness, start
from tests.repository import ROOT
from tests.tiers.contract import run, write_of
from tests.tiers.faulty_files import PoorFiles

pytestmark = [pytest.mark.faults, pytest.mark.machine]

IMAGE_BYTES: Final = 48 << 20
NUM_IMAGES: Final = 6
"""Power cuts of one run."""


async def remembered(tier: NvmeTier, oracle: Oracle) -> None:
    for digest, record in oracle.records.items():
        tier.remember(digest, record)


async def stored_durably(oracle: Oracle, tier: NvmeTier, num_paths: int = 5) -> list[Page]:
    """Pages, written and durable."""
    await remembered(tier, oracle)
    pages: list[Page] = []
    for _ in range(num_paths):
        pages += await write_path(oracle, tier, 4)
    await tier.sync(tier.accepted, deadline=time.monotonic() + 30)
    return pages


def all_back(oracle: Oracle, tier: NvmeTier, durable: int) -> list[Page]:
    return oracle.restart(tier.recovered(), tier.generation, durable=durable)


# ---- power cuts: copies of a disk's image while it is written to


@pytest.mark.parametrize("seed", range(4))
def test_power_cut_images_hold_what_was_durable(tmp_path: Path, seed: int) -> None:
    """The image is copied without a sync while the process is stopped in the midst of its work; the copy is mounted."""
    rng = random.Random(seed)
    image, cut = tmp_path / "image", tmp_path / "cut"
    make_ext4(image, IMAGE_BYTES)
    with mounted("ext4", tmp_path / "disk", image, "loop") as disk:
        witness = Witness(tmp_path / "expected")
        with start(disk / "store", seed, steps=100_000) as process:
            assert process.stdout is not None
            try:
                for _ in range(NUM_IMAGES):
                    lines = _listen(process, rng.uniform(0.02, 0.25))
                    process.send_signal(signal.SIGSTOP)
                    shutil.copyfile(image, cut)
                    lines += _rest(process)
                    process.send_signal(signal.SIGCONT)
                    witness.note(lines)
                    _check_image(copy.deepcopy(witness), cut, tmp_path / "copy", seed)
            finally:
                process.kill()
        assert witness.num_written > 20


def _listen(process: subprocess.Popen[bytes], seconds: float) -> list[bytes]:
    """Lines that the process tells within so many seconds after it has begun to serve."""
    assert process.stdout is not None
    lines: list[bytes] = []
    until = time.monotonic() + seconds
    while not lines or time.monotonic() < until:
        lines.append(process.stdout.readline())
        assert lines[-1], f"the process has ended with {process.wait(END_S)}"
    return lines


def _rest(process: subprocess.Popen[bytes]) -> list[bytes]:
    """What a stopped process has told and nobody has read yet."""
    assert process.stdout is not None
    fd = process.stdout.fileno()
    os.set_blocking(fd, False)
    try:
        data = process.stdout.read() or b""
    finally:
        os.set_blocking(fd, True)
    return data.splitlines(keepends=True)


def _check_image(witness: Witness, image: Path, where: Path, seed: int) -> None:
    with mounted("ext4", where, image, "loop"), start(where / "store", seed, steps=0) as process:
        assert process.stdout is not None
        lines = list(process.stdout)
        assert process.wait(END_S) == 0
        witness.state_file = witness.state_file.with_suffix(".image")
        witness.note(lines)
        assert witness.clean
    where.rmdir()


# ---- a disk that is full


def test_a_capacity_beyond_the_disk_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "disk", options="size=256k") as disk:
        (disk / "store").mkdir(mode=0o700)
        with pytest.raises(BadRequest, match="capacity_bytes"):
            open_store(disk / "store")
        assert list((disk / "store").iterdir()) == []


def test_without_inodes_the_start_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "disk", options="size=64m,nr_inodes=6") as disk:
        (disk / "store").mkdir(mode=0o700)
        with pytest.raises(TierUnavailable, match="No space"):
            open_store(disk / "store")
        assert list((disk / "store").iterdir()) == []


def test_a_disk_that_others_fill_stops_neither_pages_nor_journal(tmp_path: Path) -> None:
    """Everything was reserved at the start."""

    async def main(disk: Path) -> None:
        oracle = Oracle(random.Random(0))
        async with open_store(disk / "store") as tier:
            _fill(disk)
            pages = await stored_durably(oracle, tier)
            for _ in range(60):
                await write_path(oracle, tier, 1)
                gone = list(oracle.there()[-1].below())
                tier.free(np.array([page.lives[-1].slot for page in gone], np.int32))
                for page in gone:
                    page.lives[-1].freed = tier.accepted
            await tier.sync(tier.accepted, deadline=time.monotonic() + 30)
            durable = tier.durable
        async with open_store(disk / "store") as tier:
            assert set(pages) & set(oracle.there()) <= set(all_back(oracle, tier, durable))

    with mounted("tmpfs", tmp_path / "disk", options="size=8m") as disk:
        run(main(disk))


def test_a_store_shrinks_on_a_disk_that_others_filled(tmp_path: Path) -> None:
    async def main(disk: Path) -> None:
        oracle = Oracle(random.Random(0))
        async with open_store(disk / "store") as tier:
            pages = await stored_durably(oracle, tier, 4)
        _fill(disk)
        async with open_store(disk / "store", num_pages=30) as tier:
            assert tier.recovery.num_pages == len([page for page in pages if page.lives[-1].slot < 30]) > 0
            oracle.restart(tier.recovered(), tier.generation, durable=0, lying=True)
            more = await write_path(oracle, tier, 3)
            await tier.sync(tier.accepted, deadline=time.monotonic() + 30)
        async with open_store(disk / "store", num_pages=30) as tier:
            assert set(more) <= set(oracle.restart(tier.recovered(), tier.generation, durable=0, lying=True))
            assert set(await read_pages(tier, more)) == {Outcome.OK}

    with mounted("tmpfs", tmp_path / "disk", options="size=8m") as disk:
        run(main(disk))


def test_a_full_disk_without_reserved_blocks_fails_writes_alone_and_comes_back(tmp_path: Path) -> None:
    async def main(disk: Path) -> None:
        oracle = Oracle(random.Random(0))
        async with open_store(disk / "store", files=PoorFiles("fallocate")) as tier:
            assert any("fallocate" in note for note in tier.notes)
            pages = await stored_durably(oracle, tier, 2)
            filler = _fill(disk)
            path = oracle.new_path(3)
            slots = tier.allocate(len(path)).tolist()
            writes = [write_of(tier, slot, page.identity) for slot, page in zip(slots, path, strict=True)]
            assert Outcome.ERROR in await tier.write(writes)
            tier.free(np.array(slots, np.int32))
            assert set(await read_pages(tier, pages)) == {Outcome.OK}
            filler.unlink()
            more = await write_path(oracle, tier, 3)
            await tier.sync(tier.accepted, deadline=time.monotonic() + 30)
            durable = tier.durable
        async with open_store(disk / "store") as tier:
            assert {*pages, *more} <= set(all_back(oracle, tier, durable))
            assert set(await read_pages(tier, [*pages, *more])) == {Outcome.OK}

    with mounted("tmpfs", tmp_path / "disk", options="size=8m") as disk:
        run(main(disk))


def _fill(disk: Path) -> Path:
    """Take all that is free."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        try:
            while True:
                file.write(bytes(65_536))
                file.flush()
        except OSError:
            pass
    return filler


# ---- a disk that goes away, or is read only


def test_a_file_system_that_shuts_down_ends_nothing_but_io(tmp_path: Path) -> None:
    image = tmp_path / "image"
    make_ext4(image, IMAGE_BYTES)
    oracle = Oracle(random.Random(0))
    durable = 0

    async def cut_off(disk: Path) -> None:
        nonlocal durable
        tier = open_store(disk / "store")
        pages = await stored_durably(oracle, tier)
        durable = tier.durable
        shut_down(disk)
        outcomes = await read_pages(tier, pages)
        assert set(outcomes) == {Outcome.ERROR}
        await _refuses_new_pages(tier, oracle, pages[-1])
        await tier.close()

    async def again(disk: Path) -> None:
        async with open_store(disk / "store") as tier:
            found = all_back(oracle, tier, durable)
            assert set(await read_pages(tier, found)) == {Outcome.OK}
            assert await write_path(oracle, tier, 2)

    with mounted("ext4", tmp_path / "disk", image, "loop") as disk:
        run(cut_off(disk))
    (tmp_path / "disk").rmdir()
    with mounted("ext4", tmp_path / "disk", image, "loop") as disk:
        run(again(disk))


async def _refuses_new_pages(tier: NvmeTier, oracle: Oracle, leaf: Page) -> None:
    """Writes fail, then the tier is down; neither they nor the removal of a page are called durable."""
    durable = tier.durable
    num_failed = 0
    while tier.down is None:
        assert num_failed < 30, "thirty writes failed and the tier takes more"
        if path := oracle.new_path(1):
            slots = tier.allocate(1)
            assert await tier.write([write_of(tier, int(slots[0]), path[0].identity)]) == [Outcome.ERROR]
            tier.free(slots)
            num_failed += 1
    with pytest.raises(TierUnavailable, match="failed"):
        tier.allocate(1)
    life = leaf.lives[-1]
    tier.free(np.array([life.slot], np.int32))
    # It may come back: its removal cannot be written down any more.
    life.freed = UNKNOWN
    with pytest.raises((TierUnavailable, DeadlineExceeded)):
        await tier.sync(tier.accepted, deadline=time.monotonic() + 0.5)
    assert tier.durable == durable


def test_a_file_system_that_turns_read_only_goes_on_serving(tmp_path: Path) -> None:
    image = tmp_path / "image"
    make_ext4(image, IMAGE_BYTES)
    oracle = Oracle(random.Random(0))

    async def main(disk: Path) -> None:
        tier = open_store(disk / "store")
        pages = await stored_durably(oracle, tier)
        call("mount", "-o", "remount,abort", str(disk))
        assert set(await read_pages(tier, pages)) == {Outcome.OK}
        await _refuses_new_pages(tier, oracle, pages[-1])
        assert set(await read_pages(tier, pages[:-1])) == {Outcome.OK}
        await tier.close()

    with mounted("ext4", tmp_path / "disk", image, "loop") as disk:
        run(main(disk))


def test_a_read_only_file_system_is_refused_at_start_and_stays_as_it_is(tmp_path: Path) -> None:
    image = tmp_path / "image"
    make_ext4(image, IMAGE_BYTES)
    oracle = Oracle(random.Random(0))

    async def fill(disk: Path) -> None:
        async with open_store(disk / "store") as tier:
            await stored_durably(oracle, tier)

    with mounted("ext4", tmp_path / "disk", image, "loop") as disk:
        run(fill(disk))
        call("mount", "-o", "remount,ro", str(disk))
        before = snapshot(disk / "store")
        with pytest.raises(TierUnavailable, match=f"{disk}/store.*[Rr]ead-only"):
            open_store(disk / "store")
        assert snapshot(disk / "store") == before


# ---- a poor file system


def test_a_file_system_without_direct_io_and_reservation_is_used_with_a_note(tmp_path: Path) -> None:
    async def main(disk: Path) -> None:
        oracle = Oracle(random.Random(0))
        async with open_store(disk / "store") as tier:
            notes = " ".join(tier.notes)
            assert "O_DIRECT" in notes
            assert "fallocate" in notes
            await stored_durably(oracle, tier)
            durable = tier.durable
        async with open_store(disk / "store") as tier:
            found = all_back(oracle, tier, durable)
            assert len(found) > 5
            assert set(await read_pages(tier, found)) == {Outcome.OK}

    with mounted("ramfs", tmp_path / "disk") as disk:
        run(main(disk))


# ---- somebody else's


def as_nobody(directory: Path) -> tuple[int, str]:
    """Open the store in a process of a user without rights: its exit status and what it told."""
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
    task = f'{{"directory": "{directory}", "seed": 0, "steps": 30}}'
    done = subprocess.run(
        [*drop, sys.executable, "-m", "tests.faults.victim", task],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    return done.returncode, done.stdout + done.stderr


def test_a_user_without_rights_is_refused_what_is_not_his_and_served_what_is(tmp_path: Path) -> None:
    # Not below tmp_path, into which nobody but its owner may look.
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        home.chmod(0o755)
        (home / "root").mkdir(mode=0o700)
        (home / "open").mkdir()
        (home / "open").chmod(0o777)
        before = snapshot(home)
        for name, why in (("root", "belongs to user 0"), ("open", "belongs to user 0"), ("none", "Permission denied")):
            status, told = as_nobody(home / name)
            assert status == 3, told
            assert '"refused"' in told
            assert f"{home / name}" in told
            assert why in told or "Permission denied" in told
        assert snapshot(home) == before

        (home / "own").mkdir(mode=0o700)
        os.chown(home / "own", 65534, 65534)
        status, told = as_nobody(home / "own")
        assert status == 0, told
        assert '"closed"' in told
        for path in (home / "own").iterdir():
            status_of = path.stat()
            assert (status_of.st_uid, stat.S_IMODE(status_of.st_mode)) == (65534, 0o600)


def test_an_unmounted_directory_leaves_nothing(tmp_path: Path) -> None:
    """The helpers of this file: what they mount is gone afterwards, also when a file is still open there."""
    with mounted("tmpfs", tmp_path / "disk") as disk:
        held = (disk / "file").open("wb")
        unmount(disk)
        assert not (disk / "file").exists()
        held.close()
        call("mount", "-t", "tmpfs", "none", str(disk))
    assert not any(str(tmp_path) in line for line in Path("/proc/mounts").read_text().splitlines())
