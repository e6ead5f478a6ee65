"""`hicache explain`: where a prompt's tokens are, why the rest is not, and what using it takes."""

import argparse
import json
import sys
from typing import Final

from hicache.tools.commands import _prefix, _server
from hicache.tools.exits import Exit
from hicache.tools.found import Found
from hicache.tools.owner import reached
from hicache.tools.terminal import TIER_COLOURS, Colour, Style, pad, printable
from hicache.tools.units import format_seconds, plural

JSON_FORMAT: Final = "hicache-explain"
_EPILOG: Final = f"""\
{_prefix.HELP}
examples:
  hicache explain 1,2,3,4,5,6,7,8
  hicache explain --prompt "You are a helpful assistant." --tokenizer ./model
  hicache explain - --json < tokens.txt

It changes nothing, and counts as no use. Times are predicted from what the lanes have moved and
from what engines told of their prefill; "-" where nobody has told yet. What is said is what comes
of an engine that asks for the whole prompt and holds no other pages: all that is cached is lent
to it, as far as one session may have pages, also where computing would be faster; the line that
begins with "so" then says that, and an engine may acquire less.

exit status: 0 answered, whatever is cached; 1 no server answers, or it has no such namespace;
             2 bad usage
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Says span by span which tier has a prompt's tokens, and what an engine would load or compute."
    parser.epilog = _EPILOG
    _prefix.add_prefix(parser)
    _server.add_server(parser)


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    tokens = _prefix.tokens_of(args)
    _prefix.check_namespace(args)
    with reached(args.socket_dir) as owner:
        found = Found.of(owner, _prefix.named(owner, args, tokens))
    if args.json:
        print(json.dumps({"format": JSON_FORMAT, "version": 1, **found.to_json()}, indent=2))
    else:
        print("\n".join(lines(found, Style.of(sys.stdout))))
    return Exit.OK


def lines(found: Found, style: Style) -> list[str]:
    """The text form."""
    shown = [style.paint(f"cached: {found.in_words()}", Colour.TITLE)]
    for span in found.spans:
        colour = TIER_COLOURS.get(span.where, Colour.COMPUTED)
        extent = f"{span.start:,} to {span.stop - 1:,}"
        shown.append(f"  {extent:>21}  {style.paint(pad(span.where, 6), colour)}{span.in_words()}")
    shown.append(f"  so {plural(found.taken_tokens, 'token')} would be taken from the cache: {printable(found.reason)}")
    for name, seconds in (
        ("loading from NVMe", found.load_s), ("computing what is not taken", found.compute_s),
        ("computing all of it", found.recompute_s),
    ):  # fmt: skip
        shown.append(f"  {name:<27}{'-' if seconds is None else format_seconds(seconds):>12}")
    if found.pinned_tokens:
        shown.append(f"  {plural(found.pinned_tokens, 'token')} of it are pinned: they stay in some tier")
    if found.priority or found.retained_s:
        kept = f", retained for {format_seconds(found.retained_s)}" if found.retained_s else ""
        shown.append(f"  hints: priority {found.priority}{kept}")
    if found.published:
        shown.append("  another tenant has published it: acquiring copies it")
    return shown
