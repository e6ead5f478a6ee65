"""`hicache unpin`: let a pinned prefix leave the cache again."""

import argparse

from hicache.tools.commands import _prefix, _server
from hicache.tools.commands._server import Outcome
from hicache.tools.found import Found
from hicache.tools.owner import reached
from hicache.tools.units import plural

_EPILOG = f"""\
{_prefix.HELP}
example:
  hicache unpin --prompt "You are a helpful assistant." --tokenizer ./model

A pin is named by exactly the tokens that `hicache pin` was given.

{_server.EXITS}
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Ends a pin; the pages stay until the cache needs their room."
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
        says = f"end the pin of exactly these {plural(len(tokens), 'token')}; pins hold {found.pinned_tokens:,} of them"

        def unpin() -> Outcome:
            was_pinned = owner.unpin(prefix)
            told = "it is no longer pinned" if was_pinned else "there was no pin of exactly these tokens"
            return Outcome({"was_pinned": was_pinned}, told, was_pinned)

        return _server.act(args, "unpin", found.to_json(), says, unpin)
