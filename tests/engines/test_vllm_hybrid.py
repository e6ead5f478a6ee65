"""A real vLLM with layers that have a window beside layers that have none: several groups of blocks, of which some are
given back while their request runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.engines.running import (
    BLOCK,
    PAGE_BYTES,
    VOCABULARY,
    Answers,
    Expected,
    Tokens,
    conversation_prompts,
    engine,
)
from tests.engines.test_vllm import OWN_CACHE_OFF, arguments, settings
from tests.engines.test_vllm_issues import cacheable, flip, only_on_disk, stats_of
from tests.engines.test_vllm_tier import ask_and_settle, offloading, start
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
    room = {"layout.num_layers": LAYERS, "host.bytes": 3_000 * PAGE_BYTES}
    server = ServerProcess(tmp_path, arguments(tmp_path, **room))
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


def test_of_a_load_that_fails_in_the_middle_what_came_is_kept(
    model: Path, prompts: list[Tokens], plain: Answers, sidecar: ServerProcess, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A page has the blocks of all groups, so that none of them lacks what another has. vLLM gives up a whole request
    whose load has failed where it has several groups: what had come is loaded once more."""
    number = max(range(len(prompts)), key=lambda each: len(prompts[each]))
    longest, right = prompts[number], plain.tokens[number]
    with engine(model, tmp_path, settings(sidecar), **OWN_CACHE_OFF) as running:
        assert running.ask([longest]).tokens == [right]
        flip(only_on_disk(sidecar, capsys), share=0.5)
        damaged = running.ask([longest])
        again = running.ask([longest])
    assert damaged.tokens == again.tokens == [right]
    assert stats_of(sidecar, capsys)["counters"]["corrupt_pages"]["nvme"] > 0
    # About half of it has come. The rest was computed, and is cached now.
    assert len(longest) // 4 < damaged.scheduled[0] < len(longest) * 3 // 4
    assert (damaged.scheduled[0] - len(longest) - len(right) + 1) % BLOCK == 0
    assert damaged.cached == [len(longest) + len(right) - 1 - damaged.scheduled[0]]
    assert again.cached == [cacheable(longest)]


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
    longest = max(prompts, key=len)
    more, short = longest + list(range(100, 100 + 2 * BLOCK)), longest[: len(longest) // 2]
    with engine(model, tmp_path, None, **OWN_CACHE_OFF) as running:
        wanted = running.ask([more, short, longest])
    with engine(model, tmp_path, settings(sidecar)) as running:
        running.ask([longest])
        sidecar.stop()
        fresh = tmp_path / "fresh"
        fresh.mkdir()
        again = ServerProcess(tmp_path, arguments(fresh, **{"layout.num_layers": LAYERS}))
        try:
            with_own = running.ask([more])
            with engine(model, tmp_path, settings(again), **OWN_CACHE_OFF) as other:
                later = other.ask([short, longest, short])
        finally:
            again.stop()
    assert with_own.tokens == wanted.tokens[:1]
    assert with_own.scheduled[0] < 4 * BLOCK, "vLLM had it"
    assert later.tokens == [wanted.tokens[1], wanted.tokens[2], wanted.tokens[1]]


def test_windows_below_vllms_own_offloading(
    model: Path, prompts: list[Tokens], plain: Answers, tmp_path: Path
) -> None:
    # A chunk is a block of one group: as many layers as the largest has.
    largest = LAYERS // 3 * (PAGE_BYTES // 4)
    server = start(tmp_path, **{"layout.head_dim": largest // (2 * BLOCK)})
    try:
        computed = []
        for _ in range(2):
            with engine(model, tmp_path, None, **offloading(server.directory, strict=True)) as running:
                answers = ask_and_settle(running, prompts)
            assert answers.tokens == plain.tokens
            computed.append(sum(answers.scheduled))
    finally:
        server.stop()
    # vLLM hands on those blocks of a window that a request ends with: so the same prompts are found, and few that share
    # their beginning.
    assert computed[0] < sum(plain.scheduled)
    assert computed[1] < 0.5 * sum(plain.scheduled)


def make_lfm2(directory: Path) -> Path:
    """A small LFM2 with random weights: layers with a state beside one of attention."""
    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # as above
    torch.manual_seed(9)
    config = Lfm2Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"], max_position_embeddings=2048,
        block_auto_adjust_ff_dim=False,
    )  # fmt: skip
    # vLLM asks for these, too.
    config.conv_dim = config.block_dim = config.hidden_size
    Lfm2ForCausalLM(config).save_pretrained(directory)
    return directory


def test_recurrent_layers_are_refused_and_the_engine_runs_without(
    prompts: list[Tokens], sidecar: ServerProcess, tmp_path: Path
) -> None:
    model = make_lfm2(tmp_path / "lfm2")
    said = []
    for config in (None, settings(sidecar)):
        with engine(model, tmp_path, config, max_model_len=1024, **OWN_CACHE_OFF) as running:
            said.append(running.ask([each[:200] for each in prompts[:3]])[:2])
    assert said[0] == said[1]
    assert "runs without the cache: kv_cache_groups: MambaSpec is not one of" in running.log()
