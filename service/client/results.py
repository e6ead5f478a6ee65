"""What calls answer: plain values."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from hicache.service.proto import hicache_pb2 as pb


class Outcome(Enum):
    """What became of pages."""

    ACCEPTED = pb.OUTCOME_ACCEPTED
    """Room is reserved."""
    RESIDENT = pb.OUTCOME_RESIDENT
    """They are in the arena and can be found. A crash of the server may lose them."""
    DURABLE = pb.OUTCOME_DURABLE
    """They survive `kill -9` and a power cut."""
    REFUSED = pb.OUTCOME_REFUSED
    """Nothing of them is kept; `reason` says why."""


class Durability(Enum):
    """What a commit promises beyond that its pages can be found."""

    NONE = pb.DURABILITY_NONE
    BEHIND = pb.DURABILITY_BEHIND
    """They are written behind the answer: `Client.durable_sequence` tells when they are durable."""
    WAIT = pb.DURABILITY_WAIT
    """The answer waits until they are durable."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is cached of a prompt. Nothing is kept: `acquire` does that."""

    num_tokens: int
    """Tokens from the root in whole pages."""
    partial_tokens: int
    """Further tokens that the best matching page shares."""
    runs: tuple[tuple[str, int], ...]
    """`num_tokens` from the root on, as runs of (fastest tier that has them, tokens)."""


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of a commit."""

    outcome: Outcome
    """RESIDENT, DURABLE or REFUSED."""
    reason: str
    """Why it was refused, or why it is not durable although that was asked for: a reason code such as "no_room". Empty
    where there is nothing to say."""
    num_tokens: int
    """Tokens from the root that can be found with these pages."""
    sequence: int
    """Number of this promise of durability, from 1; 0 where none was asked for."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """A prefix that is kept in the cache, in whatever tier, until the client releases it or ends."""

    lease_id: int
    """For `Client.unpin`; 0 when nothing is cached."""
    num_tokens: int
    """Tokens from the root that are kept."""


@dataclass(frozen=True, slots=True)
class Prefetched:
    """What a prefetch has begun."""

    num_there: int
    """Pages that were in the arena already."""
    num_begun: int
    """Pages on their way."""
    num_left_out: int
    """Pages that stay on NVMe for want of room."""


TIER_NAMES: Final = {pb.TIER_HOST: "host", pb.TIER_NVME: "nvme"}


def reason_name(reason: "pb.Reason") -> str:
    """A reason code as text: REASON_NO_ROOM is "no_room", none is empty, and one of a later server is its number."""
    if reason not in pb.Reason.values():
        return str(int(reason))
    return "" if reason == pb.REASON_NONE else pb.Reason.Name(reason).removeprefix("REASON_").lower()
