"""What a stream can show, and text made safe and pretty for it: escaped names, colours, bars.

Colours appear on a terminal only, and not where `NO_COLOR` is set or `TERM` is `dumb`; block characters appear where
the stream's encoding has them. Other characters that an encoding lacks have stand-ins as wide as they are, or appear as
backslash escapes: for that, streams have the error handler `STAND_INS`.
"""

import codecs
import os
import re
import shutil
import unicodedata
from dataclasses import dataclass
from enum import Enum
from typing import Final, TextIO

PLAIN_WIDTH: Final = 120
"""Columns used where there is no terminal to ask."""
MIN_WIDTH: Final = 60
"""Columns used on terminals that are narrower: lines then wrap."""


class Colour(Enum):
    """A colour by what it stands for; the value is the parameter of the terminal's SGR sequence."""

    DEVICE = "32"
    HOST = "36"
    NVME = "35"
    COMPUTED = "33"
    GOOD = "1;32"
    BAD = "1;31"
    WARN = "1;33"
    TITLE = "1"
    DIM = "2"


TIER_COLOURS: Final = {"device": Colour.DEVICE, "host": Colour.HOST, "nvme": Colour.NVME}
STAND_INS: Final = "hicache.stand-ins"
"""Name of the error handler for streams."""
_STAND_INS: Final = {"…": "~", "→": ">", "µ": "u", "—": "-", "÷": "/"}
_SGR: Final = re.compile(r"\x1b\[[0-9;]*m")
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True)
class Style:
    """How to draw for one stream."""

    colour: bool = False
    """Whether escape sequences may be written."""
    unicode: bool = True
    """Whether block and line characters may be written."""
    width: int = PLAIN_WIDTH
    """Columns of a line."""
    live: bool = False
    """Whether somebody watches: bars may move."""

    @classmethod
    def of(cls, stream: TextIO) -> "Style":
        """The style that suits `stream` and the environment."""
        live = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        unicode = (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "").startswith("utf")
        width = max(shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns, MIN_WIDTH) if live else PLAIN_WIDTH
        return cls(colour=live and not os.environ.get("NO_COLOR"), unicode=unicode, width=width, live=live)

    def paint(self, text: str, colour: Colour | None) -> str:
        """`text`, coloured where the stream takes colours."""
        if not self.colour or colour is None or not text:
            return text
        return f"\x1b[{colour.value}m{text}\x1b[0m"

    def bar(self, share: float, cells: int, colour: Colour | None = None) -> str:
        """A horizontal bar of exactly `cells` columns, filled to `share`, clamped to 0 to 1; anything above 0 shows."""
        share = min(max(share, 0.0), 1.0)
        if not self.unicode:
            full = max(round(share * cells), 1 if share > 0 else 0)
            return self.paint("#" * full, colour) + "." * (cells - full)
        eighths = max(round(share * cells * 8), 1 if share > 0 else 0)
        full, part = divmod(eighths, 8)
        filled = "█" * full + (_EIGHTHS[part] if part else "")
        return self.paint(filled, colour) + self.paint("·" * (cells - len(filled)), Colour.DIM)

    def stack(self, parts: list[tuple[float, Colour]], cells: int) -> str:
        """A bar of exactly `cells` columns shared out among (amount, colour); only for streams that take colours.

        Cells go to the largest remainders; an amount above 0 that is less than a cell may vanish.
        """
        total = sum(amount for amount, _ in parts)
        if total <= 0:
            return " " * cells
        exact = [amount / total * cells for amount, _ in parts]
        counts = [int(value) for value in exact]
        for index in sorted(range(len(parts)), key=lambda i: counts[i] - exact[i])[: cells - sum(counts)]:
            counts[index] += 1
        glyph = "█" if self.unicode else "#"
        return "".join(self.paint(glyph * count, colour) for count, (_, colour) in zip(counts, parts, strict=True))


def printable(text: str, limit: int | None = None) -> str:
    """`text` on one line and harmless: control characters, line breaks, direction marks and undecodable bytes appear as
    backslash escapes. Wider than `limit` columns, it is cut and ends in "…".

    >>> printable("a\\x1b[2Jb\\n")
    'a\\\\x1b[2Jb\\\\n'
    """
    if limit is None:
        return _escape(text)
    # Every character that is shown takes a column, combining ones aside: what is far beyond the limit is not looked at.
    shown = _escape(text[: limit * 4 + 1])
    if len(text) <= limit * 4 + 1 and _columns(shown) <= limit:
        return shown
    kept, columns = "", 0
    for char in shown:
        columns += _columns(char)
        if columns >= limit:
            break
        kept += char
    return kept + "…"


def _escape(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _columns(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _stand_in(error: UnicodeError) -> tuple[str | bytes, int]:
    """What is written for the first character that a stream's encoding lacks, and where to go on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    char = error.object[error.start]
    error.end = error.start + 1
    return (_STAND_INS[char], error.end) if char in _STAND_INS else codecs.backslashreplace_errors(error)


codecs.register_error(STAND_INS, _stand_in)


def visible_length(text: str) -> int:
    """Columns that `text` takes: colour sequences and combining characters none, wide characters two."""
    return _columns(_SGR.sub("", text))


def pad(text: str, columns: int, *, right: bool = False) -> str:
    """`text` filled with spaces to `columns`, on the left where `right` aligns it; never cut."""
    space = " " * (columns - visible_length(text))
    return space + text if right else text + space
