"""How fast a machine's two ways to attend to pages in host memory are: measured once a device, and then used by all."""

import threading
from time import perf_counter
from typing import Final

import torch

from hicache.kernels.attend_cpu import attend_cpu
from hicache.kernels.checks import PageShape
from hicache.kernels.parts import Asked, PagedPart
from hicache.kernels.remote import RemoteSpeeds

_HOST_BYTES: Final = 64 << 20
"""Keys and values that the CPU attends to for a measurement: more than its caches hold."""
_LINK_BYTES: Final = 16 << 20
_ROUNDS: Final = 5
_HEADS, _HEAD_DIM, _PAGE_SIZE = 8, 128, 16

_lock: Final = threading.Lock()
_known: Final[dict[torch.device, RemoteSpeeds]] = {}


def known_speeds(device: torch.device) -> RemoteSpeeds | None:
    """What `measure_speeds` or `set_speeds` said last of the device; None if nothing: then all pages are streamed."""
    return _known.get(device)


def set_speeds(device: torch.device, speeds: RemoteSpeeds | None) -> None:
    """Let `attend` use these on the device from now on, or none."""
    with _lock:
        if speeds is None:
            _known.pop(device, None)
        else:
            _known[device] = speeds


def measure_speeds(device: torch.device, dtype: torch.dtype) -> RemoteSpeeds:
    """Measure a CUDA device, and the CPU with pages of `dtype`, for a fraction of a second, and remember it.

    Both at once, as they will work. Waits for the device, on a stream of its own. Uses the CPU as `attend` will: call
    `decode_cpu.prepare` before.
    """
    source = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)
    small, there = torch.zeros(4096, pin_memory=True), torch.zeros(4096, device=device)
    host_pass = _HostPass(dtype)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it without types
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        stream.synchronize()
        trips = []
        for _ in range(_ROUNDS):
            began = perf_counter()
            small.copy_(there, non_blocking=True)
            stream.synchronize()
            there.copy_(small, non_blocking=True)
            stream.synchronize()
            trips.append(perf_counter() - began)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # as above
        first.record(stream)
        for _ in range(4 * _ROUNDS):
            target.copy_(source, non_blocking=True)
        last.record(stream)
        host_s = min(host_pass.seconds() for _ in range(_ROUNDS))
        stream.synchronize()
        link_s = first.elapsed_time(last) / 1e3
    speeds = RemoteSpeeds(4 * _ROUNDS * _LINK_BYTES / link_s, _HOST_BYTES / host_s, min(trips))
    set_speeds(device, speeds)
    return speeds


class _HostPass:
    """Attention of one token over so many pages of `dtype` in host memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        num_pages = _HOST_BYTES // (2 * _PAGE_SIZE * _HEADS * _HEAD_DIM * dtype.itemsize)
        pages = torch.ones(num_pages, 2, _PAGE_SIZE, _HEADS, _HEAD_DIM, dtype=dtype)
        table = torch.randperm(num_pages, dtype=torch.int32)
        self._part: Final = PagedPart(pages, table, num_pages * _PAGE_SIZE)
        self._shape: Final = PageShape(num_pages, _PAGE_SIZE, _HEADS, _HEAD_DIM)
        self._query: Final = torch.ones(1, 4 * _HEADS, _HEAD_DIM)
        self._none: Final = torch.empty(0, _HEADS, _HEAD_DIM)

    def seconds(self) -> float:
        """How long it takes."""
        began = perf_counter()
        with torch.no_grad():
            attend_cpu(self._query, [(self._part, self._shape)], self._none, self._none, Asked(_HEAD_DIM**-0.5))
        return perf_counter() - began
