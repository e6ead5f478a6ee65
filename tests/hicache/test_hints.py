"""Hints about prefixes, pins of operators and quotas of tenants, in a cache that runs."""

import asyncio
import dataclasses

import pytest

from hicache import tending
from hicache.errors import BadRequest, NoRoom
from hicache.namespace import Namespace
from hicache.policies import LRU, NAMES
from hicache.policy.base import EvictionPolicy, Hint
from hicache.policy.lru import LruPolicy
from hicache.quotas import TenantQuota
from hicache.residency import Residency
from hicache.tier import DEVICE, HOST, NVME
from tests.hicache.worlds import LAYOUT, MODEL, OTHER, PAGE_SIZE, Setup, opened, prompt
from tests.simulation import World, run_simulated


async def run(setup: Setup, document: int, num_tokens: int = 17, namespace: Namespace = MODEL) -> int:
    """One request from beginning to end; how many tokens were found."""
    found = await setup.request(namespace).run(prompt(document, num_tokens))
    await setup.quiet()
    return found


def matched(setup: Setup, document: int, num_tokens: int = 16, namespace: Namespace = MODEL) -> int:
    return setup.cache.tree.match(namespace, prompt(document, num_tokens)).num_tokens


@pytest.mark.parametrize("policy", NAMES)
def test_what_is_retained_outlives_a_scan_and_is_let_go_when_its_time_is_over(policy: str) -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=12, host_pages=12, nvme_pages=None, policy=policy) as setup:
            await run(setup, 1)
            assert setup.cache.hint(MODEL, prompt(1, 17), retain_s=1000.0) == 16
            assert setup.cache.explain(MODEL, prompt(1, 17)).retained_s == pytest.approx(1000.0, rel=0.1)
            for document in range(2, 12):
                await run(setup, document)
            assert matched(setup, 1) == 16
            await asyncio.sleep(2000.0)
            for document in range(12, 40):
                await run(setup, document)
            assert setup.cache.tree.num_ranked == 0
            assert setup.cache.explain(MODEL, prompt(1, 17)).retained_s is None
            if policy == LRU:
                assert matched(setup, 1) == 0, "it is as old as it is"
            setup.check_quiet()

    run_simulated(main, 0)


def test_lower_priority_leaves_before_what_is_older() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=8, host_pages=5, nvme_pages=None) as setup:
            for document in (1, 2, 3):
                await run(setup, document)
            assert setup.cache.hint(MODEL, prompt(3, 17), priority=-4) == 16
            before = matched(setup, 1), matched(setup, 2)
            assert 0 < before[0] <= before[1]
            await run(setup, 4)
            assert (matched(setup, 1), matched(setup, 2)) == before
            assert matched(setup, 3) < 16
            assert setup.cache.counters.hints == 1

    run_simulated(main, 0)


def test_retained_pages_never_stop_a_request() -> None:
    """Every page of every tier is retained, and all tiers are full: requests go on as if none were (I27)."""

    async def main(world: World) -> None:
        async with opened(world, device_pages=8, host_pages=8, nvme_pages=12) as setup:
            for document in range(1, 20):
                await run(setup, document)
                assert setup.cache.hint(MODEL, prompt(document, 16), priority=4, retain_s=1e6) == 16
            setup.check_quiet()
            assert all(tier.num_free < 8 for tier in setup.tiers)

    run_simulated(main, 0)


def test_a_hint_about_what_is_not_cached_is_for_nothing() -> None:
    async def main(world: World) -> None:
        async with opened(world) as setup:
            assert setup.cache.hint(MODEL, prompt(1, 30), priority=2, retain_s=5.0, returns=True) == 0
            await run(setup, 1)
            assert setup.cache.hint(MODEL, [], retain_s=5.0) == 0
            assert setup.cache.hint(OTHER, prompt(1, 17), retain_s=5.0) == 0, "a tenant's hint is about its own pages"
            assert setup.cache.hint(MODEL, prompt(1, 60, branch=1, shared=10), retain_s=5.0) == 8
            assert setup.cache.counters.hints == 1
            assert setup.cache.tree.num_ranked == 1
            setup.check()

    run_simulated(main, 0)


class Heard(LruPolicy):
    """Notes the hints that it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.hints: list[tuple[int, Hint, float]] = []

    def hinted(self, path: list[object], hint: Hint, now: float) -> None:
        self.hints.append((len(path), hint, now))


def test_what_is_known_of_the_future_reaches_the_policy_of_every_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Heard] = []

    def make(capacity_pages: int) -> EvictionPolicy:
        made.append(Heard())
        return made[-1]

    monkeypatch.setitem(NAMES, "lru", make)

    async def main(world: World) -> None:
        async with opened(world) as setup:
            await run(setup, 1)
            now = world.monotonic()
            setup.cache.hint(MODEL, prompt(1, 17), returns=True, expected_return_s=30.0)
            setup.cache.hint(MODEL, prompt(1, 17), returns=False)
            told = [each.hints for each in made if each.hints]
            assert len(told) == 3
            for hints in told:
                assert [hint for _, hint, _ in hints] == [Hint(True, now + 30.0), Hint(False, None)]

    run_simulated(main, 0)


WRONG_HINTS: dict[str, list[object]] = {
    "priority": [5, -5, 1.5, True, None, "1"],
    "retain_s": [0, -1.0, float("nan"), float("inf"), 31 * 86_400.0, "1", True],
    "expected_return_s": [-1.0, float("nan"), 31 * 86_400.0, "1"],
    "returns": [1, "yes", 0.0],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG_HINTS.items() for value in values]
)
def test_a_wrong_hint_is_named_and_changes_nothing(field: str, value: object) -> None:
    async def main(world: World) -> None:
        async with opened(world) as setup:
            await run(setup, 1)
            for tokens in (prompt(1, 17), prompt(2, 17)):
                with pytest.raises(BadRequest) as refused:
                    setup.cache.hint(MODEL, tokens, **{field: value})  # type: ignore[arg-type]  # what is tested
                assert refused.value.field == field
            with pytest.raises(BadRequest, match="expected_return_s: contradicts returns=False"):
                setup.cache.hint(MODEL, prompt(1, 17), returns=False, expected_return_s=5.0)
            assert setup.cache.tree.num_ranked == setup.cache.counters.hints == 0

    run_simulated(main, 0)


def test_what_a_tenant_says_of_its_pages_is_not_told_to_others() -> None:
    async def main(world: World) -> None:
        async with opened(world) as setup:
            cache = setup.cache
            await run(setup, 1)
            assert cache.publish(MODEL, prompt(1, 17)) == 16
            cache.hint(MODEL, prompt(1, 17), priority=3, retain_s=60.0)
            cache.pin_prefix(MODEL, prompt(1, 17))
            mine, theirs = cache.explain(MODEL, prompt(1, 30)), cache.explain(OTHER, prompt(1, 30))
            assert sum(tokens for _, tokens in theirs.cached) == 16
            assert (mine.priority, mine.pinned_tokens) == (3, 16)
            assert (theirs.priority, theirs.pinned_tokens, theirs.retained_s) == (0, 0, None)

    run_simulated(main, 0)


# -- pins -------------------------------------------------------------------------------------------------------------


def test_a_pinned_prefix_stays_in_some_tier_until_it_is_given_back() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=8, host_pages=8, nvme_pages=24) as setup:
            cache = setup.cache
            await run(setup, 1)
            assert cache.pin_prefix(MODEL, prompt(1, 17)) == 16
            assert (cache.num_pins, cache.pinned_pages, cache.pinned_pages_max) == (1, 4, 6)
            for document in range(2, 30):
                await run(setup, document)
            assert matched(setup, 1) == 16
            decision = cache.explain(MODEL, prompt(1, 40))
            assert decision.pinned_tokens == 16
            assert await run(setup, 1) == 16
            assert cache.unpin_prefix(MODEL, prompt(1, 17))
            assert not cache.unpin_prefix(MODEL, prompt(1, 17))
            assert (cache.num_pins, cache.pinned_pages) == (0, 0)
            for document in range(30, 60):
                await run(setup, document)
            assert matched(setup, 1) == 0
            assert cache.explain(MODEL, prompt(1, 40)).pinned_tokens == 0
            setup.check_quiet()

    run_simulated(main, 0)


def test_pins_hold_a_bounded_share_and_requests_still_get_room() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=8, host_pages=8, nvme_pages=24) as setup:
            cache = setup.cache
            for document in (1, 2):
                await run(setup, document)
            cache.pin_prefix(MODEL, prompt(1, 17))
            with pytest.raises(NoRoom, match="pins") as refused:
                cache.pin_prefix(MODEL, prompt(2, 17))
            assert (refused.value.pages_asked, refused.value.pages_free) == (4, 2)
            assert cache.num_pins == 1
            assert cache.pin_prefix(MODEL, prompt(2, 8)) == 8, "what there is room for"
            assert cache.pin_prefix(MODEL, prompt(9, 8)) == 0, "nothing of it is cached"
            assert cache.num_pins == 2
            for document in range(3, 20):
                await run(setup, document)
            assert (matched(setup, 1), matched(setup, 2, 8)) == (16, 8)
            setup.check_quiet()

    run_simulated(main, 0)


def test_pinning_again_takes_what_has_been_added() -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=8, host_pages=16, nvme_pages=64) as setup:
            await run(setup, 1, 9)
            assert setup.cache.pin_prefix(MODEL, prompt(1, 16)) == 8
            await run(setup, 1, 17)
            assert setup.cache.pin_prefix(MODEL, prompt(1, 16)) == 16
            assert (setup.cache.num_pins, setup.cache.pinned_pages) == (1, 4)
            assert setup.cache.tree.num_leases == 1
            for wrong in ([1.5], [-1], None):
                with pytest.raises(BadRequest, match="tokens"):
                    setup.cache.pin_prefix(MODEL, wrong)  # type: ignore[arg-type]  # what is tested
            assert tending.PINNED_SHARE == 0.25

    run_simulated(main, 0)


# -- quotas -----------------------------------------------------------------------------------------------------------


def tenant(name: str) -> Namespace:
    return dataclasses.replace(MODEL, tenant=name)


@pytest.mark.parametrize("policy", NAMES)
def test_one_tenants_scan_leaves_the_working_set_of_another(policy: str) -> None:
    async def main(world: World) -> None:
        async with opened(world, device_pages=24, host_pages=24, nvme_pages=None, policy=policy) as setup:
            for document in (1, 2):
                await run(setup, document, 17, tenant("steady"))
            for document in range(10, 40):
                await run(setup, document, 17, tenant("scanner"))
            for document in (1, 2):
                assert matched(setup, document, 16, tenant("steady")) == 16
            held = setup.cache.pages_by_tenant(HOST)
            assert held["scanner"] > held.get("steady", 0)
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_quota_is_kept_for_who_has_it() -> None:
    async def main(world: World) -> None:
        quotas = {"paying": TenantQuota(host=12 * LAYOUT.page_bytes, nvme=0.5)}
        async with opened(world, device_pages=6, host_pages=16, nvme_pages=24, tenant_quotas=quotas) as setup:
            for document in (1, 2, 3):
                await run(setup, document, 17, tenant("paying"))
            for name in ("a", "b", "c"):
                for document in range(10, 16):
                    await run(setup, document, 17, tenant(name))
            for document in (1, 2, 3):
                assert matched(setup, document, 16, tenant("paying")) == 16
            for tier_id in (HOST, NVME):
                held = setup.cache.pages_by_tenant(tier_id)
                assert sum(held.values()) == setup.cache.tree.occupancy(tier_id).total
            assert setup.cache.pages_by_tenant(DEVICE)
            setup.check_quiet()

    run_simulated(main, 0)


def test_a_request_is_refused_and_counted_where_all_others_hold_is_in_use() -> None:
    """Every page is pinned by others, so the tenant with a quota is told so at once: nobody waits for ever (I27)."""

    async def main(world: World) -> None:
        async with opened(world, device_pages=8, host_pages=8, nvme_pages=None, tenant_quotas={"late": 0.5}) as setup:
            cache = setup.cache
            for document in range(1, 5):
                await run(setup, document, 9, tenant("early"))
            nodes = [info.node for batch in cache.tree.walk() for info in batch]
            pins = [
                cache.tree.pin([node for node in nodes if node.residency(tier_id) is Residency.RESIDENT], tier_id)
                for tier_id in cache.tiers
            ]
            before = world.monotonic()
            with pytest.raises(NoRoom):
                await cache.allocate(DEVICE, 8, deadline=before + 60.0)
            assert world.monotonic() - before < 60.0
            assert cache.counters.no_room_pages == {DEVICE: 8}
            for pin in pins:
                cache.free(cache.tree.unpin(pin))
            slots = await cache.allocate(DEVICE, 8, deadline=before + 60.0)
            cache.free({DEVICE: slots})
            assert await run(setup, 9, 17, tenant("late")) == 0
            assert matched(setup, 9, 16, tenant("late")) == 16
            assert PAGE_SIZE == 4
            setup.check_quiet()

    run_simulated(main, 0)
