"""The contract of a tier: where the bytes of pages live. `hicache/` owns it, `tiers/` implements it.

A tier is a pool of equal **slots**, each of which holds one page, page-first (`hicache.layout`). Which page a slot
holds is the tree's knowledge; a tier knows slots, their generations, and how to copy a page in and out. Every tier
passes the one test class `tests/tiers/contract.py`.

Who calls what, and where it waits:

- `allocate`, `free`, `generation` are synchronous, called by the event loop alone, and never wait.
- `write` and `read` are coroutines on that loop. They copy in threads or by DMA, never on the loop itself.
- Cancelling a coroutine does not stop a copy: buffers and slots belong to the copy until the coroutine has *returned*.
  The movers therefore never cancel one; they mark the transfer as unwanted and drop its result.
"""

import hashlib
import struct
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, NewType, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

TierId = NewType("TierId", str)
"""Name of one tier instance."""

DEVICE: Final = TierId("device")
HOST: Final = TierId("host")
NVME: Final = TierId("nvme")
REMOTE: Final = TierId("remote")

Slots = npt.NDArray[np.int32]
"""Slot ids of consecutive pages, one-dimensional."""
PageSums = bytes
"""Checksums of a page's bytes: packed little-endian uint32, one for each layer, then one for the whole page. They are
taken where a page enters host memory, or leaves the device past it, and handed on with it from tier to tier: these
alone know what kind they are."""
SUM_BYTES: Final = 4
"""Bytes of one checksum."""


class Outcome(Enum):
    """What became of one page of a `write` or `read`."""

    OK = "ok"
    """Copied whole; on a read also verified: generation, identity and checksum agree."""
    STALE = "stale"
    """The slot's generation is another one: the page it held was freed. Nothing was copied that may be used."""
    NOT_FOUND = "not_found"
    """The slot holds nothing, or another page than the identity names."""
    CORRUPT = "corrupt"
    """Stored bytes fail a checksum or are short. The page must be forgotten."""
    ERROR = "error"
    """The device failed (EIO, ENOSPC, ...). The page may be there; asking again later may work."""


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """What one page is: its namespace, everything before it, and its own tokens. Compared byte by byte, never by hash
    alone: `tokens` are the tokens themselves."""

    namespace: bytes
    """`Namespace.digest`, 32 bytes."""
    prefix: bytes
    """Chain digest of all pages before this one (`chain_digest`), 32 bytes; the namespace digest for the first."""
    tokens: bytes
    """The page's own token ids, packed little-endian int32, `4 * page_size` bytes."""

    @property
    def chain(self) -> bytes:
        """Chain digest up to and including this page: the `prefix` of the next one."""
        return chain_digest(self.prefix, self.tokens)


def chain_digest(prefix: bytes, tokens: bytes) -> bytes:
    """SHA-256 over a tag, the digest of everything before, the byte length of `tokens`, and `tokens`."""
    return hashlib.sha256(b"hicache-page\x01" + prefix + struct.pack("<I", len(tokens)) + tokens).digest()


@dataclass(frozen=True, slots=True)
class PageWrite:
    """One page to copy into a slot."""

    slot: int
    generation: int
    """The slot's generation when it was allocated; another one by now means `STALE`."""
    identity: PageIdentity
    data: memoryview
    """The page's bytes, contiguous, `page_bytes` long. Belongs to the copy until `write` returns."""
    sums: PageSums | None = None
    """The page's checksums, where they are known: the tier then need not take them, and what it keeps is damaged if
    they are not those of the bytes."""


@dataclass(frozen=True, slots=True)
class PageRead:
    """One page to copy out of a slot."""

    slot: int
    generation: int
    """The slot's generation when the read was decided; another one by now means `STALE`."""
    identity: PageIdentity
    into: memoryview
    """Where the bytes go: contiguous, writable, `page_bytes` long. Belongs to the copy until `read` returns; holds
    nothing usable unless the outcome is `OK`."""
    sums: bytearray | None = None
    """Empty, if the page's checksums are wanted: they are there when the outcome is `OK` and the tier knows them."""


class Tier(Protocol):
    """One store of pages. See the module's docstring for threads and waiting."""

    @property
    def tier_id(self) -> TierId: ...

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        ...

    @property
    def capacity_pages(self) -> int:
        """Slots in all. May shrink while a tier is in trouble; never below what is allocated."""
        ...

    @property
    def num_free(self) -> int:
        """Slots that `allocate` can give now. `num_free` plus slots handed out equals `capacity_pages`."""
        ...

    def allocate(self, num_pages: int) -> Slots:
        """Take `num_pages` slots, neighbours where possible; all or none.

        Raises `NoRoom` when fewer are free, `TierUnavailable` when the tier is down. The bytes in them are undefined.
        """
        ...

    def free(self, slots: Slots) -> None:
        """Give slots back and bump their generations, so that whoever still names them is told `STALE`.

        A slot that is not allocated, or is named twice, is a bug of the caller: `AssertionError`, nothing freed.
        """
        ...

    def generation(self, slot: int) -> int:
        """How often the slot has been freed, from 0."""
        ...

    async def write(self, pages: Sequence[PageWrite]) -> list[Outcome]:
        """Copy pages into their slots; one outcome each, in order. A slot is readable only after its `OK`.

        Never raises for what a device does; a failed page leaves the others alone. After `OK` the bytes are there for
        every later `read`; whether they survive a crash is the tier's own matter.
        """
        ...

    async def read(self, pages: Sequence[PageRead]) -> list[Outcome]:
        """Copy pages out of their slots; one outcome each, in order. Never raises for what a device does."""
        ...

    async def close(self) -> None:
        """Wait for copies under way, then release what the tier holds. Idempotent."""
        ...


@runtime_checkable
class SupportsView(Protocol):
    """A tier whose slots are addressable memory of this process: the host arena."""

    def view(self, slot: int) -> memoryview:
        """The slot's bytes, writable, `page_bytes` long. Valid until the tier closes; what it holds follows the
        slot."""
        ...

    def check(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        """What a `read` would say now, without copying: `OK`, `STALE` or `NOT_FOUND`. Who reads through a view asks
        before and again afterwards: only then were the bytes in between that page's."""
        ...


@runtime_checkable
class SupportsDeclare(Protocol):
    """A tier whose slots can be filled in place, beside `write`: by attention on the device, through a view on the
    host."""

    def declare(self, slot: int, generation: int, identity: PageIdentity) -> Outcome:
        """The slot now holds that page, whole: from here on `read` gives it out under that identity.

        Called by the event loop after whoever filled the slot has finished. `STALE` when the slot was freed meanwhile;
        the slot then stays as it is.
        """
        ...


@runtime_checkable
class SupportsSums(SupportsDeclare, Protocol):
    """A tier that keeps checksums with its pages: the host."""

    @property
    def num_sums(self) -> int:
        """How many of each page: one for each layer, and one for the whole. 0 if it keeps none."""
        ...

    def sums(self, slot: int, generation: int) -> PageSums | None:
        """Those of the page in the slot; None if they are not known, or the slot holds no page of that generation."""
        ...

    def declare(
        self, slot: int, generation: int, identity: PageIdentity, sums: PageSums | None = None
    ) -> Outcome:
        """`SupportsDeclare.declare`, with the page's checksums where they were taken."""
        ...


@runtime_checkable
class SupportsPageCopy(Protocol):
    """A tier that copies one of its slots onto another: copy-on-write of private device pages."""

    async def copy_page(self, source_slot: int, target_slot: int) -> Outcome:
        """Copy all layers of a page. Both slots belong to the copy until it returns; the target holds no identity."""
        ...


@runtime_checkable
class SupportsDown(Protocol):
    """A tier whose device may fail and come back."""

    @property
    def down(self) -> str | None:
        """Why no new pages are taken, in one line; None when they are."""
        ...


@runtime_checkable
class SupportsGiveUp(Protocol):
    """A tier whose device may stop answering: NVMe."""

    def give_up(self) -> None:
        """Wait for the device no more, as the cache is being closed: calls under way answer `ERROR` for what has not
        been copied, and `close` does not wait for it, be it called later or under way. The device may still answer one
        day: buffers that were given to those calls stay as they are until the process ends."""
        ...


@runtime_checkable
class SupportsCounters(Protocol):
    """A tier that counts more than its lanes see: findings of its checks, bytes that attention streamed from it."""

    def counters(self) -> dict[str, int]:
        """Counters since the tier was opened, by names of its own. Callable from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class LayerRead:
    """One layer of one page to copy out of a slot."""

    slot: int
    generation: int
    identity: PageIdentity
    layer: int
    """Layer index from 0 over the whole page."""
    into: memoryview
    """Contiguous, writable, as long as that layer of a page (`KVLayout.layer_bytes`)."""


class LayerWrites(Protocol):
    """Pages that are being copied into a tier layer by layer. Their slots and data belong to it until it is closed."""

    def start_layer(self, layer: int) -> Awaitable[list[Outcome]]:
        """Begin to copy one layer of each page whose slot has not been freed, behind what was begun before. Never
        waits, so that the next layer can be begun before this one has ended.

        Whoever calls it awaits what it returns, once and to its end: one outcome a page, in order. `OK`: that layer is
        in place and may be attended over by whoever owns the slot.
        """
        ...

    def close(self) -> None:
        """No further layer is copied; called once, when everything that was begun has ended. The slots hold no page,
        whatever they held before, until they are declared (`SupportsDeclare`)."""
        ...


@runtime_checkable
class SupportsLayerWrite(Protocol):
    """A tier into which pages can be copied layer by layer, so that attention begins on the first layer while later
    ones arrive: the device."""

    @property
    def num_layers(self) -> int:
        """Layers of a page, all of equal size, in the order in which attention needs them."""
        ...

    async def open_layer_writes(self, pages: Sequence[PageWrite]) -> LayerWrites:
        """Prepare to copy pages layer by layer: what is the same for all layers is done here, once. Waits at most for a
        write to an earlier life of a slot to end."""
        ...


class Ticket(Protocol):
    """Reads under way in another thread."""

    def wait(self, timeout_s: float) -> list[Outcome]:
        """Block the calling thread until every read reported; one outcome each, in order.

        Raises `DeadlineExceeded` after `timeout_s` seconds; the buffers then still belong to the reads.
        """
        ...


@runtime_checkable
class SupportsLayerRead(Protocol):
    """A tier from which single layers can be read, verified, while attention runs: NVMe."""

    def start_layer_reads(self, reads: Sequence[LayerRead]) -> Ticket:
        """Queue the reads and return at once. Callable from any thread. Generation, identity and the layer's own
        checksum are verified as `Tier.read` verifies whole pages."""
        ...


class RecoveredRun(NamedTuple):
    """Pages that a tier still holds from before a restart: neighbours in one prompt, in order."""

    namespace: bytes
    """The identity record (`Namespace.encode`), as `remember` was given it."""
    prefix: bytes
    """Chain digest of everything before the first page: the namespace's digest, or the `chain` of an earlier run."""
    chain: bytes
    """Chain digest up to and including the last page."""
    tokens: bytes
    """Token ids of all its pages, packed little-endian int32."""
    slots: Slots
    """`[num_pages]`. They are handed out, as if `allocate` had given them: who does not want a page frees its slot."""


@runtime_checkable
class SupportsDurability(Protocol):
    """A tier whose pages survive the process: NVMe.

    Writes and frees are numbered as they are accepted. *Accepted* (`write` answered `OK`) means readable from now on;
    *durable* means that it survives `kill -9` and a power cut. Who does not ask for durable never waits for a disk's
    cache to be flushed. A tier makes pages durable in the order in which they were accepted.
    """

    @property
    def accepted(self) -> int:
        """Number of the last write or free that was accepted; 0 before the first."""
        ...

    @property
    def durable(self) -> int:
        """Every write and free up to this number is durable. Never falls."""
        ...

    async def sync(self, number: int, *, deadline: float, is_frees_only: bool = False) -> None:
        """Wait until `durable` has reached `number`, at most until `deadline` (monotonic seconds).

        With `is_frees_only` writes that a flush has lost are nobody's concern: every free up to `number` is durable
        then, and every page accepted until then that the tier still has.

        Raises `DeadlineExceeded`, and `TierUnavailable` when what was accepted cannot be made durable: a flush failed.
        """
        ...

    def remember(self, digest: bytes, record: bytes) -> None:
        """Keep a namespace's record with its pages. Called before the first page of that namespace is written; again
        is harmless. Never waits."""
        ...

    def recovered(self) -> Sequence[RecoveredRun]:
        """What was durable when the tier was opened, parents before children, prefix-closed. Once: later calls return
        nothing."""
        ...
