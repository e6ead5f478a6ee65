"""Metrics over HTTP, at a port of the loopback address: `GET /metrics`, and nothing else.

The port is taken before the cache is opened, so that one in use is told of at once. What is counted is read on the
loop, in about a millisecond, and written down as text in a thread.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, NoReturn

from aiofiles.os import wrap
from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder

from hicache.errors import BadRequest
from hicache.service.listening import Address
from hicache.service.metrics import registry
from hicache.service.server.http import ONLY_GET, HttpServer, Request, Response

MAX_REQUESTS: Final = 8
"""Requests under way; further connections are closed."""
LOOPBACK: Final = "127.0.0.1"


class MetricsServer:
    """Serves metrics at a port until it is closed. Belongs to the event loop."""

    def __init__(self, port: int) -> None:
        """Take the port; 0 takes a free one. Raises `BadRequest` if it cannot be had."""
        try:
            self._http: Final = HttpServer(Address(LOOPBACK, port), "metrics", requests_max=MAX_REQUESTS)
        except OSError as error:
            raise BadRequest("metrics.port", f"{port} cannot be had: {error.strerror}") from None
        self.port: Final = self._http.port

    def close(self) -> None:
        """Let nobody in any more; `run` is cancelled by its owner. Again is harmless."""
        self._http.close()

    async def run(self, collect: Callable[[], list[Metric]]) -> NoReturn:
        """Answer until cancelled. `collect` says what there is to tell, and does not wait."""
        await self._http.run(partial(_answer, collect=collect))


async def _answer(request: Request, collect: Callable[[], list[Metric]]) -> Response:
    if request.path != "/metrics":
        return Response("404 Not Found", b"there is only /metrics\n")
    if not request.only_reads:
        return ONLY_GET
    encode, kind = choose_encoder(request.headers.get("accept", ""))
    return Response("200 OK", await wrap(encode)(registry(collect())), kind)
