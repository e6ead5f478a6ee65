"""`HicacheTier`: the sidecar as a secondary tier below vLLM's own offloading to host memory.

vLLM keeps chunks of blocks in a region of host memory, its primary tier, and hands every one of them on to its
secondary tiers; what is found there comes back to the primary tier first. It names a chunk by a digest that is chained
over tokens, the adapter's name, pictures and salt, and by the group of layers; tokens do not come with it. So chunks
are kept by their keys (`objects`), in namespaces that no engine with tokens has.

All of vLLM's calls come from its scheduling thread and wait for nothing: lookups, loads and saves have a thread each.
Everything that fails is a miss, or a chunk that is not saved.
"""

import hashlib
import json
import logging
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, Final

import vllm
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from hicache.errors import BadRequest, HicacheError
from hicache.namespace import Namespace
from hicache.service.engines.generation import Generation
from hicache.service.engines.link import Link, check_pages
from hicache.service.engines.objects import Objects
from hicache.service.engines.ranges import Page, Part, address_of
from hicache.service.engines.vllm.chunks import chunk_bytes, namespace_of
from hicache.service.engines.vllm.machine import kind_of_machine
from hicache.service.engines.vllm.settings import Settings

HASH_BYTES: Final = 32
"""Of SHA-256. Shorter digests (xxhash) do not tell prompts apart for sure, and those of other processes are others."""
GROUP_BYTES: Final = 4
"""A key's group of layers, behind the digest."""

_log = logging.getLogger("vllm.hicache")


_Move = Callable[[Sequence[str], Sequence[Page], float], list[bool]]


@dataclass(eq=False, slots=True)
class _Job:
    """Chunks on their way, in one direction."""

    job: Any
    """vLLM's `TransferJob`."""
    is_load: bool
    done: Sequence[bool] = ()
    """Which chunks are there now, when it has ended."""
    seconds: float = 0.0
    future: "Future[None] | None" = None

    @property
    def id(self) -> int:
        """vLLM's number of it."""
        return int(self.job.job_id)

    @property
    def keys(self) -> Sequence[bytes]:
        """Of the chunks."""
        return self.job.keys if isinstance(self.job.keys, list) else list(self.job.keys)


class _Lookups(AsyncLookupManager):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """vLLM's own thread for lookups, and what it has found for which request."""

    def __init__(self, tier: "HicacheTier", tier_type: str) -> None:
        self._tier: Final = tier
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        """Which chunks are there."""
        return self._tier.found(keys, req_context)


@dataclass(frozen=True, slots=True)
class TierSettings(Settings):
    """The connector's settings, and one."""

    lookup_timeout_s: float = 1.0
    """How long it may take to look for the chunks that a request asks for in a step, while others run."""
    identity: str = ""
    """What the weights and the engine's configuration come to: `HicacheOffloadingConnector` fills it in."""


class HicacheTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Chunks of vLLM's primary tier in the sidecar. Made by vLLM, once an engine, in its scheduler.

    What does not fit (another release, weights that nobody has named, a sidecar with other pages, a wrong secret) makes
    a tier that has nothing, and one line in the log, or, with `strict`, stops the engine's start.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **given: Any,
    ) -> None:
        """`given`: settings, as they stand in the tier's configuration. Raises `BadRequest` for those that are wrong.

        `primary_kv_view`: bytes `[chunks, bytes of a row]`, written and read here while vLLM holds the chunks.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._settings: Final = TierSettings.of(given)
        self.locality = Locality.REMOTE if self._settings.socket_dir.startswith("tls://") else Locality.LOCAL
        self._rows: Final = primary_kv_view.cast("B")
        self._start: Final = address_of(self._rows)
        self._chunk_bytes: Final = chunk_bytes(offloading_spec)
        self._generation: Final = Generation()
        self._link: Link | None = None
        self._namespace: Namespace | None = None
        self._objects: Objects | None = None
        self._has_refused = False
        self._events: Final[list[Any] | None] = (
            [] if offloading_spec.kv_events_config.enable_kv_cache_events else None
        )
        self._lookups: Final = _Lookups(self, tier_type)
        self._loader: Final = ThreadPoolExecutor(1, "hicache-load")
        self._saver: Final = ThreadPoolExecutor(1, "hicache-save")
        self._jobs: Final[dict[int, _Job]] = {}
        self._ended: Final[queue.SimpleQueue[_Job]] = queue.SimpleQueue()
        try:
            self._begin(offloading_spec)
        except HicacheError as error:
            if self._settings.strict:
                self.shutdown()
                raise
            _log.warning("hicache: this engine runs without the cache: %s", error)

    def _begin(self, spec: Any) -> None:
        namespace = namespace_of(
            spec,
            identity=self._settings.identity,
            weights=self._settings.weights,
            machine=kind_of_machine(),
            version=vllm.__version__,
        )
        if self._chunk_bytes > self._settings.staging_bytes:
            problem = f"{self._settings.staging_bytes} do not hold a chunk of {self._chunk_bytes}"
            raise BadRequest("staging_bytes", problem)
        self._link = Link(
            self._settings,
            name="vllm tier",
            staging_bytes=self._settings.staging_bytes,
            check=check_pages(namespace.layout),
        )
        self._namespace = namespace
        self._objects = Objects(self._link, namespace, self._chunk_bytes)

    # -- the scheduler's thread ---------------------------------------------------------------------------------------

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Whether a chunk is here: known some steps after the first time that its request asks."""
        if self._objects is None or not self._is_named(key):
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to save chunks, or leave them out where there are too many to save."""
        job = _Job(job_metadata, is_load=False)
        is_left_out = sum(not each.is_load for each in self._jobs.values()) >= self._settings.max_pending_saves
        if self._objects is None or is_left_out or not all(map(self._is_named, job.keys)):
            job.done = [False] * len(job.keys)
            self._ended.put(job)
        else:
            deadline = time.monotonic() + self._settings.save_timeout_s
            job.future = self._saver.submit(self._carry_out, job, self._objects.save, deadline)
        self._jobs[job.id] = job

    def submit_load(self, job_metadata: Any) -> None:
        """Begin to load chunks. They have `load_timeout_s` from now on, in the queue and out of it."""
        job = _Job(job_metadata, is_load=True)
        if self._objects is None:
            job.done = [False] * len(job.keys)
            self._ended.put(job)
        else:
            deadline = time.monotonic() + self._settings.load_timeout_s
            job.future = self._loader.submit(self._carry_out, job, self._objects.load, deadline)
        self._jobs[job.id] = job

    def get_finished_jobs(self) -> Iterable[Any]:
        """What has ended since the last call."""
        results: list[Any] = []
        while True:
            try:
                job = self._ended.get_nowait()
            except queue.Empty:
                return results
            del self._jobs[job.id]
            done = [key for key, is_done in zip(job.keys, job.done, strict=True) if is_done]
            if job.is_load:
                # Asked again, they are not here: otherwise vLLM would begin the same load for ever.
                self._lookups.mark_miss([key for key, is_done in zip(job.keys, job.done, strict=True) if not is_done])
            elif done and self._events is not None:
                self._events.append(
                    OffloadingEvent(keys=done, medium=self.medium, removed=False, locality=self.locality)
                )
            results.append(
                JobResult(
                    job_id=job.id,
                    success=len(done) == len(job.keys),
                    successful_keys=tuple(done) if job.is_load and done else None,
                    transfer_time=job.seconds,
                    transfer_bytes=len(done) * self._chunk_bytes,
                )
            )

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Chunks are saved as they are computed."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """What was found for a request is forgotten."""
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """What this step has asked is on its way."""
        self._lookups.flush()

    def take_events(self) -> Iterable[Any]:
        """Chunks that were saved since the last call, where vLLM publishes its events."""
        if self._events is not None:
            yield from self._events
            self._events.clear()

    def drain_jobs(self) -> None:
        """Wait for what is under way, each for its time at most, and find nothing of before any more: vLLM calls it
        when it resets its caches, as its weights may be others now."""
        wait([each.future for each in self._jobs.values() if each.future is not None])
        self._generation.forget()
        if self._objects is not None and self._link is not None and self._namespace is not None:
            salt = hashlib.sha256(self._namespace.salt + json.dumps(self._generation.mark).encode()).digest()
            self._objects = Objects(self._link, replace(self._namespace, salt=salt), self._chunk_bytes)

    def shutdown(self) -> None:
        """End the session and the threads. Waits for what is under way, each for its time at most."""
        self._lookups.shutdown()
        self._loader.shutdown(cancel_futures=True)
        self._saver.shutdown(cancel_futures=True)
        if self._link is not None:
            self._link.close()
        self._rows.release()

    def _is_named(self, key: bytes) -> bool:
        """Whether a key tells chunks apart."""
        if len(key) == HASH_BYTES + GROUP_BYTES:
            return True
        if not self._has_refused:
            self._has_refused = True
            mend = "start vLLM with --prefix-caching-hash-algo sha256"
            _log.warning("hicache: keys of %d bytes are no SHA-256 and find nothing: %s", len(key), mend)
        return False

    # -- the other threads --------------------------------------------------------------------------------------------

    def found(self, keys: Sequence[bytes], req_context: Any) -> list[bool]:
        """Which chunks are here, as far as can be told in time. Called by the thread of lookups.

        vLLM reads a prefix up to the first chunk that is missing: those that a request asks for behind it, in their
        order, are not looked for.
        """
        objects = self._objects
        deadline = time.monotonic() + self._settings.lookup_timeout_s
        missing_from: dict[bytes, int] = {}
        before: dict[bytes, int] = {}
        found = []
        for key in keys:
            group, position = key[HASH_BYTES:], req_context.get_offload_key_position(key) or 0
            is_behind = before.get(group, -1) < position
            before[group] = position
            if is_behind and missing_from.get(group, position) < position:
                found.append(False)
                continue
            is_here = objects is not None and objects.has(key.hex(), deadline)
            if not is_here:
                missing_from[group] = min(position, missing_from.get(group, position))
            found.append(is_here)
        return found

    def _carry_out(self, job: "_Job", do: _Move, deadline: float) -> None:
        began = time.monotonic()
        try:
            pages = [self._page(int(each)) for each in job.job.chunk_ids]
            job.done = do([key.hex() for key in job.keys], pages, deadline)
        except Exception:
            _log.exception("hicache: %s failed", "a load" if job.is_load else "a save")
            job.done = [False] * len(job.keys)
        job.seconds = time.monotonic() - began
        self._ended.put(job)

    def _page(self, chunk: int) -> Page:
        return [Part(self._start + chunk * self.block_size_bytes, self._chunk_bytes)]
