"""A server watched over time: what it does a second, and which prefixes it uses."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from hicache.tools.owner import Owner, tier_names

if TYPE_CHECKING:
    from hicache.service.proto import hicache_pb2 as pb

MOMENTS: Final = 240
"""Moments that are remembered."""
COMPUTED: Final = "computed"
FIRST_TOKENS: Final = 4
MAX_PREFIXES: Final = 200
"""Prefixes that are asked for: more than a screen has lines."""


class Order(Enum):
    """What prefixes are ranked by, as people say it."""

    USES = "uses"
    LATEST = "last use"
    BYTES = "bytes"
    LEASES = "leases"


@dataclass(frozen=True, slots=True)
class Prefix:
    """A run of whole pages, as it was seen last."""

    namespace: str
    """Digest, in hexadecimal."""
    tenant: str
    first_token: int
    num_tokens: int
    size_bytes: int
    tiers: tuple[str, ...]
    age_s: float
    uses: int
    """Requests that were given it."""
    leases: int
    """Leases and pins that end with it."""
    first_ids: tuple[int, ...]
    """Its first token ids."""

    @property
    def title(self) -> str:
        """How it is shown."""
        ids = " ".join(map(str, self.first_ids))
        return f"{self.namespace[:8]} {self.first_token:>7,}: {ids} …"

    def to_json(self) -> dict[str, Any]:
        return {
            "namespace": self.namespace, "tenant": self.tenant, "first_token": self.first_token,
            "num_tokens": self.num_tokens, "bytes": self.size_bytes, "tiers": list(self.tiers), "age_s": self.age_s,
            "uses": self.uses, "leases": self.leases,
        }  # fmt: skip


class Watch:
    """What a server did from moment to moment. `look` is called at each; nothing here waits for time to pass."""

    def __init__(self, owner: Owner, now: float) -> None:
        """`now`: seconds of any clock that does not jump."""
        self._owner: Final = owner
        self.stats = owner.stats
        self.prefixes: list[Prefix] = []
        """Those that come first in `order`, of those that `contains` leaves, in that order. The server goes through a
        large tree while several moments pass; until it has, they are the first of those that it has met."""
        self.num_matched = 0
        """How many prefixes these are the first of."""
        self.is_whole = False
        """Whether the server has gone through all of its tree for them."""
        self.order = Order.USES
        self.contains = ""
        self.rates: dict[str, deque[float]] = {}
        """By "lane NAME" bytes a second, and by "tokens SOURCE" tokens a second, moment by moment."""
        self.hit_rates: Final[deque[float]] = deque(maxlen=MOMENTS)
        """Part of the tokens asked for that was found."""
        self._looked_at = now
        self._walk = 0
        self._rank()

    def look(self, now: float) -> None:
        """Ask the server how it is. Raises as `Owner` does."""
        before, self.stats = self.stats, self._owner.inspect()
        elapsed, self._looked_at = max(now - self._looked_at, 1e-3), now
        for name, count in _counts(self.stats).items():
            rate = max(0, count - _counts(before).get(name, 0)) / elapsed
            self.rates.setdefault(name, deque(maxlen=MOMENTS)).append(rate)
        asked = self.stats["counters"]["tokens_asked"] - before["counters"]["tokens_asked"]
        if asked > 0:
            found = _found(self.stats) - _found(before)
            self.hit_rates.append(found / asked)
        self._rank()

    def choose(self, order: Order, contains: str) -> None:
        """Rank prefixes so, of those that contain a text (`RankRequest.contains`). Asks the server where that is news;
        raises as `Owner` does."""
        if (order, contains) != (self.order, self.contains):
            self.order, self.contains, self._walk = order, contains, 0
            self._rank()

    def latest(self, name: str) -> float:
        """The last of `rates`; 0 before there is one."""
        rates = self.rates.get(name)
        return rates[-1] if rates else 0.0

    def to_json(self, num_prefixes: int) -> dict[str, Any]:
        """The stable form, with the first of the prefixes."""
        stats = self.stats
        return {
            "format": "hicache-top", "version": 1, "time": stats["time"], "tiers": stats["tiers"],
            "lanes": {
                name: {**lane, "bytes_per_s": self.latest(f"lane {name}")} for name, lane in stats["lanes"].items()
            },
            "tokens_per_s": {
                name.removeprefix("tokens "): rates[-1] for name, rates in self.rates.items()
                if name.startswith("tokens ")
            },
            "hit_rate": self.hit_rates[-1] if self.hit_rates else None,
            "evicted_pages": stats["counters"]["evicted_pages"], "dropped_pages": stats["counters"]["dropped_pages"],
            "metadata_dropped_pages": stats["counters"]["metadata_dropped_pages"],
            "refused_pages": stats["counters"]["refused_pages"], "num_leases": stats["num_leases"],
            "sessions": stats["sessions"], "num_prefixes": stats["num_nodes"],
            "prefixes": [prefix.to_json() for prefix in self.prefixes[:num_prefixes]],
        }  # fmt: skip

    def _rank(self) -> None:
        from hicache.service.proto import hicache_pb2 as pb

        reply = self._owner.rank(pb.RankRequest(
            walk=self._walk, order=f"ORDER_{self.order.name}", contains=self.contains,
            max_nodes=MAX_PREFIXES, max_tokens=FIRST_TOKENS,
        ))  # fmt: skip
        layout, names = self.stats["layout"], tier_names()
        self.prefixes = [_prefix(node, layout, names) for node in reply.nodes]
        self.num_matched, self.is_whole, self._walk = reply.num_matched, reply.whole, reply.walk


def _prefix(node: "pb.BrowsedNode", layout: Mapping[str, int], names: Mapping[int, str]) -> Prefix:
    from hicache.service import wire

    return Prefix(
        namespace=node.namespace.hex(),
        tenant=node.tenant,
        first_token=node.first_page * layout["page_size"],
        num_tokens=node.num_pages * layout["page_size"],
        size_bytes=node.num_pages * layout["page_bytes"],
        tiers=tuple([names[tier] for tier in node.tiers if tier in names]),
        age_s=node.age_ms / 1000,
        uses=node.num_uses,
        leases=node.num_leases,
        first_ids=tuple(wire.unpack_int32(node.tokens)),
    )


def _counts(stats: Mapping[str, Any]) -> dict[str, int]:
    """What only grows, by the names of `Watch.rates`."""
    counters = stats["counters"]
    counts = {f"lane {name}": lane["bytes"] for name, lane in stats["lanes"].items()}
    counts |= {f"tokens {tier}": 0 for tier in stats["tiers"]}
    counts |= {f"tokens {tier}": count for tier, count in counters["tokens_by_tier"].items()}
    return {**counts, f"tokens {COMPUTED}": counters["tokens_computed"]}


def _found(stats: Mapping[str, Any]) -> int:
    counts: Sequence[int] = stats["counters"]["tokens_by_tier"].values()
    return sum(counts)
