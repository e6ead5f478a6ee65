"""What is refused: the error names the field, and the tree is as it was."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hicache.errors import BadRequest, HicacheError, LeaseExpired, NotResident
from hicache.tier import DEVICE, HOST, NVME, REMOTE, TierId
from hicache.tree import HiRadixTree
from tests.hicache.trees import World, sequence

TAPE = TierId("tape")


@pytest.fixture
def world() -> World:
    world = World()
    world.insert(sequence(1, 16))
    world.insert([*sequence(1, 8), *sequence(2, 8)])
    return world


BAD_TOKENS: dict[str, Any] = {
    "negative": [1, 2, 3, -4],
    "negative int32": np.array([1, 2, 3, -4], np.int32),
    "negative int64": np.array([1, 2, 3, -4], np.int64),
    "too large": [1, 2, 3, 2**31],
    "too large unsigned": np.array([1, 2, 3, 2**32 - 1], np.uint32),
    "far too large": [1, 2, 3, 2**80],
    "float": np.array([1.0, 2.0, 3.0, 4.0]),
    "float that is not a number": [1, 2, 3, float("nan")],
    "bool": np.array([True, False, True, False]),
    "text": "abcd",
    "list of text": ["a", "b", "c", "d"],
    "bytes": b"abcd",
    "two dimensions": np.zeros((2, 2), np.int32),
    "no dimension": 7,
    "ragged": [[1, 2], [3]],
    "nothing": None,
    "empty floats": np.empty(0),
}


@pytest.mark.parametrize("tokens", BAD_TOKENS.values(), ids=BAD_TOKENS.keys())
@pytest.mark.parametrize("method", ["match", "insert", "remove"])
def test_tokens_that_are_no_token_ids(world: World, tokens: Any, method: str) -> None:
    before = world.digest()
    calls: dict[str, Callable[[], object]] = {
        "match": lambda: world.tree.match(world.namespace, tokens),
        "insert": lambda: world.tree.insert(world.namespace, tokens, tier=HOST, slots=[50], now=9.0),
        "remove": lambda: world.tree.remove(world.namespace, tokens),
    }
    with pytest.raises(BadRequest) as caught:
        calls[method]()
    assert caught.value.field == "tokens"
    assert world.digest() == before
    world.tree.check_integrity()


def test_a_negative_token_after_a_match_is_refused(world: World) -> None:
    tokens = np.concatenate([sequence(1, 16), np.array([5, -1], np.int32)])
    with pytest.raises(BadRequest, match="index 1 is not within 0 to 2147483647"):
        world.tree.match(world.namespace, tokens)


BAD_SLOTS: dict[str, Any] = {
    "too few": [50],
    "too many": [50, 51, 52],
    "none": [],
    "negative": [50, -1],
    "one negative": [-7, 50],
    "twice": [50, 50],
    "beyond int32": [50, 2**31],
    "float": [50.0, 51.0],
    "two dimensions": [[50, 51]],
}


@pytest.mark.parametrize("slots", BAD_SLOTS.values(), ids=BAD_SLOTS.keys())
def test_slots_that_do_not_fit_the_pages(world: World, slots: Any) -> None:
    before = world.digest()
    tokens = [*sequence(1, 16), *sequence(3, 8)]
    with pytest.raises(BadRequest) as caught:
        world.tree.insert(world.namespace, tokens, tier=HOST, slots=slots, first_page=4, now=9.0)
    assert caught.value.field == "slots"
    node = world.tree.match(world.namespace, sequence(1, 16)).nodes[-1]
    with pytest.raises(BadRequest) as caught:
        world.tree.start_move(node, source=HOST, target=NVME, slots=slots)
    assert caught.value.field == "slots"
    assert world.digest() == before
    world.tree.check_integrity()


def test_unordered_slots_are_looked_at_for_duplicates(world: World) -> None:
    with pytest.raises(BadRequest, match="same slot"):
        world.tree.insert(world.namespace, sequence(5, 16), tier=HOST, slots=[63, 60, 61, 60], now=9.0)
    world.tree.insert(world.namespace, sequence(5, 16), tier=HOST, slots=[63, 60, 62, 61], now=9.0)
    world.tree.check_integrity()


@pytest.mark.parametrize("length", [0, 1, 3, 5, 15])
def test_only_whole_pages_are_inserted(world: World, length: int) -> None:
    before = world.digest()
    with pytest.raises(BadRequest, match=f"tokens: {length} tokens are not one or more whole pages of 4"):
        world.tree.insert(world.namespace, sequence(5, length), tier=HOST, slots=[50], now=9.0)
    assert world.digest() == before


@pytest.mark.parametrize("first_page", [-1, 5, 100])
def test_first_page_is_within_the_tokens(world: World, first_page: int) -> None:
    before = world.digest()
    with pytest.raises(BadRequest, match="first_page"):
        world.tree.insert(world.namespace, sequence(1, 16), tier=HOST, slots=[], first_page=first_page, now=9.0)
    with pytest.raises(BadRequest, match="first_page"):
        world.tree.remove(world.namespace, sequence(1, 16), first_page=first_page)
    assert world.digest() == before


def test_pages_before_first_page_must_be_known(world: World) -> None:
    before = world.digest()
    with pytest.raises(BadRequest, match="first_page: 3 is past the 2 pages that are in the tree"):
        world.tree.insert(
            world.namespace, [*sequence(1, 8), *sequence(7, 8)], tier=HOST, slots=[50], first_page=3, now=9.0
        )
    with pytest.raises(BadRequest, match="first_page"):
        world.tree.insert(world.namespace, sequence(9, 8), tier=HOST, slots=[50], first_page=1, now=9.0)
    assert world.digest() == before


@pytest.mark.parametrize("tier", [TAPE, REMOTE, None, 3, []])
def test_tiers_that_the_tree_does_not_have(world: World, tier: Any) -> None:
    before = world.digest()
    tree, node = world.tree, world.tree.match(world.namespace, sequence(1, 16)).nodes[-1]
    calls: list[Callable[[], object]] = [
        lambda: tree.insert(world.namespace, sequence(5, 4), tier=tier, slots=[50], now=9.0),
        lambda: tree.pin([node], tier),
        lambda: tree.start_move(node, source=tier, target=NVME, slots=[1, 2]),
        lambda: tree.start_move(node, source=HOST, target=tier, slots=[1, 2]),
        lambda: tree.evict(node, tier),
        lambda: tree.can_evict(node, tier),
        lambda: tree.forget(node, tier),
        lambda: tree.victims(tier, 1, 9.0),
        lambda: tree.occupancy(tier),
        lambda: node.residency(tier),
        lambda: node.slots(tier),
        lambda: node.is_pinned(tier),
    ]
    if tier is not None:
        calls.append(lambda: tree.flush(tier=tier))
    for call in calls:
        with pytest.raises(BadRequest) as caught:
            call()
        assert caught.value.field == "tier"
    assert world.digest() == before


def test_nodes_and_handles_of_another_tree(world: World) -> None:
    other = World()
    node = other.insert(sequence(1, 16)).node
    other_lease = other.tree.lease(node, owner="o", deadline=None, now=1.0)
    other_pin = other.tree.pin([node], HOST)
    other_move = other.tree.start_move(node, source=HOST, target=NVME, slots=[1, 2, 3, 4])
    before, other_before = world.digest(), other.digest()
    tree = world.tree
    tree.lease(tree.match(world.namespace, sequence(1, 8)), owner="o", deadline=None, now=1.0)
    own = world.digest()
    calls: list[tuple[type[HicacheError], Callable[[], object]]] = [
        (BadRequest, lambda: tree.lease(node, owner="o", deadline=None, now=1.0)),
        (BadRequest, lambda: tree.pin([node], HOST)),
        (BadRequest, lambda: tree.start_move(node, source=HOST, target=NVME, slots=[5, 6, 7, 8])),
        (BadRequest, lambda: tree.evict(node, HOST)),
        (BadRequest, lambda: tree.forget(node, HOST)),
        (BadRequest, lambda: tree.split(node, 1)),
        (BadRequest, lambda: tree.identities(node)),
        (LeaseExpired, lambda: tree.release(other_lease)),
        (LeaseExpired, lambda: tree.renew(other_lease, 9.0, now=1.0)),
        (LeaseExpired, lambda: tree.move_lease(other_lease, node, 1.0)),
        (BadRequest, lambda: tree.unpin(other_pin)),
        (BadRequest, lambda: tree.finish_move(other_move, [True] * 4)),
    ]
    for error, call in calls:
        with pytest.raises(error):
            call()
    assert (world.digest(), other.digest()) == (own, other_before)
    assert own != before
    world.tree.check_integrity()
    other.tree.check_integrity()


def test_a_lease_without_a_generation_in_this_tree(world: World) -> None:
    """The other tree's lease has a generation that this one never gave out."""
    other = World()
    node = other.insert(sequence(1, 8)).node
    for _ in range(3):
        lease = other.tree.lease(node, owner="o", deadline=None, now=1.0)
    with pytest.raises(LeaseExpired):
        world.tree.release(lease)


def test_a_deadline_is_a_number(world: World) -> None:
    node = world.tree.match(world.namespace, sequence(1, 16)).nodes[-1]
    before = world.digest()
    with pytest.raises(BadRequest, match="deadline"):
        world.tree.lease(node, owner="o", deadline=float("nan"), now=1.0)
    assert world.digest() == before
    lease = world.tree.lease(node, owner="o", deadline=5.0, now=1.0)
    with pytest.raises(BadRequest, match="deadline"):
        world.tree.renew(lease, float("nan"), now=1.0)
    assert lease.deadline == 5.0
    assert world.tree.expire(5.0) == [lease]


def test_leases_that_end_early_leave_nothing_behind(world: World) -> None:
    node = world.tree.match(world.namespace, sequence(1, 16)).nodes[-1]
    for number in range(1000):
        lease = world.tree.lease(node, owner="o", deadline=1e9 + number, now=1.0)
        world.tree.renew(lease, 2e9 + number, now=1.0)
        world.tree.release(lease)
    assert len(world.tree._deadlines) <= 66
    world.tree.check_integrity()


def test_what_is_in_use_is_not_evicted(world: World) -> None:
    tree = world.tree
    node = tree.match(world.namespace, sequence(1, 16)).nodes[-1]
    parent = node.parent
    assert parent is not None
    before = world.digest()
    with pytest.raises(NotResident, match="device"):
        tree.evict(node, DEVICE)
    with pytest.raises(BadRequest, match="still needed"):
        tree.evict(parent, HOST)
    for num_pages in (0, -1, 3):
        with pytest.raises(BadRequest, match="num_pages"):
            tree.evict(node, HOST, num_pages)
    assert world.digest() == before
    pin = tree.pin([node], HOST)
    with pytest.raises(BadRequest, match="a pin or a move"):
        tree.evict(node, HOST)
    assert tree.unpin(pin) == {}
    move = tree.start_move(node, source=HOST, target=NVME, slots=[50, 51])
    with pytest.raises(BadRequest, match="a pin or a move"):
        tree.evict(node, HOST)
    with pytest.raises(BadRequest, match="target"):
        tree.start_move(node, source=HOST, target=NVME, slots=[52, 53])
    with pytest.raises(BadRequest, match="target"):
        tree.start_move(node, source=HOST, target=HOST, slots=[52, 53])
    with pytest.raises(NotResident):
        tree.start_move(node, source=NVME, target=DEVICE, slots=[52, 53])
    with pytest.raises(BadRequest, match="ok: 1 values for 2 pages"):
        tree.finish_move(move, [True])
    tree.finish_move(move, [False, False])
    tree.evict(node, HOST)
    tree.check_integrity()


def test_pin_is_all_or_nothing(world: World) -> None:
    node = world.tree.match(world.namespace, sequence(1, 16)).nodes[-1]
    gone = world.insert(sequence(8, 8)).node
    world.tree.evict(gone, HOST)
    with pytest.raises(NotResident):
        world.tree.pin([node, gone], HOST)
    assert not node.is_pinned(HOST)
    world.tree.check_integrity()


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("page_size", {"page_size": 0, "tiers": (HOST,)}),
        ("page_size", {"page_size": -4, "tiers": (HOST,)}),
        ("page_size", {"page_size": 257, "tiers": (HOST,)}),
        ("page_size", {"page_size": 4.0, "tiers": (HOST,)}),
        ("page_size", {"page_size": True, "tiers": (HOST,)}),
        ("tiers", {"page_size": 4, "tiers": ()}),
        ("tiers", {"page_size": 4, "tiers": (HOST, HOST)}),
        ("tiers", {"page_size": 4, "tiers": tuple(TierId(f"t{i}") for i in range(9))}),
        ("policies", {"page_size": 4, "tiers": (HOST,), "policies": {NVME: None}}),
    ],
)
def test_a_tree_that_cannot_be(field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        HiRadixTree(**arguments)
    assert caught.value.field == field


def test_namespaces_that_are_none(world: World) -> None:
    before = world.digest()
    for namespace in (None, b"x" * 32, "ns"):
        bad: Any = namespace
        with pytest.raises(BadRequest) as caught:
            world.tree.match(bad, [1, 2, 3, 4])
        assert caught.value.field == "namespace"
        with pytest.raises(BadRequest):
            world.tree.insert(bad, [1, 2, 3, 4], tier=HOST, slots=[50], now=9.0)
    assert world.digest() == before


def test_a_namespace_of_another_page_size(world: World) -> None:
    """Its pages would be cut at other places than the tree's."""
    from tests.hicache.trees import make_namespace

    other = make_namespace(page_size=16)
    with pytest.raises(BadRequest, match="namespace: its pages have 16 tokens, the tree's have 4"):
        world.tree.insert(other, sequence(1, 16), tier=HOST, slots=[50, 51, 52, 53], now=9.0)
    assert world.tree.match(other, sequence(1, 16)).num_tokens == 0
