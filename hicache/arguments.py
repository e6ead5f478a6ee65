"""Checks of plain arguments: integers, times, names and flags, refused with a `BadRequest` that names field and bound.

Whoever is called from outside checks with these before anything is touched. Numbers may be numpy's; a boolean for a
number, or a float for an integer, is a mistake even where its value would do.
"""

from contextlib import suppress
from math import isfinite
from numbers import Integral, Real
from typing import Final

from hicache.errors import BadRequest

MAX_NAME_CHARS: Final = 1024
"""Longest name of an owner or a tenant."""


def whole(field: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as an integer from `low` to `high`, both included; None for no upper bound."""
    if type(value) is int:
        number = value
    elif isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
    else:
        raise BadRequest(field, f"{value!r:.80} is not an integer within {_range(low, high)}")
    if number < low or (high is not None and number > high):
        raise BadRequest(field, f"{number} is not within {_range(low, high)}")
    return number


def moment(field: str, value: object) -> float:
    """`value` as a time in seconds, a finite number."""
    if type(value) is float and isfinite(value):  # almost always
        return value
    return real(field, value, " of seconds")


def real(field: str, value: object, unit: str = "") -> float:
    """`value` as a finite float; an integer becomes the float next to it. `unit` is for the message."""
    if type(value) is float and isfinite(value):
        return value
    number = float("nan")
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # of too large an integer, which is not finite either
            number = float(value)
    if not isfinite(number):
        raise BadRequest(field, f"{value!r:.80} is not a finite number{unit}")
    return number


def name(field: str, value: object) -> str:
    """`value` as a text of at most `MAX_NAME_CHARS` characters."""
    if not isinstance(value, str):
        raise BadRequest(field, f"{type(value).__name__} is not a text")
    if len(value) > MAX_NAME_CHARS:
        raise BadRequest(field, f"{len(value)} characters are more than {MAX_NAME_CHARS}")
    return value


def flag(field: str, value: object) -> bool:
    """`value` as a truth value."""
    if not isinstance(value, bool) and not (getattr(value, "dtype", None) == "bool" and getattr(value, "ndim", 1) == 0):
        raise BadRequest(field, f"{type(value).__name__} is not a truth value")
    return bool(value)


def _range(low: int, high: int | None) -> str:
    return f"{low} to {high}" if high is not None else f"{low} and more"
