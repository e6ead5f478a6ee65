"""What came of a replay."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class NodeFound:
    """What one node served."""

    num_requests: int = 0
    tokens: int = 0
    """Of their prompts."""
    tokens_found: int = 0

    @property
    def hit_rate(self) -> float:
        """Tokens found of all tokens; 0.0 without any."""
        return self.tokens_found / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class Replayed:
    """What came of a replay, over all nodes. Tokens are those of prompts."""

    tokens: int = 0
    tokens_found: dict[str, int] = field(default_factory=dict)
    """Found, by the fastest tier that had them when they were asked for."""
    blocks_found: int = 0
    document_tokens_found: int = 0
    num_refused: int = 0
    """Requests for which there was no room in time: they were computed without the cache."""
    lane_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes copied, by lane, `host->nvme` and so on."""
    nvme_written_bytes: int = 0
    """In all ways."""
    nvme_refused_bytes: int = 0
    """Of pages that admission kept from NVMe, each time that it was asked."""
    pages_held: int = 0
    """Different pages that the caches hold at the end."""
    pages_on_nvme: int = 0
    """Those of them that NVMe has: what a restart would find."""
    ttft_s: list[float] = field(default_factory=list)
    """Seconds from arrival to first token of each request, in the order in which they had it."""
    virtual_s: float = 0.0
    nodes: list[NodeFound] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Tokens found of all tokens; 0.0 without any."""
        return sum(self.tokens_found.values()) / self.tokens if self.tokens else 0.0

    def ttft(self, share: float) -> float:
        """The TTFT that `share` of the requests do not exceed; 0.0 without any."""
        return sorted(self.ttft_s)[min(len(self.ttft_s) - 1, int(share * len(self.ttft_s)))] if self.ttft_s else 0.0

    def copied(self, lane_pages: Mapping[str, int], page_bytes: int) -> None:
        """Add what the lanes of a node have copied."""
        for name, num_pages in lane_pages.items():
            self.lane_bytes[name] = self.lane_bytes.get(name, 0) + num_pages * page_bytes
