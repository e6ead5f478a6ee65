"""A prefix from both ends through a sequence: every byte right, as fast as the optimum, and nothing left behind."""

import asyncio
import math
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hicache.deciding import PrefillSpeeds
from hicache.errors import BadRequest, Closed, DeadlineExceeded, NoRoom, NotResident, TierUnavailable
from hicache.prefill import PrefillCurve
from hicache.sequence import Sequence, StepPlan
from hicache.tier import DEVICE, HOST, NVME
from tests.hicache.worlds import LAYOUT, MODEL, PAGE_SIZE, Request, Setup, UnreadablePage, int32, opened, prompt
from tests.simulation import Faults, World, run_simulated, seeds

CURVE = PrefillCurve(token_s=1e-3, attend_s=2e-6)
NUM_TOKENS = 960
CHUNK = 64


class Engine(Request):
    """A request whose steps take as long as the curve says, and which asks before each how far to go."""

    num_computed = 0

    async def _check_context(self, plan: StepPlan, before: list[int]) -> None:
        await super()._check_context(plan, before)
        self.num_computed += len(plan.tokens)
        await asyncio.sleep(CURVE.seconds(len(before), len(before) + len(plan.tokens)))

    async def begin(self, tokens: Seq[int], *, chunk_tokens: int | None = CHUNK) -> Sequence:
        cache = self.setup.cache
        self.sequence = await Sequence.open(
            cache, self.namespace, int32(tokens), owner="test", deadline=cache.clock.monotonic() + 60,
            chunk_tokens=chunk_tokens,
        )  # fmt: skip
        return self.sequence

    async def prefill(self, tokens: Seq[int], *, chunk: int = CHUNK) -> None:
        sequence, cache = self.sequence, self.setup.cache
        assert sequence is not None
        while sequence.length < len(tokens):
            allowed = await sequence.next_step(chunk, deadline=cache.clock.monotonic() + 60)
            assert sequence.tokens.tolist() == list(tokens)[: sequence.length]
            await self.step(tokens[sequence.length : sequence.length + allowed])

    async def whole(self, tokens: Seq[int], *, chunk_tokens: int | None = CHUNK, chunk: int = CHUNK) -> float:
        """Open, prefill, close. Returns the seconds that took."""
        began = self.setup.cache.clock.monotonic()
        sequence = await self.begin(tokens, chunk_tokens=chunk_tokens)
        try:
            await self.prefill(tokens, chunk=chunk)
        finally:
            sequence.close()
        return self.setup.cache.clock.monotonic() - began


def engine(setup: Setup) -> Engine:
    return Engine(setup, MODEL, MODEL)


async def to_nvme(setup: Setup) -> None:
    for tier_id in (DEVICE, HOST):
        num_pages = setup.cache.tiers[tier_id].capacity_pages
        deadline = setup.cache.clock.monotonic() + 10
        setup.cache.free({tier_id: await setup.cache.allocate(tier_id, num_pages, deadline=deadline)})


async def ready(setup: Setup, tokens: list[int], *, page_s: float) -> None:
    """Have a prompt on NVMe alone, on a disk that takes so long for a page, which is known."""
    assert setup.nvme is not None
    await engine(setup).whole(tokens)
    await engine(setup).whole(prompt(9, 129))
    await to_nvme(setup)
    setup.nvme.bandwidth = LAYOUT.page_bytes / page_s
    for _ in range(3):
        # Loading all of it, as nobody asks: the lane sees what it costs.
        request = engine(setup)
        (await request.begin(prompt(9, 129), chunk_tokens=None)).close()
        await to_nvme(setup)


def optimum(num_tokens: int, token_s: float) -> float:
    """Seconds until both ends meet, without steps, pages, or latency."""
    linear = CURVE.token_s + token_s
    computed = (math.sqrt(linear**2 + 4 * CURVE.attend_s * token_s * num_tokens) - linear) / (2 * CURVE.attend_s)
    return token_s * (num_tokens - computed)


def page_seconds(ratio: float) -> float:
    """What a page takes on a disk so many times as fast as break-even."""
    return CURVE.seconds(0, NUM_TOKENS) / NUM_TOKENS / ratio * PAGE_SIZE


@asynccontextmanager
async def prepared(world: World, *, ratio: float = 1.0, **options: Any) -> AsyncIterator[Setup]:
    """A cache with `prompt(1, NUM_TOKENS)` on NVMe alone, and a disk that is known."""
    options.setdefault("prefill", CURVE)
    async with opened(world, device_pages=400, host_pages=400, nvme_pages=600, **options) as setup:
        await ready(setup, prompt(1, NUM_TOKENS), page_s=page_seconds(ratio))
        yield setup
        await setup.quiet()
        setup.check_quiet()


TOKENS = prompt(1, NUM_TOKENS + 1)
"""What is asked for: one token more than is cached."""


@pytest.mark.parametrize("ratio", [0.5, 0.7, 1.0, 1.4, 2.0, 4.0])
def test_it_takes_as_long_as_the_optimum_and_never_longer_than_either_choice(ratio: float) -> None:
    async def main(world: World) -> None:
        async with prepared(world, ratio=ratio) as setup:
            counters = setup.cache.counters
            num_left, num_found = counters.tokens_left, counters.tokens_by_tier.get(NVME, 0)
            request = engine(setup)
            seconds = await request.whole(TOKENS)
            best = optimum(NUM_TOKENS, page_seconds(ratio) / PAGE_SIZE)
            either = min(CURVE.seconds(0, NUM_TOKENS), page_seconds(ratio) * NUM_TOKENS / PAGE_SIZE)
            assert 0.97 * best <= seconds <= 1.1 * best, "what a page takes varies"
            assert seconds <= 1.02 * either
            if ratio == 1.0:
                assert either / seconds >= 1.7
            assert request.sequence is not None
            found = request.sequence.cached_by_tier
            assert found.keys() == {NVME}
            assert request.num_computed == len(TOKENS) - found[NVME]
            assert 0.1 * NUM_TOKENS < found[NVME] < 0.9 * NUM_TOKENS
            assert counters.tokens_left - num_left == NUM_TOKENS - found[NVME]
            assert counters.tokens_by_tier[NVME] - num_found == found[NVME]
            # Both ends are one prefix now: on the device, and found as a whole.
            again = engine(setup)
            sequence = await again.begin(TOKENS)
            assert sequence.cached_by_tier == {DEVICE: NUM_TOKENS}
            sequence.close()

    run_simulated(main, 0)


def test_it_is_said_why_and_as_it_then_is() -> None:
    async def main(world: World) -> None:
        async with prepared(world) as setup:
            alone = setup.cache.explain(MODEL, TOKENS)
            assert alone.both_ends is None
            assert alone.left_tokens == alone.computed_tokens == 0
            said = setup.cache.explain(MODEL, TOKENS, chunk_tokens=CHUNK)
            assert said.both_ends is not None
            assert said.taken_tokens == NUM_TOKENS
            assert said.left_tokens == said.computed_tokens > 0
            assert "loading one part while the other is computed takes" in said.reason
            assert f"{said.computed_tokens} of its cached tokens are computed from the front" in said.reason
            assert said.seconds is not None
            assert alone.seconds is not None
            assert said.seconds < alone.seconds
            with pytest.raises(BadRequest, match="chunk_tokens"):
                setup.cache.explain(MODEL, TOKENS, chunk_tokens=0)

    run_simulated(main, 0)


def test_what_the_engine_computes_costs_is_learnt_and_then_used() -> None:
    async def main(world: World) -> None:
        async with prepared(world, prefill=PrefillSpeeds()) as setup:
            seconds = await engine(setup).whole(TOKENS)
            assert seconds <= 1.1 * optimum(NUM_TOKENS, page_seconds(1.0) / PAGE_SIZE)

    run_simulated(main, 0)


def test_an_engine_much_slower_than_said_is_left_less() -> None:
    async def main(world: World) -> None:
        thought = PrefillCurve(token_s=CURVE.token_s / 3, attend_s=CURVE.attend_s / 3)
        async with prepared(world, ratio=2.0, prefill=thought) as setup:
            seconds = await engine(setup).whole(TOKENS)
            assert seconds <= 1.2 * optimum(NUM_TOKENS, page_seconds(2.0) / PAGE_SIZE)

    run_simulated(main, 0)


@pytest.mark.parametrize("chunk", [1, 6, 17, CHUNK])
def test_steps_of_any_size_join_the_same_prefix(chunk: int) -> None:
    async def main(world: World) -> None:
        async with prepared(world) as setup:
            request = engine(setup)
            await request.whole(TOKENS, chunk=chunk)
            assert 0 < request.num_computed < NUM_TOKENS

    run_simulated(main, 0)


def test_what_is_on_the_device_or_partly_matches_is_taken_too() -> None:
    async def main(world: World) -> None:
        async with prepared(world) as setup:
            await engine(setup).whole(TOKENS[:81], chunk_tokens=None)
            request = engine(setup)
            sequence = await request.begin([*TOKENS[: NUM_TOKENS - 2], 7, 7, 7])
            assert sequence.is_loading
            assert sequence.length == 80
            await request.prefill([*TOKENS[: NUM_TOKENS - 2], 7, 7, 7])
            found = sequence.cached_by_tier
            assert found[DEVICE] == 80
            # The last page is another one, but for two tokens, which are copied.
            assert request.num_computed == NUM_TOKENS + 1 - found[DEVICE] - found[NVME]
            assert found[NVME] % PAGE_SIZE == 2
            sequence.close()

    run_simulated(main, 0)


def test_a_disk_that_hangs_costs_its_hits_and_a_wait() -> None:
    async def main(world: World) -> None:
        async with prepared(world, ratio=2.0) as setup:
            assert setup.nvme is not None
            setup.nvme.faults = Faults(stall=1.0, stall_s=100.0)
            request = engine(setup)
            assert await request.whole(TOKENS) <= 2.2 * CURVE.seconds(0, NUM_TOKENS)
            assert request.num_computed == len(TOKENS)
            setup.nvme.faults = Faults()
            await asyncio.sleep(200)

    run_simulated(main, 0)


@pytest.mark.parametrize("faults", [Faults(error=1.0), Faults(corrupt=1.0), Faults(raises=1.0), Faults(error=0.2)])
def test_what_the_disk_does_not_give_is_computed(faults: Faults) -> None:
    async def main(world: World) -> None:
        async with prepared(world, ratio=2.0) as setup:
            assert setup.nvme is not None
            setup.nvme.faults = faults
            request = engine(setup)
            sequence = await request.begin(TOKENS)
            assert sequence.is_loading
            await request.prefill(TOKENS)
            assert not sequence.is_loading
            assert request.num_computed == len(TOKENS) - sequence.cached_by_tier.get(NVME, 0)
            assert (request.num_computed < len(TOKENS)) == (faults.error == 0.2)
            sequence.close()
            setup.nvme.faults = Faults()

    run_simulated(main, 0)


def test_an_engine_that_does_not_ask_is_right_too() -> None:
    async def main(world: World) -> None:
        async with prepared(world) as setup:
            request = engine(setup)
            sequence = await request.begin(TOKENS)
            assert sequence.is_loading
            await request.step(TOKENS)
            assert (sequence.length, sequence.is_loading) == (len(TOKENS), False)
            sequence.close()
        async with prepared(world) as setup:
            request = engine(setup)
            sequence = await request.begin(TOKENS)
            await sequence.load_rest(deadline=world.monotonic() + 60)
            assert (sequence.length, sequence.is_loading) == (NUM_TOKENS, False)
            assert sequence.cached_by_tier == {NVME: NUM_TOKENS}
            await sequence.load_rest(deadline=world.monotonic() + 60)
            await request.step(TOKENS[NUM_TOKENS:])
            sequence.close()

    run_simulated(main, 0)


def test_after_a_step_the_rest_is_given_up() -> None:
    async def main(world: World) -> None:
        async with prepared(world) as setup:
            request = engine(setup)
            sequence = await request.begin(TOKENS)
            allowed = await sequence.next_step(CHUNK, deadline=world.monotonic() + 60)
            await request.step(TOKENS[:allowed])
            await sequence.load_rest(deadline=world.monotonic() + 60)
            assert (sequence.length, sequence.is_loading) == (allowed, False)
            assert await sequence.next_step(5, deadline=world.monotonic()) == 5
            await request.prefill(TOKENS)
            sequence.close()

    run_simulated(main, 0)


def test_a_step_that_fails_is_asked_for_again() -> None:
    async def main(world: World) -> None:
        async with prepared(world) as setup:
            request = engine(setup)
            sequence = await request.begin(TOKENS)
            deadline = world.monotonic() + 60
            allowed = await sequence.next_step(CHUNK, deadline=deadline)
            with pytest.raises(RuntimeError, match="the model failed"):
                await request.step(TOKENS[:allowed], fail=True)
            assert await sequence.next_step(CHUNK, deadline=deadline) == allowed
            await request.prefill(TOKENS)
            sequence.close()

    run_simulated(main, 0)


def test_a_fork_has_what_has_joined() -> None:
    async def main(world: World) -> None:
        async with prepared(world) as setup:
            request, child = engine(setup), engine(setup)
            sequence = await request.begin(TOKENS)
            allowed = await sequence.next_step(CHUNK, deadline=world.monotonic() + 60)
            await request.step(TOKENS[:allowed])
            child.sequence = sequence.fork()
            assert (child.sequence.length, child.sequence.is_loading) == (allowed, False)
            await request.prefill(TOKENS)
            await child.step(TOKENS[allowed : allowed + 9])
            sequence.close()
            child.sequence.close()

    run_simulated(main, 0)


def test_requests_that_want_the_same_share_what_comes() -> None:
    async def main(world: World) -> None:
        async with prepared(world) as setup:
            assert setup.nvme is not None
            begun = setup.nvme.pages_begun
            async with asyncio.TaskGroup() as group:
                for _ in range(3):
                    group.create_task(engine(setup).whole(TOKENS))
            assert setup.nvme.pages_begun - begun <= NUM_TOKENS // PAGE_SIZE, "a page was read twice"
            assert setup.device.num_free >= setup.device.capacity_pages - setup.cache.tree.occupancy(DEVICE).total

    run_simulated(main, 0)


def test_what_was_fetched_ahead_is_hastened() -> None:
    async def main(world: World) -> None:
        async with prepared(world) as setup:
            assert setup.nvme is not None
            begun = setup.nvme.pages_begun
            fetched = setup.cache.prefetch(MODEL, TOKENS, deadline=world.monotonic() + 60, max_pages=100)
            request = engine(setup)
            seconds = await request.whole(TOKENS)
            await fetched.wait()
            assert fetched.num_begun == 100
            assert setup.nvme.pages_begun - begun <= NUM_TOKENS // PAGE_SIZE, "a page was read twice"
            assert seconds <= CURVE.seconds(0, NUM_TOKENS)

    run_simulated(main, 0)


def test_a_flush_takes_what_is_on_its_way_and_the_front_stays() -> None:
    async def main(world: World) -> None:
        async with prepared(world) as setup:
            request = engine(setup)
            sequence = await request.begin(TOKENS)
            allowed = await sequence.next_step(CHUNK, deadline=world.monotonic() + 60)
            await request.step(TOKENS[:allowed])
            assert setup.cache.flush() > 0
            await request.prefill(TOKENS)
            sequence.close()
            await setup.quiet()
            assert setup.cache.flush() == 0
            for tier in setup.tiers:
                assert tier.num_free == tier.capacity_pages

    run_simulated(main, 0)


def test_what_is_forgotten_while_room_is_made_for_it_leaves_the_room_free() -> None:
    async def main(world: World) -> None:
        async with prepared(world) as setup:
            # Room in the host has to be made by writing to the disk, which takes a while.
            for document in range(2, 12):
                await engine(setup).whole(prompt(document, 161), chunk_tokens=None)
            taken = await setup.cache.allocate(DEVICE, setup.device.capacity_pages, deadline=world.monotonic() + 60)
            setup.cache.free({DEVICE: taken})
            held = setup.host.allocate(setup.host.num_free)
            request = engine(setup)
            sequence = await request.begin(TOKENS)
            assert setup.nvme is not None
            setup.nvme.bandwidth = LAYOUT.page_bytes / 1e-3
            await asyncio.sleep(1e-3)
            # Meanwhile somebody finds that the disk has lost it.
            for node in setup.cache.tree.match(MODEL, int32(TOKENS)).nodes:
                setup.cache.forget(node, NVME, 0)
            await request.prefill(TOKENS)
            assert request.num_computed == len(TOKENS)
            sequence.close()
            setup.cache.free({HOST: held})

    run_simulated(main, 0)


def test_a_late_or_closed_sequence_says_so() -> None:
    async def main(world: World) -> None:
        async with prepared(world, ratio=8.0) as setup:
            assert setup.nvme is not None
            request = engine(setup)
            with pytest.raises(BadRequest, match="chunk_tokens"):
                await request.begin(TOKENS, chunk_tokens=0)
            setup.nvme.faults = Faults(stall=1.0, stall_s=1.0)
            sequence = await request.begin(TOKENS)
            with pytest.raises(BadRequest, match="max_tokens"):
                await sequence.next_step(0, deadline=world.monotonic())
            while True:
                allowed = await sequence.next_step(CHUNK, deadline=world.monotonic() + 60)
                await request.step(TOKENS[sequence.length :][:allowed])
                if sequence.length == len(TOKENS):
                    break
            sequence.close()
            with pytest.raises(Closed):
                await sequence.next_step(1, deadline=world.monotonic() + 1)
            with pytest.raises(Closed):
                await sequence.load_rest(deadline=world.monotonic() + 1)
            setup.nvme.faults = Faults()

    run_simulated(main, 0)


@pytest.mark.parametrize("block", range(4))
def test_whatever_fails_and_whoever_gives_up_nothing_is_left_behind(block: int) -> None:
    """Requests from both ends, small tiers, faults of every kind, and changes of mind at any moment: every byte that a
    step sees is right (`Request.step` looks at each), and every slot is free or in the tree when all is over."""

    async def one(setup: Setup, world: World, document: int) -> None:
        tokens = prompt(document, world.rng.randint(30, 200))
        request = engine(setup)
        try:
            async with asyncio.timeout(world.rng.choice((0.02, 0.1, 1.0, 30.0))):
                seconds = await request.whole(tokens, chunk=world.rng.choice((3, 16, CHUNK)))
                world.note("computed", document, request.num_computed, seconds)
        except TimeoutError:
            world.note("gave up", document)
        except (NoRoom, NotResident, DeadlineExceeded, TierUnavailable, UnreadablePage) as error:
            world.note("failed", document, type(error).__name__)

    async def main(world: World) -> list[tuple[Any, ...]]:
        rng = world.rng
        async with opened(
            world, device_pages=rng.randint(60, 110), host_pages=rng.randint(50, 120), nvme_pages=400, prefill=CURVE,
            metadata_bytes=rng.choice((None, None, 40_000)), exclusive=rng.random() < 0.3,
        ) as setup:  # fmt: skip
            assert setup.nvme is not None
            for document in range(6):
                await one(setup, world, document)
            await to_nvme(setup)
            setup.nvme.bandwidth = LAYOUT.page_bytes / (CURVE.token_s * PAGE_SIZE / 2.0 ** rng.uniform(-1, 2))
            setup.nvme.faults = Faults(
                error=rng.choice((0.0, 0.1)), corrupt=rng.choice((0.0, 0.05)), raises=rng.choice((0.0, 0.05)),
                stall=rng.choice((0.0, 0.1)), stall_s=rng.choice((0.3, 20.0)),
            )  # fmt: skip
            async with asyncio.TaskGroup() as group:
                for _ in range(rng.randint(2, 10)):
                    group.create_task(one(setup, world, rng.randrange(6)))
                    await world.pause(0.2)
                    if rng.random() < 0.05:
                        setup.cache.flush()
            setup.nvme.faults = Faults()
            await asyncio.sleep(60)
            await setup.quiet()
            setup.check_quiet()
            # And it still works: what is asked for now is served.
            for document in range(6):
                await engine(setup).whole(prompt(document, 100))
            await setup.quiet()
            setup.check_quiet()
            assert setup.cache.tree.num_leases == 0
        return world.trace

    for seed in seeds(40, block=block):
        trace = run_simulated(main, seed)
        if seed % 20 == 0:
            assert run_simulated(main, seed) == trace, "the same seed, another history"
