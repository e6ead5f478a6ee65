"""`hicache replay`: what a cache of given sizes would have done with a recorded or a made-up load."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache.tools.exits import CommandFailed, Exit, UsageProblem
from hicache.tools.terminal import Style, printable
from hicache.tools.units import parse_bytes

if TYPE_CHECKING:
    from hicache.tools.replay.machine import Machine
    from hicache.tools.replay.readers import Request
    from hicache.tools.replay.report import Comparison

POLICIES: Final = ("lru", "slru", "s3-fifo", "lrfu", "value")
WORKLOADS: Final = ("chat", "few-shot", "rag", "multi-turn")
WRITE_POLICIES: Final = ("demote-on-evict", "write-through", "write-through-selective")
ADMISSIONS: Final = ("always", "second-touch", "predicted")
ROUTERS: Final = ("prefix", "round-robin")
STEP_S: Final = 5e-3
"""Seconds that a step of the simulated engine costs beside its tokens."""
REQUESTS_MAX: Final = 10_000_000
NODES_MAX: Final = 64
PLOT_SUFFIXES: Final = (".svg", ".png")
_TOKEN_UNITS: Final = {"tok": 1, "ktok": 10**3, "mtok": 10**6, "gtok": 10**9}
_ZERO: Final = {"device": "; 0 for a sidecar, which has none", "nvme": "; 0 for none"}
_CURVE_FACTORS: Final = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2)
"""Capacities of a plot, in parts of what all tiers have together."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.usage = "hicache replay (TRACE | --synthetic KIND) [options]"
    parser.description = (
        "Runs the cache's own tree, policies and movers over a load, in virtual time and on tiers that keep no bytes.\n"
        "Prints hit rates by tier, bytes by lane, simulated times to first token (TTFT), and how far below MIN, which\n"
        "knows the future, the cache stayed."
    )
    parser.epilog = (
        "TRACE is one JSON a request (what `hicache trace record` writes; mooncake: hash_ids; ragpulse: chunks, whose\n"
        "lengths lie beside it), one JSON a session (sessions: block_size, requests), or CSV with\n"
        "TIMESTAMP,ContextTokens,GeneratedTokens (azure), plain or in gzip. SIZE is bytes (64GiB) or tokens (500ktok,\n"
        "4Mtok).\n\n"
        "The engine: a request that has its place computes what the cache lacks in steps of up to 8,192 tokens, at\n"
        "the same speed whatever the others do, and then has its first token; its pages are held until then.\n\n"
        "With --nodes every node has such an engine and tiers of the given sizes. A prompt goes where it costs\n"
        "least: the tokens of it that a node does not know, and what the node was given to compute beyond the average\n"
        "of all; beside it stands what one node after the other comes to.\n\n"
        "With --device 0 the cache is a sidecar's, whose pages engines copy: give the sizes of `hicache serve`.\n\n"
        "examples:\n"
        "  hicache replay requests.jsonl --device 0 --host 64GiB --nvme 1TiB --compare lru,value\n"
        "  hicache replay --synthetic chat --host 100ktok --nvme 0 --plot chat.svg\n\n"
        "exit status: 0 replayed; 1 a picture could not be written; 2 bad usage, or TRACE cannot be read"
    )
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help="file of requests")
    load = parser.add_argument_group("load")
    load.add_argument("--synthetic", choices=WORKLOADS, help="a made-up load in place of a trace")
    load.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="numbers",
                      help="change a number of the made-up load, turns=12 say; a wrong name lists them")  # fmt: skip
    load.add_argument("--seed", type=int, metavar="N", help="of the made-up load (default 0)")
    load.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    load.add_argument("--pace", type=float, default=1.0, metavar="X", help="let X times as many arrive in a second")
    load.add_argument("--block", type=int, metavar="TOKENS",
                      help="tokens of a page, a multiple of the trace's own (default that; 64 without)")  # fmt: skip
    load.add_argument("--session-gap", type=float, metavar="S",
                      help="seconds between the beginnings of sessions (default 120)")  # fmt: skip
    load.add_argument(
        "--chunks", type=Path, metavar="FILE", help="lengths of chunks (default NAME_chunks beside TRACE)"
    )
    load.add_argument(
        "--sort", action="store_true", help="put requests in order of time; else a wrong order is an error"
    )
    load.add_argument("--skip-bad", action="store_true", help="leave bad lines out and count them")
    cache = parser.add_argument_group("cache and machine")
    for tier, default in (("device", "40GiB"), ("host", "256GiB"), ("nvme", "1TiB")):
        cache.add_argument(f"--{tier}", default=default, metavar="SIZE", help=f"the {tier} tier (default {default})"
                           + _ZERO.get(tier, ""))  # fmt: skip
    cache.add_argument("--token-bytes", default="128KiB", metavar="BYTES", help="KV of a token (default 128KiB)")
    cache.add_argument("--policy", default="value", choices=POLICIES, help="evicts in all tiers (default value)")
    cache.add_argument("--compare", metavar="A,B,...", help="several policies, in one table")
    cache.add_argument("--write-policy", default="demote-on-evict", choices=WRITE_POLICIES,
                       help="when pages are written to NVMe (default demote-on-evict)")  # fmt: skip
    cache.add_argument("--exclusive", action="store_true", help="a page leaves NVMe once it is in the host")
    cache.add_argument("--admission", default="always", choices=ADMISSIONS,
                       help="which pages may be written to NVMe (default always)")  # fmt: skip
    cache.add_argument("--hints", action="store_true", help="each request says whether a later one goes on from it")
    cache.add_argument("--nodes", type=int, default=1, metavar="N", help="so many nodes behind one router (default 1)")
    cache.add_argument("--link", default="25GB", metavar="BYTES", help="a second, each way (default 25GB)")
    cache.add_argument("--nvme-read", default="6GB", metavar="BYTES", help="a second (default 6GB)")
    cache.add_argument("--nvme-write", default="3GB", metavar="BYTES", help="a second (default 3GB)")
    cache.add_argument("--prefill", type=float, default=20_000.0, metavar="N",
                       help="tokens a second at the beginning of a prompt (default 20000)")  # fmt: skip
    cache.add_argument("--concurrency", type=int, default=64, metavar="N", help="most requests at a time (default 64)")
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--plot", type=Path, metavar="FILE",
                       help="draw hit rates over capacities, one tier alone: .svg, or .png with Pillow")  # fmt: skip
    shown.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    policies = _policies(args)
    _check(args)
    sizes = {tier: _size(f"--{tier}", getattr(args, tier), zero=tier != "host") for tier in ("device", "host", "nvme")}
    rates = {name: _bytes(f"--{name.replace('_', '-')}", getattr(args, name))
             for name in ("token_bytes", "link", "nvme_read", "nvme_write")}  # fmt: skip

    from hicache.tools.demo.screen import Screen
    from hicache.tools.replay import report
    from hicache.tools.replay.bound import min_hits
    from hicache.tools.replay.continued import goes_on
    from hicache.tools.replay.loading import load as load_requests
    from hicache.tools.replay.run import replay

    load, block_tokens, requests = load_requests(args)
    machine = _machine(args, block_tokens, sizes, rates)
    hints = goes_on(requests, block_tokens) if args.hints else None
    total = machine.total_pages
    factors = _CURVE_FACTORS if args.plot else ()
    columns = [report.Column(policy, router) for policy in policies for router in _routers(machine)]
    steps = len(requests) * (len(columns) + len(policies) * (1 + len(factors)))
    with Screen(sys.stderr, Style.of(sys.stderr)).bar(steps) as bar:
        replayed = {}
        for column in columns:
            bar.describe(f"{column.label}, the whole cache")
            replayed[column] = replay(
                requests, machine, column.policy, router=column.router or ROUTERS[0], hints=hints, progress=bar.advance
            )
        alone: dict[str, int] = {}
        curves: dict[str, list[tuple[float, float]]] = {}
        for policy in policies:
            bar.describe(f"{policy}, one tier")
            alone[policy] = _found_alone(requests, hints, policy, total, bar.advance)
            for factor in factors:
                capacity = max(1, int(total * factor))
                found = _found_alone(requests, hints, policy, capacity, bar.advance)
                curves.setdefault(policy, []).append((capacity * block_tokens, found / max(1, load.blocks)))
        bar.describe("MIN")
        paths = [request.blocks.tolist() for request in requests]
        for factor in factors:
            capacity = max(1, int(total * factor))
            rate = min_hits(paths, capacity) / max(1, load.blocks)
            curves.setdefault("MIN", []).append((capacity * block_tokens, rate))
        comparison = report.Comparison(
            load, machine, replayed, alone, min_hits(paths, total), curves, is_hinted=args.hints
        )
    if args.plot:
        _draw(args.plot, comparison)
    if args.json:
        print(json.dumps(report.to_json(comparison), indent=2))
    else:
        print("\n".join(report.lines(comparison, Style.of(sys.stdout))))
    return Exit.OK


# -- what was asked for -----------------------------------------------------------------------------------------------


def _policies(args: argparse.Namespace) -> list[str]:
    if args.compare is None:
        return [args.policy]
    names = [name.strip() for name in args.compare.split(",")]
    for name in names:
        if name not in POLICIES:
            raise UsageProblem(f"--compare: unknown policy {printable(name, 40)!r}; known are {', '.join(POLICIES)}")
    if len(set(names)) < len(names):
        raise UsageProblem("--compare: a policy is named twice")
    return names


def _routers(machine: "Machine") -> tuple[str | None, ...]:
    """The routers that are compared; none where there is nothing to choose."""
    return ROUTERS if machine.nodes > 1 else (None,)


def _check(args: argparse.Namespace) -> None:
    """Everything that can be known wrong before a file is looked at."""
    if (args.trace is None) == (args.synthetic is None):
        raise UsageProblem("either TRACE or --synthetic says what to replay (see hicache replay --help)")
    other = {"--set": args.numbers, "--seed": args.seed is not None}
    if args.synthetic is None:
        wrong = [flag for flag, is_given in other.items() if is_given]
        if wrong:
            raise UsageProblem(f"{wrong[0]}: is for --synthetic loads; TRACE says what comes")
    else:
        other = {"--chunks": args.chunks, "--session-gap": args.session_gap is not None, "--sort": args.sort,
                 "--skip-bad": args.skip_bad}  # fmt: skip
        wrong = [flag for flag, is_given in other.items() if is_given]
        if wrong:
            raise UsageProblem(f"{wrong[0]}: is for a TRACE, not for --synthetic loads")
    for flag, value, low, high in (
        ("--limit", args.limit, 1, REQUESTS_MAX), ("--block", args.block, 1, 1 << 16),
        ("--session-gap", args.session_gap, 0, 1e6), ("--pace", args.pace, 1e-3, 1e3),
        ("--prefill", args.prefill, 1, 1e9), ("--concurrency", args.concurrency, 1, 4096),
        ("--seed", args.seed, 0, 1 << 63), ("--nodes", args.nodes, 1, NODES_MAX),
    ):  # fmt: skip
        if value is not None and not low <= value <= high:
            raise UsageProblem(f"{flag}: {value} is not within {low:g} to {high:g}")
    for path in (args.trace, args.chunks):
        if path is not None and not path.is_file():
            problem = "is not a file" if path.exists() else "there is no such file"
            raise UsageProblem(f"{printable(str(path))}: {problem}")
    if args.plot is not None:
        if args.plot.suffix not in PLOT_SUFFIXES:
            raise UsageProblem(f"--plot: {printable(str(args.plot))} does not end in {' or '.join(PLOT_SUFFIXES)}")
        if args.plot.suffix == ".png" and find_spec("PIL") is None:
            raise UsageProblem("--plot: PNG is drawn by Pillow, which is not installed (pip install hicache[plot]); "
                               ".svg needs nothing")  # fmt: skip
        if not args.plot.parent.is_dir():
            raise UsageProblem(f"--plot: there is no directory {printable(str(args.plot.parent))}")


def _bytes(flag: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as problem:
        raise UsageProblem(f"{flag}: {printable(str(problem), 120)}") from None


def _size(flag: str, text: str, *, zero: bool) -> tuple[int, bool]:
    """A size, and whether it is one in tokens."""
    if zero and text.strip() == "0":
        return 0, True
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text.strip()[len(number) :].lower()
    if unit not in _TOKEN_UNITS:
        return _bytes(flag, text), False
    try:
        tokens = float(number) * _TOKEN_UNITS[unit]
    except ValueError:
        tokens = 0.0
    if not 1 <= tokens < 1e15:
        raise UsageProblem(f"{flag}: {printable(text, 40)!r} is not a size such as 64GiB, 500ktok or 4Mtok")
    return int(tokens), True


def _machine(
    args: argparse.Namespace, block_tokens: int, sizes: dict[str, tuple[int, bool]], rates: dict[str, int]
) -> "Machine":
    from hicache.errors import BadRequest
    from hicache.prefill import PrefillCurve
    from hicache.tools.replay.machine import Machine
    from hicache.write_policy import WritePolicy

    token_bytes = rates["token_bytes"]
    pages = {
        tier: amount // (block_tokens if is_tokens else block_tokens * token_bytes)
        for tier, (amount, is_tokens) in sizes.items()
    }
    try:
        for tier in _ZERO:
            if getattr(args, tier).strip() != "0" and not pages[tier]:
                raise BadRequest(f"{tier}_pages", f"holds no page of {block_tokens} tokens; 0 leaves the tier out")
        return Machine(
            block_tokens=block_tokens, token_bytes=token_bytes, device_pages=pages["device"],
            host_pages=pages["host"], nvme_pages=pages["nvme"], link_bandwidth=rates["link"],
            nvme_read_bandwidth=rates["nvme_read"], nvme_write_bandwidth=rates["nvme_write"],
            prefill=PrefillCurve(token_s=1 / args.prefill, attend_s=1e-5 / args.prefill, step_s=STEP_S),
            concurrency=args.concurrency, pace=args.pace, write_policy=WritePolicy(args.write_policy),
            exclusive=args.exclusive, admission=args.admission, nodes=args.nodes,
        )  # fmt: skip
    except BadRequest as problem:
        flag = "--" + problem.field.removesuffix("_pages").replace("_", "-")
        raise UsageProblem(f"{flag}: {problem.problem}") from None


# -- what is found out ------------------------------------------------------------------------------------------------


def _found_alone(
    requests: "Sequence[Request]",
    hints: Sequence[bool] | None,
    policy: str,
    capacity_pages: int,
    progress: Callable[[], None],
) -> int:
    """Blocks that a policy finds in one tier by itself."""
    from hicache.policies import NAMES
    from hicache.tools.replay.blocks import BlockCache

    cache, found = BlockCache(NAMES[policy](capacity_pages), capacity_pages), 0
    for at, request in enumerate(requests):
        returns = None if hints is None else hints[at]
        found += cache.request(request.blocks.tolist(), request.time_s, returns=returns)
        progress()
    return found


def _draw(path: Path, comparison: "Comparison") -> None:
    from hicache.tools.replay.pictures import PICTURES
    from hicache.tools.replay.plot import chart

    load, machine = comparison.load, comparison.machine
    shapes = chart(
        f"{load.name}: blocks found",
        {name: points for name, points in comparison.curves.items() if name != "MIN"},
        bound=comparison.curves["MIN"],
        marked={
            column.policy: (machine.total_pages * machine.block_tokens, each.blocks_found / max(1, load.blocks))
            for column, each in comparison.replayed.items()
            if column.router != ROUTERS[1]
        },
    )
    try:
        path.write_bytes(PICTURES[path.suffix](shapes))
    except OSError as problem:
        raise CommandFailed(f"{printable(str(path))}: {problem.strerror}") from problem
