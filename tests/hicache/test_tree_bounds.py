"""What lies beside the pages (reports, publications, leases) has bounds of its own, and pages do not pay for it."""

import gc
from typing import Any

import pytest

from hicache.errors import BadRequest, LeaseExpired, NoRoom, NotResident
from hicache.metadata import MAX_READERS, NODE_BYTES, ORDER_BYTES, PUBLICATION_BYTES, REPORT_BYTES, ROOT_BYTES
from hicache.namespace import Namespace
from hicache.tier import HOST, NVME, TierId
from hicache.tree import HiRadixTree
from tests.hicache.trees import Tokens, digest, make_namespace, sequence

PAGE = 16
NODE = NODE_BYTES + 2 * ORDER_BYTES + 4 * (PAGE + 1)
NAMESPACE = make_namespace(PAGE)


def gpu(session: int) -> TierId:
    return TierId(f"device:s{session}/0")


def tree_of(num_nodes: int, **bounds: Any) -> HiRadixTree:
    """A tree whose budget is just reached by so many nodes of one page."""
    tree = HiRadixTree(page_size=PAGE, tiers=(HOST, NVME), metadata_bytes=ROOT_BYTES + num_nodes * NODE, **bounds)
    for number in range(num_nodes):
        insert(tree, sequence(number, PAGE), number)
    return tree


def insert(tree: HiRadixTree, tokens: Tokens, first_slot: int, namespace: Namespace = NAMESPACE) -> int:
    """The pages that left for it."""
    count = len(tokens) // PAGE
    inserted = tree.insert(namespace, tokens, tier=HOST, slots=range(first_slot, first_slot + count), now=1.0)
    return inserted.num_dropped


def test_hints_of_engines_neither_evict_nor_refuse() -> None:
    tree = tree_of(10)
    kept = tree.match(NAMESPACE, sequence(9, PAGE))
    tree.touch(kept.nodes[-1], 2.0)
    for session in range(1000):
        assert tree.report(gpu(session), NAMESPACE, sequence(9, PAGE), resident=True) == 1
    assert tree.aside_bytes >= 1000 * REPORT_BYTES > tree.metadata_bytes
    tree.check_integrity()
    assert insert(tree, sequence(20, PAGE), 20) == 1, "one page comes, one leaves"
    assert tree.num_nodes == 10
    lease = tree.lease(kept, owner="o", deadline=None, now=2.0)
    assert [insert(tree, sequence(30 + number, PAGE), 30 + number) for number in range(20)] == [1] * 20
    tree.release(lease)
    assert len(tree.reported(kept.nodes[-1])) == 1000


def test_reports_past_their_bound_are_not_noted_and_counted() -> None:
    tree = tree_of(10, max_report_bytes=4 * REPORT_BYTES + 10)
    noted = [tree.report(gpu(0), NAMESPACE, sequence(number, PAGE), resident=True) for number in range(6)]
    assert noted == [1, 1, 1, 1, 0, 0]
    assert tree.num_reports_dropped == 2
    first, fifth = (tree.match(NAMESPACE, sequence(number, PAGE)).nodes[0] for number in (0, 4))
    assert tree.report_node(gpu(1), first, resident=True) is False
    assert tree.report_node(gpu(0), first, resident=True) is True, "what is known already costs nothing more"
    assert list(tree.reported(first)) == [gpu(0)]
    tree.check_integrity()
    # Room comes back with what engines no longer have, with nodes that leave, and with sessions that end.
    assert tree.report(gpu(0), NAMESPACE, sequence(0, PAGE), resident=False) == 1
    assert tree.report_node(gpu(1), fifth, resident=True)
    tree.remove(NAMESPACE, sequence(4, PAGE), first_page=0)
    assert tree.report_node(gpu(1), first, resident=True)
    assert tree.drop_instance(gpu(0)) == 3
    assert tree.drop_instance(gpu(1)) == 1
    assert tree.aside_bytes == 0
    tree.check_integrity()


def test_a_split_that_has_no_room_for_two_reports_keeps_one() -> None:
    tree = HiRadixTree(page_size=PAGE, tiers=(HOST,), max_report_bytes=REPORT_BYTES + 60)
    tokens = sequence(1, 20 * PAGE)
    insert(tree, tokens, 0)
    (node,) = tree.match(NAMESPACE, tokens).nodes
    assert tree.report(gpu(0), NAMESPACE, tokens, resident=True) == 20
    upper, lower = tree.split(node, 5)
    assert lower is node
    assert (tree.reported(upper), tree.reported(lower)[gpu(0)].tolist()) == ({}, [True] * 15)
    assert tree.num_reports_dropped == 1
    tree.check_integrity()


def test_publications_past_their_bound_are_refused() -> None:
    tree = tree_of(10, max_publications=3)
    size = tree.metadata_bytes
    for number in range(3):
        tree.publish(NAMESPACE, sequence(number, PAGE))
    tree.publish(NAMESPACE, sequence(0, PAGE))
    before = digest(tree)
    with pytest.raises(NoRoom, match="publications: 3 are all that may be published at a time") as caught:
        tree.publish(NAMESPACE, sequence(3, PAGE))
    assert caught.value.tier == "publications"
    assert digest(tree) == before
    assert (tree.metadata_bytes, tree.aside_bytes) == (size, 3 * (PUBLICATION_BYTES + 4 * PAGE))
    assert tree.unpublish(NAMESPACE, sequence(1, PAGE))
    tree.publish(NAMESPACE, sequence(3, PAGE))
    assert insert(tree, sequence(20, PAGE), 20) == 1
    tree.check_integrity()


def test_the_readers_of_a_publication_that_used_it_last_are_remembered() -> None:
    tree = tree_of(2)
    node = tree.publish(NAMESPACE, sequence(0, PAGE))
    for number in range(MAX_READERS + 10):
        tree.touch(node, 10.0 + number, reader=make_namespace(PAGE, tenant=f"r{number}"))
    tree.touch(node, 500.0, reader=make_namespace(PAGE, tenant="r10"))
    (publication,) = tree.publications()
    assert set(publication.readers) == {f"r{number}" for number in range(10, MAX_READERS + 10)}
    assert publication.readers["r10"] == 500.0
    tree.check_integrity()


def test_one_owner_has_no_more_leases_than_it_may() -> None:
    tree = tree_of(3, max_leases_per_owner=2)
    node = tree.match(NAMESPACE, sequence(1, PAGE)).nodes[0]
    leases = [tree.lease(node, owner="a", deadline=5.0, now=1.0) for _ in range(2)]
    before = digest(tree)
    with pytest.raises(NoRoom, match="leases: 2 are all that one owner may have") as caught:
        tree.lease(node, owner="a", deadline=None, now=1.0)
    assert caught.value.tier == "leases"
    assert digest(tree) == before
    tree.lease(node, owner="b", deadline=None, now=1.0)
    tree.release(leases[0])
    tree.lease(node, owner="a", deadline=None, now=1.0)
    assert tree.expire(6.0) == [leases[1]]
    tree.lease(node, owner="a", deadline=None, now=6.0)
    tree.check_integrity()


def test_a_lease_ends_at_its_deadline_whether_or_not_expire_was_called() -> None:
    tree = tree_of(3)
    node = tree.match(NAMESPACE, sequence(1, PAGE)).nodes[0]
    lease = tree.lease(node, owner="a", deadline=5.0, now=1.0)
    tree.renew(lease, 8.0, now=4.9, owner="a")
    for owner, now, field in (("b", 5.0, "owner"), ("a", 8.0, "deadline"), (None, 9.0, "deadline")):
        with pytest.raises(LeaseExpired) as caught:
            tree.renew(lease, 50.0, now=now, owner=owner)
        assert caught.value.field == field
        with pytest.raises(LeaseExpired) as caught:
            tree.move_lease(lease, node, now, owner=owner)
        assert caught.value.field == field
    tree.touch(node, 20.0)
    with pytest.raises(LeaseExpired, match=r"deadline: lease 1 ended at 8\.0, it is 20\.0"):
        tree.renew(lease, 50.0, now=2.0)
    assert lease.deadline == 8.0
    assert tree.expire(20.0) == [lease]
    with pytest.raises(LeaseExpired) as caught:
        tree.renew(lease, 50.0, now=21.0)
    assert caught.value.field == "generation"


def test_what_is_not_published_any_more_cannot_be_leased() -> None:
    """A match is older than the end of the publication that it was made under."""
    tree = HiRadixTree(page_size=PAGE, tiers=(HOST,))
    tokens, reader = sequence(1, 4 * PAGE), make_namespace(PAGE, tenant="reader")
    insert(tree, tokens, 0)
    tree.publish(NAMESPACE, tokens)
    stale = tree.match(reader, tokens)
    shorter = tree.match(reader, tokens[: 2 * PAGE])
    own = tree.match(NAMESPACE, tokens)
    assert (stale.asked, stale.owner) == (reader.digest, NAMESPACE.digest)
    tree.publish(NAMESPACE, tokens[: 2 * PAGE])
    tree.unpublish(NAMESPACE, tokens)
    with pytest.raises(NotResident, match="no longer publishes"):
        tree.lease(stale, owner="r", deadline=None, now=1.0)
    lease = tree.lease(shorter, owner="r", deadline=None, now=1.0)
    with pytest.raises(NotResident, match="no longer publishes"):
        tree.move_lease(lease, stale, 1.0)
    tree.lease(own, owner="o", deadline=None, now=1.0)
    assert tree.num_leases == 2
    tree.check_integrity()


def test_a_match_is_not_older_than_the_departure_of_its_last_node() -> None:
    """Also where only pages behind the match have left: it has to be made again, and then holds."""
    tree = HiRadixTree(page_size=PAGE, tiers=(HOST,))
    tokens = sequence(1, 8 * PAGE)
    insert(tree, tokens, 0)
    match = tree.match(NAMESPACE, tokens[: 4 * PAGE])
    tree.evict(match.nodes[-1], HOST, 4)
    with pytest.raises(NotResident):
        tree.lease(match, owner="o", deadline=None, now=1.0)
    again = tree.match(NAMESPACE, tokens[: 4 * PAGE])
    assert again.num_tokens == match.num_tokens
    assert tree.lease(again, owner="o", deadline=None, now=1.0).node is again.nodes[-1]


def test_the_collector_sees_neither_reports_nor_publications_nor_leases() -> None:
    tree = tree_of(50)
    nodes = [info.node for batch in tree.walk() for info in batch]
    for number, node in enumerate(nodes):
        tree.report_node(gpu(0), node, resident=True)
        tree.publish(NAMESPACE, tree.tokens_of(node))
        tree.touch(node, 2.0, reader=make_namespace(PAGE, tenant=f"r{number % 3}"))
        tree.lease(node, owner="o", deadline=9.0 + number, now=1.0)
    index, reports = tree._published, tree._reports
    gc.collect()
    seen = {id(each) for each in gc.get_objects()}
    hidden: list[object] = [
        tree._leases, tree._deadlines, *tree._leases.values(), reports.by_node, *reports.nodes_of.values(),
        *reports.by_node.values(), index.publications, *index.publications.values(), index.ends,
        *(each.readers for each in index.publications.values()),
    ]  # fmt: skip
    assert not [each for each in hidden if id(each) in seen]
    with pytest.raises(BadRequest):
        tree.drop_instance(TierId("host"))
