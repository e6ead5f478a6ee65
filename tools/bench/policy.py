"""`hicache bench policy --traces DIR`: what our eviction order keeps of real workloads, beside LRU, S3-FIFO and LRFU.

Every policy runs in the configuration that it has by default, one and the same for all traces and sizes:

    value     `hicache.policy.value`, its constants
    LRFU      decay 0.001 a use, sums kept for 262,144 prefixes
    S3-FIFO   a tenth of the tier for what is new, ghosts for as many pages as the tier has
    LRU       none

A hit rate is blocks found from the first one on ÷ blocks of all prompts, over the whole trace from an empty cache. One
block is one unit of the cache; a capacity in tokens is divided by the tokens of a block. The traces, which must lie in
DIR under these names (`.jsonl.gz`), and how they are laid out:

    mooncake_conversation  at 1, 2, 4 and 8 million tokens
    mooncake_synthetic     at 1, 5 and 10 % of the tokens of its distinct blocks
    agent_tools            as well; sessions 20 s apart. At 1 % it holds less than two prompts: shown, not judged
    agentic_coding         as well; the first 80 sessions, 120 s apart, 8 blocks of 64 tokens as one
    ragpulse               as well; components laid out in blocks of 16 tokens, requests in order of time
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hicache.policy.base import EvictionPolicy
from hicache.policy.lrfu import LrfuPolicy
from hicache.policy.lru import LruPolicy
from hicache.policy.s3fifo import S3FifoPolicy
from hicache.policy.value import ValuePolicy
from hicache.tools.bench.planner import planner_rows
from hicache.tools.bench.results import Baseline, Note, Report, Row
from hicache.tools.exits import UsageProblem
from hicache.tools.replay.blocks import BlockCache
from hicache.tools.replay.bound import min_hits
from hicache.tools.replay.traces import Trace, read_trace

MILLION: Final = 1_000_000
SHARES: Final = (1, 5, 10)
"""Per cent of a trace's distinct tokens."""
GAP_GOALS: Final = {1: 0.30, 2: 0.31, 4: 0.12, 8: 0.16}
"""LRFU's share of the way from LRU to MIN, by millions of tokens."""

POLICIES: Final[dict[str, Callable[[int], EvictionPolicy]]] = {
    "value": lambda capacity: ValuePolicy(),
    "LRU": lambda capacity: LruPolicy(),
    "S3-FIFO": lambda capacity: S3FifoPolicy(capacity_pages=capacity),
    "LRFU": lambda capacity: LrfuPolicy(),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to replay."""

    traces: Path
    """Directory of the trace files."""
    divisor: int = 1
    """Only so many-th part of each trace's requests, to try the code."""


@dataclass(frozen=True, slots=True)
class _Source:
    """One trace file and how it is read."""

    file: str
    regroup: int = 1
    stagger_s: float = 120.0
    sessions_max: int | None = None


CONVERSATION: Final = _Source("mooncake_conversation.jsonl.gz")
OTHERS: Final = {
    "synthetic": _Source("mooncake_synthetic.jsonl.gz"),
    "agent_tools": _Source("agent_tools.jsonl.gz", stagger_s=20.0),
    "coding": _Source("agentic_coding.jsonl.gz", regroup=8, sessions_max=80),
    "rag": _Source("ragpulse.jsonl.gz"),
}
NOT_JUDGED: Final = {("agent_tools", 1)}


def check(plan: Plan) -> None:
    """Raise `UsageProblem` naming the first trace that is missing."""
    for source in (CONVERSATION, *OTHERS.values()):
        if not (plan.traces / source.file).is_file():
            raise UsageProblem(f"--traces: there is no file {plan.traces / source.file}")


def run(report: Report, note: Note, plan: Plan) -> None:
    """Measure every row, one after the other. Some minutes for whole traces."""
    judged: list[tuple[str, dict[str, float]]] = []
    paths, block_tokens = _paths(_read(plan, CONVERSATION))
    for millions, goal in GAP_GOALS.items():
        capacity = max(1, millions * MILLION // plan.divisor // block_tokens)
        rates = hit_rates(paths, capacity)
        bound = min_hits(paths, capacity) / _blocks(paths)
        judged.append((f"conversation {millions} M", rates))
        note(_comparison(f"conversation, {millions} M tokens, {capacity} blocks", rates, bound))
        room = bound - rates["LRU"]
        share, theirs = ((rates[name] - rates["LRU"]) / room if room else 0.0 for name in ("value", "LRFU"))
        baseline = Baseline("LRFU", theirs)
        report(Row(f"conversation_gap_{millions}m", share, "of gap", baseline, 1.0, goal, higher_is_better=True))
    for name, source in OTHERS.items():
        trace = _read(plan, source)
        paths, block_tokens = _paths(trace)
        for percent in SHARES:
            capacity = max(1, distinct_tokens(trace) * percent // 100 // block_tokens)
            rates = hit_rates(paths, capacity)
            bound = min_hits(paths, capacity) / _blocks(paths)
            note(_comparison(f"{name}, {percent} %, {capacity} blocks", rates, bound))
            best = max((rate, other) for other, rate in rates.items() if other != "value")
            report(Row(f"{name}_{percent}", rates["value"], "hits", Baseline(best[1], best[0]), bound))
            if (name, percent) not in NOT_JUDGED:
                judged.append((f"{name} {percent} %", rates))
    behind, where = min((rates["value"] - _best(rates), point) for point, rates in judged)
    note(f"furthest behind the best: {where}")
    report(Row("worst_vs_best", behind, "hits", None, None, -0.005, higher_is_better=True))
    ratio, where = min((rates["value"] / rates["LRU"], point) for point, rates in judged if rates["LRU"])
    note(f"least over LRU: {where}")
    report(Row("worst_vs_lru", ratio, "of LRU", None, None, 0.99, higher_is_better=True))
    for row in planner_rows():
        report(row)


def hit_rates(paths: list[tuple[int, ...]], capacity: int) -> dict[str, float]:
    """Block hit rate of every policy with that many blocks."""
    return {
        name: sum(map(BlockCache(make(capacity), capacity).request, paths, range(len(paths)))) / _blocks(paths)
        for name, make in POLICIES.items()
    }


def distinct_tokens(trace: Trace) -> int:
    """Tokens of the distinct blocks of a trace."""
    sizes: dict[int, int] = {}
    for request in trace.requests:
        last = len(request.blocks) - 1
        for place, block in enumerate(request.blocks):
            size = trace.block_tokens if place < last else request.num_tokens - last * trace.block_tokens
            sizes.setdefault(block, size)
    return sum(sizes.values())


def _read(plan: Plan, source: _Source) -> Trace:
    trace = read_trace(
        plan.traces / source.file,
        sort=True,
        regroup=source.regroup,
        stagger_s=source.stagger_s,
        sessions_max=source.sessions_max,
    )
    requests = trace.requests[: max(1, len(trace.requests) // plan.divisor)]
    return Trace(trace.name, trace.form, trace.block_tokens, requests, trace.num_skipped)


def _paths(trace: Trace) -> tuple[list[tuple[int, ...]], int]:
    return [request.blocks for request in trace.requests if request.blocks], trace.block_tokens


def _blocks(paths: list[tuple[int, ...]]) -> int:
    return sum(map(len, paths))


def _best(rates: dict[str, float]) -> float:
    return max(rate for name, rate in rates.items() if name != "value")


def _comparison(point: str, rates: dict[str, float], bound: float) -> str:
    return f"{point}: " + ", ".join(f"{name} {rate:.4f}" for name, rate in (*rates.items(), ("MIN", bound)))
