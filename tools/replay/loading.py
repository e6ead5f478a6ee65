"""What `hicache replay` is asked to replay: read from a trace, or made up."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any, Final

from hicache.errors import BadRequest
from hicache.tools.exits import UsageProblem
from hicache.tools.replay.generators import DEFAULT_REQUESTS, WORKLOADS, Workload, generate
from hicache.tools.replay.readers import DEFAULT_BLOCK, SESSION_GAP_S, Request, Trace, whole_blocks
from hicache.tools.replay.report import Load
from hicache.tools.terminal import printable

TOTAL_BLOCKS_MAX: Final = 20_000_000
"""Most blocks of a load, all prompts together: some 4 bytes each while it is replayed, 40 while MIN is worked out."""


def load(args: argparse.Namespace) -> tuple[Load, int, list[Request]]:
    """Read or make all requests that the command line asks for: what it is, the tokens of a block, and the requests in
    whole blocks. Raises `UsageProblem`, before anything is shown."""
    if args.synthetic is not None:
        workload, block_tokens, seed = _workload(args), args.block or DEFAULT_BLOCK, args.seed or 0
        made = generate(workload, seed=seed, num_requests=args.limit or DEFAULT_REQUESTS, block_tokens=block_tokens)
        requests = _bounded(made, block_tokens)
        return _describe(requests, args.synthetic, "synthetic", seed=seed), block_tokens, requests
    try:
        trace = Trace(
            args.trace, block_tokens=args.block, chunks=args.chunks, sort=args.sort, skip_bad=args.skip_bad,
            session_gap_s=SESSION_GAP_S if args.session_gap is None else args.session_gap,
        )  # fmt: skip
        requests = _bounded(islice(trace, args.limit), trace.block_tokens)
    except OSError as problem:
        raise UsageProblem(f"{printable(str(args.trace))}: {problem.strerror or problem}") from None
    if not requests:
        raise UsageProblem(f"{printable(str(args.trace))}: there is no request in it")
    load = _describe(requests, printable(args.trace.name, 60), trace.format, num_bad=trace.num_bad)
    return load, trace.block_tokens, requests


def _describe(
    requests: Sequence[Request], name: str, kind: str, *, num_bad: int = 0, seed: int | None = None
) -> Load:
    return Load(
        name, kind, len(requests), sum(each.input_tokens for each in requests),
        sum(len(each.blocks) for each in requests), sum(each.document_tokens for each in requests), num_bad, seed,
    )  # fmt: skip


def _bounded(requests: Iterable[Request], block_tokens: int) -> list[Request]:
    """The whole blocks of a load, which must not be too many."""
    kept, num_blocks = [], 0
    for request in requests:
        kept.append(whole_blocks(request, block_tokens))
        num_blocks += len(request.blocks)
        if num_blocks > TOTAL_BLOCKS_MAX:
            raise UsageProblem(f"the load has more than {TOTAL_BLOCKS_MAX:,} blocks; --block makes them longer, "
                               "--limit takes fewer requests")  # fmt: skip
    return kept


def _workload(args: argparse.Namespace) -> Workload:
    """A workload with the numbers that were asked for."""
    workload = WORKLOADS[args.synthetic]
    numbers = asdict(workload)
    changes: dict[str, Any] = {}
    for each in args.numbers:
        name, _, text = each.partition("=")
        if name not in numbers:
            listed = ", ".join(f"{known}={value:g}" for known, value in numbers.items())
            raise UsageProblem(f"--set: unknown name {printable(name, 40)!r}; {args.synthetic} has {listed}")
        try:
            changes[name] = type(numbers[name])(text)
        except ValueError:
            kind = "a whole number" if isinstance(numbers[name], int) else "a number"
            raise UsageProblem(f"--set: {name}: {printable(text, 40)!r} is not {kind}") from None
    try:
        return replace(workload, **changes)
    except BadRequest as problem:
        raise UsageProblem(f"--set: {problem}") from None
