"""A guard around a policy: never measurably worse than LRU.

Two shadows say what the tier would find, were it kept by the inner policy or by LRU: tiers without pages that are told
of every prompt. `ahead` is what the inner policy's shadow found more, in pages, but for the share `TOLERANCE` of LRU's.
It goes up and down by chance as well, so what it has to reach is measured by its deviation: the root of the sum of the
squares of its steps, of the last `DEVIATION_PROMPTS` prompts.

    LRU order    `ahead` never falls below 0. The inner policy is trusted when it reaches `RISE` deviations, which
                 happens by chance now and then. `CLEAR_RISE` are asked for where being wrong once more would make the
                 pages that were lost more than `STAKE` of all that LRU has found.
    inner order  `ahead` begins at 0 and is at most `CREDIT` of the capacity, as merits of long ago excuse nothing. When
                 it is below minus `FALL` deviations, the inner policy has fallen.

Neither is less than the margin: `MARGIN` of the capacity and the average prompt. A policy that is known to be good may
be presumed so. Then it rules from the start, falls at `PRESUMED_FALL` deviations, and rises again at `RISE` whatever
was lost: in a tier of few prompts chance decides for long what is seen there, and waiting for evidence costs more than
being wrong. The price is paid where such a policy is no good after all.

A shadow has as many pages as the tier but at most `SHADOW_PAGES`. In a larger tier it stands for a sample of the
prompts, chosen by a hash of where they part from the common beginning, with as small a share of the capacity.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final
from zlib import crc32

from hicache.errors import BadRequest
from hicache.node import Node
from hicache.policy.base import (
    EvictionPolicy,
    HearsCapacity,
    HearsHints,
    HearsResidency,
    HearsShape,
    HearsUses,
    Hint,
    Use,
)
from hicache.policy.history import prefix_of
from hicache.policy.lru import LruPolicy
from hicache.policy.shadow import ShadowTier

MARGIN: Final = 1 / 256
AVERAGE_PROMPTS: Final = 64
"""Prompts over which their length is averaged."""
DEVIATION_PROMPTS: Final = 512
RISE: Final = 2.0
CLEAR_RISE: Final = 4.0
STAKE: Final = 0.005
FALL: Final = 0.5
PRESUMED_FALL: Final = 1.0
CREDIT: Final = 1 / 10
TOLERANCE: Final = 0.002
SHADOW_PAGES: Final = 1 << 15
"""Pages, and so nodes at most, that each shadow stands for: 20 MB where every page is a node of its own."""
_HASHES: Final = 1 << 32


class GuardedPolicy:
    """Evicts in the order of an inner policy as long as that would find at least what LRU would, else in LRU order.

    Args:
        make: makes the inner policy, once for the tier and once for its shadow. The first is told of all that the guard
            is told of.
        capacity_pages: pages of the tier.
        shadow_pages: most pages that a shadow stands for.
        presumed: whether the inner policy is known to be good.
    """

    def __init__(
        self,
        make: Callable[[], EvictionPolicy],
        *,
        capacity_pages: int,
        shadow_pages: int = SHADOW_PAGES,
        presumed: bool = False,
    ) -> None:
        if capacity_pages < 1:
            raise BadRequest("capacity_pages", f"{capacity_pages} is below 1")
        if shadow_pages < 1:
            raise BadRequest("shadow_pages", f"{shadow_pages} is below 1")
        self._inner = inner = make()
        self._inner_uses = inner if isinstance(inner, HearsUses) else None
        self._inner_shape = inner if isinstance(inner, HearsShape) else None
        self._inner_residency = inner if isinstance(inner, HearsResidency) else None
        self._inner_capacity = inner if isinstance(inner, HearsCapacity) else None
        self._inner_hints = inner if isinstance(inner, HearsHints) else None
        self._lru = LruPolicy()
        self._ahead = 0.0  # pages
        self._squares = 0.0  # of the steps of `ahead`
        self._lru_found = 0.0  # pages
        self._lost = 0.0  # pages, by what has fallen
        self._presumed = self._trusts_inner = presumed
        self._prompts = 0
        self._prompt_pages = 0.0
        self._shadow_pages = shadow_pages
        self._capacity = capacity_pages
        self._shadow_inner = make()
        self._shadows = ShadowTier(self._shadow_inner, 0), ShadowTier(LruPolicy(), 0)
        self._fit()

    @property
    def trusts_inner(self) -> bool:
        """Whether victims come in the order of the inner policy now."""
        return self._trusts_inner

    @property
    def num_remembered(self) -> int:
        """Nodes in both shadows now."""
        return sum(map(len, self._shadows))

    # -- what the guard is told, handed on ----------------------------------------------------------------------------

    def add(self, node: Node, now: float) -> None:
        self._lru.add(node, now)
        self._inner.add(node, now)

    def discard(self, node: Node) -> None:
        self._lru.discard(node)
        self._inner.discard(node)

    def touch(self, node: Node, now: float) -> None:
        self._lru.touch(node, now)
        self._inner.touch(node, now)

    def split(self, upper: Node, lower: Node) -> None:
        for shadow in self._shadows:
            shadow.split(upper, lower)
        if self._inner_shape is not None or lower in self._lru:
            self._inner.split(upper, lower)

    def entered(self, node: Node) -> None:
        if self._inner_residency is not None:
            self._inner_residency.entered(node)

    def left(self, node: Node) -> None:
        if self._inner_residency is not None:
            self._inner_residency.left(node)

    def joined(self, upper: Node, lower: Node) -> None:
        if self._inner_shape is not None:
            self._inner_shape.joined(upper, lower)

    def hinted(self, path: Sequence[Node], hint: Hint, now: float) -> None:
        if self._inner_hints is not None:
            self._inner_hints.hinted(path, hint, now)
            self._shadows[0].hinted(path, hint, now)

    def resized(self, capacity_pages: int) -> None:
        self._ahead *= capacity_pages / self._capacity
        self._capacity = capacity_pages
        self._fit()
        if self._inner_capacity is not None:
            self._inner_capacity.resized(capacity_pages)

    def used(self, use: Use) -> None:
        if self._inner_uses is not None:
            self._inner_uses.used(use)
        self._prompts += 1
        num_pages = sum([node.num_pages for node in use.path])
        self._prompt_pages += (num_pages - self._prompt_pages) / min(self._prompts, AVERAGE_PROMPTS)
        if self._share < 1 and crc32(prefix_of(use.path[min(1, len(use.path) - 1)])) >= self._share * _HASHES:
            return
        inner_pages, lru_pages = (shadow.use(use) for shadow in self._shadows)
        self._lru_found += lru_pages / self._share
        self._judge((inner_pages - (1 - TOLERANCE) * lru_pages) / self._share)

    def victims(self) -> Iterator[Node]:
        return self._inner.victims() if self._trusts_inner else self._lru.victims()

    def _judge(self, more_pages: float) -> None:
        """Take into account how many pages more the inner policy would have found of one prompt."""
        self._ahead += more_pages
        self._squares += more_pages**2 - self._squares / DEVIATION_PROMPTS
        deviation = self._squares**0.5
        margin = MARGIN * self._capacity + self._prompt_pages
        fall = max(margin, (PRESUMED_FALL if self._presumed else FALL) * deviation)
        if not self._trusts_inner:
            self._ahead = max(0.0, self._ahead)
            is_cheap = self._presumed or self._lost + fall <= STAKE * self._lru_found
            if self._ahead >= max(margin, (RISE if is_cheap else CLEAR_RISE) * deviation):
                self._trusts_inner, self._ahead = True, 0.0
            return
        self._ahead = min(self._ahead, CREDIT * self._capacity)
        if self._ahead < -fall:
            self._lost -= self._ahead
            self._trusts_inner, self._ahead = False, 0.0

    def _fit(self) -> None:
        """Give the shadows their share of the tier."""
        self._share = min(1.0, self._shadow_pages / self._capacity)
        capacity_pages = max(1, int(self._capacity * self._share))
        for shadow in self._shadows:
            shadow.capacity_pages = capacity_pages
        if isinstance(self._shadow_inner, HearsCapacity):
            self._shadow_inner.resized(capacity_pages)
