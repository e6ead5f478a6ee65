"""C24, C26 and C28: what lies in the directory was cut, garbled, or leads elsewhere.

C26 is `tests/faults/test_damage.py`: hundreds of damaged directories. C28 against the tier, name by name, is in
`tests/tiers/test_nvme_directory.py`; here it is shown on the embedded cache.
"""

import asyncio
import contextlib
import errno
import logging
import os
import random
import shutil
import stat
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from hicache.errors import TierUnavailable
from hicache.tier import Outcome
from hicache.tiers.nvme.geometry import BLOCK
from hicache.tiers.nvme.io import FileIO
from tests.cases.client import SLOT_BYTES, Client, P, opened, seam, sequence
from tests.faults.oracle import Oracle, Page
from tests.faults.store import open_store, read_pages, write_path

NUM_RECORDS = 20
NUM_SLOTS = 32


class Log:
    """A directory with twenty durable pages, one record of the journal each, as a kill leaves it."""

    def __init__(self, place: Path) -> None:
        self.oracle = Oracle(random.Random(0))
        self.directory = place / "twenty"
        self.pages: list[Page] = []
        """In the order of their records."""
        self.ends: list[int] = []
        """Where each record ends in the log."""
        asyncio.run(self._fill(place / "live"))
        [log] = [path for path in _logs(self.directory) if _end_of(path)]
        self.name = log.name

    async def _fill(self, live: Path) -> None:
        async with open_store(live, num_pages=NUM_SLOTS, commit_interval_s=3600.0) as tier:
            for digest, record in self.oracle.records.items():
                tier.remember(digest, record)
            while len(self.pages) < NUM_RECORDS:
                self.pages += await write_path(self.oracle, tier, 1)
                await tier.sync(tier.accepted, deadline=time.monotonic() + 30)
                end = max(map(_end_of, _logs(live)))
                if not self.ends or end > self.ends[-1]:
                    self.ends.append(end)
            shutil.copytree(live, self.directory)

    def start(self, directory: Path) -> int:
        """Start on a damaged copy: the pages up to some record are there, none is wrong; what is inserted then is there
        after another start. Returns how many were there."""

        async def main() -> int:
            oracle = Oracle(random.Random(1))
            for page in self.pages:
                oracle.page_at(self.oracle.path_of(page))
            async with open_store(directory, num_pages=NUM_SLOTS) as tier:
                for digest, record in oracle.records.items():
                    tier.remember(digest, record)
                found = oracle.restart(tier.recovered(), tier.generation, durable=0, lying=True)
                chains = [page.identity.chain for page in self.pages]
                # Those that follow from a prefix of the records, closed under their own parents as they were written.
                assert {page.identity.chain for page in found} == set(chains[: len(found)])
                assert set(await read_pages(tier, found)) <= {Outcome.OK}
                more: list[Page] = []
                while not more:
                    more = await write_path(oracle, tier, 1)
            async with open_store(directory, num_pages=NUM_SLOTS) as tier:
                again = oracle.restart(tier.recovered(), tier.generation, durable=0, lying=True)
                assert {*found, *more} == set(again)
                assert set(await read_pages(tier, again)) == {Outcome.OK}
            return len(found)

        return asyncio.run(main())


def round_up(number: int, to: int) -> int:
    return -(-number // to) * to


def _logs(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.log"))


def _end_of(log: Path) -> int:
    """Where the zeros begin that fill the log up."""
    return len(log.read_bytes().rstrip(b"\0"))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    return Log(tmp_path_factory.mktemp("log"))


def cut_everywhere(log: Log, place: Path, cuts: Iterable[int]) -> None:
    """Cut the log at these positions of its last record: the file ends there, or there are zeros from there on."""
    begin, end = (round_up(end, 8) for end in log.ends[-2:])
    for cut in cuts:
        for to_zeros in (False, True):
            directory = place / "cut"
            shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(log.directory, directory)
            path = directory / log.name
            size = path.stat().st_size
            os.truncate(path, begin + cut)
            if to_zeros:
                os.truncate(path, size)
            # The record's last bytes may be zeros themselves.
            num_pages = log.start(directory)
            assert num_pages == NUM_RECORDS - 1 or (num_pages == NUM_RECORDS and begin + cut >= end - 8), cut


def test_c24_a_log_cut_in_its_last_record_starts_with_the_others(log: Log, tmp_path: Path) -> None:
    assert len(log.ends) == NUM_RECORDS
    assert log.start(shutil.copytree(log.directory, tmp_path / "whole")) == NUM_RECORDS
    length = round_up(log.ends[-1], 8) - round_up(log.ends[-2], 8)
    cut_everywhere(log, tmp_path, (0, 1, length // 2, length - 1))


@pytest.mark.faults
def test_c24_a_log_cut_anywhere_in_its_last_record_starts_with_the_others(log: Log, tmp_path: Path) -> None:
    cut_everywhere(log, tmp_path, range(round_up(log.ends[-1], 8) - round_up(log.ends[-2], 8) + 1))


@pytest.mark.parametrize("tail", ["4 KiB of zeros", "100 random bytes"])
@pytest.mark.parametrize("where", ["behind the records", "at the end of the file"])
def test_c24_garbage_behind_the_records_is_not_read(log: Log, tmp_path: Path, tail: str, where: str) -> None:
    directory = shutil.copytree(log.directory, tmp_path / "store")
    data = bytes(4096) if "zeros" in tail else random.Random(0).randbytes(100)
    with (directory / log.name).open("r+b") as file:
        # Frames are padded to eight bytes.
        file.seek(round_up(log.ends[-1], 8) if "records" in where else (directory / log.name).stat().st_size)
        file.write(data)
    assert log.start(directory) == NUM_RECORDS


@pytest.mark.parametrize("record", [10, 20])
def test_c24_a_flipped_bit_costs_what_follows_and_is_stated(
    log: Log, tmp_path: Path, record: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(record)
    for number in range(8):
        directory = shutil.copytree(log.directory, tmp_path / f"store-{number}")
        place = rng.randrange(8 * round_up(log.ends[record - 2], 8), 8 * (log.ends[record - 1] - 8))
        with (directory / log.name).open("r+b") as file:
            file.seek(place // 8)
            [byte] = file.read(1)
            file.seek(place // 8)
            file.write(bytes([byte ^ 1 << place % 8]))
        caplog.clear()
        assert log.start(directory) == record - 1
        if record < NUM_RECORDS:
            assert "damaged" in caplog.text, "what is lost in the middle is stated"


def test_c24_an_empty_log_starts_cold(log: Log, tmp_path: Path) -> None:
    directory = shutil.copytree(log.directory, tmp_path / "store")
    os.truncate(directory / log.name, 0)
    assert log.start(directory) == 0


def test_c24_an_append_that_fails_half_way_leaves_a_log_that_is_read(tmp_path: Path) -> None:
    class FullOnce(FileIO):
        """One append to a log writes half of its bytes and finds the disk full then."""

        armed = False
        struck = 0

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.armed and os.readlink(f"/proc/self/fd/{fd}").endswith(".log"):
                if self.struck:
                    self.armed = False
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.struck += 1
                data = b"".join(buffers)
                return super().pwritev(fd, [memoryview(data)[: len(data) // 2]], offset)
            return super().pwritev(fd, buffers, offset)

    files, oracle = FullOnce(), Oracle(random.Random(0))

    async def main() -> None:
        async with open_store(tmp_path / "store", num_pages=NUM_SLOTS, files=files) as tier:
            for digest, record in oracle.records.items():
                tier.remember(digest, record)
            first = await write_path(oracle, tier, 3)
            await tier.sync(tier.accepted, deadline=time.monotonic() + 30)
            files.armed = True
            second = await write_path(oracle, tier, 2)
            with contextlib.suppress(TierUnavailable):
                await tier.sync(tier.accepted, deadline=time.monotonic() + 30)
            assert files.struck
            third = await write_path(oracle, tier, 2)
            await tier.sync(tier.accepted, deadline=time.monotonic() + 30)
            durable = tier.durable
        async with open_store(tmp_path / "store", num_pages=NUM_SLOTS) as tier:
            found = oracle.restart(tier.recovered(), tier.generation, durable=durable)
            assert {*first, *second, *third} <= set(found)
            assert set(await read_pages(tier, found)) == {Outcome.OK}

    asyncio.run(main())


# ---- C28


@pytest.mark.parametrize("replaced", ["manifest", "0.log", "1.log", "000000.seg", "000002.seg", "directory"])
def test_c28_a_link_in_the_directory_leads_nothing_outside(
    tmp_path: Path, replaced: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The store has two segments and grows, so that 000002.seg would be its next."""
    directory, outside = tmp_path / "nvme", tmp_path / "outside"
    segment_bytes = BLOCK + 4 * SLOT_BYTES
    with seam(FileIO(), segment_bytes=segment_bytes), opened(directory, nvme=8) as cache:
        Client(cache).insert(sequence(0, 4 * P))
        Client(cache).persist(sequence(0, 4 * P))
    assert len(list(directory.glob("*.seg"))) == 2
    outside.mkdir()
    (outside / "file").write_bytes(b"known content " * 1000)
    (outside / "below").mkdir()
    (outside / "below" / "more").write_text("more")
    name = "sub" if replaced == "directory" else f"hicache{'.' if replaced == 'manifest' else '-'}{replaced}"
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(outside / ("below" if replaced == "directory" else "file"))
    for path in directory.iterdir():
        if not path.is_symlink():
            path.chmod(0o666)
    before = _picture(outside)
    with (
        caplog.at_level(logging.WARNING),
        seam(FileIO(), segment_bytes=segment_bytes),
        opened(directory, nvme=16, device=8, host=8) as cache,
    ):
        client = Client(cache)
        assert client.read(sequence(0, 4 * P)) in range(0, 4 * P + 1, P)
        for letter in range(1, 9):
            client.insert(sequence(letter, 4 * P))
        cache.flush()
    assert _picture(outside) == before
    made = {path.name for path in directory.glob("*.seg") if not path.is_symlink()}
    expected = [f"hicache-{number:06d}.seg" for number in range(5)]
    assert made == set(expected) - {name if name in expected else expected[-1]}, "new files were made beside the link"
    if replaced != "directory":
        assert any(name in line and ("left alone" in line or "set aside" in line) for line in caplog.messages)
    for path in directory.iterdir():
        assert path.is_symlink() or stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def _picture(directory: Path) -> list[tuple[str, int, int, bytes]]:
    found = []
    for path in sorted(directory.rglob("*")):
        status = path.stat()
        found.append((str(path), status.st_size, status.st_mtime_ns, path.read_bytes() if path.is_file() else b""))
    return found
