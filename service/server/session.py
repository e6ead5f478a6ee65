"""A session and all it holds, as data. What makes and ends it is `hicache.service.server.sessions`."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.errors import BadRequest
from hicache.lease import Lease, Pin
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.service.errors import UnknownNamespace
from hicache.service.server.intake import AT_ONCE
from hicache.service.server.promises import Promises
from hicache.service.server.shares import Peer
from hicache.service.server.staging import Staging
from hicache.service.work import EngineWork
from hicache.tier import PageIdentity, Slots

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Registered:
    """A namespace as a session registered it, and what it is in the tree: one namespace a parallel rank, which are one
    prompt's parts and count together or not at all."""

    named: Namespace
    """With the session's tenant."""
    rank: int
    ranks: tuple[Namespace, ...]
    """What each rank's pages are stored under."""
    num_bytes: int
    """Of its record, counted once a rank."""

    @property
    def own(self) -> Namespace:
        """What this session's rank stores under."""
        return self.ranks[self.rank]


@dataclass(slots=True, eq=False)
class Lent:
    """A lease that a session has."""

    leases: tuple[Lease, ...]
    """One; or, for a prefix that all ranks are to keep, one a rank."""
    pins: tuple[Pin, ...]
    """Keep pages in place in the arena; none for a lease that keeps them in the cache alone."""
    num_pages: int
    """Pages kept in place."""
    num_pinned: int = 0
    """Pages kept in the cache, wherever."""
    slots: Slots = field(default_factory=lambda: np.empty(0, np.int32))
    """Arena slots of the pages that the session was named, which are among those."""
    began: float = 0.0
    """Monotonic seconds at which the session was given it."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Reservation:
    """Room for pages that a session is about to write. Its slots are in no tree."""

    namespace_id: int
    namespace: Namespace
    """That of the session's rank."""
    tokens: Tokens
    """From the root to the end of the last page."""
    first_page: int
    identities: list[PageIdentity]
    """Of the pages from `first_page` on."""
    slots: Slots
    """In the host tier."""
    staging_slots: Slots
    lease: Lease
    """Keeps the pages before `first_page`."""


@dataclass(frozen=True, slots=True)
class Handle:
    """A prefix that was told to the session: the first `num_pages` pages on the path to a node's end."""

    namespace_id: int
    node: Node
    num_pages: int


@dataclass(slots=True, eq=False)
class Session:
    """One attached process, and all it holds. Belongs to the event loop."""

    number: int
    """Shown to people."""
    tenant: str
    peer: Peer
    """Who what it takes is counted for."""
    name: str
    """As the client calls itself."""
    uid: int
    pid: int
    key: bytes
    """SHA-256 of its token."""
    staging: Staging | None
    last_heard: float
    """Monotonic seconds: when the session was made, or its last beat."""
    is_attached: bool = False
    num_calls: int = 0
    """Calls under way."""
    num_open: int = 0
    """Calls that gRPC has not done with: those under way, those whose answers were not read, and the stream."""
    kept_bytes: int = 0
    """Of token ids that reservations keep, and promises behind replies."""
    unread_bytes: int = 0
    """Of long replies that gRPC has not done with."""
    was_read: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when one of these was read, or the session has ended."""
    num_pages: int = 0
    """Arena pages that leases and reservations keep in place."""
    num_pinned: int = 0
    """Pages that pins keep in the cache."""
    namespaces: OrderedDict[int, Registered] = field(default_factory=OrderedDict)
    """By number; the one that was used longest ago is the first."""
    namespace_numbers: dict[tuple[Namespace, int], int] = field(default_factory=dict)
    """The same by name and rank."""
    namespace_bytes: int = 0
    """Of their records."""
    num_registered: int = 0
    """Namespaces since the session began; the last one's number."""
    handles: OrderedDict[int, Handle] = field(default_factory=OrderedDict)
    calls: dict[int, int] = field(default_factory=dict)
    """What was lent to which call of the client's numbering, while it lasts."""
    abandoned: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Calls that were given up before they were lent anything."""
    leases: dict[int, Lent] = field(default_factory=dict)
    reservations: dict[int, Reservation] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the stream has something to tell."""
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    """For receiving messages."""
    pidfd: int = -1
    work: EngineWork = field(default_factory=EngineWork)
    """What its engine says that it has done."""
    promises: Promises = field(init=False)

    def __post_init__(self) -> None:
        self.promises = Promises(self.news.set)

    @property
    def owner(self) -> str:
        """What the session's leases are owned by in the tree."""
        return f"session-{self.number}"

    @property
    def is_idle(self) -> bool:
        """Whether it holds nothing and waits for nothing."""
        return not (self.leases or self.reservations or self.num_calls or self.promises.num_open)

    @property
    def has_left(self) -> bool:
        """Whether something of it stays with the server when it has ended."""
        return self.num_open > 0 or self.kept_bytes > 0

    @property
    def staging_bytes(self) -> int:
        """Of its staging memory."""
        return self.staging.num_slots * self.staging.stride if self.staging is not None else 0

    def told(self, now: float) -> dict[str, Any]:
        """The session as JSON-able values, at `now` in monotonic seconds: "session", "tenant", "name", "pid",
        "attached", "silent_s", "calls", "leases", "reservations", "pages" (kept in place), "oldest_lease_s" (0 without
        leases), "staging_bytes" and "namespaces"."""
        return {
            "session": self.number,
            "tenant": self.tenant,
            "name": self.name,
            "pid": self.pid,
            "attached": self.is_attached,
            "silent_s": max(0.0, now - self.last_heard),
            "calls": self.num_calls,
            "leases": len(self.leases),
            "reservations": len(self.reservations),
            "pages": self.num_pages,
            # They are in the order in which they were given.
            "oldest_lease_s": max([0.0, *(now - lent.began for lent in islice(self.leases.values(), 1))]),
            "staging_bytes": self.staging_bytes,
            "namespaces": len(self.namespaces),
        }

    def registered(self, namespace_id: int) -> Registered:
        """A namespace of the session, which is used now. Raises `BadRequest`, `UnknownNamespace`."""
        if not namespace_id:
            raise BadRequest("prefix.namespace_id", "is missing")
        registered = self.namespaces.get(namespace_id)
        if registered is None:
            problem = f"{namespace_id} was not registered by this session, or was let go since"
            raise UnknownNamespace(problem, field="prefix.namespace_id")
        self.namespaces.move_to_end(namespace_id)
        return registered
