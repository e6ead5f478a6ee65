"""The simulated world: one thread, one seed, and time that jumps.

`run_simulated(main, seed)` runs a coroutine on an event loop that never sleeps: when no task can go on, its clock jumps
to the next timer, and when there is no timer either, that is a `DeadlockError`. Everything random in a run comes from
`World.rng`, so the same seed gives the same run, and `World.trace` can be compared to prove it. Threads are refused.

`SimulatedTier` is a device for such a world: a tier in memory, true to `hicache.tier.Tier` (it passes the contract of
all tiers), with latency, bandwidth, faults and barriers. `SimulatedHost` is one whose slots can be viewed.

What may fail (the fault model): any page of any call, with `ERROR` and half of its bytes copied; any page of a read,
with `CORRUPT`; any call, by an exception of an unexpected type; any call may take far longer than usual. What may not
fail, because nobody could survive it: a page reported as `OK` is whole, and a generation never falls.
"""

import asyncio
import io
import os
import random
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Self, TypeVar, TypeVarTuple

from hicache.errors import BadRequest, TierUnavailable
from hicache.tier import Outcome, PageIdentity, PageRead, PageWrite, Slots, TierId
from hicache.tiers.slots import SlotPool

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

SEED_VARIABLE: Final = "HICACHE_SEED"
"""Environment variable with the one seed that `seeds` gives, to repeat a failure."""


class DeadlockError(Exception):
    """Every task waits for another, and no timer is set."""


class UnexpectedFault(Exception):
    """What a simulated tier raises against its contract. Of no type that anybody could be prepared for."""


class JumpingSelector(selectors.SelectSelector):
    """Never sleeps: when nothing is ready, time jumps to the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if ready := super().select(0):
            return ready
        if timeout is None:
            raise DeadlockError("every task waits and no timer is set")
        self.now += timeout
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time. What callbacks and forgotten tasks raise is kept in `unhandled`."""

    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)
        self.unhandled: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _loop, context: self.unhandled.append(context))

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> NoReturn:
        raise RuntimeError("a thread was asked for in the simulated world")


class World:
    """What a simulated run is given. It is also its `Clock`, in the loop's virtual time."""

    def __init__(self, seed: int, loop: SimulatedLoop) -> None:
        self.seed: Final = seed
        self.rng: Final = random.Random(seed)
        self.trace: Final[list[tuple[Any, ...]]] = []
        """What happened: virtual time first, then what was noted."""
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return self._loop.time() + 1.7e9

    def note(self, *event: Any) -> None:
        """Add to the trace."""
        self.trace.append((self.monotonic(), *event))

    async def pause(self, seconds_max: float) -> None:
        """Let others go on for a random while, sometimes for one step only."""
        await asyncio.sleep(self.rng.choice((0.0, self.rng.uniform(0.0, seconds_max))))


def repeating(seed: int) -> str:
    """The command that repeats the test under way with this seed alone."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" (")[0]
    return f"{SEED_VARIABLE}={seed} python -m pytest '{test}'"


def run_simulated(
    main: Callable[[World], Coroutine[Any, Any, T]], seed: int, *, loop: SimulatedLoop | None = None
) -> T:
    """Run `main` to its end in a fresh world, on a loop of its own that may be of a kind of its own.

    Raises what `main` raises, `DeadlockError` when nothing can go on, and `AssertionError` when tasks are left or
    something was raised where nobody could catch it. What is raised carries the seed and the command that repeats it.
    """
    loop = loop or SimulatedLoop()
    try:
        result = loop.run_until_complete(main(World(seed, loop)))
        left = sorted(task.get_name() for task in asyncio.all_tasks(loop))
        assert not left, f"tasks left running: {left}"
        assert not loop.unhandled, f"raised where nobody could catch it: {loop.unhandled}"
        return result
    except BaseException as error:
        if isinstance(error, DeadlockError):
            for task in asyncio.all_tasks(loop):
                stack = io.StringIO()
                task.print_stack(limit=3, file=stack)
                error.add_note(stack.getvalue())
        error.add_note(f"seed {seed}; to repeat: {repeating(seed)}")
        raise
    finally:
        left_tasks = asyncio.all_tasks(loop)
        for task in left_tasks:
            task.cancel()
        with suppress(DeadlockError):
            if left_tasks:
                loop.run_until_complete(asyncio.wait(left_tasks))
            loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def seeds(num_seeds: int, *, block: int = 0) -> Iterable[int]:
    """The `block`-th run of `num_seeds` seeds, from 0 on; or the one seed that `HICACHE_SEED` names.

    A soak run takes many more. Tests over many seeds are cut into blocks, so that each stays within its time limit.
    """
    if chosen := os.environ.get(SEED_VARIABLE):
        return [int(chosen)]
    num_seeds *= 20 if os.environ.get("HICACHE_SOAK") else 1
    return range(block * num_seeds, (block + 1) * num_seeds)


@dataclass(frozen=True, slots=True)
class Faults:
    """How often what goes wrong. Probabilities from 0 to 1."""

    error: float = 0.0
    """Of a page."""
    corrupt: float = 0.0
    """Of a page of a read."""
    raises: float = 0.0
    """Of a call."""
    stall: float = 0.0
    """Of a call."""
    stall_s: float = 1.0
    """Seconds that a stalled call takes longer."""


class Barrier:
    """Where copies of a tier stop until they are let go: half way through a page, after `num_pages` whole ones.

    Leaving it as an `async with` lets them go too, so that a test which fails in between does not hang.
    """

    def __init__(self, num_pages: int) -> None:
        self._pages_left = num_pages
        self._reached = asyncio.Event()
        self._released = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    async def reached(self) -> None:
        """Wait until a copy stands at the barrier."""
        await self._reached.wait()

    def release(self) -> None:
        """Let everything pass from here on."""
        self._released.set()

    async def meet(self) -> None:
        """The tier's side: called half way through each page."""
        if self._pages_left:
            self._pages_left -= 1
        elif not self._released.is_set():
            self._reached.set()
            await self._released.wait()


class SimulatedTier:
    """A tier in memory. A call waits `latency_s`; then its pages pass, one after the other, through a pipe of
    `bandwidth` bytes a second that all calls share. The first half of a page is copied when its turn comes, the second
    half when its time is over, so that whoever touches a buffer too early is found out.

    Args:
        rng: source of faults and jitter.
        jitter: times vary by up to this share, evenly.
        watch: called with ("read" or "write", pages) when a call begins.
    """

    def __init__(
        self,
        tier_id: TierId,
        *,
        page_bytes: int,
        capacity_pages: int,
        rng: random.Random | None = None,
        latency_s: float = 0.0,
        bandwidth: float = float("inf"),
        jitter: float = 0.0,
        faults: Faults | None = None,
        watch: Callable[[str, Sequence[PageRead] | Sequence[PageWrite]], None] | None = None,
    ) -> None:
        self.faults = faults or Faults()
        self.pages_begun = 0
        """Pages whose copy has begun so far; a page that is refused as `STALE` or `NOT_FOUND` has not."""
        self.fail_page: int | None = None
        """Number of the one page that fails with `ERROR` although no fault was drawn, counted by `pages_begun`."""
        self.in_flight_pages = 0
        self.in_flight_pages_max = 0
        self.cancelled_calls = 0
        """Calls that were cancelled, which nobody may do."""
        self.watch = watch
        self.latency_s = latency_s
        self.bandwidth = bandwidth
        self._tier_id = tier_id
        self._page_bytes = page_bytes
        self._slots = SlotPool(tier_id, capacity_pages)
        self._memory = bytearray(page_bytes * capacity_pages)
        self._held: list[PageIdentity | None] = [None] * capacity_pages
        self._changes = [0] * capacity_pages
        """How often something began to change each slot: a copy sees whether another came between."""
        self._rng = rng or random.Random(0)
        self._jitter = jitter
        self._pipe_free_at = 0.0
        self._barrier: Barrier | None = None
        self._closed = False
        self._given_up = asyncio.Event()
        self._num_calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # -- the contract -------------------------------------------------------------------------------------------------

    @property
    def tier_id(self) -> TierId:
        return self._tier_id

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    @property
    def capacity_pages(self) -> int:
        return self._slots.capacity

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    def allocate(self, num_pages: int) -> Slots:
        if self._closed:
            raise TierUnavailable(self.tier_id, "closed")
        return self._slots.allocate(num_pages)

    def free(self, slots: Slots) -> None:
        self._slots.free(slots)
        for slot in slots.tolist():
            self._held[slot] = None
            self._changes[slot] += 1

    def generation(self, slot: int) -> int:
        return self._slots.generation(slot)

    async def write(self, pages: Sequence[PageWrite]) -> list[Outcome]:
        if len({page.slot for page in pages}) < len(pages):
            raise BadRequest("pages", "one slot is named twice")
        data = [self._checked(page.slot, page.data) for page in pages]
        if self._closed:
            return [Outcome.ERROR] * len(pages)
        async with self._call("write", pages):
            return [await self._write_page(page, source) for page, source in zip(pages, data, strict=True)]

    async def read(self, pages: Sequence[PageRead]) -> list[Outcome]:
        into = [self._checked(page.slot, page.into) for page in pages]
        if any(buffer.readonly for buffer in into):
            raise BadRequest("into", "is read-only")
        if self._closed:
            return [Outcome.ERROR] * len(pages)
        async with self._call("read", pages):
            return [await self._read_page(page, target) for page, target in zip(pages, into, strict=True)]

    def give_up(self) -> None:
        self._closed = True
        self._given_up.set()

    async def close(self) -> None:
        self._closed = True
        await self._idle.wait()

    # -- for tests ----------------------------------------------------------------------------------------------------

    def raw_page(self, slot: int) -> bytes:
        """The bytes that lie in the slot, whatever they are."""
        return bytes(self._view(slot))

    def fill(self, slot: int, identity: PageIdentity, data: bytes) -> None:
        """Put a page into an allocated slot, at once."""
        assert self._slots.is_allocated(slot)
        self._view(slot)[:] = data
        self._held[slot] = identity

    def holds(self, slot: int) -> PageIdentity | None:
        """What the slot would serve; None if nothing."""
        return self._held[slot]

    def hold(self, *, after_pages: int) -> Barrier:
        """Stop all copies half way through the page after the next `after_pages` ones, until it is released."""
        self._barrier = Barrier(after_pages)
        return self._barrier

    # -- inside -------------------------------------------------------------------------------------------------------

    def _view(self, slot: int) -> memoryview:
        return memoryview(self._memory)[slot * self._page_bytes : (slot + 1) * self._page_bytes]

    def _checked(self, slot: int, buffer: memoryview) -> memoryview:
        self._slots.generation(slot)
        if not buffer.c_contiguous or buffer.nbytes != self._page_bytes:
            raise BadRequest("buffer", f"is not {self._page_bytes} contiguous bytes")
        return buffer.cast("B")

    @asynccontextmanager
    async def _call(self, operation: str, pages: Sequence[PageRead] | Sequence[PageWrite]) -> AsyncIterator[None]:
        self.in_flight_pages += len(pages)
        self.in_flight_pages_max = max(self.in_flight_pages_max, self.in_flight_pages)
        self._num_calls += 1
        self._idle.clear()
        try:
            if self.watch is not None:
                self.watch(operation, pages)
            fault_at = self._rng.choice(("begin", "end")) if self._happens(self.faults.raises) else None
            if fault_at == "begin":
                raise UnexpectedFault(f"{self.tier_id}: before the first page")
            if self._happens(self.faults.stall):
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.faults.stall_s):
                        await self._given_up.wait()
            await asyncio.sleep(self._varied(self.latency_s))
            yield
            if fault_at == "end":
                raise UnexpectedFault(f"{self.tier_id}: after the last page")
        except asyncio.CancelledError:
            self.cancelled_calls += 1
            raise
        finally:
            self.in_flight_pages -= len(pages)
            self._num_calls -= 1
            if not self._num_calls:
                self._idle.set()

    async def _write_page(self, page: PageWrite, data: memoryview) -> Outcome:
        slot, half = page.slot, self._page_bytes // 2
        if not self._slots.is_allocated(slot) or self.generation(slot) != page.generation:
            return Outcome.STALE
        self._held[slot] = None
        self._changes[slot] += 1
        mine, memory = self._changes[slot], self._view(slot)
        memory[:half] = data[:half]
        outcome = await self._pass_pipe()
        if self._changes[slot] != mine:
            return Outcome.STALE
        if outcome is Outcome.OK:
            memory[half:] = data[half:]
            self._held[slot] = page.identity
        return outcome

    async def _read_page(self, page: PageRead, into: memoryview) -> Outcome:
        slot, half = page.slot, self._page_bytes // 2
        if self.generation(slot) != page.generation:
            return Outcome.STALE
        if self._held[slot] != page.identity:
            return Outcome.NOT_FOUND
        before, memory = self._changes[slot], self._view(slot)
        into[:half] = memory[:half]
        outcome = await self._pass_pipe()
        if self.generation(slot) != page.generation:
            return Outcome.STALE
        if self._changes[slot] != before:
            return Outcome.NOT_FOUND
        if outcome is Outcome.OK:
            if self._happens(self.faults.corrupt):
                return Outcome.CORRUPT
            into[half:] = memory[half:]
        return outcome

    async def _pass_pipe(self) -> Outcome:
        """What lies between the two halves of a page."""
        number = self.pages_begun
        self.pages_begun += 1
        if self._barrier is not None:
            await self._barrier.meet()
        now = asyncio.get_running_loop().time()
        self._pipe_free_at = max(now, self._pipe_free_at) + self._varied(self._page_bytes / self.bandwidth)
        await asyncio.sleep(self._pipe_free_at - now)
        fails = number == self.fail_page or self._happens(self.faults.error) or self._given_up.is_set()
        return Outcome.ERROR if fails else Outcome.OK

    def _happens(self, probability: float) -> bool:
        return probability > 0 and self._rng.random() < probability

    def _varied(self, seconds: float) -> float:
        return seconds * self._rng.uniform(1 - self._jitter, 1 + self._jitter) if self._jitter else seconds


class SimulatedHost(SimulatedTier):
    """A simulated tier whose slots are memory of this process: one end of every lane."""

    def view(self, slot: int) -> memoryview:
        self._slots.generation(slot)
        return self._view(slot)

    def check(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        if self.generation(slot) != generation:
            return Outcome.STALE
        return Outcome.OK if self._held[slot] == identity else Outcome.NOT_FOUND

    def declare(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        if not self._slots.is_allocated(slot) or self.generation(slot) != generation:
            return Outcome.STALE
        self._held[slot] = identity
        self._changes[slot] += 1
        return Outcome.OK
