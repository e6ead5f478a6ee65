"""Who asks for what: reproducible, by Zipf's law, and reaching every tier."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache.tools.demo.workload import OVERSIZE, Ask, build_workload, choose_oversized, reuse

SIZES = [1840, 1620, 1720, 1570, 1660, 1780, 1600, 1900, 1690, 1640, 1750, 1580]
DEVICE = sum(SIZES) // 8
HOST = sum(SIZES) * 10 // 16


def workload(seed: int, num_requests: int = 40) -> list[Ask]:
    oversized = choose_oversized(SIZES, device_tokens=DEVICE, max_tokens=8_000, seed=seed)
    return build_workload(
        SIZES, num_requests=num_requests, seed=seed, device_tokens=DEVICE, host_tokens=HOST, oversized=oversized
    )


@pytest.mark.parametrize("seed", range(30))
def test_every_seed_reaches_every_tier_often_enough(seed: int) -> None:
    asks = workload(seed)
    assert len(asks) == 41
    assert sum(ask.oversized for ask in asks) == 1
    assert {ask.documents[0] for ask in asks if not ask.oversized} == set(range(12))
    assert min(reuse(asks, SIZES, device_tokens=DEVICE, host_tokens=HOST)) >= 4


def test_a_seed_names_one_workload() -> None:
    assert workload(7) == workload(7)
    assert workload(7) != workload(8)


def test_visits_count_what_was_asked_of_a_document_before() -> None:
    seen: Counter[int] = Counter()
    for ask in workload(3):
        if ask.oversized:
            assert ask.visit == seen[ask.documents[-1]]
            continue
        assert ask.visit == seen[ask.documents[0]]
        seen[ask.documents[0]] += 1


def test_popularity_follows_the_rank() -> None:
    asks = build_workload([1] * 20, num_requests=5_000, seed=0, device_tokens=1_000, host_tokens=10_000, oversized=())
    counts = sorted(Counter(ask.documents[0] for ask in asks).values(), reverse=True)
    harmonic = sum(1 / rank for rank in range(1, 21))
    for rank, count in enumerate(counts[:5], start=1):
        assert count == pytest.approx(5_000 / rank / harmonic, rel=0.15)


def test_reuse_measures_distances_as_lru_sees_them() -> None:
    a, b, c = (Ask((document,), 0) for document in range(3))
    sizes = [100, 100, 100]
    # With question and answer, 48 tokens each time: aa comes back over 148 tokens, a b a over 296, a b c a over 444.
    assert reuse([a, a], sizes, device_tokens=160, host_tokens=10_000) == (1, 0, 0)
    assert reuse([a, a], sizes, device_tokens=150, host_tokens=10_000) == (0, 0, 0)
    assert reuse([a, b, a], sizes, device_tokens=160, host_tokens=10_000) == (0, 1, 0)
    assert reuse([a, b, c, a], sizes, device_tokens=160, host_tokens=170) == (0, 0, 1)
    assert reuse([a, b, b, b, a], sizes, device_tokens=10_000, host_tokens=1) == (3, 0, 0)
    whole = Ask((0, 1, 2), 0, oversized=True)
    assert reuse([a, whole, a], sizes, device_tokens=400, host_tokens=10_000) == (1, 0, 0)
    assert reuse([a, whole, a], sizes, device_tokens=230, host_tokens=10_000) == (0, 1, 0)


def test_too_few_requests_for_the_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="3 requests cannot ask about each of 12 documents"):
        workload(0, num_requests=3)


def test_one_document_and_one_request_are_a_workload() -> None:
    asks = build_workload([10], num_requests=1, seed=0, device_tokens=16, host_tokens=64, oversized=(0, 0))
    assert [ask.oversized for ask in asks] == [True, False]


@given(
    st.lists(st.integers(1, 3_000), min_size=1, max_size=20),
    st.integers(1, 6_000),
    st.integers(1, 9_000),
    st.integers(0, 100),
)
def test_the_oversized_request_exceeds_the_device_and_fits_the_model(
    sizes: list[int], device_tokens: int, max_tokens: int, seed: int
) -> None:
    chosen = choose_oversized(sizes, device_tokens=device_tokens, max_tokens=max_tokens, seed=seed)
    total = sum(sizes[document] for document in chosen)
    if not chosen:
        # Greedy by turns: what is left over is less than the smallest document.
        assert max_tokens < device_tokens + max(sizes)
        return
    assert device_tokens < total <= max_tokens
    # No more than needed, and every document once before one comes twice.
    assert total - sizes[chosen[-1]] < device_tokens * OVERSIZE
    # In turn: what comes again comes because everything else that fitted then had come as often.
    for position, document in enumerate(chosen):
        before = Counter(chosen[:position])
        room = max_tokens - sum(sizes[other] for other in chosen[:position])
        assert all(before[document] <= before[other] for other in range(len(sizes)) if sizes[other] <= room)


def test_the_default_oversized_request_has_several_documents() -> None:
    for seed in range(10):
        assert len(set(choose_oversized(SIZES, device_tokens=DEVICE, max_tokens=8_000, seed=seed))) >= 3
