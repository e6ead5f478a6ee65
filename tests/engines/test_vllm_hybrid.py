"""A real vLLM with layers that have a window beside layers that have none: several groups of blocks, of which some are
given back while their request runs."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.engines.running import (
    BLOCK,
    VOCABULARY,
    Answers,
    Engine,
    Expected,
    Tokens,
    conversation_prompts,
    engine,
)
from tests.engines.test_vllm import OWN_CACHE_OFF, arguments, settings
from tests.service.serving import ServerProcess

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

LAYERS: Final = 6
WINDOW: Final = 128


def make_gemma(directory: Path) -> Path:
    """A small Gemma 3 with random weights: two layers of three look at the last tokens only."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # its thread would outlive the test
    torch.manual_seed(5)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * (LAYERS // 3),
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def prompts() -> list[Tokens]:
    return conversation_prompts(24, seed=11)


@pytest.fixture(scope="module")
def plain(model: Path, prompts: list[Tokens], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    with engine(model, tmp_path_factory.mktemp("plain"), None, **OWN_CACHE_OFF) as running:
        return running.ask(prompts)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path, arguments(tmp_path, **{"layout.num_layers": LAYERS}))
    try:
        yield server
    finally:
        server.stop()


def test_windows_beside_full_attention(
    model: Path, prompts: list[Tokens], plain: Answers, sidecar: ServerProcess, tmp_path: Path
) -> None:
    expected = Expected()
    wanted = [expected.scheduled(prompt, answer) for prompt, answer in zip(prompts, plain.tokens, strict=True)]
    with engine(model, tmp_path, settings(sidecar), **OWN_CACHE_OFF) as running:
        first = running.ask(prompts)
    assert "without the cache" not in running.log()
    assert first.tokens == plain.tokens
    assert first.scheduled == wanted
    assert sum(wanted) < 0.6 * sum(plain.scheduled)
    again = [expected.scheduled(prompt, answer) for prompt, answer in zip(prompts, plain.tokens, strict=True)]
    with engine(model, tmp_path, settings(sidecar), **OWN_CACHE_OFF) as running:
        second = running.ask(prompts)
    assert second.tokens == plain.tokens
    assert second.scheduled == again


def test_blocks_that_are_given_back_early_are_not_saved_as_others(
    model: Path, prompts: list[Tokens], plain: Answers, sidecar: ServerProcess, tmp_path: Path
) -> None:
    # Few blocks, small steps and vLLM's own cache: windows pass blocks by, others get them at once, and prefixes are
    # there without the blocks in front of their window.
    tight: dict[str, Any] = {
        "num_gpu_blocks_override": 120, "max_num_seqs": 6, "max_model_len": 1536, "max_num_batched_tokens": 4 * BLOCK,
    }  # fmt: skip
    with engine(model, tmp_path, settings(sidecar), **tight) as running:
        first = running.ask(prompts, together=True)
    # What all of that has saved is all that this one has.
    with engine(model, tmp_path, settings(sidecar), **OWN_CACHE_OFF) as running:
        second = running.ask(prompts)
        third = running.ask(prompts)
    assert first.tokens == plain.tokens
    assert second.tokens == third.tokens == plain.tokens
    assert sum(second.scheduled) < 0.6 * sum(plain.scheduled)
    assert max(third.scheduled) <= 2 * BLOCK + 8


def test_a_prefix_that_only_vllm_has_is_saved_whole_or_not(
    model: Path, prompts: list[Tokens], plain: Answers, sidecar: ServerProcess, tmp_path: Path
) -> None:
    """vLLM has a prefix in its own memory without the blocks that windows have passed, and the sidecar was started
    anew with nothing."""
    long = max(range(len(prompts)), key=lambda at: len(prompts[at]))
    short = prompts[long][: len(prompts[long]) // 2]
    with engine(model, tmp_path, None, **OWN_CACHE_OFF) as running:
        wanted = running.ask([short, prompts[long]])
    with engine(model, tmp_path, settings(sidecar)) as running:
        running.ask([prompts[long]])
        sidecar.stop()
        fresh = tmp_path / "fresh"
        fresh.mkdir()
        again = ServerProcess(tmp_path, arguments(fresh, **{"layout.num_layers": LAYERS}))
        try:
            until_the_scheduler_is_back(running, prompts[long])
            assert running.ask([prompts[long]]).tokens == [wanted.tokens[1]]
            with engine(model, tmp_path, settings(again), **OWN_CACHE_OFF) as other:
                assert other.ask([short, prompts[long], short]).tokens == [
                    wanted.tokens[0], wanted.tokens[1], wanted.tokens[0],
                ]  # fmt: skip
        finally:
            again.stop()


def until_the_scheduler_is_back(running: Engine, prompt: Tokens) -> None:
    """Ask until the scheduler's side has found a sidecar again; the worker's has had no reason to miss it."""
    deadline = time.monotonic() + 30.0
    while "vllm scheduler: the cache is there again" not in running.log():
        assert time.monotonic() < deadline
        running.ask([prompt])
