"""Engines for tests: real ones, each in a process of its own, run by the interpreter that `make engines` installs."""

import json
import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from hicache.tools.bench import engine_models, engine_process
from tests.repository import ROOT

PYTHON: Final = Path(os.environ.get("HICACHE_ENGINES_PYTHON", ROOT / ".venv-engines" / "bin" / "python"))
BLOCK: Final = engine_process.BLOCK
VOCABULARY: Final = engine_models.VOCABULARY
NEW_TOKENS: Final = 8
SHAPE: Final = {"num_layers": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": '"float32"', "page_size": BLOCK}
"""The layout of the small model, as the sidecar is told it."""
PAGE_BYTES: Final = 2 * 4 * 2 * 32 * 4 * BLOCK
START_S: Final = 180.0
END_S: Final = 60.0
"""How long an engine may take to end."""

Tokens = list[int]


class Answers(NamedTuple):
    """What an engine made of prompts."""

    tokens: list[Tokens]
    scheduled: list[int]
    """Tokens computed, for each prompt, or for all where they were asked together."""
    seconds: list[float]
    waited_s: list[float]
    """The part of `seconds` in which nothing was computed: the scheduler asked what is cached, or all requests waited
    for pages."""
    cached: list[int]
    """Tokens of each prompt that vLLM says were cached."""


class Engine:
    """A vLLM that answers one question at a time."""

    def __init__(self, process: "subprocess.Popen[str]", errors: Path) -> None:
        self.process: Final = process
        self._errors: Final = errors

    def ask(
        self,
        prompts: Sequence[Tokens],
        *,
        together: bool = False,
        salt: str = "",
        adapter: Path | None = None,
        picture: int | None = None,
    ) -> Answers:
        """Greedy tokens for each prompt, one after the other or all at once; with a `cache_salt`, of the model with a
        LoRA adapter, and with a picture in each prompt, where they are given."""
        lora = None if adapter is None else str(adapter)
        said = self._say(
            {"prompts": list(prompts), "together": together, "salt": salt, "adapter": lora, "picture": picture}
        )
        return Answers(said["tokens"], said["scheduled"], said["seconds"], said["waited_s"], said["cached"])

    def reset(self) -> bool:
        """Forget what vLLM itself has kept."""
        return bool(self._say({"reset": True})["reset"])

    def forget(self) -> None:
        """Forget what vLLM itself has kept, so that only the sidecar has it."""
        self._say({"forget": True})

    def metrics(self) -> dict[str, float]:
        """What vLLM counts, by name, over all labels. It has to be told `disable_log_stats=False`."""
        counted: dict[str, float] = self._say({"metrics": True})["metrics"]
        return counted

    def log(self) -> str:
        """What it wrote to standard error."""
        return self._errors.read_text()

    def _say(self, question: dict[str, Any]) -> dict[str, Any]:
        self.begin(question)
        return self.end()

    def begin(self, question: dict[str, Any]) -> None:
        """Ask, and do not wait."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def end(self) -> dict[str, Any]:
        """The answer to what was asked."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine ended: {self.log()[-3000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def engine(
    model: Path, directory: Path, config: dict[str, Any] | None, *, processes: bool = False, **llm: Any
) -> Iterator[Engine]:
    """An engine. `config`: the connector's settings, None for none. `processes`: the engine's core and its worker have
    their own, as in production."""
    errors = directory / f"engine-{random.getrandbits(32):08x}.log"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(directory / "cache"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if processes else "0",
    }
    with errors.open("w") as written:
        process = subprocess.Popen(
            [str(PYTHON), str(ROOT / "tests" / "engines" / "engine.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=written, text=True, env=environment, cwd=directory,
        )  # fmt: skip
    running = Engine(process, errors)
    try:
        running.begin({"model": str(model), "config": config, "new_tokens": NEW_TOKENS, "llm": llm})
        assert running.end() == {"ready": True}
        yield running
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            ended(process)
        finally:
            process.stdout.close()


def ended(process: "subprocess.Popen[str]") -> int:
    """The exit status of a process that has been told to end. One that does not is killed, and fails the test."""
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


def conversation_prompts(num_prompts: int, seed: int, *, shortest: int = 200, longest: int = 700) -> list[Tokens]:
    """Prompts that share beginnings: some documents, of `shortest` to `longest` tokens, some conversations over each,
    all of other lengths."""
    rng = random.Random(seed)
    documents = [_tokens(rng, rng.randrange(shortest, longest)) for _ in range(4)]
    prompts: list[Tokens] = []
    while len(prompts) < num_prompts:
        if prompts and rng.random() < 0.4:
            before = rng.choice(prompts)
            prompts.append(before[: rng.randrange(1, len(before) + 1)] + _tokens(rng, rng.randrange(1, 120)))
        else:
            prompts.append(rng.choice(documents) + _tokens(rng, rng.randrange(1, 120)))
    return prompts


def _tokens(rng: random.Random, count: int) -> Tokens:
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


class Expected:
    """What a cache of whole blocks with room for everything finds: the model that the real one is compared with."""

    def __init__(self) -> None:
        self.blocks: Final[set[tuple[int, ...]]] = set()
        """What is cached: each block by all tokens up to its end."""

    def scheduled(self, prompt: Tokens, answer: Tokens) -> int:
        """Tokens that are computed for a prompt and its answer, all of whose full blocks are cached then."""
        most = (len(prompt) - 1) // BLOCK
        found = 0
        while found < most and tuple(prompt[: (found + 1) * BLOCK]) in self.blocks:
            found += 1
        # The KV of the last new token is never computed.
        whole = prompt + answer[:-1]
        self.blocks.update(tuple(whole[: end * BLOCK]) for end in range(1, len(whole) // BLOCK + 1))
        return len(whole) - found * BLOCK
