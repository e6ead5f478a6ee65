"""What a server tells its owner of what is asked: all of it in order, nothing to two, and a bounded amount waits."""

import threading
from pathlib import Path
from typing import Any

import pytest

from hicache.errors import BadRequest, LeaseExpired
from hicache.service import wire
from hicache.service.client import Prompt, connect
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server import recording
from tests.service.serving import WAIT_S, ThreadServer, thread_server
from tests.service.stored import NAMESPACE, PAGE, check, store
from tests.service.test_owner import Ask, owner


def fetched(ask: Ask, **request: Any) -> pb.RecordReply:
    reply: pb.RecordReply = ask("Record", pb.RecordRequest(**request), pb.RecordReply)
    return reply


def is_on(server: ThreadServer) -> bool:
    return server.call(lambda inside: inside.recording.is_on)


def test_what_is_asked_is_told_in_order_with_what_was_cached(tmp_path: Path) -> None:
    first, second = list(range(3 * PAGE + 5)), list(range(2 * PAGE))
    with thread_server(tmp_path) as server, connect(server.directory) as client, owner(server) as ask:
        check(client, first)  # nobody records yet
        walk = fetched(ask).walk
        assert walk
        prompt = Prompt(NAMESPACE, first)
        assert client.lookup(prompt).num_tokens == 0
        store(client, first[: 3 * PAGE])
        assert check(client, first) == 3 * PAGE
        check(client, second)
        with client.acquire(Prompt(NAMESPACE, second), first_page=1):
            pass
        prompt.extend(range(7))  # behind a handle, from now on: all tokens are told all the same
        client.lookup(prompt)
        client.lookup(prompt)
        reply = fetched(ask, walk=walk, end=True)
        assert (reply.walk, reply.num_dropped) == (0, 0)
        assert not is_on(server)
        asked = list(reply.asked)
        longer = [*first, *range(7)]
        told = [
            (each.is_acquire, each.first_page, list(wire.unpack_int32(each.tokens)), _runs(each)) for each in asked
        ]
        assert told == [
            (False, 0, first, []),
            (True, 0, first, [(pb.TIER_HOST, 3 * PAGE)]),
            (True, 0, second, [(pb.TIER_HOST, 2 * PAGE)]),
            (True, 1, second, [(pb.TIER_HOST, 2 * PAGE)]),
            (False, 0, longer, [(pb.TIER_HOST, 3 * PAGE)]),
            (False, 0, longer, [(pb.TIER_HOST, 3 * PAGE)]),
        ]
        assert {(each.namespace, each.session) for each in asked} == {
            (NAMESPACE.digest, client.welcome.session_id)
        }
        times = [each.at_us for each in asked]
        assert times == sorted(times)
        with pytest.raises(LeaseExpired):
            fetched(ask, walk=walk)


def _runs(asked: pb.AskedPrompt) -> list[tuple[int, int]]:
    return [(run.tier, run.num_tokens) for run in asked.runs]


def test_a_call_waits_for_news_and_a_second_recording_takes_the_place_of_the_first(tmp_path: Path) -> None:
    with thread_server(tmp_path) as server, connect(server.directory) as client, owner(server) as ask:
        walk = fetched(ask).walk
        replies: list[pb.RecordReply | LeaseExpired] = []

        def wait() -> None:
            try:
                replies.append(fetched(ask, walk=walk, wait_ms=10_000))
            except LeaseExpired as error:
                replies.append(error)

        for expected in (pb.RecordReply, LeaseExpired):
            waiting = threading.Thread(target=wait)
            waiting.start()
            server.until(lambda inside: not inside.recording._news.is_set(), within_s=WAIT_S)
            if expected is pb.RecordReply:
                check(client, range(PAGE))
            else:
                fetched(ask)
            waiting.join(WAIT_S)
            assert isinstance(replies[-1], expected)
            if isinstance(reply := replies[-1], pb.RecordReply):
                assert len(reply.asked) == 1
                assert reply.walk == walk
        assert not fetched(ask, walk=_current(server), wait_ms=1).asked


def _current(server: ThreadServer) -> int:
    return server.call(lambda inside: inside.recording._number)


def test_what_is_not_fetched_in_time_is_counted_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MAX_QUEUED", 3)
    monkeypatch.setattr(recording, "MAX_QUEUED_BYTES", 12 * PAGE)
    monkeypatch.setattr(recording, "MAX_REPLY_BYTES", 4 * PAGE)
    with thread_server(tmp_path) as server, connect(server.directory) as client, owner(server) as ask:
        walk = fetched(ask).walk
        for _ in range(5):
            check(client, range(PAGE))
        reply = fetched(ask, walk=walk)
        assert (len(reply.asked), reply.num_dropped) == (1, 2)  # as much as a reply may have
        assert len(fetched(ask, walk=walk).asked) == 1
        check(client, range(4 * PAGE))  # longer than all that may wait
        reply = fetched(ask, walk=walk, end=True)
        assert (len(reply.asked), reply.num_dropped) == (1, 1)
        assert not is_on(server)


def test_a_recording_that_nobody_fetches_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with thread_server(tmp_path) as server, connect(server.directory) as client, owner(server) as ask:
        fetched(ask)
        check(client, range(PAGE))
        assert is_on(server)
        monkeypatch.setattr(recording, "FORGOTTEN_S", 0.0)
        check(client, range(PAGE))
        assert not is_on(server)
        assert server.call(lambda inside: (len(inside.recording._queued), inside.recording._queued_bytes)) == (0, 0)


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with thread_server(tmp_path) as server, owner(server) as ask:
        for wrong in ({"wait_ms": 30_001}, {"end": True}):
            with pytest.raises(BadRequest):
                fetched(ask, **wrong)
        with pytest.raises(LeaseExpired):
            fetched(ask, walk=5)
        assert not is_on(server)
