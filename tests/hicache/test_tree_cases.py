"""Cases from the field that the tree alone can show, by their number in the collection of such reports.

C04 and the like speak of bytes; here only what the tree offers is looked at. "P" is the page size, "held" a move that
has not been finished.
"""

import random

import pytest

from hicache.errors import BadRequest, LeaseExpired, NoRoom
from hicache.node import Node
from hicache.residency import Residency
from hicache.tier import DEVICE, HOST, NVME, TierId
from hicache.tree import HiRadixTree
from tests.hicache.trees import World, make_namespace, sequence


def demote(world: World, node: Node, source: TierId, target: TierId, ok: list[bool] | None = None) -> None:
    """A whole move, and the copy it was for leaves the source."""
    slots = world.slots(target, node.num_pages)
    move = world.tree.start_move(node, source=source, target=target, slots=slots)
    finished = world.tree.finish_move(move, ok or [True] * node.num_pages)
    for piece in finished.nodes:
        world.tree.evict(piece, source)
    world.tree.check_integrity()


def make_room(world: World, tier: TierId, num_pages: int) -> int:
    """Evict at least `num_pages` pages, tails first; returns how many left."""
    freed = 0
    while freed < num_pages and (victims := world.tree.victims(tier, num_pages - freed, world.now)):
        for node in victims:
            take = min(node.num_pages, num_pages - freed)
            freed += len(world.tree.evict(node, tier, take)[tier])
            world.tree.check_integrity()
    return freed


def test_c02_identities_that_differ_in_one_field_never_match() -> None:
    world = World(page_size=16)
    tokens = sequence(1, 64)
    tree = world.tree
    stored = make_namespace(16, salt=b"X")
    tree.insert(stored, tokens, tier=HOST, slots=[0, 1, 2, 3], now=1.0)
    for other in (
        make_namespace(16, adapter="X"),
        make_namespace(16),
        make_namespace(16, salt=b"X", adapter="X"),
        make_namespace(16, tenant="X"),
    ):
        assert tree.match(other, tokens).num_tokens == 0
    assert tree.match(stored, tokens).num_tokens == 64
    parts = ["a:b", "c", "a", "b:c", "a:b:c", "", "a\0b", "a\nb", "a/b", "a|b"]
    for number, (tenant, adapter) in enumerate((one, other) for one in parts for other in parts):
        namespace = make_namespace(16, tenant=tenant, adapter=adapter)
        assert tree.match(namespace, tokens).num_tokens == 0
        tree.insert(namespace, tokens, tier=HOST, slots=range(4 + 4 * number, 8 + 4 * number), now=2.0)
        match = tree.match(namespace, tokens)
        assert (match.num_tokens, match.owner) == (64, namespace.digest)
    infos = [info for batch in tree.walk() for info in batch]
    assert len({info.namespace for info in infos}) == len(infos) == 101
    tree.check_integrity()


def test_c04_a_page_with_a_missing_part_ends_the_prefix() -> None:
    """A page arrives when all its parts have: the caller reports a page whose companion part failed as failed."""
    world = World(page_size=16)
    tokens = sequence(1, 64)
    node = world.insert(tokens, NVME).node
    main, companion = [True] * 4, [True, False, True, True]
    move = world.tree.start_move(node, source=NVME, target=HOST, slots=[10, 11, 12, 13])
    finished = world.tree.finish_move(move, [one and other for one, other in zip(main, companion, strict=True)])
    usable = 0
    for piece in world.tree.path(node):
        if piece.residency(HOST) is not Residency.RESIDENT:
            break
        usable += piece.num_pages * 16
    assert usable == 16
    assert finished.freed[HOST].tolist() == [11]
    assert world.matched(tokens) == 64, "the copy below is still there"
    for missing in world.tree.path(node):
        if missing.residency(HOST) is Residency.ABSENT:
            again = world.tree.start_move(missing, source=NVME, target=HOST, slots=[11])
            world.tree.finish_move(again, [True])
    assert world.tree.occupancy(HOST).resident == 4
    world.tree.check_integrity()


def test_c05_a_copy_is_read_from_its_source_until_it_is_whole() -> None:
    world = World(page_size=16, tiers=(HOST, NVME))
    tokens = sequence(1, 128)
    node = world.insert(tokens, HOST).node
    move = world.tree.start_move(node, source=HOST, target=NVME, slots=range(8))
    upper, _ = world.tree.split(node, 3)
    for piece in (upper, node):
        assert piece.residency(HOST) is Residency.RESIDENT
        assert piece.residency(NVME) is Residency.ARRIVING, "not to be read yet"
        assert not world.tree.can_evict(piece, HOST)
    assert world.matched(tokens) == 128
    for piece in world.tree.finish_move(move, [True] * 8).nodes:
        world.tree.evict(piece, HOST)
    match = world.tree.match(world.namespace, tokens)
    assert match.num_tokens == 128
    assert {each.residency(NVME) for each in match.nodes} == {Residency.RESIDENT}
    assert world.tree.occupancy(HOST).total == 0
    world.tree.check_integrity()


@pytest.mark.parametrize(("source", "target"), [(HOST, DEVICE), (DEVICE, HOST)])
def test_c06_c08_the_source_of_a_copy_is_not_handed_out(source: TierId, target: TierId) -> None:
    world = World(page_size=16, tiers=(DEVICE, HOST))
    tokens = sequence(1, 64)
    node = world.insert(tokens, source).node
    move = world.tree.start_move(node, source=source, target=target, slots=world.slots(target, 4))
    for i in range(4):
        world.insert(sequence(10 + i, 32), source)
    assert make_room(world, source, 100) == 8, "everything but what is being copied"
    assert node.residency(source) is Residency.RESIDENT
    finished = world.tree.finish_move(move, [True] * 4)
    assert finished.freed == {}
    assert make_room(world, source, 100) == 4
    assert world.matched(tokens) == 64


@pytest.mark.parametrize(("source", "target"), [(HOST, NVME), (NVME, HOST)])
@pytest.mark.parametrize("cut", [False, True])
def test_c07_removed_stays_removed(source: TierId, target: TierId, cut: bool) -> None:
    world = World(page_size=16)
    tokens = sequence(1, 64)
    node = world.insert(tokens, source).node
    move = world.tree.start_move(node, source=source, target=target, slots=world.slots(target, 4))
    if cut:
        world.tree.split(node, 2)
    removed = world.tree.remove(world.namespace, tokens, first_page=0)
    assert (removed.num_pages, removed.num_pending, removed.freed, removed.held) == (4, 8, {}, ())
    assert world.matched(tokens) == 0
    world.tree.check_integrity()
    second = world.insert(tokens, source)
    assert second.num_stored == 4, "it can be put again while the move still runs"
    finished = world.tree.finish_move(move, [True] * 4)
    assert finished.nodes == ()
    assert {tier: sorted(slots.tolist()) for tier, slots in finished.freed.items()} == {
        source: [0, 1, 2, 3],
        target: [0, 1, 2, 3],
    }
    world.tree.check_integrity()
    assert world.matched(tokens) == 64
    assert second.node.slots(source).tolist() == [4, 5, 6, 7]
    assert world.tree.occupancy(target).total == 0


def test_c09_a_lease_that_outlived_its_deadline_says_so() -> None:
    """What was read under it counts only if the lease is still there afterwards."""
    world = World(page_size=16, tiers=(HOST,))
    for number in range(3):
        world.insert(sequence(number, 64))
    now = world.now
    leases = [
        world.tree.lease(world.tree.match(world.namespace, sequence(i, 64)), owner="1", deadline=now + d, now=now)
        for i, d in enumerate((0.5, 60.0, 0.5))
    ]
    assert make_room(world, HOST, 4) == 0
    assert world.tree.expire(now + 1.0) == [leases[0], leases[2]]
    assert make_room(world, HOST, 8) == 8, "others take the pages"
    world.insert(sequence(8, 128))
    for expired in (leases[0], leases[2]):
        assert expired.node is None
        with pytest.raises(LeaseExpired):
            world.tree.renew(expired, now + 9.0, now=now + 1.0)
        with pytest.raises(LeaseExpired):
            world.tree.move_lease(expired, world.tree.match(world.namespace, sequence(8, 128)), now + 1.0)
    world.tree.renew(leases[1], now + 90.0, now=now + 1.0)
    assert leases[1].node is not None
    assert world.matched(sequence(1, 64)) == 64
    world.tree.check_integrity()


def test_c10_c13_a_page_that_failed_to_arrive_is_not_offered_there() -> None:
    world = World(page_size=16)
    tokens = sequence(1, 64)
    node = world.insert(tokens, HOST).node
    move = world.tree.start_move(node, source=HOST, target=NVME, slots=[20, 21, 22, 23])
    finished = world.tree.finish_move(move, [True, True, False, True])
    assert finished.freed[NVME].tolist() == [22]
    for piece in finished.nodes:
        if world.tree.can_evict(piece, HOST):
            world.tree.evict(piece, HOST)
    failed = [piece for piece in world.tree.path(node) if piece.residency(NVME) is Residency.ABSENT]
    assert [piece.residency(HOST) for piece in failed] == [Residency.RESIDENT], "the source stays"
    world.tree.forget(failed[0], HOST, 0)
    assert world.matched(tokens) == 32, "no page is offered after one that is lost"
    assert world.tree.occupancy(NVME).resident == 2
    world.tree.check_integrity()


def test_c12_a_failed_transfer_leaves_nothing_locked_and_can_be_repeated() -> None:
    world = World(page_size=16, tiers=(HOST, NVME))
    tokens, other = sequence(1, 64), sequence(2, 64)
    node, neighbour = world.insert(tokens, NVME).node, world.insert(other, NVME).node
    for attempt in range(2):
        slots = world.slots(HOST, 4)
        move = world.tree.start_move(node, source=NVME, target=HOST, slots=slots)
        finished = world.tree.finish_move(move, [True, True, False, False])
        assert finished.freed[HOST].tolist() == slots[2:].tolist()
        assert not any(each.is_pinned(tier) for each in world.tree.path(node) for tier in (HOST, NVME))
        assert [each.num_pages * 16 for each in finished.nodes] == [32], "usable at once"
        demote(world, neighbour, *((NVME, HOST) if attempt == 0 else (HOST, NVME)))
        world.tree.evict(finished.nodes[0], HOST)
        assert world.tree.num_nodes == 2, "the halves are one again"
    move = world.tree.start_move(node, source=NVME, target=HOST, slots=world.slots(HOST, 4))
    assert world.tree.finish_move(move, [True] * 4).freed == {}
    assert node.residency(HOST) is Residency.RESIDENT
    assert node.num_pages == 4


def test_c14_eviction_frees_what_was_asked_for_and_the_oldest_first() -> None:
    world = World(tiers=(HOST,))
    for i in range(20):
        world.insert(sequence(i, 4))
    assert make_room(world, HOST, 3) == 3
    assert [i for i in range(20) if world.matched(sequence(i, 4)) == 0] == [0, 1, 2]


@pytest.mark.parametrize("tiers", [(HOST,), (HOST, NVME)])
def test_c14_a_round_evicts_no_more_with_a_slower_tier(tiers: tuple[TierId, ...]) -> None:
    world = World(tiers=tiers)
    number = 0
    for _ in range(40):
        while world.tree.occupancy(HOST).total < 90:
            number += 1
            world.insert(sequence(number, 4 * (1 + number % 7)))
        before = world.tree.occupancy(HOST).total
        freed = make_room(world, HOST, 5)
        assert freed == 5
        assert world.tree.occupancy(HOST).total == before - 5


def test_c15_children_leave_before_their_parent() -> None:
    world = World(page_size=16, tiers=(HOST,))
    shared = sequence(0, 32)
    one, other = [*shared, *sequence(1, 32)], [*shared, *sequence(2, 32)]
    world.insert(one)
    leaf = world.insert(other, first_page=2).node
    shared_node = leaf.parent
    assert shared_node is not None
    assert shared_node.num_pages == 2
    assert not world.tree.can_evict(shared_node, HOST)
    with pytest.raises(BadRequest):
        world.tree.evict(shared_node, HOST)
    while make_room(world, HOST, 1):
        pages = sum(info.num_pages for batch in world.tree.walk() for info in batch)
        assert world.tree.occupancy(HOST).total == pages
        assert all(info.node.parent is None or info.node.parent.is_live for b in world.tree.walk() for info in b)
    assert world.matched(one) == world.matched(other) == 0
    world.insert(one)
    assert world.matched(one) == 64


def test_c15_a_hole_in_one_tier_is_filled_by_another() -> None:
    world = World(page_size=16, tiers=(HOST, NVME))
    shared = sequence(0, 32)
    one, other = [*shared, *sequence(1, 32)], [*shared, *sequence(2, 32)]
    for tokens in (one, other):
        world.insert(tokens)
        world.insert(tokens, NVME)
    shared_node = world.tree.match(world.namespace, shared).nodes[0]
    assert shared_node.num_pages == 2
    world.tree.evict(shared_node, HOST)
    world.tree.check_integrity()
    assert world.matched(one) == world.matched(other) == 64
    again = world.insert(one)
    assert (again.num_stored, len(again.duplicates)) == (2, 2)


def test_c16_a_search_does_not_go_on_below_a_partly_matched_run() -> None:
    world = World(page_size=4)
    tokens = list(range(1, 17))
    world.insert(tokens)
    asked = [[*tokens[:8], 99, *tokens[9:]], tokens[:3], tokens[:4], [*tokens, 17, 18, 19, 20], tokens[4:]]
    assert [world.matched(each) for each in asked] == [8, 0, 4, 16, 0]
    world.insert([*tokens[:8], *range(50, 58)])
    assert world.matched([*tokens[:8], *range(50, 54), *tokens[12:]]) == 12


def test_c16_reserved_pages_that_were_never_filled_are_not_offered() -> None:
    world = World(page_size=4)
    tokens = sequence(1, 16)
    node = world.insert(tokens[:8], HOST).node
    move = world.tree.start_move(node, source=HOST, target=DEVICE, slots=[0, 1])
    assert node.residency(DEVICE) is Residency.ARRIVING
    finished = world.tree.finish_move(move, [False, False])
    assert finished.freed[DEVICE].tolist() == [0, 1]
    assert node.residency(DEVICE) is Residency.ABSENT
    assert world.matched(tokens) == 8


def test_c17_leases_that_nobody_ends_expire() -> None:
    world = World(page_size=16, tiers=(HOST,))
    pick = random.Random(17)
    sequences = [sequence(i, 64) for i in range(16)]
    for tokens in sequences:
        world.insert(tokens)
    most = 0
    for number in range(1000):
        now = world.tick()
        match = world.tree.match(world.namespace, pick.choice(sequences))
        world.tree.lease(match, owner=str(number), deadline=now + 20.0, now=now)
        world.tree.expire(now)
        most = max(most, world.tree.num_leases)
    assert most <= 20
    assert len(world.tree.expire(world.now + 20.0)) == most
    assert world.tree.num_leases == 0
    assert world.tree.expire(world.now + 1e9) == []
    assert make_room(world, HOST, 64) == 64
    world.tree.check_integrity()


def test_c18_a_second_release_does_nothing() -> None:
    world = World(page_size=16, tiers=(HOST,))
    node = world.insert(sequence(1, 64)).node
    one = world.tree.lease(node, owner="client 1", deadline=None, now=1.0)
    two = world.tree.lease(node, owner="client 2", deadline=None, now=1.0)
    assert one.generation != two.generation
    for _ in range(2):
        world.tree.release(one, owner="client 1")
    assert node.num_leases == 1
    assert world.tree.victims(HOST, 4, 2.0) == []
    with pytest.raises(BadRequest):
        world.tree.evict(node, HOST)
    world.tree.release(two)
    assert node.num_leases == 0
    assert sorted(world.tree.evict(node, HOST)[HOST].tolist()) == [0, 1, 2, 3]
    world.tree.check_integrity()


def test_c18_a_move_ends_once() -> None:
    world = World(page_size=16)
    for number in range(200):
        node = world.insert(sequence(number, 32)).node
        move = world.tree.start_move(node, source=HOST, target=NVME, slots=world.slots(NVME, 2))
        outcomes = [[True, True], [False, False]]
        random.Random(number).shuffle(outcomes)
        first = world.tree.finish_move(move, outcomes[0])
        second = world.tree.finish_move(move, outcomes[1])
        assert (len(first.nodes), len(first.freed)) == ((1, 0) if outcomes[0][0] else (0, 1))
        assert second == ((), {})
        world.tree.check_integrity()


def test_c18_no_slot_is_given_back_twice() -> None:
    """Removed under a pin and a move at once: each slot comes back once, from whichever ends last."""
    world = World(page_size=16)
    node = world.insert(sequence(1, 32)).node
    pins = [world.tree.pin([node, node], HOST), world.tree.pin([node], HOST)]
    move = world.tree.start_move(node, source=HOST, target=NVME, slots=[7, 8])
    assert world.tree.flush().freed == {}
    back = [world.tree.unpin(pins[0]), world.tree.finish_move(move, [True, False]).freed, world.tree.unpin(pins[1])]
    back += [world.tree.unpin(pins[0]), world.tree.unpin(pins[1]), world.tree.finish_move(move, [True, True]).freed]
    assert [{tier: slots.tolist() for tier, slots in freed.items()} for freed in back] == [
        {}, {NVME: [7, 8]}, {HOST: [0, 1]}, {}, {}, {},
    ]
    world.tree.check_integrity()


def test_c20_cancelled_moves_give_their_slots_back() -> None:
    world = World(page_size=16, tiers=(HOST, NVME))
    moves = []
    for number in range(32):
        node = world.insert(sequence(number, 256), NVME).node
        moves.append(world.tree.start_move(node, source=NVME, target=HOST, slots=world.slots(HOST, 16)))
    assert world.tree.occupancy(HOST).arriving == 512
    freed = [slot for move in moves for slot in world.tree.finish_move(move, [False] * 16).freed[HOST].tolist()]
    assert sorted(freed) == list(range(512))
    assert world.tree.occupancy(HOST).total == 0
    for number in range(32):
        node = world.tree.match(world.namespace, sequence(number, 256)).nodes[-1]
        demote(world, node, NVME, HOST)
    assert world.tree.occupancy(HOST).resident == 512


def test_c19_abandoned_pages_are_free_at_once_and_never_seen() -> None:
    """A writer reserves four pages, fills two, and is gone: whoever comes next puts all of it."""
    world = World(page_size=16)
    tokens = sequence(1, 64)
    node = world.insert(tokens).node
    move = world.tree.start_move(node, source=HOST, target=NVME, slots=[90, 91, 92, 93])
    assert world.tree.occupancy(NVME).resident == 0, "nothing is visible before it is written"
    finished = world.tree.finish_move(move, [True, True, False, False])
    assert finished.freed[NVME].tolist() == [92, 93]
    assert world.tree.occupancy(NVME).total == 2
    world.tree.check_integrity()
    # Slots that were reserved and never given to the tree are none of its business: another may put the same pages.
    inserted = world.insert(tokens, NVME)
    assert (inserted.num_stored, len(inserted.duplicates)) == (2, 2)
    assert world.matched(tokens) == 64
    for number in range(50):
        prompt = sequence(100 + number, 64)
        node = world.insert(prompt).node
        move = world.tree.start_move(node, source=HOST, target=DEVICE, slots=range(100, 104))
        assert world.tree.finish_move(move, [False] * 4).freed[DEVICE].tolist() == [100, 101, 102, 103]
    assert world.tree.occupancy(DEVICE).total == 0
    world.tree.check_integrity()


def test_c20_of_two_identical_pending_puts_one_may_be_cancelled() -> None:
    world = World(page_size=16)
    tokens = sequence(1, 64)
    node = world.insert(tokens).node
    first = world.tree.start_move(node, source=HOST, target=NVME, slots=[0, 1, 2, 3])
    before = world.digest()
    with pytest.raises(BadRequest, match="target: nvme already has, or awaits, a copy of the node"):
        world.tree.start_move(node, source=HOST, target=NVME, slots=[4, 5, 6, 7])
    assert world.digest() == before, "the second put keeps its slots"
    assert world.tree.finish_move(first, [False] * 4).freed[NVME].tolist() == [0, 1, 2, 3]
    again = world.tree.start_move(node, source=HOST, target=NVME, slots=[4, 5, 6, 7])
    # A tail comes while the put of what is before it is still pending; that one is cancelled, the tail's is not.
    longer = [*tokens, *sequence(2, 32)]
    tail = world.insert(longer, first_page=4).node
    assert tail is not node
    behind = world.tree.start_move(tail, source=HOST, target=NVME, slots=[8, 9])
    assert world.tree.finish_move(again, [False] * 4).freed[NVME].tolist() == [4, 5, 6, 7]
    assert world.tree.finish_move(behind, [True, True]).nodes == (tail,)
    world.tree.check_integrity()
    retried = world.tree.start_move(node, source=HOST, target=NVME, slots=[0, 1, 2, 3])
    world.tree.finish_move(retried, [True] * 4)
    assert world.matched(longer) == 96
    slots = [slot for step in world.tree.match(world.namespace, longer).nodes for slot in step.slots(NVME).tolist()]
    assert slots == [0, 1, 2, 3, 8, 9]


def test_c23_what_is_larger_than_the_budget_is_refused_and_throws_nothing_out() -> None:
    world = World(page_size=16, tiers=(HOST,))
    world.tree = HiRadixTree(page_size=16, tiers=(HOST,), metadata_bytes=8_000)
    for number in range(5):
        world.insert(sequence(number, 16))
    before = world.digest()
    with pytest.raises(NoRoom, match="metadata"):
        world.insert(sequence(50, 16 * 200))
    assert world.digest() == before
    for number in range(100):
        num_pages = (7, 9, 400)[number % 3]
        try:
            inserted = world.insert(sequence(100 + number, 16 * num_pages))
        except NoRoom:
            assert num_pages == 400
        else:
            assert (inserted.num_stored, num_pages < 10) == (num_pages, True), "the count accepted is told"
        assert world.tree.metadata_bytes <= 8_000
    assert world.tree.num_nodes > 5


def test_c27_a_flush_clears_what_is_under_way_and_names_what_it_could_not_clear() -> None:
    world = World(page_size=16)
    for tier in (DEVICE, HOST, NVME):
        world.insert(sequence(1, 64), tier)
    two = world.insert(sequence(2, 64), HOST).node
    three = world.insert(sequence(3, 64), NVME).node
    moves = [
        world.tree.start_move(two, source=HOST, target=NVME, slots=world.slots(NVME, 4)),
        world.tree.start_move(three, source=NVME, target=HOST, slots=world.slots(HOST, 4)),
    ]
    match = world.tree.match(world.namespace, sequence(1, 32))
    lease = world.tree.lease(match, owner="client 2", deadline=None, now=9.0)
    removed = world.tree.flush()
    assert [node.num_pages for node in removed.held] == [2]
    assert removed.num_pages == 10
    assert removed.num_pending == 16
    assert [world.matched(sequence(number, 64)) for number in (1, 2, 3)] == [32, 0, 0]
    for move in moves:
        assert sum(map(len, world.tree.finish_move(move, [True] * 4).freed.values())) == 8
    world.tree.release(lease)
    assert world.tree.flush().held == ()
    assert world.tree.num_nodes == 0
    assert all(world.tree.occupancy(tier).total == 0 for tier in world.tree.tiers)
    world.tree.check_integrity()
