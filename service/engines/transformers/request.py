"""A request: one sequence of tokens on its way through a model, and the transformers cache that stands for it."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import BadRequest, Closed
from hicache.namespace import Namespace
from hicache.service.engines.transformers.arguments import check_call, check_row
from hicache.service.engines.transformers.damage import around_damage
from hicache.service.engines.transformers.forward import ForwardPass, Row, running
from hicache.service.engines.transformers.generating import (
    Generation,
    Progress,
    Progressing,
    Streamer,
    TokenWatch,
    check_options,
)
from hicache.service.engines.transformers.request_cache import RequestCache
from hicache.service.engines.transformers.token_ids import Tokens, token_ids
from hicache.tier import TierId

if TYPE_CHECKING:
    from hicache.service.engines.transformers.engine import TransformersEngine


class Request:
    """One running request: a lease on what is cached of its tokens, and everything it computed since.

    Made by `TransformersEngine.request`; a context manager. Its tokens are the prompt and what followed; the first
    `length` of them have KV. One thread at a time. After an exception in a forward pass the request is as it was
    before that pass and can be used again. A pass that finds part of them lost, or on a device that does not give it,
    raises nothing: they are computed again first, as their ids are known.
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
        self._is_restoring = False
        self._progress: Progressing | None = None
        self._last_logits: torch.Tensor | None = None
        self._keep_logits = False
        self._back_to: int | None = None
        """Its length before damage, until the sequence has been opened anew; None else."""
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
    def cache(self) -> RequestCache:
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
        """Tokens whose KV is there; after damage, those whose KV was: the next call computes again what is lost."""
        return self._sequence.length if self._back_to is None else self._back_to

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
        chunk_size = self.check_chunk(chunk_size)
        began = time.perf_counter()

        with self._working(progress):
            logits = self.compute(chunk_size, leave=0)
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
        chunk_size = self.check_chunk(chunk_size)
        options = check_options(max_new_tokens, options)
        watch = TokenWatch([False], lambda: self._last_logits, streamer)
        num_before = len(self._tokens)
        began = time.perf_counter()

        self._keep_logits = output_logits
        try:
            with self._working(progress):
                self.compute(chunk_size, leave=chunk_size)
                ids = self._ids(0, len(self._tokens))
                model: Any = self.engine.model
                model.generate(
                    ids,
                    # As long as the ids: only then does transformers drop the cached prefix from them.
                    attention_mask=torch.ones_like(ids),
                    cache=self._cache,
                    max_new_tokens=max_new_tokens,
                    streamer=watch,
                    **options,
                )
        finally:
            self._keep_logits, self._last_logits = False, None
            self.replace_tail(num_before, watch.tokens[0])
        ended = time.perf_counter()
        if streamer is not None:
            streamer.end()
        assert watch.first_s is not None
        spent_s, self._spent_s = self._spent_s, 0.0
        return Generation(
            tokens=tuple(watch.tokens[0]),
            logits=torch.stack(watch.logits[0]) if output_logits else None,
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
            self._back_to = None
            self._sequence.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- one forward pass, driven by the engine and by the cache layers ------------------------------------------------

    def run(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Mapping[str, Any]
    ) -> Any:
        """See `PassOwner`. Raises `BadRequest` naming the model's argument that cannot be served (nothing was touched
        then), and what `Sequence.step` raises."""

        def once() -> Any:
            return self._run(original, args, kwargs, arguments)

        return once() if self._is_restoring else around_damage([self], once)

    def _run(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Mapping[str, Any]
    ) -> Any:
        try:
            with running(self._begin(arguments)):
                result = original(*args, **kwargs)
            self._commit(getattr(result, "logits", None))
        except BaseException as error:
            self.discard(error)
            raise
        return result

    def _begin(self, arguments: Mapping[str, Any]) -> ForwardPass:
        self._check_open()
        if self._forward is not None:
            raise BadRequest("cache", "is in a forward pass already; a request takes one at a time")
        tokens = token_ids(check_call(self.engine.model, arguments, 1), self.engine.vocab_size)
        self.check_row(arguments, 0, tokens, padding=0)
        rows = [self.enter(tokens, self._timeout_s)]
        self._forward = ForwardPass(self, self.engine.layout, self.engine.windows, rows, len(tokens))
        return self._forward

    def _commit(self, logits: torch.Tensor | None) -> None:
        """The pass ended: its tokens are part of the sequence. `logits` `[1, n, vocab_size]` are the model's."""
        forward, self._forward = self._forward, None
        assert forward is not None
        forward.commit()
        for row in forward.rows:
            self.took(row)
        if self._keep_logits and logits is not None:
            self._last_logits = logits[:, -1].to("cpu", torch.float32, copy=True)
        if self._progress is not None:
            self._progress.report(self.length)

    def discard(self, error: BaseException | None) -> None:
        """Drop the pass of this thread, if there is one: the request is as it was before. `error` is what ended it."""
        forward = self._forward
        if forward is not None and forward.thread_id == threading.get_ident():
            self._forward = None
            forward.discard(error)

    def length_of(self, layer: int) -> int:
        """See `PassOwner`."""
        forward = self._forward
        return self.length + (forward.num_new if forward is not None and forward.has_written(layer) else 0)

    # -- what a batch asks of its rows as well -------------------------------------------------------------------------

    def check_row(self, arguments: Mapping[str, Any], index: int, tokens: Tokens, *, padding: int) -> None:
        """Check that a call goes on with `tokens` where this request stands. Raises `BadRequest`."""
        known = self._tokens[self.length : self.length + len(tokens)]
        check_row(arguments, index, tokens, known, start=self.length, padding=padding)

    def enter(self, tokens: Tokens, timeout_s: float) -> Row:
        """Begin a step. Raises what `Sequence.step` raises."""
        start = self.length
        return Row(self._sequence.step(tokens, timeout_s=timeout_s).__enter__(), tokens, start)

    def took(self, row: Row | None) -> None:
        """A step was left. What it computed that was not known before are the request's tokens now."""
        if row is not None and self.length > len(self._tokens):
            self._tokens = np.concatenate([self._tokens[: row.start], row.tokens])

    def replace_tail(self, start: int, tokens: Sequence[int]) -> None:
        """The tokens from `start` on are these."""
        self._tokens = np.concatenate([self._tokens[:start], np.array(tokens, np.int32)])

    def look_again(self) -> None:
        """Find what others have computed of the prompt since the request was opened, unless it has begun already."""
        self.open_again()
        if self.length == self.cached and self.num_pending > self.engine.layout.page_size and not self.is_loading:
            found = self.engine.cache.match(self._namespace, self._tokens[:-1]).num_tokens
            if found > self.length:
                self._reopen(self._tokens)
                self._opened_with = self._sequence

    def go_back(self, length: int, salt: bytes | None) -> None:
        """From `open_again` on, go on from what the cache still has of the first `length` tokens, apart from others if
        a salt is given."""
        if salt is not None:
            self._namespace = dataclasses.replace(self._namespace, salt=salt)
        self._back_to = length

    def open_again(self) -> None:
        """Open the sequence anew, if the request went back. Raises what `HiCache.sequence` raises; whoever calls next
        tries it again."""
        if self._back_to is None:
            return
        # One more, if it is known: of a prompt the last token is never found.
        self._reopen(self._tokens[: self._back_to + 1])
        self.num_lost = max(self.num_lost, self.cached - self._sequence.num_cached)
        if self._progress is not None:
            self._progress.restart(self.length)

    def restore(self, length: int) -> None:
        """Compute the first `length` tokens as far as they are not there. Raises what a pass raises."""
        if self.length >= length:
            return
        self._is_restoring = True
        try:
            self.compute(self.engine.chunk_size, leave=0, keep=len(self._tokens) - length)
        finally:
            self._is_restoring = False

    def _reopen(self, tokens: Tokens) -> None:
        """Go on from what the cache has now of these tokens. If it raises, the request has still gone back."""
        self._back_to = self.length
        self._sequence.close()
        self._sequence = self.engine.cache.sequence(self._namespace, tokens, timeout_s=self._timeout_s, by_layer=True)
        self._back_to = None

    @property
    def is_loading(self) -> bool:
        """Whether more of the prompt is on its way than `length` says."""
        return self._sequence.is_loading

    def compute(self, chunk_size: int, *, leave: int, keep: int = 0) -> torch.Tensor | None:
        """Run pending tokens through the model until at most `leave` are left, but never the last `keep`; the last
        pass's logits, if any.

        Passes end at page borders where they can: then no pass needs more pages than its tokens fill.
        """
        self.open_again()
        page_size = self.engine.layout.page_size
        logits: torch.Tensor | None = None
        with torch.no_grad():
            while self.num_pending > leave or self._sequence.is_loading:
                num_tokens = self._sequence.next_step(chunk_size, timeout_s=self._timeout_s)
                if self.num_pending <= leave and not self._sequence.is_loading:
                    break
                start, stop = self.length, len(self._tokens) - keep
                end = min(start + num_tokens, stop)
                if start >= end:
                    break
                border = end // page_size * page_size
                ids = self._ids(start, border if start < border and end < stop else end)
                output = self.engine.model(input_ids=ids, cache=self._cache, use_cache=True, logits_to_keep=1)
                logits = output.logits[0, -1]
        return logits

    @contextmanager
    def _working(self, progress: Progress | None) -> Iterator[None]:
        """Report progress meanwhile."""
        if not self.num_pending:
            raise BadRequest("tokens", "are all computed; extend the request by the token chosen from the logits first")
        if progress is not None:
            self._progress = Progressing(progress, self.length, len(self._tokens))
        try:
            yield
        finally:
            self._progress = None

    def _ids(self, start: int, stop: int) -> torch.Tensor:
        ids = torch.from_numpy(self._tokens[start:stop].astype(np.int64))
        return ids[None].to(self.engine.model.device)

    def check_chunk(self, chunk_size: int | None) -> int:
        """The tokens of one pass. Raises `BadRequest`, `Closed`."""
        self._check_open()
        if chunk_size is None:
            return self.engine.chunk_size
        if not isinstance(chunk_size, int) or chunk_size < 1:
            raise BadRequest("chunk_size", f"{chunk_size!r} is not an integer of at least 1")
        return chunk_size

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the request was closed")
