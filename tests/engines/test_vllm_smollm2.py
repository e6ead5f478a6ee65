"""A real vLLM with real weights, SmolLM2-135M-Instruct in float32: its tokens, and what it computes for them."""

import math
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any, Final

import pytest

from hicache.layout import KVLayout
from hicache.tools.bench.engine_models import layout_of, make_smollm2
from tests.engines.running import BLOCK, Answers, Expected, Tokens, conversation_prompts, engine
from tests.engines.test_vllm import OWN_CACHE_OFF, arguments, garble, settings
from tests.service.serving import ServerProcess, ThreadServer

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

ROOM_PAGES: Final = 500
"""For all that the prompts leave."""
RESUME_S: Final = 5.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def layout(model: Path) -> KVLayout:
    return layout_of(model, page_size=BLOCK)


@pytest.fixture(scope="module")
def prompts() -> list[Tokens]:
    return conversation_prompts(50, seed=17, shortest=100, longest=300)


@pytest.fixture(scope="module")
def plain(model: Path, prompts: list[Tokens], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What an engine without any cache says."""
    with engine(model, tmp_path_factory.mktemp("plain"), None, **OWN_CACHE_OFF) as running:
        return running.ask(prompts)


def shape(layout: KVLayout) -> dict[str, Any]:
    """The layout as a sidecar is told it."""
    (group,) = layout.groups
    return {
        "num_layers": layout.num_layers, "num_kv_heads": group.num_kv_heads, "head_dim": group.head_dim,
        "dtype": layout.dtype.value, "page_size": layout.page_size,
    }  # fmt: skip


@pytest.fixture
def started(layout: KVLayout, tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """One sidecar after the other, each with what the one before has left on disk: the last of the list."""
    servers = [serve(layout, tmp_path)]
    try:
        yield servers
    finally:
        servers[-1].stop()


def serve(layout: KVLayout, directory: Path) -> ServerProcess:
    told = {f"layout.{name}": f'"{value}"' if name == "dtype" else value for name, value in shape(layout).items()}
    room = {"host.bytes": ROOM_PAGES * layout.page_bytes, "nvme.bytes": math.ceil(1.1 * ROOM_PAGES) * layout.page_bytes}
    return ServerProcess(directory, arguments(directory, **told, **room))


def test_fifty_prompts_have_their_tokens_and_what_is_cached_is_not_computed(
    model: Path, layout: KVLayout, prompts: list[Tokens], plain: Answers, started: list[ServerProcess], tmp_path: Path
) -> None:
    def wanted() -> list[int]:
        return [expected.scheduled(prompt, answer) for prompt, answer in zip(prompts, plain.tokens, strict=True)]

    expected = Expected()
    first, again = wanted(), wanted()
    assert sum(first) < 0.6 * sum(plain.scheduled)
    assert sum(again) < 0.15 * sum(plain.scheduled)
    with engine(model, tmp_path, settings(started[0]), **OWN_CACHE_OFF) as running:
        answers = running.ask(prompts)
    assert answers.tokens == plain.tokens
    assert answers.scheduled == first

    # Another engine finds what that one left.
    with engine(model, tmp_path, settings(started[0]), **OWN_CACHE_OFF) as running:
        answers = running.ask(prompts)
        assert answers.tokens == plain.tokens
        assert answers.scheduled == again

        # It goes on while there is no sidecar, and finds the next one, which has everything on disk.
        assert started[0].stop() == 0
        assert running.ask(prompts[:1])[:2] == (plain.tokens[:1], plain.scheduled[:1])
        started.append(serve(layout, tmp_path))
        began = asked = monotonic()
        while running.ask(prompts[:1]).scheduled == plain.scheduled[:1]:
            # How long a prompt takes to compute is the machine's: a later one than this must not have found nothing.
            assert asked - began < RESUME_S
            asked = monotonic()
        answers = running.ask(prompts)
    assert answers.tokens == plain.tokens
    assert answers.scheduled == again


def test_wrong_bytes_change_the_tokens(
    model: Path, layout: KVLayout, prompts: list[Tokens], plain: Answers, tmp_path: Path
) -> None:
    # The control: what is loaded is used.
    host = {"bytes": 150 * layout.page_bytes}
    server = ThreadServer({"socket_dir": str(tmp_path / "run"), "layout": shape(layout), "host": host})
    try:
        config = {"socket_dir": str(server.directory)}
        with engine(model, tmp_path, config, **OWN_CACHE_OFF) as running:
            assert running.ask(prompts[:5]).tokens == plain.tokens[:5]
            server.call(garble)
            assert running.ask(prompts[:5]).tokens != plain.tokens[:5]
    finally:
        server.close()
