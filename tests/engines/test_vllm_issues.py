"""Situations in which vLLM's own tiers for KV, or its figures about them, went wrong, set up with the connector.

Each test has the number in vLLM's tracker in its name, and says in our words what was reported there.
"""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from hicache.tiers.nvme.io import FileIO
from hicache.tools.bench.engine_models import VOCABULARY, make_tiny
from hicache.tools.bench.throttled import throttled_nvme
from hicache.tools.cli import main
from tests.engines.running import BLOCK, NEW_TOKENS, PAGE_BYTES, SHAPE, Engine, Tokens, engine
from tests.engines.test_vllm import OWN_CACHE_OFF, arguments, settings
from tests.service.serving import ServerProcess, ThreadServer

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

FS_BLOCK: Final = 4096
STAGING_BYTES: Final = 16 << 20
RESUME_S: Final = 5.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine without any cache: it says what is right."""
    with engine(model, tmp_path_factory.mktemp("alone"), None, **OWN_CACHE_OFF) as running:
        yield running


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ServerProcess]:
    with serving(tmp_path) as server:
        yield server


@contextmanager
def serving(directory: Path, **more: Any) -> Iterator[ServerProcess]:
    server = ServerProcess(directory, arguments(directory, **more))
    try:
        yield server
    finally:
        server.stop()


def prompts_of(seed: int, *lengths: int) -> list[Tokens]:
    """Prompts that share nothing, and that nobody has asked before."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def computed_alone(prompt: Tokens) -> int:
    """Tokens that are computed for a prompt and its answer where nothing is cached."""
    return len(prompt) + NEW_TOKENS - 1


def cacheable(prompt: Tokens) -> int:
    """Tokens of a prompt's whole blocks, without the last token, which is always computed."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def only_on_disk(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> Path:
    """Have everything leave the sidecar's memory; the directory in which it lies then."""
    room = ("--tier", "host", "--pages", "2000")
    assert main(["evict", *room, "--socket-dir", str(server.directory)]) == 0
    stats = stats_of(server, capsys)
    assert stats["tiers"]["host"]["used_pages"] == 0
    assert stats["tiers"]["nvme"]["used_pages"] > 0
    return server.directory.parent / "nvme"


def stats_of(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return said(capsys, "stats", server)


def said(capsys: pytest.CaptureFixture[str], command: str, server: ServerProcess) -> dict[str, Any]:
    """What a command says of a sidecar."""
    capsys.readouterr()
    assert main([command, "--json", "--socket-dir", str(server.directory)]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def flip(directory: Path, *, share: float = 1.0) -> None:
    """Turn one bit in each block of the disk that has something, in the last `share` of them."""
    for path in directory.glob("*.seg"):
        data = path.read_bytes()
        used = [start for start in range(FS_BLOCK, len(data), FS_BLOCK) if any(data[start : start + FS_BLOCK])]
        with path.open("r+b") as file:
            for start in used[int(len(used) * (1 - share)) :]:
                file.seek(start + 100)
                file.write(bytes([data[start + 100] ^ 1]))


def until(holds: Callable[[], bool], within_s: float = RESUME_S) -> None:
    """Wait for something that takes a moment."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < within_s


def test_49261_other_weights_under_the_same_name_are_another_model(tmp_path: Path) -> None:
    """The files of vLLM's tier on disk were found by the model's name: after its weights were replaced, the KV of the
    old ones was used, and the tokens were wrong."""
    prompts, directory, answers = prompts_of(1, 300, 400), tmp_path / "model", []
    for seed in (3, 4):
        make_tiny(directory, seed=seed)
        with engine(directory, tmp_path, None, **OWN_CACHE_OFF) as running:
            right = running.ask(prompts)
        # What the other weights left is on disk, and the sidecar another process.
        with serving(tmp_path) as server, engine(directory, tmp_path, settings(server), **OWN_CACHE_OFF) as running:
            answers += [right.tokens, running.ask(prompts).tokens]
            assert running.ask(prompts).cached == [cacheable(each) for each in prompts]
    first, first_cached, second, second_cached = answers
    assert first == first_cached != second == second_cached


def test_54363_bytes_that_changed_on_disk_are_not_served(
    model: Path, alone: Engine, sidecar: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of vLLM's tier on disk have no checksum: a file of the right length was taken, whatever was in it."""
    prompts = prompts_of(2, 300, 400)
    right = alone.ask(prompts)
    with engine(model, tmp_path, settings(sidecar), **OWN_CACHE_OFF) as running:
        assert running.ask(prompts).tokens == right.tokens
        flip(only_on_disk(sidecar, capsys))
        damaged = running.ask(prompts)
        assert damaged.tokens == right.tokens
        assert damaged.scheduled == right.scheduled
        assert stats_of(sidecar, capsys)["counters"]["corrupt_pages"]["nvme"] > 0
        # What was computed instead is cached.
        again = running.ask(prompts)
        assert again.tokens == right.tokens
        assert again.cached == [cacheable(each) for each in prompts]


def test_39732_a_load_that_fails_does_not_end_the_engine(
    model: Path, alone: Engine, sidecar: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that failed to load was an assertion in vLLM's scheduler: the process of the engine's core ended, and all
    requests with it."""
    prompts = prompts_of(3, 500, 300, 400)
    right = alone.ask(prompts)
    with engine(model, tmp_path, settings(sidecar), processes=True, **OWN_CACHE_OFF) as running:
        assert running.ask(prompts).tokens == right.tokens
        flip(only_on_disk(sidecar, capsys))
        assert running.ask(prompts, together=True).tokens == right.tokens
        assert running.ask(prompts).tokens == right.tokens


class Gate(FileIO):
    """Files whose reads wait while it is closed."""

    def __init__(self) -> None:
        self.is_open: Final = threading.Event()
        self.is_open.set()
        self.num_waiting = 0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.num_waiting += not self.is_open.is_set()
        self.is_open.wait()
        return super().preadv(fd, buffers, offset)


def test_49829_a_load_that_never_ends_is_not_waited_for(model: Path, alone: Engine, tmp_path: Path) -> None:
    """A request whose blocks a slower tier had promised was asked about again in every step, without an end: it was
    never computed, and its clients waited for ever."""
    (tmp_path / "nvme").mkdir()
    tree: dict[str, object] = {
        "socket_dir": str(tmp_path / "run"),
        "layout": {name: value.strip('"') if isinstance(value, str) else value for name, value in SHAPE.items()},
        "host": {"bytes": 500 * PAGE_BYTES},
        "nvme": {"dir": [str(tmp_path / "nvme")], "bytes": 1000 * PAGE_BYTES},
        "write_policy": "write-through",
    }
    prompts, new = prompts_of(4, 500, 300, 400), prompts_of(5, 200)
    right, right_new = alone.ask(prompts), alone.ask(new)
    gate = Gate()
    with throttled_nvme(gate):
        server = ThreadServer(tree)
    try:
        config = {"socket_dir": str(server.directory), "load_timeout_s": 1.0}
        with engine(model, tmp_path, config, **OWN_CACHE_OFF) as running:
            assert running.ask(prompts).tokens == right.tokens
            room = ("--tier", "host", "--pages", "500")
            assert main(["evict", *room, "--socket-dir", str(server.directory)]) == 0
            gate.is_open.clear()
            waited = running.ask(prompts, together=True)
            assert gate.num_waiting > 0
            assert waited.tokens == right.tokens
            # All of them, not one after the other.
            assert waited.waited_s[0] < 1.0 + 1.0
            # What needs no disk goes on.
            assert running.ask(new).tokens == right_new.tokens
            gate.is_open.set()
            until(lambda: running.ask(prompts[:1]).cached == [cacheable(prompts[0])], within_s=20.0)
            assert running.ask(prompts).tokens == right.tokens
    finally:
        gate.is_open.set()
        server.close()


def test_57303_an_engine_that_is_killed_leaves_no_memory_behind(
    model: Path, alone: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM's memory for offloaded KV is a named file in /dev/shm: an engine that was killed left it there, and after
    some restarts there was no room for another."""
    prompts = prompts_of(6, 500, 300)
    right = alone.ask(prompts)
    # Room for what one engine may pass through the sidecar's memory, not for two.
    staging = {"limits.staging_bytes": STAGING_BYTES, "limits.total_staging_bytes": STAGING_BYTES}
    with serving(tmp_path, **staging) as server:
        config = settings(server, strict=True, staging_bytes=STAGING_BYTES)
        for number in range(2):
            with engine(model, tmp_path, config, processes=True) as running:
                answers = running.ask(prompts)
                assert answers.tokens == right.tokens
                assert answers.cached == ([cacheable(each) for each in prompts] if number else [0, 0])
                family = descendants(running.process.pid)
                assert len(family) > 1
                assert any("memfd:hicache" in each for pid in family for each in shared_files(pid))
                # vLLM's own channels between its processes have names, also without the connector.
                named = {each for pid in family for each in shared_files(pid) if not each.endswith("(deleted)")}
                assert {each for each in named if each.startswith("/dev/shm/") and "/psm_" not in each} == set()
                for pid in family:
                    os.kill(pid, signal.SIGKILL)
            until(lambda: said(capsys, "sessions", server)["sessions"] == [])


def descendants(pid: int) -> list[int]:
    """A process and all that it began."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def shared_files(pid: int) -> list[str]:
    """The files whose memory a process shares with others."""
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [fields[5] for fields in lines if len(fields) == 6 and fields[1].endswith("s")]


class Counted:
    """An engine with few blocks, and how its figures change."""

    def __init__(self, running: Engine, server: ServerProcess) -> None:
        self.running: Final = running
        self.server: Final = server
        self._before: dict[str, float] = {}

    def begin(self) -> None:
        """Count from here on."""
        self._before = self.running.metrics()

    def since(self, name: str) -> float:
        """By how much one of vLLM's counters has risen."""
        return self.running.metrics()[name] - self._before.get(name, 0.0)


@pytest.fixture(scope="module")
def counted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counted]:
    directory = tmp_path_factory.mktemp("counted")
    few: dict[str, Any] = {"num_gpu_blocks_override": 96, "max_num_seqs": 12, "max_model_len": 2048}
    with (
        serving(directory) as server,
        engine(model, directory, settings(server), disable_log_stats=False, **few) as running,
    ):
        yield Counted(running, server)


def test_25780_what_is_computed_again_after_a_preemption_is_no_hit(alone: Engine, counted: Counted) -> None:
    """Requests that were preempted and came back counted as hits of the prefix cache: a load of random prompts showed a
    third of its tokens as cached."""
    # They fit as long as they do not grow.
    prompts = prompts_of(7, *[12 * BLOCK - 3] * 7, 11 * BLOCK - 3)
    right = alone.ask(prompts)
    counted.begin()
    answers = counted.running.ask(prompts, together=True)
    assert answers.tokens == right.tokens
    assert counted.since("vllm:num_preemptions") > 0
    assert answers.cached == [0] * len(prompts)
    assert counted.since("vllm:prefix_cache_hits") == 0
    assert counted.since("vllm:external_prefix_cache_hits") == 0


def test_43736_a_request_that_waits_for_room_is_counted_once(alone: Engine, counted: Counted) -> None:
    """A request for which there were no blocks yet was looked up, and counted, again in every step until there were."""
    prompts = prompts_of(8, *[12 * BLOCK + 5] * 10)
    right = alone.ask(prompts)
    assert counted.running.ask(prompts).tokens == right.tokens
    counted.running.forget()
    counted.begin()
    answers = counted.running.ask(prompts, together=True)
    assert answers.tokens == right.tokens
    assert answers.cached == [12 * BLOCK] * len(prompts)
    assert counted.since("vllm:external_prefix_cache_hits") == 12 * BLOCK * len(prompts)
    assert counted.since("vllm:external_prefix_cache_queries") == sum(map(len, prompts))
    assert counted.since("vllm:hicache_loaded_pages") == 12 * len(prompts)


def test_30522_what_vllm_has_itself_is_not_asked_for_again(alone: Engine, counted: Counted) -> None:
    """All tokens of a prompt counted as asked of the connector, also those that vLLM's own cache had."""
    (prompt,) = prompts_of(9, 20 * BLOCK)
    right = alone.ask([prompt])
    assert counted.running.ask([prompt]).tokens == right.tokens
    counted.running.forget()
    counted.running.ask([prompt[: 6 * BLOCK + 1]])
    counted.begin()
    answers = counted.running.ask([prompt])
    assert answers.tokens == right.tokens
    assert answers.cached == [19 * BLOCK]
    assert counted.since("vllm:prefix_cache_hits") == 6 * BLOCK
    assert counted.since("vllm:external_prefix_cache_queries") == 14 * BLOCK
    assert counted.since("vllm:external_prefix_cache_hits") == 13 * BLOCK
    assert counted.since("vllm:hicache_loaded_pages") == 13


def test_37460_what_a_failed_load_did_not_bring_is_not_counted_as_cached(
    alone: Engine, counted: Counted, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokens that were to be loaded counted as cached from the moment their load began, and were not taken back when it
    failed and they were computed: vLLM decided to leave it at that."""
    (prompt,) = prompts_of(10, 40 * BLOCK)
    right = alone.ask([prompt])
    assert counted.running.ask([prompt]).tokens == right.tokens
    counted.running.forget()
    flip(only_on_disk(counted.server, capsys), share=0.1)
    counted.begin()
    answers = counted.running.ask([prompt])
    (cached,) = answers.cached
    assert answers.tokens == right.tokens
    assert 0 < cached < cacheable(prompt)
    assert answers.scheduled == [computed_alone(prompt) - cached]
    assert counted.since("vllm:hicache_loaded_pages") * BLOCK == cached
    assert counted.since("vllm:prompt_tokens_cached") == cached
