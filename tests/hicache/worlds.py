"""A cache over simulated tiers, and requests that check every byte they are given.

Each token's bytes in a page are a stamp: a hash of the namespace and of all tokens up to and including it. Whoever
reads a page can therefore work out what every byte must be, wherever the page has been.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from hicache.cache import Cache
from hicache.deciding import PrefillSpeeds
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.policies import LRU
from hicache.policy.admission import AdmissionPolicy
from hicache.prefill import PrefillCurve
from hicache.quotas import TenantQuotas
from hicache.sequence import Run, Sequence, StepPlan
from hicache.tier import DEVICE, HOST, NVME, Outcome, PageRead, Tier, TierId
from hicache.write_policy import WritePolicy
from tests.hicache.durable import Image, SimulatedDurableTier
from tests.hicache.lanes import LayeredDevice
from tests.simulation import Faults, SimulatedHost, SimulatedTier, World

PAGE_SIZE: Final = 4
TOKEN_BYTES: Final = 32
LAYOUT: Final = KVLayout.uniform(
    num_layers=1, num_kv_heads=1, head_dim=TOKEN_BYTES // 8, dtype=KVDtype.FLOAT32, page_size=PAGE_SIZE
)
MODEL: Final = Namespace(model="a model", layout=LAYOUT)
OTHER: Final = Namespace(model="a model", layout=LAYOUT, tenant="another tenant")


T = TypeVar("T", bound=SimulatedTier)


class WrongBytes(AssertionError):
    """A page holds something else than its tokens say: the failure that must never be."""


class SimulatedDevice(LayeredDevice, SimulatedHost):
    """A simulated device pool: filled in place by requests, layer by layer by lanes that are asked to, and able to copy
    a page onto another."""

    async def copy_page(self, source_slot: int, target_slot: int) -> Outcome:
        target = self._view(target_slot)
        half = self.page_bytes // 2
        target[:half] = self._view(source_slot)[:half]
        outcome = await self._pass_pipe()
        target[half:] = self._view(source_slot)[half:]
        return outcome


def stamps(namespace: Namespace, tokens: Seq[int]) -> list[bytes]:
    """The bytes of each token, in order."""
    state = hashlib.sha256(namespace.digest)
    found = []
    for token in tokens:
        state.update(int(token).to_bytes(4, "little"))
        found.append(state.digest())
    return found


@dataclass(slots=True)
class Setup:
    """A cache and the tiers it runs on."""

    cache: Cache
    device: SimulatedDevice
    host: SimulatedHost
    nvme: SimulatedTier | None

    @property
    def durable(self) -> SimulatedDurableTier:
        assert isinstance(self.nvme, SimulatedDurableTier)
        return self.nvme

    @property
    def tiers(self) -> list[SimulatedTier]:
        return [tier for tier in (self.device, self.host, self.nvme) if tier is not None]

    def request(self, namespace: Namespace = MODEL, *, stamped_as: Namespace | None = None) -> "Request":
        return Request(self, namespace, stamped_as or namespace)

    def check(self) -> None:
        """What must hold at any moment when no step is between its parts."""
        self.cache.tree.check_integrity()

    def check_quiet(self, *, private_pages: int = 0) -> None:
        """What must hold when nothing runs: every slot is free or in the tree, and every page carries its stamps."""
        self.check()
        for tier in self.tiers:
            used = tier.capacity_pages - tier.num_free
            private = private_pages if tier is self.device else 0
            assert used == self.cache.tree.occupancy(tier.tier_id).total + private, f"{tier.tier_id} lost pages"
            assert not tier.cancelled_calls, f"{tier.tier_id}: a copy was cancelled"

    async def quiet(self) -> None:
        """Wait until nothing is under way: copies go on when their request is gone."""
        async with asyncio.timeout(60):
            while self._is_busy():  # noqa: ASYNC110  # no one event is it
                await asyncio.sleep(0.01)

    def _is_busy(self) -> bool:
        cache = self.cache
        return bool(any(cache._under_way.values()) or cache._holders or cache.writing_through.is_running)

    def raw(self, tier_id: TierId, slot: int) -> bytes:
        tier = self.cache.tiers[tier_id]
        assert isinstance(tier, SimulatedTier)
        return tier.raw_page(slot)


@asynccontextmanager
async def opened(
    world: World,
    *,
    device_pages: int = 8,
    host_pages: int = 16,
    nvme_pages: int | None = 64,
    faults: Faults | None = None,
    metadata_bytes: int | None = None,
    image: Image | None = None,
    sync_s: float = 1e-3,
    eager: float = 0.2,
    policy: str = LRU,
    tenant_quotas: TenantQuotas | None = None,
    admission: AdmissionPolicy | None = None,
    write_policy: WritePolicy = WritePolicy.DEMOTE,
    exclusive: bool = False,
    prefill: PrefillCurve | PrefillSpeeds | None = None,
) -> AsyncIterator[Setup]:
    """A cache that runs for the length of the block, on tiers with jitter and, if asked, faults. With an `image`, its
    NVMe tier survives crashes, and finds that image when it opens."""

    def tier(kind: type[T], tier_id: TierId, pages: int, latency: float, bandwidth: float) -> T:
        return kind(
            tier_id,
            page_bytes=LAYOUT.page_bytes,
            capacity_pages=pages,
            rng=world.rng,
            latency_s=latency,
            bandwidth=bandwidth,
            jitter=0.5,
            faults=faults if tier_id != HOST else None,
        )

    device = tier(SimulatedDevice, DEVICE, device_pages, 1e-5, 1e8)
    host = tier(SimulatedHost, HOST, host_pages, 0.0, 1e8)
    nvme: SimulatedTier | None = None
    if image is not None:
        assert nvme_pages is not None
        nvme = SimulatedDurableTier(
            image=image,
            sync_s=sync_s,
            eager=eager,
            page_bytes=LAYOUT.page_bytes,
            capacity_pages=nvme_pages,
            rng=world.rng,
            latency_s=1e-4,
            bandwidth=1e7,
            jitter=0.5,
            faults=faults,
        )
    elif nvme_pages is not None:
        nvme = tier(SimulatedTier, NVME, nvme_pages, 1e-4, 1e7)
    tiers: dict[TierId, Tier] = {DEVICE: device, HOST: host}
    if nvme is not None:
        tiers[NVME] = nvme
    async with Cache(
        LAYOUT,
        tiers,
        clock=world,
        policy=policy,
        tenant_quotas=tenant_quotas,
        metadata_bytes=metadata_bytes,
        admission=admission,
        write_policy=write_policy,
        exclusive=exclusive,
        prefill=prefill,
    ) as cache:
        yield Setup(cache, device, host, nvme)


class Request:
    """One request, the way an engine makes it: find, compute what is missing step by step, give up the lease."""

    def __init__(self, setup: Setup, namespace: Namespace, stamped_as: Namespace) -> None:
        self.setup = setup
        self.namespace = namespace
        self.stamped_as = stamped_as
        """Whose stamps its pages carry: where tenants share pages, all have the same, as KV does not name a tenant."""
        self.sequence: Sequence | None = None
        self.num_layers_read: Counter[TierId] = Counter()
        """Layers of pages on their way to the device, by where they were read."""
        self.pause: Callable[[], Awaitable[None]] = partial(asyncio.sleep, 0)
        """How long reading one such layer takes."""

    async def open(self, tokens: Seq[int], *, deadline_s: float = 60.0, by_layer: bool = False) -> Sequence:
        cache = self.setup.cache
        deadline = cache.clock.monotonic() + deadline_s
        self.sequence = await Sequence.open(
            cache, self.namespace, np.array(tokens), owner="test", deadline=deadline, by_layer=by_layer
        )
        assert self.sequence.length < len(tokens)
        assert self.sequence.tokens.tolist() == list(tokens)[: self.sequence.length]
        assert sum(self.sequence.cached_by_tier.values()) == self.sequence.length
        return self.sequence

    async def step(self, tokens: Seq[int], *, deadline_s: float = 60.0, fail: bool = False) -> None:
        """Run one step: check every byte of the context, write the new tokens, commit (or abort)."""
        sequence, cache = self.sequence, self.setup.cache
        assert sequence is not None
        plan = await sequence.begin(np.array(tokens), deadline=cache.clock.monotonic() + deadline_s)
        before = sequence.tokens.tolist()
        try:
            self._write(plan, before, tokens)
            await self._check_context(plan, before)
            if fail:
                raise RuntimeError("the model failed")
        except BaseException as error:
            sequence.abort(plan)
            if isinstance(error, UnreadablePage):
                if error.outcome is Outcome.ERROR:
                    cache.report_failing(error.tier_id)
                else:
                    sequence.report_bad(error.tier_id, error.slot)
            raise
        sequence.commit(plan)

    async def run(self, tokens: Seq[int], *, chunk: int = 8) -> int:
        """Open, prefill in chunks, close. Returns the tokens that were found."""
        sequence = await self.open(tokens)
        found = sequence.length
        try:
            while sequence.length < len(tokens):
                await self.step(tokens[sequence.length : sequence.length + chunk])
        finally:
            sequence.close()
        return found

    def _write(self, plan: StepPlan, before: list[int], tokens: Seq[int]) -> None:
        written = stamps(self.stamped_as, [*before, *tokens])[len(before) :]
        for flat, stamp in zip(plan.slot_mapping.tolist(), written, strict=True):
            slot, offset = divmod(flat, PAGE_SIZE)
            self.setup.device._view(slot)[offset * TOKEN_BYTES : (offset + 1) * TOKEN_BYTES] = stamp

    async def _check_context(self, plan: StepPlan, before: list[int]) -> None:
        expected = stamps(self.stamped_as, before)
        position = 0
        for run in plan.runs:
            for data in await self._pages(run):
                _compare(data, expected[position : position + PAGE_SIZE], f"{run.tier_id}, token {position}")
                position += PAGE_SIZE
        if plan.tail is not None:
            data = self.setup.raw(DEVICE, plan.tail.slot)[: plan.num_tail_tokens * TOKEN_BYTES]
            _compare(data, expected[position:], f"tail, token {position}")
            position += plan.num_tail_tokens
        assert position == len(before), "the step does not see its whole context"

    async def _pages_as_they_come(self, run: Run) -> list[bytes]:
        """Each layer on the device once it is there, and in the host if it does not come."""
        arriving, device = run.arriving, self.setup.device
        assert arriving is not None
        pages = [b""] * len(run.slots)
        has_come = True
        for layer in range(device.num_layers):
            has_come = has_come and await self.setup.cache.has_come(arriving.arrival, layer)
            size = device.page_bytes // device.num_layers
            tier_id, slots = (DEVICE, arriving.slots) if has_come else (HOST, run.slots)
            self.num_layers_read[tier_id] += 1
            look = partial(self._pieces, tier_id, slots.tolist(), slice(layer * size, (layer + 1) * size))
            first = look()
            await self.pause()
            if first != look():
                raise WrongBytes(f"pages that arrive on the device changed in {tier_id}")
            pages = [before + piece for before, piece in zip(pages, first, strict=True)]
        return pages

    def _pieces(self, tier_id: TierId, slots: list[int], piece: slice) -> list[bytes]:
        return [self.setup.raw(tier_id, slot)[piece] for slot in slots]

    async def _pages(self, run: Run) -> list[bytes]:
        if run.arriving is not None:
            return await self._pages_as_they_come(run)
        if run.tier_id != NVME:
            # In two looks with time between them: a pinned page stays what it is.
            first = [self.setup.raw(run.tier_id, slot) for slot in run.slots.tolist()]
            await asyncio.sleep(0)
            again = [self.setup.raw(run.tier_id, slot) for slot in run.slots.tolist()]
            if first != again:
                raise WrongBytes(f"pinned pages of {run.tier_id} changed")
            return first
        assert self.setup.nvme is not None
        buffers = [bytearray(LAYOUT.page_bytes) for _ in run.refs]
        # To the end: a step is not over before what it reads into its buffers has ended.
        outcomes = await self.setup.cache._to_the_end(
            self.setup.nvme.read([
                PageRead(ref.slot, ref.generation, ref.identity, memoryview(buffer))
                for ref, buffer in zip(run.refs, buffers, strict=True)
            ])
        )
        if outcomes is None:
            raise UnreadablePage(NVME, run.refs[0].slot, Outcome.ERROR)
        for ref, outcome in zip(run.refs, outcomes, strict=True):
            if outcome is not Outcome.OK:
                raise UnreadablePage(NVME, ref.slot, outcome)
        return [bytes(buffer) for buffer in buffers]


class UnreadablePage(Exception):
    """A step could not read a page back from NVMe."""

    def __init__(self, tier_id: TierId, slot: int, outcome: Outcome) -> None:
        super().__init__(f"{tier_id} slot {slot}: {outcome.value}")
        self.tier_id = tier_id
        self.slot = slot
        self.outcome = outcome


def _compare(data: bytes, expected: list[bytes], where: str) -> None:
    if data != b"".join(expected):
        raise WrongBytes(where)


def prompt(document: int, num_tokens: int, *, branch: int = 0, shared: int | None = None) -> list[int]:
    """A prompt: `shared` tokens of a document (all by default), then tokens of a branch of it."""
    shared = num_tokens if shared is None else min(shared, num_tokens)
    head = [1000 * document + i for i in range(shared)]
    return head + [1_000_000 * (branch + 1) + 1000 * document + i for i in range(num_tokens - shared)]


def int32(tokens: Seq[int]) -> npt.NDArray[np.int32]:
    return np.array(tokens, np.int32)
