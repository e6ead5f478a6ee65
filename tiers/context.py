"""What a step of a sequence attends to: the pages before its new tokens, wherever they are.

`ContextParts` is the `PartSource` of `hicache.kernels.attend` over a `StepPlan`. Pages on the device and in host memory
are read in place. Pages on NVMe are streamed layer by layer through two staging buffers: while one is attended to, the
other is being filled with what comes next, so that reading hides behind computing.
"""

import logging
import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from hicache.arriving import Arrival
from hicache.errors import BadRequest, CorruptPage, TierUnavailable
from hicache.kernels.attend import PagedPart
from hicache.layout import KVLayout
from hicache.sequence import PageRef, StepPlan
from hicache.tier import DEVICE, HOST, NVME, LayerRead, Outcome, SupportsLayerRead, Ticket
from hicache.tiers.device import DeviceTier
from hicache.tiers.host import HostTier

STAGING_BYTES: Final = 16 << 20
"""Size of each of the two buffers through which pages stream from NVMe."""
READ_TIMEOUT_S: Final = 30.0
"""How long a step waits for one batch of layer reads before it gives up."""
_CUDA_HOST_REGISTER_PORTABLE: Final = 0x01  # pinned for every GPU, not only for the current one

_log = logging.getLogger(__name__)


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
        self._device_table, self._device_tokens = self._device_pages(plan)
        self._has_come: Final = has_come
        self._arriving: Final = [(run.arriving, run.slots) for run in plan.runs if run.arriving is not None]
        self._come = [True] * len(self._arriving)
        """Which of them are read on the device: what did not come in one layer is not waited for in the next."""
        self._arriving_tables = self._tables_of_arriving()
        self._host_table = _table([run.slots for run in plan.runs if run.tier_id == HOST and run.arriving is None])
        self._streamed: Final[list[PageRef]] = [ref for run in plan.runs if run.tier_id == NVME for ref in run.refs]
        if self._streamed and (nvme is None or staging is None):
            raise BadRequest("nvme", "the step has pages on NVMe, but no such tier was given")
        self._batch: _Batch | None = None

    def _device_pages(self, plan: StepPlan) -> tuple[Tensor, int]:
        slots = [run.slots for run in plan.runs if run.tier_id == DEVICE]
        num_tokens = sum(len(run) for run in slots) * self._layout.page_size
        if plan.tail is not None and plan.num_tail_tokens:
            # The tail is the last page, so it alone may be filled in part.
            slots.append(np.array([plan.tail.slot], np.int32))
            num_tokens += plan.num_tail_tokens
        return _table(slots).to(self._device.layer(0).device), num_tokens

    def parts(self, layer: int) -> Iterator[PagedPart]:
        """Everything before the new tokens, for one layer. A part is valid until the next one is asked for.

        Waits for NVMe reads. Raises `CorruptPage` when a page is not there whole, `TierUnavailable` when the device
        fails to read it, `DeadlineExceeded` when it does not answer.
        """
        if self._streamed:
            self._begin(layer, 0)
        if self._device_tokens:
            yield PagedPart(self._device.layer(layer), self._device_table, self._device_tokens)
        if len(self._host_table):
            num_tokens = len(self._host_table) * self._layout.page_size
            yield PagedPart(self._host.layer_view(self._layout, layer), self._host_table, num_tokens)
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
            yield PagedPart(self._staging.tensors[batch.buffer], table, batch.count * self._layout.page_size)

    def _arriving_parts(self, layer: int) -> Iterator[PagedPart]:
        """What is on its way to the device, once this layer has come: there, or in the host where it does not come."""
        come = list(self._come)
        for index, (arriving, _) in enumerate(self._arriving):
            if come[index]:
                has = arriving.arrival.has(layer)
                come[index] = self._has_come(arriving.arrival, layer) if has is None else has
        if come != self._come:
            self._come = come
            self._arriving_tables = self._tables_of_arriving()
        on_device, in_host = self._arriving_tables
        page_size = self._layout.page_size
        if len(on_device):
            yield PagedPart(self._device.layer(layer), on_device, len(on_device) * page_size)
        if len(in_host):
            yield PagedPart(self._host.layer_view(self._layout, layer), in_host, len(in_host) * page_size)

    def _tables_of_arriving(self) -> tuple[Tensor, Tensor]:
        """Pages that are on their way: which slots are read on the device, and which in the host."""
        runs = list(zip(self._arriving, self._come, strict=True))
        on_device = _table([arriving.slots for (arriving, _), has_come in runs if has_come])
        in_host = _table([host_slots for (_, host_slots), has_come in runs if not has_come])
        return on_device.to(self._device.layer(0).device), in_host

    def close(self) -> None:
        """Wait until no read writes into the staging buffers any more."""
        if self._batch is not None:
            batch, self._batch = self._batch, None
            batch.ticket.wait(READ_TIMEOUT_S)

    def _begin(self, layer: int, first: int) -> _Batch:
        """The batch that starts there, already under way or begun now."""
        current = self._batch
        if current is not None and (current.layer, current.first) == (layer, first):
            return current
        assert self._nvme is not None
        assert self._staging is not None
        if current is not None and not isinstance(current.ticket, _Done):
            # Layers were asked for out of order: what was read ahead is not wanted.
            current.ticket.wait(READ_TIMEOUT_S)
        buffer = 1 - current.buffer if current is not None else 0
        refs = self._streamed[first : first + self._staging.num_pages]
        reads = [
            LayerRead(ref.slot, ref.generation, ref.identity, layer, self._staging.view(buffer, index))
            for index, ref in enumerate(refs)
        ]
        self._batch = _Batch(layer, first, len(refs), buffer, self._nvme.start_layer_reads(reads))
        return self._batch

    def _finish(self, batch: _Batch) -> None:
        outcomes = batch.ticket.wait(READ_TIMEOUT_S)
        batch.ticket = _Done(outcomes)
        for ref, outcome in zip(self._streamed[batch.first :], outcomes, strict=False):
            if outcome is Outcome.ERROR:
                # The page may well be there: no reason to forget it.
                raise TierUnavailable(NVME, f"layer {batch.layer} of slot {ref.slot} could not be read")
            if outcome is not Outcome.OK:
                raise CorruptPage(NVME, ref.slot, f"layer {batch.layer} could not be read back: {outcome.value}")


@dataclass(frozen=True, slots=True)
class _Done:
    """The ticket of reads that have ended."""

    outcomes: list[Outcome]

    def wait(self, timeout_s: float) -> list[Outcome]:
        return self.outcomes


def _table(slots: list[np.ndarray[tuple[int], np.dtype[np.int32]]]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, np.int32), *slots]))
