"""The composition root: builds tiers, cache and loop into the embedded `HiCache`.

The core lives on one event loop. Embedded, that loop runs in a thread this module owns, and the synchronous face below
crosses to it once per step of the engine, never per layer: everything a step needs is pinned before it begins, so
reading and writing pages inside it touches no shared state.
"""

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeVar

import numpy.typing as npt

from hicache import prefetch as ahead
from hicache import sequence as core
from hicache.admissions import ALWAYS
from hicache.arguments import real
from hicache.cache import DRAIN_S, Coverage
from hicache.deciding import Decision
from hicache.errors import BadRequest, Closed, DeadlineExceeded
from hicache.layout import KVLayout
from hicache.namespace import Namespace
from hicache.policies import DEFAULT
from hicache.prefill import PrefillCurve
from hicache.quotas import TenantQuotas
from hicache.recovery import Recovery
from hicache.service.building import Parts, build
from hicache.service.options import Directories, Options, Progress
from hicache.service.requests import DEFAULT_TIMEOUT_S, Prefetch, Sequence, Step
from hicache.service.snapshot import snapshot_of, stats_of
from hicache.tiers.context import Staging
from hicache.tree import pack_tokens
from hicache.write_policy import WritePolicy
from hicache.writing import Durability, Flushed, Persisted

if TYPE_CHECKING:
    from hicache.service.sharing import Saving, Shared, Sharing

GRACE_S: Final = 15.0
"""Beyond its deadline a call has answered at the latest after this: time for a copy that cannot be stopped to end."""
TIMEOUT_MAX_S: Final = 1e9
"""Longest time that a call may be given."""
CLOSE_TIMEOUT_S: Final = DRAIN_S + GRACE_S
"""How long `HiCache.close` waits for copies to end that cannot be stopped."""
_log = logging.getLogger(__name__)

__all__ = ["DEFAULT_TIMEOUT_S", "HiCache", "Prefetch", "Sequence", "Step"]

T = TypeVar("T")


class HiCache:
    """The cache, embedded in this process. Thread-safe; every method but `open` may be called from any thread.

    Made by `HiCache.open`; a context manager. See `Sequence` for the way a model uses it.
    """

    def __init__(self, options: Options) -> None:
        self.layout: Final = options.layout
        self._started: Final = threading.Event()
        self._stop: Final = asyncio.Event()
        self._parts: Parts | None = None
        self._failure: BaseException | None = None
        self._owners: Final = itertools.count()
        self._staging: Final[list[Staging]] = []
        self._sharing: Sharing | None = None
        # Guards `_calls` and `_is_open`: no call is handed to a loop that will not run it.
        self._lock: Final = threading.Lock()
        self._calls: Final[set[Future[Any]]] = set()
        self._is_open = False
        self._thread = threading.Thread(target=self._run, args=(options,), name="hicache", daemon=True)
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
        nvme_dir: Directories | None = None,
        nvme_bytes: int | None = None,
        nvme_min_free_bytes: int = 0,
        nvme_write_bytes_per_day: int | None = None,
        nvme_codec: str = "none",
        device: str = "cpu",
        metadata_bytes: int | None = None,
        policy: str = DEFAULT,
        tenant_quotas: TenantQuotas | None = None,
        admission: str = ALWAYS,
        write_policy: str = WritePolicy.DEMOTE.value,
        exclusive: bool = False,
        prefill: PrefillCurve | Literal["measure"] | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Open a cache for pages of one layout. What its NVMe tier has kept over a restart is found in it again.

        Args:
            layout: the model's KV and the page size.
            device_bytes: budget of the device tier; at least one page.
            host_bytes: budget of the host tier, allocated at once; at least one page.
            nvme_dir: directory of the NVMe tier, made if it is missing; several of them, best each on a device of its
                own, share what is asked for in equal parts. None for no such tier.
            nvme_bytes: budget of the NVMe tier; required with `nvme_dir`. Another one than before makes the store
                there grow or shrink.
            nvme_min_free_bytes: no new pages are taken while the file system has less space left for others.
            nvme_write_bytes_per_day: no new pages are taken while more were written; None for no bound.
            nvme_codec: how pages are encoded there: "none", or one of `NvmeTier.open`. A lossy one takes only pages of
                namespaces whose `codec` names it; others then end in host memory.
            device: "cpu", or "cuda[:index]" where there is one.
            metadata_bytes: most memory for the index of what is cached, by its own estimate (about 700 bytes a prefix
                and 4 a token); reaching it drops the coldest pages. None for no bound but that of the tiers.
            policy: which pages leave a tier first: "lru", "slru", "s3-fifo", "lrfu" or "value", see
                `hicache.policies`.
            tenant_quotas: which part of the tiers is a tenant's own: by tenant, a share of every tier (a float), or a
                `TenantQuota` with shares, or bytes of the budgets above. A tenant that holds more loses its own pages
                first. Without, tenants have equal parts of a full tier: see `hicache.policy.shared`.
            admission: which pages may be written to NVMe: "always", "second-touch" or "predicted", see
                `hicache.admissions`. Those that are refused leave the host for nothing; `persist` asks nobody.
            write_policy: when pages are written to NVMe: "demote-on-evict", when they leave the host; "write-through",
                when they are published; "write-through-selective", when a second request uses them. Namespaces may have
                their own (`set_write_policy`).
            exclusive: whether a page leaves NVMe when it comes back to the host, unless it was persisted: more pages in
                both together, and a write for each time that one goes down. Not with a policy that writes through.
            prefill: what computing a prompt costs. "measure" learns it from the steps of sequences, from entering one
                to leaving it, and takes a CPU, as on CUDA a step is left before its work has ended. A hit that is
                slower to load than to compute is then left where it is: see `explain`. None: every hit is loaded.
            progress: told of what a restart brings back: first "nvme" and how much of its log is read, of how much;
                then "pages" and how many are back, of how many. Called in threads of the cache; must not raise.

        Raises `BadRequest` naming the field before anything was made, `TierUnavailable` when a tier refuses to open.
        """
        return cls(
            Options.checked(
                layout,
                device_bytes=device_bytes,
                host_bytes=host_bytes,
                nvme_dir=nvme_dir,
                nvme_bytes=nvme_bytes,
                nvme_min_free_bytes=nvme_min_free_bytes,
                nvme_write_bytes_per_day=nvme_write_bytes_per_day,
                nvme_codec=nvme_codec,
                device=device,
                metadata_bytes=metadata_bytes,
                policy=policy,
                tenant_quotas=tenant_quotas,
                admission=admission,
                write_policy=write_policy,
                exclusive=exclusive,
                prefill=prefill,
                progress=progress,
            )
        )

    @classmethod
    def connect(
        cls,
        layout: KVLayout,
        *,
        device_bytes: int,
        host_bytes: int,
        device: str = "cpu",
        policy: str = DEFAULT,
        metadata_bytes: int | None = None,
        socket_dir: str = "",
        tenant: str = "",
        secret_file: str = "",
        strict: bool = False,
        lookup_timeout_s: float = 0.25,
        load_timeout_s: float = 5.0,
        save_timeout_s: float = 10.0,
        staging_bytes: int = 64 << 20,
        max_pending_saves: int = 64,
    ) -> Self:
        """Open a cache that shares its pages with other processes through the sidecar (`hicache serve`).

        Device and host memory here are this process's own: what it computes lies there, and what comes from the sidecar
        is copied there, as much of a prompt as fits. The sidecar keeps what all processes have computed, over their
        ends, and on NVMe. Everything that fails there is a miss: the cache goes on alone, and asks once a second
        whether the sidecar is back.

        Args:
            layout, device_bytes, host_bytes, device, policy, metadata_bytes: as `open` takes them.
            socket_dir: the sidecar's socket directory, or "tls://HOST:PORT"; empty for this user's own.
            tenant: which tenant the session is; namespaces of other tenants are not shared.
            secret_file: file with the tenant's secret.
            strict: refuse to open without a sidecar that has pages of this layout, instead of going on without.
            lookup_timeout_s: how long a request waits to be told what is cached, at most 60 seconds.
            load_timeout_s: how long a request waits for pages before it computes them, at most 600 seconds.
            save_timeout_s: how long saving what one request has published may take, and so how long `close` waits, at
                most 600 seconds.
            staging_bytes: shared memory that saves pass through.
            max_pending_saves: requests whose pages wait to be saved, beyond which others' are not.

        Raises as `open` does; with `strict` also what keeps the sidecar from being used: `Unreachable`,
        `LayoutMismatch` (with the options of `hicache serve` that mend it), `Forbidden`, `VersionMismatch`.
        """
        from hicache.service.sharing import Sharing, SharingSettings

        settings = SharingSettings.of({
            "socket_dir": socket_dir, "tenant": tenant, "secret_file": secret_file, "strict": strict,
            "lookup_timeout_s": lookup_timeout_s, "load_timeout_s": load_timeout_s, "save_timeout_s": save_timeout_s,
            "staging_bytes": staging_bytes, "max_pending_saves": max_pending_saves,
        })  # fmt: skip
        cache = cls.open(
            layout,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            device=device,
            policy=policy,
            metadata_bytes=metadata_bytes,
        )
        try:
            cache._sharing = Sharing(settings, cache._built, cache._call)
        except BaseException:
            cache.close()
            raise
        return cache

    # -- the loop's thread --------------------------------------------------------------------------------------------

    def _run(self, options: Options) -> None:
        try:
            asyncio.run(self._serve(options))
        except BaseException as failure:
            # Before the start it is the opener's; afterwards every call names it, and the log has it whole.
            self._failure = failure
            if self._started.is_set():
                _log.exception("the cache failed")
        finally:
            with self._lock:
                self._is_open = False
                calls = list(self._calls)
            for call in calls:
                if not call.done():
                    call.set_exception(self._closed())
            self._started.set()

    async def _serve(self, options: Options) -> None:
        parts = await build(options)
        async with parts.cache:
            self._parts = parts
            self._loop = asyncio.get_running_loop()
            self._is_open = True
            self._started.set()
            await self._stop.wait()

    def _call(
        self,
        work: Coroutine[Any, Any, T],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        undo: Callable[[T], None] | None = None,
    ) -> T:
        """Run `work` on the loop and wait for it. The core keeps deadlines; the wait here only ends a broken loop.

        `undo` is called on the loop with the result if there is one but nobody to take it: the thread that waited was
        interrupted, or too late. Raises what `work` raises, `Closed`, `DeadlineExceeded`.
        """
        with self._lock:
            if not self._is_open:
                work.close()
                raise self._closed()
            call: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._calls.add(call)
        try:
            return call.result(timeout_s + GRACE_S)
        except CancelledError:
            raise self._closed() from None
        except BaseException as error:
            if call.done() and not call.cancelled() and call.exception() is error:
                raise
            if undo is not None:
                call.add_done_callback(lambda _: self._undo(call, undo))
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"the cache did not answer within {timeout_s + GRACE_S:g} s") from None
            raise
        finally:
            with self._lock:
                self._calls.discard(call)

    def _undo(self, call: "Future[T]", undo: Callable[[T], None]) -> None:
        if not call.cancelled() and call.exception() is None:
            with suppress(RuntimeError):  # the loop is closed, and everything given back with it
                self._loop.call_soon_threadsafe(undo, call.result())

    def _closed(self) -> Closed:
        return Closed(f"the cache failed: {self._failure!r}" if self._failure is not None else "the cache is closed")

    def _deadline(self, timeout_s: float) -> float:
        """The moment at which a call's time is over. Raises `BadRequest`, before anything has begun."""
        seconds = real("timeout_s", timeout_s, " of seconds")
        if seconds > TIMEOUT_MAX_S:
            raise BadRequest("timeout_s", f"{seconds:g} is more than {TIMEOUT_MAX_S:g} seconds")
        return self._built.cache.clock.monotonic() + seconds

    @property
    def _built(self) -> Parts:
        if self._parts is None:
            raise self._closed()
        return self._parts

    def _take_staging(self) -> Staging:
        try:
            return self._staging.pop()
        except IndexError:
            device = self._built.device
            return Staging(self.layout, device.layer(0).dtype, pinned=device.device.type == "cuda")

    def close(self) -> None:
        """Let queued moves finish for a bounded time, then release everything. Idempotent. A connected cache saves what
        is queued first, within the time of one save.

        Calls under way in other threads raise `Closed`. A device that does not answer is waited for
        `CLOSE_TIMEOUT_S`; the memory and the files that it may still be using then stay until the process ends.
        """
        if self._sharing is not None:
            self._sharing.close()
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning("a device does not answer; what the cache has open stays so until the process ends")
        with self._lock:
            self._is_open = False
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

    def explain(
        self, namespace: Namespace, tokens: npt.ArrayLike, *, chunk_tokens: int | None = None
    ) -> Decision:
        """What a request for `tokens` (1-D, int32 ids) would take from the cache now, what it would compute although it
        is cached, and why, with the seconds predicted for either; `chunk_tokens` as `sequence` takes it. Changes
        nothing. Raises `BadRequest`, `Closed`."""
        cache = self._built.cache

        async def explain() -> Decision:
            return cache.explain(namespace, tokens, chunk_tokens=chunk_tokens)

        return self._call(explain())

    def sequence(
        self,
        namespace: Namespace,
        tokens: npt.ArrayLike,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        chunk_tokens: int | None = None,
        by_layer: bool = False,
    ) -> Sequence:
        """Begin a request for the prompt `tokens` (1-D, int32 ids, at least one).

        What is cached of it, at most `len(tokens) - 1` tokens, is leased and brought to the device as far as it fits.

        With `chunk_tokens`, the engine computes at most so many tokens in one step, and asks `Sequence.next_step`
        before each: where that is faster, it is asked to compute what is cached from the front while the rest is loaded
        from the back. That needs a cache that knows what computing costs (`open`, `prefill`).

        With `by_layer`, this does not wait for copies from host memory to the device: `Step.parts` does, layer by
        layer, so that the first layers are attended over while the last ones are copied.

        Raises `BadRequest`, `DeadlineExceeded` after `timeout_s` seconds, `Closed`.
        """
        deadline, saving = self._deadline(timeout_s), None
        if self._sharing is not None and namespace.layout == self.layout:
            tokens = pack_tokens(tokens)
            saving = self._sharing.begin(namespace, tokens, timeout_s=timeout_s)
        owner = f"embedded-{next(self._owners)}"
        opening = core.Sequence.open(
            self._built.cache,
            namespace,
            tokens,
            owner=owner,
            deadline=deadline,
            chunk_tokens=chunk_tokens,
            by_layer=by_layer,
        )
        return Sequence(self, self._call(opening, timeout_s=timeout_s, undo=core.Sequence.close), saving)

    def _published(self, saving: "Saving | None", running: core.Sequence) -> None:
        """A request has committed a step: hand over what is to be saved. Belongs to the loop."""
        if saving is not None and self._sharing is not None:
            self._sharing.published(saving, running.tokens[: running.published])

    @property
    def shared(self) -> "Shared | None":
        """What a connected cache has loaded and saved; None without a sidecar (`open`)."""
        return self._sharing.shared if self._sharing is not None else None

    def wait_saved(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """Wait until all that requests have published was saved, as far as the sidecar takes it: other processes then
        find it. Whether that was so within `timeout_s` seconds; True without a sidecar."""
        return self._sharing is None or self._sharing.wait_saved(timeout_s)

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

    def flush(self, namespace: Namespace | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Flushed:
        """Forget every page of a namespace, or of all, in every tier, and wait until that is durable: what was removed
        does not come back with a restart, either. After `timeout_s` seconds the result says that it is not yet so.

        Pages that running requests keep stay; the result has their number. Raises `Closed`.
        """
        cache, deadline = self._built.cache, self._deadline(timeout_s)

        async def flush() -> Flushed:
            num_held = await cache.flush_in_steps(namespace)
            return Flushed(num_held, await cache.settle(deadline=deadline))

        return self._call(flush(), timeout_s=timeout_s)

    def persist(
        self, namespace: Namespace, tokens: npt.ArrayLike, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Persisted:
        """Write what is cached of `tokens` (1-D, int32 ids) to NVMe, in whole pages, and wait until it is durable: it
        then survives `kill -9` and a power cut. Returns how many tokens do. Faster copies stay. Nothing else in the
        cache ever waits for a disk to flush.

        Raises `BadRequest`, `TierUnavailable` (no NVMe tier, or one whose flush fails), `DeadlineExceeded` after
        `timeout_s` seconds, `Closed`; nothing is promised then.
        """
        persisting = self._built.cache.persist(namespace, tokens, deadline=self._deadline(timeout_s))
        return self._call(persisting, timeout_s=timeout_s)

    def prefetch(
        self,
        namespace: Namespace,
        tokens: npt.ArrayLike,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_pages: int | None = None,
    ) -> Prefetch:
        """Begin to bring what NVMe alone has of `tokens` (1-D, int32 ids) to host memory, as a request for them is
        expected within `timeout_s` seconds; pages not begun by then are left. For a queue's next requests, a
        conversation whose tool call is about to end, or candidates of a retrieval.

        It takes no room from what is in use or was used within the last `timeout_s` seconds, and at most `max_pages`
        pages, by default a quarter of the host tier: see `hicache.prefetch`. Returns at once. Raises `BadRequest`,
        `Closed`.
        """
        cache, deadline = self._built.cache, self._deadline(timeout_s)

        async def prefetch() -> ahead.Prefetch:
            return cache.prefetch(namespace, tokens, deadline=deadline, max_pages=max_pages)

        return Prefetch(self, self._call(prefetch()))

    def hint(
        self,
        namespace: Namespace,
        tokens: npt.ArrayLike,
        *,
        priority: int = 0,
        retain_s: float | None = None,
        expected_return_s: float | None = None,
        returns: bool | None = None,
    ) -> int:
        """Say what is known of the future of the prefix `tokens` (1-D, int32 ids). Returns how many of them are cached,
        which the hint is about.

        Args:
            priority: -4 to 4. Of one tenant's pages in a tier, those of lower priority leave first.
            retain_s: seconds, above 0 and at most 30 days, for which the pages leave a tier only when nothing else of
                the tenant may. They stop nobody: where only they are left, they leave.
            expected_return_s: in how many seconds a prompt is expected that goes on from this one, as when a tool has
                been called; 0 to 30 days.
            returns: whether one will come at all. False contradicts an `expected_return_s`.

        A later hint about the same prefix replaces this one. Raises `BadRequest`, `Closed`.
        """
        cache = self._built.cache

        async def hint() -> int:
            return cache.hint(
                namespace,
                tokens,
                priority=priority,
                retain_s=retain_s,
                expected_return_s=expected_return_s,
                returns=returns,
            )

        return self._call(hint())

    def pin(self, namespace: Namespace, tokens: npt.ArrayLike) -> int:
        """Keep what is cached of `tokens` (1-D, int32 ids) in some tier until `unpin`. Returns how many tokens are
        kept: whole pages, 0 when none are cached. All pins together hold at most a quarter of the slowest tier.

        Raises `NoRoom` naming "pins" beyond that, `BadRequest`, `Closed`.
        """
        cache = self._built.cache

        async def pin() -> int:
            return cache.pin_prefix(namespace, tokens)

        return self._call(pin())

    def unpin(self, namespace: Namespace, tokens: npt.ArrayLike) -> bool:
        """End a pin, named by the tokens that `pin` was called with. False when there is none. Raises `Closed`."""
        cache = self._built.cache

        async def unpin() -> bool:
            return cache.unpin_prefix(namespace, tokens)

        return self._call(unpin())

    def set_write_policy(self, namespace: Namespace, write_policy: str) -> None:
        """Choose when pages of a namespace are written to NVMe, by the names that `open` takes, for what is published
        or used from now on. Raises `BadRequest`, `Closed`."""
        cache, policy = self._built.cache, WritePolicy.named(write_policy)

        async def set_write_policy() -> None:
            cache.set_write_policy(namespace, policy)

        self._call(set_write_policy())

    @property
    def recovery(self) -> Recovery:
        """What came back from NVMe when the cache was opened."""
        return self._built.cache.recovered

    @property
    def durability(self) -> Durability | None:
        """The numbers of the last write or free on NVMe that was accepted, and of the last up to which all are durable;
        None without an NVMe tier."""
        return self._built.cache.durability
