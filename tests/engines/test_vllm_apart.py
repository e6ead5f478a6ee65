"""A real vLLM whose requests bring what keeps them apart, a salt, an adapter, a picture; with a model that drafts; and
with several ranks."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import save_file

from hicache.tools.bench.engine_models import make_tiny
from tests.engines.pictures import PICTURE, PICTURE_TOKENS, make_idefics
from tests.engines.running import BLOCK, VOCABULARY, Answers, Engine, Tokens, engine
from tests.engines.test_vllm import OWN_CACHE_OFF, arguments, settings
from tests.engines.test_vllm_issues import cacheable, computed_alone
from tests.service.serving import ServerProcess

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

RANK: Final = 8
WITH_ADAPTERS: Final[dict[str, Any]] = {**OWN_CACHE_OFF, "enable_lora": True, "max_lora_rank": RANK, "max_loras": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts() -> list[Tokens]:
    rng = random.Random(41)
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in (300, 500)]


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path, arguments(tmp_path))
    try:
        yield server
    finally:
        server.stop()


def make_adapter(directory: Path, *, seed: int) -> Path:
    """A LoRA adapter of the small model's queries and values, with random weights."""
    directory.mkdir()
    noise = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(4):
        for name, size in (("q_proj", 256), ("v_proj", 64)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, 256, generator=noise) / 16
            weights[f"{prefix}.lora_B.weight"] = torch.randn(size, RANK, generator=noise) / 2
    save_file(weights, directory / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(told))
    return directory


def is_new(answers: Answers, prompts: list[Tokens]) -> bool:
    """Whether everything was computed; otherwise all that may be was not."""
    if answers.scheduled == [computed_alone(each) for each in prompts]:
        return True
    assert answers.scheduled == [computed_alone(each) - cacheable(each) for each in prompts]
    return False


def test_prompts_under_other_salts_share_nothing(
    model: Path, prompts: list[Tokens], sidecar: ServerProcess, tmp_path: Path
) -> None:
    found, tokens = [], []
    for _ in range(2):
        with engine(model, tmp_path, settings(sidecar), **OWN_CACHE_OFF) as running:
            for salt in ("", "a", "b", "a", ""):
                answers = running.ask(prompts, salt=salt)
                found.append(is_new(answers, prompts))
                tokens.append(answers.tokens)
    assert found == [True, True, True, False, False] + [False] * 5, "the first time each, and after a restart never"
    assert all(each == tokens[0] for each in tokens)


def test_adapters_are_told_apart_by_what_is_in_them(
    model: Path, prompts: list[Tokens], sidecar: ServerProcess, tmp_path: Path
) -> None:
    one, other = make_adapter(tmp_path / "one", seed=1), make_adapter(tmp_path / "other", seed=2)
    same = Path(shutil.copytree(one, tmp_path / "same"))
    with engine(model, tmp_path, None, **WITH_ADAPTERS) as running:
        right = {adapter: running.ask(prompts, adapter=adapter).tokens for adapter in (None, one, other)}
    right[same] = right[one]
    assert right[None] != right[one] != right[other] != right[None]
    found = []
    for adapters in ((None, one, other, same, one, other, None), (same, other, None)):
        with engine(model, tmp_path, settings(sidecar), **WITH_ADAPTERS) as running:
            # Before it has loaded one, it has not shown how. Servers load theirs before they are asked for.
            running.ask([prompts[0][: BLOCK // 2]], adapter=other)
            for adapter in adapters:
                answers = running.ask(prompts, adapter=adapter)
                assert answers.tokens == right[adapter]
                found.append(is_new(answers, prompts))
    assert found == [True, True, True, False, False, False, False, False, False, False]


def test_an_adapter_is_what_was_loaded_whatever_its_files_hold(
    model: Path, prompts: list[Tokens], sidecar: ServerProcess, tmp_path: Path
) -> None:
    one, other = make_adapter(tmp_path / "one", seed=1), make_adapter(tmp_path / "other", seed=2)
    third = make_adapter(tmp_path / "third", seed=3)
    with engine(model, tmp_path, None, **WITH_ADAPTERS) as running:
        right = [running.ask(prompts, adapter=adapter).tokens for adapter in (one, other, third)]
    changing = Path(shutil.copytree(one, tmp_path / "changing"))

    def replace(source: Path) -> None:
        # In place, as where a trainer writes.
        for file in source.iterdir():
            with (changing / file.name).open("r+b") as written:
                written.write(file.read_bytes())

    def asked(running: Engine, adapter: Path) -> tuple[int, bool]:
        """Which of them answered, and whether it computed all of it."""
        answers = running.ask(prompts, adapter=adapter)
        return right.index(answers.tokens), is_new(answers, prompts)

    alone = {**WITH_ADAPTERS, "max_loras": 1}
    with engine(model, tmp_path, settings(sidecar), **alone) as running:
        assert asked(running, changing) == (0, True)
        replace(other)
        assert asked(running, changing) == (0, False), "vLLM has the one that it has read"
        assert asked(running, third) == (2, True)
        # Now it has to read the files again. What was computed before is not for what they hold now, nor is it certain
        # what vLLM itself has kept.
        assert asked(running, changing) == (1, True)
        assert asked(running, changing) == (1, True)
        # One that has stayed the same has what is cached also when vLLM had put it out of memory.
        assert asked(running, third) == (2, False)
    with engine(model, tmp_path, settings(sidecar), **alone) as running:
        assert asked(running, changing) == (1, True), "what was computed with the other one is not found"
        assert asked(running, third) == (2, False)
        assert asked(running, changing) == (1, False)
        assert asked(running, one) == (0, False)


def test_pictures_are_told_apart_by_what_is_in_them(sidecar: ServerProcess, tmp_path: Path) -> None:
    model, rng = make_idefics(tmp_path / "idefics"), random.Random(43)
    before, behind = ([rng.randrange(9, VOCABULARY) for _ in range(length)] for length in (150, 100))
    # The same picture at another place is another prompt.
    prompts = [[*before, PICTURE, *behind], [*before, *behind[:8], PICTURE, *behind[8:]]]
    # As vLLM schedules them.
    whole = [each + [PICTURE] * (PICTURE_TOKENS - 1) for each in prompts]
    looking: dict[str, Any] = {**OWN_CACHE_OFF, "skip_tokenizer_init": False, "mm_hasher_algorithm": "sha256"}
    with engine(model, tmp_path, None, **looking) as running:
        right = {number: running.ask(prompts, picture=number).tokens for number in (1, 2)}
    assert right[1] != right[2]
    found = []
    for numbers in ((1, 2, 1), (2, 1)):
        with engine(model, tmp_path, settings(sidecar), **looking) as running:
            for number in numbers:
                answers = running.ask(prompts, picture=number)
                assert answers.tokens == right[number]
                found.append(is_new(answers, whole))
    assert found == [True, True, False, False, False]


def test_what_drafts_has_part_in_whose_pages_they_are(
    model: Path, prompts: list[Tokens], tmp_path: Path
) -> None:
    # Its layers have KV in the same blocks.
    server = ServerProcess(tmp_path, arguments(tmp_path, **{"layout.num_layers": 8}))
    drafts = [make_tiny(tmp_path / str(seed), seed=seed) for seed in (3, 4)]
    found = []
    try:
        with engine(model, tmp_path, None, **OWN_CACHE_OFF) as running:
            right = running.ask(prompts).tokens
        for draft in (drafts[0], drafts[0], drafts[1]):
            speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
            with engine(
                model, tmp_path, settings(server), speculative_config=speculative, **OWN_CACHE_OFF
            ) as running:
                answers = running.ask(prompts)
            assert answers.tokens == right
            # How many tokens are computed depends on how many are guessed right.
            found.append([each > len(prompt) for each, prompt in zip(answers.scheduled, prompts, strict=True)])
    finally:
        server.stop()
    assert found == [[True, True], [False, False], [True, True]]


def test_two_ranks_find_their_pages_after_a_restart(
    model: Path, prompts: list[Tokens], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # Each rank has one of the two heads, so that a page is half as large.
    server = ServerProcess(tmp_path, arguments(tmp_path, **{"layout.num_kv_heads": 1}))
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", **WITH_ADAPTERS}
    adapters = (None, make_adapter(tmp_path / "adapter", seed=1))
    try:
        with engine(model, tmp_path, None, **ranks) as running:
            right = {adapter: running.ask(prompts, adapter=adapter) for adapter in adapters}
        assert all(is_new(each, prompts) for each in right.values())
        for is_first in (True, False):
            with engine(model, tmp_path, settings(server), **ranks) as running:
                running.ask([prompts[0][: BLOCK // 2]], adapter=adapters[1])
                for adapter in adapters:
                    answers = running.ask(prompts, adapter=adapter)
                    assert answers.tokens == right[adapter].tokens
                    assert is_new(answers, prompts) == is_first
    finally:
        server.stop()
