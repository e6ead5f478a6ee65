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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hicache.policies import NAMES as MAKERS
from hicache.policy.base import EvictionPolicy
from hicache.tools.bench.planner import planner_rows
from hicache.tools.bench.results import Baseline, Note, Report, Row
from hicache.tools.exits import UsageProblem
from hicache.tools.replay.blocks import BlockCache
from hicache.tools.replay.bound import min_hits
from hicache.tools.replay.readers import SESSION_GAP_S, Request, Trace
from hicache.tools.terminal import printable

MILLION: Final = 1_000_000
SHARES: Final = (1, 5, 10)
"""Per cent of a trace's distinct tokens."""
GAP_GOALS: Final = {1: 0.30, 2: 0.31, 4: 0.12, 8: 0.16}
"""LRFU's share of the way from LRU to MIN, by millions of tokens."""

POLICIES: Final[dict[str, Callable[[int], EvictionPolicy]]] = {
    "value": MAKERS["value"],
    "LRU": MAKERS["lru"],
    "S3-FIFO": MAKERS["s3-fifo"],
    "LRFU": MAKERS["lrfu"],
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
    block_tokens: int | None = None
    session_gap_s: float = SESSION_GAP_S
    max_sessions: int | None = None


CONVERSATION: Final = _Source("mooncake_conversation.jsonl.gz")
OTHERS: Final = {
    "synthetic": _Source("mooncake_synthetic.jsonl.gz"),
    "agent_tools": _Source("agent_tools.jsonl.gz", session_gap_s=20.0),
    "coding": _Source("agentic_coding.jsonl.gz", block_tokens=512, max_sessions=80),
    "rag": _Source("ragpulse.jsonl.gz", block_tokens=16),
}
NOT_JUDGED: Final = {("agent_tools", 1)}


def check(plan: Plan) -> None:
    """Raise `UsageProblem` naming the first trace that is missing or of no known format."""
    for source in (CONVERSATION, *OTHERS.values()):
        _open(plan, source)


def run(report: Report, note: Note, plan: Plan) -> None:
    """Measure every row, one after the other. Some minutes for whole traces."""
    judged: list[tuple[str, dict[str, float]]] = []
    requests, block_tokens = _read(plan, CONVERSATION)
    paths = _paths(requests)
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
        requests, block_tokens = _read(plan, source)
        paths, distinct = _paths(requests), distinct_tokens(requests, block_tokens)
        for percent in SHARES:
            capacity = max(1, distinct * percent // 100 // block_tokens)
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


def hit_rates(paths: list[list[int]], capacity: int) -> dict[str, float]:
    """Block hit rate of every policy with that many blocks."""
    return {
        name: sum(map(BlockCache(make(capacity), capacity).request, paths, range(len(paths)))) / _blocks(paths)
        for name, make in POLICIES.items()
    }


def distinct_tokens(requests: Sequence[Request], block_tokens: int) -> int:
    """Tokens of the distinct blocks of a trace."""
    sizes: dict[int, int] = {}
    for request in requests:
        for place, block in enumerate(request.blocks.tolist()):
            sizes.setdefault(block, min(block_tokens, request.input_tokens - place * block_tokens))
    return sum(sizes.values())


def _open(plan: Plan, source: _Source) -> Trace:
    path = plan.traces / source.file
    try:
        return Trace(
            path, block_tokens=source.block_tokens, session_gap_s=source.session_gap_s,
            max_sessions=source.max_sessions, sort=True,
        )  # fmt: skip
    except OSError as problem:
        raise UsageProblem(f"--traces: {printable(str(path))}: {problem.strerror or problem}") from None


def _read(plan: Plan, source: _Source) -> tuple[list[Request], int]:
    """The prompts of a trace that have blocks, and the tokens of a block."""
    trace = _open(plan, source)
    requests = [request for request in trace if len(request.blocks)]
    if not requests:
        raise UsageProblem(f"--traces: {printable(str(trace.path))}: no prompt in it has a block")
    return requests[: max(1, len(requests) // plan.divisor)], trace.block_tokens


def _paths(requests: Sequence[Request]) -> list[list[int]]:
    return [request.blocks.tolist() for request in requests]


def _blocks(paths: list[list[int]]) -> int:
    return sum(map(len, paths))


def _best(rates: dict[str, float]) -> float:
    return max(rate for name, rate in rates.items() if name != "value")


def _comparison(point: str, rates: dict[str, float], bound: float) -> str:
    return f"{point}: " + ", ".join(f"{name} {rate:.4f}" for name, rate in (*rates.items(), ("MIN", bound)))
