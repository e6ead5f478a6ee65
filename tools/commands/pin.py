"""`hicache pin`: keep a prefix in the cache."""

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
examples:
  hicache pin --prompt "You are a helpful assistant." --tokenizer ./model
  hicache pin 1,2,3,4,5,6,7,8 --namespace 8a3f --dry-run

A pin lasts until `hicache unpin` with the same tokens, or until the server ends.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    description = "Keeps as much of a prefix as is cached, in whole pages, from leaving the cache."
    _prefix_command.configure(parser, description, _NOTES)


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    return _prefix_command.run(args, "pin", _plan, _pin)


def _plan(found: Found) -> str:
    return f"pin {found.in_words()}" if found.num_tokens else ""


def _pin(owner: Owner, prefix: "pb.NamedPrefix") -> Outcome:
    num_tokens = owner.pin(prefix)
    return Outcome({"tokens": num_tokens}, f"pinned {plural(num_tokens, 'token')}", num_tokens > 0)
