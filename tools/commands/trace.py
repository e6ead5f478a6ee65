"""`hicache trace record`: what a running server is asked, as a trace that `hicache replay` reads."""

import argparse
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from hicache.tools.arguments import byte_size, integer, path
from hicache.tools.commands import _server
from hicache.tools.exits import Exit, UsageProblem
from hicache.tools.owner import Owner, reached, tier_names
from hicache.tools.progress import Progress
from hicache.tools.terminal import printable
from hicache.tools.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from hicache.service.proto import hicache_pb2 as pb
    from hicache.tools.replay.writing import TraceFile

WAIT_S: Final = 0.5
"""How long one call waits for news, and so how soon a recording ends that is told to."""
_DESCRIPTION: Final = """\
Writes one line for each prompt that engines ask a running server for, until it is told to stop:
when, how long, in which blocks, and what was cached of it. `hicache replay FILE` then says what
tiers of other sizes, or another policy, would have made of the same requests.
"""
_EPILOG: Final = """\
Token ids are not written. A block of tokens appears as a number that is the same wherever the same
tokens came before it, within this recording and nowhere else: the key that makes the numbers is
written nowhere. --tokens adds the ids themselves; such a file holds the prompts.

Engines that look first and acquire then make one request of the two, also where they look again
while the request waits; two that wait at a time and are the same are taken for one. vLLM asks for
whole blocks: what a prompt has beyond them is not told. What an engine stores is not recorded: a
replay stores every prompt, as engines do. Answers are not known to the cache until a later prompt
repeats them.

The server keeps up to 32 MiB of prompts until they are fetched; more than that is left out of the
recording and counted. Recording costs it a copy of the token ids. One recording at a time: another
one takes its place.

A full FILE ends the recording; with --files N it goes on, and keeps the last N files as FILE,
FILE.1 and so on, FILE the newest.

examples:
  hicache trace record requests.jsonl
  hicache trace record requests.jsonl --for 3600 --max-bytes 1GiB
  hicache replay requests.jsonl --device 0 --host 64GiB --nvme 1TiB

exit status: 0 recorded until Ctrl-C, --for, --requests or the end of the room for it; 1 no server
             answers, it ended, or FILE cannot be written (what came before is whole); 2 bad usage
"""
_STATUS: Final = {signal.SIGINT: Exit.OK, signal.SIGTERM: Exit.TERMINATED, signal.SIGHUP: Exit.HUNG_UP}
"""Signals that end a recording, and what it returns then."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("action", choices=("record",), help="what to do")
    parser.add_argument("file", type=path, metavar="FILE", help="where to write; a new name")
    parser.add_argument("--for", type=integer(1, 1 << 31), metavar="SECONDS", dest="seconds", help="stop after so long")
    parser.add_argument("--requests", type=integer(1, 1 << 40), metavar="N", help="stop after so many requests")
    parser.add_argument("--max-bytes", type=byte_size, default=256 << 20, metavar="SIZE",
                        help="most bytes of a file (default 256MiB)")  # fmt: skip
    parser.add_argument("--files", type=integer(1, 1000), default=1, metavar="N",
                        help="keep the last N files (default 1, which ends when it is full)")  # fmt: skip
    parser.add_argument("--block", type=integer(1, 1 << 16), metavar="TOKENS",
                        help="tokens of a block, a multiple of the server's page (default that)")  # fmt: skip
    parser.add_argument("--tokens", action="store_true", help="write the token ids, too")
    _server.add_server(parser)


def run(args: argparse.Namespace) -> int:
    """Carry the command out and return the exit status."""
    from hicache.tools.replay.writing import TraceFile

    for name in (args.file, *(TraceFile.kept(args.file, number) for number in range(1, args.files))):
        if os.path.lexists(name):
            raise UsageProblem(f"{printable(os.fspath(name))} is there already: a recording begins a new file")
    if not args.file.parent.is_dir():
        raise UsageProblem(f"{printable(os.fspath(args.file))} is in a directory that does not exist")
    with reached(args.socket_dir) as owner:
        page = int(owner.stats["layout"]["page_size"])
        block = args.block or page
        if block % page:
            raise UsageProblem(f"--block: {block} is no multiple of {page}, the server's page")
        # Signals first: who sees that it records, or sees the file, may stop it.
        with _told_to_stop() as signals, _begun(owner, args) as (walk, file):
            recorder = Recorder(file, block, with_tokens=args.tokens)
            try:
                recorder.record(owner, walk, signals, seconds=args.seconds, requests=args.requests, is_quiet=args.json)
            except BaseException:
                recorder.told.ended = "failed"
                raise
            finally:
                _say(args, recorder.told, file)
    return _STATUS[signal.Signals(signals[0])] if signals else Exit.OK


@contextmanager
def _begun(owner: Owner, args: argparse.Namespace) -> "Iterator[tuple[int, TraceFile]]":
    """A recording that has begun, and its file, which comes after: who sees it knows that it is being written."""
    from hicache.tools.replay.writing import TraceFile

    walk = owner.record(0, wait_s=0.0).walk
    with TraceFile(args.file, max_bytes=args.max_bytes, max_files=args.files) as file:
        yield walk, file


@dataclass(slots=True)
class Told:
    """What came of a recording."""

    ended: str = ""
    """Why: "signal", "time", "requests", "full" or "failed"."""
    requests: int = 0
    tokens: int = 0
    tokens_found: dict[str, int] = field(default_factory=dict)
    """Of those, cached ones, by the fastest tier that had them."""
    joined: int = 0
    """Calls that belonged to a request that is recorded."""
    dropped: int = 0
    """Prompts that are missing."""
    seconds: float = 0.0


class Recorder:
    """Writes what a server is asked to a file."""

    def __init__(self, file: "TraceFile", block_tokens: int, *, with_tokens: bool) -> None:
        from hicache.tools.replay.writing import BlockIds, Requests

        self.told: Final = Told()
        self._file: Final = file
        self._block_tokens: Final = block_tokens
        self._with_tokens: Final = with_tokens
        self._ids: Final[BlockIds] = BlockIds(block_tokens)
        self._requests: Final[Requests] = Requests()
        self._tiers: Final = tier_names()

    def record(
        self, owner: Owner, walk: int, signals: list[int], *,
        seconds: int | None, requests: int | None, is_quiet: bool,
    ) -> None:  # fmt: skip
        """Write down the recording `walk`, which has begun, until one of `signals` has arrived or as long as was asked
        for. Raises as `Owner` does, and `OSError`."""
        told, began, shown = self.told, time.monotonic(), Progress()
        try:
            while not told.ended:
                left = WAIT_S if seconds is None else seconds - told.seconds
                is_over = bool(signals) or left <= 0
                reply = owner.record(walk, wait_s=0.0 if is_over else min(left, WAIT_S), end=is_over)
                walk = reply.walk
                self._take(reply, requests)
                told.seconds = time.monotonic() - began
                if not walk:
                    told.ended = told.ended or ("signal" if signals else "time")
                if not is_quiet:
                    size = format_bytes(self._file.num_bytes)
                    shown.note(f"recorded {plural(told.requests, 'request')}, {size}; Ctrl-C ends it")
        finally:
            shown.end()
        if walk:
            owner.record(walk, wait_s=0.0, end=True)

    def _take(self, reply: "pb.RecordReply", requests: int | None) -> None:
        """Write what a reply has, as long as there is room and `requests` are not reached."""
        told = self.told
        told.dropped += reply.num_dropped
        for asked in reply.asked:
            if not self._write(asked):
                told.ended = "full"
                return
            if told.requests == requests:
                told.ended = "requests"
                return

    def _write(self, asked: "pb.AskedPrompt") -> bool:
        """Write what was asked, if it begins a request; False where there is no room for it any more."""
        from hicache.service import wire
        from hicache.tools.replay.writing import Asked, line

        told, num_tokens, at_s = self.told, len(asked.tokens) // 4, asked.at_us / 1e6
        ids = self._ids.of(asked.namespace, asked.tokens)
        found: dict[str, int] = {}
        for run_ in asked.runs:
            tier = self._tiers[run_.tier]
            found[tier] = found.get(tier, 0) + run_.num_tokens
        first_page = asked.first_page if asked.is_acquire else None
        if not self._requests.is_new(Asked(at_s, asked.session, num_tokens, ids, sum(found.values()), first_page)):
            told.joined += 1
            return True
        tokens = wire.unpack_int32(asked.tokens) if self._with_tokens else None
        data = line(at_s, num_tokens, self._block_tokens, ids, found, tokens)
        if not self._file.fits(data):
            told.dropped += 1
            return True
        if not self._file.write(data):
            return False
        told.requests += 1
        told.tokens += num_tokens
        for tier, count in found.items():
            told.tokens_found[tier] = told.tokens_found.get(tier, 0) + count
        return True


def _say(args: argparse.Namespace, told: Told, file: "TraceFile") -> None:
    files = file.files
    if args.json:
        shown: dict[str, Any] = {
            "format": "hicache-trace", "version": 1, "files": [os.fspath(each) for each in files],
            "ended": told.ended, "seconds": told.seconds, "requests": told.requests, "joined": told.joined,
            "tokens": told.tokens, "tokens_found": told.tokens_found, "dropped": told.dropped,
        }  # fmt: skip
        print(json.dumps(shown, indent=2))
        return
    print(f"{plural(told.requests, 'request')} in {format_seconds(told.seconds)}, {plural(told.tokens, 'token')}")
    found = sum(told.tokens_found.values())
    if found:
        by_tier = ", ".join(f"{count:,} in {tier}" for tier, count in told.tokens_found.items())
        print(f"cached when they were asked for: {by_tier} ({found / told.tokens:.1%})")
    if told.dropped:
        print(f"missing: {plural(told.dropped, 'prompt')}, which came faster than they could be written down")
    if told.ended == "full":
        print("it ended as the file was full: --max-bytes and --files leave more room")
    for each in files:
        print(f"  {printable(os.fspath(each))}  {format_bytes(each.stat().st_size)}")


@contextmanager
def _told_to_stop() -> Iterator[list[int]]:
    """The signals that have arrived within the block and are to end what is done there; a second one interrupts it."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if arrived:
            raise KeyboardInterrupt
        arrived.append(number)

    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield arrived
        return
    numbers = [number for number in _STATUS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, note) for number in numbers}
    try:
        yield arrived
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
