"""The device tier: pages as attention reads them, one pool a layer, on a GPU or in CPU memory."""

import asyncio
import os
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hicache.errors import BadRequest, TierUnavailable
from hicache.layout import AttentionKind, KVLayout, PageOrder
from hicache.tier import DEVICE, Outcome, PageRead, PageWrite, TierId
from hicache.tiers.device_copy import CpuCopier, PageCopier
from hicache.tiers.device_ways import cuda_copier
from hicache.tiers.memory import MemoryTier, capacity_in_pages
from hicache.tiers.memory_limits import available_bytes

CHUNK_BYTES: Final = 1 << 20
"""A thread that copies within CPU memory is handed at least so much."""
MAX_COPY_THREADS: Final = 4
"""Threads that copy within CPU memory, at most one a core."""
ALIGNMENT: Final = 2 << 20
"""Where a pool in CPU memory begins: at a multiple of so many bytes, a huge page."""
CUDA_THREADS: Final = 2
"""Threads that queue copies on a GPU and wait for them: one for each direction."""


class DeviceTier(MemoryTier):
    """Layer-first pages: `layer(i)` is one tensor `[capacity_pages, 2, page_size, num_kv_heads, head_dim]`.

    A page that comes in by `write` is scattered into all layers, one that goes out by `read` is gathered to page-first
    bytes. Pages that a sequence computes are written in place, token by token, by `write_tokens`, and declared once
    they are whole. All pages are zero at first, so that what lies beyond the last token of a page is a number at least.

    On a GPU, copies run on streams of their own and wait for what the default stream was given before them; `OK` means
    that the copy has ended. Attention and `write_tokens` are expected on the default stream. Beside the capacity the
    GPU holds one page, to which tokens without a slot go, and two staging buffers (`device_copy.STAGING_BYTES`).

    Args:
        layout: shape of a page: one part with keys and values in NHD order.
        capacity_pages: pages; or
        capacity_bytes: as many pages as fit. Exactly one of the two.
        device: "cpu", "cuda" or "cuda:N".
        num_threads: threads that copy; by default one a core, at most `MAX_COPY_THREADS`, and two for a GPU.

    Raises `BadRequest` for a layout or size that it cannot hold, `TierUnavailable` when there is no such device or not
    enough memory.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        capacity_pages: int | None = None,
        capacity_bytes: int | None = None,
        device: str = "cpu",
        num_threads: int | None = None,
        tier_id: TierId = DEVICE,
    ) -> None:
        _check_layout(layout)
        num_pages = capacity_in_pages(layout.page_bytes, capacity_pages, capacity_bytes)
        self.layout: Final = layout
        self.device: Final = _find_device(tier_id, device)
        on_cpu = self.device.type == "cpu"
        group = layout.groups[0]
        pool = _zeros(tier_id, (group.num_layers, num_pages + (not on_cpu), layout.layer_bytes(0)), self.device)
        dtype: torch.dtype = getattr(torch, layout.dtype.value)
        shape = (2, layout.page_size, group.num_kv_heads, group.head_dim)
        self._dtype: Final = dtype
        self._layers: list[Tensor] = [layer[:num_pages].view(dtype).view(num_pages, *shape) for layer in pool]
        # The same bytes with a row for each key or value of one token: [pages * 2 * page_size, bytes of all its heads].
        self._rows: list[Tensor] = [
            layer.view(-1, group.num_kv_heads * group.head_dim * layout.dtype.itemsize) for layer in pool
        ]
        self._copier: PageCopier = CpuCopier(pool) if on_cpu else cuda_copier(pool)
        if num_threads is None:
            num_threads = min(MAX_COPY_THREADS, os.cpu_count() or 1) if on_cpu else CUDA_THREADS
        super().__init__(
            tier_id,
            page_bytes=layout.page_bytes,
            capacity_pages=num_pages,
            num_threads=num_threads,
            # A GPU's copies queue up behind each other: splitting them among threads gains nothing.
            chunk_bytes=CHUNK_BYTES if on_cpu else num_pages * layout.page_bytes,
        )

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all pages."""
        return self.capacity_pages * self.page_bytes

    def layer(self, layer: int) -> Tensor:
        """The pool of one layer: `[capacity_pages, 2, page_size, num_kv_heads, head_dim]`, contiguous, the layout's
        dtype, on `device`. What a page of it holds follows its slot."""
        if not 0 <= layer < self.layout.num_layers:
            raise BadRequest("layer", f"{layer} is not within 0 to {self.layout.num_layers - 1}")
        if not self._layers:
            raise TierUnavailable(self.tier_id, "is closed")
        return self._layers[layer]

    def write_tokens(self, layer: int, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
        """Write one layer of tokens where a block table says. Any thread; the slots are the caller's own.

        Args:
            layer: index from 0.
            slot_mapping: int64 `[T]`, `slot * page_size + offset` of each token; -1 writes nothing. No two alike.
            key, value: `[T, num_kv_heads, head_dim]` of the layout's dtype, any strides, on `device`.

        On a GPU this queues work on the current stream and returns; numbers beyond the last slot then write nothing
        instead of being refused. Raises `BadRequest`, with nothing written, for other shapes, dtypes or devices.
        """
        self.layer(layer)
        self._check_tokens(slot_mapping, key, value)
        rows, page_size = self._rows[layer], self.layout.page_size
        num_tokens = self.capacity_pages * page_size
        new_rows = [_token_rows(tensor, rows.shape[1]) for tensor in (key, value)]
        if self.device.type == "cpu":
            # numpy, because torch would wake its own threads for it: milliseconds on a busy machine.
            flat = slot_mapping.numpy()
            if flat.size and not -1 <= int(flat.min()) <= int(flat.max()) < num_tokens:
                raise BadRequest("slot_mapping", f"holds a number outside -1 to {num_tokens - 1}")
            kept = np.flatnonzero(flat >= 0)
            targets = flat[kept] + flat[kept] // page_size * page_size
            for plane, source in enumerate(new_rows):
                rows.numpy()[targets + plane * page_size] = source.numpy()[kept]
        else:
            # Without asking the GPU anything: what has no slot goes to the page beyond the last.
            inside = (slot_mapping >= 0) & (slot_mapping < num_tokens)
            flat_slots = torch.where(inside, slot_mapping, num_tokens)
            first_rows = flat_slots + flat_slots // page_size * page_size
            for plane, source in enumerate(new_rows):
                rows[first_rows + plane * page_size] = source

    @property
    def num_layers(self) -> int:
        """Layers of a page: see `SupportsLayerWrite`."""
        return self.layout.num_layers

    async def open_layer_writes(self, pages: Sequence[PageWrite]) -> "DeviceLayerWrites":
        """See `SupportsLayerWrite`. On a GPU each layer of a page is a DMA of its own."""
        self._check_writes(pages)
        await self._until_unwritten([page.slot for page in pages])
        return DeviceLayerWrites(self, pages)

    async def copy_page(self, source_slot: int, target_slot: int) -> Outcome:
        """Copy all layers of a page onto another, which then holds no identity. Both are handed out, and belong to the
        copy until it returns. Waits for a pool thread. `STALE` if the target was freed meanwhile."""
        for slot in (source_slot, target_slot):
            assert self._pool.is_allocated(slot), f"{self.tier_id}: slot {slot} is not handed out"
        assert source_slot != target_slot, f"{self.tier_id}: slot {source_slot} copied onto itself"
        generation = self.generation(target_slot)
        await self._until_unwritten([target_slot])
        if self._closed:
            return Outcome.ERROR
        if not self._accepts(target_slot, generation):
            return Outcome.STALE
        with self._writing([target_slot]):
            [ok] = await self._copy(self._copy_pages, [(source_slot, target_slot)])
        if not ok:
            return Outcome.ERROR
        return Outcome.OK if self._accepts(target_slot, generation) else Outcome.STALE

    def _copy_in(self, pages: Sequence[PageWrite]) -> None:
        self._copier.copy_in([(page.slot, page.data) for page in pages])

    def _copy_out(self, pages: Sequence[PageRead]) -> None:
        # On a CPU page by page, so that the checksums find it in the core's cache.
        num_at_once = 1 if self.device.type == "cpu" else len(pages)
        for start in range(0, len(pages), num_at_once):
            part = pages[start : start + num_at_once]
            self._copier.copy_out([(page.slot, page.into) for page in part])
            for page in part:
                if page.sums is not None:
                    self._take_sums(page.into, page.sums)

    def _take_sums(self, page: memoryview, sums: bytearray) -> None:
        from hicache.tiers.sums import page_sums  # xxhash, which pages that go nowhere else need not load

        size = self.layout.layer_bytes(0)
        sums[:] = page_sums(page, [(start, start + size) for start in range(0, self.page_bytes, size)])

    def _copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source_slot, target_slot in pairs:
            self._copier.copy_page(source_slot, target_slot)

    def _release(self) -> None:
        self._layers.clear()
        self._rows.clear()
        del self._copier

    def _check_tokens(self, slot_mapping: Tensor, key: Tensor, value: Tensor) -> None:
        group = self.layout.groups[0]
        shape = (slot_mapping.shape[0] if slot_mapping.ndim else 0, group.num_kv_heads, group.head_dim)
        if slot_mapping.ndim != 1 or slot_mapping.dtype != torch.int64:
            raise BadRequest("slot_mapping", "is not a one-dimensional int64 tensor")
        for name, tensor in (("key", key), ("value", value)):
            if tuple(tensor.shape) != shape or tensor.dtype != self._dtype:
                raise BadRequest(name, f"is {tensor.dtype} {list(tensor.shape)}, not {self._dtype} {list(shape)}")
        for name, tensor in (("slot_mapping", slot_mapping), ("key", key), ("value", value)):
            if tensor.device != self.device:
                raise BadRequest(name, f"is on {tensor.device}, the pool on {self.device}")


def _token_rows(tensor: Tensor, row_bytes: int) -> Tensor:
    """`[T, num_kv_heads, head_dim]` as bytes: uint8 `[T, row_bytes]`."""
    return tensor.detach().contiguous().view(torch.uint8).view(-1, row_bytes)


class DeviceLayerWrites:
    """See `LayerWrites`."""

    def __init__(self, tier: DeviceTier, pages: Sequence[PageWrite]) -> None:
        shape = (tier.layout.num_layers, tier.layout.layer_bytes(0))
        self._tier = tier
        self._slots = np.array([page.slot for page in pages], np.int64)
        self._generations = np.array([page.generation for page in pages], np.int64)
        self._buffers = [(page.slot, np.frombuffer(page.data, np.uint8).reshape(shape)) for page in pages]
        self._stack = ExitStack()
        if not tier._closed:
            self._stack.enter_context(tier._writing(self._slots[self._accepted()].tolist()))

    def start_layer(self, layer: int) -> Coroutine[Any, Any, list[Outcome]]:
        """See `LayerWrites`. Raises `BadRequest` for a layer that there is not."""
        tier = self._tier
        if not 0 <= layer < tier.num_layers:
            raise BadRequest("layer", f"{layer} is not within 0 to {tier.num_layers - 1}")
        if tier._closed:
            return self._ended([], [])
        accepted = self._accepted()
        parts = tier._start_copy(
            partial(tier._copier.copy_layer_in, layer),
            [self._buffers[index] for index in accepted] if len(accepted) < len(self._buffers) else self._buffers,
            item_bytes=tier.layout.layer_bytes(0),
        )
        return self._ended(accepted, parts)

    def close(self) -> None:
        self._stack.close()

    def _accepted(self) -> list[int]:
        """Which pages have their slots still. Asked twice a layer while threads copy, so all are looked at in one."""
        return np.flatnonzero(self._tier._pool.are_current(self._slots, self._generations)).tolist()

    async def _ended(self, accepted: list[int], parts: list[asyncio.Future[list[bool]]]) -> list[Outcome]:
        copied = await self._tier._copied(parts)
        still = set(self._accepted())
        if len(still) == len(accepted) == len(self._slots) and all(copied):
            return [Outcome.OK] * len(copied)
        outcomes = [Outcome.ERROR if index in still else Outcome.STALE for index in range(len(self._slots))]
        for index, ok in zip(accepted, copied, strict=True):
            if ok and index in still:
                outcomes[index] = Outcome.OK
        return outcomes


def _check_layout(layout: KVLayout) -> None:
    if layout.num_parts != 1 or layout.groups[0].kind not in (AttentionKind.FULL, AttentionKind.SLIDING_WINDOW):
        raise BadRequest("layout.groups", "the device pool supports one group with keys and values")
    if layout.order is not PageOrder.NHD:
        raise BadRequest("layout.order", "the device pool supports NHD")


def _find_device(tier_id: TierId, name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadRequest("device", f"{name!r} is not cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise BadRequest("device", f"{name!r} is not cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise TierUnavailable(tier_id, "this machine has no CUDA device that torch can use")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise TierUnavailable(tier_id, f"there is no {name}: {torch.cuda.device_count()} CUDA devices are visible")
    return torch.device("cuda", index)


def _zeros(tier_id: TierId, shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """uint8 zeros, the memory really taken."""
    num_bytes = shape[0] * shape[1] * shape[2]
    available = available_bytes() if device.type == "cpu" else None
    if available is not None and num_bytes > available:
        raise TierUnavailable(tier_id, f"needs {num_bytes} bytes of memory, {available} are available")
    try:
        if device.type == "cpu":
            # numpy asks the kernel for huge pages, torch does not: scattering is then a third faster. From a multiple
            # of their size on, so that the first bytes have one too, and vectors are not spread over two cache lines.
            room = torch.from_numpy(np.empty(num_bytes + ALIGNMENT, np.uint8))
            pool = room[-room.data_ptr() % ALIGNMENT :][:num_bytes].view(shape)
        else:
            pool = torch.empty(shape, dtype=torch.uint8, device=device)
        return pool.zero_()
    except (MemoryError, RuntimeError) as error:
        raise TierUnavailable(tier_id, f"cannot have {num_bytes} bytes on {device}: {error}") from error
