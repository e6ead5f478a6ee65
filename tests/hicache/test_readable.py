"""What readers of other tenants descend through: as fast with many publishers as with one, and never anything else."""

import random
from statistics import median
from time import thread_time_ns

import numpy as np

from hicache.namespace import Namespace
from hicache.tier import HOST
from hicache.tree import HiRadixTree
from tests.hicache.trees import Tokens, make_namespace, sequence

READER = make_namespace(tenant="reader")


def median_us(tree: HiRadixTree, tokens: Tokens, repeats: int = 101) -> float:
    times = []
    for _ in range(repeats):
        began = thread_time_ns()
        tree.match(READER, tokens)
        times.append(thread_time_ns() - began)
    return median(times) / 1000


def published_by(num_tenants: int) -> HiRadixTree:
    tree = HiRadixTree(page_size=4, tiers=(HOST,))
    for number in range(num_tenants):
        tenant = make_namespace(tenant=f"t{number}")
        tokens = [*sequence(1, 64), *sequence(2 + number, 4)]
        tree.insert(tenant, tokens, tier=HOST, slots=range(17 * number, 17 * number + 17), now=1.0)
        tree.publish(tenant, tokens)
    return tree


def test_a_lookup_costs_the_same_however_many_tenants_publish() -> None:
    few, many = published_by(1), published_by(500)
    many.check_integrity()
    tokens = np.array([*sequence(1, 64), *sequence(400, 3)], np.int32)
    match = many.match(READER, tokens)
    assert (match.num_tokens, match.owner) == (64, make_namespace(tenant="t0").digest), "of equals the first"
    assert match.partial is not None
    assert match.partial.num_tokens == 3
    assert match.partial.node.tenant == "t398"
    alone, among_many = median_us(few, tokens), median_us(many, tokens)
    assert among_many < 8 * alone, f"{among_many:.1f} µs among 500 publishers, {alone:.1f} with one"


def test_a_partial_costs_little_more_among_many_siblings() -> None:
    tree = HiRadixTree(page_size=4, tiers=(HOST,))
    publisher = make_namespace(tenant="publisher")
    for number in range(8000):
        tree.insert(publisher, [number, 1, 2, 3], tier=HOST, slots=[number], now=1.0)
        tree.publish(publisher, [number, 1, 2, 3])
        if number == 9:
            few = median_us(tree, np.array([5, 1, 2, 7], np.int32))
    match = tree.match(READER, [7777, 1, 2, 7])
    assert match.partial is not None
    assert match.partial.num_tokens == 3
    assert tree.tokens_of(match.partial.node).tolist() == [7777, 1, 2, 3]
    many = median_us(tree, np.array([7777, 1, 2, 7], np.int32))
    assert many < 8 * few, f"{many:.1f} µs among 8,000 siblings, {few:.1f} among 10"


def test_readers_find_what_is_published_through_every_change() -> None:
    """Beside a plain set of published prefixes; integrity compares all of it with the publications as well."""
    for seed in range(30):
        pick = random.Random(seed)
        tree = HiRadixTree(page_size=1, tiers=(HOST,))
        tenants = [make_namespace(1, tenant=name) for name in "abc"]
        reader = make_namespace(1, tenant="reader")
        known: set[tuple[Namespace, tuple[int, ...]]] = set()
        slot = 0
        for _ in range(60):
            tenant = pick.choice(tenants)
            tokens = tuple(pick.randrange(2) for _ in range(pick.randint(1, 7)))
            action = pick.random()
            if action < 0.6:
                tree.insert(tenant, tokens, tier=HOST, slots=range(slot, slot + len(tokens)), now=1.0)
                slot += len(tokens)
                tree.publish(tenant, tokens)
                known.add((tenant, tokens))
            elif action < 0.8 and known:
                tenant, tokens = pick.choice(sorted(known, key=lambda each: (each[0].tenant, each[1])))
                assert tree.unpublish(tenant, tokens)
                known.remove((tenant, tokens))
            else:
                tree.insert(tenant, [*tokens, 9], tier=HOST, slots=range(slot, slot + len(tokens) + 1), now=1.0)
                slot += len(tokens) + 1
            tree.check_integrity()
            asked = [pick.randrange(2) for _ in range(8)]
            longest = max(
                (
                    next((at for at, (one, other) in enumerate(zip(tokens, asked, strict=False)) if one != other),
                         len(tokens))
                    for _, tokens in known
                ),
                default=0,
            )  # fmt: skip
            assert tree.match(reader, asked).num_tokens == longest


def test_a_dropped_tree_leaves_no_publication_behind() -> None:
    """The collector does not see them, so whoever drops the tree has to undo the references."""
    import weakref

    class Watched(HiRadixTree):
        pass

    tree = Watched(page_size=4, tiers=(HOST,))
    tree.insert(READER, sequence(1, 8), tier=HOST, slots=[0, 1], now=1.0)
    tree.publish(READER, sequence(1, 8))
    tree.publish(READER, sequence(1, 4))
    published = tree._published
    readable = next(iter(published.readable.values()))
    root, gone = readable.root, weakref.ref(tree)
    assert root.children
    del tree
    assert gone() is None
    assert not root.children
    assert not published.publications
