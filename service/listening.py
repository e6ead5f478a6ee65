"""Where a server can be reached over TCP, by whom, and how: checked before anything is made.

Off unless an address is given. Whoever connects brings the access token, of which the server knows the SHA-256 alone;
and the connection is encrypted, unless the address is one of this machine's own and `plain` says that it need not be.
"""

import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from hicache.errors import BadRequest

MAX_PEM_BYTES: Final = 1 << 20
_ADDRESS: Final = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9.\-]+)):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port."""

    host: str
    port: int
    """0 for any that is free."""

    @classmethod
    def parse(cls, key: str, text: object) -> "Address":
        """From `HOST:PORT` or `[IPV6]:PORT`. Raises `BadRequest` naming `key`."""
        found = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
        if found is None or int(found[3]) > 65_535:
            raise BadRequest(key, f"{text!r:.120} is not HOST:PORT or [IPV6]:PORT")
        return cls(found[1] or found[2], int(found[3]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class Tcp:
    """What a server is told of TCP. Made by `checked`."""

    address: Address
    token_sha256: bytes
    cert: Path | None
    """Certificate chain, PEM; None for a plain connection."""
    key: Path | None
    client_ca: Path | None
    """Whose certificates clients must have; None for clients without."""

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> "Tcp | None":
        """From the keys of the table `tcp`, each checked by itself. Raises `BadRequest` naming what is missing."""
        if not values:
            return None
        address: Address | None = values.get("listen")
        if address is None:
            raise BadRequest("tcp.listen", "is missing, without which the other keys of tcp mean nothing")
        if "token_sha256" not in values:
            raise BadRequest("tcp.token_sha256", "is missing: without an access token anybody could enter")
        if values.get("plain"):
            if not address.is_loopback:
                raise BadRequest("tcp.plain", f"{address.host} is not this machine's own; give tcp.cert and tcp.key")
            if unused := {"cert", "key", "client_ca"} & values.keys():
                raise BadRequest(f"tcp.{min(unused)}", "contradicts tcp.plain")
        else:
            for each in ("cert", "key"):
                if each not in values:
                    raise BadRequest(f"tcp.{each}", "is missing; without TLS only by tcp.plain, at a loopback address")
        return cls(
            address, values["token_sha256"], values.get("cert"), values.get("key"), values.get("client_ca")
        )

    def check_free(self) -> None:
        """Raise `BadRequest` for an address that another program listens at, or that is none of this machine's."""
        try:
            infos = socket.getaddrinfo(self.address.host, self.address.port, type=socket.SOCK_STREAM)
            for family, kind, protocol, _, address in infos:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
        except OSError as error:
            raise BadRequest("tcp.listen", f"{self.address}: {error.strerror or error}") from None

    def credentials(self) -> grpc.ServerCredentials | None:
        """What the server proves itself with; None for a plain connection. Reads the files. Raises `BadRequest`."""
        if self.cert is None or self.key is None:
            return None
        cert, key = _read("tcp.cert", self.cert), _read("tcp.key", self.key)
        if os.stat(self.key).st_mode & 0o007:
            raise BadRequest("tcp.key", f"{self.key}: everybody may read it; chmod 600 it")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key, password="")
        except (OSError, ValueError) as error:
            raise BadRequest("tcp.cert", f"{self.cert} and {self.key} are no pair of PEM files: {error}") from None
        client_ca = None if self.client_ca is None else _read("tcp.client_ca", self.client_ca)
        if client_ca is not None:
            try:
                ssl.create_default_context(cadata=client_ca.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                raise BadRequest("tcp.client_ca", f"{self.client_ca} holds no certificates: {error}") from None
        return grpc.ssl_server_credentials(
            [(key, cert)], root_certificates=client_ca, require_client_auth=client_ca is not None
        )


def _read(key: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_PEM_BYTES + 1)
    except OSError as error:
        raise BadRequest(key, f"{path}: {error.strerror}") from None
    if len(text) > MAX_PEM_BYTES:
        raise BadRequest(key, f"{path}: has more than {MAX_PEM_BYTES} bytes")
    return text
