"""Stretches of prompts are known again whatever nodes they lie in."""

from collections.abc import Sequence

import numpy as np
import pytest

from hicache.errors import BadRequest
from hicache.layout import KVDtype, KVLayout
from hicache.namespace import Namespace
from hicache.node import Node
from hicache.policy.stretches import Stretches, cut
from hicache.tier import HOST
from hicache.tree import HiRadixTree

LAYOUT = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=8, dtype=KVDtype.BFLOAT16, page_size=2)
MODEL, OTHER = (Namespace(model=name, layout=LAYOUT) for name in ("a", "b"))


def inserted(tree: HiRadixTree, tokens: Sequence[int], namespace: Namespace = MODEL) -> list[Node]:
    packed = np.array(tokens, np.int32)
    tree.insert(namespace, packed, tier=HOST, slots=np.arange(len(tokens) // 2, dtype=np.int32), now=0.0)
    return list(tree.match(namespace, packed).nodes)


def tree() -> HiRadixTree:
    return HiRadixTree(page_size=2, tiers=(HOST,))


def test_the_cut_does_not_depend_on_nodes() -> None:
    whole, parted = tree(), tree()
    inserted(parted, [*range(6), 90, 91])
    inserted(parted, [*range(14), 92, 93])
    one, several = inserted(whole, range(20)), inserted(parted, range(20))
    assert (len(one), len(several)) == (1, 3)
    for stride in (1, 2, 3, 4, 100):
        assert cut(one, stride) == cut(several, stride)
    assert [stretch.num_pages for stretch in cut(one, 4)] == [4, 4, 2]


def test_digests_are_of_everything_before_and_of_the_namespace() -> None:
    first, second = cut(inserted(tree(), range(8)), 2), cut(inserted(tree(), [5, *range(1, 8)]), 2)
    assert all(one.digest != other.digest for one, other in zip(first, second, strict=True))
    assert cut(inserted(tree(), range(8), OTHER), 2) != first
    longer = cut(inserted(tree(), range(10)), 2)
    assert longer[:2] == first, "what is continued has the same cuts"


def test_nodes_have_the_stretches_they_lie_in_after_splits_and_joins() -> None:
    grown = tree()
    (node,) = inserted(grown, range(20))
    stretches = Stretches[str](stride=2)
    found = cut([node], 2)
    stretches.keep([node], found, list("abcde"))
    assert stretches.known(found) == stretches.of(node) == list("abcde")
    upper, lower = grown.split(node, 5)
    stretches.split(upper, lower)
    assert (stretches.of(upper), stretches.of(lower)) == (list("abc"), list("cde")), "the middle one lies in both"
    stretches.keep([upper, lower], found, list("fghij"))
    assert (stretches.of(upper), stretches.of(lower)) == (list("fgh"), list("hij"))
    shared = Stretches[object](stride=2)
    records = [object() for _ in range(5)]
    shared.keep([upper, lower], found, records)
    shared.joined(upper, lower)
    assert shared.of(lower) == records


def test_memory_is_bounded() -> None:
    grown, stretches = tree(), Stretches[int](records_max=4)
    for first in range(0, 1000, 20):
        path = inserted(grown, range(first, first + 20))
        stretches.keep(path, cut(path, 1), list(range(10)))
    known = stretches.known(cut(path, 1))
    assert known == [0, 1, 2, 3, *[None] * 6], "beginnings are kept longest"


@pytest.mark.parametrize(("arguments", "field"), [({"stride": 0}, "stride"), ({"records_max": 0}, "records_max")])
def test_bounds_are_named(arguments: dict[str, int], field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        Stretches[int](**arguments)
