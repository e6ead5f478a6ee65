"""What fetching ahead is for: the next requests of a queue, a conversation that goes on, candidates of a retrieval.

Each with its change of mind, in virtual time: first tokens come sooner, and nobody else's later than the bound says.
"""

import asyncio
from statistics import median

import pytest

from hicache.sequence import Sequence, StepPlan
from hicache.tier import DEVICE, HOST, NVME
from tests.hicache.test_prefetch import clear, where
from tests.hicache.worlds import LAYOUT, MODEL, Request, Setup, opened, prompt
from tests.simulation import World, run_simulated

PAGE_S = 5e-3
"""What a page takes on the disk."""
STEP_S = 0.05
"""What a step of the engine takes."""
DOCUMENT_TOKENS = 160


class Engine(Request):
    """A request whose steps take time."""

    async def _check_context(self, plan: StepPlan, before: list[int]) -> None:
        await super()._check_context(plan, before)
        await asyncio.sleep(STEP_S)

    async def first_token(self, tokens: list[int]) -> tuple[float, Sequence]:
        """Seconds from now to the first token; the sequence stays open."""
        began = self.setup.cache.clock.monotonic()
        sequence = await self.open(tokens)
        await self.step(tokens[sequence.length :])
        return self.setup.cache.clock.monotonic() - began, sequence


def engine(setup: Setup) -> Engine:
    return Engine(setup, MODEL, MODEL)


async def stored(setup: Setup, *prompts: list[int]) -> None:
    """Have prompts on NVMe alone, on a disk that takes its time."""
    for tokens in prompts:
        await setup.request().run(tokens)
    await clear(setup, DEVICE, HOST)
    assert all(set(where(setup, tokens)) == {NVME} for tokens in prompts)
    assert setup.nvme is not None
    setup.nvme.bandwidth = LAYOUT.page_bytes / PAGE_S


async def queue(world: World, *, look_ahead: int) -> list[float]:
    """Times to first token of a queue of requests, of which so many waiting ones are fetched ahead."""
    async with opened(world, device_pages=120, host_pages=400, nvme_pages=600) as setup:
        prompts = [prompt(document, DOCUMENT_TOKENS + 1) for document in range(1, 9)]
        await stored(setup, *prompts)
        await asyncio.sleep(60)
        times = []
        for number, tokens in enumerate(prompts):
            deadline = world.monotonic() + 30
            for waiting in prompts[number + 1 : number + 1 + look_ahead]:
                setup.cache.prefetch(MODEL, waiting, deadline=deadline)
            seconds, sequence = await engine(setup).first_token(tokens)
            times.append(seconds)
            await asyncio.sleep(4 * STEP_S)
            sequence.close()
        await setup.quiet()
        setup.check_quiet()
        return times


def test_a_queue_that_looks_ahead_has_its_first_tokens_sooner() -> None:
    without = run_simulated(lambda world: queue(world, look_ahead=0), 0)
    ahead = run_simulated(lambda world: queue(world, look_ahead=2), 0)
    assert median(ahead) <= median(without) / 3
    # Demands go first: the request for which nobody looked ahead waits for the two batches that were under way at most.
    assert ahead[0] <= without[0] + 2 * 16 * 1.2 * PAGE_S


def test_a_conversation_is_there_when_its_tool_call_returns() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=120, host_pages=200, nvme_pages=600) as setup:
            said = prompt(1, DOCUMENT_TOKENS)
            await stored(setup, said)
            # The model has called a tool, and is expected back in five seconds: with all that was said, and more.
            begun = setup.cache.prefetch(MODEL, said, deadline=world.monotonic() + 5)
            await asyncio.sleep(5)
            assert begun.is_done
            seconds, sequence = await engine(setup).first_token([*said, *range(7_000_000, 7_000_012)])
            assert sequence.cached_by_tier == {HOST: DOCUMENT_TOKENS}
            assert seconds <= 1.2 * STEP_S
            sequence.close()
            # A turn later there is only what the turn has added to be fetched, which is on the device.
            assert setup.cache.prefetch(MODEL, sequence.tokens, deadline=world.monotonic() + 5).num_begun == 0
            setup.check_quiet()

    run_simulated(main, 0)


@pytest.mark.parametrize("chosen", [[2], [0, 3], [1, 4, 5]])
def test_candidates_of_a_retrieval_are_fetched_until_some_are_chosen(chosen: list[int]) -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=200, host_pages=400, nvme_pages=800) as setup:
            assert setup.nvme is not None
            # One system prompt, then a document of which the first so many tokens are the same.
            candidates = [prompt(1, DOCUMENT_TOKENS + 1, branch=branch, shared=40) for branch in range(6)]
            await stored(setup, *candidates)
            num_free, num_read = setup.host.num_free, setup.nvme.pages_begun
            deadline = world.monotonic() + 30
            fetched = [setup.cache.prefetch(MODEL, tokens, deadline=deadline) for tokens in candidates]
            assert fetched[0].num_begun == 40
            assert all(each.num_begun == 30 for each in fetched[1:]), "what they share is fetched once"
            await asyncio.sleep(10 * PAGE_S)
            for number, each in enumerate(fetched):
                if number not in chosen:
                    each.cancel()
            for number in chosen:
                _, sequence = await engine(setup).first_token(candidates[number])
                assert sequence.length == DOCUMENT_TOKENS + 1
                assert sum(sequence.cached_by_tier.values()) == DOCUMENT_TOKENS, "something was computed"
                sequence.close()
            arrived = [await each.wait() for each in fetched]
            await setup.quiet()
            assert all(arrived[number] == fetched[number].num_begun for number in chosen)
            # Harm is bounded: of those not chosen no more than what was under way when minds changed has been read.
            num_wanted = sum(fetched[number].num_begun for number in chosen) + (0 if 0 in chosen else 10)
            assert setup.nvme.pages_begun - num_read <= num_wanted + 2 * 16
            assert num_free - setup.host.num_free <= sum(arrived) + 10
            setup.check_quiet()

    run_simulated(main, 0)


def test_what_is_fetched_and_never_asked_for_costs_others_nothing_they_used() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=60, host_pages=90, nvme_pages=600) as setup:
            hot, guesses = prompt(1, DOCUMENT_TOKENS + 1), [prompt(document, 201) for document in range(2, 8)]
            await stored(setup, hot, *guesses)
            _, sequence = await engine(setup).first_token(hot)
            sequence.close()
            await clear(setup, DEVICE)
            for _ in range(3):
                for guess in guesses:
                    await setup.cache.prefetch(MODEL, guess, deadline=world.monotonic() + 60).wait()
                # Wrong each time: the next request is for what was used a moment ago.
                seconds, sequence = await engine(setup).first_token(hot)
                assert set(sequence.cached_by_tier) <= {DEVICE, HOST}
                assert seconds <= 1.2 * STEP_S
                sequence.close()
            setup.check_quiet()

    run_simulated(main, 0)
