"""Promotion: pages of a lease, or of a request that is expected, on their way to faster tiers."""

import asyncio
from collections.abc import Sequence

from hicache.arriving import Arrival
from hicache.errors import DeadlineExceeded
from hicache.lease import Lease
from hicache.movers import Lane, Priority
from hicache.node import Node
from hicache.room import PATIENCE_S, Room
from hicache.running import Moving
from hicache.tier import DEVICE, HOST, NVME, TierId


class Promoting(Room):
    """Brings pages up, front first."""

    async def promote(
        self,
        lease: Lease,
        *,
        max_device_pages: int,
        deadline: float,
        priority: Priority = Priority.DEMAND,
        by_layer: bool = False,
    ) -> bool:
        """Bring the pages under a lease as close to the device as they fit: from NVMe to the host, then at most
        `max_device_pages` of them, front first, to the device. Waits until the copies ended, at most until `deadline`;
        what is on its way already, fetched ahead say, is hastened and waited for. With `by_layer`, copies to the device
        are begun and not waited for: steps read them layer by layer (`hicache.arriving`).

        What cannot be brought (no room, a failed read) stays where it is; a caller looks at the residency afterwards.
        False when NVMe did not give what it was asked for: a read failed, or nothing arrived for `PATIENCE_S`. Raises
        `DeadlineExceeded`; what was begun goes on.
        """
        arrived = True
        if NVME in self.tiers:
            num_pages = sum([node.num_pages for node in self.path(lease)])
            arrived = await self._promote_hop(lease, NVME, HOST, num_pages, priority, deadline)
            if self._is_exclusive:
                self._leave_nvme(self.path(lease)[::-1])
        if DEVICE in self.tiers:
            await self._promote_hop(lease, HOST, DEVICE, max_device_pages, priority, deadline, by_layer)
        return arrived

    async def has_come(self, arrival: Arrival, layer: int) -> bool:
        """Wait until a layer of pages on their way to the device is in place. False when it will not come, or has not
        come for `PATIENCE_S`: it is then read in the host."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await arrival.wait(layer)
        except TimeoutError:
            return False

    async def _promote_hop(
        self,
        lease: Lease,
        source: TierId,
        target: TierId,
        max_pages: int,
        priority: Priority,
        deadline: float,
        by_layer: bool = False,
    ) -> bool:
        # The whole path is pinned where it is, so that making room for one part of it does not push out another.
        # Pinned nodes are never merged, so a border between two of them stays one while others appear.
        pins = self._pin_path(lease)
        try:
            while True:
                moving = self.hasten(self.path(lease), source, target, priority)
                given_up = [move for move in moving if move.is_given_up]
                await self._start_hop(self.path(lease), source, target, max_pages, priority, deadline, moving, by_layer)
                if by_layer:
                    return True
                arrived = await self._wait_while_they_move(moving, self._lanes[source, target], deadline)
                # What a prefetch had given up when this came for it is begun anew, once it has ended.
                if not (given_up and all(move.done.is_set() for move in moving)):
                    return arrived
        finally:
            self.unpin(pins)

    async def _start_hop(
        self,
        path: Sequence[Node],
        source: TierId,
        target: TierId,
        max_pages: int,
        priority: Priority,
        deadline: float,
        moving: list[Moving],
        by_layer: bool,
    ) -> None:
        """Begin the moves of a hop, root side first, and note them in `moving`."""
        position = 0
        above: Node | None = None
        for end in path:
            # A split puts its upper half above a node of the path: what is between two of them is one of them, cut.
            while above is not end and position < max_pages:
                if (node := _first_below(above, end)) is None:
                    return
                if not self.wants(node, source, target):
                    position += node.num_pages
                    above = node
                    continue
                if position + node.num_pages > max_pages:
                    node, _ = self.tree.split(node, max_pages - position)
                slots = await self.allocate_up_to(target, node.num_pages, deadline=deadline)
                if not len(slots):
                    return
                # Looked at again: the node may have been split, moved by somebody else, or removed meanwhile.
                found = _first_below(above, end)
                if found is None or not self.wants(found, source, target):
                    self.free({target: slots})
                    continue
                num_pages = min(found.num_pages, len(slots))
                if num_pages < found.num_pages:
                    found, _ = self.tree.split(found, num_pages)
                self.free({target: slots[num_pages:]})
                moving.append(self.start_move(found, source, target, slots[:num_pages], priority, by_layer=by_layer))
                position += num_pages
                above = found

    async def _wait_while_they_move(self, moving: Sequence[Moving], lane: Lane, deadline: float) -> bool:
        """Wait for moves on one lane while it still copies anything; whether all their pages arrived."""
        for move in moving:
            while not move.done.is_set():
                num_copied = lane.stats.pages
                give_up_at = self.clock.monotonic() + PATIENCE_S
                try:
                    await self.wait(move.done, min(deadline, give_up_at))
                except DeadlineExceeded:
                    if deadline <= give_up_at:
                        raise
                    if lane.stats.pages == num_copied:
                        return False
        return all(move.is_complete for move in moving)


def _first_below(above: Node | None, end: Node) -> Node | None:
    """The highest node below `above` (None: below the root) on the path to `end`; None if there is no such path now."""
    step: Node | None = end if end.is_live else None
    while step is not None and (parent := step.parent) is not above:
        step = parent
    return step
