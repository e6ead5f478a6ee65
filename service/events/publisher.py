"""Publishes events over ZMQ: to whoever listens now, and again to whoever asks for what came before.

Sequences are without gaps, from 0 with the start of the server, whose first event says that nothing told before holds.
A listener that finds a gap, since it was slow or came late, asks the replay endpoint with the sequence that it wants to
go on from, as 8 bytes behind an empty frame. It is sent each message since then as [empty, topic, sequence, batch], and
at last the sequence -1: the form of vLLM 0.32, which says the topic here too. What is kept for that is bounded
(`KEPT_BATCHES`, `KEPT_BYTES`): who was away for longer is sent what there is, sees from its first sequence that
something is missing, and starts with an empty index.
"""

import asyncio
import os
import stat
from collections import deque
from typing import Any, Final, NoReturn

import zmq
import zmq.asyncio

from hicache.clock import Clock
from hicache.errors import BadRequest
from hicache.service.events.form import END, Event, batch, cleared, sequence_bytes
from hicache.service.sockets import is_in_use_at

TOPIC: Final = b""
"""As vLLM has it unless told otherwise: there are routers that subscribe to the empty topic exactly."""
MAX_EVENTS: Final = 256
"""Events of one message."""
KEPT_BATCHES: Final = 10_000
KEPT_BYTES: Final = 64 << 20
"""What is kept for replays, at most."""
QUEUED: Final = 10_000
"""Messages that wait for one listener; those beyond are lost to it."""


def _check_free(key: str, endpoint: str) -> None:
    """Raise `BadRequest` for a path that is not free: ZMQ removes whatever lies there, another server's socket too."""
    path = endpoint.removeprefix("ipc://")
    try:
        if path == endpoint or not os.path.lexists(path):
            return
        is_left_over = stat.S_ISSOCK(os.lstat(path).st_mode) and not is_in_use_at(path)
    except OSError as error:
        raise BadRequest(key, f"{endpoint} cannot be had: {error.strerror or error}") from None
    if not is_left_over:
        raise BadRequest(key, f"{endpoint} cannot be had: it is another program's")


class Publisher:
    """Publishes until it is closed. Belongs to the event loop."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, clock: Clock) -> None:
        """Take the endpoints; a port of 0 takes a free one. Raises `BadRequest` naming the key of one that cannot be
        had."""
        self._clock: Final = clock
        self._context: Final = zmq.asyncio.Context(io_threads=1)
        self._pending: Final[deque[Event]] = deque([cleared()])
        self._news: Final = asyncio.Event()
        self._news.set()
        self._kept: Final[deque[tuple[int, bytes]]] = deque()
        self._kept_bytes = 0
        self.num_batches = 0
        """Messages so far: the next one's sequence."""
        self.replay_endpoint = ""
        try:
            self._out: Final = self._bound(zmq.PUB, "events.endpoint", endpoint, QUEUED)
            self.endpoint: Final = self._out.getsockopt_string(zmq.LAST_ENDPOINT)
            """Where listeners connect to."""
            self._replay: zmq.asyncio.Socket | None = None
            if replay_endpoint is not None:
                self._replay = self._bound(zmq.ROUTER, "events.replay_endpoint", replay_endpoint, KEPT_BATCHES + 1)
                self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        except BaseException:
            self.close()
            raise

    def _bound(self, kind: int, key: str, endpoint: str, queued: int) -> zmq.asyncio.Socket:
        _check_free(key, endpoint)
        bound = self._context.socket(kind)
        bound.setsockopt(zmq.SNDHWM, queued)
        bound.setsockopt(zmq.LINGER, 0)
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            raise BadRequest(key, f"{endpoint} cannot be had: {error.strerror}") from None
        return bound

    def close(self) -> None:
        """Let go of the endpoints; `run` is cancelled by its owner. What was not sent is lost. Again is harmless."""
        self._context.destroy(linger=0)

    def tell(self, event: Event) -> None:
        """Publish an event with the next message. Does not wait."""
        self._pending.append(event)
        self._news.set()

    async def run(self) -> NoReturn:
        """Publish and replay until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self._replay is not None:
                tasks.create_task(self._answer(self._replay))
            while True:
                await self._news.wait()
                self._news.clear()
                while self._pending:
                    await self._publish()
        raise AssertionError("publishing has no end")

    async def _publish(self) -> None:
        events = [self._pending.popleft() for _ in range(min(MAX_EVENTS, len(self._pending)))]
        payload, sequence = batch(self._clock.wall(), events), self.num_batches
        self.num_batches += 1
        self._kept.append((sequence, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        # Does not wait for listeners: a publishing socket leaves out those that are full.
        await self._out.send_multipart([TOPIC, sequence_bytes(sequence), payload])

    async def _answer(self, replay: "zmq.asyncio.Socket") -> NoReturn:
        while True:
            frames: list[Any] = await replay.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                continue  # nothing that could be answered
            first = int.from_bytes(frames[2], "big")
            for sequence, payload in list(self._kept):
                if sequence >= first:
                    await replay.send_multipart([frames[0], b"", TOPIC, sequence_bytes(sequence), payload])
            await replay.send_multipart([frames[0], b"", b"", END, b""])
