"""A request that cannot be opened again after damage, in a busy moment say, is opened again by the next call."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch

from hicache.errors import Closed, DeadlineExceeded, TierUnavailable
from hicache.service.compose import HiCache
from hicache.service.engines.transformers import Request, TransformersEngine, layout_of
from hicache.service.requests import Step
from hicache.tier import NVME
from tests.service.tiny_llama import PAGE_SIZE, open_cache, plain_generate, random_ids, tiny_model

NEW: Final = 4
NUM_TOKENS: Final = 3 * PAGE_SIZE + 5


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture
def cache(model: Any) -> Iterator[HiCache]:
    with open_cache(layout_of(model, page_size=PAGE_SIZE)) as cache:
        yield cache


@pytest.fixture
def engine(model: Any, cache: HiCache) -> Iterator[TransformersEngine]:
    with TransformersEngine(model, cache) as engine:
        yield engine


class FailsOnce:
    """A function whose call number `at` from now on raises `error`."""

    def __init__(self, function: Callable[..., Any], at: int, error: Exception) -> None:
        self.num_calls = 0
        self._function, self._at, self._error = function, at, error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == self._at:
            raise self._error
        return self._function(*args, **kwargs)


def no_sequence(monkeypatch: pytest.MonkeyPatch, cache: HiCache, at: int) -> FailsOnce:
    opening = FailsOnce(cache.sequence, at, DeadlineExceeded("a busy moment"))
    monkeypatch.setattr(cache, "sequence", opening)
    return opening


def no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = FailsOnce(Step.parts, 1, TierUnavailable(NVME, "a test says so"))

    def parts(self: Step, layer: int, **how: Any) -> Any:
        return reading(self, layer, **how)

    monkeypatch.setattr(Step, "parts", parts)


def by_request(model: Any, request: Request) -> tuple[int, ...]:
    return request.generate(NEW).tokens


def by_transformers(model: Any, request: Request) -> tuple[int, ...]:
    output = model.generate(random_ids(NUM_TOKENS), cache=request.cache, max_new_tokens=NEW, do_sample=False)
    return tuple(output[0, NUM_TOKENS:].tolist())


def by_passes(model: Any, request: Request) -> tuple[int, ...]:
    ids, tokens = random_ids(NUM_TOKENS)[:, -1:], list[int]()
    while len(tokens) < NEW:
        with torch.no_grad():
            tokens.append(int(model(ids, cache=request.cache).logits[0, -1].argmax()))
        ids = torch.tensor([tokens[-1:]])
    return tuple(tokens)


@pytest.mark.parametrize("generated", [by_request, by_transformers, by_passes])
def test_a_request_goes_on(
    engine: TransformersEngine,
    model: Any,
    cache: HiCache,
    monkeypatch: pytest.MonkeyPatch,
    generated: Callable[[Any, Request], tuple[int, ...]],
) -> None:
    ids = random_ids(NUM_TOKENS)
    with engine.request(ids[:, :-1]) as request:
        request.prefill()
        request.extend(ids[:, -1:])
        no_context(monkeypatch)
        no_sequence(monkeypatch, cache, at=1)
        with pytest.raises(DeadlineExceeded):
            generated(model, request)
        assert (request.length, request.num_pending) == (NUM_TOKENS - 1, 1), "not as it was before"
        assert generated(model, request) == plain_generate(model, ids, NEW).tokens


def test_a_request_that_is_closed_instead_stays_closed(
    engine: TransformersEngine, model: Any, cache: HiCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.request(random_ids(NUM_TOKENS)) as request:
        request_cache = request.cache
        no_context(monkeypatch)
        opening = no_sequence(monkeypatch, cache, at=1)
        with pytest.raises(DeadlineExceeded):
            request.prefill()
    with pytest.raises(Closed):
        model(random_ids(1), cache=request_cache)
    assert opening.num_calls == 1


def test_all_rows_of_a_batch_go_back(
    engine: TransformersEngine, model: Any, cache: HiCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_ids(NUM_TOKENS + row, seed=row) for row in range(3)]
    with engine.batch(prompts) as batch:
        assert batch.cache.get_seq_length() == NUM_TOKENS + 1, "the prompts are not computed"
        lengths = [request.length for request in batch.requests]
        no_context(monkeypatch)
        opening = no_sequence(monkeypatch, cache, at=2)
        with pytest.raises(DeadlineExceeded):
            batch.generate(NEW)
        assert [request.length for request in batch.requests[1:]] == lengths[1:]
        rows = batch.generate(NEW)
        assert [row.tokens for row in rows] == [plain_generate(model, ids, NEW).tokens for ids in prompts]
    assert opening.num_calls == len(prompts) + 1, "a row was not taken back, or twice"


def test_a_row_that_cannot_be_opened_with_what_others_computed_goes_on(
    engine: TransformersEngine, model: Any, cache: HiCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(NUM_TOKENS)
    with engine.batch([ids[0], ids[0]]) as batch:
        no_sequence(monkeypatch, cache, at=1)
        with pytest.raises(DeadlineExceeded):
            batch.generate(NEW)
        assert batch.requests[1].generate(NEW).tokens == plain_generate(model, ids, NEW).tokens
