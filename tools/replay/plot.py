"""A line chart of hit rates over capacities: where its lines and words are, whatever they are drawn with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Final, Literal

WIDTH: Final = 760
HEIGHT: Final = 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 44, 52
_COLOURS: Final = ("#0b6fb8", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#be123c")
_GREY: Final = "#8a8a8a"

Points = Sequence[tuple[float, float]]
"""Capacity in tokens, above 0, and hit rate, 0 to 1; in order of capacity."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line through places in the picture, which has its origin at the upper left."""

    places: tuple[tuple[float, float], ...]
    colour: str
    """`#rrggbb`, as everywhere."""
    width: float = 1.0
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """Words on a base line that begins, has its middle, or ends at a place."""

    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"]
    colour: str
    size: int = 12


@dataclass(frozen=True, slots=True)
class Ring:
    """A small ring, white inside."""

    x: float
    y: float
    colour: str


Shape = Line | Text | Ring


def format_count(count: float) -> str:
    """A count with three significant digits and a unit of 1,000.

    >>> format_count(999), format_count(1234), format_count(144793823)
    ('999', '1.23 k', '145 M')
    """
    for unit in ("", " k", " M", " G"):
        if count < 999.5 or unit == " G":
            break
        count /= 1000
    return f"{count:.0f}" if not unit else f"{count:#.3g}".removesuffix(".") + unit


def chart(
    title: str, curves: Mapping[str, Points], *, bound: Points, marked: Mapping[str, tuple[float, float]]
) -> list[Shape]:
    """Hit rates over capacities, which double from one grid line to the next, on white, `WIDTH` by `HEIGHT`.

    Args:
        title: above the chart.
        curves: at least one, by name, each of at least one point.
        bound: what none of them can be above, drawn dashed and in grey.
        marked: single points of curves, drawn as rings in their colours.
    """
    capacities = [capacity for points in (*curves.values(), bound, marked.values()) for capacity, _ in points]
    low, high = log2(min(capacities)), log2(max(capacities))
    top = (
        min(1.0, max(rate for points in (*curves.values(), bound, marked.values()) for _, rate in points) * 1.1) or 1.0
    )

    def x(capacity: float) -> float:
        return _LEFT + (log2(capacity) - low) / ((high - low) or 1.0) * (WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return HEIGHT - _BOTTOM - rate / top * (HEIGHT - _TOP - _BOTTOM)

    def curve(name: str, points: Points, colour: str, row: int, *, is_dashed: bool = False) -> list[Shape]:
        """A curve, and its name beside the chart."""
        beside = _TOP + 20.0 * row
        return [
            Line(tuple([(x(capacity), y(rate)) for capacity, rate in points]), colour, 2.0, is_dashed),
            Line(((WIDTH - _RIGHT + 12, beside + 8), (WIDTH - _RIGHT + 30, beside + 8)), colour, 2.0, is_dashed),
            Text(WIDTH - _RIGHT + 34, beside + 12, name, "start", colour),
        ]

    shapes: list[Shape] = [
        Text(_LEFT, 24, title, "start", "#111111", size=15),
        Text((WIDTH - _RIGHT + _LEFT) / 2, HEIGHT - 12, "capacity in tokens", "middle", "#333333"),
        Text(_LEFT - 8, _TOP - 14, "hit rate", "end", "#333333"),
    ]
    for step in range(6):
        rate = top * step / 5
        shapes.append(Line(((_LEFT, y(rate)), (WIDTH - _RIGHT, y(rate))), "#e3e3e3"))
        shapes.append(Text(_LEFT - 8, y(rate) + 4, f"{100 * rate:.3g} %", "end", "#333333"))
    for capacity, _ in bound:
        shapes.append(Line(((x(capacity), _TOP), (x(capacity), HEIGHT - _BOTTOM)), "#eeeeee"))
        shapes.append(Text(x(capacity), HEIGHT - _BOTTOM + 18, format_count(capacity), "middle", "#333333"))
    shapes += curve("MIN", bound, _GREY, 0, is_dashed=True)
    for row, (name, points) in enumerate(curves.items()):
        colour = _COLOURS[row % len(_COLOURS)]
        shapes += curve(name, points, colour, row + 1)
        if name in marked:
            capacity, rate = marked[name]
            shapes.append(Ring(x(capacity), y(rate), colour))
    return shapes
