"""The client whose calls are awaited. It means the same as `hicache.service.client.client`, call by call."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Final, TypeVar

from hicache.arguments import whole
from hicache.errors import Closed, DeadlineExceeded, HicacheError
from hicache.service.client import calls
from hicache.service.client.calls import Attachment, Reserved, Steps
from hicache.service.client.client import (
    BEATS_A_LEASE,
    DEFAULT_STAGING_BYTES,
    DEFAULT_TIMEOUT_S,
    directory_of,
    make_hello,
)
from hicache.service.client.face import SessionFace
from hicache.service.client.memory import Memory
from hicache.service.client.pages import AsyncLease, AsyncReservation
from hicache.service.client.prompt import Prompt
from hicache.service.client.remote import AsyncRemoteTransport, Remote, is_remote
from hicache.service.client.results import Committed, Durability, Lookup, Pinned, Prefetched
from hicache.service.client.transport import AsyncGrpcTransport, AsyncTransport
from hicache.service.errors import UnknownSession, Unreachable
from hicache.service.proto import hicache_pb2 as pb

T = TypeVar("T")


@asynccontextmanager
async def connect_async(
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
    transport: Callable[[], AsyncTransport] | None = None,
) -> "AsyncIterator[AsyncClient]":
    """A session that lasts as long as the block: see `connect` for the arguments and what is raised."""
    if is_remote(socket_dir) and transport is None:
        remote = Remote.of(str(socket_dir), token, ca, certificate)
        transport = partial(AsyncRemoteTransport, remote)
    hello = make_hello(tenant, secret, staging_bytes, name)
    connecting = transport or partial(AsyncGrpcTransport, directory_of(socket_dir))
    async with asyncio.TaskGroup() as tasks:
        client = AsyncClient(connecting, hello, timeout_s, tasks)
        try:
            await client._attached(asyncio.get_running_loop().time() + timeout_s)
            yield client
        finally:
            await client._close()


class AsyncClient(SessionFace):
    """A session with a server, on one event loop. Made by `connect_async`; see `Client` for what happens when the
    server is started again."""

    def __init__(
        self, transport: Callable[[], AsyncTransport], hello: pb.Hello, timeout_s: float, tasks: asyncio.TaskGroup
    ) -> None:
        self._new_transport: Final = transport
        self._hello: Final = hello
        self._timeout_s: Final = timeout_s
        self._tasks: Final = tasks
        self._lock: Final = asyncio.Lock()
        self._transport: AsyncTransport | None = None
        self._attachment = None
        self._beating: asyncio.Task[None] | None = None
        self._is_closed = False

    async def lookup(self, prompt: Prompt, *, timeout_s: float | None = None) -> Lookup:
        """See `Client.lookup`."""
        return await self._run(lambda attachment: calls.lookup(attachment, prompt), timeout_s)

    async def acquire(
        self, prompt: Prompt, *, first_page: int = 0, partial: bool = False, timeout_s: float | None = None
    ) -> AsyncLease:
        """See `Client.acquire`."""

        def steps(attachment: Attachment) -> Steps[AsyncLease]:
            granted = yield from calls.acquire(attachment, prompt, first_page, partial)
            return AsyncLease(self, attachment, granted)

        return await self._run(steps, timeout_s)

    async def pin(self, prompt: Prompt, *, timeout_s: float | None = None) -> Pinned:
        """See `Client.pin`."""
        return await self._run(lambda attachment: calls.pin(attachment, prompt), timeout_s)

    async def unpin(self, pinned: Pinned) -> None:
        """See `Client.unpin`."""
        if pinned.lease_id and self._attachment is not None:
            await self._release(self._attachment, [pinned.lease_id])

    async def publish(self, prompt: Prompt, *, timeout_s: float | None = None) -> int:
        """See `Client.publish`."""
        return await self._run(lambda attachment: calls.publish(attachment, prompt, len(prompt), False), timeout_s)

    async def unpublish(self, prompt: Prompt, num_tokens: int, *, timeout_s: float | None = None) -> bool:
        """See `Client.unpublish`."""
        whole("num_tokens", num_tokens, 1, len(prompt))
        return bool(
            await self._run(lambda attachment: calls.publish(attachment, prompt, num_tokens, True), timeout_s)
        )

    async def reserve(
        self, prompt: Prompt, *, num_tokens: int | None = None, first_page: int = 0, timeout_s: float | None = None
    ) -> AsyncReservation:
        """See `Client.reserve`."""

        def steps(attachment: Attachment) -> Steps[AsyncReservation]:
            reserved = yield from calls.reserve(attachment, prompt, num_tokens, first_page)
            return AsyncReservation(self, attachment, prompt, reserved)

        return await self._run(steps, timeout_s)

    async def prefetch(
        self, prompt: Prompt, *, within_s: float, max_pages: int = 0, timeout_s: float | None = None
    ) -> Prefetched:
        """See `Client.prefetch`."""
        return await self._run(lambda attachment: calls.prefetch(attachment, prompt, within_s, max_pages), timeout_s)

    async def hint(
        self,
        prompt: Prompt,
        *,
        priority: int = 0,
        retain_s: float | None = None,
        expected_return_s: float | None = None,
        returns: bool | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """See `Client.hint`."""
        message = calls.make_hint(priority, retain_s, expected_return_s, returns)
        return await self._run(lambda attachment: calls.hint(attachment, prompt, message), timeout_s)

    async def _run(self, steps: Callable[[Attachment], Steps[T]], timeout_s: float | None) -> T:
        deadline = self._deadline(timeout_s)
        attachment, transport = await self._attached(deadline)
        try:
            return await _drive(transport, steps(attachment), deadline)
        except (UnknownSession, Unreachable):
            attachment.is_over = True
        attachment, transport = await self._attached(deadline)
        return await _drive(transport, steps(attachment), deadline)

    def _deadline(self, timeout_s: float | None) -> float:
        return asyncio.get_running_loop().time() + (self._timeout_s if timeout_s is None else timeout_s)

    async def _attached(self, deadline: float) -> tuple[Attachment, AsyncTransport]:
        async with self._lock:
            if self._is_closed:
                raise Closed("the client is closed")
            if self._attachment is not None and self._transport is not None and not self._attachment.is_over:
                return self._attachment, self._transport
            await self._hang_up()
            transport = self._new_transport()
            try:
                remaining = deadline - asyncio.get_running_loop().time()
                welcome, fds = await transport.hello(self._hello, remaining)
                attachment = Attachment(welcome, Memory(welcome, fds))
            except BaseException:
                await transport.close()
                raise
            self._beating = self._tasks.create_task(_beat(transport, attachment))
            self._attachment, self._transport = attachment, transport
            return attachment, transport

    async def _hang_up(self) -> None:
        transport, self._transport = self._transport, None
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None
        if transport is not None:
            await transport.close()

    async def _close(self) -> None:
        self._is_closed = True
        await self._hang_up()
        if self._attachment is not None:
            self._attachment.is_over = True
            self._attachment.memory.close()
            self._attachment = None

    async def _release(self, attachment: Attachment, ids: list[int]) -> None:
        transport = self._transport
        if ids and transport is not None and attachment is self._attachment:
            with suppress(HicacheError):
                await _drive(transport, calls.release(attachment, ids), self._deadline(None))

    async def _commit(
        self,
        of: Attachment,
        reserved: Reserved,
        prompt: Prompt,
        durability: Durability,
        checksums: bytes,
        timeout_s: float | None,
    ) -> Committed:
        deadline = self._deadline(timeout_s)
        attachment, transport = await self._attached(deadline)
        steps = calls.commit(attachment, of, reserved, prompt, durability, checksums)
        return await _drive(transport, steps, deadline)


async def _beat(transport: AsyncTransport, attachment: Attachment) -> None:
    """Keep a session alive until its stream ends."""
    beat_s = attachment.welcome.lease_ms / 1000 / BEATS_A_LEASE
    try:
        await transport.attach(attachment.welcome.token, beat_s, attachment.beat, attachment.hear)
    finally:
        attachment.is_over = True


async def _drive(transport: AsyncTransport, steps: Steps[T], deadline: float) -> T:
    """See `hicache.service.client.client`."""
    try:
        request = next(steps)
        while True:
            try:
                remaining = deadline - asyncio.get_running_loop().time()
                if remaining <= 0:
                    raise DeadlineExceeded("the call reached its deadline")
                reply = await transport.call(request, remaining)
            except HicacheError as error:
                request = steps.throw(error)
            else:
                request = steps.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result
