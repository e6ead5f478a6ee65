"""Each write policy, and exclusive tiers, on a load that shows what they are for. Pages of 64 tokens; LRU in tiers."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Final

from hicache.tools.replay.generators import WORKLOADS, generate
from hicache.tools.replay.machine import Machine
from hicache.tools.replay.readers import Request
from hicache.tools.replay.replayed import Replayed
from hicache.tools.replay.run import replay
from hicache.write_policy import WritePolicy

PAGE_BYTES: Final = 64 * 4096
ROOM: Final = Machine(
    block_tokens=64, token_bytes=4096, device_pages=100, host_pages=2000, nvme_pages=4000, concurrency=1
)
"""Nothing has to leave the host."""
TIGHT: Final = dataclasses.replace(ROOM, host_pages=400, nvme_pages=400)
"""Less than half of what is asked for again fits into both."""


@cache
def documents() -> list[Request]:
    """Questions of four pages about one of 20 documents of 16 pages: documents are shared, questions are not."""
    workload = dataclasses.replace(
        WORKLOADS["rag"], documents=20, document_tokens=1024, skew=0.5, instruction_tokens=128, question_tokens=256
    )
    return list(generate(workload, seed=1, num_requests=200, block_tokens=64))


@cache
def conversations() -> list[Request]:
    """Long conversations that share nothing: each page is used by every later turn of its own."""
    workload = dataclasses.replace(WORKLOADS["multi-turn"], turns=12, sessions_per_s=0.2)
    return list(generate(workload, seed=1, num_requests=300, block_tokens=64))


@cache
def run(load: Callable[[], list[Request]], machine: Machine) -> Replayed:
    return replay(load(), machine, "lru")


def test_what_a_restart_would_find_for_how_many_writes() -> None:
    """Writing through puts everything on NVMe, selectively what is shared, for a third of the writes; by default
    nothing is written while nothing has to leave. What is found without a restart is the same."""
    demoted, through, selective = (
        run(documents, dataclasses.replace(ROOM, write_policy=each))
        for each in (WritePolicy.DEMOTE, WritePolicy.THROUGH, WritePolicy.SELECTIVE)
    )
    assert demoted.nvme_written_bytes == demoted.pages_on_nvme == 0
    assert through.pages_on_nvme > 0.95 * through.pages_held
    assert selective.nvme_written_bytes < 0.35 * through.nvme_written_bytes
    shared = 20 * 1024 // 64
    assert 0.9 * shared < selective.pages_on_nvme < 1.1 * shared
    assert demoted.blocks_found == through.blocks_found == selective.blocks_found


def test_demoting_needs_the_fewest_writes_where_room_is_short() -> None:
    demoted, through = (
        run(conversations, dataclasses.replace(TIGHT, write_policy=each))
        for each in (WritePolicy.DEMOTE, WritePolicy.THROUGH)
    )
    assert demoted.nvme_written_bytes < 0.6 * through.nvme_written_bytes
    assert demoted.hit_rate > through.hit_rate


def test_exclusive_tiers_hold_more_and_write_more() -> None:
    inclusive, exclusive = (run(conversations, dataclasses.replace(TIGHT, exclusive=each)) for each in (False, True))
    assert exclusive.pages_held > 1.2 * inclusive.pages_held
    assert exclusive.pages_held > 0.95 * (TIGHT.device_pages + TIGHT.host_pages + TIGHT.nvme_pages) - 100
    assert exclusive.hit_rate > inclusive.hit_rate + 0.05
    assert exclusive.nvme_written_bytes > 1.2 * inclusive.nvme_written_bytes
    assert (inclusive.nvme_written_bytes + exclusive.nvme_written_bytes) % PAGE_BYTES == 0


def test_admission_keeps_the_hits_of_documents_without_writing_questions() -> None:
    small = dataclasses.replace(ROOM, host_pages=150, nvme_pages=600)
    always, predicted = (
        run(documents, dataclasses.replace(small, admission=each)) for each in ("always", "predicted")
    )
    assert always.nvme_refused_bytes == 0 < predicted.nvme_refused_bytes
    assert predicted.nvme_written_bytes < 0.8 * always.nvme_written_bytes
    assert predicted.hit_rate > always.hit_rate - 0.02
