"""Who asks and reads no answers takes a bounded part of the server, and is in nobody's way."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import grpc
import pytest
from h2.exceptions import ProtocolError

from hicache.errors import DeadlineExceeded
from hicache.service import wire
from hicache.service.client import Client, Prompt, connect
from hicache.service.client.transport import say_hello
from hicache.service.errors import LimitReached
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server import edge
from hicache.service.server.edge import MAX_STREAMS
from hicache.service.server.process import Server
from hicache.service.server.session import Session
from tests.service.http2 import RawChannel
from tests.service.serving import WAIT_S, ThreadServer, thread_server
from tests.service.stored import NAMESPACE, PAGE, check, store

LOOKUP: Final = "/hicache.v1.Cache/Lookup"
ATTACH: Final = "/hicache.v1.Cache/Attach"
TOKENS: Final = range(PAGE)
ASK: Final = pb.LookupRequest(
    prefix=pb.Prefix(namespace_id=1, tokens=wire.pack_int32(TOKENS))
).SerializeToString()


@contextmanager
def unread(server: ThreadServer, *, window: int = 0) -> Iterator[tuple[Client, RawChannel]]:
    """A session with a page that can be looked up, and a connection whose answers nobody reads unless told to."""
    with connect(server.directory) as client, RawChannel(server.directory / wire.DATA_SOCKET, window=window) as raw:
        if not client.lookup(Prompt(NAMESPACE, TOKENS)).num_tokens:
            store(client, TOKENS)
        yield client, raw


def num_open(inside: Server) -> int:
    """Calls and streams of all sessions that gRPC has not done with."""
    return sum([each.num_open for each in inside.sessions])


def statuses(raw: RawChannel, num_calls: int) -> Counter[grpc.StatusCode]:
    """Read until so many calls have ended; how they did."""
    ended = Counter[grpc.StatusCode]()
    while ended.total() < num_calls:
        ended.update(raw.ended())
    return ended


def test_a_stream_whose_first_answer_nobody_has_read_ends_for_its_reason(tmp_path: Path) -> None:
    """I32: the answer is given up while it waits for its client; the status comes all the same."""
    with thread_server(tmp_path) as server, unread(server) as (client, raw):
        welcome, fds = say_hello(server.directory, pb.Hello(protocol=wire.PROTOCOL), WAIT_S)
        for fd in fds:
            os.close(fd)
        stream = raw.call(ATTACH, [pb.Beat(number=1).SerializeToString()], token=welcome.token, is_over=False)
        server.until(lambda inside: inside.sessions.ended == {"its stream ended": 1}, within_s=WAIT_S)
        raw.open_window(stream, 1 << 16)
        assert statuses(raw, 1) == {grpc.StatusCode.INVALID_ARGUMENT: 1}
        assert client.lookup(Prompt(NAMESPACE, TOKENS)).num_tokens == PAGE


def test_answers_that_nobody_reads_are_as_many_calls_of_their_session_again(tmp_path: Path) -> None:
    """I21, I31: those beyond are refused, and others are served. Once they are read there may be others."""
    with (
        thread_server(tmp_path, limits__max_calls_per_session=4) as server,
        connect(server.directory) as good,
        unread(server) as (client, raw),
    ):
        num_calls = MAX_STREAMS  # all that a connection may have
        streams = [raw.call(LOOKUP, [ASK], token=client.welcome.token) for _ in range(num_calls)]
        refused = statuses(raw, num_calls - 8)
        assert refused == {grpc.StatusCode.RESOURCE_EXHAUSTED: num_calls - 8}
        assert server.call(num_open) == 8 + 2, "with the two streams"
        with pytest.raises(LimitReached, match="not read"):
            client.pin(Prompt(NAMESPACE, TOKENS))
        assert check(good, TOKENS) == PAGE
        for stream in streams:
            with suppress(ProtocolError):  # it was refused
                raw.open_window(stream, 1 << 16)
        assert statuses(raw, 8) == {grpc.StatusCode.OK: 8}
        server.until(lambda inside: num_open(inside) == 2, within_s=WAIT_S)
        assert client.pin(Prompt(NAMESPACE, TOKENS)).num_tokens == PAGE


def test_long_answers_that_nobody_reads_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I21: who asks for more waits until some were read, and is answered then."""
    monkeypatch.setattr(edge, "COUNTED_BYTES", 1)
    monkeypatch.setattr(edge, "MAX_UNREAD_BYTES", 99)
    with thread_server(tmp_path) as server, unread(server) as (client, raw):
        streams = [raw.call(LOOKUP, [ASK], token=client.welcome.token) for _ in range(20)]
        (session,) = server.call(lambda inside: list(inside.sessions))
        server.until(lambda _: session.num_open == 20 + 1, within_s=WAIT_S)
        with pytest.raises(DeadlineExceeded):
            client.pin(Prompt(NAMESPACE, TOKENS), timeout_s=0.5)
        assert 99 < session.unread_bytes < 200
        for stream in streams:
            raw.open_window(stream, 1 << 16)
        assert statuses(raw, 20) == {grpc.StatusCode.OK: 20}
        server.until(lambda _: session.unread_bytes == 0, within_s=WAIT_S)
        assert client.pin(Prompt(NAMESPACE, TOKENS)).num_tokens == PAGE


def test_streams_that_nobody_reads_are_no_more_than_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I21, I31: a session has one stream; what is answered to others, until nothing more fits into the socket, is
    bounded as the answers of its calls are."""
    with (
        thread_server(tmp_path, limits__max_calls_per_session=4) as server,
        connect(server.directory) as good,
        unread(server) as (client, raw),
    ):
        sessions, opened = server.server.sessions, list[int]()
        note_call = sessions.note_call

        def noted(session: Session) -> None:
            note_call(session)
            opened.append(session.num_open)

        monkeypatch.setattr(sessions, "note_call", noted)
        for _ in range(MAX_STREAMS):
            raw.call(ATTACH, [], token=client.welcome.token)
        server.until(lambda _: len(opened) > 0 and max(opened) == 2 * 4 + 1, within_s=WAIT_S)
        assert check(good, TOKENS) == PAGE
        ended = statuses(raw, MAX_STREAMS)
        assert set(ended) == {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert max(opened) == 2 * 4 + 1
        server.until(lambda inside: num_open(inside) == 2, within_s=WAIT_S)


def test_calls_that_wait_to_be_looked_at_are_in_nobodys_way(tmp_path: Path) -> None:
    """I31, I33: where thousands wait, gRPC itself would cancel those of any client, whoever has sent most of them."""
    began, is_over = threading.Event(), threading.Event()

    def hold(_: Server) -> None:
        began.set()
        is_over.wait(WAIT_S)

    with (
        thread_server(tmp_path, times__lease_s=WAIT_S) as server,
        unread(server, window=1 << 16) as (client, raw),
        ExitStack() as stack,
    ):
        many = [stack.enter_context(RawChannel(server.directory / wire.DATA_SOCKET, window=0)) for _ in range(16)]
        busy = threading.Thread(target=server.call, args=(hold,))
        busy.start()
        try:
            assert began.wait(WAIT_S)
            for each in many:
                for _ in range(MAX_STREAMS):
                    each.call(LOOKUP, [ASK], token=b"nobody's")
                assert each.arrived() == []
            raw.call(LOOKUP, [ASK], token=client.welcome.token)
            assert raw.arrived() == []
        finally:
            is_over.set()
            busy.join()
        assert statuses(raw, 1) == {grpc.StatusCode.OK: 1}
        for each in many:
            assert statuses(each, MAX_STREAMS) == {grpc.StatusCode.UNAUTHENTICATED: MAX_STREAMS}


def test_all_sessions_together_have_a_bound_and_those_that_hang_up_count_no_more(tmp_path: Path) -> None:
    limits = {"limits__max_calls": 4, "limits__max_sessions": 2}
    with thread_server(tmp_path, **limits) as server, connect(server.directory) as good:
        with unread(server) as (client, raw):
            for _ in range(4 + 2):
                raw.call(LOOKUP, [ASK], token=client.welcome.token)
            server.until(lambda inside: num_open(inside) == 4 + 2 + 2, within_s=WAIT_S)
            with pytest.raises(LimitReached, match="max_calls:"):
                client.pin(Prompt(NAMESPACE, TOKENS))
            assert check(good, TOKENS) == PAGE
            client.close()
            server.until(lambda inside: len(inside.sessions) == 1 == inside.sessions.num_lingering, within_s=WAIT_S)
            with pytest.raises(LimitReached, match="max_sessions"):
                connect(server.directory)
        server.until(lambda inside: inside.sessions.num_lingering == 0, within_s=WAIT_S)
        assert check(good, TOKENS) == PAGE
        with connect(server.directory) as another:
            assert check(another, TOKENS) == PAGE


def test_others_that_have_all_calls_leave_each_session_its_share(tmp_path: Path) -> None:
    """I21, I31, I33: the bound is for those above their share; all shares together are no more than it again."""
    limits = {"limits__max_calls": 16, "limits__max_sessions": 4}
    with thread_server(tmp_path, **limits) as server, connect(server.directory) as good, ExitStack() as stack:
        num_there = 1
        for number, num_served in enumerate((16 + 16 // 4, 16 // 4, 16 // 4), 1):
            client, raw = stack.enter_context(unread(server))
            num_there += 1
            server.until(_has_open(num_there), within_s=WAIT_S)
            for _ in range(30):
                raw.call(LOOKUP, [ASK], token=client.welcome.token)
            refused = 30 - num_served
            assert statuses(raw, refused) == {grpc.StatusCode.RESOURCE_EXHAUSTED: refused}
            with pytest.raises(LimitReached, match="max_calls:"):
                client.pin(Prompt(NAMESPACE, TOKENS))
            num_there += num_served
            server.until(_has_open(num_there), within_s=WAIT_S)
            tokens = range(1000 * number, 1000 * number + PAGE)
            assert store(good, tokens) == check(good, tokens) == PAGE
            assert good.pin(Prompt(NAMESPACE, tokens)).num_tokens == PAGE
        assert num_there <= 2 * 16 + 4


def _has_open(number: int) -> Callable[[Server], bool]:
    return lambda inside: num_open(inside) == number


def test_a_connection_that_is_not_read_is_closed(tmp_path: Path) -> None:
    """I21, I23: and before that no calls without a session, however many, are in the way of others."""
    times = {"times__lease_s": 1.0, "times__attach_s": 1.0}
    with (
        thread_server(tmp_path, limits__max_calls=4, **times) as server,
        connect(server.directory) as good,
        unread(server) as (client, raw),
    ):
        raw.call(LOOKUP, [ASK], token=client.welcome.token)
        for _ in range(50):
            raw.call(LOOKUP, [], token=b"nobody's")
        server.until(lambda inside: num_open(inside) == 1 + 2, within_s=WAIT_S)
        client.close()
        server.until(lambda inside: inside.sessions.num_lingering == 1, within_s=WAIT_S)
        assert check(good, TOKENS) == PAGE
        server.until(lambda inside: inside.sessions.num_lingering == 0, within_s=10.0)
        while raw.socket.recv(1 << 16):
            pass  # what was on its way, to the end
