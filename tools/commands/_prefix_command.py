"""What the commands that do something to a prefix share: their options, and how they come to what there is of it."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from hicache.tools.commands import _prefix, _server
from hicache.tools.commands._server import Outcome
from hicache.tools.found import Found
from hicache.tools.owner import Owner, reached
from hicache.tools.units import plural

if TYPE_CHECKING:
    from hicache.service.proto import hicache_pb2 as pb

Plan = Callable[[Found], str]
"""What will be done to what was found, after "will"; empty where nothing can be."""
Do = Callable[[Owner, "pb.NamedPrefix"], Outcome]
"""Does it."""


def configure(parser: argparse.ArgumentParser, description: str, notes: str) -> None:
    """Add the options of a command that takes a prefix. `notes`: its examples, and what else there is to say."""
    parser.description = description
    parser.epilog = f"{_prefix.HELP}\n{notes}\n{_server.EXITS}"
    _prefix.add_prefix(parser)
    _server.add_server(parser)
    _server.add_dry_run(parser)


def run(args: argparse.Namespace, name: str, plan: Plan, do: Do) -> int:
    """Find the prefix, say what will be done, and do it; the exit status."""
    tokens = _prefix.tokens_of(args)
    _prefix.check_namespace(args)
    with reached(args.socket_dir) as owner:
        prefix = _prefix.named(owner, args, tokens)
        found = Found.of(owner, prefix)
        says, shown = plan(found), found.to_json()
        if not says:
            nothing = f"nothing of these {plural(len(tokens), 'token')} is cached"
            return _server.act(args, name, shown, nothing, None)
        return _server.act(args, name, shown, says, lambda: do(owner, prefix))
