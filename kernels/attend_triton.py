"""Attention over parts on a GPU, by the kernels: pages are read where they are, or streamed to the device first."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import torch

from hicache.kernels.attend_cpu import attend_cpu
from hicache.kernels.checks import PageShape
from hicache.kernels.decode import paged_decode
from hicache.kernels.extend import paged_extend
from hicache.kernels.merge import merge_states
from hicache.kernels.parts import Asked, PagedPart, no_keys
from hicache.kernels.remote import RemoteSpeeds, num_streamed
from hicache.kernels.scoring import Scoring
from hicache.kernels.state import AttentionState
from hicache.kernels.streaming import Streamer, pieces

_STATES_MAX: Final = 8
"""States that are collected on the GPU before they are merged."""


class Stack:
    """States over disjoint keys of the same queries, merged whenever there are `_STATES_MAX` of them."""

    def __init__(self, query: torch.Tensor) -> None:
        """query [T, HQ, D], D that of the values."""
        self._outputs = query.new_empty((_STATES_MAX, *query.shape), dtype=torch.float32)
        self._lses = query.new_empty((_STATES_MAX, *query.shape[:2]), dtype=torch.float32)
        self._used = 0
        self._query = query

    def push(self) -> AttentionState:
        """Room for one more state, to be filled before the next call."""
        if self._used == _STATES_MAX:
            merged = merge_states(self._outputs, self._lses)
            self._outputs[0], self._lses[0] = merged.output, merged.lse
            self._used = 1
        self._used += 1
        return AttentionState(self._outputs[self._used - 1], self._lses[self._used - 1])

    def push_sinks(self, scoring: Scoring) -> None:
        """Add the keys that sinks stand for, if there are any."""
        if scoring.sinks is not None:
            output, lse = self.push()
            output.zero_()
            lse.copy_(scoring.sinks)

    def result(self, dtype: torch.dtype) -> AttentionState:
        """The state over all keys, its output in `dtype`."""
        if not self._used:
            return no_keys(self._query, dtype)
        return merge_states(self._outputs[: self._used], self._lses[: self._used], dtype=dtype)


def attend_triton(
    query: torch.Tensor,
    parts: Iterable[tuple[PagedPart, PageShape]],
    key: torch.Tensor,
    value: torch.Tensor,
    asked: Asked,
    remote: RemoteSpeeds | None,
) -> AttentionState:
    """See `hicache.kernels.attend.attend`, whose checks have been made."""
    num_tokens = query.shape[0]
    scale, window = asked.scale, asked.scoring.window
    indptr = torch.arange(2, dtype=torch.int32, device=query.device) * num_tokens
    stack = Stack(query)
    streamer = Streamer.of_thread(query) if query.device.type == "cuda" else None

    def one(number: int) -> torch.Tensor:
        return torch.full((1,), number, dtype=torch.int32, device=query.device)

    def attend_to(part: PagedPart) -> None:
        """Attend to a part on the device, with its table there."""
        # Kernels count from the table's first token, and sinks are a state of their own.
        begin = part.first_position or 0
        keep_first = max(0, asked.scoring.keep_first - begin)
        scoring = replace(asked.scoring, keep_first=keep_first, sinks=None)
        position = None if window is None else one(asked.first_position - begin)
        output, lse = stack.push()
        if num_tokens == 1:
            paged_decode(
                query, part.pages, part.block_table[None], one(part.num_tokens), scale=scale, scoring=scoring,
                page_scales=part.page_scales, query_positions=position, output=output, lse=lse,
            )  # fmt: skip
        else:
            paged_extend(
                query, indptr, scale=scale, pages=part.pages, block_tables=part.block_table[None],
                prefix_lens=one(part.num_tokens), page_scales=part.page_scales, scoring=scoring,
                first_positions=position, output=output, lse=lse,
            )  # fmt: skip

    for part, shape in parts:
        if part.pages.device == query.device:
            attend_to(replace(part, block_table=part.block_table.to(query.device)))
            continue
        assert streamer is not None, "parts elsewhere than on the CPU that interprets"
        left_to_cpu = None
        if num_tokens == 1 and remote is not None:
            part, left_to_cpu = share_out(part, remote)
        for piece in pieces(part, streamer.capacity(part.pages)):
            attend_to(streamer.fetch(piece))
            streamer.release()
        if left_to_cpu is not None:
            # In float32, so that the state is not rounded before it is merged.
            none = torch.empty(0, shape.num_kv_heads, shape.head_dim)
            state = attend_cpu(streamer.query_on_cpu().float(), [(left_to_cpu, shape)], none, none, asked)
            output, lse = stack.push()
            output.copy_(state.output)
            lse.copy_(state.lse)
        # The next part may overwrite what this one was copied from.
        streamer.wait()
    if len(key):
        output, lse = stack.push()
        paged_extend(
            query, indptr, scale=scale, key=key, value=value, scoring=replace(asked.scoring, sinks=None),
            first_positions=None if window is None else one(asked.first_position), output=output, lse=lse,
        )  # fmt: skip
    stack.push_sinks(asked.scoring)
    return stack.result(query.dtype)


def share_out(part: PagedPart, remote: RemoteSpeeds) -> tuple[PagedPart, PagedPart | None]:
    """What of the part is streamed, and what the CPU attends to: the last pages, or none."""
    page_bytes = part.pages.element_size() * part.pages[:1].numel()
    cut = num_streamed(part.block_table.shape[0], page_bytes, remote)
    if cut == part.block_table.shape[0]:
        return part, None
    return part.cut(0, cut), part.cut(cut, part.block_table.shape[0])
