"""Copies of what another tenant has published, as pages of the tenant who asks: below a page all pages are of its own.

A copy under way has its slots, its leases and a task of the server's own: it goes on to its end, whatever becomes of
the call that began it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import numpy as np
from aiofiles.os import wrap

from hicache.cache import Cache
from hicache.errors import HicacheError
from hicache.lease import Lease
from hicache.namespace import Namespace
from hicache.residency import Residency
from hicache.service.placing import publish_host_pages
from hicache.service.server.session import Tokens
from hicache.tier import HOST, Slots
from hicache.tiers.host import HostTier

ADOPT_PAGES: Final = 64
"""Pages that are copied between two looks at whether they are published still."""
OWNER: Final = "adopting"
"""Who owns the leases meanwhile."""


_log = logging.getLogger(__name__)


class Adopting:
    """Copies published pages in the arena. Belongs to the event loop."""

    def __init__(
        self, cache: Cache, host: HostTier, start: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        """`start`: carry something out that no call waits for any more; it raises nothing."""
        self._cache: Final = cache
        self._host: Final = host
        self._start: Final = start

    async def adopt(self, namespace: Namespace, tokens: Tokens, *, deadline: float) -> None:
        """Copy what others have published of a prompt beyond what is the namespace's own, as far as it can be had by
        `deadline` (monotonic seconds). Raises nothing: what could not be copied is not there."""
        tree = self._cache.tree
        if not tree.num_publications or tree.match(namespace, tokens).owner in (namespace.digest, b""):
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._start(self._carry_out(namespace, tokens.copy(), deadline, done))
        await asyncio.wait([done], timeout=max(0.0, deadline - self._cache.clock.monotonic()))

    async def _carry_out(
        self, namespace: Namespace, tokens: Tokens, deadline: float, done: "asyncio.Future[None]"
    ) -> None:
        cache, now = self._cache, self._cache.clock.monotonic()
        theirs = cache.tree.match(namespace, tokens)
        tokens = tokens[: theirs.num_tokens]
        own = cache.tree.match(namespace, tokens, published=False)
        reading = cache.tree.lease(theirs, owner=OWNER, deadline=None, now=now)
        standing = cache.tree.lease(own, owner=OWNER, deadline=None, now=now)
        try:
            if reading.node is not None:
                cache.tree.touch(reading.node, now, reader=namespace)
            await cache.promote(reading, max_device_pages=0, deadline=deadline)
            first_page, page_size = own.num_tokens // cache.layout.page_size, cache.layout.page_size
            while first_page * page_size < len(tokens):
                end = min(first_page + ADOPT_PAGES, len(tokens) // page_size)
                wanted = tokens[: end * page_size]
                num_copied = await self._copy(namespace, wanted, first_page, reading, standing, deadline)
                if not num_copied:
                    break
                first_page += num_copied
        except HicacheError:
            pass  # what is there is there
        except Exception:
            _log.exception("copying what was published failed")
        finally:
            cache.release(reading)
            cache.release(standing)
            done.set_result(None)

    async def _copy(
        self, namespace: Namespace, tokens: Tokens, first_page: int, reading: Lease, standing: Lease, deadline: float
    ) -> int:
        """Copy pages from `first_page` on to the end of `tokens`, and put them into the tree; how many those were."""
        cache, page_size = self._cache, self._cache.layout.page_size
        sources, nodes, start = list[int](), [], 0
        for node in cache.path(reading):
            if start + node.num_pages > first_page:
                if node.residency(HOST) is not Residency.RESIDENT:
                    break
                nodes.append(node)
                sources += node.slots(HOST).tolist()[max(0, first_page - start) :]
            start += node.num_pages
        sources = sources[: len(tokens) // page_size - first_page]
        if not sources:
            return 0
        pins = cache.pin({HOST: nodes})
        slots: Slots = np.empty(0, np.int32)
        try:
            slots = await cache.allocate_up_to(HOST, len(sources), deadline=deadline)
            await wrap(self._copy_pages)(sources[: len(slots)], slots.tolist())
        except BaseException:
            cache.free({HOST: slots})
            raise
        finally:
            cache.unpin(pins)
        # What has been taken back meanwhile, or lost its beginning, is not published under another name.
        num_standing = sum([node.num_pages for node in cache.path(standing)])
        is_good = reading.node is not None and reading.node.is_published and num_standing == first_page
        if not len(slots) or not is_good:
            cache.free({HOST: slots})
            return 0
        tokens = tokens[: (first_page + len(slots)) * page_size]
        num_pages = publish_host_pages(cache, self._host, namespace, tokens, first_page, slots, standing)
        cache.counters.pages_adopted += num_pages
        return num_pages

    def _copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """In a thread."""
        for source, target in zip(sources, targets, strict=True):
            np.copyto(self._host.array[target], self._host.array[source])
