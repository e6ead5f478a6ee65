"""A chart as a file: SVG out of the standard library alone, PNG by Pillow."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape

from hicache.tools.replay.plot import HEIGHT, WIDTH, Line, Ring, Shape, Text

_SCALE: Final = 2
"""Pixels of a PNG for each unit of the picture."""
_DASH, _GAP = 6.0, 4.0
_RING: Final = 4.0


def to_svg(shapes: Sequence[Shape]) -> bytes:
    """The picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *map(_element, shapes),
        "</svg>",
    ]
    return ("\n".join(parts) + "\n").encode()


def _element(shape: Shape) -> str:
    match shape:
        case Line():
            places = " ".join([f"{x:.1f},{y:.1f}" for x, y in shape.places])
            dashes = f' stroke-dasharray="{_DASH:g} {_GAP:g}"' if shape.is_dashed else ""
            return (
                f'<polyline points="{places}" fill="none" stroke="{shape.colour}" stroke-width="{shape.width:g}"'
                f"{dashes}/>"
            )
        case Ring():
            return (
                f'<circle cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{_RING:g}" fill="#ffffff" '
                f'stroke="{shape.colour}" stroke-width="2"/>'
            )
        case Text():
            return (
                f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}" '
                f'font-size="{shape.size}" fill="{shape.colour}">{escape(shape.text)}</text>'
            )


def to_png(shapes: Sequence[Shape]) -> bytes:
    """The picture as PNG. Raises `ImportError` without Pillow."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (WIDTH * _SCALE, HEIGHT * _SCALE), "#ffffff")
    draw = ImageDraw.Draw(image)
    for shape in shapes:
        match shape:
            case Line():
                width = max(1, round(shape.width * _SCALE))
                for places in _dashes(shape) if shape.is_dashed else [shape.places]:
                    draw.line([(x * _SCALE, y * _SCALE) for x, y in places], shape.colour, width, joint="curve")
            case Ring():
                x, y, radius = shape.x * _SCALE, shape.y * _SCALE, _RING * _SCALE
                draw.ellipse((x - radius, y - radius, x + radius, y + radius), "#ffffff", shape.colour, 2 * _SCALE)
            case Text():
                anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
                font = ImageFont.load_default(shape.size * _SCALE)
                draw.text((shape.x * _SCALE, shape.y * _SCALE), shape.text, shape.colour, font, anchor)
    target = io.BytesIO()
    image.save(target, "PNG")
    return target.getvalue()


def _dashes(line: Line) -> list[tuple[tuple[float, float], ...]]:
    """A dashed line as its dashes."""
    dashes: list[tuple[tuple[float, float], ...]] = []
    for (x0, y0), (x1, y1) in zip(line.places, line.places[1:], strict=False):
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        for number in range(int(length / (_DASH + _GAP)) + 1):
            ends = [min(1.0, at / length) for at in (number * (_DASH + _GAP), number * (_DASH + _GAP) + _DASH)]
            dashes.append(tuple([(x0 + (x1 - x0) * end, y0 + (y1 - y0) * end) for end in ends]))
    return dashes


PICTURES: Final[Mapping[str, Callable[[Sequence[Shape]], bytes]]] = {".svg": to_svg, ".png": to_png}
"""What draws a file, by how its name ends."""
