"""What a server is told, checked before anything is touched.

`KEYS` is the one table of what can be set: in a file, as TOML with these tables and keys, and by flags, which overrule
the file. What the table does not name is refused.
"""

import grp
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hicache.admissions import ALWAYS
from hicache.arguments import MAX_NAME_CHARS, flag, name, real, whole
from hicache.errors import BadRequest
from hicache.layout import KVDtype, KVLayout
from hicache.policies import DEFAULT, check_policy
from hicache.quotas import TenantQuota
from hicache.service.listening import Address, Tcp
from hicache.service.sockets import default_directory
from hicache.service.wire import longest_request
from hicache.write_policy import WritePolicy

MAX_SECONDS: Final = 86_400.0
"""Longest time that can be set."""
_SIZE: Final = re.compile(r"([0-9]+)\s*([kmgt]i?b?|b?)", re.IGNORECASE)
LOCAL_ENDPOINTS: Final = ("ipc://", "tcp://127.0.0.1:", "tcp://[::1]:")
"""What endpoints of events begin with: they hold the tokens of prompts, and ZMQ asks nobody who they are."""
LOOPBACK: Final = "127.0.0.1"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client, or all of them together, may take at most. Everything is refused before it is allocated."""

    max_sessions: int = 64
    """Those included that have ended while answers are not read, or promises not settled. Half of them, of `max_calls`,
    `total_staging_bytes` and `message_bytes` is divided among the tenants, so that none is without
    (`server/shares.py`)."""
    max_calls: int = 1024
    """Calls under way, those included whose answers were not read, over all sessions and beyond each one's own share:
    that is one `max_sessions`-th of as many again, and at least one."""
    max_calls_per_session: int = 64
    max_tokens: int = 1 << 20
    """Tokens of one prompt."""
    max_namespaces: int = 1024
    """Namespaces of a session; the one that was used longest ago goes first, and its client registers it again."""
    max_handles: int = 1024
    """Node handles of a session; the one that was used longest ago goes first."""
    max_leases: int = 1024
    """Leases and reservations of a session, together."""
    leased_share: float = 0.5
    """Share of the host tier that one session's leases and reservations may keep in place, above 0 to 1, and of the
    slowest tier that its pins may keep in the cache. A named tenant's sessions have it together."""
    staging_bytes: int = 256 << 20
    """Staging memory of one session; no more than its tenant's part of that of all."""
    total_staging_bytes: int = 4 << 30
    """Staging memory of all sessions."""
    message_bytes: int = 512 << 20
    """What clients have sent and the server has not answered yet, over all calls of sessions."""


@dataclass(frozen=True, slots=True)
class Times:
    """How long things may take, in seconds."""

    lease_s: float = 10.0
    """A session that was silent for so long is ended."""
    attach_s: float = 5.0
    """From the hello to the session's stream."""
    max_call_s: float = 60.0
    """Longest deadline of a call; also that of one without."""
    drain_s: float = 5.0
    """How long a stop waits for sessions that still hold something."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything that `hicache serve` needs to know. Made by `ServeConfig.checked`."""

    layout: KVLayout
    host_bytes: int
    keep_arena: bool = False
    """Whether the arena outlives the server, in the hands of a supervisor."""
    socket_dir: Path = field(default_factory=default_directory)
    socket_group: int | None = None
    """Group whose members may be engines beside the server's own user; None for nobody else."""
    nvme_dirs: tuple[Path, ...] = ()
    nvme_bytes: int | None = None
    nvme_min_free_bytes: int = 0
    nvme_write_bytes_per_day: int | None = None
    nvme_codec: str = "none"
    nvme_admission: str = ALWAYS
    metadata_bytes: int | None = None
    policy: str = DEFAULT
    write_policy: str = WritePolicy.DEMOTE.value
    exclusive: bool = False
    tenants: Mapping[str, bytes | None] = field(default_factory=dict)
    """SHA-256 of each tenant's secret, None for one that needs none. Empty: there is one tenant, without a name."""
    quotas: Mapping[str, TenantQuota] = field(default_factory=dict)
    """What of each tier is one tenant's own, for tenants that have such a part."""
    limits: Limits = Limits()
    times: Times = Times()
    events_endpoint: str | None = None
    """Where KV events are published over ZMQ, on this machine; None for nowhere."""
    events_replay_endpoint: str | None = None
    """Where they can be had again."""
    metrics_port: int | None = None
    """Where metrics are served over HTTP, on the loopback address; 0 for any free port, None for nowhere."""
    http: Address | None = None
    """Where the page is served over HTTP, a loopback address; None for nowhere."""
    http_tokenizer: Path | None = None
    """Directory of the tokenizer.json with which the page shows text; None to show token ids."""
    tcp: Tcp | None = None
    """Where engines on other machines are served; None for nowhere."""

    @classmethod
    def checked(cls, settings: Mapping[str, object]) -> "ServeConfig":
        """From a tree of settings, as TOML gives it. Raises `BadRequest` naming the key and its bound."""
        values = _flat(settings, "")
        tenants = {key: values.pop(key) for key in list(values) if key.startswith("tenants.")}
        for key in values:
            if key not in KEYS:
                raise BadRequest(key, "is not a key that can be set")
        for key in REQUIRED:
            if key not in values:
                raise BadRequest(key, "is missing")
        parsed = {key: KEYS[key](key, value) for key, value in values.items()}
        named = {key.removeprefix("tenants."): _tenant(key, table) for key, table in tenants.items()}
        config = cls(
            layout=_layout(parsed),
            host_bytes=parsed["host.bytes"],
            limits=Limits(**_group(parsed, "limits.")),
            times=Times(**_group(parsed, "times.")),
            tcp=Tcp.checked(_group(parsed, "tcp.")),
            tenants={tenant: table.get("secret_sha256") for tenant, table in named.items()},
            quotas={
                tenant: TenantQuota(host=table.get("host"), nvme=table.get("nvme"))
                for tenant, table in named.items()
                if "host" in table or "nvme" in table
            },
            **{_FIELDS[key]: value for key, value in parsed.items() if key in _FIELDS},
        )
        config._check_together()
        return config

    def _check_together(self) -> None:
        if bool(self.nvme_dirs) != (self.nvme_bytes is not None):
            raise BadRequest("nvme.bytes", "is given together with nvme.dir, or neither is")
        if self.events_replay_endpoint is not None and self.events_endpoint is None:
            raise BadRequest("events.endpoint", "is given together with events.replay_endpoint")
        if self.limits.staging_bytes > self.limits.total_staging_bytes:
            raise BadRequest("limits.staging_bytes", "is more than limits.total_staging_bytes")
        if self.http_tokenizer is not None and self.http is None:
            raise BadRequest("http.listen", "is given together with http.tokenizer")
        if len(self.tenants) > max(1, self.limits.max_sessions // 2):
            problem = f"is less than {2 * len(self.tenants)}: half of them is divided among {len(self.tenants)} tenants"
            raise BadRequest("limits.max_sessions", problem)
        longest = longest_request(self.limits.max_tokens)
        if self.limits.message_bytes < longest:
            raise BadRequest("limits.message_bytes", f"is less than {longest}: one prompt of limits.max_tokens")


def _flat(settings: Mapping[str, object], prefix: str) -> dict[str, object]:
    """Settings by dotted key; a table of a tenant is one too, even if it is empty."""
    values: dict[str, object] = {}
    for key, value in settings.items():
        full = f"{prefix}{key}"
        if isinstance(value, Mapping) and prefix != "tenants.":
            values |= _flat(value, f"{full}.")
        else:
            values[full] = value
    return values


def _group(parsed: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in parsed.items() if key.startswith(prefix)}


def _layout(parsed: Mapping[str, Any]) -> KVLayout:
    try:
        return KVLayout.uniform(**_group(parsed, "layout."))
    except BadRequest as error:
        raise BadRequest("layout", f"{error.field}: {error.problem}") from None


def _tenant(key: str, table: object) -> dict[str, Any]:
    """One tenant's table, checked."""
    if not name(key, key.removeprefix("tenants.")):
        raise BadRequest("tenants", "the name of a tenant is empty")
    if not isinstance(table, Mapping):
        raise BadRequest(key, "is not a table")
    for each in table:
        if each not in TENANT_KEYS:
            raise BadRequest(f"{key}.{each}", "is not a key that can be set")
    return {each: TENANT_KEYS[each](f"{key}.{each}", value) for each, value in table.items()}


# -- kinds of values --------------------------------------------------------------------------------------------------


def _count(key: str, value: object) -> int:
    return whole(key, value, 1, 1 << 40)


def _bytes(key: str, value: object) -> int:
    """A number of bytes, or a text such as "64GiB"; a bare k, m, g or t is a power of 1024, kb and so on of 1000."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise BadRequest(key, f"{value!r:.80} is not a size such as 4096 or 64GiB")
        unit = match[2].lower()
        base = 1000 if len(unit) == 2 and unit.endswith("b") else 1024
        value = int(match[1]) * base ** " kmgt".find(unit[:1] if unit not in ("", "b") else " ")
    return whole(key, value, 0, 1 << 62)


def _seconds(key: str, value: object) -> float:
    seconds = real(key, value, " of seconds")
    if not 0.05 <= seconds <= MAX_SECONDS:
        raise BadRequest(key, f"{seconds:g} is not within 0.05 to {MAX_SECONDS:g} seconds")
    return seconds


def _port(key: str, value: object) -> int:
    return whole(key, value, 0, 65_535)


def _loopback(key: str, value: object) -> Address:
    """An address of this machine's own, from `HOST:PORT` or a port alone."""
    is_port = isinstance(value, int) or (isinstance(value, str) and value.isascii() and value.isdigit())
    address = Address.parse(key, f"{LOOPBACK}:{value}" if is_port else value)
    if not address.is_loopback:
        raise BadRequest(
            key, f"{address.host} is not a loopback address: the page shows prompts, over plain HTTP; ssh -L reaches it"
        )
    return Address(LOOPBACK, address.port) if address.host == "localhost" else address


def _endpoint(key: str, value: object) -> str:
    endpoint = _text(key, value)
    if not endpoint.startswith(LOCAL_ENDPOINTS):
        raise BadRequest(key, f"{endpoint!r:.120} begins with none of {', '.join(LOCAL_ENDPOINTS)}")
    return endpoint


def _share(key: str, value: object) -> float:
    share = real(key, value)
    if not 0 < share <= 1:
        raise BadRequest(key, f"{share:g} is not above 0 and at most 1")
    return share


def _part(key: str, value: object) -> float | int:
    """Of a tier: a share as a float, or bytes."""
    return _share(key, value) if isinstance(value, float) else _bytes(key, value)


def _digest(key: str, value: object) -> bytes:
    if not (isinstance(value, str) and _DIGEST.fullmatch(value)):
        raise BadRequest(key, "is not a SHA-256 in 64 hexadecimal digits")
    return bytes.fromhex(value)


def _text(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise BadRequest(key, f"{type(value).__name__} is not a text")
    if not value or len(value) > MAX_NAME_CHARS or "\0" in value:
        raise BadRequest(key, f"{len(value)} characters are not 1 to {MAX_NAME_CHARS} without zero bytes")
    return value


def _path(key: str, value: object) -> Path:
    return Path(_text(key, value))


def _group_id(key: str, value: object) -> int:
    """A group by its number or its name."""
    if isinstance(value, str):
        try:
            return grp.getgrnam(value).gr_gid
        except KeyError:
            raise BadRequest(key, f"{value!r:.80} is no group of this machine") from None
    return whole(key, value, 0, (1 << 32) - 2)


def _paths(key: str, value: object) -> tuple[Path, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple([_path(key, each) for each in values])


def _dtype(key: str, value: object) -> KVDtype:
    try:
        return KVDtype(value)
    except ValueError:
        raise BadRequest(key, f"{value!r:.80} is none of {', '.join(each.value for each in KVDtype)}") from None


def _policy(key: str, value: object) -> str:
    check_policy(_text(key, value))
    return str(value)


def _write_policy(key: str, value: object) -> str:
    try:
        return WritePolicy.named(_text(key, value)).value
    except BadRequest as error:
        raise BadRequest(key, error.problem) from None


KEYS: Final[Mapping[str, Callable[[str, object], Any]]] = {
    "socket_dir": _path,
    "socket_group": _group_id,
    "layout.num_layers": _count,
    "layout.num_kv_heads": _count,
    "layout.head_dim": _count,
    "layout.dtype": _dtype,
    "layout.page_size": _count,
    "host.bytes": _bytes,
    "host.keep_arena": flag,
    "nvme.dir": _paths,
    "nvme.bytes": _bytes,
    "nvme.min_free_bytes": _bytes,
    "nvme.write_bytes_per_day": _bytes,
    "nvme.codec": _text,
    "nvme.admission": _text,
    "metadata_bytes": _bytes,
    "policy": _policy,
    "write_policy": _write_policy,
    "exclusive": flag,
    "limits.max_sessions": _count,
    "limits.max_calls": _count,
    "limits.max_calls_per_session": _count,
    "limits.max_tokens": _count,
    "limits.max_namespaces": _count,
    "limits.max_handles": _count,
    "limits.max_leases": _count,
    "limits.leased_share": _share,
    "limits.staging_bytes": _bytes,
    "limits.total_staging_bytes": _bytes,
    "limits.message_bytes": _bytes,
    "times.lease_s": _seconds,
    "times.attach_s": _seconds,
    "times.max_call_s": _seconds,
    "times.drain_s": _seconds,
    "metrics.port": _port,
    "http.listen": _loopback,
    "http.tokenizer": _path,
    "events.endpoint": _endpoint,
    "events.replay_endpoint": _endpoint,
    "tcp.listen": Address.parse,
    "tcp.token_sha256": _digest,
    "tcp.cert": _path,
    "tcp.key": _path,
    "tcp.client_ca": _path,
    "tcp.plain": flag,
}
"""Every key, and what makes a value of it."""

TENANT_KEYS: Final[Mapping[str, Callable[[str, object], Any]]] = {
    "secret_sha256": _digest,
    "host": _part,
    "nvme": _part,
}
"""The keys of a table `tenants.NAME`, all optional: its secret, and what of each tier is its own."""

REQUIRED: Final = ("layout.num_layers", "layout.num_kv_heads", "layout.head_dim", "layout.dtype", "layout.page_size",
                   "host.bytes")  # fmt: skip

_FIELDS: Final = {
    "socket_dir": "socket_dir",
    "socket_group": "socket_group",
    "host.keep_arena": "keep_arena",
    "nvme.dir": "nvme_dirs",
    "nvme.bytes": "nvme_bytes",
    "nvme.min_free_bytes": "nvme_min_free_bytes",
    "nvme.write_bytes_per_day": "nvme_write_bytes_per_day",
    "nvme.codec": "nvme_codec",
    "nvme.admission": "nvme_admission",
    "metadata_bytes": "metadata_bytes",
    "policy": "policy",
    "write_policy": "write_policy",
    "exclusive": "exclusive",
    "metrics.port": "metrics_port",
    "http.listen": "http",
    "http.tokenizer": "http_tokenizer",
    "events.endpoint": "events_endpoint",
    "events.replay_endpoint": "events_replay_endpoint",
}
"""Keys that are fields of `ServeConfig` as they are."""
