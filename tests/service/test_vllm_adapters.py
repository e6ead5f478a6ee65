"""Digests of LoRA adapters: read by a thread, of what files hold, and of nobody when they have changed."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache.service.engines.vllm.adapters import Adapters
from tests.service.serving import WAIT_S

PATIENCE_S = 0.2


@pytest.fixture
def adapters() -> Iterator[Adapters]:
    found = Adapters(look_s=0.0, patience_s=PATIENCE_S)
    yield found
    found.close()


def make(directory: Path, weights: bytes = b"1", alpha: int = 16) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(weights)
    (directory / "adapter_config.json").write_text(f'{{"lora_alpha": {alpha}}}')
    return directory


def lora(path: Path, number: int = 1) -> SimpleNamespace:
    return SimpleNamespace(lora_path=str(path), lora_int_id=number)


def digest(adapters: Adapters, asked: SimpleNamespace) -> str:
    """What is known of an adapter after another look, as a scheduler learns it step by step."""
    deadline = time.monotonic() + WAIT_S
    while not adapters.is_settled(asked):
        assert time.monotonic() < deadline
        os.sched_yield()
    return adapters.digest(asked)


def test_it_is_of_weights_and_of_what_scales_them(adapters: Adapters, tmp_path: Path) -> None:
    found = [
        digest(adapters, lora(make(tmp_path / "a"))),
        digest(adapters, lora(make(tmp_path / "b", weights=b"2"), 2)),
        digest(adapters, lora(make(tmp_path / "c", alpha=32), 3)),
    ]
    assert len(set(found)) == 3
    assert all(found)
    assert digest(adapters, lora(make(tmp_path / "d"), 9)) == found[0], "neither a path nor a number is part of it"
    assert digest(adapters, lora(tmp_path / "nowhere", 10)) == ""
    assert digest(adapters, lora(Path("no\0where"), 11)) == ""


def test_a_number_of_two_adapters_is_nobodys(adapters: Adapters, tmp_path: Path) -> None:
    # vLLM has loaded one of them, and takes it for the other.
    one, other = make(tmp_path / "a"), make(tmp_path / "b", weights=b"2")
    assert digest(adapters, lora(one))
    assert digest(adapters, lora(other)) == ""
    assert digest(adapters, lora(one)) == ""
    assert digest(adapters, lora(other, 2))


def test_one_that_has_changed_is_nobodys_until_it_has_another_number(adapters: Adapters, tmp_path: Path) -> None:
    path = make(tmp_path / "a")
    before = digest(adapters, lora(path))
    os.utime(path / "adapter_model.safetensors", (1, 1))
    assert digest(adapters, lora(path)) == before, "it holds the same"
    make(tmp_path / "a", weights=b"2")
    assert digest(adapters, lora(path)) == ""
    # vLLM may have kept the one of before, or read it again when it needed room.
    make(tmp_path / "a")
    assert digest(adapters, lora(path)) == ""
    assert digest(adapters, lora(path, 2)) == before


def test_files_that_answer_no_read_are_waited_for_once_and_not_for_long(adapters: Adapters, tmp_path: Path) -> None:
    path = make(tmp_path / "a")
    wanted = digest(adapters, lora(make(tmp_path / "b"), 2))
    weights = path / "adapter_model.safetensors"
    weights.unlink()
    os.mkfifo(weights)  # nobody writes to it
    try:
        began = time.monotonic()
        assert not adapters.is_settled(lora(path))
        assert digest(adapters, lora(path)) == ""
        assert PATIENCE_S <= time.monotonic() - began < PATIENCE_S + 5.0
        assert adapters.is_settled(lora(path)), "the next one does not wait"
    finally:
        weights.write_bytes(b"1")
    deadline = time.monotonic() + WAIT_S
    while digest(adapters, lora(path)) != wanted:
        assert time.monotonic() < deadline
        os.sched_yield()
