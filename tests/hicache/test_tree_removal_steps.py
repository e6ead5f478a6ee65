"""Removal and flush in steps, between which the tree goes on changing."""

import random

import pytest

from hicache.errors import BadRequest
from hicache.tier import HOST
from tests.hicache.trees import World, make_namespace, sequence

Path = tuple[int, ...]


class Forest:
    """Random paths of pages of one token: what is there is known by looking."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.world = World(page_size=1, tiers=(HOST,))
        self.tree, self.namespace = self.world.tree, self.world.namespace
        for _ in range(self.pick.choice([4, 12, 90])):
            self.insert(self.path())

    def path(self) -> Path:
        wide = self.pick.random() < 0.3
        return tuple(self.pick.randrange(100 if wide and not at else 3) for at in range(self.pick.randint(1, 9)))

    def insert(self, path: Path) -> None:
        self.world.insert(path)

    def pages(self) -> set[Path]:
        """Every page in the tree, by the tokens up to its end."""
        found: set[Path] = set()
        for batch in self.tree.walk():
            for info in batch:
                tokens = tuple(self.tree.tokens_of(info.node).tolist())
                found |= {tokens[:end] for end in range(info.first_page + 1, len(tokens) + 1)}
        return found

    def disturb(self) -> set[Path]:
        """Cut, join, evict or insert something; returns the pages that were inserted."""
        pick, tree = self.pick, self.tree
        nodes = [info.node for batch in tree.walk() for info in batch]
        action = pick.random()
        if action < 0.35 and nodes:
            node = pick.choice(nodes)
            if node.num_pages > 1:
                tree.split(node, pick.randrange(1, node.num_pages))
        elif action < 0.7 and nodes:
            tree.release(tree.lease(pick.choice(nodes), owner="o", deadline=None, now=self.world.now))
        elif action < 0.8:
            for victim in tree.victims(HOST, 1, self.world.now):
                tree.evict(victim, HOST, 1)
        elif action < 0.85:
            path = self.path()
            self.insert(path)
            return {path[:end] for end in range(1, len(path) + 1)}
        return set()


def is_doomed(page: Path, prefix: Path, first_page: int | None) -> bool:
    if first_page is not None and first_page < len(prefix):
        return page[: first_page + 1] == prefix[: first_page + 1]
    return len(page) > len(prefix) and page[: len(prefix)] == prefix


@pytest.mark.parametrize("block", range(4))
def test_what_was_there_has_left_and_nothing_else_whatever_happens_meanwhile(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        forest = Forest(seed)
        pick, tree = forest.pick, forest.tree
        before = forest.pages()
        prefix = pick.choice([(), forest.path()[:2], forest.path(), pick.choice(sorted(before))])
        first_page = pick.choice([None, pick.randint(0, len(prefix))])
        max_nodes = pick.choice([1, 2, 5, 30])
        if pick.random() < 0.3:
            prefix, first_page = (), None
            steps = tree.flush_in_steps(max_nodes=max_nodes)
        else:
            steps = tree.remove_in_steps(forest.namespace, prefix, first_page=first_page, max_nodes=max_nodes)
        doomed = {page for page in before if is_doomed(page, prefix, first_page)}
        inserted: set[Path] = set()
        gone: set[Path] = set()
        for removed in steps:
            tree.check_integrity()
            held_back = forest.pages()
            for node in removed.held:
                assert node.is_live
                assert inserted, "nothing is leased"
            for _ in range(pick.randint(0, 2)):
                inserted |= forest.disturb()
            gone |= held_back - forest.pages()  # evicted: not by the removal
        tree.check_integrity()
        after = forest.pages()
        assert not (doomed - inserted) & after, f"seed {seed}: pages that were removed are still there"
        assert before - doomed - gone <= after, f"seed {seed}: pages left that were not removed"


def test_a_step_looks_at_no_more_nodes_than_it_may() -> None:
    world = World(page_size=1, tiers=(HOST,))
    for token in range(1000):
        world.tree.insert(world.namespace, [token], tier=HOST, slots=[token], now=1.0)
    lease = world.tree.lease(world.tree.match(world.namespace, [500]), owner="o", deadline=None, now=1.0)
    steps = list(world.tree.flush_in_steps(max_nodes=100))
    assert [removed.num_pages for removed in steps[:9]].count(100) >= 8
    assert max(removed.num_pages for removed in steps) == 100
    assert sum(removed.num_pages for removed in steps) == 999
    (held,) = [node for removed in steps for node in removed.held]
    assert held is lease.node
    assert world.tree.num_nodes == 1
    world.tree.check_integrity()


def test_only_what_is_named_leaves_in_steps_too() -> None:
    world = World(page_size=1, tiers=(HOST,))
    other = make_namespace(1, tenant="other")
    for namespace, first in ((world.namespace, 0), (other, 100)):
        world.tree.insert(namespace, range(10), tier=HOST, slots=range(first, first + 10), now=1.0)
    (removed,) = world.tree.flush_in_steps(tenant="other", max_nodes=50)
    assert removed.freed[HOST].tolist() == list(range(100, 110))
    (removed,) = world.tree.flush_in_steps(make_namespace(1, tenant="nobody"), max_nodes=1)
    assert removed.num_pages == 0
    assert world.matched(range(10)) == 10
    (removed,) = world.tree.flush_in_steps(world.namespace, max_nodes=50)
    assert world.tree.num_nodes == 0


@pytest.mark.parametrize("max_nodes", [0, -1, 1.0, None, True])
def test_a_step_is_of_one_node_at_least(max_nodes: int) -> None:
    world = World()
    world.insert(sequence(1, 8))
    with pytest.raises(BadRequest, match="max_nodes"):
        world.tree.flush_in_steps(max_nodes=max_nodes)
    with pytest.raises(BadRequest, match="max_nodes"):
        world.tree.remove_in_steps(world.namespace, sequence(1, 8), max_nodes=max_nodes)
    with pytest.raises(BadRequest, match="tokens"):
        world.tree.remove_in_steps(world.namespace, [-1], max_nodes=1)
    assert world.matched(sequence(1, 8)) == 8
