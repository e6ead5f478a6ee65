"""How fast the card, its link and the copies over it are, each beside the best the machine gives for that work."""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
import triton
import triton.language as tl

from hicache.kernels.launch import num_multiprocessors
from hicache.tiers.device_copy import CudaQueue, StagingQueue
from hicache.tiers.device_ways import copiers_of
from hicache.tools.bench.results import Baseline, Row
from hicache.tools.gpu_check.parts import Place, Report, elapsed_ms, host_s, measured

GB: Final = 1e9


@measured
def check_memory(place: Place, report: Report) -> None:
    """Reading, copying, and pinned copies both ways: what the other rows are measured by."""
    device = place.device
    report(Row("device_read", read_gb_s(place), "GB/s", higher_is_better=True))
    source = torch.empty(place.size(2 << 30, 1 << 16), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / elapsed_ms(device, lambda: target.copy_(source)) / 1e6
    report(Row("device_copy", copied, "GB/s", higher_is_better=True))
    for name, gb_s in zip(("pinned_in", "pinned_out"), pinned_gb_s(place), strict=True):
        report(Row(name, gb_s, "GB/s", higher_is_better=True))


def read_gb_s(place: Place) -> float:
    """GB/s at which a kernel reads memory that is in no cache and does nothing else."""
    source = torch.empty(place.size(4 << 30, 1 << 20), dtype=torch.uint8, device=place.device).view(torch.int32)
    block, programs = 4096, 16 * num_multiprocessors(place.device)
    out = torch.empty(programs, dtype=torch.int32, device=place.device)
    each = source.numel() // programs // block * block

    def read() -> None:
        _read_kernel[(programs,)](source, out, each, BLOCK=block, num_warps=8)

    return 4 * each * programs / elapsed_ms(place.device, read) / 1e6


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _read_kernel(p_source: tl.tensor, p_out: tl.tensor, each: tl.tensor, BLOCK: tl.constexpr) -> None:
    i_program = tl.program_id(0).to(tl.int64)
    b_all = tl.zeros([BLOCK], tl.int32)
    p_block = p_source + i_program * each + tl.arange(0, BLOCK)
    for i in range(0, each, BLOCK):
        b_all ^= tl.load(p_block + i)
    tl.store(p_out + i_program, tl.xor_sum(b_all, 0))  # so that nothing may be left out


def pinned_gb_s(place: Place) -> tuple[float, float]:
    """GB/s of one large copy from pinned memory to the device, and back."""
    num_bytes = place.size(256 << 20, 1 << 16)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=place.has_gpu)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=place.device)
    into = num_bytes / elapsed_ms(place.device, lambda: there.copy_(host, non_blocking=True)) / 1e6
    out = num_bytes / elapsed_ms(place.device, lambda: host.copy_(there, non_blocking=True)) / 1e6
    return into, out


@measured
def check_fragments(place: Place, report: Report) -> None:
    """Pages of scattered fragments, by each way there is, and the best of them beside the contiguous pinned copy."""
    baselines = pinned_gb_s(place)
    for label, fragment_bytes, num_layers, goal in (
        ("4k", 4 << 10, 64, 0.40), ("32k", 32 << 10, 64, 0.85), ("2m", 2 << 20, 16, 0.85),
    ):  # fmt: skip
        shape = (fragment_bytes, num_layers) if place.has_gpu else (64, 3)
        _fragments(place, report, f"fragments_{label}", shape, goal, baselines)


def _fragments(
    place: Place, report: Report, label: str, shape: tuple[int, int], goal: float, baselines: tuple[float, float]
) -> None:
    fragment_bytes, num_layers = shape
    page_bytes = num_layers * fragment_bytes
    count = max(4, place.size(128 << 20, 1 << 10) // page_bytes)
    pool = torch.zeros(num_layers, 2 * count, fragment_bytes, dtype=torch.uint8, device=place.device)
    ways = copiers_of(pool, *(_queue(place, max(1, (8 << 20) // page_bytes), page_bytes) for _ in range(2)))
    memory = torch.zeros(count, page_bytes, dtype=torch.uint8, pin_memory=place.has_gpu)
    slots = torch.randperm(2 * count)[:count].tolist()
    pages = [(slot, row.numpy().data) for slot, row in zip(slots, memory, strict=True)]
    for direction, baseline in zip(("in", "out"), baselines, strict=True):
        best = 0.0
        for name, way in ways.items():
            copy = partial(way.copy_in if direction == "in" else way.copy_out, pages)
            gb_s = count * page_bytes / host_s(copy) / GB
            best = max(best, gb_s)
            report(Row(f"{label}_{direction}_{name}", gb_s, "GB/s", higher_is_better=True))
        report(Row(
            f"{label}_{direction}", best, "GB/s", Baseline("pinned copy", baseline), goal=goal,
            goal_is_ratio=True, higher_is_better=True,
        ))  # fmt: skip


def _queue(place: Place, num_pages: int, page_bytes: int) -> StagingQueue:
    return CudaQueue(place.device, num_pages, page_bytes) if place.has_gpu else _Immediate(num_pages, page_bytes)


class _Immediate:
    """A queue without a GPU: work is done when it is queued."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self.staging = torch.zeros(num_pages, page_bytes, dtype=torch.uint8)

    def run(self, queue_work: Callable[[], None]) -> None:
        queue_work()
