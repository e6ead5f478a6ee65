"""The simulated world with blocking work in it: what would run on threads runs inline, at moments that the seed draws.

`SeededLoop` takes the place of the default executor, `SeededLanes` that of the NVMe tier's lane threads. A piece of
work runs whole at one virtual moment and is reported at a later one; others run, report and go on in between, in any
order. What two threads could do to each other inside one piece of work is not shown here: `tests/tiers` has real
threads.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, Final, TypeVar, TypeVarTuple

from hicache.clock import Clock
from hicache.tiers.nvme import NvmeTier
from hicache.tiers.nvme.io import Scratch
from hicache.tiers.nvme.lanes import Job, Lanes
from tests.simulation import SimulatedLoop, World, run_simulated

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

CALL_S: Final = 0.002
"""Average seconds until a piece of work runs, and again until it is reported."""


class SeededLoop(SimulatedLoop):
    """A loop in virtual time that runs the executor's work inline."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)

    def delay(self) -> float:
        """Until something happens on a thread: mostly short, sometimes long."""
        return self.rng.expovariate(1 / CALL_S) if self.rng.random() < 0.9 else self.rng.uniform(0, 100 * CALL_S)

    # The base class says that it never returns, since it refuses threads; this loop has none to refuse.
    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        reported: asyncio.Future[T] = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except Exception as error:
                self.call_later(self.delay(), fail, error)
            else:
                self.call_later(self.delay(), succeed, result)

        def fail(error: Exception) -> None:
            if not reported.done():
                reported.set_exception(error)

        def succeed(result: T) -> None:
            if not reported.done():
                reported.set_result(result)

        self.call_later(self.delay(), run)
        return reported


class SeededLanes(Lanes):
    """Lanes without threads. `submit_anywhere` runs its job at once: whoever asks for it may block on it."""

    def __init__(self, name: str, *, num_threads: int, scratch: Callable[[], Scratch], clock: Clock) -> None:
        super().__init__(name, num_threads=num_threads, scratch=scratch, clock=clock)
        self._memory: Scratch | None = None
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, job: Job) -> None:
        assert not self._stopping, f"{self.name}: a job after the end"
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SeededLoop)
        self._num_open += 1
        self._idle.clear()
        loop.call_later(loop.delay(), self._run, job, loop)

    def submit_anywhere(self, job: Job) -> bool:
        if self._stopping:
            return False
        self._run_whole(job)
        job.land(None)
        return True

    def busy_since(self) -> float | None:
        return None

    async def stop(self) -> None:
        self._stopping = True
        await self._idle.wait()

    def _own_scratch(self) -> Scratch:
        if self._memory is None:
            self._memory = self._scratch()
        return self._memory

    def _run_whole(self, job: Job) -> None:
        rest = job.run(self._own_scratch())
        if rest is not None:
            rest()

    def _run(self, job: Job, loop: SeededLoop) -> None:
        self._run_whole(job)
        loop.call_later(loop.delay(), self._report, job)

    def _report(self, job: Job) -> None:
        self._num_open -= 1
        if not self._num_open:
            self._idle.set()
        job.land(None)


class SeededTier(NvmeTier):
    """An NVMe tier without threads."""

    def _lanes(self, name: str, num_threads: int) -> Lanes:
        lanes = super()._lanes(name, num_threads)
        return SeededLanes(name, num_threads=num_threads, scratch=lanes._scratch, clock=self._clock)


def run_seeded(main: Callable[[World], Coroutine[Any, Any, T]], seed: int) -> T:
    """`run_simulated` on a `SeededLoop`: raises what it raises, with the seed and the command that repeats it."""

    async def seeded(world: World) -> T:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SeededLoop)
        loop.rng = random.Random(seed)
        return await main(world)

    return run_simulated(seeded, seed, loop=SeededLoop())
