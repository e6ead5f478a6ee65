"""Pages between layer-first pools and page-first buffers: by numpy within CPU memory, by kernel and DMA on a GPU.

A pool is uint8 `[num_layers, num_pages, layer_bytes]`; a buffer is one page, `[num_layers, layer_bytes]` in one piece.
A copier is called from pool threads, from several at once, but never twice at once for a slot that is written.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]

STAGING_BYTES: Final = 8 << 20
"""GPU memory through which pages pass, for each direction; at least one page."""


class PageCopier(Protocol):
    """How bytes get into a pool and out of it. Each call returns when its copies have ended, and raises `RuntimeError`
    when they failed."""

    def copy_in(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        """Scatter each buffer into all layers of its slot."""
        ...

    def copy_layer_in(self, layer: int, pages: Sequence[tuple[int, Bytes]]) -> None:
        """Copy one layer of each page, given as `[num_layers, layer_bytes]`, into its slot."""
        ...

    def copy_out(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        """Gather all layers of each slot into its buffer."""
        ...

    def copy_page(self, source_slot: int, target_slot: int) -> None:
        """Copy all layers of one slot onto another."""
        ...


class CpuCopier:
    """Both sides in CPU memory: one strided numpy copy a page, which holds no interpreter lock and wakes no threads.

    `hicache.kernels.gather` does the same bytes from one tensor of slots; buffers that lie anywhere would have to be
    collected for it first, a second copy of everything.
    """

    def __init__(self, pool: Tensor) -> None:
        self._pool = pool.numpy()
        self._page_shape = (pool.shape[0], pool.shape[2])

    def copy_in(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        for slot, data in pages:
            np.copyto(self._pool[:, slot], np.frombuffer(data, np.uint8).reshape(self._page_shape))

    def copy_layer_in(self, layer: int, pages: Sequence[tuple[int, Bytes]]) -> None:
        pool = self._pool[layer]
        for slot, data in pages:
            pool[slot] = data[layer]

    def copy_out(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        for slot, into in pages:
            np.copyto(np.frombuffer(into, np.uint8).reshape(self._page_shape), self._pool[:, slot])

    def copy_page(self, source_slot: int, target_slot: int) -> None:
        np.copyto(self._pool[:, target_slot], self._pool[:, source_slot])


class StagingQueue(Protocol):
    """A buffer of whole pages beside the pool, and an order in which work on it is done."""

    @property
    def staging(self) -> Tensor:
        """uint8 `[pages, page_bytes]`, on the pool's device."""
        ...

    def run(self, queue_work: Callable[[], None]) -> None:
        """Do what `queue_work` queues, undisturbed by other calls; returns when it has ended. Any thread."""
        ...


class CudaQueue:
    """A stream of its own with a staging buffer that only it uses."""

    def __init__(self, device: torch.device, num_pages: int, page_bytes: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it without types
        self._staging = torch.empty((num_pages, page_bytes), dtype=torch.uint8, device=device)
        self._lock = threading.Lock()

    @property
    def staging(self) -> Tensor:
        return self._staging

    def run(self, queue_work: Callable[[], None]) -> None:
        """The work begins after everything that the default stream has been given by now."""
        with self._lock, torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            try:
                queue_work()
            except BaseException:
                self._stream.synchronize()  # what was queued before it failed still uses the caller's buffers
                raise
            # A blocking event: the thread sleeps until the copy has ended instead of asking over and over.
            ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # as above
            ended.record(self._stream)
        ended.synchronize()


class StagedCopier:
    """The pool on a GPU: each page passes whole through a staging buffer, where a kernel takes it apart or together.

    A page in registered memory is then one DMA; other memory goes through the driver's own buffers. Each direction has
    its own queue, so that pages coming in and pages going out do not wait for each other.
    """

    def __init__(self, pool: Tensor, inward: StagingQueue, outward: StagingQueue) -> None:
        from hicache.kernels import gather  # Triton, which pages in CPU memory need not load

        self._kernels: Final = gather
        self._pool: Final = pool
        self._pages: Final = gather.LayerPages.of(list(pool))
        self._inward: Final = inward
        self._outward: Final = outward

    def copy_in(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        def queue_work() -> None:
            for batch, staging, slots, rows in self._batches(pages, self._inward.staging):
                for row, (_, data) in zip(staging, batch, strict=True):
                    row.copy_(as_tensor(data), non_blocking=True)
                self._kernels.scatter_pages(staging, rows, self._pages, slots)

        self._inward.run(queue_work)

    def copy_layer_in(self, layer: int, pages: Sequence[tuple[int, Bytes]]) -> None:
        # One layer of a page lies in one piece on both sides: no kernel is needed to take it apart.
        def queue_work() -> None:
            for slot, data in pages:
                self._pool[layer, slot].copy_(as_tensor(data[layer].data), non_blocking=True)

        self._inward.run(queue_work)

    def copy_out(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        def queue_work() -> None:
            for batch, staging, slots, rows in self._batches(pages, self._outward.staging):
                self._kernels.gather_pages(self._pages, slots, staging, rows)
                for row, (_, into) in zip(staging, batch, strict=True):
                    as_tensor(into).copy_(row, non_blocking=True)

        self._outward.run(queue_work)

    def copy_page(self, source_slot: int, target_slot: int) -> None:
        def queue_work() -> None:
            self._pool[:, target_slot].copy_(self._pool[:, source_slot])

        self._inward.run(queue_work)

    def _batches(
        self, pages: Sequence[tuple[int, memoryview]], staging: Tensor
    ) -> Iterator[tuple[Sequence[tuple[int, memoryview]], Tensor, Tensor, Tensor]]:
        """As many pages at a time as fit: the pages, their part of the staging buffer, their slots, and the buffer's
        rows. Work on one batch is queued before the next is asked for, and done in that order."""
        for start in range(0, len(pages), len(staging)):
            batch = pages[start : start + len(staging)]
            slots = torch.tensor([slot for slot, _ in batch], device=staging.device)
            yield batch, staging[: len(batch)], slots, torch.arange(len(batch), device=staging.device)


def as_tensor(buffer: memoryview) -> Tensor:
    """uint8 `[num_bytes]` over the buffer, or over a copy of it if it is read-only."""
    array = np.frombuffer(buffer, np.uint8)
    return torch.from_numpy(array if array.flags.writeable else array.copy())  # torch has no read-only tensors
