"""A real vLLM that offloads to host memory itself, with the sidecar as a tier below: by vLLM's own connector, tiering
manager, lookups and keys."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from hicache.tools.bench.engine_models import make_tiny
from tests.engines.running import (
    BLOCK,
    NEW_TOKENS,
    PAGE_BYTES,
    Answers,
    Engine,
    Expected,
    Tokens,
    conversation_prompts,
    engine,
)
from tests.engines.test_vllm import OWN_CACHE_OFF, arguments
from tests.service.serving import ServerProcess

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

CHUNKS: Final = {"num_layers": 1, "num_kv_heads": 1, "head_dim": PAGE_BYTES // (2 * BLOCK), "dtype": '"int8"'}
"""The sidecar's layout, where a page is a chunk of which nothing but its size is known."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts() -> list[Tokens]:
    return conversation_prompts(20, seed=17)


@pytest.fixture(scope="module")
def plain(model: Path, prompts: list[Tokens], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What an engine without any cache says."""
    with engine(model, tmp_path_factory.mktemp("plain"), None, **OWN_CACHE_OFF) as running:
        return running.ask(prompts)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ServerProcess]:
    server = start(tmp_path)
    try:
        yield server
    finally:
        server.stop()


def start(directory: Path, **more: Any) -> ServerProcess:
    layout = {f"layout.{name}": value for name, value in CHUNKS.items()}
    return ServerProcess(directory, arguments(directory, **layout, **more))


def offloading(socket_dir: Path, **more: Any) -> dict[str, Any]:
    """vLLM's arguments. `more`: the tier's settings."""
    return {
        **OWN_CACHE_OFF,
        "kv_transfer_config": {
            "kv_connector": "HicacheOffloadingConnector",
            "kv_connector_module_path": "hicache.service.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": 500 * PAGE_BYTES,
                "hicache": {"socket_dir": str(socket_dir), **more},
            },
        },
    }


def ask_and_settle(running: Engine, prompts: list[Tokens]) -> Answers:
    """Ask, and let vLLM hand on what it has: it stores in the step after, and cascades when that has ended."""
    answers = running.ask(prompts)
    running.ask([prompts[0][:3]])
    return answers


def bound(prompts: list[Tokens], answers: list[Tokens], *, again: bool) -> int:
    """Most tokens that are computed, as a cache of whole blocks needs for its prompts."""
    expected = Expected()
    first = sum(expected.scheduled(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True))
    if not again:
        return first
    return sum(expected.scheduled(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True))


def test_chunks_come_back_in_other_engines_and_from_another_sidecar(
    model: Path, prompts: list[Tokens], plain: Answers, sidecar: ServerProcess, tmp_path: Path
) -> None:
    with engine(model, tmp_path, None, **offloading(sidecar.directory, strict=True)) as running:
        first = ask_and_settle(running, prompts)
    assert first.tokens == plain.tokens
    again = bound(prompts, plain.tokens, again=True)
    assert again < 0.3 * sum(plain.scheduled)
    # What this one has, the sidecar gave: vLLM's own memory went with the first.
    with engine(model, tmp_path, None, **offloading(sidecar.directory, strict=True)) as running:
        second = running.ask(prompts)
    assert second.tokens == plain.tokens
    assert sum(second.scheduled) <= again
    assert sidecar.stop() == 0
    restarted = start(tmp_path)
    try:
        with engine(model, tmp_path, None, **offloading(restarted.directory, strict=True), processes=True) as running:
            third = running.ask(prompts)
    finally:
        restarted.stop()
    assert third.tokens == plain.tokens
    assert max(third.seconds) < 60
    assert NEW_TOKENS < BLOCK
