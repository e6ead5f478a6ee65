"""Two real engines with the same model and a sidecar, each in a process of its own, for `hicache bench engine`."""

import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hicache.layout import KVLayout
from hicache.service.engines.link import serve_options
from hicache.tools.bench.engine_models import layout_of
from hicache.tools.bench.engine_process import BLOCK, Answer, Question
from hicache.tools.exits import CommandFailed
from hicache.tools.terminal import printable

PROMPT_TOKENS: Final = 1500
HUGE_PAGES: Final = "glibc.malloc.hugetlb=1"
"""For both engines, as glibc's tunables: with small pages one of them may take a fifth longer than the other for all of
its life, by where its memory happened to come to lie."""
ARENA_PROMPTS: Final = 8
"""Prompts that the sidecar has room for: the load need not stay."""


class Engine:
    """An engine in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]", errors: Path) -> None:
        self._process: Final = process
        self._errors: Final = errors

    def ask(self, question: Question) -> Answer:
        """Waits for the answer."""
        self.tell(asdict(question))
        return Answer(**self.told())

    def tell(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            print(json.dumps(what), file=self._process.stdin, flush=True)
        except BrokenPipeError as problem:
            raise self._failure() from problem

    def told(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self) -> CommandFailed:
        said = self._errors.read_text(errors="replace").strip().splitlines()
        return CommandFailed(f"an engine of the bench ended: {printable(said[-1] if said else 'without a word')}")


@dataclass(frozen=True, slots=True)
class Machine:
    """Both engines, and the sidecar of one of them."""

    plain: Engine
    ours: Engine
    sidecar: "subprocess.Popen[str]"
    num_words: int
    """Tokens that prompts are made of."""
    rng: random.Random

    def prompt(self, num_tokens: int) -> list[int]:
        """One that was never asked."""
        return [self.rng.randrange(3, self.num_words) for _ in range(num_tokens)]

    def both(self, question: Question) -> tuple[Answer, Answer]:
        """Answers without the connector and with it, asked one after the other."""
        plain, ours = self.plain.ask(question), self.ours.ask(question)
        require(plain.tokens == ours.tokens, "other tokens with the connector")
        return plain, ours

    def sidecar_cpu_s(self) -> float:
        """CPU that the sidecar has taken."""
        fields = Path(f"/proc/{self.sidecar.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def machine_of(
    python: Path, directory: Path, model: Path, num_words: int, *, seed: int = 7, swapped: bool = False
) -> Iterator[Machine]:
    """`swapped`: the engine with the connector is started first."""
    directory.mkdir()
    layout = layout_of(model, page_size=BLOCK)
    with ExitStack() as stack:
        sidecar = stack.enter_context(_sidecar(directory / "run", layout))
        configs = [("plain", None), ("ours", {"socket_dir": os.fspath(directory / "run"), "strict": True})]
        engines = {
            name: stack.enter_context(
                _engine(python, directory / f"{name}.log", {"model": os.fspath(model), "config": config})
            )
            for name, config in (reversed(configs) if swapped else configs)
        }
        for each in engines.values():
            require(each.told() == {"ready": True}, "an engine of the bench did not start")
        yield Machine(engines["plain"], engines["ours"], sidecar, num_words, random.Random(seed))


@contextmanager
def _engine(python: Path, errors: Path, told: dict[str, Any]) -> Iterator[Engine]:
    """Started, and not waited for."""
    command = (os.fspath(python), "-m", "hicache.tools.bench.engine_process")
    with (
        errors.open("w") as written,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=written, text=True,
            env={**os.environ, "GLIBC_TUNABLES": HUGE_PAGES},
        ) as process,
    ):  # fmt: skip
        try:
            engine = Engine(process, errors)
            engine.tell(told)
            yield engine
        except BaseException:
            process.kill()
            raise
        # Leaving the block closes its input, which ends it.


@contextmanager
def _sidecar(sockets: Path, layout: KVLayout) -> "Iterator[subprocess.Popen[str]]":
    host_bytes = ARENA_PROMPTS * (PROMPT_TOKENS // layout.page_size) * layout.page_bytes
    command = (
        sys.executable, "-m", "hicache.tools", "serve", "--socket-dir", os.fspath(sockets),
        *shlex.split(serve_options(layout)), "--set", f"host.bytes={host_bytes}",
    )  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            if not process.stdout.readline():
                raise CommandFailed(f"the sidecar of the bench did not start: {process.stderr.read().strip()}")
            yield process
        finally:
            process.terminate()


def require(holds: bool, problem: str) -> None:
    """Raises `CommandFailed`: a figure of a wrong answer is none."""
    if not holds:
        raise CommandFailed(problem)
