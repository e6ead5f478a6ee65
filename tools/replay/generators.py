"""Seeded workloads: requests as a serving system sees them, made up from a few numbers.

Sessions begin at random (a Poisson process). Every prompt of a session is, in this order,

    instructions    the same for all sessions
    a document      one of `documents`, chosen once a session, popular ones more often (Zipf)
    a beginning     the session's own
    turns           question, answer, question, answer, ..., and the question that is asked now

so that a prompt has all of the last one of its session and two parts more. Lengths of questions and answers, turns of a
session and the time between two turns vary; everything else is as the numbers say. One seed, one workload.
"""

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Final

from hicache.errors import BadRequest
from hicache.tools.replay.readers import BlockKey, Chunk, Request, cut_into_blocks

DEFAULT_REQUESTS: Final = 4000
"""Requests of a workload where nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The numbers of a workload. Raises `BadRequest` naming the one that is out of bounds."""

    sessions_per_s: float
    """How many sessions begin in a second, on average; above 0, at most 1,000."""
    turns: int = 1
    """Turns of a session on average: 1 to `2 * turns - 1` of them are equally likely."""
    think_s: float = 20.0
    """Seconds from one question to the next, on average (exponential)."""
    instruction_tokens: int = 0
    documents: int = 0
    """Documents there are; 0 for prompts without one."""
    document_tokens: int = 0
    skew: float = 1.0
    """Exponent of Zipf's law: the n-th most popular document is chosen in proportion to `n ** -skew`."""
    beginning_tokens: int = 0
    question_tokens: int = 64
    """On average: half of that to one and a half times as much are equally likely; so for answers."""
    answer_tokens: int = 192

    def __post_init__(self) -> None:
        bounds: dict[str, tuple[float, float]] = {
            "sessions_per_s": (1e-6, 1000), "turns": (1, 1000), "think_s": (0, 1e6), "documents": (0, 100_000),
            "skew": (0, 10), "question_tokens": (1, 1 << 20), "answer_tokens": (0, 1 << 20),
        }  # fmt: skip
        for each in fields(self):
            low, high = bounds.get(each.name, (0, 1 << 20))
            value = getattr(self, each.name)
            if not low <= value <= high:
                raise BadRequest(each.name, f"{value} is not within {low:g} to {high:g}")


WORKLOADS: Final = {
    "chat": Workload(sessions_per_s=0.5, turns=6, instruction_tokens=2048),
    "few-shot": Workload(sessions_per_s=2.0, documents=16, document_tokens=2048),
    "rag": Workload(sessions_per_s=1.0, instruction_tokens=512, documents=20, document_tokens=8192, question_tokens=48),
    "multi-turn": Workload(
        sessions_per_s=0.1, turns=24, beginning_tokens=512, question_tokens=128, answer_tokens=256
    ),
}  # fmt: skip
"""The workloads by name.

    chat        short conversations of many people with one assistant: its instructions are shared
    few-shot    questions behind one of 16 sets of examples (its documents), each asked once
    rag         questions about one of 20 long documents, each asked once
    multi-turn  long conversations that share nothing with each other
"""


@dataclass(slots=True)
class _Session:
    """A session that goes on."""

    name: str
    turns_left: int
    chunks: list[Chunk]
    lengths: list[int]
    document_tokens: int
    turn: int = field(default=0)


def generate(workload: Workload, *, seed: int, num_requests: int, block_tokens: int) -> Iterator[Request]:
    """The first `num_requests` requests of a workload, in order of time, in blocks of `block_tokens` tokens."""
    rng = random.Random(seed)
    serials = itertools.count()
    ids: dict[BlockKey, int] = {}
    popularity = list(itertools.accumulate((n + 1) ** -workload.skew for n in range(workload.documents)))
    waiting: list[tuple[float, int, _Session]] = []
    next_start_s = 0.0
    for _ in range(num_requests):
        while not waiting or next_start_s <= waiting[0][0]:
            heapq.heappush(waiting, (next_start_s, next(serials), _begin(workload, rng, next(serials), popularity)))
            next_start_s += rng.expovariate(workload.sessions_per_s)
        now_s, _, session = heapq.heappop(waiting)
        session.chunks.append(("question", next(serials)))
        session.lengths.append(_around(rng, workload.question_tokens))
        answer = _around(rng, workload.answer_tokens)
        tokens = sum(session.lengths)
        blocks = cut_into_blocks(session.chunks, session.lengths, block_tokens, ids)
        yield Request(now_s, blocks, tokens, answer, session.name, session.turn, session.document_tokens)
        session.turn += 1
        session.turns_left -= 1
        if session.turns_left:
            session.chunks.append(("answer", next(serials)))
            session.lengths.append(answer)
            pause_s = rng.expovariate(1 / workload.think_s) if workload.think_s else 0.0
            heapq.heappush(waiting, (now_s + pause_s, next(serials), session))


def _begin(workload: Workload, rng: random.Random, serial: int, popularity: list[float]) -> _Session:
    chunks: list[Chunk] = []
    lengths: list[int] = []
    if workload.instruction_tokens:
        chunks.append(("instructions", 0))
        lengths.append(workload.instruction_tokens)
    if workload.documents and workload.document_tokens:
        (document,) = rng.choices(range(workload.documents), cum_weights=popularity)
        chunks.append(("document", document))
        lengths.append(workload.document_tokens)
    document_tokens = sum(lengths)
    if workload.beginning_tokens:
        chunks.append(("beginning", serial))
        lengths.append(workload.beginning_tokens)
    return _Session(f"session {serial}", rng.randint(1, 2 * workload.turns - 1), chunks, lengths, document_tokens)


def _around(rng: random.Random, mean: int) -> int:
    return rng.randint(mean - mean // 2, mean + mean // 2)
