"""The client whose calls block."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from os import PathLike
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Final, Self, TypeVar

from hicache.arguments import whole
from hicache.errors import BadRequest, Closed, DeadlineExceeded, HicacheError
from hicache.service import wire
from hicache.service.client import calls
from hicache.service.client.calls import Attachment, Reserved, Steps
from hicache.service.client.face import SessionFace
from hicache.service.client.memory import Memory
from hicache.service.client.pages import Lease, Reservation
from hicache.service.client.prompt import Prompt
from hicache.service.client.remote import Remote, RemoteTransport, is_remote
from hicache.service.client.results import Committed, Durability, Lookup, Pinned, Prefetched
from hicache.service.client.transport import GrpcTransport, Transport
from hicache.service.errors import UnknownSession, Unreachable
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.sockets import default_directory

DEFAULT_TIMEOUT_S: Final = 10.0
"""How long a call may take."""
DEFAULT_STAGING_BYTES: Final = 64 << 20
"""Staging memory that is asked for."""
BEATS_A_LEASE: Final = 4
"""Beats within the lease time."""

T = TypeVar("T")


def connect(
    socket_dir: str | Path | None = None,
    *,
    tenant: str = "",
    secret: bytes = b"",
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    name: str = "",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    token: bytes | str = b"",
    ca: str | PathLike[str] | None = None,
    certificate: tuple[str | PathLike[str], str | PathLike[str]] | None = None,
    transport: Callable[[], Transport] | None = None,
) -> "Client":
    """Begin a session with the server whose sockets are in `socket_dir`, by default this user's own.

    `socket_dir` may also be "tls://HOST:PORT" (or "tcp://HOST:PORT", which is not encrypted): a server on another
    machine. Pages then travel in messages: `acquire` waits for all of a lease's pages, and `commit` sends them.

    Args:
        tenant, secret: as the server's configuration has them; nothing where it has no tenants.
        staging_bytes: memory for pages that are to be written, shared by all reservations; 0 for a client that reads.
        name: shown to the operator, at most 64 characters.
        timeout_s: how long a call may take that is given no time of its own.
        token: over TCP, the server's access token.
        ca: over TLS, a file with the certificates that the server's derives from, by default those this machine trusts.
        certificate: over TLS, files with this client's own certificate and key, where the server asks for one.
        transport: makes a connection, used instead of sockets.

    Raises `Unreachable`, `Forbidden`, `LimitReached`, `Draining`, `VersionMismatch`, `BadRequest`, `DeadlineExceeded`.
    """
    if is_remote(socket_dir) and transport is None:
        remote = Remote.of(str(socket_dir), token, ca, certificate)
        transport = partial(RemoteTransport, remote)
    hello = make_hello(tenant, secret, staging_bytes, name)
    client = Client(transport or partial(GrpcTransport, directory_of(socket_dir)), hello, timeout_s)
    client._attached(monotonic() + timeout_s)
    return client


def directory_of(socket_dir: str | Path | None) -> Path:
    """The directory that a client looks for sockets in."""
    return Path(default_directory() if socket_dir is None else socket_dir).absolute()


def make_hello(tenant: str, secret: bytes, staging_bytes: int, name: str) -> pb.Hello:
    """The hello of a client. Raises `BadRequest`."""
    if not 0 <= staging_bytes < 1 << 63:
        raise BadRequest("staging_bytes", f"{staging_bytes} is not within 0 to 2**63 - 1")
    return pb.Hello(protocol=wire.PROTOCOL, tenant=tenant, secret=secret, staging_bytes=staging_bytes, name=name)


class Client(SessionFace):
    """A session with a server. Thread-safe; a context manager. Made by `connect`.

    When the server is started again, or the session ends for another reason, the next call begins a new one by itself:
    leases and reservations of before are gone then, and say so. While no server is there each call raises `Unreachable`
    at once; nothing waits for one to come back. Every call raises `DeadlineExceeded` after its time.
    """

    def __init__(self, transport: Callable[[], Transport], hello: pb.Hello, timeout_s: float) -> None:
        self._new_transport: Final = transport
        self._hello: Final = hello
        self._timeout_s: Final = timeout_s
        # Guards the three below. Held while a new session is begun, so that of many threads one does it.
        self._lock: Final = threading.Lock()
        self._transport: Transport | None = None
        self._attachment = None
        self._is_closed = False

    # -- the face -----------------------------------------------------------------------------------------------------

    def lookup(self, prompt: Prompt, *, timeout_s: float | None = None) -> Lookup:
        """How much of a prompt is cached, and where. Keeps nothing."""
        return self._run(lambda attachment: calls.lookup(attachment, prompt), timeout_s)

    def acquire(
        self, prompt: Prompt, *, first_page: int = 0, partial: bool = False, timeout_s: float | None = None
    ) -> Lease:
        """Have what is cached of a prompt brought to shared memory, and kept there until the lease is released.

        `first_page`: pages before it are kept in the cache but not given, as the caller has them. `partial`: ask for
        the page that shares some tokens behind the last whole page, too (`Lease.partial`). What cannot be had in
        time is left out: see `Lease.num_tokens` and `Lease.cut_short`. Nothing cached is a lease of no pages.
        """

        def steps(attachment: Attachment) -> Steps[Lease]:
            granted = yield from calls.acquire(attachment, prompt, first_page, partial)
            return Lease(self, attachment, granted)

        return self._run(steps, timeout_s)

    def pin(self, prompt: Prompt, *, timeout_s: float | None = None) -> Pinned:
        """Keep what is cached of a prompt in the cache, in whatever tier, until `unpin` or the end of the session."""
        return self._run(lambda attachment: calls.pin(attachment, prompt), timeout_s)

    def unpin(self, pinned: Pinned) -> None:
        """End what `pin` began. Again, and after the session, is harmless."""
        if pinned.lease_id and self._attachment is not None:
            self._release(self._attachment, [pinned.lease_id])

    def publish(self, prompt: Prompt, *, timeout_s: float | None = None) -> int:
        """Let all other tenants have what is cached of a prompt, in whole pages: a system prompt, say. Returns how many
        tokens those are; 0 when nothing is cached. Lasts until `unpublish`, or until the pages have left the cache."""
        return self._run(lambda attachment: calls.publish(attachment, prompt, len(prompt), False), timeout_s)

    def unpublish(self, prompt: Prompt, num_tokens: int, *, timeout_s: float | None = None) -> bool:
        """End the publication of a prompt's first `num_tokens` tokens, as `publish` counted them; whether there was
        one. Copies that others have made stay theirs. Raises `BadRequest`."""
        whole("num_tokens", num_tokens, 1, len(prompt))
        return bool(self._run(lambda attachment: calls.publish(attachment, prompt, num_tokens, True), timeout_s))

    def reserve(
        self, prompt: Prompt, *, num_tokens: int | None = None, first_page: int = 0, timeout_s: float | None = None
    ) -> Reservation:
        """Ask for room for those whole pages of a prompt, or of its first `num_tokens`, that are not cached yet.

        Look at the reservation's `outcome`: it may have fewer pages, or none. `first_page`: pages before it must be
        cached, or it is refused.
        """

        def steps(attachment: Attachment) -> Steps[Reservation]:
            reserved = yield from calls.reserve(attachment, prompt, num_tokens, first_page)
            return Reservation(self, attachment, prompt, reserved)

        return self._run(steps, timeout_s)

    def prefetch(
        self, prompt: Prompt, *, within_s: float, max_pages: int = 0, timeout_s: float | None = None
    ) -> Prefetched:
        """Begin to bring what NVMe alone has of a prompt to shared memory, as it is expected to be acquired within
        `within_s` seconds. `max_pages`: at most so many; 0 for the server's own bound. Does not wait for the disk."""
        return self._run(lambda attachment: calls.prefetch(attachment, prompt, within_s, max_pages), timeout_s)

    def hint(
        self,
        prompt: Prompt,
        *,
        priority: int = 0,
        retain_s: float | None = None,
        expected_return_s: float | None = None,
        returns: bool | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Say what is known of the future of a prompt: that it comes back, or not, or in so many seconds; that it is to
        stay longer than others for so many seconds; that others leave after it (a priority above 0, at most 4) or
        before it (below 0). Returns how many tokens of it are cached: the hint is about these."""
        message = calls.make_hint(priority, retain_s, expected_return_s, returns)
        return self._run(lambda attachment: calls.hint(attachment, prompt, message), timeout_s)

    def close(self) -> None:
        """End the session; what it held is given back by the server. Views that are still looked at stay readable, but
        mean nothing. Idempotent."""
        with self._lock:
            self._is_closed = True
            transport, attachment = self._transport, self._attachment
            self._transport = self._attachment = None
        if transport is not None:
            transport.close()
        if attachment is not None:
            attachment.is_over = True
            attachment.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- carrying calls out -------------------------------------------------------------------------------------------

    def _run(self, steps: Callable[[Attachment], Steps[T]], timeout_s: float | None) -> T:
        """Carry a call out; once more in a new session if this one turns out to have ended."""
        deadline = monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        attachment, transport = self._attached(deadline)
        try:
            return _drive(transport, steps(attachment), deadline)
        except (UnknownSession, Unreachable):
            attachment.is_over = True
        attachment, transport = self._attached(deadline)
        return _drive(transport, steps(attachment), deadline)

    def _attached(self, deadline: float) -> tuple[Attachment, Transport]:
        """The session, or a new one where there is none or it is over."""
        with self._lock:
            if self._is_closed:
                raise Closed("the client is closed")
            if self._attachment is not None and self._transport is not None and not self._attachment.is_over:
                return self._attachment, self._transport
            if self._transport is not None:
                # Its memory stays mapped for whoever still has a lease of that session.
                self._transport.close()
                self._transport = None
            transport = self._new_transport()
            try:
                welcome, fds = transport.hello(self._hello, deadline - monotonic())
                attachment = Attachment(welcome, Memory(welcome, fds))

                def over() -> None:
                    attachment.is_over = True

                beat_s = welcome.lease_ms / 1000 / BEATS_A_LEASE
                transport.attach(welcome.token, beat_s, attachment.beat, attachment.hear, over)
            except BaseException:
                transport.close()
                raise
            self._attachment, self._transport = attachment, transport
            return attachment, transport

    def _release(self, attachment: Attachment, ids: list[int]) -> None:
        """Give leases and reservations back, if their session is still this one. Never fails: if it cannot be said, the
        session's end says it."""
        transport = self._transport
        if ids and transport is not None and attachment is self._attachment:
            with suppress(HicacheError, ValueError):  # ValueError: the channel was closed
                _drive(transport, calls.release(attachment, ids), monotonic() + self._timeout_s)

    def _commit(
        self,
        of: Attachment,
        reserved: Reserved,
        prompt: Prompt,
        durability: Durability,
        checksums: bytes,
        timeout_s: float | None,
    ) -> Committed:
        """Commit in the session that reserved, or not at all."""
        deadline = monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        attachment, transport = self._attached(deadline)
        return _drive(transport, calls.commit(attachment, of, reserved, prompt, durability, checksums), deadline)


def _drive(transport: Transport, steps: Steps[T], deadline: float) -> T:
    """Make the requests of a call until it returns."""
    try:
        request = next(steps)
        while True:
            try:
                remaining = deadline - monotonic()
                if remaining <= 0:
                    raise DeadlineExceeded("the call reached its deadline")
                reply = transport.call(request, remaining)
            except HicacheError as error:
                request = steps.throw(error)
            else:
                request = steps.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result
