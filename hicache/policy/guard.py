"""A guard around a policy: never measurably worse than LRU.

A shadow says what the tier would hold and find had it been kept by LRU: an LRU list of prefixes with the tier's
capacity, without pages. The inner policy may make the tier differ from it, by a number of pages that it earns:

    apart    pages that left the tier and that the shadow still holds: what the inner policy bets on
    balance  pages found by the tier or a faster one, less those found by the shadow but for the share `TOLERANCE`; at
             most `CREDIT` of the capacity
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
        self._inner_capacity = inner if isinstance(inner, HearsCapacity) else None
        self._inner_hints = inner if isinstance(inner, HearsHints) else None
        self._lru = LruPolicy()
        self._shadow = _Shadow(capacity_pages, shadow_max)
        self._listed: dict[Box, None] = {}
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
        self._shadow.split(upper, lower)
        if self._inner_shape is not None or lower.box in self._listed:
            self._inner.split(upper, lower)

    def entered(self, node: Node) -> None:
        self._shadow.entered(node)
        if self._inner_residency is not None:
            self._inner_residency.entered(node)

    def left(self, node: Node) -> None:
        self._shadow.left(node)
        if self._inner_residency is not None:
            self._inner_residency.left(node)

    def joined(self, upper: Node, lower: Node) -> None:
        self._shadow.joined(upper, lower)
        if self._inner_shape is not None:
            self._inner_shape.joined(upper, lower)

    def hinted(self, path: Sequence[Node], hint: Hint, now: float) -> None:
        if self._inner_hints is not None:
            self._inner_hints.hinted(path, hint, now)

    def resized(self, capacity_pages: int) -> None:
        self._balance *= capacity_pages / self._capacity
        self._capacity = self._shadow.capacity_pages = capacity_pages
        if self._inner_capacity is not None:
            self._inner_capacity.resized(capacity_pages)

    def used(self, use: Use) -> None:
        shadow, found_pages = self._shadow, use.found_pages
        begin = sum([node.num_pages for node in use.path])
        real_pages = shadow_pages = 0
        # Tail before head, so that heads leave the shadow last.
        for node in reversed(use.path):
            begin -= node.num_pages
            if shadow.samples(node):
                shadow_pages += shadow.use(node)
                if found_pages is not None:
                    real_pages += min(max(0, found_pages - begin), node.num_pages)
        shadow.shrink()
        if found_pages is not None:
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
    has_left: bool = False
    """Whether the tier has given it up since its last use."""


class _Shadow:
    """An LRU list of the prefixes that a sample holds, and which of them have left the tier."""

    def __init__(self, capacity_pages: int, shadow_max: int) -> None:
        self.capacity_pages = capacity_pages
        """Of the whole tier."""
        self.pages_apart = 0
        """Pages of the sample that LRU would hold and that have left the tier."""
        self.share = 1.0
        """Of all prefixes, those in the sample."""
        self._held: OrderedDict[bytes, _Held] = OrderedDict()  # used longest ago first
        self._pages = 0
        self._shadow_max = shadow_max

    def __len__(self) -> int:
        return len(self._held)

    def samples(self, node: Node) -> bool:
        """Whether a node is in the sample."""
        return self.share == 1.0 or crc32(prefix_of(node)) < self.share * _HASHES

    def use(self, node: Node) -> int:
        """A node of the sample was used. Returns how many of its pages LRU would have had."""
        prefix, num_pages = prefix_of(node), node.num_pages
        known = self._drop(prefix)
        self._hold(prefix, _Held(num_pages))
        return min(known, num_pages)

    def left(self, node: Node) -> None:
        """The tier does not hold the node any longer."""
        self._mark(node, True)

    def entered(self, node: Node) -> None:
        """The tier holds the node from now on."""
        self._mark(node, False)

    def shrink(self) -> None:
        """Drop what LRU would have evicted, and the half of a sample that has grown too large."""
        while self._pages > self.capacity_pages * self.share and self._held:
            self._drop(next(iter(self._held)))
        while len(self._held) > self._shadow_max:
            self.share /= 2
            below = self.share * _HASHES
            for prefix in [each for each in self._held if crc32(each) >= below]:
                self._drop(prefix)

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` is new above `lower`, with pages that were its own."""
        held = self._held.get(prefix_of(lower))
        if held is None:
            return
        self._resize(held, min(held.num_pages, lower.num_pages))
        if self.samples(upper):
            # Used no earlier than `lower`; in the order of the list it stands a little too well.
            self._hold(prefix_of(upper), _Held(upper.num_pages, held.has_left))

    def joined(self, upper: Node, lower: Node) -> None:
        """`lower` is about to take the pages of `upper`."""
        self._drop(prefix_of(upper))
        held = self._held.get(prefix_of(lower))
        if held is not None:
            self._resize(held, lower.num_pages + upper.num_pages)

    def _hold(self, prefix: bytes, held: _Held) -> None:
        self._held[prefix] = held
        self._pages += held.num_pages
        self.pages_apart += held.num_pages * held.has_left

    def _drop(self, prefix: bytes) -> int:
        """Forget a prefix; returns how many pages it had."""
        held = self._held.pop(prefix, None)
        if held is None:
            return 0
        self._pages -= held.num_pages
        self.pages_apart -= held.num_pages * held.has_left
        return held.num_pages

    def _resize(self, held: _Held, num_pages: int) -> None:
        more = num_pages - held.num_pages
        held.num_pages = num_pages
        self._pages += more
        self.pages_apart += more * held.has_left

    def _mark(self, node: Node, has_left: bool) -> None:
        held = self._held.get(prefix_of(node))
        if held is not None and held.has_left != has_left:
            held.has_left = has_left
            self.pages_apart += held.num_pages if has_left else -held.num_pages
