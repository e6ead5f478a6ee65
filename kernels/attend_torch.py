"""Attention over parts on the CPU, by torch: pages are gathered, a cache-sized piece at a time, and attended to.

What torch's fused operator wants is known in one place, `_flash`: it dies of an empty key, reports LSE 0 for a row that
sees nothing, and aligns its causal mask to the first key; it is never given an empty key or a mask.
"""

import threading
from collections.abc import Iterable
from typing import Final

import torch

from hicache.kernels.attend_scored import scored
from hicache.kernels.checks import PageShape
from hicache.kernels.parts import Asked, PagedPart, no_keys, selectable, state_dtype
from hicache.kernels.scoring import visible_reference
from hicache.kernels.state import AttentionState

SCRATCH_BYTES: Final = 8 << 20
"""Keys and values that are gathered before they are attended to, at most: enough that merging and the calls of torch
cost little, and still in the cores' shared cache when attention reads them."""
_FOLD_TOKENS_MAX: Final = 64
"""Up to so many new tokens, the query heads of a group become rows of one head: fewer, larger products on the CPU.
Beyond, there are rows enough, and rearranging them costs more than it gains."""
_NARROW_BYTES: Final = 1 << 19
"""Half precision that is gathered before it is widened into those keys and values: what a core's own cache holds."""

class _Scratch(threading.local):
    """Buffers of one thread; kept, because a step of a model attends in every layer and new memory is slow to touch."""

    def __init__(self) -> None:
        self._buffer = _new_buffer(0)
        self._narrow = _new_buffer(0)

    def take(self, num_bytes: int, like: torch.Tensor, page_size: int) -> torch.Tensor:
        """[2, capacity, H, D] of undefined content, with H, D and dtype of `like` [*, H, D]: keys in plane 0, values
        in plane 1; capacity in tokens, at least one page, otherwise as many as `num_bytes` hold. Overwritten by the
        next call of this thread."""
        _, num_kv_heads, head_dim = like.shape
        dtype = like.dtype
        token_bytes = 2 * num_kv_heads * head_dim * dtype.itemsize
        capacity = max(page_size, num_bytes // token_bytes)
        if self._buffer.numel() < capacity * token_bytes:
            self._buffer = _new_buffer(capacity * token_bytes)
        flat = self._buffer[: capacity * token_bytes].view(dtype)
        return flat.view(2, capacity, num_kv_heads, head_dim)

    def take_narrow(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, ...] of undefined content, of the dtype and row shape of `rows` [*, ...]: what is gathered before it is
        widened. n is at least 1, otherwise as many rows as `_NARROW_BYTES` hold."""
        row_shape = rows.shape[1:]
        row_bytes = row_shape.numel() * rows.element_size()
        count = max(1, _NARROW_BYTES // row_bytes)
        if self._narrow.numel() < count * row_bytes:
            self._narrow = _new_buffer(count * row_bytes)
        return self._narrow[: count * row_bytes].view(rows.dtype).view(count, *row_shape)


    @property
    def num_bytes(self) -> int:
        return self._buffer.numel() + self._narrow.numel()


def _new_buffer(num_bytes: int) -> torch.Tensor:
    # Made in inference mode, it could not be written to outside of it.
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8)


_scratch = _Scratch()


def scratch_bytes() -> int:
    """What this thread's buffers take, which stay from call to call."""
    return _scratch.num_bytes


class Running:
    """The attention state over the keys seen so far: output [H, G, T, D] and LSE [H, G, T], of any stride."""

    def __init__(self) -> None:
        self.state: AttentionState | None = None
        """Output and LSE so far; None as long as there was no key."""

    def add(self, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge in the state over further keys. Takes the tensors over."""
        if self.state is None:
            self.state = AttentionState(output, lse)
            return
        # exp(s2 - log(exp(s1) + exp(s2))) is a sigmoid, and the two weights add up to one.
        weight = torch.sigmoid(lse - self.state.lse).masked_fill_(lse == -torch.inf, 0.0)
        self.state.output.lerp_(output, weight.unsqueeze(-1))
        torch.logaddexp(self.state.lse, lse, out=self.state.lse)


class _Piece:
    """Tokens that are gathered before they are attended to: widened, one after the other, whatever their pages were."""

    def __init__(self, like: torch.Tensor, asked: Asked) -> None:
        """like [*, H, D], of the dtype that is computed in."""
        self._like: Final = like
        self._has_window: Final = asked.scoring.window is not None
        self._buffer = torch.empty(0)
        self._positions = torch.empty(0, dtype=torch.int64)
        self.filled = 0
        """Tokens in it."""

    @property
    def key(self) -> torch.Tensor:
        """[filled, H, D]; likewise `value`."""
        return self._buffer[0, : self.filled]

    @property
    def value(self) -> torch.Tensor:
        return self._buffer[1, : self.filled]

    @property
    def positions(self) -> torch.Tensor:
        """int64 [filled], where each token is in the sequence, if there is a window."""
        return self._positions[: self.filled]

    def room(self, page_size: int) -> int:
        """Pages of that size that still fit; 0 before the first `clear`."""
        return (self._buffer.shape[1] - self.filled) // page_size if self._buffer.dim() > 1 else 0

    def clear(self, page_size: int) -> None:
        """Empty, and with room for a page of that size at least."""
        if self._buffer.dim() == 1 or self._buffer.shape[1] < page_size:
            self._buffer = _scratch.take(SCRATCH_BYTES, self._like, page_size)
            self._positions = torch.empty(self._buffer.shape[1] if self._has_window else 0, dtype=torch.int64)
        self.filled = 0

    def add_pages(self, part: PagedPart, page_size: int, ids: torch.Tensor, num_tokens: int, position: int) -> None:
        """Append the pages `ids`, of which the last may be filled in part; `position`: of their first token."""
        # Whole pages are gathered; behind the tokens of a last one lies its unused rest, which what follows overwrites.
        for plane in (0, 1):
            target = self._buffer[plane, self.filled : self.filled + ids.shape[0] * page_size]
            by_page = target.view(ids.shape[0], page_size, *target.shape[1:])
            _gather(part.pages[:, plane], ids, by_page)
            if part.page_scales is not None:
                here = ids.long().to(part.page_scales.device)
                by_page *= part.page_scales[here, plane].to(target.device)[:, None, :, None]
        self._place(num_tokens, position)

    def add_token(self, key: torch.Tensor, value: torch.Tensor, position: int) -> None:
        """Append one token, key and value [1, H, D]."""
        self._buffer[0, self.filled], self._buffer[1, self.filled] = key[0], value[0]
        self._place(1, position)

    def _place(self, num_tokens: int, position: int) -> None:
        if self._has_window:
            torch.arange(position, position + num_tokens, out=self._positions[self.filled : self.filled + num_tokens])
        self.filled += num_tokens


def attend_torch(
    query: torch.Tensor,
    parts: Iterable[tuple[PagedPart, PageShape]],
    key: torch.Tensor,
    value: torch.Tensor,
    asked: Asked,
) -> AttentionState:
    """See `hicache.kernels.attend.attend`, whose checks have been made; the query, `key` and `value` are on the CPU.

    Returns output [T, HQ, D] and LSE [T, HQ], float32, or float64 for a query of that. Sinks are the caller's to add.
    """
    # Half precision is widened first: states would otherwise be rounded once a part, and torch's fused attention is no
    # faster with bfloat16 than with float32, and slower with float16.
    query, key, value = (tensor.to(state_dtype(query)) for tensor in (query, key, value))
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    few = num_tokens <= _FOLD_TOKENS_MAX
    by_head = query.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    rows = by_head.reshape(num_kv_heads, -1, head_dim) if few else query.transpose(0, 1)
    query_positions = torch.arange(asked.first_position, asked.first_position + num_tokens)
    running = Running()
    piece = _Piece(key, asked)

    def attend_to(rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool = False) -> None:
        output, lse = _flash(rows, key, value, asked.scale, is_causal=is_causal)
        running.add(output.view(*by_head.shape), lse.view(*by_head.shape[:3]))

    def attend_by_scores(key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor | None) -> None:
        visible = None if positions is None else visible_reference(query_positions, positions, asked.scoring)
        running.add(*scored(by_head, key, value, scale=asked.scale, scoring=asked.scoring, visible=visible))

    def flush(page_size: int) -> None:
        """Attend to the tokens of the piece, all of which every query sees but for a window."""
        if piece.filled and asked.is_plain:
            attend_to(rows, piece.key, piece.value)
        elif piece.filled:
            attend_by_scores(piece.key, piece.value, None if asked.scoring.window is None else piece.positions)
        piece.clear(page_size)

    for part, shape in parts:
        table, left, position = part.block_table, part.num_tokens, part.first_position or 0
        while left:
            room = piece.room(shape.page_size)
            if not room:
                flush(shape.page_size)
                continue
            ids, table = table[:room], table[room:]
            count = min(left, ids.shape[0] * shape.page_size)
            piece.add_pages(part, shape.page_size, ids, count, position)
            left -= count
            position += count
    if num_tokens == len(key) == 1:
        # A single new token is one more key that every query sees: cheaper than a state of its own.
        if not piece.room(1):
            flush(1)
        piece.add_token(key, value, asked.first_position)
    flush(1)
    if len(key) > 1:
        if asked.is_plain:
            attend_to(query.transpose(0, 1), key, value, is_causal=True)
        else:
            attend_by_scores(key, value, query_positions)
    if running.state is None:
        return no_keys(query, query.dtype)
    output = running.state.output.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)
    return AttentionState(output, running.state.lse.permute(2, 0, 1).reshape(num_tokens, num_heads))


def _gather(pages: torch.Tensor, ids: torch.Tensor, target: torch.Tensor) -> None:
    """`target[i] = pages[ids[i]]`; pages [num_slots, ...], ids on any device, target contiguous on the CPU, of the same
    dtype or a wider one."""
    ids = ids.to(pages.device)
    stored = selectable(pages)
    if pages.device != target.device:
        target.copy_(stored.index_select(0, ids).view(pages.dtype))
    elif pages.dtype == target.dtype:
        torch.index_select(pages, 0, ids, out=target)
    else:
        narrow = _scratch.take_narrow(stored)
        for start in range(0, ids.shape[0], narrow.shape[0]):
            some = ids[start : start + narrow.shape[0]]
            into = target[start : start + narrow.shape[0]]
            into.copy_(torch.index_select(stored, 0, some, out=narrow[: some.shape[0]]).view(pages.dtype))


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's fused attention: query [HQ, T, D], key, value [L, H, D], L at least 1; output [HQ, T, D], LSE [HQ, T].

    The operator dies of an empty key, hence the bound. It takes a head shared by several query heads as it is, and rows
    and heads of any stride. Its causal mask is aligned to the first key, right where queries and keys are the same
    tokens.
    """
    assert key.shape[0] >= 1
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], 0.0, is_causal, scale=scale
    )
    return output[0], lse[0]
