"""Eviction policies by name, one instance a tier.

    lru     what was used longest ago leaves first (default)
    lrfu    what has the smallest sum of its uses, each worth half after so many others (`hicache.policy.lrfu`)
    value   what is least likely to be read again soon, by its own uses and by its class (`hicache.policy.value`)

All of them are fed by the tree with the nodes that may leave, and by the cache with uses: one for each prompt, when it
has been computed. Policies that have to hear of every node that enters or leaves a tier (`HearsResidency`) have no name
here, as nobody tells them. What lrfu and value remember belongs to a prefix: where nodes are joined, as they are while
an answer grows behind its prompt, the longer one is a new prefix to them.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from hicache.errors import BadRequest
from hicache.policy.base import EvictionPolicy
from hicache.policy.lrfu import LrfuPolicy
from hicache.policy.lru import LruPolicy
from hicache.policy.value import ValuePolicy
from hicache.tier import TierId

LRU: Final = "lru"
NAMES: Final[Mapping[str, Callable[[], EvictionPolicy]]] = {LRU: LruPolicy, "lrfu": LrfuPolicy, "value": ValuePolicy}
"""What makes a policy of each name, with its defaults."""


def check_policy(name: object) -> str:
    """The name of a policy. Raises `BadRequest` with those there are."""
    if not isinstance(name, str) or name not in NAMES:
        raise BadRequest("policy", f"{name!r:.80} is none of {', '.join(NAMES)}")
    return name


def policies_named(name: str, tiers: Iterable[TierId]) -> dict[TierId, EvictionPolicy]:
    """A policy of that name for each tier. Raises `BadRequest` as `check_policy` does."""
    make = NAMES[check_policy(name)]
    return {tier_id: make() for tier_id in tiers}
