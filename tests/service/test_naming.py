"""A session has so many namespaces at a time: the one that was used longest ago goes, and its client names it again."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache.layout import MAX_LAYERS
from hicache.namespace import Namespace
from hicache.service.client import Client, Lookup, Prompt, calls, connect
from hicache.service.client.calls import MAX_NAMESPACES, TRIES, Attachment
from hicache.service.errors import LimitReached, UnknownNamespace
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.naming import MAX_RECORDS_BYTES
from hicache.service.server.process import Server
from hicache.tier import HOST, Slots
from tests.service.serving import WAIT_S, ServerProcess, ThreadServer, arguments, thread_server
from tests.service.stored import NAMESPACE, PAGE, page_bytes, store

FEW: Final = 3
"""Namespaces that a session may have here."""
TOKENS: Final = range(4 * PAGE)


def salted(number: int) -> Namespace:
    """One of any number of namespaces."""
    return replace(NAMESPACE, salt=b"%d" % number)


def consistent(server: Server) -> None:
    """What a session holds is within its bounds, and agrees with itself."""
    for session in server.sessions:
        assert len(session.namespaces) <= FEW
        assert {number: (each.named, each.rank) for number, each in session.namespaces.items()} == {
            number: key for key, number in session.namespace_numbers.items()
        }
        assert session.namespace_bytes == sum([each.num_bytes for each in session.namespaces.values()])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    with thread_server(tmp_path_factory.mktemp("naming"), limits__max_namespaces=FEW) as server:
        yield server


STEPS: Final = st.lists(
    st.tuples(st.sampled_from(["store", "look up", "read", "new prompt"]), st.integers(0, 2 * FEW)), max_size=40
)


@given(steps=STEPS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_more_namespaces_than_there_may_be_are_served_as_few_are(server: ThreadServer, steps: list[Any]) -> None:
    """I02, I21: prompts that were named when others were, handles and reservations over namespaces that have gone."""
    server.call(lambda inside: inside.cache.flush())
    stored = dict.fromkeys(range(2 * FEW + 1), 0)
    prompts = {number: Prompt(salted(number)) for number in stored}
    with connect(server.directory) as client:
        for what, number in steps:
            prompt, tenant = prompts[number], str(number)
            if what == "store" and stored[number] < 3 * PAGE:
                tokens = range(stored[number] + PAGE)
                prompt.extend(tokens[len(prompt) :])
                stored[number] = store(client, tokens, prompt=prompt, tenant=tenant)
                assert stored[number] == len(tokens)
            elif what == "look up":
                assert client.lookup(prompt).num_tokens == min(stored[number], len(prompt))
            elif what == "read":
                with client.acquire(prompt) as lease:
                    assert lease.num_tokens == min(stored[number], len(prompt))
                    pages = [lease.read(page) for page in range(len(lease))]
                assert pages == [page_bytes(range(len(prompt)), page, tenant) for page in range(len(pages))]
            elif what == "new prompt":
                prompts[number] = Prompt(salted(number), range(stored[number]))
            server.call(consistent)
    server.until(lambda inside: not len(inside.sessions), within_s=WAIT_S)


def test_a_real_server_serves_one_session_with_more_salts_than_it_remembers(tmp_path: Path) -> None:
    """With the limit that there is unless another one is set."""
    server = ServerProcess(tmp_path, arguments())
    try:
        with connect(server.directory) as client:
            first = Prompt(salted(0), range(PAGE))
            store(client, range(PAGE), prompt=first)
            session = client.welcome.session_id
            for number in range(1, MAX_NAMESPACES + 50):
                assert client.lookup(Prompt(salted(number), range(PAGE))).num_tokens == 0
            assert client.lookup(first).num_tokens == PAGE
            assert client.lookup(Prompt(salted(0), range(2 * PAGE))).num_tokens == PAGE
            assert client.welcome.session_id == session
    finally:
        assert server.stop() == 0


def test_what_waits_keeps_the_namespace_that_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that waits for room, and one that is being written: no slot is lost, and the pages are found under the
    name that they were written for."""

    def others(client: Client) -> None:
        for number in range(1, 3):
            client.lookup(Prompt(salted(number), TOKENS))

    with (
        thread_server(tmp_path, host_pages=8, limits__max_namespaces=1) as server,
        connect(server.directory) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        cache, waits, goes_on = server.server.cache, threading.Event(), asyncio.Event()
        allocate = cache.allocate_up_to

        async def allocate_later(*what: Any, **how: Any) -> Slots:
            waits.set()
            await goes_on.wait()
            return await allocate(*what, **how)

        monkeypatch.setattr(cache, "allocate_up_to", allocate_later)
        prompt = Prompt(salted(0), TOKENS)
        waiting = threads.submit(client.reserve, prompt)
        assert waits.wait(WAIT_S)
        others(client)
        server.call(lambda _: goes_on.set())
        with waiting.result(WAIT_S) as reservation:
            assert len(reservation) == 4
            for page, view in enumerate(reservation):
                view[:] = page_bytes(TOKENS, page)
            others(client)
            assert reservation.commit().num_tokens == len(TOKENS)
        others(client)
        with client.acquire(prompt) as lease:
            assert [lease.read(page) for page in range(4)] == [page_bytes(TOKENS, page) for page in range(4)]
        assert client.lookup(Prompt(salted(1), TOKENS)).num_tokens == 0
        assert server.call(lambda inside: inside.cache.flush()) == 0
        assert server.call(lambda inside: inside.cache.tiers[HOST].num_free) == 8


@pytest.mark.parametrize("few", ["limits__max_namespaces", "limits__max_handles"])
def test_a_lease_that_waits_needs_its_names_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: str) -> None:
    """The namespace or the handle is let go while pages come to the arena: they are lent as they were asked for, with
    the page that shares tokens behind them, and the client need not ask again."""
    with (
        thread_server(tmp_path, **{few: 1}) as server,
        connect(server.directory) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        cache, waits, goes_on, num_asked = server.server.cache, threading.Event(), asyncio.Event(), list[int]()
        promote = cache.promote

        async def promote_later(*what: Any, **how: Any) -> bool:
            num_asked.append(1)
            waits.set()
            await goes_on.wait()
            return await promote(*what, **how)

        shared = Prompt(NAMESPACE, [*range(2 * PAGE + 5), *range(7000, 7020)])
        store(client, range(4 * PAGE))
        store(client, range(9000, 9000 + PAGE))
        assert client.lookup(shared).num_tokens == 2 * PAGE
        monkeypatch.setattr(cache, "promote", promote_later)
        waiting = threads.submit(client.acquire, shared, partial=True)
        assert waits.wait(WAIT_S)
        client.lookup(Prompt(salted(1), TOKENS))
        assert client.lookup(Prompt(NAMESPACE, range(9000, 9000 + PAGE))).num_tokens == PAGE
        server.call(lambda _: goes_on.set())
        with waiting.result(WAIT_S) as lease:
            assert (lease.num_tokens, lease.partial_tokens) == (2 * PAGE, 5)
            assert lease.partial is not None
            assert lease.partial.tobytes() == page_bytes(range(4 * PAGE), 2)
        assert len(num_asked) == 1


def test_long_records_are_few_at_a_time(tmp_path: Path) -> None:
    """I21: however many namespaces a session may have, their records are bounded, each counted once a rank."""
    with thread_server(tmp_path) as server, connect(server.directory) as client:
        for number in range(40):
            long = replace(salted(number), num_ranks=64, adapter="a" * 4000)
            assert client.lookup(Prompt(long, TOKENS, rank=number)).num_tokens == 0
        (session,) = server.call(lambda inside: list(inside.sessions))
        assert 0 < session.namespace_bytes <= MAX_RECORDS_BYTES
        assert len(session.namespaces) == MAX_RECORDS_BYTES // session.namespaces[40].num_bytes
        layout = {each.named.layout is server.server.cache.layout for each in session.namespaces.values()}
        assert layout == {True}, "one for all of them"
        longest = replace(
            long, model="m" * 4000, tokenizer="t" * 4000, codec="c" * 4000, pipeline_ranges=((0, 1),) * MAX_LAYERS
        )
        with pytest.raises(LimitReached, match="record"):
            client.lookup(Prompt(longest, TOKENS, rank=0))
        assert client.lookup(Prompt(NAMESPACE, TOKENS)).num_tokens == 0


def _lookup(attachment: Attachment) -> "calls.Steps[Lookup]":
    return calls.lookup(attachment, Prompt(NAMESPACE, TOKENS))


def test_a_client_names_a_namespace_again_a_few_times_and_no_more() -> None:
    attachment = Attachment(pb.Welcome(page_size=PAGE), memory=None)  # type: ignore[arg-type]  # no look-up touches it
    steps = _lookup(attachment)
    assert next(steps).method == "Register"
    for number in range(1, TRIES):
        asked: Any = steps.send(pb.RegisterReply(namespace_id=number))
        assert (asked.method, asked.message.prefix.namespace_id) == ("Lookup", number)
        assert steps.throw(UnknownNamespace("was let go")).method == "Register"
    steps.send(pb.RegisterReply(namespace_id=TRIES))
    with pytest.raises(UnknownNamespace):
        steps.throw(UnknownNamespace("was let go"))


def test_a_client_remembers_no_more_than_so_many() -> None:
    attachment = Attachment(pb.Welcome(page_size=PAGE), memory=None)  # type: ignore[arg-type]  # no look-up touches it
    for number in range(1, 2 * MAX_NAMESPACES):
        steps = calls.lookup(attachment, Prompt(salted(number), TOKENS))
        next(steps)
        steps.send(pb.RegisterReply(namespace_id=number))
    assert len(attachment.namespaces) == MAX_NAMESPACES
