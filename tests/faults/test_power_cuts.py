"""The NVMe tier over hundreds of ends of the process and of the power, one seed a run (`tests.faults.power`).

To repeat one: HICACHE_SEED=7 python -m pytest tests/faults/test_power_cuts.py -k fast
"""

from collections.abc import Iterable

import pytest

from tests.faults.power import STEPS, PowerRun, Tally, rates_of
from tests.faults.seeded import run_seeded
from tests.simulation import World, seeds

FAST, ALL, BLOCK = 40, 520, 40
"""Seeds in the ordinary run, in all, and in one test."""


def run_seeds(chosen: Iterable[int]) -> Tally:
    total = Tally()
    for seed in chosen:
        total.add(run_seeded(lambda world: PowerRun(world, rates_of(world.seed)).run(STEPS), seed))
    return total


@pytest.mark.slow
def test_what_is_durable_survives_and_nothing_reads_wrong_fast() -> None:
    chosen = list(seeds(FAST))
    total = run_seeds(chosen)
    if len(chosen) >= FAST:
        assert min(total.kills, total.stops, total.cuts_while_opening) > 0
        assert total.pages_recovered > FAST
        assert total.faults > FAST


@pytest.mark.faults
@pytest.mark.parametrize("block", range(ALL // BLOCK))
def test_what_is_durable_survives_and_nothing_reads_wrong(block: int) -> None:
    total = run_seeds(seeds(BLOCK, block=block))
    assert total.pages_written > 0


def test_the_same_seed_is_the_same_run() -> None:
    for seed in (1, 2, 3):
        runs = []
        for _ in range(2):
            kept: list[PowerRun] = []

            async def main(world: World, kept: list[PowerRun] = kept) -> Tally:
                kept.append(PowerRun(world, rates_of(world.seed)))
                return await kept[0].run(100)

            tally = run_seeded(main, seed)
            runs.append((tally, kept[0].disk.num_calls, list(kept[0].disk.recent)))
        assert runs[0] == runs[1]
