"""What lanes leave to finishers: which thread does it, with which memory, and who waits for it."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

import pytest

from hicache.clock import ManualClock
from hicache.tier import PageRead
from hicache.tiers.nvme.findings import Finding
from hicache.tiers.nvme.io import Scratch
from hicache.tiers.nvme.lanes import Lanes
from hicache.tiers.nvme.segment import PageGet, SegmentFile
from tests.stamps import identity_chain, stamp
from tests.tiers.contract import run, store
from tests.tiers.faulty_files import HeldFiles
from tests.tiers.nvme import SMALL, small_tier

WAIT_S = 30.0


class TwoParts:
    """A job that notes on which thread and with which memory its parts were done, and each of which may be held."""

    def __init__(self, *, rest_waits_for: threading.Event | None = None, error: Exception | None = None) -> None:
        self.may_run = threading.Event()
        self.has_run = threading.Event()
        self.threads: list[str] = []
        self.scratch: Scratch | None = None
        self.landed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._rest_waits_for = rest_waits_for
        self._error = error

    def run(self, scratch: Scratch) -> Callable[[], None]:
        self.threads.append(threading.current_thread().name)
        self.scratch = scratch
        assert self.may_run.wait(WAIT_S)
        self.has_run.set()
        return self._rest

    def _rest(self) -> None:
        self.threads.append(threading.current_thread().name)
        if self._rest_waits_for is not None:
            assert self._rest_waits_for.wait(WAIT_S), "the lane did the rest before it began the next job"
        if self._error is not None:
            raise self._error

    def land(self, error: Exception | None) -> None:
        self.landed.set_result(error)


def one_lane() -> Lanes:
    return Lanes("one", num_threads=1, num_finishers=1, scratch=lambda: Scratch(SMALL, 1), clock=ManualClock())


def test_the_next_job_begins_before_the_last_one_is_finished() -> None:
    async def main() -> None:
        lanes = one_lane()
        second, third = TwoParts(), TwoParts()
        first = TwoParts(rest_waits_for=second.has_run)
        for job in (first, second, third):
            lanes.submit(job)
        for job in (first, second, third):
            job.may_run.set()
        assert [await job.landed for job in (first, second, third)] == [None] * 3
        lane, finisher = "hicache-one-0", "hicache-one-rest-0"
        assert first.threads == second.threads == [lane, finisher]
        assert third.threads == [lane, lane], "with no job waiting"
        assert first.scratch is not second.scratch, "the first page's header was there still"
        await lanes.stop()

    run(main())


def test_what_is_left_is_done_before_the_threads_end() -> None:
    async def main() -> None:
        lanes, go = one_lane(), threading.Event()
        first, second = TwoParts(rest_waits_for=go), TwoParts()
        lanes.submit(first)
        lanes.submit(second)
        first.may_run.set()
        second.may_run.set()
        await second.landed
        async with asyncio.TaskGroup() as tasks:
            stopping = tasks.create_task(lanes.stop())
            await asyncio.sleep(0)
            assert not first.landed.done()
            assert not stopping.done()
            go.set()
        assert first.landed.done()
        assert not [each for each in threading.enumerate() if each.name.startswith("hicache-one")]

    run(main())


def test_a_lane_that_waits_for_memory_is_not_taken_for_a_device_that_hangs() -> None:
    made: list[Scratch] = []

    def scratch() -> Scratch:
        made.append(Scratch(SMALL, 1))
        return made[-1]

    async def main() -> None:
        lanes = Lanes("one", num_threads=1, num_finishers=1, scratch=scratch, clock=ManualClock())
        go = threading.Event()
        jobs = [TwoParts(rest_waits_for=go), TwoParts(), TwoParts()]
        for job in jobs:
            lanes.submit(job)
            job.may_run.set()
        assert await asyncio.to_thread(jobs[1].has_run.wait, WAIT_S)
        while lanes.busy_since() is not None:  # noqa: ASYNC110  # the thread tells nobody
            await asyncio.sleep(0)
        assert jobs[2].threads == [], "the third has no memory"
        go.set()
        assert [await job.landed for job in jobs] == [None] * 3
        assert len(made) == 2
        await lanes.stop()

    run(main())


def test_without_memory_jobs_are_errors_and_later_ones_are_not() -> None:
    """The system gives no more memory; then it does. A thread that ended for it would leave its jobs waiting."""
    refusals = [OSError("no memory"), MemoryError()]

    def scratch() -> Scratch:
        if refusals:
            raise refusals.pop()
        return Scratch(SMALL, 1)

    async def main() -> None:
        lanes = Lanes("one", num_threads=1, num_finishers=1, scratch=scratch, clock=ManualClock())
        jobs = [TwoParts() for _ in range(3)]
        for job in jobs:
            job.may_run.set()
            lanes.submit(job)
        landed = [await job.landed for job in jobs]
        assert [type(each) for each in landed] == [MemoryError, OSError, type(None)]
        await lanes.stop()

    run(main())


def test_a_bug_in_what_is_left_lands_with_the_job(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        lanes = one_lane()
        bugs = [ValueError("left"), ValueError("kept")]
        jobs = [TwoParts(error=bug) for bug in bugs]
        for job in jobs:
            lanes.submit(job)
        for job in jobs:
            job.may_run.set()
        assert [await job.landed for job in jobs] == bugs
        await lanes.stop()

    with caplog.at_level(logging.CRITICAL):
        run(main())


def test_without_finishers_lanes_do_it_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """F27: the system gives no more threads."""
    start = threading.Thread.start

    def start_lanes(thread: threading.Thread) -> None:
        if "-rest-" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    async def main() -> None:
        lanes = one_lane()
        jobs = [TwoParts(), TwoParts()]
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start_lanes)
            for job in jobs:
                lanes.submit(job)
        for job in jobs:
            job.may_run.set()
        assert [await job.landed for job in jobs] == [None, None]
        assert [job.threads for job in jobs] == [["hicache-one-0"] * 2] * 2
        await lanes.stop()

    run(main())


def test_a_cancelled_read_returns_only_when_finishers_have_left_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, go = threading.Event(), threading.Event()
    verify = SegmentFile.verify_pages
    files = HeldFiles("preadv")

    def held(
        segment: SegmentFile, gets: Sequence[PageGet], fetched: Sequence[Finding | None], scratch: Scratch
    ) -> list[Finding]:
        if "-rest-" in threading.current_thread().name:
            arrived.set()
            assert go.wait(WAIT_S)
        return verify(segment, gets, fetched, scratch)

    async def main() -> None:
        async with small_tier(SMALL, 3, read_lanes=1, files=files) as tier:
            slots, identities = tier.allocate(3), identity_chain(3)
            await store(tier, slots, identities)
            monkeypatch.setattr(SegmentFile, "verify_pages", held)
            buffers = [memoryview(bytearray(tier.page_bytes)) for _ in identities]
            reads = [PageRead(*each) for each in zip(slots.tolist(), [0] * 3, identities, buffers, strict=True)]
            files.hold()
            reading = asyncio.get_running_loop().create_task(tier.read(reads[::-1]))  # no neighbours: three jobs
            await asyncio.to_thread(files.arrived.acquire)
            files.let_go()
            assert await asyncio.to_thread(arrived.wait, WAIT_S)
            for _ in range(3):
                reading.cancel()
                await asyncio.sleep(0)
                assert not reading.done()
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert [bytes(each) for each in buffers] == [stamp(each, SMALL.page_bytes).tobytes() for each in identities]

    run(main())
