"""`hicache sessions`: who is attached to a server, and what they hold."""

import argparse
import json
import sys
from typing import Any, Final

from hicache.tools.commands import _server
from hicache.tools.exits import Exit
from hicache.tools.owner import reached
from hicache.tools.terminal import Colour, Style, pad, printable
from hicache.tools.units import format_bytes, format_seconds, plural

_EPILOG: Final = f"""\
examples:
  hicache sessions
  hicache sessions --json | jq '.sessions[] | select(.leases > 0)'

{_server.EXITS}
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Shows the sessions of engines: who they are, what they hold, and for how long."
    parser.epilog = _EPILOG
    _server.add_server(parser)


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    with reached(args.socket_dir) as owner:
        stats = owner.stats
    if args.json:
        shown = {name: stats[name] for name in ("draining", "begun", "ended", "sessions")}
        print(json.dumps({"format": "hicache-sessions", "version": 1, **shown}, indent=2))
    else:
        print("\n".join(lines(stats, Style.of(sys.stdout))))
    return Exit.OK


def lines(stats: dict[str, Any], style: Style) -> list[str]:
    """The text form."""
    sessions = stats["sessions"]
    shown = [f"{plural(len(sessions), 'session')}{', draining: no new ones' if stats['draining'] else ''}"]
    if sessions:
        shown.append(style.paint(
            f"  {'session':>7}  {'name':<20}{'tenant':<14}{'pid':>8}{'leases':>8}{'reserved':>9}{'pages':>9}"
            f"{'oldest':>12}{'calls':>6}{'silent':>12}{'staging':>10}", Colour.DIM,
        ))  # fmt: skip
    for each in sessions:
        oldest = format_seconds(each["oldest_lease_s"]) if each["leases"] else "-"
        line = (
            f"  {each['session']:>7}  {pad(printable(each['name'] or '-', 18), 20)}"
            f"{pad(printable(each['tenant'] or '-', 12), 14)}{each['pid'] or '-':>8}{each['leases']:>8,}"
            f"{each['reservations']:>9,}{each['pages']:>9,}{oldest:>12}{each['calls']:>6,}"
            f"{format_seconds(each['silent_s']):>12}{format_bytes(each['staging_bytes']):>10}"
        )
        shown.append(line if each["attached"] else line + style.paint("  not attached", Colour.WARN))
    ended = ", ".join(f"{count:,} since {printable(why, 60)}" for why, count in stats["ended"].items())
    return [*shown, f"{plural(stats['begun'], 'session')} since the start{f'; ended: {ended}' if ended else ''}"]
