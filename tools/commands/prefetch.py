"""`hicache prefetch`: bring a prefix from NVMe to host memory before it is asked for."""

import argparse

from hicache.tools.arguments import integer
from hicache.tools.commands import _prefix, _server
from hicache.tools.commands._server import Outcome
from hicache.tools.found import Found
from hicache.tools.owner import reached
from hicache.tools.units import format_bytes, plural

_EPILOG = f"""\
{_prefix.HELP}
examples:
  hicache prefetch --prompt "You are a helpful assistant." --tokenizer ./model
  hicache prefetch 1,2,3,4,5,6,7,8 --within 10 --max-pages 100

It takes free room and pages that leave for nothing, no more: what other requests need stays.

{_server.EXITS}
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Begins to copy to host memory what NVMe alone has of a prefix, and does not wait for it."
    parser.epilog = _EPILOG
    _prefix.add_prefix(parser)
    parser.add_argument("--within", type=integer(1, 600), default=60, metavar="SECONDS",
                        help="pages not begun by then are left on NVMe (default 60)")  # fmt: skip
    parser.add_argument("--max-pages", type=integer(1, 1 << 40), metavar="N",
                        help="fetch so many pages at most (default: a quarter of host memory)")  # fmt: skip
    _server.add_server(parser)
    _server.add_dry_run(parser)


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    tokens = _prefix.tokens_of(args)
    _prefix.check_namespace(args)
    with reached(args.socket_dir) as owner:
        prefix = _prefix.named(owner, args, tokens)
        found = Found.of(owner, prefix)
        if not found.num_tokens:
            says = f"nothing of these {plural(len(tokens), 'token')} is cached, so nothing can be fetched"
            return _server.act(args, "prefetch", found.to_json(), says, None)
        most = min(found.num_pages("nvme"), args.max_pages or found.num_pages("nvme"))
        there = found.num_pages("host")
        says = (
            f"bring up to {plural(most, 'page')} ({format_bytes(most * found.page_bytes)}) from NVMe to host memory; "
            f"{plural(there, 'page')} of the prefix {'is' if there == 1 else 'are'} there"
        )

        def fetch() -> Outcome:
            begun = owner.prefetch(prefix, within_s=args.within, max_pages=args.max_pages or 0)
            told = f"begun: {plural(begun.num_begun, 'page')}; there already: {begun.num_there:,}"
            if begun.num_left_out:
                told += f"; left on NVMe for want of room: {begun.num_left_out:,}"
            done = {"begun_pages": begun.num_begun, "there_pages": begun.num_there, "left_pages": begun.num_left_out}
            return Outcome(done, told, begun.num_begun > 0 or not begun.num_left_out)

        return _server.act(args, "prefetch", found.to_json(), says, fetch)
