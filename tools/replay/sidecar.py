"""How an engine uses a sidecar, which has no device tier: pages are lent out of the host and copied by the engine, and
what it has computed is stored there, all of it at once."""

from typing import Final

import numpy as np
import numpy.typing as npt

from hicache.cache import Cache, Coverage
from hicache.errors import NoRoom
from hicache.namespace import Namespace
from hicache.residency import Residency
from hicache.tier import HOST

OWNER: Final = "replay"


async def lend(
    cache: Cache, namespace: Namespace, blocks: npt.NDArray[np.int32], *, deadline: float
) -> tuple[Coverage, int]:
    """What is cached of a prompt as it is asked for, and how many blocks can be lent once what was on NVMe has come.
    Waits for that. Raises `DeadlineExceeded`."""
    match = cache.tree.match(namespace, blocks)
    coverage, now = cache.coverage(match), cache.clock.monotonic()
    lease = cache.tree.lease(match, owner=OWNER, deadline=None, now=now)
    try:
        if lease.node is None:
            return coverage, 0
        cache.tree.touch(lease.node, now)
        await cache.promote(lease, max_device_pages=0, deadline=deadline)
        path, num_lent = cache.path(lease), 0
        cache.writing_through.used(path[-1])
        cache.tell_use(lease)
        for node in path:
            if node.residency(HOST) is not Residency.RESIDENT:
                break
            num_lent += node.num_pages
        return coverage, num_lent
    finally:
        cache.release(lease)


async def store(cache: Cache, namespace: Namespace, blocks: npt.NDArray[np.int32], *, deadline: float) -> None:
    """Store what is not cached of a prompt, as much of it as there is room for. Waits for that. Raises `NoRoom` where
    there is none at all."""
    match = cache.tree.match(namespace, blocks)
    first, now = match.num_tokens, cache.clock.monotonic()
    if first == len(blocks):
        return
    lease = cache.tree.lease(match, owner=OWNER, deadline=None, now=now)
    try:
        if lease.node is not None:
            cache.tree.touch(lease.node, now)
        slots = await cache.allocate_up_to(HOST, len(blocks) - first, deadline=deadline)
        if not len(slots):
            raise NoRoom(HOST, pages_asked=len(blocks) - first, pages_free=0)
        now, stored = cache.clock.monotonic(), blocks[: first + len(slots)]
        try:
            inserted = cache.tree.insert(namespace, stored, tier=HOST, slots=slots, first_page=first, now=now)
        except NoRoom:
            cache.free({HOST: slots})
            raise
        cache.writing_through.published(inserted.node)
        cache.free(inserted.freed)
        cache.free({HOST: inserted.duplicates})
    finally:
        cache.release(lease)
