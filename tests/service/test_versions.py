"""Ends of other versions: what rises with the protocol's number, and what each end makes of what it does not know."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor

from hicache.service import wire
from hicache.service.client import Outcome, Prompt, connect
from hicache.service.client.calls import REPLIES, Attachment, lookup
from hicache.service.client.results import reason_name
from hicache.service.client.transport import GrpcTransport, say_hello
from hicache.service.errors import ServerFailure, VersionMismatch, error_of
from hicache.service.proto import hicache_pb2 as pb
from tests.service.serving import WAIT_S, thread_server
from tests.service.stored import NAMESPACE, PAGE, check, store

KNOWN: Final = Path(__file__).with_name(f"protocol_{wire.PROTOCOL}.txt")
"""What engines and the server say to each other under this number, one field, value or call a line."""
NEW_FIELD: Final = b"\xba\x3e\x02ab"
"""A field of a later version: number 999, two bytes."""


def _spoken() -> tuple[set[str], set[str]]:
    """All that belongs to what engines use, as lines; and those of them that are in what clients send."""
    lines, sent = set[str](), set[str]()
    for service in (wire.CACHE, wire.DOOR):
        for call in service.methods:
            streams = f"{'stream ' * call.client_streaming}{call.input_type.name} {'stream ' * call.server_streaming}"
            lines.add(f"{service.name}.{call.name} {streams}{call.output_type.name}")
            sent |= _fields(call.input_type)
            lines |= _fields(call.output_type)
    sent |= _fields(pb.DESCRIPTOR.message_types_by_name["Hello"])
    return lines | sent | _fields(pb.DESCRIPTOR.message_types_by_name["HelloReply"]), sent


def _fields(message: Descriptor) -> set[str]:
    lines = set[str]()
    for each in message.fields:
        kind = each.message_type or each.enum_type
        what = kind.name if kind is not None else f"type {each.type}"
        presence = " optional" if kind is None and each.has_presence else ""
        lines.add(f"{message.name}.{each.name} {each.number} {'repeated ' * each.is_repeated}{what}{presence}")
        if isinstance(kind, Descriptor):
            lines |= _fields(kind)
        elif isinstance(kind, EnumDescriptor):
            lines |= {f"{kind.name}.{value.name} {value.number}" for value in kind.values}
    return lines


def test_the_number_rises_with_what_the_other_end_would_get_wrong() -> None:
    """I36: nothing that was said under this number goes or changes, and clients say nothing new. Whoever breaks this
    raises `PROTOCOL` and writes the file of the new number with `write_known`; never that of one that was released."""
    known, (spoken, sent) = set(KNOWN.read_text().splitlines()), _spoken()
    assert known, "the file says nothing"
    assert not known - spoken, "gone or changed"
    assert not sent - known, "new in what clients send"
    calls = tuple(f"{service.name}." for service in (wire.CACHE, wire.DOOR))
    assert not {line for line in spoken - known if line.startswith(calls)}, "new calls"


def write_known() -> None:
    """Write down what is spoken now."""
    KNOWN.write_text("".join(f"{line}\n" for line in sorted(_spoken()[0])))


@pytest.mark.parametrize("protocol", [0, wire.PROTOCOL + 1])
def test_a_hello_of_another_protocol_is_told_so_whatever_else_it_says(tmp_path: Path, protocol: int) -> None:
    """I36: fields of its own version do not hide why it is refused."""
    hello = pb.Hello.FromString(pb.Hello(protocol=protocol, tenant="nobody").SerializeToString() + NEW_FIELD)
    with thread_server(tmp_path) as server:
        with pytest.raises(VersionMismatch, match=f"protocol {protocol} is asked for, {wire.PROTOCOL} is spoken"):
            say_hello(server.directory, hello, WAIT_S)
        with connect(server.directory) as client:
            assert client.welcome.protocol == wire.PROTOCOL


def _more(data: bytes) -> bytes:
    """What a later server of the same protocol would have sent: each message of it has a field more."""
    return data + NEW_FIELD


class LaterTransport(GrpcTransport):
    """To a server whose answers have fields that this client does not know."""

    def call(self, request: Any, timeout_s: float) -> Any:
        """Every call is one of its own, so that all answers come this way."""
        kind, path = REPLIES[request.method], wire.path_of(wire.CACHE.methods_by_name[request.method])
        call = self._channel.unary_unary(path, bytes, lambda data: kind.FromString(_more(data)))
        message = wire.with_tokens(request.message.SerializeToString(), request.tokens)
        try:
            return call(message, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_of(error) from None


def test_an_older_client_passes_over_what_a_later_server_adds_to_its_answers(tmp_path: Path) -> None:
    """I36."""
    with thread_server(tmp_path) as server, connect(transport=lambda: LaterTransport(server.directory)) as client:
        prompt = Prompt(NAMESPACE, range(2 * PAGE))
        assert store(client, range(2 * PAGE), prompt=prompt) == 2 * PAGE
        assert check(client, range(2 * PAGE)) == 2 * PAGE
        assert client.lookup(prompt).num_tokens == 2 * PAGE
        assert client.reserve(prompt).outcome is Outcome.RESIDENT
        assert client.hint(prompt, priority=1) == 2 * PAGE
        client.unpin(client.pin(prompt))


@contextmanager
def greeting(directory: Path, reply: bytes) -> Iterator[None]:
    """A server that answers one hello with these bytes."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(directory / wire.HELLO_SOCKET))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(wire.MAX_HELLO_BYTES)
                connection.sendall(len(reply).to_bytes(4, "little") + reply)

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            yield
        finally:
            answering.join(WAIT_S)


def test_a_welcome_and_a_refusal_of_a_later_server_are_understood(tmp_path: Path) -> None:
    """I36: a refusal's reason that is not known is shown, and no mistake of this end."""
    welcome = pb.HelloReply.FromString(_more(pb.HelloReply(welcome=pb.Welcome(session_id=7)).SerializeToString()))
    mismatch = pb.Error(reason=pb.REASON_VERSION_MISMATCH, problem="newer")
    mismatch = pb.Error.FromString(_more(mismatch.SerializeToString()))
    later = pb.Error.FromString(b"\x08\xe7\x07" + pb.Error(problem="out of luck").SerializeToString())
    for number, (reply, error) in enumerate([
        (welcome, None),
        (pb.HelloReply(error=mismatch), VersionMismatch),
        (pb.HelloReply(error=later), ServerFailure),
    ]):
        directory = tmp_path / str(number)
        directory.mkdir()
        with greeting(directory, reply.SerializeToString()):
            if error is None:
                assert say_hello(directory, pb.Hello(), WAIT_S)[0].session_id == 7
            else:
                with pytest.raises(error, match=reply.error.problem):
                    say_hello(directory, pb.Hello(), WAIT_S)


def test_reasons_and_tiers_of_a_later_server_are_shown() -> None:
    """I36."""
    reply = pb.CommitReply.FromString(b"\x10\xe7\x07")
    assert reason_name(reply.reason) == "999"
    attachment = Attachment(pb.Welcome(), memory=None)  # type: ignore[arg-type]  # no look-up touches it
    steps = lookup(attachment, Prompt(NAMESPACE, range(PAGE)))
    next(steps)
    steps.send(pb.RegisterReply(namespace_id=1))
    run = pb.Run.FromString(b"\x08\xe7\x07" + pb.Run(num_tokens=PAGE).SerializeToString())
    with pytest.raises(StopIteration) as ended:
        steps.send(pb.LookupReply(num_tokens=PAGE, runs=[run]))
    assert ended.value.value.runs == (("?", PAGE),)


def test_what_is_no_answer_to_a_hello_is_said_to_be_none(tmp_path: Path) -> None:
    with greeting(tmp_path, b"\xff\xff\xff"), pytest.raises(ServerFailure, match="hello"):
        say_hello(tmp_path, pb.Hello(), WAIT_S)
