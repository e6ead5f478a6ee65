"""Prefixes that one tenant publishes to the others, over the wire (I33): they get copies, and nothing else crosses."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from hicache.errors import BadRequest
from hicache.namespace import Namespace
from hicache.service.client import Durability, Prompt, connect, connect_async
from hicache.tier import HOST
from tests.service.serving import WAIT_S, ThreadServer, thread_server
from tests.service.stored import LAYOUT, NAMESPACE, PAGE, check, page_bytes, store
from tests.service.test_deadlines import leave_the_host

SYSTEM = range(4 * PAGE)
PROMPT = [*SYSTEM, *range(9000, 9000 + 3 * PAGE)]
TENANTS: Final[dict[str, dict[str, object]]] = {"red": {}, "blue": {}, "green": {}}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadServer]:
    options = {"nvme__bytes": 256 * LAYOUT.page_bytes, "nvme__dir": str(tmp_path / "nvme")}
    with thread_server(tmp_path, tenants=TENANTS, **options) as running:
        yield running
        running.call(lambda inside: inside.cache.tree.check_integrity())
        running.until(lambda inside: inside.cache.tree.num_leases == 0, within_s=WAIT_S)


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_what_is_published_is_found_and_copied(server: ThreadServer, is_on_disk: bool) -> None:
    with connect(server.directory, tenant="red") as red, connect(server.directory, tenant="blue") as blue:
        store(red, PROMPT, tenant="red", durability=Durability.WAIT)
        assert blue.lookup(Prompt(NAMESPACE, PROMPT)).num_tokens == 0
        assert red.publish(Prompt(NAMESPACE, [*SYSTEM, 1, 2, 3])) == 4 * PAGE
        if is_on_disk:
            server.run(leave_the_host(server))
        prompt = Prompt(NAMESPACE, PROMPT)
        found = blue.lookup(prompt)
        assert found.runs == (("nvme" if is_on_disk else "host", 4 * PAGE),)
        with blue.acquire(prompt) as lease:
            assert lease.num_tokens == 4 * PAGE
            assert [bytes(page) for page in lease] == [page_bytes(PROMPT, index, "red") for index in range(4)]
            assert blue.acquire(prompt).slots == lease.slots, "it was copied once"
        assert server.call(lambda inside: inside.cache.counters.pages_adopted) == 4
        # What it computes goes on from there, and stays its own.
        assert store(blue, PROMPT, tenant="blue", prompt=prompt) == 7 * PAGE
        assert blue.lookup(prompt).num_tokens == 7 * PAGE
        with red.acquire(Prompt(NAMESPACE, PROMPT)) as lease:
            assert lease.read(6) == page_bytes(PROMPT, 6, "red")
        # The copies stay when the publication ends, and when the publisher's pages leave.
        assert red.unpublish(Prompt(NAMESPACE, PROMPT), 4 * PAGE)
        assert not red.unpublish(Prompt(NAMESPACE, PROMPT), 4 * PAGE)
        own = Namespace(model=NAMESPACE.model, layout=LAYOUT, tenant="red")
        server.call(lambda inside: inside.cache.flush(own))
        assert red.lookup(Prompt(NAMESPACE, PROMPT)).num_tokens == 0
        assert blue.lookup(Prompt(NAMESPACE, PROMPT)).num_tokens == 7 * PAGE
        with connect(server.directory, tenant="green") as green:
            assert green.lookup(Prompt(NAMESPACE, PROMPT)).num_tokens == 0
            with green.acquire(Prompt(NAMESPACE, PROMPT)) as nothing:
                assert not len(nothing)


def test_one_who_has_the_beginning_copies_the_rest(server: ThreadServer) -> None:
    with connect(server.directory, tenant="red") as red, connect(server.directory, tenant="blue") as blue:
        store(blue, SYSTEM[: 2 * PAGE], tenant="blue")
        store(red, PROMPT, tenant="red")
        red.publish(Prompt(NAMESPACE, PROMPT))
        with blue.acquire(Prompt(NAMESPACE, PROMPT), first_page=1) as lease:
            assert (lease.first_page, lease.num_tokens) == (1, 7 * PAGE)
            owners = ["blue", *["red"] * 5]
            assert [bytes(page) for page in lease] == [
                page_bytes(PROMPT, index, owner) for index, owner in enumerate(owners, start=1)
            ]


def test_without_room_what_fits_is_copied(tmp_path: Path) -> None:
    with (
        thread_server(tmp_path, host_pages=10, tenants=TENANTS, limits__leased_share=1.0) as server,
        connect(server.directory, tenant="red") as red,
        connect(server.directory, tenant="blue") as blue,
    ):
        store(red, PROMPT, tenant="red")
        red.publish(Prompt(NAMESPACE, PROMPT))
        with red.acquire(Prompt(NAMESPACE, PROMPT)), blue.acquire(Prompt(NAMESPACE, PROMPT)) as lease:
            assert lease.num_tokens == 3 * PAGE
            assert lease.read(2) == page_bytes(PROMPT, 2, "red")
        server.until(lambda inside: inside.cache.tree.num_leases == 0, within_s=WAIT_S)
        assert server.call(lambda inside: inside.cache.tiers[HOST].num_free) == 0
        server.call(lambda inside: inside.cache.tree.check_integrity())


def test_what_cannot_be_published_is_refused(server: ThreadServer) -> None:
    ranked = Namespace(model="m", layout=LAYOUT, num_ranks=2)

    async def awaited() -> None:
        async with connect_async(server.directory, tenant="red") as red:
            assert await red.publish(Prompt(NAMESPACE, SYSTEM)) == 0
            assert not await red.unpublish(Prompt(NAMESPACE, SYSTEM), 4 * PAGE)

    with connect(server.directory, tenant="red") as red:
        assert red.publish(Prompt(NAMESPACE, SYSTEM)) == 0, "nothing is cached"
        with pytest.raises(BadRequest, match="ranks"):
            red.publish(Prompt(ranked, SYSTEM))
        for wrong in (0, 4 * PAGE + 1):
            with pytest.raises(BadRequest, match="num_tokens"):
                red.unpublish(Prompt(NAMESPACE, SYSTEM), wrong)
        with pytest.raises(BadRequest, match="tokens"):
            red.unpublish(Prompt(NAMESPACE, SYSTEM), PAGE + 1)
        store(red, SYSTEM, tenant="red")
        assert check(red, SYSTEM, tenant="red") == 4 * PAGE
        server.call(lambda inside: inside.cache.flush())
    asyncio.run(awaited())
