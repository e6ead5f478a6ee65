"""Whatever happens to a request while it waits: nothing it took is lost, nobody else notices, and all goes on.

One script of a request is run again and again. Each time something else befalls it, at its first wait, at its second,
and so on, until it has no more: it is cancelled, its sequences are closed under it, its deadline passes, everything is
flushed.
"""

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Final

import pytest

from hicache.errors import BadRequest, Closed, DeadlineExceeded, NoRoom, NotResident, TierUnavailable
from hicache.sequence import Sequence
from tests.hicache.worlds import MODEL, Request, Setup, UnreadablePage, int32, opened, prompt
from tests.simulation import Faults, World, run_simulated

REFUSALS: Final = (BadRequest, Closed, DeadlineExceeded, NoRoom, NotResident, TierUnavailable, UnreadablePage)
"""What a request may be told: `BadRequest` by a step that was ended under it."""


@types.coroutine
def watched(work: Awaitable[None], at_wait: Callable[[], None]) -> Generator[Any, Any, None]:
    """Run `work`, and `at_wait` each time that it waits for something."""
    steps = work.__await__()
    thrown: BaseException | None = None
    while True:
        try:
            waits_for = next(steps) if thrown is None else steps.throw(thrown)
        except StopIteration:
            return
        at_wait()
        thrown = None
        try:
            yield waits_for
        except BaseException as error:
            thrown = error


def repeat(main: Callable[[World, int], Coroutine[Any, Any, bool]]) -> int:
    """Run `main` with 1, 2, 3 and so on until it returns false; returns the last of these numbers."""

    def run(number: int) -> bool:
        return run_simulated(lambda world: main(world, number), number)

    return next(number for number in count(1) if not run(number))


class Script:
    """A request that meets all there is to wait for: promotion from NVMe, a partial page, room, and copies of tails.

    `at_wait` is called at each of its waits, after the moment was added to `waits`.
    """

    def __init__(self, setup: Setup, deadline: float, at_wait: Callable[[], None] = lambda: None) -> None:
        self.setup = setup
        self.deadline = deadline
        self.waits: list[float] = []
        self._at_wait = at_wait
        self.requests: list[Request] = []

    def _request(self, sequence: Sequence | None = None) -> Request:
        request = self.setup.request()
        request.sequence = sequence
        self.requests.append(request)
        return request

    async def run_refused(self) -> None:
        """Run, and take every refusal for an end."""
        try:
            await watched(self._run(), self._wait)
        except (*REFUSALS, asyncio.CancelledError):
            pass
        finally:
            self.close()

    def _wait(self) -> None:
        self.waits.append(self.setup.cache.clock.monotonic())
        self._at_wait()

    async def _run(self) -> None:
        tokens = prompt(1, 21, branch=1, shared=14)
        first = self._request()
        await first.open(tokens, deadline_s=self._left())
        assert first.sequence is not None
        await first.step(tokens[first.sequence.length :], deadline_s=self._left())
        second = self._request(first.sequence.fork())
        third = self._request(first.sequence.fork())
        async with asyncio.TaskGroup() as group:
            for i, request in enumerate((first, second)):
                group.create_task(self._step_beside(request, [7_000_000 + i, 1, 2, 3, 4]))
        await third.step(prompt(8, 8), deadline_s=self._left())
        self.close()

    async def _step_beside(self, request: Request, tokens: list[int]) -> None:
        with suppress(*REFUSALS):
            await watched(request.step(tokens, deadline_s=self._left()), self._wait)

    def _left(self) -> float:
        return self.deadline - self.setup.cache.clock.monotonic()

    def close(self) -> None:
        for request in self.requests:
            if request.sequence is not None:
                request.sequence.close()


async def prepare(setup: Setup) -> None:
    """Fill all tiers; the script's prompt ends up on NVMe."""
    for document in range(1, 7):
        await setup.request().run(prompt(document, 17))
    coverage = setup.cache.coverage(setup.cache.tree.match(MODEL, int32(prompt(1, 16))))
    assert "nvme" in coverage.by_tier


async def neighbour(setup: Setup) -> None:
    """Another request at the same time, which asks for some of the same pages."""
    try:
        await setup.request().run(prompt(1, 15))
        await setup.request().run(prompt(2, 20))
    except (Closed, NoRoom, NotResident, UnreadablePage):
        pass


async def check_after(setup: Setup) -> None:
    """Nothing is lost, and everything works."""
    await setup.quiet()
    setup.check_quiet()
    assert setup.cache.tree.num_leases == 0
    for document in (1, 2, 99):
        assert await setup.request().run(prompt(document, 17)) < 17
    assert await setup.request().run(prompt(99, 17)) == 16
    await setup.quiet()
    setup.check_quiet()


Blow = Callable[[Setup, Script, "asyncio.Task[None]"], None]


def cancel(setup: Setup, script: Script, task: "asyncio.Task[None]") -> None:
    task.cancel()


def close(setup: Setup, script: Script, task: "asyncio.Task[None]") -> None:
    script.close()


def flush(setup: Setup, script: Script, task: "asyncio.Task[None]") -> None:
    setup.cache.flush()


def forget(setup: Setup, script: Script, task: "asyncio.Task[None]") -> None:
    """NVMe turns out to have lost every page."""
    assert setup.nvme is not None
    setup.nvme._held = [None] * setup.nvme.capacity_pages


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside another"])
@pytest.mark.parametrize("blow", [cancel, close, flush, forget])
def test_a_request_is_struck_at_every_wait(blow: Blow, is_alone: bool) -> None:
    async def main(world: World, number: int) -> bool:
        async with opened(world, device_pages=8, host_pages=8, nvme_pages=64) as setup:
            await prepare(setup)
            script = Script(setup, world.monotonic() + 60, lambda: strike(blow, setup, script, task, number))
            async with asyncio.TaskGroup() as group:
                task = group.create_task(script.run_refused())
                if not is_alone:
                    group.create_task(neighbour(setup))
            await check_after(setup)
        return len(script.waits) >= number

    assert repeat(main) > 20, "the script hardly waits"


def strike(blow: Blow, setup: Setup, script: Script, task: "asyncio.Task[None]", strike_at: int) -> None:
    if len(script.waits) == strike_at:
        asyncio.get_running_loop().call_soon(blow, setup, script, task)


def test_the_deadline_passes_at_every_wait() -> None:
    async def main(world: World, deadline: float | None) -> list[float]:
        async with opened(world, device_pages=8, host_pages=8, nvme_pages=64) as setup:
            await prepare(setup)
            script = Script(setup, world.monotonic() + 60 if deadline is None else deadline)
            await script.run_refused()
            assert deadline is None or world.monotonic() <= deadline + 0.3
            await check_after(setup)
        return script.waits

    for moment in run_simulated(partial(main, deadline=None), 0):
        run_simulated(partial(main, deadline=moment), 0)


def test_the_cache_closes_at_every_wait() -> None:
    """Requests under way are told so, at once, and what they held is given back."""

    async def main(world: World, number: int) -> bool:
        leave = asyncio.Event()

        def at_wait() -> None:
            if len(script.waits) == number:
                leave.set()

        async with asyncio.TaskGroup() as group:
            async with opened(world, device_pages=8, host_pages=8, nvme_pages=64) as setup:
                await prepare(setup)
                script = Script(setup, world.monotonic() + 60, at_wait)
                task = group.create_task(script.run_refused())
                group.create_task(neighbour(setup))
                task.add_done_callback(lambda _: leave.set())
                await leave.wait()
            closed_at = world.monotonic()
        assert world.monotonic() <= closed_at + 0.3
        setup.check_quiet()
        assert setup.cache.tree.num_leases == 0
        return len(script.waits) >= number

    repeat(main)


def test_tiers_that_raise_end_a_copy_and_not_the_cache() -> None:
    """Copies that belong to no lane are guarded like those that do."""

    async def main(world: World) -> None:
        async with opened(world, device_pages=8, host_pages=8, nvme_pages=64) as setup:
            await prepare(setup)
            for tier in setup.tiers:
                tier.faults = Faults(raises=1.0)
            await Script(setup, world.monotonic() + 60).run_refused()
            for tier in setup.tiers:
                tier.faults = Faults()
            await check_after(setup)

    run_simulated(main, 0)
