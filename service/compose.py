"""The composition root: builds tiers, cache and loop into the embedded `HiCache`.

The core lives on one event loop. Embedded, that loop runs in a thread this module owns, and the synchronous face below
crosses to it once per step of the engine, never per layer: everything a step needs is pinned before it begins, so
reading and writing pages inside it touches no shared state.
"""

import asyncio
import itertools
import os
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

from hicache import sequence as core
from hicache.cache import Cache, Coverage
from hicache.clock import SystemClock
from hicache.errors import BadRequest, Closed, CorruptPage
from hicache.kernels.attend import PagedPart
from hicache.layout import KVLayout
from hicache.metadata import check_metadata_bytes
from hicache.namespace import Namespace
from hicache.service.snapshot import snapshot_of, stats_of
from hicache.tier import DEVICE, HOST, NVME, Tier, TierId
from hicache.tiers.context import ContextParts, Staging
from hicache.tiers.device import DeviceTier
from hicache.tiers.host import HostTier
from hicache.tiers.nvme import NvmeTier

DEFAULT_TIMEOUT_S: Final = 60.0
"""How long a call waits for room or a copy before it raises `DeadlineExceeded`."""
GRACE_S: Final = 15.0
"""Beyond its deadline a call has answered at the latest after this: time for a copy that cannot be stopped to end."""

T = TypeVar("T")


class HiCache:
    """The cache, embedded in this process. Thread-safe; every method but `open` may be called from any thread.

    Made by `HiCache.open`; a context manager. See `Sequence` for the way a model uses it.
    """

    def __init__(self, budgets: "_Budgets") -> None:
        self.layout: Final = budgets.layout
        self._started: Final = threading.Event()
        self._stop: asyncio.Event | None = None
        self._parts: _Parts | None = None
        self._failure: BaseException | None = None
        self._owners: Final = itertools.count()
        self._staging: Final[list[Staging]] = []
        self._thread = threading.Thread(target=self._run, args=(budgets,), name="hicache", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    @classmethod
    def open(
        cls,
        layout: KVLayout,
        *,
        device_bytes: int,
        host_bytes: int,
        nvme_dir: str | os.PathLike[str] | None = None,
        nvme_bytes: int | None = None,
        device: str = "cpu",
        metadata_bytes: int | None = None,
    ) -> Self:
        """Open a cache for pages of one layout.

        Args:
            layout: the model's KV and the page size.
            device_bytes: budget of the device tier; at least one page.
            host_bytes: budget of the host tier, allocated at once; at least one page.
            nvme_dir: directory of the NVMe tier, made if it is missing; None for no such tier.
            nvme_bytes: budget of the NVMe tier; required with `nvme_dir`.
            device: "cpu", or "cuda[:index]" where there is one.
            metadata_bytes: most memory for the index of what is cached, by its own estimate (about 700 bytes a prefix
                and 4 a token); reaching it drops the coldest pages. None for no bound but that of the tiers.

        Raises `BadRequest` naming the field before anything was made, `TierUnavailable` when a tier refuses to open.
        """
        return cls(_Budgets.checked(layout, device_bytes, host_bytes, nvme_dir, nvme_bytes, device, metadata_bytes))

    # -- the loop's thread --------------------------------------------------------------------------------------------

    def _run(self, budgets: "_Budgets") -> None:
        try:
            asyncio.run(self._serve(budgets))
        except BaseException as failure:
            # Before the start it is the opener's; after it there is nobody but the thread's own hook to tell.
            if self._started.is_set():
                raise
            self._failure = failure
            self._started.set()

    async def _serve(self, budgets: "_Budgets") -> None:
        parts = await _build(budgets)
        async with parts.cache:
            self._stop = asyncio.Event()
            self._parts = parts
            self._loop = asyncio.get_running_loop()
            self._started.set()
            await self._stop.wait()

    def _call(self, work: Coroutine[Any, Any, T], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> T:
        """Run `work` on the loop and wait for it. The core keeps deadlines; the wait here only ends a broken loop."""
        if self._stop is None or not self._thread.is_alive():
            work.close()
            raise Closed("the cache is closed")
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(timeout_s + GRACE_S)

    def _deadline(self, timeout_s: float) -> float:
        return self._built.cache.clock.monotonic() + timeout_s

    @property
    def _built(self) -> "_Parts":
        if self._parts is None:
            raise Closed("the cache is closed")
        return self._parts

    def _take_staging(self) -> Staging:
        try:
            return self._staging.pop()
        except IndexError:
            return Staging(self.layout, self._built.device.layer(0).dtype)

    def close(self) -> None:
        """Let queued moves finish for a bounded time, then release everything. Idempotent."""
        if self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._parts = None
        self._staging.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the face -----------------------------------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.layout.page_size

    @property
    def device_pages(self) -> int:
        """Pages of the device tier: what one step's new tokens may need at most."""
        return self._built.device.capacity_pages

    def match(self, namespace: Namespace, tokens: npt.ArrayLike) -> Coverage:
        """How much of `tokens` (1-D, int32 ids) is cached, and where. Changes nothing."""
        cache = self._built.cache

        async def match() -> Coverage:
            return cache.coverage(cache.tree.match(namespace, tokens))

        return self._call(match())

    def sequence(
        self, namespace: Namespace, tokens: npt.ArrayLike, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> "Sequence":
        """Begin a request for the prompt `tokens` (1-D, int32 ids, at least one).

        What is cached of it, at most `len(tokens) - 1` tokens, is leased and brought to the device as far as it fits.

        Raises `BadRequest`, `DeadlineExceeded` after `timeout_s` seconds, `Closed`.
        """
        owner = f"embedded-{next(self._owners)}"
        opening = core.Sequence.open(
            self._built.cache, namespace, tokens, owner=owner, deadline=self._deadline(timeout_s)
        )
        return Sequence(self, self._call(opening, timeout_s=timeout_s))

    def publish(self, namespace: Namespace, tokens: npt.ArrayLike) -> int:
        """Let every other tenant reuse what is cached of a prefix, a system prompt say, in whole pages.

        Tenants whose namespace is equal in everything else copy it instead of computing it. Nothing else of this tenant
        is ever visible to them. A page is published until it leaves the cache, is flushed, or `unpublish`.
        Returns the tokens published, a multiple of the page size; 0 when nothing of it is cached.
        """
        cache = self._built.cache

        async def publish() -> int:
            return cache.publish(namespace, tokens)

        return self._call(publish())

    def unpublish(self, namespace: Namespace, tokens: npt.ArrayLike) -> bool:
        """End the publication of exactly the tokens that `publish` said it published; True when there was one.

        Copies that other tenants have made meanwhile are theirs and stay.
        """
        cache = self._built.cache

        async def unpublish() -> bool:
            return cache.unpublish(namespace, tokens)

        return self._call(unpublish())

    def stats(self) -> dict[str, Any]:
        """Occupancy, lanes and counters, as JSON-able values. See `hicache.service.snapshot`."""
        cache = self._built.cache

        async def stats() -> dict[str, Any]:
            return stats_of(cache)

        return self._call(stats())

    def snapshot(self) -> dict[str, Any]:
        """`stats` and every node of the tree, as JSON-able values: what `hicache tree` shows."""
        return self._call(snapshot_of(self._built.cache))

    def flush(self, namespace: Namespace | None = None) -> int:
        """Forget every page of a namespace, or of all, in every tier; returns the pages that running requests keep."""
        cache = self._built.cache

        async def flush() -> int:
            return cache.flush(namespace)

        return self._call(flush())


class Sequence:
    """A running request, used by one thread at a time. A context manager: leaving it gives its lease up.

        with cache.sequence(namespace, prompt) as sequence:
            with sequence.step(prompt[sequence.length:]) as step:
                for layer in range(num_layers):
                    step.write(layer, key, value)
                    out, _ = attend(query, step.parts(layer), key=key, value=value, scale=scale)
    """

    def __init__(self, cache: HiCache, running: core.Sequence) -> None:
        self._cache: Final = cache
        self._core: Final = running
        self.num_cached: Final = running.length
        """Tokens found in the cache when the request began: they need not be computed."""
        self.cached_by_tier: Final = dict(running.cached_by_tier)
        """`num_cached` by the fastest tier that had them."""

    @property
    def length(self) -> int:
        """Tokens whose KV is there now."""
        return self._core.length

    def step(self, tokens: npt.ArrayLike, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> "Step":
        """A step for the next `tokens` (1-D, int32 ids): pages for their KV, and everything before them pinned.

        Use it in a `with` block. Leaving the block without an exception commits; with one, the tokens are forgotten.
        Entering raises `BadRequest`, `NoRoom` (more tokens than the device tier can ever hold), `DeadlineExceeded`.
        """
        return Step(self._cache, self._core, tokens, timeout_s)

    def fork(self) -> "Sequence":
        """Another request with the same tokens; both share all pages until one of them writes."""

        async def fork() -> core.Sequence:
            return self._core.fork()

        return Sequence(self._cache, self._cache._call(fork()))

    def close(self) -> None:
        """Give up the lease and unpublished tokens; published pages stay cached. Idempotent."""

        async def close() -> None:
            self._core.close()

        if self._cache._parts is not None:
            self._cache._call(close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Step:
    """One forward pass of a sequence over some new tokens. A `PartSource` for `hicache.kernels.attend`."""

    def __init__(self, cache: HiCache, running: core.Sequence, tokens: npt.ArrayLike, timeout_s: float) -> None:
        self._cache: Final = cache
        self._core: Final = running
        self._tokens: Final = tokens
        self._timeout_s: Final = timeout_s
        self._plan: core.StepPlan | None = None
        self._staging: Staging | None = None

    def __enter__(self) -> Self:
        cache, built = self._cache, self._cache._built
        beginning = self._core.begin(self._tokens, deadline=cache._deadline(self._timeout_s))
        plan = cache._call(beginning, timeout_s=self._timeout_s)
        if any(run.tier_id == NVME for run in plan.runs):
            self._staging = cache._take_staging()
        self._plan = plan
        self._slot_mapping = torch.from_numpy(plan.slot_mapping).to(built.device.layer(0).device)
        self._context = ContextParts(
            plan, built.cache.layout, device=built.device, host=built.host, nvme=built.nvme, staging=self._staging
        )
        return self

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the new tokens' keys and values of one layer.

        Args:
            layer: index from 0.
            key, value: `[num_new, num_kv_heads, head_dim]`, the layout's dtype, on the device tier's device.
        """
        self._cache._built.device.write_tokens(layer, self._slot_mapping, key, value)

    def parts(self, layer: int) -> Iterator[PagedPart]:
        """Everything before the new tokens, for one layer. A part is valid until the next one is asked for.

        Raises `CorruptPage` when a page on NVMe cannot be read back; the step must then be given up.
        """
        return self._context.parts(layer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        plan, self._plan = self._plan, None
        assert plan is not None, "the step was not begun"

        async def end() -> None:
            if kind is None:
                self._core.commit(plan)
                return
            self._core.abort(plan)
            if isinstance(error, CorruptPage):
                self._core.report_bad(TierId(error.tier), error.slot)

        try:
            # If reads do not end, the buffers stay theirs: they are not handed out again.
            self._context.close()
            if self._staging is not None:
                self._cache._staging.append(self._staging)
        finally:
            self._cache._call(end())


@dataclass(frozen=True, slots=True)
class _Budgets:
    """What `HiCache.open` was asked for, checked."""

    layout: KVLayout
    device_bytes: int
    host_bytes: int
    nvme_dir: Path | None
    nvme_bytes: int
    device: str
    metadata_bytes: int | None

    @classmethod
    def checked(
        cls,
        layout: KVLayout,
        device_bytes: int,
        host_bytes: int,
        nvme_dir: str | os.PathLike[str] | None,
        nvme_bytes: int | None,
        device: str,
        metadata_bytes: int | None,
    ) -> "_Budgets":
        budgets = {"device_bytes": device_bytes, "host_bytes": host_bytes}
        if (nvme_dir is None) != (nvme_bytes is None):
            raise BadRequest("nvme_bytes", "is given together with nvme_dir, or neither is")
        if nvme_bytes is not None:
            budgets["nvme_bytes"] = nvme_bytes
        for name, value in budgets.items():
            if value < layout.page_bytes:
                raise BadRequest(name, f"{value} bytes are less than one page of {layout.page_bytes} bytes")
        num_tiers = 2 if nvme_dir is None else 3
        check_metadata_bytes(metadata_bytes, page_size=layout.page_size, num_tiers=num_tiers)
        directory = Path(nvme_dir) if nvme_dir else None
        return cls(layout, device_bytes, host_bytes, directory, nvme_bytes or 0, device, metadata_bytes)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What an open cache consists of."""

    cache: Cache
    device: DeviceTier
    host: HostTier
    nvme: NvmeTier | None


async def _build(budgets: _Budgets) -> _Parts:
    """Open the tiers; if one refuses, those before it are closed."""
    layout = budgets.layout
    clock = SystemClock()
    async with AsyncExitStack() as stack:

        async def opened(tier: Tier) -> None:
            stack.push_async_callback(tier.close)

        device = DeviceTier(layout, capacity_bytes=budgets.device_bytes, device=budgets.device)
        await opened(device)
        pinned = device.device.type == "cuda"
        host = HostTier(page_bytes=layout.page_bytes, capacity_bytes=budgets.host_bytes, pinned=pinned)
        await opened(host)
        tiers: dict[TierId, Tier] = {DEVICE: device, HOST: host}
        # Last, because it alone leaves something behind: whatever else is refused, is refused before.
        nvme = None
        if budgets.nvme_dir is not None:
            nvme = NvmeTier.open(budgets.nvme_dir, layout=layout, capacity_bytes=budgets.nvme_bytes, clock=clock)
            await opened(nvme)
            tiers[NVME] = nvme
        cache = Cache(layout, tiers, clock=clock, metadata_bytes=budgets.metadata_bytes)
        stack.pop_all()
        return _Parts(cache, device, host, nvme)
