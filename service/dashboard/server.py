"""Serves the page over HTTP at a loopback address, to whoever has the server's token.

Every user of the machine can connect to a loopback address, and every page that a browser shows can try to. So:

- What is cached, prompts above all, is told only to requests that carry the token, which is made anew at each start and
  is in the address that the server prints, behind a `#`: browsers keep that to themselves. The page itself, its script
  and its style say nothing and are given to everybody.
- The token travels in a header of its own, which a foreign page can send only if we let it, and we do not; there is no
  cookie that a browser would add by itself.
- The `Host` must be a name of this machine, so that a foreign name that was pointed here is refused.
- The page runs its own script alone, asks nobody else for anything, and shows in nobody's frame.

Nothing can be changed here, and what a request costs has a bound: `TreeView`, `History` and `HttpServer` say which.
"""

import asyncio
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable
from importlib.resources import files
from typing import Any, Final, NoReturn
from urllib.parse import parse_qs

from aiofiles.os import wrap

from hicache.cache import Cache
from hicache.errors import BadRequest, NotResident
from hicache.service.dashboard.history import EVERY_S, SPANS, History
from hicache.service.dashboard.names import TOP
from hicache.service.dashboard.tree import Decode, TreeView
from hicache.service.listening import Address
from hicache.service.server.http import ONLY_GET, HttpServer, Request, Response
from hicache.service.server.sessions import Sessions
from hicache.service.snapshot import moment_of, stats_of

MAX_REQUESTS: Final = 32
"""Requests under way; further connections are closed."""
MAX_DIGITS: Final = 18
"""Of a number in a request."""
HOSTS: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""What this machine may be called beside the address that is listened at; at any port, which may be forwarded."""
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:]+)(?::[0-9]+)?")
_KINDS: Final = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}  # fmt: skip
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Dashboard:
    """Serves the page until it is closed. Belongs to the event loop."""

    def __init__(self, address: Address, decode: Decode | None) -> None:
        """Take the address, which is a loopback one; `decode` makes text of tokens. Raises `BadRequest` if it cannot be
        had."""
        try:
            self._http: Final = HttpServer(address, "http", requests_max=MAX_REQUESTS)
        except OSError as error:
            raise BadRequest("http.listen", f"{address} cannot be had: {error.strerror}") from None
        self.address: Final = Address(address.host, self._http.port)
        self._decode: Final = decode
        self._token: Final = secrets.token_urlsafe(32)
        self._page: Final = _page()

    @property
    def url(self) -> str:
        """What to open in a browser. A secret: who has it sees all prompts that are cached."""
        return f"http://{self.address}/#{self._token}"

    def close(self) -> None:
        """Let nobody in any more; `run` is cancelled by its owner. Again is harmless."""
        self._http.close()

    async def run(self, cache: Cache, sessions: Sessions, status: Callable[[], dict[str, Any]]) -> NoReturn:
        """Answer until cancelled. `status`: what the server says of itself."""
        history, tree = History(cache, sessions), TreeView(cache, self._decode)

        async def answer(request: Request) -> Response:
            refusal = self._refusal(request)
            if refusal is not None:
                return refusal
            if request.path in self._page:
                return self._page[request.path]
            try:
                asked = _Parameters(request.query)
                if request.path == "/data/now":
                    body = await wrap(_written)(_now(cache, sessions, status(), history, asked))
                elif request.path == "/data/tree":
                    body = await tree.picture(asked.whole("focus", TOP))
                else:
                    body = _written(tree.prefix(asked.whole("id", TOP)))
            except BadRequest as error:
                return _told("400 Bad Request", str(error))
            except NotResident as error:
                # No error, so that no browser calls it one: that something leaves the cache is what caches are for.
                body = _written({"gone": str(error)})
            return Response("200 OK", body, "application/json", _HEADERS)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._http.run(answer))
            while True:
                await asyncio.sleep(EVERY_S)
                history.note()

    def _refusal(self, request: Request) -> Response | None:
        host = _HOST.fullmatch(request.headers.get("host", "").lower())
        if host is None or host[1] not in HOSTS | {str(self.address).rpartition(":")[0]}:
            return _told("403 Forbidden", "this machine is not called that; open it by 127.0.0.1 or localhost")
        if request.path not in self._page and request.path not in ("/data/now", "/data/tree", "/data/prefix"):
            return _told("404 Not Found", "there is no such page")
        if not request.only_reads:
            return ONLY_GET
        if request.path.startswith("/data/") and not self._has_token(request):
            return _told("401 Unauthorized", "the token is missing or is another server's")
        return None

    def _has_token(self, request: Request) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        # Compared by their digests: how long that takes says nothing of the token.
        mine, theirs = [hashlib.sha256(each.encode()).digest() for each in (self._token, token)]
        return scheme.lower() == "bearer" and hmac.compare_digest(mine, theirs)


class _Parameters:
    """What a request asks about."""

    def __init__(self, query: str) -> None:
        """Raises `BadRequest`."""
        try:
            self._values: Final = parse_qs(query, max_num_fields=8)
        except ValueError:
            raise BadRequest("query", "has more than 8 fields") from None

    def text(self, name: str, default: str) -> str:
        return self._values.get(name, [default])[-1]

    def whole(self, name: str, default: int) -> int:
        text = self.text(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
            raise BadRequest(name, f"{text!r:.40} is no number of at most {MAX_DIGITS} digits")
        return int(text)


def _now(
    cache: Cache, sessions: Sessions, status: dict[str, Any], history: History, asked: _Parameters
) -> dict[str, Any]:
    """`stats_of`, `moment_of` and `Sessions.stats`, with "server", and as "history" "columns" and "rows" of a "span"
    of `History`, from the row "first" on."""
    span, first = asked.text("span", next(iter(SPANS))), asked.whole("first", 0)
    return {
        **moment_of(cache), **stats_of(cache), **sessions.stats(), "server": status,
        "history": {"columns": history.columns, "rows": history.rows(span, first)},
    }  # fmt: skip


def _told(status: str, text: str) -> Response:
    return Response(status, f"{text}\n".encode(), headers=_HEADERS)


def _written(told: dict[str, Any]) -> bytes:
    return json.dumps(told).encode()


def _page() -> dict[str, Response]:
    """The page's files, by path."""
    found = {}
    for file in (files("hicache.service.dashboard") / "page").iterdir():
        kind = _KINDS.get(file.name[file.name.rfind(".") :])
        if kind is not None:
            found[f"/{file.name}"] = Response("200 OK", file.read_bytes(), kind, _HEADERS)
    found["/"] = found.pop("/index.html")
    return found
