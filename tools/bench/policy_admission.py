"""The admission rows of `hicache bench policy`: what is kept of write-through's hits for how many bytes written.

Two tiers evict what was used longest ago: 2,000 blocks of 512 tokens (1 M) in the host over 16,000 on NVMe (8.2 M), and
4,000 (2 M) over 32,000 (16.4 M). The points of the curve are

    write-through  every block that is new to NVMe, when it comes
    always         every block that leaves the host
    second touch   those that were used twice
    predicted      at several pages written for each that comes back; its default is the one that the rows are of
    oracle         those that are used again, which it knows

A row is the share of write-through's hits that the default keeps. It steers its writes by itself, by what has come back
so far, and knows nothing of the oracle; the goal holds for at most 1.6 times the oracle's writes. Were it to write
more, its row would be that of a mixture with second touch, prompt by prompt at random, which writes as much as that.
The floor is the mixture of second touch and write-through. With hints each prompt says whether a later one goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hicache.policy.admission import AdmissionPolicy, AlwaysAdmission, SecondTouchAdmission
from hicache.policy.lru import LruPolicy
from hicache.policy.predicted import WRITES_PER_RETURN, PredictedAdmission
from hicache.tools.bench.results import Baseline, Note, Report, Row
from hicache.tools.replay.blocks import BlockCache
from hicache.tools.replay.continued import goes_on
from hicache.tools.replay.readers import Trace
from hicache.tools.replay.two_tiers import OracleAdmission, TwoTiers

TRACES: Final = {"conversation": "mooncake_conversation.jsonl.gz", "synthetic": "mooncake_synthetic.jsonl.gz"}
SIZES: Final = {1: (2_000, 16_000), 2: (4_000, 32_000)}
"""Blocks in the host and on NVMe, by millions of tokens in the host."""
GOALS: Final = {
    ("conversation", 1): 0.88, ("conversation", 2): 0.78, ("synthetic", 1): 0.99, ("synthetic", 2): 0.92,
}  # fmt: skip
"""Three points above the mixture of second touch and write-through."""
HINTED_GOAL: Final = 0.95
WRITES_OF_ORACLE: Final = 1.6
OTHERS: Final = (1.0, 1.3, 2.0, 3.0)
"""Further pages written for each that comes back, for the curve."""


@dataclass(frozen=True, slots=True)
class Point:
    """What one way to admit comes to, in blocks."""

    name: str
    found: int
    written: int


@dataclass(frozen=True, slots=True)
class Curve:
    """What ways to admit keep of one trace at one size."""

    name: str
    through: Point
    second: Point
    oracle: Point
    default: Point
    hinted: Point
    others: tuple[Point, ...]

    def kept(self, point: Point) -> float:
        """Of write-through's hits."""
        return point.found / self.through.found if self.through.found else 0.0

    def writes(self, point: Point) -> float:
        """As a multiple of the oracle's."""
        return point.written / self.oracle.written if self.oracle.written else 0.0

    def kept_within(self, point: Point, high: Point | None = None) -> float:
        """What it keeps for `WRITES_OF_ORACLE` at most: where it writes more, mixed with second touch."""
        share = 1.0
        if self.writes(point) > WRITES_OF_ORACLE:
            low = self.writes(self.second)
            share = max(0.0, (WRITES_OF_ORACLE - low) / (self.writes(point) - low))
        return share * self.kept(point) + (1.0 - share) * self.kept(self.second)


def rows(traces: Path, note: Note, report: Report, divisor: int = 1) -> None:
    """Measure every row from the traces of a directory, of which only so many-th part is taken. About a minute."""
    for trace, file in TRACES.items():
        source = Trace(traces / file, sort=True)
        requests = [request for request in source if len(request.blocks)]
        requests = requests[: max(1, len(requests) // divisor)]
        hints = goes_on(requests, source.block_tokens)
        paths = [request.blocks.tolist() for request in requests]
        times = [request.time_s for request in requests]
        for millions, sizes in SIZES.items():
            host_blocks, nvme_blocks = (max(1, size // divisor) for size in sizes)
            curve = measure(f"{trace} {millions} M", paths, times, hints, host_blocks, nvme_blocks)
            for line in table(curve):
                note(line)
            floor = Baseline("mixture", curve.kept_within(curve.through))
            report(Row(
                f"admission_{trace}_{millions}m", curve.kept_within(curve.default), "of hits", floor,
                curve.kept(curve.oracle), GOALS[trace, millions], higher_is_better=True,
            ))  # fmt: skip
            report(Row(
                f"admission_{trace}_hinted_{millions}m", curve.kept_within(curve.hinted), "of hits", floor,
                curve.kept(curve.oracle), HINTED_GOAL, higher_is_better=True,
            ))  # fmt: skip


def measure(
    name: str,
    paths: Sequence[list[int]],
    times: Sequence[float],
    hints: Sequence[bool],
    host_blocks: int,
    nvme_blocks: int,
) -> Curve:
    """Replay prompts, at their times, under every way to admit; `hints` say which ones go on."""

    def point(name: str, policy: AdmissionPolicy, *, is_hinted: bool = False) -> Point:
        tiers = TwoTiers(policy, host_blocks=host_blocks, nvme_blocks=nvme_blocks)
        found = 0
        for path, time_s, returns in zip(paths, times, hints, strict=True):
            found += tiers.request(path, time_s, returns=returns if is_hinted else None)
        return Point(name, found, tiers.num_written)

    def predicted(per_return: float) -> AdmissionPolicy:
        return PredictedAdmission(capacity_pages=nvme_blocks, writes_per_return=per_return)

    # What NVMe holds is then what one tier of its size would hold, and all that was not found is written.
    one_tier = BlockCache(LruPolicy(), nvme_blocks)
    found = sum(map(one_tier.request, paths, times))
    return Curve(
        name,
        through=Point("write-through", found, sum(map(len, paths)) - found),
        second=point("second touch", SecondTouchAdmission()),
        oracle=point("oracle", OracleAdmission(paths)),
        default=point(f"predicted {WRITES_PER_RETURN:g}", predicted(WRITES_PER_RETURN)),
        hinted=point(f"hinted {WRITES_PER_RETURN:g}", predicted(WRITES_PER_RETURN), is_hinted=True),
        others=(
            point("always", AlwaysAdmission()),
            *(point(f"predicted {per_return:g}", predicted(per_return)) for per_return in OTHERS),
        ),
    )


def table(curve: Curve) -> list[str]:
    """The curve, fewest writes first."""
    points = [curve.through, curve.second, curve.oracle, curve.default, curve.hinted, *curve.others]
    return [f"admission, {curve.name}: hits kept, writes as a multiple of the oracle's"] + [
        f"  {point.name:14} {curve.kept(point):6.3f} {curve.writes(point):6.2f} x"
        for point in sorted(points, key=lambda point: point.written)
    ]
