"""A real vLLM with the connector: the tokens are those of an engine without it, and what is cached is not computed."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from hicache.tools.bench.engine_models import make_tiny
from tests.engines.running import (
    NEW_TOKENS,
    PAGE_BYTES,
    SHAPE,
    Answers,
    Expected,
    Tokens,
    conversation_prompts,
    engine,
)
from tests.service.serving import ServerProcess, ThreadServer

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

OWN_CACHE_OFF: Final[dict[str, Any]] = {"enable_prefix_caching": False}
"""So that every hit is the sidecar's."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts() -> list[Tokens]:
    return conversation_prompts(50, seed=7)


@pytest.fixture(scope="module")
def plain(model: Path, prompts: list[Tokens], tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What an engine without any cache says."""
    with engine(model, tmp_path_factory.mktemp("plain"), None, **OWN_CACHE_OFF) as running:
        return running.ask(prompts)


def arguments(directory: Path, **more: Any) -> list[str]:
    """Options of a sidecar for the small model, with room for everything, in memory and on disk."""
    values = {
        **{f"layout.{name}": value for name, value in SHAPE.items()},
        "host.bytes": 2_000 * PAGE_BYTES,
        "nvme.dir": f'["{directory / "nvme"}"]',
        "nvme.bytes": 4_000 * PAGE_BYTES,
        "write_policy": '"write-through"',
        **more,
    }
    (directory / "nvme").mkdir(exist_ok=True)
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path, arguments(tmp_path))
    try:
        yield server
    finally:
        server.stop()


def settings(server: ServerProcess, **more: Any) -> dict[str, Any]:
    # Where a machine is shared, a lookup may take longer than an engine would wait for: what is counted is no race.
    return {"socket_dir": str(server.directory), "lookup_timeout_s": 10.0, **more}


@pytest.mark.smoke
def test_what_is_cached_is_not_computed_and_the_tokens_are_the_same(
    model: Path, prompts: list[Tokens], plain: Answers, sidecar: ServerProcess, tmp_path: Path
) -> None:
    expected = Expected()
    with engine(model, tmp_path, settings(sidecar), **OWN_CACHE_OFF) as running:
        first = running.ask(prompts)
    wanted = [expected.scheduled(prompt, answer) for prompt, answer in zip(prompts, plain.tokens, strict=True)]
    assert first.tokens == plain.tokens
    assert sum(wanted) < 0.6 * sum(plain.scheduled)
    assert first.scheduled == wanted

    # A new engine finds what the first one left.
    again = [expected.scheduled(prompt, answer) for prompt, answer in zip(prompts, plain.tokens, strict=True)]
    with engine(model, tmp_path, settings(sidecar), **OWN_CACHE_OFF) as running:
        second = running.ask(prompts)
    assert second.tokens == plain.tokens
    assert second.scheduled == again
    assert max(again) <= NEW_TOKENS + 31 + 31

    # And so does one of a sidecar that was started again.
    assert sidecar.stop() == 0
    restarted = ServerProcess(tmp_path, arguments(tmp_path))
    try:
        with engine(model, tmp_path, settings(restarted), **OWN_CACHE_OFF) as running:
            third = running.ask(prompts)
    finally:
        restarted.stop()
    assert third.tokens == plain.tokens
    assert third.scheduled == again


def test_beside_vllms_own_cache_and_with_many_requests_at_once(
    model: Path, prompts: list[Tokens], plain: Answers, sidecar: ServerProcess, tmp_path: Path
) -> None:
    # So few blocks that requests are preempted, and come back.
    few: dict[str, Any] = {"num_gpu_blocks_override": 96, "max_num_seqs": 8, "max_model_len": 2048}
    with engine(model, tmp_path, settings(sidecar), **few) as running:
        first = running.ask(prompts, together=True)
        # Blocks that were saved are free when the engine has made another step.
        while not running.reset():
            running.ask([prompts[0][:3]])
        second = running.ask(prompts, together=True)
    assert first.tokens == second.tokens == plain.tokens


def test_with_processes_for_core_and_worker(
    model: Path, prompts: list[Tokens], plain: Answers, sidecar: ServerProcess, tmp_path: Path
) -> None:
    # As it runs in production: the two sides of the connector share nothing but plans.
    for _ in range(2):
        with engine(model, tmp_path, settings(sidecar), processes=True) as running:
            answers = running.ask(prompts[:8])
        assert answers.tokens == plain.tokens[:8]
    assert max(answers.seconds) < 60


@pytest.mark.smoke
def test_wrong_bytes_change_the_tokens(
    model: Path, prompts: list[Tokens], plain: Answers, tmp_path: Path
) -> None:
    # The control: what is loaded is used, and the tests above would see it if it were wrong.
    tree: dict[str, object] = {
        "socket_dir": str(tmp_path / "run"),
        "layout": {name: value.strip('"') if isinstance(value, str) else value for name, value in SHAPE.items()},
        "host": {"bytes": 2_000 * PAGE_BYTES},
    }
    server = ThreadServer(tree)
    try:
        config = {"socket_dir": str(server.directory)}
        with engine(model, tmp_path, config, **OWN_CACHE_OFF) as running:
            assert running.ask(prompts[:5]).tokens == plain.tokens[:5]
            server.call(garble)
            assert running.ask(prompts[:5]).tokens != plain.tokens[:5]
    finally:
        server.close()


def garble(server: Any) -> None:
    """Turn every page of the arena into other numbers."""
    host = server.cache.tiers["host"]
    for slot in range(host.capacity_pages):
        page = host.tensor()[slot].view(torch.float32)
        page.copy_(page.flip(0) + 1.0)


def test_a_sidecar_that_comes_later_is_found(
    model: Path, prompts: list[Tokens], plain: Answers, tmp_path: Path
) -> None:
    config = {"socket_dir": str(tmp_path / "run")}
    with engine(model, tmp_path, config, **OWN_CACHE_OFF) as running:
        assert running.ask(prompts[:3])[:2] == (plain.tokens[:3], plain.scheduled[:3])
        server = ServerProcess(tmp_path, arguments(tmp_path))
        try:
            began = time.monotonic()
            while running.ask(prompts[:1]).scheduled == plain.scheduled[:1]:
                assert time.monotonic() - began < 5.0
            assert running.ask(prompts[:3]).tokens == plain.tokens[:3]
        finally:
            server.stop()
    # Each side says it once.
    for side in ("scheduler", "worker"):
        assert running.log().count(f"hicache, vllm {side}: going on without the cache") == 1


@pytest.mark.parametrize("after_s", [0.0, pytest.param(0.05, marks=pytest.mark.smoke), 0.2, 0.6])
def test_a_sidecar_that_is_killed_costs_no_request(
    model: Path, prompts: list[Tokens], plain: Answers, sidecar: ServerProcess, tmp_path: Path, after_s: float
) -> None:
    some, said = prompts[:12], plain.tokens[:12]
    with engine(model, tmp_path, settings(sidecar), **OWN_CACHE_OFF) as running:
        assert running.ask(some[:6]).tokens == said[:6]
        # Half of them load, the others save, while it dies.
        running.begin({"prompts": some})
        time.sleep(after_s)  # the moment is the test's subject
        sidecar.stop(signal.SIGKILL)
        assert running.end()["tokens"] == said
        assert running.ask(some).tokens == said
        again = ServerProcess(tmp_path, arguments(tmp_path))
        try:
            began = time.monotonic()
            while running.ask(some[:1]).scheduled == plain.scheduled[:1]:
                assert time.monotonic() - began < 5.0
            assert running.ask(some).tokens == said
        finally:
            again.stop()


def test_a_sidecar_that_stands_still_is_not_waited_for(
    model: Path, prompts: list[Tokens], plain: Answers, sidecar: ServerProcess, tmp_path: Path
) -> None:
    config = settings(sidecar, lookup_timeout_s=0.25, load_timeout_s=1.0, save_timeout_s=1.0)
    with engine(model, tmp_path, config, **OWN_CACHE_OFF) as running:
        assert running.ask(prompts[:4]).tokens == plain.tokens[:4]
        os.kill(sidecar.process.pid, signal.SIGSTOP)
        try:
            stopped = running.ask(prompts[:4])
        finally:
            os.kill(sidecar.process.pid, signal.SIGCONT)
        assert stopped.tokens == plain.tokens[:4]
        assert stopped.scheduled == plain.scheduled[:4]
        assert max(stopped.waited_s) < 1.0 + 2.0


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"layout.page_size": 16}, "start it with `hicache serve --set layout.num_layers=4"),
        ({"tenants.a.secret_sha256": '"' + "0" * 64 + '"'}, "secret"),
    ],
)
def test_what_does_not_fit_is_told_and_the_engine_runs_without(
    model: Path, prompts: list[Tokens], plain: Answers, tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    server = ServerProcess(tmp_path, arguments(tmp_path, **change))
    try:
        with engine(model, tmp_path, settings(server), **OWN_CACHE_OFF) as running:
            assert running.ask(prompts[:2])[:2] == (plain.tokens[:2], plain.scheduled[:2])
        assert line in running.log()
        with (
            pytest.raises(AssertionError, match="the engine ended"),
            engine(model, tmp_path, settings(server, strict=True)) as running,
        ):
            pass
    finally:
        server.stop()
