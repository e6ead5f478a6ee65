"""What an engine says of its own work, so that one place measures both the cache and what it is for."""

from dataclasses import dataclass
from typing import Final

from hicache.arguments import real, whole
from hicache.errors import BadRequest
from hicache.service.proto import hicache_pb2 as pb

MAX_COUNT: Final = 1 << 40
"""Most that one report may count."""
MAX_S: Final = float(1 << 31)
"""Longest time of one report, in seconds."""


@dataclass(frozen=True, slots=True)
class EngineWork:
    """What an engine has done since it last said so. Sums of the requests that it means, none of them negative."""

    queue_waits: int = 0
    """Requests that left the engine's queue."""
    queue_wait_s: float = 0.0
    """How long they had waited there, together."""
    prefill_tokens: int = 0
    """Tokens of prompts that were computed, cached ones not among them."""
    prefill_s: float = 0.0
    """How long that took."""
    decode_tokens: int = 0
    """Tokens that were generated."""
    decode_s: float = 0.0
    """How long that took."""

    def __add__(self, other: "EngineWork") -> "EngineWork":
        return EngineWork(
            self.queue_waits + other.queue_waits, self.queue_wait_s + other.queue_wait_s,
            self.prefill_tokens + other.prefill_tokens, self.prefill_s + other.prefill_s,
            self.decode_tokens + other.decode_tokens, self.decode_s + other.decode_s,
        )  # fmt: skip

    def check(self) -> None:
        """Raise `BadRequest` naming a field that is out of its bounds."""
        for name in ("queue_waits", "prefill_tokens", "decode_tokens"):
            whole(name, getattr(self, name), 0, MAX_COUNT)
        for name in ("queue_wait_s", "prefill_s", "decode_s"):
            if not 0 <= real(name, getattr(self, name), " of seconds") <= MAX_S:
                raise BadRequest(name, f"{getattr(self, name):g} is not within 0 to {MAX_S:g} seconds")

    def to_message(self) -> pb.EngineWork:
        """As it travels, times rounded to microseconds."""
        return pb.EngineWork(
            queue_waits=self.queue_waits, queue_wait_us=round(1e6 * self.queue_wait_s),
            prefill_tokens=self.prefill_tokens, prefill_us=round(1e6 * self.prefill_s),
            decode_tokens=self.decode_tokens, decode_us=round(1e6 * self.decode_s),
        )  # fmt: skip

    @classmethod
    def of_message(cls, message: pb.EngineWork) -> "EngineWork":
        """As it was sent. Raises `BadRequest`."""
        work = cls(
            message.queue_waits, message.queue_wait_us / 1e6,
            message.prefill_tokens, message.prefill_us / 1e6,
            message.decode_tokens, message.decode_us / 1e6,
        )  # fmt: skip
        work.check()
        return work
