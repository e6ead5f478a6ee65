"""What every engine may be told of its sidecar, in the engine's own configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from hicache.errors import BadRequest


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings that all engines have, each with its default. An engine's own class adds others, and their bounds."""

    socket_dir: str = ""
    """The sidecar's socket directory, or "tls://HOST:PORT"; empty for this user's own."""
    tenant: str = ""
    secret_file: str = ""
    """File with the tenant's secret, as it is, without a line end."""
    weights: str = ""
    """Names the weights in place of the digest of their files: whoever changes them gives another name."""
    strict: bool = False
    """Refuse to start without a sidecar that fits, instead of going on without a cache."""

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

    def _require_seconds(self, **most: float) -> None:
        """Each of these is above 0 and at most so many seconds. Raises `BadRequest`."""
        for name, highest in most.items():
            if not 0.0 < getattr(self, name) <= highest:
                raise BadRequest(name, f"{getattr(self, name)} is not above 0 and at most {highest}")

    def _require_count(self, **most: int) -> None:
        """Each of these is within 1 and so many. Raises `BadRequest`."""
        for name, highest in most.items():
            if not 1 <= getattr(self, name) <= highest:
                raise BadRequest(name, f"{getattr(self, name)} is not within 1 to {highest}")
