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
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Final, Self

import numpy.typing as npt

from hicache.arguments import flag, whole
from hicache.clock import Clock
from hicache.copying import Copying
from hicache.counters import Counters, Coverage
from hicache.deciding import Deciding, Decision, PrefillSpeeds
from hicache.errors import BadRequest
from hicache.layout import KVLayout
from hicache.lease import Lease
from hicache.namespace import Namespace
from hicache.policies import DEFAULT, policies_named
from hicache.policy.admission import AdmissionPolicy, AlwaysAdmission
from hicache.policy.base import EvictionPolicy, HearsCopies, HearsShape, Use
from hicache.prefetch import Prefetch, begin
from hicache.prefill import PrefillCurve
from hicache.promoting import Promoting
from hicache.quotas import TenantQuotas, check_quotas, quota_pages
from hicache.recovery import Progress, Recovery, recover
from hicache.room import PATIENCE_S
from hicache.running import FAILING_S, Moving, checked_tiers
from hicache.tending import Tending
from hicache.tier import DEVICE, NVME, SupportsGiveUp, Tier, TierId
from hicache.tree import Match, pack_tokens
from hicache.write_policy import WritePolicy, WritingThrough
from hicache.writing import Durability, Persisted, Writer

DRAIN_S: Final = 10.0
"""How long `close` lets queued moves finish before it drops them."""
GIVE_UP_S: Final = 5.0
"""How long after that it waits for copies that cannot be stopped."""
FLUSH_STEP_NODES: Final = 256
"""Nodes that a flush looks at before others run."""

_log = logging.getLogger(__name__)

__all__ = ["DRAIN_S", "FAILING_S", "PATIENCE_S", "Cache", "Counters", "Coverage", "Moving"]


class Cache(Promoting, Copying, Tending):
    """Pages of KV over device, host and NVMe, for one layout and any number of namespaces with that layout.

    Use it as an async context manager: leaving the block drains the lanes for at most `DRAIN_S`, then closes the tiers.
    A disk that does not answer is waited for `GIVE_UP_S` more (`SupportsGiveUp`); what it may be using then stays as it
    is until the process ends. `leave_by` asks for less time.

    Args:
        layout: shape of a page; every tier has `page_bytes == layout.page_bytes`.
        tiers: the tiers by id. `HOST` is required and supports views; `DEVICE` and `NVME` may be absent.
        clock: decides recency and deadlines.
        policy: name of the eviction policy of every tier (`hicache.policies`).
        tenant_quotas: which part of the tiers is a tenant's own, by tenant: a share of every tier, or a `TenantQuota`.
            Without, tenants have equal parts (`hicache.policy.shared`).
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
        listeners: hear of every copy that can be served from now on, or cannot any longer.

    Raises `BadRequest` when tiers and layout disagree, the budget cannot hold a single page, or a policy that writes
    through is asked for together with `exclusive` or without an NVMe tier.
    """

    def __init__(
        self,
        layout: KVLayout,
        tiers: Mapping[TierId, Tier],
        *,
        clock: Clock,
        policy: str = DEFAULT,
        tenant_quotas: TenantQuotas | None = None,
        policies: Mapping[TierId, EvictionPolicy] | None = None,
        metadata_bytes: int | None = None,
        admission: AdmissionPolicy | None = None,
        write_policy: WritePolicy = WritePolicy.DEMOTE,
        exclusive: bool = False,
        prefill: PrefillCurve | PrefillSpeeds | None = None,
        progress: Progress | None = None,
        listeners: Sequence[HearsCopies] = (),
    ) -> None:
        own = checked_tiers(layout, tiers)
        policies = policies or {}
        capacity_pages = {tier_id: tier.capacity_pages for tier_id, tier in own.items()}
        quotas = quota_pages(check_quotas(tenant_quotas), capacity_pages, layout.page_bytes)
        named = policies_named(policy, capacity_pages, quotas)
        super().__init__(
            layout,
            own,
            clock=clock,
            policies={**named, **policies},
            metadata_bytes=metadata_bytes,
            listeners=[*([admission] if isinstance(admission, HearsShape) else []), *listeners],
            exclusive=flag("exclusive", exclusive),
        )
        self._require_writable(write_policy)
        self._hearing: Final = {tier_id: each for tier_id, each in named.items() if tier_id not in policies}
        """Eviction policies that are told of uses."""
        self.writer = Writer(self, admission or AlwaysAdmission())
        self.writing_through: Final = WritingThrough(self, write_policy)
        self.deciding = Deciding(
            prefill,
            self._lanes.values(),
            clock=clock,
            page_size=layout.page_size,
            device=own.get(DEVICE),
        )
        self._report_progress: Final = progress
        self._timer: asyncio.TimerHandle | None = None
        self._leave_by = float("inf")
        self._is_given_up = False
        """Whether some copies were still under way when the cache was left."""
        self.recovered = Recovery()
        """What came back from the NVMe tier when the cache was opened."""

    # -- life ---------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self._stop_timer)
            for tier in self.tiers.values():
                stack.push_async_callback(self._close_tier, tier)
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
        self.leave_by(min(self._leave_by, self.clock.monotonic() + DRAIN_S + GIVE_UP_S))
        # The error of the block is not handed on: lanes are closed in the same way whatever ended the block.
        await self._exit.aclose()

    def leave_by(self, deadline: float) -> None:
        """The block is about to be left, and is to have been by `deadline` (monotonic seconds): queued moves have two
        thirds of what time there is then, copies that cannot be stopped the rest. Who waits inside the block for a
        device that does not answer is told so then, too."""
        self._stop_timer()
        self._leave_by = deadline
        self._timer = asyncio.get_running_loop().call_later(self._time_to_leave(), self._give_up)

    @property
    def leaving_by(self) -> float:
        """What `leave_by` was told last; infinity before."""
        return self._leave_by

    def _time_to_leave(self) -> float:
        return max(0.0, self._leave_by - self.clock.monotonic())

    def _stop_timer(self) -> None:
        """Nothing is under way any more, and every tier is closed."""
        if self._timer is not None:
            self._timer.cancel()

    def _give_up(self) -> None:
        """Copies have not ended in time: whoever waits for a device that does not answer is told so."""
        nvme: object = self.tiers.get(NVME)
        if isinstance(nvme, SupportsGiveUp):
            _log.warning("%s does not answer; what it may be using stays so until the process ends", NVME)
            self._is_given_up = True
            nvme.give_up()

    async def _close_tier(self, tier: Tier) -> None:
        # Memory that a disk may still be read into is not given back.
        if not self._is_given_up or tier.tier_id == NVME:
            await tier.close()

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
        drain_until = self.clock.monotonic() + self._time_to_leave() * DRAIN_S / (DRAIN_S + GIVE_UP_S)
        for lane in self._lanes.values():
            await lane.close(drain_until=drain_until)

    def set_write_policy(self, namespace: Namespace, write_policy: WritePolicy) -> None:
        """Choose when pages of a namespace are written to NVMe, for what is published or used from now on. Raises
        `BadRequest` for one that writes through in an exclusive cache, or without an NVMe tier."""
        self._require_writable(write_policy)
        self.writing_through.set(namespace, write_policy)

    def _require_writable(self, write_policy: WritePolicy) -> None:
        if write_policy is WritePolicy.DEMOTE:
            return
        if NVME not in self.tiers:
            raise BadRequest("write_policy", f"{write_policy.value} writes to NVMe, and there is no such tier")
        if self._is_exclusive:
            raise BadRequest("write_policy", f"{write_policy.value} keeps copies on NVMe, which exclusive does not")

    # -- looking ------------------------------------------------------------------------------------------------------

    def coverage(self, match: Match) -> Coverage:
        """Where the pages of `match` are. Changes nothing."""
        runs = []
        for node in match.nodes:
            num_pages = match.pages_in_last if node is match.nodes[-1] else node.num_pages
            runs.append((self.fastest(node), num_pages * self.layout.page_size))
        return Coverage(match.num_tokens, match.partial.num_tokens if match.partial else 0, tuple(runs))

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
        match = self.tree.match(namespace, packed[:-1])
        decision = self.decide(namespace, len(packed), self.coverage(match), chunk_tokens=chunk_tokens)
        return self.cared_for(decision, match)

    def pages_by_tenant(self, tier_id: TierId) -> dict[str, int]:
        """Pages that a tier holds or awaits of each tenant; empty for a tier whose policy was given."""
        shared = self._hearing.get(tier_id)
        return shared.pages_by_tenant() if shared is not None else {}

    def tell_use(self, lease: Lease | None) -> None:
        """A prompt was looked up and computed, of which the leased prefix is cached: the policies learn of it. Once a
        request; the tree has been told of its recency before."""
        if path := self.path(lease):
            self.tree.count_use(path[-1])
            use = Use(path, self.clock.monotonic())
            for policy in self._hearing.values():
                policy.used(use)
            if NVME in self.tiers:
                self.writer.admission.used(use)
                self.writing_through.published(path[-1])

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

    # -- sharing and removing -----------------------------------------------------------------------------------------

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

    def flush(self, namespace: Namespace | None = None) -> int:
        """Forget every page, or those of one namespace, in all tiers; pages in flight do not come back.

        Returns the pages that are still held by leases and can still be matched: 0 means all is clear. Does not wait;
        takes some 10 µs a node.
        """
        removed = self.tree.flush(namespace=namespace)
        self.free(removed.freed)
        return sum(node.num_pages for node in removed.held)

    async def flush_in_steps(self, namespace: Namespace | None = None, tenant: str | None = None) -> int:
        """`flush`, or that of one tenant, letting others run in between: what was there at the call has left, or is
        held, when it returns."""
        num_held = 0
        for removed in self.tree.flush_in_steps(namespace, tenant, max_nodes=FLUSH_STEP_NODES):
            self.free(removed.freed)
            num_held += sum([node.num_pages for node in removed.held])
            await asyncio.sleep(0)
        return num_held

    # -- what survives a restart --------------------------------------------------------------------------------------

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
