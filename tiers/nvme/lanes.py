"""Lane threads: long-lived threads that run blocking copies for an event loop.

Handing one call to a thread pool costs an event loop 40 µs and more, most of it in waking up. Here jobs go to the
threads through one queue, finished jobs into a deque, and the loop is woken **once** for all that finished meanwhile.

    loop                       lane thread
    submit(job)   -- queue -->  job.run(scratch)
    job.land()    <-- deque --  append; wake the loop unless somebody has already

`submit` and `stop` are called by the loop, `submit_anywhere` and `busy_since` by any thread.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Protocol

from hicache.clock import Clock
from hicache.tiers.nvme.io import Scratch

MAX_QUEUED: Final = 64
"""Jobs of the loop that are handed to the threads and not finished; more wait on the loop's side, in order."""

_log = logging.getLogger(__name__)


class Job(Protocol):
    """One piece of blocking work."""

    def run(self, scratch: Scratch) -> None:
        """On a lane thread. What a device does is a result, kept in the job; anything raised here is a bug."""
        ...

    def land(self, error: Exception | None) -> None:
        """On the loop, after `run`; `error` is what `run` raised. Jobs of `submit_anywhere` land on their lane
        thread.
        """
        ...


class Lanes:
    """Threads for one kind of work, started with the first job."""

    def __init__(self, name: str, *, num_threads: int, scratch: Callable[[], Scratch], clock: Clock) -> None:
        self.name = name
        self.num_threads = num_threads
        self._scratch = scratch
        self._clock = clock
        self._queue: SimpleQueue[tuple[Job, bool] | None] = SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._num_in_flight = 0
        self._landed: deque[tuple[Job, Exception | None] | None] = deque()
        self._woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: list[threading.Thread] = []
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

    def _start(self) -> RuntimeError | None:
        """Start the threads, or as many as the system gives; the error if it gives none."""
        if self._threads:
            return None
        for index in range(self.num_threads):
            name = f"hicache-{self.name}-{index}"
            thread = threading.Thread(target=self._work, args=(index,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                _log.warning("%s: only %d of %d threads could be started", self.name, index, self.num_threads)
                return None if self._threads else error
            self._threads.append(thread)
        return None

    def _hand_over(self, job: Job) -> None:
        self._num_in_flight += 1
        self._queue.put((job, True))

    def _end(self) -> None:
        for _ in self._threads:
            self._queue.put(None)

    def _work(self, index: int) -> None:
        scratch = self._scratch()
        while (taken := self._queue.get()) is not None:
            job, lands_on_loop = taken
            error: Exception | None = None
            self._busy_since[index] = self._clock.monotonic()
            try:
                job.run(scratch)
            except Exception as raised:
                _log.exception("%s: a copy failed for a reason that is not the device's", self.name)
                error = raised
            self._busy_since[index] = None
            if lands_on_loop:
                self._post((job, error))
            else:
                job.land(error)
            # Until the next job comes this frame would keep the last one's buffers alive.
            del taken, job, error
        self._post(None)

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
                continue
            self._num_in_flight -= 1
            if self._waiting:
                self._hand_over(self._waiting.popleft())
                if self._stopping and not self._waiting:
                    self._end()
            job, error = landed
            job.land(error)
        if self._num_ended == len(self._threads) and self._ended is not None and not self._ended.is_set():
            for thread in self._threads:
                thread.join()
            self._ended.set()
