"""Attention over parts on a GPU, by the kernels: pages are read where they are, or streamed to the device first."""

from collections.abc import Iterable
from typing import Final

import torch

from hicache.kernels.attend_torch import attend_torch
from hicache.kernels.checks import PageShape
from hicache.kernels.decode import paged_decode
from hicache.kernels.extend import paged_extend
from hicache.kernels.merge import merge_states
from hicache.kernels.parts import PagedPart, no_keys
from hicache.kernels.remote import RemoteSpeeds, num_streamed
from hicache.kernels.state import AttentionState
from hicache.kernels.streaming import Streamer, pieces

_STATES_MAX: Final = 8
"""States that are collected on the GPU before they are merged."""


class _Stack:
    """States over disjoint keys of the same queries, merged whenever there are `_STATES_MAX` of them."""

    def __init__(self, query: torch.Tensor) -> None:
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
    scale: float,
    remote: RemoteSpeeds | None,
) -> AttentionState:
    """See `hicache.kernels.attend.attend`, whose checks have been made."""
    num_tokens = query.shape[0]
    indptr = torch.arange(2, dtype=torch.int32, device=query.device) * num_tokens
    stack = _Stack(query)
    streamer = Streamer.of_thread(query) if query.device.type == "cuda" else None

    def attend_to(pages: torch.Tensor, table: torch.Tensor, num_keys: int) -> None:
        lengths = torch.full((1,), num_keys, dtype=torch.int32, device=query.device)
        output, lse = stack.push()
        if num_tokens == 1:
            paged_decode(query, pages, table[None], lengths, scale=scale, output=output, lse=lse)
        else:
            paged_extend(
                query, indptr, scale=scale, pages=pages, block_tables=table[None], prefix_lens=lengths,
                output=output, lse=lse,
            )  # fmt: skip

    for part, shape in parts:
        if part.pages.device == query.device:
            attend_to(part.pages, part.block_table.to(query.device), part.num_tokens)
            continue
        assert streamer is not None, "parts elsewhere than on the CPU that interprets"
        left_to_cpu = None
        if num_tokens == 1 and remote is not None:
            part, left_to_cpu = _share_out(part, shape, remote)
        for ids, num_keys in pieces(part, streamer.capacity(part.pages)):
            attend_to(*streamer.fetch(part.pages, ids), num_keys)
            streamer.release()
        if left_to_cpu is not None:
            # In float32, so that the state is not rounded before it is merged.
            none = torch.empty(0, shape.num_kv_heads, shape.head_dim)
            state = attend_torch(streamer.query_on_cpu().float(), [(left_to_cpu, shape)], none, none, scale)
            output, lse = stack.push()
            output.copy_(state.output)
            lse.copy_(state.lse)
        # The next part may overwrite what this one was copied from.
        streamer.wait()
    if len(key):
        output, lse = stack.push()
        paged_extend(query, indptr, scale=scale, key=key, value=value, output=output, lse=lse)
    return stack.result(query.dtype)


def _share_out(part: PagedPart, shape: PageShape, remote: RemoteSpeeds) -> tuple[PagedPart, PagedPart | None]:
    """What of the part is streamed, and what the CPU attends to: the last pages, or none."""
    page_bytes = part.pages.element_size() * part.pages[:1].numel()
    cut = num_streamed(part.block_table.shape[0], page_bytes, remote)
    tokens = min(part.num_tokens, cut * shape.page_size)
    if tokens == part.num_tokens:
        return part, None
    return (
        PagedPart(part.pages, part.block_table[:cut], tokens),
        PagedPart(part.pages, part.block_table[cut:], part.num_tokens - tokens),
    )
