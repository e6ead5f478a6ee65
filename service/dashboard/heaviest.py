"""The largest branches of a tree that is too large to be shown, found in one walk and in memory for these alone.

A branch weighs what its own pages and all below it weigh. No branch is heavier than the one it hangs on, so the
heaviest of all branches are a tree by themselves: those are kept, and what is left out is counted at the branch that it
hangs on. Of branches of one weight the one that was met first comes first, which is never the one below.
"""

from collections.abc import Hashable, Sequence
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Branch(Generic[K]):
    """A part of the tree, as far as the walk has seen it."""

    __slots__ = ("children", "depth", "hidden", "is_kept", "key", "order", "total")

    def __init__(self, key: K, depth: int, order: int, total: list[int]) -> None:
        self.key: Final = key
        self.depth: Final = depth
        """Levels below where the walk began."""
        self.order: Final = order
        self.total = total
        """Of the branch and all below it: the sums of what `Heaviest.add` was told."""
        self.hidden: list[int] | None = None
        """The sums of what hangs here and is left out; None for nothing."""
        self.children: list[Branch[K]] = []
        """What hangs here and is kept, in the order in which it was met."""
        self.is_kept = True

    def take(self, child: "Branch[K]") -> None:
        """Count what hangs here, and keep it or not."""
        self.total = _sum(self.total, child.total)
        if child.is_kept:
            self.children.append(child)
        else:
            self.hide(child)

    def hide(self, child: "Branch[K]") -> None:
        self.hidden = _sum(self.hidden, child.total) if self.hidden is not None else list(child.total)

    def copy(self) -> "Branch[K]":
        """Another with the same children."""
        other = Branch(self.key, self.depth, self.order, self.total)
        other.hidden, other.children = self.hidden, list(self.children)
        return other


class Heaviest(Generic[K]):
    """What a walk, in which branches come before what hangs on them, has found so far.

    Args:
        top: where the walk begins.
        numbers: its own, as `add` is told them.
        limit: branches that are kept below it.
        max_depth: levels below it that are kept.
    """

    def __init__(self, top: K, numbers: Sequence[int], *, limit: int, max_depth: int) -> None:
        self._limit: Final = limit
        self._max_depth: Final = max_depth
        self._open: Final[list[Branch[K]]] = [Branch(top, 0, 0, list(numbers))]
        """From the top down to the branch that was met last."""
        self._open_keys: Final[set[K]] = {top}
        self._kept: list[Branch[K]] = []
        """Those that the walk has left."""
        self._last: tuple[int, int] | None = None
        """The rank of the last one that is kept, once there are more than `limit`."""
        self._num_met = 0

    def is_open(self, key: K) -> bool:
        """Whether something can still hang on it."""
        return key in self._open_keys

    def add(self, key: K, above: K, numbers: Sequence[int]) -> None:
        """Meet a branch that hangs on `above`, which is open; what is open below that is left. `numbers` are its own,
        without what hangs on it: the first is its weight, and none is negative."""
        while self._open[-1].key != above:
            self._leave()
        self._num_met += 1
        self._open.append(Branch(key, self._open[-1].depth + 1, self._num_met, list(numbers)))
        self._open_keys.add(key)

    def top(self) -> Branch[K]:
        """What was found, as if the walk ended here: at most `limit` branches below the top, and the open ones."""
        self._drop()
        below: Branch[K] | None = None
        for branch in reversed(self._open):
            seen = branch.copy()
            seen.is_kept = branch.depth <= self._max_depth
            if below is not None:
                seen.take(below)
            below = seen
        assert below is not None, "the top is always open"
        return below

    def finish(self) -> Branch[K]:
        """What was found by a walk that has ended: at most `limit` branches below the top."""
        while len(self._open) > 1:
            self._leave()
        return self.top()

    def _leave(self) -> None:
        branch = self._open.pop()
        self._open_keys.discard(branch.key)
        branch.is_kept = branch.depth <= self._max_depth and (self._last is None or _rank(branch) <= self._last)
        self._open[-1].take(branch)
        if branch.is_kept:
            self._kept.append(branch)
            if len(self._kept) > 2 * self._limit:
                self._drop()

    def _drop(self) -> None:
        """Leave out all but the heaviest that the walk has left: what comes later takes the place of none before it."""
        if len(self._kept) <= self._limit:
            return
        self._kept.sort(key=_rank)
        dropped, self._kept = self._kept[self._limit :], self._kept[: self._limit]
        self._last = _rank(self._kept[-1]) if self._kept else (0, 0)
        for branch in dropped:
            branch.is_kept = False
        for branch in (*self._open, *self._kept):
            left_out = [child for child in branch.children if not child.is_kept]
            if left_out:
                branch.children = [child for child in branch.children if child.is_kept]
            for child in left_out:
                branch.hide(child)


def _rank(branch: Branch[K]) -> tuple[int, int]:
    """Smaller for what comes first."""
    return -branch.total[0], branch.order


def _sum(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]
