"""`hicache warm`: have an engine compute prompts before users ask, so that the cache holds them."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hicache.errors import HicacheError
from hicache.tools.arguments import integer, path
from hicache.tools.commands import _prefix
from hicache.tools.commands._source import tier_name
from hicache.tools.exits import CommandFailed, Exit, UsageProblem
from hicache.tools.found import Found
from hicache.tools.openai_engine import OpenAiEngine, Refused
from hicache.tools.owner import Owner, reached
from hicache.tools.progress import Progress
from hicache.tools.terminal import printable
from hicache.tools.units import format_seconds, plural

MAX_PROMPTS: Final = 1_000_000
"""Prompts of a file."""
MAX_LINE: Final = 64 << 20
"""Characters of one prompt's line."""
SHOWN_FAILURES: Final = 10
"""Failures that are told one by one; of the others the number."""
SETTLE_S: Final = 30.0
"""How long it is waited until the sidecar has the pages that are to be pinned: engines save them behind the answer."""
_EPILOG: Final = """\
FILE has one prompt a line. Where its name ends in .jsonl each line is an object instead:
{"prompt": "..."}, {"prompt": [1, 2, 3]} with token ids, or {"messages": [...]} for a chat.
A single - reads prompts from standard input, as lines that are objects if they begin with {.

examples:
  hicache warm system-prompts.txt --engine http://localhost:8000
  hicache warm handbook.jsonl --engine http://localhost:8000 --sidecar /run/user/1000/hicache --pin
  jq -c '{messages}' chats.json | hicache warm - --engine http://gpu7:30000 --at-once 4

The engine is asked for one token of each, through /v1/completions or /v1/chat/completions. With
--sidecar the command tells what its tiers hold before and after. --pin keeps the prompts there
until `hicache unpin`; it asks the engine which tokens they have (/tokenize), and needs pages that
are found by tokens, as vLLM's connector keeps them.

exit status: 0 all were computed, and pinned if that was asked for; 1 some were not, or no engine
answers; 2 bad usage, before anything was asked
"""

Prompt = dict[str, Any]
"""{"prompt": text or token ids} or {"messages": [...]}."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Sends prompts through an engine that speaks the OpenAI API, so that they are cached before anybody asks."
    )
    parser.epilog = _EPILOG
    parser.add_argument("file", type=path, metavar="FILE", help="prompts, one a line")
    parser.add_argument("--engine", required=True, metavar="URL", help="where the engine listens")
    parser.add_argument("--model", metavar="NAME", help="which model (default: the only one that is served)")
    parser.add_argument("--api-key-file", type=path, metavar="FILE", help="a file with the engine's key")
    parser.add_argument("--at-once", type=integer(1, 64), default=1, metavar="N",
                        help="prompts under way (default 1: what prompts share is then computed once)")  # fmt: skip
    parser.add_argument("--retries", type=integer(0, 20), default=3, metavar="N",
                        help="how often a call that fails by chance is repeated (default 3)")  # fmt: skip
    parser.add_argument("--timeout", type=integer(1, 86_400), default=600, metavar="SECONDS",
                        help="how long one call may take (default 600)")  # fmt: skip
    parser.add_argument("--sidecar", type=path, metavar="DIR", help="a sidecar's socket directory, to tell what it has")
    parser.add_argument("--pin", action="store_true", help="keep the prompts in the sidecar")
    parser.add_argument("--namespace", metavar="HEX", help="with --pin, the beginning of the engine's namespace")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    if args.sidecar is None and (args.pin or args.namespace is not None):
        raise UsageProblem("--pin and --namespace need --sidecar DIR")
    if args.namespace is not None and not args.pin:
        raise UsageProblem("--namespace is given together with --pin")
    _prefix.check_namespace(args)
    engine = OpenAiEngine(args.engine, key=_key(args), timeout_s=args.timeout, retries=args.retries)
    prompts = _prompts(args.file)
    if args.sidecar is None:
        return _warm(args, engine, prompts, None)
    with reached(args.sidecar) as owner:
        return _warm(args, engine, prompts, owner)


@dataclass(slots=True)
class _Told:
    """What became of the prompts."""

    done: list[Prompt] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    failures: list[tuple[int, str]] = field(default_factory=list)
    """The line of each, and why."""


def _warm(
    args: argparse.Namespace, engine: OpenAiEngine, prompts: Sequence[tuple[int, Prompt]], owner: Owner | None
) -> int:
    model = args.model or _only(engine.models())
    before = _held(owner)
    began = time.monotonic()
    told = _computed(engine, model, prompts, args.at_once)
    seconds = time.monotonic() - began
    pinned = _pinned(args, engine, model, told, owner) if args.pin and owner is not None else None
    after = _held(owner)
    if args.json:
        print(json.dumps(_to_json(args, model, len(prompts), told, seconds, before, after, pinned), indent=2))
    else:
        for line in _lines(len(prompts), told, seconds, before, after, pinned):
            print(line)
    is_pinned = pinned is None or pinned["prompts"] == len(told.done)
    return Exit.OK if not told.failures and is_pinned else Exit.FAILED


def _computed(
    engine: OpenAiEngine, model: str, prompts: Sequence[tuple[int, Prompt]], at_once: int
) -> _Told:
    """Have the prompts computed, in order where one is under way at a time."""
    told, progress = _Told(), Progress()
    with ThreadPoolExecutor(at_once, "hicache-warm") as threads:
        calls = {threads.submit(engine.compute, model, prompt): (line, prompt) for line, prompt in prompts}
        try:
            for number, call in enumerate(as_completed(calls), start=1):
                line, prompt = calls[call]
                try:
                    usage = call.result()
                except Refused as refusal:
                    told.failures.append((line, str(refusal)))
                else:
                    told.done.append(prompt)
                    told.prompt_tokens += usage.prompt_tokens
                    if usage.cached_tokens is not None:
                        told.cached_tokens = (told.cached_tokens or 0) + usage.cached_tokens
                progress("prompts", number, len(prompts))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            engine.close()
            raise
        finally:
            progress.end()
    told.failures.sort()
    return told


def _pinned(
    args: argparse.Namespace, engine: OpenAiEngine, model: str, told: _Told, owner: Owner
) -> dict[str, int]:
    """Pin what was computed, once the sidecar has it: how many prompts are kept in all their whole pages, and how many
    tokens of all."""
    num_prompts = num_tokens = 0
    give_up_at = time.monotonic() + SETTLE_S
    for prompt in told.done:
        try:
            tokens = engine.tokens(model, prompt)
            kept, wanted = _pin(owner, args, tokens, give_up_at)
        except (Refused, HicacheError, CommandFailed) as problem:
            raise CommandFailed(f"{plural(num_prompts, 'prompt')} pinned, then: {problem}") from None
        num_tokens += kept
        num_prompts += kept >= wanted
    return {"prompts": num_prompts, "tokens": num_tokens}


def _pin(owner: Owner, args: argparse.Namespace, tokens: Sequence[int], give_up_at: float) -> tuple[int, int]:
    """Pin one prompt; how many tokens are kept, and how many are in its whole pages."""
    page_size = int(owner.stats["layout"]["page_size"])
    wanted = len(tokens) // page_size * page_size
    while True:
        try:
            prefix = _prefix.named(owner, args, tokens)
        except CommandFailed:
            # What was the first of its namespace may not have come yet.
            if time.monotonic() >= give_up_at or owner.stats["namespaces"]:
                raise
            found = 0
        else:
            found = Found.of(owner, prefix).num_tokens
            if found >= wanted or time.monotonic() >= give_up_at:
                return owner.pin(prefix), wanted
        time.sleep(0.2)
        owner.stats = owner.inspect()


def _held(owner: Owner | None) -> dict[str, Any] | None:
    """Pages that each tier of the sidecar holds, and the tokens that were asked of it and found."""
    if owner is None:
        return None
    said = owner.inspect()
    counters = said["counters"]
    return {
        "pages": {str(name): int(tier["used_pages"]) for name, tier in said["tiers"].items()},
        "tokens_asked": int(counters.get("tokens_asked", 0)),
        "tokens_found": sum(int(count) for count in counters.get("tokens_by_tier", {}).values()),
    }


def _only(models: Sequence[str]) -> str:
    if len(models) == 1:
        return models[0]
    if not models:
        raise CommandFailed("the engine serves no model")
    listed = ", ".join(printable(name, 60) for name in models[:8]) + (", …" if len(models) > 8 else "")
    raise CommandFailed(f"the engine serves {len(models)} models; name one with --model: {listed}")


# -- prompts ----------------------------------------------------------------------------------------------------------


def _key(args: argparse.Namespace) -> str:
    if args.api_key_file is None:
        return ""
    try:
        key = str(args.api_key_file.read_text()).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(f"--api-key-file: {printable(os.fspath(args.api_key_file))}: {_why(error)}") from None
    if not key or not key.isascii() or not key.isprintable():
        raise UsageProblem(f"--api-key-file: {printable(os.fspath(args.api_key_file))} has no key on a single line")
    return key


def _prompts(file: Path) -> list[tuple[int, Prompt]]:
    """All prompts of a file, each with its line. Raises `UsageProblem` for the first that is none."""
    name = printable(os.fspath(file))
    try:
        if os.fspath(file) == "-":
            lines = list(_lines_of(sys.stdin))
        else:
            with file.open(encoding="utf-8") as opened:
                lines = list(_lines_of(opened))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(f"{name}: {_why(error)}") from None
    prompts: list[tuple[int, Prompt]] = []
    for number, line in lines:
        if len(line) > MAX_LINE:
            raise UsageProblem(f"{name}: line {number} has more than {MAX_LINE:,} characters")
        is_object = file.suffix == ".jsonl" or (os.fspath(file) == "-" and line.startswith("{"))
        try:
            prompts.append((number, _object(line) if is_object else {"prompt": line}))
        except ValueError as problem:
            raise UsageProblem(f"{name}: line {number} {problem}") from None
        if len(prompts) > MAX_PROMPTS:
            raise UsageProblem(f"{name}: there are more than {MAX_PROMPTS:,} prompts")
    if not prompts:
        raise UsageProblem(f"{name}: there are no prompts")
    return prompts


def _lines_of(opened: Any) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers, each read no further than is looked at."""
    number = 0
    while line := opened.readline(MAX_LINE + 2):
        number += 1
        if line.strip():
            yield number, line.rstrip("\r\n")


def _object(line: str) -> Prompt:
    """The prompt that an object says. Raises `ValueError` with the rest of a sentence."""
    try:
        said = json.loads(line)
    except ValueError as error:
        raise ValueError(f"is no JSON: {printable(str(error), 80)}") from None
    if not isinstance(said, dict) or len(said.keys() & {"prompt", "messages"}) != 1 or len(said) != 1:
        raise ValueError('is not an object with "prompt" or "messages" alone')
    if isinstance(messages := said.get("messages"), list) and messages:
        if not all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in messages):
            raise ValueError("has a message without a role")
        return said
    prompt = said.get("prompt")
    is_ids = isinstance(prompt, list) and all(type(each) is int and 0 <= each < 1 << 31 for each in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise ValueError("has neither text, nor token ids, nor messages")
    return said


def _why(error: OSError | UnicodeDecodeError) -> str:
    return f"is not text: {error.reason}" if isinstance(error, UnicodeDecodeError) else str(error.strerror)


# -- what is told -----------------------------------------------------------------------------------------------------


def _lines(
    num_prompts: int,
    told: _Told,
    seconds: float,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    pinned: Mapping[str, int] | None,
) -> Iterator[str]:
    """The text form."""
    for line, why in told.failures[:SHOWN_FAILURES]:
        yield f"line {line} failed: {why}"
    if len(told.failures) > SHOWN_FAILURES:
        yield f"{len(told.failures) - SHOWN_FAILURES:,} more failed"
    cached = "" if told.cached_tokens is None else f", {told.cached_tokens:,} of them found cached by the engine"
    yield (
        f"{len(told.done):,} of {plural(num_prompts, 'prompt')} computed: {plural(told.prompt_tokens, 'token')} in "
        f"{format_seconds(seconds)}{cached}"
    )
    if before is not None and after is not None:
        found = after["tokens_found"] - before["tokens_found"]
        asked = after["tokens_asked"] - before["tokens_asked"]
        for name, pages in after["pages"].items():
            had = before["pages"].get(name, 0)
            yield f"sidecar, {tier_name(name, 5).strip()}: {plural(pages, 'page')}, {had:,} before"
        yield f"sidecar: {found:,} of {asked:,} tokens that it was asked for meanwhile were found"
    if pinned is not None:
        yield f"pinned: {plural(pinned['tokens'], 'token')}, all of {plural(pinned['prompts'], 'prompt')}"


def _to_json(
    args: argparse.Namespace,
    model: str,
    num_prompts: int,
    told: _Told,
    seconds: float,
    before: Mapping[str, Any] | None,
    after: Mapping[str, Any] | None,
    pinned: Mapping[str, int] | None,
) -> dict[str, Any]:
    """The stable form, as its schema says."""
    return {
        "format": "hicache-warm", "version": 1, "engine": args.engine, "model": model, "prompts": num_prompts,
        "computed": len(told.done), "prompt_tokens": told.prompt_tokens, "cached_tokens": told.cached_tokens,
        "seconds": seconds, "failures": [{"line": line, "why": why} for line, why in told.failures],
        "sidecar": None if before is None else {"before": before, "after": after}, "pinned": pinned,
    }  # fmt: skip
