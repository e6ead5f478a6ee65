"""`hicache bench NAME`: figures beside baselines that are measured in the same run."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache.tools.exits import CommandFailed, Exit, UsageProblem
from hicache.tools.terminal import Style, printable
from hicache.tools.units import format_bytes

if TYPE_CHECKING:
    from hicache.tools.bench.results import Note, Report


@dataclass(frozen=True, slots=True)
class Bench:
    """One of the things that can be measured."""

    summary: str
    prepare: Callable[[argparse.Namespace], "Callable[[Report, Note], None]"]
    """From options to what measures; raises `UsageProblem` before anything is touched. Loads what it needs when it is
    called."""


def _tree(args: argparse.Namespace) -> "Callable[[Report, Note], None]":
    from hicache.tools.bench import tree

    scale = tree.Scale(divisor=args.scale)
    return lambda report, note: tree.run(report, scale)


def _nvme(args: argparse.Namespace) -> "Callable[[Report, Note], None]":
    from hicache.tools.bench import nvme

    plan = nvme.Plan(args.dir, args.scale)
    nvme.check(plan)
    return lambda report, note: nvme.run(report, note, plan)


def _restart(args: argparse.Namespace) -> "Callable[[Report, Note], None]":
    from hicache.tools.bench import restart

    plan = restart.Plan(args.dir, args.scale)
    restart.check(plan)
    return lambda report, note: restart.run(report, note, plan)


def _movers(args: argparse.Namespace) -> "Callable[[Report, Note], None]":
    from hicache.tools.bench import movers

    scale = movers.Scale(divisor=args.scale)
    return lambda report, note: movers.run(report, note, scale)


def _codec(args: argparse.Namespace) -> "Callable[[Report, Note], None]":
    from hicache.tools.bench import codec

    return lambda report, note: codec.run(report, note, divisor=args.scale)


def _attention(args: argparse.Namespace) -> "Callable[[Report, Note], None]":
    from hicache.tools.bench import attention
    from hicache.tools.bench.scratch import check_directory

    check_directory(args.dir, attention.NVME_BYTES)
    return lambda report, note: attention.run(report, note, args.dir, attention.Scale(args.scale))


def _policy(args: argparse.Namespace) -> "Callable[[Report, Note], None]":
    from hicache.tools.bench import policy

    if args.traces is None:
        raise UsageProblem("policy needs --traces DIR, the directory of the traces to replay")
    plan = policy.Plan(args.traces, args.scale)
    policy.check(plan)
    return lambda report, note: policy.run(report, note, plan)


def _service(args: argparse.Namespace) -> "Callable[[Report, Note], None]":
    from hicache.tools.bench import service

    plan = service.Plan(args.dir, args.scale)
    service.check(plan)
    return lambda report, note: service.run(report, note, plan)


def _cli(args: argparse.Namespace) -> "Callable[[Report, Note], None]":
    from hicache.tools.bench import cli

    if not args.dir.is_dir():
        raise UsageProblem(f"--dir: there is no directory {args.dir}")
    return lambda report, note: cli.run(report, note, args.dir, divisor=args.scale)


def _engine(args: argparse.Namespace) -> "Callable[[Report, Note], None]":
    from hicache.tools.bench import engine

    plan = engine.Plan(args.dir, args.python, args.scale)
    engine.check(plan)
    return lambda report, note: engine.run(report, note, plan)


BENCHES: Final = {
    "tree": Bench("match, insert and eviction in the HiRadixTree", _tree),
    "movers": Bench("copies that hide behind computing, are asked for early, and are given up", _movers),
    "nvme": Bench("pages in and out of the NVMe tier, beside direct I/O without it", _nvme),
    "restart": Bench("how long until a cache that was killed is warm again", _restart),
    "policy": Bench("what eviction keeps of real workloads, beside LRU, S3-FIFO, LRFU and MIN", _policy),
    "attention": Bench("attention over a context larger than its device tier, and over some of its pages", _attention),
    "service": Bench("what the sidecar costs beside a bare gRPC echo, and beside memcpy", _service),
    "cli": Bench("what starting a command costs beside a bare interpreter", _cli),
    "engine": Bench("what a real vLLM gains by the sidecar, and what it costs where nothing is reused", _engine),
    "codec": Bench("codecs on real KV: how small, how exact, how fast, and when they pay", _codec),
}


_EXAMPLES: Final = """\
examples:
  hicache bench nvme --dir /data --json nvme.json
  hicache bench cli --scale 20

exit status: 0 measured, goals reached or not; 1 it failed, or FILE could not be written; 2 bad usage
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Measures one part of hicache and prints each figure with its baseline from the same run, their ratio, the\n"
        "bound that no code could beat, and the goal. Ratios travel to other machines, times do not."
    )
    listed = "\n".join(f"  {name:<11}{bench.summary}" for name, bench in BENCHES.items())
    parser.epilog = f"benches:\n{listed}\n\n{_EXAMPLES}"
    parser.add_argument("name", metavar="NAME", help="what to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures in FILE")
    parser.add_argument("--dir", type=Path, metavar="DIR", default=Path(tempfile.gettempdir()),
                        help="measure the file system of DIR; nothing stays there (default %(default)s)")  # fmt: skip
    parser.add_argument("--traces", type=Path, metavar="DIR", help="policy: the directory of the traces to replay")
    parser.add_argument("--python", type=Path, metavar="FILE", default=Path(sys.executable),
                        help="engine: the interpreter that has vLLM and hicache (default: this one)")  # fmt: skip
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
    measure = BENCHES[args.name].prepare(args)

    from hicache.tools.bench import results

    style = Style.of(sys.stdout)
    machine = results.machine()
    print(f"{args.name}: {machine['cpu']}, {machine['cores']} cores, {format_bytes(machine['memory_bytes'])}, "
          f"Python {machine['python']}, Linux {machine['kernel']}")  # fmt: skip
    print(results.HEADING, flush=True)
    rows: list[results.Row] = []

    def report(row: results.Row) -> None:
        rows.append(row)
        print(results.line(row, style), flush=True)

    def note(text: str) -> None:
        # Not among the rows: who keeps those in a file sees here that work goes on.
        print(f"{args.name}: {printable(text)}", file=sys.stderr, flush=True)

    measure(report, note)
    if args.json is not None:
        kept = {"bench": args.name, "machine": machine, "rows": [row.to_json() for row in rows]}
        text = json.dumps({"format": "hicache-bench", "version": 1, **kept}, indent=1)
        try:
            args.json.write_text(text + "\n", encoding="utf-8")
        except OSError as problem:
            raise CommandFailed(f"{args.json}: {problem.strerror}") from problem
    # Goals are for the full loads on an idle machine; a run that misses one has still done its work.
    return Exit.OK
