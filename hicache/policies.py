"""Eviction policies by name, one instance a tier.

    lru      what was used longest ago leaves first
    slru     the same, but what was used again is protected while it fits into its share (`hicache.policy.slru`)
    s3-fifo  what was not used while it stood in a small queue of new pages (`hicache.policy.s3fifo`)
    lrfu     what has the smallest sum of its uses, each worth half after so many others (`hicache.policy.lrfu`)
    value    what is least likely to be read again soon, by its own uses and by its class (`hicache.policy.value`), as
             long as that finds what lru would find (`hicache.policy.guard`; default)

Each keeps the pages of one tenant; whose turn it is, and what callers care for, is decided above it
(`hicache.policy.shared`). All of them are fed by the tree with the nodes that may leave, those that ask for it with
every node that enters or leaves a tier, is split or joined, and by the cache with uses: one for each prompt, when it
has been computed.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from hicache.errors import BadRequest
from hicache.policy.base import EvictionPolicy
from hicache.policy.guard import GuardedPolicy
from hicache.policy.lrfu import LrfuPolicy
from hicache.policy.lru import LruPolicy
from hicache.policy.s3fifo import S3FifoPolicy
from hicache.policy.shared import SharedPolicy
from hicache.policy.slru import SlruPolicy
from hicache.policy.value import ValuePolicy
from hicache.tier import TierId

LRU: Final = "lru"
DEFAULT: Final = "value"
_UNGUARDED: Final[Mapping[str, Callable[[int], EvictionPolicy]]] = {
    LRU: lambda capacity_pages: LruPolicy(),
    "slru": lambda capacity_pages: SlruPolicy(capacity_pages=capacity_pages),
    "s3-fifo": lambda capacity_pages: S3FifoPolicy(capacity_pages=capacity_pages),
    "lrfu": lambda capacity_pages: LrfuPolicy(),
    DEFAULT: lambda capacity_pages: ValuePolicy(),
}
NAMES: Final[Mapping[str, Callable[[int], EvictionPolicy]]] = {
    **_UNGUARDED,
    DEFAULT: lambda capacity_pages: GuardedPolicy(ValuePolicy, capacity_pages=capacity_pages, presumed=True),
}
"""What makes a policy of each name for a tier of so many pages, with its defaults."""


def check_policy(name: object) -> str:
    """The name of a policy. Raises `BadRequest` with those there are."""
    if not isinstance(name, str) or name not in NAMES:
        raise BadRequest("policy", f"{name!r:.80} is none of {', '.join(NAMES)}")
    return name


def policies_named(
    name: str, capacity_pages: Mapping[TierId, int], quotas: Mapping[TierId, Mapping[str, int]] | None = None
) -> dict[TierId, SharedPolicy]:
    """For each tier, which has so many pages, one that keeps each tenant's pages by a policy of that name. `quotas` are
    pages by tier and tenant. Raises `BadRequest` as `check_policy` does."""
    check_policy(name)
    return {
        tier_id: SharedPolicy(
            partial(NAMES[name], num_pages),
            partial(_UNGUARDED[name], num_pages),
            capacity_pages=num_pages,
            quotas=(quotas or {}).get(tier_id),
        )
        for tier_id, num_pages in capacity_pages.items()
    }
