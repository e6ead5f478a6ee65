"""`hicache prefetch`: bring a prefix from NVMe to host memory before it is asked for."""

import argparse
from typing import TYPE_CHECKING, Final

from hicache.tools.arguments import integer
from hicache.tools.commands import _prefix_command
from hicache.tools.commands._server import Outcome
from hicache.tools.found import Found
from hicache.tools.owner import Owner
from hicache.tools.units import format_bytes, plural

if TYPE_CHECKING:
    from hicache.service.proto import hicache_pb2 as pb

_NOTES: Final = """\
examples:
  hicache prefetch --prompt "You are a helpful assistant." --tokenizer ./model
  hicache prefetch 1,2,3,4,5,6,7,8 --within 10 --max-pages 100

It takes free room and pages that leave for nothing, no more: what other requests need stays.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    description = "Begins to copy to host memory what NVMe alone has of a prefix, and does not wait for it."
    _prefix_command.configure(parser, description, _NOTES)
    parser.add_argument("--within", type=integer(1, 600), default=60, metavar="SECONDS",
                        help="pages not begun by then are left on NVMe (default 60)")  # fmt: skip
    parser.add_argument("--max-pages", type=integer(1, 1 << 40), metavar="N",
                        help="fetch so many pages at most (default: a quarter of host memory)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""

    def plan(found: Found) -> str:
        if not found.num_tokens:
            return ""
        on_nvme, there = found.num_pages("nvme"), found.num_pages("host")
        most = min(on_nvme, args.max_pages or on_nvme)
        size = format_bytes(most * found.page_bytes)
        return (
            f"bring up to {plural(most, 'page')} ({size}) from NVMe to host memory; "
            f"{plural(there, 'page')} of the prefix {'is' if there == 1 else 'are'} there"
        )

    def fetch(owner: Owner, prefix: "pb.NamedPrefix") -> Outcome:
        begun = owner.prefetch(prefix, within_s=args.within, max_pages=args.max_pages or 0)
        told = f"begun: {plural(begun.num_begun, 'page')}; there already: {begun.num_there:,}"
        if begun.num_left_out:
            told += f"; left on NVMe for want of room: {begun.num_left_out:,}"
        done = {"begun_pages": begun.num_begun, "there_pages": begun.num_there, "left_pages": begun.num_left_out}
        return Outcome(done, told, begun.num_begun > 0 or not begun.num_left_out)

    return _prefix_command.run(args, "prefetch", plan, fetch)
