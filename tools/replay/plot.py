"""A line chart as an SVG file, out of the standard library alone."""

from collections.abc import Mapping, Sequence
from math import log2
from typing import Final
from xml.sax.saxutils import escape

WIDTH: Final = 760
HEIGHT: Final = 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 44, 52
_COLOURS: Final = ("#0b6fb8", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#be123c")
_GREY: Final = "#8a8a8a"

Points = Sequence[tuple[float, float]]
"""Capacity in tokens, above 0, and hit rate, 0 to 1; in order of capacity."""


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


def chart(title: str, curves: Mapping[str, Points], *, bound: Points, marked: Mapping[str, tuple[float, float]]) -> str:
    """Hit rates over capacities, which double from one grid line to the next.

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

    def line(points: Points, colour: str, dashes: str = "") -> str:
        places = " ".join(f"{x(capacity):.1f},{y(rate):.1f}" for capacity, rate in points)
        return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'

    def label(name: str, points: Points, colour: str, row: int) -> str:
        return _text(WIDTH - _RIGHT + 34, _TOP + 12 + 20 * row, name, "start", colour) + (
            f'<line x1="{WIDTH - _RIGHT + 12}" x2="{WIDTH - _RIGHT + 30}" y1="{_TOP + 8 + 20 * row}" '
            f'y2="{_TOP + 8 + 20 * row}" stroke="{colour}" stroke-width="2"/>'
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 24, title, "start", "#111111", size=15),
        _text((WIDTH - _RIGHT + _LEFT) / 2, HEIGHT - 12, "capacity in tokens", "middle", "#333333"),
        _text(_LEFT, _TOP - 6, "hit rate", "end", "#333333"),
    ]
    for step in range(6):
        rate = top * step / 5
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(rate):.1f}" y2="{y(rate):.1f}" stroke="#e3e3e3"/>'
        )
        parts.append(_text(_LEFT - 8, y(rate) + 4, f"{100 * rate:.3g} %", "end", "#333333"))
    for capacity, _ in bound:
        at = f"{x(capacity):.1f}"
        parts.append(f'<line x1="{at}" x2="{at}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" stroke="#eeeeee"/>')
        parts.append(_text(x(capacity), HEIGHT - _BOTTOM + 18, format_count(capacity), "middle", "#333333"))
    parts += [line(bound, _GREY, ' stroke-dasharray="6 4"'), label("MIN", bound, _GREY, 0)]
    for row, (name, points) in enumerate(curves.items()):
        colour = _COLOURS[row % len(_COLOURS)]
        parts += [line(points, colour), label(name, points, colour, row + 1)]
        if name in marked:
            capacity, rate = marked[name]
            parts.append(f'<circle cx="{x(capacity):.1f}" cy="{y(rate):.1f}" r="4" fill="#ffffff" stroke="{colour}" '
                         'stroke-width="2"/>')  # fmt: skip
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str, colour: str, *, size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
    )
