"""C05, C10, C11, C13: I/O that is slow or fails, and what may be seen after it. Against the embedded cache."""

import errno
import os
import threading
import time
from pathlib import Path

from hicache.tier import NVME
from tests.cases.client import SLOT_BYTES, Client, P, SegmentFiles, check_at_rest, opened, seam, sequence

A, B = sequence(0, 4 * P), sequence(1, 4 * P)
ONE_LANE = {"read_lanes": 1, "write_lanes": 1}


def fail(number: int = errno.EIO) -> None:
    raise OSError(number, os.strerror(number))


def test_c05_pages_are_read_from_host_while_they_are_written_to_disk(tmp_path: Path) -> None:
    """The device is as slow as can be: it stops after three of eight pages, until everybody has read."""
    files, gate, stopped = SegmentFiles(), threading.Event(), threading.Event()

    def stop_after_three(number: int) -> None:
        if number > 3:
            stopped.set()
            assert gate.wait(60)

    long = sequence(0, 8 * P)
    with seam(files), opened(tmp_path / "nvme", device=16, host=16) as cache:
        client = Client(cache)
        client.insert(long)
        files.count_from_here()
        files.before_write = stop_after_three
        durable: list[int] = []
        demotion = threading.Thread(target=lambda: durable.append(client.persist(long)))
        demotion.start()
        assert stopped.wait(60)
        for _ in range(5):
            assert Client(cache).read_there(long) == 8 * P
        assert durable == [], "a read waited for the demotion"
        gate.set()
        demotion.join()
        assert durable == [8 * P]
        check_at_rest(cache)
    with opened(tmp_path / "nvme") as cache:
        assert cache.match(Client(cache).namespace, long).by_tier == {NVME: 8 * P}
        assert Client(cache).read_there(long) == 8 * P


def test_c10_a_store_that_failed_is_offered_up_to_the_page_that_failed(tmp_path: Path) -> None:
    files = SegmentFiles()
    with seam(files, **ONE_LANE):
        with opened(tmp_path / "nvme") as cache:
            client = Client(cache)
            client.insert(A)
            files.count_from_here()
            # Four pages in one call; it fails, and so does the third of the four that then are written one by one.
            files.before_write = lambda number: fail() if number in (1, 4) else None
            client.persist(A)
            assert cache.stats()["tiers"]["nvme"]["counters"]["write.device_error"] == 1
            assert cache.match(client.namespace, A).num_tokens == 4 * P
            files.before_write = lambda _number: None
        with opened(tmp_path / "nvme") as cache:
            client = Client(cache)
            assert client.match(A) == client.read_there(A) == 2 * P
            client.insert(A)
            assert client.persist(A) == 4 * P
            check_at_rest(cache)
        with opened(tmp_path / "nvme") as cache:
            assert Client(cache).match(A) == Client(cache).read_there(A) == 4 * P


def persisted(directory: Path, *letters: list[int]) -> None:
    """A directory with these sequences, of which nothing is anywhere else."""
    with opened(directory) as cache:
        for tokens in letters:
            Client(cache).insert(tokens)
            assert Client(cache).persist(tokens) == len(tokens)


def test_c11_a_file_that_was_cut_serves_the_pages_before_the_cut(tmp_path: Path) -> None:
    """Pages 0 and 1 are whole, page 2 is half there, page 3 is gone. The file is cut while the cache runs: at a start
    its length is seen, and what lies behind the end is not offered at all (below)."""
    persisted(tmp_path / "nvme", A)
    [segment] = (tmp_path / "nvme").glob("*.seg")
    with opened(tmp_path / "nvme") as cache:
        client = Client(cache)
        assert client.match(A) == 4 * P
        os.truncate(segment, 4096 + 2 * SLOT_BYTES + SLOT_BYTES // 2 + 512)
        assert client.read(A) == 2 * P
        assert client.match(A) == 2 * P
        assert cache.stats()["tiers"]["nvme"]["counters"]["read.short"] >= 1
        client.insert(B)
        assert client.read(B) == 4 * P
        check_at_rest(cache)


def test_c11_a_file_that_was_cut_before_the_start_serves_the_pages_before_the_cut(tmp_path: Path) -> None:
    persisted(tmp_path / "nvme", A)
    [segment] = (tmp_path / "nvme").glob("*.seg")
    os.truncate(segment, 4096 + 2 * SLOT_BYTES + SLOT_BYTES // 2 + 512)
    with opened(tmp_path / "nvme") as cache:
        client = Client(cache)
        assert client.read(A) == 2 * P
        client.insert(A)
        assert client.read_there(A) == 4 * P
        check_at_rest(cache)


def test_c11_half_a_read_is_continued_and_a_failed_neighbour_harms_nobody(tmp_path: Path) -> None:
    persisted(tmp_path / "nvme", A, B)

    class Halves(SegmentFiles):
        def preadv(self, fd, buffers, offset):  # type: ignore[no-untyped-def]  # as the method it stands for
            if self._is_page(fd, offset) and sum(map(len, buffers)) > 512 and not self.num_reads % 2:
                self.num_reads += 1
                half = sum(map(len, buffers)) // 2 // 512 * 512
                first = []
                for buffer in buffers:
                    first.append(buffer[:half])
                    half -= len(first[-1])
                return super(SegmentFiles, self).preadv(fd, [part for part in first if len(part)], offset)
            return super().preadv(fd, buffers, offset)

    with seam(Halves(), **ONE_LANE), opened(tmp_path / "nvme") as cache:
        assert Client(cache).read_there(A) == 4 * P
    files = SegmentFiles()
    with seam(files, **ONE_LANE), opened(tmp_path / "nvme") as cache:
        client = Client(cache)
        files.count_from_here()
        files.before_read = lambda number: fail() if number <= 2 else None
        client.read(B)
        assert client.read_there(A) == 4 * P
        assert client.read_there(B) == 4 * P, "an error that passes is no reason to forget a page"
        check_at_rest(cache)


def test_c13_what_could_not_be_written_down_is_not_counted_as_being_there(tmp_path: Path) -> None:
    """D and H hold four pages each and S takes none, so that what has to leave H is gone. What `match` says of A is
    there; once S works again A survives in it. (`tests/hicache/test_cache.py` has the case with leases in H.)"""
    files = SegmentFiles()
    with seam(files), opened(tmp_path / "nvme", device=4, host=4) as cache:
        client = Client(cache)
        files.before_write = lambda _number: fail(errno.ENOSPC)
        client.insert(A)
        letter = 2
        while client.match(A) == 4 * P:
            assert letter < 20, "eight pages of room hold all that was inserted"
            client.insert(sequence(letter, 2 * P))
            letter += 1
        assert client.read(A) == client.match(A) < 4 * P
        assert cache.stats()["tiers"]["nvme"]["used_pages"] == 0
        files.before_write = lambda _number: None
        # A device that failed is tried again after a second.
        until = time.monotonic() + 30
        while client.persist_if_up(A) < 4 * P:
            assert time.monotonic() < until
            client.insert(A)
        check_at_rest(cache)
    with opened(tmp_path / "nvme") as cache:
        assert Client(cache).read_there(A) == 4 * P
