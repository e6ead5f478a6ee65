"""A guard around a policy: never measurably worse than LRU.

A shadow says what the tier would hold and find had it been kept by LRU: an LRU list of prefixes with the tier's
capacity, without pages. The inner policy may make the tier differ from it, by a number of pages that it earns:

    apart    pages that the shadow holds and the tier does not: what the inner policy bets on
    balance  pages found by the tier, less those found by the shadow but for the share `TOLERANCE`; at most `CREDIT` of
             the capacity
    slack    how far apart both may be: `START` of the capacity and `GAIN` times the balance, and not below 0

Victims come in the order of the inner policy while one page more would be within the slack, else in LRU order, which
the guard keeps all the while and which brings the tier back to the shadow. So an inner policy that bets well soon rules
alone, and one that does not is left with `TOLERANCE`, by which it can still show that it has recovered. A bet that was
lost shows only when the pages are missed, much later: that is why bets are bounded, and not only what was lost.

The shadow remembers at most `SHADOW_MAX` prefixes. Where more fit into the tier, it looks at a sample, chosen by a hash
of the prefix and halved as often as needed, with as small a share of the capacity. Both sides of the account then count
the sample alone.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from hicache.collector import untrack
from hicache.errors import BadRequest
from hicache.node import Box, Node
from hicache.policy.base import EvictionPolicy, HearsHints, HearsResidency, HearsShape, HearsUses, Hint, Use
from hicache.policy.history import prefix_of
from hicache.policy.lru import LruPolicy

START: Final = 1 / 16
GAIN: Final = 4.0
CREDIT: Final = 1 / 2
TOLERANCE: Final = 0.002
SHADOW_MAX: Final = 1 << 14
"""Prefixes in the shadow. At about 200 bytes each, 3 MB when it is full."""
_HASHES: Final = 1 << 32


class GuardedPolicy:
    """Evicts in the order of `inner` as long as that finds at least what LRU would, else in LRU order.

    Args:
        inner: the policy that is trusted at first. It is told of all that the guard is told of.
        capacity_pages: pages of the tier.
        shadow_max: prefixes that the shadow remembers.
    """

    def __init__(self, inner: EvictionPolicy, *, capacity_pages: int, shadow_max: int = SHADOW_MAX) -> None:
        if capacity_pages < 1:
            raise BadRequest("capacity_pages", f"{capacity_pages} is below 1")
        if shadow_max < 1:
            raise BadRequest("shadow_max", f"{shadow_max} is below 1")
        self._inner = inner
        self._inner_uses = inner if isinstance(inner, HearsUses) else None
        self._inner_shape = inner if isinstance(inner, HearsShape) else None
        self._inner_residency = inner if isinstance(inner, HearsResidency) else None
        self._inner_hints = inner if isinstance(inner, HearsHints) else None
        self._lru = LruPolicy()
        self._shadow = _Shadow(capacity_pages, shadow_max)
        self._fresh: dict[Box, bool] = {}  # every node of the tier: whether the use that brought it is still to be told
        self._listed: dict[Box, None] = {}
        untrack(self._fresh)
        untrack(self._listed)
        self._capacity = capacity_pages
        self._balance = 0.0  # pages

    @property
    def trusts_inner(self) -> bool:
        """Whether victims come in the order of the inner policy now."""
        slack = START * self._capacity + GAIN * self._balance
        return self._shadow.pages_apart + 1 <= slack * self._shadow.share

    @property
    def num_remembered(self) -> int:
        """Prefixes in the shadow now."""
        return len(self._shadow)

    # -- what the guard is told, handed on ----------------------------------------------------------------------------

    def add(self, node: Node, now: float) -> None:
        self._listed[node.box] = None
        self._lru.add(node, now)
        self._inner.add(node, now)

    def discard(self, node: Node) -> None:
        self._listed.pop(node.box, None)
        self._lru.discard(node)
        self._inner.discard(node)

    def touch(self, node: Node, now: float) -> None:
        self._lru.touch(node, now)
        self._inner.touch(node, now)

    def split(self, upper: Node, lower: Node) -> None:
        if lower.box in self._fresh:
            self._fresh[upper.box] = self._fresh[lower.box]
        self._shadow.split(upper, lower, lower.box in self._fresh)
        if self._inner_shape is not None or lower.box in self._listed:
            self._inner.split(upper, lower)

    def entered(self, node: Node) -> None:
        self._fresh[node.box] = True
        self._shadow.entered(node)
        if self._inner_residency is not None:
            self._inner_residency.entered(node)

    def left(self, node: Node) -> None:
        del self._fresh[node.box]
        self._shadow.left(node)
        if self._inner_residency is not None:
            self._inner_residency.left(node)

    def joined(self, upper: Node, lower: Node) -> None:
        if self._fresh.pop(upper.box, False):
            self._fresh[lower.box] = True
        self._shadow.joined(upper, lower)
        if self._inner_shape is not None:
            self._inner_shape.joined(upper, lower)

    def hinted(self, path: Sequence[Node], hint: Hint, now: float) -> None:
        if self._inner_hints is not None:
            self._inner_hints.hinted(path, hint, now)

    def used(self, use: Use) -> None:
        shadow, fresh = self._shadow, self._fresh
        real_pages = shadow_pages = 0
        # Tail before head, so that heads leave the shadow last.
        for node in reversed(use.path):
            is_fresh = fresh.get(node.box)
            if is_fresh:
                fresh[node.box] = False
            if shadow.samples(node):
                shadow_pages += shadow.use(node, is_fresh is not None)
                if is_fresh is False:
                    real_pages += node.num_pages
        shadow.shrink()
        balance = self._balance + (real_pages - (1 - TOLERANCE) * shadow_pages) / shadow.share
        self._balance = min(max(balance, -START / GAIN * self._capacity), CREDIT * self._capacity)
        if self._inner_uses is not None:
            self._inner_uses.used(use)

    # -- what comes of it ---------------------------------------------------------------------------------------------

    def victims(self) -> Iterator[Node]:
        return self._inner.victims() if self.trusts_inner else self._lru.victims()


@dataclass(slots=True)
class _Held:
    """A prefix that LRU would hold."""

    num_pages: int
    in_tier: bool


class _Shadow:
    """An LRU list of the prefixes that a sample holds, and which of them the tier holds."""

    def __init__(self, capacity_pages: int, shadow_max: int) -> None:
        self._held: OrderedDict[bytes, _Held] = OrderedDict()  # used longest ago first
        self._pages = 0
        self._capacity = capacity_pages
        self._shadow_max = shadow_max
        self.pages_apart = 0
        """Pages of the sample that LRU would hold and the tier does not."""
        self.share = 1.0
        """Of all prefixes, those in the sample."""

    def __len__(self) -> int:
        return len(self._held)

    def samples(self, node: Node) -> bool:
        """Whether a node is in the sample."""
        return self.share == 1.0 or _hash(prefix_of(node)) < self.share * _HASHES

    def use(self, node: Node, in_tier: bool) -> int:
        """A node of the sample was used. Returns how many of its pages LRU would have had."""
        prefix, num_pages = prefix_of(node), node.num_pages
        known = self._drop(prefix)
        self._hold(prefix, num_pages, in_tier)
        return min(known, num_pages)

    def left(self, node: Node) -> None:
        """The tier does not hold the node any longer."""
        held = self._held.get(prefix_of(node))
        if held is not None and held.in_tier:
            held.in_tier = False
            self.pages_apart += held.num_pages

    def entered(self, node: Node) -> None:
        """The tier holds the node from now on."""
        held = self._held.get(prefix_of(node))
        if held is not None and not held.in_tier:
            held.in_tier = True
            self.pages_apart -= held.num_pages

    def shrink(self) -> None:
        """Drop what LRU would have evicted, and the half of a sample that has grown too large."""
        while self._pages > self._capacity * self.share and self._held:
            self._drop(next(iter(self._held)))
        while len(self._held) > self._shadow_max:
            self.share /= 2
            below = self.share * _HASHES
            for prefix in [each for each in self._held if _hash(each) >= below]:
                self._drop(prefix)

    def split(self, upper: Node, lower: Node, in_tier: bool) -> None:
        """`upper` is new above `lower`, with pages that were its own."""
        held = self._held.get(prefix_of(lower))
        if held is None:
            return
        gone = held.num_pages - min(held.num_pages, lower.num_pages)
        held.num_pages -= gone
        self._pages -= gone
        if not held.in_tier:
            self.pages_apart -= gone
        if self.samples(upper):
            # Used no earlier than `lower`; in the order of the list it stands a little too well.
            self._hold(prefix_of(upper), upper.num_pages, in_tier)

    def joined(self, upper: Node, lower: Node) -> None:
        """`lower` is about to take the pages of `upper`."""
        self._drop(prefix_of(upper))
        held = self._held.get(prefix_of(lower))
        if held is not None:
            held.num_pages += upper.num_pages
            self._pages += upper.num_pages
            if not held.in_tier:
                self.pages_apart += upper.num_pages

    def _hold(self, prefix: bytes, num_pages: int, in_tier: bool) -> None:
        self._held[prefix] = _Held(num_pages, in_tier)
        self._pages += num_pages
        if not in_tier:
            self.pages_apart += num_pages

    def _drop(self, prefix: bytes) -> int:
        """Forget a prefix; returns how many pages it had."""
        held = self._held.pop(prefix, None)
        if held is None:
            return 0
        self._pages -= held.num_pages
        if not held.in_tier:
            self.pages_apart -= held.num_pages
        return held.num_pages


def _hash(prefix: bytes) -> int:
    return crc32(prefix)
