"""The machine that a replay simulates."""

from dataclasses import dataclass, field
from typing import Final, Self

from hicache.admissions import ALWAYS, check_admission
from hicache.errors import BadRequest
from hicache.prefill import PrefillCurve
from hicache.write_policy import WritePolicy

PAGES_MIN: Final = 8
"""Fewest pages of a tier."""
PAGES_MAX: Final = 1 << 26
"""Most pages of a tier."""
NODES_MAX: Final = 64
"""Most nodes of a cluster."""
TOKEN_BYTES: Final = 128 << 10
"""Default bytes of KV of a token."""
DEVICE_BYTES, HOST_BYTES, NVME_BYTES = 40 << 30, 256 << 30, 1 << 40
"""Default tiers."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What is simulated. Raises `BadRequest` naming the field that is out of bounds."""

    block_tokens: int
    """Tokens of a block, which is a page."""
    token_bytes: int
    """Bytes of KV of a token."""
    device_pages: int
    """0 for a sidecar, which has none: engines copy what it lends them out of the host, and store what they compute."""
    host_pages: int
    nvme_pages: int
    """0 for a machine without."""
    link_bandwidth: float = 25e9
    """Bytes a second between device and host, each way."""
    link_latency_s: float = 20e-6
    nvme_read_bandwidth: float = 6e9
    nvme_write_bandwidth: float = 3e9
    nvme_latency_s: float = 100e-6
    prefill: PrefillCurve = field(default_factory=lambda: PrefillCurve(token_s=50e-6, attend_s=0.5e-9, step_s=5e-3))
    """Seconds to compute tokens of a prompt."""
    step_tokens: int = 8192
    concurrency: int = 64
    pace: float = 1.0
    """How much faster than in the trace requests come."""
    write_policy: WritePolicy = WritePolicy.DEMOTE
    exclusive: bool = False
    """Whether a page leaves NVMe once it is in the host."""
    admission: str = ALWAYS
    """Which pages may be written to NVMe, by a name of `hicache.admissions`."""
    nodes: int = 1
    """Sidecars, each with tiers and an engine of its own, behind one router."""

    def __post_init__(self) -> None:
        for name, low in (("device_pages", 0), ("host_pages", PAGES_MIN), ("nvme_pages", 0)):
            value = getattr(self, name)
            if not (low <= value <= PAGES_MAX) or 0 < value < PAGES_MIN:
                allowed = f"{PAGES_MIN} to {PAGES_MAX}" + ("" if low else ", or 0")
                raise BadRequest(name, f"{value} pages of {self.block_tokens} tokens are not within {allowed}")
        if not 1 <= self.nodes <= NODES_MAX:
            raise BadRequest("nodes", f"{self.nodes} is not within 1 to {NODES_MAX}")
        check_admission(self.admission)
        if not self.nvme_pages:
            for name, is_given in (
                ("admission", self.admission != ALWAYS),
                ("write_policy", self.write_policy is not WritePolicy.DEMOTE),
                ("exclusive", self.exclusive),
            ):
                if is_given:
                    raise BadRequest(name, "is about NVMe, and there is none")
        if self.exclusive and self.write_policy is not WritePolicy.DEMOTE:
            raise BadRequest("exclusive", f"does not go with {self.write_policy.value}, which keeps copies on NVMe")

    @classmethod
    def default(cls, block_tokens: int) -> Self:
        """What is simulated where nothing else is asked for, with pages of so many tokens."""
        page_bytes = block_tokens * TOKEN_BYTES
        return cls(
            block_tokens=block_tokens, token_bytes=TOKEN_BYTES, device_pages=DEVICE_BYTES // page_bytes,
            host_pages=HOST_BYTES // page_bytes, nvme_pages=NVME_BYTES // page_bytes,
        )  # fmt: skip

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.block_tokens * self.token_bytes

    @property
    def total_pages(self) -> int:
        """Pages of all tiers of all nodes together."""
        return self.nodes * (self.device_pages + self.host_pages + self.nvme_pages)
