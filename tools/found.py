"""What a server has of a prompt, span by span, and what using it would take: the matter of `hicache explain`."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from hicache.tools.owner import Owner, tier_names
from hicache.tools.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from hicache.service.proto import hicache_pb2 as pb

MISS: Final = "miss"


class Action(Enum):
    """What becomes of tokens when somebody asks for the prompt."""

    MAP = "map"
    """They are in the arena, where an engine of this machine reads them."""
    LOAD = "load"
    """The server brings them from NVMe to the arena."""
    COMPUTE = "compute"
    """An engine computes them."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[start, stop)` of the prompt, which are in one place and share one fate."""

    start: int
    stop: int
    where: str
    """The fastest tier that has them, or `MISS`."""
    action: Action
    why: str
    """Why that becomes of them."""
    load_s: float | None = None
    """Predicted time for bringing them to the arena; None where that cannot be said yet."""
    compute_s: float | None = None
    """The same for computing them."""

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    def in_words(self) -> str:
        """What becomes of them, how long that takes, and why."""
        takes = []
        if self.load_s is not None:
            takes.append(format_seconds(self.load_s))
        if self.compute_s is not None:
            computing = "" if self.action is Action.COMPUTE else "computing it "
            takes.append(computing + format_seconds(self.compute_s))
        times = f" ({'; '.join(takes)})" if takes else ""
        return f"{plural(self.num_tokens, 'token')}: {_WOULD[self.action]}{times}, {self.why}"


@dataclass(frozen=True, slots=True)
class Found:
    """What there is of a prompt."""

    namespace: str
    """Digest, in hexadecimal."""
    num_asked: int
    """Tokens of the prompt."""
    num_tokens: int
    """Of these, cached in whole pages from the root."""
    spans: tuple[Span, ...]
    """All of the prompt, in order."""
    pinned_tokens: int
    priority: int
    retained_s: float
    published: bool
    taken_tokens: int
    """Of what is cached, the first so many that a session would be lent; the rest of the prompt is computed."""
    reason: str
    """Why so many, in words and figures."""
    page_size: int
    page_bytes: int
    load_s: float | None
    """Predicted time until what is loaded is in host memory; None while the server has not measured that."""
    compute_s: float | None
    """Predicted time for computing what is not taken; None while no engine has told how fast it is."""
    recompute_s: float | None
    """The same for the whole prompt."""

    @classmethod
    def of(cls, owner: Owner, prefix: "pb.NamedPrefix") -> "Found":
        """Ask a server."""
        reply = owner.explain(prefix)
        layout = owner.stats["layout"]
        page_size, num_asked = int(layout["page_size"]), len(prefix.tokens) // 4
        token_s = reply.token_ns / 1e9 if reply.HasField("token_ns") else None
        load_s = reply.load_us / 1e6 if reply.HasField("load_us") else None
        cached = list(_cached(reply, token_s, load_s))
        return cls(
            namespace=prefix.namespace.hex(),
            num_asked=num_asked,
            num_tokens=reply.num_tokens,
            spans=(*cached, *_misses(reply.num_tokens, num_asked, reply.partial_tokens, page_size, token_s)),
            pinned_tokens=reply.pinned_tokens,
            priority=reply.priority,
            retained_s=reply.retained_ms / 1000,
            published=reply.published,
            taken_tokens=reply.taken_tokens,
            reason=reply.reason,
            page_size=page_size,
            page_bytes=int(layout["page_bytes"]),
            load_s=load_s,
            compute_s=_compute_s(token_s, num_asked - reply.taken_tokens),
            recompute_s=_compute_s(token_s, num_asked),
        )

    @property
    def by_place(self) -> dict[str, int]:
        """Tokens by where they are; places without any are absent."""
        sums: dict[str, int] = {}
        for span in self.spans:
            sums[span.where] = sums.get(span.where, 0) + span.num_tokens
        return sums

    def num_pages(self, where: str | None = None) -> int:
        """Pages that are cached, or those of one tier."""
        return (self.num_tokens if where is None else self.by_place.get(where, 0)) // self.page_size

    def in_words(self) -> str:
        """What is cached, in half a sentence."""
        pages = self.num_pages()
        words = (
            f"{pages * self.page_size:,} of {plural(self.num_asked, 'token')} ({plural(pages, 'page')}, "
            f"{format_bytes(pages * self.page_bytes)}) of namespace {self.namespace[:16]}"
        )
        missing = self.num_asked - self.num_tokens
        return words + (f"; {missing:,} are not cached in whole pages" if missing else "")

    def to_json(self) -> dict[str, Any]:
        """The stable form, without its head."""
        return {
            "namespace": self.namespace, "asked_tokens": self.num_asked, "cached_tokens": self.num_tokens,
            "page_size": self.page_size, "page_bytes": self.page_bytes, "tokens_by_place": self.by_place,
            "spans": [
                {
                    "start": span.start, "stop": span.stop, "where": span.where, "action": span.action.value,
                    "load_s": span.load_s, "compute_s": span.compute_s, "why": span.why,
                }
                for span in self.spans
            ],
            "taken_tokens": self.taken_tokens, "reason": self.reason,
            "pinned_tokens": self.pinned_tokens, "priority": self.priority, "retained_s": self.retained_s,
            "published": self.published,
            "predicted": {"load_s": self.load_s, "compute_s": self.compute_s, "recompute_s": self.recompute_s},
        }  # fmt: skip


_WOULD: Final = {
    Action.MAP: "would be mapped", Action.LOAD: "would be loaded", Action.COMPUTE: "would be computed",
}  # fmt: skip
_TAKEN: Final = {
    "host": (Action.MAP, "as it is in host memory: nothing is copied"),
    "nvme": (Action.LOAD, "as it is on NVMe alone"),
}
_LEFT: Final = "as a session is lent no more pages at a time"


def _cached(reply: "pb.ExplainReply", token_s: float | None, load_s: float | None) -> Iterator[Span]:
    """What is cached, cut where it is not taken any more; what loading takes is shared out by tokens."""
    names, position, cuts = tier_names(), 0, list[tuple[int, int, str]]()
    for run in reply.runs:
        start, position = position, position + run.num_tokens
        border = min(max(start, reply.taken_tokens), position)
        cuts += [(*cut, names[run.tier]) for cut in ((start, border), (border, position)) if cut[0] < cut[1]]
    num_loaded = sum([stop - start for start, stop, tier in cuts if tier == "nvme" and start < reply.taken_tokens])
    for start, stop, tier in cuts:
        action, why = _TAKEN[tier] if start < reply.taken_tokens else (Action.COMPUTE, _LEFT)
        is_known = action is Action.LOAD and load_s is not None
        yield Span(
            start, stop, tier, action, why,
            load_s=(load_s or 0.0) * (stop - start) / num_loaded if is_known else None,
            compute_s=_compute_s(token_s, stop - start),
        )  # fmt: skip


def _compute_s(token_s: float | None, num_tokens: int) -> float | None:
    return token_s * num_tokens if token_s is not None else None


def _misses(
    position: int, num_asked: int, partial_tokens: int, page_size: int, token_s: float | None
) -> Iterator[Span]:
    """What is not cached from `position` on, by why it is not."""

    def missing(start: int, stop: int, why: str) -> Span:
        return Span(start, stop, MISS, Action.COMPUTE, why, compute_s=_compute_s(token_s, stop - start))

    tail = num_asked - position
    if partial_tokens:
        why = "as a cached page begins so and goes on otherwise; an engine may copy this part of it instead"
        yield missing(position, position + partial_tokens, why)
    if tail > partial_tokens:
        if tail < page_size:
            why = f"as it is less than a page of {page_size} tokens, and only whole pages are cached"
        elif position or partial_tokens:
            why = "as no cached prompt goes on so: it was never stored, or has left"
        else:
            why = "as no cached prompt begins so: it was never stored, or has left"
        yield missing(position + partial_tokens, num_asked, why)
