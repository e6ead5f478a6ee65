"""What `hicache explain` says, and what then happens."""

import random
from pathlib import Path

from hicache.service import wire
from hicache.service.client import Client, Prompt, connect
from hicache.service.proto import hicache_pb2 as pb
from hicache.tools.found import MISS, Found
from hicache.tools.owner import Owner, reached
from tests.service.serving import ThreadServer, thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, store

CASES = 200


def _prompt(rng: random.Random) -> list[int]:
    """One of few beginnings and few continuations, so that prompts share pages, end within pages, and miss."""
    tokens: list[int] = []
    for _ in range(rng.randint(1, 4)):
        tokens += range(1000 * rng.randint(1, 4), 1000 * rng.randint(5, 6))[: rng.choice((8, PAGE, 2 * PAGE))]
    return tokens[: rng.randint(1, len(tokens))]


def _explained(owner: Owner, tokens: list[int]) -> Found:
    return Found.of(owner, pb.NamedPrefix(namespace=NAMESPACE.digest, tokens=wire.pack_int32(tokens)))


def _lent(server: ThreadServer, client: Client, tokens: list[int]) -> tuple[int, dict[str, int]]:
    """Tokens of a lease on a prompt, and the tiers in which they were."""
    before = server.call(lambda inside: dict(inside.cache.counters.tokens_by_tier))
    with client.acquire(Prompt(NAMESPACE, tokens)) as lease:
        num_tokens = lease.num_tokens
    after = server.call(lambda inside: dict(inside.cache.counters.tokens_by_tier))
    return num_tokens, {tier: after[tier] - before.get(tier, 0) for tier in after if after[tier] != before.get(tier)}


def test_what_is_explained_is_what_happens(tmp_path: Path) -> None:
    rng = random.Random(9)
    nvme = {"nvme__bytes": 512 * LAYOUT.page_bytes, "nvme__dir": str(tmp_path / "nvme")}
    seen: dict[str, int] = {}
    with (
        thread_server(tmp_path, host_pages=12, **nvme) as server,
        connect(server.directory) as client,
        reached(server.directory) as owner,
    ):
        store(client, range(PAGE))
        for case in range(CASES):
            tokens = _prompt(rng)
            found = _explained(owner, tokens)
            cached = {tier: count for tier, count in found.by_place.items() if tier != MISS}
            assert (found.num_tokens, cached) == _lent(server, client, tokens), f"case {case}: {tokens}"
            assert [span.start for span in found.spans] == [0, *(span.stop for span in found.spans)][:-1]
            assert found.spans[-1].stop == len(tokens)
            for tier, count in found.by_place.items():
                seen[tier] = seen.get(tier, 0) + (count > 0)
            whole = tokens[: len(tokens) // PAGE * PAGE]
            if len(whole) > found.num_tokens:
                store(client, whole)
        with reached(server.directory) as now:  # what lanes have done is asked as a server is reached
            predicted = [_explained(now, _prompt(rng)).load_s for _ in range(50)]
    assert min(seen.get(tier, 0) for tier in ("host", "nvme", MISS)) > 20, seen
    assert None not in predicted
    assert max(each for each in predicted if each is not None) > 0
