"""A request: one sequence of tokens on its way through a model, and the transformers cache that stands for it."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from hicache.errors import BadRequest, Closed, CorruptPage, NotResident, TierUnavailable
from hicache.namespace import Namespace
from hicache.service.engines.transformers.forward import ForwardPass, current
from hicache.tier import TierId

if TYPE_CHECKING:
    from hicache.service.engines.transformers.engine import TransformersEngine

Tokens = npt.NDArray[np.int32]
Progress = Callable[[int, int], None]
"""Called after every chunk of a prefill with the tokens computed so far, and the tokens to compute in all."""

MAX_REOPENS: Final = 16
"""Damaged pages that one call works around, each by recomputing from there on, before it gives up."""

_PASS_ARGUMENTS: Final = frozenset({
    "input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep",
    "return_dict", "output_hidden_states", "output_attentions", "labels", "inputs_embeds",
})  # fmt: skip
"""Arguments of a forward pass whose meaning is known here. Another one that carries a tensor may change the KV."""
_OWN_OPTIONS: Final = (
    "inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache", "past_key_values", "use_cache",
    "cache_implementation", "max_length", "prefill_chunk_size", "return_dict_in_generate",
)  # fmt: skip
"""Options of `model.generate` that a request decides itself."""
_OTHER_MODES: Final = (
    "num_beams", "num_return_sequences", "assistant_model", "prompt_lookup_num_tokens", "guidance_scale",
)  # fmt: skip
"""Options that need several sequences, or one that goes back; 1 and None ask for neither."""

_HINT: Final = (
    "a forward pass takes the tokens after those that are computed, "
    "generate() all tokens, or those after with an attention_mask for all"
)

T = TypeVar("T")
_logger = logging.getLogger(__name__)


class Streamer(Protocol):
    """Takes tokens as they come: transformers' `TextStreamer` and its kind."""

    def put(self, value: torch.Tensor) -> None:
        """The prompt's ids `[1, tokens]` first, then one new token `[1]` at a time."""
        ...

    def end(self) -> None:
        """No more tokens come."""
        ...


@dataclass(frozen=True, slots=True)
class Generation:
    """What one call of `Request.generate` produced."""

    tokens: tuple[int, ...]
    """New token ids, without the prompt; the end-of-sequence token too, if that ended it."""
    logits: torch.Tensor | None
    """The logits that each of them was chosen from, `[len(tokens), vocab_size]` float32 on the CPU, if asked for."""
    ttft_s: float
    """Seconds this request worked until the first new token was known: opening it (the first time), `prefill` calls
    since the generation before, and this call up to that moment."""
    total_s: float
    """Seconds the call took."""


class Request:
    """One running request: a lease on what is cached of its tokens, and everything it computed since.

    Made by `TransformersEngine.request`; a context manager. Its tokens are the prompt and what followed; the first
    `length` of them have KV. One thread at a time. After an exception in a forward pass the request is as it was
    before that pass and can be used again.
    """

    def __init__(self, engine: "TransformersEngine", namespace: Namespace, tokens: Tokens, timeout_s: float) -> None:
        self.engine: Final = engine
        self._namespace = namespace
        self._tokens = tokens
        self._timeout_s = timeout_s
        began = time.perf_counter()
        self._sequence = self._opened_with = engine.cache.sequence(
            namespace, tokens, timeout_s=timeout_s, chunk_tokens=engine.chunk_size, by_layer=True
        )
        self._spent_s = time.perf_counter() - began
        self.num_lost = 0
        """Those of them that turned out damaged when they were read, and were recomputed."""
        self._forward: ForwardPass | None = None
        self._progress: _Progressing | None = None
        self._last_logits: torch.Tensor | None = None
        self._keep_logits = False
        self._closed = False
        self._cache: Final = RequestCache(self)

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were found when the request was opened, and need no compute; always fewer than the
        prompt has. Where the cache loads from the back while the model computes, it grows until the prompt is there."""
        return self._opened_with.num_cached

    @property
    def cached_by_tier(self) -> Mapping[TierId, int]:
        """Where they were found."""
        return self._opened_with.cached_by_tier

    @property
    def cache(self) -> "RequestCache":
        """What stands for this request in transformers: `model.generate(ids, cache=request.cache)`. Who asks for it
        drives the model himself, so what is still being loaded is waited for."""
        if not self._closed:
            self._sequence.load_rest(timeout_s=self._timeout_s)
        return self._cache

    @property
    def tokens(self) -> Tokens:
        """All token ids so far, a copy: prompt, generated tokens, and what `extend` added."""
        return self._tokens.copy()

    @property
    def length(self) -> int:
        """Tokens whose KV is there."""
        return self._sequence.length

    @property
    def num_pending(self) -> int:
        """Tokens that the model has not seen yet."""
        return len(self._tokens) - self.length

    def extend(self, tokens: npt.ArrayLike | torch.Tensor) -> None:
        """Append token ids, to be computed by the next `prefill` or `generate`: the next turn of a chat, say."""
        self._check_open()
        self._tokens = np.concatenate([self._tokens, token_ids(tokens, self.engine.vocab_size)])

    def prefill(self, chunk_size: int | None = None, progress: Progress | None = None) -> torch.Tensor:
        """Run all pending tokens through the model, up to `chunk_size` at a time; the last one's logits `[vocab_size]`.

        The smaller the chunk, the fewer device pages a pass needs. Raises `BadRequest` when nothing is pending, and
        what the model raises.
        """
        chunk_size = self._check_chunk(chunk_size)
        began = time.perf_counter()

        with self._working(progress):
            logits = self._around_damage(lambda: self._compute(chunk_size, leave=0))
        assert logits is not None
        self._spent_s += time.perf_counter() - began
        return logits

    def generate(
        self,
        max_new_tokens: int,
        *,
        chunk_size: int | None = None,
        progress: Progress | None = None,
        output_logits: bool = False,
        streamer: Streamer | None = None,
        **options: Any,
    ) -> Generation:
        """Compute what is pending and generate up to `max_new_tokens` more by `model.generate`, greedily by default.

        `options` are those of `model.generate` (`do_sample`, `eos_token_id`, ...), except what a request decides
        itself. The last new token stays pending. After an exception the tokens chosen so far are kept, and another
        call goes on from there. Raises `BadRequest` when nothing is pending, and for options that need more than one
        sequence (beams, assistants).
        """
        chunk_size = self._check_chunk(chunk_size)
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise BadRequest("max_new_tokens", f"{max_new_tokens!r} is not an integer of at least 1")
        for name in _OWN_OPTIONS:
            if name in options:
                raise BadRequest(name, "is decided by the request; leave it out")
        for name in _OTHER_MODES:
            if options.get(name) not in (None, 1):
                raise BadRequest(name, "needs several sequences, or one that goes back; a request is neither")
        # Greedy, whatever the model's own generation settings say.
        options = {"do_sample": False} | options
        min_new_tokens = options.pop("min_new_tokens", None)

        watch = _TokenWatch(self, streamer)
        num_before = len(self._tokens)
        began = time.perf_counter()

        def run() -> None:
            # A second time only after a damaged page: the tokens chosen before it count.
            watch.begin()
            done = len(watch.tokens)
            self._tokens = np.concatenate([self._tokens[:num_before], np.array(watch.tokens, np.int32)])
            self._compute(chunk_size, leave=chunk_size)
            ids = self._ids(0, len(self._tokens))
            model: Any = self.engine.model
            model.generate(
                ids,
                # As long as the ids: only then does transformers drop the cached prefix from them.
                attention_mask=torch.ones_like(ids),
                cache=self._cache,
                max_new_tokens=max_new_tokens - done,
                min_new_tokens=None if min_new_tokens is None else max(0, min_new_tokens - done),
                streamer=watch,
                **options,
            )

        self._keep_logits = output_logits
        try:
            with self._working(progress):
                self._around_damage(run)
        finally:
            self._keep_logits, self._last_logits = False, None
            self._tokens = np.concatenate([self._tokens[:num_before], np.array(watch.tokens, np.int32)])
        ended = time.perf_counter()
        if streamer is not None:
            streamer.end()
        assert watch.first_s is not None
        spent_s, self._spent_s = self._spent_s, 0.0
        return Generation(
            tokens=tuple(watch.tokens),
            logits=torch.stack(watch.logits) if output_logits else None,
            ttft_s=spent_s + watch.first_s - began,
            total_s=ended - began,
        )

    def close(self) -> None:
        """Give up the lease and what is private to the request; whole pages stay cached. Idempotent.

        Raises `BadRequest` while another thread is in a forward pass with it.
        """
        if not self._closed:
            self.discard(None)
            if self._forward is not None:
                raise BadRequest("request", "cannot be closed in another thread's forward pass")
            self._closed = True
            self._sequence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- one forward pass, driven by the engine and by the cache layers ------------------------------------------------

    def begin(self, arguments: Mapping[str, Any]) -> ForwardPass:
        """A forward pass of the attached model starts with this request's cache; its tokens are known from now on.

        Raises `BadRequest` naming the model's argument that cannot be served (nothing was touched then), and what
        `Sequence.step` raises.
        """
        self._check_open()
        if self._forward is not None:
            raise BadRequest("cache", "is in a forward pass already; a request takes one at a time")
        tokens = self._check_pass(arguments)
        step = self._sequence.step(tokens, timeout_s=self._timeout_s)
        self._forward = ForwardPass(self, self.engine.layout, step, tokens)
        return self._forward

    def commit(self, logits: torch.Tensor | None) -> None:
        """The pass ended: its tokens are part of the sequence. `logits` `[1, n, vocab_size]` are the model's."""
        forward, self._forward = self._forward, None
        assert forward is not None
        start = self.length
        forward.commit()
        if self.length > len(self._tokens):
            self._tokens = np.concatenate([self._tokens[:start], forward.tokens])
        if self._keep_logits and logits is not None:
            self._last_logits = logits[0, -1].to("cpu", torch.float32, copy=True)
        if self._progress is not None:
            self._progress.report(self.length)

    def discard(self, error: BaseException | None) -> None:
        """Drop the pass of this thread, if there is one: the request is as it was before. `error` is what ended it."""
        forward = self._forward
        if forward is not None and forward.thread_id == threading.get_ident():
            self._forward = None
            forward.discard(error)

    def length_of(self, layer: int) -> int:
        """Tokens that one layer holds, those of a pass under way included once the layer has stored them."""
        forward = self._forward
        return self.length + (len(forward.tokens) if forward is not None and forward.has_written(layer) else 0)

    def take_logits(self) -> torch.Tensor | None:
        """The logits of the last pass, `[vocab_size]` float32 on the CPU, while they are kept."""
        return self._last_logits

    def _check_pass(self, arguments: Mapping[str, Any]) -> Tokens:
        """The token ids of a pass, if it is one that can be served."""
        model = self.engine.model
        ids = arguments.get("input_ids")
        if ids is None or arguments.get("inputs_embeds") is not None:
            raise BadRequest("inputs_embeds", "do not say which tokens they are; pass input_ids")
        if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < 1:
            shape = tuple(ids.shape)
            raise BadRequest("input_ids", f"have shape {shape}, not [1, tokens]: a request is one sequence, no batch")
        if arguments.get("use_cache") is False:
            raise BadRequest("use_cache", "is False although a request's cache was passed")
        if arguments.get("output_attentions"):
            raise BadRequest("output_attentions", "is not supported: attention weights are never there as a whole")
        for name, value in arguments.items():
            if name not in _PASS_ARGUMENTS and isinstance(value, torch.Tensor):
                raise BadRequest(name, "is not supported: keys and values may depend on it beside the tokens")
        if model.training:
            raise BadRequest("model", "is in training mode; call model.eval()")
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters()):
            raise BadRequest("model", "cannot have gradients through cached keys; call it under torch.no_grad()")

        tokens = token_ids(ids, self.engine.vocab_size)
        start, end = self.length, self.length + len(tokens)
        mask = arguments.get("attention_mask")
        if mask is not None and (tuple(mask.shape) != (1, end) or not bool((mask == 1).all())):
            raise BadRequest("attention_mask", f"is not ones of shape (1, {end}): padding and masks are not supported")
        known = self._tokens[start:end]
        if not np.array_equal(known, tokens[: len(known)]):
            raise BadRequest("input_ids", f"differ from the request's own at position {start}; {_HINT}")
        positions = arguments.get("position_ids")
        if positions is not None:
            expected = torch.arange(start, end, dtype=positions.dtype, device=positions.device)
            if tuple(positions.shape) != (1, len(tokens)) or not torch.equal(positions[0], expected):
                raise BadRequest("position_ids", f"are not {start} to {end - 1}; {_HINT}")
        return tokens

    def _compute(self, chunk_size: int, *, leave: int) -> torch.Tensor | None:
        """Run pending tokens through the model until at most `leave` are left; the last pass's logits, if any.

        Passes end at page borders where they can: then no pass needs more pages than its tokens fill.
        """
        page_size = self.engine.layout.page_size
        logits: torch.Tensor | None = None
        with torch.no_grad():
            while self.num_pending > leave or self._sequence.is_loading:
                num_tokens = self._sequence.next_step(chunk_size, timeout_s=self._timeout_s)
                if self.num_pending <= leave and not self._sequence.is_loading:
                    break
                start, end = self.length, self.length + num_tokens
                border = end // page_size * page_size
                ids = self._ids(start, border if start < border and end < len(self._tokens) else end)
                output = self.engine.model(input_ids=ids, cache=self._cache, use_cache=True, logits_to_keep=1)
                logits = output.logits[0, -1]
        return logits

    @contextmanager
    def _working(self, progress: Progress | None) -> Iterator[None]:
        """Report progress meanwhile."""
        if not self.num_pending:
            raise BadRequest("tokens", "are all computed; extend the request by the token chosen from the logits first")
        if progress is not None:
            self._progress = _Progressing(progress, self.length, len(self._tokens))
        try:
            yield
        finally:
            self._progress = None

    def _around_damage(self, run: Callable[[], T]) -> T:
        """`run`, and again after each damaged page: what was lost with it is recomputed, not missed by the caller."""
        for _ in range(MAX_REOPENS):
            try:
                return run()
            except (CorruptPage, NotResident, TierUnavailable) as damage:
                # Found by this pass, or by somebody else who shares the page: it is gone from the cache, or on a device
                # that fails, which the cache does not count on for a while.
                _logger.warning("%s; recomputing from there on", damage)
                self._sequence.close()
                self._sequence = self.engine.cache.sequence(
                    self._namespace, self._tokens, timeout_s=self._timeout_s, by_layer=True
                )
                self.num_lost = max(self.num_lost, self.cached - self._sequence.num_cached)
                if self._progress is not None:
                    self._progress.restart(self.length)
        return run()

    def _ids(self, start: int, stop: int) -> torch.Tensor:
        ids = torch.from_numpy(self._tokens[start:stop].astype(np.int64))
        return ids[None].to(self.engine.model.device)

    def _check_chunk(self, chunk_size: int | None) -> int:
        self._check_open()
        if chunk_size is None:
            return self.engine.chunk_size
        if not isinstance(chunk_size, int) or chunk_size < 1:
            raise BadRequest("chunk_size", f"{chunk_size!r} is not an integer of at least 1")
        return chunk_size

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the request was closed")


class RequestCache(Cache):
    """A request as transformers sees it. Holds no tensors: layers write to the request's sequence."""

    def __init__(self, request: Request) -> None:
        self.request: Final = request
        super().__init__(layers=[_RequestLayer(request, layer) for layer in range(request.engine.layout.num_layers)])


class _RequestLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__ carries no types
    """One layer of a request's cache. `update` returns only the new keys and values: attention reads the rest."""

    is_sliding = False

    def __init__(self, request: Request, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' class carries no types
        self.is_initialized = True
        self._request = request
        self._layer = layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: pages exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        forward = current()
        if forward is None or forward.owner is not self._request:
            raise BadRequest("cache", "works only in a call of the model itself, while its engine is attached")
        forward.write(self._layer, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self._request.length_of(self._layer)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        _refuse("crop", "going back, as assisted decoding does")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        _refuse("reorder_cache", "beams")

    def batch_repeat_interleave(self, repeats: int) -> None:
        _refuse("batch_repeat_interleave", "batches")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        _refuse("batch_select_indices", "batches")

    def reset(self) -> None:
        _refuse("reset", "starting over; open another request")

    def offload(self) -> None:
        _refuse("offload", "transformers' own offloading")

    def prefetch(self) -> None:
        _refuse("prefetch", "transformers' own offloading")


def _refuse(method: str, what: str) -> NoReturn:
    raise BadRequest(f"cache.{method}", f"a request's cache does not support {what}")


class _Progressing:
    """Turns lengths of a request into calls of the caller's `Progress` until what was pending is computed."""

    def __init__(self, progress: Progress, start: int, end: int) -> None:
        self._progress = progress
        self._start = start
        self._end = end

    def restart(self, length: int) -> None:
        """The request goes on from fewer tokens than before: there is more to compute."""
        self._start = min(self._start, length)

    def report(self, length: int) -> None:
        """So many tokens are computed now."""
        if length <= self._end:
            self._progress(length - self._start, self._end - self._start)


class _TokenWatch:
    """Notes every new token as `generate` chooses it, when the first one came, and what it was chosen from."""

    def __init__(self, request: Request, streamer: Streamer | None) -> None:
        self.tokens: list[int] = []
        self.logits: list[torch.Tensor] = []
        self.first_s: float | None = None
        self._request = request
        self._streamer = streamer
        self._is_prompt = True

    def begin(self) -> None:
        """A call of `generate` starts: it will begin by giving its input."""
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            if self._streamer is not None and not self.tokens:
                self._streamer.put(value)
            return
        if self.first_s is None:
            self.first_s = time.perf_counter()
        self.tokens.extend(value.flatten().tolist())
        logits = self._request.take_logits()
        if logits is not None:
            self.logits.append(logits)
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        """The end of one call is not the end of the generation; that is told by `Request.generate`."""


def token_ids(tokens: npt.ArrayLike | torch.Tensor, vocab_size: int) -> Tokens:
    """Token ids as int32 `[tokens]`, from `[tokens]` or `[1, tokens]`. Raises `BadRequest` for anything else."""
    try:
        ids = np.asarray(tokens.detach().cpu() if isinstance(tokens, torch.Tensor) else tokens)
    except (TypeError, ValueError) as error:
        raise BadRequest("input_ids", f"are not an array of token ids: {error}") from error
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise BadRequest("input_ids", f"{ids.dtype} of shape {ids.shape} is not one sequence of integer token ids")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise BadRequest("input_ids", f"hold ids outside 0 to {vocab_size - 1}")
    return ids.astype(np.int32)
