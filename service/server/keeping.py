"""An arena that outlives its server: `hicache serve --keep-arena`.

A supervisor holds the descriptors of the arena and of its table of generations while one server ends and the next one
starts (systemd's file descriptor store). What lies where, the next one learns from a third file, which a server writes
in the second phase of its stop: the tree's nodes, the slots of their pages in the arena, and a checksum of each page.
It is used once: the next server marks it as used before it believes it, so that it is never taken for the truth about
an arena in which somebody has written since. Therefore a server that was killed leaves an arena from which nothing
comes back; and of one that was stopped every page comes back whose bytes still have their checksum.

The table goes on over restarts, all its counts one higher: a client that still looks at pages of the earlier server
finds on leaving its lease that they may be others.
"""

import logging
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
from aiofiles.os import wrap
from crc32c import crc32c

from hicache.cache import Cache
from hicache.errors import HicacheError, NoRoom
from hicache.namespace import Namespace
from hicache.residency import Residency
from hicache.service.readiness import Supervisor
from hicache.service.server.copying import checksum
from hicache.tier import HOST, PageIdentity, Slots
from hicache.tiers.host import HostTier
from hicache.tokens import INT32, TOKEN_BYTES

ARENA: Final = "hicache-arena"
GENERATIONS: Final = "hicache-generations"
PAGES: Final = "hicache-pages"
"""What the supervisor calls the three."""
SAVE_S: Final = 2.0
"""How long a stop may take checksums. Pages for which there is no time do not come back."""
CHUNK_PAGES: Final = 256
"""Pages whose checksums are taken between two looks at the clock."""
_HEAD: Final = struct.Struct("<8sIIQ")  # magic, whether it was used, CRC-32C of what follows, its bytes
_MAGIC: Final = b"hicpage1"
_USED_AT: Final = 8

_log = logging.getLogger(__name__)


class KeptNode(NamedTuple):
    """A run of pages as it is written down."""

    namespace: int
    """Index of its namespace's record."""
    first_page: int
    tokens: bytes
    """Its own, packed int32."""
    slots: bytes
    """In the arena, packed int32: of its first pages, or none."""
    sums: bytes
    """CRC-32C of each of these, packed uint32."""


class _Prefix(NamedTuple):
    """The way down to a node."""

    namespace: int
    num_pages: int
    tokens: bytes
    chain: bytes


class Keeper:
    """Hands an arena on from one server to the next. Belongs to the event loop."""

    def __init__(self, supervisor: Supervisor) -> None:
        """Takes what the supervisor has kept."""
        self._supervisor: Final = supervisor
        self._kept: Final[Mapping[str, int]] = {
            name: fd for name, fd in supervisor.kept.items() if name in (ARENA, GENERATIONS, PAGES)
        }
        self._namespaces: list[Namespace] = []
        self._nodes: list[KeptNode] = []
        self.num_restored = 0
        """Pages that came back."""

    def make_host(self, *, page_bytes: int, capacity_bytes: int, layer_bytes: Sequence[int] | None) -> HostTier:
        """The host tier, over the arena that was kept if it is of this size, else over a new one, which the supervisor
        is given. Blocks, some 0.1 s a GiB of pages that come back: for a thread. Raises `TierUnavailable`."""
        nodes = self._read()
        host = None
        if ARENA in self._kept and GENERATIONS in self._kept:
            try:
                host = HostTier(
                    page_bytes=page_bytes, capacity_bytes=capacity_bytes, layer_bytes=layer_bytes, outlives=True,
                    kept=(self._kept[ARENA], self._kept[GENERATIONS]),
                )  # fmt: skip
            except HicacheError as error:
                _log.warning("the arena that was kept is of no use: %s", error)
                for name in self._kept:
                    self._supervisor.forget(name)
        for fd in self._kept.values():
            os.close(fd)
        if host is None:
            host = HostTier(
                page_bytes=page_bytes, capacity_bytes=capacity_bytes, layer_bytes=layer_bytes, outlives=True
            )
        else:
            self._nodes = [_verified(node, host) for node in nodes]
            host.take_over(_slots_of(self._nodes))
        for name, fd in zip((ARENA, GENERATIONS), host.whole_fds, strict=True):
            self._supervisor.keep(fd, name)
        return host

    def _read(self) -> list[KeptNode]:
        """What an earlier server has written down, for the first time."""
        if PAGES not in self._kept:
            return []
        self._supervisor.forget(PAGES)
        data = os.pread(self._kept[PAGES], os.fstat(self._kept[PAGES]).st_size, 0)
        if len(data) < _HEAD.size:
            return []
        magic, was_used, crc, length = _HEAD.unpack_from(data)
        body = data[_HEAD.size :]
        if magic != _MAGIC or was_used or length != len(body) or crc32c(body) != crc:
            return []
        os.pwrite(self._kept[PAGES], struct.pack("<I", 1), _USED_AT)
        records, nodes = msgpack.unpackb(body)
        self._namespaces = [Namespace.decode(record) for record in records]
        return [KeptNode(*node) for node in nodes]

    def restore(self, cache: Cache, host: HostTier) -> None:
        """Put the pages that came back into the tree. Called once, when the cache is open and before it is used."""
        path: list[_Prefix] = []
        for node in self._nodes:
            while path and (path[-1].namespace != node.namespace or path[-1].num_pages != node.first_page):
                path.pop()
            namespace = self._namespaces[node.namespace]
            if path or not node.first_page:
                before = path[-1] if path else _Prefix(node.namespace, 0, b"", namespace.digest)
                pages = list(_identified(namespace, before.chain, node.tokens, cache.layout.page_size))
                path.append(_Prefix(
                    node.namespace, node.first_page + len(pages), before.tokens + node.tokens, pages[-1].chain
                ))  # fmt: skip
                if node.slots and self._put(cache, host, namespace, node, path[-1].tokens, pages):
                    continue
            cache.free({HOST: np.frombuffer(node.slots, INT32)})
        _log.info("%d pages of the arena came back", self.num_restored)

    def _put(
        self, cache: Cache, host: HostTier, namespace: Namespace, node: KeptNode, tokens: bytes,
        pages: list[PageIdentity],
    ) -> bool:  # fmt: skip
        """Put the pages of one node into the tree; False if they cannot be, and the slots are the caller's."""
        slots: Slots = np.frombuffer(node.slots, INT32)
        start = node.first_page * cache.layout.page_size
        known = np.frombuffer(tokens, INT32)[: start + len(slots) * cache.layout.page_size]
        match = cache.tree.match(namespace, known[:start], published=False)
        if namespace.layout != cache.layout or match.num_tokens < start:
            return False
        now = cache.clock.monotonic()
        try:
            inserted = cache.tree.insert(
                namespace, known, tier=HOST, slots=slots, first_page=node.first_page, now=now
            )
        except NoRoom:
            return False
        for slot, identity in zip(slots.tolist(), pages, strict=False):  # perhaps not all were right
            host.declare(slot, host.generation(slot), identity)
        cache.free(inserted.freed)
        cache.free({HOST: inserted.duplicates})
        self.num_restored += len(slots) - len(inserted.duplicates)
        return True

    async def save(self, cache: Cache, host: HostTier) -> None:
        """Write down what is in the arena, and have the supervisor keep it. For a server that stops, when its sessions
        have ended. Waits for checksums, at most `SAVE_S`."""
        until = min(cache.clock.monotonic() + SAVE_S, cache.leaving_by)
        records: list[bytes] = []
        numbers: dict[bytes, int] = {}
        nodes: list[KeptNode] = []
        for (info,) in cache.tree.walk(batch=1):
            node = info.node
            if info.namespace not in numbers:
                numbers[info.namespace] = len(records)
                records.append(node.record.encode())
            tokens = cache.tree.own_tokens_of(node).astype("<i4").tobytes()
            is_here = node.residency(HOST) is Residency.RESIDENT
            slots = node.slots(HOST).tobytes() if is_here else b""
            nodes.append(KeptNode(numbers[info.namespace], info.first_page, tokens, slots, b""))
        summed = [each._replace(slots=b"") for each in nodes]
        for start in range(0, len(nodes), CHUNK_PAGES):
            if cache.clock.monotonic() >= until:
                break
            summed[start : start + CHUNK_PAGES] = await wrap(_summed)(nodes[start : start + CHUNK_PAGES], host)
        self._supervisor.keep(fd := await wrap(_written)([records, summed]), PAGES)
        os.close(fd)


def _written(content: Any) -> int:
    """The descriptor of a file that holds it."""
    body = msgpack.packb(content)
    fd = os.memfd_create(PAGES, os.MFD_CLOEXEC)
    data = memoryview(_HEAD.pack(_MAGIC, 0, crc32c(body), len(body)) + body)
    while data:
        data = data[os.write(fd, data) :]
    return fd


def _summed(nodes: list[KeptNode], host: HostTier) -> list[KeptNode]:
    """The nodes with the checksums of their pages."""
    return [
        node._replace(sums=struct.pack(f"<{len(slots)}I", *[checksum(host.view(slot)) for slot in slots]))
        for node in nodes
        for slots in [np.frombuffer(node.slots, INT32).tolist()]
    ]


def _verified(node: KeptNode, host: HostTier) -> KeptNode:
    """A node as far as its pages still have their checksums."""
    slots, sums = np.frombuffer(node.slots, INT32).tolist(), np.frombuffer(node.sums, "<u4").tolist()
    num_right = 0
    for slot, expected in zip(slots, sums, strict=True):
        if not 0 <= slot < host.capacity_pages or checksum(host.view(slot)) != expected:
            break
        num_right += 1
    return node._replace(slots=node.slots[: 4 * num_right], sums=node.sums[: 4 * num_right])


def _slots_of(nodes: list[KeptNode]) -> Slots:
    return np.frombuffer(b"".join([node.slots for node in nodes]), INT32)


def _identified(namespace: Namespace, chain: bytes, tokens: bytes, page_size: int) -> Iterator[PageIdentity]:
    """The pages of a node."""
    step = TOKEN_BYTES * page_size
    for start in range(0, len(tokens), step):
        identity = PageIdentity(namespace.digest, chain, tokens[start : start + step])
        chain = identity.chain
        yield identity
