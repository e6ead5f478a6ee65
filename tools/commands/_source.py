"""What `hicache tree` and `hicache stats` share: a running server or a saved snapshot, and what is said of it first."""

import argparse
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from hicache.tools.commands import _server
from hicache.tools.exits import CommandFailed, UsageProblem
from hicache.tools.owner import Owner, reached
from hicache.tools.snapshot import Snapshot, load
from hicache.tools.terminal import TIER_COLOURS, Colour, Style, pad, printable
from hicache.tools.units import format_bytes, format_seconds, plural

EPILOG: Final = """\
Without FILE the running server is asked. A snapshot comes from `hicache demo --snapshot FILE`,
or from HiCache.snapshot().

exit status: 0 ok; 1 no server answers, or the file is damaged (what can be read of it is
shown); 2 bad usage, or FILE is not a snapshot
"""


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the two ways of naming a file, the server's directory, and `--json`."""
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="a snapshot file")
    parser.add_argument("--snapshot", type=Path, metavar="FILE", help="the same")
    _server.add_server(parser)


def check_source(args: argparse.Namespace) -> None:
    """Raise `UsageProblem` where more than one file, or a file and a server, are named."""
    if args.file is not None and args.snapshot is not None:
        raise UsageProblem("name one snapshot file")
    if (args.file or args.snapshot) is not None and args.socket_dir is not None:
        raise UsageProblem("name a snapshot file or a server, not both")


def read(args: argparse.Namespace, ask: Callable[[Owner], Snapshot]) -> tuple[str, Snapshot]:
    """What was named, by name; `ask` asks where it is a server."""
    path: Path | None = args.file or args.snapshot
    if path is not None:
        return os.fspath(path), load(path)
    with reached(args.socket_dir) as owner:
        return f"server at {owner.directory}", ask(owner)


def check_whole(snapshot: Snapshot) -> None:
    """After `snapshot` was shown: raise `CommandFailed` if parts of it were damaged."""
    if snapshot.num_damaged:
        raise CommandFailed(
            f"{plural(snapshot.num_damaged, 'prefix', 'prefixes')} of the file are damaged and left out"
        )


def heading(name: str, snapshot: Snapshot, style: Style) -> str:
    """Which file or server, and when."""
    taken = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(snapshot.time))
    dtype, page_size = snapshot.layout.get("dtype"), snapshot.layout.get("page_size")
    shape = (
        f", {printable(str(dtype), 20)} pages of {printable(str(page_size), 20)} tokens" if dtype and page_size else ""
    )
    return style.paint(printable(name), Colour.TITLE) + style.paint(f"  taken {taken}{shape}", Colour.DIM)


def tier_lines(tiers: Mapping[str, Mapping[str, Any]], style: Style) -> list[str]:
    """How full each tier is; `tiers` as in `hicache.service.snapshot`."""
    lines = []
    for name, tier in tiers.items():
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
