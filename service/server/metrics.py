"""Metrics over HTTP, at a port of the loopback address: `GET /metrics`, and nothing else.

The port is taken before the cache is opened, so that one in use is told of at once. Each connection is for one request
and has `REQUEST_S` seconds; there are at most `MAX_REQUESTS` at a time. What is counted is read on the loop, in about a
millisecond, and written down as text in a thread.
"""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Final, NoReturn

from aiofiles.os import wrap
from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder

from hicache.errors import BadRequest
from hicache.service.metrics import registry
from hicache.service.server.accepting import Acceptor

MAX_REQUESTS: Final = 8
"""Requests under way; further connections are closed."""
REQUEST_S: Final = 5.0
"""From the connection to the last byte of the answer."""
BACKLOG: Final = 64
"""Connections that wait to be accepted."""
MAX_HEAD_BYTES: Final = 16 << 10
"""Of a request, up to its empty line."""
LOOPBACK: Final = "127.0.0.1"


class MetricsServer:
    """Serves metrics at a port until it is closed. Belongs to the event loop."""

    def __init__(self, port: int) -> None:
        """Take the port; 0 takes a free one. Raises `BadRequest` if it cannot be had."""
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((LOOPBACK, port))
            listening.listen(BACKLOG)
            listening.setblocking(False)
        except OSError as error:
            listening.close()
            raise BadRequest("metrics.port", f"{port} cannot be had: {error.strerror}") from None
        self.port: Final = int(listening.getsockname()[1])
        self._acceptor: Final = Acceptor(listening, MAX_REQUESTS, "metrics")

    def close(self) -> None:
        """Let nobody in any more; `run` is cancelled by its owner. Again is harmless."""
        self._acceptor.close()

    async def run(self, collect: Callable[[], list[Metric]]) -> NoReturn:
        """Answer until cancelled. `collect` says what there is to tell, and does not wait."""
        await self._acceptor.run(partial(self._handle, collect=collect))

    async def _handle(self, connection: socket.socket, collect: Callable[[], list[Metric]]) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await _read_head(connection)
                await loop.sock_sendall(connection, await _answer(head, collect))
        except (OSError, TimeoutError):
            return  # whoever asked is gone, or never asked


async def _read_head(connection: socket.socket) -> bytes:
    """A request up to its empty line; less where it ends or is too long before that."""
    loop, head = asyncio.get_running_loop(), b""
    while b"\r\n\r\n" not in head and len(head) < MAX_HEAD_BYTES:
        part = await loop.sock_recv(connection, MAX_HEAD_BYTES - len(head))
        if not part:
            break
        head += part
    return head


async def _answer(head: bytes, collect: Callable[[], list[Metric]]) -> bytes:
    request, *lines = head.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    words = request.split(" ")
    if b"\r\n\r\n" not in head or len(words) != 3 or not words[2].startswith("HTTP/1."):
        return _response("400 Bad Request", b"this is no request\n")
    method, target, _ = words
    if target.partition("?")[0] != "/metrics":
        return _response("404 Not Found", b"there is only /metrics\n")
    if method not in ("GET", "HEAD"):
        return _response("405 Method Not Allowed", b"there is only GET\n", "Allow: GET, HEAD")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    encode, kind = choose_encoder(headers.get("accept", ""))
    body = await wrap(encode)(registry(collect()))
    return _response("200 OK", body, f"Content-Type: {kind}", is_head=method == "HEAD")


def _response(status: str, body: bytes, *headers: str, is_head: bool = False) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (b"" if is_head else body)
