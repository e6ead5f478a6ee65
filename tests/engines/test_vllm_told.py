"""What a real vLLM tells of the connector: Prometheus metrics by its own registry, and KV events by its publisher."""

import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from hicache.tools.bench.engine_models import make_tiny
from tests.engines.running import BLOCK, PAGE_BYTES, Engine, Expected, Tokens, conversation_prompts, engine
from tests.engines.test_vllm import OWN_CACHE_OFF, arguments, settings
from tests.service.serving import ServerProcess
from tests.service.test_events import connected, events_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def test_what_is_counted_and_published_is_what_has_happened(tmp_path: Path) -> None:
    model, prompts = make_tiny(tmp_path / "model"), conversation_prompts(12, seed=23)
    told: dict[str, Any] = {
        **OWN_CACHE_OFF,
        "disable_log_stats": False,
        "kv_events_config": {
            "enable_kv_cache_events": True, "publisher": "zmq",
            "endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay",
        },
    }  # fmt: skip
    sidecar = ServerProcess(tmp_path, arguments(tmp_path))
    try:
        with engine(model, tmp_path, settings(sidecar), **told) as running:
            answers = running.ask(prompts)
            expected = Expected()
            for prompt, answer in zip(prompts, answers.tokens, strict=True):
                expected.scheduled(prompt, answer)
            metrics = until_saved(running, len(expected.blocks), prompts[0][:3])
            published = replayed(f"ipc://{tmp_path}/replay")
    finally:
        sidecar.stop()
    num_tokens = sum(len(prompt) + len(answer) - 1 for prompt, answer in zip(prompts, answers.tokens, strict=True))
    num_loaded = num_tokens - sum(answers.scheduled)
    assert num_loaded > 10 * BLOCK
    assert metrics["loaded_pages"] * BLOCK == num_loaded
    assert metrics["loaded_bytes"] == metrics["loaded_pages"] * PAGE_BYTES
    assert metrics["saved_bytes"] == len(expected.blocks) * PAGE_BYTES
    assert metrics["unloaded_pages"] == metrics["unsaved_pages"] == metrics["unanswered_lookups"] == 0
    assert metrics["lookups"] >= len(prompts)
    assert num_loaded <= metrics["found_tokens"] <= metrics["asked_tokens"]
    assert {"load_seconds", "save_seconds"} <= metrics.keys(), "vLLM's reader gives whole numbers of them"
    # What events say, a router can put together: the tokens up to the end of each block.
    chains: dict[Any, tuple[int, ...]] = {None: ()}
    for event in published:
        assert event["type"] == "BlockStored"
        assert event["medium"] == "CPU"
        assert event["block_size"] == BLOCK
        (name,) = event["block_hashes"]
        chains[name] = chains[event["parent_block_hash"]] + tuple(event["token_ids"])
    del chains[None]
    assert len(chains) == len(set(chains.values())), "one name for each"
    assert set(chains.values()) == expected.blocks


def replayed(endpoint: str) -> list[dict[str, Any]]:
    """All events that vLLM has published, from its replay."""
    found: list[dict[str, Any]] = []
    with connected(zmq.DEALER, endpoint) as connection:
        connection.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            _, _, sequence, payload = connection.recv_multipart()
            if int.from_bytes(sequence, "big", signed=True) == -1:
                return found
            found += events_of(payload)


def until_saved(running: Engine, num_pages: int, short: Tokens) -> dict[str, float]:
    """Let the engine make steps until so many pages are saved; its metrics then, without their prefix."""
    deadline = time.monotonic() + 60.0
    while True:
        prefix = "vllm:hicache_"
        metrics = {name.removeprefix(prefix): value for name, value in running.metrics().items() if prefix in name}
        if metrics["saved_pages"] >= num_pages:
            running.ask([short])
            assert metrics["saved_pages"] == num_pages
            return metrics
        assert time.monotonic() < deadline, metrics
        running.ask([short])
