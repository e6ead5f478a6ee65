"""What each eviction policy keeps of one trace at one size: the points that `hicache bench policy` is made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hicache.policies import NAMES as MAKERS
from hicache.policy.base import EvictionPolicy
from hicache.tools.exits import UsageProblem
from hicache.tools.replay.blocks import BlockCache
from hicache.tools.replay.bound import min_hits
from hicache.tools.replay.continued import goes_on
from hicache.tools.replay.readers import SESSION_GAP_S, Request, Trace
from hicache.tools.terminal import printable

MILLION: Final = 1_000_000
POLICIES: Final[dict[str, Callable[[int], EvictionPolicy]]] = {
    "value": MAKERS["value"],
    "LRU": MAKERS["lru"],
    "S3-FIFO": MAKERS["s3-fifo"],
    "LRFU": MAKERS["lrfu"],
}


@dataclass(frozen=True, slots=True)
class Source:
    """One trace file and how it is read."""

    file: str
    block_tokens: int | None = None
    session_gap_s: float = SESSION_GAP_S
    max_sessions: int | None = None

    def open(self, traces: Path) -> Trace:
        """Raises `UsageProblem` where the file is missing or of no known format."""
        path = traces / self.file
        try:
            return Trace(
                path, block_tokens=self.block_tokens, session_gap_s=self.session_gap_s,
                max_sessions=self.max_sessions, sort=True,
            )  # fmt: skip
        except OSError as problem:
            raise UsageProblem(f"--traces: {printable(str(path))}: {problem.strerror or problem}") from None


CONVERSATION: Final = Source("mooncake_conversation.jsonl.gz")
OTHERS: Final = {
    "synthetic": Source("mooncake_synthetic.jsonl.gz"),
    "agent_tools": Source("agent_tools.jsonl.gz", session_gap_s=20.0),
    "coding": Source("agentic_coding.jsonl.gz", block_tokens=512, max_sessions=80),
    "rag": Source("ragpulse.jsonl.gz", block_tokens=16),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One point: a trace at one size, in millions of tokens or in per cent of its distinct ones."""

    traces: Path
    source: Source
    size: int
    is_percent: bool
    is_hinted: bool = False
    """Whether each prompt says if a later one goes on from it: then for "value" alone."""
    divisor: int = 1
    """Only so many-th part of the requests, to try the code."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of it: block hit rates by policy, of all requests and of each half."""

    capacity_blocks: int
    rates: dict[str, float]
    halves: dict[str, tuple[float, float]]
    bound: float
    """Of MIN; 0 for a hinted point, which has none of its own."""


def measure(asked: Asked) -> Measured:
    """Replay every policy at a point. Runs in a process of its own."""
    trace = asked.source.open(asked.traces)
    requests = [request for request in trace if len(request.blocks)]
    if not requests:
        raise UsageProblem(f"--traces: {printable(str(trace.path))}: no prompt in it has a block")
    requests = requests[: max(1, len(requests) // asked.divisor)]
    block_tokens = trace.block_tokens
    if asked.is_percent:
        tokens = distinct_tokens(requests, block_tokens) * asked.size // 100
    else:
        tokens = asked.size * MILLION // asked.divisor
    capacity = max(1, tokens // block_tokens)
    paths: list[list[int]] = [request.blocks.tolist() for request in requests]
    returns = goes_on(requests, block_tokens) if asked.is_hinted else None
    names = ["value"] if asked.is_hinted else list(POLICIES)
    hits = {name: hits_of(name, paths, capacity, returns) for name in names}
    bound = 0.0 if asked.is_hinted else min_hits(paths, capacity) / _blocks(paths)
    middle = len(paths) // 2
    return Measured(
        capacity,
        {name: sum(found) / _blocks(paths) for name, found in hits.items()},
        {
            name: (_rate(found[:middle], paths[:middle]), _rate(found[middle:], paths[middle:]))
            for name, found in hits.items()
        },
        bound,
    )


def hits_of(name: str, paths: Sequence[list[int]], capacity: int, returns: Sequence[bool] | None = None) -> list[int]:
    """Blocks of each prompt that a policy with so many blocks found."""
    cache = BlockCache(POLICIES[name](capacity), capacity)
    if returns is None:
        return [cache.request(path, now) for now, path in enumerate(paths)]
    return [cache.request(path, now, returns=returns[now]) for now, path in enumerate(paths)]


def distinct_tokens(requests: Sequence[Request], block_tokens: int) -> int:
    """Tokens of the distinct blocks of a trace."""
    sizes: dict[int, int] = {}
    for request in requests:
        for place, block in enumerate(request.blocks.tolist()):
            sizes.setdefault(block, min(block_tokens, request.input_tokens - place * block_tokens))
    return sum(sizes.values())


def _blocks(paths: Sequence[list[int]]) -> int:
    return sum(map(len, paths))


def _rate(found: Sequence[int], paths: Sequence[list[int]]) -> float:
    return sum(found) / _blocks(paths) if paths else 0.0
