"""Real request traces, read into one form: when a prompt came and which blocks it has.

Known forms, told apart by their first record; each may be compressed with gzip (a name that ends in `.gz`):

    mooncake   one JSON object a request: timestamp (ms), input_length, output_length, hash_ids (chained block ids)
    sessions   one JSON object a session: session, block_size, requests [{t, in, out, h: [[first id, count], ...]}];
               `t` in seconds since the session's start; sessions start one after the other, `stagger_s` apart
    ragpulse   one JSON object a request: timestamp (s), hash_ids by component; token counts of the components lie in
               the file of the same name that ends in `_chunks`, next to it
    azure      CSV with TIMESTAMP, ContextTokens, GeneratedTokens: arrivals and lengths, nothing to reuse

A problem names the file, the line and the reason (`BadTrace`). Nothing of a file is given before all of it was read.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any, Final

from hicache.errors import BadRequest

BLOCK_OF_RAGPULSE: Final = 16
"""Tokens of a block into which ragpulse's components are laid out."""
TOKENS_MAX: Final = 1 << 24
"""Most tokens of one prompt."""
COMPONENTS: Final = {
    "sys_prompt": "sys_prompt",
    "passages_ids": "passage",
    "history": "history",
    "web_search": "web_search",
    "user_input": "user_input",
}
"""Components of a ragpulse prompt in their order, and the kind under which their lengths are listed."""


class BadTrace(BadRequest):
    """A trace cannot be read. Raised by `read_trace` alone."""

    def __init__(self, path: Path, line: int | None, reason: str) -> None:
        self.path, self.line, self.problem = path, line, reason
        super().__init__("trace", f"{path}{'' if line is None else f', line {line}'}: {reason}")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt."""

    time_s: float
    """Seconds since the trace's first second, never before the previous request's."""
    num_tokens: int
    """Of the prompt's blocks; the last one holds what is left of a multiple of the block size."""
    num_output_tokens: int
    blocks: tuple[int, ...]
    """Chained ids from 0 on: equal id means equal whole prefix. Empty where a trace names none."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace in memory."""

    name: str
    form: str
    """"mooncake", "sessions", "ragpulse" or "azure"."""
    block_tokens: int
    """Tokens of a block; 0 without blocks."""
    requests: tuple[Request, ...]
    num_skipped: int
    """Lines that were left out because they were bad."""


class _Chain:
    """Gives (id of the block before, key) pairs ids of their own."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, object], int] = {}

    def path(self, keys: Iterable[object]) -> tuple[int, ...]:
        path, above, ids = [], -1, self._ids
        for key in keys:
            above = ids.setdefault((above, key), len(ids))
            path.append(above)
        return tuple(path)


class _Bad(Exception):
    """One line is bad."""


def read_trace(
    path: Path,
    *,
    skip_bad: bool = False,
    sort: bool = False,
    regroup: int = 1,
    stagger_s: float = 120.0,
    sessions_max: int | None = None,
) -> Trace:
    """Read a trace of any known form.

    Args:
        path: the file.
        skip_bad: leave bad lines out and count them, instead of raising.
        sort: put requests in the order of their times; without it, a time before the previous one's is bad.
        regroup: blocks of a session trace that make one block here.
        stagger_s: seconds between the starts of two sessions; each session's own times count from there.
        sessions_max: read no more sessions than that.

    Raises `BadTrace` for a file that cannot be read, is of no known form, is cut short, or (unless `skip_bad`) has a
    line that is not what its form says or whose time is negative or before the previous one's. Cut gzip, an unknown
    form and a file without a single good line are errors in any case.
    """
    lines = _lines(path)
    first = next((text for _, text in lines if text.strip()), "")
    if not first:
        raise BadTrace(path, None, "is empty")
    if first.startswith("TIMESTAMP,"):
        return _azure(path, lines, skip_bad, sort)
    try:
        head = json.loads(first)
    except ValueError:
        head = None
    fields = set(head) if isinstance(head, dict) else set()
    if {"session", "block_size", "requests"} <= fields:
        return _sessions(path, lines, skip_bad, sort, regroup, stagger_s, sessions_max)
    if {"timestamp", "hash_ids"} <= fields and isinstance(head["hash_ids"], list):
        return _mooncake(path, lines, skip_bad, sort)
    if {"timestamp", "hash_ids"} <= fields and isinstance(head["hash_ids"], dict):
        return _ragpulse(path, lines, skip_bad, sort)
    raise BadTrace(path, 1, "is of no known form: mooncake, sessions, ragpulse (JSON lines) or azure (CSV)")


def _lines(path: Path) -> list[tuple[int, str]]:
    """The lines that are not empty, numbered from 1."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            return [(number, text) for number, text in enumerate(file, 1) if text.strip()]
    except EOFError:
        raise BadTrace(path, None, "its gzip data is cut short") from None
    except (gzip.BadGzipFile, zlib.error) as problem:
        raise BadTrace(path, None, f"is not whole gzip data: {problem}") from None
    except UnicodeDecodeError as problem:
        raise BadTrace(path, None, f"is not UTF-8 text (byte {problem.start})") from None
    except OSError as problem:
        raise BadTrace(path, None, problem.strerror or str(problem)) from None


class _Reader:
    """Goes over lines and keeps the order of time."""

    def __init__(self, path: Path, skip_bad: bool, sort: bool) -> None:
        self.path, self.skip_bad, self._sort = path, skip_bad, sort
        self.num_skipped = 0
        self._latest = 0.0

    def bad(self, line: int, reason: str) -> None:
        """A line is bad: count it, or raise."""
        if not self.skip_bad:
            raise BadTrace(self.path, line, reason)
        self.num_skipped += 1

    def in_order(self, time_s: float) -> float:
        """Check that a request's time is not before the previous one's."""
        if time_s < self._latest and not self._sort:
            raise _Bad(f"its time, {time_s:g} s, is before the previous one's, {self._latest:g} s")
        self._latest = time_s
        return time_s

    def finish(self, form: str, block_tokens: int, requests: list[Request]) -> Trace:
        if not requests:
            raise BadTrace(self.path, None, f"has no good line ({self.num_skipped} bad)")
        requests.sort(key=lambda request: request.time_s)
        name = self.path.name.removesuffix(".gz").rsplit(".", 1)[0]
        return Trace(name, form, block_tokens, tuple(requests), self.num_skipped)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise _Bad("is not JSON") from None
    if not isinstance(found, dict):
        raise _Bad("is not a JSON object")
    return found


def _number(record: Mapping[str, Any], field: str) -> float:
    value = record.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise _Bad(f"{field}: {value!r} is not a number from 0 on")
    return float(value)


def _count(record: Mapping[str, Any], field: str, least: int = 0) -> int:
    value = record.get(field)
    if type(value) is not int or not least <= value <= TOKENS_MAX:
        raise _Bad(f"{field}: {value!r} is not within {least} to {TOKENS_MAX}")
    return value


def _ids(value: object, field: str) -> list[int]:
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
        raise _Bad(f"{field}: is not a list of ids")
    return value


def _mooncake(path: Path, lines: list[tuple[int, str]], skip_bad: bool, sort: bool) -> Trace:
    block_tokens = 512
    reader, ids, requests = _Reader(path, skip_bad, sort), _Chain(), list[Request]()
    for number, text in lines:
        try:
            record = _object(text)
            time_s = _number(record, "timestamp") / 1e3
            num_tokens = _count(record, "input_length", 1)
            num_output = _count(record, "output_length")
            blocks = _ids(record.get("hash_ids"), "hash_ids")
            if len(blocks) != -(-num_tokens // block_tokens):
                raise _Bad(f"hash_ids: {len(blocks)} blocks of {block_tokens} do not hold {num_tokens} tokens")
            requests.append(Request(reader.in_order(time_s), num_tokens, num_output, ids.path(blocks)))
        except _Bad as problem:
            reader.bad(number, str(problem))
    return reader.finish("mooncake", block_tokens, requests)


def _sessions(
    path: Path,
    lines: list[tuple[int, str]],
    skip_bad: bool,
    sort: bool,
    regroup: int,
    stagger_s: float,
    sessions_max: int | None,
) -> Trace:
    reader, ids, requests = _Reader(path, skip_bad, sort), _Chain(), list[Request]()
    block_tokens = 0
    for index, (number, text) in enumerate(lines[:sessions_max]):
        try:
            record = _object(text)
            size = _count(record, "block_size", 1)
            if block_tokens not in (0, size):
                raise _Bad(f"block_size: {size} is not {block_tokens}, that of the sessions before")
            block_tokens = size
            found: list[Request] = []
            latest = 0.0
            if not isinstance(record["requests"], list):
                raise _Bad("requests: is not a list")
            for request in record["requests"]:
                if not isinstance(request, dict):
                    raise _Bad("requests: one is not a JSON object")
                time_s = _number(request, "t")
                if time_s < latest:
                    raise _Bad(f"t: {time_s:g} s is before the previous one's, {latest:g} s")
                latest = time_s
                blocks = _runs(request.get("h"))
                num_tokens = min(_count(request, "in"), len(blocks) * size)
                # Ids are a session's own, unless it names its agent: those sessions share one numbering.
                scope = () if "agent" in record else (index,)
                keys = ((*scope, *blocks[at : at + regroup]) for at in range(0, len(blocks), regroup))
                found.append(Request(index * stagger_s + time_s, num_tokens, _count(request, "out"), ids.path(keys)))
            requests += found
        except _Bad as problem:
            reader.bad(number, str(problem))
    return reader.finish("sessions", block_tokens * regroup, requests)


def _runs(value: object) -> list[int]:
    """Block ids from runs of consecutive ones."""
    if not isinstance(value, list):
        raise _Bad("h: is not a list of runs")
    total = 0
    for run in value:
        if not (isinstance(run, list) and len(run) == 2 and all(type(each) is int and each >= 0 for each in run)):
            raise _Bad(f"h: {run!r} is not a first id and a count")
        total += run[1]
    if total > TOKENS_MAX:
        raise _Bad(f"h: {total} blocks are above {TOKENS_MAX}")
    return list(chain.from_iterable(range(first, first + count) for first, count in value))


def _ragpulse(path: Path, lines: list[tuple[int, str]], skip_bad: bool, sort: bool) -> Trace:
    lengths = _component_lengths(path)
    reader, ids, requests = _Reader(path, skip_bad, sort), _Chain(), list[Request]()
    for number, text in lines:
        try:
            record = _object(text)
            # This form writes its times as text.
            with_time = {"timestamp": _parse_float(record.get("timestamp"))}
            time_s = _number(with_time, "timestamp")
            num_output = _count(record, "output_length")
            components = record.get("hash_ids")
            if not isinstance(components, dict):
                raise _Bad("hash_ids: is not an object of components")
            parts: list[tuple[str, int, int]] = []
            for field, kind in COMPONENTS.items():
                for each in _ids(components.get(field) or [], f"hash_ids.{field}"):
                    parts.append((kind, each, lengths.get((kind, each), 0)))
            num_tokens = sum(length for _, _, length in parts)
            if not 1 <= num_tokens <= TOKENS_MAX:
                raise _Bad(f"hash_ids: {num_tokens} tokens are not within 1 to {TOKENS_MAX}")
            blocks = ids.path(_laid_out(parts))
            requests.append(Request(reader.in_order(time_s), num_tokens, num_output, blocks))
        except _Bad as problem:
            reader.bad(number, str(problem))
    return reader.finish("ragpulse", BLOCK_OF_RAGPULSE, requests)


def _parse_float(value: object) -> object:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _component_lengths(path: Path) -> dict[tuple[str, int], int]:
    stem, dot, suffix = path.name.partition(".")
    beside = path.with_name(f"{stem}_chunks{dot}{suffix}")
    lengths: dict[tuple[str, int], int] = {}
    for number, text in _lines(beside):
        try:
            record = _object(text)
            kind = record.get("kind")
            if not isinstance(kind, str):
                raise _Bad("kind: is no text")
            lengths[kind, _count(record, "id")] = _count(record, "token_length")
        except _Bad as problem:
            raise BadTrace(beside, number, str(problem)) from None
    return lengths


def _laid_out(parts: list[tuple[str, int, int]]) -> list[object]:
    """Keys of the blocks into which components are cut, one after the other: what each block's tokens come from."""
    keys: list[object] = []
    current: list[tuple[str, int, int, int]] = []
    room = BLOCK_OF_RAGPULSE
    for kind, number, length in parts:
        offset = 0
        while offset < length:
            taken = min(room, length - offset)
            current.append((kind, number, offset, taken))
            offset += taken
            room -= taken
            if not room:
                keys.append(tuple(current))
                current, room = [], BLOCK_OF_RAGPULSE
    if current:
        keys.append(tuple(current))
    return keys


def _azure(path: Path, lines: list[tuple[int, str]], skip_bad: bool, sort: bool) -> Trace:
    reader, requests = _Reader(path, skip_bad, sort), list[Request]()
    start: datetime | None = None
    for number, text in lines[1:]:
        try:
            try:
                stamp, num_tokens, num_output = next(csv.reader([text]))
                at = datetime.fromisoformat(stamp[:26])
                record = {"ContextTokens": int(num_tokens), "GeneratedTokens": int(num_output)}
            except ValueError:
                raise _Bad("is not a time and two numbers") from None
            start = start or at
            time_s = (at - start).total_seconds()
            if time_s < 0:
                raise _Bad("its time is before the first one's")
            context, generated = _count(record, "ContextTokens", 1), _count(record, "GeneratedTokens")
            requests.append(Request(reader.in_order(time_s), context, generated, ()))
        except _Bad as problem:
            reader.bad(number, str(problem))
    return reader.finish("azure", 0, requests)
