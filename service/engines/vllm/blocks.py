"""The engine's KV memory as pages: a page is one block of every layer of every group, group by group, layer by layer.

Blocks are opaque: bytes are copied, never looked at. On the CPU a block's layers are copied by torch in one call where
they lie at equal distances, as vLLM lays them out, so that the interpreter's lock is not held meanwhile. On CUDA the
gather and scatter kernels collect blocks into device memory on a stream of their own, and pinned memory takes them
from there.
"""

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from hicache.errors import BadRequest
from hicache.service.engines.vllm.identity import Groups
from hicache.service.engines.vllm.plan import NULL_BLOCK, BlockIds

STAGE_BYTES: Final = 32 << 20
"""Device and pinned memory that pages pass through on CUDA, a direction."""


class Blocks:
    """The KV memory of one worker. Used by one thread for each direction."""

    def __init__(self, groups: Groups, caches: Mapping[str, Tensor], num_blocks: int) -> None:
        """`caches`: each layer's tensor, as vLLM registers them. Raises `BadRequest` for one whose blocks are not
        ranges of bytes."""
        self._rows: Final = [
            [_rows(name, caches[name], num_blocks, groups.layer_bytes) for name in names]
            for names in groups.layer_names
        ]
        self._stacks: Final = [_stack(rows) for rows in self._rows]
        self._layer_bytes: Final = groups.layer_bytes
        self.page_bytes: Final = groups.layer_bytes * groups.num_layers
        self.num_blocks: Final = num_blocks
        self.device: Final = self._rows[0][0].device
        self._cuda: Final = _CudaCopies(self._rows, self.page_bytes) if self.device.type == "cuda" else None

    def save(self, blocks: BlockIds, first: int, pages: Sequence[memoryview]) -> None:
        """Copy the blocks of the pages from index `first` of `blocks` on into `pages`, writable views. Waits until it
        is done."""
        if self._cuda is not None:
            self._cuda.save(blocks, first, pages)
            return
        for index, page in enumerate(pages, start=first):
            whole = torch.frombuffer(page, dtype=torch.uint8)
            for target, stack, rows, block in self._parts(whole, blocks, index):
                if stack is not None:
                    target.copy_(stack[:, block])
                else:
                    for layer, row in enumerate(rows):
                        target[layer].copy_(row[block])

    def load(self, blocks: BlockIds, first: int, pages: Sequence[memoryview]) -> None:
        """Copy `pages` into the blocks from index `first` of `blocks` on; null blocks are passed over. Waits until it
        is done."""
        if self._cuda is not None:
            self._cuda.load(blocks, first, pages)
            return
        for index, page in enumerate(pages, start=first):
            for source, stack, rows, block in self._parts(_readable(page), blocks, index):
                if block == NULL_BLOCK:
                    continue
                if stack is not None:
                    stack[:, block].copy_(source)
                else:
                    for layer, row in enumerate(rows):
                        row[block].copy_(source[layer])

    def fence(self) -> "torch.cuda.Event | None":
        """A point on the current stream that copies begin after; None where memory needs none."""
        if self._cuda is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        event.record()
        return event

    def wait_for(self, fence: "torch.cuda.Event | None") -> None:
        """The next copies of this thread begin after `fence`."""
        if self._cuda is not None and fence is not None:
            self._cuda.wait_for(fence)

    def _parts(
        self, page: Tensor, blocks: BlockIds, index: int
    ) -> list[tuple[Tensor, Tensor | None, list[Tensor], int]]:
        """A page's part of each group, [layers, bytes], with where the group's layers are and which block it is."""
        parts, start = [], 0
        for stack, rows, ids in zip(self._stacks, self._rows, blocks, strict=True):
            size = len(rows) * self._layer_bytes
            parts.append((page[start : start + size].view(len(rows), -1), stack, rows, ids[index]))
            start += size
        return parts


class _CudaCopies:
    """Copies between blocks in CUDA memory and pages of shared memory."""

    def __init__(self, rows: Sequence[Sequence[Tensor]], page_bytes: int) -> None:
        from hicache.kernels.gather import LayerPages

        self._groups: Final = [LayerPages.of(each) for each in rows]
        self._page_bytes: Final = page_bytes
        self._device: Final = rows[0][0].device
        self._most: Final = max(1, STAGE_BYTES // page_bytes)
        self._streams: Final = {
            name: torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's
            for name in ("save", "load")
        }
        self._stages: Final = {
            name: (
                torch.empty(self._most, page_bytes, dtype=torch.uint8, device=self._device),
                torch.empty(self._most, page_bytes, dtype=torch.uint8, pin_memory=True),
            )
            for name in self._streams
        }

    def wait_for(self, fence: "torch.cuda.Event") -> None:
        for stream in self._streams.values():
            stream.wait_event(fence)

    def save(self, blocks: BlockIds, first: int, pages: Sequence[memoryview]) -> None:
        from hicache.kernels.gather import gather_pages

        device, pinned = self._stages["save"]
        stream = self._streams["save"]
        for start in range(0, len(pages), self._most):
            some = pages[start : start + self._most]
            with torch.cuda.stream(stream):
                at = 0
                for group, ids in zip(self._groups, blocks, strict=True):
                    chosen = ids[first + start : first + start + len(some)]
                    size = group.layer_bytes * len(group.layers)
                    gather_pages(
                        group, self._ids(chosen), device[:, at : at + size], self._ids(range(len(some)))
                    )
                    at += size
                pinned[: len(some)].copy_(device[: len(some)], non_blocking=True)
            stream.synchronize()
            for row, page in enumerate(some):
                torch.frombuffer(page, dtype=torch.uint8).copy_(pinned[row])

    def load(self, blocks: BlockIds, first: int, pages: Sequence[memoryview]) -> None:
        from hicache.kernels.gather import scatter_pages

        device, pinned = self._stages["load"]
        stream = self._streams["load"]
        for start in range(0, len(pages), self._most):
            some = pages[start : start + self._most]
            for row, page in enumerate(some):
                pinned[row].copy_(_readable(page))
            with torch.cuda.stream(stream):
                device[: len(some)].copy_(pinned[: len(some)], non_blocking=True)
                at = 0
                for group, ids in zip(self._groups, blocks, strict=True):
                    chosen = ids[first + start : first + start + len(some)]
                    kept = [row for row, block in enumerate(chosen) if block != NULL_BLOCK]
                    size = group.layer_bytes * len(group.layers)
                    if kept:
                        scatter_pages(
                            device[:, at : at + size],
                            self._ids(kept),
                            group,
                            self._ids([chosen[row] for row in kept]),
                        )
                    at += size
            stream.synchronize()

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.int64, device=self._device)


def _readable(page: memoryview) -> Tensor:
    """A page that is only read, as a tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(page, dtype=torch.uint8)


def _rows(name: str, cache: Tensor, num_blocks: int, layer_bytes: int) -> Tensor:
    """A layer's blocks as uint8 `[num_blocks, layer_bytes]`, a view. Raises `BadRequest`."""
    if cache.shape[0] % num_blocks or not cache.numel():
        problem = f"{name}: the first of its axes {tuple(cache.shape)} is not its {num_blocks} blocks"
        raise BadRequest("kv_caches", problem)
    # The attention backend's own blocks may be smaller: then several, one after the other, are one of the engine's.
    smaller = cache.shape[0] // num_blocks
    inner = cache[0].numel() * cache.element_size()
    stride = cache.stride(0) * cache.element_size()
    if not _is_dense(cache[0]) or inner * smaller != layer_bytes or (smaller > 1 and stride != inner):
        raise BadRequest("kv_caches", f"{name}: its blocks are not {layer_bytes} bytes each, one after the other")
    start = cache.storage_offset() * cache.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    return whole.as_strided((num_blocks, layer_bytes), (stride * smaller, 1), start)


def _is_dense(block: Tensor) -> bool:
    """Whether a block is one range of bytes, in whatever order its axes lie: heads within tokens, say, as on CUDA."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(block.stride(), block.shape) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _stack(rows: Sequence[Tensor]) -> Tensor | None:
    """All layers as uint8 `[layers, num_blocks, layer_bytes]`, a view, where they lie at equal distances in one
    memory."""
    first = rows[0]
    starts = [row.storage_offset() for row in rows]
    steps = {after - before for before, after in pairwise(starts)} or {0}
    alike = {(row.untyped_storage().data_ptr(), row.stride(0)) for row in rows}
    if len(alike) > 1 or len(steps) > 1 or min(steps) < 0:
        return None
    return first.as_strided((len(rows), *first.shape), (steps.pop(), *first.stride()), starts[0])
