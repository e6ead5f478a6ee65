"""What a benchmark prints and keeps: rows of figures, each beside its baseline and its bound.

The JSON form is

    {"format": "hicache-bench", "version": 1, "bench", "machine",
     "rows": [{"name", "value", "unit", "baseline": {"name", "value"}, "ratio", "bound", "goal", "ok"}]}

`ratio` is value ÷ baseline: a ratio travels to another machine, a time does not. `bound` is what no code could beat, in
the row's unit; `goal` is the value to reach, and `ok` whether it was. What does not apply is null. A row that was
measured within a budget has `peak` too: {"name", "value", "budget"}.
"""

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import thread_time_ns
from typing import Any, Final

from hicache.tools.terminal import Colour, Style, pad

Report = Callable[["Row"], None]
"""Called with each row as it is measured."""
Note = Callable[[str], None]
"""Called with what is measured next, by benches that take more than a second between rows."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a value is compared with: the best the machine gives for that work, measured in the same run."""

    name: str
    value: float
    """In the row's unit."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The most of something that was in use while a value was measured, beside what it was allowed."""

    name: str
    value: float
    budget: float


@dataclass(frozen=True, slots=True)
class Row:
    """One figure."""

    name: str
    value: float
    unit: str
    baseline: Baseline | None = None
    bound: float | None = None
    """In the row's unit."""
    goal: float | None = None
    """The value to reach in the row's unit, or the ratio where `goal_is_ratio`."""
    goal_is_ratio: bool = False
    higher_is_better: bool = False
    peak: Peak | None = None

    @property
    def ratio(self) -> float | None:
        """Value ÷ baseline."""
        return self.value / self.baseline.value if self.baseline is not None and self.baseline.value else None

    @property
    def ok(self) -> bool | None:
        """Whether the goal was reached, None without one; False beyond the budget of the peak."""
        if self.peak is not None and self.peak.value > self.peak.budget:
            return False
        reached = self.ratio if self.goal_is_ratio else self.value
        if self.goal is None or reached is None:
            return None
        return reached >= self.goal if self.higher_is_better else reached <= self.goal

    def to_json(self) -> dict[str, Any]:
        baseline = None if self.baseline is None else {"name": self.baseline.name, "value": self.baseline.value}
        fields = {
            "name": self.name, "value": self.value, "unit": self.unit, "baseline": baseline, "ratio": self.ratio,
            "bound": self.bound, "goal": self.goal, "ok": self.ok,
        }  # fmt: skip
        return fields if self.peak is None else fields | {"peak": asdict(self.peak)}


def machine() -> dict[str, Any]:
    """The machine in words: what a reader needs to judge a figure, and nothing that names its owner."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


HEADING: Final = f"  {'':<34}{'value':>12}  {'baseline':<36}{'ratio':>8}{'bound':>11}{'goal':>13}"


def line(row: Row, style: Style) -> str:
    """A row as a person reads it."""
    baseline = f"{_figure(row.baseline.value)} {row.baseline.name}" if row.baseline is not None else ""
    ratio = f"{row.ratio:.2f}" if row.ratio is not None else ""
    bound = _figure(row.bound) if row.bound is not None else ""
    goal = "" if row.goal is None else ("ratio " if row.goal_is_ratio else "") + _figure(row.goal)
    mark = {None: "", True: "  ok", False: "  MISSED"}[row.ok]
    colour = {None: None, True: Colour.GOOD, False: Colour.BAD}[row.ok]
    value = f"{_figure(row.value)} {row.unit}"
    text = f"  {row.name:<34}{pad(value, 12, right=True)}  {baseline:<36}{ratio:>8}{bound:>11}{goal:>13}"
    if row.peak is not None:
        text += f"  {row.peak.name} {100 * row.peak.value / row.peak.budget:.0f} % of budget"
    return text + style.paint(mark, colour)


def cpu_us(operations: Iterable[Callable[[], object]]) -> list[float]:
    """Microseconds of this thread's CPU time that each operation takes: other work on the machine does not count."""
    times = []
    for operation in operations:
        began = thread_time_ns()
        operation()
        times.append((thread_time_ns() - began) / 1e3)
    return times


def median_us(operations: Iterable[Callable[[], object]]) -> float:
    """Median of `cpu_us`."""
    return median(cpu_us(operations))


def alternated_us(*sides: Sequence[Callable[[], object]]) -> list[float]:
    """Median of each side, one operation of each in turn, so that all meet the same moments of the machine."""
    times: list[list[float]] = [[] for _ in sides]
    for operations in zip(*sides, strict=True):
        for side, operation in zip(times, operations, strict=True):
            side += cpu_us([operation])
    return [median(side) for side in times]


def _figure(value: float) -> str:
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"
