"""What `hicache explain` says, and what then happens."""

import random
from pathlib import Path
from typing import NamedTuple

from hicache.service import wire
from hicache.service.client import Client, EngineWork, Prompt, connect
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.process import Server
from hicache.tools.found import MISS, Action, Found, Span
from hicache.tools.owner import Owner, reached
from tests.service.serving import WAIT_S, ThreadServer, thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, store
from tests.service.test_deadlines import leave_the_host

CASES = 200


def _prompt(rng: random.Random) -> list[int]:
    """One of few beginnings and few continuations, so that prompts share pages, end within pages, and miss."""
    tokens: list[int] = []
    for _ in range(rng.randint(1, 4)):
        tokens += range(1000 * rng.randint(1, 4), 1000 * rng.randint(5, 6))[: rng.choice((8, PAGE, 2 * PAGE))]
    return tokens[: rng.randint(1, len(tokens))]


def _by_action(found: Found, action: Action) -> int:
    return sum(span.num_tokens for span in found.spans if span.action is action)


def _computed(found: Found) -> list[Span]:
    return [span for span in found.spans if span.action is Action.COMPUTE]


def _explained(owner: Owner, tokens: list[int]) -> Found:
    return Found.of(owner, pb.NamedPrefix(namespace=NAMESPACE.digest, tokens=wire.pack_int32(tokens)))


class Lent(NamedTuple):
    """What came of a prompt."""

    num_tokens: int
    """Tokens of a lease on it."""
    found: dict[str, int]
    """Tokens that were cached, by tier."""
    num_loaded: int
    """Tokens that came from NVMe for it."""


def _lent(server: ThreadServer, client: Client, tokens: list[int]) -> Lent:
    before, loaded_before = server.call(_counts)
    with client.acquire(Prompt(NAMESPACE, tokens)) as lease:
        num_tokens = lease.num_tokens
    after, loaded = server.call(_counts)
    found = {tier: after[tier] - before.get(tier, 0) for tier in after if after[tier] != before.get(tier)}
    return Lent(num_tokens, found, loaded - loaded_before)


def _counts(inside: Server) -> tuple[dict[str, int], int]:
    (lane,) = [each for each in inside.cache.lanes if each.name == "nvme->host"]
    return dict(inside.cache.counters.tokens_by_tier), lane.stats.pages * PAGE


def test_what_is_explained_is_what_happens(tmp_path: Path) -> None:
    rng = random.Random(9)
    nvme = {"nvme__bytes": 512 * LAYOUT.page_bytes, "nvme__dir": str(tmp_path / "nvme")}
    seen: dict[str, int] = {}
    num_cut, stored = 0, [[*range(PAGE)]]
    with (
        thread_server(tmp_path, host_pages=12, limits__leased_share=0.17, **nvme) as server,
        connect(server.directory) as client,
        reached(server.directory) as owner,
    ):
        store(client, stored[0])
        for case in range(CASES):
            tokens = [*rng.choice(stored), 7, 7] if rng.random() < 0.3 else _prompt(rng)
            found = _explained(owner, tokens)
            cached = {tier: count for tier, count in found.by_place.items() if tier != MISS}
            lent = _lent(server, client, tokens)
            assert lent == (found.taken_tokens, cached, _by_action(found, Action.LOAD)), f"case {case}: {tokens}"
            assert _by_action(found, Action.MAP) + _by_action(found, Action.LOAD) == found.taken_tokens
            assert all(span.where == MISS or span.start >= found.taken_tokens for span in _computed(found))
            assert (found.taken_tokens < found.num_tokens) == found.reason.startswith("a session is lent 2 pages")
            num_cut += found.taken_tokens < found.num_tokens
            assert [span.start for span in found.spans] == [0, *(span.stop for span in found.spans)][:-1]
            assert found.spans[-1].stop == len(tokens)
            for tier, count in found.by_place.items():
                seen[tier] = seen.get(tier, 0) + (count > 0)
            whole = tokens[: len(tokens) // PAGE * PAGE]
            if len(whole) > found.num_tokens:
                store(client, whole)
                stored.append(whole)
        predicted = [_explained(owner, _prompt(rng)).load_s for _ in range(50)]
    assert num_cut > 10
    assert min(seen.get(tier, 0) for tier in ("host", "nvme", MISS)) > 20, seen
    assert None not in predicted
    assert max(each for each in predicted if each is not None) > 0


def test_what_is_slower_to_load_than_to_compute_is_said_and_loaded_all_the_same(tmp_path: Path) -> None:
    nvme = {"nvme__bytes": 512 * LAYOUT.page_bytes, "nvme__dir": str(tmp_path / "nvme"), "times__lease_s": 1.0}
    tokens = [*range(4 * PAGE), 7, 7]
    with (
        thread_server(tmp_path, **nvme) as server,
        connect(server.directory) as client,
        reached(server.directory) as owner,
    ):
        store(client, tokens[: 4 * PAGE])
        server.run(leave_the_host(server))
        assert _lent(server, client, tokens).num_loaded == 4 * PAGE  # now the lane is measured
        server.run(leave_the_host(server))
        client.report(EngineWork(prefill_tokens=1 << 30, prefill_s=1e-3))
        server.until(lambda inside: inside.sessions.work.prefill_tokens > 0, within_s=WAIT_S)
        found = _explained(owner, tokens)
        assert found.reason.startswith("not worth loading more: if all of it is computed, it takes ")
        assert found.reason.endswith("; what is acquired is loaded all the same, unless an engine acquires less")
        assert found.load_s is not None
        assert found.recompute_s is not None
        assert found.load_s > found.recompute_s
        assert [span.action for span in found.spans] == [Action.LOAD, Action.COMPUTE]
        assert _lent(server, client, tokens).num_loaded == found.taken_tokens == 4 * PAGE
