"""Ways by which pages in registered memory reach a GPU's pool and leave it, and the choice among them.

Which is fastest depends on the size of a layer of a page, on the link and on the card: small fragments are better moved
by a kernel, large ones by the copy engine. So each is tried once, when the pool is made (`cuda_copier`).
"""

import ctypes
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from hicache.tiers.device_batch import Addresses, copy_batch, driver_call, stream_of
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


CopyBatch = Callable[[Addresses, Addresses, int], None]
"""Queues copies of as many bytes each: (targets, sources, bytes), uint64 `[n]` addresses, n at least 1."""


class BatchCopier(StagedCopier):
    """Registered memory, one call of the copy engine for all layers of all pages."""

    def __init__(self, pool: Tensor, inward: StagingQueue, outward: StagingQueue, copy_batch: CopyBatch) -> None:
        super().__init__(pool, inward, outward)
        self._copy_batch = copy_batch

    def copy_in(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        if pages:
            there, here = self._addresses(pages)
            self._inward.run(lambda: self._copy_batch(there, here, self._pool.shape[2]))

    def copy_out(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        if pages:
            there, here = self._addresses(pages)
            self._outward.run(lambda: self._copy_batch(here, there, self._pool.shape[2]))

    def _addresses(self, pages: Sequence[tuple[int, memoryview]]) -> tuple[Addresses, Addresses]:
        """Of each layer of each page: in the pool, and in its buffer."""
        num_layers, _, layer_bytes = self._pool.shape
        layers = np.arange(num_layers, dtype=np.uint64)
        slots = np.array([slot for slot, _ in pages], np.uint64)
        buffers = np.array([_address(buffer) for _, buffer in pages], np.uint64)
        there = np.uint64(self._pool.data_ptr()) + slots[:, None] * np.uint64(self._pool.stride(1))
        return (
            (there + layers * np.uint64(self._pool.stride(0))).ravel(),
            (buffers[:, None] + layers * np.uint64(layer_bytes)).ravel(),
        )


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


_log = logging.getLogger(__name__)

_MAX_PITCH: Final = 11
"""`cudaDevAttrMaxPitch`: rows of a copy in two dimensions may lie so many bytes apart."""
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
    ways = copiers_of(pool, inward, outward)
    count = min(pool.shape[1], max(1, MEASURED_BYTES // page_bytes))
    # Zeros, so that what is copied in leaves the pool as it was.
    memory = torch.zeros((count, page_bytes), dtype=torch.uint8, pin_memory=True)
    pages = [(slot, row.numpy().data) for slot, row in enumerate(memory)]
    return ChosenCopier(
        into=fastest(ways, lambda way: _elapsed_ms(lambda: way.copy_in(pages))),
        out=fastest(ways, lambda way: _elapsed_ms(lambda: way.copy_out(pages))),
        other=ways["staged"],
    )


def copiers_of(pool: Tensor, inward: StagingQueue, outward: StagingQueue) -> dict[str, PageCopier]:
    """Every way that there is on this machine, by name; "staged" and "kernel" always."""
    ways: dict[str, PageCopier] = {
        "staged": StagedCopier(pool, inward, outward), "kernel": KernelCopier(pool, inward, outward),
    }  # fmt: skip
    copy_2d = engine_copies(pool)
    if copy_2d is not None:
        ways["engine"] = EngineCopier(pool, inward, outward, copy_2d)
    call = driver_call()
    if call is not None:
        ways["batch"] = BatchCopier(
            pool, inward, outward,
            lambda targets, sources, num_bytes: copy_batch(call, targets, sources, num_bytes, stream_of(pool.device)),
        )  # fmt: skip
    return ways


def fastest(ways: Mapping[str, PageCopier], time_of: Callable[[PageCopier], float]) -> PageCopier:
    """The way that takes the least time. One that raises `RuntimeError` is passed over, and said so in the log, unless
    none works: then the last one's error is raised."""
    times: dict[str, float] = {}
    last: RuntimeError | None = None
    for name, way in ways.items():
        try:
            times[name] = time_of(way)
        except RuntimeError as error:
            _log.warning("pages are not copied to and from the GPU the %s way: %s", name, error)
            last = error
    if not times:
        raise last or ValueError("there is no way")
    return ways[min(times, key=times.__getitem__)]


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
    try:
        pitch_max = runtime.deviceGetAttribute(_MAX_PITCH, pool.device.index)
    except RuntimeError as error:  # a driver that is too old for this cupy
        _log.warning("cupy cannot use the GPU: %s", error)
        return None
    if pool.stride(0) > pitch_max:
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
