"""What `hicache tree` and `hicache stats` share: which snapshot, and what is said about it first."""

import argparse
import time
from pathlib import Path
from typing import Any

from hicache.tools.exits import CommandFailed, UsageProblem
from hicache.tools.snapshot import Snapshot
from hicache.tools.terminal import TIER_COLOURS, Colour, Style, pad, printable
from hicache.tools.units import format_bytes, format_seconds, plural

EPILOG = """\
A snapshot comes from `hicache demo --snapshot FILE`, or from HiCache.snapshot().

exit status: 0 ok; 1 the file is damaged (what can be read of it is shown); 2 bad usage, or FILE is not a snapshot
"""


def add_file(parser: argparse.ArgumentParser) -> None:
    """Add the two ways of naming the file, and `--json`."""
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="a snapshot file")
    parser.add_argument("--snapshot", type=Path, metavar="FILE", help="the same")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def chosen_file(args: argparse.Namespace) -> Path:
    """The one file that was named. Raises `UsageProblem` for none or two."""
    named = [path for path in (args.file, args.snapshot) if path is not None]
    if len(named) != 1:
        raise UsageProblem("name one snapshot file" if named else "no snapshot file is named: give FILE")
    path: Path = named[0]
    return path


def check_whole(snapshot: Snapshot) -> None:
    """After `snapshot` was shown: raise `CommandFailed` if parts of it were damaged."""
    if snapshot.num_damaged:
        raise CommandFailed(
            f"{plural(snapshot.num_damaged, 'prefix', 'prefixes')} of the file are damaged and left out"
        )


def heading(path: Path, snapshot: Snapshot, style: Style) -> str:
    """Which file, and how old."""
    taken = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(snapshot.time))
    dtype, page_size = snapshot.layout.get("dtype"), snapshot.layout.get("page_size")
    shape = (
        f", {printable(str(dtype), 20)} pages of {printable(str(page_size), 20)} tokens" if dtype and page_size else ""
    )
    return style.paint(printable(str(path)), Colour.TITLE) + style.paint(f"  taken {taken}{shape}", Colour.DIM)


def tier_lines(snapshot: Snapshot, style: Style) -> list[str]:
    """How full each tier is."""
    lines = []
    for name, tier in snapshot.tiers.items():
        used, capacity = tier["used_bytes"], tier["capacity_bytes"]
        share = used / capacity if capacity else 0.0
        bar = style.bar(share, 32, TIER_COLOURS.get(name))
        lines.append(
            f"  {tier_name(name, 10)}{format_bytes(used):>10} of {format_bytes(capacity):<10}{bar} {share:6.1%}"
            f"  {tier['used_pages']:>9,} of {plural(tier['capacity_pages'], 'page')}"
        )
    return lines


def tier_name(name: str, columns: int) -> str:
    """A tier as people write it, padded."""
    return pad("NVMe" if name == "nvme" else printable(name, columns - 1), columns)


def age(seconds: float) -> str:
    """How long ago, short."""
    return format_seconds(seconds) if seconds >= 0.001 else "now"


def rate(value: Any) -> str:
    """Bytes a second, or nothing where it is not known."""
    return f"{format_bytes(value)}/s" if isinstance(value, (int, float)) and 0 < value < 1e18 else "-"
