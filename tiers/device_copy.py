"""Pages between layer-first pools and page-first buffers: by numpy within CPU memory, by kernel and DMA on a GPU.

A pool is uint8 `[num_layers, num_pages, layer_bytes]`; a buffer is one page, `[num_layers, layer_bytes]` in one piece.
A copier is called from pool threads, from several at once, but never twice at once for a slot that is written.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

STAGING_BYTES: Final = 8 << 20
"""GPU memory through which pages pass, for each direction; at least one page."""


class PageCopier(Protocol):
    """How bytes get into a pool and out of it. Each call returns when its copies have ended, and raises `RuntimeError`
    when they failed."""

    def copy_in(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        """Scatter each buffer into all layers of its slot."""
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

    def copy_out(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        for slot, into in pages:
            np.copyto(np.frombuffer(into, np.uint8).reshape(self._page_shape), self._pool[:, slot])

    def copy_page(self, source_slot: int, target_slot: int) -> None:
        np.copyto(self._pool[:, target_slot], self._pool[:, source_slot])


class _Direction:
    """A stream with a staging buffer that only it uses: work queued under the lock stays together and in order."""

    def __init__(self, device: torch.device, num_pages: int, page_bytes: int) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it without types
        self.staging = torch.empty((num_pages, page_bytes), dtype=torch.uint8, device=device)
        self._lock = threading.Lock()

    def run(self, queue_work: Callable[[], None]) -> None:
        """Queue work behind everything that the default stream has been given by now, and wait until it has ended."""
        with self._lock, torch.cuda.stream(self.stream):
            self.stream.wait_stream(torch.cuda.default_stream(self.device))
            try:
                queue_work()
            except BaseException:
                self.stream.synchronize()  # what was queued before it failed still uses the caller's buffers
                raise
            ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # as above
            ended.record(self.stream)
        ended.synchronize()


class CudaCopier:
    """The pool on a GPU. Buffers in registered memory are copied by DMA, others through the driver's own staging."""

    def __init__(self, pool: Tensor, device: torch.device) -> None:
        from hicache.kernels import gather  # Triton, which pages in CPU memory need not load

        self._gather = gather
        num_layers, _, layer_bytes = pool.shape
        page_bytes = num_layers * layer_bytes
        self._pool = pool
        self._pages = gather.LayerPages.of(list(pool))
        self._batch = max(1, STAGING_BYTES // page_bytes)
        self._inward = _Direction(device, self._batch, page_bytes)
        self._outward = _Direction(device, self._batch, page_bytes)
        self._rows = torch.arange(self._batch, device=device)

    def copy_in(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        def queue_work() -> None:
            for start in range(0, len(pages), self._batch):
                batch = pages[start : start + self._batch]
                staging = self._inward.staging[: len(batch)]
                for row, (_, data) in zip(staging, batch, strict=True):
                    row.copy_(_as_tensor(data), non_blocking=True)
                self._gather.scatter_pages(staging, self._rows[: len(batch)], self._pages, self._slots(batch))

        self._inward.run(queue_work)

    def copy_out(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        def queue_work() -> None:
            for start in range(0, len(pages), self._batch):
                batch = pages[start : start + self._batch]
                staging = self._outward.staging[: len(batch)]
                self._gather.gather_pages(self._pages, self._slots(batch), staging, self._rows[: len(batch)])
                for row, (_, into) in zip(staging, batch, strict=True):
                    _as_tensor(into).copy_(row, non_blocking=True)

        self._outward.run(queue_work)

    def copy_page(self, source_slot: int, target_slot: int) -> None:
        def queue_work() -> None:
            self._pool[:, target_slot].copy_(self._pool[:, source_slot])

        self._inward.run(queue_work)

    def _slots(self, pages: Sequence[tuple[int, memoryview]]) -> Tensor:
        return torch.tensor([slot for slot, _ in pages], device=self._pool.device)


def _as_tensor(buffer: memoryview) -> Tensor:
    array = np.frombuffer(buffer, np.uint8)
    return torch.from_numpy(array if array.flags.writeable else array.copy())  # torch has no read-only tensors
