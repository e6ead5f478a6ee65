"""What is asked of the cache, prompt by prompt, for the owner who wants to record it.

While nobody records, a look-up costs one look at `is_on`. While somebody does, what was asked waits here until it is
fetched, up to a bound; what comes beyond that is counted, and dropped. A recording that nobody fetches any more ends by
itself.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from hicache.clock import Clock
from hicache.errors import BadRequest, LeaseExpired
from hicache.namespace import Namespace
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.boot import Boot
from hicache.service.server.session import Session, Tokens

MAX_QUEUED: Final = 1 << 16
"""Prompts that wait to be fetched."""
MAX_QUEUED_BYTES: Final = 32 << 20
"""Bytes of their token ids; with `MAX_REPLY_BYTES` no more than a reply may have."""
MAX_REPLY_BYTES: Final = 4 << 20
"""So many bytes of token ids after which a reply ends; the last prompt may be longer."""
FORGOTTEN_S: Final = 60.0
"""After so long without a call a recording has ended."""
MAX_WAIT_MS: Final = 30_000


class _Asked(NamedTuple):
    at: float
    """Monotonic seconds."""
    session: int
    first_page: int | None
    namespace: bytes
    tokens: Tokens
    runs: list[pb.Run]


class Recording:
    """The recording that is under way, if one is: one at a time, of the owner who began one last. Belongs to the event
    loop."""

    def __init__(self, clock: Clock, boot: Boot) -> None:
        self._clock: Final = clock
        self._boot: Final = boot
        self.is_on = False
        """Whether to `note` what is asked."""
        self._number = 0
        self._began = self._heard = 0.0
        self._queued: Final[deque[_Asked]] = deque()
        self._queued_bytes = self._num_dropped = 0
        self._news = asyncio.Event()

    def note(
        self, session: Session, namespace: Namespace, tokens: Tokens, runs: Iterable[pb.Run], first_page: int | None
    ) -> None:
        """Somebody asked for the pages of a prompt from `first_page` on, or (None) where they are; `runs` of it were
        cached. Only while `is_on`. Keeps `tokens`."""
        now = self._clock.monotonic()
        if now > self._heard + FORGOTTEN_S:
            self._end()
        elif len(self._queued) >= MAX_QUEUED or self._queued_bytes + tokens.nbytes > MAX_QUEUED_BYTES:
            self._num_dropped += 1
        else:
            self._queued.append(_Asked(now, session.number, first_page, namespace.digest, tokens, list(runs)))
            self._queued_bytes += tokens.nbytes
            self._news.set()

    async def fetch(self, request: pb.RecordRequest, deadline: float) -> pb.RecordReply:
        """See `RecordRequest`. Waits until something is asked, at most until `deadline` (monotonic seconds). Raises
        `BadRequest`, and `LeaseExpired` for a recording that has ended."""
        if request.wait_ms > MAX_WAIT_MS:
            raise BadRequest("wait_ms", f"{request.wait_ms} is more than {MAX_WAIT_MS}")
        now = self._clock.monotonic()
        if request.walk:
            self._require(request.walk)
        elif request.end:
            raise BadRequest("end", "there is nothing to end: a recording begins")
        else:
            self._end()
            self._number, self.is_on, self._began = self._boot.next_id(), True, now
        number, self._heard = self._number, now
        if request.wait_ms and not self._queued and not request.end:
            self._news.clear()
            try:
                async with asyncio.timeout(max(0.0, min(request.wait_ms / 1000, deadline - now))):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._require(number)
            self._heard = self._clock.monotonic()
        reply = self._reply()
        if request.end and not self._queued:
            self._end()
        else:
            reply.walk = number
        return reply

    def _reply(self) -> pb.RecordReply:
        reply, num_bytes = pb.RecordReply(num_dropped=self._num_dropped), 0
        self._num_dropped = 0
        while self._queued and num_bytes < MAX_REPLY_BYTES:
            each = self._queued.popleft()
            self._queued_bytes -= each.tokens.nbytes
            num_bytes += each.tokens.nbytes
            reply.asked.add(
                at_us=int(1e6 * (each.at - self._began)),
                session=each.session,
                is_acquire=each.first_page is not None,
                first_page=each.first_page or 0,
                namespace=each.namespace,
                tokens=each.tokens.astype("<i4").tobytes(),
                runs=each.runs,
            )
        return reply

    def _require(self, number: int) -> None:
        if number != self._number or not self.is_on:
            raise LeaseExpired("walk", f"{number} has ended, or another recording has taken its place")

    def _end(self) -> None:
        self.is_on = False
        self._queued.clear()
        self._queued_bytes = self._num_dropped = 0
        self._news.set()  # whoever waits for a recording whose place is taken is told
