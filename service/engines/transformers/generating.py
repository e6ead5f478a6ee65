"""What a generation gives, and what is noted while it runs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from hicache.errors import BadRequest

Progress = Callable[[int, int], None]
"""Called after every chunk of a prefill with the tokens computed so far, and the tokens to compute in all."""

_OWN_OPTIONS: Final = (
    "inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache", "past_key_values", "use_cache",
    "cache_implementation", "max_length", "prefill_chunk_size", "return_dict_in_generate",
)  # fmt: skip
"""Options of `model.generate` that a request decides itself."""
_OTHER_MODES: Final = (
    "num_beams", "num_return_sequences", "assistant_model", "prompt_lookup_num_tokens", "guidance_scale",
)  # fmt: skip
"""Options that need several sequences, or one that goes back; 1 and None ask for neither."""


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
    """What one call of `Request.generate` produced, or of `Batch.generate` for one row."""

    tokens: tuple[int, ...]
    """New token ids, without the prompt; the end-of-sequence token too, if that ended it."""
    logits: torch.Tensor | None
    """The logits that each of them was chosen from, `[len(tokens), vocab_size]` float32 on the CPU, if asked for."""
    ttft_s: float
    """Seconds this request worked until the first new token was known: opening it (the first time), `prefill` calls
    since the generation before, and this call up to that moment."""
    total_s: float
    """Seconds the call took."""


def check_options(max_new_tokens: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call of `generate`, greedy whatever the model's own generation settings say. Raises
    `BadRequest` for those that a request decides itself, or that need more than one sequence."""
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise BadRequest("max_new_tokens", f"{max_new_tokens!r} is not an integer of at least 1")
    for name in _OWN_OPTIONS:
        if name in options:
            raise BadRequest(name, "is decided by the request; leave it out")
    for name in _OTHER_MODES:
        if options.get(name) not in (None, 1):
            raise BadRequest(name, "needs several sequences, or one that goes back; a request is neither")
    return {"do_sample": False, **options}


class Progressing:
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


class TokenWatch:
    """Notes every new token as `generate` chooses it, when the first one came, and what it was chosen from."""

    def __init__(
        self, ends: Sequence[bool], logits: Callable[[], torch.Tensor | None], streamer: Streamer | None = None
    ) -> None:
        """`ends`: for each row whether it has ended. `logits`: `[rows, vocab_size]` float32 on the CPU of the last
        pass, or None where they are not kept."""
        self.tokens: Final[list[list[int]]] = [[] for _ in ends]
        """Of each row."""
        self.logits: Final[list[list[torch.Tensor]]] = [[] for _ in ends]
        self.first_s: float | None = None
        self._ends: Final = ends
        self._last_logits: Final = logits
        self._streamer: Final = streamer
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            if self._streamer is not None:
                self._streamer.put(value)
            return
        if self.first_s is None:
            self.first_s = time.perf_counter()
        logits = self._last_logits()
        for row, token in enumerate(value.flatten().tolist()):
            if not self._ends[row]:
                self.tokens[row].append(token)
                if logits is not None:
                    self.logits[row].append(logits[row])
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        """The streamer is told by who began the generation, when the request is up to date."""
