"""Blocks of layers with a window: what of them is saved, and what a save does whose blocks others are given."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from hicache.service.client import Prompt
from hicache.service.engines.link import Link
from hicache.service.engines.vllm.blocks import Blocks
from hicache.service.engines.vllm.identity import Groups, Identity
from hicache.service.engines.vllm.plan import BlockIds, Load, Plan, Save
from hicache.service.engines.vllm.scheduling import Scheduling
from hicache.service.engines.vllm.settings import Settings
from hicache.service.engines.vllm.transfers import Transfers
from tests.service.serving import ThreadServer, thread_server
from tests.service.test_vllm import (
    BLOCK,
    LAYER_BYTES,
    LAYERS,
    NUM_BLOCKS,
    Request,
    SlidingWindowSpec,
    cache_config,
    engine_config,
    group,
    spec,
    told,
)

WINDOW: Final = 2 * BLOCK
GROUPS: Final = Groups.of(cache_config(group("a"), group("b", kind=spec(SlidingWindowSpec, sliding_window=WINDOW))))
TOKENS: Final = list(range(6 * BLOCK))
LOAD_S: Final = 5.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadServer]:
    layout = {"num_layers": LAYERS, "num_kv_heads": 1, "head_dim": 16, "dtype": "float32", "page_size": BLOCK}
    with thread_server(tmp_path, layout=layout, host__bytes=64 * LAYERS * LAYER_BYTES) as running:
        yield running


@pytest.fixture
def link(server: ThreadServer) -> Iterator[Link]:
    given = Settings.of({"socket_dir": str(server.directory), "strict": True})
    link = Link(given, name="test", staging_bytes=16 * LAYERS * LAYER_BYTES)
    yield link
    link.close()


def identity() -> Identity:
    return told(Identity.of(engine_config(), GROUPS, b"f" * 32, "w"))


def scheduling_of(link: Link, groups: Groups = GROUPS) -> Scheduling:
    return Scheduling(identity(), groups, link, lookup_timeout_s=5.0, load_timeout_s=LOAD_S)


def step(request: Request, blocks: Sequence[list[int]], num_scheduled: int, *, new: Sequence[Any] = ()) -> Any:
    """A step of vLLM's that computes so many tokens of one request. `new`: blocks of requests that begin."""
    return SimpleNamespace(
        total_num_scheduled_tokens=num_scheduled,
        num_scheduled_tokens={request.request_id: num_scheduled},
        preempted_req_ids=None,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=request.request_id, num_computed_tokens=request.num_computed, block_ids=each)
            for each in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[request.request_id], num_computed_tokens=[request.num_computed], new_block_ids=[None]
        ),
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: tuple(blocks)),
        kv_cache_block_copies=[SimpleNamespace(dst_block_id=40)],
    )  # fmt: skip


def test_a_page_is_saved_with_all_its_layers_or_not_at_all(link: Link) -> None:
    scheduling = scheduling_of(link)
    request = Request("r", list(TOKENS))
    assert scheduling.matched(request, 4 * BLOCK) == 0, "vLLM has four pages, of which it needs two"
    request.num_computed = 4 * BLOCK
    full, window = [1, 2, 3, 4, 5, 6], [0, 0, 7, 8, 9, 10]
    (save,) = scheduling.plan(step(request, [full, window], 2 * BLOCK)).saves
    assert save.first_page == 2
    assert save.blocks == ((3, 4, 5, 6), (7, 8, 9, 10))
    assert len(save.new_tokens) == 4 * len(TOKENS), "all tokens, as the page's name has them"
    assert not scheduling.plan(step(request, [full, window], 2 * BLOCK)).saves, "once"


def test_what_a_step_writes_to_for_the_first_time_is_told(link: Link) -> None:
    scheduling = scheduling_of(link)
    request = Request("r", list(TOKENS))
    scheduling.matched(request, 0)
    plan = scheduling.plan(step(request, [[1], [2]], 1, new=[([11, 12], [13, 0])]))
    assert plan.overwritten == {11, 12, 13, 40}
    alone = Groups.of(cache_config(group("a", "b")))
    plan = scheduling_of(link, alone).plan(step(request, [[1]], 1, new=[([11, 12],)]))
    assert not plan.overwritten, "blocks of full attention stay until their request has ended"


def store(link: Link) -> tuple[list[int], ...]:
    """Have the pages of `TOKENS` in the sidecar; the blocks, of each group, that they were in."""
    blocks, num_pages = HeldBlocks(), len(TOKENS) // BLOCK
    blocks.let_through.set()
    ids = tuple(tuple(range(first, first + num_pages)) for first in (1, 20))
    transfers = Transfers(link, blocks, Settings(), page_size=BLOCK, rank=0)
    transfers.begin_saves(Plan(saves=[saved("before", list(TOKENS), ids)]))
    transfers.close()
    return tuple(map(list, ids))


def test_of_a_load_that_failed_what_had_come_is_loaded_once_more(link: Link) -> None:
    ids, scheduling, request = store(link), scheduling_of(link), Request("r", [*TOKENS, 0])
    for _ in range(2):
        assert scheduling.matched(request, 0) == len(TOKENS)
        scheduling.allocated(request, ids, len(TOKENS))
        scheduling.ended(["r"], ())  # vLLM has taken back all that the request had
    assert scheduling.matched(request, 0) == 0


def test_a_second_load_has_what_the_first_has_left_of_its_time(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("hicache.service.engines.vllm.scheduling.time", clock)
    ids, scheduling, request = store(link), scheduling_of(link), Request("r", [*TOKENS, 0])

    def load(*, takes_s: float) -> float:
        """A load that fails; how long it might have taken."""
        assert scheduling.matched(request, 0) == len(TOKENS)
        scheduling.allocated(request, ids, len(TOKENS))
        [planned] = scheduling.plan(step(request, ids, 0)).loads
        clock.now += takes_s
        scheduling.ended([request.request_id], ())
        return planned.timeout_s

    assert load(takes_s=2.0) == LOAD_S
    clock.now += 1.0  # until vLLM has blocks for it again
    assert load(takes_s=2.0) == LOAD_S - 3.0
    preempted = step(request, ids, 0)
    preempted.preempted_req_ids = {"r"}
    scheduling.plan(preempted)
    assert load(takes_s=LOAD_S) == LOAD_S, "it is begun anew"
    request = Request("on a disk that hangs", [*TOKENS, 0])
    assert load(takes_s=LOAD_S) == LOAD_S
    assert scheduling.matched(request, 0) == 0, "it has waited long enough"


class HeldBlocks(Blocks):
    """Blocks whose copies wait to be let through."""

    def __init__(self) -> None:
        both = torch.zeros(LAYERS, NUM_BLOCKS, LAYER_BYTES, dtype=torch.uint8)
        both += torch.arange(NUM_BLOCKS, dtype=torch.uint8)[None, :, None]
        self.memory: Final = {"a": both[0], "b": both[1]}
        super().__init__(GROUPS, self.memory, NUM_BLOCKS)
        self.begun: Final = threading.Event()
        self.let_through: Final = threading.Event()

    def save(self, blocks: BlockIds, first: int, pages: Sequence[memoryview]) -> None:
        self.begun.set()
        assert self.let_through.wait(30)
        super().save(blocks, first, pages)


def saved(name: str, tokens: list[int], blocks: BlockIds) -> Save:
    namespace = identity().of_request(Request(name, tokens))
    assert namespace is not None
    return Save(name, namespace, torch.tensor(tokens, dtype=torch.int32).numpy().tobytes(), 0, blocks)


def test_blocks_that_others_are_given_are_not_saved_as_what_they_were(link: Link) -> None:
    blocks = HeldBlocks()
    transfers = Transfers(link, blocks, Settings(), page_size=BLOCK, rank=0)
    first, second = list(range(100, 100 + 2 * BLOCK)), list(range(500, 500 + 2 * BLOCK))
    transfers.begin_saves(Plan(saves=[saved("one", first, ((1, 2), (3, 4))), saved("two", second, ((5, 6), (7, 8)))]))
    assert blocks.begun.wait(30)
    # The first is being copied, the second waits behind it: who gets block 3 waits, who gets block 8 does not.
    transfers.take_away(Plan(overwritten=frozenset({8})))
    taken = threading.Thread(target=lambda: transfers.take_away(Plan(overwritten=frozenset({3}))))
    taken.start()
    taken.join(0.2)
    assert taken.is_alive()
    blocks.let_through.set()
    taken.join(30)
    assert not taken.is_alive()
    blocks.memory["b"][3] = blocks.memory["b"][8] = 255
    heard: set[str] = set()
    while heard != {"one", "two"}:
        heard |= transfers.results({"one", "two"}, is_idle=True).saved
    counts = transfers.counts.take()
    assert (counts["saved_pages"], counts["unsaved_pages"]) == (2, 2)
    namespace = identity().of_request(Request("one", first))
    assert namespace is not None
    assert link.call(lambda client: client.lookup(Prompt(namespace, second)).num_tokens) == 0
    load = Load("again", namespace, saved("one", first, ()).new_tokens, 0, ((20, 21), (0, 23)), LOAD_S)
    transfers.begin_loads(Plan(loads=[load]))
    loaded: set[str] = set()
    while not loaded:
        loaded |= transfers.results(set(), is_idle=True).loaded
    assert [int(blocks.memory["a"][each][0]) for each in (20, 21)] == [1, 2]
    assert int(blocks.memory["b"][23][0]) == 4, "as it was before"
    assert not blocks.memory["b"][0].any(), "nothing is written to the null block"
    transfers.close()
