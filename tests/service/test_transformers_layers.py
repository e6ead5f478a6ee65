"""A context on its way to the device, through the real engine: each layer is attended over as soon as it has come.

The device tier is the real one, but the copy of a layer waits until the test lets it begin, and can be made to fail.
So can be reading a layer of what streams from NVMe.
"""

import asyncio
import errno
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from hicache.service import building
from hicache.service.compose import HiCache
from hicache.service.engines.transformers import TransformersEngine, layout_of
from hicache.tier import DEVICE, HOST, NVME, LayerWrites, Outcome, PageWrite
from hicache.tiers.device import DeviceTier
from hicache.tiers.nvme.io import FileIO
from hicache.tools.bench.throttled import throttled_nvme
from tests.service.tiny_llama import (
    PAGE_SIZE,
    assert_same,
    counting,
    open_cache,
    plain_generate,
    random_ids,
    tiny_model,
)

NUM_PAGES: Final = 24
NUM_TOKENS: Final = NUM_PAGES * PAGE_SIZE
NUM_LAYERS: Final = 3
NEW: Final = 6
BLOCK_BYTES: Final = 4096
"""Of an NVMe page's header, and what pages are aligned to."""


class Gate:
    """Which layers may be copied to the device, and what happened in which order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.is_closed = False
        self.fails_from = NUM_LAYERS
        """The first layer whose copy fails."""
        self._open: list[Future[None]] = [Future() for _ in range(NUM_LAYERS)]

    def let(self, layer: int) -> None:
        """The copy of a layer may begin. From any thread."""
        if not self._open[layer].done():
            self._open[layer].set_result(None)

    async def pass_through(self, layer: int, copy: Callable[[], Any], num_pages: int) -> list[Outcome]:
        if self.is_closed:
            await asyncio.wrap_future(self._open[layer])
        if layer >= self.fails_from:
            return [Outcome.ERROR] * num_pages
        outcomes: list[Outcome] = await copy()
        self.note("copied", layer)
        return outcomes

    def note(self, what: str, layer: int) -> None:
        if (what, layer) not in self.log:
            self.log.append((what, layer))


class GatedWrites:
    """Layers of some pages, each of which passes the gate first."""

    def __init__(self, inner: LayerWrites, num_pages: int, gate: Gate) -> None:
        self._inner = inner
        self._num_pages = num_pages
        self._gate = gate

    def start_layer(self, layer: int) -> Coroutine[Any, Any, list[Outcome]]:
        return self._gate.pass_through(layer, lambda: self._inner.start_layer(layer), self._num_pages)

    def close(self) -> None:
        self._inner.close()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@contextmanager
def in_the_host(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[HiCache, TransformersEngine, Gate]]:
    """A cache that has a prompt in host memory alone, before a gate that is closed."""
    gate = Gate()

    class GatedDevice(DeviceTier):
        async def open_layer_writes(self, pages: Sequence[PageWrite]) -> Any:
            return GatedWrites(await super().open_layer_writes(pages), len(pages), gate)

    monkeypatch.setattr(building, "DeviceTier", GatedDevice)
    with (
        open_cache(layout_of(model, page_size=PAGE_SIZE), device_pages=40, host_pages=200) as cache,
        TransformersEngine(model, cache) as engine,
    ):
        for prompt in (ids, *(random_ids(NUM_TOKENS, seed) for seed in (2, 3))):
            with engine.request(prompt) as request:
                request.generate(1)
        assert cache.match(engine.namespace, ids[0]).by_tier.keys() == {HOST}
        gate.is_closed = True
        yield cache, engine, gate


@contextmanager
def after_each_layer(model: Any, tell: Callable[[int], None]) -> Iterator[None]:
    """`tell` is called when a layer of the model has been computed."""
    layers = model.get_decoder().layers
    handles = [each.register_forward_hook(lambda *_, layer=index: tell(layer)) for index, each in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def test_each_layer_is_attended_over_before_the_next_one_has_come(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = random_ids(NUM_TOKENS)
    plain = plain_generate(model, ids, NEW)
    with in_the_host(model, ids, monkeypatch) as (cache, engine, gate):

        def tell(layer: int) -> None:
            gate.note("attended", layer)
            if layer + 1 < NUM_LAYERS:
                gate.let(layer + 1)

        with counting(model) as counter, after_each_layer(model, tell), engine.request(ids) as request:
            assert request.cached == NUM_TOKENS - 1
            assert ("copied", 0) not in gate.log, "the request was not given before its pages had come"
            gate.let(0)
            generation = request.generate(NEW, output_logits=True)
            assert counter.tokens == 1 + NEW - 1, "something was computed that is cached"
        assert_same(generation.tokens, generation.logits, plain)
        assert gate.log == [(what, layer) for layer in range(NUM_LAYERS) for what in ("copied", "attended")]
        assert cache.match(engine.namespace, ids[0]).by_tier.keys() == {DEVICE}
        assert cache.stats()["counters"]["failed_moves"] == {}


@pytest.mark.parametrize("fails_from", range(NUM_LAYERS))
def test_what_does_not_come_is_read_in_the_host(model: Any, monkeypatch: pytest.MonkeyPatch, fails_from: int) -> None:
    """Whichever layer fails first, the ones before it are read on the device, and the tokens are the same."""
    ids = random_ids(NUM_TOKENS)
    plain = plain_generate(model, ids, NEW)
    with in_the_host(model, ids, monkeypatch) as (cache, engine, gate):
        gate.fails_from = fails_from

        def tell(layer: int) -> None:
            if layer + 1 < NUM_LAYERS:
                gate.let(layer + 1)

        with counting(model) as counter, after_each_layer(model, tell), engine.request(ids) as request:
            gate.let(0)
            generation = request.generate(NEW, output_logits=True)
            assert counter.tokens == 1 + NEW - 1, "something was computed that is cached"
        assert_same(generation.tokens, generation.logits, plain)
        assert cache.stats()["counters"]["failed_moves"][f"{HOST}->{DEVICE}"] >= NUM_PAGES - 1
        assert [layer for what, layer in gate.log if what == "copied"] == list(range(fails_from))

        # Later it comes, and nothing of the device was lost meanwhile.
        gate.fails_from, gate.is_closed = NUM_LAYERS, False
        with engine.request(ids) as request:
            again = request.generate(NEW, output_logits=True)
        assert_same(again.tokens, again.logits, plain)
        assert cache.match(engine.namespace, ids[0]).by_tier.keys() == {DEVICE}


# -- what streams from NVMe -------------------------------------------------------------------------------------------


class UnreadableFiles(FileIO):
    """Real files, of which one read fails."""

    def __init__(self) -> None:
        super().__init__()
        self.unreadable: set[int] = set()
        """Offsets of which the first that is read fails."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset in self.unreadable:
            self.unreadable.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, buffers, offset)


def places_of(directory: Path, layer: int, layer_bytes: int) -> dict[Path, list[int]]:
    """By segment, where that layer of every page lies (`tiers/FORMAT.md`)."""
    return {
        segment: [at + BLOCK_BYTES + layer * layer_bytes for at in range(0, len(data), BLOCK_BYTES)
                  if data.startswith(b"HICPAGE\0", at)]
        for segment in directory.glob("hicache-*.seg")
        for data in (segment.read_bytes(),)
    }  # fmt: skip


def damage(places: dict[Path, list[int]]) -> None:
    """Flip a bit at each place."""
    for segment, offsets in places.items():
        with segment.open("r+b") as file:
            for at in offsets:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1]))
            os.fsync(file.fileno())


@pytest.mark.parametrize("is_damaged", [True, False], ids=["damaged", "unreadable"])
@pytest.mark.parametrize("fails_at", range(NUM_LAYERS))
def test_a_layer_that_nvme_does_not_give_is_computed_again(
    model: Any, tmp_path: Path, fails_at: int, is_damaged: bool
) -> None:
    """A context that no faster tier has room for is streamed. Whichever layer fails, those before it were attended
    over, nothing of them is kept, and the tokens are the same."""
    ids, files = random_ids(NUM_TOKENS), UnreadableFiles()
    layout = layout_of(model, page_size=PAGE_SIZE)
    plain = plain_generate(model, ids, NEW)
    attended: list[int] = []
    with (
        throttled_nvme(files),
        open_cache(
            layout, device_pages=6, host_pages=8, nvme_dir=tmp_path / "nvme", nvme_bytes=64 << 20
        ) as cache,
        TransformersEngine(model, cache) as engine,
    ):
        with engine.request(ids) as request:
            request.prefill()
        with engine.request(ids) as request:
            assert request.cached == NUM_TOKENS - PAGE_SIZE
            assert request.cached_by_tier[NVME] > NUM_TOKENS // 4
            places = places_of(tmp_path / "nvme", fails_at, layout.layer_bytes(0))
            if is_damaged:
                damage(places)
            else:
                files.unreadable = {at for offsets in places.values() for at in offsets}
            with after_each_layer(model, attended.append), counting(model) as counter:
                generation = request.generate(NEW, output_logits=True)
            assert_same(generation.tokens, generation.logits, plain)
            assert attended[: fails_at + 1] == [*range(fails_at), 0], "the pass did not fail at that layer"
            assert request.num_lost > 0
            # The pass that failed counted a page; then came what was lost, and that page.
            assert counter.tokens == PAGE_SIZE + request.num_lost + PAGE_SIZE + NEW - 1
