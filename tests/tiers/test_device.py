"""The device tier: the contract, the layer-first form of its pages, and tokens written in place.

Everything runs on CPU memory; the classes marked `gpu` run the same on a GPU.
"""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from hicache.errors import BadRequest, TierUnavailable
from hicache.kernels.gather import LayerPages, gather_pages_reference, scatter_pages_reference
from hicache.layout import AttentionKind, KVDtype, KVLayout, LayerGroup, PageOrder
from hicache.tier import Outcome, SupportsDeclare, SupportsLayerWrite, SupportsPageCopy, Tier
from hicache.tiers.device import DeviceTier
from tests.stamps import identity_chain, stamp
from tests.tiers.contract import TierContract, expect_miss, expect_page, run, store, write_of


def small_layout(dtype: KVDtype = KVDtype.FLOAT32, *, num_layers: int = 3, page_size: int = 4) -> KVLayout:
    return KVLayout.uniform(num_layers=num_layers, num_kv_heads=2, head_dim=8, dtype=dtype, page_size=page_size)


def layout_of(page_bytes: int) -> KVLayout:
    """Two layers of int8 pages with one head that together have so many bytes."""
    page_size = TierContract.page_size
    return KVLayout.uniform(
        num_layers=2, num_kv_heads=1, head_dim=page_bytes // (4 * page_size), dtype=KVDtype.INT8, page_size=page_size
    )


@asynccontextmanager
async def opened(layout: KVLayout, capacity_pages: int, device: str = "cpu") -> AsyncIterator[DeviceTier]:
    tier = DeviceTier(layout, capacity_pages=capacity_pages, device=device)
    try:
        yield tier
    finally:
        await tier.close()


def raw_page(tier: DeviceTier, slot: int) -> bytes:
    """The page-first bytes of a slot, read layer by layer from the pools."""
    layers = [tier.layer(layer)[slot].view(torch.uint8).cpu() for layer in range(tier.layout.num_layers)]
    return b"".join(layer.numpy().tobytes() for layer in layers)


class TestDeviceContract(TierContract):
    device: ClassVar[str] = "cpu"

    @asynccontextmanager
    async def make_tier(self, *, page_bytes: int, capacity_pages: int) -> AsyncIterator[Tier]:
        async with opened(layout_of(page_bytes), capacity_pages, self.device) as tier:
            yield tier

    def raw_page(self, tier: Tier, slot: int) -> bytes:
        assert isinstance(tier, DeviceTier)
        return raw_page(tier, slot)


@pytest.mark.gpu
class TestCudaContract(TestDeviceContract):
    device = "cuda"


class TestDevicePages:
    """What is special to pages on a device."""

    device: ClassVar[str] = "cpu"

    @pytest.mark.parametrize("dtype", list(KVDtype))
    def test_a_page_is_scattered_into_all_layers_bit_by_bit(self, dtype: KVDtype) -> None:
        layout = small_layout(dtype)

        async def main() -> None:
            async with opened(layout, 6, self.device) as tier:
                assert isinstance(tier, SupportsDeclare)
                assert isinstance(tier, SupportsPageCopy)
                identities = identity_chain(4)
                slots = tier.allocate(6)[[4, 1, 5, 2]]
                await store(tier, slots, identities)
                for layer in range(3):
                    pool = tier.layer(layer)
                    assert pool.shape == (6, 2, 4, 2, 8)
                    assert pool.dtype == getattr(torch, dtype.value)
                    assert pool.device.type == self.device
                    assert pool.is_contiguous()
                    for slot, identity in zip(slots.tolist(), identities, strict=True):
                        size = layout.layer_bytes(0)
                        expected = stamp(identity, size, start=layer * size)
                        assert pool[slot].view(torch.uint8).cpu().numpy().tobytes() == expected.tobytes()
                    for slot in (0, 3):
                        assert not pool[slot].view(torch.uint8).any()
                for slot, identity in zip(slots.tolist(), identities, strict=True):
                    await expect_page(tier, slot, identity)

        run(main())

    def test_layers_come_one_by_one_and_make_no_page_before_it_is_declared(self) -> None:
        layout = small_layout()

        async def main() -> None:
            async with opened(layout, 6, self.device) as tier:
                assert isinstance(tier, SupportsLayerWrite)
                assert tier.num_layers == 3
                before, identities = identity_chain(3, namespace=1), identity_chain(3)
                slots = tier.allocate(6)[[4, 1, 5]]
                await store(tier, slots, before)
                writes = [write_of(tier, slot, each) for slot, each in zip(slots.tolist(), identities, strict=True)]
                writing = await tier.open_layer_writes(writes)
                for layer in range(3):
                    assert await writing.start_layer(layer) == [Outcome.OK] * 3
                    for slot, old, new in zip(slots.tolist(), before, identities, strict=True):
                        size = layout.layer_bytes(0)
                        for each in range(3):
                            expected = stamp(new if each <= layer else old, size, start=each * size).tobytes()
                            assert tier.layer(each)[slot].view(torch.uint8).cpu().numpy().tobytes() == expected
                        await expect_miss(tier, slot, old, Outcome.NOT_FOUND)
                        await expect_miss(tier, slot, new, Outcome.NOT_FOUND)
                for layer in (-1, 3):
                    with pytest.raises(BadRequest, match="layer"):
                        await writing.start_layer(layer)
                writing.close()
                for slot, identity in zip(slots.tolist(), identities, strict=True):
                    assert tier.declare(slot, tier.generation(slot), identity) is Outcome.OK
                    await expect_page(tier, slot, identity)
                with pytest.raises(BadRequest, match="same slot"):
                    await tier.open_layer_writes([writes[0], writes[0]])
            assert await (await tier.open_layer_writes(writes)).start_layer(0) == [Outcome.ERROR] * 3

        run(main())

    def test_a_slot_freed_between_layers_is_written_by_its_next_owner_alone(self) -> None:
        async def main() -> None:
            async with opened(small_layout(), 2, self.device) as tier:
                slots, identities = tier.allocate(2), identity_chain(2)
                writes = [write_of(tier, slot, each) for slot, each in zip(slots.tolist(), identities, strict=True)]
                writing = await tier.open_layer_writes(writes)
                assert await writing.start_layer(0) == [Outcome.OK] * 2
                tier.free(slots[:1])
                assert await writing.start_layer(1) == [Outcome.STALE, Outcome.OK]
                again, other = tier.allocate(1), identity_chain(1, namespace=1)
                async with asyncio.TaskGroup() as group:
                    storing = group.create_task(store(tier, again, other))
                    await asyncio.sleep(0)
                    assert not storing.done()
                    writing.close()
                await expect_page(tier, int(again[0]), other[0])
                closing = await tier.open_layer_writes(writes[1:])
                assert await closing.start_layer(0) == [Outcome.OK]
                closing.close()

        run(main())

    def test_the_form_of_pages_is_that_of_the_kernels(self) -> None:
        layout = small_layout(KVDtype.BFLOAT16)

        async def main() -> None:
            async with opened(layout, 6, self.device) as tier:
                identities = identity_chain(3)
                slots = tier.allocate(6)[[4, 1, 5]]
                pages = LayerPages.of([tier.layer(layer) for layer in range(3)])
                page_ids = torch.from_numpy(slots).to(self.device)
                rows = torch.arange(3, dtype=torch.int32, device=self.device)
                await store(tier, slots, identities)
                gathered = torch.zeros(3, layout.page_bytes, dtype=torch.uint8, device=self.device)
                gather_pages_reference(pages, page_ids, gathered, rows)
                for row, identity in zip(gathered, identities, strict=True):
                    assert row.cpu().numpy().tobytes() == stamp(identity, layout.page_bytes).tobytes()
                # And back: what the kernels' reference scatters is what the tier reads.
                scatter_pages_reference(gathered.flip(0), rows, pages, page_ids)
                for slot, identity in zip(slots.tolist(), reversed(identities), strict=True):
                    assert tier.declare(slot, 0, identity) is Outcome.OK
                    await expect_page(tier, slot, identity)

        run(main())

    def test_more_pages_than_one_batch_of_staging(self) -> None:
        layout = small_layout(num_layers=30, page_size=64)

        async def main() -> None:
            async with opened(layout, 40, self.device) as tier:
                identities = identity_chain(40)
                slots = tier.allocate(40)
                np.random.default_rng(0).shuffle(slots)
                await store(tier, slots, identities)
                for slot, identity in zip(slots.tolist(), identities, strict=True):
                    await expect_page(tier, slot, identity)

        run(main())

    @pytest.mark.parametrize("dtype", list(KVDtype))
    @pytest.mark.parametrize("seed", range(3))
    def test_tokens_go_where_the_slot_mapping_says(self, dtype: KVDtype, seed: int) -> None:
        layout = small_layout(dtype)
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)

        def rows(num_tokens: int) -> Tensor:
            """Random bit patterns, with the strides of a tensor that was `[heads, tokens, head_dim]`."""
            size = (2, num_tokens, 8 * dtype.itemsize)
            bits = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
            return bits.view(getattr(torch, dtype.value)).to(self.device).transpose(0, 1)

        async def main() -> None:
            async with opened(layout, 5, self.device) as tier:
                expected = np.zeros((3, 5, 2, 4, 2, 8 * dtype.itemsize), np.uint8)
                for num_tokens in (0, 1, 3, 11):
                    mapping = rng.sample(range(20), num_tokens)
                    if num_tokens > 1:
                        mapping[rng.randrange(num_tokens)] = -1
                        mapping[0] = -1
                    slots = torch.tensor(mapping, dtype=torch.int64, device=self.device)
                    for layer in range(3):
                        key, value = rows(num_tokens), rows(num_tokens)
                        tier.write_tokens(layer, slots, key, value)
                        for token, slot in enumerate(mapping):
                            if slot >= 0:
                                for plane, tensor in enumerate((key, value)):
                                    token_bits = tensor[token].contiguous().view(torch.uint8).cpu().numpy()
                                    expected[layer, slot // 4, plane, slot % 4] = token_bits
                for layer in range(3):
                    pool = tier.layer(layer).view(torch.uint8).cpu().numpy()
                    assert np.array_equal(pool, expected[layer])

        run(main())

    def test_a_page_of_tokens_is_read_page_first_once_declared(self) -> None:
        layout = small_layout()

        async def main() -> None:
            async with opened(layout, 3, self.device) as tier:
                [identity] = identity_chain(1)
                [slot] = tier.allocate(2)[1:].tolist()
                page = torch.from_numpy(stamp(identity, layout.page_bytes)).view(torch.float32).view(3, 2, 4, 2, 8)
                page = page.to(self.device)
                for tokens in (slice(0, 3), slice(3, 4)):
                    mapping = slot * 4 + torch.arange(4, device=self.device)[tokens]
                    for layer in range(3):
                        tier.write_tokens(layer, mapping, page[layer, 0, tokens], page[layer, 1, tokens])
                await expect_miss(tier, slot, identity, Outcome.NOT_FOUND)
                assert tier.declare(slot, 0, identity) is Outcome.OK
                await expect_page(tier, slot, identity)

        run(main())

    def test_a_page_is_copied_whole_and_carries_no_identity(self) -> None:
        async def main() -> None:
            async with opened(small_layout(), 4, self.device) as tier:
                first, second = identity_chain(2)
                slots = tier.allocate(3)
                await store(tier, slots[:2], [first, second])
                assert await tier.copy_page(int(slots[0]), int(slots[2])) is Outcome.OK
                assert raw_page(tier, int(slots[2])) == raw_page(tier, int(slots[0]))
                await expect_miss(tier, int(slots[2]), first, Outcome.NOT_FOUND)
                # Onto a slot that held another page, which is then gone.
                assert await tier.copy_page(int(slots[0]), int(slots[1])) is Outcome.OK
                for identity in (first, second):
                    await expect_miss(tier, int(slots[1]), identity, Outcome.NOT_FOUND)
                await expect_page(tier, int(slots[0]), first)

        run(main())


@pytest.mark.gpu
class TestCudaPages(TestDevicePages):
    device = "cuda"

    def test_tokens_beyond_the_last_slot_write_nothing(self) -> None:
        async def main() -> None:
            async with opened(small_layout(), 2, self.device) as tier:
                tokens = torch.ones(3, 2, 8, device=self.device)
                mapping = torch.tensor([8, 1 << 40, -5], device=self.device)
                tier.write_tokens(1, mapping, tokens, tokens)
                for layer in range(3):
                    assert not tier.layer(layer).any()

        run(main())


# ---- copy-on-write under pressure


class HeldCopies(DeviceTier):
    """Copies of whole pages onto each other wait for `gate`."""

    def __init__(self, layout: KVLayout, capacity_pages: int) -> None:
        super().__init__(layout, capacity_pages=capacity_pages)
        self.gate = threading.Event()
        self.arrived = threading.Semaphore(0)
        self.failure: Exception | None = None

    def _copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.arrived.release()
        assert self.gate.wait(20.0)
        if self.failure is not None:
            raise self.failure
        super()._copy_pages(pairs)


def test_a_copy_onto_a_slot_that_is_freed_meanwhile_is_stale() -> None:
    async def main() -> None:
        tier = HeldCopies(small_layout(), 2)
        first, second = identity_chain(2)
        slots = tier.allocate(2)
        await store(tier, slots[:1], [first])
        async with asyncio.TaskGroup() as group:
            copying = group.create_task(tier.copy_page(0, 1))
            assert await asyncio.to_thread(tier.arrived.acquire, timeout=20.0)
            tier.free(slots[1:])
            tier.allocate(1)
            # The next life's page waits for the late copy, and so does another copy onto it.
            writing = group.create_task(tier.write([write_of(tier, 1, second)]))
            await asyncio.sleep(0)
            tier.gate.set()
        assert copying.result() is Outcome.STALE
        assert writing.result() == [Outcome.OK]
        await expect_page(tier, 1, second)
        await tier.close()

    run(main())


def test_a_copy_that_waited_for_a_slot_that_was_freed_again_is_stale() -> None:
    async def main() -> None:
        tier = HeldCopies(small_layout(), 2)
        [first] = identity_chain(1)
        slots = tier.allocate(2)
        await store(tier, slots[:1], [first])
        async with asyncio.TaskGroup() as group:
            group.create_task(tier.copy_page(0, 1))
            assert await asyncio.to_thread(tier.arrived.acquire, timeout=20.0)
            waiting = group.create_task(tier.copy_page(0, 1))
            await asyncio.sleep(0)
            tier.free(slots[1:])
            tier.allocate(1)
            tier.gate.set()
        assert waiting.result() is Outcome.STALE
        assert not tier.arrived.acquire(blocking=False), "it was copied into the slot's next life"
        await tier.close()
        assert tier.generation(1) == 1

    run(main())


def test_a_copy_that_fails_or_comes_after_closing_is_an_error() -> None:
    async def main() -> None:
        tier = HeldCopies(small_layout(), 2)
        tier.allocate(2)
        tier.gate.set()
        tier.failure = RuntimeError("the GPU is gone")
        assert await tier.copy_page(0, 1) is Outcome.ERROR
        await tier.close()
        assert await tier.copy_page(0, 1) is Outcome.ERROR

    run(main())


@pytest.mark.parametrize(("source", "target"), [(0, 2), (2, 0), (1, 1)])
def test_a_copy_that_names_a_wrong_slot_is_a_bug_of_the_caller(source: int, target: int) -> None:
    async def main() -> None:
        async with opened(small_layout(), 3) as tier:
            tier.allocate(2)
            with pytest.raises(AssertionError, match="device: slot"):
                await tier.copy_page(source, target)

    run(main())


# ---- requests that are wrong


TOKENS = torch.ones(3, 2, 8)
MAPPING = torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("layer", "mapping", "key", "value", "field"),
    [
        (3, MAPPING, TOKENS, TOKENS, "layer"),
        (-1, MAPPING, TOKENS, TOKENS, "layer"),
        (0, MAPPING.int(), TOKENS, TOKENS, "slot_mapping"),
        (0, MAPPING[None], TOKENS, TOKENS, "slot_mapping"),
        (0, torch.tensor(0), TOKENS, TOKENS, "slot_mapping"),
        (0, torch.tensor([0, 1, 8]), TOKENS, TOKENS, "slot_mapping"),
        (0, torch.tensor([0, 1, -2]), TOKENS, TOKENS, "slot_mapping"),
        (0, MAPPING, TOKENS[:2], TOKENS, "key"),
        (0, MAPPING, TOKENS.double(), TOKENS, "key"),
        (0, MAPPING, TOKENS, TOKENS.transpose(1, 2), "value"),
        (0, MAPPING, TOKENS, torch.empty(3, 2, 8, device="meta"), "value"),
    ],
)
def test_wrong_tokens_are_refused_and_write_nothing(
    layer: int, mapping: Tensor, key: Tensor, value: Tensor, field: str
) -> None:
    async def main() -> None:
        async with opened(small_layout(), 2) as tier:
            before = [raw_page(tier, slot) for slot in range(2)]
            with pytest.raises(BadRequest) as caught:
                tier.write_tokens(layer, mapping, key, value)
            assert caught.value.field == field
            assert [raw_page(tier, slot) for slot in range(2)] == before

    run(main())


def test_tokens_that_autograd_watches_are_written_as_numbers() -> None:
    async def main() -> None:
        async with opened(small_layout(), 2) as tier:
            key = torch.ones(1, 2, 8, requires_grad=True)
            tier.write_tokens(0, torch.tensor([5]), key, key * 2)
            assert torch.equal(tier.layer(0)[1, :, 1], torch.stack([key[0], 2 * key[0]]).detach())
            with torch.inference_mode():
                key = torch.full((1, 2, 8), 3.0)
                tier.write_tokens(0, torch.tensor([6]), key, key * 2)
            assert torch.equal(tier.layer(0)[1, :, 2], torch.stack([key[0], 2 * key[0]]))

    run(main())


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            KVLayout((LayerGroup(AttentionKind.FULL, 1, 1, 8),) * 2, KVDtype.INT8, 4),
            "layout.groups: the device pool supports one group with keys and values",
        ),
        (
            KVLayout((LayerGroup(AttentionKind.LATENT, 1, 1, 8),), KVDtype.INT8, 4),
            "layout.groups: the device pool supports one group with keys and values",
        ),
        (
            KVLayout((LayerGroup(AttentionKind.FULL, 1, 1, 8),), KVDtype.INT8, 4, PageOrder.HND),
            "layout.order: the device pool supports NHD",
        ),
    ],
)
def test_a_layout_without_a_pool_is_refused(layout: KVLayout, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        DeviceTier(layout, capacity_pages=1)


def test_a_sliding_window_has_the_same_pool() -> None:
    layout = KVLayout((LayerGroup(AttentionKind.SLIDING_WINDOW, 2, 1, 8, window=16),), KVDtype.FLOAT16, 4)

    async def main() -> None:
        async with opened(layout, 3) as tier:
            assert tier.layer(1).shape == (3, 2, 4, 1, 8)

    run(main())


def test_capacity_in_bytes_counts_whole_pages() -> None:
    async def main() -> None:
        layout = small_layout()
        tier = DeviceTier(layout, capacity_bytes=4 * layout.page_bytes - 1)
        assert tier.capacity_pages == 3
        assert tier.capacity_bytes == 3 * layout.page_bytes
        await tier.close()
        with pytest.raises(TierUnavailable, match="device: is closed"):
            tier.layer(0)

    run(main())


def test_a_pool_begins_with_a_huge_page() -> None:
    """A vector that is spread over two cache lines is loaded as two."""

    async def main() -> None:
        async with opened(small_layout(), 3) as tier:
            assert tier.layer(0).data_ptr() % (2 << 20) == 0

    run(main())


def test_a_budget_below_one_page_is_refused() -> None:
    with pytest.raises(BadRequest, match="capacity_bytes: 1000 is below one page, which takes 1536 bytes"):
        DeviceTier(small_layout(), capacity_bytes=1_000)


@pytest.mark.parametrize("device", ["", "tpu", "mps", "cpu:x", "meta"])
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(BadRequest, match="is not cpu, cuda or cuda:N"):
        DeviceTier(small_layout(), capacity_pages=1, device=device)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(TierUnavailable, match=r"no CUDA device|there is no cuda:63"):
        DeviceTier(small_layout(), capacity_pages=1, device="cuda:63")


def test_memory_that_cannot_be_had_is_a_typed_refusal() -> None:
    with pytest.raises(TierUnavailable, match=r"device: needs \d+ bytes of memory, \d+ are available"):
        DeviceTier(small_layout(num_layers=1000, page_size=256), capacity_pages=1 << 24)
