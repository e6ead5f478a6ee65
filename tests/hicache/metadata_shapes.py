"""How far a process grows with a tree, beside what the tree says that it uses. Run alone in a process:

    python -m tests.hicache.metadata_shapes SHAPE NUM_NODES

prints the growth of resident memory and the tree's estimate, in bytes.
"""

import gc
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hicache.node import Node
from hicache.tier import DEVICE, HOST, NVME, TierId
from hicache.tree import HiRadixTree
from tests.hicache.trees import make_namespace

Tokens = npt.NDArray[np.int32]


class Growing:
    """A tree with a budget that is never reached, and random tokens."""

    def __init__(self, page_size: int) -> None:
        self.tree = HiRadixTree(page_size=page_size, tiers=(DEVICE, HOST, NVME), metadata_bytes=1 << 40)
        self.page_size = page_size
        self.namespace = make_namespace(page_size)
        self.rng = np.random.default_rng(1)
        self.next_slot = 0

    def tokens(self, num_pages: int) -> Tokens:
        return self.rng.integers(0, 150_000, num_pages * self.page_size, dtype=np.int32)

    def insert(self, tokens: Tokens, tier: TierId = DEVICE, first_page: int = 0) -> Node:
        count = len(tokens) // self.page_size - first_page
        slots = np.arange(self.next_slot, self.next_slot + count, dtype=np.int32)
        self.next_slot += count
        inserted = self.tree.insert(
            self.namespace, tokens, tier=tier, slots=slots, first_page=first_page, now=float(self.next_slot)
        )
        self.tree.identities(inserted.node)
        return inserted.node


def flat(grown: Growing, num_nodes: int) -> None:
    for _ in range(num_nodes):
        grown.insert(grown.tokens(1))


def tiers(grown: Growing, num_nodes: int) -> None:
    for _ in range(num_nodes):
        tokens = grown.tokens(1)
        for tier in grown.tree.tiers:
            grown.insert(tokens, tier)


def groups(grown: Growing, num_nodes: int) -> None:
    for _ in range(num_nodes // 3):
        head = grown.tokens(1)
        for _ in range(2):
            grown.insert(np.concatenate([head, grown.tokens(1)]))


def spines(grown: Growing, num_nodes: int) -> None:
    for _ in range(num_nodes // 200):
        spine = grown.tokens(101)
        grown.insert(spine)
        for page in range(1, 100):
            grown.insert(np.concatenate([spine[: page * grown.page_size], grown.tokens(1)]), first_page=page)


def runs(grown: Growing, num_nodes: int) -> None:
    for _ in range(num_nodes // 10):
        grown.insert(grown.tokens(40))


def namespaces(grown: Growing, num_nodes: int) -> None:
    for number in range(num_nodes // 2):
        grown.namespace = make_namespace(grown.page_size, tenant=str(number))
        grown.insert(grown.tokens(1))


def publications(grown: Growing, num_nodes: int) -> None:
    for _ in range(num_nodes // 2):
        tokens = grown.tokens(1)
        grown.insert(tokens)
        grown.tree.publish(grown.namespace, tokens)


def reports(grown: Growing, num_nodes: int) -> None:
    for number in range(num_nodes // 2):
        node = grown.insert(grown.tokens(1))
        assert grown.tree.report_node(TierId(f"device:s/{number % 8}"), node, resident=True)


SHAPES: dict[str, Callable[[Growing, int], None]] = {
    shape.__name__: shape for shape in (flat, tiers, groups, spines, runs, namespaces, publications, reports)
}


def measure(shape: str, page_size: int, num_nodes: int) -> tuple[int, int]:
    """Bytes that the process grew by, and bytes that the tree estimates."""
    warm = Growing(page_size)
    SHAPES[shape](warm, 400)
    grown = Growing(page_size)
    gc.collect()
    before = _resident_bytes()
    SHAPES[shape](grown, num_nodes)
    gc.collect()
    return _resident_bytes() - before, grown.tree.metadata_bytes + grown.tree.aside_bytes


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


if __name__ == "__main__":
    print(*measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
