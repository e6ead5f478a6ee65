"""What engines report to have on their devices: shown, and nothing more."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

from hicache.errors import BadRequest, NotResident
from hicache.node import Node
from hicache.tier import DEVICE, HOST, NVME, TierId
from tests.hicache.trees import World, make_namespace, sequence

GPU, OTHER_GPU = TierId("device:session-1/0"), TierId("device:session-1/1")
TOKENS = sequence(1, 32)


@pytest.fixture
def world() -> World:
    world = World()
    world.insert(TOKENS)
    return world


def reported(world: World, instance: TierId = GPU) -> list[bool]:
    """Of each cached page of `TOKENS`, whether the instance reported it."""
    flags: list[bool] = []
    for node in world.tree.match(world.namespace, TOKENS).nodes:
        nothing = np.zeros(node.num_pages, np.bool_)
        flags += world.tree.reported(node).get(instance, nothing).tolist()
    return flags


def test_a_report_is_about_pages_and_is_shown(world: World) -> None:
    assert world.tree.report(GPU, world.namespace, TOKENS[:21], resident=True, first_page=2) == 3
    assert reported(world) == [False, False, True, True, True, False, False, False]
    assert reported(world, OTHER_GPU) == [False] * 8
    (info,) = next(world.tree.walk())
    assert info.reported == {GPU: 3}
    assert world.tree.report(GPU, world.namespace, TOKENS[:16], resident=False) == 4
    assert reported(world) == [False, False, False, False, True, False, False, False]
    world.tree.check_integrity()


def test_only_pages_of_the_very_namespace_are_noted(world: World) -> None:
    other = make_namespace(tenant="other")
    world.tree.publish(world.namespace, TOKENS)
    assert world.tree.report(GPU, other, TOKENS, resident=True) == 0
    assert world.tree.report(GPU, world.namespace, [*TOKENS[:8], *sequence(7, 24)], resident=True) == 2
    assert world.tree.report(GPU, world.namespace, sequence(7, 24), resident=True) == 0
    assert world.tree.report(GPU, world.namespace, TOKENS[:3], resident=True) == 0
    assert reported(world) == [True, True] + [False] * 6


def test_reports_survive_splits_and_merges(world: World) -> None:
    world.tree.report(GPU, world.namespace, TOKENS[:12], resident=True, first_page=1)
    world.tree.report(OTHER_GPU, world.namespace, TOKENS, resident=True, first_page=6)
    expected = [False, True, True, False, False, False, False, False]
    lease = None
    for end in (8, 20, 24, 4):
        lease = world.tree.lease(world.tree.match(world.namespace, TOKENS[:end]), owner="o", deadline=None, now=1.0)
        assert reported(world) == expected
        assert reported(world, OTHER_GPU) == [False] * 6 + [True] * 2
        world.tree.check_integrity()
        world.tree.release(lease)
        assert reported(world) == expected
        world.tree.check_integrity()
    assert world.tree.num_nodes <= 3


def test_reports_end_with_the_session_and_with_the_pages(world: World) -> None:
    node = world.tree.match(world.namespace, TOKENS).nodes[0]
    world.tree.report_node(GPU, node, resident=True)
    world.tree.report(OTHER_GPU, world.namespace, TOKENS[:8], resident=True)
    assert world.tree.aside_bytes > 0
    assert world.tree.drop_instance(GPU) == 8
    assert world.tree.drop_instance(GPU) == 0
    assert reported(world) == [False] * 8
    world.tree.evict(node, HOST, 7)
    assert reported(world, OTHER_GPU) == [True]
    world.tree.flush()
    world.insert(TOKENS)
    assert reported(world, OTHER_GPU) == [False] * 8, "these are other pages"
    assert world.tree.aside_bytes == 0
    with pytest.raises(NotResident):
        world.tree.report_node(GPU, node, resident=True)


def test_a_report_is_no_copy(world: World) -> None:
    """Neither a source, nor part of the closure, nor a use, nor a reason to stay."""
    node = world.tree.match(world.namespace, TOKENS).nodes[0]
    victims, used = world.tree.victims(HOST, 8, 1.0), node.last_access
    world.tree.report_node(GPU, node, resident=True)
    assert (world.tree.victims(HOST, 8, 1.0), node.last_access, world.tree.num_nodes) == (victims, used, 1)
    with pytest.raises(BadRequest, match="tier"):
        world.tree.start_move(node, source=GPU, target=NVME, slots=range(8))
    for method in (node.residency, node.slots, world.tree.occupancy):
        with pytest.raises(BadRequest, match="tier"):
            method(GPU)
    assert [tier for tier in world.tree.tiers if node.is_pinned(tier)] == []
    world.tree.evict(node, HOST)
    assert world.matched(TOKENS) == 0


BAD_NAMES: Final = [
    "", "host", DEVICE, "device:", "device:a", "device:a/", "device:/0", "device:a/x", "device:a b/0", "device:a/0\n",
    "nvme:a/0", "device:a/b/0", f"device:{'a' * 300}/0", 7, None,
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_NAMES)
def test_an_instance_is_named_by_session_and_rank(world: World, bad: Any) -> None:
    before = world.digest()
    node: Node = world.tree.match(world.namespace, TOKENS).nodes[0]
    calls: list[Callable[[], object]] = [
        lambda: world.tree.report(bad, world.namespace, TOKENS, resident=True),
        lambda: world.tree.report_node(bad, node, resident=True),
    ]
    for call in calls:
        with pytest.raises(BadRequest) as caught:
            call()
        assert caught.value.field == "instance"
    assert world.digest() == before


def test_bad_input_is_refused(world: World) -> None:
    for first_page in (-1, 9):
        with pytest.raises(BadRequest, match="first_page"):
            world.tree.report(GPU, world.namespace, TOKENS, resident=True, first_page=first_page)
    with pytest.raises(BadRequest, match="tokens"):
        world.tree.report(GPU, world.namespace, [-1, 2, 3, 4], resident=True)
    other = World()
    with pytest.raises(BadRequest, match="another tree"):
        other.tree.report_node(GPU, world.tree.match(world.namespace, TOKENS).nodes[0], resident=True)
