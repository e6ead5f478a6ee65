"""Pages are copied out of staging memory as they are, with their checksums, whatever else is copied meanwhile."""

import asyncio
import gc
import os
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from hicache.clock import SystemClock
from hicache.service.client import connect
from hicache.service.server import copying
from hicache.service.server.copying import Copying, checksum
from hicache.service.server.staging import Staging
from hicache.tier import Slots
from hicache.tiers.host import HostTier
from tests.service.serving import WAIT_S, thread_server
from tests.service.stored import PAGE, store
from tests.tiers.contract import run

PAGE_BYTES = 8192
NUM_PAGES = 512
LAYERS = (PAGE_BYTES // 2, PAGE_BYTES // 2)


@asynccontextmanager
async def opened(layer_bytes: tuple[int, ...] | None) -> AsyncIterator[tuple[Copying, HostTier, Staging]]:
    """Copies into an arena out of staging memory that is full of numbers at random, both of `NUM_PAGES` slots."""
    host = HostTier(page_bytes=PAGE_BYTES, capacity_pages=NUM_PAGES, layer_bytes=layer_bytes)
    staging, copies = Staging(NUM_PAGES, PAGE_BYTES), Copying(host, SystemClock())
    try:
        rng = np.random.default_rng(0)
        for slot in range(NUM_PAGES):
            staging.view(slot, PAGE_BYTES)[:] = rng.bytes(PAGE_BYTES)
        yield copies, host, staging
    finally:
        copies.close()
        staging.close()
        await host.close()


@pytest.mark.parametrize("layer_bytes", [None, LAYERS])
@pytest.mark.parametrize("piece_bytes", [PAGE_BYTES // 4, PAGE_BYTES])
def test_what_is_copied_at_once_stays_apart(
    layer_bytes: tuple[int, ...] | None, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "CHUNK_BYTES", PAGE_BYTES)  # so that threads share every copy
    monkeypatch.setattr(copying, "PIECE_BYTES", piece_bytes)

    async def main() -> None:
        async with opened(layer_bytes) as (copies, host, staging):
            order = np.random.default_rng(1).permutation(NUM_PAGES).astype(np.int32)
            for _ in range(20):
                slots = host.allocate(NUM_PAGES)
                parts = list(zip(np.split(order, 8), np.split(slots, 8), strict=True))
                done = await asyncio.gather(*[copies.copy(staging, *part, has_crcs=True) for part in parts])
                for (sources, into), copied in zip(parts, done, strict=True):
                    pages = [bytes(staging.view(slot, PAGE_BYTES)) for slot in sources.tolist()]
                    assert [bytes(host.view(slot)) for slot in into.tolist()] == pages
                    assert copied.crcs == [checksum(memoryview(page)) for page in pages]
                    sums = None if layer_bytes is None else [host.take_sums(slot) for slot in into.tolist()]
                    assert copied.sums == sums
                assert await copies.is_whole(slots) == [True] * NUM_PAGES
                host.view(7)[5] ^= 1
                [damaged] = np.flatnonzero(slots == 7).tolist()
                assert [index for index, is_whole in enumerate(await copies.is_whole(slots)) if not is_whole] == [
                    damaged
                ]
                host.free(slots)
                assert await copies.is_whole(slots) == [None] * NUM_PAGES  # these are in another life

    run(main())


def test_copies_that_overlap_from_the_start_use_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing can be measured of them, however long they go on."""
    monkeypatch.setattr(copying, "CHUNK_BYTES", PAGE_BYTES)
    waits, goes_on, num_threads = threading.Event(), threading.Event(), dict[copying._Work, int]()
    do_some = copying._Work.do_some

    def noted(work: copying._Work, num_others: int) -> None:
        num_threads.setdefault(work, num_others + 1)
        if len(num_threads) == 1:
            waits.set()
            assert goes_on.wait(WAIT_S)
        do_some(work, num_others)

    async def main() -> None:
        async with opened(None) as (_, host, staging):
            with monkeypatch.context() as patched:
                patched.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
                copies = Copying(host, SystemClock())
            monkeypatch.setattr(copying._Work, "do_some", noted)
            slots = host.allocate(NUM_PAGES)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(copies.copy(staging, slots[:9], slots[:9], has_crcs=False))
                    assert await asyncio.to_thread(waits.wait, WAIT_S)
                    for _ in range(5):
                        await copies.copy(staging, slots[9:], slots[9:], has_crcs=False)
                    goes_on.set()
            finally:
                goes_on.set()
                copies.close()
            assert list(num_threads.values()) == [1, 4, 4, 4, 4, 4]

    run(main())


def test_a_thread_that_fails_fails_the_copy_when_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "CHUNK_BYTES", PAGE_BYTES)

    async def main() -> None:
        async with opened(LAYERS) as (copies, host, staging):
            slots: Slots = host.allocate(NUM_PAGES)
            with monkeypatch.context() as patched:
                patched.setattr(host, "take_sums", {}.__getitem__)
                for _ in range(20):
                    with pytest.raises(KeyError):
                        await copies.copy(staging, slots, slots, has_crcs=False)
            copied = await copies.copy(staging, slots, slots, has_crcs=False)
            assert copied.sums == [host.take_sums(slot) for slot in slots.tolist()]

    run(main())


def test_the_staging_memory_of_ended_sessions_is_let_go_without_the_collector(tmp_path: Path) -> None:
    with thread_server(tmp_path, host_pages=512) as server, uncollected():
        for start in range(5):
            with connect(server.directory) as client:
                store(client, range(10_000 * start, 10_000 * start + 8 * PAGE))
        server.until(lambda seen: not list(seen.sessions), within_s=WAIT_S)
        assert staging_maps() == 0


def staging_maps() -> int:
    """How often this process has staging memory mapped."""
    return len(re.findall("hicache-staging", Path(f"/proc/{os.getpid()}/maps").read_text()))


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing in a reference cycle goes while the block runs."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
