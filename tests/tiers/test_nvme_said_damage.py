"""Whatever costs durable pages is said: in the log of the cache that starts without them, and by the doctor before. And
what a crash leaves is no damage."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache.tiers.nvme.log import LOG_NAMES
from hicache.tools.cli import main
from tests.cases.client import SLOT_BYTES, Client, P, opened, seam, sequence
from tests.tiers.faulty_files import FaultyFiles

LENGTH = 8 * P
DOCUMENTS = range(5)
NUM_SLOTS = 64
MANIFEST = "hicache.manifest"
SEGMENT = "hicache-000000.seg"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store with forty durable pages."""
    directory = tmp_path_factory.mktemp("damage") / "store"
    with opened(directory, nvme=NUM_SLOTS) as cache:
        client = Client(cache)
        for document in DOCUMENTS:
            client.insert(sequence(document, LENGTH))
            assert client.persist(sequence(document, LENGTH)) == LENGTH
    return directory


def copy_of(store: Path, target: Path) -> Path:
    shutil.copytree(store, target)
    target.chmod(0o700)
    return target


def remove(*names: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    return damage


def zero(*names: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        for name in names:
            (directory / name).write_bytes(bytes((directory / name).stat().st_size))

    return damage


def cut(num_bytes: int, *names: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        for name in names:
            os.truncate(directory / name, num_bytes)

    return damage


def swap_segment(directory: Path) -> None:
    """The segment of another store in the place of ours."""
    other = directory.parent / "other"
    with opened(other, nvme=NUM_SLOTS) as cache:
        assert Client(cache).insert(sequence(9, LENGTH)) == 0
    shutil.copyfile(other / SEGMENT, directory / SEGMENT)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "no manifest": remove(MANIFEST),
    "an empty manifest": cut(0, MANIFEST),
    "half a manifest": cut(100, MANIFEST),
    "no logs": remove(*LOG_NAMES),
    "zeroed logs": zero(*LOG_NAMES),
    "empty logs": cut(0, *LOG_NAMES),
    "one log gone, one zeroed": lambda directory: (zero(LOG_NAMES[0])(directory), remove(LOG_NAMES[1])(directory))[0],
    "no segment": remove(SEGMENT),
    "half a segment": cut(4096 + 10 * SLOT_BYTES, SEGMENT),
    "another store's segment": swap_segment,
    **{f"logs of {size} bytes": cut(size, *LOG_NAMES) for size in (1000, 4096, 4100, 4200, 5000, 6001, 8192, 9000)},
}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", DAMAGES)
def test_pages_that_do_not_come_back_are_spoken_of(
    name: str, store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy_of(store, tmp_path / "store")
    DAMAGES[name](directory)
    assert main(["doctor", str(directory)]) == 1
    caplog.clear()
    with opened(directory, nvme=NUM_SLOTS) as cache:
        assert cache.recovery.pages < len(DOCUMENTS) * LENGTH // P, "nothing was lost"
        said = warnings_of(caplog)
        assert any(str(directory) in line for line in said), said
        client = Client(cache)
        client.insert(sequence(8, LENGTH))
        assert client.persist(sequence(8, LENGTH)) == LENGTH
    caplog.clear()
    with opened(directory, nvme=NUM_SLOTS) as cache:
        assert Client(cache).read(sequence(8, LENGTH)) == LENGTH
        assert warnings_of(caplog) == [], "said once"


@pytest.mark.parametrize("nvme", [16, 200])
def test_another_capacity_is_no_damage(
    nvme: int, store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy_of(store, tmp_path / "store")
    for size in (nvme, NUM_SLOTS):
        with opened(directory, nvme=size) as cache:
            assert cache.recovery.pages > 0
        assert main(["doctor", str(directory)]) == 0
    assert warnings_of(caplog) == []


class Copying(FaultyFiles):
    """Keeps what a process that is killed at a call would leave, for each call that alters a directory."""

    def __init__(self, directory: Path, after: Path) -> None:
        super().__init__(counts=lambda name: name in ("unlink", "rename", "fallocate", "pwritev", "fsync", "fdatasync"))
        self._directory = directory
        self._after = after
        self.num_kept = 0

    def _strike(self, name: str) -> None:
        if self.counts(name) and self._directory.exists():
            with self._lock:
                shutil.copytree(self._directory, self._after / str(self.num_kept))
                (self._after / str(self.num_kept)).chmod(0o700)
                self.num_kept += 1


@pytest.mark.parametrize("before", ["nothing", "a store", "a smaller store", "a larger store"])
def test_what_a_crash_leaves_is_no_damage(
    before: str, store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "store"
    if before != "nothing":
        copy_of(store, directory)
        num_pages = {"a store": NUM_SLOTS, "a smaller store": 48, "a larger store": 100}[before]
        with opened(directory, nvme=num_pages):
            pass
    files = Copying(directory, tmp_path / "after")
    with seam(files), opened(directory, nvme=NUM_SLOTS) as cache:
        client = Client(cache)
        client.insert(sequence(7, LENGTH))
        client.persist(sequence(7, LENGTH))
    assert files.num_kept > 5
    assert warnings_of(caplog) == []
    for each in range(files.num_kept):
        with opened(tmp_path / "after" / str(each), nvme=NUM_SLOTS) as cache:
            assert before == "nothing" or cache.recovery.pages > 0
        assert warnings_of(caplog) == [], f"at call {each}"
