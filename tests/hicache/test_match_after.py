"""Matching on from a place that is known says what a match from the root says."""

import random

import pytest

from hicache.errors import BadRequest, NotResident
from hicache.tier import HOST
from tests.hicache.trees import World, digest


@pytest.mark.parametrize("seed", range(40))
def test_a_match_from_within_is_the_match_from_the_root(seed: int) -> None:
    """Over random trees: any place on any path, any tokens behind it, cached or not."""
    draw = random.Random(seed)
    page_size = draw.choice([1, 2, 4])
    world = World(page_size)
    prompts: list[list[int]] = []
    for _ in range(12):
        start = list(draw.choice(prompts))[: draw.randrange(40)] if prompts and draw.random() < 0.8 else []
        tokens = [*start, *(draw.randrange(3) for _ in range(draw.randrange(1, 40)))]
        tokens = tokens[: max(1, len(tokens) // page_size) * page_size]
        if len(tokens) % page_size == 0:
            world.insert(tokens)
            prompts.append(tokens)
    before = digest(world.tree)
    for _ in range(60):
        known = draw.choice(prompts)
        tokens = [*known[: draw.randrange(len(known) + 1)], *(draw.randrange(3) for _ in range(draw.randrange(20)))]
        expected = world.tree.match(world.namespace, tokens)
        if not expected.nodes:
            continue
        # From any page of the match; named by the last node of the match or by one that reaches further.
        num_pages = draw.randint(1, expected.num_tokens // page_size)
        node = world.tree.match(world.namespace, known).nodes[-1]
        if world.tree.tokens_of(node)[: num_pages * page_size].tolist() != tokens[: num_pages * page_size]:
            node = expected.nodes[-1]
        assert world.tree.match_after(node, num_pages, tokens[num_pages * page_size :]) == expected
    assert digest(world.tree) == before


def test_what_is_no_place_is_refused() -> None:
    world = World(4)
    node = world.insert(range(8)).node
    for num_pages in (0, 3, -1, 1.0):
        with pytest.raises(BadRequest, match="num_pages"):
            world.tree.match_after(node, num_pages, [])  # type: ignore[arg-type]  # some are of another type
    with pytest.raises(BadRequest, match="tokens"):
        world.tree.match_after(node, 2, [1, -1])
    world.tree.evict(node, HOST)
    with pytest.raises(NotResident):
        world.tree.match_after(node, 2, [])
