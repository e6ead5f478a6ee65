"""HTTP for whoever asks this server on its own machine: requests without a body, one a connection.

There are so many connections at a time, and each has `REQUEST_S` seconds. Nothing else of a request is looked at than
its head, of at most `MAX_HEAD_BYTES`.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NoReturn

from hicache.service.listening import Address
from hicache.service.server.accepting import Acceptor

BACKLOG: Final = 64
"""Connections that wait to be accepted."""
MAX_HEAD_BYTES: Final = 16 << 10
"""Of a request, up to its empty line."""
REQUEST_S: Final = 5.0
"""From a connection to the last byte of its answer."""
_END: Final = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody asks for."""

    method: str
    path: str
    query: str
    """What follows the path's question mark."""
    headers: Mapping[str, str]
    """By name in lower case; of a name that is given twice, both values with a comma between."""

    @property
    def only_reads(self) -> bool:
        """Whether it is a GET, or a HEAD, for which the answer's body is left out."""
        return self.method in ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class Response:
    """What is answered."""

    status: str
    body: bytes
    kind: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


Answer = Callable[[Request], Awaitable[Response]]

ONLY_GET: Final = Response("405 Method Not Allowed", b"there is only GET\n", headers={"Allow": "GET, HEAD"})
_NO_REQUEST: Final = Response("400 Bad Request", b"this is no request\n")


class HttpServer:
    """Answers at an address until it is closed. Belongs to the event loop."""

    def __init__(self, address: Address, named: str, *, requests_max: int) -> None:
        """Take the address, which is an IP address and a port, 0 for one that is free. Raises `OSError`.

        Args:
            named: what is served, for the log.
            requests_max: requests under way; connections above are closed at once.
        """
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((address.host, address.port))
            listening.listen(BACKLOG)
            listening.setblocking(False)
        except OSError:
            listening.close()
            raise
        self.port: Final = int(listening.getsockname()[1])
        self._acceptor: Final = Acceptor(listening, requests_max, named)

    def close(self) -> None:
        """Let nobody in any more; `run` is cancelled by its owner. Again is harmless."""
        self._acceptor.close()

    async def run(self, answer: Answer) -> NoReturn:
        """Let `answer` answer until cancelled; it raises nothing."""
        await self._acceptor.run(partial(self._handle, answer=answer))

    async def _handle(self, connection: socket.socket, answer: Answer) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(REQUEST_S):
                request = _parsed(await _read_head(connection))
                response = await answer(request) if request is not None else _NO_REQUEST
                has_body = request is None or request.method != "HEAD"
                await loop.sock_sendall(connection, _written(response, has_body=has_body))
        except (OSError, TimeoutError):
            return  # whoever asked is gone, or never asked


async def _read_head(connection: socket.socket) -> bytes:
    """A request up to its empty line; less where it ends or is too long before that."""
    loop, head = asyncio.get_running_loop(), b""
    while _END not in head and len(head) < MAX_HEAD_BYTES:
        part = await loop.sock_recv(connection, MAX_HEAD_BYTES - len(head))
        if not part:
            break
        head += part
    return head


def _parsed(head: bytes) -> Request | None:
    """None for what is no request."""
    first, *lines = head.partition(_END)[0].decode("latin-1").split("\r\n")
    words = first.split(" ")
    if _END not in head or len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        name, value = name.strip().lower(), value.strip()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    path, _, query = words[1].partition("?")
    return Request(words[0], path, query, headers)


def _written(response: Response, *, has_body: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {response.status}",
        f"Content-Length: {len(response.body)}",
        "Connection: close",
        f"Content-Type: {response.kind}",
        *[f"{name}: {value}" for name, value in response.headers.items()],
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (response.body if has_body else b"")
