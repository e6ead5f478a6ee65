"""What the extra configuration of SGLang's backend may say for hicache, under the key "hicache"."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from hicache.errors import BadRequest
from hicache.service.engines.settings import EngineSettings

KEY: Final = "hicache"
"""The one field of the extra configuration that is read here; the others are SGLang's."""


@dataclass(frozen=True, slots=True)
class Settings(EngineSettings):
    """The backend's settings, each with its default. Times are seconds."""

    lookup_timeout_s: float = 2.0
    """How long SGLang's query thread waits to be told how many pages of a prompt are cached."""
    load_timeout_s: float = 10.0
    """How long one batch of pages may take to load, at most 128; what did not come in time is a miss."""
    save_timeout_s: float = 10.0
    """How long one batch of pages may take to save."""
    staging_bytes: int = 256 << 20
    """Shared memory that saves pass through, for each rank."""

    def __post_init__(self) -> None:
        self._require_seconds(lookup_timeout_s=60.0, load_timeout_s=600.0, save_timeout_s=600.0)
        self._require_count(staging_bytes=1 << 36)

    @classmethod
    def in_extra_config(cls, extra_config: Mapping[str, Any] | None) -> Self:
        """Take the settings out of SGLang's extra configuration. Raises `BadRequest`."""
        given = (extra_config or {}).get(KEY, {})
        if not isinstance(given, Mapping):
            raise BadRequest(KEY, f"{type(given).__name__} is no table of settings")
        return cls.of(given)
