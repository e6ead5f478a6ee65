"""What a run of the demo found out, and its JSON form.

    {"format": "hicache-demo", "version": 1,
     "machine":   {"python", "torch", "transformers", "platform", "cpus", "device"},
     "model":     {"name", "dtype", "num_layers", "num_kv_heads", "head_dim", "page_size", "page_bytes", "token_bytes"},
     "documents": [{"title", "tokens", "cut_from"}],
     "budgets":   {"device_bytes", "host_bytes", "nvme_bytes", "working_set_tokens", "working_set_bytes"},
     "requests":  [{"number", "documents", "question", "prompt_tokens", "tokens": {"device", "host", "nvme",
                    "recomputed"}, "served_by", "oversized", "ttft_s", "total_s", "answer", "answer_tokens"}],
     "comparisons": [{"number", "verdict": "equal" | "near tie" | "different", "first_difference", "gap",
                    "max_logit_difference"}],
     "summary":   {"tokens": {"device", "host", "nvme", "recomputed"}, "hit_rate", "ttft_ratio",
                   "ttft_s": {"device" | "host" | "nvme" | "hit" | "recompute": {"p50", "requests"}},
                   "ttft_min_prompt_tokens",
                   "identical_outputs": {"equal", "near_ties", "compared", "tolerance", "max_logit_difference"},
                   "bytes_by_lane": {"device->host": bytes, ...},
                   "tiers": {tier: {"capacity_bytes", "used_bytes"}},
                   "device_io": {"read_bytes", "write_bytes", "nvme_lane_read_bytes", "nvme_lane_write_bytes",
                    "nvme_streamed_bytes"},
                   "seconds": {"run", "compare"}, "seed", "ok"}}

Times are seconds, sizes bytes; what does not apply is null. `ttft_ratio` is the median TTFT of recomputed prompts
divided by that of hits, over prompts of at least `ttft_min_prompt_tokens` tokens, without the oversized one.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from hicache.tools.demo.process_io import ProcessIO

TIERS: Final = ("device", "host", "nvme")
"""Where tokens may come from, fast to slow; a request has `recomputed` beside them."""
RECOMPUTE: Final = "recompute"
TTFT_MIN_PROMPT_TOKENS: Final = 1_500
"""Shorter prompts do not enter the comparison of times: their prefill is over before it can be measured well."""


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request as it went."""

    number: int
    """From 1, in the order asked."""
    titles: tuple[str, ...]
    question: str
    prompt_tokens: int
    tokens: Mapping[str, int]
    """Prompt tokens by where they were found: "device", "host", "nvme"."""
    ttft_s: float
    """From the opening of the request to the first new token."""
    total_s: float
    answer: str
    answer_tokens: tuple[int, ...]
    oversized: bool = False
    """Whether its context exceeds the device budget by design."""

    @property
    def recomputed(self) -> int:
        """Prompt tokens that the model had to compute."""
        return self.prompt_tokens - sum(self.tokens.values())

    @property
    def served_by(self) -> str:
        """The tier that most of the cached tokens came from, or "recompute" when less than half were cached."""
        if self.recomputed * 2 > self.prompt_tokens:
            return RECOMPUTE
        return max(TIERS, key=lambda tier: (self.tokens.get(tier, 0), -TIERS.index(tier)))

    def to_json(self) -> dict[str, Any]:
        tokens = {tier: self.tokens.get(tier, 0) for tier in TIERS} | {"recomputed": self.recomputed}
        return {
            "number": self.number, "documents": list(self.titles), "question": self.question,
            "prompt_tokens": self.prompt_tokens, "tokens": tokens, "served_by": self.served_by,
            "oversized": self.oversized, "ttft_s": self.ttft_s, "total_s": self.total_s, "answer": self.answer,
            "answer_tokens": list(self.answer_tokens),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """One request's answer beside that of plain `transformers` generation."""

    number: int
    verdict: str
    """ "equal"; "near tie": they part where the plain run's two best logits are within the tolerance; "different"."""
    max_logit_difference: float
    """Largest absolute difference of any logit, over the steps that had the same tokens before them."""
    first_difference: int | None = None
    """The first answer token that differs, from 0."""
    gap: float | None = None
    """How far apart the plain run's two best logits are there."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"max_logit_difference": _finite(self.max_logit_difference)}


@dataclass(frozen=True, slots=True)
class TierUse:
    """How full a tier was at the end."""

    capacity_bytes: int
    used_bytes: int


@dataclass(slots=True)
class DemoResult:
    """Everything a run found out. Filled while it runs."""

    machine: dict[str, Any]
    model: dict[str, Any]
    documents: list[dict[str, Any]]
    budgets: dict[str, int]
    seed: int
    tolerance: float
    """Logits closer than this are a near tie."""
    requests: list[RequestResult] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    bytes_by_lane: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, TierUse] = field(default_factory=dict)
    device_io: ProcessIO | None = None
    """Read from and written to block devices while the requests ran."""
    nvme_streamed_bytes: int = 0
    """Read from the NVMe tier layer by layer, for attention in place, beside what the lanes moved."""
    run_s: float = 0.0
    compare_s: float = 0.0

    @property
    def tokens(self) -> dict[str, int]:
        """Prompt tokens by where they came from, over all requests."""
        sums = {tier: sum(request.tokens.get(tier, 0) for request in self.requests) for tier in TIERS}
        return sums | {"recomputed": sum(request.recomputed for request in self.requests)}

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that was not computed."""
        total = sum(request.prompt_tokens for request in self.requests)
        return 1 - self.tokens["recomputed"] / total if total else 0.0

    def ttft(self, served_by: str) -> tuple[float | None, int]:
        """Median TTFT and number of the long enough requests that were served by a tier, by any tier ("hit"), or by
        recomputing."""
        times = [
            request.ttft_s
            for request in self.requests
            if request.prompt_tokens >= TTFT_MIN_PROMPT_TOKENS
            and not request.oversized
            and (request.served_by == served_by or (served_by == "hit" and request.served_by != RECOMPUTE))
        ]
        return (statistics.median(times) if times else None), len(times)

    def ttft_ratio(self, served_by: str = "hit") -> float | None:
        """How many times longer recomputing takes to the first token than such a hit; None without either."""
        recompute, hit = self.ttft(RECOMPUTE)[0], self.ttft(served_by)[0]
        return recompute / hit if recompute is not None and hit else None

    def count(self, verdict: str) -> int:
        """Comparisons that ended so."""
        return sum(comparison.verdict == verdict for comparison in self.comparisons)

    @property
    def max_logit_difference(self) -> float | None:
        """Largest over all comparisons; None without any."""
        return max((comparison.max_logit_difference for comparison in self.comparisons), default=None)

    @property
    def ok(self) -> bool:
        """Whether nothing differed from plain generation, near ties aside."""
        return self.count("different") == 0

    def lane_bytes(self, lane: str) -> int:
        """Bytes that a lane such as "nvme->host" moved."""
        return self.bytes_by_lane.get(lane, 0)

    def to_json(self) -> dict[str, Any]:
        """The form that the module's docstring describes."""
        times = {}
        for served_by in (*TIERS, "hit", RECOMPUTE):
            p50, number = self.ttft(served_by)
            times[served_by] = {"p50": p50, "requests": number}
        io = self.device_io
        return {
            "format": "hicache-demo",
            "version": 1,
            "machine": self.machine,
            "model": self.model,
            "documents": self.documents,
            "budgets": self.budgets,
            "requests": [request.to_json() for request in self.requests],
            "comparisons": [comparison.to_json() for comparison in self.comparisons],
            "summary": {
                "tokens": self.tokens,
                "hit_rate": self.hit_rate,
                "ttft_ratio": self.ttft_ratio(),
                "ttft_s": times,
                "ttft_min_prompt_tokens": TTFT_MIN_PROMPT_TOKENS,
                "identical_outputs": {
                    "equal": self.count("equal"), "near_ties": self.count("near tie"),
                    "compared": len(self.comparisons), "tolerance": self.tolerance,
                    "max_logit_difference": _finite(self.max_logit_difference),
                },
                "bytes_by_lane": self.bytes_by_lane,
                "tiers": {name: asdict(use) for name, use in self.tiers.items()},
                "device_io": {
                    "read_bytes": io.read_bytes if io else None, "write_bytes": io.write_bytes if io else None,
                    "nvme_lane_read_bytes": self.lane_bytes("nvme->host"),
                    "nvme_lane_write_bytes": self.lane_bytes("host->nvme"),
                    "nvme_streamed_bytes": self.nvme_streamed_bytes,
                },
                "seconds": {"run": self.run_s, "compare": self.compare_s},
                "seed": self.seed,
                "ok": self.ok,
            },
        }  # fmt: skip


def _finite(value: float | None) -> float | None:
    # JSON has no infinity: a logit that is not a number is "different", and its distance is null.
    return value if value is not None and math.isfinite(value) else None


def choose_comparisons(requests: Sequence[RequestResult], at_least: int, each: int) -> list[int]:
    """Numbers of the requests to compare with plain generation: every oversized one, `each` that every tier served and
    one that none did, as far as there are so many, then the earliest others until there are `at_least`. Ascending."""
    chosen = [request.number for request in requests if request.oversized]
    for served_by, wanted in (*((tier, each) for tier in TIERS), (RECOMPUTE, 1)):
        alike = [request.number for request in requests if request.served_by == served_by and not request.oversized]
        # The last ones: by then the pages have been through the most.
        chosen += alike[-wanted:]
    rest = [request.number for request in requests if request.number not in chosen]
    chosen += rest[: max(at_least - len(chosen), 0)]
    return sorted(set(chosen))
