"""How much of what clients send is in the server's memory at a time.

gRPC receives the one message of an ordinary call before anybody is asked, a thousand of four megabytes at once if need
be. So the methods are served as if clients streamed, which is the same on the wire: a call is looked at first, and its
message is received only then, and within a bound of all messages together.
"""

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

from hicache.errors import BadRequest
from hicache.service.errors import LimitReached
from hicache.service.server.shares import Peer, Peers, Pool

AT_ONCE: Final = 8
"""Messages of one session that are received at a time; the others stay with their sender until it is their turn."""


OWNER: Final[Peer] = ""
"""Who messages are counted for that belong to no session."""


@dataclass(frozen=True, slots=True)
class Received:
    """The message of a call."""

    data: bytes
    peer: Peer
    """Who it is counted for."""


NOTHING: Final = Received(b"", OWNER)


class Intake:
    """Receives messages, for all services of a server. Belongs to the event loop.

    Args:
        message_bytes_max: of one message.
        bytes_max: of all messages of calls under way; each counts as the longest until it is there.
        peers: among whom these are divided.
    """

    def __init__(self, message_bytes_max: int, bytes_max: int, peers: Peers) -> None:
        self._longest: Final = message_bytes_max
        self._pool: Final = Pool(peers, bytes_max)

    async def receive(
        self, context: "grpc.aio.ServicerContext[Any, Any]", turns: asyncio.Semaphore, peer: Peer = OWNER
    ) -> Received:
        """A call's message, to be given back by `let_go` when the call has ended. Waits for the client, and before that
        for one of its `turns`: who begins calls and sends nothing is in the way of itself alone. Raises `LimitReached`
        before anything is received, `BadRequest` where none comes."""
        async with turns:
            return await self._receive(context, peer)

    async def _receive(self, context: "grpc.aio.ServicerContext[Any, Any]", peer: Peer) -> Received:
        if not self._pool.fits(peer, self._longest):
            raise LimitReached(f"messages of {self._pool.held(peer)} bytes are under way", field="message_bytes")
        self._pool.note(peer, self._longest)
        data = b""
        try:
            received = await context.read()
            if received is grpc.aio.EOF:
                raise BadRequest("message", "is missing")
            data = bytes(received)
        finally:
            self._pool.note(peer, len(data) - self._longest)
        return Received(data, peer)

    def let_go(self, received: Received) -> None:
        """The call whose message this was has ended."""
        self._pool.note(received.peer, -len(received.data))
