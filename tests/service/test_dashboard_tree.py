"""The largest branches of a tree: compared with all of them, which a model sorts."""

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.clock import ManualClock
from hicache.node import Node
from hicache.service.dashboard import walk
from hicache.service.dashboard.heaviest import Branch, Heaviest
from hicache.service.dashboard.pace import Pace
from hicache.service.dashboard.walk import Key, View
from hicache.tier import HOST, NVME
from tests.hicache.trees import World

Tree = list[tuple[int, int]]
"""For each branch, which comes after the one it hangs on: that one's number, or -1 for the top, and its own weight."""


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Branches in the order of a walk."""
    path, found = [-1], Tree()
    for number in range(draw(st.integers(0, 60))):
        path = path[: draw(st.integers(1, len(path)))]
        found.append((path[-1], draw(st.integers(0, 5))))
        path.append(number)
    return found


def below(branch: Branch[int]) -> Iterator[tuple[int, Branch[int]]]:
    """All branches, each with the key of the one above."""
    for child in branch.children:
        yield branch.key, child
        yield from below(child)


def expected(tree: Tree, limit: int, max_depth: int) -> set[int]:
    """The heaviest, by sorting all."""
    weights, depths = total_weights(tree), dict[int, int]()
    for number, (above, _) in enumerate(tree):
        depths[number] = depths[above] + 1 if above >= 0 else 1
    shown = [number for number in range(len(tree)) if depths[number] <= max_depth]
    return set(sorted(shown, key=lambda number: (-weights[number], number))[:limit])


def total_weights(tree: Tree) -> list[int]:
    weights = [weight for _, weight in tree]
    for number in reversed(range(len(tree))):
        if tree[number][0] >= 0:
            weights[tree[number][0]] += weights[number]
    return weights


@given(tree=trees(), limit=st.integers(1, 20), max_depth=st.integers(1, 6), looks=st.booleans())
def test_the_heaviest_are_kept_and_the_rest_is_counted_where_it_hangs(
    tree: Tree, limit: int, max_depth: int, looks: bool
) -> None:
    heaviest = Heaviest(-1, [0, 0], limit=limit, max_depth=max_depth)
    for number, (above, weight) in enumerate(tree):
        assert heaviest.is_open(above)
        heaviest.add(number, above, [weight, 1])
        if looks:  # in between
            assert heaviest.top().total == [sum(weight for _, weight in tree[: number + 1]), number + 1]
    top = heaviest.finish()
    kept, weights = dict[int, Branch[int]](), total_weights(tree)
    for above, branch in below(top):
        assert branch.key not in kept
        assert tree[branch.key][0] == above
        kept[branch.key] = branch
    assert set(kept) == expected(tree, limit, max_depth)
    assert top.total == [sum(weight for _, weight in tree), len(tree)]
    for number, branch in kept.items():
        assert branch.total[0] == weights[number]
        own = [tree[number][1], 1]
        hidden = branch.hidden or [0, 0]
        shown = [sum(numbers) for numbers in zip([0, 0], *[child.total for child in branch.children], strict=True)]
        assert branch.total == [mine + left + seen for mine, left, seen in zip(own, hidden, shown, strict=True)]


def test_a_wide_tree_of_equal_branches_is_held_in_little_memory() -> None:
    heaviest = Heaviest(-1, [0], limit=10, max_depth=5)
    for number in range(5_000):
        heaviest.add(number, -1, [7])
        assert len(heaviest.top().children) <= 11
    top = heaviest.finish()
    assert [branch.key for branch in top.children] == list(range(10))
    assert top.hidden == [7 * 4_990]


PAGE_BYTES = 10


def look(view: View) -> Branch[Key]:
    """One look, of one step of the walk."""
    clock = ManualClock()
    asyncio.run(view.go_on(Pace(clock), until=clock.monotonic()))
    return view.top


def nodes_of(branch: Branch[Key]) -> dict[Key, int]:
    """All branches with the bytes of each and what hangs on it."""
    found = {branch.key: branch.total[0]}
    for child in branch.children:
        found |= nodes_of(child)
    return found


@given(st.data())
def test_a_tree_that_changes_under_the_walk(data: st.DataObject) -> None:
    """Pages come and go between the steps: no step fails, and a walk that nothing disturbs finds what is there."""
    world = World(page_size=1, tiers=(HOST, NVME))
    prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "STEP", 1)
        view = View(world.tree, ManualClock(), None, page_bytes=PAGE_BYTES)
        for _ in range(data.draw(st.integers(0, 20))):
            prompt = data.draw(prompts)
            if data.draw(st.booleans()):
                world.insert(prompt, data.draw(st.sampled_from([HOST, NVME])))
            else:
                world.tree.remove(world.namespace, prompt, first_page=data.draw(st.integers(0, len(prompt) - 1)))
            look(view)
        view.is_whole = False
        while not view.is_whole:  # the walk that was under way
            look(view)
        view.is_whole = False
        while not view.is_whole:
            top = look(view)
        infos = [info for batch in world.tree.walk() for info in batch]
        assert top.total[:3] == [PAGE_BYTES * sum([info.num_pages for info in infos]), len(infos), 0]
        found = nodes_of(top)
        assert {key for key in found if isinstance(key, Node)} == {info.node for info in infos}
        assert top.hidden is None


def test_from_one_prefix_only_what_is_below_it_is_seen() -> None:
    world = World(page_size=1, tiers=(HOST, NVME))
    for tail in ([3], [4, 5]):
        node = world.insert([1, 2, *tail]).node
    world.insert([7, 8, 9])
    above = node.parent
    assert above is not None
    top = look(View(world.tree, ManualClock(), above, page_bytes=PAGE_BYTES))
    assert top.total[:2] == [5 * PAGE_BYTES, 3]
    assert set(nodes_of(top)) == {above, *above.children}
    of_namespace = look(View(world.tree, ManualClock(), world.namespace.digest, page_bytes=PAGE_BYTES))
    assert of_namespace.total[:2] == [8 * PAGE_BYTES, 4]


def test_what_was_seen_from_above_is_shown_until_it_was_walked_through() -> None:
    world = World(page_size=1, tiers=(HOST, NVME))
    for tail in range(10):
        node = world.insert([1, 2, tail]).node
    for other in range(20):
        world.insert([3, other])
    key = node.parent
    assert key is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "STEP", 1)
        everything = View(world.tree, ManualClock(), None, page_bytes=PAGE_BYTES)
        look(everything)
        assert everything.seen(key) is None, "it has not been walked through"
        assert everything.num_expected == world.tree.num_nodes
        while not everything.is_whole:
            look(everything)
        world.insert([1, 2, 99])
        zoomed = View(world.tree, ManualClock(), key, page_bytes=PAGE_BYTES, above=everything)
        assert (zoomed.is_whole, zoomed.as_of, zoomed.num_expected) == (False, everything.as_of, 11)
        while not zoomed.is_whole:
            assert zoomed.top.total[:2] == [12 * PAGE_BYTES, 11]
            assert set(nodes_of(zoomed.top)) < {key, *key.children}
            look(zoomed)
        assert zoomed.top.total[:2] == [13 * PAGE_BYTES, 12]
        assert set(nodes_of(zoomed.top)) == {key, *key.children}


def test_a_prefix_that_leaves_while_it_is_looked_at() -> None:
    world = World(page_size=1, tiers=(HOST, NVME))
    for tail in range(10):
        node = world.insert([1, 2, tail]).node
    above = node.parent
    assert above is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "STEP", 1)
        view = View(world.tree, ManualClock(), above, page_bytes=PAGE_BYTES)
        look(view)
        world.tree.remove(world.namespace, [1, 2], first_page=0)
        world.insert([1, 2, 3])
        while not view.is_whole:
            look(view)
    assert world.tree.current(above) is None
