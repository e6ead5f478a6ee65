"""What a part of the check is: a function that is given where to work, and reports rows."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import torch

from hicache.layout import KVDtype, KVLayout
from hicache.tools.bench.results import Row

T = TypeVar("T")


class LeftOut(Exception):
    """Raised by a part that cannot run here; the message says what it needs."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part works."""

    device: torch.device
    """A CUDA device, or the CPU where there is none."""
    directory: Path
    """Empty, for the part's own files; removed afterwards."""

    @property
    def has_gpu(self) -> bool:
        """Whether this is the real thing. Without, parts try what they can with small sizes."""
        return self.device.type == "cuda"

    def size(self, real: T, small: T) -> T:
        """`real` on a GPU, `small` without."""
        return real if self.has_gpu else small

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.has_gpu:
            torch.cuda.synchronize(self.device)

    def require_gpu(self) -> None:
        """Raises `LeftOut` on a machine without one."""
        if not self.has_gpu:
            raise LeftOut("needs a GPU")


Report = Callable[[Row], None]
Check = Callable[[Place, Report], None]
"""Measures or compares, and reports each row as soon as it has it. What it raises fails the part, not the others."""


def measured(check: Check) -> Check:
    """A check whose figures mean something on a GPU only. Without one it is rehearsed: it runs through with small
    sizes, so that what would stop it on the GPU stops it here; its rows are dropped, and it says that it needs one."""

    @wraps(check)
    def run(place: Place, report: Report) -> None:
        if place.has_gpu:
            check(place, report)
            return
        check(place, lambda row: None)
        raise LeftOut("needs a GPU; rehearsed with small sizes")

    return run


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the check, which runs in a process of its own."""

    name: str
    where: str
    """`module:function`, a `Check`."""
    summary: str
    estimate_s: int
    """How long it takes on one H200, the start of the process included: an estimate until it has been measured."""
    limit_s: float
    """After this its process is ended."""
    interprets: bool = False
    """Whether it launches kernels, and therefore interprets them where there is no GPU."""
    measures: bool = False
    """Whether its rows are figures that may miss their goals, not comparisons."""


def layout_for(place: Place) -> KVLayout:
    """Pages of a model of 8 billion parameters, of fewer layers; without a GPU smaller ones."""
    if place.has_gpu:
        return KVLayout.uniform(num_layers=8, num_kv_heads=8, head_dim=128, dtype=KVDtype.BFLOAT16, page_size=16)
    return KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=64, dtype=KVDtype.FLOAT32, page_size=16)


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, relative to that of `expected`; infinite if a value is no number."""
    difference = actual.double().cpu() - expected.double().cpu()
    if not difference.isfinite().all():
        return float("inf")
    return float(difference.square().mean().sqrt() / expected.double().square().mean().sqrt().clamp_min(1e-300))


def report_difference(
    report: Report, name: str, actual: torch.Tensor, expected: torch.Tensor, allowed: float
) -> None:
    """Report by how much two tensors differ, in a part that measures too. Raises `AssertionError` above `allowed`."""
    error = relative_rms(actual, expected)
    report(Row(name, error, "", goal=allowed))
    if error > allowed:
        raise AssertionError(f"{name} is {error:.3g}, expected at most {allowed:.3g}")


def elapsed_ms(device: torch.device, work: Callable[[], object], rounds: int = 10) -> float:
    """Median time of `work` on `device`, after two rounds that do not count: the kernels compile in the first. On the
    CPU, where it is no figure, one round."""
    if device.type == "cpu":
        return 1e3 * host_s(work, 1)
    for _ in range(2):
        work()
    times = []
    for _ in range(rounds):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it without types
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as above
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return sorted(times)[len(times) // 2]


def host_s(work: Callable[[], object], rounds: int = 5) -> float:
    """Median time of work that returns when it has ended, after one round that does not count."""
    work()
    times = []
    for _ in range(rounds):
        began = perf_counter()
        work()
        times.append(perf_counter() - began)
    return sorted(times)[rounds // 2]
