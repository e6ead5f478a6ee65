"""`hicache doctor`: how a server and its machine are; with DIR, what lies in a store's directory and is damaged."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Final

from hicache.tools import checks
from hicache.tools.commands import _server as server
from hicache.tools.commands.serve import read_settings
from hicache.tools.exits import Exit, UsageProblem
from hicache.tools.progress import Progress
from hicache.tools.terminal import Style, printable

JSON_FORMAT: Final = "hicache-doctor"
_DESCRIPTION: Final = """\
Without DIR, looks at a server and its machine: packages, settings, sockets, health, tiers,
limits, GPU. Each line is ok, warn or fail, with what can be done about it.

With DIR, looks at the directory of an NVMe tier and says what lies there: format version, lock,
sizes, segments, logs, what is damaged, and what a start would bring back. Works on
directories that are damaged, foreign, of another version or in use. Of a tier with
several directories it looks at one, and says what needs the others. Creates and alters
nothing, unless --repair is given.
"""
_EPILOG: Final = """\
examples:
  hicache doctor
  hicache doctor --config /etc/hicache.toml
  hicache doctor /data/hicache --verify

--repair first copies every file to a new directory (--copy) and compares the copy. Then
it opens the store, which mends its files, reads all pages, and frees the slots of those
that do not verify. Nobody may use the store meanwhile.

exit status: 0 no line is a fail; 1 one is; 2 bad usage, nothing was altered
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="the directory of an NVMe tier")
    server.add_server(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help="check a server's settings and disks, too")
    parser.add_argument("--verify", action="store_true", help="read every page and check it")
    parser.add_argument("--repair", action="store_true", help="free what does not verify; needs --copy")
    parser.add_argument("--copy", type=Path, metavar="DIR", help="where --repair first copies everything; a new name")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    if args.directory is None:
        return _server(args)
    if args.socket_dir is not None or args.config is not None:
        raise UsageProblem("--socket-dir and --config are about a server: leave DIR out")
    return _store(args)


def _server(args: argparse.Namespace) -> int:
    if args.verify or args.repair or args.copy is not None:
        raise UsageProblem("--verify, --repair and --copy are about the directory of an NVMe tier: name DIR")
    settings = read_settings(args.config) if args.config is not None else None
    from hicache.service.sockets import default_directory
    from hicache.tools import doctor_server

    named = settings.get("socket_dir") if settings is not None else None
    directory = args.socket_dir or (Path(named) if isinstance(named, str) else default_directory())
    return _told(args, directory, doctor_server.diagnose(directory, settings))


def _store(args: argparse.Namespace) -> int:
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
    return _told(args, args.directory, doctor.diagnose(report, args.directory.stat()))


def _told(args: argparse.Namespace, directory: Path, found: list[checks.Check]) -> int:
    healthy = checks.is_healthy(found)
    if args.json:
        print(json.dumps({
            "format": JSON_FORMAT, "version": 1, "path": os.fspath(directory), "healthy": healthy,
            "checks": [check.to_json() for check in found],
        }, indent=2))  # fmt: skip
    else:
        print("\n".join([printable(os.fspath(directory)), *checks.lines(found, Style.of(sys.stdout))]))
    return Exit.OK if healthy else Exit.FAILED
