"""Sizes, counts and times as people write and read them."""

import re
from typing import Final

_UNITS: Final = {
    "": 1, "b": 1,
    "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-zA-Z]*)")
MAX_BYTES: Final = 1 << 62
"""Largest size that is accepted, in bytes."""


def parse_bytes(text: str) -> int:
    """Bytes from "4096", "64MiB", "1.5GB", "2g": KiB and so on are powers of 1024, kB and so on powers of 1000, and a
    bare k, m, g or t is a power of 1024. Case does not matter; fractions of a byte are dropped.

    Raises `ValueError` with a sentence for anything else, for 0 and for more than `MAX_BYTES`.

    >>> parse_bytes("64MiB"), parse_bytes("1.5GB"), parse_bytes(" 2 k ")
    (67108864, 1500000000, 2048)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 4096, 64MiB or 1.5GB")
    size = (
        int(float(match[1]) * _UNITS[match[2].lower()]) if "." in match[1] else int(match[1]) * _UNITS[match[2].lower()]
    )
    if not 0 < size <= MAX_BYTES:
        raise ValueError(f"{text!r} is not within 1 byte to 4 EiB")
    return size


def format_bytes(size: float) -> str:
    """A size with three significant digits and a unit of 1024.

    >>> format_bytes(0), format_bytes(999), format_bytes(368640), format_bytes(940e6)
    ('0 B', '999 B', '360 KiB', '896 MiB')
    >>> format_bytes(1.5 * 2**30), format_bytes(12 * 2**20)
    ('1.50 GiB', '12.0 MiB')
    """
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if abs(value) < 999.5 or unit == "EiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{_three_digits(value)} {unit}"


def format_seconds(seconds: float) -> str:
    """A duration with three significant digits.

    >>> [format_seconds(seconds) for seconds in (0.0000421, 0.1234, 3.456, 75, 7300)]
    ['42.1 µs', '123 ms', '3.46 s', '1 min 15 s', '2 h 02 min']
    """
    if seconds < 0.9995e-3:
        return f"{_three_digits(seconds * 1e6)} µs"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    if round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _three_digits(value: float) -> str:
    """`value`, below 999.5, with three significant digits, zeros at the end too, so that columns stay straight."""
    return f"{value:#.3g}".removesuffix(".") if value else "0"


def plural(count: int, noun: str, nouns: str = "") -> str:
    """A count with its noun.

    >>> plural(1, "page"), plural(1200, "page"), plural(2, "query", "queries")
    ('1 page', '1,200 pages', '2 queries')
    """
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"
