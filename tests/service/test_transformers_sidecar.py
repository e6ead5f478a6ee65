"""transformers over the sidecar: what one process has computed another finds, and nothing that befalls the sidecar
changes a token."""

import copy
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from hicache.errors import BadRequest
from hicache.layout import KVLayout
from hicache.service.client import Client
from hicache.service.compose import HiCache
from hicache.service.engines.transformers import TransformersEngine, layout_of, namespace_of
from hicache.service.errors import LayoutMismatch, Unreachable
from hicache.tier import HOST
from tests.punctual import in_time
from tests.service.serving import WAIT_S, ServerProcess
from tests.service.tiny_llama import (
    PAGE_SIZE,
    PassCounter,
    Plain,
    assert_same,
    counting,
    kept,
    plain_generate,
    random_ids,
    tiny_model,
)

NEW: Final = 8
"""Tokens that most tests generate."""
LENGTH: Final = 200
"""Tokens of most prompts."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def plain(model: Any) -> Plain:
    """What plain transformers says to the prompt of most tests."""
    return plain_generate(model, random_ids(LENGTH), NEW)


def options_for(layout: KVLayout, directory: Path, *, host_pages: int = 256, **more: object) -> list[str]:
    """Options of a sidecar for a layout, which keeps everything on disk."""
    group = layout.groups[0]
    values: dict[str, object] = {
        "layout.num_layers": layout.num_layers,
        "layout.num_kv_heads": group.num_kv_heads,
        "layout.head_dim": group.head_dim,
        "layout.dtype": f'"{layout.dtype.value}"',
        "layout.page_size": layout.page_size,
        "host.bytes": host_pages * layout.page_bytes,
        "nvme.dir": f'["{directory / "nvme"}"]',
        "nvme.bytes": 64 << 20,
        "write_policy": '"write-through"',
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    (directory / "nvme").mkdir(exist_ok=True)
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


class Sidecar:
    """A sidecar for one model that can be ended and started again."""

    def __init__(self, directory: Path, options: list[str]) -> None:
        self._directory = directory
        self._options = options
        self.process = ServerProcess(directory, options)
        self.socket_dir = str(self.process.directory)

    def kill(self) -> None:
        """As a crash would."""
        self.process.stop(signal.SIGKILL)

    def start(self) -> None:
        """Again, after it has ended."""
        self.process.stop()
        self.process = ServerProcess(self._directory, self._options)


@pytest.fixture(scope="module")
def socket_dir(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a sidecar that nothing befalls. Tests use salts of their own."""
    directory = tmp_path_factory.mktemp("sidecar")
    running = Sidecar(directory, options_for(layout_of(model, page_size=PAGE_SIZE), directory))
    try:
        yield running.socket_dir
    finally:
        running.process.stop()


@pytest.fixture
def sidecar(model: Any, tmp_path: Path) -> Iterator[Sidecar]:
    """One that a test may do anything to."""
    running = Sidecar(tmp_path, options_for(layout_of(model, page_size=PAGE_SIZE), tmp_path))
    try:
        yield running
    finally:
        running.process.stop()


def connect(layout: KVLayout, socket_dir: str, *, device_pages: int = 64, host_pages: int = 64, **more: Any) -> HiCache:
    """A cache with room for so many pages here, connected to a sidecar, and patient: a machine that stands still for a
    moment costs no hits."""
    patience = {"lookup_timeout_s": WAIT_S, "load_timeout_s": WAIT_S, "save_timeout_s": WAIT_S}
    return HiCache.connect(
        layout,
        device_bytes=device_pages * layout.page_bytes,
        host_bytes=host_pages * layout.page_bytes,
        socket_dir=socket_dir,
        **{**patience, **more},
    )


@contextmanager
def connected(
    model: Any, socket_dir: str, *, salt: str = "", **more: Any
) -> Iterator[tuple[HiCache, TransformersEngine, PassCounter]]:
    """What a new process has: a cache with nothing in it, connected, and a model attached."""
    namespace = replace(namespace_of(model, page_size=PAGE_SIZE), salt=salt.encode())
    with (
        connect(layout_of(model, page_size=PAGE_SIZE), socket_dir, **more) as cache,
        TransformersEngine(model, cache, namespace=namespace) as engine,
        counting(model) as counter,
    ):
        yield cache, engine, counter


def check(engine: TransformersEngine, plain: Plain, **how: Any) -> int:
    """Ask for the prompt of most tests and compare; how many tokens were cached."""
    with engine.request(random_ids(LENGTH)) as request:
        generation = request.generate(NEW, output_logits=True, **how)
        assert_same(generation.tokens, generation.logits, plain)
        return request.cached


RESUME_S: Final = 5.0
"""Within which a sidecar that is there again is found."""
FOUND: Final = kept(LENGTH + NEW - 1, LENGTH) // PAGE_SIZE * PAGE_SIZE
"""Tokens of that prompt that another process finds: whole pages."""


def test_what_one_process_has_computed_another_finds(model: Any, plain: Plain, socket_dir: str) -> None:
    with connected(model, socket_dir, salt="finds") as (cache, engine, counter):
        assert check(engine, plain) == 0
        assert cache.wait_saved()
        assert cache.shared is not None
        assert (cache.shared.loaded_pages, cache.shared.saved_pages) == (0, (LENGTH + NEW - 1) // PAGE_SIZE)
    with connected(model, socket_dir, salt="finds") as (cache, engine, counter):
        with engine.request(random_ids(LENGTH)) as request:
            assert request.cached_by_tier == {HOST: FOUND}
            generation = request.generate(NEW, output_logits=True)
            assert_same(generation.tokens, generation.logits, plain)
        assert counter.tokens == LENGTH - FOUND + NEW - 1
        assert cache.shared is not None
        assert cache.shared.loaded_pages == FOUND // PAGE_SIZE


def test_an_answer_is_found_as_well_as_its_prompt(model: Any, socket_dir: str) -> None:
    ids = random_ids(50)
    with connected(model, socket_dir, salt="prompt") as (_, engine, _), engine.request(ids) as request:
        request.generate(3 * PAGE_SIZE)
        whole = request.tokens
    with connected(model, socket_dir, salt="prompt") as (_, engine, _), engine.request(whole) as request:
        assert request.cached == (len(whole) - 1) // PAGE_SIZE * PAGE_SIZE


def test_a_restart_of_the_sidecar_loses_nothing(model: Any, plain: Plain, sidecar: Sidecar) -> None:
    with connected(model, sidecar.socket_dir) as (cache, engine, _):
        check(engine, plain)
        assert cache.wait_saved()
        sidecar.start()
        with connected(copy.deepcopy(model), sidecar.socket_dir) as (_, other, _):
            assert check(other, plain) == FOUND
        # The session of before the restart goes on by itself.
        with engine.request(random_ids(LENGTH, seed=9)) as request:
            request.prefill()
        assert cache.wait_saved()
    with connected(model, sidecar.socket_dir) as (_, engine, _), engine.request(random_ids(LENGTH, seed=9)) as request:
        assert request.cached == FOUND


@pytest.mark.faults
def test_a_sidecar_that_lost_everything_is_given_it_again(model: Any, plain: Plain, tmp_path: Path) -> None:
    layout = layout_of(model, page_size=PAGE_SIZE)
    options = options_for(layout, tmp_path, write_policy='"demote-on-evict"')
    sidecar = Sidecar(tmp_path, options)
    try:
        with connected(model, sidecar.socket_dir) as (cache, engine, _):
            check(engine, plain)
            assert cache.wait_saved()
            sidecar.kill()
            sidecar.start()
            check(engine, plain)
            assert cache.wait_saved()
        with connected(model, sidecar.socket_dir) as (_, engine, _):
            assert check(engine, plain) == FOUND
    finally:
        sidecar.process.stop()


# -- what may befall the sidecar --------------------------------------------------------------------------------------


def before(monkeypatch: pytest.MonkeyPatch, call: str, happens: Callable[[], None]) -> None:
    """Let something happen before the next call of the client of that name."""
    real = getattr(Client, call)

    def then(self: Client, *args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(Client, call, real)
        happens()
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Client, call, then)


@pytest.mark.faults
@pytest.mark.parametrize("call", ["lookup", "acquire", "reserve", "_commit"])
def test_killed_before_any_call_the_tokens_are_right(
    model: Any, plain: Plain, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    if call in ("lookup", "acquire"):
        with connected(model, sidecar.socket_dir) as (_, engine, _):
            check(engine, plain)
    with connected(model, sidecar.socket_dir) as (cache, engine, _):
        before(monkeypatch, call, sidecar.kill)
        assert check(engine, plain) == 0
        assert cache.wait_saved()
        assert sidecar.process.process.poll() is not None, "nothing befell it"
        assert check(engine, plain) == kept(LENGTH + NEW - 1, LENGTH)


def assert_true(value: bool) -> None:
    assert value


class KillingStreamer:
    """Kills a sidecar when the third token comes."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        self._num_seen = 0

    def put(self, value: Any) -> None:
        self._num_seen += 1
        if self._num_seen == 4:
            self._sidecar.kill()

    def end(self) -> None:
        assert self._num_seen > 4


def test_killed_while_tokens_are_generated_they_are_right(model: Any, plain: Plain, sidecar: Sidecar) -> None:
    with connected(model, sidecar.socket_dir) as (_, engine, _):
        check(engine, plain, streamer=KillingStreamer(sidecar))
        check(engine, plain)


@pytest.mark.faults
def test_a_sidecar_that_hangs_is_waited_for_once(model: Any, plain: Plain, sidecar: Sidecar) -> None:
    with connected(model, sidecar.socket_dir, lookup_timeout_s=0.2) as (cache, engine, _):
        os.kill(sidecar.process.process.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            engine.request(random_ids(LENGTH)).close()
            assert 0.2 <= time.monotonic() - began < 2.0
            assert cache.shared is not None
            assert not cache.shared.is_up
            with in_time(0.2):
                engine.request(random_ids(LENGTH)).close()
            check(engine, plain)
        finally:
            os.kill(sidecar.process.process.pid, signal.SIGCONT)


@pytest.mark.faults
def test_a_load_that_is_late_is_computed(
    model: Any, plain: Plain, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(model, sidecar.socket_dir) as (_, engine, _):
        check(engine, plain)
    pid = sidecar.process.process.pid
    with connected(model, sidecar.socket_dir, lookup_timeout_s=0.25, load_timeout_s=0.3) as (_, engine, _):
        before(monkeypatch, "acquire", lambda: os.kill(pid, signal.SIGSTOP))
        try:
            began = time.monotonic()
            with engine.request(random_ids(LENGTH)) as request:
                assert request.cached == 0
            assert 0.3 <= time.monotonic() - began < 2.0
            check(engine, plain)
        finally:
            os.kill(pid, signal.SIGCONT)


def test_pages_that_leave_before_they_are_saved_are_left_out(
    model: Any, socket_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = random_ids(20 * PAGE_SIZE), random_ids(30 * PAGE_SIZE, seed=2)
    may_save = threading.Event()
    with connected(model, socket_dir, salt="leave", device_pages=6, host_pages=34, policy="lru") as (cache, engine, _):
        before(monkeypatch, "reserve", lambda: assert_true(may_save.wait(WAIT_S)))
        for ids in (first, second):
            with engine.request(ids) as request:
                request.prefill()
        num_here = cache.match(engine.namespace, first[0]).num_tokens // PAGE_SIZE
        assert 0 < num_here < 20
        may_save.set()
        assert cache.wait_saved()
        assert cache.shared is not None
        assert cache.shared.saved_pages == num_here + 30
    for ids, num_found in ((first, num_here), (second, 29)):
        with connected(model, socket_dir, salt="leave") as (_, engine, _), engine.request(ids) as request:
            assert request.cached == num_found * PAGE_SIZE


def test_without_a_sidecar_the_cache_works_alone(
    model: Any, plain: Plain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "hicache"),
        connected(model, str(tmp_path)) as (_, engine, counter),
    ):
        assert check(engine, plain) == 0
        counter.take()
        assert check(engine, plain) == kept(LENGTH + NEW - 1, LENGTH)
    said = [record.message for record in caplog.records]
    assert len(said) == 1
    assert "going on without the cache" in said[0]


@pytest.mark.faults
def test_a_sidecar_that_comes_later_is_found(model: Any, plain: Plain, tmp_path: Path) -> None:
    layout = layout_of(model, page_size=PAGE_SIZE)
    (tmp_path / "run").mkdir(mode=0o700)
    with connected(model, str(tmp_path / "run")) as (cache, engine, _):
        check(engine, plain)
        sidecar = Sidecar(tmp_path, options_for(layout, tmp_path))
        try:
            began = time.monotonic()
            with in_time(RESUME_S):
                while cache.shared is not None and not cache.shared.is_up:
                    assert time.monotonic() - began < WAIT_S, "it was not found"
                    engine.request(random_ids(LENGTH)).close()
            check(engine, plain)
            assert cache.wait_saved()
            with connected(copy.deepcopy(model), sidecar.socket_dir) as (_, other, _):
                assert check(other, plain) == FOUND
        finally:
            sidecar.process.stop()


def test_strict_refuses_to_open_without_a_sidecar(model: Any, tmp_path: Path) -> None:
    with pytest.raises(Unreachable):
        connect(layout_of(model, page_size=PAGE_SIZE), str(tmp_path), strict=True)


@pytest.mark.faults
def test_a_sidecar_with_other_pages_is_not_used(
    model: Any, plain: Plain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sidecar = Sidecar(tmp_path, options_for(layout_of(model, page_size=2 * PAGE_SIZE), tmp_path))
    try:
        with pytest.raises(LayoutMismatch, match=r"start it with `hicache serve --set layout\.num_layers=3"):
            connect(layout_of(model, page_size=PAGE_SIZE), sidecar.socket_dir, strict=True)
        with (
            caplog.at_level(logging.WARNING, "hicache"),
            connected(model, sidecar.socket_dir) as (_, engine, _),
        ):
            check(engine, plain)
        assert ["layout.page_size=16" in record.message for record in caplog.records] == [True]
    finally:
        sidecar.process.stop()


# -- what is kept apart -----------------------------------------------------------------------------------------------


def test_other_weights_and_salts_find_nothing(model: Any, socket_dir: str) -> None:
    ids = random_ids(LENGTH)
    with connected(model, socket_dir, salt="nothing") as (_, engine, _), engine.request(ids) as request:
        request.prefill()
    for other, salt in ((tiny_model(seed=1), "nothing"), (model, "else")):
        with connected(other, socket_dir, salt=salt) as (_, engine, _), engine.request(ids) as request:
            assert request.cached == 0


def test_a_namespace_of_another_tenant_stays_here(model: Any, plain: Plain, socket_dir: str) -> None:
    ids = random_ids(LENGTH)
    with connected(model, socket_dir, salt="here") as (cache, engine, _):
        with engine.request(ids, namespace=replace(engine.namespace, tenant="other")) as request:
            request.prefill()
        assert cache.wait_saved()
        assert cache.shared is not None
        assert cache.shared.saved_pages == 0
        assert check(engine, plain) == 0


def test_a_prompt_larger_than_host_memory_here_is_loaded_in_part(model: Any, plain: Plain, socket_dir: str) -> None:
    with connected(model, socket_dir, salt="part") as (_, engine, _):
        check(engine, plain)
    with connected(model, socket_dir, salt="part", device_pages=16, host_pages=4) as (_, engine, _):
        assert check(engine, plain) == 4 * PAGE_SIZE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lookup_timeout_s", 0.0),
        ("load_timeout_s", 601.0),
        ("save_timeout_s", -1.0),
        ("staging_bytes", 100),
        ("max_pending_saves", 0),
        ("secret_file", "/nowhere"),
        ("strict", "yes"),
    ],
)
def test_bad_settings_are_refused(model: Any, tmp_path: Path, field: str, value: Any) -> None:
    more: dict[str, Any] = {"strict": True, field: value}
    with pytest.raises(BadRequest) as refusal:
        connect(layout_of(model, page_size=PAGE_SIZE), str(tmp_path), **more)
    assert refusal.value.field == field
