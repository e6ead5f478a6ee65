"""The seeded rows of `hicache bench policy`: hit rates of made-up loads in the default configuration of a replay.

Each is 4,000 requests of `hicache replay --synthetic KIND` (`hicache.tools.replay.generators` gives the numbers), seed
0, through the whole cache: 40 GiB of device, 256 GiB of host and 1 TiB of NVMe at 128 KiB a token, LRU in each, pages
of 64 tokens. A rate is tokens found of all prompts' tokens, of rag those of instructions and documents. The bound is
what a cache without limits finds that has each prompt before the next one comes.
"""

from typing import Final

from hicache.policies import LRU
from hicache.tools.bench.results import Note, Report, Row
from hicache.tools.replay.generators import DEFAULT_REQUESTS, WORKLOADS, generate
from hicache.tools.replay.machine import Machine
from hicache.tools.replay.readers import DEFAULT_BLOCK, Request
from hicache.tools.replay.run import replay

GOALS: Final = {"chat": 0.85, "few-shot": 0.95, "rag": 0.99, "multi-turn": 0.90}


def rows(note: Note, report: Report, divisor: int = 1) -> None:
    """Measure every row, of so many-th part of the requests. About a minute."""
    for kind, goal in GOALS.items():
        requests = list(
            generate(WORKLOADS[kind], seed=0, num_requests=DEFAULT_REQUESTS // divisor, block_tokens=DEFAULT_BLOCK)
        )
        found = replay(requests, Machine.default(DEFAULT_BLOCK), LRU)
        tokens, documents = ideal(requests)
        all_tokens = sum([request.input_tokens for request in requests])
        all_documents = sum([request.document_tokens for request in requests])
        rate, bound = found.hit_rate, tokens / all_tokens
        if kind == "rag":
            rate, bound = found.document_tokens_found / all_documents, documents / all_documents
        times = f"TTFT {found.ttft(0.5):.4f} s p50, {found.ttft(0.99):.4f} s p99"
        note(f"{kind}: {found.hit_rate:.4f} of all tokens, {times}")
        name = f"seeded_{kind.replace('-', '_')}"
        report(Row(name, rate, "hits", None, bound, goal, higher_is_better=True))


def ideal(requests: list[Request]) -> tuple[int, int]:
    """Tokens, and of these document tokens, that were in a prompt before, in whole prefixes."""
    seen: set[int] = set()
    tokens = documents = 0
    for request in requests:
        blocks = request.blocks.tolist()
        num_known = sum([block in seen for block in blocks])  # chained: what is known is known from the first one on
        known = min(num_known * DEFAULT_BLOCK, request.input_tokens)
        tokens += known
        documents += min(known, request.document_tokens)
        seen.update(blocks)
    return tokens, documents
