"""Ways by which pages in registered memory reach a GPU's pool and leave it, and the choice among them.

Which is fastest depends on the size of a layer of a page, on the link and on the card: small fragments are better moved
by a kernel, large ones by the copy engine. So each is tried once, when the pool is made (`cuda_copier`).
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from hicache.tiers.device_copy import (
    STAGING_BYTES,
    Bytes,
    CudaQueue,
    PageCopier,
    StagedCopier,
    StagingQueue,
    as_tensor,
)


class KernelCopier(StagedCopier):
    """Registered memory, read and written by the kernel itself, all pages in one launch: for small layers of pages."""

    def copy_in(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        def queue_work() -> None:
            memory, rows = _rows_of([data for _, data in pages], self._pool.device)
            self._kernels.scatter_pages(memory, rows, self._pages, self._slots(pages))

        if pages:
            self._inward.run(queue_work)

    def copy_out(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        def queue_work() -> None:
            memory, rows = _rows_of([into for _, into in pages], self._pool.device)
            self._kernels.gather_pages(self._pages, self._slots(pages), memory, rows)

        if pages:
            self._outward.run(queue_work)

    def _slots(self, pages: Sequence[tuple[int, memoryview]]) -> Tensor:
        return torch.tensor([slot for slot, _ in pages], device=self._pool.device)


Copy2D = Callable[[int, int, int, int, int, int], None]
"""Queues `height` copies of `width` bytes: (target, target pitch, source, source pitch, width, height), addresses and
pitches in bytes."""


class EngineCopier(StagedCopier):
    """Registered memory, one call of the copy engine a page: no kernel, no multiprocessor, and nothing staged.

    The layers of a page lie one pool layer apart, so that a page is a copy in two dimensions, as the engine knows them.
    """

    def __init__(self, pool: Tensor, inward: StagingQueue, outward: StagingQueue, copy_2d: Copy2D) -> None:
        super().__init__(pool, inward, outward)
        self._copy_2d = copy_2d

    def copy_in(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        num_layers, _, layer_bytes = self._pool.shape

        def queue_work() -> None:
            for slot, data in pages:
                target, pitch = self._place(slot)
                self._copy_2d(target, pitch, _address(data), layer_bytes, layer_bytes, num_layers)

        self._inward.run(queue_work)

    def copy_out(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        num_layers, _, layer_bytes = self._pool.shape

        def queue_work() -> None:
            for slot, into in pages:
                source, pitch = self._place(slot)
                self._copy_2d(_address(into), layer_bytes, source, pitch, layer_bytes, num_layers)

        self._outward.run(queue_work)

    def _place(self, slot: int) -> tuple[int, int]:
        """Address of a slot in the first layer, and bytes from layer to layer."""
        return self._pool.data_ptr() + slot * self._pool.stride(1), self._pool.stride(0)


class ChosenCopier:
    """A `PageCopier` that has one for memory that is registered, for each direction, and one for everything else."""

    def __init__(self, *, into: PageCopier, out: PageCopier, other: PageCopier) -> None:
        self.into: Final = into
        """Copies registered memory into the pool."""
        self.out: Final = out
        """Copies pages out to registered memory."""
        self.other: Final = other
        """Copies all other memory, and does what does not concern whole pages of memory."""

    def copy_in(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        registered, rest = _by_memory(pages)
        if registered:
            self.into.copy_in(registered)
        if rest:
            self.other.copy_in(rest)

    def copy_layer_in(self, layer: int, pages: Sequence[tuple[int, Bytes]]) -> None:
        self.other.copy_layer_in(layer, pages)

    def copy_out(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        registered, rest = _by_memory(pages)
        if registered:
            self.out.copy_out(registered)
        if rest:
            self.other.copy_out(rest)

    def copy_page(self, source_slot: int, target_slot: int) -> None:
        self.other.copy_page(source_slot, target_slot)


MEASURED_BYTES: Final = 16 << 20
"""What each way copies, in each direction, when they are compared; at least one page."""
MEASURED_ROUNDS: Final = 3
"""How often, the fastest counting."""


def cuda_copier(pool: Tensor) -> ChosenCopier:
    """The copier of a pool on a GPU: two queues with `STAGING_BYTES` each, and for each direction the way that was
    fastest on this machine for pages of this shape. Takes some 10 ms, and expects that every page is zero."""
    page_bytes = pool.shape[0] * pool.shape[2]
    num_pages = max(1, STAGING_BYTES // page_bytes)
    inward, outward = (CudaQueue(pool.device, num_pages, page_bytes) for _ in range(2))
    staged = StagedCopier(pool, inward, outward)
    ways: list[PageCopier] = [staged, KernelCopier(pool, inward, outward)]
    copy_2d = engine_copies(pool)
    if copy_2d is not None:
        ways.append(EngineCopier(pool, inward, outward, copy_2d))
    count = min(pool.shape[1], max(1, MEASURED_BYTES // page_bytes))
    # Zeros, so that what is copied in leaves the pool as it was.
    memory = torch.zeros((count, page_bytes), dtype=torch.uint8, pin_memory=True)
    pages = [(slot, row.numpy().data) for slot, row in enumerate(memory)]
    return ChosenCopier(
        into=min(ways, key=lambda way: _elapsed_ms(lambda: way.copy_in(pages))),
        out=min(ways, key=lambda way: _elapsed_ms(lambda: way.copy_out(pages))),
        other=staged,
    )


def _elapsed_ms(copy: Callable[[], None]) -> float:
    """Time of the fastest of some rounds, after one that does not count."""
    copy()
    times = []
    for _ in range(MEASURED_ROUNDS):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it without types
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as above
        begin.record()
        copy()  # returns when it has ended
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return min(times)


def engine_copies(pool: Tensor) -> Copy2D | None:
    """Copies in two dimensions on the current stream, if there is cupy and the pool's layers are not too far apart for
    the engine."""
    try:
        from cupy.cuda import runtime
    except ImportError:
        return None
    attributes = runtime.getDeviceProperties(pool.device.index)
    if pool.stride(0) > int(attributes["memPitch"]):
        return None

    def copy_2d(target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int) -> None:
        stream = torch.cuda.current_stream(pool.device).cuda_stream
        runtime.memcpy2DAsync(
            target, target_pitch, source, source_pitch, width, height, runtime.memcpyDefault, stream
        )

    return copy_2d


def _rows_of(buffers: Sequence[memoryview], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pages that lie anywhere as rows of one tensor: uint8 `[n, page_bytes]`, whose rows overlap, and int64 numbers of
    the rows that are the buffers, on `device`. Nothing but those may be read or written."""
    addresses = [_address(buffer) for buffer in buffers]
    first = min(addresses)
    step = math.gcd(16, *(address - first for address in addresses))
    page_bytes = buffers[0].nbytes
    num_bytes = max(addresses) - first + page_bytes
    memory = np.ctypeslib.as_array((ctypes.c_ubyte * num_bytes).from_address(first))
    num_rows = (num_bytes - page_bytes) // step + 1
    rows = torch.from_numpy(memory).as_strided((num_rows, page_bytes), (step, 1))
    return rows, torch.tensor([(address - first) // step for address in addresses], device=device)


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def _by_memory(
    pages: Sequence[tuple[int, memoryview]],
) -> tuple[list[tuple[int, memoryview]], list[tuple[int, memoryview]]]:
    """Those in registered memory, and the others. What is read-only counts as other: torch has no such tensors."""
    registered = [not buffer.readonly and as_tensor(buffer).is_pinned() for _, buffer in pages]
    return (
        [page for page, is_registered in zip(pages, registered, strict=True) if is_registered],
        [page for page, is_registered in zip(pages, registered, strict=True) if not is_registered],
    )
