"""`hicache top`: a running server, watched."""

import argparse
import codecs
import json
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from hicache.tools.arguments import integer
from hicache.tools.commands import _server
from hicache.tools.exits import Exit, UsageProblem
from hicache.tools.owner import reached
from hicache.tools.terminal import MIN_WIDTH, Style
from hicache.tools.top_view import Choices, frame
from hicache.tools.watching import Watch

RESIZE_S: Final = 0.2
"""How soon a terminal that was resized is drawn anew."""
JSON_PREFIXES: Final = 50
MAX_TYPED: Final = 1024
"""Bytes that are read of what was typed at once."""
_EPILOG: Final = """\
keys: q quits, s sorts the prefixes by uses, last use, bytes or leases, / filters them by namespace,
tenant, tier or first token ids (Esc clears), p pauses.

Uses are requests that were given a prefix since the server was started. In a large cache the
server takes a while to go through all prefixes, a moment at a time.

Tiers are bars; lanes show what they move now, their queues, and what they moved before, one
column an interval; tokens are shown by where they came from. Pages that were "kept elsewhere" left
a tier while another one had them, a slower one most of the time; "lost" ones left the cache.

examples:
  hicache top
  hicache top --interval 5 --socket-dir /run/hicache
  hicache top --json --count 10 | jq .hit_rate

exit status: 0 quit; 1 no server answers, or it ended; 2 bad usage
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = "Shows what a running server holds and does, and keeps showing it."
    parser.epilog = _EPILOG
    _server.add_server(parser)
    parser.add_argument("--interval", type=integer(1, 3600), default=1, metavar="SECONDS",
                        help="how often the server is asked (default 1)")  # fmt: skip
    parser.add_argument("--count", type=integer(1, 1 << 30), metavar="N",
                        help="end after so many intervals (with --json: default 1, one object a line)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    if not args.json and not (sys.stdin.isatty() and Style.of(sys.stdout).live):
        raise UsageProblem("standard input and output have to be a terminal; there is --json")
    with reached(args.socket_dir) as owner:
        watch = Watch(owner, time.monotonic())
        if args.json:
            for _ in range(args.count or 1):
                time.sleep(args.interval)
                watch.look(time.monotonic())
                print(json.dumps(watch.to_json(JSON_PREFIXES)), flush=True)
        else:
            _draw(watch, f"server at {owner.directory}", args.interval, args.count)
    return Exit.OK


def _draw(watch: Watch, name: str, interval: float, count: int | None) -> None:
    """Draw until `q`, or `count` intervals have passed."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    # Asked before `Live` puts itself in the place of standard output.
    console, choices, style = Console(highlight=False), Choices(), Style.of(sys.stdout)
    with _keys_at_once(), Live(console=console, screen=True, auto_refresh=False) as live:

        def draw() -> tuple[int, int]:
            size = console.size
            lines = frame(watch, choices, name, replace(style, width=max(size.width, MIN_WIDTH)), size.height)
            texts = [Text.from_ansi(line, no_wrap=True, overflow="crop") for line in lines]
            live.update(Group(*texts), refresh=True)
            return size.width, size.height

        drawn, due, keys = draw(), time.monotonic() + interval, Keys()
        while count is None or count > 0:
            pressed = keys.read(min(max(0.0, due - time.monotonic()), RESIZE_S))
            if not all(map(choices.press, pressed)):
                return
            is_due = time.monotonic() >= due
            if is_due:
                due = time.monotonic() + interval
                count = count - 1 if count is not None else None
                if not choices.is_paused:
                    watch.look(time.monotonic())
            watch.choose(choices.order, choices.filter)
            if is_due or pressed or tuple(console.size) != drawn:
                drawn = draw()


class Keys:
    """What is typed, of which a character may be several bytes."""

    def __init__(self) -> None:
        self._decoder: Final = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self, within_s: float) -> str:
        """What is typed until something is, or for a while; empty for nothing. The end of the input is a `q`."""
        ready, _, _ = select.select([sys.stdin], [], [], within_s)
        if not ready:
            return ""
        # Past Python's own buffer, of which `select` knows nothing.
        data = os.read(sys.stdin.fileno(), MAX_TYPED)
        return self._decoder.decode(data) if data else "q"


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Within the block keys are given as they are pressed, and not shown; Ctrl-C interrupts as ever."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
