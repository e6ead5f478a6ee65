"""`hicache bench service`: what the sidecar costs beside a bare gRPC echo, and beside `memcpy`.

The server is what `hicache serve` runs, in a process of its own, and so is each client. A lookup's baseline is a bare
gRPC service on the same loop, with as many bytes in its request and in its reply, called through gRPC alone: without a
deadline, a token, or a message to pack. Sides alternate, a few calls each, so that all meet the same moments of the
machine.

`first` sends a whole prompt that is cached; `append` names it by its handle and sends a turn of 256 new tokens. Short
ones, all but `131k_first`, travel on the client's stream, while the echo is a call: that is what a lookup would be
otherwise, and why it can take less. `stream` is `append` again, beside an echo on a stream. `cpu` is what a first call
takes in client and server together, beyond what the echo takes in both. `c1` and `c32` say how many clients call at the
same time, `p16` and `p64` how many tokens a page has.

`store` is a commit: the server copies the pages out of staging memory, sums them and publishes them. `retrieve` is
`read_into`: the client copies pages out of the arena into its own memory and looks that they were right; `read` does so
into memory of the client's, which it uses again once the copy before has been dropped. The baseline is copying as many
bytes between two buffers in memory that is there. `30x3` are pages of a small model's 30 layers with 3 heads. `2x2` are
thin ones of 1 KiB a token, which no model of today has: what each page costs beside its bytes shows there, so they have
no goal.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

from hicache.layout import KVLayout
from hicache.tools.bench.results import Baseline, Note, Report, Row
from hicache.tools.bench.scratch import scratch_directory
from hicache.tools.bench.service_process import Task, Times, layout
from hicache.tools.exits import CommandFailed, UsageProblem
from hicache.tools.terminal import printable

PAGE_SIZES: Final = (16, 64)
CLIENTS: Final = 32
FIRST_GOAL: Final = 2.0
"""First lookup of 131,072 tokens ÷ echo."""
APPEND_GOAL: Final = 1.3
CPU_GOAL_MS: Final = 2.0
"""CPU of such a first lookup beyond the echo's."""
STORE_GOAL: Final = 0.6
"""Of `memcpy`."""
RETRIEVE_GOAL: Final = 0.9
WARM_UP: Final = 4
"""Prompts stored and read before any is timed: arena and staging are then mapped, page by page, in both processes."""
ARENA_PROMPTS: Final = 3
"""Prompts that the arena has room for."""
THIN: Final = (2, 2)
"""Layers and KV heads of pages that lookups are about, of 1 KiB a token."""
MODEL: Final = (30, 3)
"""Those of a small model."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    directory: Path
    """Where sockets are made, in a directory of their own that is removed again."""
    divisor: int = 1
    """Prompts, calls and clients are so many fewer: 1 for figures, more for trying the code."""

    def tokens(self, num_tokens: int) -> int:
        """The length of a prompt."""
        return max(num_tokens // self.divisor // max(PAGE_SIZES), 1) * max(PAGE_SIZES)

    @property
    def rounds(self) -> int:
        """How often each side has its turn."""
        return max(12 // self.divisor, 1)

    @property
    def calls(self) -> int:
        """Calls of one client in a turn."""
        return max(20 // self.divisor, 2)

    @property
    def clients(self) -> int:
        """How many "32 clients" are."""
        return max(CLIENTS // self.divisor, 2)


def check(plan: Plan) -> None:
    """Raises `UsageProblem` where no sockets can be made. Creates nothing."""
    if not plan.directory.is_dir():
        raise UsageProblem(f"--dir: there is no directory {printable(os.fspath(plan.directory))}")


def run(report: Report, note: Note, plan: Plan) -> None:
    """Measure every row. `check` first."""
    for page_size in PAGE_SIZES:
        with _machine(plan, layout(page_size, *THIN), plan.tokens(131_072), plan.clients) as thin:
            for words, num_tokens in (("4k", 4096), ("131k", 131_072)):
                thin.clients[0].do(Task("fill", plan.tokens(num_tokens), 1))
                for named, clients in ((1, thin.clients[:1]), (CLIENTS, thin.clients)):
                    note(f"pages of {page_size} tokens: lookups of {words}, clients: {len(clients)}")
                    variant = f"p{page_size}_c{named}"
                    _lookups(report, plan, thin, clients, plan.tokens(num_tokens), words, variant)
            note(f"pages of {page_size} tokens: storing and retrieving 131k, thin")
            _moves(report, plan, thin, plan.tokens(131_072), f"131k_2x2_p{page_size}", has_goals=False)
        with _machine(plan, layout(page_size, *MODEL), plan.tokens(4096), 1) as model:
            note(f"pages of {page_size} tokens: storing and retrieving 4k")
            _moves(report, plan, model, plan.tokens(4096), f"4k_30x3_p{page_size}", has_goals=True)


def _lookups(
    report: Report,
    plan: Plan,
    machine: "_Machine",
    clients: "Sequence[_Client]",
    num_tokens: int,
    words: str,
    variant: str,
) -> None:
    """Rows of lookups of one prompt."""
    sides = ("first", "echo_first", "append", "echo_append", "echo_stream")
    us: dict[str, list[float]] = {side: [] for side in sides}
    cpu_us: dict[str, float] = dict.fromkeys(sides, 0.0)
    for number in range(plan.rounds + 1):
        for side in sides:
            began = machine.cpu_us()
            times = _together(clients, Task(side, num_tokens, plan.calls))
            if number:  # the first round is for warming up
                cpu_us[side] += machine.cpu_us() - began + sum(each.cpu_us for each in times)
                us[side] += [each for client in times for each in client.us]
    is_long = words == "131k"
    for side, goal in (("first", FIRST_GOAL), ("append", APPEND_GOAL)):
        echo = Baseline("bare gRPC echo", median(us[f"echo_{side}"]))
        name = f"lookup_{words}_{side}_{variant}"
        report(Row(name, median(us[side]), "us", echo, goal=goal if is_long else None, goal_is_ratio=True))
    streamed = Baseline("gRPC echo on a stream", median(us["echo_stream"]))
    report(Row(f"lookup_{words}_stream_{variant}", median(us["append"]), "us", streamed))
    calls = len(us["first"])
    first, echoed = cpu_us["first"] / calls / 1e3, cpu_us["echo_first"] / calls / 1e3
    goal_ms = CPU_GOAL_MS if is_long else None
    report(Row(f"lookup_{words}_cpu_{variant}", first - echoed, "ms", Baseline("the echo's own", echoed), goal=goal_ms))


def _moves(report: Report, plan: Plan, machine: "_Machine", num_tokens: int, variant: str, *, has_goals: bool) -> None:
    """Rows of storing and retrieving one prompt after the other."""
    client = machine.clients[0]
    client.do(Task("retrieve", num_tokens, WARM_UP))
    sides = ("memcpy", "store", "retrieve", "read")
    us: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(plan.rounds):
        for side in sides:
            us[side] += client.do(Task(side, num_tokens, 2)).us
    num_bytes = num_tokens // machine.layout.page_size * machine.layout.page_bytes
    speeds = {side: num_bytes / median(took) / 1e3 for side, took in us.items()}
    copied = Baseline("memcpy between touched buffers", speeds["memcpy"])
    for side, goal in (("store", STORE_GOAL), ("retrieve", RETRIEVE_GOAL), ("read", RETRIEVE_GOAL)):
        name = f"{side}_{variant}"
        aim = goal if has_goals else None
        report(Row(name, speeds[side], "GB/s", copied, goal=aim, goal_is_ratio=True, higher_is_better=True))


def _together(clients: "Sequence[_Client]", task: Task) -> list[Times]:
    """Have all clients do the same at the same time."""
    for client in clients:
        client.ask(task)
    return [client.answer() for client in clients]


# -- processes --------------------------------------------------------------------------------------------------------


class _Client:
    """A client in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process: Final = process

    def ask(self, task: Task) -> None:
        """Have a task begun."""
        assert self._process.stdin is not None, "its input is a pipe"
        self._process.stdin.write(json.dumps(asdict(task)) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Times:
        """Wait until it is done."""
        return Times(**json.loads(_line(self._process)))

    def do(self, task: Task) -> Times:
        """Have a task done."""
        self.ask(task)
        return self.answer()


@dataclass(frozen=True, slots=True)
class _Machine:
    """A server with its clients, all running."""

    layout: KVLayout
    clients: list[_Client]
    server: int
    """Its process."""

    def cpu_us(self) -> float:
        """Microseconds of CPU that the server has taken so far."""
        # What clock_getcpuclockid makes of a process: its number inverted, and 2 for the scheduler's clock.
        return time.clock_gettime_ns((~self.server << 3) | 2) / 1e3


@contextmanager
def _machine(plan: Plan, page_layout: KVLayout, num_tokens: int, num_clients: int) -> Iterator[_Machine]:
    """Start everything; end it when the block does. The first client can store `num_tokens` tokens at once."""
    prompt_bytes = num_tokens // page_layout.page_size * page_layout.page_bytes
    (group,) = page_layout.groups
    shape = (page_layout.page_size, group.num_layers, group.num_kv_heads)
    with scratch_directory(plan.directory) as sockets, ExitStack() as stack:
        server = stack.enter_context(_process("serve", sockets, *shape, ARENA_PROMPTS * prompt_bytes))
        _line(server)
        clients = [
            _Client(stack.enter_context(_process("client", sockets, *shape, 0 if number else prompt_bytes)))
            for number in range(num_clients)
        ]
        yield _Machine(page_layout, clients, server.pid)


@contextmanager
def _process(role: str, sockets: Path, *numbers: int) -> Iterator["subprocess.Popen[str]"]:
    """A process of `service_process`, killed when the block ends."""
    command = [sys.executable, "-m", "hicache.tools.bench.service_process", role, str(sockets), *map(str, numbers)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: "subprocess.Popen[str]") -> str:
    """The next line that a process prints. Raises `CommandFailed` with its last words if it ends first."""
    assert process.stdout is not None, "its output is a pipe"
    assert process.stderr is not None, "its errors are a pipe"
    if line := process.stdout.readline():
        return line
    process.kill()
    # A traceback of several errors has a frame around them.
    said = [words for line in process.stderr.read().splitlines() if (words := line.strip(" |+-"))]
    raise CommandFailed(f"a process ended early: {printable(said[-1]) if said else 'it said nothing'}")
