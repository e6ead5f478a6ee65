"""Requests out of trace files: five formats, told apart by their content, plain or gzip, read line by line.

    recorded   one JSON a request, as `hicache trace record` writes it (`writing.py`): that of mooncake with a
               `block_size`, and with numbers of blocks of up to 53 bits
    mooncake   one JSON a request: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of blocks of 512 tokens
    sessions   one JSON a session: `session`, `block_size`, `requests` of `t` (s since it began), `in`, `out` and `h`,
               block ids in runs `[first, count]`. Ids count within their session, except in a file whose sessions name
               their `agent`: there all sessions share them.
    ragpulse   one JSON a request: `timestamp` (s), `output_length`, `session_id`, `hash_ids` of chunks by component. A
               second file gives the chunks' lengths, one JSON a chunk: `id`, `kind`, `token_length`.
    azure      CSV `TIMESTAMP,ContextTokens,GeneratedTokens`: arrivals and lengths. No two prompts share anything.

An equal id means an equal whole prefix in what comes out: of recorded, mooncake and session files because it does in
the file, of ragpulse because its ids are chained here. What a reader keeps is one line, the sessions that overlap
(sessions), and the ids of distinct blocks (recorded, ragpulse).
"""

import gzip
import heapq
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache.tokens import TOKEN_MAX
from hicache.tools.exits import UsageProblem
from hicache.tools.replay.writing import ID_MAX
from hicache.tools.terminal import printable

Blocks = npt.NDArray[np.int32]
Chunk = tuple[str, int]
"""Kind and id of a chunk of a ragpulse prompt."""
BlockKey = tuple[int, tuple[Chunk, ...], int]

LINE_BYTES_MAX: Final = 64 << 20
"""Longest line that is read."""
BLOCKS_MAX: Final = 1 << 20
"""Most blocks of one prompt, as the file counts them."""
BLOCK_TOKENS_MAX: Final = 1 << 16
"""Most tokens of a block."""
TOKENS_MAX: Final = 1 << 28
"""Most tokens of one prompt or answer."""
SECONDS_MAX: Final = 1e10
MOONCAKE_BLOCK: Final = 512
DEFAULT_BLOCK: Final = 64
"""Tokens of a block where a format has none of its own and none are asked for."""
SESSION_GAP_S: Final = 120.0
"""Default seconds between the beginnings of two sessions, where a trace does not tell when they began."""
_COMPONENTS: Final = {
    "sys_prompt": "sys_prompt", "passages_ids": "passage", "history": "history", "web_search": "web_search",
    "user_input": "user_input",
}  # fmt: skip
"""Components of a ragpulse prompt, in the order of the prompt, and the kind that their chunks have."""
_DOCUMENT_KINDS: Final = ("sys_prompt", "passage")
_AZURE_HEADER: Final = "TIMESTAMP,ContextTokens,GeneratedTokens"
_GZIP_MAGIC: Final = b"\x1f\x8b"


class BadTrace(UsageProblem):
    """A trace cannot be read: the message gives the file, the line, and what is wrong there."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{printable(str(path))}: line {line}: {printable(reason, 200)}")


class _BadLine(Exception):
    """What is wrong with a line."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt, as it arrives."""

    time_s: float
    """Seconds since the trace began; never less than that of the request before."""
    blocks: Blocks
    """`[num_blocks]` ids of its blocks, each standing for the whole prefix that it ends. The last one may be partly
    filled; tokens behind the blocks are never found again."""
    input_tokens: int
    output_tokens: int
    session: str = ""
    """Whose request it is, where the trace says so."""
    turn: int = 0
    """Which one of its session, from 0 on."""
    document_tokens: int = 0
    """Tokens at the beginning of the prompt that are instructions and documents, where the source tells them apart."""


def whole_blocks(request: Request, block_tokens: int) -> Request:
    """A prompt without its last block where that is partly filled: what a cache of whole pages keeps of it."""
    return replace(request, blocks=request.blocks[: request.input_tokens // block_tokens])


class Trace:
    """A trace file. Iterating over it reads it, each time from its beginning.

    Args:
        path: the file.
        block_tokens: tokens of a block as it comes out: a multiple of the file's own where it has one. None for the
            file's own, or `DEFAULT_BLOCK`.
        session_gap_s: seconds between the beginnings of two sessions (sessions).
        max_sessions: only the first so many sessions are read, at least one (sessions); None for all.
        chunks: the file of chunk lengths (ragpulse); None for the one beside the trace, `NAME_chunks.jsonl[.gz]`.
        sort: take requests whose times are out of order, and put them in order; this reads all of the file first.
            Without it they are bad.
        skip_bad: leave bad lines out and count them, instead of raising `BadTrace`. What comes after the place where
            gzip data is cut or damaged cannot be had.

    Raises `BadTrace`, here for what the first line shows and while it is read for the rest; `OSError`.
    """

    def __init__(
        self,
        path: Path,
        *,
        block_tokens: int | None = None,
        session_gap_s: float = SESSION_GAP_S,
        max_sessions: int | None = None,
        chunks: Path | None = None,
        sort: bool = False,
        skip_bad: bool = False,
    ) -> None:
        self.path: Final = path
        self.num_bad = 0
        """Lines left out so far, of the last time it was read."""
        self._sort = sort
        self._skip_bad = skip_bad
        self._session_gap_s = session_gap_s
        self._max_sessions = max_sessions
        number, first = self._first()
        self.format: Final = _find_format(first)
        """"recorded", "mooncake", "sessions", "ragpulse" or "azure"."""
        if not self.format:
            known = "recorded, mooncake, sessions, ragpulse and azure"
            raise BadTrace(path, number, f"is of no known format; known are {known}")
        own_tokens = 0
        if self.format == "mooncake":
            own_tokens = MOONCAKE_BLOCK
        elif self.format in ("recorded", "sessions"):
            try:
                own_tokens = _whole(_parse_json(first), "block_size", 1, BLOCK_TOKENS_MAX)
            except _BadLine as problem:
                raise BadTrace(path, number, str(problem)) from None
        self.block_tokens: Final = block_tokens or own_tokens or DEFAULT_BLOCK
        """Tokens of each block."""
        self._own_tokens: Final = own_tokens or self.block_tokens
        if self.block_tokens % self._own_tokens:
            raise BadTrace(
                path, number, f"blocks of {self.block_tokens} tokens are no multiple of its own {own_tokens}"
            )
        self._chunk_lengths = self._read_chunks(chunks) if self.format == "ragpulse" else {}
        self._num_bad_chunks = self.num_bad

    def __iter__(self) -> Iterator[Request]:
        self.num_bad = self._num_bad_chunks
        parsers = {
            "recorded": self._recorded, "mooncake": self._mooncake, "sessions": self._sessions,
            "ragpulse": self._ragpulse, "azure": self._azure,
        }  # fmt: skip
        parsed: Iterable[tuple[int, Request]] = parsers[self.format]()
        if self._sort:
            parsed = sorted(parsed, key=lambda each: each[1].time_s)
        last_s = 0.0
        group = self.block_tokens // self._own_tokens
        for number, request in parsed:
            if request.time_s < last_s:
                self._bad(
                    self.path, number, f"its time, {request.time_s:g} s, lies before the last one's, {last_s:g} s"
                )
                continue
            last_s = request.time_s
            yield request if group == 1 else _regrouped(request, group)

    # -- lines --------------------------------------------------------------------------------------------------------

    def _first(self) -> tuple[int, bytes]:
        """The first line with something on it; where bad lines are skipped, the first of a known format, if any is."""
        first: tuple[int, bytes] | None = None
        for number, line in self._lines(self.path):
            first = first or (number, line)
            if not self._skip_bad or _find_format(line):
                return number, line
        if first is None:
            raise BadTrace(self.path, 1, "the file has no lines that can be read")
        return first

    def _lines(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """Lines that are not blank, with their numbers."""
        with open(path, "rb") as raw:
            stream: BufferedIOBase = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == _GZIP_MAGIC else raw
            for number in itertools.count(1):
                try:
                    line = stream.readline(LINE_BYTES_MAX + 1)
                except EOFError:
                    return self._bad(path, number, "the gzip data is cut off")
                except (zlib.error, gzip.BadGzipFile):
                    return self._bad(path, number, "the gzip data is damaged")
                if not line:
                    return None
                if len(line) > LINE_BYTES_MAX:
                    raise BadTrace(path, number, f"is longer than {LINE_BYTES_MAX} bytes")
                if line.strip():
                    yield number, line

    def _bad(self, path: Path, line: int, reason: str) -> None:
        if not self._skip_bad:
            raise BadTrace(path, line, reason)
        self.num_bad += 1

    def _objects(self, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in self._lines(path):
            try:
                found = _parse_json(line)
            except _BadLine as problem:
                self._bad(path, number, str(problem))
                continue
            yield number, found

    # -- formats: requests in blocks of the file's own, with their lines ----------------------------------------------

    def _recorded(self) -> Iterator[tuple[int, Request]]:
        numbers: dict[int, int] = {}
        for number, found in self._objects(self.path):
            try:
                self._check_block(found)
                blocks = [numbers.setdefault(each, len(numbers)) for each in _numbers(found, "hash_ids", ID_MAX)]
                request = self._timed(found, np.array(blocks, np.int32))
            except _BadLine as problem:
                self._bad(self.path, number, str(problem))
                continue
            yield number, request

    def _mooncake(self) -> Iterator[tuple[int, Request]]:
        for number, found in self._objects(self.path):
            try:
                request = self._timed(found, _ids(found, "hash_ids"))
            except _BadLine as problem:
                self._bad(self.path, number, str(problem))
                continue
            yield number, request

    def _timed(self, found: dict[str, Any], blocks: Blocks) -> Request:
        """A request of a recorded or a mooncake line."""
        tokens = _whole(found, "input_length", 0, TOKENS_MAX)
        _check_count(len(blocks), tokens, self._own_tokens)
        answer = _whole(found, "output_length", 0, TOKENS_MAX)
        return Request(_seconds(found, "timestamp") / 1e3, blocks, tokens, answer)

    def _check_block(self, found: dict[str, Any]) -> None:
        block = _whole(found, "block_size", 1, BLOCK_TOKENS_MAX)
        if block != self._own_tokens:
            raise _BadLine(f"block_size {block} is not {self._own_tokens}, that of the first line")

    def _sessions(self) -> Iterator[tuple[int, Request]]:
        """Sessions begin one after the other and overlap: their requests are merged by time."""
        waiting: list[tuple[float, int, int, Request]] = []
        serials = itertools.count()
        next_id = num_sessions = 0
        for number, found in self._objects(self.path):
            begins_s = num_sessions * self._session_gap_s
            while waiting and waiting[0][0] < begins_s:
                yield heapq.heappop(waiting)[2:]
            shares_ids = "agent" in found
            try:
                requests, end_id = self._session(found, begins_s, 0 if shares_ids else next_id)
            except _BadLine as problem:
                self._bad(self.path, number, str(problem))
                continue
            num_sessions += 1
            if not shares_ids:
                next_id = end_id
            for request in requests:
                heapq.heappush(waiting, (request.time_s, next(serials), number, request))
            if num_sessions == self._max_sessions:
                break
        while waiting:
            yield heapq.heappop(waiting)[2:]

    def _session(self, found: dict[str, Any], begins_s: float, first_id: int) -> tuple[list[Request], int]:
        """The requests of one session, and the first id that is free behind its own."""
        self._check_block(found)
        session, end_id, last_s = _string(found, "session"), first_id, 0.0
        requests: list[Request] = []
        for turn, each in enumerate(_list(found, "requests")):
            try:
                if not isinstance(each, dict):
                    raise _BadLine("is not an object")
                time_s = _seconds(each, "t")
                if time_s < last_s:
                    raise _BadLine(f"t {time_s:g} lies before {last_s:g}, that of the one before")
                last_s = time_s
                tokens = _whole(each, "in", 0, TOKENS_MAX)
                blocks, end = _runs(_list(each, "h"), first_id)
                _check_count(len(blocks), tokens, self._own_tokens)
                answer = _whole(each, "out", 0, TOKENS_MAX)
            except _BadLine as problem:
                raise _BadLine(f"requests[{turn}]: {problem}") from None
            end_id = max(end_id, end)
            requests.append(Request(begins_s + time_s, blocks, tokens, answer, session, turn))
        return requests, end_id

    def _ragpulse(self) -> Iterator[tuple[int, Request]]:
        ids: dict[BlockKey, int] = {}
        turns: dict[str, int] = {}
        for number, found in self._objects(self.path):
            try:
                chunks = _chunks_of(found)
                unknown = next((chunk for chunk in chunks if chunk not in self._chunk_lengths), None)
                if unknown is not None:
                    raise _BadLine(f"the file of chunks has no {unknown[0]} {unknown[1]}")
                lengths = [self._chunk_lengths[chunk] for chunk in chunks]
                tokens = sum(lengths)
                if tokens > TOKENS_MAX or tokens > BLOCKS_MAX * self.block_tokens:
                    raise _BadLine(f"has {tokens} tokens, more than {min(TOKENS_MAX, BLOCKS_MAX * self.block_tokens)}")
                time_s, session = _seconds(found, "timestamp"), _string(found, "session_id")
                answer = _whole(found, "output_length", 0, TOKENS_MAX)
            except _BadLine as problem:
                self._bad(self.path, number, str(problem))
                continue
            turn = turns[session] = turns.get(session, -1) + 1
            documents = sum(
                length for (kind, _), length in zip(chunks, lengths, strict=True) if kind in _DOCUMENT_KINDS
            )
            blocks = cut_into_blocks(chunks, lengths, self.block_tokens, ids)
            yield number, Request(time_s, blocks, tokens, answer, session, turn, documents)

    def _read_chunks(self, path: Path | None) -> dict[Chunk, int]:
        path = path or _chunks_beside(self.path)
        if not path.is_file():
            raise BadTrace(
                self.path, 1, f"needs the lengths of its chunks; there is no file {path} (--chunks names it)"
            )
        lengths = {}
        for number, found in self._objects(path):
            try:
                chunk = (_string(found, "kind"), _whole(found, "id", 0, TOKEN_MAX))
                lengths[chunk] = _whole(found, "token_length", 0, TOKENS_MAX)
            except _BadLine as problem:
                self._bad(path, number, str(problem))
        return lengths

    def _azure(self) -> Iterator[tuple[int, Request]]:
        lines = self._lines(self.path)
        for number, line in lines:
            if _find_format(line):
                break  # the header, by which the format was told
            self._bad(self.path, number, "stands before the header")
        began_s: float | None = None
        next_id = 0
        for number, line in lines:
            try:
                columns = line.decode("utf-8", errors="replace").strip().split(",")
                if len(columns) != 3:
                    raise _BadLine(f"has {len(columns)} columns, not 3")
                fields = {"ContextTokens": _number(columns[1]), "GeneratedTokens": _number(columns[2])}
                tokens = _whole(fields, "ContextTokens", 0, TOKENS_MAX)
                answer = _whole(fields, "GeneratedTokens", 0, TOKENS_MAX)
                now_s = _date_and_time(columns[0])
                num_blocks = -(-tokens // self.block_tokens)
                if num_blocks > BLOCKS_MAX or next_id + num_blocks > TOKEN_MAX:
                    raise _BadLine("has more blocks than can be numbered; choose longer ones")
                began_s = now_s if began_s is None else began_s
            except _BadLine as problem:
                self._bad(self.path, number, str(problem))
                continue
            blocks = np.arange(next_id, next_id + num_blocks, dtype=np.int32)
            next_id += num_blocks
            yield number, Request(now_s - began_s, blocks, tokens, answer)


def _find_format(first: bytes) -> str:
    """The format of a file by its first line; "" for none that is known."""
    if first.decode("utf-8-sig", errors="replace").strip() == _AZURE_HEADER:
        return "azure"
    try:
        found = _parse_json(first)
    except _BadLine:
        return ""
    if "requests" in found and "block_size" in found:
        return "sessions"
    if "timestamp" in found and "hash_ids" in found:
        if isinstance(found["hash_ids"], dict):
            return "ragpulse"
        return "recorded" if "block_size" in found else "mooncake"
    return ""


def _regrouped(request: Request, group: int) -> Request:
    """Longer blocks of `group` each. As ids are chained, the last one of a group stands for all of it."""
    ends = np.arange(group - 1, len(request.blocks), group)
    if len(request.blocks) % group:
        ends = np.append(ends, len(request.blocks) - 1)
    return Request(
        request.time_s, request.blocks[ends], request.input_tokens, request.output_tokens, request.session,
        request.turn, request.document_tokens,
    )  # fmt: skip


def cut_into_blocks(
    chunks: Sequence[Chunk], lengths: Sequence[int], block_tokens: int, ids: dict[BlockKey, int]
) -> Blocks:
    """Lay chunks out one behind the other and cut that into blocks. A block is known by the one before it, the chunks
    that it has part in, and its length; `ids` numbers what is new."""
    ends = list(itertools.accumulate(lengths))
    num_tokens = ends[-1] if ends else 0
    parent, first, found = -1, 0, list[int]()
    for start in range(0, num_tokens, block_tokens):
        stop = min(start + block_tokens, num_tokens)
        while ends[first] <= start:
            first += 1
        last = first
        while ends[last] < stop:
            last += 1
        parent = ids.setdefault((parent, tuple(chunks[first : last + 1]), stop - start), len(ids))
        found.append(parent)
    return np.array(found, np.int32)


def _chunks_of(found: dict[str, Any]) -> list[Chunk]:
    """The chunks of a ragpulse prompt in their order; a component that is not named has none."""
    by_component = _field(found, "hash_ids")
    if not isinstance(by_component, dict):
        raise _BadLine("hash_ids is not an object")
    return [
        (kind, each)
        for name, kind in _COMPONENTS.items()
        if name in by_component
        for each in _ids(by_component, name).tolist()
    ]


def _chunks_beside(path: Path) -> Path:
    stem, dot, suffix = path.name.partition(".")
    return path.with_name(f"{stem}_chunks{dot}{suffix}")


# -- fields -----------------------------------------------------------------------------------------------------------


def _parse_json(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise _BadLine("is not JSON") from None
    if not isinstance(found, dict):
        raise _BadLine("is not a JSON object")
    return found


def _field(found: dict[str, Any], name: str) -> Any:
    if name not in found:
        raise _BadLine(f"{name} is missing")
    return found[name]


def _whole(found: dict[str, Any], name: str, low: int, high: int) -> int:
    value = _field(found, name)
    if type(value) is not int:
        raise _BadLine(f"{name} is not an integer")
    if not low <= value <= high:
        raise _BadLine(f"{name} {value} is not within {low} to {high}")
    return value


def _seconds(found: dict[str, Any], name: str) -> float:
    """A time, as a number or written out; below `SECONDS_MAX` in its own unit."""
    value = _field(found, name)
    value = _number(value) if isinstance(value, str) else value
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:  # NaN
        raise _BadLine(f"{name} is not a number")
    if not 0 <= value <= SECONDS_MAX:
        raise _BadLine(f"{name} {value} is " + ("negative" if value < 0 else f"more than {SECONDS_MAX:g}"))
    return float(value)


def _number(text: str) -> int | float | None:
    """A number that is written out; None for anything else."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None


def _date_and_time(text: str) -> float:
    """Seconds of a date and time with any number of decimals."""
    whole, _, decimals = text.strip().partition(".")
    try:
        moment = datetime.strptime(whole + " +0000", "%Y-%m-%d %H:%M:%S %z")
        return moment.timestamp() + float(f"0.{decimals or 0}")
    except ValueError:
        raise _BadLine(f"TIMESTAMP {text!r} is not a date and time") from None


def _string(found: dict[str, Any], name: str) -> str:
    value = _field(found, name)
    if not isinstance(value, str):
        raise _BadLine(f"{name} is not a string")
    return value


def _list(found: dict[str, Any], name: str) -> list[Any]:
    value = _field(found, name)
    if not isinstance(value, list):
        raise _BadLine(f"{name} is not a list")
    return value


def _ids(found: dict[str, Any], name: str) -> Blocks:
    return np.array(_numbers(found, name, TOKEN_MAX), np.int32)


def _numbers(found: dict[str, Any], name: str, most: int) -> list[int]:
    ids = _list(found, name)
    if len(ids) > BLOCKS_MAX:
        raise _BadLine(f"{name} has {len(ids)} ids, more than {BLOCKS_MAX}")
    if not all(type(each) is int and 0 <= each <= most for each in ids):
        raise _BadLine(f"{name} holds something else than integers within 0 to {most}")
    return ids


def _runs(runs: list[Any], first_id: int) -> tuple[Blocks, int]:
    """Ids out of runs of them, counted from `first_id`, and the first one behind them all."""
    parts, end, num_blocks = list[Blocks](), first_id, 0
    for run in runs:
        if not (isinstance(run, list) and len(run) == 2 and all(type(each) is int and each >= 0 for each in run)):
            raise _BadLine("h holds something else than pairs of a first id and a count")
        start, stop = first_id + run[0], first_id + run[0] + run[1]
        num_blocks += run[1]
        if stop > TOKEN_MAX or num_blocks > BLOCKS_MAX:
            raise _BadLine(f"h has more than {BLOCKS_MAX} blocks, or an id beyond {TOKEN_MAX}")
        parts.append(np.arange(start, stop, dtype=np.int32))
        end = max(end, stop)
    return np.concatenate(parts) if parts else np.empty(0, np.int32), end


def _check_count(num_blocks: int, num_tokens: int, block_tokens: int) -> None:
    """The last block may be partly filled, or not be named where it is."""
    most = -(-num_tokens // block_tokens)
    if num_blocks > most:
        raise _BadLine(f"names {num_blocks} blocks, but its {num_tokens} tokens fill {most}")
