"""Twenty thousand messages that no client should send: random bytes, valid messages with wild values and in wild order,
valid messages that were damaged. Each call is answered with a status of ours, the server lives, and nothing leaks.

A share of them is tried with every change. To repeat a seed: `HICACHE_SEED=7 python -m pytest`, and this file.
"""

import os
import random
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from hicache.service import wire
from hicache.service.client import Prompt, connect
from hicache.service.client.calls import REPLIES
from hicache.service.client.transport import say_hello
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.process import Server
from hicache.tier import HOST
from tests.service.serving import WAIT_S, thread_server
from tests.service.stored import NAMESPACE, PAGE, check, store
from tests.simulation import SEED_VARIABLE

MESSAGES: Final = 20_000
MESSAGES_A_HELLO: Final = 40
"""For so many messages there is one hello that is none."""
MESSAGES_A_STREAM: Final = 400
"""For so many messages there is one stream of look-ups."""
AT_ONCE: Final = 32
"""Calls under way at a time."""
SEED: Final = 7_301
ANSWERS: Final = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DATA_LOSS,
}
"""What a call may end with. INTERNAL would be a mistake of the server's, UNAVAILABLE its end."""


class Fuzz:
    """Draws messages. Remembers ids that replies gave, to use and misuse them."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.ids = [0, 1, 2**64 - 1]

    def number(self, bits: int) -> int:
        """Mostly at an end of its range, or an id that was given out."""
        kind = self.draw.randrange(4)
        if kind == 0 and bits == 64:
            return self.draw.choice(self.ids)
        return self.draw.choice((0, 1, 2, PAGE, 2 ** (bits - 1), 2**bits - 1, self.draw.randrange(2**bits)))

    def tokens(self) -> bytes:
        """Whole pages of few ids, so that prompts meet; or ids and bytes that are none."""
        if self.draw.random() < 0.2:
            return self.draw.randbytes(self.draw.randrange(200))
        ids = [self.draw.randrange(3) for _ in range(self.draw.choice((1, PAGE, 2 * PAGE, 2 * PAGE + 3, 5 * PAGE)))]
        if self.draw.random() < 0.1:
            ids[self.draw.randrange(len(ids))] = -self.draw.randrange(1, 2**31)
        return wire.pack_int32(ids)

    def prefix(self) -> pb.Prefix:
        namespace_id = self.draw.choice((1, 1, 1, 1, 0, 2, 2**32 - 1))
        handle = self.number(64) if self.draw.random() < 0.3 else 0
        return pb.Prefix(namespace_id=namespace_id, handle=handle, tokens=self.tokens())

    def message(self, method: str) -> Any:
        """A valid message with wild values."""
        prefix, few = self.prefix(), self.draw.choice((0, 0, 0, 1, self.number(64)))
        if method == "Register":
            record = self.draw.choice((NAMESPACE.encode(), self.draw.randbytes(50), b""))
            return pb.RegisterRequest(record=record, rank=self.number(32))
        if method == "Acquire":
            return pb.AcquireRequest(prefix=prefix, first_page=few, call=self.number(64), partial=bool(few))
        if method == "Reserve":
            return pb.ReserveRequest(prefix=prefix, first_page=few, call=self.number(64))
        if method == "Commit":
            checksums = self.draw.choice((b"", self.draw.randbytes(8)))
            durability: Any = self.draw.choice((0, 1, 2, 3, -1))
            return pb.CommitRequest(reservation=self.number(64), durability=durability, checksums=checksums)
        if method == "Release":
            return pb.ReleaseRequest(ids=[self.number(64) for _ in range(self.draw.randrange(8))])
        if method == "Read":
            return pb.ReadRequest(lease=self.number(64), index=few, offset=few, length=self.number(64))
        if method == "Write":
            data, checksum = self.draw.randbytes(self.draw.randrange(64)), self.number(32)
            return pb.WriteRequest(reservation=self.number(64), index=few, offset=few, data=data, checksum=checksum)
        if method == "Prefetch":
            return pb.PrefetchRequest(prefix=prefix, within_ms=self.number(32), max_pages=self.number(64))
        if method == "Hint":
            return pb.HintRequest(prefix=prefix, priority=self.draw.choice((0, 4, -5, 2**31 - 1)), retain_ms=few)
        if method == "Publish":
            return pb.PublishRequest(prefix=prefix, withdraw=bool(few))
        return {"Lookup": pb.LookupRequest, "Pin": pb.PinRequest}[method](prefix=prefix)

    def data(self, method: str) -> bytes:
        kind = self.draw.random()
        if kind < 0.15:
            return self.draw.randbytes(self.draw.randrange(64))
        packed = bytearray(self.message(method).SerializeToString())
        if kind < 0.4 and packed:
            for _ in range(self.draw.randrange(1, 4)):
                packed[self.draw.randrange(len(packed))] ^= 1 << self.draw.randrange(8)
        return bytes(packed)

    def learn(self, method: str, reply: bytes) -> None:
        """Remember the ids of a reply."""
        message: Any = REPLIES[method].FromString(reply)
        names = ("lease", "handle", "reservation")
        self.ids += [getattr(message, name) for name in names if name in message.DESCRIPTOR.fields_by_name]
        del self.ids[3:-200]


@pytest.mark.parametrize(
    "num_messages",
    [MESSAGES // 20, pytest.param(MESSAGES, marks=[pytest.mark.faults, pytest.mark.slow])],
    ids=["share", "all"],
)
def test_no_message_ends_more_than_its_own_call(tmp_path: Path, num_messages: int) -> None:
    """I31, I32, I34, F32, F33."""
    seed = int(os.environ.get(SEED_VARIABLE, SEED))
    fuzz = Fuzz(random.Random(seed))
    try:
        with thread_server(tmp_path, limits__max_leases=64, limits__max_namespaces=8) as server:
            with connect(server.directory, name="good") as good:
                store(good, range(1000, 1000 + 3 * PAGE))
                with connect(server.directory, name="fuzz", timeout_s=30.0) as client:
                    client.lookup(Prompt(NAMESPACE, [1]))  # registers namespace 1
                    statuses = Counter(_send(fuzz, server.directory, client.welcome.token, num_messages))
                    _odd_hellos(fuzz, server.directory, num_messages // MESSAGES_A_HELLO)
                    _ask(fuzz, server.directory, num_messages // MESSAGES_A_STREAM)
                assert set(statuses) <= ANSWERS, statuses
                assert statuses[grpc.StatusCode.OK] > num_messages // 10, statuses
                server.until(lambda inside: len(inside.sessions) == 1, within_s=WAIT_S)
                assert server.call(_held) == (0, 0)
                assert store(good, range(2000, 2000 + 3 * PAGE)) == 3 * PAGE
                assert check(good, range(2000, 2000 + 3 * PAGE)) == 3 * PAGE
            server.call(lambda inside: inside.cache.tree.check_integrity())
    except BaseException as error:
        error.add_note(f"seed {seed}; to repeat: {SEED_VARIABLE}={seed} python -m pytest {__file__}")
        raise


def _send(fuzz: Fuzz, directory: Path, token: bytes, num_messages: int) -> Iterator[grpc.StatusCode]:
    """Send messages, some at a time; the statuses of their answers."""
    methods, metadata = sorted(REPLIES), ((wire.TOKEN_METADATA, token),)
    with grpc.insecure_channel(wire.address(str(directory / wire.DATA_SOCKET))) as channel:
        calls = {name: channel.unary_unary(f"/hicache.v1.Cache/{name}", bytes, bytes) for name in methods}
        for _ in range(num_messages // AT_ONCE):
            chosen = [fuzz.draw.choice(methods) for _ in range(AT_ONCE)]
            sent = [calls[name].future(fuzz.data(name), timeout=60.0, metadata=metadata) for name in chosen]
            for name, call in zip(chosen, sent, strict=True):
                status = call.code()
                yield status
                if status is grpc.StatusCode.OK:
                    fuzz.learn(name, call.result())


def _ask(fuzz: Fuzz, directory: Path, num_streams: int) -> None:
    """Look-ups on streams of sessions of their own: each is answered under its number, until one is no message."""
    for _ in range(num_streams):
        welcome, fds = say_hello(directory, pb.Hello(protocol=wire.PROTOCOL), 30.0)
        for fd in fds:
            os.close(fd)
        numbers = range(1, AT_ONCE + 1)
        beats = [wire.asking(fuzz.message("Lookup").SerializeToString(), number) for number in numbers]
        beats += [wire.asking(fuzz.data("Lookup"), number) for number in numbers]
        answered: list[int] = []
        with grpc.insecure_channel(wire.address(str(directory / wire.DATA_SOCKET))) as channel:
            how: Any = {"timeout": 30.0, "metadata": ((wire.TOKEN_METADATA, welcome.token),)}
            register = pb.RegisterRequest(record=NAMESPACE.encode()).SerializeToString()
            channel.unary_unary("/hicache.v1.Cache/Register", bytes, bytes)(register, **how)
            stream = channel.stream_stream("/hicache.v1.Cache/Attach", bytes, pb.Notice.FromString)(iter(beats), **how)
            with suppress(grpc.RpcError):
                for notice in stream:
                    answered += [notice.number] if notice.number else []
            # UNAUTHENTICATED: every beat was answered, and the stream has come to its end.
            assert stream.code() in ANSWERS | {grpc.StatusCode.UNAUTHENTICATED}
        assert answered[:AT_ONCE] == list(numbers)


def _odd_hellos(fuzz: Fuzz, directory: Path, num_hellos: int) -> None:
    """Random bytes, whole and in part, on the hello socket; each connection is closed by the other end."""
    for _ in range(num_hellos):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30.0)
            connection.connect(str(directory / wire.HELLO_SOCKET))
            connection.sendall(fuzz.draw.randbytes(fuzz.draw.randrange(40)))
            with suppress(ConnectionError):  # closed before all was read
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass


def _held(inside: Server) -> tuple[int, int]:
    """Leases, and arena slots that are in no tree."""
    host, occupancy = inside.cache.tiers[HOST], inside.cache.tree.occupancy(HOST)
    return inside.cache.tree.num_leases, host.capacity_pages - host.num_free - occupancy.total
