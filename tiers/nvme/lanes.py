"""Lane threads: long-lived threads that run blocking copies for an event loop.

Handing one call to a thread pool costs an event loop 40 µs and more, most of it in waking up. Here jobs go to the
threads through one queue, finished jobs into a deque, and the loop is woken **once** for all that finished meanwhile.

    loop                       lane thread
    submit(job)   -- queue -->  job.run(scratch)
    job.land()    <-- deque --  append; wake the loop unless somebody has already

What a job has left to do without the device goes to a *finisher*, a thread that does only that, with the scratch memory
that the job has; its lane takes spare memory and begins the next job at once. A device ends transfers in bunches. So it
has the next ones as soon as the lanes have woken up, and not when those of the first of them have been checked, on the
cores that the other lanes wait for. Where no job waits, the lane has nothing better to do than to finish its own.

`submit` and `stop` are called by the loop, `submit_anywhere` and `busy_since` by any thread.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final, Protocol

from hicache.clock import Clock
from hicache.tiers.nvme.io import Scratch

MAX_QUEUED: Final = 64
"""Jobs of the loop that are handed to the threads and not finished; more wait on the loop's side, in order."""

_log = logging.getLogger(__name__)


class Job(Protocol):
    """One piece of blocking work."""

    def run(self, scratch: Scratch) -> Callable[[], None] | None:
        """On a lane thread. What a device does is a result, kept in the job; anything raised here is a bug. Returns
        what is left to do that takes `scratch` and a core, but no device: called once, on this thread or a finisher.
        """
        ...

    def land(self, error: Exception | None) -> None:
        """On the loop, after `run` and what it left; `error` is what these raised. Jobs of `submit_anywhere` land on
        the thread that did the last of it.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Left:
    """What a lane leaves to a finisher."""

    job: Job
    lands_on_loop: bool
    rest: Callable[[], None]
    scratch: Scratch


class Lanes:
    """Threads for one kind of work, started with the first job: so many lanes, and so many finishers."""

    def __init__(
        self, name: str, *, num_threads: int, scratch: Callable[[], Scratch], clock: Clock, num_finishers: int = 0
    ) -> None:
        self.name = name
        self.num_threads = num_threads
        self._num_finishers = num_finishers
        self._scratch = scratch
        self._clock = clock
        self._queue: SimpleQueue[tuple[Job, bool] | None] = SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._num_in_flight = 0
        self._landed: deque[tuple[Job, Exception | None] | None] = deque()
        self._woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: list[threading.Thread] = []
        self._left: SimpleQueue[_Left | None] = SimpleQueue()
        self._spare: SimpleQueue[Scratch] = SimpleQueue()
        """Memory that no job has. Each lane takes one for itself; as many again may wait for a finisher."""
        self._finishers: list[threading.Thread] = []
        self._busy_since: list[float | None] = [None] * num_threads
        self._num_ended = 0
        self._ended: asyncio.Event | None = None
        self._stopping = False
        # Guards the start of the threads and `_stopping`: no job enters the queue behind the threads' end.
        self._lock = threading.Lock()

    def submit(self, job: Job) -> None:
        """Have `job` run on a thread and land on the running loop. Never waits."""
        assert not self._stopping, f"{self.name}: a job after the end"
        loop = asyncio.get_running_loop()
        assert self._loop is loop or not self._num_in_flight, f"{self.name}: used from two loops at once"
        self._loop = loop
        with self._lock:
            problem = self._start()
        if problem is not None:
            job.land(problem)
        elif self._num_in_flight < MAX_QUEUED:
            self._hand_over(job)
        else:
            self._waiting.append(job)

    def submit_anywhere(self, job: Job) -> bool:
        """Have `job` run and land on a thread. False, and nothing done, without a thread or once they are to stop."""
        with self._lock:
            if self._stopping or self._start() is not None:
                return False
            self._queue.put((job, False))
            return True

    def busy_since(self) -> float | None:
        """When the job that has been running longest was begun; None when all threads are idle."""
        return min((since for since in self._busy_since if since is not None), default=None)

    async def stop(self) -> None:
        """Finish what was submitted, then end the threads. A device that hangs makes this wait for ever."""
        with self._lock:
            first, self._stopping = not self._stopping, True
        if self._ended is None:
            self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
            if not self._threads:
                self._ended.set()
        if first and not self._waiting:
            self._end()
        await self._ended.wait()

    def _start(self) -> Exception | None:
        """Start the threads, or as many as the system gives; the error if it gives none, or no memory for them."""
        if self._threads:
            return None
        try:
            memory = [self._scratch() for _ in range(self.num_threads * (2 if self._num_finishers else 1))]
        except (OSError, MemoryError) as error:
            _log.warning("%s: no memory for its threads: %s", self.name, error)
            return error
        problem = self._start_some(self._threads, self._work, self.name, self.num_threads)
        if self._threads:
            self._start_some(self._finishers, self._finish_others, f"{self.name}-rest", self._num_finishers)
            for scratch in memory:
                self._spare.put(scratch)
        return None if self._threads else problem

    @staticmethod
    def _start_some(
        threads: list[threading.Thread], work: Callable[[int], None], name: str, number: int
    ) -> RuntimeError | None:
        for index in range(number):
            thread = threading.Thread(target=work, args=(index,), name=f"hicache-{name}-{index}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                _log.warning("%s: only %d of %d threads could be started", name, index, number)
                return error
            threads.append(thread)
        return None

    def _hand_over(self, job: Job) -> None:
        self._num_in_flight += 1
        self._queue.put((job, True))

    def _end(self) -> None:
        for _ in self._threads:
            self._queue.put(None)

    def _work(self, index: int) -> None:
        scratch = self._spare.get()
        while (taken := self._queue.get()) is not None:
            job, lands_on_loop = taken
            rest, error = None, None
            self._busy_since[index] = self._clock.monotonic()
            try:
                rest = job.run(scratch)
            except Exception as raised:
                error = self._bug(raised)
            self._busy_since[index] = None
            if rest is None:
                self._settle(job, lands_on_loop, error)
            elif self._finishers and not self._queue.empty():
                self._left.put(_Left(job, lands_on_loop, rest, scratch))
                scratch = self._spare.get()
            else:
                self._finish(job, lands_on_loop, rest)
            # Until the next job comes this frame would keep the last one's buffers alive.
            del taken, job, rest, error
        self._post(None)

    def _finish_others(self, _index: int) -> None:
        while (left := self._left.get()) is not None:
            self._finish(left.job, left.lands_on_loop, left.rest)
            self._spare.put(left.scratch)
            del left
        self._post(None)

    def _finish(self, job: Job, lands_on_loop: bool, rest: Callable[[], None]) -> None:
        error = None
        try:
            rest()
        except Exception as raised:
            error = self._bug(raised)
        self._settle(job, lands_on_loop, error)

    def _bug(self, error: Exception) -> Exception:
        _log.error("%s: a copy failed for a reason that is not the device's", self.name, exc_info=error)
        return error

    def _settle(self, job: Job, lands_on_loop: bool, error: Exception | None) -> None:
        if lands_on_loop:
            self._post((job, error))
        else:
            job.land(error)

    def _post(self, landed: tuple[Job, Exception | None] | None) -> None:
        # 1. A thread appends, then looks at the flag. 2. The loop lowers the flag, then takes what is there. Who finds
        # the flag up is seen by a landing that has not begun; two who find it down merely wake the loop twice.
        self._landed.append(landed)
        if self._woken or self._loop is None:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._land)
        except RuntimeError:
            # The loop was closed with copies under way: nobody is left to be told.
            self._woken = False

    def _land(self) -> None:
        self._woken = False
        while self._landed:
            landed = self._landed.popleft()
            if landed is None:
                self._num_ended += 1
                if self._num_ended == len(self._threads):  # the lanes: finishers end behind what these have left
                    for _ in self._finishers:
                        self._left.put(None)
                continue
            self._num_in_flight -= 1
            if self._waiting:
                self._hand_over(self._waiting.popleft())
                if self._stopping and not self._waiting:
                    self._end()
            job, error = landed
            job.land(error)
        threads = self._threads + self._finishers
        if self._num_ended == len(threads) and self._ended is not None and not self._ended.is_set():
            for thread in threads:
                thread.join()
            self._ended.set()
