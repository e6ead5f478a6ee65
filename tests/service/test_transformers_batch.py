"""Batches: rows of other lengths, each with what is cached of its own prompt, give what each gives alone."""

from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch

from hicache.errors import BadRequest, TierUnavailable
from hicache.service.compose import HiCache
from hicache.service.engines.transformers import TransformersEngine, layout_of
from hicache.service.requests import Step
from hicache.tier import NVME
from tests.service.tiny_llama import (
    PAGE_SIZE,
    VOCAB_SIZE,
    PassCounter,
    assert_same,
    counting,
    kept,
    open_cache,
    plain_generate,
    random_ids,
    tiny_model,
)

NEW: Final = 6
LENGTHS: Final = (50, 1, PAGE_SIZE, 130)
"""Tokens of the prompts of most tests."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    """Ids `[1, tokens]`, one for each row."""
    return [random_ids(length, seed=20 + length) for length in LENGTHS]


@pytest.fixture(scope="module")
def plain(model: Any, prompts: list[torch.Tensor]) -> list[Any]:
    """What plain transformers says to each prompt alone."""
    return [plain_generate(model, ids, NEW) for ids in prompts]


@pytest.fixture
def cache(model: Any) -> Iterator[HiCache]:
    with open_cache(layout_of(model, page_size=PAGE_SIZE)) as cache:
        yield cache


@pytest.fixture
def engine(model: Any, cache: HiCache) -> Iterator[TransformersEngine]:
    with TransformersEngine(model, cache) as engine:
        yield engine


@pytest.fixture
def counter(model: Any) -> Iterator[PassCounter]:
    with counting(model) as counter:
        yield counter


def padded(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `[rows, tokens]` as a tokenizer gives them with `padding_side="left"`."""
    width = max(ids.shape[1] for ids in prompts)
    ids = torch.cat([torch.nn.functional.pad(ids, (width - ids.shape[1], 0)) for ids in prompts])
    mask = torch.stack([torch.arange(width) >= width - ids.shape[1] for ids in prompts]).long()
    return ids, mask


def test_every_row_gives_what_it_gives_alone(
    engine: TransformersEngine, prompts: list[torch.Tensor], plain: list[Any], counter: PassCounter
) -> None:
    found = tuple(kept(length + NEW - 1, length) for length in LENGTHS)
    for cached in ((0, 0, 0, 0), found):
        counter.take()
        with engine.batch(*padded(prompts)) as batch:
            assert batch.cached == cached
            generations = batch.generate(NEW, output_logits=True)
            for generation, expected in zip(generations, plain, strict=True):
                assert_same(generation.tokens, generation.logits, expected)
        # Each prompt but its last token row by row, then one pass of all rows for each token.
        assert counter.take() == sum(LENGTHS) - sum(cached) - 4 * 1 - sum(
            1 for length, each in zip(LENGTHS, cached, strict=True) if each == length
        ) + NEW


def test_prompts_of_any_form_are_taken(
    engine: TransformersEngine, prompts: list[torch.Tensor], plain: list[Any]
) -> None:
    for ids in (prompts, [ids[0].tolist() for ids in prompts]):
        with engine.batch(ids) as batch:
            assert [each.tokens for each in batch.generate(NEW)] == [each.tokens for each in plain]


def test_generate_of_transformers_takes_the_cache(
    engine: TransformersEngine, model: Any, prompts: list[torch.Tensor], plain: list[Any]
) -> None:
    ids, mask = padded(prompts)
    for _ in range(2):
        with engine.batch(ids, mask) as batch:
            sequences = model.generate(
                ids, attention_mask=mask, cache=batch.cache, max_new_tokens=NEW, do_sample=False
            )
        assert [tuple(row) for row in sequences[:, ids.shape[1] :].tolist()] == [each.tokens for each in plain]


def test_rows_find_what_the_rows_before_them_have_computed(
    engine: TransformersEngine, model: Any, counter: PassCounter
) -> None:
    document = random_ids(5 * PAGE_SIZE, seed=3)
    prompts = [torch.cat([document, random_ids(7, seed=seed)], dim=1) for seed in (4, 5, 6)]
    plain = [plain_generate(model, ids, NEW) for ids in prompts]
    counter.take()
    with engine.batch(prompts) as batch:
        generations = batch.generate(NEW)
        assert [each.tokens for each in generations] == [each.tokens for each in plain]
        assert batch.cached == (0, 5 * PAGE_SIZE, 5 * PAGE_SIZE)
    assert counter.tokens == 5 * PAGE_SIZE + 3 * 6 + NEW


def test_a_row_that_has_ended_is_computed_no_further(
    engine: TransformersEngine, model: Any, prompts: list[torch.Tensor], plain: list[Any]
) -> None:
    end = plain[0].tokens[2]
    expected = []
    for each in plain:
        stop = each.tokens.index(end) + 1 if end in each.tokens else NEW
        expected.append(each.tokens[:stop])
    assert len({len(tokens) for tokens in expected}) > 1, "all rows end together; choose other prompts"
    with engine.batch(prompts) as batch:
        generations = batch.generate(NEW, eos_token_id=end)
        assert [each.tokens for each in generations] == expected
        for request, ids, tokens in zip(batch.requests, prompts, expected, strict=True):
            assert request.tokens.tolist() == [*ids[0].tolist(), *tokens]
            # Nothing behind the end was stored.
            assert request.length == ids.shape[1] + len(tokens) - 1


def test_a_conversation_of_batches(engine: TransformersEngine, model: Any, prompts: list[torch.Tensor]) -> None:
    with engine.batch(prompts) as batch:
        first = batch.prefill().argmax(-1)
        assert first.tolist() == [plain_generate(model, ids, 1).tokens[0] for ids in prompts]
        batch.extend(first)
        generations = batch.generate(2)
        longer = [torch.cat([ids, token.view(1, 1)], dim=1) for ids, token in zip(prompts, first, strict=True)]
        assert [each.tokens for each in generations] == [plain_generate(model, ids, 2).tokens for ids in longer]
        again = batch.generate(2)
        longer = [
            torch.cat([ids, torch.tensor([each.tokens])], dim=1) for ids, each in zip(longer, generations, strict=True)
        ]
        assert [each.tokens for each in again] == [plain_generate(model, ids, 2).tokens for ids in longer]


def test_a_pass_of_several_tokens_in_each_row(
    engine: TransformersEngine, model: Any, prompts: list[torch.Tensor]
) -> None:
    more = torch.cat([random_ids(3, seed=40 + row) for row in range(len(prompts))])
    ids, mask = padded(prompts)
    with engine.batch(ids, mask) as batch, torch.no_grad():
        ids, mask = torch.cat([ids, more], dim=1), torch.nn.functional.pad(mask, (0, 3), value=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -4:]
        logits = model(ids[:, -4:], attention_mask=mask, position_ids=positions, cache=batch.cache).logits
        for row, prompt in enumerate(prompts):
            alone = model(torch.cat([prompt, more[row : row + 1]], dim=1)).logits
            torch.testing.assert_close(logits[row], alone[0, -4:], rtol=0, atol=5e-5)


# -- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_pages", [5, 7])
def test_rows_that_do_not_fit_at_once_take_turns(
    model: Any, prompts: list[torch.Tensor], plain: list[Any], device_pages: int
) -> None:
    """Contexts larger than the device: what one row attends to there is pinned where another one needs a page."""
    with (
        open_cache(layout_of(model, page_size=PAGE_SIZE), device_pages=device_pages) as cache,
        TransformersEngine(model, cache) as engine,
        counting(model) as counter,
    ):
        for _ in range(2):
            with engine.batch(prompts) as batch:
                _ = batch.cache
                counter.take()
                generations = batch.generate(NEW, output_logits=True)
                assert (len(counter.passes) > NEW) == (device_pages == 5), "passes were not of some of the rows"
            for generation, expected in zip(generations, plain, strict=True):
                assert_same(generation.tokens, generation.logits, expected)
            assert cache.stats()["tiers"]["device"]["used_pages"] <= device_pages


def test_more_rows_than_the_device_has_pages_for_are_refused(model: Any, prompts: list[torch.Tensor]) -> None:
    with (
        open_cache(layout_of(model, page_size=PAGE_SIZE), device_pages=4) as cache,
        TransformersEngine(model, cache) as engine,
        pytest.raises(BadRequest, match="have 4 rows, but the device tier has 4 pages"),
    ):
        engine.batch(prompts)


def test_windows_hold_in_batches(prompts: list[torch.Tensor]) -> None:
    model = tiny_model("Gemma3", head_dim=16, sliding_window=21,
                       layer_types=["sliding_attention", "full_attention", "sliding_attention"])  # fmt: skip
    with (
        open_cache(layout_of(model, page_size=PAGE_SIZE)) as cache,
        TransformersEngine(model, cache) as engine,
        engine.batch(prompts) as batch,
    ):
        for generation, ids in zip(batch.generate(NEW, output_logits=True), prompts, strict=True):
            assert_same(generation.tokens, generation.logits, plain_generate(model, ids, NEW))


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 7, 12])
def test_a_page_that_is_lost_is_computed_again(
    engine: TransformersEngine, prompts: list[torch.Tensor], plain: list[Any], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Whichever layer of whichever row finds the context gone, before or after rows have ended."""
    real, num_calls = Step.parts, 0

    def fails_once(self: Step, layer: int, **how: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == at:
            raise TierUnavailable(NVME, "a test says so")
        return real(self, layer, **how)

    end = plain[0].tokens[2]
    expected = [each.tokens[: each.tokens.index(end) + 1] if end in each.tokens else each.tokens for each in plain]
    with engine.batch(prompts) as batch:
        monkeypatch.setattr(Step, "parts", fails_once)
        assert [each.tokens for each in batch.generate(NEW, eos_token_id=end)] == expected
    assert num_calls > at


def test_after_a_pass_that_failed_the_batch_goes_on(
    engine: TransformersEngine, model: Any, prompts: list[torch.Tensor], plain: list[Any]
) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupted

    with engine.batch(prompts) as batch:
        cache = batch.cache
        ids, mask = padded(prompts)
        handle = model.model.layers[1].register_forward_pre_hook(interrupt)
        try:
            with pytest.raises(Interrupted):
                model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=1)
        finally:
            handle.remove()
        assert [request.length for request in batch.requests] == [length - 1 for length in LENGTHS]
        assert [each.tokens for each in batch.generate(NEW)] == [each.tokens for each in plain]


def test_ids_and_masks_that_are_not_the_batchs_are_refused(
    engine: TransformersEngine, model: Any, prompts: list[torch.Tensor]
) -> None:
    ids, mask = padded(prompts)
    with engine.batch(ids, mask) as batch, torch.no_grad():
        cache = batch.cache
        last, positions = ids[:, -1:], (mask.sum(-1, keepdim=True) - 1)
        right = {"attention_mask": mask, "position_ids": positions, "cache": cache}
        for wrong, problem in (
            ({"input_ids": last[:2]}, r"input_ids: have shape \(2, 1\)"),
            ({"input_ids": (last + 1) % VOCAB_SIZE}, "input_ids: differ"),
            ({"attention_mask": torch.ones_like(mask)}, "attention_mask: is not ones"),
            ({"attention_mask": None}, "attention_mask: is missing: row 0 is padded"),
            ({"position_ids": positions + 1}, "position_ids: are not 49 to 49"),
            ({"labels": last}, "labels: is not supported for a batch"),
            ({"return_dict": False}, "return_dict: is False"),
        ):
            with pytest.raises(BadRequest, match=problem):
                model(**{"input_ids": last, **right, **wrong})
        assert [request.length for request in batch.requests] == [length - 1 for length in LENGTHS]
        model(input_ids=last, **right)
        assert [request.length for request in batch.requests] == list(LENGTHS)


@pytest.mark.parametrize(
    ("ids", "mask", "problem"),
    [
        (torch.ones(2, 3, dtype=torch.long), torch.tensor([[1, 1, 0], [1, 1, 1]]), "of row 0 is not zeros"),
        (torch.ones(2, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [1, 0, 1]]), "of row 1 is not zeros"),
        (torch.ones(2, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [0, 0, 0]]), "one that is empty"),
        (torch.ones(2, 3, dtype=torch.long), torch.ones(2, 4), "has shape"),
        (torch.ones(3, dtype=torch.long), None, r"not \[rows, tokens\]"),
        ([[1, 2], [VOCAB_SIZE]], None, "outside 0 to"),
        ([], None, "no rows"),
        ([[1]], torch.ones(1, 1), "together with"),
    ],
)
def test_bad_batches_are_refused(engine: TransformersEngine, ids: Any, mask: Any, problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        engine.batch(ids, mask)


def test_tokens_of_other_numbers_than_rows_are_refused(engine: TransformersEngine, prompts: list[torch.Tensor]) -> None:
    with engine.batch(prompts) as batch:
        batch.prefill()
        with pytest.raises(BadRequest, match="of row 0 are all computed"):
            batch.generate(1)
        with pytest.raises(BadRequest, match="not one for each of 4 rows"):
            batch.extend([1])
