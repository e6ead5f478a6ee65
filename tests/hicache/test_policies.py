"""What all eviction policies promise, over random prompts in a cache of blocks; and what sets each apart."""

import random
from collections.abc import Callable

import pytest

from hicache.errors import BadRequest
from hicache.node import Node
from hicache.policies import policies_named
from hicache.policy.base import EvictionPolicy, Use
from hicache.policy.lrfu import LrfuPolicy
from hicache.policy.lru import LruPolicy
from hicache.policy.s3fifo import S3FifoPolicy
from hicache.policy.slru import SlruPolicy
from hicache.policy.value import ValuePolicy
from hicache.tier import HOST
from hicache.tools.replay.blocks import BlockCache
from hicache.tools.replay.bound import min_hits
from hicache.tree import HiRadixTree
from tests.hicache.trees import make_namespace, sequence

POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda capacity: LruPolicy(),
    "slru": lambda capacity: SlruPolicy(capacity_pages=capacity),
    "s3fifo": lambda capacity: S3FifoPolicy(capacity_pages=capacity),
    "lrfu": lambda capacity: LrfuPolicy(),
    "value": lambda capacity: ValuePolicy(),
}


def random_paths(seed: int, count: int) -> list[tuple[int, ...]]:
    """Prompts over a random tree: block ids are chained."""
    pick, ids, paths = random.Random(seed), dict[tuple[int, int], int](), list[tuple[int, ...]]()
    for _ in range(count):
        path, above = [], -1
        for _ in range(pick.randint(1, 6)):
            above = ids.setdefault((above, min(pick.randint(0, 9), pick.randint(0, 9))), len(ids))
            path.append(above)
        paths.append(tuple(path))
    return paths


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("capacity", [1, 3, 10, 40])
def test_random_prompts_keep_the_cache_full_and_its_prefixes_whole(name: str, capacity: int) -> None:
    for seed in range(5):
        paths = random_paths(seed, 300)
        policy = POLICIES[name](capacity)
        cache, hits = BlockCache(policy, capacity), 0
        above = {block: path[at - 1] if at else -1 for path in paths for at, block in enumerate(path)}
        seen: set[int] = set()
        for now, path in enumerate(paths):
            expected = next((at for at, block in enumerate(path) if block not in cache), len(path))
            found = cache.request(path, now)
            assert found == expected
            hits += found
            seen.update(path)
            assert len(cache) == min(capacity, max(len(cache), len(path)))
            kept = [block for block in seen if block in cache]
            assert len(kept) == len(cache) <= capacity
            assert all(above[block] == -1 or above[block] in cache for block in kept)
            listed = list(policy.victims())
            leaves = {block for block in kept if not any(above[other] == block for other in kept)}
            assert {int.from_bytes(node._key, "little") for node in listed} == leaves
            assert len(listed) == len(leaves)
        assert hits <= min_hits(paths, capacity)


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_prompts_give_the_same_hits(name: str) -> None:
    paths = random_paths(7, 400)
    first, second = (BlockCache(POLICIES[name](20), 20) for _ in range(2))
    assert [first.request(p, t) for t, p in enumerate(paths)] == [second.request(p, t) for t, p in enumerate(paths)]


def best_possible(paths: list[tuple[int, ...]], capacity: int) -> int:
    """Most hits of any cache, by trying every set of blocks that a cache could keep after each prompt."""
    reachable: dict[frozenset[int], int] = {frozenset(): 0}
    for path in paths:
        following: dict[frozenset[int], int] = {}
        for kept, hits in reachable.items():
            found = next((at for at, block in enumerate(path) if block not in kept), len(path))
            pool = sorted(kept | set(path))
            for mask in range(1 << len(pool)):
                if mask.bit_count() <= capacity:
                    chosen = frozenset(block for at, block in enumerate(pool) if mask >> at & 1)
                    following[chosen] = max(following.get(chosen, 0), hits + found)
        reachable = following
    return max(reachable.values())


def test_min_is_the_best_that_any_cache_could_do() -> None:
    for seed in range(25):
        pick, ids = random.Random(seed), dict[tuple[int, int], int]()
        paths = list[tuple[int, ...]]()
        for _ in range(7):
            path, above = list[int](), -1
            for _ in range(pick.randint(1, 3)):
                above = ids.setdefault((above, pick.randrange(2)), len(ids))
                path.append(above)
            paths.append(tuple(path))
        for capacity in (1, 2, 3):
            assert min_hits(paths, capacity) == best_possible(paths, capacity), f"seed {seed}, capacity {capacity}"


def hits_of(name: str, paths: list[tuple[int, ...]], capacity: int) -> int:
    cache = BlockCache(POLICIES[name](capacity), capacity)
    return sum(cache.request(path, now) for now, path in enumerate(paths))


def test_one_time_prompts_do_not_push_out_what_was_used_often() -> None:
    """Three blocks that are used again and again, between ever new ones that never come back."""
    paths = list[tuple[int, ...]]([(0,), (1,), (2,)] * 3)
    for step in range(100):
        paths += [(100 + 20 * step + i,) for i in range(20)] + [(step % 3,)]
    assert hits_of("lru", paths, 10) <= 6
    for name in ("slru", "s3fifo", "lrfu", "value"):
        assert hits_of(name, paths, 10) >= 90, name


def test_value_learns_which_prompts_come_back() -> None:
    """Short prompts are asked again after 60 others, long ones never; neither is used more often than the other."""
    paths: list[tuple[int, ...]] = []
    following = 0
    for step in range(1500):
        size = 2 if step % 2 else 12
        paths.append(tuple(range(following, following + size)))
        following += size
        if step % 2 and step > 60:
            paths.append(paths[-60])
    assert hits_of("value", paths, 150) > 1.5 * max(hits_of(name, paths, 150) for name in ("lru", "s3fifo", "slru"))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: LrfuPolicy(decay=2.0), "decay"),
        (lambda: SlruPolicy(capacity_pages=0), "capacity_pages"),
        (lambda: SlruPolicy(capacity_pages=1, protected_share=1.5), "protected_share"),
        (lambda: S3FifoPolicy(capacity_pages=0), "capacity_pages"),
        (lambda: S3FifoPolicy(capacity_pages=1, small_share=-0.1), "small_share"),
    ],
)
def test_arguments_that_cannot_be_are_named(make: Callable[[], EvictionPolicy], field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        make()


@pytest.mark.parametrize(("name", "num_uses"), [("s3-fifo", 1), ("lrfu", 4), ("value", 4)])
def test_what_left_is_known_when_it_comes_back_within_a_longer_run(name: str, num_uses: int) -> None:
    """A prompt that was used, evicted and asked again with more behind it, beside one that is new."""
    policy = policies_named(name, {HOST: 16})[HOST]
    tree, namespace = HiRadixTree(page_size=4, tiers=(HOST,), policies={HOST: policy}), make_namespace(4)

    def store(number: int, num_pages: int, first_slot: int, now: float) -> Node:
        slots = range(first_slot, first_slot + num_pages)
        tokens = sequence(number, 4 * num_pages)
        node = tree.insert(namespace, tokens, tier=HOST, slots=list(slots), now=now).node
        policy.used(Use(tree.path(node), now))
        return node

    known = store(1, 2, 0, 0.0)
    for use in range(num_uses - 1):
        policy.used(Use(tree.path(known), 1.0 + use))
    tree.victims(HOST, 2, 5.0)
    tree.evict(known, HOST)
    assert tree.num_nodes == 0
    back = store(1, 6, 0, 6.0)
    new = store(2, 6, 6, 7.0)
    assert tree.victims(HOST, 12, 8.0) == [new, back], "it is as if it had never been there"
    tree.check_integrity()
