"""`hicache bench policy --traces DIR`: what our eviction order keeps of real workloads, beside LRU, S3-FIFO and LRFU.

Every policy runs in the configuration that it has by default, one and the same for all traces and sizes:

    value     guarded, as a cache has it; its constants are listed in hicache/policy/README.md
    LRFU      decay 0.001 a use, sums kept for 262,144 prefixes
    S3-FIFO   a tenth of the tier for what is new, ghosts for as many pages as the tier has
    LRU       none

A hit rate is blocks found from the first one on ÷ blocks of all prompts, over the whole trace from an empty cache. One
block is one unit of the cache; a capacity in tokens is divided by the tokens of a block. The traces, which must lie in
DIR under these names (`.jsonl.gz`), and how they are laid out:

    mooncake_conversation  at 1, 2, 4 and 8 million tokens; hinted rows: each prompt says whether a later one goes on
    mooncake_synthetic     at 1, 5 and 10 % of the tokens of its distinct blocks
    agent_tools            as well; sessions 20 s apart. At 1 % it holds less than two prompts: shown, not judged
    agentic_coding         as well; the first 80 sessions, 120 s apart, 8 blocks of 64 tokens as one
    ragpulse               as well; components laid out in blocks of 16 tokens, requests in order of time

Points are measured in two processes at once and reported in order. The rows of the planner, of admission to NVMe
(`hicache.tools.bench.policy_admission`) and of made-up loads (`hicache.tools.bench.policy_seeded`) follow.
"""

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hicache.tools.bench import policy_admission, policy_seeded
from hicache.tools.bench.planner import planner_rows
from hicache.tools.bench.policy_points import CONVERSATION, OTHERS, Asked, Measured, Source, measure
from hicache.tools.bench.results import Baseline, Note, Report, Row

SHARES: Final = (1, 5, 10)
"""Per cent of a trace's distinct tokens."""
GAP_GOALS: Final = {1: 0.30, 2: 0.31, 4: 0.12, 8: 0.16}
"""LRFU's share of the way from LRU to MIN, by millions of tokens."""
HINTED_GOALS: Final = {1: 0.129, 2: 0.198, 4: 0.281, 8: 0.341}
"""95 % of what is found by a cache that knows whether a prompt is gone on from, and not when."""
NOT_JUDGED: Final = {("agent_tools", 1)}
PROCESSES: Final = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What to replay."""

    traces: Path
    """Directory of the trace files."""
    divisor: int = 1
    """Only so many-th part of each trace's requests, to try the code."""


def check(plan: Plan) -> None:
    """Raise `UsageProblem` naming the first trace that is missing or of no known format."""
    for source in (CONVERSATION, *OTHERS.values()):
        source.open(plan.traces)


def run(report: Report, note: Note, plan: Plan) -> None:
    """Measure every row, one after the other. Some minutes for whole traces."""
    judged: list[tuple[str, dict[str, float]]] = []

    def ask(source: Source, size: int, *, is_percent: bool, is_hinted: bool = False) -> Asked:
        return Asked(plan.traces, source, size, is_percent, is_hinted, plan.divisor)

    points = [
        *(ask(CONVERSATION, millions, is_percent=False) for millions in GAP_GOALS),
        *(ask(CONVERSATION, millions, is_percent=False, is_hinted=True) for millions in HINTED_GOALS),
        *(ask(source, percent, is_percent=True) for source in OTHERS.values() for percent in SHARES),
    ]
    note(f"{len(points)} points of five traces, {PROCESSES} at a time")
    with _measuring(points) as measured:
        for millions, goal in GAP_GOALS.items():
            found = next(measured)
            _compare(note, f"conversation, {millions} M tokens", found)
            judged.append((f"conversation {millions} M", found.rates))
            room = found.bound - found.rates["LRU"]
            share, theirs = (
                (found.rates[name] - found.rates["LRU"]) / room if room else 0.0 for name in ("value", "LRFU")
            )
            baseline = Baseline("LRFU", theirs)
            report(Row(f"conversation_gap_{millions}m", share, "of gap", baseline, 1.0, goal, higher_is_better=True))
        for millions, goal in HINTED_GOALS.items():
            found = next(measured)
            _compare(note, f"conversation hinted, {millions} M tokens", found)
            baseline = Baseline("without", dict(judged)[f"conversation {millions} M"]["value"])
            name, rate = f"conversation_hinted_{millions}m", found.rates["value"]
            report(Row(name, rate, "hits", baseline, None, goal, higher_is_better=True))
        for name in OTHERS:
            for percent in SHARES:
                found = next(measured)
                _compare(note, f"{name}, {percent} %", found)
                best = max((rate, other) for other, rate in found.rates.items() if other != "value")
                report(Row(f"{name}_{percent}", found.rates["value"], "hits", Baseline(best[1], best[0]), found.bound))
                if (name, percent) not in NOT_JUDGED:
                    judged.append((f"{name} {percent} %", found.rates))
    behind, where = min((rates["value"] - _best(rates), point) for point, rates in judged)
    note(f"furthest behind the best: {where}")
    report(Row("worst_vs_best", behind, "hits", None, None, -0.005, higher_is_better=True))
    ratio, where = min((rates["value"] / rates["LRU"], point) for point, rates in judged if rates["LRU"])
    note(f"least over LRU: {where}")
    report(Row("worst_vs_lru", ratio, "of LRU", None, None, 0.99, higher_is_better=True))
    for row in planner_rows():
        report(row)
    policy_admission.rows(plan.traces, note, report, plan.divisor)
    policy_seeded.rows(note, report, plan.divisor)


@contextmanager
def _measuring(points: Iterable[Asked]) -> Iterator[Iterator[Measured]]:
    """What comes of each point, in order, as soon as it and those before it are there."""
    # Forked: a spawned process imports everything again, and its tracker of resources outlives the pool.
    pool = ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("fork"))
    try:
        yield pool.map(measure, points)
    finally:
        pool.shutdown(cancel_futures=True)


def _best(rates: dict[str, float]) -> float:
    return max(rate for name, rate in rates.items() if name != "value")


def _compare(note: Note, point: str, found: Measured) -> None:
    """Show all policies at a point, with both halves of the trace."""
    shown = [
        f"{name} {rate:.4f} ({found.halves[name][0]:.4f}, {found.halves[name][1]:.4f})"
        for name, rate in found.rates.items()
    ]
    bound = f", MIN {found.bound:.4f}" if found.bound else ""
    note(f"{point}, {found.capacity_blocks} blocks (halves): {', '.join(shown)}{bound}")
