"""The guard: never measurably worse than LRU, whatever stands behind it, and out of the way of what is better."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from hicache.errors import BadRequest
from hicache.node import Box, Node
from hicache.policy.base import EvictionPolicy, Hint
from hicache.policy.guard import GuardedPolicy
from hicache.policy.lrfu import LrfuPolicy
from hicache.policy.lru import LruPolicy
from hicache.policy.s3fifo import S3FifoPolicy
from hicache.tools.replay.blocks import BlockCache
from hicache.tools.replay.readers import Trace

EXCERPTS = Path(__file__).parents[2] / "tools" / "traces"


class MruPolicy:
    """Evicts what was used last: about the worst there is."""

    def __init__(self) -> None:
        self._listed: dict[Box, None] = {}

    def add(self, node: Node, now: float) -> None:
        self._listed[node.box] = None

    def discard(self, node: Node) -> None:
        del self._listed[node.box]

    def touch(self, node: Node, now: float) -> None:
        del self._listed[node.box]
        self._listed[node.box] = None

    def split(self, upper: Node, lower: Node) -> None:
        pass

    def victims(self) -> Iterator[Node]:
        return (box[0] for box in reversed(self._listed))


class TurnsBadPolicy(LrfuPolicy):
    """LRFU that turns into its opposite while `is_bad`."""

    is_bad: ClassVar[bool] = False

    def victims(self) -> Iterator[Node]:
        return iter(list(super().victims())[::-1]) if self.is_bad else super().victims()


def hits_of(policy: EvictionPolicy, paths: Sequence[Sequence[int]], capacity: int) -> int:
    cache = BlockCache(policy, capacity)
    return sum(cache.request(path, now) for now, path in enumerate(paths))


def conversations(seed: int, count: int, waiting: int) -> list[list[int]]:
    """Conversations of a few turns; about so many others go on between two turns of one."""
    pick, open_ones, ids, paths = random.Random(seed), list[list[int]](), 0, list[list[int]]()
    while len(paths) < count:
        if len(open_ones) < waiting or pick.random() < 0.3:
            open_ones.append([])
        path = open_ones.pop(pick.randrange(len(open_ones)))
        added = pick.randint(1, 6)
        path += range(ids, ids + added)
        ids += added
        paths.append(list(path))
        if pick.random() < 0.8:
            open_ones.append(path)
    return paths


def often_among_many(seed: int, count: int) -> list[list[int]]:
    """Thirty prompts that come again and again between ever new ones: LRU keeps none of them."""
    pick = random.Random(seed)
    return [[pick.randrange(30)] if pick.random() < 0.2 else [100 + step] for step in range(count)]


@pytest.mark.parametrize("capacity", [20, 40, 60, 200, 600])
@pytest.mark.parametrize("waiting", [5, 20, 60])
def test_the_worst_policy_loses_no_more_than_a_hundredth_of_what_lru_finds(waiting: int, capacity: int) -> None:
    paths = conversations(waiting, 2500, waiting)
    lru = hits_of(LruPolicy(), paths, capacity)
    assert hits_of(GuardedPolicy(MruPolicy, capacity_pages=capacity), paths, capacity) >= 0.99 * lru
    assert hits_of(MruPolicy(), paths, capacity) < 0.9 * lru, "it is bad here"


@pytest.mark.parametrize("name", ["mooncake", "agent_tools", "ragpulse"])
@pytest.mark.parametrize("share", [20, 50])
def test_excerpts_of_traces_lose_no_more_either(name: str, share: int) -> None:
    paths = [request.blocks.tolist() for request in Trace(EXCERPTS / f"{name}.jsonl")]
    capacity = len({block for path in paths for block in path}) * share // 100
    guarded = hits_of(GuardedPolicy(MruPolicy, capacity_pages=capacity), paths, capacity)
    assert guarded >= 0.99 * hits_of(LruPolicy(), paths, capacity)


def test_what_is_better_than_lru_is_let_do_it() -> None:
    paths = often_among_many(1, 6000)
    lru, lrfu = hits_of(LruPolicy(), paths, 100), hits_of(LrfuPolicy(), paths, 100)
    assert lrfu > 1.2 * lru
    assert hits_of(GuardedPolicy(LrfuPolicy, capacity_pages=100), paths, 100) > 0.95 * lrfu


# Who is not presumed good has to be well ahead first.
@pytest.mark.parametrize(("presumed", "soon"), [(True, 0.9), (False, 0.87)])
def test_a_policy_that_recovers_is_trusted_again(presumed: bool, soon: float, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = often_among_many(2, 12_000)
    guard = GuardedPolicy(TurnsBadPolicy, capacity_pages=100, presumed=presumed)
    cache = BlockCache(guard, 100)
    trusted = list[float]()
    for part in range(3):
        monkeypatch.setattr(TurnsBadPolicy, "is_bad", part == 1)
        asked = 0
        for now in range(4_000 * part, 4_000 * (part + 1)):
            cache.request(paths[now], now)
            asked += guard.trusts_inner
        trusted.append(asked / 4_000)
    assert trusted[0] > soon
    assert trusted[1] < 0.5
    assert trusted[2] > 0.7


@pytest.mark.parametrize(("make", "is_good"), [(LrfuPolicy, True), (MruPolicy, False)])
def test_what_is_presumed_good_rules_until_it_shows_that_it_is_not(
    make: Callable[[], EvictionPolicy], is_good: bool
) -> None:
    paths = often_among_many(3, 4_000) if is_good else conversations(3, 4_000, 60)
    guard = GuardedPolicy(make, capacity_pages=200, presumed=True)
    assert guard.trusts_inner
    cache, found, ruled = BlockCache(guard, 200), 0, 0
    for now, path in enumerate(paths):
        found += cache.request(path, now)
        ruled += guard.trusts_inner
    assert found >= 0.9 * hits_of(LruPolicy(), paths, 200)
    assert ruled == len(paths) if is_good else 0 < ruled < 0.2 * len(paths)


@pytest.mark.parametrize("make", [LrfuPolicy, MruPolicy])
def test_a_small_shadow_judges_by_a_sample(make: Callable[[], EvictionPolicy]) -> None:
    paths, capacity = conversations(3, 4000, 150), 1500
    whole = hits_of(GuardedPolicy(make, capacity_pages=capacity), paths, capacity)
    guard = GuardedPolicy(make, capacity_pages=capacity, shadow_pages=500)
    sampled = hits_of(guard, paths, capacity)
    assert guard.num_remembered <= 2 * (500 + max(map(len, paths)))
    assert sampled == pytest.approx(whole, rel=0.1)
    assert sampled >= 0.95 * hits_of(LruPolicy(), paths, capacity)


class Listening(S3FifoPolicy):
    """S3-FIFO that keeps what it was told of hints."""

    def __init__(self) -> None:
        super().__init__(capacity_pages=10)
        self.heard: list[tuple[Sequence[Node], Hint, float]] = []

    def hinted(self, path: Sequence[Node], hint: Hint, now: float) -> None:
        self.heard.append((path, hint, now))


def test_the_inner_policy_is_told_everything() -> None:
    """S3-FIFO counts every node of its tier: it fails at once when something is kept from it."""
    made = list[Listening]()

    def make() -> Listening:
        made.append(Listening())
        return made[-1]

    guard = GuardedPolicy(make, capacity_pages=10)
    cache, paths = BlockCache(guard, 10), conversations(4, 500, 10)
    for now, path in enumerate(paths):
        cache.request(path, now, returns=True)
    inner, shadow = made
    assert len(inner.heard) == len(shadow.heard) == len(paths)
    for told, copied in zip(inner.heard, shadow.heard, strict=True):
        assert told[1:] == copied[1:]
        assert told[1] == Hint(returns=True)
        assert len(told[0]) == len(copied[0])


def test_arguments_that_cannot_be_are_named() -> None:
    with pytest.raises(BadRequest, match="capacity_pages"):
        GuardedPolicy(LruPolicy, capacity_pages=0)
    with pytest.raises(BadRequest, match="shadow_pages"):
        GuardedPolicy(LruPolicy, capacity_pages=1, shadow_pages=0)
