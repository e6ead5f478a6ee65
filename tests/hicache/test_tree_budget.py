"""The metadata budget: what leaves when it is reached, and what is refused."""

import sys

import numpy as np
import pytest

from hicache.errors import BadRequest, NoRoom
from hicache.metadata import NODE_BYTES, ORDER_BYTES, ROOT_BYTES
from hicache.tier import DEVICE, HOST, NVME, TierId
from hicache.tree import HiRadixTree
from tests.hicache.trees import World, make_namespace, sequence

PAGE = 4
NODE = NODE_BYTES + 2 * ORDER_BYTES + 4 * (PAGE + 1)
"""What a node of one page with one copy is counted as, under a budget."""


def budgeted(budget: int, tiers: tuple[TierId, ...] = (DEVICE, HOST, NVME)) -> World:
    world = World(page_size=PAGE, tiers=tiers)
    world.tree = HiRadixTree(page_size=PAGE, tiers=tiers, metadata_bytes=budget)
    return world


def test_an_insert_drops_the_least_recently_used_and_no_more_than_it_needs() -> None:
    world = budgeted(ROOT_BYTES + 10 * NODE)
    for number in range(10):
        assert world.insert(sequence(number, PAGE)).num_dropped == 0
    assert world.tree.metadata_bytes == ROOT_BYTES + 10 * NODE
    world.tree.touch(world.tree.match(world.namespace, sequence(0, PAGE)).nodes[0], world.tick())
    inserted = world.insert(sequence(10, PAGE))
    assert (inserted.num_dropped, inserted.freed[HOST].tolist()) == (1, [1])
    assert [number for number in range(11) if not world.matched(sequence(number, PAGE))] == [1]
    # Twice the tokens and slots of what is dropped: two more nodes leave, not three.
    inserted = world.insert(sequence(11, 2 * PAGE))
    assert inserted.freed[HOST].tolist() == [2, 3]
    assert world.tree.metadata_bytes <= ROOT_BYTES + 10 * NODE


def test_recency_is_over_all_tiers_and_all_namespaces() -> None:
    world = budgeted(3 * ROOT_BYTES + 3 * NODE + ORDER_BYTES + 4)
    others = [make_namespace(PAGE, tenant=str(number)) for number in range(2)]
    world.insert(sequence(1, PAGE), NVME)
    for slot, (tier, namespace) in enumerate(zip((DEVICE, HOST), others, strict=True)):
        world.tree.insert(namespace, sequence(1, PAGE), tier=tier, slots=[90 + slot], now=world.tick())
    world.insert(sequence(1, PAGE), DEVICE)
    inserted = world.insert(sequence(2, PAGE), HOST)
    assert {tier: slots.tolist() for tier, slots in inserted.freed.items()} == {DEVICE: [90]}
    inserted = world.insert(sequence(3, PAGE), HOST)
    assert {tier: slots.tolist() for tier, slots in inserted.freed.items()} == {HOST: [91]}
    inserted = world.insert(sequence(4, PAGE), HOST)
    assert inserted.freed == {}, "two namespaces have gone as well"


def test_tails_leave_before_heads() -> None:
    world = budgeted(ROOT_BYTES + 4 * NODE, tiers=(HOST,))
    head = sequence(0, PAGE)
    world.insert([*head, *sequence(1, PAGE)])
    world.insert([*head, *sequence(2, PAGE)])
    assert world.tree.num_nodes == 3
    dropped = [world.insert(sequence(3 + number, PAGE)).freed.get(HOST, np.empty(0)).tolist() for number in range(3)]
    assert dropped == [[], [1], [0, 3]], "the head, and the one tail it then has, are one node"
    assert world.matched(head) == 0


def test_what_is_leased_pinned_or_moving_stays() -> None:
    world = budgeted(ROOT_BYTES + 4 * NODE + ORDER_BYTES + 4)
    nodes = [world.insert(sequence(number, PAGE)).node for number in range(4)]
    lease = world.tree.lease(nodes[0], owner="o", deadline=None, now=world.now)
    pin = world.tree.pin([nodes[1]], HOST)
    move = world.tree.start_move(nodes[2], source=HOST, target=NVME, slots=[50])
    assert world.insert(sequence(5, PAGE)).freed[HOST].tolist() == [3]
    before = world.digest()
    world.tree.touch(world.tree.match(world.namespace, sequence(5, PAGE)).nodes[0], world.now)
    keep = world.tree.pin([world.tree.match(world.namespace, sequence(5, PAGE)).nodes[0]], HOST)
    with pytest.raises(NoRoom, match=r"metadata: \d+ bytes asked of a budget of \d+") as caught:
        world.insert(sequence(6, PAGE))
    assert (caught.value.tier, caught.value.pages_asked) == ("metadata", 1)
    assert world.digest() == before, "a refused insert changed the tree"
    world.tree.check_integrity()
    world.tree.unpin(keep)
    world.tree.finish_move(move, [True])
    world.tree.unpin(pin)
    world.tree.release(lease)
    freed = world.insert(sequence(6, PAGE)).freed
    assert {tier: slots.tolist() for tier, slots in freed.items()} == {HOST: [0]}


def test_the_path_of_an_insert_is_never_what_leaves_for_it() -> None:
    world = budgeted(ROOT_BYTES + 2 * NODE, tiers=(HOST,))
    old = sequence(1, PAGE)
    world.insert(old)
    world.insert(sequence(2, PAGE))
    inserted = world.insert([*old, *sequence(3, PAGE)], first_page=1)
    assert inserted.freed[HOST].tolist() == [1], "the older one is the insert's own"
    assert world.matched([*old, *sequence(3, PAGE)]) == 2 * PAGE
    with pytest.raises(NoRoom):
        world.insert(sequence(4, 400 * PAGE))
    with pytest.raises(NoRoom):
        world.insert([*old, *sequence(5, 400 * PAGE)], first_page=1)
    assert world.matched([*old, *sequence(3, PAGE)]) == 2 * PAGE


def test_what_adds_nothing_drops_nothing() -> None:
    world = budgeted(ROOT_BYTES + 3 * NODE, tiers=(HOST,))
    for number in range(3):
        world.insert(sequence(number, PAGE))
    again = world.insert(sequence(0, PAGE))
    assert (again.freed, again.num_dropped, len(again.duplicates)) == ({}, 0, 1)


def test_one_page_always_fits_whoever_had_the_room() -> None:
    least = ROOT_BYTES + NODE_BYTES + 4 * ORDER_BYTES + 4 * (PAGE + 3)
    with pytest.raises(BadRequest, match=f"metadata_bytes: {least - 1} is not a number of bytes from {least} on"):
        budgeted(least - 1)
    for bad in (0, -1, 1e9, True, "1 GB"):
        with pytest.raises(BadRequest, match="metadata_bytes"):
            budgeted(bad)  # type: ignore[arg-type]  # on purpose
    world = budgeted(least)
    for number in range(6):
        namespace = make_namespace(PAGE, tenant=str(number))
        for slot, tier in enumerate((DEVICE, HOST, NVME)):
            inserted = world.tree.insert(
                namespace, sequence(1, PAGE), tier=tier, slots=[3 * number + slot], now=world.tick()
            )
            assert inserted.num_stored == 1
            assert inserted.num_dropped == (number > 0 and slot == 0)
            world.tree.check_integrity()


def test_splits_may_pass_the_budget_and_the_next_insert_makes_up_for_them() -> None:
    world = budgeted(ROOT_BYTES + 3 * NODE, tiers=(HOST,))
    node = world.insert(sequence(1, 20 * PAGE)).node
    for pages in range(1, 10):
        world.tree.split(node, 1)
        assert world.tree.num_nodes == pages + 1
    assert world.tree.metadata_bytes > world.tree.metadata_budget  # type: ignore[operator]  # there is one
    inserted = world.insert(sequence(2, PAGE))
    assert inserted.num_dropped > 5
    assert world.tree.metadata_bytes <= ROOT_BYTES + 3 * NODE


def test_without_a_budget_nothing_is_dropped_and_the_estimate_is_still_there() -> None:
    world = World(page_size=PAGE, tiers=(HOST,))
    assert world.tree.metadata_budget is None
    assert world.tree.metadata_bytes == 0
    for number in range(100):
        world.insert(sequence(number, PAGE))
    assert world.tree.metadata_bytes == ROOT_BYTES + 100 * (NODE - ORDER_BYTES)


def test_a_node_that_most_children_have_left_does_not_keep_their_room() -> None:
    world = World(page_size=PAGE, tiers=(HOST,))
    head = sequence(0, PAGE)
    world.tree.lease(world.insert(head), owner="o", deadline=None, now=1.0)
    nodes = [
        world.tree.insert(
            world.namespace, [*head, 7, 7, 7, number], tier=HOST, slots=[1 + number], first_page=1, now=1.0
        ).node
        for number in range(2000)
    ]
    parent = nodes[0].parent
    assert parent is not None
    large = sys.getsizeof(parent._children)
    for node in nodes[:-70]:
        world.tree.evict(node, HOST)
    world.tree.check_integrity()
    assert sys.getsizeof(parent._children) < large / 4
    assert len(parent.children) == 70
    for node in nodes[-70:]:
        world.tree.evict(node, HOST)
    world.tree.check_integrity()
    assert parent._children is None


def test_evicting_a_long_run_page_by_page_does_not_copy_what_stays() -> None:
    world = World(page_size=1, tiers=(HOST, NVME))
    num_pages = 5000
    node = world.insert(np.arange(num_pages)).node
    whole = node._slots
    for left in range(num_pages - 1, num_pages - 100, -1):
        (victim,) = world.tree.victims(HOST, 1, 9.0)
        assert world.tree.evict(victim, HOST, 1)[HOST].tolist() == [left]
        (node,) = world.tree.match(world.namespace, np.arange(num_pages)).nodes
        assert node._slots is whole, "the slots were copied"
        assert node.slots(HOST).tolist() == list(range(left))
    world.insert(np.arange(node.num_pages), NVME)
    assert node.slots(HOST).tolist() == node.slots(NVME).tolist() == list(range(node.num_pages))
    freed = world.tree.evict(node, HOST)[HOST]
    assert freed.tolist() == list(range(len(freed)))
    world.tree.check_integrity()
