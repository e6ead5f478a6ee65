"""The session with the sidecar, and doing without it.

Calls are made only while the sidecar is known to answer. After one that got no answer it is asked again from a thread,
once a second, until it does: until then the engine does not notice that there is a cache, and waits for nothing.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from hicache.errors import BadRequest, DeadlineExceeded, HicacheError
from hicache.layout import KVLayout
from hicache.namespace import Namespace
from hicache.service.client import Client, Prompt, connect
from hicache.service.engines.settings import EngineSettings
from hicache.service.errors import Draining, Forbidden, LayoutMismatch, LimitReached, Unreachable, VersionMismatch

RETRY_S: Final = 1.0
"""Between two attempts to reach a sidecar that did not answer."""
REFUSED_RETRY_S: Final = 15.0
"""The same for one that refused: its operator has to do something first."""
CONNECT_S: Final = 3.0
"""How long an attempt may take."""

T = TypeVar("T")

_log = logging.getLogger(__name__)
_REFUSED: Final = (Forbidden, VersionMismatch, LayoutMismatch)
"""What is wrong with a session as a whole."""
_LOST: Final = (Unreachable, DeadlineExceeded, Draining)
_MENDS: Final[tuple[tuple[type[HicacheError], str], ...]] = (
    (Unreachable, "is a sidecar running there? start one with `hicache serve`"),
    (Forbidden, "look at the settings `tenant` and `secret_file`"),
    (VersionMismatch, "install the same release of hicache for the sidecar and for the engine"),
)
"""What the user can do where the error does not say so."""


class Link:
    """A client of the sidecar that may be missing. Any thread may call it."""

    def __init__(
        self, settings: EngineSettings, *, name: str, staging_bytes: int, check: Callable[[Client], None] | None = None
    ) -> None:
        """Connect once, at most for `CONNECT_S`, and go on without if that fails.

        `check` looks at a new session and raises what makes it useless. With `settings.strict` whatever is wrong is
        raised here.
        """
        self._settings: Final = settings
        self._name: Final = name
        self._staging_bytes: Final = staging_bytes
        self._check: Final = check
        self._lock: Final = threading.Lock()
        self._client: Client | None = None
        self._said = ""
        self._bad_fields: Final[set[str]] = set()
        """What requests were refused for, each of which is said once."""
        self._closing: Final = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._client = self._connected()
        except HicacheError as error:
            if settings.strict:
                if words := _mend(error):
                    error.add_note(f"hicache{words}")
                raise
            self._lose(error)

    @property
    def is_up(self) -> bool:
        """Whether the sidecar is believed to answer."""
        return self._client is not None

    def call(self, ask: Callable[[Client], T]) -> T | None:
        """What `ask` gets of the client; None while there is none, and when it raises `HicacheError`."""
        client = self._client
        if client is None:
            return None
        try:
            return ask(client)
        except HicacheError as error:
            self.failed(client, error)
            return None

    def failed(self, client: Client, error: HicacheError) -> None:
        """A call of `client` raised: if nobody answers, none is made until somebody does. What is wrong with a request
        costs no other one its hits."""
        if isinstance(error, (*_LOST, *_REFUSED)):
            with self._lock:
                if self._client is not client:
                    return
                self._client = None
            self._lose(error, client)
        elif isinstance(error, (BadRequest, LimitReached)) and error.field not in self._bad_fields:
            self._bad_fields.add(error.field)
            _log.warning("hicache, %s: a request went without the cache, as others like it will: %s", self._name, error)
        else:
            _log.info("hicache: %s", error)

    def close(self) -> None:
        """End the session. Idempotent."""
        self._closing.set()
        with self._lock:
            thread, client = self._thread, self._client
            self._client = None
        if thread is not None:
            thread.join()
        if client is not None:
            client.close()

    def _connected(self) -> Client:
        settings = self._settings
        client = connect(
            settings.socket_dir or None,
            tenant=settings.tenant,
            secret=settings.secret(),
            staging_bytes=self._staging_bytes,
            name=self._name,
            timeout_s=CONNECT_S,
        )
        try:
            if self._check is not None:
                self._check(client)
        except BaseException:
            client.close()
            raise
        return client

    def _lose(self, error: HicacheError, client: Client | None = None) -> None:
        """Say it once, and begin to look for the sidecar."""
        self._say(f"going on without the cache: {error}{_mend(error)}")
        with self._lock:
            if self._closing.is_set() or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(
                target=self._look, args=(error, client), name="hicache-link", daemon=True
            )
            self._thread.start()

    def _look(self, error: HicacheError, lost: Client | None) -> None:
        if lost is not None:
            lost.close()
        while not self._closing.wait(REFUSED_RETRY_S if isinstance(error, (*_REFUSED, BadRequest)) else RETRY_S):
            try:
                client = self._connected()
            except HicacheError as again:
                error = again
                self._say(f"going on without the cache: {error}{_mend(error)}")
                continue
            with self._lock:
                is_wanted = not self._closing.is_set()
                if is_wanted:
                    self._client, self._thread = client, None
            if is_wanted:
                self._say("the cache is there again")
            else:
                client.close()
            return

    def _say(self, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            _log.warning("hicache, %s: %s", self._name, sentence)


def _mend(error: HicacheError) -> str:
    """What follows an error's own words; empty where they say what to do."""
    return next((f"; {words}" for kind, words in _MENDS if isinstance(error, kind)), "")


def serve_options(layout: KVLayout) -> str:
    """The options of `hicache serve` that give it a layout whose layers are all alike."""
    group = layout.groups[0]
    values = {
        "num_layers": layout.num_layers, "num_kv_heads": group.num_kv_heads, "head_dim": group.head_dim,
        "dtype": f'"{layout.dtype.value}"', "page_size": layout.page_size,
    }  # fmt: skip
    return " ".join(f"--set layout.{name}={value}" for name, value in values.items())


def check_pages(layout: KVLayout) -> Callable[[Client], None]:
    """A check that a sidecar's pages are those of an engine's layout. It asks for a page that nobody has."""
    nothing = Namespace(model="nothing", layout=layout)

    def check(client: Client) -> None:
        try:
            client.lookup(Prompt(nothing, [0] * layout.page_size), timeout_s=CONNECT_S)
        except LayoutMismatch as error:
            welcome = client.welcome
            raise LayoutMismatch(
                f"the sidecar has pages of {welcome.page_bytes} bytes and {welcome.page_size} tokens, this engine of "
                f"{layout.page_bytes} and {layout.page_size}, or laid out otherwise: start it with `hicache serve "
                f"{serve_options(layout)}`"
            ) from error

    return check
