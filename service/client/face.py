"""What a client says of its session without a call, the same whether its calls are awaited or not."""

from hicache.errors import Closed
from hicache.service.client.calls import Attachment
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.work import EngineWork


class SessionFace:
    """The part of `Client` and `AsyncClient` that does not wait."""

    _attachment: Attachment | None
    """The session, or the last one until another is begun; None before the first and after the end."""

    def report(self, work: EngineWork) -> None:
        """Say what the engine has done since the last report, for the server's metrics: how long requests waited, and
        how fast prompts are computed, from which the server tells what its hits have saved. Sent with the next beat;
        what a session has not sent when it ends is lost. Does not wait. Raises `BadRequest`."""
        attachment = self._attachment
        if attachment is not None:
            attachment.report(work)

    @property
    def durable_sequence(self) -> int:
        """The number up to which all promises of durability of this session are settled (`Committed.sequence`)."""
        return self._attachment.durable_sequence if self._attachment is not None else 0

    @property
    def lost(self) -> frozenset[int]:
        """Promises up to `durable_sequence` that could not be kept."""
        return frozenset(self._attachment.lost if self._attachment is not None else ())

    @property
    def is_draining(self) -> bool:
        """Whether the server has said that it is about to stop."""
        return self._attachment is not None and self._attachment.is_draining

    @property
    def welcome(self) -> pb.Welcome:
        """What the server said of itself and of this session's bounds. Raises `Closed`."""
        if self._attachment is None:
            raise Closed("the client is closed")
        return self._attachment.welcome
