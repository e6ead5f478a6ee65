"""Look-ups on a session's stream: each is answered in time, under its own number, whatever others ask and send."""

import itertools
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from hicache.errors import DeadlineExceeded
from hicache.service import wire
from hicache.service.client import Client, Durability, Prompt, connect
from hicache.service.client.asking import SWEPT_AT, Asking
from hicache.service.client.transport import say_hello
from hicache.service.errors import LimitReached, Unreachable, from_error
from hicache.service.proto import hicache_pb2 as pb
from tests.punctual import in_time
from tests.service.serving import WAIT_S, ServerProcess, ThreadServer, arguments, thread_server
from tests.service.stored import NAMESPACE, PAGE, store

LATE_S: Final = 0.3
"""How much later than its deadline a look-up may end."""
LONG: Final = wire.SHORT_BYTES // 4 // PAGE * PAGE
"""Tokens of a prompt that is too long for the stream."""


def _num_lookups(server: ThreadServer) -> dict[str, int]:
    """How many look-ups ended how, whichever way they came."""
    return server.call(
        lambda inside: {code: times.count for (method, code), times in inside.call_times if method == "Lookup"}
    )


@contextmanager
def attached(server: ThreadServer, beats: Iterable[bytes]) -> Iterator[Any]:
    """The stream of a session of its own, in which namespace 1 is registered, before anything is read from it."""
    welcome, fds = say_hello(server.directory, pb.Hello(protocol=wire.PROTOCOL), WAIT_S)
    for fd in fds:
        os.close(fd)
    metadata = ((wire.TOKEN_METADATA, welcome.token),)
    # Otherwise this end would take in megabytes that nobody reads.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]
    with grpc.insecure_channel(wire.address(str(server.directory / wire.DATA_SOCKET)), options) as channel:
        register = pb.RegisterRequest(record=NAMESPACE.encode()).SerializeToString()
        channel.unary_unary("/hicache.v1.Cache/Register", bytes, bytes)(register, timeout=WAIT_S, metadata=metadata)
        attach = channel.stream_stream("/hicache.v1.Cache/Attach", bytes, pb.Notice.FromString)
        yield attach(iter(beats), timeout=WAIT_S, metadata=metadata)


def _beat(number: int, **prefix: Any) -> bytes:
    """A look-up of namespace 1, if nothing else is said."""
    request = pb.LookupRequest(prefix=pb.Prefix(**{"namespace_id": 1, **prefix}))
    return pb.Beat(lookup=request, number=number).SerializeToString()


def test_threads_look_up_side_by_side_and_each_hears_its_own_answer(tmp_path: Path) -> None:
    """While the server tells of promises on the same stream. One of the prompts is too long for it."""

    def found(client: Client, tokens: list[int]) -> set[int]:
        known = Prompt(NAMESPACE, tokens)
        return {client.lookup(prompt).num_tokens for _ in range(20) for prompt in (known, Prompt(NAMESPACE, tokens))}

    limits = {"limits__staging_bytes": 8 << 20, "limits__leased_share": 1.0}
    prompts = [[number] * num_tokens for number, num_tokens in enumerate((LONG, PAGE, 2 * PAGE, 3 * PAGE, 4 * PAGE))]
    with (
        thread_server(tmp_path, host_pages=LONG // PAGE + 100, **limits) as server,
        connect(server.directory, staging_bytes=8 << 20) as client,
        ThreadPoolExecutor(len(prompts)) as threads,
    ):
        for tokens in prompts:
            store(client, tokens)
        asked = [threads.submit(found, client, tokens) for tokens in prompts]
        for number in range(1, 21):
            store(client, range(1000 * number, 1000 * number + PAGE), durability=Durability.BEHIND)
        assert [each.result(WAIT_S) for each in asked] == [{len(tokens)} for tokens in prompts]
        assert _num_lookups(server) == {"OK": 40 * len(prompts)}
        assert client.durable_sequence == 20


def test_a_look_up_that_fails_is_answered_so_and_the_stream_goes_on(tmp_path: Path) -> None:
    """I31, I32."""
    tokens = wire.pack_int32(range(PAGE))
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"namespace_id": 2}, "unknown_namespace", "prefix.namespace_id"),
        ({"tokens": b"abc"}, "bad_request", "prefix.tokens"),
        ({"handle": 77, "tokens": tokens}, "unknown_handle", "prefix.handle"),
        ({"tokens": bytes(4 * 5000)}, "limit", "max_tokens"),
    ]
    with thread_server(tmp_path, limits__max_tokens=4096) as server, connect(server.directory) as client:
        store(client, range(PAGE))
        beats = [_beat(number, **each) for number, (each, _, _) in enumerate(wrong, 1)]
        with attached(server, [*beats, _beat(2**64 - 1, tokens=tokens)]) as stream:
            answers = {notice.number: notice for notice in itertools.islice(stream, 2 + len(wrong)) if notice.number}
        for number, (_, reason, field) in enumerate(wrong, 1):
            error: Any = from_error(answers[number].error)
            assert (error.reason, error.field) == (reason, field)
            assert not answers[number].HasField("lookup")
        assert answers[2**64 - 1].lookup.num_tokens == PAGE
        assert not answers[2**64 - 1].HasField("error")
        assert _num_lookups(server) == {"INVALID_ARGUMENT": 1, "NOT_FOUND": 2, "RESOURCE_EXHAUSTED": 1, "OK": 1}


@pytest.mark.parametrize(
    ("beat", "code"),
    [
        (_beat(0), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.Beat(number=1).SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT),
        (b"\x1a\x05\xba\x3e\x02ab\x20", grpc.StatusCode.INVALID_ARGUMENT),
        (pb.Beat(number=1).SerializeToString() + b"\x1a\x05\xba\x3e\x02ab", grpc.StatusCode.INVALID_ARGUMENT),
        (_beat(1, tokens=bytes(wire.MAX_BEAT_BYTES)), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=["no number", "no look-up", "no message", "a field of another version", "too long"],
)
def test_a_beat_that_is_none_ends_its_session_and_no_other(
    tmp_path: Path, beat: bytes, code: grpc.StatusCode
) -> None:
    """I32."""
    with thread_server(tmp_path) as server, connect(server.directory) as client:
        with attached(server, itertools.chain([beat], itertools.repeat(_beat(1)))) as stream:
            with pytest.raises(grpc.RpcError) as ended:
                list(stream)
            assert ended.value.code() is code
        assert client.lookup(Prompt(NAMESPACE, range(PAGE))).num_tokens == 0
        assert server.call(lambda inside: len(inside.sessions)) == 1


def test_who_asks_and_does_not_listen_ends_as_silent(tmp_path: Path) -> None:
    """I21, I23: it is not read from any more, others are served meanwhile, and nothing of it stays but its stream. gRPC
    keeps that until its client hangs up; it counts as a session, so that nobody has any number of them."""
    limits = {"times__lease_s": 1.0, "limits__max_sessions": 2}
    with thread_server(tmp_path, **limits) as server, connect(server.directory) as client:
        store(client, range(PAGE))
        with attached(server, itertools.repeat(_beat(1, tokens=wire.pack_int32(range(PAGE))))) as stream:
            server.until(lambda inside: len(inside.sessions) == 2, within_s=WAIT_S)
            while server.call(lambda inside: len(inside.sessions)) == 2:
                assert client.lookup(Prompt(NAMESPACE, range(PAGE))).num_tokens == PAGE
            assert server.call(lambda inside: inside.sessions.ended) == {"it was silent": 1}
            server.until(lambda inside: inside.sessions.num_lingering == 1, within_s=WAIT_S)
            assert stream.is_active(), "the client has not hung up"
            client.close()
            server.until(lambda inside: not len(inside.sessions), within_s=WAIT_S)
            with connect(server.directory), pytest.raises(LimitReached, match="max_sessions"):
                connect(server.directory)
        server.until(lambda inside: not len(inside.sessions) + inside.sessions.num_lingering, within_s=WAIT_S)
        with connect(server.directory), connect(server.directory):
            assert server.call(lambda inside: len(inside.sessions)) == 2


def test_a_server_that_is_stopped_or_killed_is_not_waited_for(tmp_path: Path) -> None:
    """I26, F22: a look-up ends by its deadline. What comes later is nobody's answer."""
    server = ServerProcess(tmp_path, arguments())
    try:
        with connect(server.directory, timeout_s=WAIT_S) as client, ThreadPoolExecutor(1) as threads:
            store(client, range(PAGE))
            server.process.send_signal(signal.SIGSTOP)
            for length in range(1, 4):
                with in_time(0.2 + LATE_S), pytest.raises(DeadlineExceeded):
                    client.lookup(Prompt(NAMESPACE, range(length)), timeout_s=0.2)
            server.process.send_signal(signal.SIGCONT)
            assert client.lookup(Prompt(NAMESPACE, range(2 * PAGE))).num_tokens == PAGE
            server.process.send_signal(signal.SIGSTOP)
            waiting = threads.submit(client.lookup, Prompt(NAMESPACE, range(PAGE)))
            server.process.kill()
            with pytest.raises(Unreachable):
                waiting.result(WAIT_S)
    finally:
        server.stop(signal.SIGKILL)


def test_a_session_outlives_any_number_of_look_ups_at_a_stopped_server(tmp_path: Path) -> None:
    """I28: each costs its own caller its time, and nobody else anything."""
    server = ServerProcess(tmp_path, arguments(times__lease_s=300.0))
    try:
        with connect(server.directory, timeout_s=WAIT_S) as client:
            store(client, range(PAGE))
            session, prompt = client.welcome.session_id, Prompt(NAMESPACE, range(PAGE))
            server.process.send_signal(signal.SIGSTOP)
            for _ in range(SWEPT_AT + 100):
                with pytest.raises(DeadlineExceeded):
                    client.lookup(prompt, timeout_s=0.0001)
            server.process.send_signal(signal.SIGCONT)
            assert client.lookup(prompt).num_tokens == PAGE
            assert client.welcome.session_id == session
    finally:
        server.stop(signal.SIGKILL)


def test_look_ups_that_nobody_reads_are_bounded_and_beats_go_between_them() -> None:
    asking = Asking()
    beats = asking.beats(0.0, pb.Beat)  # one is always due
    with ThreadPoolExecutor(1) as threads:
        for _ in range(2 * SWEPT_AT):
            with pytest.raises(DeadlineExceeded):
                asking.look_up(b"", 0.0)
        assert asking._unsent.qsize() <= SWEPT_AT
        for data in itertools.islice(beats, SWEPT_AT + 1):
            assert data == b"", "what nobody waits for is not sent"
        waiting = threads.submit(asking.look_up, b"\x0a\x00", WAIT_S)
        asked = pb.Beat.FromString(next(filter(None, beats)))
        assert asked.HasField("lookup")
        assert next(beats) == b"", "a beat"
        asking.hear(pb.Notice(number=asked.number + 1, error=pb.Error(problem="another's")))
        asking.hear(pb.Notice(number=asked.number, lookup=pb.LookupReply(num_tokens=7)))
        assert waiting.result(WAIT_S).num_tokens == 7
        waiting = threads.submit(asking.look_up, b"", WAIT_S)
        assert next(filter(None, beats))
        asking.close()
        with pytest.raises(Unreachable):
            waiting.result(WAIT_S)
    with pytest.raises(Unreachable):
        asking.look_up(b"", WAIT_S)
    assert set(beats) <= {b""}
