"""Pages that came from elsewhere, put into the tree, and pages of the tree, copied out. Belongs to the cache's loop."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from hicache.cache import Cache
from hicache.errors import NoRoom
from hicache.lease import Lease
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.step_plan import Tokens
from hicache.tier import HOST, Outcome, PageIdentity, PageRead, PageWrite, Slots, TierId
from hicache.tiers.host import HostTier

OWNER: Final = "sharing"
"""Who owns the leases meanwhile."""


def publish_host_pages(
    cache: Cache, host: HostTier, namespace: Namespace, tokens: Tokens, first_page: int, slots: Slots, standing: Lease
) -> int:
    """Put written host pages into the tree, as those of `tokens` from `first_page` on; how many those were.

    `standing`: a lease on the pages before them, which moves to their end. Without room in the tree's metadata the
    slots are given back.
    """
    tree, now = cache.tree, cache.clock.monotonic()
    identities = identities_of(cache, namespace, tokens, first_page, standing)
    try:
        inserted = tree.insert(namespace, tokens, tier=HOST, slots=slots, first_page=first_page, now=now)
    except NoRoom:
        cache.free({HOST: slots})
        return 0
    for slot, identity in zip(slots.tolist(), identities, strict=True):
        host.declare(slot, host.generation(slot), identity)
    tree.move_lease(standing, inserted.node, now)
    cache.writing_through.published(inserted.node)
    cache.free(inserted.freed)
    cache.free({HOST: inserted.duplicates})
    return len(slots)


def identities_of(
    cache: Cache, namespace: Namespace, tokens: Tokens, first_page: int, standing: Lease
) -> list[PageIdentity]:
    """Of the whole pages of `tokens` from `first_page` on, behind those that `standing` is a lease on."""
    path, page_size = cache.path(standing), cache.layout.page_size
    chain = cache.tree.identities(path[-1])[-1].chain if path else namespace.digest
    identities = []
    for start in range(first_page * page_size, len(tokens), page_size):
        packed = tokens[start : start + page_size].astype("<i4").tobytes()
        identities.append(PageIdentity(namespace.digest, chain, packed))
        chain = identities[-1].chain
    return identities


def stand_on(cache: Cache, namespace: Namespace, tokens: Tokens) -> Lease:
    """A lease on what is the namespace's own of `tokens`: its pages stay in some tier until `cache.release`."""
    own = cache.tree.match(namespace, tokens, published=False)
    return cache.tree.lease(own, owner=OWNER, deadline=None, now=cache.clock.monotonic())


def num_leased(cache: Cache, standing: Lease) -> int:
    """Pages that a lease is on, from the root."""
    return sum(node.num_pages for node in cache.path(standing))


async def copy_in(
    cache: Cache,
    host: HostTier,
    namespace: Namespace,
    tokens: Tokens,
    pages: Sequence[memoryview],
    standing: Lease,
    *,
    check: Callable[[], None],
    deadline: float,
) -> int:
    """Copy pages behind those that `standing` is a lease on into host memory and publish them; how many there was room
    for. `tokens` go up to the end of `pages`. `check` raises what makes the copied bytes worth nothing: then none of
    them is published."""
    page_size = cache.layout.page_size
    first_page = num_leased(cache, standing)
    if (first_page + len(pages)) * page_size != len(tokens):
        return 0  # somebody computed some of them meanwhile, or what stood before them was damaged
    slots = await cache.allocate_up_to(HOST, len(pages), deadline=deadline)
    num_good = 0
    try:
        tokens = tokens[: (first_page + len(slots)) * page_size]
        identities = identities_of(cache, namespace, tokens, first_page, standing)
        writes = [
            PageWrite(slot, host.generation(slot), identity, page)
            for slot, identity, page in zip(slots.tolist(), identities, pages, strict=False)
        ]
        outcomes = await host.write(writes)
        check()
        if num_leased(cache, standing) == first_page:
            num_good = next((at for at, each in enumerate(outcomes) if each is not Outcome.OK), len(outcomes))
    finally:
        cache.free({HOST: slots[num_good:]})
    if not num_good:
        return 0
    good = tokens[: (first_page + num_good) * page_size]
    return publish_host_pages(cache, host, namespace, good, first_page, slots[:num_good], standing)


async def copy_out(
    cache: Cache, namespace: Namespace, tokens: Tokens, first_page: int, buffers: Sequence[memoryview]
) -> int:
    """Copy the pages of `tokens` from `first_page` on into `buffers`, from the fastest tier that has each; how many,
    from the first on, were there whole."""
    match = cache.tree.match(namespace, tokens, published=False)
    by_tier: dict[TierId, list[Node]] = {}
    reads: dict[TierId, list[tuple[int, PageRead]]] = {}
    num_there = min(len(buffers), match.num_tokens // cache.layout.page_size - first_page)
    page = 0
    for node in match.nodes:
        tier_id = cache.fastest(node)
        tier = cache.tiers[tier_id]
        for slot, identity in zip(node.slots(tier_id).tolist(), cache.tree.identities(node), strict=True):
            if 0 <= (index := page - first_page) < num_there:
                read = PageRead(slot, tier.generation(slot), identity, buffers[index])
                reads.setdefault(tier_id, []).append((index, read))
                by_tier.setdefault(tier_id, []).append(node)
            page += 1
    was_copied = np.zeros(len(buffers) + 1, bool)
    pins = cache.pin(by_tier)
    try:
        for tier_id, wanted in reads.items():
            outcomes = await cache.tiers[tier_id].read([read for _, read in wanted])
            was_copied[[index for index, _ in wanted]] = [each is Outcome.OK for each in outcomes]
    finally:
        cache.unpin(pins)
    return int(np.argmin(was_copied))
