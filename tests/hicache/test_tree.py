"""The tree's structure: matches, partials, splits, joins, recency and inspection, each by example."""

import gc
import math
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import pytest

from hicache import tree
from hicache.errors import BadRequest, NotResident
from hicache.node import Node
from hicache.policy import history
from hicache.residency import Residency
from hicache.results import Match
from hicache.sortedchunks import CHUNK, ORDER_FROM, SortedChunks
from hicache.tier import DEVICE, HOST, NVME, chain_digest
from hicache.tokens import pack_slots
from hicache.tree import HiRadixTree
from tests.hicache.trees import World, make_namespace, sequence

# -- match -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 64, 256])
def test_only_whole_pages_match(page_size: int) -> None:
    world = World(page_size)
    tokens = sequence(1, 5 * page_size)
    world.insert(tokens)
    for length in range(len(tokens) + 1):
        if length % page_size in (0, 1, page_size - 1):
            match = world.tree.match(world.namespace, tokens[:length])
            assert match.num_tokens == length // page_size * page_size
            tail = length - match.num_tokens
            assert (match.partial.num_tokens if match.partial else 0) == tail
            assert match.pages_in_last == length // page_size
    assert world.matched([*tokens, 1, 2, 3]) == len(tokens)


def test_an_empty_prompt_and_an_empty_tree_match_nothing() -> None:
    world = World()
    nothing = world.tree.match(world.namespace, [])
    assert nothing == Match((), 0, 0, None, world.namespace.digest, world.namespace.digest)
    assert world.tree.match(world.namespace, [1, 2, 3, 4]) == nothing
    world.insert(sequence(0, 8))
    assert world.tree.match(world.namespace, []) == nothing
    other = make_namespace(tenant="other")
    assert world.tree.match(other, sequence(0, 8)) == nothing._replace(owner=other.digest, asked=other.digest)


@pytest.mark.parametrize("kind", ["list", "tuple", "int64", "uint32", "int16", "strided", "big-endian", "read-only"])
def test_tokens_may_come_in_any_integer_form(kind: str) -> None:
    world = World()
    tokens = np.arange(1, 13, dtype=np.int32)
    world.insert(tokens)
    forms: dict[str, Any] = {
        "list": tokens.tolist(),
        "tuple": tuple(tokens.tolist()),
        "int64": tokens.astype(np.int64),
        "uint32": tokens.astype(np.uint32),
        "int16": tokens.astype(np.int16),
        "strided": np.repeat(tokens, 2)[::2],
        "big-endian": tokens.astype(">i4"),
        "read-only": np.frombuffer(tokens.tobytes(), np.int32),
    }
    assert world.matched(forms[kind]) == 12
    assert len(world.insert(forms[kind]).duplicates) == 3


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1024, 4097, 40_000])
def test_a_difference_is_found_wherever_it_is(length: int) -> None:
    world = World(page_size=1)
    tokens = sequence(1, length)
    world.insert(tokens)
    pick = random.Random(length)
    for at in {0, length - 1, length // 2, *(pick.randrange(length) for _ in range(20))}:
        other = tokens.copy()
        other[at] ^= 1 << pick.randrange(30)
        assert world.matched(other) == at


def test_a_match_is_read_only_however_often() -> None:
    world = World()
    prefix = sequence(1, 16)
    world.insert([*prefix, *sequence(2, 8)])
    world.insert([*prefix, *sequence(3, 8)])
    before = world.digest()
    for cut in range(25):
        for _ in range(3):
            world.tree.match(world.namespace, prefix[:cut])
            world.tree.match(world.namespace, [*prefix[:cut], 99, 98])
    assert world.digest() == before
    world.tree.check_integrity()


# -- partials ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_siblings", [1, 2, 7, ORDER_FROM, 3 * CHUNK])
def test_the_partial_is_the_best_of_all_siblings(num_siblings: int) -> None:
    pick = random.Random(num_siblings)
    world = World(page_size=4)
    head = [9, 9, 9, 9]
    pages = {tuple(pick.choice([1, 2, 3, 256, 2**31 - 1, *range(30)]) for _ in range(4)) for _ in range(num_siblings)}
    for page in sorted(pages, key=hash):
        slots = world.slots(HOST, 2)
        first_page = world.matched(head) // 4
        world.tree.insert(
            world.namespace, [*head, *page], tier=HOST, slots=slots[first_page:], first_page=first_page, now=1.0
        )
    for _ in range(200):
        query = [pick.choice([1, 2, 3, 256, 2**31 - 1, *range(30)]) for _ in range(pick.randint(1, 4))]
        best = max(_num_common(page, query) for page in pages)
        match = world.tree.match(world.namespace, [*head, *query])
        if best == 4:
            assert match.num_tokens == 8
        else:
            assert match.num_tokens == 4
            assert (match.partial.num_tokens if match.partial else 0) == best
            if match.partial:
                node = match.partial.node
                own = world.tree.tokens_of(node)[-4 * node.num_pages :].tolist()
                assert _num_common(own[4 * match.partial.page :], query) == best
    world.tree.check_integrity()


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def test_a_partial_may_lie_inside_a_run() -> None:
    world = World()
    tokens = sequence(1, 16)
    node = world.insert(tokens).node
    match = world.tree.match(world.namespace, [*tokens[:10], 7, 7, 7])
    assert (match.num_tokens, match.pages_in_last) == (8, 2)
    assert match.partial == (node, 2, 2)


def test_a_whole_shared_page_is_a_partial_when_the_prompt_ends_in_it() -> None:
    world = World()
    tokens = sequence(1, 8)
    node = world.insert(tokens).node
    assert world.tree.match(world.namespace, tokens[:7]).partial == (node, 1, 3)
    assert world.tree.match(world.namespace, tokens).partial is None


def test_partials_stay_right_while_siblings_come_and_go() -> None:
    pick = random.Random(5)
    world = World(page_size=2, tiers=(HOST,))
    live: dict[tuple[int, int], Node] = {}
    for _ in range(2500):
        page = (pick.randrange(60), pick.randrange(60))
        if page in live and pick.random() < 0.8:
            world.tree.evict(live.pop(page), HOST)
        elif page not in live:
            slots = world.slots(HOST, 1)
            live[page] = world.tree.insert(world.namespace, page, tier=HOST, slots=slots, now=1.0).node
        query = (pick.randrange(60), 99)
        partial = world.tree.match(world.namespace, query).partial
        expected = any(first == query[0] for first, _ in live)
        assert (partial is not None) == expected
    world.tree.check_integrity()


def test_sorted_chunks_against_a_sorted_list() -> None:
    pick = random.Random(3)
    order, keys = SortedChunks[bytes](), list[bytes]()
    for _ in range(6 * CHUNK):
        key = pick.randbytes(2)
        at = bisect_left(keys, key)
        if at < len(keys) and keys[at] == key:
            if pick.random() < 0.7:
                order.remove(key)
                del keys[at]
        else:
            order.add(key)
            keys.insert(at, key)
        query = pick.randbytes(2)
        at = bisect_left(keys, query)
        expected = (keys[at - 1] if at else None, keys[at] if at < len(keys) else None)
        assert order.neighbours(query) == expected
    assert list(order) == keys
    for key in keys:
        order.remove(key)
    assert list(order) == []
    assert order.neighbours(b"x") == (None, None)


# -- insert ------------------------------------------------------------------------------------------------------------


def test_the_same_content_is_stored_once_a_tier() -> None:
    world = World()
    tokens = sequence(1, 16)
    world.insert(tokens)
    again = world.insert(tokens)
    assert (again.num_stored, again.duplicates.tolist()) == (0, [4, 5, 6, 7])
    assert world.tree.occupancy(HOST).resident == 4
    further = world.insert(tokens, DEVICE)
    assert (further.num_stored, further.duplicates.tolist()) == (4, [])
    assert further.node.residency(DEVICE) is further.node.residency(HOST) is Residency.RESIDENT
    assert further.node.slots(DEVICE).tolist() == [0, 1, 2, 3]


def test_an_insert_fills_the_holes_of_a_tier_only() -> None:
    world = World()
    tokens = sequence(1, 24)
    world.insert(tokens)
    world.insert(tokens[:8], DEVICE)
    world.insert(tokens[:16], NVME, first_page=0)
    filled = world.insert(tokens, DEVICE)
    assert filled.num_stored == 4
    assert filled.duplicates.tolist() == [2, 3]
    assert [node.slots(DEVICE).tolist() for node in world.tree.path(filled.node)] == [[0, 1], [4, 5], [6, 7]]


def test_a_copy_for_the_middle_of_a_run_splits_it_twice() -> None:
    world = World()
    tokens = sequence(1, 24)
    world.insert(tokens)
    inserted = world.insert(tokens[:16], DEVICE, first_page=2)
    assert [node.num_pages for node in world.tree.path(inserted.node)] == [2, 2]
    assert inserted.node.slots(DEVICE).tolist() == [0, 1]
    assert inserted.node.slots(HOST).tolist() == [2, 3]
    assert [node.num_pages for node in inserted.node.children] == [2]


def test_an_insert_ends_where_its_tokens_end() -> None:
    world = World()
    tokens = sequence(1, 16)
    world.insert(tokens)
    shorter = world.insert(tokens[:8])
    assert world.tree.tokens_of(shorter.node).tolist() == tokens[:8].tolist()
    assert world.matched(tokens) == 16


def test_what_is_arriving_counts_as_known() -> None:
    world = World()
    tokens = sequence(1, 8)
    node = world.insert(tokens).node
    move = world.tree.start_move(node, source=HOST, target=DEVICE, slots=[50, 51])
    assert world.insert(tokens, DEVICE).duplicates.tolist() == [0, 1]
    world.tree.finish_move(move, [True, True])
    assert node.slots(DEVICE).tolist() == [50, 51]


# -- structure ---------------------------------------------------------------------------------------------------------


def test_a_split_keeps_the_object_as_the_lower_half() -> None:
    world = World()
    tokens = sequence(1, 16)
    node = world.insert(tokens).node
    lease = world.tree.lease(node, owner="o", deadline=None, now=1.0)
    pin = world.tree.pin([node], HOST)
    move = world.tree.start_move(node, source=HOST, target=NVME, slots=[9, 8, 7, 6])
    upper, lower = world.tree.split(node, 3)
    assert lower is node
    assert lease.node is lower
    assert pin.nodes == move.nodes == (upper, lower)
    assert (upper.num_leases, lower.num_leases) == (0, 1)
    assert (upper.slots(NVME).tolist(), lower.slots(NVME).tolist()) == ([9, 8, 7], [6])
    assert upper.residency(NVME) is lower.residency(NVME) is Residency.ARRIVING
    finished = world.tree.finish_move(move, [True, False, True, True])
    assert [piece.num_pages for piece in finished.nodes] == [1, 1, 1]
    assert finished.freed[NVME].tolist() == [8]
    world.tree.check_integrity()


def test_halves_of_a_split_do_not_keep_the_whole_alive() -> None:
    world = World(page_size=1, tiers=(HOST,))
    node = world.insert(np.arange(10_000)).node
    assert len(node._buffer) > 39_000
    for _ in range(9_900):
        world.tree.evict(node, HOST, 1)
        node = world.tree.match(world.namespace, [0]).nodes[0]
    assert node.num_pages == 100
    assert len(node._buffer) <= 800
    world.tree.check_integrity()


@pytest.mark.parametrize("leased", [False, True])
def test_a_sequence_published_page_by_page_stays_a_short_path(leased: bool) -> None:
    world = World(page_size=2, tiers=(HOST,))
    tokens = sequence(1, 2000)
    lease = None
    longest = 0
    for count in range(1, 1001):
        inserted = world.tree.insert(
            world.namespace, tokens[: 2 * count], tier=HOST, slots=[count], first_page=count - 1, now=float(count)
        )
        if leased:
            if lease is None:
                lease = world.tree.lease(inserted, owner="o", deadline=None, now=float(count))
            else:
                world.tree.move_lease(lease, inserted, float(count))
        longest = max(longest, len(world.tree.path(inserted.node)))
    assert longest <= 2 + math.log2(1000)
    world.tree.check_integrity()
    path = world.tree.path(inserted.node)
    assert [slot for node in path for slot in node.slots(HOST).tolist()] == list(range(1, 1001))
    if lease is not None:
        assert lease.node is inserted.node
        assert [node.num_leases for node in path] == [0] * (len(path) - 1) + [1]


def test_a_node_that_was_joined_leads_to_its_heir() -> None:
    world = World()
    tokens = sequence(1, 16)
    first = world.insert(tokens[:4]).node
    heir = world.insert(tokens, first_page=1).node
    assert not first.is_live
    assert first.parent is None
    assert first.children == ()
    assert world.tree.current(first) is heir
    assert world.tree.path(first) == []
    with pytest.raises(NotResident):
        world.tree.pin([first], HOST)
    world.tree.touch(first, 99.0)
    assert heir.last_access == 99.0
    world.tree.evict(heir, HOST)
    assert world.tree.current(first) is None
    world.tree.touch(first, 100.0)


def test_uses_are_counted_along_the_path_and_kept_by_splits_and_joins() -> None:
    world = World()
    prefix, one, two = sequence(0, 8), sequence(1, 8), sequence(2, 4)
    node = world.insert([*prefix, *one]).node
    for _ in range(3):
        world.tree.count_use(node)
    world.tree.touch(node, world.tick())
    other = world.insert([*prefix, *two]).node
    upper = node.parent
    assert upper is not None
    assert upper is other.parent
    assert (upper.num_uses, node.num_uses, other.num_uses) == (3, 3, 0)
    world.tree.count_use(other)
    assert (upper.num_uses, node.num_uses, other.num_uses) == (4, 3, 1)
    assert {info.num_uses for batch in world.tree.walk() for info in batch} == {4, 3, 1}
    world.tree.evict(other, HOST)  # what is left is one run again
    world.tree.check_integrity()
    assert (node.num_pages, node.num_uses, upper.is_live) == (4, 4, False)
    world.tree.count_use(upper)
    assert node.num_uses == 5
    world.tree.evict(node, HOST)
    world.tree.count_use(node)
    assert world.insert([*prefix, *one]).node.num_uses == 0


def test_runs_with_a_lease_between_them_are_joined_when_it_ends() -> None:
    world = World()
    tokens = sequence(1, 32)
    world.insert(tokens)
    lease = world.tree.lease(world.tree.match(world.namespace, tokens[:12]), owner="o", deadline=None, now=1.0)
    assert world.tree.num_nodes == 2
    world.tree.release(lease)
    assert world.tree.num_nodes == 1
    assert world.matched(tokens) == 32
    world.tree.check_integrity()


def test_many_leases_at_random_places_do_not_fragment_a_run() -> None:
    pick = random.Random(1)
    world = World(page_size=1, tiers=(HOST,))
    tokens = np.arange(2048)
    world.insert(tokens)
    for _ in range(300):
        match = world.tree.match(world.namespace, tokens[: pick.randint(1, 2048)])
        world.tree.release(world.tree.lease(match, owner="o", deadline=None, now=1.0))
    assert world.tree.num_nodes <= 2 + math.log2(2048)
    world.tree.check_integrity()


def test_a_match_older_than_a_split_is_leased_where_it_ended() -> None:
    world = World()
    tokens = sequence(1, 24)
    node = world.insert(tokens).node
    match = world.tree.match(world.namespace, tokens[:12])
    world.tree.split(node, 4)
    lease = world.tree.lease(match, owner="o", deadline=None, now=1.0)
    assert lease.node is not None
    assert world.tree.tokens_of(lease.node).tolist() == tokens[:12].tolist()
    world.tree.flush()
    with pytest.raises(NotResident):
        world.tree.lease(world.tree.match(world.namespace, tokens)._replace(nodes=(node,)), owner="o", deadline=None,
                         now=1.0)
    assert world.matched(tokens) == 12


def test_a_match_older_than_a_merge_is_leased_where_it_ended() -> None:
    world = World()
    tokens = sequence(1, 24)
    first = world.insert(tokens[:12]).node
    match = world.tree.match(world.namespace, tokens[:8])
    world.insert(tokens, first_page=3)
    assert not first.is_live
    lease = world.tree.lease(match, owner="o", deadline=None, now=1.0)
    assert lease.node is not None
    assert world.tree.tokens_of(lease.node).tolist() == tokens[:8].tolist()
    world.tree.check_integrity()


def test_removed_trees_leave_no_garbage_for_the_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        world = World(page_size=1)
        for i in range(50):
            world.insert([7, i, i, i])
            world.insert([7, i, 5], DEVICE)
        lease = world.tree.lease(world.tree.match(world.namespace, [7, 3]), owner="o", deadline=None, now=1.0)
        world.tree.release(lease)
        while victims := world.tree.victims(HOST, 50, world.now) + world.tree.victims(DEVICE, 50, world.now):
            for node in victims:
                for tier in (HOST, DEVICE):
                    if world.tree.can_evict(node, tier):
                        world.tree.evict(node, tier)
        assert world.tree.num_nodes == 0
        del node, victims, lease
        assert not [each for each in gc.get_objects() if type(each) is Node]
    finally:
        gc.enable()


# -- what eviction looks at --------------------------------------------------------------------------------------------


class CountingLru:
    """Counts the nodes that a choice of victims looks at."""

    def __init__(self) -> None:
        from hicache.policy.lru import LruPolicy

        self.inner = LruPolicy()
        self.add, self.discard = self.inner.add, self.inner.discard
        self.touch, self.split = self.inner.touch, self.inner.split
        self.looked_at = 0

    def victims(self) -> Iterator[Node]:
        for node in self.inner.victims():
            self.looked_at += 1
            yield node


def test_choosing_victims_never_walks_the_tree() -> None:
    policy = CountingLru()
    radix = HiRadixTree(page_size=4, tiers=(HOST, NVME), policies={HOST: policy})
    namespace = make_namespace()
    for i in range(3000):
        radix.insert(namespace, sequence(i, 8), tier=HOST, slots=[2 * i, 2 * i + 1], now=float(i))
    for node in radix.victims(HOST, 2000, 1e6):
        radix.touch(node, 1e6)
    policy.looked_at = 0
    assert len(radix.victims(HOST, 10, 1e6)) == 5
    assert policy.looked_at == 5


def test_a_tier_leaf_may_have_children_elsewhere() -> None:
    world = World()
    tokens = sequence(1, 16)
    lower = world.insert(tokens).node
    upper = world.insert(tokens[:8], DEVICE).node
    assert lower.parent is upper
    assert world.tree.victims(DEVICE, 1, 9.0) == [upper]
    assert world.tree.victims(HOST, 99, 9.0) == [lower]
    world.tree.evict(lower, HOST)
    assert world.tree.victims(HOST, 99, 9.0) == [upper]


def test_the_last_copy_in_the_slowest_tier_is_no_victim_while_it_is_needed() -> None:
    world = World()
    tokens = sequence(1, 8)
    node = world.insert(tokens, NVME).node
    lease = world.tree.lease(node, owner="o", deadline=None, now=1.0)
    assert world.tree.victims(NVME, 1, 1.0) == []
    with pytest.raises(BadRequest, match="the last, and still needed"):
        world.tree.evict(node, NVME)
    world.insert(tokens, HOST)
    assert world.tree.victims(NVME, 1, 1.0) == [node]
    world.tree.evict(node, NVME)
    assert world.tree.victims(HOST, 1, 1.0) == [node], "leased, but it can be demoted"
    assert not world.tree.can_evict(node, HOST)
    world.tree.release(lease)
    assert world.tree.can_evict(node, HOST)


# -- identity and inspection -------------------------------------------------------------------------------------------


def test_identities_are_the_chain_from_the_root_whatever_the_shape() -> None:
    world = World()
    tokens = sequence(1, 24)
    node = world.insert(tokens).node
    chain, expected = world.namespace.digest, []
    for at in range(0, 24, 4):
        page = tokens[at : at + 4].astype("<i4").tobytes()
        expected.append((world.namespace.digest, chain, page))
        chain = chain_digest(chain, page)
    for cuts in ([], [2], [1], [3]):
        for cut in cuts:
            if cut < node.num_pages:
                world.tree.split(node, cut)
        found = [page for step in world.tree.path(node) for page in world.tree.identities(step)]
        assert [(page.namespace, page.prefix, page.tokens) for page in found] == expected
    assert world.tree.identities(node)[-1].chain == chain
    world.tree.check_integrity()


def test_a_digest_that_comes_with_pages_is_kept_and_not_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told, untold = World(), World()
    tokens = sequence(1, 24)
    end = untold.tree.identities(untold.insert(tokens).node)[-1].chain
    node = told.tree.insert(
        told.namespace, tokens, tier=HOST, slots=told.slots(HOST, 6), chain=end, now=told.tick()
    ).node
    monkeypatch.setattr(history, "chain_digest", None)  # to be called by nobody
    assert history.prefix_of(node) == end
    told.tree.check_integrity()
    # It is that of the end: the rest of a run that is cut has its own.
    monkeypatch.undo()
    told.tree.split(node, 2)
    assert [page.chain for step in told.tree.path(node) for page in told.tree.identities(step)] == [
        page.chain for page in untold.tree.identities(untold.tree.match(untold.namespace, tokens).nodes[-1])
    ]
    told.tree.check_integrity()


def test_i03_a_hash_of_eight_bits_finds_no_wrong_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests name pages to remote stores; what matches is decided by tokens alone."""
    monkeypatch.setattr(tree, "chain_digest", lambda prefix, tokens: chain_digest(prefix, tokens)[:1] * 32)
    world = World(tiers=(HOST,))
    pick = random.Random(8)
    stored: dict[tuple[int, ...], int] = {}
    for slot in range(10_000):
        page = tuple(pick.choices(range(12), k=4))
        inserted = world.tree.insert(world.namespace, page, tier=HOST, slots=[slot], now=1.0)
        assert len(inserted.duplicates) == (page in stored)
        stored.setdefault(page, slot)
        (identity,) = world.tree.identities(inserted.node)
        assert identity.tokens == np.array(page, np.int32).tobytes()
    assert len({info.node._chain for batch in world.tree.walk() for info in batch}) <= 256
    for page in {tuple(pick.choices(range(12), k=4)) for _ in range(3000)} | set(stored):
        match = world.tree.match(world.namespace, page)
        assert match.num_tokens == (4 if page in stored else 0)
        if match.nodes:
            assert match.nodes[0].slots(HOST).tolist() == [stored[page]]


def test_a_walk_goes_on_while_the_tree_changes() -> None:
    world = World()
    stay = [world.insert(sequence(i, 8)).node for i in range(50)]
    go = [world.insert(sequence(i, 8)).node for i in range(50, 100)]
    cut = [world.insert(sequence(i, 8)).node for i in range(100, 150)]
    seen: list[Node] = []
    for batch in world.tree.walk(batch=10):
        assert 1 <= len(batch) <= 10
        for info in batch:
            assert info.node.is_live
            tokens = world.tree.tokens_of(info.node)
            assert info.first_page == len(tokens) // 4 - info.num_pages
            assert world.tree.own_tokens_of(info.node).tolist() == tokens[4 * info.first_page :].tolist()
        seen += [info.node for info in batch]
        for nodes, change in ((go, lambda node: world.tree.evict(node, HOST)), (cut, lambda n: world.tree.split(n, 1))):
            for _ in range(5):
                if nodes:
                    change(nodes.pop())
    assert len(set(seen)) == len(seen)
    assert set(stay) <= set(seen)


def test_a_walk_tells_what_is_there() -> None:
    world = World()
    tokens = sequence(1, 16)
    node = world.insert(tokens).node
    world.insert(tokens[:8], DEVICE)
    world.tree.lease(node, owner="o", deadline=None, now=1.0)
    upper, lower = next(world.tree.walk())
    assert (upper.first_page, upper.num_pages, upper.num_children, upper.num_leases) == (0, 2, 1, 0)
    assert (lower.first_page, lower.num_pages, lower.num_children, lower.num_leases) == (2, 2, 0, 1)
    assert upper.residency == (Residency.RESIDENT, Residency.RESIDENT, Residency.ABSENT)
    assert lower.residency == (Residency.ABSENT, Residency.RESIDENT, Residency.ABSENT)
    assert upper.namespace == lower.namespace == world.namespace.digest
    with pytest.raises(BadRequest, match="batch"):
        next(world.tree.walk(batch=0))


def test_namespaces_share_nothing() -> None:
    world = World()
    tokens = sequence(1, 8)
    world.insert(tokens)
    other = make_namespace(tenant="other")
    assert world.tree.match(other, tokens).num_tokens == 0
    world.tree.insert(other, tokens, tier=HOST, slots=[90, 91], now=9.0)
    assert world.tree.occupancy(HOST).resident == 4
    assert world.tree.flush(tenant="other").freed[HOST].tolist() == [90, 91]
    assert world.matched(tokens) == 8
    world.tree.check_integrity()


@pytest.mark.parametrize(("first", "then", "num_nodes"), [(4, 2, 2), (3, 2, 1), (4, 3, 1), (2, 1, 2), (1, 1, 1)])
def test_runs_are_joined_while_the_upper_one_is_less_than_twice_as_long(first: int, then: int, num_nodes: int) -> None:
    """Exactly twice as long is not joined: only so is a token copied O(log n) times."""
    world = World()
    tokens = sequence(1, 4 * (first + then))
    world.insert(tokens[: 4 * first])
    world.insert(tokens, first_page=first)
    assert world.tree.num_nodes == num_nodes
    assert world.matched(tokens) == len(tokens)


def test_runs_that_a_move_made_alike_are_joined_when_it_ends() -> None:
    world = World()
    tokens = sequence(1, 16)
    world.insert(tokens)
    world.insert(tokens[:8], NVME)
    upper, lower = world.tree.match(world.namespace, tokens).nodes
    move = world.tree.start_move(lower, source=HOST, target=NVME, slots=[70, 71])
    assert world.tree.num_nodes == 2
    finished = world.tree.finish_move(move, [True, True])
    assert finished.nodes == (lower,)
    assert (lower.num_pages, upper.is_live, world.tree.num_nodes) == (4, False, 1)
    assert lower.slots(NVME).tolist() == [0, 1, 70, 71]
    world.tree.check_integrity()


@pytest.mark.parametrize("count", [63, 64, 65, 66, 1000])
def test_slots_are_checked_however_many_they_are(count: int) -> None:
    ascending = np.arange(count, dtype=np.int32)
    for good in (ascending, ascending[::-1], ascending + (2**31 - 1 - count), np.roll(ascending, 7)):
        assert pack_slots(good, count).tolist() == good.tolist()
    for at in (0, 1, count // 2, count - 1):
        twice, negative = ascending.copy(), ascending.copy()
        twice[at] = twice[at - 1]
        negative[at] = -1
        for slots, problem in ((twice, "the same slot"), (twice[::-1], "the same slot"), (negative, "-1 is below 0")):
            with pytest.raises(BadRequest, match=f"slots: {problem}"):
                pack_slots(slots, count)
    with pytest.raises(BadRequest, match="slots: -1 is below 0"):
        pack_slots(ascending - 1, count)
    with pytest.raises(BadRequest, match=f"slots: {count} slots do not match {count + 1} pages"):
        pack_slots(ascending, count + 1)


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.uint64])
def test_ids_of_other_integer_types_are_within_the_same_bounds(dtype: type) -> None:
    top: Any = np.array([0, 2**31 - 1], dtype)
    assert tree.pack_tokens(top).tolist() == [0, 2**31 - 1]
    with pytest.raises(BadRequest, match="id 2147483648 is not within 0 to 2147483647"):
        tree.pack_tokens(top + np.array([0, 1], dtype))
    if dtype is np.int64:
        with pytest.raises(BadRequest, match="id -1 is not within"):
            tree.pack_tokens(top - np.array([1, 0], dtype))
