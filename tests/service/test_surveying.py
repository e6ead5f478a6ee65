"""What `Outline` and `Rank` tell of a tree: compared with all of it, however many looks it takes, and in bounded
memory."""

import asyncio
import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from hicache.clock import ManualClock
from hicache.errors import BadRequest, LeaseExpired
from hicache.node import Node
from hicache.results import NodeInfo
from hicache.service.dashboard import walk
from hicache.service.proto import hicache_pb2 as pb
from hicache.service.server import surveying
from hicache.service.server.boot import Boot
from hicache.service.server.surveying import MAX_OUTLINED, MAX_RANKED, Surveying
from hicache.service.server.walks import MAX_WALKS
from hicache.tier import HOST, NVME
from hicache.tree import HiRadixTree
from tests.hicache.trees import World, make_namespace

TENANTS = ("", "Red")


@pytest.fixture(params=[7, 10_000], ids=["many looks", "one look"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call meets so many nodes."""
    monkeypatch.setattr(walk, "STEP", request.param)
    monkeypatch.setattr(surveying, "LOOK_S", 0.0)


def forest(seed: int) -> World:
    """Some prompts of two tenants that share beginnings, some of them used."""
    pick, world = random.Random(seed), World(page_size=1, tiers=(HOST, NVME))
    namespaces = [make_namespace(1, tenant=tenant) for tenant in TENANTS]
    for _ in range(60):
        tokens = [pick.randrange(4) for _ in range(pick.randint(1, 9))]
        node = world.tree.insert(
            pick.choice(namespaces), tokens, tier=HOST, slots=world.slots(HOST, len(tokens)), now=world.tick()
        ).node
        if pick.random() < 0.5:
            world.tree.count_use(node)
            world.tree.touch(node, world.tick())
    return world


def surveying_of(world: World) -> Surveying:
    return Surveying(world.tree, ManualClock(world.now), Boot())


def outlined(surveys: Surveying, **begin: Any) -> pb.OutlineReply:
    """All calls of an outline."""
    request, seen = pb.OutlineRequest(**begin), 0
    while True:
        reply = asyncio.run(surveys.outline(request))
        assert reply.num_seen >= seen
        if not reply.walk:
            return reply
        assert not reply.branches
        seen, request = reply.num_seen, pb.OutlineRequest(walk=reply.walk)


def infos_of(tree: HiRadixTree) -> dict[Node, NodeInfo]:
    return {info.node: info for batch in tree.walk() for info in batch}


def below(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from below(child)


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("seed", range(8))
def test_an_outline_is_the_largest_branches(seed: int) -> None:
    world = forest(seed)
    infos = infos_of(world.tree)
    by_place = {(info.namespace, bytes(world.tree.tokens_of(node))): node for node, info in infos.items()}
    for max_branches, max_depth in ((MAX_OUTLINED, 0), (MAX_OUTLINED, 2), (12, 0), (5, 3), (1, 1)):
        reply = outlined(surveying_of(world), max_branches=max_branches, max_depth=max_depth, max_tokens=2)
        assert (reply.num_seen, reply.whole) == (len(infos), True)
        assert len(reply.branches) <= max_branches
        told: list[tuple[bytes, Node | None, int]] = []
        for branch in reply.branches:
            shown = branch.node
            if not branch.above:
                inside = [node for node, info in infos.items() if info.namespace == shown.namespace]
                told.append((shown.namespace, None, 0))
                assert shown.tenant in TENANTS
            else:
                digest, above, depth = told[branch.above - 1]
                assert digest == shown.namespace
                candidates = above.children if above is not None else [
                    node for node in by_place.values() if node.parent is None and node.namespace == digest
                ]  # fmt: skip
                (node,) = [each for each in candidates if world.tree.own_tokens_of(each, 2).tolist()
                           == np.frombuffer(shown.tokens, "<i4").tolist()]  # fmt: skip
                assert (shown.num_uses, shown.num_pages) == (node.num_uses, node.num_pages)
                assert (shown.first_page, list(shown.tiers)) == (infos[node].first_page, [pb.TIER_HOST])
                told.append((digest, node, depth + 1))
                inside = list(below(node))
            assert branch.total_nodes == len(inside)
            assert branch.total_pages == sum(node.num_pages for node in inside)
        # What is told is larger than what is not, and what is not is counted where it hangs.
        shown_nodes = {node for _, node, _ in told if node is not None}
        hidden = sum(branch.hidden_nodes for branch in reply.branches) + reply.hidden_nodes
        assert hidden == len(infos) - len(shown_nodes)
        hidden_pages = sum(branch.hidden_pages for branch in reply.branches) + reply.hidden_pages
        assert hidden_pages == sum(node.num_pages for node in infos if node not in shown_nodes)
        if max_depth:
            assert max(depth for _, _, depth in told) <= max_depth
        elif len(told) == max_branches:
            smallest = min(branch.total_pages for branch in reply.branches)
            others = [node for node in infos if node not in shown_nodes]
            assert max(sum(each.num_pages for each in below(node)) for node in others) <= smallest


class Seen(NamedTuple):
    """What a node is ranked by."""

    num_uses: int
    last_access: float
    num_pages: int
    num_leases: int


ORDERS: dict["pb.Order", Callable[[NodeInfo | Seen], Any]] = {
    pb.ORDER_USES: lambda info: (-info.num_uses, -info.last_access),
    pb.ORDER_LATEST: lambda info: -info.last_access,
    pb.ORDER_BYTES: lambda info: -info.num_pages,
    pb.ORDER_LEASES: lambda info: (-info.num_leases, -info.last_access),
}


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("order", ORDERS, ids=pb.Order.Name)
def test_a_ranking_is_what_sorting_all_gives(order: "pb.Order") -> None:
    world = forest(1)
    for tokens in ([0], [1, 2], [3, 3]):
        match = world.tree.match(make_namespace(1), tokens)
        if match.nodes:
            world.tree.lease(match, owner="me", deadline=None, now=world.now)
    infos, surveys = infos_of(world.tree), surveying_of(world)
    for contains in ("", "red", "RED HOST 1", make_namespace(1).digest.hex()[10:40], "host 2 3", "device"):
        wanted = sorted([info for info in infos.values() if _contains(world.tree, info, contains)], key=ORDERS[order])
        request = pb.RankRequest(order=order, max_nodes=9, contains=contains, max_tokens=4)
        for _ in range(40):
            reply = asyncio.run(surveys.rank(request))
            request.walk = reply.walk
            if reply.whole:
                break
        assert reply.whole
        assert reply.num_matched == len(wanted), contains
        told = [
            Seen(node.num_uses, world.now - node.age_ms / 1000, node.num_pages, node.num_leases) for node in reply.nodes
        ]
        assert [ORDERS[order](each) for each in told] == [ORDERS[order](info) for info in wanted[:9]]
        whole = {Seen(info.num_uses, info.last_access, info.num_pages, info.num_leases) for info in wanted}
        assert set(told) <= whole


def _contains(tree: HiRadixTree, info: NodeInfo, contains: str) -> bool:
    first = [str(token) for token in tree.own_tokens_of(info.node).tolist()[:4]]
    return contains.lower() in " ".join([info.namespace.hex(), info.tenant, "host", *first]).lower()


def test_a_round_goes_on_for_ever_and_shows_what_is_new() -> None:
    world = World(page_size=1, tiers=(HOST,))
    node = world.insert([1, 2]).node
    world.insert([3])
    surveys = surveying_of(world)
    request = pb.RankRequest(order=pb.ORDER_USES, max_nodes=1, max_tokens=1)
    for uses in range(1, 4):
        world.tree.count_use(node)
        reply = asyncio.run(surveys.rank(request))
        request.walk = reply.walk
        assert [(each.num_uses, each.tokens) for each in reply.nodes] == [(uses, np.int32(1).tobytes())]
    world.tree.evict(node, HOST)
    assert [each.tokens for each in asyncio.run(surveys.rank(request)).nodes] == [np.int32(3).tobytes()]


def test_what_leaves_during_a_walk_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "STEP", 1)
    monkeypatch.setattr(surveying, "LOOK_S", 0.0)
    world = World(page_size=1, tiers=(HOST,))
    gone = world.insert([1]).node
    world.insert([2])
    long = world.insert([5, 6, 7, 8]).node
    surveys = surveying_of(world)
    request = pb.OutlineRequest(max_branches=9)
    for _ in range(3):
        reply = asyncio.run(surveys.outline(request))
        request = pb.OutlineRequest(walk=reply.walk)
    world.tree.evict(gone, HOST)
    world.tree.split(long, 1)
    reply = asyncio.run(surveys.outline(pb.OutlineRequest(walk=reply.walk, end=True)))
    assert (reply.walk, reply.whole, reply.num_seen) == (0, False, 3)
    assert sorted((branch.node.first_page, branch.node.num_pages) for branch in reply.branches if branch.above) == [
        (0, 1), (1, 3),
    ]  # fmt: skip


def test_what_cannot_be_meant_is_refused() -> None:
    surveys = surveying_of(World(page_size=1, tiers=(HOST,)))
    for field, outline in (
        ("max_branches", pb.OutlineRequest()), ("max_branches", pb.OutlineRequest(max_branches=MAX_OUTLINED + 1)),
        ("max_tokens", pb.OutlineRequest(max_branches=1, max_tokens=65)),
    ):  # fmt: skip
        with pytest.raises(BadRequest, match=field):
            asyncio.run(surveys.outline(outline))
    for field, rank in (
        ("order", pb.RankRequest(max_nodes=1)), ("max_nodes", pb.RankRequest(order=pb.ORDER_USES)),
        ("max_nodes", pb.RankRequest(order=pb.ORDER_USES, max_nodes=MAX_RANKED + 1)),
        ("contains", pb.RankRequest(order=pb.ORDER_USES, max_nodes=1, contains=257 * "x")),
        ("max_tokens", pb.RankRequest(order=pb.ORDER_USES, max_nodes=1, max_tokens=65)),
    ):  # fmt: skip
        with pytest.raises(BadRequest, match=field):
            asyncio.run(surveys.rank(rank))
    with pytest.raises(LeaseExpired):
        asyncio.run(surveys.outline(pb.OutlineRequest(walk=1 << 40)))
    assert outlined(surveys, max_branches=1).whole


def test_of_many_outlines_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "STEP", 1)
    monkeypatch.setattr(surveying, "LOOK_S", 0.0)
    surveys = surveying_of(forest(2))
    walks = [asyncio.run(surveys.outline(pb.OutlineRequest(max_branches=9))).walk for _ in range(MAX_WALKS + 1)]
    with pytest.raises(LeaseExpired):
        asyncio.run(surveys.outline(pb.OutlineRequest(walk=walks[0])))
    assert asyncio.run(surveys.outline(pb.OutlineRequest(walk=walks[1], end=True))).num_seen == 1


def large_tree(num_nodes: int) -> World:
    """Of a thousand documents, with as many questions each as it takes."""
    world = World(page_size=4, tiers=(HOST,))
    for number in range(num_nodes - 1000):
        document, question = number % 1000, number // 1000
        tokens = np.concatenate([np.arange(16) + 100 * document, np.full(8, 1_000_000 + question)]).astype(np.int32)
        known = 4 if question else 0
        world.tree.insert(
            world.namespace, tokens, tier=HOST, slots=world.slots(HOST, 6 - known), first_page=known, now=1.0
        )
    return world


@pytest.mark.faults
def test_a_tree_of_any_size_takes_no_more_memory_than_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a look at 20,000 nodes takes beside the tree, and a look at 160,000."""
    monkeypatch.setattr(surveying, "LOOK_S", 0.0)
    monkeypatch.setattr(walk, "STEP", 5_000)
    peaks = []
    for num_nodes in (20_000, 160_000):
        surveys = surveying_of(large_tree(num_nodes))
        tracemalloc.start()
        try:
            reply = outlined(surveys, max_branches=2_000, max_depth=2, max_tokens=4)
            request = pb.RankRequest(order=pb.ORDER_BYTES, max_nodes=200, contains="1")
            ranked = asyncio.run(surveys.rank(request))
            while not ranked.whole:
                request.walk = ranked.walk
                ranked = asyncio.run(surveys.rank(request))
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert (reply.num_seen, len(reply.branches)) == (num_nodes, 2_000)
        assert ranked.num_matched == num_nodes
    assert max(peaks) < 8 << 20, peaks
    assert peaks[1] < 1.3 * peaks[0], peaks
