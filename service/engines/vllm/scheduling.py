"""The scheduler's side: what is cached of a request, what is to be loaded, and which pages a step fills.

It runs on the engine's scheduling thread. A request costs it one lookup; nothing here waits longer than
`Settings.lookup_timeout_s`, and nothing raises.
"""

import time
from collections.abc import Iterable
from itertools import takewhile
from math import inf
from typing import Any, Final

from hicache.service.client import Client, Prompt
from hicache.service.client.results import Lookup
from hicache.service.engines.link import Link
from hicache.service.engines.vllm.adapters import Answer, Loaded
from hicache.service.engines.vllm.counts import Counts
from hicache.service.engines.vllm.identity import Backends, Groups, Identity, lora_of
from hicache.service.engines.vllm.plan import NULL_BLOCK, BlockIds, Load, Plan, Save
from hicache.service.engines.vllm.tracked import Tracked, count_what_was_loaded
from hicache.service.wire import pack_int32
from hicache.tier import HOST

FOUND_S: Final = 1.0
"""How long an answer is good for while its request waits to be admitted: vLLM asks again at each step."""


class Scheduling:
    """The requests of one engine. Belongs to its scheduling thread."""

    def __init__(
        self, identity: Identity, groups: Groups, link: Link, *, lookup_timeout_s: float, load_timeout_s: float
    ) -> None:
        self._identity: Final = identity
        self._groups: Final = groups
        self._block_size: Final = groups.block_size
        self._link: Final = link
        self._lookup_timeout_s: Final = lookup_timeout_s
        self._load_timeout_s: Final = load_timeout_s
        self.counts: Final = Counts()
        self._tracked: Final[dict[str, Tracked | None]] = {}
        self._unnamed: Final[dict[str, Any]] = {}
        """Requests that began before workers had loaded their adapter."""
        self._loads: list[Load] = []
        self._unreported: list[str] = []
        self._started: list[str] = []
        self._kept: Final[set[str]] = set()
        """Finished requests whose blocks are kept until they are saved."""

    # -- what is cached -----------------------------------------------------------------------------------------------

    def matched(self, request: Any, num_computed: int) -> int | None:
        """Tokens of whole blocks that can be loaded behind the first `num_computed`. At least one token is left to
        compute, as vLLM needs the logits of the last. None while it cannot be told whose pages the request's are: it is
        asked again at the next step."""
        if request.request_id not in self._tracked and not self._identity.is_settled(request):
            return None
        tracked = self._of(request)
        if tracked is None or tracked.is_retired or not tracked.loads_left or time.monotonic() >= tracked.load_by:
            return 0
        size = self._block_size
        first, most = num_computed // size, (int(request.num_tokens) - 1) // size
        if most <= first or num_computed % size:
            return 0
        last = min(self._found(tracked, most * size) // size, most)
        tracked.wanted = (first, max(first, last))
        # What is cached is not saved again, whether it is loaded or vLLM has it itself.
        tracked.num_full = max(tracked.num_full, last)
        return max(0, last - first) * size

    def _of(self, request: Any) -> Tracked | None:
        """What is known of a request, from now on."""
        name = request.request_id
        if name not in self._tracked:
            namespace = self._identity.of_request(request)
            self._tracked[name] = None if namespace is None else Tracked(request, namespace, Prompt(namespace))
            if namespace is None and lora_of(request) is not None:
                self._unnamed[name] = request
        return self._tracked[name]

    def _found(self, tracked: Tracked, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens are cached, as of at most `FOUND_S` ago."""
        now = time.monotonic()
        prompt = tracked.prompt
        if now - tracked.found_at < FOUND_S and len(prompt) >= num_tokens:
            return tracked.found_tokens
        if len(prompt) < num_tokens:
            prompt.extend(tracked.request.all_token_ids[len(prompt) : num_tokens])

        def ask(client: Client) -> Lookup:
            return client.lookup(prompt, timeout_s=self._lookup_timeout_s)

        found = self._link.call(ask)
        tracked.found_tokens = 0 if found is None else found.num_tokens
        tracked.runs = () if found is None else found.runs
        if tracked.is_second and found is not None:
            tracked.runs = tuple(takewhile(lambda run: run[0] == HOST, found.runs))
            tracked.found_tokens = sum(count for _, count in tracked.runs)
        self.counts.add(
            lookups=1,
            unanswered_lookups=found is None,
            asked_tokens=len(prompt),
            found_tokens=tracked.found_tokens,
        )
        tracked.found_at = now
        return tracked.found_tokens

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], num_external: int) -> None:
        """vLLM has blocks for a request; `num_external` tokens of those that were offered are to be loaded into
        them."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not num_external:
            return
        first, _ = tracked.wanted
        end = first + num_external // self._block_size
        tracked.loads_left -= 1
        tracked.is_loading = True
        now = time.monotonic()
        tracked.load_by = min(tracked.load_by, now + self._load_timeout_s)
        tokens = bytes(pack_int32(request.all_token_ids[: end * self._block_size]))
        blocks, timeout_s = self._blocks(block_ids, first, end), max(0.0, tracked.load_by - now)
        lora = lora_of(request)
        tracked.is_to_start = lora is not None
        self._loads.append(Load(request.request_id, tracked.namespace, tokens, first, blocks, timeout_s, lora))

    def sources(self, request: Any, num_external: int) -> dict[str, int]:
        """Which tier of the sidecar had how many of the tokens that are loaded, as of the lookup."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return {}
        start = tracked.wanted[0] * self._block_size
        end, at = start + num_external, 0
        sources: dict[str, int] = {}
        for tier, num_tokens in tracked.runs:
            shared = min(end, at + num_tokens) - max(start, at)
            at += num_tokens
            if shared > 0:
                sources[tier] = sources.get(tier, 0) + shared
        return sources

    # -- a step -------------------------------------------------------------------------------------------------------

    def plan(self, step: Any) -> Plan:
        """What the worker's side is to do in a step, as vLLM's `SchedulerOutput` has it."""
        preempted = sorted(step.preempted_req_ids or ())
        for name in preempted:
            tracked = self._tracked.get(name)
            if tracked is not None:
                # Its saves under way are given up, and it may load what it had.
                tracked.loads_left += 1
                tracked.load_by = inf
                tracked.num_full = 0
        loads, self._loads = self._loads, []
        unreported, self._unreported = self._unreported, []
        saves = list(self._saves(step))
        started, self._started = self._started, []
        return Plan(
            loads=loads,
            saves=saves,
            preempted=preempted,
            overwritten=self._overwritten(step, loads) if self._groups.has_window else frozenset(),
            unreported=unreported,
            is_idle=not step.total_num_scheduled_tokens,
            asks_backends=not self._identity.knows_backends,
            asked_adapters=self._identity.adapters.asked(),
            started=started,
        )

    def _saves(self, step: Any) -> Iterable[Save]:
        computed = {each.req_id: each.num_computed_tokens for each in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, num_scheduled in step.num_scheduled_tokens.items():
            tracked = self._tracked.get(name)
            if tracked is None:
                continue
            if tracked.is_to_start:
                tracked.is_to_start = False
                self._started.append(name)
            if tracked.is_retired:
                continue
            # Of tokens that are only guessed, or not sampled yet, the KV may be overwritten.
            known = tracked.request.all_token_ids
            end = min(computed[name] + num_scheduled, len(known)) // self._block_size
            first = tracked.num_full
            if end <= first:
                continue
            state = step.kv_connector_block_state
            block_ids = state.get_block_ids(name) if state is not None else None
            if block_ids is None or any(len(block_ids[group]) < end for group in self._groups.ids):
                continue
            blocks = self._blocks(block_ids, first, end)
            # Where vLLM itself had a prefix, blocks in front of a window are not there. A page is saved whole or not.
            missing = [index for each in blocks for index, block in enumerate(each, 1) if block == NULL_BLOCK]
            num_missing = max(missing, default=0)
            first += num_missing
            if first == end:
                tracked.num_full = end
                continue
            new_tokens = bytes(pack_int32(known[tracked.num_sent : end * self._block_size]))
            tracked.num_full, tracked.is_saving = end, True
            tracked.num_sent = max(tracked.num_sent, end * self._block_size)
            blocks = tuple(each[num_missing:] for each in blocks)
            yield Save(name, tracked.namespace, new_tokens, first, blocks, lora_of(tracked.request))

    @staticmethod
    def _overwritten(step: Any, loads: Iterable[Load]) -> frozenset[int]:
        """Blocks that somebody else may have had until now."""
        taken: set[int] = set()
        for each in step.scheduled_new_reqs:
            taken.update(*each.block_ids)
        for block_ids in step.scheduled_cached_reqs.new_block_ids:
            taken.update(*(block_ids or ()))
        for load in loads:
            taken.update(*load.blocks)
        taken.update(copy.dst_block_id for copy in step.kv_cache_block_copies or ())
        return frozenset(taken - {NULL_BLOCK})

    def _blocks(self, block_ids: tuple[list[int], ...], first: int, end: int) -> BlockIds:
        return tuple(tuple(block_ids[group][first:end]) for group in self._groups.ids)

    def take_backends(self, backends: Iterable[Backends]) -> None:
        """What workers have said that their layers have, when a plan has asked them."""
        self._identity.take_backends(backends)

    def take_adapters(self, loaded: Iterable[Loaded], answers: Iterable[Answer]) -> None:
        """What workers have said of their adapters. Requests that have waited for nothing are saved from now on, with
        all that they have computed."""
        self._identity.adapters.take(loaded, answers)
        for name, request in list(self._unnamed.items()):
            namespace = self._identity.of_request(request)
            if namespace is not None:
                del self._unnamed[name]
                self._tracked[name] = Tracked(request, namespace, Prompt(namespace))

    def request(self, name: str) -> Any:
        """A request that is not finished, by its name; None for one that is not cached."""
        tracked = self._tracked.get(name)
        return None if tracked is None else tracked.request

    def ended(self, loaded: Iterable[str], saved: Iterable[str]) -> None:
        """Loads of these requests have ended, and the blocks of those are not kept any more."""
        for name in loaded:
            tracked = self._tracked.get(name)
            if tracked is not None:
                tracked.is_loading = False
                count_what_was_loaded(tracked.request)
                if not tracked.request.num_computed_tokens and not tracked.is_second:
                    tracked.is_second = True
                    tracked.loads_left += 1
                    tracked.found_at = -inf
                if tracked.num_full == tracked.wanted[1]:
                    # What could not be had is computed, and saved then.
                    tracked.num_full = min(tracked.num_full, tracked.request.num_computed_tokens // self._block_size)
        self._kept.difference_update(saved)

    @property
    def keeps_blocks(self) -> bool:
        """Whether blocks of finished requests are still to become free."""
        return bool(self._kept)

    def finished(self, request: Any) -> bool:
        """A request has ended. Whether its blocks may still be read for saving, so that the worker's side says when
        they are not."""
        self._unnamed.pop(request.request_id, None)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None and tracked.is_to_start:
            self._started.append(request.request_id)
        if tracked is None or not tracked.is_saving:
            return False
        if tracked.is_loading:
            self._unreported.append(request.request_id)
            return False
        self._kept.add(request.request_id)
        return True

    def reset(self) -> None:
        """Nothing that was saved until now may be loaded by this engine."""
        self._identity.forget()
        self._unnamed.clear()
        for tracked in self._tracked.values():
            if tracked is not None:
                # Also when it is preempted, and computed anew, later.
                tracked.is_retired = True
