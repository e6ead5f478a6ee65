"""Types of command-line arguments: each takes a word and raises argparse's error with a sentence."""

import argparse
from collections.abc import Callable
from pathlib import Path

from hicache.tools.units import parse_bytes


def path(text: str) -> Path:
    """A file or directory. `Path("")` would be the current directory: what an unset variable in a script would name."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty")
    return Path(text)


def utf8(text: str) -> str:
    """Text that is sent on. Bytes of a terminal that are no UTF-8 cannot be."""
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise argparse.ArgumentTypeError(f"{text!r} is not UTF-8")
    return text


def byte_size(text: str) -> int:
    """A size such as 4096, 64MiB or 1.5GB."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def integer(least: int, most: int) -> Callable[[str], int]:
    """A whole number within bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least:,} to {most:,}")
        return value

    return parse
