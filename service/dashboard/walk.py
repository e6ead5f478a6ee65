"""One walk after the other through what lies below one branch of a cache's tree, a moment at a time."""

from abc import ABC, abstractmethod
from typing import Any, Final

from hicache.clock import Clock
from hicache.node import Node
from hicache.residency import Residency
from hicache.service.dashboard.heaviest import Branch, Heaviest
from hicache.service.dashboard.pace import Pace
from hicache.tree import HiRadixTree

MAX_BRANCHES: Final = 1_000
"""Branches of one picture."""
MAX_DEPTH: Final = 16
"""Levels of one picture below its focus."""
STEP: Final = 32
"""Prefixes that are looked at before the clock is."""

Key = Node | bytes | None
"""A prefix, a namespace by its digest, or all of them."""


class Round(ABC):
    """A walk through what lies below one branch of a tree, a moment at a time, which begins anew when it ends. Belongs
    to the tree's loop.

    Args:
        key: where it begins.
    """

    def __init__(self, tree: HiRadixTree, clock: Clock, key: Key) -> None:
        self.key: Final = key
        self.is_whole = False
        """Whether a walk has come to its end."""
        self.as_of = clock.monotonic()
        """When the walk began that came to its end last, or the first one, monotonic seconds."""
        self.num_met = 0
        """Prefixes that the walk under way has met."""
        self._tree: Final = tree
        self._clock: Final = clock
        self._start()

    def _start(self) -> None:
        self._began, self.num_met = self._clock.monotonic(), 0
        self._nodes = self._tree.nodes(self.key)
        self._begin()

    async def go_on(self, pace: Pace, until: float) -> None:
        """Walk on to the end, or until then, monotonic seconds."""
        while True:
            for _ in range(STEP):
                node = next(self._nodes, None)
                if node is None:
                    self._end()
                    self.is_whole, self.as_of = True, self._began
                    self._start()
                    return
                self.num_met += 1
                if node.is_live:
                    self._meet(node)
            await pace.rest()
            if self._clock.monotonic() >= until:
                return

    @abstractmethod
    def _begin(self) -> None:
        """A walk begins."""

    @abstractmethod
    def _meet(self, node: Node) -> None:
        """The next node, which is in the tree; those above it were met before, if they have not changed since."""

    @abstractmethod
    def _end(self) -> None:
        """All have been met."""


class View(Round):
    """The largest branches of the tree from one place, and the walk that renews the picture.

    Args:
        limit, max_depth: as `Heaviest` has them; None for `MAX_BRANCHES`.
        above: another one that has `seen` the key: until a walk from here has come to its end, what is shown is what
            that one has found.
    """

    def __init__(
        self,
        tree: HiRadixTree,
        clock: Clock,
        key: Key,
        *,
        page_bytes: int,
        limit: int | None = None,
        max_depth: int = MAX_DEPTH,
        above: "View | None" = None,
    ) -> None:
        self.shown: list[Key] = [key]
        """What the last picture shows."""
        self._tiers: Final = [*tree.tiers]
        self._page_bytes: Final = page_bytes
        self._limit: Final = MAX_BRANCHES if limit is None else limit
        self._max_depth: Final = max_depth
        self._finished: Branch[Key] | None = above.seen(key) if above is not None else None
        super().__init__(tree, clock, key)
        if above is not None:
            self.as_of = above.as_of

    def _begin(self) -> None:
        self._heaviest: Heaviest[Key] = Heaviest(
            self.key, self._numbers(self.key), limit=self._limit, max_depth=self._max_depth
        )

    def _end(self) -> None:
        self._finished = self._heaviest.finish()

    @property
    def top(self) -> Branch[Key]:
        """What was found: by the last walk that has come to its end, from here or above, or by the first one so far."""
        return self._finished if self._finished is not None else self._heaviest.top()

    @property
    def num_expected(self) -> int:
        """Prefixes that a walk will meet, as far as is known."""
        return self._finished.total[1] if self._finished is not None else self._tree.num_nodes

    def seen(self, key: Key) -> Branch[Key] | None:
        """A branch as a walk that has come to its end has found it; None if it did not, or was too small."""
        pending = [self._finished] if self._finished is not None else []
        while pending:
            branch = pending.pop()
            if branch.key == key:
                return branch
            pending += branch.children
        return None

    def _meet(self, node: Node) -> None:
        heaviest, above = self._heaviest, node.parent
        # A node that was split meanwhile hangs on one that the walk has not met.
        while above is not None and not heaviest.is_open(above):
            above = above.parent
        hangs_on: Key = above if above is not None else node.namespace
        if not heaviest.is_open(hangs_on):
            if self.key is not None:
                return  # what the walk began at has left
            heaviest.add(hangs_on, None, self._numbers(hangs_on))
        heaviest.add(node, hangs_on, self._numbers(node))

    def _numbers(self, key: Key) -> list[int]:
        """Of one by itself: bytes, prefixes and leases, then bytes by tier."""
        numbers = [0] * (3 + len(self._tiers))
        if isinstance(key, Node):
            size_bytes = key.num_pages * self._page_bytes
            numbers[:3] = size_bytes, 1, key.num_leases
            for index, tier in enumerate(self._tiers, 3):
                if key.residency(tier) is Residency.RESIDENT:
                    numbers[index] = size_bytes
                    break
        return numbers

    def sizes(self, branch: Branch[Key]) -> dict[str, Any]:
        """Of a branch and all below it, and of what is not shown there."""
        more = self._sizes(branch.hidden) if branch.hidden is not None else None
        return {"total": self._sizes(branch.total), "more": more}

    def _sizes(self, numbers: list[int]) -> dict[str, Any]:
        size_bytes, num_prefixes, num_leases, *by_tier = numbers
        return {
            "bytes": size_bytes, "prefixes": num_prefixes, "leases": num_leases,
            "tiers": {str(tier): count for tier, count in zip(self._tiers, by_tier, strict=True) if count},
        }  # fmt: skip

