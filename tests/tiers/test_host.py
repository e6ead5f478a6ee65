"""The host tier: the contract, the ways to see its slots, and what becomes of it on a machine that gives less."""

import asyncio
import logging
import mmap
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from hicache.errors import BadRequest, TierUnavailable
from hicache.layout import AttentionKind, KVDtype, KVLayout, LayerGroup, PageOrder
from hicache.tier import Outcome, SupportsDeclare, SupportsView, Tier
from hicache.tiers.arena import HUGE_PAGE
from hicache.tiers.host import SLOT_ALIGNMENT, HostTier, slot_bytes
from tests.stamps import identity_chain, stamp
from tests.tiers.contract import TierContract, expect_miss, expect_page, run, store


@asynccontextmanager
async def opened(**arguments: Any) -> AsyncIterator[HostTier]:
    tier = HostTier(**arguments)
    try:
        yield tier
    finally:
        await tier.close()


class TestHostContract(TierContract):
    @asynccontextmanager
    async def make_tier(self, *, page_bytes: int, capacity_pages: int) -> AsyncIterator[Tier]:
        async with opened(page_bytes=page_bytes, capacity_pages=capacity_pages) as tier:
            yield tier

    def raw_page(self, tier: Tier, slot: int) -> bytes:
        assert isinstance(tier, HostTier)
        return tier.array[slot, : tier.page_bytes].tobytes()


# ---- slots as memory


def test_slots_are_aligned_and_their_views_writable() -> None:
    async def main() -> None:
        async with opened(page_bytes=10_000, capacity_pages=3) as tier:
            assert isinstance(tier, SupportsView)
            assert isinstance(tier, SupportsDeclare)
            assert tier.slot_stride == slot_bytes(10_000) == 12_288
            assert tier.array.shape == (3, 12_288)
            for slot in range(3):
                view = tier.view(slot)
                assert (len(view), view.format, view.readonly) == (10_000, "B", False)
                address = np.frombuffer(view, np.uint8).ctypes.data
                assert address % SLOT_ALIGNMENT == 0
                assert address == tier.array[slot].ctypes.data

    run(main())


def test_a_page_filled_through_its_view_is_served_once_declared() -> None:
    async def main() -> None:
        async with opened(page_bytes=10_000, capacity_pages=2) as tier:
            first, second = identity_chain(2)
            [slot] = tier.allocate(1).tolist()
            tier.view(slot)[:] = stamp(first, 10_000).data
            await expect_miss(tier, slot, first, Outcome.NOT_FOUND)
            assert tier.declare(slot, 0, first) is Outcome.OK
            await expect_page(tier, slot, first)
            # And what `write` brought is seen through the view.
            await store(tier, np.array([slot], np.int32), [second])
            assert bytes(tier.view(slot)) == stamp(second, 10_000).tobytes()
            assert bytes(tier.tensor()[slot, :10_000].numpy()) == stamp(second, 10_000).tobytes()
            tier.tensor()[slot, 0] = 255 - int(stamp(second, 1)[0])
            assert tier.view(slot)[0] == 255 - int(stamp(second, 1)[0])

    run(main())


def test_many_pages_are_declared_at_once_or_none() -> None:
    async def main() -> None:
        async with opened(page_bytes=3_000, capacity_pages=5, layer_bytes=(1_000, 2_000)) as tier:
            tier.free(tier.allocate(3))  # the slots are in their second life then
            slots = tier.allocate(4)[[2, 0, 3]]
            identities = identity_chain(3)
            for slot, identity in zip(slots.tolist(), identities, strict=True):
                tier.view(slot)[:] = stamp(identity, 3_000).data
            sums = [tier.take_sums(slot) for slot in slots.tolist()]
            generations = tier.generations(slots)
            assert generations.tolist() == [tier.generation(slot) for slot in slots.tolist()]
            with pytest.raises(BadRequest) as caught:
                tier.declare_all(slots, identities, [sums[0], sums[1], bytes(4)])
            assert caught.value.field == "sums"
            for slot, identity in zip(slots.tolist(), identities, strict=True):
                await expect_miss(tier, slot, identity, Outcome.NOT_FOUND)
            tier.declare_all(slots, identities, sums)
            for slot, identity, each in zip(slots.tolist(), identities, sums, strict=True):
                await expect_page(tier, slot, identity)
                assert tier.sums(slot, tier.generation(slot)) == each
            await expect_miss(tier, 1, identities[0], Outcome.NOT_FOUND)
            tier.declare_all(slots, identities)
            assert [tier.sums(slot, tier.generation(slot)) for slot in slots.tolist()] == [None] * 3
            for wrong in (np.array([0, 0, 3], np.int32), np.array([0, 2, 4], np.int32), slots[:2]):
                with pytest.raises(AssertionError):
                    tier.declare_all(wrong, identities)

    run(main())


@pytest.mark.parametrize("dtype", list(KVDtype))
def test_a_layer_is_seen_in_place(dtype: KVDtype) -> None:
    layout = KVLayout.uniform(num_layers=3, num_kv_heads=2, head_dim=8, dtype=dtype, page_size=4)

    async def main() -> None:
        async with opened(page_bytes=layout.page_bytes, capacity_pages=5) as tier:
            identities = identity_chain(5)
            await store(tier, tier.allocate(5), identities)
            for layer in range(3):
                seen = tier.layer_view(layout, layer)
                assert seen.shape == (5, 2, 4, 2, 8)
                assert seen.dtype == getattr(torch, dtype.value)
                assert seen.stride()[1:] == (64, 16, 8, 1)
                assert seen.stride(0) * dtype.itemsize == tier.slot_stride
                assert seen.data_ptr() == tier.tensor().data_ptr() + layer * layout.layer_bytes(0)
                for slot, identity in enumerate(identities):
                    expected = stamp(identity, layout.layer_bytes(0), start=layer * layout.layer_bytes(0))
                    assert seen[slot].view(torch.uint8).numpy().tobytes() == expected.tobytes()
            tier.layer_view(layout, 1)[2, 1, 3, 1, 7] = 1
            last = tier.view(2)[2 * layout.layer_bytes(0) - dtype.itemsize : 2 * layout.layer_bytes(0)]
            assert bytes(last) == torch.ones(1).to(getattr(torch, dtype.value)).view(torch.uint8).numpy().tobytes()

    run(main())


def test_layers_are_found_across_groups() -> None:
    layout = KVLayout(
        (
            LayerGroup(AttentionKind.FULL, 2, 2, 8),
            LayerGroup(AttentionKind.LATENT, 1, 1, 32),
            LayerGroup(AttentionKind.SLIDING_WINDOW, 2, 1, 16, window=8),
        ),
        KVDtype.FLOAT16,
        4,
    )

    async def main() -> None:
        async with opened(page_bytes=layout.page_bytes, capacity_pages=1) as tier:
            base = tier.tensor().data_ptr()
            full, latent, sliding = (layout.layer_bytes(part) for part in range(3))
            offsets = {layer: tier.layer_view(layout, layer).data_ptr() - base for layer in (0, 1, 3, 4)}
            assert offsets == {0: 0, 1: full, 3: 2 * full + latent, 4: 2 * full + latent + sliding}
            assert tier.layer_view(layout, 4).shape == (1, 2, 4, 1, 16)
            with pytest.raises(BadRequest, match="keys and values in NHD order"):
                tier.layer_view(layout, 2)
            for layer in (-1, 5):
                with pytest.raises(BadRequest, match=f"layer: {layer} is not within 0 to 4"):
                    tier.layer_view(layout, layer)
            with pytest.raises(BadRequest, match="keys and values in NHD order"):
                tier.layer_view(KVLayout(layout.groups, layout.dtype, 4, PageOrder.HND), 0)
            with pytest.raises(BadRequest, match="has pages of"):
                tier.layer_view(KVLayout(layout.groups, layout.dtype, 8), 0)

    run(main())


@pytest.mark.parametrize("slot", [-1, 2])
def test_a_view_of_a_slot_that_does_not_exist_is_refused(slot: int) -> None:
    async def main() -> None:
        async with opened(page_bytes=100, capacity_pages=2) as tier:
            with pytest.raises(BadRequest, match="slot"):
                tier.view(slot)

    run(main())


def test_after_closing_old_views_are_harmless_and_new_ones_refused() -> None:
    async def main() -> None:
        async with opened(page_bytes=100, capacity_pages=2) as tier:
            view, tensor = tier.view(1), tier.tensor()
            view[0] = 9
            await tier.close()
            assert view[0] == 9
            assert tensor[1, 0] == 9
            for name in ("array", "fd"):
                with pytest.raises(TierUnavailable, match="host: is closed"):
                    getattr(tier, name)
            with pytest.raises(TierUnavailable, match="host: is closed"):
                tier.view(0)
            with pytest.raises(TierUnavailable, match="host: is closed"):
                tier.tensor()

    run(main())


# ---- size


def test_capacity_in_bytes_counts_whole_slots() -> None:
    async def main() -> None:
        async with opened(page_bytes=5_000, capacity_bytes=3 * 8_192 + 8_191) as tier:
            assert tier.capacity_pages == 3
            assert tier.capacity_bytes == 3 * 8_192

    run(main())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"page_bytes": 5_000, "capacity_bytes": 8_191},
            "capacity_bytes: 8191 is below one page, which takes 8192 bytes",
        ),
        ({"page_bytes": 5_000, "capacity_pages": 0}, "capacity_pages: 0 is not within"),
        ({"page_bytes": 5_000}, "capacity_bytes: is given exactly when"),
        ({"page_bytes": 0, "capacity_pages": 1}, "page_bytes: 0 is below 1"),
        ({"page_bytes": 1, "capacity_pages": 1, "num_threads": 0}, "num_threads: 0 is not within"),
    ],
)
def test_a_size_that_makes_no_sense_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        HostTier(**arguments)  # type: ignore[arg-type]  # integers for the parameters that are integers


def test_memory_that_cannot_be_had_is_a_typed_refusal() -> None:
    with pytest.raises(TierUnavailable, match=r"host: needs \d+ bytes of memory, \d+ are available"):
        HostTier(page_bytes=1 << 30, capacity_pages=1 << 20)


# ---- pages of 2 MiB, and pinning


def test_the_arena_is_gathered_into_large_pages_while_it_is_used(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with opened(page_bytes=HUGE_PAGE, capacity_pages=16) as tier:
            identities = identity_chain(16)
            slots = tier.allocate(16)
            while tier._collapsing.is_alive():
                await store(tier, slots, identities)
                await expect_page(tier, int(slots[3]), identities[3])
            if not caplog.records:
                assert tier.collapsed_bytes == 16 * HUGE_PAGE
            await store(tier, slots, identities)
            for slot, identity in zip(slots.tolist(), identities, strict=True):
                await expect_page(tier, slot, identity)

    run(main())


def test_closing_does_not_wait_for_all_of_the_gathering() -> None:
    async def main() -> None:
        tier = HostTier(page_bytes=HUGE_PAGE, capacity_pages=128)
        await tier.close()
        assert not tier._collapsing.is_alive()
        assert tier.collapsed_bytes < 128 * HUGE_PAGE

    run(main())


NO_LARGE_PAGES = """
import asyncio, ctypes, logging
from hicache.tiers.host import HostTier

logging.basicConfig(format="%(message)s")
PR_SET_THP_DISABLE = 41
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
tier = HostTier(page_bytes=1 << 20, capacity_pages=64)
tier._collapsing.join()
tier.view(63)[:3] = b"abc"
print(bytes(tier.view(63)[:3]), tier.collapsed_bytes)
asyncio.run(tier.close())
"""


def test_without_large_pages_there_is_one_warning_and_the_tier_works() -> None:
    result = subprocess.run([sys.executable, "-c", NO_LARGE_PAGES], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.returncode) == ("b'abc' 0\n", 0)
    assert result.stderr.startswith("host: only 0 of 64 MiB lie in 2 MiB pages, disk I/O is slower: ")
    assert result.stderr.count("\n") == 1


def test_a_tier_that_cannot_be_pinned_says_so_once_and_works(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with opened(page_bytes=HUGE_PAGE, capacity_pages=2, pinned=True) as tier:
            [identity] = identity_chain(1)
            slots = tier.allocate(1)
            await store(tier, slots, [identity])
            await expect_page(tier, int(slots[0]), identity)
            warnings = [record for record in caplog.records if "the arena is not pinned" in record.getMessage()]
            assert len(warnings) == (0 if tier.pinned else 1)
            if not torch.cuda.is_available():
                assert not tier.pinned

    with caplog.at_level(logging.WARNING, logger="hicache.tiers.host"):
        run(main())


def test_generations_can_be_read_through_their_descriptor() -> None:
    """Another process maps the table and sees each slot's count rise when the slot is given back, and nothing else."""
    tier = HostTier(page_bytes=4096, capacity_pages=3, huge_pages=False)
    try:
        tier.free(tier.allocate(2))
        fd = tier.share_generations()
        assert tier.share_generations() == fd
        with mmap.mmap(fd, 3 * 8, mmap.MAP_SHARED, mmap.PROT_READ) as table:

            def shown() -> list[int]:
                return list(struct.unpack("<3q", table[:]))

            assert shown() == [tier.generation(slot) for slot in range(3)] == [1, 1, 0]
            slots = tier.allocate(3)
            assert shown() == [1, 1, 0]
            tier.free(slots[1:])
            assert shown() == [tier.generation(slot) for slot in range(3)] == [1, 2, 1]
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 3 * 8, mmap.MAP_SHARED)
    finally:
        asyncio.run(tier.close())
    with pytest.raises(TierUnavailable):
        tier.share_generations()
