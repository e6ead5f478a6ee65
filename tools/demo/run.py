"""The run itself: a real model answers every request through hicache, then some of them again without it."""

import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from hicache import HiCache
from hicache.errors import BadRequest, TierUnavailable
from hicache.service.engines.transformers import TransformersEngine, layout_of
from hicache.tier import TierId
from hicache.tools.demo import report
from hicache.tools.demo.compare import GREEDY, NEAR_TIE, Answer, compare, plain_answer
from hicache.tools.demo.model import load_model, quiet_transformers
from hicache.tools.demo.options import DemoOptions
from hicache.tools.demo.plan import Plan, make_plan
from hicache.tools.demo.process_io import ProcessIO
from hicache.tools.demo.results import TIERS, DemoResult, RequestResult, TierUse, choose_comparisons
from hicache.tools.demo.screen import Bar, Screen
from hicache.tools.demo.sources import Sources
from hicache.tools.exits import CommandFailed, Exit, UsageProblem
from hicache.tools.snapshot import wrap
from hicache.tools.terminal import printable
from hicache.tools.units import plural

REQUEST_TIMEOUT_S: Final = 120.0
"""Longest wait of a request for pages and for room."""


def run_demo(options: DemoOptions, sources: Sources, screen: Screen) -> Exit:
    """Plan, run, compare, report and write what was asked for.

    Raises `UsageProblem` before anything was created, `CommandFailed` and `HicacheError` afterwards.
    """
    try:
        return _run(options, sources, screen)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CommandFailed(f"out of memory: {printable(str(error), 160)}") from error


def _run(options: DemoOptions, sources: Sources, screen: Screen) -> Exit:
    _check_device(options.device)
    with screen.stage("reading the documents"):
        plan = make_plan(options, sources, _nvme_parent(options.nvme_dir))
    with screen.stage(f"loading {printable(plan.files.name)}"):
        model = load_model(plan.files, dtype=getattr(torch, options.dtype), device=options.device)
        _check_model(model, plan)
    result = _empty_result(plan, model)
    screen.print(report.notes(plan.notes, screen.style))
    with _warnings_shown(screen), ExitStack() as stack:
        # Interrupted or not, what is temporary goes with the stack.
        directory = options.nvme_dir or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="hicache-demo-", dir=_nvme_parent(None)))
        )
        answers, snapshot = _answer_all(plan, model, directory, result, screen)
    _compare(plan, model, answers, result, screen)
    screen.print(report.summary(result, screen.style))
    if options.json is not None:
        _write_json(options.json, result.to_json())
    if options.snapshot is not None and snapshot is not None:
        _write_json(options.snapshot, snapshot)
    return Exit.OK if result.ok else Exit.FAILED


def _answer_all(
    plan: Plan, model: Any, directory: Path, result: DemoResult, screen: Screen
) -> tuple[dict[int, Answer], dict[str, Any] | None]:
    """Ask everything through hicache. Returns the answers to compare, by request number, and the snapshot."""
    budgets = plan.budgets
    answers: dict[int, Answer] = {}
    try:
        cache = HiCache.open(
            plan.layout,
            device_bytes=budgets.device_bytes, host_bytes=budgets.host_bytes,
            nvme_dir=directory, nvme_bytes=budgets.nvme_bytes, device=plan.options.device,
        )  # fmt: skip
    except (BadRequest, TierUnavailable) as refusal:
        # Tiers refuse before they touch anything: a directory that others may write to, one in use, too little room.
        raise UsageProblem(printable(str(refusal))) from refusal
    with cache, TransformersEngine(model, cache, tokenizer=plan.prompter.tokenizer) as engine:
        total = len(plan.asks)
        place = f"in {directory}" + ("" if plan.options.nvme_dir else ", removed at the end")
        screen.print(report.header(result, nvme_place=place, num_requests=total, style=screen.style))
        screen.print(report.table_head(screen.style))
        before, began = ProcessIO.now(), time.perf_counter()
        with screen.bar(total) as bar:
            for number in range(1, total + 1):
                answered, answer = _answer(plan, engine, number, bar)
                result.requests.append(answered)
                answers[number] = answer
                # Logits are large: only those are kept that may still be compared.
                keep = choose_comparisons(result.requests, plan.options.compare, plan.options.compare_each)
                answers = {number: answers[number] for number in keep}
                screen.print([report.request_line(answered, total, screen.style)])
                bar.advance()
        result.run_s = time.perf_counter() - began
        after = ProcessIO.now()
        result.device_io = after.since(before) if before is not None and after is not None else None
        _take_stats(cache.stats(), result)
        snapshot = None
        if plan.options.snapshot is not None:
            asked = [(request.titles, prompt) for request, prompt in zip(result.requests, plan.prompts, strict=True)]
            snapshot = wrap(cache.snapshot(), prompts=asked, decode=plan.prompter.text)
    return answers, snapshot


def _answer(plan: Plan, engine: TransformersEngine, number: int, bar: Bar) -> tuple[RequestResult, Answer]:
    ask, question, tokens = plan.asks[number - 1], plan.questions[number - 1], plan.prompts[number - 1]
    titles = tuple(plan.documents[index].document.title for index in ask.documents)

    def prefilling(done: int, of: int) -> None:
        bar.describe(f"request {number}: computed {done:,} of {of:,} tokens")

    bar.describe(f"request {number}: looking up {len(tokens):,} tokens")
    began = time.perf_counter()
    with engine.request(tokens, timeout_s=REQUEST_TIMEOUT_S) as request:
        generation = request.generate(plan.options.max_new_tokens, progress=prefilling, output_logits=True, **GREEDY)
        found = _still_found(request.cached_by_tier, request.num_lost)
    total_s = time.perf_counter() - began
    assert generation.logits is not None
    answered = RequestResult(
        number=number, titles=titles, question=question, prompt_tokens=len(tokens), tokens=found,
        ttft_s=generation.ttft_s, total_s=total_s, answer=plan.prompter.text(generation.tokens),
        answer_tokens=tuple(generation.tokens), oversized=ask.oversized,
    )  # fmt: skip
    return answered, Answer(tuple(generation.tokens), generation.logits.float().cpu())


def _still_found(by_tier: Mapping[TierId, int], num_lost: int) -> dict[str, int]:
    """Tokens by where they were found, without those that turned out damaged, NVMe's first: its pages are verified."""
    found: dict[str, int] = {}
    for tier, count in sorted(by_tier.items(), key=lambda each: TIERS.index(each[0]), reverse=True):
        lost = min(count, num_lost)
        num_lost -= lost
        found[str(tier)] = count - lost
    return found


def _compare(plan: Plan, model: Any, answers: dict[int, Answer], result: DemoResult, screen: Screen) -> None:
    """Answer the chosen requests again with the model alone; the engine is detached by now."""
    screen.print(["", f"  the same model without hicache, from the start, for {len(answers)} of the requests:"])
    began = time.perf_counter()
    with screen.bar(len(answers)) as bar:
        for done, (number, ours) in enumerate(sorted(answers.items()), start=1):
            bar.describe(f"request {number}: {len(plan.prompts[number - 1]):,} tokens from the start")
            plain = plain_answer(model, plan.prompts[number - 1], plan.options.max_new_tokens)
            result.comparisons.append(compare(number, ours, plain, result.tolerance))
            request = result.requests[number - 1]
            screen.print([report.compared_line(request, result.comparisons[-1], done, len(answers), screen.style)])
            bar.advance()
    result.compare_s = time.perf_counter() - began


def _take_stats(stats: dict[str, Any], result: DemoResult) -> None:
    result.bytes_by_lane = {lane: int(values["bytes"]) for lane, values in stats["lanes"].items()}
    result.nvme_streamed_bytes = int(stats["tiers"]["nvme"]["counters"].get("read_layer.bytes", 0))
    result.tiers = {
        tier: TierUse(int(values["capacity_bytes"]), int(values["used_bytes"]))
        for tier, values in stats["tiers"].items()
    }


def _empty_result(plan: Plan, model: Any) -> DemoResult:
    layout, budgets, options = plan.layout, plan.budgets, plan.options
    group = layout.groups[0]
    return DemoResult(
        machine={
            "python": platform.python_version(), "torch": torch.__version__,
            "transformers": quiet_transformers().__version__, "platform": platform.platform(terse=True),
            "cpus": os.cpu_count(), "device": str(model.device),
        },
        model={
            "name": plan.files.name, "dtype": options.dtype, "num_layers": layout.num_layers,
            "num_kv_heads": group.num_kv_heads, "head_dim": group.head_dim, "page_size": layout.page_size,
            "page_bytes": layout.page_bytes, "token_bytes": layout.token_bytes,
        },
        documents=[
            {"title": document.document.title, "tokens": document.num_tokens, "cut_from": document.cut_from}
            for document in plan.documents
        ],
        budgets={
            "device_bytes": budgets.device_bytes, "host_bytes": budgets.host_bytes, "nvme_bytes": budgets.nvme_bytes,
            "working_set_tokens": plan.working_set_tokens,
            "working_set_bytes": plan.working_set_tokens * layout.token_bytes,
        },
        seed=options.seed,
        tolerance=NEAR_TIE[getattr(torch, options.dtype)],
    )  # fmt: skip


def _check_device(device: str) -> None:
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UsageProblem(f"--device: {printable(device)} is not a device such as cpu or cuda:0") from error
    if chosen.type not in ("cpu", "cuda"):
        raise UsageProblem(f"--device: {printable(device)} is neither cpu nor cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        raise UsageProblem(f"--device: there is no {chosen} here: {plural(count, 'CUDA device')}")


def _check_model(model: Any, plan: Plan) -> None:
    try:
        layout = layout_of(model, page_size=plan.layout.page_size)
    except BadRequest as refusal:
        raise UsageProblem(f"--model: {printable(plan.files.name)} {refusal.problem}") from refusal
    if layout != plan.layout:
        raise CommandFailed(f"the model's layout {layout} is not what its configuration says")


def _nvme_parent(nvme_dir: Path | None) -> Path:
    """An existing directory on the file system of the NVMe tier. Without `--nvme-dir` that is `TMPDIR`, else
    `/var/tmp`: `/tmp` lies in memory on many machines, and then nothing would be read from a disk."""
    if nvme_dir is not None:
        return nvme_dir if nvme_dir.is_dir() else nvme_dir.parent
    kept = Path("/var/tmp")  # noqa: S108  # only the parent of a directory of our own
    if not os.environ.get("TMPDIR") and os.access(kept, os.W_OK | os.X_OK):
        return kept
    return Path(tempfile.gettempdir())


class _Remarks(logging.Handler):
    """Shows warnings of the cache as notes among the demo's lines."""

    def __init__(self, screen: Screen) -> None:
        super().__init__(logging.WARNING)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.print(report.notes([printable(record.getMessage())], self._screen.style))


@contextmanager
def _warnings_shown(screen: Screen) -> Iterator[None]:
    logger, handler = logging.getLogger("hicache"), _Remarks(screen)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file such that it is there whole or not at all; devices and pipes are written to as they are."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"
    path = path.resolve()  # a link stays one
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
