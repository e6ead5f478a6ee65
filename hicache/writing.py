"""What goes down to NVMe: pages with everything before them, so that what survives a restart can be used.

NVMe is kept prefix-closed: a node is written there only when the node above it is there. So the order in which pages
leave (leaves of the tier first) never makes a hole, and what is durable is durable with its whole path from the root.
Nodes above keep the faster copies that they have; what is on the device alone is copied past the host tier.

One thing makes a hole: a damaged copy that is forgotten while another tier has the page. What is below it on NVMe then
serves until a restart; a later write or `persist` below the hole fills it first.
"""

import asyncio
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from hicache.errors import DeadlineExceeded, NoRoom, TierUnavailable
from hicache.guarding import guarded
from hicache.lease import Lease
from hicache.movers import PageMove, Priority
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.policy.admission import AdmissionPolicy, Verdict
from hicache.residency import Residency
from hicache.tier import (
    DEVICE,
    HOST,
    NVME,
    Outcome,
    PageIdentity,
    PageRead,
    PageWrite,
    Slots,
    SupportsDurability,
    Tier,
)
from hicache.tokens import pack_tokens

if TYPE_CHECKING:
    from hicache.cache import Cache, Moving

PAST_HOST_BYTES: Final = 16 << 20
"""Size of the buffer through which pages go from the device to NVMe, at least one page."""


@runtime_checkable
class SupportsCheck(Protocol):
    """A tier that says at once, without I/O, whether it still has a page: one whose flushes may fail."""

    def check(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        """`OK`, `STALE` or `NOT_FOUND`, as a `read` would answer now."""
        ...


@dataclass(frozen=True, slots=True)
class Persisted:
    """What a request to persist came to."""

    num_tokens: int
    """Tokens from the beginning of the prompt that survive `kill -9` and a power cut from now on, in whole pages. They
    may still be evicted, removed or damaged later, as any page."""
    number: int
    """The tier's number up to which everything is durable (`SupportsDurability`)."""


@dataclass(frozen=True, slots=True)
class Durability:
    """How far writes and frees of the NVMe tier have come, by their numbers."""

    accepted: int
    """The last one that was accepted: readable, or gone, from now on."""
    durable: int
    """Up to here all survive `kill -9` and a power cut."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush came to."""

    num_held: int
    """Pages that running requests keep, and that can still be matched."""
    is_durable: bool
    """Whether what was removed stays removed over a restart from now on, too. False when the NVMe tier could not make
    it so in time, or at all: what was removed is not served by this process, but may come back with the next one."""


class Writer:
    """Writes nodes of a cache's tree to its NVMe tier, each after those above it. Lives on the cache's loop."""

    def __init__(self, cache: "Cache", admission: AdmissionPolicy) -> None:
        nvme: object = cache.tiers.get(NVME)
        self._cache: Final = cache
        self.tier: Final = nvme if isinstance(nvme, SupportsDurability) else None
        """The NVMe tier, if it survives a restart."""
        self.admission: Final = admission
        self._past_host: Final = asyncio.Lock()

    # -- writing down -------------------------------------------------------------------------------------------------

    def admits(self, node: Node) -> bool:
        """Whether a node that NVMe does not have may be written there. Who asks also acts on it: a refusal is counted,
        and the policy learns from what becomes of the node."""
        verdict = self.admission.admits(node, self._cache.clock.monotonic())
        if verdict is Verdict.ADMITTED:
            return True
        refused = self._cache.counters.refused_pages
        refused[verdict.value] = refused.get(verdict.value, 0) + node.num_pages
        return False

    async def write(self, targets: Callable[[], Sequence[Node]], *, deadline: float) -> int:
        """Copy nodes to NVMe, the most wanted first, in waves from the root down: each wave writes for every target the
        first node on its path that is not there yet. Nothing leaves another tier.

        `targets` is asked again for each wave, as nodes split meanwhile. Ends when all are there, or no room can be
        had, or a copy failed. A node that had to leave again for another one is not written a second time: in a tier
        that is too small for all of them they would take turns.

        Returns how many pages came to NVMe. Raises `DeadlineExceeded`; what was begun goes on.
        """
        cache = self._cache
        begun: set[Node] = set()
        num_written = 0
        while True:
            missing, is_blocked = self._missing(targets())
            tops = [node for node in missing if node not in begun]
            if tops:
                moving = await self._start(tops, deadline)
                begun.update([node for move in moving for node in move.move.nodes])
                for move in moving:
                    await cache.wait(move.done, deadline)
                num_written += sum([move.num_arrived for move in moving])
                if not moving or not all(move.is_complete for move in moving):
                    return num_written
            elif is_blocked:
                await cache.wait_for_progress(deadline)
            else:
                return num_written

    def _missing(self, targets: Sequence[Node]) -> tuple[list[Node], bool]:
        """For each target the first node on its path that NVMe has no copy of, in the targets' order; and whether one
        waits for a copy of somebody else to begin or to end its stay."""
        tops: dict[Node, None] = {}
        is_blocked = False
        first_missing: dict[Node, Node | None] = {}
        for target in targets:
            below: list[Node] = []
            step: Node | None = target if target.is_live else None
            while step is not None and step not in first_missing:
                below.append(step)
                step = step.parent
            missing = first_missing[step] if step is not None else None
            for node in reversed(below):
                if missing is None and node.residency(NVME) is not Residency.RESIDENT:
                    missing = node
                first_missing[node] = missing
            if missing is not None:
                if missing.residency(NVME) is Residency.ABSENT:
                    tops[missing] = None
                else:
                    is_blocked = True
        return list(tops), is_blocked

    async def _start(self, nodes: Sequence[Node], deadline: float) -> "list[Moving]":
        """Begin to copy nodes, each of whose parents is on NVMe, as far as there is room there."""
        cache, tree = self._cache, self._cache.tree
        # Kept while room is made: the parents have nothing below them in the tier yet, and would be the next to go.
        parents = tree.pin([node.parent for node in nodes if node.parent is not None], NVME)
        moving: list[Moving] = []
        slots: Slots = np.empty(0, np.int32)
        try:
            slots = await cache.allocate_up_to(NVME, sum([node.num_pages for node in nodes]), deadline=deadline)
            # Looked at again, as others ran: a node may be split, joined, written or gone.
            wanted, _ = self._missing(nodes)
            for node in wanted:
                if not len(slots):
                    break
                if not self._remember(node):
                    continue
                if node.num_pages > len(slots):
                    # Its beginning: what is written must have everything before it.
                    node, _ = tree.split(node, len(slots))
                taken, slots = slots[: node.num_pages], slots[node.num_pages :]
                source = HOST if node.residency(HOST) is Residency.RESIDENT else DEVICE
                self.admission.written(node, cache.clock.monotonic())
                moving.append(cache.start_move(node, source, NVME, taken, Priority.WRITE_BACK))
        finally:
            cache.free({NVME: slots})
            cache.free(tree.unpin(parents))
        return moving

    def _remember(self, node: Node) -> bool:
        """Have the tier keep the node's namespace, before a page of it is written; false if it has no room for more."""
        if self.tier is None:
            return True
        try:
            self.tier.remember(node.namespace, node.record.encode())
        except NoRoom:
            return False
        return True

    async def copy_past_host(self, device: Tier, nvme: Tier, pages: Sequence[PageMove]) -> list[Outcome | None]:
        """Copy pages from the device to NVMe through a buffer; one outcome each, None for a page that was not begun
        because the cache closes. One call at a time has the buffer, and no slot of the host tier is needed. As into the
        host, checksums are taken as the pages leave the device, where it takes any, and travel on with them."""
        page_bytes = device.page_bytes
        num_at_once = max(1, PAST_HOST_BYTES // page_bytes)
        outcomes: list[Outcome | None] = []
        async with self._past_host:
            buffer = memoryview(mmap.mmap(-1, page_bytes * min(num_at_once, len(pages))))  # aligned to memory pages
            while len(outcomes) < len(pages) and not self._cache.is_closing:
                chunk = pages[len(outcomes) : len(outcomes) + num_at_once]
                views = [buffer[i * page_bytes : (i + 1) * page_bytes] for i in range(len(chunk))]
                reads = [
                    PageRead(page.source_slot, page.source_generation, page.identity, view, bytearray())
                    for page, view in zip(chunk, views, strict=True)
                ]
                found = await guarded(device.read(reads)) or [Outcome.ERROR] * len(chunk)
                whole = [i for i, outcome in enumerate(found) if outcome is Outcome.OK]
                written = await guarded(nvme.write([
                    PageWrite(
                        chunk[i].target_slot, chunk[i].target_generation, chunk[i].identity, views[i],
                        bytes(reads[i].sums or b"") or None,
                    )
                    for i in whole
                ])) or [Outcome.ERROR] * len(whole)
                for i, outcome in zip(whole, written, strict=True):
                    found[i] = outcome
                outcomes += found
        return outcomes + [None] * (len(pages) - len(outcomes))

    # -- durable on request -------------------------------------------------------------------------------------------

    async def persist(self, namespace: Namespace, tokens: npt.ArrayLike, *, deadline: float) -> Persisted:
        """See `Cache.persist`."""
        tier = self._require_tier()
        cache, tree = self._cache, self._cache.tree
        match = tree.match(namespace, pack_tokens(tokens), published=False)
        lease = tree.lease(match, owner="persist", deadline=None, now=cache.clock.monotonic())
        has_lost_before = False
        try:
            while True:
                await self.write(lambda: [lease.node] if lease.node is not None else [], deadline=deadline)
                # Everything written so far is accepted; what is pinned stays until it is durable, too.
                number = tier.accepted
                pins = cache.pin({NVME: self._written(lease)})
                try:
                    # A flush that failed, now or long ago, matters only if it took pages of this path: `_forget_lost`
                    # looks, where the tier can say.
                    await tier.sync(number, deadline=deadline, is_frees_only=isinstance(tier, SupportsCheck))
                    has_lost = self._forget_lost(self._written(lease))
                    num_pages = sum([node.num_pages for node in self._written(lease)])
                finally:
                    cache.unpin(pins)
                if not has_lost:
                    break
                if has_lost_before:
                    raise TierUnavailable(NVME, "a flush failed again: it took pages that were written a second time")
                has_lost_before = True
        finally:
            cache.release(lease)
        return Persisted(num_pages * cache.layout.page_size, number)

    def _forget_lost(self, nodes: Sequence[Node]) -> bool:
        """Forget pages that a flush, which failed, has taken since they were accepted, in each node from the first such
        page on. Whether there were some: they can then be written again."""
        tier, has_lost = self.tier, False
        if not isinstance(tier, SupportsCheck):
            return False
        for node in nodes:
            if not node.is_live or node.residency(NVME) is not Residency.RESIDENT:
                continue  # What was forgotten above had no other copy: the nodes below have left with it.
            for page, (slot, identity) in enumerate(
                zip(node.slots(NVME).tolist(), self._cache.tree.identities(node), strict=True)
            ):
                if tier.check(slot, self._cache.tiers[NVME].generation(slot), identity) is not Outcome.OK:
                    self._cache.forget(node, NVME, page)
                    has_lost = True
                    break
        return has_lost

    def _written(self, lease: Lease) -> list[Node]:
        """The nodes of a leased path, from the root on, that are on NVMe with everything before them."""
        nodes: list[Node] = []
        for node in self._cache.path(lease):
            if node.residency(NVME) is not Residency.RESIDENT:
                break
            nodes.append(node)
        return nodes

    async def settle(self, *, deadline: float) -> bool:
        """Wait until whatever was removed so far is removed durably; False if it is not by `deadline`, or cannot be."""
        if self.tier is None:
            return True
        try:
            # A removed page that is being copied or read gives its slot back when that ends.
            while self._cache.tree.occupancy(NVME).condemned:
                await self._cache.wait_for_progress(deadline)
            await self.tier.sync(self.tier.accepted, deadline=deadline, is_frees_only=True)
        except (DeadlineExceeded, TierUnavailable):
            return False
        return True

    def _require_tier(self) -> SupportsDurability:
        if self.tier is None:
            raise TierUnavailable(NVME, "this cache has no tier that survives a restart")
        return self.tier
