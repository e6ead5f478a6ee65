"""What the tree's own memory is estimated from: how many bytes a node costs beside what is counted exactly.

The estimate is a sum of counts that the tree keeps anyway, so it costs nothing to keep: nodes, copies of nodes in
tiers and namespaces, each times a constant below; and, exactly, 4 bytes a token and 4 a slot. Publications and reports
are estimated in the same way, but apart: they are bounded by themselves, so that neither what one tenant publishes nor
what an engine claims to have can push pages out of the index.

The constants come from the growth of a process's resident memory under CPython 3.11, with a budget set
(`tests/hicache/test_metadata.py` measures it again). Over the shapes that were tried (flat and in groups, a spine with
a leaf at every page, long runs, one copy a node or one in each of three tiers, many namespaces, publications, reports;
page sizes of 1 to 64, 10,000 to 180,000 nodes) the estimate was between 8 % below and 30 % above what was measured.
Most of the difference is in the dictionaries, which grow by doubling. Not in it: leases, pins and moves, which belong
to their callers; and up to as many bytes of tokens and slots again as a node has, where a split cut off less than half
of a run and the rest is not worth a copy yet.
"""

from typing import Final

from hicache.errors import BadRequest

NODE_BYTES: Final = 480
"""A node, its key, its entry among its siblings, and its chain digest."""
ORDER_BYTES: Final = 100
"""A place in one order of eviction: one for each copy of a node, and with a budget one more."""
ROOT_BYTES: Final = 640
"""A namespace."""
PUBLICATION_BYTES: Final = 720
"""A publication of a prefix, beside 4 bytes for each token that is published, however often."""
READER_BYTES: Final = 120
"""When another tenant last used a publication."""
REPORT_BYTES: Final = 420
"""What one engine reported about one node, beside a bit a page."""

MAX_PUBLICATIONS: Final = 20_000
"""Publications of all tenants at one time, where a tree is not told otherwise."""
MAX_READERS: Final = 64
"""Tenants whose last use of a publication is remembered; beyond, the one that used it longest ago is forgotten."""
MAX_REPORT_BYTES: Final = 64 << 20
"""Memory for all reports, where a tree is not told otherwise: some 150,000 pairs of a node and an engine."""


def check_metadata_bytes(budget: int | None, *, page_size: int, num_tiers: int) -> None:
    """Raise `BadRequest` for a budget that is no number or cannot hold one page with a copy in every tier."""
    if budget is None:
        return
    least = ROOT_BYTES + NODE_BYTES + ORDER_BYTES * (num_tiers + 1) + 4 * (page_size + num_tiers)
    if type(budget) is not int or budget < least:
        raise BadRequest("metadata_bytes", f"{budget!r} is not a number of bytes from {least} on, or None")
