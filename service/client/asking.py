"""Look-ups on a session's stream, which take half the time of calls of their own: there are no headers to send, no
session to find, and no task to begin for each.

A look-up goes through three threads at this end: gRPC's that sends, gRPC's that receives, and the one that listens to
the stream. Each needs the interpreter's lock: beside a thread that computes in Python all the time, a look-up waits
three times as long as that keeps it (`sys.getswitchinterval`), where a call waits twice as long.
"""

import itertools
import queue
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Final, NamedTuple

from hicache.errors import DeadlineExceeded
from hicache.service import wire
from hicache.service.errors import Unreachable, from_error
from hicache.service.proto import hicache_pb2 as pb

SWEPT_AT: Final = 4096
"""Where so many look-ups are to be sent, those are forgotten for which nobody waits any more: the server has stopped
reading. The others are as many as threads wait."""
_END: Final = 0


class _Asked(NamedTuple):
    packed: bytes
    """A `LookupRequest`."""
    answer: "queue.SimpleQueue[pb.Notice | None]"
    """Where its answer is awaited; None says that there will be none."""


class Asking:
    """The look-ups of one stream. Thread-safe: each thread waits for the answer of its own number."""

    def __init__(self) -> None:
        self._numbers: Final = itertools.count(1)
        self._unsent: Final[queue.SimpleQueue[int]] = queue.SimpleQueue()
        """Numbers of look-ups, `_END` behind the last."""
        self._waiting: Final[dict[int, _Asked]] = {}
        """Look-ups that somebody waits for."""
        self._is_over = False

    def beats(self, beat_s: float, beat: Callable[[], pb.Beat]) -> Iterator[bytes]:
        """What is to be sent on the stream, packed: what `beat` says every `beat_s` seconds, and look-ups as they come.
        Ends after `close`. Waits; gRPC asks for the next one in a thread of its own."""
        due = monotonic()
        while True:
            if monotonic() >= due:
                yield beat().SerializeToString()
                due = monotonic() + beat_s
            try:
                number = self._unsent.get(timeout=max(0.0, due - monotonic()))
            except queue.Empty:
                continue
            if number == _END:
                return
            if (asked := self._waiting.get(number)) is not None:
                yield wire.asking(asked.packed, number)

    def look_up(self, packed: bytes, timeout_s: float) -> pb.LookupReply:
        """Ask a packed `LookupRequest` and wait for the answer. Raises `Unreachable` when the stream has ended,
        `DeadlineExceeded`, and the error that the look-up failed with."""
        if self._unsent.qsize() >= SWEPT_AT:
            self._sweep()
        number, answer = next(self._numbers), queue.SimpleQueue[pb.Notice | None]()
        self._waiting[number] = _Asked(packed, answer)
        try:
            # Looked at after the line before: `close` marks the end before it looks for who waits.
            if self._is_over:
                raise Unreachable("the session's stream has ended")
            self._unsent.put(number)
            notice = answer.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(f"no answer within {timeout_s:g} s") from None
        finally:
            del self._waiting[number]
        if notice is None:
            raise Unreachable("the session's stream has ended")
        if notice.HasField("error"):
            raise from_error(notice.error)
        return notice.lookup

    def _sweep(self) -> None:
        """Forget what is not sent yet and nobody waits for. Other threads may put and take meanwhile."""
        for _ in range(self._unsent.qsize()):
            try:
                number = self._unsent.get_nowait()
            except queue.Empty:
                return
            if number == _END or number in self._waiting:
                self._unsent.put(number)

    def hear(self, notice: pb.Notice) -> None:
        """An answer has come; perhaps nobody waits for it any more."""
        if (asked := self._waiting.get(notice.number)) is not None:
            asked.answer.put(notice)

    def close(self) -> None:
        """The stream has ended, or is to. Idempotent."""
        self._is_over = True
        self._unsent.put(_END)
        for asked in list(self._waiting.values()):
            asked.answer.put(None)
