"""What an embedded cache shares through the sidecar: pages that others have computed come in, its own go out.

A request looks its prompt up once. What the sidecar has beyond this process's own tiers is leased in the arena, copied
to host memory here, and found there like anything else. Pages that requests publish are copied to staging memory and
committed by a thread, behind the request.

The sidecar is never needed: every failure is a miss or a page that is not saved, no call waits longer than its time,
and one that gets no answer is the last one until somebody answers again (`hicache.service.engines.link`).
"""

import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from hicache.errors import BadRequest, HicacheError
from hicache.lease import Lease
from hicache.namespace import Namespace
from hicache.service.building import Parts
from hicache.service.client import Client, Outcome, Prompt
from hicache.service.engines.link import Link, check_pages
from hicache.service.engines.settings import EngineSettings
from hicache.service.placing import copy_in, copy_out, num_leased, stand_on
from hicache.step_plan import Tokens
from hicache.tree import pack_tokens

GiB: Final = 1 << 30
_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SharingSettings(EngineSettings):
    """See `HiCache.connect`. Times are seconds."""

    lookup_timeout_s: float = 0.25
    load_timeout_s: float = 5.0
    save_timeout_s: float = 10.0
    staging_bytes: int = 64 << 20
    max_pending_saves: int = 64

    def __post_init__(self) -> None:
        self._require_seconds(lookup_timeout_s=60.0, load_timeout_s=600.0, save_timeout_s=600.0)
        self._require_count(staging_bytes=64 * GiB, max_pending_saves=4096)


@dataclass(frozen=True, slots=True)
class Shared:
    """What went to and fro since the cache was connected."""

    is_up: bool
    """Whether the sidecar is believed to answer."""
    loaded_pages: int
    """Copied from the sidecar."""
    saved_pages: int
    """Committed to it."""
    pending_saves: int
    """Requests whose pages wait to be saved."""
    left_out_saves: int
    """Saves that were not begun, as `max_pending_saves` waited."""


class Loop(Protocol):
    """Runs work on the cache's loop and waits for it."""

    def __call__(
        self, work: Coroutine[Any, Any, T], *, timeout_s: float, undo: Callable[[T], None] | None = None
    ) -> T: ...


class Saving:
    """What one request has to be saved. Made by `Sharing.begin`."""

    def __init__(self, namespace: Namespace, prompt: Prompt, num_known: int) -> None:
        self.namespace: Final = namespace
        self.prompt: Final = prompt
        """As far as it was saved. The saver's thread's."""
        self.num_known = num_known
        """Tokens that the sidecar has, or that were handed to the saver."""
        self.tokens: Tokens = np.empty(0, np.int32)
        """What is published. Under the lock of `Sharing`."""
        self.is_queued = False
        """Whether a job will look at it. Under that lock, too."""

    def fork(self) -> "Saving":
        """For another request that goes on from the same tokens."""
        return Saving(self.namespace, Prompt(self.prompt.namespace), self.num_known)


class Sharing:
    """The sidecar's side of one embedded cache. Any thread may call it."""

    def __init__(self, settings: SharingSettings, parts: Parts, run: Loop) -> None:
        """Raises `BadRequest`; with `settings.strict` whatever keeps the sidecar from being used."""
        layout = parts.cache.layout
        if settings.staging_bytes < layout.page_bytes:
            raise BadRequest(
                "staging_bytes", f"{settings.staging_bytes} do not hold a page of {layout.page_bytes}"
            )
        self._settings: Final = settings
        self._parts: Final = parts
        self._run: Final = run
        self._page_size: Final = layout.page_size
        self._changed: Final = threading.Condition()
        self._pending = self._left_out = self._loaded = self._saved = 0
        self._closing_at = float("inf")
        self._link: Final = Link(
            settings, name="embedded", staging_bytes=settings.staging_bytes, check=check_pages(layout)
        )
        self._saver: Final = ThreadPoolExecutor(1, "hicache-save")

    @property
    def shared(self) -> Shared:
        """What went to and fro."""
        with self._changed:
            return Shared(self._link.is_up, self._loaded, self._saved, self._pending, self._left_out)

    # -- in ---------------------------------------------------------------------------------------------------------

    def begin(self, namespace: Namespace, tokens: Tokens, *, timeout_s: float) -> Saving | None:
        """A request begins: bring what the sidecar has of its prompt beyond what is here to host memory. Waits at most
        for the times of the settings and `timeout_s`. None for a namespace that is not shared."""
        name = self._name_there(namespace)
        if name is None:
            return None
        num_known = 0
        # The last token is computed in any case, so the page that it ends is worth nothing.
        num_pages = max(0, len(tokens) - 1) // self._page_size
        wanted = pack_tokens(tokens)[: num_pages * self._page_size]
        if num_pages and self._link.is_up:
            try:
                num_known = self._fetch(namespace, name, wanted, timeout_s)
            except HicacheError as error:  # of this process's own tiers
                _log.info("hicache: nothing was loaded: %s", error)
        return Saving(namespace, Prompt(name), num_known)

    def _name_there(self, namespace: Namespace) -> Namespace | None:
        """The namespace as the sidecar is told it, where the session's tenant is added."""
        if namespace.tenant not in ("", self._settings.tenant):
            return None
        return replace(namespace, tenant="")

    def _fetch(self, namespace: Namespace, name: Namespace, tokens: Tokens, timeout_s: float) -> int:
        """Tokens that the sidecar has of `tokens`, after as many of them as could be are here."""
        prompt = Prompt(name, np.ascontiguousarray(tokens).data)
        lookup_s = min(timeout_s, self._settings.lookup_timeout_s)
        found = self._link.call(lambda client: client.lookup(prompt, timeout_s=lookup_s))
        if found is None or not found.num_tokens:
            return 0
        tokens = tokens[: found.num_tokens]
        deadline = time.monotonic() + min(timeout_s, self._settings.load_timeout_s)
        cache = self._parts.cache

        async def stand() -> Lease:
            return stand_on(cache, namespace, tokens)

        async def leave() -> None:
            cache.release(standing)

        standing = self._run(stand(), timeout_s=timeout_s, undo=cache.release)
        try:
            self._link.call(lambda client: self._load(client, namespace, prompt, tokens, standing, deadline))
        finally:
            self._run(leave(), timeout_s=timeout_s)
        return found.num_tokens

    def _load(
        self, client: Client, namespace: Namespace, prompt: Prompt, tokens: Tokens, standing: Lease, deadline: float
    ) -> None:
        cache, host = self._parts.cache, self._parts.host

        async def count() -> int:
            return num_leased(cache, standing)

        left_s = deadline - time.monotonic()
        done, num_pages = self._run(count(), timeout_s=left_s), len(tokens) // self._page_size
        while done < num_pages and (left_s := deadline - time.monotonic()) > 0:
            # Where a lease holds less than all, as one session may not have all of the arena, the rest follows.
            with client.acquire(prompt, first_page=done, timeout_s=left_s) as lease:
                if lease.first_page != done or not len(lease):
                    return
                pages = lease[: num_pages - done]
                end = (done + len(pages)) * self._page_size
                copying = copy_in(
                    cache, host, namespace, tokens[:end], pages, standing,
                    check=lease.check, deadline=cache.clock.monotonic() + left_s,
                )  # fmt: skip
                num_copied = self._run(copying, timeout_s=left_s)
            with self._changed:
                self._loaded += num_copied
            done += num_copied
            if num_copied < len(pages):
                return

    # -- out --------------------------------------------------------------------------------------------------------

    def published(self, saving: Saving, tokens: Tokens) -> None:
        """A request has published `tokens`, whole pages. Queues them to be saved; does not wait."""
        if len(tokens) <= saving.num_known or not self._link.is_up:
            return
        with self._changed:
            is_left_out = not saving.is_queued and self._pending >= self._settings.max_pending_saves
            if is_left_out or self._closing_at < float("inf"):
                self._left_out += 1
                return
            saving.num_known, saving.tokens = len(tokens), tokens
            if saving.is_queued:
                return
            saving.is_queued = True
            self._pending += 1
        self._saver.submit(self._save, saving)

    def wait_saved(self, timeout_s: float) -> bool:
        """Wait until nothing is queued to be saved; whether that was so within `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def close(self) -> None:
        """Save what is queued, within the time of one save, and end the session."""
        with self._changed:
            self._closing_at = time.monotonic() + self._settings.save_timeout_s
        self._saver.shutdown()
        self._link.close()

    # -- the saver's thread -----------------------------------------------------------------------------------------

    def _save(self, saving: Saving) -> None:
        try:
            with self._changed:
                saving.is_queued = False
                tokens = saving.tokens
            deadline = min(self._closing_at, time.monotonic() + self._settings.save_timeout_s)
            if deadline > time.monotonic():
                saving.prompt.extend(np.ascontiguousarray(tokens[len(saving.prompt) :]).data)
                self._link.call(lambda client: self._store(client, saving, tokens, deadline))
        except Exception:
            _log.exception("hicache: a save failed")
        finally:
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()

    def _store(self, client: Client, saving: Saving, tokens: Tokens, deadline: float) -> None:
        """Store the pages of `tokens` that the sidecar does not have, as many as it takes."""
        end = len(tokens)
        while end and (left_s := deadline - time.monotonic()) > 0:
            with client.reserve(saving.prompt, num_tokens=end, timeout_s=left_s) as reservation:
                if reservation.outcome is not Outcome.ACCEPTED:
                    return
                first_page, num_pages = reservation.first_page, len(reservation)
                reading = copy_out(self._parts.cache, saving.namespace, tokens, first_page, list(reservation))
                num_read = self._run(reading, timeout_s=left_s)
                if num_read < num_pages:
                    # The rest has left this process. What is here is asked room for once more, if it is anything.
                    end = (first_page + num_read) * self._page_size if num_read else 0
                    continue
                left_s = max(0.01, deadline - time.monotonic())
                if reservation.commit(timeout_s=left_s).outcome is Outcome.REFUSED:
                    return
            with self._changed:
                self._saved += num_pages
