"""Going through siblings, and so through trees, in steps between which the tree may change."""

from collections.abc import Iterator
from typing import Final

from hicache.node import Node, Root

BATCH: Final = 256
"""Siblings that are looked up at once."""


class Siblings:
    """The children of a node, one after the other. What comes while they are gone through may be missed; what stays is
    given once, and under the key of a node that was split its upper half is given.

    A step costs O(log n) in the number of children: few are listed at once, many are found by the order that their
    parent keeps.
    """

    __slots__ = ("_is_all", "_last", "_prefix", "_waiting", "parent")

    def __init__(self, parent: Node, prefix: bytes = b"", only: bytes | None = None) -> None:
        """Those whose first page begins with `prefix`, less than a page; or with `only` the one under that key."""
        self.parent = parent
        self._prefix = self._last = prefix
        self._waiting: list[bytes] = [] if only is None else [only]
        self._is_all = only is not None

    def next(self) -> Node | None:
        """The next child that is in the tree; None when there is none left."""
        while self._waiting or self._look_up():
            key, children = self._waiting.pop(), self.parent._children
            box = children.get(key) if children else None
            if box is not None and box[0]._parent is not None:
                return box[0]
        return None

    def _look_up(self) -> bool:
        """Learn the next keys, the first of them last; false when there are none."""
        children, order, prefix = self.parent._children, self.parent._order, self._prefix
        if self._is_all or not children:
            return False
        if order is None:
            # Few: all that have not been given yet.
            keys = sorted([key for key in children if key > self._last])
            self._is_all = True
        else:
            keys = order.following(self._last, BATCH)
        self._is_all |= not keys or not keys[-1].startswith(prefix)
        self._waiting = [key for key in reversed(keys) if key.startswith(prefix)]
        self._last = keys[-1] if keys else self._last
        return bool(self._waiting)


def below(top: Node) -> Iterator[Node]:
    """All that hangs below a node, parents before children, one at a time; what changes between two of them is met as
    `Siblings` says."""
    stack = [Siblings(top)]
    while stack:
        node = stack[-1].next()
        if node is None:
            stack.pop()
            continue
        if node._children:
            stack.append(Siblings(node))
        yield node


def begins_at(node: Node, ends: dict[Node, int]) -> int:
    """Pages between the root and the first page of a node in the tree.

    `ends` remembers where nodes above it end. That never changes while they are in the tree, so it may be kept for as
    long as memory allows.
    """
    unknown: list[Node] = []
    step = node._parent
    while step is not None and not isinstance(step, Root) and step not in ends:
        unknown.append(step)
        step = step._parent
    end = ends.get(step, 0) if step is not None else 0
    for above in reversed(unknown):
        end += above._num_pages
        ends[above] = end
    return end
