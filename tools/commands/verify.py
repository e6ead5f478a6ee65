"""`hicache verify`: read what is cached and compare it with its checksums."""

import argparse
import json

from hicache.tools.arguments import integer
from hicache.tools.commands import _server
from hicache.tools.exits import Exit
from hicache.tools.owner import reached
from hicache.tools.progress import Progress
from hicache.tools.units import plural

PAGES_A_STEP = 256
"""Copies that one call verifies: between calls there is time for progress, and for a change of mind."""
_EPILOG = """\
examples:
  hicache verify
  hicache verify --one-in 100

Copies that are damaged are forgotten at once: a damaged page is never served. The server works on
meanwhile. Interrupted, it stops after the step under way.

exit status: 0 all is whole; 1 something was damaged or could not be read, or no server answers; 2 bad usage
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Reads the copies of all pages, or of a sample, and compares them with their checksums."
    parser.epilog = _EPILOG
    parser.add_argument("--one-in", type=integer(1, (1 << 32) - 1), default=1, metavar="N",
                        help="read one page in N, at random (default 1, which is all)")  # fmt: skip
    _server.add_server(parser)


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    pages = corrupt = failed = 0
    shown = Progress()
    with reached(args.socket_dir) as owner:
        # What is there as it begins; pages that came from NVMe have their checksums there, and are not read twice.
        total = sum([tier["used_pages"] for tier in owner.stats["tiers"].values()]) // args.one_in
        try:
            for reply in owner.verify(pages_a_step=PAGES_A_STEP, one_in=args.one_in):
                pages += reply.num_pages
                corrupt += reply.num_corrupt
                failed += reply.num_failed
                shown("verified", pages, max(total, pages))
        finally:
            shown.end()
    if args.json:
        print(json.dumps({
            "format": "hicache-verify", "version": 1, "one_in": args.one_in, "pages": pages,
            "corrupt_pages": corrupt, "failed_pages": failed,
        }, indent=2))  # fmt: skip
    else:
        found = "all are whole"
        if corrupt + failed:
            found = f"{corrupt:,} were damaged and are forgotten, {failed:,} could not be read"
        elif not pages:
            found = f"one in {args.one_in:,} of so few is none" if args.one_in > 1 else "nothing is cached"
        print(f"{plural(pages, 'copy', 'copies')} read: {found}")
    return Exit.FAILED if corrupt + failed else Exit.OK
