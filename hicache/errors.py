"""Every error hicache raises on purpose.

    HicacheError
    ├── BadRequest          the caller's input is wrong; nothing was touched
    ├── NoRoom              a tier, or the metadata budget, cannot hold the pages asked for
    ├── NotResident         the pages asked for are not (or no longer) in that tier
    ├── LeaseExpired        the lease ended, was released, or belongs to somebody else
    ├── DeadlineExceeded    a wait reached its deadline
    ├── CorruptPage         bytes failed a checksum or carry another identity
    ├── TierUnavailable     a tier is down (dead disk, read-only, closed)
    └── Closed              the cache or session was closed

Types differ where callers react differently; a broken invariant of our own is an `AssertionError`, not one of these.
Each class has a stable `reason` code, which is what goes over a wire; messages are for people.
"""

from typing import ClassVar


class HicacheError(Exception):
    """Base of all errors that hicache raises on purpose."""

    reason: ClassVar[str] = "error"


class BadRequest(HicacheError, ValueError):
    """The input is wrong. Raised before anything was touched; the message names the field and its bound."""

    reason = "bad_request"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class NoRoom(HicacheError):
    """A tier cannot give the pages asked for, or one of the tree's own bounds is reached. `tier` then names what is
    bounded: "metadata" (`HiRadixTree.insert`), "publications" (`publish`) or "leases" (`lease`), and the message gives
    the bound. Raised by `Tier.allocate`, by the cache after evicting what it may, and by the tree."""

    reason = "no_room"

    def __init__(self, tier: str, *, pages_asked: int, pages_free: int, problem: str = "") -> None:
        super().__init__(f"{tier}: {problem or f'{pages_asked} pages asked, {pages_free} free'}")
        self.tier = tier
        self.pages_asked = pages_asked
        self.pages_free = pages_free


class NotResident(HicacheError):
    """The pages asked for are not, or no longer, in that tier. Raised by the tree and by `Cache` reads."""

    reason = "not_resident"

    def __init__(self, tier: str, what: str) -> None:
        super().__init__(f"{what} is not resident in {tier}")
        self.tier = tier


class LeaseExpired(HicacheError):
    """The lease ended, was released, or is another owner's: what was read under it must not be used."""

    reason = "lease_expired"

    def __init__(self, field: str, problem: str) -> None:
        """`field` is what does not hold: "generation" (it has ended, or was made elsewhere), "owner", "deadline" (it is
        past), or "pages" (they are gone)."""
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class DeadlineExceeded(HicacheError, TimeoutError):
    """A wait reached its deadline. What was waited for may still happen; whatever it holds is given back by itself."""

    reason = "deadline_exceeded"


class CorruptPage(HicacheError):
    """Stored bytes failed their checksum, or their header names another page. The page counts as a miss."""

    reason = "corrupt_page"

    def __init__(self, tier: str, slot: int, problem: str) -> None:
        super().__init__(f"{tier} slot {slot}: {problem}")
        self.tier = tier
        self.slot = slot


class TierUnavailable(HicacheError):
    """A tier cannot be used: it refused to open, is marked down, or was closed. The message says which and why."""

    reason = "tier_unavailable"

    def __init__(self, tier: str, problem: str) -> None:
        super().__init__(f"{tier}: {problem}")
        self.tier = tier


class Closed(HicacheError):
    """The cache or the session was closed."""

    reason = "closed"
