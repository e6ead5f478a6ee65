"""What all parts of a cache share: its tree, tiers and lanes, the pins of its steps, its slots, and how it waits.

Base of `hicache.cache.Cache`, where the rules are that all of it keeps.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from hicache.arriving import Arrival
from hicache.clock import Clock
from hicache.counters import Counters, count
from hicache.deciding import Deciding
from hicache.errors import BadRequest, Closed, DeadlineExceeded
from hicache.layout import KVLayout
from hicache.lease import Lease, Move, Pin
from hicache.movers import Lane, Priority, Transfer
from hicache.node import Node
from hicache.policy.base import EvictionPolicy, HearsCopies, HearsShape
from hicache.residency import Residency
from hicache.tier import DEVICE, HOST, NVME, Slots, SupportsDeclare, SupportsPageCopy, SupportsView, Tier, TierId
from hicache.tree import HiRadixTree
from hicache.writing import Writer

FAILING_S: Final = 10.0
"""How long a tier that failed a step is taken for one that may fail the next."""
NVME_WORKERS: Final = 8
"""Batches that are on their way to or from NVMe at one time: four leave a fast device idle between two."""
MEMORY_WORKERS: Final = 4
"""Batches that are copied between memories at one time."""
OWN_TIERS: Final = (DEVICE, HOST, NVME)
"""Tiers a cache may have, fast to slow. The host tier is always there: every lane has it at one end."""


@runtime_checkable
class WritableInPlace(SupportsDeclare, SupportsPageCopy, Protocol):
    """What a device tier can do beside the contract of a tier: sequences write its slots directly."""


@dataclass(slots=True, eq=False)
class Moving:
    """A move under way: the tree's record of it, and the moment when it ended."""

    move: Move
    source: TierId
    target: TierId
    priority: Priority
    on_done: Callable[[int], None] | None
    by_layer: bool
    """Layer by layer, where the lane can."""
    arrival: Arrival = field(default_factory=Arrival)
    """How far it has come, for steps that read its pages meanwhile."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    num_arrived: int = 0
    """Pages that are in the target, once it has ended."""
    is_complete: bool = False
    """All of them are."""
    is_given_up: bool = False
    """Nobody wants it any more: what has not begun is not copied."""
    transfer: Transfer | None = None
    """Its way through a lane, once that has taken it."""

    def submitted(self, transfer: Transfer) -> None:
        """The lane has taken it, which may have taken a while."""
        self.transfer = transfer
        if self.is_given_up:
            transfer.cancel()
        else:
            transfer.hasten(self.priority)

    def hasten(self, priority: Priority) -> None:
        """Make it more urgent, unless it was given up."""
        if not self.is_given_up and priority < self.priority:
            self.priority = priority
            if self.transfer is not None:
                self.transfer.hasten(priority)

    def give_up(self) -> None:
        """Copy nothing more of it, unless a request waits for it."""
        if self.priority is not Priority.DEMAND and not self.done.is_set():
            self.is_given_up = True
            if self.transfer is not None:
                self.transfer.cancel()


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A place in the line of those who wait for room."""

    num_pages: int


class Running:
    """The state of a cache, and what changes of it everybody hears of."""

    writer: Writer
    """Writes to NVMe. Set by the cache, of which it is a part; so is the next."""
    deciding: Deciding
    """Weighs loading against computing."""

    def __init__(
        self,
        layout: KVLayout,
        tiers: Mapping[TierId, Tier],
        *,
        clock: Clock,
        policies: Mapping[TierId, EvictionPolicy],
        metadata_bytes: int | None,
        listeners: Sequence[HearsShape | HearsCopies],
        exclusive: bool,
    ) -> None:
        """`tiers` are those of `checked_tiers`; the rest is as `hicache.cache.Cache` takes it."""
        self._is_exclusive: Final = exclusive
        self.layout: Final = layout
        self.clock: Final = clock
        self.tiers: Final = dict(tiers)
        self.tree: Final = HiRadixTree(
            page_size=layout.page_size,
            tiers=tuple(self.tiers),
            policies=policies,
            metadata_bytes=metadata_bytes,
            listeners=listeners,
        )
        self.counters: Final = Counters()
        host: object = self.tiers[HOST]
        assert isinstance(host, SupportsView), "these are no checked tiers"
        self._host_view: Final = host.view
        device: object = self.tiers.get(DEVICE)
        assert device is None or isinstance(device, WritableInPlace), "these are no checked tiers"
        self._device: Final = device
        self._lanes: Final = {
            (source, target): Lane(
                self.tiers[source],
                self.tiers[target],
                clock=clock,
                num_workers=NVME_WORKERS if NVME in (source, target) else MEMORY_WORKERS,
            )
            for source, target in ((DEVICE, HOST), (HOST, DEVICE), (HOST, NVME), (NVME, HOST))
            if source in self.tiers and target in self.tiers
        }
        self._tasks = asyncio.TaskGroup()
        self._exit = AsyncExitStack()
        self._progress = asyncio.Event()
        self._lines: Final[dict[TierId, dict[Turn, None]]] = {tier_id: {} for tier_id in self.tiers}
        """Who waits for room in each tier, in the order of arrival."""
        self._under_way: Final = dict.fromkeys(self.tiers, 0)
        """Demotions and moves under way, by tier: when one ends, pages may leave that could not before."""
        self._stalled: Final[set[TierId]] = set()
        """Tiers that have worn out somebody's patience, until a move of theirs ends: nothing more is sent down to them
        meanwhile, as it would only keep its faster copy from leaving."""
        self._failing_until: Final[dict[TierId, float]] = {}
        self._holders = 0
        """Who has pins that end soon: steps and promotions."""
        self._num_changes = 0
        self._num_given_back = 0
        """How often a lease or pins ended."""
        self._num_freed: Final = dict.fromkeys(self.tiers, 0)
        """Slots that became free so far, by tier."""
        self._num_moves = 0
        self._moving: Final[dict[Moving, None]] = {}
        """Moves under way."""
        self._persisted: list[Node] = []
        """Ends of prefixes that were persisted, if the cache is exclusive: with what they were joined to, they stay on
        NVMe."""
        self._policies: Final = dict(policies)
        """The eviction policies of the tiers."""
        self._pins: Final[dict[tuple[bytes, bytes], tuple[Lease, int]]] = {}
        """Pinned prefixes, by namespace and tokens: their leases and pages."""
        self._closing = False

    @property
    def device(self) -> WritableInPlace:
        """The device tier, as sequences use it beside the contract of a tier."""
        assert self._device is not None, "this cache has no device tier"
        return self._device

    @property
    def lanes(self) -> Iterable[Lane]:
        """The lanes there are, for inspection."""
        return self._lanes.values()

    def start(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """Run work of the cache's own in its task group: it raises nothing, and ends when the cache closes."""
        self._tasks.create_task(work, name=name)

    @property
    def is_closing(self) -> bool:
        """Whether nothing new is begun any more."""
        return self._closing

    def _require_open(self) -> None:
        if self._closing:
            raise Closed("the cache is closed")

    def fastest(self, node: Node) -> TierId:
        """The fastest tier that can serve the node now."""
        return next(tier_id for tier_id in self.tiers if node.residency(tier_id) is Residency.RESIDENT)

    def path(self, lease: Lease | None) -> list[Node]:
        """The nodes under a lease, root side first; none without a lease, or where its pages are gone."""
        return self.tree.path(lease.node) if lease is not None and lease.node is not None else []

    def _from(self, tier_id: TierId) -> list[TierId]:
        """A tier and the slower ones."""
        order = list(self.tiers)
        return order[order.index(tier_id) :]

    # -- pins and leases ----------------------------------------------------------------------------------------------

    def _pin_path(self, lease: Lease) -> tuple[Pin, ...]:
        path = self.path(lease)
        return self.pin({
            tier_id: [node for node in path if node.residency(tier_id) is Residency.RESIDENT] for tier_id in self.tiers
        })

    def pin(self, nodes: Mapping[TierId, Sequence[Node]]) -> tuple[Pin, ...]:
        """Keep copies where they are until `unpin`, which follows soon: requests for room may wait for it."""
        pins = tuple(self.tree.pin(of_tier, tier_id) for tier_id, of_tier in nodes.items())
        self._holders += 1
        return pins

    def unpin(self, pins: Iterable[Pin]) -> None:
        """End what `pin` gave, once; slots whose page was removed meanwhile become free."""
        for pin in pins:
            self._free_slots(self.tree.unpin(pin))
        self._holders -= 1
        self._num_given_back += 1
        self._changed()

    def release(self, lease: Lease) -> None:
        """End a lease: pages that nobody else needs may leave now."""
        self.tree.release(lease)
        self._num_given_back += 1
        self._changed()

    # -- slots --------------------------------------------------------------------------------------------------------

    def free(self, freed: Mapping[TierId, Slots]) -> None:
        """Give slots back to their tiers and wake whoever waits for room."""
        if self._free_slots(freed):
            self._changed()

    def _free_slots(self, freed: Mapping[TierId, Slots]) -> int:
        for tier_id, slots in freed.items():
            if len(slots):
                self.tiers[tier_id].free(slots)
                self._num_freed[tier_id] += len(slots)
        return sum(len(slots) for slots in freed.values())

    def evict(self, node: Node, tier_id: TierId) -> int:
        """The node's copy leaves the tier, which it can (`HiRadixTree.can_evict`). Returns its pages."""
        survives = any(
            other != tier_id and node.residency(other) is Residency.RESIDENT for other in self.tiers
        )
        num_pages = node.num_pages
        self.free(self.tree.evict(node, tier_id))
        count(self.counters.evicted_pages if survives else self.counters.dropped_pages, tier_id, num_pages)
        return num_pages

    def forget(self, node: Node, tier_id: TierId, first_page: int) -> None:
        """A tier cannot give a node's pages back from `first_page` on: they are not offered from there any more."""
        if not node.is_live or node.residency(tier_id) is not Residency.RESIDENT:
            return
        count(self.counters.corrupt_pages, tier_id, node.num_pages - first_page)
        self.free(self.tree.forget(node, tier_id, first_page))

    def report_failing(self, tier_id: TierId) -> None:
        """A step could not read from a tier that does not say that its pages are gone: sequences that are opened within
        `FAILING_S` do not count on what is there alone. Its pages stay: asking again later may work."""
        self._failing_until[tier_id] = self.clock.monotonic() + FAILING_S

    def is_failing(self, tier_id: TierId) -> bool:
        """Whether a step could not read from the tier a moment ago."""
        return self.clock.monotonic() < self._failing_until.get(tier_id, float("-inf"))

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Something can leave a tier, or be taken, that could not before."""
        self._num_changes += 1
        self._wake()

    def _wake(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()

    async def wait_for_progress(self, deadline: float) -> None:
        """Wait until a move ends or room is given back. Raises `DeadlineExceeded`."""
        await self.wait(self._progress, deadline)

    async def wait(self, event: asyncio.Event, deadline: float) -> None:
        """Wait for an event, at most until `deadline` (monotonic seconds). Raises `DeadlineExceeded`."""
        try:
            async with asyncio.timeout(max(0.0, deadline - self.clock.monotonic())):
                await event.wait()
        except TimeoutError:
            raise DeadlineExceeded("no room was made before the deadline") from None


def checked_tiers(layout: KVLayout, tiers: Mapping[TierId, Tier]) -> dict[TierId, Tier]:
    """The tiers of a cache, fast to slow. Raises `BadRequest` where they and the layout disagree, one is unknown or one
    cannot do what its place asks for."""
    unknown = [tier_id for tier_id in tiers if tier_id not in OWN_TIERS]
    if unknown:
        raise BadRequest("tiers", f"unknown tier {unknown[0]!r}; known are {', '.join(OWN_TIERS)}")
    host: object = tiers.get(HOST)
    if not isinstance(host, SupportsView):
        raise BadRequest("tiers", "the host tier is missing or gives no views of its slots")
    device: object = tiers.get(DEVICE)
    if device is not None and not isinstance(device, WritableInPlace):
        raise BadRequest("tiers", "the device tier cannot be written in place")
    for tier in tiers.values():
        if tier.page_bytes != layout.page_bytes:
            raise BadRequest(
                f"tiers[{tier.tier_id}].page_bytes", f"{tier.page_bytes} is not the layout's {layout.page_bytes}"
            )
    return {tier_id: tiers[tier_id] for tier_id in OWN_TIERS if tier_id in tiers}
