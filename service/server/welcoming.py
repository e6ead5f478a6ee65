"""What every hello comes to, whichever way it came: the tenant is checked, and a session begins with its memory."""

import asyncio
import hashlib
import hmac
import os
from collections.abc import Mapping
from typing import Final

from hicache.errors import BadRequest
from hicache.service import wire
from hicache.service.errors import Forbidden, VersionMismatch
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server.session import Session
from hicache.service.server.sessions import Sessions
from hicache.service.server.staging import Staging
from hicache.tier import TierId
from hicache.tiers.host import HostTier
from hicache.tiers.memory import started_executor

NOBODY: Final = -1
"""User, process and descriptor of a peer of whom the kernel knows nothing."""


class Welcoming:
    """Begins sessions. Belongs to the event loop."""

    def __init__(self, sessions: Sessions, host: HostTier, tenants: Mapping[str, bytes | None]) -> None:
        """`tenants`: SHA-256 of each one's secret, None for one that needs none; empty where there are no tenants."""
        self.sessions: Final = sessions
        self._host: Final = host
        self._tenants: Final = tenants
        # One thread: it takes a core for a while, however many sessions begin at once.
        self._gatherer: Final = started_executor(TierId("gather"), 1)
        self._gathered: Final[set[Staging]] = set()
        """Memory that is gathered, or waits for it."""

    def close(self) -> None:
        """Gather no more, and join the thread, which takes some tens of milliseconds. Idempotent."""
        for staging in self._gathered:
            staging.stop_gathering()
        self._gatherer.shutdown()

    def check(self, hello: pb.Hello) -> None:
        """Raise what a hello is refused with: `VersionMismatch`, `Forbidden`, `BadRequest`."""
        if hello.protocol != wire.PROTOCOL:
            raise VersionMismatch(f"protocol {hello.protocol} is asked for, {wire.PROTOCOL} is spoken here")
        self._check_tenant(hello)
        if len(hello.name) > wire.MAX_NAME_CHARS:
            raise BadRequest("name", f"{len(hello.name)} characters are more than {wire.MAX_NAME_CHARS}")
        if hello.staging_bytes and not self._staging_slots(hello):
            raise BadRequest("staging_bytes", f"{hello.staging_bytes} bytes hold no slot of {self._host.slot_stride}")

    def _staging_slots(self, hello: pb.Hello) -> int:
        """How much staging memory a session is given: as much as is asked for and may be, but no more than its tenant's
        part, or it would take some of another's. A slot at least."""
        stride = self._host.slot_stride
        most = min(self.sessions.limits.staging_bytes, max(self.sessions.staging_part, stride))
        return min(hello.staging_bytes, most) // stride

    def _check_tenant(self, hello: pb.Hello) -> None:
        """The tenant is one of the configuration's, and the secret its own."""
        if not self._tenants:
            if hello.tenant:
                raise Forbidden("this server has no tenants")
            return
        secret = self._tenants.get(hello.tenant)
        given = hashlib.sha256(hello.secret[: wire.MAX_SECRET_BYTES]).digest()
        # One answer for a tenant that there is not and for a wrong secret, after the same comparison.
        is_right = hmac.compare_digest(given, secret if secret is not None else given)
        if hello.tenant not in self._tenants or not is_right or len(hello.secret) > wire.MAX_SECRET_BYTES:
            raise Forbidden("there is no such tenant, or its secret is another one")

    async def begin(
        self, hello: pb.Hello, *, uid: int = NOBODY, pid: int = NOBODY, pidfd: int = NOBODY
    ) -> tuple[Session, pb.Welcome]:
        """Begin a session for a hello that was checked; `pidfd` is its own then, or closed. Waits for its staging
        memory to be made. Raises `LimitReached`, `Draining`, `NoRoom`."""
        stride, num_slots = self._host.slot_stride, self._staging_slots(hello)
        peer, staging = self.sessions.peers.of(hello.tenant, uid), None
        try:
            # Counted before anything is allocated.
            self.sessions.reserve_staging(peer, num_slots * stride)
            try:
                if num_slots:
                    staging = await _make_staging(num_slots, stride)
                session, token = self.sessions.begin(
                    tenant=hello.tenant, name=hello.name, uid=uid, pid=pid, pidfd=pidfd, staging=staging
                )
            except BaseException:
                self.sessions.unreserve_staging(peer, num_slots * stride)
                if staging is not None:
                    staging.close()
                raise
        except BaseException:
            if pidfd >= 0:
                os.close(pidfd)
            raise
        if staging is not None:
            self._gather(staging)
        return session, self._welcome(session, token)

    def _gather(self, staging: Staging) -> None:
        """Have the thread gather staging memory, which stays mapped meanwhile."""

        def ended(_: "asyncio.Future[None]") -> None:
            self._gathered.discard(staging)
            staging.let_go()

        staging.hold()
        self._gathered.add(staging)
        asyncio.get_running_loop().run_in_executor(self._gatherer, staging.gather).add_done_callback(ended)

    def _welcome(self, session: Session, token: bytes) -> pb.Welcome:
        sessions, layout = self.sessions, self.sessions.cache.layout
        return pb.Welcome(
            protocol=wire.PROTOCOL,
            boot_id=sessions.boot.id,
            token=token,
            session_id=session.number,
            page_size=layout.page_size,
            page_bytes=layout.page_bytes,
            slot_stride=self._host.slot_stride,
            arena_slots=self._host.capacity_pages,
            staging_slots=session.staging.num_slots if session.staging is not None else 0,
            attach_ms=int(sessions.times.attach_s * 1000),
            lease_ms=int(sessions.times.lease_s * 1000),
            max_tokens=sessions.limits.max_tokens,
            max_leases=sessions.limits.max_leases,
            max_leased_pages=sessions.max_pages,
        )


async def _make_staging(num_slots: int, stride: int) -> Staging:
    """Staging memory, allocated by a thread. What nobody waits for any more is given back."""
    making = asyncio.get_running_loop().run_in_executor(None, Staging, num_slots, stride)
    try:
        await asyncio.wait([making])
    except asyncio.CancelledError:
        making.add_done_callback(lambda made: None if made.exception() else made.result().close())
        raise
    return making.result()
