"""A real vLLM that `hicache bench engine` asks, in a process of the engine's own Python.

    python -m hicache.tools.bench.engine_process

    first line   {"model": directory, "config": the connector's settings or null}; answered by {"ready": true}
    others       a `Question`, answered by an `Answer`; both JSON, a line each

It ends with its input. vLLM runs as a whole in this process, with one thread for its arithmetic: what other threads
take, and what the connector's methods take on vLLM's own, is then the connector's.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import wraps
from types import FunctionType
from typing import Any, Final

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip
"""For vLLM on a machine without a network: one GiB of KV, and threads that do not spin on a core that others need."""
BLOCK: Final = 32
"""Tokens of a block, the least that vLLM takes on a CPU."""
SETTLED_S: Final = 0.02
SETTLED_CPU_S: Final = 0.001
"""Who takes less CPU than this in that time is at rest."""

EMPTY_CALLS: Final = 1000
"""Calls of nothing, to learn what measuring a call takes."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt."""

    prompt: list[int]
    new_tokens: int
    forget: bool = False
    """Forget what vLLM itself has kept before. What the sidecar has stays."""
    aside: bool = False
    """Put the connector aside for this one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of it."""

    tokens: list[int]
    scheduled: int
    """Tokens that were computed."""
    seconds: float
    """Until the answer."""
    cpu_s: float
    """CPU of the whole process, until nothing was under way any more."""
    connector_cpu_s: float
    """The part of it on other threads than vLLM's, and in the connector's methods."""


def llm_arguments(config: dict[str, Any] | None) -> dict[str, Any]:
    """What vLLM's `LLM` is told: float32, greedily exact, as a whole in one process; `config` is the connector's, None
    for no connector."""
    arguments: dict[str, Any] = {
        "dtype": "float32", "block_size": BLOCK, "enforce_eager": True, "seed": 0, "skip_tokenizer_init": True,
        "distributed_executor_backend": "uni", "max_model_len": 4096,
    }  # fmt: skip
    if config is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "HicacheConnector",
            "kv_connector_module_path": "hicache.service.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": config,
        }
    return arguments


def watch_steps(see: Callable[[int, float], None]) -> None:
    """Call `see` for each step that vLLM has scheduled, with its tokens and when the scheduler began: vLLM's own
    statistics count what they believe that was not computed."""
    from vllm.v1.core.sched.scheduler import Scheduler

    plain = Scheduler.schedule

    def watched(self: Any, *args: Any, **more: Any) -> Any:
        began = time.monotonic()
        output = plain(self, *args, **more)
        see(output.total_num_scheduled_tokens, began)
        return output

    Scheduler.schedule = watched


class Clock:
    """CPU time of this thread in the methods of a class, without what it takes to look at the time. Those that do
    nothing are left as they are: vLLM calls some of them for every layer."""

    def __init__(self, kind: type) -> None:
        self.seconds = self._empty_s = 0.0
        self._is_inside = False
        empty = self._timed(lambda: None)
        for _ in range(EMPTY_CALLS):
            empty()
        self._empty_s, self.seconds = self.seconds / EMPTY_CALLS, 0.0
        for name, value in list(vars(kind).items()):
            if isinstance(value, FunctionType) and not name.startswith("__") and not _is_empty(value):
                setattr(kind, name, self._timed(value))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*args: Any, **more: Any) -> Any:
            if self._is_inside:
                return method(*args, **more)
            self._is_inside, began = True, time.thread_time()
            try:
                return method(*args, **more)
            finally:
                self._is_inside = False
                self.seconds += time.thread_time() - began - self._empty_s

        return timed


def _is_empty(method: FunctionType) -> bool:
    """Whether a method has nothing but a docstring."""

    def empty() -> None:
        """Nothing."""

    return method.__code__.co_code == empty.__code__.co_code


class Engine:
    """vLLM, and what it takes."""

    def __init__(self, model: str, config: dict[str, Any] | None) -> None:
        from vllm import LLM

        self._scheduled = 0
        watch_steps(self._count)
        self._clock: Clock | None = None
        if config is not None:
            from hicache.service.engines.vllm import HicacheConnector

            self._clock = Clock(HicacheConnector)
        self._llm: Final = LLM(model=model, **llm_arguments(config))

    def answer(self, question: Question) -> Answer:
        """Ask the model."""
        _settle()
        while question.forget and not self._llm.reset_prefix_cache():
            self._generate([0], 1)  # blocks that were saved are free after one more step
        with self._without_connector() if question.aside else nullcontext():
            _settle()
            scheduled, others_s, hooks_s = self._scheduled, _others_s(), self._hooks_s
            began_s, began = time.process_time(), time.monotonic()
            tokens = self._generate(question.prompt, question.new_tokens)
            seconds = time.monotonic() - began
            _settle()
        return Answer(
            tokens,
            self._scheduled - scheduled,
            seconds,
            time.process_time() - began_s,
            _others_s() - others_s + self._hooks_s - hooks_s,
        )

    @contextmanager
    def _without_connector(self) -> Iterator[None]:
        """vLLM as it is without one: neither its scheduler nor its worker has any. The session with the sidecar stays.
        Nothing may be under way."""
        from vllm.distributed.kv_transfer import kv_transfer_state

        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        kept = scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT
        scheduler.connector = kv_transfer_state._KV_CONNECTOR_AGENT = None
        try:
            yield
        finally:
            scheduler.connector, kv_transfer_state._KV_CONNECTOR_AGENT = kept

    def close(self) -> None:
        """End it."""
        self._llm.llm_engine.engine_core.shutdown()

    def _count(self, num_tokens: int, began: float) -> None:
        self._scheduled += num_tokens

    @property
    def _hooks_s(self) -> float:
        return self._clock.seconds if self._clock is not None else 0.0

    def _generate(self, prompt: list[int], new_tokens: int) -> list[int]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids)


def _others_s() -> float:
    """CPU of all other threads of this process."""
    return time.process_time() - time.thread_time()


def _settle() -> None:
    """Wait until nothing is under way on another thread."""
    before = float("-inf")
    while _others_s() - before > SETTLED_CPU_S:
        before = _others_s()
        time.sleep(SETTLED_S)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    asked = json.loads(sys.stdin.readline())
    engine = Engine(asked["model"], asked["config"])
    with suppress(BrokenPipeError):  # who asked is gone
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(asdict(engine.answer(Question(**json.loads(line))))), file=answers, flush=True)
    engine.close()


if __name__ == "__main__":
    main()
