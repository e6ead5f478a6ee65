"""Pages of host memory on their way to the device, through two buffers there and on a stream of their own.

Work is queued, not waited for: a copy waits for the attention that used its buffer two pieces before, attention waits
for its copy, and the host runs ahead of both. So one piece is copied while the other is attended to.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch

from hicache.kernels.gather import LayerPages, scatter_pages
from hicache.kernels.parts import PagedPart, selectable

BUFFER_BYTES: Final = 16 << 20
"""Size of each of the two buffers; at least one page."""
KERNEL_BYTES_MAX: Final = 1 << 20
"""Up to so many bytes a page, a kernel reads pinned memory itself, all pages in one launch; larger ones are worth a
call of the copy engine each, which leaves the multiprocessors to attention."""


def pieces(part: PagedPart, pages_max: int) -> Iterator[PagedPart]:
    """The part, cut into such of at most `pages_max` pages."""
    num_pages = part.block_table.shape[0]
    for begin in range(0, num_pages, pages_max):
        yield part.cut(begin, min(begin + pages_max, num_pages))


class Streamer:
    """The buffers and the stream of one thread on one device. Every call is for that thread's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it without types
        self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # as above
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device)] * 2
        self._rows: list[LayerPages] = []
        self._released: list[torch.cuda.Event | None] = [None, None]
        self._copied: torch.cuda.Event | None = None
        self._turn = 0
        self._query: torch.Tensor | None = None
        self._asked: torch.cuda.Event | None = None

    @classmethod
    def of_thread(cls, query: torch.Tensor) -> "Streamer":
        """This thread's streamer on the query's device, for a call that attends with `query` from now on."""
        streamer = _local.streamers.get(query.device)
        if streamer is None:
            streamer = _local.streamers[query.device] = cls(query.device)
        streamer._query = query
        streamer._asked = torch.cuda.current_stream(query.device).record_event()
        return streamer

    def capacity(self, pages: torch.Tensor) -> int:
        """Pages of that shape that one buffer holds."""
        return max(1, BUFFER_BYTES // _page_bytes(pages))

    def fetch(self, part: PagedPart) -> PagedPart:
        """Copy the part, of at most `capacity` pages in host memory: the same on the device, for work on the current
        stream until `release`."""
        pages = selectable(part.pages)
        self._prepare(pages)
        ids = part.block_table.cpu()
        buffer = self._buffers[self._turn]
        local = buffer[: len(ids) * _page_bytes(pages)].view(pages.dtype).view(len(ids), *pages.shape[1:])
        table = torch.arange(len(ids), dtype=torch.int32, device=self._device)
        made = torch.cuda.current_stream(self._device).record_event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(made)
            released = self._released[self._turn]
            if released is not None:
                self._stream.wait_event(released)
            if not pages.is_pinned() or not pages[0].is_contiguous():
                # Through ordinary memory, for which the host waits.
                local.copy_(pages.index_select(0, ids))
            elif _page_bytes(pages) <= KERNEL_BYTES_MAX:
                on_device = ids.pin_memory().to(self._device, non_blocking=True)
                scatter_pages(pages, on_device, self._rows[self._turn], table)
            else:
                for i, slot in enumerate(ids.tolist()):
                    local[i].copy_(pages[slot], non_blocking=True)
            self._copied = self._stream.record_event()
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        scales = part.page_scales
        if scales is not None:
            # Few and small: the host may wait for them.
            scales = scales[ids.long()].to(self._device)
        return replace(part, pages=local.view(part.pages.dtype), block_table=table, page_scales=scales)

    def release(self) -> None:
        """What was queued on the current stream by now was the last to use the pages of the last `fetch`."""
        self._released[self._turn] = torch.cuda.current_stream(self._device).record_event()
        self._turn = 1 - self._turn

    def wait(self) -> None:
        """Wait until nothing is copied any more: what was copied from may be overwritten."""
        if self._copied is not None:
            self._copied.synchronize()

    def query_on_cpu(self) -> torch.Tensor:
        """The query, once it is computed: what was queued since this call of `attend` began is not waited for."""
        assert self._query is not None
        assert self._asked is not None
        with torch.cuda.stream(self._aside):
            self._aside.wait_event(self._asked)
            return self._query.to("cpu")

    def _prepare(self, pages: torch.Tensor) -> None:
        """Buffers for pages of that shape."""
        page_bytes = _page_bytes(pages)
        if self._rows and self._rows[0].layer_bytes == page_bytes:
            return
        num_bytes = self.capacity(pages) * page_bytes
        # Their old memory may still be in use on the other stream.
        self._stream.synchronize()
        torch.cuda.current_stream(self._device).synchronize()
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._rows = [LayerPages.of([buffer.view(-1, page_bytes)]) for buffer in self._buffers]
        self._released = [None, None]


class _Local(threading.local):
    def __init__(self) -> None:
        self.streamers: dict[torch.device, Streamer] = {}


_local = _Local()


def _page_bytes(pages: torch.Tensor) -> int:
    return pages.shape[1:].numel() * pages.element_size()
