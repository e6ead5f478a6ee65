"""A replay: requests against the cache as it is, over tiers that only take the time that copying would.

Tree, policies, sequences and movers are the ones that serve; what is simulated is time and bytes. One block of the
trace is one page, a page of one token to the tree: its id. As ids are chained, that finds what the tokens would find.
A block that is partly filled is no page: as in a cache, what lies behind the last whole one is computed and not kept.

The engine that is stated: at most `concurrency` requests at a time, the others wait in line; each computes what the
cache lacks in steps of at most `step_tokens` tokens, at `prefill`'s speed, whatever the others do meanwhile; its
pages are held until its first token. Answers are not stored: a trace shows them when a later prompt repeats them. Of
several nodes each has an engine and a cache of its own, and a router chooses one for each prompt as it arrives. Without
a device tier the cache is a sidecar's, and the engine one that uses it (`sidecar.py`).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Final

import numpy as np

from hicache.admissions import admission_named
from hicache.cache import Cache
from hicache.errors import HicacheError
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.policies import check_policy
from hicache.sequence import Sequence as Prompt
from hicache.tier import DEVICE, HOST, NVME, Tier, TierId
from hicache.tools.bench.virtual import VirtualClock, run_virtual
from hicache.tools.replay.machine import Machine
from hicache.tools.replay.readers import Request, whole_blocks
from hicache.tools.replay.replayed import NodeFound, Replayed
from hicache.tools.replay.router import ROUTERS
from hicache.tools.replay.sidecar import lend, store
from hicache.tools.replay.tiers import ReplayDevice, ReplayHost, ReplayTier

DEADLINE_S: Final = 600.0
"""How long a request tries to get room, in virtual seconds."""
_LANE_PAGE_MAX: Final = 64 << 20
"""What a lane has in flight at most: a larger page counts as so large, and is alone there as well."""
_PAGE_GRAIN: Final = 128
"""A page of the simulated layout has a multiple of so many bytes."""


def replay(
    requests: Sequence[Request],
    machine: Machine,
    policy: str,
    *,
    router: str = "prefix",
    hints: Sequence[bool] | None = None,
    progress: Callable[[], None] | None = None,
) -> Replayed:
    """Replay requests, which are in order of time, from an empty cache.

    Deterministic. Raises `BadRequest` for a policy that there is none of.

    Args:
        policy: evicts in all tiers, by a name of `hicache.policies`.
        router: which node a prompt goes to, by a name of `ROUTERS`; one node needs none.
        hints: what the caller of each request knows: whether a later prompt goes on from it. None for no hints.
        progress: called after each request.
    """
    check_policy(policy)
    return run_virtual(lambda clock: _Replay(machine, policy, router, clock, progress).run(requests, hints))


class _Node:
    """A cache and the engine before it."""

    def __init__(self, machine: Machine, layout: KVLayout, policy: str, clock: VirtualClock) -> None:
        self.machine = machine
        self.places = asyncio.Semaphore(machine.concurrency)
        self.found = NodeFound()
        link_s, page_bytes = machine.page_bytes / machine.link_bandwidth, layout.page_bytes
        tiers: dict[TierId, Tier] = {HOST: ReplayHost(HOST, machine.host_pages, page_bytes, 0.0, 0.0, 0.0)}
        if machine.device_pages:
            latency_s = machine.link_latency_s
            tiers[DEVICE] = ReplayDevice(DEVICE, machine.device_pages, page_bytes, link_s, link_s, latency_s)
        self._nvme: ReplayTier | None = None
        if machine.nvme_pages:
            read_s = machine.page_bytes / machine.nvme_read_bandwidth
            write_s = machine.page_bytes / machine.nvme_write_bandwidth
            self._nvme = ReplayTier(NVME, machine.nvme_pages, page_bytes, read_s, write_s, machine.nvme_latency_s)
            tiers[NVME] = self._nvme
        admission = None
        if machine.nvme_pages:
            admission = admission_named(machine.admission, machine.nvme_pages, page_size=machine.block_tokens)
        self.cache = Cache(
            layout, tiers, clock=clock, policy=policy, write_policy=machine.write_policy, exclusive=machine.exclusive,
            admission=admission,
        )  # fmt: skip

    def add_to(self, found: Replayed) -> None:
        """Add what the node has done."""
        page_bytes = self.machine.page_bytes
        found.nodes.append(self.found)
        found.copied({lane.name: lane.stats.pages for lane in self.cache.lanes}, page_bytes)
        found.nvme_written_bytes += page_bytes * (self._nvme.pages_written if self._nvme is not None else 0)
        found.nvme_refused_bytes += page_bytes * sum(self.cache.counters.refused_pages.values())
        found.pages_held += sum([info.num_pages for infos in self.cache.tree.walk() for info in infos])
        if self._nvme is not None:
            found.pages_on_nvme += self.cache.tree.occupancy(NVME).resident


class _Replay:
    """One replay under way."""

    def __init__(
        self, machine: Machine, policy: str, router: str, clock: VirtualClock, progress: Callable[[], None] | None
    ) -> None:
        self._machine = machine
        self._clock = clock
        self._progress = progress
        self._found = Replayed()
        lane_page = -(-min(machine.page_bytes, _LANE_PAGE_MAX) // _PAGE_GRAIN) * _PAGE_GRAIN
        layout = KVLayout.uniform(
            num_layers=1,
            num_kv_heads=_PAGE_GRAIN // 2,
            head_dim=lane_page // _PAGE_GRAIN,
            dtype=KVDtype.INT8,
            page_size=1,
        )
        self._namespace = Namespace(model="replay", layout=layout)
        self._nodes = [_Node(machine, layout, policy, clock) for _ in range(machine.nodes)]
        self._router = ROUTERS[router](machine.nodes)

    async def run(self, requests: Sequence[Request], hints: Sequence[bool] | None) -> Replayed:
        found = self._found
        requests = [whole_blocks(request, self._machine.block_tokens) for request in requests]
        async with AsyncExitStack() as stack:
            for node in self._nodes:
                await stack.enter_async_context(node.cache)
            begin_s = requests[0].time_s if requests else 0.0
            async with asyncio.TaskGroup() as group:
                for at, request in enumerate(requests):
                    arrives_s = (request.time_s - begin_s) / self._machine.pace
                    await asyncio.sleep(arrives_s - self._clock.monotonic())
                    group.create_task(self._serve(at, request, arrives_s, None if hints is None else hints[at]))
            found.virtual_s = self._clock.monotonic()
            for node in self._nodes:
                node.add_to(found)
        return found

    async def _serve(self, number: int, request: Request, arrived_s: float, returns: bool | None) -> None:
        found = self._found
        chosen = self._router.route(number, request.input_tokens, lambda: self._known(request))
        node = self._nodes[chosen]
        async with node.places:  # first come, first served
            if request.input_tokens:
                await (self._prefill if self._machine.device_pages else self._prefill_from_sidecar)(
                    node, request, returns
                )
                found.ttft_s.append(self._clock.monotonic() - arrived_s)
        self._router.served(number, chosen)
        found.tokens += request.input_tokens
        node.found.num_requests += 1
        node.found.tokens += request.input_tokens
        if self._progress is not None:
            self._progress()

    def _known(self, request: Request) -> list[int]:
        """How many tokens of a prompt each node knows."""
        matches = [node.cache.tree.match(self._namespace, request.blocks) for node in self._nodes]
        return [match.num_tokens * self._machine.block_tokens for match in matches]

    async def _prefill(self, node: _Node, request: Request, returns: bool | None) -> None:
        """Find, compute the rest step by step, and store it; what cannot be stored is computed all the same."""
        machine, done = self._machine, 0
        step_pages = max(1, min(machine.step_tokens // machine.block_tokens, machine.device_pages // 4))
        deadline = self._clock.monotonic() + DEADLINE_S
        try:
            # One id more, which is never stored: the cache leaves the last one to be computed.
            asked = np.append(request.blocks, np.int32(0))
            prompt = await Prompt.open(node.cache, self._namespace, asked, owner="replay", deadline=deadline)
            try:
                # The last token is computed even where it is known: its logits are what is asked for.
                found = self._count_found(node, request, prompt.cached_by_tier, prompt.length)
                done = min(found, request.input_tokens - 1)
                while prompt.length < len(request.blocks):
                    blocks = request.blocks[prompt.length : prompt.length + step_pages]
                    plan = await prompt.begin(blocks, deadline=deadline)
                    stop = (prompt.length + len(blocks)) * machine.block_tokens
                    if prompt.length + len(blocks) == len(request.blocks):
                        # What is left of less than a block goes with the last step.
                        stop = min(stop + machine.block_tokens, request.input_tokens)
                    await asyncio.sleep(machine.prefill.seconds(done, stop))
                    done = stop
                    prompt.commit(plan)
            finally:
                prompt.close()
            if returns is not None:
                node.cache.hint(self._namespace, request.blocks, returns=returns)
        except HicacheError:
            self._found.num_refused += 1
        steps = -(-(request.input_tokens - done) // machine.step_tokens)
        await asyncio.sleep(machine.prefill.seconds(done, request.input_tokens, steps=steps))

    async def _prefill_from_sidecar(self, node: _Node, request: Request, returns: bool | None) -> None:
        """Copy what is lent, compute the rest, and store it behind the first token."""
        machine, cache, blocks = self._machine, node.cache, request.blocks
        deadline, done, is_refused = self._clock.monotonic() + DEADLINE_S, 0, False
        try:
            coverage, num_lent = await lend(cache, self._namespace, blocks, deadline=deadline)
            self._count_found(node, request, coverage.by_tier, coverage.num_tokens)
            done = min(num_lent * machine.block_tokens, request.input_tokens - 1)
            if num_lent:
                await asyncio.sleep(machine.link_latency_s + num_lent * machine.page_bytes / machine.link_bandwidth)
        except HicacheError:
            is_refused = True
        steps = -(-(request.input_tokens - done) // machine.step_tokens)
        await asyncio.sleep(machine.prefill.seconds(done, request.input_tokens, steps=steps))
        try:
            await store(cache, self._namespace, blocks, deadline=deadline)
            if returns is not None:
                cache.hint(self._namespace, blocks, returns=returns)
        except HicacheError:
            is_refused = True
        self._found.num_refused += is_refused

    def _count_found(self, node: _Node, request: Request, by_tier: Mapping[TierId, int], num_blocks: int) -> int:
        """Count what was found of a prompt, in all and by tier; returns it, in tokens."""
        found, block_tokens = self._found, self._machine.block_tokens
        for tier_id, blocks_there in by_tier.items():
            found.tokens_found[tier_id] = found.tokens_found.get(tier_id, 0) + blocks_there * block_tokens
        num_found = num_blocks * block_tokens
        found.blocks_found += num_blocks
        found.document_tokens_found += min(num_found, request.document_tokens)
        node.found.tokens_found += num_found
        return num_found
