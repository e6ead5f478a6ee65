"""A real vLLM that offloads to host memory itself, with the sidecar as a tier below: by vLLM's own connector, tiering
manager, lookups and keys."""

from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL
from time import monotonic, sleep
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
from tests.engines.test_vllm import OWN_CACHE_OFF, arguments, garble
from tests.service.serving import ServerProcess, ThreadServer

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

CHUNKS: Final = {"num_layers": 1, "num_kv_heads": 1, "head_dim": PAGE_BYTES // (2 * BLOCK), "dtype": '"int8"'}
"""The sidecar's layout, where a page is a chunk of which nothing but its size is known."""

MODULE: Final = "hicache.service.engines.vllm"
PATIENT: Final = {"lookup_timeout_s": 20.0}
"""Where all of an engine is one process, its empty steps keep the interpreter from the tier's threads."""


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
    return ServerProcess(directory, arguments(directory, **{**layout, **more}))


def offloading(socket_dir: Path, **more: Any) -> dict[str, Any]:
    """vLLM's arguments. `more`: the tier's settings."""
    return with_connector({
        "kv_connector": "HicacheOffloadingConnector",
        "kv_connector_module_path": MODULE,
        "kv_connector_extra_config": {"hicache": {**PATIENT, "socket_dir": str(socket_dir), **more}},
    })


def tiering(socket_dir: Path, **more: Any) -> dict[str, Any]:
    """The same with vLLM's own connector, and the tier among its tiers."""
    tier = {"type": "HicacheTier", "module_path": MODULE, **PATIENT, "socket_dir": str(socket_dir), **more}
    spec = {"spec_name": "HicacheOffloadingSpec", "spec_module_path": MODULE}
    return with_connector({
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {**spec, "secondary_tiers": [tier]},
    })


def with_connector(config: dict[str, Any]) -> dict[str, Any]:
    config["kv_connector_extra_config"]["cpu_bytes_to_use"] = 500 * PAGE_BYTES
    return {**OWN_CACHE_OFF, "kv_transfer_config": {"kv_role": "kv_both", **config}}


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
        assert running.reset()
        anew = running.ask(prompts[:4])
    assert second.tokens == plain.tokens
    assert sum(second.scheduled) <= again
    # What was there before a reset is not found any more.
    assert anew.tokens == plain.tokens[:4]
    assert sum(anew.scheduled) >= bound(prompts[:4], plain.tokens[:4], again=False)
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


def test_wrong_bytes_change_the_tokens(
    model: Path, prompts: list[Tokens], plain: Answers, tmp_path: Path
) -> None:
    # The control: what the tier gives is used.
    layout = {"page_size": BLOCK, **CHUNKS, "dtype": "int8"}
    server = ThreadServer({"socket_dir": str(tmp_path / "run"), "layout": layout, "host": {"bytes": 999 * PAGE_BYTES}})
    try:
        with engine(model, tmp_path, None, **tiering(server.directory, weights="tiny")) as running:
            assert ask_and_settle(running, prompts[:5]).tokens == plain.tokens[:5]
        server.call(garble)
        with engine(model, tmp_path, None, **tiering(server.directory, weights="tiny")) as running:
            assert running.ask(prompts[:5]).tokens != plain.tokens[:5]
    finally:
        server.close()


def test_damaged_chunks_are_computed(
    model: Path, prompts: list[Tokens], plain: Answers, sidecar: ServerProcess, tmp_path: Path
) -> None:
    with engine(model, tmp_path, None, **offloading(sidecar.directory)) as running:
        ask_and_settle(running, prompts)
    assert sidecar.stop() == 0
    files = [each for each in (tmp_path / "nvme").rglob("*") if each.is_file()]
    num_flipped = 0
    for file in files:
        contents = bytearray(file.read_bytes())
        # Somewhere in every other chunk, where there are chunks: what is not zero.
        for at in range(PAGE_BYTES, len(contents), 2 * PAGE_BYTES):
            num_flipped += contents[at] != 0
            contents[at] ^= 1 if contents[at] else 0
        file.write_bytes(contents)
    assert num_flipped > 10
    restarted = start(tmp_path)
    try:
        with engine(model, tmp_path, None, **offloading(restarted.directory)) as running:
            damaged = running.ask(prompts)
            assert "the cache is there" not in running.log()
    finally:
        restarted.stop()
    assert damaged.tokens == plain.tokens
    assert sum(damaged.scheduled) > bound(prompts, plain.tokens, again=True)


def test_a_sidecar_that_is_killed_costs_no_request(
    model: Path, prompts: list[Tokens], plain: Answers, sidecar: ServerProcess, tmp_path: Path
) -> None:
    with engine(model, tmp_path, None, disable_log_stats=False, **offloading(sidecar.directory)) as running:
        assert running.ask(prompts[:6]).tokens == plain.tokens[:6]
        running.begin({"prompts": prompts[:12]})
        sleep(0.1)  # some loads and saves are under way
        sidecar.stop(SIGKILL)
        assert running.end()["tokens"] == plain.tokens[:12]
        before = running.metrics()[WRITTEN]
        again = start(tmp_path)
        try:
            began = monotonic()
            while "vllm tier: the cache is there again" not in running.log():
                assert monotonic() - began < 5.0
                assert running.ask(prompts[:1]).tokens == plain.tokens[:1]
            assert ask_and_settle(running, prompts[12:]).tokens == plain.tokens[12:]
            while running.metrics()[WRITTEN] <= before:
                assert monotonic() - began < 30.0
                running.ask([prompts[0][:3]])
        finally:
            again.stop()


WRITTEN: Final = "vllm:kv_offload_tiering_write_bytes"
"""What vLLM counts of what the tier has saved."""


def test_what_does_not_fit_is_told_and_the_engine_runs_without(
    model: Path, prompts: list[Tokens], plain: Answers, sidecar: ServerProcess, tmp_path: Path
) -> None:
    # Nobody has said whose chunks these are, as vLLM does not.
    with engine(model, tmp_path, None, **tiering(sidecar.directory)) as running:
        assert running.ask(prompts[:2]).tokens == plain.tokens[:2]
        assert running.log().count("weights: vLLM does not tell a tier") == 1
    # Digests that are others in each process.
    other = {**offloading(sidecar.directory), "prefix_caching_hash_algo": "xxhash"}
    with engine(model, tmp_path, None, **other) as running:
        assert running.ask(prompts[:2]).tokens == plain.tokens[:2]
        assert running.log().count("prefix_caching_hash_algo: xxhash is not one of sha256, sha256_cbor") == 1
    with (
        pytest.raises(AssertionError, match="weights: vLLM does not tell a tier"),
        engine(model, tmp_path, None, **tiering(sidecar.directory, strict=True)) as running,
    ):
        pass
