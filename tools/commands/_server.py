"""What the commands that ask a running server share: which server, and how an action is told."""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from hicache.tools.arguments import path
from hicache.tools.exits import Exit

EXITS: Final = "exit status: 0 done; 1 it was not, or no server answers; 2 bad usage"


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the server's directory and `--json`."""
    parser.add_argument("--socket-dir", type=path, metavar="DIR",
                        help="where the server's sockets are (default: as for hicache serve)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add `--dry-run`."""
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an action."""

    done: dict[str, Any]
    """The same for programs."""
    says: str
    is_ok: bool = True


def act(
    args: argparse.Namespace, name: str, plan: dict[str, Any], says: str, do: Callable[[], Outcome] | None
) -> int:
    """Say what will be done, do it unless that was not wanted, and say what was: the exit status.

    The stable form is `{"format": "hicache-NAME", "version": 1, "dry_run", "plan": {...}, "done": {...} or null}`.
    `do` is None where nothing can be done, which `says` explains.
    """
    if not args.json:
        print(("would " if args.dry_run else "will ") + says if do is not None else says, flush=True)
    outcome = do() if do is not None and not args.dry_run else None
    if args.json:
        done = outcome.done if outcome is not None else None
        shown = {"format": f"hicache-{name}", "version": 1, "dry_run": args.dry_run, "plan": plan, "done": done}
        print(json.dumps(shown, indent=2))
    elif outcome is not None:
        print(outcome.says)
    return Exit.OK if do is not None and (outcome is None or outcome.is_ok) else Exit.FAILED
