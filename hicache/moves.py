"""Moves of a cache: copies from tier to tier, each of which a task of the cache completes."""

from collections.abc import Callable, Iterable, Sequence

from hicache.arriving import Arrival
from hicache.counters import count
from hicache.evictable import tiers_of_children
from hicache.movers import PageMove, Priority, Transfer
from hicache.node import Node
from hicache.residency import Residency
from hicache.results import Finished, Freed
from hicache.running import Moving, Running
from hicache.tier import DEVICE, HOST, NVME, Outcome, Slots, TierId


class Moves(Running):
    """Begins and ends moves. See rules 1 and 3 of `hicache.cache`."""

    def start_move(
        self,
        node: Node,
        source: TierId,
        target: TierId,
        slots: Slots,
        priority: Priority,
        *,
        on_done: Callable[[int], None] | None = None,
        by_layer: bool = False,
    ) -> Moving:
        """Begin to copy a node from one tier to another, into `slots` of the target; returns at once. With `by_layer`,
        layer after layer, where the lane can.

        The node is resident in `source` and absent in `target`. From here on the slots belong to the move: they end in
        the tree or are freed, whether anybody still waits or not. `on_done` is called once, on the loop, when the move
        has ended, with how many pages arrived; it does not wait and does not raise. Raises `Closed`, and the slots are
        freed.
        """
        if self._closing:
            self.free({target: slots})
            self._require_open()
        move = self.tree.start_move(node, source=source, target=target, slots=slots)
        from_tier, to_tier = self.tiers[source], self.tiers[target]
        pages = [
            PageMove(
                source_slot=int(source_slot),
                source_generation=from_tier.generation(int(source_slot)),
                target_slot=int(target_slot),
                target_generation=to_tier.generation(int(target_slot)),
                identity=identity,
            )
            for source_slot, target_slot, identity in zip(
                node.slots(source), slots, self.tree.identities(node), strict=True
            )
        ]
        moving = Moving(move, source, target, priority, on_done, by_layer)
        self._moving[moving] = None
        self._num_moves += 1
        for tier_id in (source, target):
            self._under_way[tier_id] += 1
        self._tasks.create_task(self._carry_out(moving, pages), name=f"move {source}->{target}")
        return moving

    async def _carry_out(self, moving: Moving, pages: list[PageMove]) -> None:
        outcomes: Sequence[Outcome | None]
        lane = self._lanes.get((moving.source, moving.target))
        if moving.is_given_up:
            outcomes = [None] * len(pages)
        elif lane is not None:
            arrival = moving.arrival

            def advance(_: Transfer, layer: int) -> None:
                arrival.advance(layer)

            moving.submitted(
                await lane.submit(pages, priority=moving.priority, by_layer=moving.by_layer, on_layer=advance)
            )
            assert moving.transfer is not None
            outcomes = (await moving.transfer.wait()).outcomes
        else:
            outcomes = await self.writer.copy_past_host(self.tiers[moving.source], self.tiers[moving.target], pages)
        ok = [outcome is Outcome.OK for outcome in outcomes]
        if moving.target == NVME and not all(ok):
            # Nothing is kept there without what comes before it.
            ok = [position < ok.index(False) for position in range(len(ok))]
        finished = self.tree.finish_move(moving.move, ok)
        moving.num_arrived, moving.is_complete = ok.count(True), all(ok)
        if moving.num_arrived and lane is not None:
            self.deciding.copied(lane)
        if not all(ok):
            num_failed = ok.count(False) - (outcomes.count(None) if moving.is_given_up else 0)
            if num_failed:
                count(self.counters.failed_moves, f"{moving.source}->{moving.target}", num_failed)
            self._forget_bad(moving, outcomes)
        del self._moving[moving]
        if self._is_exclusive and (moving.source, moving.target) == (NVME, HOST):
            self._leave_nvme(finished.nodes)
        for tier_id in (moving.source, moving.target):
            self._under_way[tier_id] -= 1
            self._stalled.discard(tier_id)
        self._free_slots(self._keep_for_readers(moving.arrival, finished))
        moving.arrival.end(all(ok))
        if any(ok):
            self._changed()
        else:
            self._wake()
        moving.done.set()
        if moving.on_done is not None:
            moving.on_done(moving.num_arrived)

    def arrivals(self) -> dict[Node, Arrival]:
        """What is on its way from the host to the device: for steps that `enter` it."""
        coming = [moving for moving in self._moving if moving.target == DEVICE]
        return {node: moving.arrival for moving in coming for node in moving.move.nodes}

    def enter(self, arrivals: set[Arrival]) -> None:
        """A step begins to read pages that are on their way to the device: see `hicache.arriving`."""
        for arrival in arrivals:
            arrival.num_readers += 1

    def leave(self, arrivals: set[Arrival]) -> None:
        """It does not read them any more."""
        for arrival in arrivals:
            arrival.num_readers -= 1
            if not arrival.num_readers and arrival.is_over:
                self.unpin(arrival.pins)
                self.free(arrival.freed)

    def _keep_for_readers(self, arrival: Arrival, finished: Finished) -> Freed:
        """A move has ended whose pages steps may be reading: those on the device stay so, and the slots of those that
        did not come are not free before. Returns what is free now."""
        if not arrival.num_readers:
            return finished.freed
        there = [node for node in finished.nodes if node.residency(DEVICE) is Residency.RESIDENT]
        arrival.pins = self.pin({DEVICE: there})
        arrival.freed = {tier_id: slots for tier_id, slots in finished.freed.items() if tier_id == DEVICE}
        return {tier_id: slots for tier_id, slots in finished.freed.items() if tier_id != DEVICE}

    def _forget_bad(self, moving: Moving, outcomes: Sequence[Outcome | None]) -> None:
        """A source that cannot give a page back whole must not be asked for it again."""
        bad = (Outcome.CORRUPT, Outcome.NOT_FOUND, Outcome.STALE)
        for node, first_page in self.tree.failed_pages(moving.move, [outcome in bad for outcome in outcomes]):
            self.forget(node, moving.source, first_page)

    def hasten(self, nodes: Iterable[Node], source: TierId, target: TierId, priority: Priority) -> list[Moving]:
        """Moves under way that bring pages of nodes where they are wanted, made as urgent as `priority`."""
        path = set(nodes)
        moving = [
            move
            for move in self._moving
            if (move.source, move.target) == (source, target) and not path.isdisjoint(move.move.nodes)
        ]
        for move in moving:
            move.hasten(priority)
        return moving

    def wants(self, node: Node, source: TierId, target: TierId) -> bool:
        """Whether the node should take this hop on its way up: it can, and is in nothing as fast as the target."""
        slower = self._from(target)[1:]
        return node.residency(source) is Residency.RESIDENT and all(
            node.residency(tier_id) is Residency.ABSENT for tier_id in self.tiers if tier_id not in slower
        )

    def _leave_nvme(self, nodes: Sequence[Node]) -> None:
        """Pages have come to the host: their copies on NVMe leave, from the ends up, so that what stays has everything
        before it. Where something below is there still, they leave with that."""
        persisted = [node for node in map(self.tree.current, self._persisted) if node is not None]
        self._persisted = list(dict.fromkeys(persisted))
        kept = set(persisted)
        for node in nodes:
            step: Node | None = node
            while step is not None and step not in kept and self._is_to_leave_nvme(step):
                parent = step.parent
                self.free(self.tree.evict(step, NVME))
                count(self.counters.evicted_pages, NVME, step.num_pages)
                step = parent

    def _is_to_leave_nvme(self, node: Node) -> bool:
        return (
            node.is_live
            and node.residency(NVME) is Residency.RESIDENT
            and node.residency(HOST) is Residency.RESIDENT
            and not tiers_of_children(node) >> list(self.tiers).index(NVME) & 1
            and self.tree.can_evict(node, NVME)
        )
