"""A batch: several requests that go through a model together, padded on the left as transformers has it.

Each row is a request of its own, with what is cached of its own prompt. Prompts are computed row by row, as each has
another part of them to compute, and a row finds what the rows before it have; then all rows decode in one pass. Where
the device tier has no room for a pass of all rows, they take turns in several.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch

from hicache.errors import BadRequest, DeadlineExceeded, NoRoom
from hicache.service.engines.transformers.arguments import check_call
from hicache.service.engines.transformers.damage import around_damage
from hicache.service.engines.transformers.forward import ForwardPass, Row, leave, running
from hicache.service.engines.transformers.generating import Generation, TokenWatch, check_options
from hicache.service.engines.transformers.request import Request
from hicache.service.engines.transformers.request_cache import RequestCache
from hicache.service.engines.transformers.token_ids import Tokens, token_ids

if TYPE_CHECKING:
    from hicache.service.engines.transformers.engine import TransformersEngine

ROOM_S: Final = 1.0
"""How long a row waits for room that other rows of its pass may hold, before it goes into a pass of its own."""
_OF_ROWS: Final = ("input_ids", "attention_mask", "position_ids")
"""Arguments of a call that have a row for each sequence."""
_WHOLE: Final = ("output_hidden_states", "labels")
"""Arguments for whose results all rows would have to be in one pass."""


class Batch:
    """Several running requests in one call of the model.

    Made by `TransformersEngine.batch`; a context manager. The requests are the batch's while it lives. One thread at a
    time. After an exception in a pass, `generate` goes on from where each row stands.
    """

    def __init__(self, engine: "TransformersEngine", requests: Sequence[Request], timeout_s: float) -> None:
        self.engine: Final = engine
        self.requests: Final = tuple(requests)
        """Its rows."""
        self._timeout_s: Final = timeout_s
        self._cache: Final = RequestCache(self)
        self._num_columns = 0
        """Tokens whose KV is there in the longest row, and so with its padding in each."""
        self._ended = [False] * len(requests)
        self._most_rows = len(requests)
        self._forward: ForwardPass | None = None
        self._keep_logits = False
        self._last_logits: torch.Tensor | None = None

    @property
    def cached(self) -> tuple[int, ...]:
        """Tokens of each row's prompt that need no compute. Those that rows before it compute count once they have."""
        return tuple(request.cached for request in self.requests)

    @property
    def cache(self) -> RequestCache:
        """What stands for this batch in transformers: `model.generate(ids, attention_mask=mask, cache=batch.cache)`,
        with the ids and the mask that the batch was opened with. Computes all prompts but for their last token first,
        as rows find different parts of theirs."""
        self._align(self.engine.chunk_size)
        return self._cache

    def prefill(self, chunk_size: int | None = None) -> torch.Tensor:
        """Run all pending tokens of each row through the model; the logits of each row's last one `[rows, vocab_size]`.
        Raises as `Request.prefill` does."""
        logits = []
        for request in self.requests:
            request.look_again()
            logits.append(request.prefill(chunk_size))
        return torch.stack(logits)

    def extend(self, tokens: npt.ArrayLike | torch.Tensor) -> None:
        """Append a token id to each row, `[rows]`: those chosen from the logits of `prefill`, say."""
        ids = token_ids(tokens, self.engine.vocab_size)
        if len(ids) != len(self.requests):
            raise BadRequest("tokens", f"are {len(ids)}, not one for each of {len(self.requests)} rows")
        for request, token in zip(self.requests, ids, strict=True):
            request.extend([token])

    def generate(
        self,
        max_new_tokens: int,
        *,
        chunk_size: int | None = None,
        output_logits: bool = False,
        **options: Any,
    ) -> tuple[Generation, ...]:
        """Compute what is pending and generate up to `max_new_tokens` more in each row by `model.generate`, greedily by
        default; for each row what it generated, up to its end-of-sequence token. The last new token stays pending.

        `options` as `Request.generate` takes them. Times are those of the batch. Raises `BadRequest` when nothing is
        pending in a row.
        """
        chunk_size = self.requests[0].check_chunk(chunk_size)
        options = check_options(max_new_tokens, options)
        ends = self._end_tokens(options)
        options.setdefault("pad_token_id", _first(self.engine.model.generation_config.pad_token_id, ends))
        for row, request in enumerate(self.requests):
            if not request.num_pending:
                raise BadRequest("tokens", f"of row {row} are all computed; extend the batch first")
        self._ended = [False] * len(self.requests)
        watch = _BatchWatch(self._ended, ends, lambda: self._last_logits)
        num_before = [len(request.tokens) for request in self.requests]
        began = time.perf_counter()

        self._keep_logits = output_logits
        try:
            self._align(chunk_size)
            ids, mask = self._padded()
            model: Any = self.engine.model
            model.generate(
                ids,
                attention_mask=mask,
                cache=self._cache,
                max_new_tokens=max_new_tokens,
                streamer=watch,
                **options,
            )
        finally:
            self._keep_logits, self._last_logits = False, None
            self._keep(num_before, watch)
            self._ended = [False] * len(self.requests)
        total_s = time.perf_counter() - began
        assert watch.first_s is not None
        return tuple(
            Generation(
                tokens=tuple(tokens),
                logits=torch.stack(logits) if output_logits else None,
                ttft_s=watch.first_s - began,
                total_s=total_s,
            )
            for tokens, logits in zip(watch.tokens, watch.logits, strict=True)
        )

    def close(self) -> None:
        """Close all rows. Idempotent. Raises as `Request.close` does."""
        self.discard(None)
        if self._forward is not None:
            raise BadRequest("batch", "cannot be closed in another thread's forward pass")
        for request in self.requests:
            request.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- one call of the model, driven by the engine and by the cache layers -------------------------------------------

    def run(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], arguments: Mapping[str, Any]
    ) -> Any:
        """See `PassOwner`. What rows have kept before another one's pass failed stays theirs."""
        if self._forward is not None:
            raise BadRequest("cache", "is in a forward pass already; a batch takes one at a time")
        num_rows = len(self.requests)
        ids = self._check(arguments)

        def call(start: int, stop: int) -> Any:
            if stop - start == num_rows:
                return original(*args, **kwargs)
            return original(**_cut(arguments, start, stop))

        results: list[Any] = []
        start = 0
        while start < num_rows:
            going_on = [request for row, request in enumerate(self.requests) if row >= start and not self._ended[row]]
            stop, result = around_damage(going_on, partial(self._run_from, start, ids, call))
            results.append(result)
            start = stop
        self._num_columns += len(ids[0])
        result = results[0]
        if len(results) > 1:
            result.logits = torch.cat([each.logits for each in results])
        if self._keep_logits:
            self._last_logits = result.logits[:, -1].to("cpu", torch.float32, copy=True)
        return result

    def _run_from(self, start: int, ids: Sequence[Tokens], call: Callable[[int, int], Any]) -> tuple[int, Any]:
        """A pass of the rows from `start` on, as many as there is room for: before which row it ended, and what the
        model gave."""
        rows = self._enter(ids, start)
        stop = start + len(rows)
        self._forward = ForwardPass(self, self.engine.layout, self.engine.windows, rows, len(ids[0]))
        try:
            with running(self._forward):
                result = call(start, stop)
            self._commit(start)
        except BaseException as error:
            self.discard(error)
            raise
        return stop, result

    def discard(self, error: BaseException | None) -> None:
        """Drop the pass of this thread, if there is one."""
        forward = self._forward
        if forward is not None and forward.thread_id == threading.get_ident():
            self._forward = None
            forward.discard(error)

    def length_of(self, layer: int) -> int:
        """See `PassOwner`."""
        forward = self._forward
        return self._num_columns + (forward.num_new if forward is not None and forward.has_written(layer) else 0)

    def _check(self, arguments: Mapping[str, Any]) -> list[Tokens]:
        """The new tokens of each row, if it is a call that can be served."""
        ids = check_call(self.engine.model, arguments, len(self.requests))
        for name in _WHOLE:
            if arguments.get(name) is not None and arguments[name] is not False:
                raise BadRequest(name, "is not supported for a batch")
        if arguments.get("return_dict") is False:
            raise BadRequest("return_dict", "is False, which is not supported for a batch")
        rows = [token_ids(row, self.engine.vocab_size) for row in ids]
        for index, (request, tokens) in enumerate(zip(self.requests, rows, strict=True)):
            if not self._ended[index]:
                request.check_row(arguments, index, tokens, padding=self._num_columns - request.length)
        return rows

    def _enter(self, ids: Sequence[Tokens], start: int) -> list[Row | None]:
        """Begin the steps of rows from `start` on, as many as there is room for at once, at least one."""
        rows: list[Row | None] = []
        try:
            for index in range(start, min(len(ids), start + self._most_rows)):
                if self._ended[index]:
                    rows.append(None)
                    continue
                is_first = all(row is None for row in rows)
                try:
                    timeout_s = self._timeout_s if is_first else min(ROOM_S, self._timeout_s)
                    rows.append(self.requests[index].enter(ids[index], timeout_s))
                except (NoRoom, DeadlineExceeded):
                    if is_first:
                        raise
                    self._most_rows = len(rows)
                    break
        except BaseException as error:
            leave([row.step for row in rows if row is not None], error)
            raise
        return rows

    def _commit(self, start: int) -> None:
        forward, self._forward = self._forward, None
        assert forward is not None
        try:
            forward.commit()
        finally:
            for request, row in zip(self.requests[start:], forward.rows, strict=False):
                request.took(row)

    # -- around calls of generate --------------------------------------------------------------------------------------

    def _align(self, chunk_size: int) -> None:
        """Compute each row up to its last token, so that all rows go on with one each."""
        for index, request in enumerate(self.requests):
            if not self._ended[index]:
                request.look_again()
                request.compute(chunk_size, leave=1, keep=1)
        self._num_columns = max(len(request.tokens) for request in self.requests) - 1

    def _padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask `[rows, longest row]` as transformers takes them, padded on the left."""
        rows = [request.tokens for request in self.requests]
        width = self._num_columns + 1
        ids = np.stack([np.pad(row, (width - len(row), 0)) for row in rows]).astype(np.int64)
        mask = np.stack([np.arange(width) >= width - len(row) for row in rows]).astype(np.int64)
        device = self.engine.model.device
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)

    def _keep(self, num_before: Sequence[int], watch: TokenWatch) -> None:
        """The rows' tokens are those of before and those chosen since."""
        for request, start, tokens in zip(self.requests, num_before, watch.tokens, strict=True):
            request.replace_tail(start, tokens)

    def _end_tokens(self, options: Mapping[str, Any]) -> frozenset[int]:
        ends = options.get("eos_token_id", self.engine.model.generation_config.eos_token_id)
        return frozenset(np.atleast_1d([] if ends is None else np.asarray(ends)).tolist())


class _BatchWatch(TokenWatch):
    """Notes also which rows have ended: what a pass computes for them is not stored."""

    def __init__(self, ended: list[bool], ends: frozenset[int], logits: Callable[[], torch.Tensor | None]) -> None:
        super().__init__(ended, logits)
        self._ended: Final = ended
        self._end_tokens: Final = ends

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        for row, tokens in enumerate(self.tokens):
            self._ended[row] = bool(tokens) and tokens[-1] in self._end_tokens


def _cut(arguments: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Arguments of a call for some of its rows."""
    return {
        name: value[start:stop] if name in _OF_ROWS and isinstance(value, torch.Tensor) and len(value) > 1 else value
        for name, value in arguments.items()
    }


def _first(pad_token_id: int | None, ends: frozenset[int]) -> int:
    """What is put behind the end of a row."""
    return pad_token_id if pad_token_id is not None else min(ends, default=0)


def rows_of(
    input_ids: Sequence[npt.ArrayLike] | torch.Tensor, attention_mask: torch.Tensor | None, vocab_size: int
) -> list[Tokens]:
    """Prompts of a batch without their padding: from ids `[rows, tokens]` with a mask of their shape that is 0 for what
    is padded on the left, or from one sequence of ids each. Raises `BadRequest`."""
    if not isinstance(input_ids, torch.Tensor):
        if attention_mask is not None:
            raise BadRequest("attention_mask", "is given together with input_ids [rows, tokens]")
        rows = [token_ids(row, vocab_size) for row in input_ids]
    else:
        if input_ids.dim() != 2:
            raise BadRequest("input_ids", f"have shape {tuple(input_ids.shape)}, not [rows, tokens]")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if mask.shape != input_ids.shape:
            raise BadRequest("attention_mask", f"has shape {tuple(mask.shape)}, the ids {tuple(input_ids.shape)}")
        lengths = (mask != 0).sum(-1).tolist()
        for index, length in enumerate(lengths):
            if length and not bool((mask[index, -length:] == 1).all()):
                raise BadRequest("attention_mask", f"of row {index} is not zeros and then ones: pad on the left")
        rows = [
            token_ids(ids[len(ids) - length :], vocab_size) for ids, length in zip(input_ids, lengths, strict=True)
        ]
    if not rows or not all(map(len, rows)):
        raise BadRequest("input_ids", "have no rows, or one that is empty; each row needs at least one token")
    return rows
