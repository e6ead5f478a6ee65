"""Nodes in the order of a number that a policy gives them."""

from collections.abc import Iterator

from hicache.collector import untrack
from hicache.node import Box, Node
from hicache.sortedchunks import SortedChunks


class Ordered:
    """Listed nodes, smallest key first; of equal keys, the one that was placed first. Changes cost O(log n)."""

    def __init__(self) -> None:
        self._order: SortedChunks[tuple[float, int, Box]] = SortedChunks()
        self._entries: dict[Box, tuple[float, int, Box]] = {}
        self._serial = 0
        untrack(self._entries)

    def __contains__(self, node: Node) -> bool:
        return node.box in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Node]:
        for _, _, box in self._order:
            yield box[0]

    def entries(self) -> Iterator[tuple[float, Node]]:
        """Keys and nodes, smallest key first."""
        for key, _, box in self._order:
            yield key, box[0]

    def place(self, node: Node, key: float) -> None:
        """List the node under `key`, wherever it stood before."""
        box = node.box
        entry = self._entries.get(box)
        if entry is not None:
            self._order.remove(entry)
        self._serial += 1
        entry = self._entries[box] = (key, self._serial, box)
        untrack(entry)
        self._order.add(entry)

    def remove(self, node: Node) -> bool:
        """Take the node off the list; False when it was not on it."""
        entry = self._entries.pop(node.box, None)
        if entry is None:
            return False
        self._order.remove(entry)
        return True
