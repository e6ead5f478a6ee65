"""`hicache doctor DIR`: what lies in a store's directory, what is damaged, what a start would bring back."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache.tools.exits import Exit, UsageProblem
from hicache.tools.progress import Progress
from hicache.tools.terminal import Colour, Style, pad, printable

if TYPE_CHECKING:
    from hicache.tools.doctor import Check

JSON_FORMAT: Final = "hicache-doctor"
_DESCRIPTION: Final = """\
Looks at the directory of an NVMe tier and says what lies there: format version, lock,
sizes, segments, logs, what is damaged, and what a start would bring back. Works on
directories that are damaged, foreign, of another version or in use. Of a tier with
several directories it looks at one, and says what needs the others. Creates and alters
nothing, unless --repair is given.
"""
_EPILOG: Final = """\
--repair first copies every file to a new directory (--copy) and compares the copy. Then
it opens the store, which mends its files, reads all pages, and frees the slots of those
that do not verify. Nobody may use the store meanwhile.

exit status: 0 nothing is damaged; 1 something is; 2 bad usage, nothing was altered
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("directory", type=Path, metavar="DIR", help="the directory of an NVMe tier")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--verify", action="store_true", help="read every page and check it")
    parser.add_argument("--repair", action="store_true", help="free what does not verify; needs --copy")
    parser.add_argument("--copy", type=Path, metavar="DIR", help="where --repair first copies everything; a new name")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    name = printable(os.fspath(args.directory))
    if args.repair != (args.copy is not None):
        raise UsageProblem("--repair and --copy DIR go together: nothing is repaired without a copy aside")
    if not args.directory.is_dir():
        raise UsageProblem(f"{name} is not a directory")

    from hicache.tiers.nvme import inspect_directory
    from hicache.tools import doctor

    shown = Progress()
    if args.repair:
        report = inspect_directory(args.directory)
        doctor.check_repair(report, args.copy)
        doctor.copy_aside(args.directory, args.copy, shown)
        num_freed = doctor.repair(report, shown)
        shown.end()
        print(f"{name}: copied to {printable(os.fspath(args.copy))}; {num_freed:,} slots freed", file=sys.stderr)
    report = inspect_directory(
        args.directory, verify=args.verify or args.repair, progress=lambda done, total: shown("reading", done, total)
    )
    shown.end()
    checks = doctor.diagnose(report, args.directory.stat())
    healthy = doctor.is_healthy(checks)
    if args.json:
        print(json.dumps({
            "format": JSON_FORMAT, "version": 1, "path": os.fspath(args.directory), "healthy": healthy,
            "checks": [check.to_json() for check in checks],
        }, indent=2))  # fmt: skip
    else:
        print("\n".join([name, *lines(checks, Style.of(sys.stdout))]))
    return Exit.OK if healthy else Exit.FAILED


def lines(checks: "list[Check]", style: Style) -> list[str]:
    """The text form: a line for each check, and below it what can be done."""
    colours = {"ok": Colour.GOOD, "warn": Colour.WARN, "fail": Colour.BAD}
    width = max(len(check.subject) for check in checks)
    shown = []
    for check in checks:
        verdict = style.paint(pad(check.verdict.value, 4), colours[check.verdict.value])
        shown.append(f"  {verdict}  {pad(check.subject, width)}  {check.says}")
        if check.mend:
            arrow = "→" if style.unicode else "->"
            shown.append(f"  {pad('', 4)}  {pad('', width)}  {style.paint(f'{arrow} {check.mend}', Colour.DIM)}")
    return shown
