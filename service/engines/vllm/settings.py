"""What `kv_connector_extra_config` may say."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from hicache.errors import BadRequest

GiB = 1 << 30


@dataclass(frozen=True, slots=True)
class Settings:
    """The connector's settings, each with its default. Times are seconds."""

    socket_dir: str = ""
    """The sidecar's socket directory, or "tls://HOST:PORT"; empty for this user's own."""
    tenant: str = ""
    secret_file: str = ""
    """File with the tenant's secret, as it is, without a line end."""
    weights: str = ""
    """Names the weights in place of the digest of their files: whoever changes them gives another name."""
    strict: bool = False
    """Refuse to start without a sidecar that fits, instead of going on without a cache."""
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
        for name, most in (("lookup_timeout_s", 60.0), ("load_timeout_s", 600.0), ("save_timeout_s", 600.0)):
            if not 0.0 < getattr(self, name) <= most:
                raise BadRequest(name, f"{getattr(self, name)} is not above 0 and at most {most}")
        for name, highest in (("staging_bytes", 64 * GiB), ("max_pending_saves", 4096)):
            if not 1 <= getattr(self, name) <= highest:
                raise BadRequest(name, f"{getattr(self, name)} is not within 1 to {highest}")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Check and take what was given. Raises `BadRequest` naming the key."""
        known = {each.name: each.default for each in fields(cls)}
        taken: dict[str, Any] = {}
        for key, value in given.items():
            if key not in known:
                raise BadRequest(key, f"is no setting; there are {', '.join(sorted(known))}")
            kind = type(known[key])
            if kind is float and type(value) is int:
                value = float(value)
            if type(value) is not kind:
                raise BadRequest(key, f"{value!r} is not {kind.__name__}")
            taken[key] = value
        return cls(**taken)

    def secret(self) -> bytes:
        """The tenant's secret. Raises `BadRequest` for a file that cannot be read."""
        if not self.secret_file:
            return b""
        try:
            return Path(self.secret_file).read_bytes()
        except OSError as error:
            raise BadRequest("secret_file", f"{self.secret_file}: {error.strerror}") from error
