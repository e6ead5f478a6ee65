"""`hicache stats`: tiers, lanes and counters."""

import argparse
import json
import sys
from typing import Final

from hicache.tools.commands import _source as common
from hicache.tools.exits import Exit
from hicache.tools.snapshot import Snapshot, of_server
from hicache.tools.terminal import Colour, Style, pad, printable
from hicache.tools.units import format_bytes, format_seconds

JSON_FORMAT: Final = "hicache-stats"
_EPILOG: Final = f"""\
examples:
  hicache stats
  hicache stats --json | jq .counters.tokens_by_tier
  hicache stats demo.snapshot

{common.EPILOG}"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Shows how full each tier is, what the lanes between them moved, and what the cache has counted."
    )
    parser.epilog = _EPILOG
    common.add_source(parser)


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    common.check_source(args)
    name, snapshot = common.read(args, lambda owner: of_server(owner.stats))
    if args.json:
        print(json.dumps(to_json(snapshot), indent=2))
    else:
        style = Style.of(sys.stdout)
        print(common.heading(name, snapshot, style))
        for line in lines(snapshot, style):
            print(line)
    common.check_whole(snapshot)
    return Exit.OK


def to_json(snapshot: Snapshot) -> dict[str, object]:
    """The stable form: `{"format": "hicache-stats", "version": 1, "time", "layout", "tiers", "lanes", "counters",
    "num_prefixes", "num_damaged"}`, the inner objects as `hicache.service.snapshot` describes them."""
    return {
        "format": JSON_FORMAT, "version": 1, "time": snapshot.time, "layout": snapshot.layout, "tiers": snapshot.tiers,
        "lanes": snapshot.lanes, "counters": snapshot.counters, "num_prefixes": snapshot.num_prefixes,
        "num_damaged": snapshot.num_damaged,
    }  # fmt: skip


def lines(snapshot: Snapshot, style: Style) -> list[str]:
    """The text form, without its heading."""
    shown = ["", style.paint("Tiers", Colour.TITLE), *common.tier_lines(snapshot.tiers, style)]
    shown += ["", style.paint("Lanes", Colour.TITLE)]
    shown.append(style.paint(f"  {'':<18}{'moved':>10}{'pages':>11}{'failed':>9}{'busy':>10}{'speed':>13}", Colour.DIM))
    arrow = " → " if style.unicode else " -> "
    for name, lane in snapshot.lanes.items():
        busy = lane.get("busy_s")
        busy_text = format_seconds(busy) if isinstance(busy, (int, float)) and 0 < busy < 1e9 else "-"
        failed = pad(f"{lane['failed']:,}", 9, right=True)
        shown.append(
            f"  {pad(printable(name, 40).replace('nvme', 'NVMe').replace('->', arrow), 18)}"
            f"{format_bytes(lane['bytes']):>10}{lane['pages']:>11,}"
            f"{style.paint(failed, Colour.BAD) if lane['failed'] else failed}{busy_text:>10}"
            f"{common.rate(lane.get('bandwidth')):>13}"
        )
    shown += ["", style.paint("Counters", Colour.TITLE)]
    for name, value in snapshot.counters.items():
        label = printable(name.replace("_", " "), 26)
        if isinstance(value, dict):
            parts = [f"{printable(str(key), 20)} {_number(count)}" for key, count in value.items()]
            shown.append(f"  {label:<26}  {', '.join(parts) or 'none'}")
        else:
            shown.append(f"  {label:<26}  {_number(value)}")
    shown.append(f"  {'prefixes':<26}  {snapshot.num_prefixes:,}")
    return shown


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) else printable(str(value), 40)
