"""Which document each request asks about: a seeded Zipf law, and one request that is larger than the device.

Every document is asked about at least once; the other requests are drawn with probability proportional to 1/rank, ranks
being shuffled by the seed; then the order is shuffled. Since a demo of three tiers has to reach all three, orders are
drawn until enough requests come back to a document at each of three **reuse distances**, measured in tokens as LRU sees
them: close enough for the device, too far for it but close enough for the host, and farther than that. Same arguments,
same workload.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

ZIPF_EXPONENT: Final = 1.0
MAX_DRAWS: Final = 500
"""Orders drawn before the best one so far is taken."""
MAX_STEPS: Final = 2_000_000
"""Bound on draws times requests times documents: about a second."""
QUESTION_TOKENS: Final = 48
"""What a request adds to the cache beside its document: question and answer, roughly."""
OVERSIZE: Final = 1.6
"""The oversized request's context is at least this many times the device budget, where documents and model allow."""
# Distances that decide a tier beyond doubt, although tiers hold whole pages and not documents.
_SURELY_DEVICE: Final = 0.95
_SURELY_BEYOND_DEVICE: Final = 1.5
_SURELY_HOST: Final = 0.8
_SURELY_BEYOND_HOST: Final = 1.3


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a question about some documents."""

    documents: tuple[int, ...]
    """Indices of the documents, in the order in which the prompt has them; more than one in the oversized request."""
    visit: int
    """How often the (first) document was asked about before, from 0: picks the question."""
    oversized: bool = False


def build_workload(
    sizes: Sequence[int],
    *,
    num_requests: int,
    seed: int,
    device_tokens: int,
    host_tokens: int,
    oversized: Sequence[int],
) -> list[Ask]:
    """`num_requests` requests about documents of these sizes, in tokens, and the oversized one among them, after two
    thirds, if `oversized` names documents.

    `num_requests` is at least the number of documents. `device_tokens` and `host_tokens` are the tiers' capacities.
    """
    if len(sizes) > num_requests:
        raise ValueError(f"{num_requests} requests cannot ask about each of {len(sizes)} documents")
    wanted = max(num_requests // 10, 1)
    best: list[Ask] = []
    best_reach = -1
    for draw in range(min(MAX_DRAWS, MAX_STEPS // (len(sizes) * num_requests) + 1)):
        asks = _draw(len(sizes), num_requests, random.Random(f"hicache demo {seed} {draw}"), oversized)
        reach = min(reuse(asks, sizes, device_tokens=device_tokens, host_tokens=host_tokens))
        if reach > best_reach:
            best, best_reach = asks, reach
        if reach >= wanted:
            break
    return best


def _draw(num_documents: int, num_requests: int, rng: random.Random, oversized: Sequence[int]) -> list[Ask]:
    by_rank = list(range(num_documents))
    rng.shuffle(by_rank)
    weights = [1 / rank**ZIPF_EXPONENT for rank in range(1, num_documents + 1)]
    order = by_rank + rng.choices(by_rank, weights, k=num_requests - num_documents)
    rng.shuffle(order)
    visits = [0] * num_documents
    asks = []
    for position, document in enumerate(order):
        if oversized and position == num_requests * 2 // 3:
            asks.append(Ask(tuple(oversized), visits[oversized[-1]], oversized=True))
        asks.append(Ask((document,), visits[document]))
        visits[document] += 1
    return asks


def reuse(asks: Sequence[Ask], sizes: Sequence[int], *, device_tokens: int, host_tokens: int) -> tuple[int, int, int]:
    """How many requests come back to their document at a distance that surely finds it on the device, in the host tier
    and not the device, and on NVMe alone. A distance counts the document itself and everything asked about since."""
    counts = [0, 0, 0]
    recent: dict[int, int] = {}  # documents, most recent last, and `other_tokens` when they were last asked about
    other_tokens = 0  # questions, answers, and all but the first document of an oversized request: nobody else's prefix
    for ask in asks:
        document = ask.documents[0]
        if document in recent:
            since = other_tokens - recent.pop(document)
            distance = since + sizes[document]
            for other, asked_at in reversed(recent.items()):
                if asked_at < other_tokens - since:
                    break
                distance += sizes[other]
            if not ask.oversized:
                counts[0] += distance <= device_tokens * _SURELY_DEVICE
                counts[1] += device_tokens * _SURELY_BEYOND_DEVICE <= distance <= host_tokens * _SURELY_HOST
                counts[2] += distance >= (device_tokens + host_tokens) * _SURELY_BEYOND_HOST
        recent[document] = other_tokens
        other_tokens += QUESTION_TOKENS + sum(sizes[other] for other in ask.documents[1:])
    return counts[0], counts[1], counts[2]


def choose_oversized(sizes: Sequence[int], *, device_tokens: int, max_tokens: int, seed: int) -> tuple[int, ...]:
    """Documents whose texts together exceed `device_tokens` and fit into `max_tokens`, chosen by the seed; a document
    may come more than once where there are few small ones. Empty if it cannot be done."""
    order = list(range(len(sizes)))
    random.Random(f"hicache demo oversized {seed}").shuffle(order)
    chosen: list[int] = []
    total = 0
    while total < device_tokens * OVERSIZE:
        fitting = [document for document in order if 0 < sizes[document] <= max_tokens - total]
        if not fitting:
            break
        # In turn, each once before any comes again.
        document = min(fitting, key=chosen.count)
        chosen.append(document)
        total += sizes[document]
    return tuple(chosen) if total > device_tokens else ()
