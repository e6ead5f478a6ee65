"""The transformers engine against plain transformers: same tokens, same logits, and nothing computed twice."""

import copy
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaAttention

from hicache.errors import BadRequest, Closed
from hicache.namespace import Namespace
from hicache.service.compose import HiCache
from hicache.service.engines.transformers import Request, TransformersEngine, layout_of
from tests.service.tiny_llama import (
    PAGE_SIZE,
    TOLERANCE,
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

NEW: Final = 8
"""Tokens that most tests generate."""


def _model(engine: TransformersEngine) -> Any:
    """The engine's model, without the types that transformers gives its methods in part only."""
    return engine.model


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


@pytest.fixture
def counter(model: Any) -> Iterator[PassCounter]:
    with counting(model) as counter:
        yield counter


# -- equal to plain transformers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1000, 256, 16, 7])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (6, 2), (4, 1)], ids=["mha", "gqa3", "gqa4"])
def test_generates_what_plain_transformers_generates(num_heads: int, num_kv_heads: int, chunk_size: int) -> None:
    model = tiny_model(num_heads=num_heads, num_kv_heads=num_kv_heads)
    ids = random_ids(300)
    plain = plain_generate(model, ids, NEW)
    with (
        open_cache(layout_of(model, page_size=PAGE_SIZE)) as cache,
        TransformersEngine(model, cache) as engine,
        counting(model) as counter,
        engine.request(ids) as request,
    ):
        generation = request.generate(NEW, chunk_size=chunk_size, output_logits=True)
        assert_same(generation.tokens, generation.logits, plain)
        assert counter.tokens == 300 + NEW - 1
        assert max(counter.passes) == min(chunk_size, 300)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 16}),
        ("Mistral", {"sliding_window": None}),
        ("Granite", {"attention_multiplier": 0.5}),
        ("Olmo2", {}),
        ("SmolLM3", {}),
        ("Phi3", {"sliding_window": None}),
        ("Gemma", {"head_dim": 16}),
        ("Mixtral", {"num_local_experts": 2}),
        ("StableLm", {}),
    ],
)
def test_serves_the_relatives_of_llama(kind: str, config: dict[str, Any]) -> None:
    model = tiny_model(kind, **config)
    ids = random_ids(100)
    plain = plain_generate(model, ids, 4)
    with open_cache(layout_of(model, page_size=PAGE_SIZE)) as cache, TransformersEngine(model, cache) as engine:
        for cached in (0, kept(103, 100)):
            with engine.request(ids) as request:
                assert request.cached == cached
                generation = request.generate(4, chunk_size=33, output_logits=True)
            assert_same(generation.tokens, generation.logits, plain)


@pytest.mark.parametrize("rope", ["linear", "yarn", "llama3"])
def test_serves_rope_that_depends_on_the_position_alone(rope: str) -> None:
    scaling: dict[str, Any] = {"rope_type": rope, "rope_theta": 10_000.0, "factor": 4.0}
    if rope != "linear":
        scaling |= {"original_max_position_embeddings": 512}
    if rope == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = tiny_model(rope_parameters=scaling)
    ids = random_ids(100)
    plain = plain_generate(model, ids, 4)
    with open_cache(layout_of(model, page_size=PAGE_SIZE)) as cache, TransformersEngine(model, cache) as engine:
        for cached in (0, kept(103, 100)):
            with engine.request(ids) as request:
                assert request.cached == cached
                generation = request.generate(4, output_logits=True)
            assert_same(generation.tokens, generation.logits, plain)


@pytest.mark.parametrize("chunk_size", [1000, 256, 16])
def test_prefill_gives_the_logits_of_the_last_token(engine: TransformersEngine, chunk_size: int) -> None:
    ids = random_ids(300)
    plain = plain_generate(_model(engine), ids, 1)
    seen: list[tuple[int, int]] = []
    with engine.request(ids) as request:
        logits = request.prefill(chunk_size, lambda done, of: seen.append((done, of)))
        assert request.length == 300
        assert request.num_pending == 0
    torch.testing.assert_close(logits, plain.logits[0], rtol=0, atol=TOLERANCE)
    assert seen == [(min(end, 300), 300) for end in range(chunk_size, 300 + chunk_size, chunk_size)]


def test_bfloat16_agrees_as_closely_as_two_orders_of_rounding_do() -> None:
    model = tiny_model().to(torch.bfloat16)
    ids = random_ids(200)
    eager = tiny_model().to(torch.bfloat16)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        plain = model(ids).logits[0, -1].float()
        other_order = (eager(ids).logits[0, -1].float() - plain).abs().max()
    with open_cache(layout_of(model, page_size=PAGE_SIZE)) as cache, TransformersEngine(model, cache) as engine:
        for _ in range(2):
            with engine.request(ids) as request:
                difference = (request.prefill(64).float() - plain).abs().max()
            # transformers' own two orders of adding up (eager, sdpa) are the yardstick: bfloat16 keeps 8 bits.
            assert float(difference) <= 3 * float(other_order)


# -- model.generate itself -------------------------------------------------------------------------------------------


def test_generate_of_transformers_takes_the_cache(engine: TransformersEngine, counter: PassCounter) -> None:
    ids = random_ids(100)
    plain = plain_generate(_model(engine), ids, NEW)
    counter.take()
    for cached in (0, kept(100 + NEW - 1, 100)):
        with engine.request(ids) as request:
            sequences = _model(engine).generate(ids, cache=request.cache, max_new_tokens=NEW, do_sample=False)
            assert tuple(sequences[0, 100:].tolist()) == plain.tokens
            assert counter.take() == 100 - cached + NEW - 1
            assert request.tokens.tolist() == sequences[0, :-1].tolist()


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_the_older_keyword_works_too(engine: TransformersEngine) -> None:
    ids = random_ids(50)
    plain = plain_generate(_model(engine), ids, 1)
    with engine.request(ids) as request, torch.no_grad():
        logits = _model(engine)(ids, past_key_values=request.cache).logits[0, -1]
        assert request.length == 50
    torch.testing.assert_close(logits, plain.logits[0], rtol=0, atol=TOLERANCE)


def test_inference_mode_works_too(engine: TransformersEngine) -> None:
    ids = random_ids(50)
    plain = plain_generate(_model(engine), ids, 1)
    with engine.request(ids) as request:
        with torch.inference_mode():
            _model(engine)(ids[:, :20], cache=request.cache)
        torch.testing.assert_close(request.prefill(), plain.logits[0], rtol=0, atol=TOLERANCE)


def test_generate_of_transformers_prefills_in_chunks(engine: TransformersEngine, counter: PassCounter) -> None:
    ids = random_ids(300)
    plain = plain_generate(_model(engine), ids, NEW)
    counter.take()
    with engine.request(ids[:, :150]) as request:
        request.prefill()
    assert counter.take() == 150
    with engine.request(ids) as request:
        cached = request.cached
        assert cached == kept(150, 300)
        sequences = _model(engine).generate(
            ids, cache=request.cache, max_new_tokens=NEW, do_sample=False, prefill_chunk_size=64
        )
    assert tuple(sequences[0, 300:].tolist()) == plain.tokens
    assert counter.passes == [64, 64, 28] + [1] * (NEW - 1)


def test_generate_of_transformers_takes_new_ids_with_the_whole_mask(
    engine: TransformersEngine, counter: PassCounter
) -> None:
    ids = random_ids(100)
    plain = plain_generate(_model(engine), ids, NEW)
    with engine.request(ids[:, :80]) as request:
        request.prefill()
        counter.take()
        sequences = _model(engine).generate(
            ids[:, 80:],
            attention_mask=torch.ones(1, 100, dtype=torch.long),
            cache=request.cache,
            max_new_tokens=NEW,
            do_sample=False,
        )
        assert tuple(sequences[0, 20:].tolist()) == plain.tokens
        assert counter.tokens == 20 + NEW - 1


# -- reuse ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shared", [0, 1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 3 * PAGE_SIZE + 5, 5 * PAGE_SIZE, 5 * PAGE_SIZE + 2]
)
def test_a_shared_prefix_is_not_recomputed(engine: TransformersEngine, counter: PassCounter, shared: int) -> None:
    first, second = random_ids(5 * PAGE_SIZE + 3), random_ids(6 * PAGE_SIZE, seed=2)
    # Differs from the first in every position, then agrees where it should.
    second = torch.where(second[:, : first.shape[1]] == first, (first + 1) % VOCAB_SIZE, second[:, : first.shape[1]])
    second[:, :shared] = first[:, :shared]
    plain = plain_generate(_model(engine), second, NEW)
    with engine.request(first) as request:
        assert request.cached == 0
        request.prefill()
    counter.take()
    with engine.request(second) as request:
        # Only whole pages are kept; within them, every shared token counts.
        assert request.cached == min(shared, 5 * PAGE_SIZE)
        assert sum(request.cached_by_tier.values()) == request.cached
        generation = request.generate(NEW, output_logits=True)
    assert_same(generation.tokens, generation.logits, plain)
    assert counter.tokens == second.shape[1] - min(shared, 5 * PAGE_SIZE) + NEW - 1


@pytest.mark.parametrize("length", [1, PAGE_SIZE, PAGE_SIZE + 1, 4 * PAGE_SIZE])
def test_of_a_prompt_that_is_cached_whole_the_last_token_is_computed(
    engine: TransformersEngine, counter: PassCounter, length: int
) -> None:
    ids = random_ids(length)
    plain = plain_generate(_model(engine), ids, 1)
    longer = torch.cat([ids, random_ids(PAGE_SIZE, seed=3)], dim=1)
    with engine.request(longer) as request:
        request.prefill()
    counter.take()
    with engine.request(ids) as request:
        assert request.cached == length - 1
        torch.testing.assert_close(request.prefill(), plain.logits[0], rtol=0, atol=TOLERANCE)
    assert counter.tokens == 1


def test_a_conversation_goes_on_without_recomputing(engine: TransformersEngine, counter: PassCounter) -> None:
    turns = [random_ids(70, seed=4), random_ids(21, seed=5), random_ids(3, seed=6)]
    ids = torch.empty(1, 0, dtype=torch.long)
    with engine.request(turns[0]) as request:
        for number, turn in enumerate(turns):
            ids = torch.cat([ids, turn], dim=1)
            plain = plain_generate(_model(engine), ids, NEW)
            counter.take()
            if number:
                request.extend(turn)
            generation = request.generate(NEW, output_logits=True)
            assert_same(generation.tokens, generation.logits, plain)
            # After the first turn the last token of the answer before is pending too.
            assert counter.take() == turn.shape[1] + (NEW - 1 if number == 0 else NEW)
            ids = torch.cat([ids, torch.tensor([generation.tokens])], dim=1)
        assert request.tokens.tolist() == ids[0].tolist()
    with engine.request(ids) as request:
        assert request.cached == kept(ids.shape[1] - 1, ids.shape[1])


def test_prefill_then_generate_from_a_chosen_token(engine: TransformersEngine, counter: PassCounter) -> None:
    ids = random_ids(60)
    plain = plain_generate(_model(engine), ids, NEW)
    counter.take()
    with engine.request(ids) as request:
        first = int(request.prefill().argmax())
        request.extend([first])
        generation = request.generate(NEW - 1)
    assert (first, *generation.tokens) == plain.tokens
    assert counter.tokens == 60 + NEW - 1


def test_another_salt_shares_nothing(engine: TransformersEngine) -> None:
    ids = random_ids(60)
    salted = dataclasses.replace(engine.namespace, salt=b"other")
    with engine.request(ids) as request:
        request.prefill()
    for namespace, cached in ((salted, 0), (None, kept(60, 60))):
        with engine.request(ids, namespace=namespace) as request:
            assert request.cached == cached


# -- contexts larger than the device --------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 16, 5])
def test_a_context_larger_than_the_device_runs(model: Any, chunk_size: int | None) -> None:
    ids = random_ids(400)
    plain = plain_generate(model, ids, NEW)
    with (
        open_cache(layout_of(model, page_size=PAGE_SIZE), device_pages=6) as cache,
        TransformersEngine(model, cache) as engine,
        counting(model) as counter,
    ):
        for cached in (0, kept(400 + NEW - 1, 400)):
            with engine.request(ids) as request:
                assert request.cached == cached
                generation = request.generate(NEW, chunk_size=chunk_size, output_logits=True)
                assert_same(generation.tokens, generation.logits, plain)
                assert counter.take() == 400 - cached + NEW - 1
            device = cache.stats()["tiers"]["device"]
            assert device["capacity_pages"] == 6
            assert device["used_pages"] <= 6


@pytest.mark.parametrize("device_pages", [1, 2, 3])
def test_the_smallest_devices_run(model: Any, device_pages: int) -> None:
    ids = random_ids(100)
    plain = plain_generate(model, ids, 2 * PAGE_SIZE)
    with (
        open_cache(layout_of(model, page_size=PAGE_SIZE), device_pages=device_pages) as cache,
        TransformersEngine(model, cache) as engine,
    ):
        # The second one continues from the middle of a page.
        for prompt in (ids[:, :70], ids):
            with engine.request(prompt) as request:
                generation = request.generate(2 * PAGE_SIZE, output_logits=True)
        assert_same(generation.tokens, generation.logits, plain)


def test_a_context_on_all_three_tiers_runs(model: Any, tmp_path: Path) -> None:
    layout = layout_of(model, page_size=PAGE_SIZE)
    ids = random_ids(600)
    plain = plain_generate(model, ids, NEW)
    with (
        open_cache(
            layout, device_pages=6, host_pages=10, nvme_dir=tmp_path / "nvme", nvme_bytes=64 << 20
        ) as cache,
        TransformersEngine(model, cache) as engine,
    ):
        for cached in (0, kept(600 + NEW - 1, 600)):
            with engine.request(ids) as request:
                assert request.cached == cached
                generation = request.generate(NEW, output_logits=True)
            assert_same(generation.tokens, generation.logits, plain)
        assert cache.stats()["tiers"]["nvme"]["used_pages"] > 0


def damage_every_page(directory: Path) -> int:
    """Flip a byte in the payload of every page in an NVMe tier's directory (`tiers/FORMAT.md`); returns the pages."""
    num_pages = 0
    for segment in directory.glob("hicache-*.seg"):
        with segment.open("r+b") as file:
            blocks = range(0, segment.stat().st_size, 4096)
            for at in blocks:
                file.seek(at)
                if file.read(8) == b"HICPAGE\0":
                    file.seek(at + 4096)
                    byte = file.read(1)[0]
                    file.seek(at + 4096)
                    file.write(bytes([byte ^ 1]))
                    num_pages += 1
            os.fsync(file.fileno())
    return num_pages


@pytest.mark.parametrize("step", ["prefill", "generate", "of_transformers"])
@pytest.mark.parametrize("found", [True, False], ids=["found", "own"])
def test_pages_that_turn_out_damaged_are_computed_again(
    model: Any, tmp_path: Path, step: str, found: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the damaged pages were found in the cache or computed by the request itself."""
    layout = layout_of(model, page_size=PAGE_SIZE)
    ids = random_ids(600)
    plain = plain_generate(model, ids, NEW)
    directory = tmp_path / "nvme"
    with (
        open_cache(layout, device_pages=6, host_pages=10, nvme_dir=directory, nvme_bytes=64 << 20) as cache,
        TransformersEngine(model, cache) as engine,
        counting(model) as counter,
    ):
        if found:
            with engine.request(ids[:, :580]) as request:
                request.prefill()
        with engine.request(ids[:, :580]) as request:
            assert request.cached == (576 if found else 0)
            request.prefill()
            request.extend(ids[:, 580:])
            assert damage_every_page(directory) > 0
            counter.take()
            if step == "prefill":
                seen: list[tuple[int, int]] = []
                logits = request.prefill(progress=lambda done, of: seen.append((done, of)))
                torch.testing.assert_close(logits, plain.logits[0], rtol=0, atol=TOLERANCE)
                assert all(0 < done <= of for done, of in seen)
                assert seen[-1][0] == seen[-1][1] > 20
                num_new = 0
            elif step == "of_transformers":
                output = model.generate(ids, cache=request.cache, max_new_tokens=NEW, do_sample=False)
                assert tuple(output[0, 600:].tolist()) == plain.tokens
                num_new = NEW - 1
            else:
                generation = request.generate(NEW, output_logits=True)
                assert_same(generation.tokens, generation.logits, plain)
                num_new = NEW - 1
            assert request.length == 600 + num_new
            # The pass that met the damage counted 20 tokens; then came what was lost, and those 20.
            num_again = counter.tokens - 20 - 20 - num_new
            assert 0 < num_again < 580
            assert request.num_lost == (num_again - 4 if found else 0)
    assert "recomputing" in caplog.text


# -- several requests -----------------------------------------------------------------------------------------------


def test_two_requests_take_turns_on_one_model(engine: TransformersEngine, counter: PassCounter) -> None:
    prompts = [random_ids(90, seed=7), random_ids(75, seed=8)]
    plains = [plain_generate(_model(engine), ids, NEW) for ids in prompts]
    counter.take()
    with engine.request(prompts[0]) as one, engine.request(prompts[1]) as other, torch.no_grad():
        requests = (one, other)
        chosen: tuple[list[int], list[int]] = ([], [])
        for start in range(0, 90, 20):
            for request, ids, tokens in zip(requests, prompts, chosen, strict=True):
                if (chunk := ids[:, start : start + 20]).shape[1]:
                    logits = _model(engine)(chunk, cache=request.cache).logits
                    if request.length == ids.shape[1]:
                        tokens.append(int(logits[0, -1].argmax()))
        for _ in range(NEW - 1):
            for request, tokens in zip(requests, chosen, strict=True):
                logits = _model(engine)(torch.tensor([tokens[-1:]]), cache=request.cache).logits
                tokens.append(int(logits[0, -1].argmax()))
    assert [tuple(tokens) for tokens in chosen] == [plain.tokens for plain in plains]
    assert counter.tokens == 90 + 75 + 2 * (NEW - 1)


def test_two_threads_run_two_requests(engine: TransformersEngine) -> None:
    prompts = [random_ids(90, seed=7), random_ids(75, seed=8)]
    plains = [plain_generate(_model(engine), ids, NEW) for ids in prompts]
    results: dict[int, tuple[int, ...]] = {}
    meet = threading.Barrier(2)

    def run(number: int) -> None:
        with engine.request(prompts[number]) as request:
            meet.wait(timeout=60)
            results[number] = request.generate(NEW, chunk_size=16).tokens

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[number] for number in range(2)] == [plain.tokens for plain in plains]


# -- exceptions -----------------------------------------------------------------------------------------------------


class FailAt:
    """Raises in one layer, in the n-th pass from now; once."""

    def __init__(self, model: Any, layer: int, error: BaseException, *, passes: int = 1) -> None:
        self._left = passes
        self._error = error
        self._handle = model.model.layers[layer].register_forward_pre_hook(self._hook)

    def _hook(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self._left -= 1
        if self._left == 0:
            self._handle.remove()
            raise self._error


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_forward_pass_that_fails_leaves_the_request_usable(
    engine: TransformersEngine, counter: PassCounter, layer: int, error: BaseException
) -> None:
    ids = random_ids(100)
    plain = plain_generate(_model(engine), ids, NEW)
    with engine.request(ids) as request:
        FailAt(_model(engine), layer, error, passes=2)
        with pytest.raises(type(error)):
            request.prefill(chunk_size=40)
        # A chunk ends at a page border: 40 tokens are 32.
        assert request.length == 32
        assert request.cache.get_seq_length() == 32
        counter.take()
        generation = request.generate(NEW, output_logits=True)
        assert_same(generation.tokens, generation.logits, plain)
        assert counter.take() == 68 + NEW - 1
    with engine.request(ids) as request:
        assert request.cached == kept(100 + NEW - 1, 100)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_pass_of_the_callers_own_that_fails_leaves_the_request_usable(
    engine: TransformersEngine, error: BaseException
) -> None:
    ids = random_ids(100)
    plain = plain_generate(_model(engine), ids, 1)
    with engine.request(ids) as request, torch.no_grad():
        FailAt(_model(engine), 1, error)
        with pytest.raises(type(error)):
            _model(engine)(ids, cache=request.cache)
        assert request.cache.get_seq_length() == 0
        torch.testing.assert_close(_model(engine)(ids).logits[0, -1], plain.logits[0], rtol=0, atol=TOLERANCE)
        assert request.length == 0
        logits = _model(engine)(ids, cache=request.cache).logits[0, -1]
        torch.testing.assert_close(logits, plain.logits[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_generation_that_fails_goes_on_where_it_was(
    engine: TransformersEngine, counter: PassCounter, error: BaseException
) -> None:
    ids = random_ids(100)
    plain = plain_generate(_model(engine), ids, NEW)
    with engine.request(ids) as request:
        FailAt(_model(engine), 1, error, passes=4)
        with pytest.raises(type(error)):
            request.generate(NEW)
        # One pass for the prompt and two for tokens; the third token was chosen, its pass failed.
        assert request.tokens[100:].tolist() == list(plain.tokens[:3])
        assert request.num_pending == 1
        counter.take()
        assert request.generate(NEW - 3).tokens == plain.tokens[3:]
        assert counter.tokens == NEW - 3


def test_progress_that_raises_loses_nothing(engine: TransformersEngine) -> None:
    ids = random_ids(100)
    plain = plain_generate(_model(engine), ids, 1)

    def stop(done: int, of: int) -> None:
        raise RuntimeError("enough")

    with engine.request(ids) as request:
        with pytest.raises(RuntimeError, match="enough"):
            request.prefill(chunk_size=40, progress=stop)
        assert request.length == 32
        torch.testing.assert_close(request.prefill(), plain.logits[0], rtol=0, atol=TOLERANCE)


# -- attaching ------------------------------------------------------------------------------------------------------


def test_detaching_gives_the_model_back(model: Any, cache: HiCache) -> None:
    ids = random_ids(40)
    before = model.config._attn_implementation
    logits = model(ids).logits
    engine = TransformersEngine(model, cache)
    assert model.config._attn_implementation == "hicache"
    with engine.request(ids) as request:
        request.prefill()
        engine.detach()
        engine.detach()
        with pytest.raises(BadRequest, match="while its engine is attached"), torch.no_grad():
            model(ids, cache=request.cache)
    assert model.config._attn_implementation == before
    assert "forward" not in model.__dict__
    assert torch.equal(model(ids).logits, logits)
    with TransformersEngine(model, cache) as again, again.request(ids) as request:
        assert request.cached == kept(40, 40)


def test_calls_without_a_requests_cache_run_as_before(engine: TransformersEngine) -> None:
    model = _model(engine)
    ids = torch.cat([random_ids(30), random_ids(30, seed=2)])
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    attached = model.generate(ids, **options)
    trained = model(ids, labels=ids).loss
    engine.detach()
    assert torch.equal(model.generate(ids, **options), attached)
    torch.testing.assert_close(model(ids, labels=ids).loss, trained)


def test_a_call_without_the_cache_within_a_pass_is_a_call_without_the_cache(engine: TransformersEngine) -> None:
    ids = random_ids(40)
    plain = plain_generate(_model(engine), ids, 1)
    inner: list[torch.Tensor] = []

    def call(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        handle.remove()
        inner.append(_model(engine)(ids).logits[0, -1])

    handle = _model(engine).model.layers[1].register_forward_pre_hook(call)
    with engine.request(ids) as request:
        inner.append(request.prefill())
    for logits in inner:
        torch.testing.assert_close(logits, plain.logits[0], rtol=0, atol=TOLERANCE)
    assert len(inner) == 2


def test_a_copy_of_an_attached_model_is_a_model_of_its_own(engine: TransformersEngine) -> None:
    ids = random_ids(40)
    copied = copy.deepcopy(_model(engine))
    with torch.no_grad():
        copied.lm_head.weight += 1
        logits = _model(engine)(ids).logits
        assert not torch.allclose(copied(ids).logits, logits)
        engine.detach()
        torch.testing.assert_close(_model(engine)(ids).logits, logits)


def test_a_wrapper_around_the_engines_own_stays(model: Any, cache: HiCache) -> None:
    ids = random_ids(40)
    logits = model(ids).logits
    calls: list[int] = []
    with TransformersEngine(model, cache) as engine:
        inner = model.forward

        def outer(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return inner(*args, **kwargs)

        model.forward = outer
        with engine.request(ids) as request:
            request.prefill()
    try:
        torch.testing.assert_close(model(ids).logits, logits)
        assert len(calls) == 2
        with TransformersEngine(model, cache) as again, again.request(ids) as request:
            assert request.cached == kept(40, 40)
            request.prefill()
        assert model.forward is outer
        assert len(calls) == 3
    finally:
        del model.forward


def test_a_model_has_one_engine(engine: TransformersEngine) -> None:
    with pytest.raises(BadRequest, match="attached to another engine"):
        TransformersEngine(_model(engine), engine.cache)


def test_the_cache_must_be_of_the_models_layout(model: Any) -> None:
    other = tiny_model(num_kv_heads=3)
    with open_cache(layout_of(other, page_size=PAGE_SIZE)) as cache:
        with pytest.raises(BadRequest, match=r"cache\.layout"):
            TransformersEngine(model, cache)
        with pytest.raises(BadRequest, match=r"cache\.layout"):
            TransformersEngine(tiny_model(num_kv_heads=3).to(torch.bfloat16), cache)
    assert model.config._attn_implementation == "sdpa"


def test_changed_weights_are_refused() -> None:
    model = tiny_model()
    ids = random_ids(40)
    with open_cache(layout_of(model, page_size=PAGE_SIZE)) as cache:
        with TransformersEngine(model, cache) as engine:
            with engine.request(ids) as request:
                request.prefill()
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
            with pytest.raises(BadRequest, match="other weights"):
                engine.request(ids)
        with TransformersEngine(model, cache) as engine, engine.request(ids) as request:
            assert request.cached == 0


def test_the_default_chunk_fits_the_device(model: Any) -> None:
    layout = layout_of(model, page_size=PAGE_SIZE)
    for device_pages, chunk_size in ((1, 16), (6, 48), (1000, 512)):
        with open_cache(layout, device_pages=device_pages) as cache, TransformersEngine(model, cache) as engine:
            assert engine.chunk_size == chunk_size


# -- what a generation reports --------------------------------------------------------------------------------------


class Listener:
    """A streamer that notes what it is given."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_hears_the_prompt_and_every_token(engine: TransformersEngine) -> None:
    ids = random_ids(50)
    listener = Listener()
    with engine.request(ids) as request:
        generation = request.generate(NEW, streamer=listener)
    assert listener.heard == [ids[0].tolist(), *([token] for token in generation.tokens)]
    assert listener.ended == 1
    assert generation.logits is None
    assert generation.ttft_s > 0
    assert generation.total_s > 0


def test_generation_ends_at_the_end_of_sequence(engine: TransformersEngine) -> None:
    ids = random_ids(50)
    plain = plain_generate(_model(engine), ids, NEW)
    with engine.request(ids) as request:
        generation = request.generate(NEW, eos_token_id=plain.tokens[3], pad_token_id=0)
    assert generation.tokens == plain.tokens[: plain.tokens.index(plain.tokens[3]) + 1]


def test_sampling_options_reach_transformers(engine: TransformersEngine) -> None:
    ids = random_ids(50)
    options: dict[str, Any] = {"do_sample": True, "temperature": 3.0, "top_k": 50}
    torch.manual_seed(5)
    plain = _model(engine).generate(ids, max_new_tokens=NEW, **options)[0, 50:].tolist()
    torch.manual_seed(5)
    with engine.request(ids) as request:
        assert list(request.generate(NEW, **options).tokens) == plain


def test_generation_is_greedy_whatever_the_models_settings_say() -> None:
    model = tiny_model()
    ids = random_ids(50)
    plain = plain_generate(model, ids, NEW)
    model.generation_config.update(do_sample=True, temperature=5.0)
    with (
        open_cache(layout_of(model, page_size=PAGE_SIZE)) as cache,
        TransformersEngine(model, cache) as engine,
        engine.request(ids) as request,
    ):
        assert request.generate(NEW).tokens == plain.tokens


# -- refusals -------------------------------------------------------------------------------------------------------


def _batch(request: Request, ids: torch.Tensor) -> None:
    _model(request.engine)(ids.repeat(2, 1), cache=request.cache)


def _padding(request: Request, ids: torch.Tensor) -> None:
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    _model(request.engine)(ids, attention_mask=mask, cache=request.cache)


def _padded_generate(request: Request, ids: torch.Tensor) -> None:
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    _model(request.engine).generate(ids, attention_mask=mask, cache=request.cache, max_new_tokens=2)


def _mask_of_the_new_tokens(request: Request, ids: torch.Tensor) -> None:
    _model(request.engine)(ids[:, :20], cache=request.cache)
    _model(request.engine)(ids[:, 20:], attention_mask=torch.ones_like(ids[:, 20:]), cache=request.cache)


def _mask_4d(request: Request, ids: torch.Tensor) -> None:
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
    _model(request.engine)(ids, attention_mask=mask, cache=request.cache)


def _positions(request: Request, ids: torch.Tensor) -> None:
    positions = torch.arange(5, 5 + ids.shape[1])[None]
    _model(request.engine)(ids, position_ids=positions, cache=request.cache)


def _embeddings(request: Request, ids: torch.Tensor) -> None:
    embeddings = _model(request.engine).get_input_embeddings()(ids)
    _model(request.engine)(inputs_embeds=embeddings, cache=request.cache)


def _other_tokens(request: Request, ids: torch.Tensor) -> None:
    _model(request.engine)((ids + 1) % VOCAB_SIZE, cache=request.cache)


def _prompt_twice(request: Request, ids: torch.Tensor) -> None:
    _model(request.engine)(ids[:, :20], cache=request.cache)
    _model(request.engine)(ids, cache=request.cache)


def _suffix_without_the_mask(request: Request, ids: torch.Tensor) -> None:
    _model(request.engine)(ids[:, :20], cache=request.cache)
    _model(request.engine).generate(ids[:, 20:], cache=request.cache, max_new_tokens=2)


def _no_use_of_the_cache(request: Request, ids: torch.Tensor) -> None:
    _model(request.engine)(ids, cache=request.cache, use_cache=False)


def _attention_weights(request: Request, ids: torch.Tensor) -> None:
    _model(request.engine)(ids, cache=request.cache, output_attentions=True)


def _unknown_tensor(request: Request, ids: torch.Tensor) -> None:
    _model(request.engine)(ids, cache=request.cache, token_type_ids=torch.ones_like(ids))


def _beams(request: Request, ids: torch.Tensor) -> None:
    _model(request.engine).generate(ids, cache=request.cache, num_beams=2, max_new_tokens=2)


def _gradients(request: Request, ids: torch.Tensor) -> None:
    with torch.enable_grad():
        _model(request.engine)(ids, cache=request.cache)


def _submodule(request: Request, ids: torch.Tensor) -> None:
    _model(request.engine).model(ids, cache=request.cache)


def _own_beams(request: Request, ids: torch.Tensor) -> None:
    request.generate(2, num_beams=2)


def _own_mask(request: Request, ids: torch.Tensor) -> None:
    request.generate(2, attention_mask=torch.ones_like(ids))


def _nothing_pending(request: Request, ids: torch.Tensor) -> None:
    request.prefill()
    request.generate(2)


def _no_tokens_wanted(request: Request, ids: torch.Tensor) -> None:
    request.generate(0)


def _chunk_of_nothing(request: Request, ids: torch.Tensor) -> None:
    request.prefill(chunk_size=0)


def _extension_out_of_vocabulary(request: Request, ids: torch.Tensor) -> None:
    request.extend([VOCAB_SIZE])


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (_batch, "input_ids"),
        (_padding, "attention_mask"),
        (_padded_generate, "attention_mask"),
        (_mask_of_the_new_tokens, "attention_mask"),
        (_mask_4d, "attention_mask"),
        (_positions, "position_ids"),
        (_embeddings, "inputs_embeds"),
        (_other_tokens, "input_ids"),
        (_prompt_twice, "input_ids"),
        (_suffix_without_the_mask, "input_ids"),
        (_no_use_of_the_cache, "use_cache"),
        (_attention_weights, "output_attentions"),
        (_unknown_tensor, "token_type_ids"),
        (_beams, "input_ids"),
        (_gradients, "model"),
        (_submodule, "cache"),
        (_own_beams, "num_beams"),
        (_own_mask, "attention_mask"),
        (_nothing_pending, "tokens"),
        (_no_tokens_wanted, "max_new_tokens"),
        (_chunk_of_nothing, "chunk_size"),
        (_extension_out_of_vocabulary, "input_ids"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    engine: TransformersEngine, call: Callable[[Request, torch.Tensor], None], field: str
) -> None:
    ids = random_ids(50)
    plain = plain_generate(_model(engine), ids, 1)
    with engine.request(ids) as request:
        with pytest.raises(BadRequest) as refusal, torch.no_grad():
            call(request, ids)
        assert refusal.value.field == field
        # Nothing came of it: the request goes on and is right.
        if request.num_pending:
            torch.testing.assert_close(request.prefill(), plain.logits[0], rtol=0, atol=TOLERANCE)


def test_training_mode_is_refused(engine: TransformersEngine) -> None:
    ids = random_ids(20)
    _model(engine).train()
    try:
        with engine.request(ids) as request, pytest.raises(BadRequest, match="training mode"):
            request.prefill()
    finally:
        _model(engine).eval()


def test_a_request_takes_one_pass_at_a_time(engine: TransformersEngine) -> None:
    """Another thread that calls the model with the same request is told so, and the first one's pass stays whole."""
    ids = random_ids(40)
    plain = plain_generate(_model(engine), ids, 1)
    errors: list[BaseException] = []

    def intrude() -> None:
        try:
            with torch.no_grad():
                _model(engine)(ids, cache=request.cache)
        except BadRequest as error:
            errors.append(error)

    def once(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        handle.remove()
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()

    with engine.request(ids) as request:
        handle = _model(engine).model.layers[1].register_forward_pre_hook(once)
        torch.testing.assert_close(request.prefill(), plain.logits[0], rtol=0, atol=TOLERANCE)
    assert [str(error) for error in errors] == [
        "cache: is in a forward pass already; a request takes one at a time"
    ]


class OddAttention(LlamaAttention):
    """A layer that attends to other keys than it stores."""

    def forward(self, hidden_states: torch.Tensor, cache: Any = None, **kwargs: Any) -> Any:
        changed = type("Changed", (), {"update": lambda _, *args, **options: self._update(cache, args, options)})()
        return super().forward(hidden_states, cache=changed, **kwargs)

    def _update(self, cache: Any, args: Any, options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = cache.update(*args, **options)
        return key * 2, value


@pytest.mark.parametrize("odd", ["keys", "missing_layer", "mask", "shapes"])
def test_a_model_that_does_something_else_is_caught_in_the_pass(odd: str) -> None:
    model = tiny_model()
    ids = random_ids(40)
    with (
        open_cache(layout_of(model, page_size=PAGE_SIZE)) as cache,
        TransformersEngine(model, cache) as engine,
        engine.request(ids) as request,
    ):
        layer = model.model.layers[1]
        if odd == "keys":
            layer.self_attn.__class__ = OddAttention
        elif odd == "missing_layer":
            del model.model.layers[2]
        elif odd == "mask":

            def see_everything(*args: Any) -> None:
                create_causal_mask(
                    model.config,
                    torch.empty(1, 40, 0),
                    None,
                    request.cache,
                    or_mask_function=lambda *index: index[0] >= 0,
                )

            layer.register_forward_pre_hook(see_everything)
        else:
            layer.self_attn.v_proj = torch.nn.Linear(96, 64)
        with pytest.raises(BadRequest, match="model") as refusal:
            request.prefill()
        assert refusal.value.field == "model"
        assert request.length == 0
    with open_cache(layout_of(tiny_model(), page_size=PAGE_SIZE)) as cache:
        assert cache.match(engine.namespace, ids[0].numpy()).num_tokens == 0


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("crop", (-1,)),
        ("reorder_cache", (torch.tensor([0]),)),
        ("batch_repeat_interleave", (2,)),
        ("batch_select_indices", (torch.tensor([0]),)),
        ("reset", ()),
        ("offload", (0,)),
    ],
)
def test_the_cache_does_not_go_back_or_multiply(
    engine: TransformersEngine, method: str, args: tuple[object, ...]
) -> None:
    with engine.request(random_ids(20)) as request:
        with pytest.raises(BadRequest) as refusal:
            getattr(request.cache, method)(*args)
        assert refusal.value.field == f"cache.{method}"


def test_assisted_decoding_is_refused(engine: TransformersEngine) -> None:
    ids = torch.cat([random_ids(20)] * 3, dim=1)
    with engine.request(ids) as request, pytest.raises(ValueError, match="cropped"):
        _model(engine).generate(ids, cache=request.cache, prompt_lookup_num_tokens=3, max_new_tokens=10)


@pytest.mark.parametrize(
    "ids",
    [[], [[1, 2], [3, 4]], [[1, 2], [3]], [1.5, 2.0], [VOCAB_SIZE], [-1], ["a"], torch.tensor([True])],
    ids=["empty", "batch", "ragged", "floats", "too_large", "negative", "text", "truth"],
)
def test_prompts_that_are_no_token_ids_are_refused(engine: TransformersEngine, ids: Any) -> None:
    with pytest.raises(BadRequest, match="input_ids"):
        engine.request(ids)


def test_a_namespace_of_another_model_is_refused(engine: TransformersEngine) -> None:
    foreign = Namespace(model="revision-7", layout=engine.layout)
    with pytest.raises(BadRequest, match="more than tenant and salt"):
        engine.request(random_ids(20), namespace=foreign)


def test_a_request_of_another_engine_is_refused(engine: TransformersEngine) -> None:
    other_model = tiny_model(seed=9)
    ids = random_ids(20)
    with TransformersEngine(other_model, engine.cache) as other, other.request(ids) as request:
        with pytest.raises(BadRequest, match="another engine"), torch.no_grad():
            _model(engine)(ids, cache=request.cache)
        assert request.length == 0


def test_a_closed_request_is_closed(engine: TransformersEngine) -> None:
    ids = random_ids(20)
    request = engine.request(ids)
    request.close()
    request.close()
    for call in (request.prefill, lambda: request.generate(1), lambda: request.extend([1])):
        with pytest.raises(Closed):
            call()
    with pytest.raises(Closed), torch.no_grad():
        _model(engine)(ids, cache=request.cache)
