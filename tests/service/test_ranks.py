"""Engines with several parallel ranks: each stores its part of a page, and a page is there when all parts are."""

from pathlib import Path

import pytest

from hicache.errors import BadRequest
from hicache.namespace import Namespace
from hicache.service.client import Prompt, connect
from hicache.service.errors import LimitReached
from hicache.tier import HOST
from tests.service.serving import thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, page_bytes, store

TWO = Namespace(model="sha256:ab", layout=LAYOUT, num_ranks=2)
TOKENS = range(4 * PAGE)


def test_a_page_is_there_when_every_rank_has_stored_its_part(tmp_path: Path) -> None:
    """I11: and all ranks are told the same length, whatever each of them has."""
    with (
        thread_server(tmp_path) as server,
        connect(server.directory, name="rank 0") as first,
        connect(server.directory, name="rank 1") as second,
    ):
        ranks = [(first, Prompt(TWO, TOKENS, rank=0)), (second, Prompt(TWO, TOKENS, rank=1))]
        store(first, TOKENS, tenant="rank 0", prompt=ranks[0][1])
        for client, prompt in ranks:
            assert client.lookup(prompt).num_tokens == 0
            with client.acquire(prompt) as lease:
                assert len(lease) == 0
        with second.reserve(ranks[1][1], num_tokens=3 * PAGE) as reservation:
            for index, view in enumerate(reservation):
                view[:] = page_bytes(TOKENS, index, "rank 1")
            reservation.commit()
        for number, (client, prompt) in enumerate(ranks):
            assert client.lookup(prompt).num_tokens == 3 * PAGE
            with client.acquire(prompt) as lease:
                assert lease.num_tokens == 3 * PAGE
                for index in range(3):
                    assert lease.read(index) == page_bytes(TOKENS, index, f"rank {number}")
        # What is one rank's is nobody else's, and an engine of one rank shares nothing with it.
        assert first.lookup(Prompt(NAMESPACE, TOKENS)).num_tokens == 0
        server.call(lambda inside: inside.cache.tree.check_integrity())


def test_a_pin_keeps_the_parts_of_all_ranks(tmp_path: Path) -> None:
    """A scheduler that has one session keeps what its workers are about to read."""
    with thread_server(tmp_path) as server, connect(server.directory) as client:
        for rank in range(2):
            store(client, TOKENS, prompt=Prompt(TWO, TOKENS, rank=rank))
        pinned = client.pin(Prompt(TWO, TOKENS))
        assert pinned.num_tokens == 4 * PAGE
        assert server.call(lambda inside: inside.cache.flush()) == 8
        assert client.lookup(Prompt(TWO, TOKENS, rank=1)).num_tokens == 4 * PAGE
        client.unpin(pinned)
        assert server.call(lambda inside: inside.cache.flush()) == 0
        assert server.call(lambda inside: inside.cache.tiers[HOST].num_free) == 64


def test_one_rank_that_loses_a_part_shortens_the_prompt_for_all(tmp_path: Path) -> None:
    with thread_server(tmp_path) as server, connect(server.directory) as client:
        prompts = [Prompt(TWO, TOKENS, rank=rank) for rank in range(2)]
        for prompt in prompts:
            store(client, TOKENS, prompt=prompt)
        (session,) = server.call(lambda inside: list(inside.sessions))
        theirs = session.namespaces[2].own
        assert server.call(lambda inside: inside.cache.flush(theirs)) == 0
        assert [client.lookup(prompt).num_tokens for prompt in prompts] == [0, 0]


def test_ranks_that_there_are_not(tmp_path: Path) -> None:
    with thread_server(tmp_path) as server, connect(server.directory) as client:
        with pytest.raises(BadRequest, match="rank"):
            Prompt(TWO, TOKENS, rank=2)
        with pytest.raises(LimitReached, match="ranks"):
            client.lookup(Prompt(Namespace(model="m", layout=LAYOUT, num_ranks=65), [1]))
