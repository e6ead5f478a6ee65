"""The cache: one tree over all tiers, and what moves pages between them.

`Cache` joins the tree (which knows where every page is), the tiers (which hold bytes) and the lanes (which copy). It
does no I/O and has no thread of its own: it lives on one event loop, and everything in here is called from there.

Three rules, on which the promises of the project rest:

1. A page is copied first and dropped afterwards. Between the two it is in both tiers, never in neither.
2. What a decision rested on is looked at again after every `await`: nodes split, leases come and go meanwhile.
3. Whoever starts a copy does not own its end. A task of the cache completes every move and every copy of a page,
   whatever became of the request that asked for it; so a cancelled request leaves neither a lost slot nor a page in
   flight, and no tier's coroutine is ever cancelled.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from hicache.arguments import flag, whole
from hicache.clock import Clock
from hicache.deciding import Deciding, Decision, PrefillSpeeds
from hicache.errors import BadRequest, Closed, DeadlineExceeded, NoRoom, TierUnavailable
from hicache.evictable import tiers_of_children
from hicache.guarding import guarded
from hicache.layout import KVLayout
from hicache.lease import Lease, Move, Pin
from hicache.movers import Lane, PageMove, Priority, Transfer
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.policies import LRU, policies_named
from hicache.policy.admission import AdmissionPolicy, AlwaysAdmission
from hicache.policy.base import EvictionPolicy, HearsShape, HearsUses, Use
from hicache.prefetch import Prefetch, begin
from hicache.prefill import PrefillCurve
from hicache.recovery import Progress, Recovery, recover
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
    SupportsDeclare,
    SupportsPageCopy,
    SupportsView,
    Tier,
    TierId,
)
from hicache.tree import HiRadixTree, Match, pack_tokens
from hicache.write_policy import WritePolicy, WritingThrough
from hicache.writing import Durability, Persisted, Writer

DRAIN_S: Final = 10.0
"""How long `close` lets queued moves finish before it drops them."""
PATIENCE_S: Final = 2.0
"""How long a tier is asked for room before it has none for now. A slower tier may hang: its copies go on, and what
nobody needs is dropped instead."""
MAX_TRIES: Final = 8
"""Tries to make room in vain that follow one another, while nobody has given anything back. What others move may help,
so it is tried again; but in a slow tier that is too small for all, two may push out each other's copies for ever."""
FLUSH_STEP_NODES: Final = 256
"""Nodes that a flush looks at before others run."""
FAILING_S: Final = 10.0
"""How long a tier that failed a step is taken for one that may fail the next."""
NVME_WORKERS: Final = 8
"""Batches that are on their way to or from NVMe at one time: four leave a fast device idle between two."""
MEMORY_WORKERS: Final = 4
"""Batches that are copied between memories at one time."""
_SLOWER: Final = {DEVICE: HOST, HOST: NVME}
OWN_TIERS: Final = (DEVICE, HOST, NVME)
"""Tiers a cache may have, fast to slow. The host tier is always there: every lane has it at one end."""

NO_SLOTS: Final[Slots] = np.empty(0, np.int32)

T = TypeVar("T")


@dataclass(slots=True)
class Counters:
    """What the cache has done since it was opened. Tokens unless the name says otherwise."""

    lookups: int = 0
    """Sequences opened."""
    hits: int = 0
    """Of these, how many found at least one token."""
    tokens_asked: int = 0
    tokens_by_tier: dict[str, int] = field(default_factory=dict)
    """Tokens found, by the fastest tier that had them when they were asked for."""
    tokens_left: int = 0
    """Tokens that were cached, but slower to load than to compute: they are not among those found."""
    tokens_computed: int = 0
    """Tokens whose KV came in through a sequence's step."""
    pages_published: int = 0
    pages_duplicate: int = 0
    """Pages computed although somebody else had published them meanwhile."""
    pages_adopted: int = 0
    """Pages copied from what another tenant has published."""
    pages_refused: int = 0
    """Pages that a commit could not publish for want of room in the metadata budget; each try counts."""
    refused_pages: dict[str, int] = field(default_factory=dict)
    """Pages that NVMe admission refused, by its reason; each time that they were asked about."""
    pages_written_through: int = 0
    """Pages written to NVMe before they had to leave a faster tier, but for those that were waited for in vain."""
    metadata_dropped_pages: int = 0
    """Pages that left the cache to keep the tree's metadata within its budget."""
    evicted_pages: dict[str, int] = field(default_factory=dict)
    """Copies that left a tier while a slower tier kept one."""
    dropped_pages: dict[str, int] = field(default_factory=dict)
    """Pages that left the cache, by the tier of their last copy."""
    failed_moves: dict[str, int] = field(default_factory=dict)
    """Pages whose move failed, by lane."""
    corrupt_pages: dict[str, int] = field(default_factory=dict)
    """Pages forgotten because a tier could not give them back whole, by tier."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a prompt is cached, and where."""

    num_tokens: int
    """Tokens covered by whole pages, a multiple of the page size."""
    partial_tokens: int
    """Further tokens that the best partly matching page shares."""
    runs: tuple[tuple[TierId, int], ...]
    """`num_tokens` in order from the root, as runs of (fastest tier that holds them, tokens)."""

    @property
    def by_tier(self) -> dict[TierId, int]:
        """`num_tokens` by the fastest tier that holds each page; tiers with none are absent."""
        sums: dict[TierId, int] = {}
        for tier_id, num_tokens in self.runs:
            sums[tier_id] = sums.get(tier_id, 0) + num_tokens
        return sums


@runtime_checkable
class WritableInPlace(SupportsDeclare, SupportsPageCopy, Protocol):
    """What a device tier can do beside the contract of a tier: sequences write its slots directly."""


class Cache:
    """Pages of KV over device, host and NVMe, for one layout and any number of namespaces with that layout.

    Use it as an async context manager: leaving the block drains the lanes for at most `DRAIN_S`, then closes the tiers.

    Args:
        layout: shape of a page; every tier has `page_bytes == layout.page_bytes`.
        tiers: the tiers by id. `HOST` is required and supports views; `DEVICE` and `NVME` may be absent.
        clock: decides recency and deadlines.
        policy: name of the eviction policy of every tier (`hicache.policies`).
        policies: eviction policies by tier, used instead. Whoever made them tells them of uses (`HearsUses`).
        metadata_bytes: most memory that the tree itself may use, by its own estimate; None for no bound but that of the
            tiers' slots. Reaching it drops the coldest pages from all tiers.
        admission: which pages may be written to NVMe (`hicache.admissions`); None for all.
        write_policy: when pages are written to NVMe, for namespaces that `set_write_policy` does not name.
        exclusive: whether a page leaves NVMe once it is in the host, unless it was persisted. Host and NVMe then hold
            as many different pages as both have room for, and each demotion is a write. By default a page that comes
            back keeps its copy on NVMe, and leaves the host for nothing.
        prefill: what computing costs; with `PrefillSpeeds` it is learnt from the steps of sequences. Hits that are
            slower to load than to compute are then left where they are (`hicache.deciding`). None: all are loaded.
        progress: told while pages that the NVMe tier has kept over a restart are put back.

    Raises `BadRequest` when tiers and layout disagree, the budget cannot hold a single page, or `exclusive` is asked
    for together with a policy that writes through.
    """

    def __init__(
        self,
        layout: KVLayout,
        tiers: Mapping[TierId, Tier],
        *,
        clock: Clock,
        policy: str = LRU,
        policies: Mapping[TierId, EvictionPolicy] | None = None,
        metadata_bytes: int | None = None,
        admission: AdmissionPolicy | None = None,
        write_policy: WritePolicy = WritePolicy.DEMOTE,
        exclusive: bool = False,
        prefill: PrefillCurve | PrefillSpeeds | None = None,
        progress: Progress | None = None,
    ) -> None:
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
        self._is_exclusive: Final = flag("exclusive", exclusive)
        self._require_writable(write_policy)
        self.layout: Final = layout
        self.clock: Final = clock
        self.tiers: Final = {tier_id: tiers[tier_id] for tier_id in OWN_TIERS if tier_id in tiers}
        named = policies_named(policy, {tier_id: tier.capacity_pages for tier_id, tier in self.tiers.items()})
        self.tree: Final = HiRadixTree(
            page_size=layout.page_size,
            tiers=tuple(self.tiers),
            policies={**named, **(policies or {})},
            metadata_bytes=metadata_bytes,
            listeners=[admission] if isinstance(admission, HearsShape) else [],
        )
        self._hearing: Final = [
            each for tier_id, each in named.items() if tier_id not in (policies or {}) and isinstance(each, HearsUses)
        ]
        """Eviction policies that are told of uses."""
        self.counters: Final = Counters()
        self._host_view: Final = host.view
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
        self._lines: Final[dict[TierId, dict[_Turn, None]]] = {tier_id: {} for tier_id in self.tiers}
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
        self.writer: Final = Writer(self, admission or AlwaysAdmission())
        self.writing_through: Final = WritingThrough(self, write_policy)
        self._persisted: list[Node] = []
        """Ends of prefixes that were persisted, if the cache is exclusive: with what they were joined to, they stay on
        NVMe."""
        self.deciding: Final = Deciding(
            prefill,
            self._lanes.values(),
            clock=clock,
            page_size=layout.page_size,
            device=self.tiers.get(DEVICE),
        )
        self._report_progress: Final = progress
        self.recovered = Recovery()
        """What came back from the NVMe tier when the cache was opened."""
        self._closing = False

    # -- life ---------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for tier in self.tiers.values():
                stack.push_async_callback(tier.close)
            await self._recover()
            await stack.enter_async_context(self._tasks)
            stack.push_async_callback(self._close_lanes)
            for lane in self._lanes.values():
                self._tasks.create_task(lane.run(), name=f"lane {lane.name}")
            self._exit = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The error of the block is not handed on: lanes are closed in the same way whatever ended the block.
        await self._exit.aclose()

    async def _recover(self) -> None:
        """Take over what the NVMe tier has kept; nobody else uses the tree yet."""
        durable = self.writer.tier
        if durable is not None and (runs := durable.recovered()):
            self.recovered = await recover(
                self.tree, self.tiers[NVME], runs,
                layout=self.layout, clock=self.clock, progress=self._report_progress,
            )

    async def _close_lanes(self) -> None:
        self._closing = True
        self._wake()
        drain_until = self.clock.monotonic() + DRAIN_S
        for lane in self._lanes.values():
            await lane.close(drain_until=drain_until)

    @property
    def device(self) -> "WritableInPlace":
        """The device tier, as sequences use it beside the contract of a tier."""
        assert self._device is not None, "this cache has no device tier"
        return self._device

    @property
    def lanes(self) -> Iterable[Lane]:
        """The lanes there are, for inspection."""
        return self._lanes.values()

    def set_write_policy(self, namespace: Namespace, write_policy: WritePolicy) -> None:
        """Choose when pages of a namespace are written to NVMe, for what is published or used from now on. Raises
        `BadRequest` for one that writes through in an exclusive cache."""
        self._require_writable(write_policy)
        self.writing_through.set(namespace, write_policy)

    def _require_writable(self, write_policy: WritePolicy) -> None:
        if self._is_exclusive and write_policy is not WritePolicy.DEMOTE:
            raise BadRequest("write_policy", f"{write_policy.value} keeps copies on NVMe, which exclusive does not")

    def start(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """Run work of the cache's own in its task group: it raises nothing, and ends when the cache closes."""
        self._tasks.create_task(work, name=name)

    # -- looking ------------------------------------------------------------------------------------------------------

    def coverage(self, match: Match) -> Coverage:
        """Where the pages of `match` are. Changes nothing."""
        runs = []
        for node in match.nodes:
            num_pages = match.pages_in_last if node is match.nodes[-1] else node.num_pages
            runs.append((self.fastest(node), num_pages * self.layout.page_size))
        return Coverage(match.num_tokens, match.partial.num_tokens if match.partial else 0, tuple(runs))

    def fastest(self, node: Node) -> TierId:
        """The fastest tier that can serve the node now."""
        return next(tier_id for tier_id in self.tiers if node.residency(tier_id) is Residency.RESIDENT)

    def learn(self, namespace: Namespace, start: int, stop: int, seconds: float) -> None:
        """A step of the namespace's model computed tokens `[start, stop)` of one prompt in `seconds`, with everything
        before them on the device. Nothing, where the cache does not learn. Raises `BadRequest` for an empty range or a
        time that is not above zero."""
        self.deciding.learn(namespace.model, start, stop, seconds)

    def decide(
        self, namespace: Namespace, num_tokens: int, coverage: Coverage, *, chunk_tokens: int | None = None
    ) -> Decision:
        """How much of what is cached of a prompt of `num_tokens` tokens is worth taking. Changes nothing."""
        return self.deciding.decide(namespace.model, num_tokens, coverage.runs, chunk_tokens=chunk_tokens)

    def explain(
        self, namespace: Namespace, tokens: npt.ArrayLike, *, chunk_tokens: int | None = None
    ) -> Decision:
        """What a sequence that is opened for `tokens` now would take from the cache, and why: see `Decision`.

        With `chunk_tokens`, as `Sequence.open` takes it, that may be from both ends. Of what another tenant has
        published, it speaks as if it were copied already. Changes nothing. Raises `BadRequest` for tokens that are
        none, and a `chunk_tokens` below 1.
        """
        packed = pack_tokens(tokens)
        if chunk_tokens is not None:
            chunk_tokens = whole("chunk_tokens", chunk_tokens, 1)
        coverage = self.coverage(self.tree.match(namespace, packed[:-1]))
        return self.decide(namespace, len(packed), coverage, chunk_tokens=chunk_tokens)

    # -- sharing ------------------------------------------------------------------------------------------------------

    def publish(self, namespace: Namespace, tokens: npt.ArrayLike) -> int:
        """Let other tenants read what is cached of a prefix, in whole pages: see `HiRadixTree.publish`.

        Returns the tokens published, a multiple of the page size; 0 when nothing of it is cached.
        """
        packed = pack_tokens(tokens)
        match = self.tree.match(namespace, packed, published=False)
        if match.num_tokens:
            self.tree.publish(namespace, packed[: match.num_tokens])
        return match.num_tokens

    def unpublish(self, namespace: Namespace, tokens: npt.ArrayLike) -> bool:
        """End the publication of a prefix, named by exactly the tokens that `publish` said it published. True when
        there was one. Copies that others have made of it are theirs and stay."""
        return self.tree.unpublish(namespace, tokens)

    # -- room ---------------------------------------------------------------------------------------------------------

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
        line, turn = self._lines[tier_id], _Turn(num_pages)
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

    def _given(self, tier_id: TierId) -> tuple[int, int]:
        """Grows when a lease or pins end, and when somebody frees slots of a tier, though another may have taken them:
        what could not leave for a while may then leave."""
        return self._num_given_back, self._num_freed[tier_id]

    def is_waited_for(self, tier_id: TierId) -> bool:
        """Whether somebody waits for room in a tier."""
        return bool(self._lines[tier_id])

    @property
    def is_closing(self) -> bool:
        """Whether nothing new is begun any more."""
        return self._closing

    def _require_open(self) -> None:
        if self._closing:
            raise Closed("the cache is closed")

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
            if self._has_slower_copy(node, tier_id) or self._is_refused(node, tier_id):
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

    def _from(self, tier_id: TierId) -> list[TierId]:
        """A tier and the slower ones."""
        order = list(self.tiers)
        return order[order.index(tier_id) :]

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
                give_up_at = self.clock.monotonic() + PATIENCE_S
                try:
                    await self._copy_down(pin, tier_id, target.tier_id, deadline=min(deadline, give_up_at))
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

    def evict(self, node: Node, tier_id: TierId) -> int:
        """The node's copy leaves the tier, which it can (`HiRadixTree.can_evict`). Returns its pages."""
        survives = any(
            other != tier_id and node.residency(other) is Residency.RESIDENT for other in self.tiers
        )
        num_pages = node.num_pages
        self.free(self.tree.evict(node, tier_id))
        _count(self.counters.evicted_pages if survives else self.counters.dropped_pages, tier_id, num_pages)
        return num_pages

    # -- moves --------------------------------------------------------------------------------------------------------

    def start_move(
        self,
        node: Node,
        source: TierId,
        target: TierId,
        slots: Slots,
        priority: Priority,
        *,
        on_done: Callable[[int], None] | None = None,
    ) -> "Moving":
        """Begin to copy a node from one tier to another, into `slots` of the target; returns at once.

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
        moving = Moving(move, source, target, priority, on_done)
        self._moving[moving] = None
        self._num_moves += 1
        for tier_id in (source, target):
            self._under_way[tier_id] += 1
        self._tasks.create_task(self._carry_out(moving, pages), name=f"move {source}->{target}")
        return moving

    async def _carry_out(self, moving: "Moving", pages: list[PageMove]) -> None:
        outcomes: Sequence[Outcome | None]
        lane = self._lanes.get((moving.source, moving.target))
        if moving.is_given_up:
            outcomes = [None] * len(pages)
        elif lane is not None:
            moving.submitted(await lane.submit(pages, priority=moving.priority))
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
                _count(self.counters.failed_moves, f"{moving.source}->{moving.target}", num_failed)
            self._forget_bad(moving, outcomes)
        del self._moving[moving]
        if self._is_exclusive and (moving.source, moving.target) == (NVME, HOST):
            self._leave_nvme(finished.nodes)
        for tier_id in (moving.source, moving.target):
            self._under_way[tier_id] -= 1
            self._stalled.discard(tier_id)
        self._free_slots(finished.freed)
        if any(ok):
            self._changed()
        else:
            self._wake()
        moving.done.set()
        if moving.on_done is not None:
            moving.on_done(moving.num_arrived)

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
                _count(self.counters.evicted_pages, NVME, step.num_pages)
                step = parent

    def _is_to_leave_nvme(self, node: Node) -> bool:
        return (
            node.is_live
            and node.residency(NVME) is Residency.RESIDENT
            and node.residency(HOST) is Residency.RESIDENT
            and not tiers_of_children(node) >> list(self.tiers).index(NVME) & 1
            and self.tree.can_evict(node, NVME)
        )

    def _forget_bad(self, moving: "Moving", outcomes: Sequence[Outcome | None]) -> None:
        """A source that cannot give a page back whole must not be asked for it again."""
        bad = (Outcome.CORRUPT, Outcome.NOT_FOUND, Outcome.STALE)
        for node, first_page in self.tree.failed_pages(moving.move, [outcome in bad for outcome in outcomes]):
            self.forget(node, moving.source, first_page)

    def prefetch(
        self, namespace: Namespace, tokens: npt.ArrayLike, *, deadline: float, max_pages: int | None = None
    ) -> Prefetch:
        """Begin to bring to the host what NVMe alone has of a prefix that a request is expected to want by `deadline`
        (monotonic seconds), its beginning first. Returns at once; see `hicache.prefetch` for what bounds its harm.

        Args:
            tokens: `[n]`, int32 ids; whole pages of them that are cached under the namespace itself are fetched.
            deadline: pages whose copy has not begun by then are left, unless a request has come for them.
            max_pages: most pages to fetch, from 1 on; None for a quarter of the host tier.

        What cannot be had (no room without harm, a failed read) is left where it is: `Prefetch` has the numbers. Counts
        as a use of the prefix. Raises `BadRequest`, `Closed`.
        """
        self._require_open()
        return begin(self, namespace, tokens, deadline=deadline, max_pages=max_pages)

    async def promote(
        self, lease: Lease, *, max_device_pages: int, deadline: float, priority: Priority = Priority.DEMAND
    ) -> bool:
        """Bring the pages under a lease as close to the device as they fit: from NVMe to the host, then at most
        `max_device_pages` of them, front first, to the device. Waits until the copies ended, at most until `deadline`;
        what is on its way already, fetched ahead say, is hastened and waited for.

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
            await self._promote_hop(lease, HOST, DEVICE, max_device_pages, priority, deadline)
        return arrived

    async def _promote_hop(
        self, lease: Lease, source: TierId, target: TierId, max_pages: int, priority: Priority, deadline: float
    ) -> bool:
        # The whole path is pinned where it is, so that making room for one part of it does not push out another.
        # Pinned nodes are never merged, so a border between two of them stays one while others appear.
        pins = self._pin_path(lease)
        try:
            while True:
                moving = self.hasten(self.path(lease), source, target, priority)
                given_up = [move for move in moving if move.is_given_up]
                await self._start_hop(self.path(lease), source, target, max_pages, priority, deadline, moving)
                arrived = await self._wait_while_they_move(moving, self._lanes[source, target], deadline)
                # What a prefetch had given up when this came for it is begun anew, once it has ended.
                if not (given_up and all(move.done.is_set() for move in moving)):
                    return arrived
        finally:
            self.unpin(pins)

    def hasten(self, nodes: Iterable[Node], source: TierId, target: TierId, priority: Priority) -> "list[Moving]":
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

    async def _start_hop(
        self,
        path: Sequence[Node],
        source: TierId,
        target: TierId,
        max_pages: int,
        priority: Priority,
        deadline: float,
        moving: "list[Moving]",
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
                moving.append(self.start_move(found, source, target, slots[:num_pages], priority))
                position += num_pages
                above = found

    async def _wait_while_they_move(self, moving: "Sequence[Moving]", lane: Lane, deadline: float) -> bool:
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

    def wants(self, node: Node, source: TierId, target: TierId) -> bool:
        """Whether the node should take this hop on its way up: it can, and is in nothing as fast as the target."""
        slower = self._from(target)[1:]
        return node.residency(source) is Residency.RESIDENT and all(
            node.residency(tier_id) is Residency.ABSENT for tier_id in self.tiers if tier_id not in slower
        )

    def path(self, lease: Lease | None) -> list[Node]:
        """The nodes under a lease, root side first; none without a lease, or where its pages are gone."""
        return self.tree.path(lease.node) if lease is not None and lease.node is not None else []

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

    def report_failing(self, tier_id: TierId) -> None:
        """A step could not read from a tier that does not say that its pages are gone: sequences that are opened within
        `FAILING_S` do not count on what is there alone. Its pages stay: asking again later may work."""
        self._failing_until[tier_id] = self.clock.monotonic() + FAILING_S

    def is_failing(self, tier_id: TierId) -> bool:
        """Whether a step could not read from the tier a moment ago."""
        return self.clock.monotonic() < self._failing_until.get(tier_id, float("-inf"))

    def forget(self, node: Node, tier_id: TierId, first_page: int) -> None:
        """A tier cannot give a node's pages back from `first_page` on: they are not offered from there any more."""
        if not node.is_live or node.residency(tier_id) is not Residency.RESIDENT:
            return
        _count(self.counters.corrupt_pages, tier_id, node.num_pages - first_page)
        self.free(self.tree.forget(node, tier_id, first_page))

    def flush(self, namespace: Namespace | None = None) -> int:
        """Forget every page, or those of one namespace, in all tiers; pages in flight do not come back.

        Returns the pages that are still held by leases and can still be matched: 0 means all is clear. Does not wait;
        takes some 10 µs a node.
        """
        removed = self.tree.flush(namespace=namespace)
        self.free(removed.freed)
        return sum(node.num_pages for node in removed.held)

    async def flush_in_steps(self, namespace: Namespace | None = None) -> int:
        """`flush`, letting others run in between: what was there at the call has left, or is held, when it returns."""
        num_held = 0
        for removed in self.tree.flush_in_steps(namespace, max_nodes=FLUSH_STEP_NODES):
            self.free(removed.freed)
            num_held += sum([node.num_pages for node in removed.held])
            await asyncio.sleep(0)
        return num_held

    @property
    def durability(self) -> Durability | None:
        """How far the NVMe tier has come; None without one that survives a restart."""
        tier = self.writer.tier
        return Durability(tier.accepted, tier.durable) if tier is not None else None

    async def settle(self, *, deadline: float) -> bool:
        """Wait until everything removed so far is removed durably: it then does not come back over a restart, either.

        False if it is not by `deadline` (monotonic seconds), or the NVMe tier cannot make it so. True at once for a
        cache without a tier that survives a restart.
        """
        return await self.writer.settle(deadline=deadline)

    async def persist(self, namespace: Namespace, tokens: npt.ArrayLike, *, deadline: float) -> Persisted:
        """Write what is cached of a prefix to NVMe, in whole pages, and wait until it survives `kill -9` and a power
        cut. Faster copies stay. Pages for which NVMe has no room, or which fail, and those behind them, are left out.

        Raises `DeadlineExceeded` at `deadline` (monotonic seconds): what was begun goes on, nothing is promised.
        `TierUnavailable` when there is no such tier, or it cannot flush; `BadRequest` for tokens that are none.
        """
        persisted = await self.writer.persist(namespace, tokens, deadline=deadline)
        if self._is_exclusive and persisted.num_tokens:
            match = self.tree.match(namespace, pack_tokens(tokens)[: persisted.num_tokens], published=False)
            self._persisted += match.nodes[-1:]
        return persisted

    async def copy_page(self, node: Node, page: int, target_slot: int, *, deadline: float) -> bool:
        """Copy one page of a node, from wherever it is, into a device slot that is not in the tree.

        False if it cannot be had. The copy is the caller's own, whatever becomes of the node. Once this has ended, by
        an exception too, nothing is copied into the slot any more. Raises `DeadlineExceeded`, `Closed`.
        """
        tier_id = self.fastest(node)
        slot, identity = int(node.slots(tier_id)[page]), self.tree.identities(node)[page]
        if tier_id == NVME:
            aside = await self._read_aside(node, slot, identity, deadline)
            try:
                return len(aside) > 0 and await self._copy_to_device(int(aside[0]), identity, target_slot)
            finally:
                self.free({HOST: aside})
        pins = self.pin({tier_id: [node]})
        try:
            if tier_id == DEVICE:
                return await self.copy_device_page(slot, target_slot)
            return await self._copy_to_device(slot, identity, target_slot)
        finally:
            self.unpin(pins)

    async def copy_device_page(self, source_slot: int, target_slot: int) -> bool:
        """Copy one device page onto another, all layers; True when it was copied. Ends as `copy_page` does."""
        return await self._to_the_end(self.device.copy_page(source_slot, target_slot)) is Outcome.OK

    async def _copy_to_device(self, host_slot: int, identity: PageIdentity, target_slot: int) -> bool:
        device = self.tiers[DEVICE]
        write = PageWrite(target_slot, device.generation(target_slot), identity, self._host_view(host_slot))
        return await self._to_the_end(device.write([write])) == [Outcome.OK]

    async def _to_the_end(self, copy: Coroutine[Any, Any, T]) -> T | None:
        """Run a copy between pages in memory as a task of the cache. Returns, even when cancelled, only after it has
        ended: until then its slots are in use. None if the tier raised against its contract."""
        if self._closing:
            copy.close()
            self._require_open()
        task = self._tasks.create_task(guarded(copy))
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return task.result()

    async def _read_aside(self, node: Node, slot: int, identity: PageIdentity, deadline: float) -> Slots:
        """Read a page from NVMe into a host slot that is not in the tree: `[1]`, the caller's; `[0]` if it cannot be
        had. A disk may hang: a request that is late or cancelled leaves both slots to the read."""
        self._require_open()
        reading = _Reading(slot, identity, self.pin({NVME: [node]}))
        self._tasks.create_task(self._carry_out_reading(reading, deadline), name=f"read {NVME} aside")
        try:
            await self.wait(reading.done, deadline)
        except BaseException:
            reading.is_wanted = False
            self.free({HOST: reading.host_slots})
            raise
        return reading.host_slots

    async def _carry_out_reading(self, reading: "_Reading", deadline: float) -> None:
        outcomes = None
        slots = NO_SLOTS
        try:
            slots = await self.allocate_up_to(HOST, 1, deadline=deadline)
            if len(slots):
                nvme, slot, into = self.tiers[NVME], reading.slot, self._host_view(int(slots[0]))
                page = PageRead(slot, nvme.generation(slot), reading.identity, into)
                outcomes = await guarded(nvme.read([page]))
        except (DeadlineExceeded, Closed):
            pass  # whoever waits for it is told the same
        if outcomes == [Outcome.OK] and reading.is_wanted:
            reading.host_slots = slots
        else:
            self.free({HOST: slots})
        self.unpin(reading.pins)
        reading.done.set()

    def tell_use(self, lease: Lease | None) -> None:
        """A prompt was looked up and computed, of which the leased prefix is cached: the policies learn of it. Once a
        request; the tree has been told of its recency before."""
        if path := self.path(lease):
            use = Use(path, self.clock.monotonic())
            for policy in self._hearing:
                policy.used(use)
            if NVME in self.tiers:
                self.writer.admission.used(use)
                self.writing_through.published(path[-1])

    def release(self, lease: Lease) -> None:
        """End a lease: pages that nobody else needs may leave now."""
        self.tree.release(lease)
        self._num_given_back += 1
        self._changed()

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


@dataclass(slots=True, eq=False)
class Moving:
    """A move under way: the tree's record of it, and the moment when it ended."""

    move: Move
    source: TierId
    target: TierId
    priority: Priority
    on_done: Callable[[int], None] | None
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
class _Turn:
    """A place in the line of those who wait for room."""

    num_pages: int


@dataclass(slots=True, eq=False)
class _Reading:
    """A page on its way from NVMe to a host slot that is not in the tree."""

    slot: int
    identity: PageIdentity
    pins: tuple[Pin, ...]
    done: asyncio.Event = field(default_factory=asyncio.Event)
    is_wanted: bool = True
    """Nobody has given up waiting for it."""
    host_slots: Slots = field(default_factory=lambda: NO_SLOTS)
    """Where the page is once `done` is set: `[1]`, or `[0]` if it could not be read."""


def _first_below(above: Node | None, end: Node) -> Node | None:
    """The highest node below `above` (None: below the root) on the path to `end`; None if there is no such path now."""
    step: Node | None = end if end.is_live else None
    while step is not None and (parent := step.parent) is not above:
        step = parent
    return step


def _pages_until(line: Iterable[_Turn], turn: _Turn) -> int:
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


def _count(counts: dict[str, int], key: str, amount: int) -> None:
    counts[key] = counts.get(key, 0) + amount
