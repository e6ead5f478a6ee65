"""`hicache unpin`: let a pinned prefix leave the cache again."""

import argparse
from typing import TYPE_CHECKING, Final

from hicache.tools.commands import _prefix_command
from hicache.tools.commands._server import Outcome
from hicache.tools.found import Found
from hicache.tools.owner import Owner
from hicache.tools.units import plural

if TYPE_CHECKING:
    from hicache.service.proto import hicache_pb2 as pb

_NOTES: Final = """\
example:
  hicache unpin --prompt "You are a helpful assistant." --tokenizer ./model

A pin is named by exactly the tokens that `hicache pin` was given.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    description = "Ends a pin; the pages stay until the cache needs their room."
    _prefix_command.configure(parser, description, _NOTES)


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    return _prefix_command.run(args, "unpin", _plan, _unpin)


def _plan(found: Found) -> str:
    return f"end the pin of exactly these {plural(found.num_asked, 'token')}; pins hold {found.pinned_tokens:,} of them"


def _unpin(owner: Owner, prefix: "pb.NamedPrefix") -> Outcome:
    was_pinned = owner.unpin(prefix)
    told = "it is no longer pinned" if was_pinned else "there was no pin of exactly these tokens"
    return Outcome({"was_pinned": was_pinned}, told, was_pinned)
