"""What a cache counts, and how it says where a prompt's pages are."""

from dataclasses import dataclass, field

from hicache.tier import TierId


@dataclass(slots=True)
class Counters:
    """What the cache has done since it was opened. Tokens unless the name says otherwise."""

    lookups: int = 0
    """Sequences opened."""
    hits: int = 0
    """Of these, how many found at least one token."""
    tokens_asked: int = 0
    tokens_by_tier: dict[str, int] = field(default_factory=dict)
    """Tokens found, by the fastest tier that had them when they were asked for."""
    tokens_left: int = 0
    """Tokens that were cached, but slower to load than to compute: they are not among those found."""
    tokens_computed: int = 0
    """Tokens whose KV came in through a sequence's step."""
    pages_published: int = 0
    pages_duplicate: int = 0
    """Pages computed although somebody else had published them meanwhile."""
    pages_adopted: int = 0
    """Pages copied from what another tenant has published."""
    hints: int = 0
    """Hints that something cached was meant by."""
    no_room_pages: dict[str, int] = field(default_factory=dict)
    """Pages that a request was refused since all others were in use, by tier."""
    pages_refused: int = 0
    """Pages that a commit could not publish for want of room in the metadata budget; each try counts."""
    refused_pages: dict[str, int] = field(default_factory=dict)
    """Pages that NVMe admission refused, by its reason; each time that they were asked about."""
    pages_written_through: int = 0
    """Pages written to NVMe before they had to leave a faster tier, but for those that were waited for in vain."""
    metadata_dropped_pages: int = 0
    """Pages that left the cache to keep the tree's metadata within its budget."""
    evicted_pages: dict[str, int] = field(default_factory=dict)
    """Copies that left a tier while a slower tier kept one."""
    dropped_pages: dict[str, int] = field(default_factory=dict)
    """Pages that left the cache, by the tier of their last copy."""
    failed_moves: dict[str, int] = field(default_factory=dict)
    """Pages whose move failed, by lane."""
    corrupt_pages: dict[str, int] = field(default_factory=dict)
    """Pages forgotten because a tier could not give them back whole, by tier."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a prompt is cached, and where."""

    num_tokens: int
    """Tokens covered by whole pages, a multiple of the page size."""
    partial_tokens: int
    """Further tokens that the best partly matching page shares."""
    runs: tuple[tuple[TierId, int], ...]
    """`num_tokens` in order from the root, as runs of (fastest tier that holds them, tokens)."""

    @property
    def by_tier(self) -> dict[TierId, int]:
        """`num_tokens` by the fastest tier that holds each page; tiers with none are absent."""
        sums: dict[TierId, int] = {}
        for tier_id, num_tokens in self.runs:
            sums[tier_id] = sums.get(tier_id, 0) + num_tokens
        return sums


def count(counts: dict[str, int], key: str, amount: int) -> None:
    counts[key] = counts.get(key, 0) + amount
