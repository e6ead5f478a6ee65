"""What all sessions have together, divided so that no tenant leaves the others without any.

Half of it is for whoever comes first. The other half is divided: each peer has a part of its own, whether it uses it or
not, and as large a one as every other has. So one peer alone may have all but the others' parts. Where there can be
one peer only, it may have all.

A peer is a tenant. Where there are no tenants, but users of a group may connect, it is a user; how many will come
nobody knows then, so there is a part for each that is there, and for one more. Who has nothing yet is refused for
nobody else's part.

Of what its sessions ask for all the time, calls and token ids, each session has a share beside that, so that sessions
of one tenant leave each other some (`beyond`).

The alternatives that lost: sessions that end for a newcomer's sake, as no tenant is to notice another; and a bound for
each tenant, as most of what there is would lie idle while one tenant works alone.
"""

from collections import Counter
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from typing import Final, TypeAlias

Peer: TypeAlias = str | int
"""The name of a tenant, or the id of a user."""
_ONLY: Final[Peer] = ""
"""The peer where there is one."""


class Peers:
    """Who counts as one, and how many there can be."""

    def __init__(self, tenants: Collection[str] = (), *, has_group: bool = False) -> None:
        """`tenants`: their names; none where there are no tenants. `has_group`: other users than the server's own may
        connect."""
        self._tenants: Final = frozenset(tenants)
        self._are_users: Final = has_group and not tenants

    def of(self, tenant: str, uid: int) -> Peer:
        """Who a session's things are counted for."""
        return tenant or (uid if self._are_users else _ONLY)

    @property
    def num_tenants(self) -> int:
        """Tenants that there are, whether they are there or not; 0 where there are none."""
        return len(self._tenants)

    def num_absent(self, present: AbstractSet[Peer]) -> int:
        """How many peers a part is kept for beside those that are there."""
        return 1 if self._are_users else len(self._tenants - present)


def beyond(own: int, before: int, after: int) -> int:
    """How much more of what is divided a session has when it has `after` of something instead of `before`: up to `own`
    is its own, beside that."""
    return max(0, after - own) - max(0, before - own)


class Pool:
    """So much of something that all peers have together, and what of it each has. Belongs to the event loop.

    >>> pool = Pool(Peers({"red", "blue"}), 8)
    >>> while pool.fits("red"): pool.note("red", 1)
    >>> while pool.fits("blue"): pool.note("blue", 1)
    >>> pool.held("red"), pool.held("blue")
    (6, 2)
    """

    def __init__(self, peers: Peers, most: int) -> None:
        self._peers: Final = peers
        self._most: Final = most
        self._held: Final = Counter[Peer]()
        self.total = 0
        """What all peers have."""

    @property
    def part(self) -> int:
        """What each tenant has for itself; all where nothing is divided among tenants. Who asks for no more at a time
        always finds its part."""
        return self._most // 2 // self._peers.num_tenants if self._peers.num_tenants > 1 else self._most

    def held(self, peer: Peer) -> int:
        """What a peer has."""
        return self._held[peer]

    def fits(self, peer: Peer, amount: int = 1) -> bool:
        """Whether a peer may have so much more. Nothing more always fits."""
        if not amount:
            return True
        divided = self._most // 2
        if self.total + amount + divided <= self._most:
            return True  # even if nobody used any of a part: this is asked for every call
        if not self._held[peer]:
            return self.total + amount <= self._most
        present = self._held.keys() | {peer}
        num_absent = self._peers.num_absent(present)
        part = divided // (len(present) + num_absent)
        unused = part * num_absent + sum([max(0, part - self._held[each]) for each in present if each != peer])
        return self.total + amount + unused <= self._most

    def note(self, peer: Peer, amount: int) -> None:
        """A peer has so much more, or less."""
        self.total += amount
        self._held[peer] += amount
        if not self._held[peer]:
            del self._held[peer]
