"""The cache after a crash: what was durable is found again with the right bytes, what was removed is not."""

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hicache.errors import DeadlineExceeded, TierUnavailable
from hicache.layout import KVDtype, KVLayout
from hicache.metadata import NODE_BYTES, ORDER_BYTES, ROOT_BYTES
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.recovery import Recovery
from hicache.residency import IN_TIER, Residency
from hicache.tier import DEVICE, HOST, NVME, PageIdentity, TierId, chain_digest
from tests.hicache.durable import Image, Page
from tests.hicache.worlds import (
    LAYOUT,
    MODEL,
    OTHER,
    PAGE_SIZE,
    Setup,
    int32,
    opened,
    prompt,
    stamps,
)
from tests.simulation import World, run_simulated


def nodes(setup: Setup) -> Iterator[Node]:
    for batch in setup.cache.tree.walk():
        for info in batch:
            yield info.node


def check_closed(setup: Setup) -> None:
    """NVMe holds no page without those before it; a node that is split on its way is under way in both halves."""
    for node in nodes(setup):
        if node.parent is not None:
            state, above = node.residency(NVME), node.parent.residency(NVME)
            assert state is not Residency.RESIDENT or above is Residency.RESIDENT, "NVMe has a hole"
            assert state is not Residency.ARRIVING or above in IN_TIER, "a copy is under way into a hole"


def page_of(namespace: Namespace, tokens: list[int], index: int, number: int) -> Page:
    """The `index`-th page of a prompt, as an earlier life would have left it."""
    prefix = namespace.digest
    for start in range(0, index * PAGE_SIZE, PAGE_SIZE):
        prefix = chain_digest(prefix, int32(tokens[start : start + PAGE_SIZE]).tobytes())
    start = index * PAGE_SIZE
    identity = PageIdentity(namespace.digest, prefix, int32(tokens[start : start + PAGE_SIZE]).tobytes())
    return Page(identity, b"".join(stamps(namespace, tokens)[start : start + PAGE_SIZE]), number)


def image_of(*prompts: tuple[Namespace, list[int]]) -> Image:
    """A medium with the whole pages of some prompts."""
    image = Image()
    for namespace, tokens in prompts:
        image.records[namespace.digest] = namespace.encode()
        for index in range(len(tokens) // PAGE_SIZE):
            page = page_of(namespace, tokens, index, len(image.pages) + 1)
            if page.identity not in [other.identity for other in image.pages.values()]:
                image.pages[len(image.pages)] = page
    return image


def test_what_was_durable_is_found_again_after_a_restart() -> None:
    async def main(world: World) -> None:
        async with opened(world, image=Image()) as setup:
            await setup.request().run(prompt(1, 22))
            deadline = world.monotonic() + 10
            persisted = await setup.cache.persist(MODEL, prompt(1, 22), deadline=deadline)
            assert persisted.num_tokens == 20
            assert setup.durable.durable >= persisted.number
            setup.check_quiet()
            image = setup.durable.crash(world.rng)
        async with opened(world, image=image) as setup:
            assert setup.cache.recovered == Recovery(pages=5, namespaces=1, nodes=1, seconds=0.0)
            setup.check_quiet()
            request = setup.request()
            sequence = await request.open(prompt(1, 22))
            assert sequence.cached_by_tier == {NVME: 20}
            await request.step(prompt(1, 22)[20:])
            sequence.close()
            setup.check_quiet()

    run_simulated(main, 0)


def test_persisting_keeps_the_faster_copies_and_says_how_far_it_reached() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=16, nvme_pages=3, image=Image()) as setup:
            await setup.request().run(prompt(1, 20))
            persisted = await setup.cache.persist(MODEL, prompt(1, 40), deadline=world.monotonic() + 10)
            assert persisted.num_tokens == 3 * PAGE_SIZE
            assert setup.cache.tree.occupancy(DEVICE).resident == 5
            assert (await setup.cache.persist(OTHER, prompt(1, 40), deadline=world.monotonic() + 10)).num_tokens == 0
            setup.check_quiet()

    run_simulated(main, 0)


def test_who_does_not_ask_never_waits_for_a_flush() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=6, host_pages=8, image=Image(), sync_s=1e6) as setup:
            for document in range(8):
                await setup.request().run(prompt(document, 17))
            assert setup.durable.accepted > 0
            assert setup.durable.num_syncs == 0
            with pytest.raises(DeadlineExceeded):
                await setup.cache.persist(MODEL, prompt(1, 17), deadline=world.monotonic() + 1)
            assert not await setup.cache.settle(deadline=world.monotonic() + 1)
            setup.durable.sync_fails = True
            await setup.request().run(prompt(1, 17))
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_flush_that_fails_promises_nothing() -> None:
    async def main(world: World) -> None:
        async with opened(world, image=Image()) as setup:
            await setup.request().run(prompt(1, 22))
            setup.durable.sync_fails = True
            with pytest.raises(TierUnavailable, match="flush"):
                await setup.cache.persist(MODEL, prompt(1, 22), deadline=world.monotonic() + 1)
            assert await setup.cache.settle(deadline=world.monotonic() + 1), "a removal is not what flushes lose"
            assert await setup.request().run(prompt(1, 22)) == 20
            # The tree may believe these pages to be on NVMe. They are written again before anything is promised.
            setup.durable.sync_fails = False
            persisted = await setup.cache.persist(MODEL, prompt(1, 22), deadline=world.monotonic() + 1)
            assert persisted.num_tokens == 20
            assert len(setup.durable.certain().closed()) == 5
            setup.check_quiet()

    run_simulated(main, 0)


@pytest.mark.parametrize("tier_id", [DEVICE, HOST])
def test_what_a_failed_flush_took_is_written_again_from_wherever_it_is(tier_id: TierId) -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=8, host_pages=8, image=Image(), eager=0.0) as setup:
            cache = setup.cache
            await setup.request().run(prompt(1, 17))
            if tier_id == HOST:
                cache.free({DEVICE: await cache.allocate(DEVICE, 8, deadline=world.monotonic() + 1)})
            setup.durable.sync_fails = True
            for _ in range(2):
                with pytest.raises(TierUnavailable):
                    await cache.persist(MODEL, prompt(1, 17), deadline=world.monotonic() + 1)
            setup.durable.sync_fails = False
            assert (await cache.persist(MODEL, prompt(1, 17), deadline=world.monotonic() + 1)).num_tokens == 16
            image = setup.durable.crash(world.rng)
            setup.check_quiet()
        async with opened(world, image=image) as setup:
            assert await setup.request().run(prompt(1, 17)) == 16
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_cache_without_such_a_tier_says_so() -> None:
    async def main(world: World) -> None:
        for nvme_pages in (None, 64):
            async with opened(world, nvme_pages=nvme_pages) as setup:
                with pytest.raises(TierUnavailable, match="survives"):
                    await setup.cache.persist(MODEL, prompt(1, 22), deadline=world.monotonic() + 1)
                assert await setup.cache.settle(deadline=world.monotonic() + 1)

    run_simulated(main, 0)


@pytest.mark.parametrize("seed", range(6))
def test_ancestors_go_down_first_wherever_they_are(seed: int) -> None:
    """Prompts that share a hot beginning: it stays on the device, while what follows is pushed down."""

    async def main(world: World) -> None:
        async with opened(world, device_pages=8, host_pages=6, image=Image()) as setup:
            for branch in range(10):
                await setup.request().run(prompt(1, 20, branch=branch, shared=12))
                check_closed(setup)
            written = [node for node in nodes(setup) if node.residency(NVME) is Residency.RESIDENT]
            assert any(node.residency(DEVICE) is Residency.RESIDENT for node in written)
            image = setup.durable.crash(world.rng)
            assert len(image.closed()) == len(image.pages)
            setup.check_quiet()

    run_simulated(main, seed)


def test_foreign_and_unreadable_pages_are_given_back() -> None:
    other_layout = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=2, dtype=KVDtype.FLOAT32, page_size=4)
    assert other_layout.page_bytes == LAYOUT.page_bytes
    foreign = replace(MODEL, layout=other_layout)
    image = image_of((MODEL, prompt(1, 8)), (foreign, prompt(2, 12)), (OTHER, prompt(3, 16)))
    image.records[OTHER.digest] += b"?"

    async def main(world: World) -> None:
        async with opened(world, image=copy.deepcopy(image)) as setup:
            assert setup.cache.recovered == Recovery(pages=2, foreign_pages=7, namespaces=1, nodes=1)
            assert await setup.request().run(prompt(1, 9)) == 8
            assert await setup.request(OTHER).run(prompt(3, 17)) == 0
            setup.check_quiet()

    run_simulated(main, 0)


def test_what_does_not_fit_into_the_metadata_budget_is_given_back() -> None:
    image = image_of(*((MODEL, prompt(document, 8)) for document in range(6)))
    node_bytes = NODE_BYTES + 2 * ORDER_BYTES + 8 * 4 + 2 * 4

    async def main(world: World) -> None:
        async with opened(world, image=image, metadata_bytes=ROOT_BYTES + 4 * node_bytes + 50) as setup:
            assert setup.cache.recovered == Recovery(pages=8, refused_pages=4, namespaces=1, nodes=4)
            setup.check_quiet()
            assert setup.cache.tree.metadata_bytes <= (setup.cache.tree.metadata_budget or 0)
            assert await setup.request().run(prompt(2, 9)) == 8
            setup.check_quiet()

    run_simulated(main, 0)
