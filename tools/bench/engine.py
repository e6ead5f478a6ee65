"""`hicache bench engine`: what the connector gives a real vLLM, and what it costs where there is nothing to give.

Two engines with the same model run at the same time, one with the connector and one without, and are asked in turn; a
sidecar runs beside them. Models are in float32, so that the tokens of both must be the same, and are compared.

`ttft_hit_vs_recompute` is the time until the first token of a prompt of 1,500 tokens that the sidecar has and vLLM has
not, beside that of the engine without the connector, which computes it. Its bound is what that engine takes when its
own prefix cache has the prompt: nothing is loaded then.

`no_reuse` is a load of prompts of that length that nobody has asked before: `wall` compares the time of both engines,
`overhead` is what the connector's methods and threads take, in percent of the CPU of the engine without it, `sidecar`
what the sidecar takes for storing it all. These rows are SmolLM2's. The tiny model's have its name in front; as it
computes next to nothing, its load has no goals and is measured only where SmolLM2 is left out.
"""

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
from statistics import median
from typing import Any, Final

from hicache.layout import KVLayout
from hicache.service.engines.link import serve_options
from hicache.tools.bench.engine_models import VOCABULARY, layout_of, make_smollm2, make_tiny
from hicache.tools.bench.engine_process import BLOCK, Answer, Question
from hicache.tools.bench.results import Baseline, Note, Report, Row
from hicache.tools.bench.scratch import scratch_directory
from hicache.tools.demo.model import quiet_transformers
from hicache.tools.exits import CommandFailed, UsageProblem
from hicache.tools.terminal import printable

PROMPT_TOKENS: Final = 1500
NEW_TOKENS: Final = 16
"""Tokens of an answer where nothing is reused."""
HIT_ROUNDS: Final = 5
LOAD_ROUNDS: Final = 7
HIT_GOAL: Final = 0.25
"""Time until the first token ÷ that of computing the prompt."""
WALL_GOAL: Final = 1.03
CPU_GOAL: Final = 1.0
"""Percent."""
ARENA_PROMPTS: Final = 8
"""Prompts that the sidecar has room for: the load need not stay."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured where."""

    directory: Path
    """Where models and sockets lie meanwhile, in a directory of their own that is removed again."""
    python: Path
    """The interpreter of an environment in which vLLM and hicache are installed."""
    divisor: int = 1
    """Rounds are so many fewer, and SmolLM2 is left out: 1 for figures, more for trying the code."""

    def rounds(self, number: int) -> int:
        """How often a side has its turn."""
        return max(number // self.divisor, 1)


def check(plan: Plan) -> None:
    """Raises `UsageProblem`, `CommandFailed` or `BadRequest` where the bench cannot run. Creates nothing."""
    if not plan.directory.is_dir():
        raise UsageProblem(f"--dir: there is no directory {printable(os.fspath(plan.directory))}")
    if plan.divisor == 1:
        quiet_transformers()
        from hicache.service.engines.models import find_model  # loads transformers

        find_model("smollm2")
    name = printable(os.fspath(plan.python))
    look = (
        "import importlib.util as u; lacks = [n for n in ('vllm', 'hicache') if not u.find_spec(n)]; "
        "raise SystemExit(' '.join(lacks) or 0)"
    )
    try:
        found = subprocess.run([plan.python, "-c", look], capture_output=True, text=True, check=False)
    except OSError as problem:
        raise UsageProblem(f"--python: {name}: {problem.strerror}") from problem
    if found.returncode:
        missing = printable(found.stderr.strip().splitlines()[-1])
        raise UsageProblem(f"--python: {name} has no {missing}: give that of an environment with vLLM and hicache")


def run(report: Report, note: Note, plan: Plan) -> None:
    """Measure every row. `check` first."""
    quiet_transformers()
    with scratch_directory(plan.directory) as scratch:
        note("a tiny model with random weights: starting two engines")
        with _machine(plan, scratch / "1", make_tiny(scratch / "tiny"), VOCABULARY) as machine:
            _hits(report, note, plan, machine, "tiny")
            if plan.divisor > 1:
                _overhead(report, note, plan, machine, "tiny")
        if plan.divisor == 1:
            note("SmolLM2-135M: making its files and starting two engines")
            with _machine(plan, scratch / "2", make_smollm2(scratch / "smollm2"), 49_000) as machine:
                _hits(report, note, plan, machine, "smollm2")
                _overhead(report, note, plan, machine, "smollm2")


def _hits(report: Report, note: Note, plan: Plan, machine: "_Machine", model: str) -> None:
    """Time until the first token."""
    note(f"{model}: prompts of {PROMPT_TOKENS} tokens, computed and loaded")
    computed, loaded, own = [], [], []
    for number in range(plan.rounds(HIT_ROUNDS) + 1):
        question = Question(machine.prompt(PROMPT_TOKENS), 1)
        cold, saved = machine.both(question)
        local = machine.plain.ask(question)
        again = machine.ours.ask(Question(question.prompt, 1, forget=True))
        _require(again.tokens == cold.tokens, f"{model}: other tokens with what was loaded")
        _require(again.scheduled < BLOCK < saved.scheduled, f"{model}: {again.scheduled} tokens of a hit were computed")
        if number:  # the first round is for warming up
            computed.append(cold.seconds)
            loaded.append(again.seconds)
            own.append(local.seconds)
    baseline = Baseline("computing the prompt", 1e3 * median(computed))
    name, value = f"{_prefix(model)}ttft_hit_vs_recompute", 1e3 * median(loaded)
    report(Row(name, value, "ms", baseline, 1e3 * median(own), HIT_GOAL, goal_is_ratio=True))


def _overhead(report: Report, note: Note, plan: Plan, machine: "_Machine", model: str) -> None:
    """What nothing to reuse costs."""
    note(f"{model}: prompts that nobody has asked before")
    plain: list[Answer] = []
    ours: list[Answer] = []
    sidecar_s: list[float] = []
    for number in range(plan.rounds(LOAD_ROUNDS) + 1):
        before = machine.sidecar_cpu_s()
        answers = machine.both(Question(machine.prompt(PROMPT_TOKENS), NEW_TOKENS), swapped=bool(number % 2))
        if number:
            plain.append(answers[0])
            ours.append(answers[1])
            sidecar_s.append(machine.sidecar_cpu_s() - before)
    _require(all(each.connector_cpu_s > 0 for each in ours), f"{model}: nothing was saved")
    without_s = median(each.seconds for each in plain)
    wall_s = without_s * median(after.seconds / before.seconds for before, after in zip(plain, ours, strict=True))
    engine_s = median(each.cpu_s for each in plain)
    # vLLM has other threads of its own, which do a little all the time.
    connector_s = median(each.connector_cpu_s for each in ours) - median(each.connector_cpu_s for each in plain)
    without = Baseline("without the connector", 1e3 * without_s)
    wall_goal, cpu_goal = (WALL_GOAL, CPU_GOAL) if model == "smollm2" else (None, None)
    report(Row(f"{_prefix(model)}no_reuse_wall", 1e3 * wall_s, "ms", without, goal=wall_goal, goal_is_ratio=True))
    report(Row(f"{_prefix(model)}no_reuse_overhead", 100 * connector_s / engine_s, "%", goal=cpu_goal))
    report(Row(f"{_prefix(model)}no_reuse_sidecar", 100 * median(sidecar_s) / engine_s, "%"))


def _prefix(model: str) -> str:
    """What stands in front of a row's name."""
    return "" if model == "smollm2" else f"{model}_"


def _require(holds: bool, problem: str) -> None:
    """A figure of a wrong answer is none."""
    if not holds:
        raise CommandFailed(problem)


class _Engine:
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
class _Machine:
    """Both engines, and the sidecar of one of them."""

    plain: _Engine
    ours: _Engine
    sidecar: "subprocess.Popen[str]"
    num_words: int
    """Tokens that prompts are made of."""
    rng: random.Random

    def prompt(self, num_tokens: int) -> list[int]:
        """One that was never asked."""
        return [self.rng.randrange(3, self.num_words) for _ in range(num_tokens)]

    def both(self, question: Question, *, swapped: bool = False) -> tuple[Answer, Answer]:
        """Answers without the connector and with it, asked one after the other."""
        if swapped:
            ours = self.ours.ask(question)
            plain = self.plain.ask(question)
        else:
            plain = self.plain.ask(question)
            ours = self.ours.ask(question)
        _require(plain.tokens == ours.tokens, "other tokens with the connector")
        return plain, ours

    def sidecar_cpu_s(self) -> float:
        """CPU that the sidecar has taken."""
        fields = Path(f"/proc/{self.sidecar.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _machine(plan: Plan, directory: Path, model: Path, num_words: int) -> Iterator[_Machine]:
    directory.mkdir()
    layout = layout_of(model, page_size=BLOCK)
    with ExitStack() as stack:
        sidecar = stack.enter_context(_sidecar(directory / "run", layout))
        config = {"socket_dir": os.fspath(directory / "run"), "strict": True}
        plain, ours = (
            stack.enter_context(_engine(plan.python, directory / f"{name}.log", {"model": os.fspath(model)} | given))
            for name, given in (("plain", {"config": None}), ("ours", {"config": config}))
        )
        for each in (plain, ours):
            _require(each.told() == {"ready": True}, "an engine of the bench did not start")
        yield _Machine(plain, ours, sidecar, num_words, random.Random(7))


@contextmanager
def _engine(python: Path, errors: Path, told: dict[str, Any]) -> Iterator[_Engine]:
    """Started, and not waited for."""
    command = (os.fspath(python), "-m", "hicache.tools.bench.engine_process")
    with (
        errors.open("w") as written,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=written, text=True) as process,
    ):
        try:
            engine = _Engine(process, errors)
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
