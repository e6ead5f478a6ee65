"""Copiers between layer-first pools and page-first buffers: all of them move the same bytes.

The staged copier is meant for a GPU; here its pool and staging buffers are CPU memory and its queues immediate, so that
batching and the kernels' CPU path are what is tested.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from hicache.tiers.device_batch import PROTOTYPE, Attributes, BatchCall, copy_batch, driver_call
from hicache.tiers.device_copy import CpuCopier, PageCopier, StagedCopier
from hicache.tiers.device_ways import BatchCopier, ChosenCopier, EngineCopier, KernelCopier, copiers_of, fastest

NUM_LAYERS, NUM_PAGES, LAYER_BYTES = 3, 11, 40
PAGE_BYTES = NUM_LAYERS * LAYER_BYTES


class Immediate:
    """Work is done when it is queued."""

    def __init__(self, num_pages: int) -> None:
        self.staging = torch.full((num_pages, PAGE_BYTES), 0x5A, dtype=torch.uint8)
        self.num_runs = 0

    def run(self, queue_work: Callable[[], None]) -> None:
        self.num_runs += 1
        queue_work()


def staged(pool: Tensor) -> PageCopier:
    return StagedCopier(pool, Immediate(4), Immediate(3))


def kernel(pool: Tensor) -> PageCopier:
    return KernelCopier(pool, Immediate(1), Immediate(1))


def engine(pool: Tensor) -> PageCopier:
    return EngineCopier(pool, Immediate(1), Immediate(1), copy_2d)


def copy_2d(target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int) -> None:
    """What the copy engine does, row by row."""
    for row in range(height):
        ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)


STREAM = 77


def move_each(
    targets: int, sources: int, sizes: int, count: int, attributes: int, firsts: int, num_attributes: int, failed: int,
    stream: int,
) -> int:  # fmt: skip
    """What the driver does, and what it would refuse: 1 is CUDA_ERROR_INVALID_VALUE."""
    how = Attributes.from_address(attributes)
    if (num_attributes, how.source_order, how.flags, stream) != (1, 1, 0, STREAM):
        return 1
    if ctypes.c_size_t.from_address(firsts).value or not count:
        return 1
    arrays = [(ctypes.c_uint64 * count).from_address(address) for address in (targets, sources, sizes)]
    for index, (target, source, size) in enumerate(zip(*arrays, strict=True)):
        if not target or not source:
            ctypes.c_size_t.from_address(failed).value = index
            return 1
        ctypes.memmove(target, source, size)
    return 0


batch_call: BatchCall = PROTOTYPE(move_each)


def batch(pool: Tensor) -> PageCopier:
    return BatchCopier(pool, Immediate(1), Immediate(1), partial(copy_batch, batch_call, stream=STREAM))


MAKERS = [CpuCopier, staged, kernel, engine, batch]


def random_pool(seed: int) -> Tensor:
    bits = np.random.default_rng(seed).integers(0, 256, (NUM_LAYERS, NUM_PAGES, LAYER_BYTES))
    return torch.from_numpy(bits.astype(np.uint8))


def page_of(pool: Tensor, slot: int) -> npt.NDArray[np.uint8]:
    return np.concatenate([layer[slot] for layer in pool.numpy()])


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("num_pages", [0, 1, 3, 4, 5, 11])
def test_pages_come_in_and_go_out(make: Callable[[Tensor], PageCopier], num_pages: int) -> None:
    pool, source = random_pool(0), random_pool(1)
    before = pool.clone()
    copier = make(pool)
    slots = np.random.default_rng(num_pages).permutation(NUM_PAGES)[:num_pages].tolist()
    copier.copy_in([(slot, page_of(source, slot).data) for slot in slots])
    for slot in range(NUM_PAGES):
        assert np.array_equal(page_of(pool, slot), page_of(source if slot in slots else before, slot))
    buffers = [np.zeros(PAGE_BYTES, np.uint8) for _ in slots]
    copier.copy_out([(slot, buffer.data) for slot, buffer in zip(slots, buffers, strict=True)])
    for slot, buffer in zip(slots, buffers, strict=True):
        assert np.array_equal(buffer, page_of(source, slot))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_one_layer_of_pages_comes_in(make: Callable[[Tensor], PageCopier], layer: int) -> None:
    pool, source = random_pool(0), random_pool(1)
    expected = pool.clone()
    expected[layer, [7, 2]] = source[layer, [7, 2]]
    make(pool).copy_layer_in(layer, [(slot, page_of(source, slot).reshape(NUM_LAYERS, -1)) for slot in (7, 2)])
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("make", MAKERS)
def test_one_slot_goes_out_to_several_buffers(make: Callable[[Tensor], PageCopier]) -> None:
    pool = random_pool(0)
    buffers = [np.zeros(PAGE_BYTES, np.uint8) for _ in range(5)]
    make(pool).copy_out([(2, buffer.data) for buffer in buffers])
    for buffer in buffers:
        assert np.array_equal(buffer, page_of(pool, 2))


@pytest.mark.parametrize("make", MAKERS)
def test_a_page_is_copied_onto_another(make: Callable[[Tensor], PageCopier]) -> None:
    pool = random_pool(0)
    expected = pool.clone()
    expected[:, 7] = expected[:, 4]
    make(pool).copy_page(4, 7)
    assert torch.equal(pool, expected)


def test_each_direction_has_its_own_queue() -> None:
    inward, outward = Immediate(1), Immediate(1)
    copier = StagedCopier(random_pool(0), inward, outward)
    buffer = np.zeros(PAGE_BYTES, np.uint8)
    copier.copy_out([(0, buffer.data), (1, buffer.data)])
    assert (inward.num_runs, outward.num_runs) == (0, 1)
    copier.copy_in([(0, buffer.data)])
    assert (inward.num_runs, outward.num_runs) == (1, 1)


class Counting:
    """Copies nothing, and counts what it is given."""

    def __init__(self) -> None:
        self.num_in = self.num_out = 0

    def copy_in(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        self.num_in += len(pages)

    def copy_out(self, pages: Sequence[tuple[int, memoryview]]) -> None:
        self.num_out += len(pages)

    def copy_layer_in(self, layer: int, pages: Sequence[tuple[int, npt.NDArray[np.uint8]]]) -> None:
        raise AssertionError("not for whole pages")

    def copy_page(self, source_slot: int, target_slot: int) -> None:
        raise AssertionError("not for whole pages")


def test_memory_that_is_not_registered_is_copied_the_staged_way() -> None:
    into, out, pool = Counting(), Counting(), random_pool(0)
    copier = ChosenCopier(into=into, out=out, other=staged(pool))
    page = page_of(random_pool(1), 3)
    copier.copy_in([(5, page.data), (6, memoryview(page.tobytes()))])
    assert np.array_equal(page_of(pool, 5), page)
    assert np.array_equal(page_of(pool, 6), page)
    buffer = np.zeros(PAGE_BYTES, np.uint8)
    copier.copy_out([(5, buffer.data)])
    assert np.array_equal(buffer, page)
    assert (into.num_in, out.num_out) == (0, 0)


def test_a_batch_that_the_driver_refuses_is_an_error_that_says_where() -> None:
    addresses = np.zeros(3, np.uint64)
    kept = np.zeros(8, np.uint8)
    addresses[:2] = kept.ctypes.data
    with pytest.raises(RuntimeError, match="error 1 at copy 2 of 3"):
        copy_batch(batch_call, addresses, addresses, 4, STREAM)


def test_what_the_driver_is_told_of_a_copy_is_as_long_as_in_c() -> None:
    assert ctypes.sizeof(Attributes) == 24


def test_without_a_gpu_there_are_the_two_ways_that_need_no_driver() -> None:
    if torch.cuda.is_available():
        assert driver_call() is not None
    else:
        assert driver_call() is None
        assert list(copiers_of(random_pool(0), Immediate(1), Immediate(1))) == ["staged", "kernel"]


def test_the_fastest_way_that_works_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    ways = {"slow": Counting(), "broken": Counting(), "fast": Counting()}
    times = {id(ways["slow"]): 3.0, id(ways["fast"]): 2.0}

    def time_of(way: PageCopier) -> float:
        if id(way) not in times:
            raise RuntimeError("no such instruction")
        return times[id(way)]

    with caplog.at_level(logging.WARNING):
        assert fastest(ways, time_of) is ways["fast"]
    assert [record.getMessage() for record in caplog.records] == [
        "pages are not copied to and from the GPU the broken way: no such instruction"
    ]
    with pytest.raises(RuntimeError, match="no such instruction"):
        fastest({"broken": ways["broken"]}, time_of)
