"""Fetching ahead: what a request will want is brought from NVMe to the host before it comes.

A prediction may be wrong, so its harm is bounded:

1. It takes free room of the host, and copies that leave for nothing: NVMe has the page too, no running request leases
   it or anything below it, nothing pins it, and it was not used within the last `deadline - now` seconds. What was used
   within as long as the request may take to come is as likely to be wanted first.
2. It takes no room that somebody waits for, and at most `max_pages` a call, a quarter of the host tier by default.
3. It goes through the lane at `Priority.PREFETCH`, behind every demand that is not `age_s` younger, and has a quarter
   of the batches that may be under way: for these a demand may have to wait.
4. It holds nothing: no lease, no pin beyond the copies that are under way. A page that was removed stays removed.

A request that comes meanwhile hastens what is on its way for it and waits for that (`Cache.promote`). Those pages are
then the request's: neither `cancel` nor the deadline takes them back.
"""

import asyncio
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from hicache.arguments import moment, whole
from hicache.movers import Priority
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.residency import Residency
from hicache.tier import HOST, NVME, Slots

if TYPE_CHECKING:
    from hicache.cache import Cache, Moving

SHARE: Final = 4
"""By default, a call fetches at most the host tier's pages divided by this."""
LOOK_BELOW_NODES: Final = 64
"""Nodes below a victim that are looked at for leases; one with more below it stays."""


class Prefetch:
    """Pages on their way from NVMe to the host. Made by `Cache.prefetch`; belongs to the cache's loop.

    It need not be kept: what was begun goes on. It ends by itself at its deadline, as if it were cancelled then.
    """

    def __init__(self, *, num_there: int, num_left_out: int) -> None:
        self.num_there: Final = num_there
        """Pages of the cached prefix that were in the host or the device already."""
        self.num_left_out: Final = num_left_out
        """Pages that NVMe alone has and that were not begun, for want of room or beyond `max_pages`."""
        self.num_begun = 0
        """Pages that were begun."""
        self._moving: list[Moving] = []
        self._left = 0
        self._arrived = 0
        self._ended = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._ended.set()

    @property
    def is_done(self) -> bool:
        """Whether nothing is under way any more."""
        return self._ended.is_set()

    @property
    def num_arrived(self) -> int:
        """Pages that came whole so far."""
        return self._arrived

    async def wait(self) -> int:
        """Wait until nothing is under way any more; how many pages came whole. No longer than until the deadline and
        the end of the copies that had begun by then. Cancelling the waiting task cancels nothing else."""
        await self._ended.wait()
        return self._arrived

    def cancel(self) -> None:
        """Change one's mind. Pages whose copy has not begun are not copied, and their slots become free; what has begun
        ends as it does, and what a request waits for goes on. Pages that came are ordinary copies. Again is harmless.
        """
        for moving in self._moving:
            moving.give_up()

    def _began(self, moving: "Moving") -> None:
        self.num_begun += moving.move.num_pages
        self._left += 1
        self._moving.append(moving)
        self._ended.clear()

    def _end_at(self, seconds: float) -> None:
        if self._left:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.cancel)

    def _one_ended(self, num_arrived: int) -> None:
        self._arrived += num_arrived
        self._left -= 1
        if not self._left:
            if self._timer is not None:
                self._timer.cancel()
            self._ended.set()


def begin(
    cache: "Cache", namespace: Namespace, tokens: npt.ArrayLike, *, deadline: float, max_pages: int | None
) -> Prefetch:
    """See `Cache.prefetch`."""
    deadline = moment("deadline", deadline)
    host_pages = cache.tiers[HOST].capacity_pages
    if max_pages is not None:
        max_pages = whole("max_pages", max_pages, 1)
    else:
        max_pages = max(1, host_pages // SHARE)
    now = cache.clock.monotonic()
    path = _matched(cache, namespace, tokens)
    if not path or NVME not in cache.tiers:
        return Prefetch(num_there=sum([node.num_pages for node in path]), num_left_out=0)
    # A use that is expected is as good as one: what is above stays, and what comes is not the first to leave.
    cache.tree.touch(path[-1], now)
    num_wanted = sum([node.num_pages for node in path if _is_on_nvme_alone(cache, node)])
    slots = _room(cache, min(num_wanted, max_pages) if deadline > now else 0, now - (deadline - now))
    # What left has made equal neighbours, which are one node now.
    path = _matched(cache, namespace, tokens)
    prefetch = Prefetch(
        num_there=sum([node.num_pages for node in path]) - num_wanted, num_left_out=num_wanted - len(slots)
    )
    for node in path:
        if not len(slots):
            break
        if not _is_on_nvme_alone(cache, node):
            continue
        if node.num_pages > len(slots):
            node, _ = cache.tree.split(node, len(slots))
        taken, slots = slots[: node.num_pages], slots[node.num_pages :]
        prefetch._began(cache.start_move(node, NVME, HOST, taken, Priority.PREFETCH, on_done=prefetch._one_ended))
    prefetch._end_at(max(0.0, deadline - now))
    return prefetch


def _matched(cache: "Cache", namespace: Namespace, tokens: npt.ArrayLike) -> list[Node]:
    """The nodes of what is cached of a prefix, cut where it ends."""
    match = cache.tree.match(namespace, tokens, published=False)
    path = list(match.nodes)
    if path and match.pages_in_last < path[-1].num_pages:
        path[-1], _ = cache.tree.split(path[-1], match.pages_in_last)
    return path


def _is_on_nvme_alone(cache: "Cache", node: Node) -> bool:
    """Whether the node has to be fetched: it is on NVMe, and neither in a faster tier nor on its way there."""
    return all(
        node.residency(tier_id) is (Residency.RESIDENT if tier_id == NVME else Residency.ABSENT)
        for tier_id in cache.tiers
    )


def _room(cache: "Cache", num_pages: int, used_before: float) -> Slots:
    """Slots of the host, as many as there are for something that is only expected. Does not wait."""
    tier = cache.tiers[HOST]
    if cache.is_waited_for(HOST):
        return np.empty(0, np.int32)
    while num_pages > tier.num_free:
        missing = num_pages - tier.num_free
        left = 0
        # Twice as many are looked at as are needed; evicting leaves shows those above them, so it may go on.
        for node in cache.tree.victims(HOST, 2 * missing, cache.clock.monotonic()):
            if left >= missing:
                break
            if _may_leave(node, used_before) and cache.tree.can_evict(node, HOST):
                if node.num_pages > missing - left:
                    cache.tree.split(node, node.num_pages - (missing - left))
                left += cache.evict(node, HOST)
        if not left:
            break
    return tier.allocate(min(num_pages, tier.num_free))


def _may_leave(node: Node, used_before: float) -> bool:
    return (
        node.last_access < used_before
        and node.residency(NVME) is Residency.RESIDENT
        and not _has_leases(node)
    )


def _has_leases(node: Node) -> bool:
    """Whether a lease ends at the node or below it; true when there is too much to look at."""
    seen, stack = 0, [node]
    while stack:
        step = stack.pop()
        seen += 1
        if step.num_leases or seen > LOOK_BELOW_NODES:
            return True
        stack += step.children
    return False
