"""C21, C22, C23 and C25: caps, instances and what is left behind, over restarts and kills, on the embedded cache."""

import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hicache.errors import BadRequest
from hicache.tier import NVME
from hicache.tiers.nvme.directory import overhead_bytes
from hicache.tiers.nvme.geometry import BLOCK, Geometry, PageShape
from tests.cases.client import LAYOUT, SLOT_BYTES, Client, P, check_at_rest, opened, sequence
from tests.repository import ROOT


class Child:
    """A process with a cache (`tests.cases.child`)."""

    def __init__(
        self,
        directory: Path | str,
        num_pages: int = 64,
        *,
        cwd: Path = ROOT,
        wrap: tuple[str, ...] = (),
        mode: tuple[str, ...] = (),
    ) -> None:
        command = [*wrap, sys.executable, "-m", "tests.cases.child", str(directory), str(num_pages), *mode]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd, env=env
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def ask(self, what: str, letter: int, num_pages: int) -> int:
        """Have it done; the tokens it answers."""
        self.say(f"{what} {letter} {num_pages}")
        return int(self.line())

    def kill(self) -> None:
        self.process.kill()
        assert self._end() == -signal.SIGKILL

    def stop(self) -> int:
        """Let it end by itself; its status."""
        return self._end()

    def _end(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(60)


@contextmanager
def sampled(look: Callable[[], int], every_s: float) -> Iterator[list[int]]:
    """What `look` returns, on a thread, until the block ends, and then once more."""
    samples: list[int] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(every_s):
            samples.append(look())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield samples
    finally:
        done.set()
        sampler.join()
        samples.append(look())


def _bytes_of(directory: Path) -> int:
    """What the directory takes; 0 where it is not made yet."""
    total = 0
    for path in directory.glob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def _cap(num_pages: int) -> int:
    """The most that a directory with room for so many pages may take."""
    capacity_bytes = BLOCK + num_pages * SLOT_BYTES
    return capacity_bytes + overhead_bytes(Geometry.plan(PageShape.of(LAYOUT), capacity_bytes=capacity_bytes))


@pytest.mark.faults
def test_c21_the_cap_holds_over_a_kill_and_a_restart_and_when_it_shrinks(tmp_path: Path) -> None:
    directory = tmp_path / "nvme"
    with sampled(lambda: _bytes_of(directory), 0.01) as samples:
        child = Child(directory, 32)
        assert child.line() == "open"
        for letter in range(32):
            child.ask("insert", letter, 1)
            assert child.ask("persist", letter, 1) == P
            # However fast the machine is, each insert is looked at once.
            samples.append(_bytes_of(directory))
        child.kill()
        assert 32 * SLOT_BYTES <= max(samples) <= _cap(32), "sampled while it was filled, too"
        with opened(directory, device=8, host=8, nvme=32) as cache:
            client = Client(cache)
            assert cache.stats()["tiers"]["nvme"]["used_pages"] == 32
            assert [client.read_there(sequence(letter, P)) for letter in range(32)] == [P] * 32
            for letter in range(32, 364):
                client.insert(sequence(letter, P))
                assert cache.stats()["tiers"]["nvme"]["used_pages"] <= 32
            check_at_rest(cache)
        assert max(samples) <= _cap(32)
        with opened(directory, device=8, host=8, nvme=16) as cache:
            client = Client(cache)
            kept = [letter for letter in range(364) if client.match(sequence(letter, P))]
            assert cache.stats()["tiers"]["nvme"]["used_pages"] == len(kept) <= 16
            assert [client.read_there(sequence(letter, P)) for letter in kept] == [P] * len(kept)
            assert _bytes_of(directory) <= _cap(16)
            for letter in range(400, 440):
                client.insert(sequence(letter, P))
            check_at_rest(cache)
    assert samples[-1] <= _cap(16)
    assert max(samples) <= _cap(32)


@pytest.mark.faults
def test_c22_a_second_instance_is_refused_and_the_first_is_not_disturbed(tmp_path: Path) -> None:
    """Twenty starts of two at the same moment are in `tests/tiers/test_nvme_directory.py`."""
    directory = tmp_path / "nvme"
    (tmp_path / "link").symlink_to(directory)
    first = Child(directory)
    assert first.line() == "open"
    first.ask("insert", 1, 4)
    assert first.ask("persist", 1, 4) == 4 * P
    for path, cwd in ((directory, ROOT), (tmp_path / "link", ROOT), ("nvme", tmp_path)):
        second = Child(path, cwd=cwd)
        told = second.line()
        assert told.startswith("refused")
        assert str(path) in told
        assert str(first.process.pid) in told
        assert second.stop() == 3
    assert first.ask("read", 1, 4) == 4 * P
    first.kill()
    after = Child(directory)
    assert after.line() == "open"
    assert after.ask("read", 1, 4) == 4 * P
    assert after.stop() == 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("nvme", [None, 8])
def test_c23_an_entry_larger_than_the_cap_is_kept_in_part_and_told_so(tmp_path: Path, nvme: int | None) -> None:
    """H = 8, S off and S = 8. D is as large, since that is where a sequence is computed; a longer one does not fit."""
    directory = tmp_path / "nvme" if nvme else None
    long, small = sequence(0, 20 * P), sequence(1, 2 * P)
    with opened(directory, device=24, host=8, nvme=nvme or 0) as cache:
        client = Client(cache)

        def used_pages() -> int:
            return int(cache.stats()["tiers"]["host"]["used_pages"])

        with sampled(used_pages, 0.001) as used:
            client.insert(small)
            before = resident_bytes()
            client.insert(long)
            assert client.read_there(small) == len(small), "a long one has not thrown out what was there"
            for number in range(100):
                letter, pages = 10 + number, 7 if number % 2 else 9
                client.insert(sequence(letter, pages * P))
                assert client.match(sequence(letter, pages * P)) == pages * P, "the newest is always there"
                others = sum(client.match(sequence(other, P)) > 0 for other in range(10, letter))
                assert others > 0 or not number, "something of the others is always there"
        assert 0 < max(used) <= 8
        assert len(used) > 100
        found = client.match(long)
        assert found % P == 0
        assert client.read_there(long) == found
        if nvme:
            client.insert(long)
            persisted = client.persist(long)
            assert persisted <= 8 * P, "told that more is durable than fits"
            assert cache.stats()["tiers"]["nvme"]["used_pages"] <= 8
        assert resident_bytes() - before < 64 << 20
        check_at_rest(cache)
    if nvme:
        with opened(directory, device=24, host=8, nvme=8) as cache:
            assert cache.match(Client(cache).namespace, long).by_tier.get(NVME, 0) >= persisted
            assert Client(cache).read_there(long) >= persisted


def test_c23_a_cap_below_one_page_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="nvme_bytes"):
        opened(tmp_path / "nvme", nvme=-1)
    assert list(tmp_path.iterdir()) == []


# ---- C25: the host tier is a memory file without a name, which goes with its last holder. What killed clients of the
# ---- sidecar leave is looked for in test_sidecar.py.

POOL_BYTES = 16 << 20


def _shared_bytes() -> int:
    """All shared memory of the machine, that of nameless files too."""
    [line] = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:")]
    return int(line.split()[1]) << 10


@pytest.mark.faults
def test_c25_twenty_kills_leave_nothing_behind_and_the_next_start_works(tmp_path: Path) -> None:
    """Others may use shared memory meanwhile, so each kill is measured by itself, and the median counts."""
    parent = Child(tmp_path / "nvme", POOL_BYTES // LAYOUT.page_bytes, mode=("fork",))
    held, left = [], []
    for number in range(21):
        before = _shared_bytes()
        parent.say(str(number))
        pid, tokens = map(int, parent.line().split())
        assert tokens == 4 * P
        held.append(_shared_bytes() - before)
        end = signal.SIGKILL if number < 20 else signal.SIGTERM
        os.kill(pid, end)
        assert int(parent.line()) == (-signal.SIGKILL if number < 20 else 0)
        left.append(_shared_bytes() - before)
    assert parent.stop() == 0
    assert statistics.median(held) > 0.9 * POOL_BYTES, "what is measured is not the pool"
    assert statistics.median(left) < 0.1 * POOL_BYTES


@pytest.mark.faults
@pytest.mark.machine
def test_c25_a_start_with_shared_memory_that_is_full_is_no_bus_error(tmp_path: Path) -> None:
    """In a mount namespace of its own the shared-memory file system is full with a foreign file."""
    script = 'mount -t tmpfs -o size=1m none /dev/shm && head -c 1M /dev/zero > /dev/shm/foreign; exec "$@"'
    child = Child(tmp_path / "nvme", wrap=("unshare", "--mount", "sh", "-c", script, "sh"))
    assert child.line() == "open"
    child.ask("insert", 1, 4)
    assert child.ask("read", 1, 4) == 4 * P
    assert child.stop() == 0
