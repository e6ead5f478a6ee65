"""One scripted life of an NVMe store on the simulated disk, in which one call fails: every call, in every way.

The script opens a new store, writes, frees, writes into freed slots, syncs until a fresh log is written, stops, starts
again and reads. Whatever fails, a start is refused in words or succeeds, what was called durable is there, no byte is
wrong, and once the fault is over everything works.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest

from tests.faults.oracle import Page
from tests.faults.power import HONEST, PowerCut, PowerRun
from tests.faults.seeded import run_seeded
from tests.simulation import World
from tests.tiers.simulated_disk import Fail, Rates

FAILING_ONCE = Rates(write_error=1e-12)
"""A profile under which what is not confirmed may be lost; by itself it never strikes."""
LYING_ONCE = Rates(lost=1e-12)


class ScriptedRun(PowerRun):
    """A run whose steps are written down."""

    async def script(self) -> None:
        """See the module."""
        await self._open()
        for _ in range(2):
            first = [await self.write(3) for _ in range(3)]
            await self._sync()
            self._take(first[1])
            await self.write(4)
            await self._sync()
            self._take(first[0])
            self._take(first[2])
            await asyncio.sleep(0.3)
            await self.write(4)
            await self.write(2)
            await self._read()
            self._read_layers()
            await self._sync()
            await self._read_stale()
            await self._end(cut=True)
            await self._open()
        await self.write(2)
        await self._sync()
        await self.prove_well()

    def _take(self, pages: list[Page]) -> None:
        """Free pages and all below them."""
        if pages and pages[0].is_there:
            self._give_back(list(pages[0].below()))


async def script_of(run: ScriptedRun, cut: bool) -> None:
    """The script; if the power or the process ends in its midst, a start after that, and a proof that all is well."""
    run.cuts_while_opening = 0.0
    try:
        await run.script()
    except PowerCut:
        await run.begin_again(cut)
        await run.prove_well()


def scripted(fail: Fail | None, at: int) -> ScriptedRun:
    """Run the script with a failure in one call."""
    profile = HONEST if fail is None else LYING_ONCE if fail is Fail.TORN else FAILING_ONCE
    kept: list[ScriptedRun] = []

    async def main(world: World) -> None:
        kept.append(ScriptedRun(world, profile))
        if fail is not None:
            kept[0].disk.fail_at(at, fail)
        await script_of(kept[0], cut=False)

    _named(main, f"{fail} in call {at}")
    return kept[0]


def ended(at: int, *, cut: bool) -> None:
    """Run the script; in one call the power fails, or the process ends."""

    async def main(world: World) -> None:
        run = ScriptedRun(world, HONEST)
        run.disk.cut_power_at(at, run.on_end)
        await script_of(run, cut)

    _named(main, f"{'power cut' if cut else 'kill'} in call {at}")


def _named(main: Callable[[World], Coroutine[Any, Any, None]], what: str) -> None:
    try:
        run_seeded(main, 0)
    except BaseException as error:
        error.add_note(what)
        raise


@pytest.fixture(scope="module")
def num_calls() -> int:
    """Calls of the script when nothing fails."""
    run = scripted(None, 0)
    assert run.tally.pages_written > 30
    assert run.tally.misses == 0
    return run.disk.num_calls


def every_call(fail: Fail, calls: Iterable[int]) -> None:
    struck = sum(bool(scripted(fail, at).disk.num_faults) for at in calls)
    assert struck > 0, "the failure never came"


@pytest.mark.parametrize("fail", Fail)
def test_some_calls_fail_once(num_calls: int, fail: Fail) -> None:
    """A share of the complete loop: every 29th call, from another one on for each failure."""
    every_call(fail, range(1 + 5 * list(Fail).index(fail), num_calls + 1, 29))


@pytest.mark.parametrize("cut", [False, True])
def test_the_end_comes_in_some_calls(num_calls: int, cut: bool) -> None:
    for at in range(7 + 11 * cut, num_calls + 1, 29):
        ended(at, cut=cut)


@pytest.mark.faults
@pytest.mark.parametrize("fail", Fail)
def test_every_call_fails_once(num_calls: int, fail: Fail) -> None:
    every_call(fail, range(1, num_calls + 1))


@pytest.mark.faults
@pytest.mark.parametrize("cut", [False, True])
def test_the_end_comes_in_every_call(num_calls: int, cut: bool) -> None:
    for at in range(1, num_calls + 1):
        ended(at, cut=cut)
