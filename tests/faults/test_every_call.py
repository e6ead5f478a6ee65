"""One scripted life of an NVMe store on the simulated disk, in which one call fails: every call, in every way.

The script opens a new store, writes, frees, writes into freed slots, syncs until a fresh log is written, stops, starts
again and reads. Whatever fails, a start is refused in words or succeeds, what was called durable is there, no byte is
wrong, and once the fault is over everything works.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from tests.faults.oracle import Page
from tests.faults.power import HONEST, PowerCut, PowerRun
from tests.faults.seeded import run_seeded
from tests.simulation import World
from tests.tiers.simulated_disk import DIRECT_UNIT, Fail, Rates, SimulatedDisk

FAILING_ONCE = Rates(write_error=1e-12)
"""A profile under which what is not confirmed may be lost; by itself it never strikes."""
LYING_ONCE = Rates(lost=1e-12)


class ScriptedRun(PowerRun):
    """A run whose steps are written down."""

    num_calls = 0
    """Calls before the proof that all is well."""

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
        self.num_calls = self.disk.num_calls
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


class TracedDisk(SimulatedDisk):
    """Keeps the names of all calls, and which of them move so much that they can be cut in parts."""

    def __init__(self, rng: random.Random, **options: Any) -> None:
        super().__init__(rng, **options)
        self.calls: list[str] = []
        self.divisible: set[int] = set()
        """Their numbers, from 1."""

    def _begin(self, name: str, about: object) -> bool:
        self.calls.append(name)
        return super()._begin(name, about)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._moved(super().preadv, fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._moved(super().pwritev, fd, buffers, offset)

    def _moved(
        self, move: Callable[[int, Sequence[memoryview], int], int], fd: int, buffers: Sequence[memoryview], offset: int
    ) -> int:
        number = len(self.calls) + 1
        moved = move(fd, buffers, offset)
        if moved > DIRECT_UNIT:
            self.divisible.add(number)
        return moved


def profile_of(fail: Fail | None) -> Rates:
    """What the oracle may count on in a run with such a failure."""
    if fail is None:
        return HONEST
    return LYING_ONCE if fail is Fail.TORN else FAILING_ONCE


def scripted(profile: Rates, fail: Fail = Fail.EIO, at: int = 0) -> ScriptedRun:
    """Run the script, with a failure in one call if `at` is not 0."""
    kept: list[ScriptedRun] = []

    async def main(world: World) -> None:
        kept.append(ScriptedRun(world, profile, disk=TracedDisk))
        kept[0].disk.fail_at(at - kept[0].disk.num_calls, fail)
        await script_of(kept[0], cut=False)

    _named(main, f"{fail} in call {at}")
    return kept[0]


def calls_of(profile: Rates, fail: Fail | None = None) -> list[tuple[int, str]]:
    """The script's calls when nothing fails, their numbers and names: from the first of the store on, to where
    everything has to go well. With `fail`, those that can fail so."""
    run = scripted(profile)
    assert run.tally.pages_written > 30
    assert run.tally.misses == 0
    assert isinstance(run.disk, TracedDisk)
    calls = list(enumerate(run.disk.calls, 1))[4 : run.num_calls]
    if fail is None:
        return calls
    names, divisible = CAN_FAIL.get(fail), run.disk.divisible
    return [
        (at, name)
        for at, name in calls
        if (names is None or name in names) and (fail not in IN_PARTS or at in divisible)
    ]


def ended(at: int, *, cut: bool) -> None:
    """Run the script; in one call the power fails, or the process ends."""

    async def main(world: World) -> None:
        run = ScriptedRun(world, HONEST)
        run.disk.cut_power_at(at - run.disk.num_calls, run.on_end)
        await script_of(run, cut)

    _named(main, f"{'power cut' if cut else 'kill'} in call {at}")


def _named(main: Callable[[World], Coroutine[Any, Any, None]], what: str) -> None:
    try:
        run_seeded(main, 0)
    except BaseException as error:
        error.add_note(what)
        raise


MOVES = frozenset({"preadv", "pwritev"})
CAN_FAIL = {Fail.SHORT: MOVES, Fail.EINTR: MOVES, Fail.TORN: frozenset({"pwritev"})}
"""Calls that a failure of that kind makes a difference to; where nothing is said, all."""
IN_PARTS = frozenset({Fail.SHORT, Fail.TORN})
"""Failures that need something to cut."""
READS = frozenset({"preadv", "stat", "fstat", "listdir", "statvfs", "set_direct"})
"""Calls that leave the disk as it was: the end in one of them is, for the disk, the end in the next that does not."""


PARTS = 4
"""A complete loop is cut into so many tests, so that each stays within its time limit on a busy machine too."""


def every_call(fail: Fail, *, first: int, step: int | None = None) -> None:
    """One run for each call that the failure can strike and that is counted: from the `first` on every `step`-th, or
    about twelve of them."""
    profile = profile_of(fail)
    able = [at for at, _ in calls_of(profile, fail)]
    chosen = able[first :: step or len(able) // 12]
    struck = sum(bool(scripted(profile, fail, at).disk.num_faults) for at in chosen)
    assert struck == len(chosen), f"of {len(chosen)} calls only {struck} failed"


def every_end(*, cut: bool, first: int, step: int) -> None:
    """One run for each call that changes the disk, counted so, in which the power or the process ends."""
    for at in [at for at, name in calls_of(HONEST) if name not in READS][first::step]:
        ended(at, cut=cut)


@pytest.mark.parametrize("fail", Fail)
def test_some_calls_fail_once(fail: Fail) -> None:
    """A share of the complete loop below."""
    every_call(fail, first=3)


@pytest.mark.parametrize("cut", [False, True])
def test_the_end_comes_in_some_calls(cut: bool) -> None:
    every_end(cut=cut, first=11 * cut, step=23)


@pytest.mark.faults
@pytest.mark.parametrize("fail", Fail)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_call_fails_once(fail: Fail, part: int) -> None:
    every_call(fail, first=part, step=PARTS)


@pytest.mark.faults
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("part", range(PARTS))
def test_the_end_comes_in_every_call(cut: bool, part: int) -> None:
    every_end(cut=cut, first=part, step=PARTS)
