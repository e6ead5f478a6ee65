"""`hicache bench NAME`: figures beside baselines that are measured in the same run."""

import argparse
import json
import sys
from pathlib import Path
from typing import Final

from hicache.tools.exits import CommandFailed, Exit, UsageProblem
from hicache.tools.terminal import Style
from hicache.tools.units import format_bytes

BENCHES: Final = {"tree": "match, insert and eviction in the HiRadixTree"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Measures one part of hicache and prints each figure with its baseline from the same run, their ratio, the\n"
        "bound that no code could beat, and the goal. Ratios travel to other machines, times do not."
    )
    parser.epilog = "benches:\n" + "\n".join(f"  {name:<8}{text}" for name, text in BENCHES.items())
    parser.add_argument("name", metavar="NAME", help="what to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures in FILE")
    parser.add_argument("--scale", type=int, default=1, metavar="N",
                        help="divide the loads by N, to try the code, not to measure it (default 1)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    if args.name not in BENCHES:
        raise UsageProblem(f"unknown bench {args.name!r}; known are {', '.join(BENCHES)}")
    if args.scale < 1:
        raise UsageProblem(f"--scale: {args.scale} is below 1")
    if args.json is not None and not args.json.parent.is_dir():
        raise UsageProblem(f"--json: there is no directory {args.json.parent}")

    from hicache.tools.bench import results, tree

    style = Style.of(sys.stdout)
    machine = results.machine()
    print(f"{args.name}: {machine['cpu']}, {machine['cores']} cores, {format_bytes(machine['memory_bytes'])}, "
          f"Python {machine['python']}, Linux {machine['kernel']}")  # fmt: skip
    print(results.HEADING, flush=True)
    rows: list[results.Row] = []

    def report(row: results.Row) -> None:
        rows.append(row)
        print(results.line(row, style), flush=True)

    tree.run(report, tree.Scale(divisor=args.scale))
    if args.json is not None:
        text = json.dumps({"bench": args.name, "machine": machine, "rows": [row.to_json() for row in rows]}, indent=1)
        try:
            args.json.write_text(text + "\n", encoding="utf-8")
        except OSError as problem:
            raise CommandFailed(f"{args.json}: {problem.strerror}") from problem
    # Goals are for the full loads on an idle machine; a run that misses one has still done its work.
    return Exit.OK
