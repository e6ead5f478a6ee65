"""The command line: `hicache COMMAND ...`.

Starting it loads argparse and one small file, the command that was asked for; torch, numpy and rich are loaded by the
commands that need them, when they have checked everything they were given. See `hicache.tools.exits` for statuses.

A command is a module of `hicache.tools.commands` with

    configure(parser)  adds its options and description to an argparse parser
    run(args) -> int   does the work and returns an exit status; raises `UsageProblem` or `CommandFailed` to stop with
                       one line, and may let `OSError` and `HicacheError` through: they are expected failures too
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from io import TextIOBase, TextIOWrapper
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

from hicache.errors import HicacheError
from hicache.tools.exits import CommandFailed, Exit, UsageProblem
from hicache.tools.terminal import STAND_INS, printable

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

COMMANDS: Final = {
    "serve": "run the sidecar: one cache that the engines of this machine share",
    "demo": "answer questions over documents with a real model, and show what the cache does and saves",
    "warm": "have an engine compute prompts before users ask, so that they are cached",
    "top": "watch a running server: tiers, lanes, hit rates, sessions, prefixes",
    "tree": "show the cached prefixes: where they are, bytes, recency, uses, leases",
    "stats": "show tiers, lanes and counters",
    "sessions": "show who is attached to a server, and what they hold",
    "explain": "say where a prompt's tokens are, why the rest is not, and what using it takes",
    "pin": "keep a prefix in the cache",
    "unpin": "let a pinned prefix leave again",
    "prefetch": "bring a prefix from NVMe to host memory",
    "evict": "make room in a tier",
    "flush": "forget what is cached",
    "verify": "read what is cached and compare it with its checksums",
    "doctor": "say how a server and its machine are, or what is damaged in the directory of an NVMe tier",
    "trace": "record what a running server is asked, for replays",
    "replay": "say what a cache of given sizes would have done with a recorded or made-up load",
    "bench": "measure a part of hicache beside baselines of the same run",
    "completion": "print what makes bash, zsh or fish complete commands and options",
}
"""Name and summary of each command, in the order in which help lists them."""
_STATUS_OF: Final = {signal.SIGHUP: Exit.HUNG_UP, signal.SIGTERM: Exit.TERMINATED}
"""Signals that end a command after it has cleaned up, and what it returns then."""
_TELLING: Final = frozenset({
    "bench", "demo", "doctor", "evict", "flush", "pin", "prefetch", "unpin", "verify", "warm",
})  # fmt: skip
"""Commands whose work, or what it came to, is not known where nobody reads what they say."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived. It unwinds as a `KeyboardInterrupt` does, so that temporary files are removed: a task
    group passes on what is one as it is."""

    def __init__(self, status: Exit) -> None:
        super().__init__(status)
        self.status = status


class Parser(argparse.ArgumentParser):
    """An argparse parser whose complaints are one line."""

    def print_help(self, file: "SupportsWrite[str] | None" = None) -> None:
        """As argparse does, which takes no notice of help that could not be written."""
        with suppress(BrokenPipeError):
            print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        raise UsageProblem(f"{printable(message)} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. `argv` is without the program's name; None takes `sys.argv`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    _prepare_streams()
    try:
        with _terminating():
            status = _run(arguments, name)
            sys.stdout.flush()
    except SystemExit as stop:
        # argparse ends so after --help and --version.
        return _shown(name, stop.code if isinstance(stop.code, int) else Exit.OK)
    except UsageProblem as problem:
        return _complain(name, str(problem), Exit.USAGE)
    except CommandFailed as problem:
        return _complain(name, str(problem), Exit.FAILED)
    except BrokenPipeError:
        return _leave_quietly(name)
    except (HicacheError, OSError) as problem:
        return _complain(name, printable(str(problem)), Exit.FAILED)
    except Terminated as stop:
        return _complain(name, "terminated", stop.status)
    except KeyboardInterrupt:
        return _complain(name, "interrupted", Exit.INTERRUPTED)
    return status


def _run(arguments: list[str], name: str) -> int:
    if not name:
        return _without_command(arguments)
    command = import_module(f"hicache.tools.commands.{name}")
    parser = Parser(prog=f"hicache {name}", allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    command.configure(parser)
    status: int = command.run(parser.parse_args(arguments[1:]))
    return status


def _without_command(arguments: list[str]) -> int:
    from hicache import __version__

    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    parser = Parser(
        prog="hicache", usage="hicache COMMAND [options]", allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="A hierarchical KV cache for LLM inference, over GPU memory, host memory and NVMe.",
        epilog=f"commands:\n{listing}\n\n`hicache COMMAND --help` explains one. "
               "Exit status: 0 ok, 1 failed, 2 bad usage.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"hicache {__version__}")
    if arguments and not arguments[0].startswith("-"):
        parser.error(f"unknown command {arguments[0]!r}")
    parser.parse_args(arguments)
    parser.error("a command is missing")


def _complain(name: str, message: str, status: Exit) -> int:
    try:
        sys.stdout.flush()  # what was printed before comes before
    except OSError:
        _silence_stdout()
    with suppress(OSError):  # nobody may be left to be told
        print(f"hicache {name}".rstrip() + ": " + " ".join(message.split("\n")), file=sys.stderr, flush=True)
    return status


def _shown(name: str, status: int) -> int:
    """What help returns."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
    except OSError as problem:
        return _complain(name, str(problem), Exit.FAILED)
    return status


def _leave_quietly(name: str) -> int:
    """The reader of our output has left. What only shows something has done its work; what stops before it acts, half
    way, or before it says what it has found has not."""
    _silence_stdout()
    return Exit.FAILED if name in _TELLING else Exit.OK


def _silence_stdout() -> None:
    # The interpreter flushes standard output once more on its way out and would complain then.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _prepare_streams() -> None:
    # Started with one of them closed. What is printed to a stream that is None would go to standard output.
    sys.stdout = sys.stdout or _Nowhere()
    sys.stderr = sys.stderr or _Nowhere()
    for stream in (sys.stdout, sys.stderr):
        # What the stream's encoding lacks has a stand-in or is escaped; it does not end the command.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=STAND_INS)


class _Nowhere(TextIOBase):
    """Takes text and forgets it."""

    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def _terminating() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP unwind the main thread, so that what is temporary is removed."""
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return
    # One that was told to ignore a signal (nohup) keeps ignoring it.
    numbers = [number for number in _STATUS_OF if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, _raise_terminated) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _raise_terminated(signum: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(_STATUS_OF[signal.Signals(signum)])
