"""How a prefix is named on the command line: tokens or text, and the namespace that it is looked for in."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hicache.tools.arguments import utf8
from hicache.tools.exits import CommandFailed, UsageProblem
from hicache.tools.owner import Owner
from hicache.tools.terminal import printable
from hicache.tools.tokenizer import opened

if TYPE_CHECKING:
    from hicache.service.proto import hicache_pb2 as pb

MAX_TOKENS: Final = 1 << 24
"""Token ids that a prefix may have."""
MAX_ID: Final = (1 << 31) - 1
HELP: Final = """\
TOKENS are token ids from the beginning of the prompt, separated by commas or spaces; a
single - reads them from standard input. The namespace is the digest that `hicache tree`
shows, or as much of its beginning as no other one has; it may be left out where the server
keeps only one.
"""


def add_prefix(parser: argparse.ArgumentParser) -> None:
    """Add the ways of naming a prefix."""
    parser.add_argument("tokens", nargs="*", metavar="TOKENS", help="token ids of the prefix")
    parser.add_argument("--prompt", type=utf8, metavar="TEXT", help="the prefix as text; needs --tokenizer")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="the directory of a tokenizer.json")
    parser.add_argument("--namespace", metavar="HEX", help="the beginning of the namespace's digest")


def tokens_of(args: argparse.Namespace) -> list[int]:
    """The token ids that were named. Raises `UsageProblem`."""
    if bool(args.tokens) == (args.prompt is not None):
        raise UsageProblem("name the prefix by TOKENS or by --prompt TEXT")
    if args.prompt is not None:
        if args.tokenizer is None:
            raise UsageProblem("--prompt needs --tokenizer DIR")
        ids: list[int] = opened(args.tokenizer).encode(args.prompt).ids
        return ids
    try:
        text = sys.stdin.read(12 * MAX_TOKENS) if args.tokens == ["-"] else " ".join(args.tokens)
    except UnicodeDecodeError:
        raise UsageProblem("TOKENS: standard input is no text") from None
    words = text.replace(",", " ").split()
    if not words:
        raise UsageProblem("TOKENS: there are none")
    if len(words) > MAX_TOKENS:
        raise UsageProblem(f"TOKENS: {len(words):,} are more than {MAX_TOKENS:,}")
    return [_token(word) for word in words]


def _token(word: str) -> int:
    if not word.isascii() or not word.isdecimal() or len(word) > 10 or int(word) > MAX_ID:
        raise UsageProblem(f"TOKENS: '{printable(word, 40)}' is no token id from 0 to {MAX_ID:,}")
    return int(word)


def check_namespace(args: argparse.Namespace) -> None:
    """Raise `UsageProblem` for what is no beginning of a digest."""
    text = args.namespace
    if text is not None and (not text or len(text) > 64 or text.strip("0123456789abcdef")):
        raise UsageProblem(f"--namespace: '{printable(text, 80)}' is no beginning of a digest")


def named(owner: Owner, args: argparse.Namespace, tokens: Sequence[int]) -> "pb.NamedPrefix":
    """The prefix as it travels. Raises `CommandFailed` where the namespace is none or several of the server's."""
    from hicache.service import wire
    from hicache.service.proto import hicache_pb2 as pb

    return pb.NamedPrefix(namespace=bytes.fromhex(_namespace(owner, args.namespace)), tokens=wire.pack_int32(tokens))


def _namespace(owner: Owner, beginning: str | None) -> str:
    known: list[dict[str, Any]] = owner.stats["namespaces"]
    found = [str(each["namespace"]) for each in known if str(each["namespace"]).startswith(beginning or "")]
    if len(found) == 1:
        return found[0]
    if not known:
        raise CommandFailed("nothing is cached yet: the server has no namespaces")
    listed = ", ".join(f"{each['namespace'][:16]} ({_whose(each)})" for each in known[:8])
    listed += ", …" if len(known) > 8 else ""
    if beginning is None:
        raise CommandFailed(f"the server keeps {len(known)} namespaces; name one with --namespace: {listed}")
    raise CommandFailed(f"{'several' if found else 'none'} of the server's namespaces begin so: {listed}")


def _whose(namespace: dict[str, Any]) -> str:
    model = printable(str(namespace["model"]), 24)
    return f"{model}, tenant {printable(str(namespace['tenant']), 24)}" if namespace["tenant"] else model
