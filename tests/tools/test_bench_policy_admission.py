"""The admission rows of `hicache bench policy` from an excerpt, and how a point above the bound is brought down."""

import gzip
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from hicache.tools.bench.policy_admission import SIZES, TRACES, Curve, Point, measure, rows, table
from hicache.tools.bench.results import Row
from hicache.tools.replay.continued import goes_on
from hicache.tools.replay.readers import Request

EXCERPT: Final = Path(__file__).parent / "traces" / "mooncake.jsonl"


def test_every_row_is_measured(tmp_path: Path) -> None:
    for file in TRACES.values():
        with gzip.open(tmp_path / file, "wb") as packed:
            packed.write(EXCERPT.read_bytes())
    measured: list[Row] = []
    notes: list[str] = []
    rows(tmp_path, notes.append, measured.append)
    assert [row.name for row in measured] == [
        f"admission_{trace}{hinted}_{millions}m" for trace in TRACES for millions in SIZES for hinted in ("", "_hinted")
    ]
    # The host holds all of the excerpt: everything is kept, and nothing has to be written.
    assert {row.value for row in measured} == {1.0}
    assert any("oracle" in note for note in notes)


def test_a_point_that_writes_too_much_is_mixed_down() -> None:
    curve = Curve(
        "made up",
        through=Point("write-through", 100, 400),
        second=Point("second touch", 80, 100),
        oracle=Point("oracle", 120, 100),
        default=Point("default", 95, 150),
        hinted=Point("hinted", 110, 220),
        others=(),
    )
    assert curve.kept_within(curve.default) == pytest.approx(0.95)
    # Half of the prompts by one and half by the other write 1.6 times the oracle's.
    assert curve.kept_within(curve.hinted) == pytest.approx((1.1 + 0.8) / 2)
    assert curve.kept_within(curve.through) == pytest.approx(0.8 * 0.8 + 0.2)
    assert [line.split()[0] for line in table(curve)[1:]] == ["second", "oracle", "default", "hinted", "write-through"]


def test_the_curve_of_a_small_load_is_in_order() -> None:
    """Half of 400 prompts of six blocks go on once, 30 prompts later, and the host holds ten prompts."""
    paths: list[list[int]] = []
    hints = []
    for number in range(400):
        mine = [1000 * number + place for place in range(6)]
        earlier = number - 30
        is_second = earlier >= 0 and earlier % 4 == 0
        paths.append([*paths[earlier][:6], *mine] if is_second else mine)
        hints.append(number % 4 == 0 and number + 30 < 400 and not is_second)
    curve = measure("small", paths, [float(number) for number in range(400)], hints, 60, 600)
    assert curve.second.found < curve.hinted.found <= curve.oracle.found
    assert curve.oracle.written <= curve.hinted.written < curve.through.written
    assert curve.kept(curve.through) == curve.writes(curve.oracle) == 1.0


def test_a_prompt_goes_on_where_its_last_whole_block_comes_again() -> None:
    def request(blocks: list[int], tokens: int) -> Request:
        return Request(0.0, np.array(blocks, np.int32), tokens, 1)

    requests = [
        request([1, 2, 3], 1300),  # goes on in the next one, in which its remainder is another block
        request([1, 2, 4], 1536),  # whole blocks, and the last one comes again
        request([1, 2, 4, 5], 1700),
        request([6], 100),  # no whole block
        request([6], 100),
        request([1], 512),
    ]
    assert goes_on(requests, 512) == [True, True, False, False, False, False]
