"""What a step of a sequence attends to: the pages before its new tokens, wherever they are.

`ContextParts` is the `PartSource` of `hicache.kernels.attend` over a `StepPlan`. Pages on the device and in host memory
are read in place. Pages on NVMe are streamed layer by layer through two staging buffers: while one is attended to, the
other is being filled with what comes next, so that reading hides behind computing.
"""

import logging
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hicache.arriving import Arrival
from hicache.errors import BadRequest, CorruptPage, DeadlineExceeded, TierUnavailable
from hicache.kernels.attend import PagedPart
from hicache.layout import KVLayout
from hicache.sequence import PageRef, Run, StepPlan
from hicache.tier import DEVICE, HOST, NVME, LayerRead, Outcome, Slots, SupportsLayerRead, Ticket
from hicache.tiers.device import DeviceTier
from hicache.tiers.host import HostTier

STAGING_BYTES: Final = 16 << 20
"""Size of each of the two buffers through which pages stream from NVMe."""
READ_TIMEOUT_S: Final = 5.0
"""How long a step waits for one batch of layer reads, some megabytes, before the device counts as failing. No longer
than a sidecar is given: what does not come can be computed."""
_CUDA_HOST_REGISTER_PORTABLE: Final = 0x01  # pinned for every GPU, not only for the current one

_log = logging.getLogger(__name__)

Pages = npt.NDArray[np.int64]
"""Which pages of a context, counted from its first, stand in the slots of a table."""
_PlacedRun = tuple[Run, Pages]


class Staging:
    """Two page-aligned buffers of `[pages, 2, page_size, num_kv_heads, head_dim]`, each of one layer of some pages.

    In huge pages where the kernel gives them: direct I/O into scattered small ones is a good third slower. With
    `pinned` they are registered with CUDA too, so that a GPU copies from them by itself; without cupy or a GPU they
    are not, and copies go through the driver's own buffers.
    """

    def __init__(self, layout: KVLayout, dtype: torch.dtype, *, pinned: bool = False) -> None:
        group = layout.groups[0]
        self.layer_bytes: Final = layout.layer_bytes(0)
        self.num_pages: Final = max(1, STAGING_BYTES // self.layer_bytes)
        """Pages that fit into one buffer."""
        shape = (self.num_pages, 2, layout.page_size, group.num_kv_heads, group.head_dim)
        self._maps: Final = [mmap.mmap(-1, self.num_pages * self.layer_bytes) for _ in range(2)]
        for buffer in self._maps:
            with suppress(OSError):  # a kernel without huge pages
                buffer.madvise(mmap.MADV_HUGEPAGE)
            if pinned:
                _register(self, buffer)
        self.buffers: Final = [memoryview(buffer) for buffer in self._maps]
        self.tensors: Final = [torch.frombuffer(buffer, dtype=dtype).view(shape) for buffer in self._maps]

    def view(self, buffer: int, index: int) -> memoryview:
        """Where the `index`-th page of a batch goes."""
        return self.buffers[buffer][index * self.layer_bytes : (index + 1) * self.layer_bytes]


def _register(owner: Staging, buffer: mmap.mmap) -> None:
    """Register the buffer with CUDA until `owner` is gone."""
    try:
        from cupy.cuda import runtime

        address = np.frombuffer(buffer, np.uint8).ctypes.data
        runtime.hostRegister(address, len(buffer), _CUDA_HOST_REGISTER_PORTABLE)
    except (ImportError, RuntimeError) as error:
        _log.warning("the staging buffers of a sequence are not registered with CUDA: %s", error)
        return
    weakref.finalize(owner, runtime.hostUnregister, address).atexit = False


@dataclass(slots=True)
class _Batch:
    """Layer reads under way: the pages `[first, first + count)` of the streamed ones, into one buffer."""

    layer: int
    first: int
    count: int
    buffer: int
    ticket: Ticket


class ContextParts:
    """The context of one step, as parts to attend to. Used by one thread, layer after layer.

    Args:
        plan: the pinned step.
        device, host, nvme: the tiers that the plan's runs name.
        staging: buffers for what streams; this step's alone until `close`.
        has_come: waits until a layer of pages on their way to the device is there; False when it does not come.
    """

    def __init__(
        self,
        plan: StepPlan,
        layout: KVLayout,
        *,
        device: DeviceTier,
        host: HostTier,
        nvme: SupportsLayerRead | None,
        staging: Staging | None,
        has_come: Callable[[Arrival, int], bool],
    ) -> None:
        self._layout: Final = layout
        self._device: Final = device
        self._host: Final = host
        self._nvme: Final = nvme
        self._staging: Final = staging
        runs = _placed(plan)
        self._device_table, self._device_pages, self._device_tokens = self._on_device(plan, runs)
        self._has_come: Final = has_come
        self._arriving: Final = [(run.arriving, run.slots, pages) for run, pages in runs if run.arriving is not None]
        self._come = [True] * len(self._arriving)
        """Which of them are read on the device: what did not come in one layer is not waited for in the next."""
        self._arriving_tables = self._tables_of_arriving()
        in_host = [(run.slots, pages) for run, pages in runs if run.tier_id == HOST and run.arriving is None]
        self._host_table, self._host_pages = _table(slots for slots, _ in in_host), _joined(in_host)
        streamed = [(run, pages) for run, pages in runs if run.tier_id == NVME]
        self._streamed: Final[list[PageRef]] = [ref for run, _ in streamed for ref in run.refs]
        self._streamed_pages: Final = _joined([(run.slots, pages) for run, pages in streamed])
        if self._streamed and (nvme is None or staging is None):
            raise BadRequest("nvme", "the step has pages on NVMe, but no such tier was given")
        self._batch: _Batch | None = None
        self._is_hung = False
        """Whether reads into the staging buffers did not end in time, and may end at any time from now on."""

    def _on_device(self, plan: StepPlan, runs: list[_PlacedRun]) -> tuple[Tensor, Pages, int]:
        there = [(run.slots, pages) for run, pages in runs if run.tier_id == DEVICE]
        num_tokens = sum(len(slots) for slots, _ in there) * self._layout.page_size
        if plan.tail is not None and plan.num_tail_tokens:
            # The tail is the last page, so it alone may be filled in part.
            tail = runs[-1][1][-1:] + 1 if runs else np.zeros(1, np.int64)
            there.append((np.array([plan.tail.slot], np.int32), tail))
            num_tokens += plan.num_tail_tokens
        table = _table(slots for slots, _ in there)
        return table.to(self._device.layer(0).device), _joined(there), num_tokens

    def parts(self, layer: int, *, placed: bool = False) -> Iterator[PagedPart]:
        """Everything before the new tokens, for one layer. A part is valid until the next one is asked for.

        `placed`: each part has consecutive tokens and says where in the sequence they are, as a window asks; without,
        parts are as few as can be.

        Waits for NVMe reads, for each batch `READ_TIMEOUT_S` at most. Raises `CorruptPage` when a page is not there
        whole, `TierUnavailable` when the device fails to read it or does not answer.
        """
        page_size = self._layout.page_size
        for part, pages in self._parts(layer):
            if not placed:
                yield part
                continue
            borders = [0, *(np.flatnonzero(np.diff(pages) != 1) + 1).tolist(), len(pages)]
            for begin, end in pairwise(borders):
                yield replace(part.cut(begin, end), first_position=int(pages[begin]) * page_size)

    def _parts(self, layer: int) -> Iterator[tuple[PagedPart, Pages]]:
        """The parts, each with which of the context's pages it has."""
        if self._streamed:
            self._begin(layer, 0)
        is_all = not self._arriving and not self._streamed
        if self._device_tokens:
            stays, pages = is_all or len(self._host_table) > 0, self._device.layer(layer)
            yield PagedPart(pages, self._device_table, self._device_tokens, stays=stays), self._device_pages
        if len(self._host_table):
            num_tokens = len(self._host_table) * self._layout.page_size
            pages = self._host.layer_view(self._layout, layer)
            yield PagedPart(pages, self._host_table, num_tokens, stays=is_all), self._host_pages
        yield from self._arriving_parts(layer)
        first = 0
        while first < len(self._streamed):
            batch = self._begin(layer, first)
            self._finish(batch)
            first += batch.count
            if first < len(self._streamed):
                self._begin(layer, first)
            elif layer + 1 < self._layout.num_layers:
                self._begin(layer + 1, 0)
            assert self._staging is not None
            table = torch.arange(batch.count, dtype=torch.int32)
            part = PagedPart(self._staging.tensors[batch.buffer], table, batch.count * self._layout.page_size)
            yield part, self._streamed_pages[batch.first : batch.first + batch.count]

    def _arriving_parts(self, layer: int) -> Iterator[tuple[PagedPart, Pages]]:
        """What is on its way to the device, once this layer has come: there, or in the host where it does not come."""
        come = list(self._come)
        for index, (arriving, _, _) in enumerate(self._arriving):
            if come[index]:
                has = arriving.arrival.has(layer)
                come[index] = self._has_come(arriving.arrival, layer) if has is None else has
        if come != self._come:
            self._come = come
            self._arriving_tables = self._tables_of_arriving()
        (on_device, device_pages), (in_host, host_pages) = self._arriving_tables
        page_size = self._layout.page_size
        if len(on_device):
            yield PagedPart(self._device.layer(layer), on_device, len(on_device) * page_size), device_pages
        if len(in_host):
            view = self._host.layer_view(self._layout, layer)
            yield PagedPart(view, in_host, len(in_host) * page_size), host_pages

    def _tables_of_arriving(self) -> tuple[tuple[Tensor, Pages], tuple[Tensor, Pages]]:
        """Pages that are on their way: which slots are read on the device, and which in the host."""
        runs = list(zip(self._arriving, self._come, strict=True))
        come = [(arriving.slots, pages) for (arriving, _, pages), has_come in runs if has_come]
        left = [(host_slots, pages) for (_, host_slots, pages), has_come in runs if not has_come]
        on_device = _table(slots for slots, _ in come).to(self._device.layer(0).device)
        return (on_device, _joined(come)), (_table(slots for slots, _ in left), _joined(left))

    def close(self) -> bool:
        """Wait until no read writes into the staging buffers any more. Whether that is so: it is not when the device
        does not answer, which is not waited for twice."""
        batch, self._batch = self._batch, None
        if batch is not None and not self._is_hung:
            with suppress(TierUnavailable):
                self._outcomes_of(batch)
        return not self._is_hung

    def _begin(self, layer: int, first: int) -> _Batch:
        """The batch that starts there, already under way or begun now."""
        current = self._batch
        if current is not None and (current.layer, current.first) == (layer, first):
            return current
        assert self._nvme is not None
        assert self._staging is not None
        if current is not None and not isinstance(current.ticket, _Done):
            # Layers were asked for out of order: what was read ahead is not wanted.
            self._outcomes_of(current)
        buffer = 1 - current.buffer if current is not None else 0
        refs = self._streamed[first : first + self._staging.num_pages]
        reads = [
            LayerRead(ref.slot, ref.generation, ref.identity, layer, self._staging.view(buffer, index))
            for index, ref in enumerate(refs)
        ]
        self._batch = _Batch(layer, first, len(refs), buffer, self._nvme.start_layer_reads(reads))
        return self._batch

    def _finish(self, batch: _Batch) -> None:
        outcomes = self._outcomes_of(batch)
        batch.ticket = _Done(outcomes)
        for ref, outcome in zip(self._streamed[batch.first :], outcomes, strict=False):
            if outcome is Outcome.ERROR:
                # The page may well be there: no reason to forget it.
                raise TierUnavailable(NVME, f"layer {batch.layer} of slot {ref.slot} could not be read")
            if outcome is not Outcome.OK:
                raise CorruptPage(NVME, ref.slot, f"layer {batch.layer} could not be read back: {outcome.value}")

    def _outcomes_of(self, batch: _Batch) -> list[Outcome]:
        """Wait for reads under way."""
        try:
            return batch.ticket.wait(READ_TIMEOUT_S)
        except DeadlineExceeded as late:
            self._is_hung = True
            raise TierUnavailable(NVME, f"layer {batch.layer} has not come for {READ_TIMEOUT_S:g} s") from late


@dataclass(frozen=True, slots=True)
class _Done:
    """The ticket of reads that have ended."""

    outcomes: list[Outcome]

    def wait(self, timeout_s: float) -> list[Outcome]:
        return self.outcomes


def _placed(plan: StepPlan) -> list[_PlacedRun]:
    """The runs of a plan, which follow each other, with which of the context's pages each has."""
    ends = np.cumsum([len(run.slots) for run in plan.runs], dtype=np.int64).tolist()
    return [(run, np.arange(end - len(run.slots), end)) for run, end in zip(plan.runs, ends, strict=True)]


def _table(slots: Iterable[Slots]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, np.int32), *slots]))


def _joined(runs: list[tuple[Slots, Pages]]) -> Pages:
    return np.concatenate([np.empty(0, np.int64), *(pages for _, pages in runs)])
