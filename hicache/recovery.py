"""What a cache takes over from a tier that survived a restart: checked, joined to long runs, and put into the tree.

What comes from a disk is an offer, not a promise: records may be of another model, of another layout, of a version that
nobody reads any more. What cannot be used is given back to the tier, which then has it no longer.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hicache.clock import Clock
from hicache.collector import paused
from hicache.errors import BadRequest, NoRoom
from hicache.layout import KVLayout
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.restoring import Restorer
from hicache.tier import RecoveredRun, Slots, Tier
from hicache.tree import HiRadixTree

BATCH: Final = 500
"""Runs put back before others get their turn on the loop."""

Progress = Callable[[int, int], None]
"""Told how many pages are done, and how many there are in all. Called on the cache's loop; does not raise."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What became of the pages that a tier offered. The page counts add up to what it offered."""

    pages: int = 0
    """In the tree again."""
    foreign_pages: int = 0
    """Freed: their namespace has another layout than the cache, or its record cannot be read."""
    orphan_pages: int = 0
    """Freed: what they continue is not there, or they do not fit to it."""
    refused_pages: int = 0
    """Freed: the tree's metadata budget was full."""
    namespaces: int = 0
    """Whose pages came back."""
    nodes: int = 0
    """Nodes of the tree that these pages make."""
    seconds: float = 0.0


async def recover(
    tree: HiRadixTree,
    tier: Tier,
    runs: Sequence[RecoveredRun],
    *,
    layout: KVLayout,
    clock: Clock,
    progress: Progress | None = None,
) -> Recovery:
    """Put runs that `tier` has kept into an empty tree, in their order, which is then that of their recency.

    Others run between batches, but nothing else may use the tree before this has ended. Frees what is not wanted.
    """
    began = clock.monotonic()
    num_pages = sum([len(run.slots) for run in runs])
    restorers: dict[bytes, tuple[bytes, Restorer] | None] = {}
    """By the record of a namespace: its digest, and who puts its runs back; None for one that cannot be."""
    ends: dict[bytes, Node] = {}
    """The node that ends where a run begins, by the run's prefix; none where a prompt begins."""
    unwanted: list[Slots] = []
    counts: Counter[str] = Counter()
    is_full = False
    with paused():
        for number, run in enumerate(joined(runs)):
            if number % BATCH == 0:
                if progress is not None:
                    progress(counts.total(), num_pages)
                await asyncio.sleep(0)
            record, prefix = run.namespace, run.prefix
            if record not in restorers:
                namespace = _readable(record, layout)
                restorers[record] = None if namespace is None else (
                    namespace.digest, tree.restorer(namespace, tier=tier.tier_id, now=began)
                )  # fmt: skip
            known, above = restorers[record], ends.get(prefix)
            what = "pages"
            if known is None:
                what = "foreign_pages"
            elif prefix != known[0] if above is None else above.namespace != known[0]:
                what = "orphan_pages"
            elif is_full:
                what = "refused_pages"
            else:
                try:
                    ends[run.chain] = known[1].restore(above, run.tokens, slots=run.slots, chain=run.chain)
                except NoRoom:
                    what, is_full = "refused_pages", True
                except ValueError:  # also as BadRequest: tokens that are none, or that are there already
                    what = "orphan_pages"
            counts[what] += len(run.slots)
            if what != "pages":
                unwanted.append(run.slots)
    if unwanted:
        tier.free(np.concatenate(unwanted))
    if progress is not None:
        progress(num_pages, num_pages)
    return Recovery(
        **counts,
        namespaces=tree.num_namespaces,
        nodes=tree.num_nodes,
        seconds=clock.monotonic() - began,
    )


def joined(runs: Sequence[RecoveredRun]) -> Iterator[RecoveredRun]:
    """The same pages in as long runs as can be: a run that is the only one to continue another is made part of it."""
    children = Counter([run.prefix for run in runs])
    only_child = {run.prefix: run for run in runs if children[run.prefix] == 1}
    taken: set[int] = set()
    """Runs that were made part of the one before them."""
    for run in runs:
        if id(run) in taken:
            continue
        if run.chain not in only_child:
            yield run
            continue
        parts = [run]
        while (after := only_child.get(parts[-1].chain)) is not None and after.namespace == run.namespace:
            if id(after) in taken or after is run:
                break
            taken.add(id(after))
            parts.append(after)
        if len(parts) == 1:
            yield run
            continue
        yield RecoveredRun(
            namespace=run.namespace,
            prefix=run.prefix,
            chain=parts[-1].chain,
            tokens=b"".join([part.tokens for part in parts]),
            slots=np.concatenate([part.slots for part in parts]),
        )


def _readable(record: bytes, layout: KVLayout) -> Namespace | None:
    """The namespace of a record, if its pages are of this layout."""
    try:
        namespace = Namespace.decode(record)
    except BadRequest:
        return None
    return namespace if namespace.layout == layout else None
