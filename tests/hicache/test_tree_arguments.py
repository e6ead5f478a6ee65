"""Arguments of every public method: what is refused names its field and changes nothing."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest

from hicache.arguments import MAX_NAME_CHARS, flag, moment, name, whole
from hicache.errors import BadRequest, LeaseExpired
from hicache.lease import Lease
from hicache.node import Node
from hicache.tier import DEVICE, HOST, NVME, TierId
from hicache.tree import HiRadixTree
from tests.hicache.trees import World, sequence

GPU: Final = TierId("device:s/0")
TOKENS: Final = sequence(1, 16)
LONGER: Final = [*sequence(1, 12), *sequence(9, 4)]


class Bench:
    """A small tree, a node and a lease in it, to be called with something wrong."""

    def __init__(self) -> None:
        self.world = World()
        self.world.insert(TOKENS)
        self.world.insert([*sequence(1, 8), *sequence(2, 8)])
        self.tree = self.world.tree
        self.namespace = self.world.namespace
        self.lease = self.tree.lease(self.node, owner="o", deadline=50.0, now=2.0)

    @property
    def node(self) -> Node:
        return self.tree.match(self.namespace, TOKENS).nodes[-1]

    def insert(self, **named: Any) -> object:
        named = {"slots": [90, 91], "first_page": 2, "now": 9.0, **named}
        return self.tree.insert(self.namespace, LONGER, tier=HOST, **named)


Call = Callable[[Bench, Any], object]


def instead(value: Any, other: Any) -> Any:
    """`value`, or something else that is refused where None, or a 1, would be allowed."""
    return other if value is None or value is True or value == 1 else value


NOT_INTEGERS: Final = (1.0, "1", None, True, [1], 1.5)
NOT_TIMES: Final = (None, "x", [1], True, float("nan"), float("inf"), -float("inf"), 10**400, 1j, np.array([1.0]))
NOT_NAMES: Final[tuple[Any, ...]] = (3, b"o", [], "x" * (MAX_NAME_CHARS + 1))
NOT_NODES: Final = (None, "x", 3, ())

INTEGERS: Final[dict[str, tuple[str, Call]]] = {
    "insert": ("first_page", lambda b, v: b.insert(first_page=v)),
    "split": ("num_pages", lambda b, v: b.tree.split(b.node, v)),
    "victims": ("num_pages", lambda b, v: b.tree.victims(HOST, v, 1.0)),
    "forget": ("first_page", lambda b, v: b.tree.forget(b.node, HOST, v)),
    "report": ("first_page", lambda b, v: b.tree.report(GPU, b.namespace, TOKENS, resident=True, first_page=v)),
    "walk": ("batch", lambda b, v: b.tree.walk(batch=v)),
    "evict": ("num_pages", lambda b, v: b.tree.evict(b.node, HOST, instead(v, 0))),
    "remove": ("first_page", lambda b, v: b.tree.remove(b.namespace, TOKENS, first_page=instead(v, -1))),
    "tree": ("page_size", lambda b, v: HiRadixTree(page_size=instead(v, "1"), tiers=(HOST,))),
}  # fmt: skip
TIMES: Final[dict[str, tuple[str, Call]]] = {
    "insert": ("now", lambda b, v: b.insert(now=v)),
    "touch": ("now", lambda b, v: b.tree.touch(b.node, v)),
    "victims": ("now", lambda b, v: b.tree.victims(HOST, 1, v)),
    "lease": ("now", lambda b, v: b.tree.lease(b.node, owner="o", deadline=None, now=v)),
    "deadline": ("deadline", lambda b, v: b.tree.lease(b.node, owner="o", deadline=instead(v, ""), now=1)),
    "renew": ("deadline", lambda b, v: b.tree.renew(b.lease, instead(v, ""), now=2.0)),
    "renew now": ("now", lambda b, v: b.tree.renew(b.lease, 60.0, now=v)),
    "move_lease": ("now", lambda b, v: b.tree.move_lease(b.lease, b.node, v)),
    "expire": ("now", lambda b, v: b.tree.expire(v)),
    "restorer": ("now", lambda b, v: b.tree.restorer(b.namespace, tier=HOST, now=v)),
}  # fmt: skip
NAMES: Final[dict[str, tuple[str, Call]]] = {
    "lease": ("owner", lambda b, v: b.tree.lease(b.node, owner=v, deadline=None, now=1.0)),
    "flush": ("tenant", lambda b, v: b.tree.flush(tenant=v)),
    "walk": ("tenant", lambda b, v: b.tree.walk(tenant=v)),
    "tiers": ("tiers", lambda b, v: HiRadixTree(page_size=4, tiers=(v,))),
}
NODES: Final[dict[str, tuple[str, Call]]] = {
    "touch": ("node", lambda b, v: b.tree.touch(v, 1.0)),
    "pin": ("node", lambda b, v: b.tree.pin([v], HOST)),
    "evict": ("node", lambda b, v: b.tree.evict(v, HOST)),
    "can_evict": ("node", lambda b, v: b.tree.can_evict(v, HOST)),
    "forget": ("node", lambda b, v: b.tree.forget(v, HOST)),
    "split": ("node", lambda b, v: b.tree.split(v, 1)),
    "path": ("node", lambda b, v: b.tree.path(v)),
    "current": ("node", lambda b, v: b.tree.current(v)),
    "tokens_of": ("node", lambda b, v: b.tree.tokens_of(v)),
    "identities": ("node", lambda b, v: b.tree.identities(v)),
    "reported": ("node", lambda b, v: b.tree.reported(v)),
    "report_node": ("node", lambda b, v: b.tree.report_node(GPU, v, resident=True)),
    "start_move": ("node", lambda b, v: b.tree.start_move(v, source=HOST, target=NVME, slots=[1, 2])),
    "lease": ("target", lambda b, v: b.tree.lease(v, owner="o", deadline=None, now=1.0)),
    "move_lease": ("target", lambda b, v: b.tree.move_lease(b.lease, v, 3.0)),
    "release": ("lease", lambda b, v: b.tree.release(v)),
    "renew": ("lease", lambda b, v: b.tree.renew(v, None, now=1.0)),
    "unpin": ("pin", lambda b, v: b.tree.unpin(v)),
    "finish_move": ("move", lambda b, v: b.tree.finish_move(v, [True])),
    "match": ("namespace", lambda b, v: b.tree.match(v, TOKENS)),
    "chain": ("chain", lambda b, v: b.insert(chain=instead(v, bytes(31)))),
    "insert": ("namespace", lambda b, v: b.tree.insert(v, TOKENS, tier=HOST, slots=range(90, 94), now=1.0)),
    "remove": ("namespace", lambda b, v: b.tree.remove(v, TOKENS)),
    "publish": ("namespace", lambda b, v: b.tree.publish(v, TOKENS)),
    "report": ("namespace", lambda b, v: b.tree.report(GPU, v, TOKENS, resident=True)),
    "flush": ("namespace", lambda b, v: b.tree.flush(instead(v, ""))),
    "drop_instance": ("instance", lambda b, v: b.tree.drop_instance(v)),
    "resident": ("resident", lambda b, v: b.tree.report(GPU, b.namespace, TOKENS, resident=v)),
}


def each(calls: dict[str, tuple[str, Call]], values: tuple[Any, ...]) -> Iterator[Any]:
    for method, (field, call) in calls.items():
        yield pytest.param(field, call, values, id=method)


@pytest.mark.parametrize(
    ("field", "call", "values"),
    [*each(INTEGERS, NOT_INTEGERS), *each(TIMES, NOT_TIMES), *each(NAMES, NOT_NAMES), *each(NODES, NOT_NODES)],
)
def test_what_is_refused_names_its_field_and_changes_nothing(field: str, call: Call, values: tuple[Any, ...]) -> None:
    bench = Bench()
    before, bytes_before = bench.world.digest(), bench.tree.metadata_bytes
    for value in values:
        with pytest.raises(BadRequest) as caught:
            call(bench, value)
        assert caught.value.field == field, value
        assert (bench.world.digest(), bench.tree.metadata_bytes) == (before, bytes_before), value
    bench.tree.check_integrity()
    assert bench.tree.expire(60.0) == [bench.lease], "no other lease was left behind"


def test_numbers_of_numpy_are_numbers() -> None:
    bench = Bench()
    page: Any = np.int64(2)
    time: Any = np.float32(9.0)
    inserted = bench.tree.insert(bench.namespace, LONGER, tier=HOST, slots=[90, 91], first_page=page, now=time)
    assert inserted.num_stored == 1
    bench.tree.check_integrity()
    assert (whole("n", np.uint8(3), 0, 3), moment("t", np.int32(3)), flag("f", np.bool_(1)), name("o", "")) == (
        3, 3.0, True, "",
    )  # fmt: skip
    assert type(moment("t", 3)) is float


def test_bounds_are_in_the_message() -> None:
    bench = Bench()
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: bench.tree.split(bench.node, 2), "num_pages: 2 is not within 1 to 1"),
        (lambda: bench.insert(first_page=5), "first_page: 5 is not within 0 to 4"),
        (lambda: bench.tree.walk(batch=0), "batch: 0 is not within 1 and more"),
        (lambda: bench.insert(now=float("inf")), "now: inf is not a finite number of seconds"),
    ]
    for call, message in calls:
        with pytest.raises(BadRequest, match=message):
            call()


def test_pins_and_moves_do_not_end_as_each_other() -> None:
    bench = Bench()
    move: Any = bench.tree.start_move(bench.node, source=HOST, target=NVME, slots=[1, 2])
    pin: Any = bench.tree.pin([bench.node], HOST)
    with pytest.raises(BadRequest, match="pin: Move is not a pin"):
        bench.tree.unpin(move)
    with pytest.raises(BadRequest, match="move: Pin is not a move"):
        bench.tree.finish_move(pin, [True, True])
    with pytest.raises(BadRequest, match="nodes: int is not"):
        bench.tree.pin(3, HOST)  # type: ignore[arg-type]  # on purpose
    for ok in (None, [1, 0], ["yes", "no"], np.ones((2, 2), np.bool_), [True], [True] * 3):
        with pytest.raises(BadRequest, match="ok: "):
            bench.tree.finish_move(move, ok)  # type: ignore[arg-type]  # on purpose
    assert move.is_open
    assert pin.is_open
    bench.tree.check_integrity()
    assert bench.tree.finish_move(move, np.array([True, True])).nodes == (bench.node,)  # type: ignore[arg-type]  # works


def test_a_tree_that_cannot_be() -> None:
    for field, arguments in (
        ("tiers", {"tiers": "abc"}),
        ("tiers", {"tiers": None}),
        ("max_publications", {"max_publications": -1}),
        ("max_report_bytes", {"max_report_bytes": 0.5}),
        ("max_leases_per_owner", {"max_leases_per_owner": 0}),
    ):
        with pytest.raises(BadRequest) as caught:
            HiRadixTree(**{"page_size": 4, "tiers": (DEVICE,), **arguments})  # type: ignore[arg-type]  # on purpose
        assert caught.value.field == field


def test_a_lease_belongs_to_this_class() -> None:
    """A handle that only looks like one is refused as well."""
    bench = Bench()
    copy = Lease(bench.node, "o", bench.lease.generation, 50.0)
    before = bench.world.digest()
    calls: list[Callable[[], object]] = [
        lambda: bench.tree.release(copy),
        lambda: bench.tree.renew(copy, 60.0, now=2.0),
        lambda: bench.tree.move_lease(copy, bench.node, 2.0),
    ]
    for call in calls:
        with pytest.raises(LeaseExpired, match="generation: lease 1") as caught:
            call()
        assert caught.value.field == "generation"
    assert bench.world.digest() == before
