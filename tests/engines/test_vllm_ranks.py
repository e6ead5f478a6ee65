"""A real vLLM of two ranks that do not have the same pages: both go by what each of them has, and all is right."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.data import DataCalls
from hicache.service.server.edge import Call
from hicache.service.server.session import Session
from hicache.service.server.storing import Storing
from hicache.tier import HOST
from hicache.tools.bench.engine_models import make_tiny
from tests.engines.running import BLOCK, PAGE_BYTES, SHAPE, VOCABULARY, Tokens, engine
from tests.engines.test_vllm import OWN_CACHE_OFF
from tests.engines.test_vllm_issues import cacheable, computed_alone
from tests.service.serving import ThreadServer

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

SAVED_WITHIN_S: Final = 60.0
RANKS: Final = 2
KNOWN: Final = 5
"""Pages of the second prompt that are saved before the others."""


class Trouble:
    """What befalls the second rank, in a sidecar of this process."""

    def __init__(self) -> None:
        self.what = ""
        """"commit": its session ends when it has written its pages, before they are published; "load": its session ends
        whenever it asks for pages; "loss": its pages leave between the lookup and that."""
        self.times = 0
        """How often."""

    def meets(self, what: str, session: Session, namespace_id: int) -> bool:
        """Whether this is the second rank's, and it is time."""
        is_met = self.what == what and session.registered(namespace_id).rank == 1
        self.times += is_met
        return is_met


@pytest.fixture
def trouble(monkeypatch: pytest.MonkeyPatch) -> Trouble:
    now, commit, acquire = Trouble(), Storing.commit, DataCalls.acquire

    async def commits(
        self: Storing, session: Session, request: pb.CommitRequest, deadline: float
    ) -> pb.CommitReply:
        if now.meets("commit", session, session.reservations[request.reservation].namespace_id):
            self.sessions.end(session, "test")
        return await commit(self, session, request, deadline)

    async def acquires(self: DataCalls, call: Call, request: pb.AcquireRequest) -> pb.AcquireReply:
        namespace_id = request.prefix.namespace_id
        if now.meets("load", call.session, namespace_id):
            self._sessions.end(call.session, "test")
        elif now.meets("loss", call.session, namespace_id):
            self._cache.flush(call.session.registered(namespace_id).own)
        return await acquire(self, call, request)

    monkeypatch.setattr(Storing, "commit", commits)
    monkeypatch.setattr(DataCalls, "acquire", acquires)
    return now


@pytest.fixture
def sidecar(trouble: Trouble, tmp_path: Path) -> Iterator[ThreadServer]:
    layout = {**SHAPE, "dtype": "float32", "num_kv_heads": 1}  # each rank has one of the two heads
    server = ThreadServer({
        "socket_dir": str(tmp_path / "run"), "layout": layout, "host": {"bytes": 500 * PAGE_BYTES // RANKS}
    })  # fmt: skip
    yield server
    server.close()


def saved(server: ThreadServer, *prompts: Tokens, more: int = 0) -> None:
    """Wait until both ranks' parts of all whole pages of prompts that share nothing are in the cache, and parts of so
    many pages more."""
    num_pages = RANKS * sum(len(each) // BLOCK for each in prompts) + more
    server.until(lambda it: it.cache.tree.occupancy(HOST).resident == num_pages, within_s=SAVED_WITHIN_S)


def joined(server: ThreadServer) -> None:
    """Wait until both ranks and the scheduler have sessions: a rank that was refused one twice in one call tries again
    after a second."""
    server.until(lambda it: sum(each.is_attached for each in it.sessions) == RANKS + 1, within_s=SAVED_WITHIN_S)


def test_what_one_rank_lacks_no_rank_uses(
    trouble: Trouble, sidecar: ThreadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    ranks: dict[str, Any] = {
        "tensor_parallel_size": RANKS, "distributed_executor_backend": "mp", **OWN_CACHE_OFF
    }  # fmt: skip
    model, rng = make_tiny(tmp_path / "model"), random.Random(47)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (300, 500)]
    begun = prompts[1][: KNOWN * BLOCK + 3]
    new = [computed_alone(each) for each in prompts]
    with engine(model, tmp_path, None, **ranks) as running:
        right = running.ask(prompts)
    assert right.scheduled == new
    config = {"socket_dir": str(sidecar.directory), "lookup_timeout_s": 10.0}
    with engine(model, tmp_path, config, **ranks) as running:
        assert running.ask([begun]).scheduled == [computed_alone(begun)]
        saved(sidecar, begun)
        trouble.what = "commit"
        for _ in range(2):
            # In the second round the first rank has all of it, and the second what it had before the trouble.
            answers = running.ask(prompts)
            assert answers.tokens == right.tokens
            assert answers.scheduled == [new[0], new[1] - KNOWN * BLOCK]
            saved(sidecar, begun, more=sum(len(each) // BLOCK for each in prompts) - KNOWN)
        assert trouble.times
        trouble.what = ""
        assert running.ask(prompts).tokens == right.tokens
        saved(sidecar, *prompts)
        for each in ("load", "", "loss", ""):
            joined(sidecar)
            trouble.what, trouble.times = each, 0
            answers = running.ask(prompts)
            assert answers.tokens == right.tokens
            assert bool(trouble.times) == bool(each)
            saved(sidecar, *prompts)
            # What was found for both ranks and came for one of them alone is computed.
            found = [0 if each else cacheable(prompt) for prompt in prompts]
            assert answers.scheduled == [alone - cached for alone, cached in zip(new, found, strict=True)]
            assert answers.cached == found
    sidecar.call(lambda it: it.cache.tree.check_integrity())
