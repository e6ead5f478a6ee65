"""The host tier: pages in one arena of shareable memory, pinned where there is a GPU."""

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hicache.errors import BadRequest, TierUnavailable
from hicache.layout import AttentionKind, KVLayout, LayerGroup, PageOrder
from hicache.tier import HOST, SUM_BYTES, Outcome, PageIdentity, PageRead, PageSums, PageWrite, Slots, TierId
from hicache.tiers.arena import Arena
from hicache.tiers.memory import Held, MemoryTier, capacity_in_pages
from hicache.tiers.slots import SlotPool

SLOT_ALIGNMENT: Final = 4096
"""Slots begin at multiples of this, in bytes: what direct I/O asks of a buffer."""
CHUNK_BYTES: Final = 1 << 20
"""A copying thread is handed at least so much."""
MAX_COPY_THREADS: Final = 4
"""Threads that copy, at most one a core."""

_log = logging.getLogger(__name__)


def slot_bytes(page_bytes: int) -> int:
    """Bytes a page occupies in the arena: `page_bytes` rounded up to `SLOT_ALIGNMENT`."""
    return -(-page_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class HostTier(MemoryTier):
    """Pages in host memory, page-first, slot `i` at byte `i * slot_stride` of the arena.

    The constructor allocates all memory, some 0.3 s a GiB; a thread then gathers it into 2 MiB pages, some 3 s a GiB,
    and the tier can be used meanwhile. With `pinned` the constructor waits for that and registers the arena with CUDA:
    make the tier in a thread if a loop is running. Memory that cannot be gathered or registered stays ordinary memory,
    with one warning.

    Beside `write` and `read`, slots are memory: `view` (bytes), `array` (numpy), `tensor` and `layer_view` (torch) show
    the same bytes without a copy. Who fills a slot through one of them says so with `declare`; until then it holds
    nothing. Such views keep the memory mapped, after `close` too, but what they show then is nobody's.

    Told of `layer_bytes`, the tier keeps the checksums that a page comes with (`PageWrite.sums`, `declare`), and hands
    them on (`sums`). It never looks whether they are still right: a slower tier does, of a page that it reads back.

    Args:
        page_bytes: bytes of one page.
        capacity_pages: slots; or
        capacity_bytes: as many slots of `slot_bytes(page_bytes)` as fit. Exactly one of the two.
        pinned: register the arena with CUDA.
        layer_bytes: bytes of each layer of a page, in order; None: no checksums are kept.
        huge_pages: gather the memory into 2 MiB pages.
        num_threads: threads that copy; by default one a core, at most `MAX_COPY_THREADS`.
        outlives: the memory may be handed on to a later process (`Arena`, `whole_fds`).
        kept: the `whole_fds` of an earlier process with as many slots. All generations rise by one, so that nobody
            takes what comes for what was; which slots hold something is said by `take_over`.

    Raises `BadRequest` for a size that holds no page, `TierUnavailable` when the memory cannot be had.
    """

    def __init__(
        self,
        *,
        page_bytes: int,
        capacity_pages: int | None = None,
        capacity_bytes: int | None = None,
        layer_bytes: Sequence[int] | None = None,
        pinned: bool = False,
        huge_pages: bool = True,
        num_threads: int | None = None,
        tier_id: TierId = HOST,
        outlives: bool = False,
        kept: tuple[int, int] | None = None,
    ) -> None:
        if page_bytes < 1:
            raise BadRequest("page_bytes", f"{page_bytes} is below 1")
        if layer_bytes is not None and (sum(layer_bytes) != page_bytes or min(layer_bytes) < 1):
            raise BadRequest("layer_bytes", f"{sum(layer_bytes)} bytes in layers are no page of {page_bytes}")
        self._layer_ranges: Final = tuple(pairwise(accumulate(layer_bytes or (), initial=0)))
        self.slot_stride: Final = slot_bytes(page_bytes)
        """Bytes from one slot to the next."""
        num_pages = capacity_in_pages(self.slot_stride, capacity_pages, capacity_bytes)
        # Before any table of slots is made: of a size that cannot be had, the tables alone may be too large.
        self._outlives = outlives
        self._arena = Arena(
            tier_id, num_pages * self.slot_stride, outlives=outlives, fd=None if kept is None else kept[0]
        )
        try:
            super().__init__(
                tier_id,
                page_bytes=page_bytes,
                capacity_pages=num_pages,
                num_threads=min(MAX_COPY_THREADS, os.cpu_count() or 1) if num_threads is None else num_threads,
                chunk_bytes=CHUNK_BYTES,
            )
        except BaseException:
            self._arena.close()
            raise
        self._generations: Arena | None = None
        if kept is not None:
            try:
                self._share_in(self._make_table(kept[1]), continued=True)
            except BaseException:
                self._executor.shutdown()
                self._arena.close()
                raise
        self._array: npt.NDArray[np.uint8] | None = np.frombuffer(self._arena.memory, np.uint8).reshape(num_pages, -1)
        self._stop = threading.Event()
        self._collapsing = threading.Thread(target=self._collapse, name=f"hicache-{tier_id}-collapse", daemon=True)
        self._pinned = False
        if pinned:
            if huge_pages:
                self._collapse()  # registering fixes pages where they are
            refusal = self._arena.register()
            self._pinned = refusal is None
            if refusal is not None:
                _log.warning("%s: the arena is not pinned, copies to and from a GPU are slower: %s", tier_id, refusal)
        elif huge_pages:
            self._start_collapsing()

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the arena."""
        return self._arena.num_bytes

    @property
    def pinned(self) -> bool:
        """Whether the arena is registered with CUDA, so that copies to and from a GPU are DMA."""
        return self._pinned

    @property
    def collapsed_bytes(self) -> int:
        """How much of the arena lies in 2 MiB pages so far."""
        return self._arena.collapsed_bytes

    @property
    def fd(self) -> int:
        """The arena's descriptor, sealed: whoever it is sent to can map it for reading only. Closed with the tier.

        Raises `TierUnavailable` once closed.
        """
        return self._arena.fd

    def share_generations(self) -> int:
        """The descriptor of a table that shows from now on how often each slot was freed: int64 `[capacity_pages]`,
        sealed as the arena is. A slot's count rises before anything else is put there. Closed with the tier.

        Whoever maps the arena copies a page and then compares: another count than when the page was named means that
        the bytes may be another page's. Raises `TierUnavailable` when the memory cannot be had, or once closed.
        """
        if self._array is None:
            raise TierUnavailable(self.tier_id, "is closed")
        if self._generations is None:
            self._share_in(self._make_table(None), continued=False)
        assert self._generations is not None, "it was made"
        return self._generations.fd

    def _make_table(self, fd: int | None) -> Arena:
        table_id = TierId(f"{self.tier_id}-generations")
        return Arena(table_id, 8 * self.capacity_pages, outlives=self._outlives, fd=fd)

    def _share_in(self, table: Arena, *, continued: bool) -> None:
        """Keep the generations in a table from now on, `continued` from the ones that are there."""
        memory = np.frombuffer(table.memory, np.int64)
        if continued:
            self._pool = SlotPool.restored(self.tier_id, memory + 1, np.empty(0, np.int32))
        self._pool.keep_generations_in(memory)
        self._generations = table

    @property
    def whole_fds(self) -> tuple[int, int]:
        """Arena and table of generations, for a later process: see `kept`. Raises `TierUnavailable` once closed."""
        self.share_generations()
        assert self._generations is not None, "it was made"
        return self._arena.whole_fd, self._generations.whole_fd

    def take_over(self, slots: Slots) -> None:
        """These slots hold pages of the earlier process, which are to be declared. For a tier that was made with
        `kept`, before anything else is done with it."""
        assert self._generations is not None, "nothing was kept"
        assert self.num_free == self.capacity_pages, "it is in use already"
        memory = np.frombuffer(self._generations.memory, np.int64)
        self._pool = SlotPool.restored(self.tier_id, memory.copy(), slots)
        self._pool.keep_generations_in(memory)

    @property
    def num_sums(self) -> int:
        """Checksums of each page: one for each layer, and one for the whole. 0 if none are kept."""
        return len(self._layer_ranges) + 1 if self._layer_ranges else 0

    def sums(self, slot: int, generation: int) -> PageSums | None:
        """The checksums that the page in the slot came with; None if it came without, or the slot holds no page of that
        generation. Raises `BadRequest` for a slot that does not exist."""
        if self._pool.generation(slot) != generation or (held := self._held[slot]) is None:
            return None
        return held.sums

    def take_sums(self, slot: int) -> PageSums:
        """The checksums of what lies in the slot now, for `declare`. Any thread may call; cheapest in the one that has
        just filled the slot, while that is in its core's cache. For a tier that was told of `layer_bytes`."""
        assert self._layer_ranges, f"{self.tier_id}: knows no layers to take checksums of"
        from hicache.tiers.sums import page_sums  # xxhash, which a tier that keeps no checksums need not load

        return page_sums(self.view(slot), self._layer_ranges)

    def declare(
        self, slot: int, generation: int, identity: PageIdentity, sums: PageSums | None = None
    ) -> Outcome:
        """See `SupportsSums`. Raises `BadRequest` for another number of checksums than `num_sums`."""
        self._check_sums(sums)
        return super().declare(slot, generation, identity, sums)

    def declare_all(
        self, slots: Slots, identities: Sequence[PageIdentity], sums: Sequence[PageSums] | None = None
    ) -> None:
        """`declare` for many slots, which the caller has taken and not freed since: the page of each and, where they
        were taken, its checksums. Raises `BadRequest` for another number of checksums than `num_sums`; nothing is
        declared then."""
        numbers = slots.tolist()
        assert len(set(numbers)) == len(numbers) == len(identities), f"{self.tier_id}: one slot a page, one page a slot"
        assert self._pool.are_allocated(slots), f"{self.tier_id}: a slot that nobody has was declared"
        assert self._being_written.keys().isdisjoint(numbers), f"{self.tier_id}: a slot was declared under a write"
        for each in sums or ():
            self._check_sums(each)
        pages = map(Held, identities) if sums is None else map(Held, identities, sums)
        for slot, page in zip(numbers, pages, strict=True):
            self._held[slot] = page

    def generations(self, slots: Slots) -> npt.NDArray[np.int64]:
        """`generation` of each of the slots, which exist: int64, one a slot."""
        return self._pool.generations(slots)

    def view(self, slot: int) -> memoryview:
        """The slot's bytes, writable, `page_bytes` long. Raises `TierUnavailable` once closed."""
        if not 0 <= slot < self.capacity_pages:
            raise BadRequest("slot", f"{slot} is not within 0 to {self.capacity_pages - 1}")
        start = slot * self.slot_stride
        return self._arena.memory[start : start + self._page_bytes]

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All slots: uint8 `[capacity_pages, slot_stride]`, writable; the first `page_bytes` of each row are the page.

        Raises `TierUnavailable` once closed.
        """
        if self._array is None:
            raise TierUnavailable(self.tier_id, "is closed")
        return self._array

    def tensor(self) -> Tensor:
        """`array` as torch sees it: uint8 `[capacity_pages, slot_stride]`, on the CPU, the same memory."""
        return torch.from_numpy(self.array)

    def layer_view(self, layout: KVLayout, layer: int) -> Tensor:
        """One layer of every slot, in place: `[capacity_pages, 2, page_size, num_kv_heads, head_dim]` in the layout's
        dtype, strided over the arena, each slot's part contiguous. Attention on the CPU reads pages here.

        Raises `BadRequest` for a layout with pages of another size, and for a layer that has no keys and values in NHD
        order.
        """
        if layout.page_bytes != self._page_bytes:
            raise BadRequest("layout", f"has pages of {layout.page_bytes} bytes, this tier of {self._page_bytes}")
        group, start, num_bytes = _find_layer(layout, layer)
        if layout.order is not PageOrder.NHD or group.kind not in (AttentionKind.FULL, AttentionKind.SLIDING_WINDOW):
            raise BadRequest("layout", "a view of a layer needs keys and values in NHD order")
        dtype: torch.dtype = getattr(torch, layout.dtype.value)
        shape = (self.capacity_pages, 2, layout.page_size, group.num_kv_heads, group.head_dim)
        return self.tensor()[:, start : start + num_bytes].view(dtype).view(shape)

    async def close(self) -> None:
        self._stop.set()
        if self._collapsing.is_alive():
            await asyncio.get_running_loop().run_in_executor(self._executor, self._collapsing.join)
        await super().close()

    def _check_writes(self, pages: Sequence[PageWrite]) -> None:
        super()._check_writes(pages)
        for page in pages:
            self._check_sums(page.sums)

    def _check_sums(self, sums: PageSums | None) -> None:
        if sums is not None and len(sums) != SUM_BYTES * self.num_sums:
            raise BadRequest("sums", f"{len(sums)} bytes are not {self.num_sums} checksums")

    def _copy_in(self, pages: Sequence[PageWrite]) -> None:
        slots = self.array
        for page in pages:
            np.copyto(slots[page.slot, : self._page_bytes], np.frombuffer(page.data, np.uint8))

    def _copy_out(self, pages: Sequence[PageRead]) -> None:
        slots = self.array
        for page in pages:
            np.copyto(np.frombuffer(page.into, np.uint8), slots[page.slot, : self._page_bytes])

    def _release(self) -> None:
        self._array = None
        self._arena.close()
        if self._generations is not None:
            self._generations.close()

    def _start_collapsing(self) -> None:
        try:
            self._collapsing.start()
        except RuntimeError as error:
            _log.warning("%s: the arena stays in small pages, disk I/O is slower: %s", self.tier_id, error)

    def _collapse(self) -> None:
        refusal = self._arena.collapse(self._stop)
        if refusal is not None:
            _log.warning(
                "%s: only %d of %d MiB lie in 2 MiB pages, disk I/O is slower: %s",
                self.tier_id,
                self._arena.collapsed_bytes >> 20,
                self._arena.num_bytes >> 20,
                refusal,
            )


def _find_layer(layout: KVLayout, layer: int) -> tuple[LayerGroup, int, int]:
    """The group of a layer, counted over all groups, the byte of a page at which it begins, and its bytes."""
    if layer >= 0:
        start, first = 0, 0
        for part, group in enumerate(layout.groups):
            num_bytes = layout.layer_bytes(part)
            if layer < first + group.num_layers:
                return group, start + (layer - first) * num_bytes, num_bytes
            start += layout.part_bytes(part)
            first += group.num_layers
    raise BadRequest("layer", f"{layer} is not within 0 to {layout.num_layers - 1}")
