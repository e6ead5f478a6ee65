"""The largest branches of a tree: compared with all of them, which a model sorts."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from hicache.service.dashboard.heaviest import Branch, Heaviest

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
