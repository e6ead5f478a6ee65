"""Room in a tier: who waits for it, what leaves for it, and how that goes one tier down first."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from hicache.care import rank_of
from hicache.counters import count
from hicache.errors import DeadlineExceeded, NoRoom, TierUnavailable
from hicache.lease import Pin
from hicache.movers import Priority
from hicache.moves import Moves
from hicache.node import Node
from hicache.residency import Residency
from hicache.running import Moving, Turn
from hicache.tier import DEVICE, HOST, NVME, Slots, Tier, TierId

PATIENCE_S: Final = 2.0
"""How long a tier is asked for room before it has none for now. A slower tier may hang: its copies go on, and what
nobody needs is dropped instead."""
LEAST_PATIENCE_S: Final = 0.5
"""Less time says nothing of a tier: who is in such a hurry gets no room, and nobody's pages are dropped for it."""
MAX_TRIES: Final = 8
"""Tries to make room in vain that follow one another, while nobody has given anything back. What others move may help,
so it is tried again; but in a slow tier that is too small for all, two may push out each other's copies for ever."""
_SLOWER: Final = {DEVICE: HOST, HOST: NVME}
NO_SLOTS: Final[Slots] = np.empty(0, np.int32)


class Room(Moves):
    """Gives out slots, and makes room for them."""

    async def allocate(self, tier_id: TierId, num_pages: int, *, deadline: float, wait: bool = True) -> Slots:
        """Take `num_pages` slots of a tier, evicting and demoting what leaves first by policy; all or none.

        Never takes what is pinned. With `wait`, room that others are making (demotions) or hold for a moment (steps) is
        waited for, at most until `deadline` (monotonic seconds); whoever waits holds no pins himself. Those who wait
        for a tier are served in the order in which they came, so that nobody is passed over for ever.

        Raises `NoRoom` when even then the pages cannot be had, `TierUnavailable` when the tier is down,
        `DeadlineExceeded` at the deadline, `Closed`.
        """
        tier = self.tiers[tier_id]
        if num_pages > tier.capacity_pages:
            raise NoRoom(tier_id, pages_asked=num_pages, pages_free=tier.num_free)
        self._require_open()
        if not wait or not num_pages:
            return await self._allocate_now(tier, num_pages, deadline)
        line, turn = self._lines[tier_id], Turn(num_pages)
        line[turn] = None
        num_tries, given = 0, self._given(tier_id)
        try:
            while tier.num_free < (wanted := _pages_until(line, turn)):
                num_changes = self._num_changes
                made_room = await self._make_room(tier_id, wanted - tier.num_free, deadline=deadline)
                self._require_open()
                if made_room or self._given(tier_id) != given:
                    num_tries, given = 0, self._given(tier_id)
                num_tries += 1
                if made_room or (self._num_changes != num_changes and num_tries < MAX_TRIES):
                    continue
                # Tried again only when something is new: to demote what cannot be demoted now would fail again.
                while tier.num_free < _pages_until(line, turn) and (
                    self._num_changes == num_changes
                    or (num_tries >= MAX_TRIES and self._given(tier_id) == given)
                ):
                    # A tier below counts too: what cannot be demoted now may be when it has room again. Whoever is next
                    # gets room or gives up when there is nothing to wait for; the others then see what is left.
                    under_way = any(self._under_way[each] for each in self._from(tier_id))
                    if not (under_way or self._holders) and next(iter(line)) is turn:
                        count(self.counters.no_room_pages, tier_id, num_pages)
                        raise NoRoom(tier_id, pages_asked=num_pages, pages_free=tier.num_free)
                    await self.wait_for_progress(deadline)
                    self._require_open()
            return tier.allocate(num_pages)
        finally:
            del line[turn]
            if line:
                self._wake()

    async def _allocate_now(self, tier: Tier, num_pages: int, deadline: float) -> Slots:
        """`allocate` without waiting for others. Those who wait may be waiting for just this, so it passes them."""
        num_tries = 0
        while tier.num_free < num_pages:
            num_changes = self._num_changes
            made_room = await self._make_room(tier.tier_id, num_pages - tier.num_free, deadline=deadline)
            self._require_open()
            num_tries = 0 if made_room else num_tries + 1
            if not made_room and (self._num_changes == num_changes or num_tries >= MAX_TRIES):
                raise NoRoom(tier.tier_id, pages_asked=num_pages, pages_free=tier.num_free)
        return tier.allocate(num_pages)

    async def allocate_up_to(self, tier_id: TierId, num_pages: int, *, deadline: float) -> Slots:
        """`allocate`, content with fewer pages where a tier is small, full of pinned pages, or down."""
        tier = self.tiers[tier_id]
        try:
            return await self.allocate(tier_id, min(num_pages, tier.capacity_pages), deadline=deadline, wait=False)
        except (NoRoom, TierUnavailable):
            try:
                return tier.allocate(min(num_pages, tier.num_free))
            except (NoRoom, TierUnavailable):
                return NO_SLOTS

    def _given(self, tier_id: TierId) -> tuple[int, int]:
        """Grows when a lease or pins end, and when somebody frees slots of a tier, though another may have taken them:
        what could not leave for a while may then leave."""
        return self._num_given_back, self._num_freed[tier_id]

    def is_waited_for(self, tier_id: TierId) -> bool:
        """Whether somebody waits for room in a tier."""
        return bool(self._lines[tier_id])

    async def _make_room(self, tier_id: TierId, num_pages: int, *, deadline: float) -> bool:
        """Let at most `num_pages` pages leave a tier, coldest first; False when none could."""
        freed = num_stuck = 0
        tried: set[Node] = set()
        give_up_at = self.clock.monotonic() + PATIENCE_S
        # What stands first may be unable to leave: its copy would be the last one of a prefix that others build on,
        # and the tier below is full. Then those behind it are asked.
        while freed < num_pages and self.clock.monotonic() < give_up_at:
            found = self.tree.victims(tier_id, num_pages - freed + num_stuck, self.clock.monotonic())
            victims = _covering([node for node in found if node not in tried], num_pages - freed)
            if not victims:
                break
            freed += await self._let_leave(victims, tier_id, num_pages - freed, deadline=deadline)
            tried.update(victims)
            num_stuck = sum(node.num_pages for node in tried if node.residency(tier_id) is Residency.RESIDENT)
        return freed > 0

    async def _let_leave(self, victims: Sequence[Node], tier_id: TierId, num_pages: int, *, deadline: float) -> int:
        """Evict or demote `victims`, but of the last one only as much as `num_pages` needs. Returns the pages that
        left."""
        freed = 0
        to_demote: list[Node] = []
        surplus = sum(node.num_pages for node in victims) - num_pages
        if surplus > 0:
            # The tail leaves first; the object that stays the victim after a split is the lower half.
            self.tree.split(victims[-1], surplus)
        for node in victims:
            if (
                self._has_slower_copy(node, tier_id)
                or self._is_refused(node, tier_id)
                or self._is_outranked(node, tier_id)
            ):
                freed += self.evict(node, tier_id)
            else:
                to_demote.append(node)
        if to_demote:
            freed += await self._demote(to_demote, tier_id, deadline=deadline)
        return freed

    def _has_slower_copy(self, node: Node, tier_id: TierId) -> bool:
        return any(node.residency(slower) is Residency.RESIDENT for slower in self._from(tier_id)[1:])

    def _is_refused(self, node: Node, tier_id: TierId) -> bool:
        """Whether a node leaves the host for nothing, as NVMe does not admit it. What is needed goes down all the same:
        its last copy could not leave otherwise."""
        goes_to_nvme = _SLOWER.get(tier_id) == NVME and NVME in self.tiers
        return goes_to_nvme and self.tree.can_evict(node, tier_id) and not self.writer.admits(node)

    def _is_outranked(self, node: Node, tier_id: TierId) -> bool:
        """Whether a node that nobody needs would push out of the tier below what its tenant cares for more."""
        below_id = _SLOWER.get(tier_id)
        below = self.tiers.get(below_id) if below_id else None
        if not self.tree.num_ranked or below is None or below.num_free >= node.num_pages:
            return False
        if not self.tree.can_evict(node, tier_id):
            return False
        return any(
            victim.tenant == node.tenant and rank_of(victim) > rank_of(node)
            for victim in self.tree.victims(below.tier_id, 1, self.clock.monotonic())
        )

    async def _demote(self, nodes: Sequence[Node], tier_id: TierId, *, deadline: float) -> int:
        """Copy `nodes` one tier down, then let them leave `tier_id`. Nodes that cannot be copied are dropped if nobody
        needs them, else they stay. Returns the pages that left."""
        target_id = _SLOWER.get(tier_id)
        target = self.tiers.get(target_id) if target_id else None
        # Pinned while room is made below and the copies run, so that nobody else takes them; a split meanwhile adds
        # the new half to the pin.
        pin = self.tree.pin(nodes, tier_id)
        self._under_way[tier_id] += 1
        num_moves = self._num_moves
        try:
            if target is not None and target.tier_id not in self._stalled:
                # At most half of the time there is: where this makes room for a copy from a faster tier, it is then the
                # slower tier that is known to be late, and there is time left to do without it.
                now = self.clock.monotonic()
                patience_s = min(PATIENCE_S, (deadline - now) / 2)
                give_up_at = now + patience_s if patience_s >= LEAST_PATIENCE_S else deadline
                try:
                    await self._copy_down(pin, tier_id, target.tier_id, deadline=give_up_at)
                except DeadlineExceeded:
                    if deadline <= give_up_at:
                        raise
                    if self._under_way[target.tier_id]:
                        self._stalled.add(target.tier_id)
        finally:
            fragments = list(pin.nodes)
            self.free(self.tree.unpin(pin))
            self._under_way[tier_id] -= 1
            # If nothing was even tried, nothing is new for others who wait: two of them would wake each other for ever.
            if self._num_moves != num_moves:
                self._wake()
        # Without an `await` since the pin was given up: what is looked at here is what is evicted.
        return sum([self.evict(node, tier_id) for node in fragments if self.tree.can_evict(node, tier_id)])

    async def _copy_down(self, pin: Pin, source: TierId, target: TierId, *, deadline: float) -> None:
        """Copy pinned nodes one tier down, as far as there is room. Where not all fit, the warmest are kept: victims
        come coldest first."""
        if target == NVME:
            await self.writer.write(lambda: list(reversed(list(pin.nodes))), deadline=deadline)
            return
        slots = await self.allocate_up_to(target, pin.num_pages, deadline=deadline)
        moving: list[Moving] = []
        for node in reversed(list(pin.nodes)):
            if not len(slots) or not self._can_start(node, source, target):
                continue
            if node.num_pages > len(slots):
                # Its tail still fits; `node` stays the lower half.
                self.tree.split(node, node.num_pages - len(slots))
            taken, slots = slots[: node.num_pages], slots[node.num_pages :]
            moving.append(self.start_move(node, source, target, taken, Priority.WRITE_BACK))
        self.free({target: slots})
        for move in moving:
            await self.wait(move.done, deadline)

    async def write_behind(self, targets: Callable[[], Sequence[Node]]) -> None:
        """Copy nodes to NVMe that need not leave a faster tier, as far as there is room and the disk answers. `targets`
        is asked again as they split. Raises `Closed`."""
        if NVME in self._stalled:
            return
        try:
            num_written = await self.writer.write(targets, deadline=self.clock.monotonic() + PATIENCE_S)
            self.counters.pages_written_through += num_written
        except DeadlineExceeded:
            if self._under_way[NVME]:
                self._stalled.add(NVME)

    def _can_start(self, node: Node, source: TierId, target: TierId) -> bool:
        return node.residency(source) is Residency.RESIDENT and node.residency(target) is Residency.ABSENT


def _pages_until(line: Iterable[Turn], turn: Turn) -> int:
    """Pages that a turn and those before it wait for."""
    num_pages = 0
    for each in line:
        num_pages += each.num_pages
        if each is turn:
            break
    return num_pages


def _covering(nodes: Sequence[Node], num_pages: int) -> list[Node]:
    """The first of `nodes` that together have at least `num_pages` pages; all of them if they have fewer."""
    taken: list[Node] = []
    for node in nodes:
        if num_pages <= 0:
            break
        taken.append(node)
        num_pages -= node.num_pages
    return taken
