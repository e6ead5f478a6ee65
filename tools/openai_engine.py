"""An engine that speaks the OpenAI API over HTTP, asked for as little as possible: one token of each prompt.

Every call has its time. What may pass by itself (no connection, too many requests, a failure of the engine's) is tried
again, a bounded number of times; what the engine refuses is not.
"""

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from hicache.tools.exits import CommandFailed, UsageProblem
from hicache.tools.terminal import printable

MAX_REPLY_BYTES: Final = 64 << 20
"""Of a reply. Token ids of a long prompt take most."""
CONNECT_S: Final = 10.0
"""How long reaching an engine may take."""
RETRIED: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Statuses after which a call may do better when it is repeated."""
FIRST_WAIT_S: Final = 0.5
"""Before the first repetition; before each further one twice as long."""
MAX_WAIT_S: Final = 30.0
"""Longest wait before a repetition, whatever an engine asks for."""


class Refused(Exception):
    """The engine did not do what it was asked for, and will not. The message is one line."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one prompt took."""

    prompt_tokens: int
    cached_tokens: int | None
    """Of these, found by the engine; None where it does not say."""


class OpenAiEngine:
    """One engine. Any thread may call it."""

    def __init__(self, url: str, *, key: str = "", timeout_s: float, retries: int) -> None:
        """`url`: http:// or https://, host and port, and a path if the API is not below /v1 of the host. `timeout_s`:
        for one answer. Raises `UsageProblem`."""
        problem = UsageProblem(f"--engine: '{printable(url, 80)}' is no URL such as http://localhost:8000")
        try:
            parts = urlsplit(url)
            self._port: Final = parts.port
        except ValueError:
            raise problem from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise problem
        if parts.username or parts.password:
            raise UsageProblem("--engine: a key belongs into --api-key-file, not into the URL")
        self._host: Final[str] = parts.hostname
        self._base: Final = parts.path.rstrip("/").removesuffix("/v1")
        self._context: Final = ssl.create_default_context() if parts.scheme == "https" else None
        self._timeout_s: Final = timeout_s
        self._retries: Final = retries
        self._headers: Final = {"Content-Type": "application/json", "User-Agent": "hicache-warm"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._lock: Final = threading.Lock()
        self._open: Final[set[http.client.HTTPConnection]] = set()
        self._closed: Final = threading.Event()

    def models(self) -> list[str]:
        """Names of the models that it serves. Raises `CommandFailed` where nobody answers in this way."""
        try:
            reply = self._call("GET", "/v1/models", None)
            return [str(each["id"]) for each in reply["data"]]
        except Refused as refusal:
            raise CommandFailed(str(refusal)) from None
        except (KeyError, TypeError):
            raise CommandFailed("the engine does not list its models as the OpenAI API has it") from None

    def compute(self, model: str, prompt: Mapping[str, Any]) -> Usage:
        """Have a prompt computed: {"prompt": text or token ids}, or {"messages": [...]}. Raises `Refused`."""
        path = "/v1/chat/completions" if "messages" in prompt else "/v1/completions"
        reply = self._call("POST", path, {"model": model, **prompt, "max_tokens": 1, "temperature": 0})
        usage = reply.get("usage") if isinstance(reply, dict) else None
        if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
            raise Refused("the engine answered without saying how many tokens the prompt has")
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return Usage(usage["prompt_tokens"], cached if isinstance(cached, int) else None)

    def tokens(self, model: str, prompt: Mapping[str, Any]) -> list[int]:
        """The token ids of a prompt, by the engine's own /tokenize, which vLLM and SGLang have. Raises `Refused`."""
        if isinstance(ids := prompt.get("prompt"), list):
            return ids
        reply = self._call("POST", "/tokenize", {"model": model, **prompt})
        ids = reply.get("tokens") if isinstance(reply, dict) else None
        if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < 1 << 31 for each in ids):
            raise Refused("the engine does not say which tokens a prompt has (/tokenize)")
        return ids

    def close(self) -> None:
        """End calls under way: they raise `Refused`. Idempotent."""
        with self._lock:
            self._closed.set()
            under_way = list(self._open)
        for connection in under_way:
            with suppress(OSError, AttributeError):  # not connected yet, or not any more
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """The JSON of a reply. Raises `Refused`."""
        content = None if body is None else json.dumps(body).encode()
        wait_s = FIRST_WAIT_S
        for left in range(self._retries, -1, -1):
            asked_s: float | None = None
            try:
                status, asked_s, reply = self._once(method, path, content)
                if status == 200:
                    return json.loads(reply)
                problem = f"{path} was answered with status {status}: {_reason(reply)}"
                if status not in RETRIED:
                    raise Refused(problem)
            except (OSError, http.client.HTTPException) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                problem = f"no answer from {self._host}: {printable(reason or type(error).__name__, 200)}"
            except ValueError:
                raise Refused(f"{path} was answered with what is no JSON") from None
            if not left or self._closed.wait(min(MAX_WAIT_S, max(wait_s, asked_s or 0.0))):
                raise Refused(problem)
            wait_s *= 2
        raise AssertionError("the last try returns or raises")

    def _once(self, method: str, path: str, content: bytes | None) -> tuple[int, float | None, bytes]:
        """Status, how long to wait if the engine says so, and body."""
        if self._context is not None:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host, self._port, timeout=CONNECT_S, context=self._context
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_S)
        with closing(connection):
            with self._lock:
                if self._closed.is_set():
                    raise OSError("stopped")
                self._open.add(connection)
            try:
                connection.connect()
                connection.sock.settimeout(self._timeout_s)
                connection.request(method, self._base + path, content, self._headers)
                with closing(connection.getresponse()) as response:
                    reply = response.read(MAX_REPLY_BYTES + 1)
            finally:
                with self._lock:
                    self._open.discard(connection)
        if len(reply) > MAX_REPLY_BYTES:
            raise ValueError("longer than any reply")
        after = response.getheader("Retry-After", "")
        return response.status, float(after) if after.isdecimal() else None, reply


def _reason(reply: bytes) -> str:
    """What an engine says of a failure, in short."""
    text = reply[:4096].decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError):
        said = json.loads(reply)
        text = str(said["error"]["message"] if "error" in said else said["message"])
    return printable(text.strip() or "nothing", 200)
