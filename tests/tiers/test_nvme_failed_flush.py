"""A flush of the device that fails, whichever it is, costs one request an error at most: what comes after it is durable
again, without anybody writing something else first."""

import shutil
from pathlib import Path

import pytest

from hicache.errors import TierUnavailable
from hicache.namespace import Namespace
from hicache.writing import Flushed
from tests.cases.client import LAYOUT, Client, P, check_at_rest, opened, seam, sequence
from tests.tiers.faulty_files import Fault, FaultyFiles

LENGTH = 8 * P


def flushes(name: str) -> bool:
    return name in ("fdatasync", "fsync")


def survives(directory: Path, after: Path, letters: str) -> None:
    """What a process that was killed now would leave behind has these documents, whole and right."""
    shutil.copytree(directory, after)
    after.chmod(0o700)
    with opened(after) as cache:
        for letter in letters:
            assert Client(cache).read(sequence(ord(letter), LENGTH)) == LENGTH


@pytest.mark.parametrize("at", range(1, 5))
def test_one_flush_that_fails_is_made_good(at: int, tmp_path: Path) -> None:
    files = FaultyFiles(counts=flushes)
    with seam(files), opened(tmp_path / "store") as cache:
        client = Client(cache)
        client.insert(sequence(ord("a"), LENGTH))
        assert client.persist(sequence(ord("a"), LENGTH)) == LENGTH
        client.insert(sequence(ord("b"), LENGTH))
        files.arm(Fault.EIO, at)
        for letter in "bab":
            assert client.persist(sequence(ord(letter), LENGTH)) == LENGTH
        files.heal()
        assert cache.flush(Namespace(model="none", layout=LAYOUT)) == Flushed(num_held=0, is_durable=True)
        survives(tmp_path / "store", tmp_path / "after", "ab")
        check_at_rest(cache)


def test_flushes_that_fail_for_a_while_fail_requests_for_that_while(tmp_path: Path) -> None:
    files = FaultyFiles(counts=flushes)
    with seam(files), opened(tmp_path / "store") as cache:
        client = Client(cache)
        client.insert(sequence(ord("a"), LENGTH))
        assert client.persist(sequence(ord("a"), LENGTH)) == LENGTH
        client.insert(sequence(ord("b"), LENGTH))
        files.arm(Fault.EIO, 1, lasting=True)
        with pytest.raises(TierUnavailable):
            client.persist(sequence(ord("b"), LENGTH))
        assert client.read(sequence(ord("b"), LENGTH)) == LENGTH, "the faster copies are still there"
        files.heal()
        assert client.persist(sequence(ord("b"), LENGTH)) == LENGTH
        assert client.persist(sequence(ord("a"), LENGTH)) == LENGTH
        survives(tmp_path / "store", tmp_path / "after", "ab")
        check_at_rest(cache)


def test_pages_that_a_failed_flush_took_do_not_keep_a_removal_from_being_durable(tmp_path: Path) -> None:
    files = FaultyFiles(counts=flushes)
    with seam(files), opened(tmp_path / "store") as cache:
        client = Client(cache)
        client.insert(sequence(ord("a"), LENGTH))
        assert client.persist(sequence(ord("a"), LENGTH)) == LENGTH
        client.insert(sequence(ord("b"), LENGTH))
        files.arm(Fault.EIO, 1)
        client.persist(sequence(ord("b"), LENGTH))
        assert files.hits, "no flush failed"
        files.heal()
        assert cache.flush() == Flushed(num_held=0, is_durable=True)
        shutil.copytree(tmp_path / "store", tmp_path / "after")
        (tmp_path / "after").chmod(0o700)
        with opened(tmp_path / "after") as after:
            assert after.recovery.pages == 0


def test_one_flush_that_fails_in_a_cache_of_two_directories(tmp_path: Path) -> None:
    files = FaultyFiles(counts=flushes)
    directories = [tmp_path / "one", tmp_path / "two"]
    with seam(files), opened(directories) as cache:  # type: ignore[arg-type]  # the helper's hint names one directory
        client = Client(cache)
        for at, letter in enumerate("abc", 1):
            client.insert(sequence(ord(letter), LENGTH))
            files.arm(Fault.EIO, at)
            client.persist_if_up(sequence(ord(letter), LENGTH))
            files.heal()
            assert client.persist(sequence(ord(letter), LENGTH)) == LENGTH
        check_at_rest(cache)
    with opened(directories) as cache:  # type: ignore[arg-type]  # as above
        for letter in "abc":
            assert Client(cache).read(sequence(ord(letter), LENGTH)) == LENGTH
