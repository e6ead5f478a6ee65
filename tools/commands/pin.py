"""`hicache pin`: keep a prefix in the cache."""

import argparse
from typing import TYPE_CHECKING

from hicache.tools.commands import _prefix, _server
from hicache.tools.commands._server import Outcome
from hicache.tools.found import Found
from hicache.tools.owner import Owner, reached
from hicache.tools.units import plural

if TYPE_CHECKING:
    from hicache.service.proto import hicache_pb2 as pb

_EPILOG = f"""\
{_prefix.HELP}
examples:
  hicache pin --prompt "You are a helpful assistant." --tokenizer ./model
  hicache pin 1,2,3,4,5,6,7,8 --namespace 8a3f --dry-run

A pin lasts until `hicache unpin` with the same tokens, or until the server ends.

{_server.EXITS}
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Keeps as much of a prefix as is cached, in whole pages, from leaving the cache."
    parser.epilog = _EPILOG
    _prefix.add_prefix(parser)
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
            says = f"nothing of these {plural(len(tokens), 'token')} is cached, so nothing can be pinned"
            return _server.act(args, "pin", found.to_json(), says, None)
        says = f"pin {found.in_words()}"
        return _server.act(args, "pin", found.to_json(), says, lambda: _pinned(owner, prefix))


def _pinned(owner: Owner, prefix: "pb.NamedPrefix") -> Outcome:
    num_tokens = owner.pin(prefix)
    return Outcome({"tokens": num_tokens}, f"pinned {plural(num_tokens, 'token')}", num_tokens > 0)
