"""`hicache evict`: make room in a tier."""

import argparse
from typing import Final

from hicache.tools.arguments import byte_size, integer
from hicache.tools.commands import _server
from hicache.tools.commands._server import Outcome
from hicache.tools.exits import CommandFailed, UsageProblem
from hicache.tools.owner import reached
from hicache.tools.progress import Progress
from hicache.tools.units import format_bytes, plural

STEP_BYTES: Final = 1 << 30
"""Bytes that one call evicts: between calls there is time for progress, and for a change of mind."""
_EPILOG: Final = f"""\
examples:
  hicache evict --tier host --bytes 2GiB
  hicache evict --tier nvme --pages 1000 --dry-run

The cache chooses what leaves, as it would for a request. What leaves host memory is written
to NVMe first where there is one and its rules for writing allow it. Pages that leases hold stay.
It goes step by step: engines get room in between, which they may use, and interrupted it stops
after the step under way.

{_server.EXITS}
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Makes so much of a tier free, by having what is wanted least leave it."
    parser.epilog = _EPILOG
    parser.add_argument("--tier", required=True, choices=("host", "nvme"), help="where room is to be made")
    amount = parser.add_mutually_exclusive_group(required=True)
    amount.add_argument("--pages", type=integer(1, 1 << 40), metavar="N", help="pages that are to be free")
    amount.add_argument("--bytes", type=byte_size, metavar="SIZE", help="the same in bytes, such as 2GiB")
    _server.add_server(parser)
    _server.add_dry_run(parser)


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    with reached(args.socket_dir) as owner:
        tier = owner.stats["tiers"].get(args.tier)
        if tier is None:
            raise UsageProblem(f"--tier: the server has no {args.tier} tier")
        page_bytes = int(owner.stats["layout"]["page_bytes"])
        wanted = args.pages or -(-args.bytes // page_bytes)
        capacity, free = tier["capacity_pages"], tier["capacity_pages"] - tier["used_pages"]
        if wanted > capacity:
            raise UsageProblem(f"{plural(wanted, 'page')} are more than the {capacity:,} of the {args.tier} tier")
        leaving = max(0, wanted - free)
        says = (
            f"have {plural(wanted, 'page')} ({format_bytes(wanted * page_bytes)}) of the {args.tier} tier free: "
            f"{free:,} are free now, so about {leaving:,} will leave it"
        )
        plan = {"tier": args.tier, "pages": wanted, "free_pages": free, "leaving_pages": leaving}

        def evict() -> Outcome:
            why, now_free, step = "", free, max(1, STEP_BYTES // page_bytes)
            shown = Progress()
            try:
                for done in range(0, leaving, step):
                    shown("evicted", done, leaving)
                    now_free = owner.evict(args.tier, min(now_free + step, wanted))
            except CommandFailed as problem:  # some may have left before it came to that
                why, now = f"{problem}; ", owner.inspect()["tiers"][args.tier]
                now_free = now["capacity_pages"] - now["used_pages"]
            finally:
                shown.end()
            told = f"{why}{plural(now_free, 'page')} are free now"
            return Outcome({"free_pages": now_free}, told, not why and now_free >= wanted)

        return _server.act(args, "evict", plan, says, evict)
