"""What `kv_connector_extra_config` may say."""

from dataclasses import dataclass

from hicache.service.engines.settings import EngineSettings

GiB = 1 << 30


@dataclass(frozen=True, slots=True)
class Settings(EngineSettings):
    """The connector's settings, each with its default. Times are seconds."""

    lookup_timeout_s: float = 0.25
    """How long the scheduler waits to be told what is cached."""
    load_timeout_s: float = 5.0
    """How long a request waits for pages before it computes them."""
    save_timeout_s: float = 10.0
    """How long the blocks of a finished request may be held for saving."""
    staging_bytes: int = 256 << 20
    """Shared memory that saves pass through, for each worker."""
    max_pending_saves: int = 64
    """Saves under way in a worker, beyond which others are left out."""

    def __post_init__(self) -> None:
        self._require_seconds(lookup_timeout_s=60.0, load_timeout_s=600.0, save_timeout_s=600.0)
        self._require_count(staging_bytes=64 * GiB, max_pending_saves=4096)
