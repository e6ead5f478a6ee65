"""Leases: holds on the existence of prefixes, with owners and deadlines."""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from hicache.arguments import moment, name, whole
from hicache.collector import put, untrack
from hicache.errors import BadRequest, LeaseExpired, NoRoom, NotResident
from hicache.lease import Lease
from hicache.metadata import MAX_PUBLICATIONS, MAX_REPORT_BYTES
from hicache.node import Node
from hicache.policy.base import EvictionPolicy, HearsCopies, HearsShape
from hicache.results import Inserted, Match
from hicache.structure import Structure
from hicache.tier import TierId


class Leasing(Structure):
    """The leases of a tree. A lease is counted at the node where it ends; a node with children keeps its last copy, so
    everything above is kept with it."""

    def __init__(
        self,
        *,
        page_size: int,
        tiers: Sequence[TierId],
        policies: Mapping[TierId, EvictionPolicy] | None = None,
        listeners: Sequence[HearsShape | HearsCopies] = (),
        metadata_bytes: int | None = None,
        max_publications: int = MAX_PUBLICATIONS,
        max_report_bytes: int = MAX_REPORT_BYTES,
        max_leases_per_owner: int | None = None,
    ) -> None:
        super().__init__(
            page_size=page_size,
            tiers=tiers,
            policies=policies,
            listeners=listeners,
            metadata_bytes=metadata_bytes,
            max_publications=max_publications,
            max_report_bytes=max_report_bytes,
        )
        if max_leases_per_owner is not None:
            max_leases_per_owner = whole("max_leases_per_owner", max_leases_per_owner, 1)
        self.max_leases_per_owner: Final = max_leases_per_owner
        """Most leases that one owner may have at a time; None for no bound."""
        self._leases: Final[dict[int, Lease]] = {}
        self._num_leases_of: Final[dict[str, int]] = {}
        # A heap of (deadline, generation); what was renewed or has ended stays in it until it surfaces.
        self._deadlines: list[tuple[float, int]] = []
        self._generation = 0
        untrack(self._deadlines)

    @property
    def num_leases(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    @property
    def leases_by_owner(self) -> dict[str, int]:
        """How many of them each owner has, of those who have some."""
        return dict(self._num_leases_of)

    def lease(
        self, target: Match | Inserted | Node, *, owner: str, deadline: float | None, now: float
    ) -> Lease:
        """Protect some copy of every page from the root to the end of `target` until the lease is released or expires.

        Splits a node where a match ends inside it. A match of nothing gives a lease that holds nothing yet. Which copy
        is kept is open: pin one to keep its address.

        Args:
            target: up to where. A match may be older than splits and merges, not older than the departure of the node
                that it ends in: that node may have lost only pages behind the match, but a new match has to be made.
            owner: who may end, renew and move it.
            deadline: monotonic seconds at which `expire` ends it, None for never. One that is past already gives a
                lease that the next `expire` ends.

        Raises `NotResident` when that node has left the tree, or its pages are another tenant's and not published any
        more; `NoRoom` naming "leases" for an owner that has as many as it may; `BadRequest` naming the field.
        """
        owner = name("owner", owner)
        deadline = None if deadline is None else moment("deadline", deadline)
        now = moment("now", now)
        most, num_owned = self.max_leases_per_owner, self._num_leases_of.get(owner, 0)
        if most is not None and num_owned >= most:
            raise NoRoom("leases", pages_asked=0, pages_free=0, problem=f"{num_owned} are all that one owner may have")
        node = self._node_at_end(target)
        self._advance(now)
        self._generation += 1
        lease = Lease(node, owner, self._generation, deadline)
        self._num_leases_of[owner] = num_owned + 1
        put(self._leases, self._generation, lease)
        self._watch(lease)
        if node is not None:
            self._count_lease(node, 1)
        return lease

    def move_lease(
        self, lease: Lease, target: Match | Inserted | Node, now: float, *, owner: str | None = None
    ) -> None:
        """Let a lease end elsewhere: at a deeper node when its sequence grew, at a higher one when it is cut.

        Raises `LeaseExpired` when it ended, was not made here, is past its deadline at `now`, or is of another owner
        than `owner` where one is given; `NotResident` as `lease` does.
        """
        now = moment("now", now)
        self._require_lease(lease, owner)
        self._require_in_time(lease, now)
        node = self._node_at_end(target)
        self._advance(now)
        before = lease._node
        if node is not None:
            self._count_lease(node, 1)
        lease._node = node
        if before is not None:
            self._count_lease(before, -1)
            self._heal(before)

    def release(self, lease: Lease, *, owner: str | None = None) -> None:
        """End a lease. Again is no error. Raises `LeaseExpired` for a lease of another tree, and of another owner than
        `owner` where one is given."""
        _check_owner(lease, owner)
        known = self._leases.get(lease._generation)
        if known is lease:
            self._end_lease(lease)
        elif known is not None or lease._node is not None:
            raise LeaseExpired("generation", f"lease {lease._generation} was not made by this tree")

    def renew(self, lease: Lease, deadline: float | None, *, now: float, owner: str | None = None) -> None:
        """Give a lease another deadline, monotonic seconds or None for never.

        Raises `LeaseExpired` when it ended, was not made here, is past the deadline it has at `now`, is of another
        owner than `owner` where one is given, or holds pages that were forgotten as corrupt.
        """
        deadline = None if deadline is None else moment("deadline", deadline)
        now = moment("now", now)
        self._require_lease(lease, owner)
        self._require_in_time(lease, now)
        if lease._node is not None and lease._node._parent is None:
            raise LeaseExpired("pages", f"those of lease {lease._generation} are gone")
        self._advance(now)
        lease._deadline = deadline
        self._watch(lease)

    def expire(self, now: float) -> list[Lease]:
        """End the leases whose deadline is not after `now`; returns them, earliest deadline first."""
        now = moment("now", now)
        self._advance(now)
        ended: list[Lease] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, generation = heappop(self._deadlines)
            lease = self._leases.get(generation)
            if lease is not None and lease._deadline == deadline:
                self._end_lease(lease)
                ended.append(lease)
        return ended

    def _watch(self, lease: Lease) -> None:
        """Note a lease's deadline for `expire`; drop the entries of others when most of them are out of date."""
        if lease._deadline is None:
            return
        heappush(self._deadlines, (lease._deadline, lease._generation))
        if len(self._deadlines) > 64 + 2 * len(self._leases):
            self._deadlines = [
                (each._deadline, each._generation) for each in self._leases.values() if each._deadline is not None
            ]
            heapify(self._deadlines)
            untrack(self._deadlines)

    def _end_lease(self, lease: Lease) -> None:
        node = lease._node
        del self._leases[lease._generation]
        self._num_leases_of[lease._owner] -= 1
        if not self._num_leases_of[lease._owner]:
            del self._num_leases_of[lease._owner]
        lease._node = None
        if node is not None:
            self._count_lease(node, -1)
            self._heal(node)

    def _count_lease(self, node: Node, change: int) -> None:
        node._num_leases += change
        self._refresh(node)

    def _require_lease(self, lease: Lease, owner: str | None) -> None:
        _check_owner(lease, owner)
        if self._leases.get(lease._generation) is not lease:
            problem = f"lease {lease._generation} of {lease._owner!r} has ended or was not made by this tree"
            raise LeaseExpired("generation", problem)

    def _require_in_time(self, lease: Lease, now: float) -> None:
        """A lease ends at its deadline for everybody, whether or not `expire` has come by."""
        now = max(now, self._now)
        if lease._deadline is not None and lease._deadline <= now:
            raise LeaseExpired("deadline", f"lease {lease._generation} ended at {lease._deadline}, it is {now}")

    def _node_at_end(self, target: Match | Inserted | Node) -> Node | None:
        """The node that ends where `target` does; splits to make it so. The place is looked up again by its number of
        pages, since a match may be older than a split or a merge."""
        if isinstance(target, Match):
            if not target.nodes:
                return None
            last = self.current(target.nodes[-1])
            self._require_live(last or target.nodes[-1])
            end = target.num_tokens // self.page_size
            for node in self.path(last or target.nodes[-1]):
                if end <= node._num_pages:
                    if node._root.digest != target.asked and not node.is_published:
                        raise NotResident("the tree", "a prefix that another tenant no longer publishes")
                    return self._split(node, end) if end < node._num_pages else node
                end -= node._num_pages
            raise AssertionError("a node's path became shorter while it lived")
        node = target.node if isinstance(target, Inserted) else target
        if not isinstance(node, Node):
            raise BadRequest("target", f"{type(target).__name__} is not a match, an insert or a node")
        self._require_live(node)
        return node


def _check_owner(lease: Lease, owner: str | None) -> None:
    if not isinstance(lease, Lease):
        raise BadRequest("lease", f"{type(lease).__name__} is not a lease")
    if owner is not None and owner != lease._owner:
        raise LeaseExpired("owner", f"lease {lease._generation} belongs to another")
