"""Small trees for tests: namespaces, tokens that are easy to read, and slots that count up."""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.residency import Residency
from hicache.results import Inserted
from hicache.tier import DEVICE, HOST, NVME, TierId
from hicache.tree import HiRadixTree

Tokens = npt.NDArray[np.int32]


def make_namespace(page_size: int = 4, **fields: Any) -> Namespace:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=8, dtype=KVDtype.FLOAT32, page_size=page_size)
    return Namespace(model="sha256:00", layout=layout, **fields)


class World:
    """A tree of one namespace, with slots that count up from 0 in each tier and a time that each insert advances."""

    def __init__(self, page_size: int = 4, tiers: tuple[TierId, ...] = (DEVICE, HOST, NVME)) -> None:
        self.namespace = make_namespace(page_size)
        self.tree = HiRadixTree(page_size=page_size, tiers=tiers)
        self.next_slot = dict.fromkeys(tiers, 0)
        self.now = 0.0

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def slots(self, tier: TierId, count: int) -> npt.NDArray[np.int32]:
        first = self.next_slot[tier]
        self.next_slot[tier] += count
        return np.arange(first, first + count, dtype=np.int32)

    def insert(self, tokens: npt.ArrayLike, tier: TierId = HOST, first_page: int = 0) -> Inserted:
        count = len(np.asarray(tokens)) // self.tree.page_size - first_page
        inserted = self.tree.insert(
            self.namespace, tokens, tier=tier, slots=self.slots(tier, count), first_page=first_page, now=self.tick()
        )
        self.tree.check_integrity()
        return inserted

    def matched(self, tokens: npt.ArrayLike) -> int:
        return self.tree.match(self.namespace, tokens).num_tokens

    def digest(self) -> str:
        return digest(self.tree)


def digest(tree: HiRadixTree) -> str:
    """Everything that a caller can see of a tree, as one value."""
    lines = []
    for batch in tree.walk():
        for info in batch:
            slots = [info.node.slots(tier).tolist() for tier in tree.tiers]
            lines.append(repr((info[1:], tree.tokens_of(info.node).tolist(), slots)))
    lines += [repr(tree.occupancy(tier)) for tier in tree.tiers]
    lines.append(repr((tree.num_nodes, tree.num_leases)))
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def sequence(number: int, num_tokens: int) -> Tokens:
    """Tokens that no sequence of another number shares at any position."""
    return (number * 100_000 + np.arange(num_tokens)).astype(np.int32)


def tiers_of(node: Node, *tiers: TierId) -> list[TierId]:
    """Those of `tiers` in which the node is resident."""
    return [tier for tier in tiers if node.residency(tier) is Residency.RESIDENT]
