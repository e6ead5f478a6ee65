"""Publishing a prefix to other tenants: who reads what, and when that ends."""

import dataclasses

import pytest

from hicache.errors import BadRequest, NotResident
from hicache.namespace import Namespace
from hicache.results import Match
from hicache.tier import DEVICE, HOST, NVME
from tests.hicache.trees import Tokens, World, make_namespace, sequence

SYSTEM = sequence(1, 16)
READER = make_namespace(tenant="reader")


@pytest.fixture
def world() -> World:
    """A publisher's tree: a prefix of four pages, and two private continuations."""
    world = World()
    world.insert([*SYSTEM, *sequence(2, 8)])
    world.insert([*SYSTEM, *sequence(3, 8)])
    return world


def read(world: World, tokens: Tokens | list[int], reader: Namespace = READER) -> Match:
    before = world.digest()
    match = world.tree.match(reader, tokens)
    assert world.digest() == before
    return match


def test_other_tenants_match_what_is_published_and_nothing_below(world: World) -> None:
    prompt = [*SYSTEM, *sequence(2, 8)]
    assert read(world, prompt).num_tokens == 0
    node = world.tree.publish(world.namespace, SYSTEM)
    world.tree.check_integrity()
    match = read(world, prompt)
    assert (match.num_tokens, match.nodes[-1], match.pages_in_last) == (16, node, 4)
    assert match.owner == world.namespace.digest == match.nodes[0].namespace
    assert match.partial is None, "the page after it is private, though it is the same"
    assert [page.namespace for page in world.tree.identities(match.nodes[-1])] == [match.owner] * 4
    assert world.matched(prompt) == 24
    assert world.tree.match(READER, prompt, published=False).nodes == ()


def test_only_a_namespace_that_is_equal_in_everything_else_reads(world: World) -> None:
    world.tree.publish(world.namespace, SYSTEM)
    for field, value in {
        "model": "sha256:01", "tokenizer": "t", "adapter": "a", "adapter_generation": 1, "num_ranks": 2, "codec": "c",
        "salt": b"s", "pipeline_ranges": ((0, 1),),
    }.items():  # fmt: skip
        other = dataclasses.replace(READER, **{field: value})  # type: ignore[arg-type]  # one field of each type
        assert read(world, SYSTEM, other).nodes == ()
    assert read(world, SYSTEM).num_tokens == 16


def test_a_published_page_may_be_reused_in_part(world: World) -> None:
    world.tree.publish(world.namespace, [*SYSTEM, *sequence(2, 4)])
    world.tree.publish(world.namespace, [*SYSTEM, *sequence(3, 8)])
    # Within a run, and among children: of the three that begin alike, the published one that shares most.
    world.insert([*SYSTEM, 200_000, 200_001, 200_002, 7])
    match = read(world, [*SYSTEM[:10], 5, 5])
    assert (match.num_tokens, match.partial and match.partial.num_tokens) == (8, 2)
    match = read(world, [*SYSTEM, 200_000, 200_001, 200_002, 7])
    assert match.num_tokens == 16
    assert match.partial is not None
    assert match.partial.num_tokens == 3
    assert world.tree.tokens_of(match.partial.node)[16:20].tolist() == sequence(2, 4).tolist()
    assert read(world, [*SYSTEM, *sequence(2, 8)]).num_tokens == 20


def test_ones_own_pages_come_first_and_the_longest_wins(world: World) -> None:
    world.tree.publish(world.namespace, SYSTEM)
    other = make_namespace(tenant="other")
    world.tree.insert(other, [*SYSTEM, *sequence(9, 4)], tier=HOST, slots=range(100, 105), now=1.0)
    world.tree.publish(other, [*SYSTEM, *sequence(9, 4)])
    world.tree.insert(READER, SYSTEM, tier=HOST, slots=range(200, 204), now=1.0)
    assert read(world, SYSTEM).owner == READER.digest
    longest = read(world, [*SYSTEM, *sequence(9, 8)])
    assert (longest.num_tokens, longest.owner) == (20, other.digest)
    assert read(world, [*SYSTEM, 900_000, 900_001, 5]).owner == READER.digest
    partial = read(world, [*SYSTEM, 900_000, 900_001, 5]).partial
    assert partial is not None
    assert (partial.num_tokens, partial.node.namespace) == (2, other.digest), "named by its node"


def test_it_ends_with_unpublish_and_other_publications_stay(world: World) -> None:
    world.tree.publish(world.namespace, SYSTEM[:8])
    world.tree.publish(world.namespace, [*SYSTEM, *sequence(2, 8)])
    world.tree.publish(world.namespace, [*SYSTEM, *sequence(3, 8)])
    assert world.tree.unpublish(world.namespace, [*SYSTEM, *sequence(2, 8)])
    assert not world.tree.unpublish(world.namespace, [*SYSTEM, *sequence(2, 8)])
    assert not world.tree.unpublish(world.namespace, SYSTEM), "published as part of another, not by itself"
    assert not world.tree.unpublish(READER, SYSTEM[:8])
    world.tree.check_integrity()
    assert read(world, [*SYSTEM, *sequence(2, 8)]).num_tokens == 16
    assert read(world, [*SYSTEM, *sequence(3, 8)]).num_tokens == 24
    assert world.tree.unpublish(world.namespace, [*SYSTEM, *sequence(3, 8)])
    assert read(world, [*SYSTEM, *sequence(3, 8)]).num_tokens == 8
    assert world.tree.unpublish(world.namespace, SYSTEM[:8])
    assert read(world, SYSTEM).nodes == ()
    assert world.tree.publications() == []
    world.tree.check_integrity()
    assert world.tree.num_nodes == 3, "what publications kept apart is joined again"


def test_it_ends_where_pages_leave_and_does_not_come_back_with_them(world: World) -> None:
    published = [*SYSTEM, *sequence(2, 8)]
    world.tree.publish(world.namespace, published)
    node = world.tree.match(world.namespace, published).nodes[-1]
    world.tree.evict(node, HOST, 1)
    assert read(world, published).num_tokens == 20
    world.insert(published)
    world.tree.check_integrity()
    assert read(world, published).num_tokens == 20, "what left has to be published again"
    (publication,) = world.tree.publications()
    assert (publication.num_pages, publication.tenant) == (5, "")
    world.tree.publish(world.namespace, published)
    assert read(world, published).num_tokens == 24
    assert len(world.tree.publications()) == 1
    assert world.tree.unpublish(world.namespace, published)
    assert read(world, published).nodes == ()


@pytest.mark.parametrize("how", ["remove", "flush", "flush the tenant", "forget"])
def test_it_ends_with_removal_even_where_a_reader_keeps_the_pages(world: World, how: str) -> None:
    world.tree.publish(world.namespace, SYSTEM)
    lease = world.tree.lease(read(world, SYSTEM[:8]), owner="reader's session", deadline=None, now=1.0)
    if how == "remove":
        removed = world.tree.remove(world.namespace, SYSTEM, first_page=0)
    elif how == "forget":
        world.tree.forget(world.tree.match(world.namespace, SYSTEM).nodes[0], HOST, 0)
    else:
        removed = world.tree.flush(tenant="") if "tenant" in how else world.tree.flush()
    if how != "forget":
        assert [node.num_pages for node in removed.held] == [2], "the lease protects what it covers"
        assert world.matched(SYSTEM) == 8
    assert read(world, SYSTEM).nodes == ()
    assert world.tree.publications() == []
    world.tree.check_integrity()
    world.tree.release(lease)
    world.tree.check_integrity()


def test_readers_protect_what_they_lease_and_move_nothing_else(world: World) -> None:
    world.tree.publish(world.namespace, SYSTEM)
    world.tree.touch(world.tree.match(world.namespace, SYSTEM).nodes[0], 50.0)
    match = read(world, SYSTEM)
    world.tree.touch(match.nodes[-1], 99.0, reader=READER)
    assert match.nodes[-1].last_access == 50.0, "recency is kept per tenant"
    assert world.tree.publications()[0].readers == {"reader": 99.0}
    world.tree.touch(match.nodes[-1], 100.0, reader=world.namespace)
    assert match.nodes[-1].last_access == 100.0
    world.tree.touch(match.nodes[-1], 101.0, reader=dataclasses.replace(READER, salt=b"s"))
    assert world.tree.publications()[0].readers == {"reader": 99.0}, "it may not read, so it did not"
    lease = world.tree.lease(match, owner="reader's session", deadline=None, now=101.0)
    for node in world.tree.match(world.namespace, SYSTEM).nodes[-1].children:
        world.tree.evict(node, HOST)
    assert not world.tree.can_evict(match.nodes[-1], HOST)
    world.tree.release(lease)
    assert world.tree.can_evict(match.nodes[-1], HOST)


def test_a_reader_never_grows_another_tenants_tree(world: World) -> None:
    """Whoever inserts, inserts into its own tree: there the prefix has to be first."""
    world.tree.publish(world.namespace, SYSTEM)
    with pytest.raises(BadRequest, match="first_page: 4 is past the 0 pages that are in the tree"):
        world.tree.insert(READER, [*SYSTEM, *sequence(4, 4)], tier=HOST, slots=[90], first_page=4, now=1.0)
    world.tree.insert(READER, [*SYSTEM, *sequence(4, 4)], tier=HOST, slots=range(90, 95), now=1.0)
    assert world.matched([*SYSTEM, *sequence(4, 4)]) == 16
    assert read(world, [*SYSTEM, *sequence(4, 4)]).owner == READER.digest


def test_it_survives_splits_and_moves(world: World) -> None:
    node = world.tree.publish(world.namespace, SYSTEM)
    upper, _ = world.tree.split(node, 1)
    assert upper.is_published
    move = world.tree.start_move(node, source=HOST, target=NVME, slots=[50, 51, 52])
    finished = world.tree.finish_move(move, [True, False, True])
    assert all(piece.is_published for piece in finished.nodes)
    assert read(world, SYSTEM).num_tokens == 16
    assert [info.is_published for batch in world.tree.walk() for info in batch].count(False) == 2
    for number, piece in enumerate(world.tree.path(node)):
        slots = range(60 + 10 * number, 60 + 10 * number + piece.num_pages)
        world.tree.start_move(piece, source=HOST, target=DEVICE, slots=slots)
    world.tree.check_integrity()
    assert read(world, SYSTEM).num_tokens == 16


def test_what_is_not_there_cannot_be_published(world: World) -> None:
    before = world.digest()
    with pytest.raises(NotResident, match="page 4 of the prefix to publish is not resident in the tree"):
        world.tree.publish(world.namespace, [*SYSTEM, *sequence(9, 4)])
    with pytest.raises(NotResident):
        world.tree.publish(READER, SYSTEM)
    for bad in ([], SYSTEM[:3], [-1, 2, 3, 4], [0.5] * 4, [[1, 2, 3, 4]]):
        for method in (world.tree.publish, world.tree.unpublish):
            with pytest.raises(BadRequest, match="tokens"):
                method(world.namespace, bad)
    with pytest.raises(BadRequest, match="namespace"):
        world.tree.publish("a", SYSTEM)  # type: ignore[arg-type]  # on purpose
    assert world.digest() == before


def test_i33_a_walk_of_one_tenant_shows_no_other(world: World) -> None:
    world.tree.insert(READER, SYSTEM, tier=HOST, slots=range(90, 94), now=1.0)
    world.tree.publish(world.namespace, SYSTEM)
    for tenant, count in (("", 3), ("reader", 1), ("nobody", 0)):
        infos = [info for batch in world.tree.walk(tenant=tenant) for info in batch]
        assert len(infos) == count
        assert {info.tenant for info in infos} <= {tenant}
