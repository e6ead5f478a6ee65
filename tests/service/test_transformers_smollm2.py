"""The transformers engine with a real language model: SmolLM2-135M-Instruct in float32."""

from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch

from hicache.service.engines.models import load_model, load_tokenizer
from hicache.service.engines.transformers import TransformersEngine, layout_of
from tests.service.tiny_llama import PAGE_SIZE, Plain, assert_same, counting, open_cache, plain_generate

NEW: Final = 12
TOLERANCE: Final = 5e-4
"""Largest accepted difference of a float32 logit. transformers' own two orders of adding up (eager, sdpa) differ by up
to 8e-5 over 30 layers on logits of up to 30; merging page by page adds a third order."""

STORY: Final = """\
The lighthouse of Skarholm stands on a rock that the sea covers twice a day. For forty years Ingrid Solheim kept its
lamp. She wrote down the weather every evening, in a book with a green cover, and beside it the names of the ships that
passed. In the winter of 1911 the supply boat did not come for seven weeks. Ingrid burned the furniture to keep the lamp
warm, first the chairs and then the table, and at last the shelf on which the books had stood. The green book she kept.
When the boat came at last, its captain found the lamp burning and the keeper asleep on the floor beside it, with the
book under her head. Asked what she had missed most in those weeks, she said that she had run out of ink on the ninth
day, and that there were now forty-one evenings of which nobody would ever know the weather."""
QUESTIONS: Final = ("What colour was the cover of the book?", "Why did she burn the chairs and the table?")


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model("smollm2")


@dataclass(frozen=True)
class Asked:
    """A question about the story, and what plain transformers answers."""

    ids: torch.Tensor
    """`[1, tokens]`"""
    plain: Plain


@pytest.fixture(scope="module")
def asked(model: Any) -> list[Asked]:
    tokenizer = load_tokenizer("smollm2")
    asked = []
    for question in QUESTIONS:
        text = f"<|im_start|>user\n{STORY}\n\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        asked.append(Asked(ids, plain_generate(model, ids, NEW, tolerance=TOLERANCE)))
    return asked


@pytest.mark.slow
@pytest.mark.parametrize("device_pages", [64, 3], ids=["fits", "four_times_the_device"])
def test_a_real_model_answers_the_same(model: Any, asked: list[Asked], device_pages: int) -> None:
    layout = layout_of(model, page_size=PAGE_SIZE)
    assert layout.page_bytes == 2 * 368_640
    one, other = (question.ids[0] for question in asked)
    shared = int((one[: len(other)] != other[: len(one)]).nonzero()[0])
    assert shared > 180, "the story comes first"
    with (
        open_cache(layout, device_pages=device_pages) as cache,
        TransformersEngine(model, cache) as engine,
        counting(model) as counter,
    ):
        for question, cached in zip(asked, (0, shared), strict=True):
            with engine.request(question.ids) as request:
                assert request.cached == cached
                generation = request.generate(NEW, output_logits=True)
            assert_same(generation.tokens, generation.logits, question.plain, tolerance=TOLERANCE)
            assert counter.take() == question.ids.shape[1] - cached + len(generation.tokens) - 1
            assert question.ids.shape[1] > 4 * device_pages * PAGE_SIZE or device_pages == 64
            device = cache.stats()["tiers"]["device"]
            assert device["used_bytes"] <= device["capacity_bytes"] <= device_pages * layout.page_bytes
