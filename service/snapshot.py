"""What a cache holds and has done, as JSON-able values: for `hicache stats`, `hicache tree`, and whoever reads JSON.

`stats_of` gives

    {"tiers": {TIER: {"capacity_pages", "used_pages", "capacity_bytes", "used_bytes", "counters": {NAME: count},
                       "down" (why the tier takes no new pages, or null), "tenants": {TENANT: pages}}},
     "lanes": {"host->nvme": {"pages", "bytes", "failed", "cancelled", "queued_pages", "busy_s", "bandwidth"}},
     "pins": {"prefixes", "pages", "pages_max"} (of operators), "num_ranked" (nodes that hints gave another rank),
     "counters": {...}, "num_nodes", "num_leases", "metadata_bytes" (an estimate), "metadata_budget" (bytes or null),
     "durability": {"accepted", "durable"} (numbers of writes and frees on NVMe, or null),
     "recovery": {"pages", "foreign_pages", "orphan_pages", "refused_pages", "namespaces", "nodes", "seconds"} (what
     came back when the cache was opened)}

with tiers fast to slow. `used_pages` counts every slot that is not free: pages of the tree, pages that requests are
computing, and pages on their way in. `moment_of` gives `"format"`, `"time"` (seconds since 1970, UTC) and `"layout"`;
`snapshot_of` has both, `"leases_by_owner"` ({OWNER: count}), and `"nodes"`, parents before children:

    {"id", "parent" (id or null), "namespace" (hex digest), "tenant", "first_token", "num_tokens", "tokens" (own ids),
     "bytes", "residency": {TIER: "resident" | "arriving" | "condemned" | "absent"}, "age_s" (since its last use),
     "uses" (requests that were given it), "priority" and "retained_s" (by hints; null for not retained), "leases",
     "published" (to other tenants),
     "reported": {"device:SESSION/RANK": pages it says it has}}
"""

import asyncio
import dataclasses
from typing import Any, Final

from hicache.cache import Cache
from hicache.node import Node
from hicache.tier import SupportsCounters, SupportsDown

FORMAT: Final = 1
"""Version of the snapshot; raised when a reader of the old form would misread the new one."""
BATCH: Final = 500
"""Nodes looked at before others get their turn on the loop."""


def stats_of(cache: Cache) -> dict[str, Any]:
    """Occupancy, lanes and counters of a cache. Called on its loop; does not wait."""
    page_bytes = cache.layout.page_bytes
    tiers = {}
    for tier_id, tier in cache.tiers.items():
        used_pages = tier.capacity_pages - tier.num_free
        tiers[str(tier_id)] = {
            "capacity_pages": tier.capacity_pages,
            "used_pages": used_pages,
            "capacity_bytes": tier.capacity_pages * page_bytes,
            "used_bytes": used_pages * page_bytes,
            "counters": tier.counters() if isinstance(tier, SupportsCounters) else {},
            "down": tier.down if isinstance(tier, SupportsDown) else None,
            "tenants": cache.pages_by_tenant(tier_id),
        }
    lanes = {}
    for lane in cache.lanes:
        stats = lane.stats
        lanes[lane.name] = {
            "pages": stats.pages,
            "bytes": stats.bytes,
            "failed": stats.failed,
            "cancelled": stats.cancelled,
            "queued_pages": stats.queued_pages,
            "busy_s": stats.busy_s,
            "bandwidth": stats.bandwidth,
        }
    durability = cache.durability
    return {
        "tiers": tiers,
        "lanes": lanes,
        "counters": dataclasses.asdict(cache.counters),
        "pins": {"prefixes": cache.num_pins, "pages": cache.pinned_pages, "pages_max": cache.pinned_pages_max},
        "num_ranked": cache.tree.num_ranked,
        "num_nodes": cache.tree.num_nodes,
        "num_leases": cache.tree.num_leases,
        "metadata_bytes": cache.tree.metadata_bytes,
        "metadata_budget": cache.tree.metadata_budget,
        "durability": dataclasses.asdict(durability) if durability is not None else None,
        "recovery": dataclasses.asdict(cache.recovered),
    }


def moment_of(cache: Cache) -> dict[str, Any]:
    """What a reader must know to read the rest: the format, when it was, and the layout of a page."""
    layout = cache.layout
    return {
        "format": FORMAT,
        "time": cache.clock.wall(),
        "layout": {
            "page_size": layout.page_size,
            "page_bytes": layout.page_bytes,
            "dtype": layout.dtype.value,
            "num_layers": layout.num_layers,
        },
    }


async def snapshot_of(cache: Cache) -> dict[str, Any]:
    """The whole tree beside `stats_of`. Others run between batches of nodes, so it may be of several moments."""
    layout = cache.layout
    ids: dict[Node, int] = {}
    nodes: list[dict[str, Any]] = []
    now = cache.clock.monotonic()
    for batch in cache.tree.walk(batch=BATCH):
        for info in batch:
            node, parent = info.node, info.node.parent
            ids[node] = len(nodes)
            nodes.append({
                "id": len(nodes),
                "parent": ids.get(parent) if parent is not None else None,
                "namespace": info.namespace.hex(),
                "tenant": info.tenant,
                "first_token": info.first_page * layout.page_size,
                "num_tokens": info.num_pages * layout.page_size,
                "tokens": cache.tree.own_tokens_of(node).tolist(),
                "bytes": info.num_pages * layout.page_bytes,
                "residency": {
                    str(tier_id): state.name.lower()
                    for tier_id, state in zip(cache.tiers, info.residency, strict=True)
                },
                "age_s": max(0.0, now - info.last_access),
                "uses": info.num_uses,
                "priority": cache.tree.priority(node),
                "retained_s": max(0.0, until - now) if (until := cache.tree.retained_until(node)) is not None else None,
                "leases": info.num_leases,
                "published": info.is_published,
                "reported": {str(instance): pages for instance, pages in info.reported.items()},
            })
        await asyncio.sleep(0)
    own = {"leases_by_owner": cache.tree.leases_by_owner, "nodes": nodes}
    return {**moment_of(cache), **stats_of(cache), **own}
