"""What a server has of a prompt, span by span, and what using it would take: the matter of `hicache explain`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hicache.tools.owner import Owner, tier_names
from hicache.tools.units import format_bytes, plural

if TYPE_CHECKING:
    from hicache.service.proto import hicache_pb2 as pb

MISS: Final = "miss"


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[start, stop)` of the prompt, which are in one place."""

    start: int
    stop: int
    where: str
    """The fastest tier that has them, or `MISS`."""
    why: str
    """What that means for who asks for the prompt."""

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


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
    page_size: int
    page_bytes: int
    load_s: float | None
    """Predicted time until what is on NVMe alone is in host memory; None while the server has not measured that."""
    compute_s: float | None
    """Predicted time for computing what is not cached; None while no engine has told how fast it is."""
    recompute_s: float | None
    """The same for the whole prompt."""

    @classmethod
    def of(cls, owner: Owner, prefix: "pb.NamedPrefix") -> "Found":
        """Ask a server."""
        reply = owner.explain(prefix)
        layout, names = owner.stats["layout"], tier_names()
        page_size, num_asked = int(layout["page_size"]), len(prefix.tokens) // 4
        spans, position = [], 0
        for run in reply.runs:
            tier, stop = names[run.tier], position + run.num_tokens
            spans.append(Span(position, stop, tier, _HIT[tier]))
            position = stop
        spans += _misses(position, num_asked, reply.partial_tokens, page_size)
        nvme_pages = sum([span.num_tokens for span in spans if span.where == "nvme"]) // page_size
        token_s = _seconds_a_token(owner.stats["work"])
        return cls(
            namespace=prefix.namespace.hex(),
            num_asked=num_asked,
            num_tokens=reply.num_tokens,
            spans=tuple(spans),
            pinned_tokens=reply.pinned_tokens,
            priority=reply.priority,
            retained_s=reply.retained_ms / 1000,
            published=reply.published,
            page_size=page_size,
            page_bytes=int(layout["page_bytes"]),
            load_s=_load_s(owner.stats["lanes"], nvme_pages * int(layout["page_bytes"])),
            compute_s=token_s * (num_asked - reply.num_tokens) if token_s is not None else None,
            recompute_s=token_s * num_asked if token_s is not None else None,
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
                {"start": span.start, "stop": span.stop, "where": span.where, "why": span.why} for span in self.spans
            ],
            "pinned_tokens": self.pinned_tokens, "priority": self.priority, "retained_s": self.retained_s,
            "published": self.published,
            "predicted": {"load_s": self.load_s, "compute_s": self.compute_s, "recompute_s": self.recompute_s},
        }  # fmt: skip


_HIT: Final = {
    "host": "in host memory: an engine on this machine maps it, nothing is copied",
    "nvme": "on NVMe alone: the server loads it into host memory when it is acquired",
}


def _misses(position: int, num_asked: int, partial_tokens: int, page_size: int) -> list[Span]:
    """What is not cached from `position` on, by why it is not."""
    spans, tail = [], num_asked - position
    if partial_tokens:
        why = "a cached page begins so and goes on otherwise: an engine may copy this part of it, or computes it"
        spans.append(Span(position, position + partial_tokens, MISS, why))
    if tail > partial_tokens:
        if tail < page_size:
            why = f"less than a page of {page_size} tokens: only whole pages are cached, an engine computes it"
        elif position or partial_tokens:
            why = "no cached prompt goes on so: it was never stored, or has left; an engine computes it"
        else:
            why = "no cached prompt begins so: it was never stored, or has left; an engine computes it"
        spans.append(Span(position + partial_tokens, num_asked, MISS, why))
    return spans


def _load_s(lanes: dict[str, Any], num_bytes: int) -> float | None:
    if not num_bytes:
        return 0.0
    lane = lanes.get("nvme->host")
    if lane is None or not lane["bytes"] or not lane["busy_s"]:
        return None
    # Where time is all latency the lane knows no bandwidth: then what it took so far, latency and all.
    return num_bytes / float(lane["bandwidth"] or lane["bytes"] / lane["busy_s"])


def _seconds_a_token(work: dict[str, Any]) -> float | None:
    num_tokens, seconds = int(work["prefill_tokens"]), float(work["prefill_s"])
    return seconds / num_tokens if num_tokens else None
