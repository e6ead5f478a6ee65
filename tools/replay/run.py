"""A replay: requests against the cache as it is, over tiers that only take the time that copying would.

Tree, policies, sequences and movers are the ones that serve; what is simulated is time and bytes. One block of the
trace is one page, a page of one token to the tree: its id. As ids are chained, that finds what the tokens would find.

The engine that is stated: at most `concurrency` requests at a time, the others wait in line; each computes what the
cache lacks in steps of at most `step_tokens` tokens, at `prefill`'s speed, whatever the others do meanwhile; its
pages are held until its first token. Answers are not stored: a trace shows them when a later prompt repeats them.
"""

import asyncio
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hicache.cache import Cache
from hicache.errors import BadRequest, HicacheError
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.policy.base import EvictionPolicy, HearsResidency, HearsUses, Use
from hicache.policy.lrfu import LrfuPolicy
from hicache.policy.lru import LruPolicy
from hicache.policy.s3fifo import S3FifoPolicy
from hicache.policy.slru import SlruPolicy
from hicache.policy.value import ValuePolicy
from hicache.prefill import PrefillCurve
from hicache.sequence import Sequence as Prompt
from hicache.tier import DEVICE, HOST, NVME, Outcome, PageIdentity, PageRead, PageWrite, Tier, TierId
from hicache.tools.bench.virtual import SlotsOnly, VirtualClock, run_virtual
from hicache.tools.replay.readers import Request
from hicache.write_policy import WritePolicy

POLICIES: Final[Mapping[str, Callable[[int], EvictionPolicy]]] = {
    "lru": lambda capacity_pages: LruPolicy(),
    "slru": lambda capacity_pages: SlruPolicy(capacity_pages=capacity_pages),
    "s3-fifo": lambda capacity_pages: S3FifoPolicy(capacity_pages=capacity_pages),
    "lrfu": lambda capacity_pages: LrfuPolicy(),
    "value": lambda capacity_pages: ValuePolicy(),
}
"""Eviction policies by name: for a tier of so many pages, with their defaults."""
REPLAYABLE: Final = tuple(name for name, make in POLICIES.items() if not isinstance(make(1), HearsResidency))
"""Those that can be replayed. A tree tells a policy of nodes that may leave; the replay tells it of uses. One that has
to hear of every node that enters or leaves a tier is told by nobody here: `BlockCache` runs it on one tier alone."""
DEADLINE_S: Final = 600.0
"""How long a request tries to get room, in virtual seconds."""
PAGES_MIN: Final = 8
"""Fewest pages of a tier."""
PAGES_MAX: Final = 1 << 26
"""Most pages of a tier."""
_LANE_PAGE_MAX: Final = 64 << 20
"""What a lane has in flight at most: a larger page counts as so large, and is alone there as well."""
_PAGE_GRAIN: Final = 128
"""A page of the simulated layout has a multiple of so many bytes."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What is simulated. Raises `BadRequest` naming the field that is out of bounds."""

    block_tokens: int
    """Tokens of a block, which is a page."""
    token_bytes: int
    """Bytes of KV of a token."""
    device_pages: int
    host_pages: int
    nvme_pages: int
    """0 for a machine without."""
    link_bandwidth: float = 25e9
    """Bytes a second between device and host, each way."""
    link_latency_s: float = 20e-6
    nvme_read_bandwidth: float = 6e9
    nvme_write_bandwidth: float = 3e9
    nvme_latency_s: float = 100e-6
    prefill: PrefillCurve = field(default_factory=lambda: PrefillCurve(token_s=50e-6, attend_s=0.5e-9, step_s=5e-3))
    """Seconds to compute tokens of a prompt."""
    step_tokens: int = 8192
    concurrency: int = 64
    pace: float = 1.0
    """How much faster than in the trace requests come."""
    write_policy: WritePolicy = WritePolicy.DEMOTE
    exclusive: bool = False
    """Whether a page leaves NVMe once it is in the host."""

    def __post_init__(self) -> None:
        for name, low in (("device_pages", PAGES_MIN), ("host_pages", PAGES_MIN), ("nvme_pages", 0)):
            value = getattr(self, name)
            if not (low <= value <= PAGES_MAX) or 0 < value < PAGES_MIN:
                allowed = f"{PAGES_MIN} to {PAGES_MAX}" + ("" if low else ", or 0")
                raise BadRequest(name, f"{value} pages of {self.block_tokens} tokens are not within {allowed}")
        if self.exclusive and self.write_policy is not WritePolicy.DEMOTE:
            raise BadRequest("exclusive", f"does not go with {self.write_policy.value}, which keeps copies on NVMe")

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.block_tokens * self.token_bytes

    @property
    def total_pages(self) -> int:
        """Pages of all tiers together."""
        return self.device_pages + self.host_pages + self.nvme_pages


@dataclass(slots=True)
class Replayed:
    """What came of a replay. Tokens are those of prompts."""

    tokens: int = 0
    tokens_found: dict[str, int] = field(default_factory=dict)
    """Found, by the fastest tier that had them when they were asked for."""
    blocks_found: int = 0
    document_tokens_found: int = 0
    num_refused: int = 0
    """Requests for which there was no room in time: they were computed without the cache."""
    lane_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes copied, by lane, `host->nvme` and so on."""
    nvme_written_bytes: int = 0
    """In all ways."""
    ttft_s: list[float] = field(default_factory=list)
    """Seconds from arrival to first token of each request, in the order in which they had it."""
    virtual_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Tokens found of all tokens; 0.0 without any."""
        return sum(self.tokens_found.values()) / self.tokens if self.tokens else 0.0

    def ttft(self, share: float) -> float:
        """The TTFT that `share` of the requests do not exceed; 0.0 without any."""
        return sorted(self.ttft_s)[min(len(self.ttft_s) - 1, int(share * len(self.ttft_s)))] if self.ttft_s else 0.0


def replay(
    requests: Sequence[Request], machine: Machine, policy: str, *, progress: Callable[[], None] | None = None
) -> Replayed:
    """Replay requests, which are in order of time, from an empty cache. `progress` is called after each of them.

    Deterministic. Raises `BadRequest` for a policy that is not one of `REPLAYABLE`.
    """
    if policy not in REPLAYABLE:
        raise BadRequest("policy", f"{policy!r:.40} is none of {', '.join(REPLAYABLE)}")
    return run_virtual(lambda clock: _Replay(machine, policy, clock, progress).run(requests))


class _Replay:
    """One replay under way."""

    def __init__(self, machine: Machine, policy: str, clock: VirtualClock, progress: Callable[[], None] | None) -> None:
        self._machine = machine
        self._clock = clock
        self._progress = progress
        self._policy = policy
        self._places = asyncio.Semaphore(machine.concurrency)
        self._found = Replayed()
        self._hearing: list[HearsUses] = []
        """Policies that are told of uses."""
        lane_page = -(-min(machine.page_bytes, _LANE_PAGE_MAX) // _PAGE_GRAIN) * _PAGE_GRAIN
        self._layout = KVLayout.uniform(
            num_layers=1,
            num_kv_heads=_PAGE_GRAIN // 2,
            head_dim=lane_page // _PAGE_GRAIN,
            dtype=KVDtype.INT8,
            page_size=1,
        )
        self._namespace = Namespace(model="replay", layout=self._layout)

    async def run(self, requests: Sequence[Request]) -> Replayed:
        machine, found = self._machine, self._found
        link_s, page_bytes = machine.page_bytes / machine.link_bandwidth, self._layout.page_bytes
        device = _Device(DEVICE, machine.device_pages, page_bytes, link_s, link_s, machine.link_latency_s)
        host = _Host(HOST, machine.host_pages, page_bytes, 0.0, 0.0, 0.0)
        tiers: dict[TierId, Tier] = {DEVICE: device, HOST: host}
        nvme: _Tier | None = None
        if machine.nvme_pages:
            read_s = machine.page_bytes / machine.nvme_read_bandwidth
            write_s = machine.page_bytes / machine.nvme_write_bandwidth
            nvme = _Tier(NVME, machine.nvme_pages, page_bytes, read_s, write_s, machine.nvme_latency_s)
            tiers[NVME] = nvme
        policies = {tier_id: POLICIES[self._policy](tier.capacity_pages) for tier_id, tier in tiers.items()}
        self._hearing = [each for each in policies.values() if isinstance(each, HearsUses)]
        async with Cache(
            self._layout, tiers, clock=self._clock, policies=policies, write_policy=machine.write_policy,
            exclusive=machine.exclusive,
        ) as cache:  # fmt: skip
            begin_s = requests[0].time_s if requests else 0.0
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    arrives_s = (request.time_s - begin_s) / machine.pace
                    await asyncio.sleep(arrives_s - self._clock.monotonic())
                    await self._places.acquire()
                    group.create_task(self._serve(cache, request, arrives_s))
            found.virtual_s = self._clock.monotonic()
        found.lane_bytes = {lane.name: lane.stats.pages * machine.page_bytes for lane in cache.lanes}
        found.nvme_written_bytes = nvme.pages_written * machine.page_bytes if nvme is not None else 0
        return found

    async def _serve(self, cache: Cache, request: Request, arrived_s: float) -> None:
        found = self._found
        try:
            if request.input_tokens:
                await self._prefill(cache, request)
                found.ttft_s.append(self._clock.monotonic() - arrived_s)
        finally:
            self._places.release()
        found.tokens += request.input_tokens
        if self._progress is not None:
            self._progress()

    async def _prefill(self, cache: Cache, request: Request) -> None:
        """Find, compute the rest step by step, and store it; what cannot be stored is computed all the same."""
        machine, done = self._machine, 0
        step_pages = max(1, min(machine.step_tokens // machine.block_tokens, machine.device_pages // 4))
        deadline = self._clock.monotonic() + DEADLINE_S
        try:
            # One id more, which is never stored: the cache leaves the last one to be computed.
            asked = np.append(request.blocks, np.int32(0))
            prompt = await Prompt.open(cache, self._namespace, asked, owner="replay", deadline=deadline)
            try:
                # The last token is computed even where it is known: its logits are what is asked for.
                done = min(self._count_found(request, prompt), request.input_tokens - 1)
                while prompt.length < len(request.blocks):
                    blocks = request.blocks[prompt.length : prompt.length + step_pages]
                    plan = await prompt.begin(blocks, deadline=deadline)
                    stop = min((prompt.length + len(blocks)) * machine.block_tokens, request.input_tokens)
                    await asyncio.sleep(machine.prefill.seconds(done, stop))
                    done = stop
                    prompt.commit(plan)
                self._tell_use(cache, request)
            finally:
                prompt.close()
        except HicacheError:
            self._found.num_refused += 1
        steps = -(-(request.input_tokens - done) // machine.step_tokens)
        await asyncio.sleep(machine.prefill.seconds(done, request.input_tokens, steps=steps))

    def _tell_use(self, cache: Cache, request: Request) -> None:
        """A prompt was looked up and stored."""
        path = cache.tree.match(self._namespace, request.blocks).nodes
        if path:
            for policy in self._hearing:
                policy.used(Use(path, self._clock.monotonic()))

    def _count_found(self, request: Request, prompt: Prompt) -> int:
        """Count what was found of a prompt by tier; returns it, in tokens."""
        found, block_tokens, left = self._found, self._machine.block_tokens, request.input_tokens
        for tier_id, num_blocks in prompt.cached_by_tier.items():
            # Only the last block may be partly filled.
            num_tokens = min(num_blocks * block_tokens, left)
            left -= num_tokens
            found.tokens_found[tier_id] = found.tokens_found.get(tier_id, 0) + num_tokens
        num_found = request.input_tokens - left
        found.blocks_found += prompt.length
        found.document_tokens_found += min(num_found, request.document_tokens)
        return num_found


class _Tier(SlotsOnly):
    """A tier without bytes. A call waits `latency_s`, then its pages pass, one after the other, through a pipe that all
    reads share, or one that all writes share."""

    def __init__(
        self, tier_id: TierId, num_pages: int, page_bytes: int, read_s: float, write_s: float, latency_s: float
    ) -> None:
        super().__init__(tier_id, capacity_pages=num_pages, page_bytes=page_bytes)
        self.pages_written = 0
        self._read_s, self._write_s, self._latency_s = read_s, write_s, latency_s
        self._reads_free_at = self._writes_free_at = 0.0

    async def write(self, pages: Sequence[PageWrite]) -> list[Outcome]:
        now = asyncio.get_running_loop().time()
        begin = max(now + self._latency_s, self._writes_free_at)
        self._writes_free_at = begin + len(pages) * self._write_s
        await asyncio.sleep(self._writes_free_at - now)
        self.pages_written += len(pages)
        return [self._outcome(page.slot, page.generation) for page in pages]

    async def read(self, pages: Sequence[PageRead]) -> list[Outcome]:
        now = asyncio.get_running_loop().time()
        begin = max(now + self._latency_s, self._reads_free_at)
        self._reads_free_at = begin + len(pages) * self._read_s
        await asyncio.sleep(self._reads_free_at - now)
        return [self._outcome(page.slot, page.generation) for page in pages]


class _Host(_Tier):
    """Memory, one end of every lane. All slots show the same bytes, which nobody looks at."""

    def __init__(
        self, tier_id: TierId, num_pages: int, page_bytes: int, read_s: float, write_s: float, latency_s: float
    ) -> None:
        super().__init__(tier_id, num_pages, page_bytes, read_s, write_s, latency_s)
        self._bytes = memoryview(mmap.mmap(-1, page_bytes))  # takes no memory while nobody writes to it

    def view(self, slot: int) -> memoryview:
        return self._bytes

    def check(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        return self._outcome(slot, generation)

    def declare(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        return self._outcome(slot, generation)


class _Device(_Tier):
    """A pool that requests fill in place."""

    def declare(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        return self._outcome(slot, generation)

    async def copy_page(self, source_slot: int, target_slot: int) -> Outcome:
        return Outcome.OK
