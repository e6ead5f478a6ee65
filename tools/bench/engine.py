"""`hicache bench engine`: what the connector gives a real vLLM, and what it costs where there is nothing to give.

Two engines with the same model run at the same time, one with the connector and one without, and are asked in turn, so
that one of them is busy at a time; a sidecar runs beside them. Models are in float32, so that the tokens of both must
be the same, and are compared.

`ttft_hit_vs_recompute` is the time until the first token of a prompt of 1,500 tokens that the sidecar has and vLLM has
not, beside that of the engine without the connector, which computes it. Its bound is what that engine takes when its
own prefix cache has the prompt: nothing is loaded then.

`no_reuse` is a load of prompts of that length that nobody has asked before. Each is asked three times, in all orders:
the engine without the connector; the one with it, whose connector is put aside for that time (neither vLLM's scheduler
nor its worker has one then; how vLLM was started for one, and the sessions with the sidecar, stay, which only `engines`
and `overhead` have); and that one with its connector. `wall` is the time of the last ÷ that of the second, the median
of all prompts: what the connector does to an engine. `engines` is the last ÷ the first. Two engines differ from the
start on, by where their memory came to lie, more than by a connector: so all is started several times, each engine
first in turn, and `least` and `most` say how far the medians of the starts are apart. `overhead` is the CPU that the
connector's methods and threads take, its session's included, in percent of the CPU of the engine without it, `sidecar`
what the sidecar takes for storing it all.

These rows are SmolLM2's. The tiny model's have its name in front; as it computes next to nothing, its load has no goals
and is measured only where SmolLM2 is left out.
"""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, permutations
from pathlib import Path
from statistics import median
from typing import Final

from hicache.tools.bench.engine_machine import PROMPT_TOKENS, Machine, machine_of, require
from hicache.tools.bench.engine_models import VOCABULARY, make_smollm2, make_tiny
from hicache.tools.bench.engine_process import BLOCK, Answer, Question
from hicache.tools.bench.results import Baseline, Note, Report, Row
from hicache.tools.bench.scratch import scratch_directory
from hicache.tools.demo.model import quiet_transformers
from hicache.tools.exits import UsageProblem
from hicache.tools.terminal import printable

NEW_TOKENS: Final = 16
"""Tokens of an answer where nothing is reused."""
HIT_ROUNDS: Final = 5
STARTS: Final = 3
"""Of both engines, for what nothing to reuse costs."""
PROMPTS: Final = 8
"""In each of them."""
HIT_GOAL: Final = 0.25
"""Time until the first token ÷ that of computing the prompt."""
WALL_GOAL: Final = 1.03
CPU_GOAL: Final = 1.0
"""Percent."""
SMOLLM2_TOKENS: Final = 49_000
"""Tokens that its prompts are made of: not those behind, which mean something to it."""


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
        tiny = make_tiny(scratch / "tiny")
        with machine_of(plan.python, scratch / "1", tiny, VOCABULARY) as machine:
            _hits(report, note, plan, machine, "tiny")
        if plan.divisor > 1:
            _overhead(report, note, plan, scratch, tiny, "tiny", VOCABULARY)
        else:
            note("SmolLM2-135M: making its files and starting two engines")
            smollm2 = make_smollm2(scratch / "smollm2")
            with machine_of(plan.python, scratch / "2", smollm2, SMOLLM2_TOKENS) as machine:
                _hits(report, note, plan, machine, "smollm2")
            _overhead(report, note, plan, scratch, smollm2, "smollm2", SMOLLM2_TOKENS)


def _hits(report: Report, note: Note, plan: Plan, machine: Machine, model: str) -> None:
    """Time until the first token."""
    note(f"{model}: prompts of {PROMPT_TOKENS} tokens, computed and loaded")
    computed, loaded, own = [], [], []
    for number in range(plan.rounds(HIT_ROUNDS) + 1):
        question = Question(machine.prompt(PROMPT_TOKENS), 1)
        cold, saved = machine.both(question)
        local = machine.plain.ask(question)
        again = machine.ours.ask(Question(question.prompt, 1, forget=True))
        require(again.tokens == cold.tokens, f"{model}: other tokens with what was loaded")
        require(again.scheduled < BLOCK < saved.scheduled, f"{model}: {again.scheduled} tokens of a hit were computed")
        if number:  # the first round is for warming up
            computed.append(cold.seconds)
            loaded.append(again.seconds)
            own.append(local.seconds)
    baseline = Baseline("computing the prompt", 1e3 * median(computed))
    name, value = f"{_prefix(model)}ttft_hit_vs_recompute", 1e3 * median(loaded)
    report(Row(name, value, "ms", baseline, 1e3 * median(own), HIT_GOAL, goal_is_ratio=True))


@dataclass(frozen=True, slots=True)
class _Asked:
    """One prompt, asked three times."""

    plain: Answer
    """Of the engine without the connector."""
    aside: Answer
    """Of the other one, with its connector put aside."""
    ours: Answer
    sidecar_s: float
    """CPU of the sidecar for the last."""


def _overhead(
    report: Report, note: Note, plan: Plan, scratch: Path, directory: Path, model: str, num_words: int
) -> None:
    """What nothing to reuse costs."""
    starts: list[list[_Asked]] = []
    for number in range(plan.rounds(STARTS)):
        note(f"{model}: prompts that nobody has asked before, start {number + 1} of {plan.rounds(STARTS)}")
        place = scratch / f"s{number}"  # short, as the paths of sockets have to be
        with machine_of(plan.python, place, directory, num_words, seed=number, swapped=bool(number % 2)) as machine:
            starts.append(_asked(machine, plan.rounds(PROMPTS), model))
    every = [each for start in starts for each in start]
    engine_s = median(each.plain.cpu_s for each in every)
    # vLLM has other threads of its own, which do a little all the time.
    connector_s = median(each.ours.connector_cpu_s - each.plain.connector_cpu_s for each in every)
    wall_goal, cpu_goal = (WALL_GOAL, CPU_GOAL) if model == "smollm2" else (None, None)

    def compare(name: str, baseline: str, beside: Callable[[_Asked], Answer], goal: float | None) -> None:
        """The time with the connector ÷ that of other answers."""
        beside_s = median(beside(each).seconds for each in every)
        medians = [median(each.ours.seconds / beside(each).seconds for each in start) for start in starts]
        ratio = median(each.ours.seconds / beside(each).seconds for each in every)
        for words, value, its_goal in (
            (name, ratio, goal), (f"{name}_least", min(medians), None), (f"{name}_most", max(medians), None)
        ):  # fmt: skip
            named, base = f"{_prefix(model)}no_reuse_{words}", Baseline(baseline, 1e3 * beside_s)
            report(Row(named, 1e3 * beside_s * value, "ms", base, goal=its_goal, goal_is_ratio=True))

    compare("wall", "with the connector put aside", lambda each: each.aside, wall_goal)
    compare("engines", "another engine, without a connector", lambda each: each.plain, None)
    report(Row(f"{_prefix(model)}no_reuse_overhead", 100 * connector_s / engine_s, "%", goal=cpu_goal))
    sidecar_s = median(each.sidecar_s for each in every)
    report(Row(f"{_prefix(model)}no_reuse_sidecar", 100 * sidecar_s / engine_s, "%"))


def _asked(machine: Machine, count: int, model: str) -> list[_Asked]:
    """Prompts, each asked three times in another order. The first is for warming up, and does not count."""
    asked = []
    for _, order in zip(range(count + 1), cycle(permutations(("plain", "aside", "ours"))), strict=False):
        prompt, answers, sidecar_s = machine.prompt(PROMPT_TOKENS), {}, {}
        for side in order:
            engine, before_s = machine.plain if side == "plain" else machine.ours, machine.sidecar_cpu_s()
            answers[side] = engine.ask(Question(prompt, NEW_TOKENS, forget=True, aside=side == "aside"))
            sidecar_s[side] = machine.sidecar_cpu_s() - before_s
        require(len({tuple(each.tokens) for each in answers.values()}) == 1, f"{model}: not the same tokens")
        require(len({each.scheduled for each in answers.values()}) == 1, f"{model}: something was reused")
        asked.append(_Asked(**answers, sidecar_s=sidecar_s["ours"]))
    # A cache that takes nothing costs little.
    again = machine.ours.ask(Question(prompt, 1, forget=True))
    require(again.scheduled < BLOCK, f"{model}: nothing was saved")
    return asked[1:]


def _prefix(model: str) -> str:
    """What stands in front of a row's name."""
    return "" if model == "smollm2" else f"{model}_"
